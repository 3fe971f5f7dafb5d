#ifndef MOERL_TOOLS_MOERL_SUPERVISION_H_
#define MOERL_TOOLS_MOERL_SUPERVISION_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "libs/base/process.h"

// What to do when a process of a run ends. A state machine without processes and clocks: it is told events and
// the time and answers with actions, in order.
//
// Processes form groups that live and die together: when one member ends unasked the others are killed, and the
// group is started again after a back-off. A group that keeps ending soon after its start, or a program
// that refuses its configuration, ends the run.
namespace moerl {

struct GroupSpec {
  std::string name;
  int num_members = 1;
  bool ends_run = false;         // when all its members exit with 0 the run is done
  bool outlives_others = false;  // at the end it is stopped after all that do not
};

struct SupervisionLimits {
  absl::Duration quick_end = absl::Seconds(5);           // a group that ends sooner after its start has failed to start
  int quick_ends_max = 10;                               // this many in a row end the run
  absl::Duration backoff_min = absl::Milliseconds(100);  // doubles with each quick end in a row
  absl::Duration backoff_max = absl::Seconds(5);
  absl::Duration stop_grace = absl::Seconds(22);  // from SIGTERM to SIGKILL
};

struct Action {
  enum class Kind { kStart, kTerminate, kKill, kNotice, kFinish };
  Kind kind;
  int group = 0;
  int member = 0;
  int exit_code = 0;      // of kFinish
  std::string text = {};  // of kNotice and kFinish: what happened, for people
};
using Actions = std::vector<Action>;

class Supervision {
 public:
  static constexpr int kExitRefusedConfiguration = 2;  // of a program that is not worth starting again

  Supervision(std::vector<GroupSpec> groups, SupervisionLimits limits);

  // Once, first: starts all groups.
  Actions Begin(absl::Time now);
  // The member, started by an action, has ended; `last_words` are its own about it, if any. Also to be called when it
  // could not be started.
  Actions OnExit(int group, int member, const ExitStatus& status, absl::Time now, const std::string& last_words = "");
  // Call at WakeTime() or later.
  Actions OnTime(absl::Time now);
  // Stops everything; the run then finishes with `exit_code`. A second call kills everything at once.
  Actions Stop(int exit_code, const std::string& why, absl::Time now);

  // When OnTime has something to do; infinite future when it has not.
  absl::Time WakeTime() const;

 private:
  struct Group {
    GroupSpec spec;
    std::vector<bool> is_running;
    bool is_ending = false;  // a member ended; the rest is going
    int num_done = 0;        // members that exited with 0, in a group that ends the run
    int num_quick_ends = 0;
    absl::Time started_at;
    absl::Time restart_at = absl::InfiniteFuture();
    std::string last_end;

    bool IsRunning() const;
  };

  void StartGroup(int group, absl::Time now, Actions& actions);
  void SignalGroup(int group, Action::Kind kind, Actions& actions);
  void EndUnasked(int group, absl::Time now, Actions& actions);
  void BeginStop(int exit_code, const std::string& why, absl::Time now, Actions& actions);
  void AdvanceStop(absl::Time now, Actions& actions);
  bool AnyRunning(bool outliving) const;

  enum class Phase { kRunning, kStoppingMost, kStoppingRest, kFinished };
  std::vector<Group> groups_;
  const SupervisionLimits limits_;
  Phase phase_ = Phase::kRunning;
  absl::Time kill_at_ = absl::InfiniteFuture();
  bool is_killing_ = false;
  int exit_code_ = 0;
  std::string why_;
};

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_SUPERVISION_H_
