#include "libs/base/crash_signals.h"

#include <dlfcn.h>

#include <csignal>

#include "absl/strings/match.h"

namespace moerl {
namespace {

bool IsInfinipaths(const struct sigaction& action) {
  if ((action.sa_flags & SA_SIGINFO) == 0) return false;
  Dl_info library;
  return dladdr(reinterpret_cast<void*>(action.sa_sigaction), &library) != 0 && library.dli_fname != nullptr &&
         absl::StrContains(library.dli_fname, "libinfinipath");
}

}  // namespace

void DropInfinipathHandlers() {
  for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGABRT, SIGINT, SIGTERM}) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) == 0 && IsInfinipaths(action)) std::signal(number, SIG_DFL);
  }
}

}  // namespace moerl
