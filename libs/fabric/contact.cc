#include "libs/fabric/contact.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libs/base/status_macros.h"

namespace moerl::fabric {

// Fields are separated by '\n', which none of them contains.
std::string EncodeContact(const Contact& contact) {
  return absl::StrCat(contact.node, "\n", contact.name, "\n", contact.heartbeat_address, "\n", contact.control_address,
                      "\n", contact.exchange_address, "\n", contact.page.pid, "\n", contact.page.page_fd, "\n",
                      contact.page.bell_fd);
}

absl::StatusOr<Contact> DecodeContact(const std::string& text) {
  const std::vector<std::string> fields = absl::StrSplit(text, '\n');
  Contact contact;
  if (fields.size() != 8 || !absl::SimpleAtoi(fields[5], &contact.page.pid) ||
      !absl::SimpleAtoi(fields[6], &contact.page.page_fd) || !absl::SimpleAtoi(fields[7], &contact.page.bell_fd)) {
    return absl::DataLossError("fabric: a rank introduced itself in another format; give all ranks the same build");
  }
  contact.node = fields[0];
  contact.name = fields[1];
  contact.heartbeat_address = fields[2];
  contact.control_address = fields[3];
  contact.exchange_address = fields[4];
  return contact;
}

absl::StatusOr<std::vector<Contact>> ContactsOf(const std::vector<Lifetime>& members) {
  std::vector<Contact> contacts;
  for (const Lifetime& member : members) {
    MOERL_ASSIGN_OR_RETURN(contacts.emplace_back(), DecodeContact(member.contact));
  }
  return contacts;
}

Membership MembershipOf(uint64_t epoch, const std::vector<Contact>& contacts, int self) {
  Membership membership;
  membership.epoch = epoch;
  membership.self = self;
  std::vector<std::string> nodes;
  for (size_t rank = 0; rank < contacts.size(); ++rank) {
    const Contact& contact = contacts[rank];
    const auto found = std::find(nodes.begin(), nodes.end(), contact.node);
    const int node = static_cast<int>(found - nodes.begin());
    if (found == nodes.end()) nodes.push_back(contact.node);
    const std::string where = contact.heartbeat_address.substr(0, contact.heartbeat_address.rfind(':'));
    membership.members.push_back(
        {.node = node,
         .name = absl::StrCat("rank ", rank, " (", contact.name.empty() ? "" : contact.name + ", ", "node ", node, ", ",
                              where, ")")});
  }
  return membership;
}

std::vector<WatchedPeer> WatchedPeersOf(const std::vector<Contact>& contacts, int self) {
  std::vector<WatchedPeer> peers;
  for (const Contact& contact : contacts) {
    WatchedPeer peer;
    if (contact.node == contacts[self].node) peer.page = contact.page;
    peer.address = contact.heartbeat_address;
    peers.push_back(std::move(peer));
  }
  return peers;
}

}  // namespace moerl::fabric
