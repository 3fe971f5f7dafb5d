#ifndef MOERL_LIBS_BASE_STATUS_MACROS_H_
#define MOERL_LIBS_BASE_STATUS_MACROS_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns from the enclosing function with the status of `expression` unless it is OK.
#define MOERL_RETURN_IF_ERROR(expression)     \
  do {                                        \
    absl::Status moerl_status = (expression); \
    if (!moerl_status.ok()) [[unlikely]]      \
      return moerl_status;                    \
  } while (false)

// Assigns the value of a StatusOr to `lhs` (which may declare a variable), or returns its status.
#define MOERL_ASSIGN_OR_RETURN(lhs, expression) \
  MOERL_ASSIGN_OR_RETURN_IMPL(MOERL_CONCAT(moerl_statusor_, __LINE__), lhs, expression)

#define MOERL_ASSIGN_OR_RETURN_IMPL(statusor, lhs, expression) \
  auto statusor = (expression);                                \
  if (!statusor.ok()) [[unlikely]]                             \
    return std::move(statusor).status();                       \
  lhs = std::move(statusor).value()

#define MOERL_CONCAT(a, b) MOERL_CONCAT_IMPL(a, b)
#define MOERL_CONCAT_IMPL(a, b) a##b

#endif  // MOERL_LIBS_BASE_STATUS_MACROS_H_
