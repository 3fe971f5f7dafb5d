#include "libs/rpc/server.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <thread>

#include "absl/synchronization/notification.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "libs/rpc/channel.h"
#include "libs/rpc/status.h"
#include "libs/rpc/stream.h"
#include "moerl/v1/environment.grpc.pb.h"

namespace moerl::rpc {
namespace {

using Health = grpc::health::v1::Health;
using grpc::health::v1::HealthCheckResponse;

// Reset answers at once; Step answers when told to.
class SlowEnvironment final : public v1::EnvironmentService::CallbackService {
 public:
  grpc::ServerUnaryReactor* Reset(grpc::CallbackServerContext* context, const v1::ResetRequest* request,
                                  v1::ResetResponse* response) override {
    if (absl::Status refused = server ? server->Admit() : absl::OkStatus(); !refused.ok())
      return Reply(context, refused);
    response->set_episode_id(request->text());
    return Reply(context, absl::OkStatus());
  }

  grpc::ServerUnaryReactor* Step(grpc::CallbackServerContext* context, const v1::StepRequest*,
                                 v1::StepResponse*) override {
    class Reactor : public grpc::ServerUnaryReactor {
     public:
      explicit Reactor(absl::Notification& cancelled) : cancelled_(cancelled) {}
      void OnCancel() override {
        cancelled_.Notify();
        Finish(grpc::Status::CANCELLED);
      }
      void OnDone() override { delete this; }

     private:
      absl::Notification& cancelled_;
    };
    (void)context;
    step = new Reactor(step_cancelled);
    step_started.Notify();
    return step;
  }

  Server* server = nullptr;
  grpc::ServerUnaryReactor* step = nullptr;
  absl::Notification step_started, step_cancelled;
};

class ServerTest : public testing::Test {
 protected:
  void Serve(ServerOptions options = {}) {
    options.address = "127.0.0.1:0";
    auto server = Server::Start(options, {&service_});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    service_.server = server_.get();
    channel_ = MakeChannel(server_->address(), {.attempts_max = 1}).value();
  }

  HealthCheckResponse::ServingStatus CheckHealth(const std::string& name) {
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(name);
    HealthCheckResponse response;
    const grpc::Status status =
        Health::NewStub(channel_)->Check(CallContext(absl::Seconds(5)).get(), request, &response);
    return status.ok() ? response.status() : HealthCheckResponse::UNKNOWN;
  }

  absl::Status CallReset(std::string text = "x") {
    v1::ResetRequest request;
    request.set_text(text);
    v1::ResetResponse response;
    return FromGrpc(
        v1::EnvironmentService::NewStub(channel_)->Reset(CallContext(absl::Seconds(5)).get(), request, &response));
  }

  SlowEnvironment service_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(ServerTest, IsAliveAtOnceAndReadyWhenTold) {
  Serve();
  EXPECT_EQ(CheckHealth(""), HealthCheckResponse::SERVING);
  EXPECT_EQ(CheckHealth("ready"), HealthCheckResponse::NOT_SERVING);
  server_->SetReady(true);
  EXPECT_EQ(CheckHealth("ready"), HealthCheckResponse::SERVING);
  EXPECT_TRUE(CallReset().ok());
}

TEST_F(ServerTest, DrainsInOrder) {
  Serve();
  server_->SetReady(true);
  bool was_told = false;
  server_->OnDrain([&] { was_told = true; });
  v1::StepResponse response;
  grpc::Status step_status;
  std::thread running([&] {
    step_status = v1::EnvironmentService::NewStub(channel_)->Step(CallContext(absl::Seconds(20)).get(), {}, &response);
  });
  service_.step_started.WaitForNotification();

  server_->BeginDrain();
  EXPECT_TRUE(was_told);
  EXPECT_EQ(CheckHealth("ready"), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(CheckHealth(""), HealthCheckResponse::SERVING);
  const absl::Status refused = CallReset();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(RetryDelay(refused), absl::Seconds(1));
  server_->SetReady(true);  // too late
  EXPECT_EQ(CheckHealth("ready"), HealthCheckResponse::NOT_SERVING);

  std::thread finisher([&] {
    absl::SleepFor(absl::Milliseconds(200));
    service_.step->Finish(grpc::Status::OK);
  });
  EXPECT_EQ(server_->Shutdown(absl::Now() + absl::Seconds(10)), 0);
  running.join();
  finisher.join();
  EXPECT_TRUE(step_status.ok()) << step_status.error_message();
}

TEST_F(ServerTest, CancelsAtTheDeadlineOfTheDrainWhatStillRuns) {
  Serve();
  v1::StepResponse response;
  grpc::Status step_status;
  std::thread running([&] {
    step_status = v1::EnvironmentService::NewStub(channel_)->Step(CallContext(absl::Seconds(20)).get(), {}, &response);
  });
  service_.step_started.WaitForNotification();
  EXPECT_EQ(server_->Shutdown(absl::Now() + absl::Milliseconds(100)), 1);
  running.join();
  EXPECT_FALSE(step_status.ok());
  EXPECT_TRUE(service_.step_cancelled.HasBeenNotified());
}

TEST_F(ServerTest, CapsTheDeadlineOfAUnaryCallThatHasNone) {
  Serve({.unary_deadline_max = absl::Milliseconds(200)});
  v1::StepResponse response;
  grpc::ClientContext no_deadline;
  const absl::Time start = absl::Now();
  const grpc::Status status = v1::EnvironmentService::NewStub(channel_)->Step(&no_deadline, {}, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << status.error_message();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_TRUE(service_.step_cancelled.WaitForNotificationWithTimeout(absl::Seconds(5)));
}

TEST_F(ServerTest, RefusesAMessageAboveTheBound) {
  Serve({.limits = {.message_bytes_max = 1 << 20}});
  EXPECT_EQ(CallReset(std::string(2 << 20, 'x')).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(CallReset(std::string(1 << 19, 'x')).ok());
}

TEST_F(ServerTest, DoesNotShareItsPort) {
  Serve();
  SlowEnvironment other;
  const auto second = Server::Start({.address = server_->address()}, {&other});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(second.status().message().find(server_->address()), absl::string_view::npos);
}

TEST_F(ServerTest, SurvivesAClientThatPingsAsOftenAsChannelsDo) {
  WireLimits limits{.keepalive_time = absl::Milliseconds(200), .keepalive_timeout = absl::Seconds(2)};
  Serve({.limits = limits});
  channel_ = MakeChannel(server_->address(), {.limits = limits, .attempts_max = 1}).value();
  ASSERT_TRUE(CallReset().ok());
  absl::SleepFor(absl::Seconds(2));
  EXPECT_EQ(channel_->GetState(false), GRPC_CHANNEL_READY);
  EXPECT_TRUE(CallReset().ok());
}

}  // namespace
}  // namespace moerl::rpc
