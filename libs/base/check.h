#ifndef MOERL_LIBS_BASE_CHECK_H_
#define MOERL_LIBS_BASE_CHECK_H_

// MOERL_CHECK(condition) states what the program itself guarantees and aborts, with file, line and the
// condition, when it does not hold. For programmer errors only; input is answered with an absl::Status.
#define MOERL_CHECK(condition) \
  (__builtin_expect(!!(condition), 1) ? (void)0 : ::moerl::internal::CheckFailed(__FILE__, __LINE__, #condition))

namespace moerl::internal {

// Prints one line to stderr and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);

}  // namespace moerl::internal

#endif  // MOERL_LIBS_BASE_CHECK_H_
