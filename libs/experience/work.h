#ifndef MOERL_LIBS_EXPERIENCE_WORK_H_
#define MOERL_LIBS_EXPERIENCE_WORK_H_

// The messages of ExperienceService.Work as plain data, for the state machines at both of its ends: the
// trainer's Experience and the rollout server's Worker. Fields and meaning are those of
// proto/moerl/v1/experience.proto; work_proto.h converts. Lengths and offsets count new tokens, the
// continued prefix included. Value types; any thread.

#include <compare>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "libs/base/lineage.h"
#include "libs/rl/trajectory.h"

namespace moerl {

// Unique in the run: the trainer's epoch and a counter within it.
struct LeaseId {
  int64_t epoch = 0;
  int64_t counter = 0;
  auto operator<=>(const LeaseId&) const = default;
};

struct SampleOfLease {
  LeaseId lease_id;
  int64_t sample = 0;
  auto operator<=>(const SampleOfLease&) const = default;
};

// ---- from the worker
struct Hello {
  std::string worker;
  int64_t incarnation = 0;
  int64_t hello_number = 0;
  int64_t num_slots = 0;  // samples it can run at once
  VersionName version;
  std::string numerics_fingerprint;
  std::vector<LeaseId> leases_held;
  std::vector<SampleOfLease> unacknowledged;
};

// Samples the worker would start now; replaces what it said before.
struct Demand {
  int64_t num_samples = 0;
  VersionName version;
};

struct Progress {
  LeaseId lease_id;
  int64_t sample = 0;
  int64_t offset = 0;
  rl::TokenRun tokens;
};

enum class FinishReason { kStop = 1, kLength = 2, kAbort = 3 };
enum class FailureReason {
  kVerifierTimeout = 1,
  kVerifierError = 2,
  kRewardOutOfRange = 3,
  kBadObservation = 4,
  kBadPrompt = 5
};

struct Failure {
  FailureReason reason = FailureReason::kVerifierError;
  std::string detail;
};

struct Finish {
  LeaseId lease_id;
  int64_t sample = 0;
  int64_t num_tokens = 0;
  uint64_t digest = 0;  // TokenRun::IdsDigest of all new tokens
  FinishReason reason = FinishReason::kStop;
  std::variant<double, Failure> outcome;  // the reward, or why there is none
  int64_t offset = 0;                     // of `tokens`, the ones not sent as progress
  rl::TokenRun tokens;
};

struct HandBack {
  LeaseId lease_id;
};

struct Renewal {
  std::vector<LeaseId> lease_ids;
};

using WorkerMessage = std::variant<Hello, Demand, Progress, Finish, HandBack, Renewal>;

// ---- from the trainer
struct LeaseDecision {
  LeaseId lease_id;
  bool is_adopted = false;
  int64_t duration_ms = 0;
  std::vector<int64_t> lengths;  // by sample: tokens the trainer has
  std::vector<bool> are_final;   // by sample
};

struct Welcome {
  std::string run_id;
  int64_t epoch = 0;
  std::vector<Fork> forks;
  std::vector<LeaseDecision> decisions;
  int64_t hello_number = 0;
};

struct LeasedSample {
  bool is_final = false;
  std::shared_ptr<const rl::TokenRun> prefix;  // null for none
};

struct Grant {
  LeaseId lease_id;
  int64_t group = 0;
  int64_t prompt_index = 0;  // known to the trainer's prompt source; not on the wire
  int64_t duration_ms = 0;
  int64_t min_version = 0;
  std::vector<LeasedSample> samples;
};

enum class Verdict { kRecorded = 1, kSuperseded = 2, kRefused = 3 };

struct Ack {
  LeaseId lease_id;
  int64_t sample = 0;
  Verdict verdict = Verdict::kRecorded;
  std::string reason;  // of a refusal
};

struct Revocation {
  LeaseId lease_id;
  std::string reason;
};

using TrainerMessage = std::variant<Welcome, Grant, Ack, Revocation>;

}  // namespace moerl

#endif  // MOERL_LIBS_EXPERIENCE_WORK_H_
