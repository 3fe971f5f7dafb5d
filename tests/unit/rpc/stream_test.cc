#include "libs/rpc/stream.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "libs/rpc/channel.h"
#include "libs/rpc/server.h"
#include "moerl/v1/experience.grpc.pb.h"
#include "moerl/v1/rollout.grpc.pb.h"

namespace moerl::rpc {
namespace {

std::atomic<int> num_live_streams = 0;

// Echoes every renewal as a credit; refuses a hello. With `asks_elsewhere` it asks for the next message on another
// thread, which is done before OnMessage has returned.
class EchoStream final : public ServerBidiStream<v1::WorkRequest, v1::WorkResponse> {
 public:
  EchoStream(size_t queue_max, bool asks_elsewhere) : ServerBidiStream(queue_max), asks_elsewhere_(asks_elsewhere) {
    ++num_live_streams;
  }
  ~EchoStream() override { --num_live_streams; }

 private:
  bool OnMessage(v1::WorkRequest& request) override {
    if (request.has_hello()) {
      End(absl::FailedPreconditionError("no hello here"));
      return false;
    }
    v1::WorkResponse response;
    response.mutable_credit()->set_num_bytes(request.demand().num_samples());
    if (!Send(std::move(response))) End(absl::ResourceExhaustedError("slow reader"));
    if (asks_elsewhere_) std::thread([this] { ReadNext(); }).join();
    return !asks_elsewhere_;
  }

  const bool asks_elsewhere_;
};

class Experience final : public v1::ExperienceService::CallbackService {
 public:
  grpc::ServerBidiReactor<v1::WorkRequest, v1::WorkResponse>* Work(grpc::CallbackServerContext*) override {
    if (refuse) return RefuseBidi<v1::WorkRequest, v1::WorkResponse>(absl::UnavailableError("not now"));
    return Start(std::make_shared<EchoStream>(1000, asks_elsewhere));
  }
  bool refuse = false;
  bool asks_elsewhere = false;
};

// Writes until its queue is full, then goes on whenever it has drained; stops after `total`.
class CountingStream final : public ServerStream<v1::GenerateResponse> {
 public:
  explicit CountingStream(uint32_t total) : ServerStream(4), total_(total) { ++num_live_streams; }
  ~CountingStream() override { --num_live_streams; }
  void Fill() {
    while (next_ < total_) {
      v1::GenerateResponse response;
      response.set_sample_index(next_);
      response.mutable_complete()->set_request_id(std::string(10000, 'x'));
      if (!Send(std::move(response))) return;
      ++next_;
    }
    End(absl::OkStatus());
  }
  static inline std::atomic<uint32_t> num_produced = 0;

 private:
  void OnDrained() override {
    Fill();
    num_produced = next_;
  }
  const uint32_t total_;
  uint32_t next_ = 0;
};

class Rollout final : public v1::RolloutService::CallbackService {
 public:
  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(grpc::CallbackServerContext*,
                                                           const v1::GenerateRequest* request) override {
    if (request->prompt_token_ids().empty())
      return Refuse<v1::GenerateResponse>(InvalidField("prompt_token_ids", "empty"));
    auto stream = std::make_shared<CountingStream>(request->prompt_token_ids(0));
    stream->Fill();
    return Start(stream);
  }
};

class Worker final : public ClientBidiStream<v1::WorkRequest, v1::WorkResponse> {
 public:
  Worker() : ClientBidiStream(10000, StreamContext()) { ++num_live_streams; }
  ~Worker() override { --num_live_streams; }
  std::vector<uint64_t> received;
  std::atomic<size_t> num_received = 0;
  absl::Status status;
  absl::Notification over;

 private:
  bool OnMessage(v1::WorkResponse& response) override {
    received.push_back(response.credit().num_bytes());
    ++num_received;
    return true;
  }
  void OnOver(const absl::Status& end) override {
    status = end;
    over.Notify();
  }
};

v1::WorkRequest Demand(uint32_t n) {
  v1::WorkRequest request;
  request.mutable_demand()->set_num_samples(n);
  return request;
}

// gRPC's threads let go of a stream a little after its call is over.
void ExpectNothingLeaks() {
  for (int i = 0; i < 500 && num_live_streams != 0; ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(num_live_streams, 0);
}

class StreamTest : public testing::Test {
 protected:
  void SetUp() override {
    ExpectNothingLeaks();  // of the test before
    server_ = Server::Start({.address = "127.0.0.1:0"}, {&experience_, &rollout_}).value();
    channel_ = MakeChannel(server_->address(), {.attempts_max = 1}).value();
    work_ = v1::ExperienceService::NewStub(channel_);
  }

  std::shared_ptr<Worker> OpenWorker() {
    auto worker = std::make_shared<Worker>();
    work_->async()->Work(&worker->context(), worker.get());
    StartClient(worker);
    return worker;
  }

  Experience experience_;
  Rollout rollout_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::ExperienceService::Stub> work_;
};

TEST_F(StreamTest, CarriesEverythingInOrderAndEndsWhenTheClientCloses) {
  auto worker = OpenWorker();
  for (uint32_t i = 0; i < 500; ++i) ASSERT_TRUE(worker->Send(Demand(i)));
  worker->CloseSending();
  EXPECT_FALSE(worker->Send(Demand(0)));
  worker->over.WaitForNotification();
  EXPECT_TRUE(worker->status.ok()) << worker->status;
  ASSERT_EQ(worker->received.size(), 500u);
  for (uint32_t i = 0; i < 500; ++i) EXPECT_EQ(worker->received[i], i);
  EXPECT_FALSE(worker->Send(Demand(0)));
  worker.reset();
  ExpectNothingLeaks();
}

TEST_F(StreamTest, ReadsOnWhenAskedOnAnotherThreadBeforeTheHookHasReturned) {
  experience_.asks_elsewhere = true;
  auto worker = OpenWorker();
  for (uint32_t i = 0; i < 200; ++i) ASSERT_TRUE(worker->Send(Demand(i)));
  worker->CloseSending();
  ASSERT_TRUE(worker->over.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_EQ(worker->received.size(), 200u);
}

TEST_F(StreamTest, EndsOnceWithTheServersStatus) {
  auto worker = OpenWorker();
  v1::WorkRequest hello;
  hello.mutable_hello()->set_worker("w");
  worker->Send(hello);
  worker->over.WaitForNotification();
  EXPECT_EQ(worker->status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(worker->status.message(), "no hello here");
  worker.reset();
  ExpectNothingLeaks();
}

TEST_F(StreamTest, RefusesWithDetails) {
  experience_.refuse = true;
  auto worker = OpenWorker();
  worker->over.WaitForNotification();
  EXPECT_EQ(worker->status.code(), absl::StatusCode::kUnavailable);
  grpc::ClientContext context;
  auto reader = v1::RolloutService::NewStub(channel_)->Generate(&context, {});
  v1::GenerateResponse response;
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(FieldViolations(FromGrpc(reader->Finish())).at(0).field, "prompt_token_ids");
}

TEST_F(StreamTest, SurvivesWritersOnManyThreadsWhileCallsAreCancelled) {
  for (int round = 0; round < 50; ++round) {
    auto worker = OpenWorker();
    std::vector<std::thread> writers;
    for (int t = 0; t < 3; ++t) {
      writers.emplace_back([worker] {
        for (uint32_t i = 0; i < 200; ++i) worker->Send(Demand(i));
      });
    }
    if (round % 2 == 0) worker->Cancel();
    for (auto& writer : writers) writer.join();
    if (round % 2 == 1) worker->Cancel();
    worker->over.WaitForNotification();
  }
  ExpectNothingLeaks();
}

TEST_F(StreamTest, ServesAllToAReaderThatKeepsUp) {
  v1::GenerateRequest request;
  request.add_prompt_token_ids(1000);
  grpc::ClientContext context;
  auto reader = v1::RolloutService::NewStub(channel_)->Generate(&context, request);
  v1::GenerateResponse response;
  uint32_t expected = 0;
  while (reader->Read(&response)) EXPECT_EQ(response.sample_index(), expected++);
  EXPECT_EQ(expected, 1000u);
  EXPECT_TRUE(reader->Finish().ok());
  ExpectNothingLeaks();
}

TEST_F(StreamTest, StopsProducingForAReaderThatNeverReads) {
  v1::GenerateRequest request;
  request.add_prompt_token_ids(1'000'000);
  grpc::ClientContext context;
  auto reader = v1::RolloutService::NewStub(channel_)->Generate(&context, request);
  absl::SleepFor(absl::Seconds(1));
  const uint32_t produced = CountingStream::num_produced;
  EXPECT_LT(produced, 2000u) << "a window of 64 KiB to a few MiB holds a few hundred messages of 10 kB";
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(CountingStream::num_produced, produced);
  context.TryCancel();
  EXPECT_FALSE(reader->Finish().ok());
  ExpectNothingLeaks();
}

// The call is then the last to hold its channel, and lets it go on one of gRPC's threads. No server here, whose use of
// those threads would keep them.
TEST(ClientStream, MayOutliveItsChannel) {
  ExpectNothingLeaks();
  for (int round = 0; round < 100; ++round) {
    auto channel = MakeChannel("127.0.0.1:9", {.attempts_max = 1}).value();
    auto worker = std::make_shared<Worker>();
    v1::ExperienceService::NewStub(channel)->async()->Work(&worker->context(), worker.get());
    channel.reset();
    StartClient(worker);
    worker->Cancel();
    worker->over.WaitForNotification();
    worker.reset();
    ExpectNothingLeaks();
  }
}

}  // namespace
}  // namespace moerl::rpc
