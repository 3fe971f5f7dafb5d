#include "tools/moerl/supervision.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"

namespace moerl {

bool Supervision::Group::IsRunning() const {
  return std::find(is_running.begin(), is_running.end(), true) != is_running.end();
}

Supervision::Supervision(std::vector<GroupSpec> groups, SupervisionLimits limits) : limits_(limits) {
  for (GroupSpec& spec : groups) {
    Group group;
    group.is_running.assign(spec.num_members, false);
    group.spec = std::move(spec);
    groups_.push_back(std::move(group));
  }
}

Actions Supervision::Begin(absl::Time now) {
  Actions actions;
  for (size_t group = 0; group < groups_.size(); ++group) StartGroup(static_cast<int>(group), now, actions);
  return actions;
}

void Supervision::StartGroup(int index, absl::Time now, Actions& actions) {
  Group& group = groups_[index];
  group.is_ending = false;
  group.num_done = 0;
  group.started_at = now;
  group.restart_at = absl::InfiniteFuture();
  for (int member = 0; member < group.spec.num_members; ++member) {
    group.is_running[member] = true;
    actions.push_back({Action::Kind::kStart, index, member});
  }
}

void Supervision::SignalGroup(int index, Action::Kind kind, Actions& actions) {
  const Group& group = groups_[index];
  for (int member = 0; member < group.spec.num_members; ++member) {
    if (group.is_running[member]) actions.push_back({kind, index, member});
  }
}

Actions Supervision::OnExit(int index, int member, const ExitStatus& status, absl::Time now,
                            const std::string& last_words) {
  Group& group = groups_[index];
  MOERL_CHECK(group.is_running[member]);
  group.is_running[member] = false;
  Actions actions;
  if (phase_ != Phase::kRunning) {
    AdvanceStop(now, actions);
    return actions;
  }
  const std::string name = group.spec.num_members == 1 ? group.spec.name : absl::StrCat(group.spec.name, "-", member);
  if (group.spec.ends_run && status.code == 0 && !group.is_ending) {
    if (++group.num_done == group.spec.num_members) BeginStop(0, "done", now, actions);
    return actions;
  }
  if (!group.is_ending) {
    group.is_ending = true;
    group.last_end = absl::StrCat(name, " ended: ", status.ToString(),
                                  last_words.empty() ? "" : absl::StrCat(" (", last_words, ")"));
    if (status.code == kExitRefusedConfiguration) {
      BeginStop(kExitRefusedConfiguration, absl::StrCat(group.last_end, "; it refuses its configuration"), now,
                actions);
      return actions;
    }
    SignalGroup(index, Action::Kind::kKill, actions);
  }
  if (!group.IsRunning()) EndUnasked(index, now, actions);
  return actions;
}

void Supervision::EndUnasked(int index, absl::Time now, Actions& actions) {
  Group& group = groups_[index];
  const bool is_quick = now - group.started_at < limits_.quick_end;
  group.num_quick_ends = is_quick ? group.num_quick_ends + 1 : 0;
  if (group.num_quick_ends >= limits_.quick_ends_max) {
    return BeginStop(1,
                     absl::StrCat(group.last_end, ", the ", group.num_quick_ends, "th time within ",
                                  absl::FormatDuration(limits_.quick_end), " of its start"),
                     now, actions);
  }
  absl::Duration backoff = limits_.backoff_min;
  for (int i = 1; i < group.num_quick_ends; ++i) backoff = std::min(backoff * 2, limits_.backoff_max);
  group.restart_at = now + backoff;
  actions.push_back(
      {Action::Kind::kNotice, index, 0, 0,
       absl::StrCat(group.last_end, "; starting ", group.spec.name, " again in ", absl::FormatDuration(backoff))});
}

Actions Supervision::OnTime(absl::Time now) {
  Actions actions;
  if (phase_ == Phase::kRunning) {
    for (size_t index = 0; index < groups_.size(); ++index) {
      if (groups_[index].restart_at <= now) StartGroup(static_cast<int>(index), now, actions);
    }
  } else if (kill_at_ <= now) {
    kill_at_ = absl::InfiniteFuture();
    is_killing_ = true;
    AdvanceStop(now, actions);
  }
  return actions;
}

Actions Supervision::Stop(int exit_code, const std::string& why, absl::Time now) {
  Actions actions;
  if (phase_ == Phase::kRunning) {
    BeginStop(exit_code, why, now, actions);
  } else if (phase_ != Phase::kFinished) {
    for (size_t index = 0; index < groups_.size(); ++index) {
      SignalGroup(static_cast<int>(index), Action::Kind::kKill, actions);
    }
  }
  return actions;
}

void Supervision::BeginStop(int exit_code, const std::string& why, absl::Time now, Actions& actions) {
  exit_code_ = exit_code;
  why_ = why;
  phase_ = Phase::kStoppingMost;
  for (size_t index = 0; index < groups_.size(); ++index) {
    groups_[index].restart_at = absl::InfiniteFuture();
    if (!groups_[index].spec.outlives_others) SignalGroup(static_cast<int>(index), Action::Kind::kTerminate, actions);
  }
  kill_at_ = now + limits_.stop_grace;
  AdvanceStop(now, actions);
}

bool Supervision::AnyRunning(bool outliving) const {
  for (const Group& group : groups_) {
    if (group.spec.outlives_others == outliving && group.IsRunning()) return true;
  }
  return false;
}

// Goes to the next phase when the one at hand has nothing left to wait for, and kills what is over its time.
void Supervision::AdvanceStop(absl::Time now, Actions& actions) {
  if (phase_ == Phase::kStoppingMost && !AnyRunning(/*outliving=*/false)) {
    phase_ = Phase::kStoppingRest;
    kill_at_ = now + limits_.stop_grace;
    is_killing_ = false;
    for (size_t index = 0; index < groups_.size(); ++index) {
      if (groups_[index].spec.outlives_others) SignalGroup(static_cast<int>(index), Action::Kind::kTerminate, actions);
    }
  }
  if (phase_ == Phase::kStoppingRest && !AnyRunning(/*outliving=*/true)) {
    phase_ = Phase::kFinished;
    kill_at_ = absl::InfiniteFuture();
    actions.push_back({Action::Kind::kFinish, 0, 0, exit_code_, why_});
    return;
  }
  if (!std::exchange(is_killing_, false)) return;
  const bool outliving = phase_ == Phase::kStoppingRest;
  for (size_t index = 0; index < groups_.size(); ++index) {
    if (groups_[index].spec.outlives_others == outliving) {
      SignalGroup(static_cast<int>(index), Action::Kind::kKill, actions);
    }
  }
}

absl::Time Supervision::WakeTime() const {
  absl::Time wake = kill_at_;
  for (const Group& group : groups_) wake = std::min(wake, group.restart_at);
  return wake;
}

}  // namespace moerl
