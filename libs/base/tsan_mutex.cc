// Tells ThreadSanitizer what absl::Mutex does. Debian's libabsl is not instrumented, so that TSan would report every
// use of data under such a mutex as a race. These definitions take the place of the library's for calls from our code,
// call them, and say which thread's past is known to which after it. Compiled into tsan builds only.
//
// While a mutex is released, absl evaluates the conditions of those who wait, on the thread that releases: reads
// that the mutex does protect, in a moment in which TSan has been told that it is gone. They are ignored.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/mutex.h"
#include "libs/base/check.h"

extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);

namespace {

// The library's own definition.
template <typename Function>
Function* Library(const char* mangled) {
  auto* function = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, mangled));
  MOERL_CHECK(function != nullptr);
  return function;
}

class IgnoreReads {
 public:
  IgnoreReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~IgnoreReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};

// Runs `call`, which releases the mutex and has it again when it returns.
template <typename Call>
auto ReleaseAndTake(void* mutex, Call call) {
  __tsan_release(mutex);
  const auto result = [&] {
    const IgnoreReads ignore;
    return call();
  }();
  __tsan_acquire(mutex);
  return result;
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

#define MOERL_MUTEX "_ZN4absl7debian35Mutex"
#define MOERL_COND_VAR "_ZN4absl7debian37CondVar"

void Mutex::Lock() {
  static auto* library = Library<void(Mutex*)>(MOERL_MUTEX "4LockEv");
  library(this);
  __tsan_acquire(this);
}

bool Mutex::TryLock() {
  static auto* library = Library<bool(Mutex*)>(MOERL_MUTEX "7TryLockEv");
  const bool is_locked = library(this);
  if (is_locked) __tsan_acquire(this);
  return is_locked;
}

void Mutex::Unlock() {
  static auto* library = Library<void(Mutex*)>(MOERL_MUTEX "6UnlockEv");
  __tsan_release(this);
  const IgnoreReads ignore;
  library(this);
}

void Mutex::ReaderLock() {
  static auto* library = Library<void(Mutex*)>(MOERL_MUTEX "10ReaderLockEv");
  library(this);
  __tsan_acquire(this);
}

void Mutex::ReaderUnlock() {
  static auto* library = Library<void(Mutex*)>(MOERL_MUTEX "12ReaderUnlockEv");
  __tsan_release(this);
  const IgnoreReads ignore;
  library(this);
}

void Mutex::Await(const Condition& condition) {
  static auto* library = Library<void(Mutex*, const Condition&)>(MOERL_MUTEX "5AwaitERKNS0_9ConditionE");
  ReleaseAndTake(this, [&] {
    library(this, condition);
    return true;
  });
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static auto* library = Library<bool(Mutex*, const Condition&, Duration)>(
      MOERL_MUTEX "16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  return ReleaseAndTake(this, [&] { return library(this, condition, timeout); });
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  static auto* library =
      Library<bool(Mutex*, const Condition&, Time)>(MOERL_MUTEX "17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  return ReleaseAndTake(this, [&] { return library(this, condition, deadline); });
}

void Mutex::LockWhen(const Condition& condition) {
  static auto* library = Library<void(Mutex*, const Condition&)>(MOERL_MUTEX "8LockWhenERKNS0_9ConditionE");
  {
    const IgnoreReads ignore;
    library(this, condition);
  }
  __tsan_acquire(this);
}

void CondVar::Wait(Mutex* mutex) {
  static auto* library = Library<void(CondVar*, Mutex*)>(MOERL_COND_VAR "4WaitEPNS0_5MutexE");
  ReleaseAndTake(mutex, [&] {
    library(this, mutex);
    return true;
  });
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static auto* library =
      Library<bool(CondVar*, Mutex*, Duration)>(MOERL_COND_VAR "15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
  return ReleaseAndTake(mutex, [&] { return library(this, mutex, timeout); });
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static auto* library =
      Library<bool(CondVar*, Mutex*, Time)>(MOERL_COND_VAR "16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
  return ReleaseAndTake(mutex, [&] { return library(this, mutex, deadline); });
}

#undef MOERL_MUTEX
#undef MOERL_COND_VAR

ABSL_NAMESPACE_END
}  // namespace absl
