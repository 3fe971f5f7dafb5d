#ifndef MOERL_SERVICES_TRAINER_RUN_METRICS_H_
#define MOERL_SERVICES_TRAINER_RUN_METRICS_H_

#include <map>

#include "absl/time/time.h"
#include "moerl/v1/trainer.pb.h"
#include "services/trainer/experience.h"

namespace moerl {
class Counter;
class Gauge;
class Histogram;
}  // namespace moerl

namespace moerl::trainer {

// What a scrape of the leader shows: phases and steps from the start, the protocol's state once there is one.
// Control thread.
class RunMetrics {
 public:
  RunMetrics();

  // What the run does at `now` (of the monotonic clock): after every change and at least every second. The time since
  // the last call counts for the phase of then.
  void ObservePhase(v1::TrainerPhase phase, absl::Duration now);
  // After each change of the protocol's state; `step` are done.
  void Observe(const Experience& experience, int64_t step);
  void ObserveStep(const v1::StepMetrics& row);

 private:
  struct Phase {
    Gauge* is_current;
    Counter* seconds;
  };

  std::map<int, Phase> phases_;
  Phase* phase_ = nullptr;
  absl::Duration phase_seen_;
  ExperienceCounters last_;
  Counter& tokens_;
  Counter& tokens_compared_;
  Counter& steps_skipped_;
  Histogram& step_seconds_;
  Histogram& wait_seconds_;
};

// How many rollout servers of the size of those connected would keep the trainer busy: open groups and those that
// could be admitted if there were room, over the groups a server takes; at least 1 while the run goes on.
int64_t RolloutsWanted(const Experience& experience);

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_RUN_METRICS_H_
