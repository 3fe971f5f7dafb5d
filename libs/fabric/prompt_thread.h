#ifndef MOERL_LIBS_FABRIC_PROMPT_THREAD_H_
#define MOERL_LIBS_FABRIC_PROMPT_THREAD_H_

namespace moerl::fabric {

// Makes the calling thread run soon after it wakes, also where every core is busy: real time at the lowest priority
// where this process may have that (CAP_SYS_NICE), else short slices, which the scheduler of Linux 6.12 and later
// prefers. For threads that mostly sleep and do little: heartbeats that come late look like a lost rank.
void RunPromptly();

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_PROMPT_THREAD_H_
