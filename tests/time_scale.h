#ifndef MOERL_TESTS_TIME_SCALE_H_
#define MOERL_TESTS_TIME_SCALE_H_

#include <cstdlib>

namespace moerl {

// How many times longer this build may take than a release build: what a test's own bound on time is multiplied by.
// ctest sets it (cmake/MoerlTargets.cmake); a program started by hand gets 1.
inline double TimeScale() {
  const char* scale = std::getenv("MOERL_TEST_TIME_SCALE");
  return scale == nullptr ? 1 : std::atof(scale);
}

}  // namespace moerl

#endif  // MOERL_TESTS_TIME_SCALE_H_
