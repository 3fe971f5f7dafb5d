#ifndef MOERL_LIBS_BASE_CRASH_SIGNALS_H_
#define MOERL_LIBS_BASE_CRASH_SIGNALS_H_

namespace moerl {

// libfabric brings libinfinipath along, which takes SIGSEGV, SIGBUS, SIGILL, SIGABRT, SIGINT and SIGTERM when it is
// loaded and answers them with exit(1), static destructors and all, from within the handler: a crash then leaves no
// core file, looks like an error to whoever waits for the process, and may hang instead. Gives those signals back their
// default action; others' handlers stay. To be called first in main.
void DropInfinipathHandlers();

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_CRASH_SIGNALS_H_
