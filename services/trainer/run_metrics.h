#ifndef MOERL_SERVICES_TRAINER_RUN_METRICS_H_
#define MOERL_SERVICES_TRAINER_RUN_METRICS_H_

#include "moerl/v1/trainer.pb.h"
#include "services/trainer/experience.h"

namespace moerl::trainer {

// What a scrape of the leader shows. Control thread.
class RunMetrics {
 public:
  // After each change of the protocol's state.
  void Observe(const Experience& experience);
  void ObserveStep(const v1::StepMetrics& row);

 private:
  ExperienceCounters last_;
};

// How many rollout servers of the size of those connected would keep the trainer busy: open groups and those that
// could be admitted if there were room, over the groups a server takes; at least 1 while the run goes on.
int64_t RolloutsWanted(const Experience& experience);

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_RUN_METRICS_H_
