#ifndef MOERL_TESTS_INTEGRATION_MEMBERSHIP_FAULT_TIMES_H_
#define MOERL_TESTS_INTEGRATION_MEMBERSHIP_FAULT_TIMES_H_

#include <string>
#include <vector>

#include "tests/integration/membership/ranks.h"

namespace moerl {

// How long one kind of fault took, over all its repeats: until a survivor had its error, until it had finished an
// operation of the next epoch, and until a replacement had.
class FaultTimes {
 public:
  explicit FaultTimes(std::string fault) : fault_(std::move(fault)) {}

  // Expects an error within 1 s of `lost_at`, and an operation of the next epoch within 2 s of the error.
  void AddLoss(int64_t lost_at_ns, const Board::Rank& survivor);
  // Expects the first operation within 2 s of asking.
  void AddJoin(const Board::Rank& joiner);
  // One row of a table on standard output.
  void Print();

 private:
  const std::string fault_;
  std::vector<double> error_ms_, reform_ms_, join_ms_;
};

}  // namespace moerl

#endif  // MOERL_TESTS_INTEGRATION_MEMBERSHIP_FAULT_TIMES_H_
