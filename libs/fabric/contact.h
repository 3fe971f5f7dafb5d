#ifndef MOERL_LIBS_FABRIC_CONTACT_H_
#define MOERL_LIBS_FABRIC_CONTACT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "libs/fabric/detector.h"
#include "libs/fabric/membership.h"
#include "libs/fabric/shared_page.h"
#include "libs/fabric/transport.h"

namespace moerl::fabric {

// How a process is reached for as long as it lives, whatever the epoch. Travels as Lifetime::contact.
struct Contact {
  std::string node;                                                  // equal on ranks that share memory
  std::string name;                                                  // for people; may be empty
  std::string heartbeat_address, control_address, exchange_address;  // "ip:port"
  SharedPageName page;                                               // its heartbeats count here
};

std::string EncodeContact(const Contact& contact);
absl::StatusOr<Contact> DecodeContact(const std::string& text);

// The contacts of an epoch's members by rank. DATA_LOSS: of another build.
absl::StatusOr<std::vector<Contact>> ContactsOf(const std::vector<Lifetime>& members);
Membership MembershipOf(uint64_t epoch, const std::vector<Contact>& contacts, int self);
std::vector<WatchedPeer> WatchedPeersOf(const std::vector<Contact>& contacts, int self);

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_CONTACT_H_
