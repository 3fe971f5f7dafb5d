#include "libs/base/failpoint.h"

#include <unistd.h>

#include <csignal>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "libs/base/status_macros.h"

namespace moerl {
namespace internal {
std::atomic<int> num_armed_failpoints{0};
}  // namespace internal

namespace {

enum class Action { kCrash, kError, kSleep };

struct Failpoint {
  Action action = Action::kError;
  absl::Duration sleep;
  int64_t only_hit = 0;  // 0: every hit
  int64_t hits = 0;
};

using Table = std::map<std::string, Failpoint, std::less<>>;

ABSL_CONST_INIT absl::Mutex mutex(absl::kConstInit);

Table& Armed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
  static Table* table = new Table;
  return *table;
}

absl::Status BadPoint(absl::string_view point) {
  return absl::InvalidArgumentError(
      absl::StrCat("failpoints: '", point, "' is not NAME=crash|error|sleep(DURATION)[@N] with N from 1"));
}

absl::Status ParsePoint(absl::string_view point, Table& table) {
  const std::pair<absl::string_view, absl::string_view> name_rest = absl::StrSplit(point, absl::MaxSplits('=', 1));
  const std::pair<absl::string_view, absl::string_view> action_hit =
      absl::StrSplit(name_rest.second, absl::MaxSplits('@', 1));
  absl::string_view action = action_hit.first;
  Failpoint failpoint;
  if (action == "crash") {
    failpoint.action = Action::kCrash;
  } else if (action == "error") {
    failpoint.action = Action::kError;
  } else if (absl::ConsumePrefix(&action, "sleep(") && absl::ConsumeSuffix(&action, ")")) {
    failpoint.action = Action::kSleep;
    if (!absl::ParseDuration(action, &failpoint.sleep)) return BadPoint(point);
  } else {
    return BadPoint(point);
  }
  const bool has_hit = action_hit.first.size() != name_rest.second.size();
  if (has_hit && (!absl::SimpleAtoi(action_hit.second, &failpoint.only_hit) || failpoint.only_hit < 1)) {
    return BadPoint(point);
  }
  if (name_rest.first.empty()) return BadPoint(point);
  table[std::string(name_rest.first)] = failpoint;
  return absl::OkStatus();
}

[[noreturn]] void Crash() {
  kill(getpid(), SIGKILL);
  while (true) pause();
}

}  // namespace

absl::Status ArmFailpoints(absl::string_view spec) {
#ifndef MOERL_FAILPOINTS
  return absl::FailedPreconditionError(absl::StrCat(
      "failpoints: '", spec, "' asked for, but this build has none; configure with -DMOERL_FAILPOINTS=ON"));
#endif
  Table parsed;
  for (absl::string_view point : absl::StrSplit(spec, ';', absl::SkipWhitespace())) {
    MOERL_RETURN_IF_ERROR(ParsePoint(absl::StripAsciiWhitespace(point), parsed));
  }
  absl::MutexLock lock(&mutex);
  for (auto& [name, failpoint] : parsed) Armed()[name] = failpoint;
  internal::num_armed_failpoints = static_cast<int>(Armed().size());
  return absl::OkStatus();
}

void DisarmFailpoints() {
  absl::MutexLock lock(&mutex);
  Armed().clear();
  internal::num_armed_failpoints = 0;
}

int64_t FailpointHits(absl::string_view name) {
  absl::MutexLock lock(&mutex);
  const auto it = Armed().find(name);
  return it == Armed().end() ? 0 : it->second.hits;
}

absl::Status internal::HitFailpoint(absl::string_view name) {
  Failpoint failpoint;
  {
    absl::MutexLock lock(&mutex);
    const auto it = Armed().find(name);
    if (it == Armed().end()) return absl::OkStatus();
    ++it->second.hits;
    failpoint = it->second;
  }
  if (failpoint.only_hit != 0 && failpoint.hits != failpoint.only_hit) return absl::OkStatus();
  switch (failpoint.action) {
    case Action::kCrash:
      Crash();
    case Action::kSleep:
      absl::SleepFor(failpoint.sleep);
      return absl::OkStatus();
    case Action::kError:
      return absl::UnavailableError(absl::StrCat("failpoint ", name));
  }
  return absl::OkStatus();
}

}  // namespace moerl
