#ifndef MOERL_LIBS_BASE_LINEAGE_H_
#define MOERL_LIBS_BASE_LINEAGE_H_

// Names of weight versions and the forks that retire them. Value types; any thread.

#include <compare>
#include <cstdint>
#include <span>

namespace moerl {

// A set of weights: `number` is the policy after that many steps (0 after the warm start), `epoch` the
// publisher epoch that committed it first. Two versions with one number differ when a fork lies between.
struct VersionName {
  int64_t epoch = 0;
  int64_t number = 0;
  auto operator<=>(const VersionName&) const = default;
};

// Under `epoch` the run resumed from the checkpoint of `step` on other bytes.
struct Fork {
  int64_t epoch = 0;
  int64_t step = 0;
  auto operator<=>(const Fork&) const = default;
};

// Whether `version` left the lineage: a later epoch resumed from a checkpoint before it.
inline bool IsRetired(VersionName version, std::span<const Fork> forks) {
  for (const Fork& fork : forks) {
    if (fork.epoch > version.epoch && version.number > fork.step) return true;
  }
  return false;
}

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_LINEAGE_H_
