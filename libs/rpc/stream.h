#ifndef MOERL_LIBS_RPC_STREAM_H_
#define MOERL_LIBS_RPC_STREAM_H_

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/client_callback.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "libs/rpc/status.h"

// Streams over gRPC's callback API that any thread may write to, with a bounded queue in front of the
// one write that gRPC allows at a time. They keep gRPC's rules so that callers need not know them:
// one read and one write in flight, Finish once, nothing after OnDone, nothing blocks, nothing leaks.
//
// Ownership: Start() hands a stream to gRPC, which keeps it alive until the call is over; any thread may hold
// the shared_ptr for longer, its Send() then returns false. Hooks run on gRPC's threads, OnMessage one at a
// time; none of them may block. A hook may call any method of its stream.
namespace moerl::rpc {

namespace internal {

// Keeps a hook from running on two threads at once: a call while it runs makes the running one go round again.
class SerialHook {
 public:
  template <class Hook>
  void Run(Hook hook) {
    if (num_wanted_.fetch_add(1, std::memory_order_acq_rel) != 0) return;
    int num_done = 0;
    do {
      num_done = num_wanted_.load(std::memory_order_acquire);
      hook();
    } while (num_wanted_.fetch_sub(num_done, std::memory_order_acq_rel) != num_done);
  }

 private:
  std::atomic<int> num_wanted_ = 0;
};

}  // namespace internal

// ---------------------------------------------------------------------------------------------------
// What the two kinds of served streams share: the queue in front of the write, and the end of the call.
template <class Reactor, class Response>
class QueuedWriter : public Reactor {
 public:
  explicit QueuedWriter(size_t queue_max) : queue_max_(queue_max) {}

  // Queues `message`. False, and nothing queued, when the call is over or ending, or `queue_max` messages wait
  // for a slow reader: then either stop producing until OnDrained, or End(RESOURCE_EXHAUSTED).
  bool Send(Response message) {
    absl::MutexLock lock(&mutex_);
    if (end_.has_value() || queue_.size() >= queue_max_) return false;
    queue_.push_back(std::move(message));
    Pump();
    return true;
  }

  // Ends the call with `status` after everything queued is written. The first End counts.
  void End(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (end_.has_value()) return;
    end_ = ToGrpc(status);
    Pump();
  }

  // True once the call has been ended or cancelled; nothing more can be sent.
  bool is_over() const {
    absl::MutexLock lock(&mutex_);
    return end_.has_value();
  }

 protected:
  // Runs `action` unless the call is ending: gRPC must see nothing of a call after its Finish.
  template <class Action>
  void IfOpen(Action action) {
    absl::MutexLock lock(&mutex_);
    if (!is_finished_) action();
  }

  // The queue has become empty: more may be sent. Never runs on two threads at once.
  virtual void OnDrained() {}
  // The client has gone away or cancelled, or the deadline has passed.
  virtual void OnCancelled() {}
  // The call is over; the last hook.
  virtual void OnOver() {}

 private:
  template <class Stream>
  friend auto Start(std::shared_ptr<Stream> stream);

  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (is_writing_ || is_finished_) return;
    if (!queue_.empty()) {
      is_writing_ = true;
      this->StartWrite(&queue_.front());
    } else if (end_.has_value()) {
      is_finished_ = true;
      this->Finish(*end_);
    }
  }

  void OnWriteDone(bool ok) final {
    bool is_drained = false;
    {
      absl::MutexLock lock(&mutex_);
      is_writing_ = false;
      queue_.pop_front();
      if (!ok) Abandon();
      Pump();
      is_drained = queue_.empty() && !end_.has_value();
    }
    if (is_drained) drained_.Run([this] { OnDrained(); });
  }

  void OnCancel() final {
    {
      absl::MutexLock lock(&mutex_);
      Abandon();
      Pump();
    }
    OnCancelled();
  }

  void OnDone() final {
    OnOver();
    const std::shared_ptr<void> last = std::move(self_);
  }

  // Drops what waits (not the message being written) and ends the call.
  void Abandon() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    queue_.erase(queue_.begin() + (is_writing_ ? 1 : 0), queue_.end());
    if (!end_.has_value()) end_ = grpc::Status::CANCELLED;
  }

  const size_t queue_max_;
  internal::SerialHook drained_;
  std::shared_ptr<void> self_;  // set by Start before gRPC sees the reactor, taken by OnDone
  mutable absl::Mutex mutex_;
  std::deque<Response> queue_ ABSL_GUARDED_BY(mutex_);  // the front is being written when is_writing_
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool is_writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_finished_ ABSL_GUARDED_BY(mutex_) = false;
};

// A server-streaming call. The method handler derives from it and writes
//   return rpc::Start(std::make_shared<MyStream>(...));
template <class Response>
class ServerStream : public QueuedWriter<grpc::ServerWriteReactor<Response>, Response> {
 public:
  using QueuedWriter<grpc::ServerWriteReactor<Response>, Response>::QueuedWriter;
};

// A bidirectional call, served. Reads one message at a time: the next is asked for when OnMessage returns
// true, or by ReadNext() later, which is how a receiver that is full slows its sender.
template <class Request, class Response>
class ServerBidiStream : public QueuedWriter<grpc::ServerBidiReactor<Request, Response>, Response> {
 public:
  using QueuedWriter<grpc::ServerBidiReactor<Request, Response>, Response>::QueuedWriter;

  // Asks for the next message, after or in an OnMessage that returned false. At most one is outstanding. Any thread,
  // also before that OnMessage has returned; does nothing once the call is over.
  void ReadNext() {
    Turn turn = Turn::kIdle;
    while (true) {
      if (turn == Turn::kReading || turn == Turn::kWanted) return;
      const Turn next = turn == Turn::kIdle ? Turn::kReading : Turn::kWanted;
      if (!turn_.compare_exchange_weak(turn, next, std::memory_order_acq_rel)) continue;
      if (next == Turn::kReading) Read();
      return;
    }
  }

 protected:
  // Takes one message (may be moved from). True asks for the next.
  virtual bool OnMessage(Request& request) = 0;
  // The client has said that it sends no more. By default the call ends with OK.
  virtual void OnHalfClosed() { this->End(absl::OkStatus()); }

 private:
  // Whose turn it is: nobody's, gRPC's with a read, OnMessage's, or OnMessage's while the next one is asked for
  // already.
  enum class Turn { kIdle, kReading, kTaking, kWanted };

  void Read() {
    this->IfOpen([this] { this->StartRead(&request_); });
  }

  void OnReadDone(bool ok) final {
    if (!ok) {  // it stays kReading: nothing can be read any more
      if (!this->is_over()) OnHalfClosed();
      return;
    }
    turn_.store(Turn::kTaking, std::memory_order_release);
    if (!this->is_over() && OnMessage(request_)) turn_.store(Turn::kWanted, std::memory_order_release);
    Turn turn = Turn::kTaking;
    if (turn_.compare_exchange_strong(turn, Turn::kIdle, std::memory_order_acq_rel)) return;
    turn_.store(Turn::kReading, std::memory_order_release);
    Read();
  }

  Request request_;  // owned by the read in flight, else by OnMessage
  std::atomic<Turn> turn_ = Turn::kIdle;
};

// Gives a server's stream to gRPC: returns the reactor that the method handler returns.
template <class Stream>
auto Start(std::shared_ptr<Stream> stream) {
  Stream* reactor = stream.get();
  if constexpr (requires { reactor->ReadNext(); }) reactor->ReadNext();
  reactor->self_ = std::move(stream);
  return reactor;
}

// A stream that only says no: return rpc::Refuse<FooResponse>(status);
template <class Response>
grpc::ServerWriteReactor<Response>* Refuse(const absl::Status& status) {
  auto stream = std::make_shared<ServerStream<Response>>(0);
  stream->End(status);
  return Start(std::move(stream));
}

// The same for a bidirectional call: return rpc::RefuseBidi<FooRequest, FooResponse>(status);
template <class Request, class Response>
grpc::ServerBidiReactor<Request, Response>* RefuseBidi(const absl::Status& status) {
  class Refused final : public ServerBidiStream<Request, Response> {
   public:
    Refused() : ServerBidiStream<Request, Response>(0) {}
    bool OnMessage(Request&) override { return false; }
  };
  auto stream = std::make_shared<Refused>();
  stream->End(status);
  return Start(std::static_pointer_cast<Refused>(stream));
}

// ---------------------------------------------------------------------------------------------------
// ClientBidiStream: the client's side of a bidirectional call.
//
//   auto stream = std::make_shared<MyStream>(...);                   // derives from ClientBidiStream<Q, A>
//   stub->async()->Work(&stream->context(), stream.get());
//   rpc::StartClient(stream);
//
// Exactly one OnOver(status) follows, whatever happens.
template <class Request, class Response>
class ClientBidiStream : public grpc::ClientBidiReactor<Request, Response> {
 public:
  ClientBidiStream(size_t queue_max, std::unique_ptr<grpc::ClientContext> context)
      : queue_max_(queue_max), context_(std::move(context)) {}

  grpc::ClientContext& context() { return *context_; }

  // As in ServerStream: false when the call is over, half-closed, or `queue_max` messages wait.
  bool Send(Request message) {
    absl::MutexLock lock(&mutex_);
    if (is_closed_ || queue_.size() >= queue_max_) return false;
    queue_.push_back(std::move(message));
    Pump();
    return true;
  }

  // Says, after everything queued, that no more will be sent; the server then ends the call.
  void CloseSending() {
    absl::MutexLock lock(&mutex_);
    if (is_closed_) return;
    is_closed_ = true;
    wants_writes_done_ = true;
    Pump();
  }

  // Ends the call from this side; OnOver says CANCELLED. Harmless when it is over.
  void Cancel() { context_->TryCancel(); }

  void ReadNext() {
    absl::MutexLock lock(&mutex_);
    if (is_reading_ || reads_ended_) return;
    is_reading_ = true;
    this->StartRead(&response_);
  }

  bool is_over() const {
    absl::MutexLock lock(&mutex_);
    return is_over_;
  }

 protected:
  // Takes one message (may be moved from). True asks for the next; after false nothing is read, nor is the end of
  // the call noticed, until ReadNext().
  virtual bool OnMessage(Response& response) = 0;
  virtual void OnDrained() {}
  virtual void OnOver(const absl::Status& status) = 0;

 private:
  template <class Stream>
  friend void StartClient(std::shared_ptr<Stream> stream);

  void Begin(std::shared_ptr<void> self) {
    self_ = std::move(self);
    // Sends come from outside of reactions until reading has ended: gRPC must not call OnDone before.
    this->AddHold();
    {
      absl::MutexLock lock(&mutex_);
      is_started_ = true;
      Pump();
    }
    ReadNext();
    this->StartCall();
  }

  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!is_started_ || is_writing_ || reads_ended_) return;
    if (!queue_.empty()) {
      is_writing_ = true;
      this->StartWrite(&queue_.front());
    } else if (wants_writes_done_) {
      wants_writes_done_ = false;
      this->StartWritesDone();
    }
  }

  void OnReadDone(bool ok) final {
    if (!ok) {
      {
        absl::MutexLock lock(&mutex_);
        is_reading_ = false;
        reads_ended_ = true;
        is_closed_ = true;
        queue_.erase(queue_.begin() + (is_writing_ ? 1 : 0), queue_.end());
      }
      this->RemoveHold();
      return;
    }
    {
      absl::MutexLock lock(&mutex_);
      is_reading_ = false;
    }
    if (OnMessage(response_)) ReadNext();
  }

  void OnWriteDone(bool ok) final {
    bool is_drained = false;
    {
      absl::MutexLock lock(&mutex_);
      is_writing_ = false;
      queue_.pop_front();
      if (!ok) {  // The call has ended; the read that is or will be asked for says so.
        is_closed_ = true;
        queue_.clear();
        wants_writes_done_ = false;
      }
      Pump();
      is_drained = ok && queue_.empty() && !is_closed_;
    }
    if (!ok) return ReadNext();
    if (is_drained) drained_.Run([this] { OnDrained(); });
  }

  void OnDone(const grpc::Status& status) final {
    {
      absl::MutexLock lock(&mutex_);
      is_over_ = true;
    }
    OnOver(FromGrpc(status));
    const std::shared_ptr<void> last = std::move(self_);
  }

  const size_t queue_max_;
  internal::SerialHook drained_;
  const std::unique_ptr<grpc::ClientContext> context_;
  std::shared_ptr<void> self_;
  Response response_;
  mutable absl::Mutex mutex_;
  std::deque<Request> queue_ ABSL_GUARDED_BY(mutex_);
  bool is_started_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool wants_writes_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool reads_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_over_ ABSL_GUARDED_BY(mutex_) = false;
};

template <class Stream>
void StartClient(std::shared_ptr<Stream> stream) {
  Stream* reactor = stream.get();
  reactor->Begin(std::move(stream));
}

// ---------------------------------------------------------------------------------------------------
// ClientReadStream: the client's side of a server-streaming call (WatchVersions, Generate). Started by
//   stub->async()->WatchVersions(&stream->context(), &request, stream.get());  rpc::StartClient(stream);
// `request` must live until OnOver.
template <class Response>
class ClientReadStream : public grpc::ClientReadReactor<Response> {
 public:
  explicit ClientReadStream(std::unique_ptr<grpc::ClientContext> context) : context_(std::move(context)) {}

  grpc::ClientContext& context() { return *context_; }
  void Cancel() { context_->TryCancel(); }

  // Asks for the next message after an OnMessage that returned false.
  void ReadNext() {
    absl::MutexLock lock(&mutex_);
    if (is_reading_ || reads_ended_) return;
    is_reading_ = true;
    this->StartRead(&response_);
  }

 protected:
  virtual bool OnMessage(Response& response) = 0;
  virtual void OnOver(const absl::Status& status) = 0;

 private:
  template <class Stream>
  friend void StartClient(std::shared_ptr<Stream> stream);

  void Begin(std::shared_ptr<void> self) {
    self_ = std::move(self);
    this->AddHold();
    ReadNext();
    this->StartCall();
  }

  void OnReadDone(bool ok) final {
    {
      absl::MutexLock lock(&mutex_);
      is_reading_ = false;
      reads_ended_ = !ok;
    }
    if (!ok) return this->RemoveHold();
    if (OnMessage(response_)) ReadNext();
  }

  void OnDone(const grpc::Status& status) final {
    OnOver(FromGrpc(status));
    const std::shared_ptr<void> last = std::move(self_);
  }

  const std::unique_ptr<grpc::ClientContext> context_;
  std::shared_ptr<void> self_;
  Response response_;
  absl::Mutex mutex_;
  bool is_reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool reads_ended_ ABSL_GUARDED_BY(mutex_) = false;
};

// Finishes a unary call: return rpc::Reply(context, status);
inline grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_STREAM_H_
