#ifndef MOERL_SERVICES_TRAINER_LEASE_TABLE_H_
#define MOERL_SERVICES_TRAINER_LEASE_TABLE_H_

#include <cstdint>
#include <map>
#include <vector>

#include "libs/experience/work.h"

namespace moerl::trainer {

// Deadlines of the live leases by the trainer's own monotonic clock, in milliseconds. Volatile: a restart
// gives every live lease its full duration again. Thread-compatible; has no clock, callers pass the time.
class LeaseTable {
 public:
  explicit LeaseTable(int64_t duration_ms) : duration_ms_(duration_ms) {}

  void Add(LeaseId id, int64_t now_ms) { deadlines_[id] = now_ms + duration_ms_; }
  void Remove(LeaseId id) { deadlines_.erase(id); }
  bool IsLive(LeaseId id) const { return deadlines_.contains(id); }

  // A message named the lease. False if it is not live.
  bool Renew(LeaseId id, int64_t now_ms) {
    const auto it = deadlines_.find(id);
    if (it == deadlines_.end()) return false;
    it->second = now_ms + duration_ms_;
    return true;
  }

  std::vector<LeaseId> Expired(int64_t now_ms) const {
    std::vector<LeaseId> expired;
    for (const auto& [id, deadline_ms] : deadlines_) {
      if (deadline_ms <= now_ms) expired.push_back(id);
    }
    return expired;
  }

  int64_t duration_ms() const { return duration_ms_; }
  const std::map<LeaseId, int64_t>& deadlines() const { return deadlines_; }

 private:
  int64_t duration_ms_;
  std::map<LeaseId, int64_t> deadlines_;
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_LEASE_TABLE_H_
