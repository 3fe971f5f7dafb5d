#include "libs/base/log.h"

#include <spdlog/sinks/ansicolor_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <charconv>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace moerl {
namespace {

thread_local std::string trace_id;

// Appends `text` with everything escaped that a line cannot hold and, inside quotes, what JSON cannot.
// Bytes that are not UTF-8 pass: a log line must not fail.
void AppendEscaped(absl::string_view text, bool in_quotes, std::string& out) {
  for (const char c : text) {
    switch (c) {
      case '"':
        out += in_quotes ? "\\\"" : "\"";
        break;
      case '\\':
        out += in_quotes ? "\\\\" : "\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned char>(c));
        } else {
          out += c;
        }
    }
  }
}

void AppendQuoted(absl::string_view text, std::string& out) {
  out += '"';
  AppendEscaped(text, /*in_quotes=*/true, out);
  out += '"';
}

bool NeedsQuotes(absl::string_view text) {
  if (text.empty()) return true;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) <= 0x20 || c == '"' || c == '=' || c == 0x7f) return true;
  }
  return false;
}

void AppendNumber(double value, bool json, std::string& out) {
  // JSON has no NaN or infinity; they go as text there.
  std::array<char, 32> digits;  // the shortest text that reads back as `value` has at most 24
  const char* end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  const absl::string_view text(digits.data(), end - digits.data());
  if (json && !std::isfinite(value)) {
    AppendQuoted(text, out);
  } else {
    absl::StrAppend(&out, text);
  }
}

void AppendValue(const LogValue& value, bool json, std::string& out) {
  std::visit(
      [&](const auto& v) {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, bool>) {
          out += v ? "true" : "false";
        } else if constexpr (std::is_same_v<T, double>) {
          AppendNumber(v, json, out);
        } else if constexpr (std::is_same_v<T, absl::string_view>) {
          if (json || NeedsQuotes(v)) {
            AppendQuoted(v, out);
          } else {
            absl::StrAppend(&out, v);
          }
        } else {
          absl::StrAppend(&out, v);
        }
      },
      value.get());
}

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

struct Logger {
  bool json;
  std::unique_ptr<spdlog::logger> spd;
  Logger* replaced = nullptr;  // kept: another thread may be writing through it
};

Logger* MakeLogger(const LogOptions& options) {
  const bool json = options.format == LogFormat::kJson || (options.format == LogFormat::kAuto && isatty(2) == 0);
  auto sink = std::make_shared<spdlog::sinks::ansicolor_stderr_sink_mt>();
  auto spd = std::make_unique<spdlog::logger>(options.program, std::move(sink));
  if (json) {
    std::string program;
    AppendQuoted(options.program, program);
    spd->set_pattern(absl::StrCat(R"({"time":"%Y-%m-%dT%H:%M:%S.%fZ","level":"%l","program":)",
                                  absl::StrReplaceAll(program, {{"%", "%%"}}), ",%v}"),
                     spdlog::pattern_time_type::utc);
  } else {
    spd->set_pattern("%H:%M:%S.%e %^%L%$ %n: %v", spdlog::pattern_time_type::local);
  }
  spd->set_level(ToSpdlog(options.level));
  spd->flush_on(spdlog::level::debug);
  return new Logger{.json = json, .spd = std::move(spd)};
}

std::atomic<Logger*>& Current() {
  static std::atomic<Logger*> current{MakeLogger(LogOptions{})};
  return current;
}

}  // namespace

void InitLogging(const LogOptions& options) {
  Logger* logger = MakeLogger(options);
  logger->replaced = Current().exchange(logger, std::memory_order_acq_rel);
}

bool ParseLogLevel(absl::string_view name, LogLevel& level) {
  static constexpr std::array<std::pair<absl::string_view, LogLevel>, 4> kLevels = {{
      {"debug", LogLevel::kDebug},
      {"info", LogLevel::kInfo},
      {"warning", LogLevel::kWarning},
      {"error", LogLevel::kError},
  }};
  for (const auto& [known, value] : kLevels) {
    if (name != known) continue;
    level = value;
    return true;
  }
  return false;
}

bool IsLogged(LogLevel level) { return Current().load(std::memory_order_acquire)->spd->should_log(ToSpdlog(level)); }

void Log(LogLevel level, absl::string_view message, LogFields fields) {
  Logger& logger = *Current().load(std::memory_order_acquire);
  if (!logger.spd->should_log(ToSpdlog(level))) return;
  const std::string line = logger.json ? internal::FormatJson(message, fields) : internal::FormatHuman(message, fields);
  logger.spd->log(ToSpdlog(level), spdlog::string_view_t(line.data(), line.size()));
}

ScopedTraceId::ScopedTraceId(std::string id) : previous_(std::exchange(trace_id, std::move(id))) {}
ScopedTraceId::~ScopedTraceId() { trace_id = std::move(previous_); }

const std::string& CurrentTraceId() { return trace_id; }

std::string internal::FormatHuman(absl::string_view message, LogFields fields) {
  std::string out;
  AppendEscaped(message, /*in_quotes=*/false, out);
  for (const LogField& field : fields) {
    absl::StrAppend(&out, " ", field.key, "=");
    AppendValue(field.value, /*json=*/false, out);
  }
  if (!trace_id.empty()) {
    out += " trace_id=";
    AppendValue(trace_id, /*json=*/false, out);
  }
  return out;
}

std::string internal::FormatJson(absl::string_view message, LogFields fields) {
  std::string out = R"("message":)";
  AppendQuoted(message, out);
  for (const LogField& field : fields) {
    out += ',';
    AppendQuoted(field.key, out);
    out += ':';
    AppendValue(field.value, /*json=*/true, out);
  }
  if (!trace_id.empty()) {
    out += R"(,"trace_id":)";
    AppendQuoted(trace_id, out);
  }
  return out;
}

}  // namespace moerl
