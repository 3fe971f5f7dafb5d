#ifndef MOERL_LIBS_BASE_LOG_H_
#define MOERL_LIBS_BASE_LOG_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>

#include "absl/strings/string_view.h"

// Structured logging to standard error: one event, one line, whatever it contains. Thread-safe.
//
//   LogInfo("version published", {{"version", 12}, {"bytes", bytes}, {"seconds", seconds}});
//
// On a terminal:  19:03:11.123 I moerl-trainer: version published version=12 bytes=1048576 seconds=0.21
// Elsewhere:      {"time":"2026-11-30T19:03:11.123456Z","level":"info","program":"moerl-trainer",
//                  "message":"version published","version":12,"bytes":1048576,"seconds":0.21}  (one line)
// A program that has not called InitLogging logs at info under the name "moerl".
namespace moerl {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kAuto, kHuman, kJson };  // kAuto: human when standard error is a terminal

struct LogOptions {
  std::string program = "moerl";
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kAuto;
};

// A value of a field: boolean, integer, real or text. Refers to text, does not copy it.
class LogValue {
 public:
  LogValue(bool value) : value_(value) {}  // NOLINT: implicit by design
  template <std::signed_integral T>
  LogValue(T value) : value_(static_cast<int64_t>(value)) {}  // NOLINT
  template <std::unsigned_integral T>
  LogValue(T value) : value_(static_cast<uint64_t>(value)) {}  // NOLINT
  template <std::floating_point T>
  LogValue(T value) : value_(static_cast<double>(value)) {}                                    // NOLINT
  LogValue(const char* value) : value_(absl::string_view(value)) {}                            // NOLINT
  LogValue(absl::string_view value) : value_(value) {}                                         // NOLINT
  LogValue(std::string_view value) : value_(absl::string_view(value.data(), value.size())) {}  // NOLINT
  LogValue(const std::string& value) : value_(absl::string_view(value)) {}                     // NOLINT

  const std::variant<bool, int64_t, uint64_t, double, absl::string_view>& get() const { return value_; }

 private:
  std::variant<bool, int64_t, uint64_t, double, absl::string_view> value_;
};

// Key and value; keys are lower_snake_case and none of time, level, program, message, trace_id.
struct LogField {
  absl::string_view key;
  LogValue value;
};

using LogFields = std::initializer_list<LogField>;

// Sets program name, level and format. Call it once, first thing in main; later calls replace the settings.
void InitLogging(const LogOptions& options);

// The level names of the configuration: debug, info, warning, error. False when `name` is none of them.
bool ParseLogLevel(absl::string_view name, LogLevel& level);

bool IsLogged(LogLevel level);
void Log(LogLevel level, absl::string_view message, LogFields fields = {});
inline void LogDebug(absl::string_view message, LogFields fields = {}) { Log(LogLevel::kDebug, message, fields); }
inline void LogInfo(absl::string_view message, LogFields fields = {}) { Log(LogLevel::kInfo, message, fields); }
inline void LogWarning(absl::string_view message, LogFields fields = {}) { Log(LogLevel::kWarning, message, fields); }
inline void LogError(absl::string_view message, LogFields fields = {}) { Log(LogLevel::kError, message, fields); }

// While it lives, events of this thread carry trace_id (the trace part of a W3C traceparent, or any
// other name of the work in hand). Nests; must be destroyed on the thread that made it.
class ScopedTraceId {
 public:
  explicit ScopedTraceId(std::string trace_id);
  ~ScopedTraceId();
  ScopedTraceId(const ScopedTraceId&) = delete;
  ScopedTraceId& operator=(const ScopedTraceId&) = delete;

 private:
  std::string previous_;
};

// The trace id of this thread, empty when there is none: to hand it to another thread or process.
const std::string& CurrentTraceId();

namespace internal {
// The part of the line after time, level and program; exposed for tests.
std::string FormatHuman(absl::string_view message, LogFields fields);
std::string FormatJson(absl::string_view message, LogFields fields);
}  // namespace internal

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_LOG_H_
