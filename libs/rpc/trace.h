#ifndef MOERL_LIBS_RPC_TRACE_H_
#define MOERL_LIBS_RPC_TRACE_H_

#include <string>

#include "absl/strings/string_view.h"

// W3C Trace Context between processes: calls carry the trace of the thread that makes them, and the access log of who
// serves them has it. Pure functions.
namespace moerl::rpc {

inline constexpr char kTraceparent[] = "traceparent";  // metadata key

// "00-<trace id>-<span>-01" for a trace id of 32 hexadecimal digits; empty for any other name.
std::string FormatTraceparent(absl::string_view trace_id);

// The trace id of a traceparent; empty when it is not well formed.
std::string TraceIdOf(absl::string_view traceparent);

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_TRACE_H_
