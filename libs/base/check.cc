#include "libs/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace moerl::internal {

void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "%s:%d: check does not hold: %s\n", file, line, condition);
  std::abort();
}

}  // namespace moerl::internal
