// What every program of a sanitizer build runs with, wherever it is started. Compiled into such builds only.
//
// A suppression is for a library that is not ours, says why its report is wrong, and stands here.
#if defined(__SANITIZE_ADDRESS__)

extern "C" const char* __asan_default_options() { return "detect_leaks=1:detect_stack_use_after_return=1"; }
extern "C" const char* __ubsan_default_options() { return "halt_on_error=1:print_stacktrace=1"; }
extern "C" const char* __lsan_default_suppressions() {
  return
      // libfabric 1.17's provider `net` copies the description of every endpoint (600 bytes) and does not free it in
      // fi_close.
      "leak:fi_dupinfo\n";
}

#elif defined(__SANITIZE_THREAD__)

extern "C" const char* __tsan_default_options() { return "second_deadlock_stack=1"; }
extern "C" const char* __tsan_default_suppressions() {
  return
      // Debian's absl records the order of mutexes in a graph under a spin lock of its own, which TSan does not see; it
      // sees the memmove inside.
      "called_from_lib:libabsl_graphcycles_internal.so.20220623\n";
}

#endif
