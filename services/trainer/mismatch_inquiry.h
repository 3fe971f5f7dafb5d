#ifndef MOERL_SERVICES_TRAINER_MISMATCH_INQUIRY_H_
#define MOERL_SERVICES_TRAINER_MISMATCH_INQUIRY_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "libs/base/lineage.h"
#include "libs/model/config.h"
#include "services/trainer/experience.h"

namespace moerl::trainer {

// Up to and with the token in question, and what the trainer's forward made of it (model/stages.h).
struct MismatchTrace {
  std::vector<int32_t> tokens;
  std::vector<uint64_t> stage_digests;
};

// Asks every connected rollout server what its forward makes of a sequence with a mismatch, to name the server that
// differs and the first stage where it does. All are asked: a sample can come from several servers, and one that
// computes otherwise is worth naming whichever it was. Data and decisions; the leader sends and receives.
// Thread-compatible.
class MismatchInquiry {
 public:
  // `workers`: names by connection of those who are asked. `config` must outlive it.
  MismatchInquiry(uint64_t id, VersionName version, std::vector<uint64_t> stage_digests,
                  const model::ModelConfig& config, std::map<ConnectionId, std::string> workers);

  uint64_t id() const { return id_; }
  const std::map<ConnectionId, std::string>& asked() const { return waiting_; }
  void OnReport(ConnectionId connection, uint64_t id, VersionName version, const std::vector<uint64_t>& stage_digests);
  void OnBreak(ConnectionId connection);
  bool is_done() const { return waiting_.empty(); }

  // "layer 3 attention of rollout-1", or why no place can be named.
  std::string Verdict() const;

 private:
  const uint64_t id_;
  const VersionName version_;
  const std::vector<uint64_t> stage_digests_;
  const model::ModelConfig& config_;
  std::map<ConnectionId, std::string> waiting_;
  std::vector<std::string> differing_;  // "layer 3 attention of rollout-1"
  int64_t num_equal_ = 0;
  int64_t num_other_version_ = 0;
  int64_t num_gone_ = 0;
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_MISMATCH_INQUIRY_H_
