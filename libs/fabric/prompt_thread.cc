#include "libs/fabric/prompt_thread.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace moerl::fabric {
namespace {

constexpr uint64_t kSliceNs = 100'000;  // the shortest that the kernel takes

// struct sched_attr of the kernel, which glibc 2.36 does not have.
struct SchedulerAttributes {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime, deadline, period;
};

}  // namespace

void RunPromptly() {
  const sched_param lowest = {.sched_priority = sched_get_priority_min(SCHED_RR)};
  if (sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &lowest) == 0) return;
  SchedulerAttributes attributes = {};
  attributes.size = sizeof(attributes);
  attributes.policy = SCHED_OTHER;
  attributes.runtime = kSliceNs;
  syscall(SYS_sched_setattr, 0, &attributes, 0);  // older kernels ignore the slice
}

}  // namespace moerl::fabric
