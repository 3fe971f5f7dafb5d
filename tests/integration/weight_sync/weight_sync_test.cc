// A real moerl-weight-sync process, published to and read from over loopback, and killed.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libs/base/clock.h"
#include "libs/base/env.h"
#include "libs/base/log.h"
#include "libs/base/process.h"
#include "libs/rpc/channel.h"
#include "libs/rpc/status.h"
#include "libs/weights/publisher.h"
#include "libs/weights/reader.h"
#include "moerl/v1/weight_sync.grpc.pb.h"
#include "services/weight_sync/store.h"

namespace moerl {
namespace {

using ::testing::HasSubstr;
using weights::ElementType;
using weights::LocalVersion;
using weights::Publisher;
using weights::Reader;
using weights::TensorView;

// A model of the demonstration's size and shape: many small tensors. Its bytes are a function of (number, salt).
class Model {
 public:
  Model(int64_t number, uint64_t salt, int num_tensors = 130, uint64_t elements = 4700) {
    for (int t = 0; t < num_tensors; ++t) {
      std::mt19937_64 random(static_cast<uint64_t>(number) * 1'000'003 + salt * 7919 + static_cast<uint64_t>(t));
      bytes_.emplace_back(elements);
      for (uint16_t& element : bytes_.back()) element = static_cast<uint16_t>(random());
    }
    for (int t = 0; t < num_tensors; ++t) {
      tensors_.push_back({.name = absl::StrCat("layers.", t, ".weight"),
                          .type = ElementType::kBf16,
                          .shape = {elements},
                          .data = std::as_bytes(std::span(bytes_[t]))});
    }
  }
  Model(const Model&) = delete;

  const std::vector<TensorView>& tensors() const { return tensors_; }
  uint64_t bytes() const { return bytes_.size() * bytes_[0].size() * 2; }
  bool Equals(const LocalVersion& version) const {
    if (version.tensors().size() != tensors_.size()) return false;
    for (const TensorView& tensor : tensors_) {
      const TensorView* other = version.Find(tensor.name);
      if (other == nullptr ||
          !std::equal(tensor.data.begin(), tensor.data.end(), other->data.begin(), other->data.end())) {
        return false;
      }
    }
    return true;
  }

 private:
  std::vector<std::vector<uint16_t>> bytes_;
  std::vector<TensorView> tensors_;
};

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  close(fd);
  return ntohs(address.sin_port);
}

class WeightSyncTest : public ::testing::Test {
 protected:
  void SetUp() override {
    InitLogging({.level = LogLevel::kError});
    (void)PosixEnv()->RemoveTree(directory_);
    ASSERT_TRUE(PosixEnv()->CreateDirs(directory_).ok());
    std::ofstream(directory_ + "/config.yaml") << "name: weight_sync_test\ntask: {name: reverse}\n";
    StartServer();
    auto channel = rpc::MakeChannel(address_, {});
    ASSERT_TRUE(channel.ok()) << channel.status();
    channel_ = *channel;
  }
  void TearDown() override {
    server_.reset();
    if (getenv("KEEP") == nullptr) (void)PosixEnv()->RemoveTree(directory_);
  }

  void StartServer() {
    auto process = Process::Start(
        {.command = {MOERL_BINARY_DIR "/bin/moerl-weight-sync", "--config", directory_ + "/config.yaml", "--set",
                     "server.listen_address=" + address_, "--set", "server.metrics_address=127.0.0.1:0", "--set",
                     "weight_sync.store_directory=" + store_, "--set", "weight_sync.versions_kept=3"},
         .log_file = directory_ + "/log"});
    ASSERT_TRUE(process.ok()) << process.status();
    server_.emplace(*std::move(process));
  }
  void KillServer() {
    server_->Signal(SIGKILL);
    ASSERT_TRUE(server_->Wait(absl::Seconds(10)));
  }
  std::unique_ptr<Reader> NewReader(weights::ReaderOptions options = {}) {
    return std::make_unique<Reader>(channel_, std::move(options));
  }
  absl::Duration ServerCpuTime() const {
    std::ifstream stat("/proc/" + std::to_string(server_->pid()) + "/stat");
    std::string word;
    std::vector<std::string> words;
    while (stat >> word) words.push_back(word);
    int64_t user = 0, system = 0;  // fields 14 and 15 of proc(5), in ticks
    EXPECT_TRUE(absl::SimpleAtoi(words.at(13), &user) && absl::SimpleAtoi(words.at(14), &system));
    return absl::Seconds(static_cast<double>(user + system) / static_cast<double>(sysconf(_SC_CLK_TCK)));
  }
  uint64_t ServerRssBytes() const {
    std::ifstream status("/proc/" + std::to_string(server_->pid()) + "/status");
    std::string word;
    uint64_t kilobytes = 0;
    while (status >> word) {
      if (word == "VmRSS:") status >> kilobytes;
    }
    return kilobytes << 10;
  }

  const std::string directory_ = testing::TempDir() + "/weight_sync_" + std::to_string(getpid());
  const std::string store_ = directory_ + "/store";
  const std::string address_ = absl::StrCat("127.0.0.1:", FreePort());
  std::optional<Process> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

// Waits until the reader samples from `name`.
::testing::AssertionResult Runs(const Reader& reader, const VersionName& name,
                                absl::Duration timeout = absl::Seconds(20)) {
  const absl::Time give_up_at = absl::Now() + timeout;
  while (absl::Now() < give_up_at) {
    const auto version = reader.Now().version;
    if (version != nullptr && version->name() == name) return ::testing::AssertionSuccess();
    absl::SleepFor(absl::Milliseconds(1));
  }
  return ::testing::AssertionFailure() << "version " << weights::ToString(name)
                                       << " did not arrive: " << reader.Now().status;
}

// Asks for all chunks of the latest version.
v1::FetchChunksRequest WantEverything(v1::WeightSyncService::Stub& stub) {
  v1::GetManifestResponse manifest;
  EXPECT_TRUE(stub.GetManifest(rpc::CallContext(absl::Seconds(5)).get(), {}, &manifest).ok());
  v1::FetchChunksRequest request;
  *request.mutable_wants()->mutable_version() = manifest.manifest().version();
  for (const auto& tensor : manifest.manifest().tensors()) {
    request.mutable_wants()->mutable_chunks()->MergeFrom(tensor.chunks());
  }
  return request;
}

TEST_F(WeightSyncTest, AReaderFlipsToWhatTwoRanksPublished) {
  Publisher leader(channel_), follower(channel_);
  const auto epoch = leader.Acquire("run");
  ASSERT_TRUE(epoch.ok()) << epoch.status();
  follower.UseEpoch(*epoch);
  ASSERT_TRUE(leader.RecordForks({}).ok());
  const auto reader = NewReader();
  std::vector<double> publish_ms, flip_ms;
  for (int64_t number = 0; number < 12; ++number) {
    const Model model(number, 0);
    const std::span<const TensorView> tensors(model.tensors());
    const absl::Time start = absl::Now();
    ASSERT_TRUE(leader.Begin(number, 2, model.bytes()).ok());
    std::string shards[2];
    std::thread other([&] { shards[1] = follower.PutShard(number, 1, tensors.subspan(70)).value(); });
    shards[0] = leader.PutShard(number, 0, tensors.first(70)).value();
    other.join();
    const auto committed = leader.Commit(number, shards, "{\"model_type\":\"x\"}", "cpu");
    ASSERT_TRUE(committed.ok()) << committed.status();
    publish_ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
    ASSERT_TRUE(Runs(*reader, committed->name));
    flip_ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
    const auto version = reader->Now().version;
    EXPECT_TRUE(model.Equals(*version));
    EXPECT_EQ(version->manifest().model_config_json, "{\"model_type\":\"x\"}");
    EXPECT_EQ(version->manifest().root, committed->root);
  }
  std::sort(publish_ms.begin(), publish_ms.end());
  std::sort(flip_ms.begin(), flip_ms.end());
  std::printf("1.2 MB in 130 tensors, median ms: published %.1f, running at the reader %.1f\n", publish_ms[6],
              flip_ms[6]);
  EXPECT_EQ(leader.LatestReady().value(), (VersionName{*epoch, 11}));
}

TEST_F(WeightSyncTest, AForkMovesTheReaderDown) {
  Publisher publisher(channel_);
  const int64_t first = publisher.Acquire("run").value();
  for (int64_t number = 4; number < 7; ++number) {
    ASSERT_TRUE(publisher.Publish(number, Model(number, 0).tensors(), "", "").ok());
  }
  const auto reader = NewReader();
  ASSERT_TRUE(Runs(*reader, {first, 6}));
  const auto held = reader->Now().version;

  Publisher resumed(channel_);
  const int64_t second = resumed.Acquire("run").value();
  const std::vector<Fork> forks = {{.epoch = second, .step = 5}};
  ASSERT_TRUE(resumed.RecordForks(forks).ok());
  ASSERT_TRUE(Runs(*reader, {first, 5}));
  EXPECT_EQ(reader->Now().forks, forks);
  EXPECT_TRUE(Model(6, 0).Equals(*held)) << "who holds the old one may go on reading it";
  EXPECT_EQ(publisher.Publish(7, Model(7, 0).tensors(), "", "").status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(resumed.Publish(6, Model(6, 1).tensors(), "", "").ok());
  ASSERT_TRUE(Runs(*reader, {second, 6}));
  EXPECT_TRUE(Model(6, 1).Equals(*reader->Now().version));
}

TEST_F(WeightSyncTest, AReaderKeepsItsVersionWhenItCannotRunTheNext) {
  Publisher publisher(channel_);
  const int64_t epoch = publisher.Acquire("run").value();
  ASSERT_TRUE(publisher.Publish(0, Model(0, 0).tensors(), "", "cpu").ok());
  const auto reader = NewReader({.check = [](const weights::Manifest& manifest) {
    if (manifest.numerics_fingerprint == "cpu") return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("numerics: this process is cpu, the version is ", manifest.numerics_fingerprint));
  }});
  ASSERT_TRUE(Runs(*reader, {epoch, 0}));
  ASSERT_TRUE(publisher.Publish(1, Model(1, 0).tensors(), "", "cuda").ok());
  for (int i = 0; i < 200 && reader->Now().status.ok(); ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_THAT(reader->Now().status.message(), HasSubstr("this process is cpu, the version is cuda"));
  EXPECT_EQ(reader->Now().version->name(), (VersionName{epoch, 0}));
  ASSERT_TRUE(publisher.Publish(2, Model(2, 0).tensors(), "", "cpu").ok());
  ASSERT_TRUE(Runs(*reader, {epoch, 2}));
  EXPECT_TRUE(reader->Now().status.ok());
}

TEST_F(WeightSyncTest, ADamagedChunkNeverReachesAReader) {
  Publisher publisher(channel_);
  const int64_t epoch = publisher.Acquire("run").value();
  const auto reader = NewReader();
  ASSERT_TRUE(publisher.Publish(0, Model(0, 0, 3, 1 << 18).tensors(), "", "").ok());
  ASSERT_TRUE(Runs(*reader, {epoch, 0}));
  server_->Signal(SIGTERM);
  ASSERT_EQ(server_->Wait(absl::Seconds(10))->code, 0);
  {
    auto store = Store::Open({.directory = store_, .versions_kept = 3}, PosixEnv(), SystemClock());
    ASSERT_TRUE(store.ok()) << store.status();
  }
  const std::vector<std::string> before = PosixEnv()->List(store_ + "/chunks").value();
  StartServer();
  ASSERT_TRUE(publisher.Publish(1, Model(1, 0, 3, 1 << 18).tensors(), "", "").ok());
  ASSERT_TRUE(Runs(*reader, {epoch, 1}));

  const auto late = [&] {
    const std::vector<std::string> names = PosixEnv()->List(store_ + "/chunks").value();
    for (const std::string& name : names) {
      if (!std::count(before.begin(), before.end(), name)) return store_ + "/chunks/" + name;
    }
    return std::string();
  }();
  std::fstream(late, std::ios::in | std::ios::out).seekp(3).put('!');
  const auto newcomer = NewReader();
  const absl::Status status = newcomer->WaitReady(absl::Seconds(1));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("DATA_LOSS"));
  EXPECT_GT(newcomer->Stats().num_verify_failures, 0);

  Publisher again(channel_);  // a trainer that resumes publishes its version first, and so mends it
  ASSERT_TRUE(again.Acquire("run").ok());
  ASSERT_TRUE(again.Publish(1, Model(1, 0, 3, 1 << 18).tensors(), "", "").ok());
  ASSERT_TRUE(Runs(*newcomer, {epoch, 1}));
  EXPECT_TRUE(Model(1, 0, 3, 1 << 18).Equals(*newcomer->Now().version));
}

TEST_F(WeightSyncTest, AReaderThatIsKilledGoesOnWhereItStopped) {
  const Model model(0, 0, 24, 1 << 20);  // 48 MiB
  Publisher publisher(channel_);
  const int64_t epoch = publisher.Acquire("run").value();
  ASSERT_TRUE(publisher.Publish(0, model.tensors(), "", "").ok());
  const std::string local = directory_ + "/reader";
  uint64_t fetched = 0;
  for (int round = 0; round < 4; ++round) {  // the file is all that a killed process leaves
    auto reader = NewReader({.directory = local});
    for (int i = 0; i < 1000 && reader->Stats().fetched_bytes < (8 << 20); ++i) absl::SleepFor(absl::Milliseconds(1));
    const uint64_t in_round = reader->Stats().fetched_bytes;
    reader.reset();
    fetched += in_round;
  }
  auto reader = NewReader({.directory = local});
  ASSERT_TRUE(Runs(*reader, {epoch, 0}));
  EXPECT_TRUE(model.Equals(*reader->Now().version));
  EXPECT_GT(fetched, 0u);
  EXPECT_LT(reader->Stats().fetched_bytes, model.bytes()) << "nothing was kept of what came before";
  EXPECT_LE(fetched + reader->Stats().fetched_bytes, model.bytes() + (4 << 20));
  reader = NewReader({.directory = local});
  ASSERT_TRUE(Runs(*reader, {epoch, 0}));
  EXPECT_EQ(reader->Stats().fetched_bytes, 0u) << "all of it is here";
}

TEST_F(WeightSyncTest, ReadersThatDoNotReadBoundTheServersMemory) {
  const Model model(0, 0, 64, 1 << 20);  // 128 MiB
  Publisher publisher(channel_);
  const int64_t epoch = publisher.Acquire("run").value();
  ASSERT_TRUE(publisher.Publish(0, model.tensors(), "", "").ok());
  auto stub = v1::WeightSyncService::NewStub(channel_);
  const v1::FetchChunksRequest wants = WantEverything(*stub);
  const uint64_t before = ServerRssBytes();
  struct Slow {
    std::unique_ptr<grpc::ClientContext> context = rpc::CallContext(absl::Seconds(60));
    std::unique_ptr<grpc::ClientReaderWriter<v1::FetchChunksRequest, v1::FetchChunksResponse>> stream;
  };
  std::vector<Slow> readers(12);
  for (Slow& reader : readers) {
    reader.stream = stub->FetchChunks(reader.context.get());
    v1::FetchChunksRequest credit;
    credit.set_credit_bytes(1 << 30);
    ASSERT_TRUE(reader.stream->Write(credit));
    ASSERT_TRUE(reader.stream->Write(wants));
  }
  absl::SleepFor(absl::Seconds(1));
  const uint64_t grown = ServerRssBytes() - std::min(before, ServerRssBytes());
  std::printf("12 readers that do not read, 128 MiB wanted by each: the server grew by %.1f MiB\n",
              static_cast<double>(grown) / (1 << 20));
#if defined(__SANITIZE_ADDRESS__)
  constexpr uint64_t kReaderBytesMax = 20 << 20;  // it pads blocks and keeps freed ones
#else
  constexpr uint64_t kReaderBytesMax = 5 << 20;
#endif
  EXPECT_LT(grown, readers.size() * kReaderBytesMax) << "2 MiB and a chunk each, and the transport's windows";
  const auto reader = NewReader();  // and others are served meanwhile
  ASSERT_TRUE(Runs(*reader, {epoch, 0}));
  for (Slow& slow : readers) slow.context->TryCancel();
}

TEST_F(WeightSyncTest, ReadersThatGoAwayMidwayLeaveNoWorkBehind) {
  const Model model(0, 0, 16, 1 << 19);
  Publisher publisher(channel_);
  ASSERT_TRUE(publisher.Acquire("run").ok());
  ASSERT_TRUE(publisher.Publish(0, model.tensors(), "", "").ok());
  auto stub = v1::WeightSyncService::NewStub(channel_);
  const v1::FetchChunksRequest wants = WantEverything(*stub);
  v1::FetchChunksRequest credit;
  credit.set_credit_bytes(1 << 30);
  for (int round = 0; round < 5; ++round) {
    std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
    std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::FetchChunksRequest, v1::FetchChunksResponse>>> streams;
    for (int i = 0; i < 40; ++i) {  // more than the disk's threads take at once
      contexts.push_back(rpc::CallContext(absl::Seconds(20)));
      streams.push_back(stub->FetchChunks(contexts.back().get()));
      ASSERT_TRUE(streams.back()->Write(credit));
      ASSERT_TRUE(streams.back()->Write(wants));
    }
    for (auto& context : contexts) context->TryCancel();
    for (auto& stream : streams) EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  absl::SleepFor(absl::Milliseconds(500));
  const absl::Duration before = ServerCpuTime();
  absl::SleepFor(absl::Seconds(1));
  EXPECT_LT(ServerCpuTime() - before, absl::Milliseconds(200));
}

TEST_F(WeightSyncTest, CreditsAreNeverExceeded) {
  const Model model(0, 0, 4, 1 << 20);
  Publisher publisher(channel_);
  ASSERT_TRUE(publisher.Acquire("run").ok());
  ASSERT_TRUE(publisher.Publish(0, model.tensors(), "", "").ok());
  auto stub = v1::WeightSyncService::NewStub(channel_);
  v1::FetchChunksRequest message = WantEverything(*stub);
  const auto context = rpc::CallContext(absl::Seconds(20));
  auto stream = stub->FetchChunks(context.get());
  ASSERT_TRUE(stream->Write(message));
  message.Clear();
  message.set_credit_bytes((3 << 20) + 5);
  ASSERT_TRUE(stream->Write(message));
  stream->WritesDone();
  int num_received = 0;
  v1::FetchChunksResponse response;
  while (stream->Read(&response)) ++num_received;
  EXPECT_EQ(num_received, 3);
  const absl::Status status = rpc::FromGrpc(stream->Finish());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("credit_bytes"));
}

TEST_F(WeightSyncTest, BadRequestsNameTheField) {
  auto stub = v1::WeightSyncService::NewStub(channel_);
  const auto context = [] { return rpc::CallContext(absl::Seconds(5)); };
  v1::AcquirePublisherResponse acquired;
  const absl::Status no_run = rpc::FromGrpc(stub->AcquirePublisher(context().get(), {}, &acquired));
  EXPECT_EQ(no_run.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(no_run.message(), HasSubstr("run_id"));

  v1::BeginVersionRequest begin;
  begin.set_publisher_epoch(7);
  begin.set_num_shards(1);
  v1::BeginVersionResponse begun;
  const absl::Status no_publisher = rpc::FromGrpc(stub->BeginVersion(context().get(), begin, &begun));
  EXPECT_EQ(no_publisher.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(no_publisher.message(), HasSubstr("publisher_epoch"));

  v1::GetManifestRequest get;
  v1::GetManifestResponse got;
  EXPECT_EQ(stub->GetManifest(context().get(), get, &got).error_code(), grpc::StatusCode::NOT_FOUND);
  get.mutable_version()->set_epoch(3);
  EXPECT_EQ(stub->GetManifest(context().get(), get, &got).error_code(), grpc::StatusCode::NOT_FOUND);

  v1::CommitVersionRequest commit;
  v1::CommitVersionResponse committed;
  EXPECT_EQ(stub->CommitVersion(context().get(), commit, &committed).error_code(), grpc::StatusCode::INVALID_ARGUMENT);

  v1::AcquireLeaseRequest lease;
  lease.set_holder("x");
  lease.set_duration_ms(5);
  v1::AcquireLeaseResponse leased;
  const absl::Status short_lease = rpc::FromGrpc(stub->AcquireLease(context().get(), lease, &leased));
  EXPECT_THAT(short_lease.message(), HasSubstr("duration_ms"));

  const auto put_context = context();
  auto put = stub->PutChunks(put_context.get());
  v1::PutChunksRequest offer;
  offer.mutable_offer()->add_chunks()->set_sha256(std::string(32, 'x'));
  offer.mutable_offer()->mutable_chunks(0)->set_num_bytes(1);
  put->Write(offer);
  const absl::Status no_header = rpc::FromGrpc(put->Finish());
  EXPECT_EQ(no_header.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(no_header.message(), HasSubstr("header"));
}

// The server is killed at random moments while a trainer publishes and readers follow. Every answered commit stays,
// every version a reader runs is whole, and at the end no READY version on disk misses a byte.
TEST_F(WeightSyncTest, FortyKillsLoseNothing) {
  const uint64_t seed = 20261130;
  std::printf("seed %lu\n", seed);
  std::mt19937_64 random(seed);
  std::atomic<bool> is_over = false;
  std::atomic<int64_t> last_committed = -1, num_fenced = 0;

  std::thread trainer([&] {
    // Publishes on; now and then a new incarnation takes over and publishes its resumed version first.
    std::mt19937_64 choice(seed + 1);
    auto publisher = std::make_unique<Publisher>(channel_);
    if (!publisher->Acquire("run").ok()) return;
    for (int64_t number = 0; !is_over;) {
      if (choice() % 8 == 0 && number > 0) {
        publisher = std::make_unique<Publisher>(channel_);
        if (!publisher->Acquire("run").ok() || !publisher->RecordForks({}).ok()) continue;
        --number;
      }
      const Model model(number, 0, 40, 3000);
      const auto committed = publisher->Publish(number, model.tensors(), "", "");
      if (!committed.ok()) {
        num_fenced += absl::IsFailedPrecondition(committed.status());
        continue;
      }
      last_committed = std::max(last_committed.load(), number);
      ++number;
    }
  });
  std::vector<std::unique_ptr<Reader>> readers;
  readers.push_back(NewReader());
  readers.push_back(NewReader({.directory = directory_ + "/reader"}));
  int num_checked = 0;
  for (int round = 0; round < 40; ++round) {
    // At least every fourth round there is a commit in between, however slow the machine.
    const int64_t wanted = last_committed + (round % 4 == 0);
    for (int i = 0; i < 2000 && last_committed < wanted; ++i) absl::SleepFor(absl::Milliseconds(5));
    absl::SleepFor(absl::Microseconds(random() % 150'000));
    KillServer();
    const int64_t promised = last_committed;
    StartServer();
    for (const auto& reader : readers) {
      const auto version = reader->Now().version;
      if (version == nullptr) continue;
      ++num_checked;
      ASSERT_TRUE(Model(version->name().number, 0, 40, 3000).Equals(*version)) << weights::ToString(version->name());
    }
    const auto latest = Publisher(channel_).LatestReady();
    ASSERT_TRUE(latest.ok() || promised < 0) << latest.status();
    ASSERT_GE(latest.value_or(VersionName{.number = -1}).number, promised) << "an answered commit is gone";
    if (round % 10 == 9) readers[1] = NewReader({.directory = directory_ + "/reader"});
  }
  is_over = true;
  trainer.join();
  const VersionName latest = Publisher(channel_).LatestReady().value();
  EXPECT_GE(latest.number, 8);
  for (const auto& reader : readers) {
    EXPECT_TRUE(Runs(*reader, latest));
    EXPECT_TRUE(Model(latest.number, 0, 40, 3000).Equals(*reader->Now().version));
  }
  std::printf("%ld versions over 40 kills, %d looks at readers, %ld publishes begun again\n", latest.number + 1,
              num_checked, num_fenced.load());

  KillServer();
  auto store = Store::Open({.directory = store_, .versions_kept = 3}, PosixEnv(), SystemClock());
  ASSERT_TRUE(store.ok()) << store.status();
  int num_ready = 0;
  for (const VersionInfo& info : (*store)->List()) {
    if (info.row.state != VersionState::kReady) continue;
    ++num_ready;
    const auto manifest = weights::ParseManifest((*store)->GetManifest(info.row.name).value());
    ASSERT_TRUE(manifest.ok()) << manifest.status();
    auto staging = weights::Staging::Begin(*manifest, "", nullptr).value();
    const std::vector<weights::ChunkRef> missing = staging->Missing();
    for (const weights::ChunkRef& ref : missing) {
      const auto data = (*store)->ReadChunk(info.row.name, ref);
      ASSERT_TRUE(data.ok()) << data.status();
      ASSERT_TRUE(staging->Put(ref, *data).ok());
    }
    EXPECT_TRUE(Model(info.row.name.number, 0, 40, 3000).Equals(*weights::Staging::Finish(std::move(staging))));
  }
  EXPECT_EQ(num_ready, 3);
}

}  // namespace
}  // namespace moerl
