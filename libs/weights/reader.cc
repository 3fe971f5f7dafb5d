#include "libs/weights/reader.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "libs/base/clock.h"
#include "libs/base/env.h"
#include "libs/base/log.h"
#include "libs/base/metrics.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/channel.h"
#include "libs/rpc/status.h"
#include "libs/rpc/stream.h"
#include "libs/weights/retry.h"
#include "moerl/v1/weight_sync.grpc.pb.h"

namespace moerl::weights {
namespace {

constexpr absl::Duration kUnaryTimeout = absl::Seconds(20);
constexpr absl::Duration kFetchTimeout = absl::Hours(1);
constexpr uint64_t kLeaseDurationMs = 600'000;
constexpr size_t kAskedAtOnce = 8192;  // chunks a message
constexpr absl::string_view kSuffix = ".weights";

struct Metrics {
  Counter& verify_failures =
      GetCounter("moerl_weights_verify_failures_total", "Chunks and manifests that arrived damaged.");
  Counter& fetched_bytes = GetCounter("moerl_weights_fetched_bytes_total", "Chunk bytes fetched.");
  Histogram& fetch_seconds =
      GetHistogram("moerl_weights_fetch_seconds", "Fetching what is missing of a version.", SecondsBounds());
  Histogram& stage_seconds =
      GetHistogram("moerl_weights_stage_seconds", "From hearing of a version to having it, verified.", SecondsBounds());
};

Metrics& GetMetrics() {
  static auto& metrics = *new Metrics();
  return metrics;
}

VersionName FromProto(const v1::VersionName& proto) {
  return {.epoch = static_cast<int64_t>(proto.epoch()), .number = static_cast<int64_t>(proto.number())};
}

void ToProto(const VersionName& name, v1::VersionName* proto) {
  proto->set_epoch(static_cast<uint64_t>(name.epoch));
  proto->set_number(static_cast<uint64_t>(name.number));
}

}  // namespace

struct Reader::Impl : std::enable_shared_from_this<Reader::Impl> {
  class Watch;

  explicit Impl(ReaderOptions o) : options(std::move(o)) {}

  // --- the reader's thread
  void Run();
  bool Wait(bool& must_watch, std::optional<VersionName>& to_stage);
  void StartWatch();
  absl::Status Stage(const VersionName& name);
  absl::StatusOr<Manifest> GetManifest(const VersionName& name);
  absl::Status Fetch(Staging& staging);
  absl::Status Receive(grpc::ClientReaderWriter<v1::FetchChunksRequest, v1::FetchChunksResponse>& stream,
                       Staging& staging);
  uint64_t Lease(const VersionName& name);
  void Release(uint64_t lease_id);
  void Install(std::shared_ptr<const LocalVersion> version, absl::Duration heard_at);
  void Failed(const VersionName& name, const absl::Status& status);
  std::string PathOf(const Manifest& manifest) const;
  void RemoveFilesBut(const std::string& path);

  // --- the watch's hooks
  void OnVersions(const v1::WatchVersionsResponse& response);
  void OnWatchOver(const absl::Status& status);

  bool MustStage() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return has_latest && now.latest != refused && !IsRetired(now.latest, now.forks) &&
           (now.version == nullptr || now.latest.number > now.version->name().number);
  }

  const ReaderOptions options;
  std::unique_ptr<v1::WeightSyncService::Stub> stub;
  Clock* const clock = SystemClock();
  std::thread thread;

  mutable absl::Mutex mutex;
  absl::CondVar changed;
  bool is_ending ABSL_GUARDED_BY(mutex) = false;
  Readable now ABSL_GUARDED_BY(mutex);
  ReaderStats stats ABSL_GUARDED_BY(mutex);
  bool has_latest ABSL_GUARDED_BY(mutex) = false;
  absl::Duration latest_heard_at ABSL_GUARDED_BY(mutex);
  std::optional<VersionName> refused ABSL_GUARDED_BY(mutex);  // by options.check
  std::optional<VersionName> is_staging ABSL_GUARDED_BY(mutex);
  grpc::ClientContext* call ABSL_GUARDED_BY(mutex) = nullptr;             // under way on the reader's thread
  std::shared_ptr<Watch> watch ABSL_GUARDED_BY(mutex);                    // null: must be started
  absl::Duration watch_at ABSL_GUARDED_BY(mutex) = absl::ZeroDuration();  // not before
  absl::Duration stage_at ABSL_GUARDED_BY(mutex) = absl::ZeroDuration();
  Backoff watch_backoff ABSL_GUARDED_BY(mutex);
  Backoff stage_backoff ABSL_GUARDED_BY(mutex);

  // Makes the context of a call known, so that the destructor and a fork can end it.
  class ScopedCall {
   public:
    ScopedCall(Impl* impl, grpc::ClientContext* context) : impl_(impl) {
      absl::MutexLock lock(&impl_->mutex);
      impl_->call = context;
      if (impl_->is_ending) context->TryCancel();
    }
    ~ScopedCall() {
      absl::MutexLock lock(&impl_->mutex);
      impl_->call = nullptr;
    }

   private:
    Impl* const impl_;
  };
};

class Reader::Impl::Watch final : public rpc::ClientReadStream<v1::WatchVersionsResponse> {
 public:
  explicit Watch(std::weak_ptr<Impl> impl)
      : rpc::ClientReadStream<v1::WatchVersionsResponse>(rpc::StreamContext()), impl_(std::move(impl)) {}

  const v1::WatchVersionsRequest request;

 private:
  bool OnMessage(v1::WatchVersionsResponse& response) override {
    if (auto impl = impl_.lock()) impl->OnVersions(response);
    return true;
  }
  void OnOver(const absl::Status& status) override {
    if (auto impl = impl_.lock()) impl->OnWatchOver(status);
  }

  const std::weak_ptr<Impl> impl_;
};

void Reader::Impl::OnVersions(const v1::WatchVersionsResponse& response) {
  bool is_changed = false;
  {
    absl::MutexLock lock(&mutex);
    watch_backoff.Reset();
    std::vector<Fork> forks;
    for (const v1::Fork& fork : response.forks()) {
      forks.push_back({.epoch = static_cast<int64_t>(fork.epoch()), .step = static_cast<int64_t>(fork.step())});
    }
    is_changed = forks != now.forks;
    now.forks = std::move(forks);
    if (response.has_latest()) {
      const VersionName latest = FromProto(response.latest());
      if (!has_latest || latest != now.latest) latest_heard_at = clock->Now();
      has_latest = true;
      now.latest = latest;
    }
    if (now.version != nullptr && IsRetired(now.version->name(), now.forks)) {
      LogWarning("version left behind by a fork", {{"version", ToString(now.version->name())}});
      now.version = nullptr;
      is_changed = true;
    }
    if (is_staging && IsRetired(*is_staging, now.forks) && call != nullptr) call->TryCancel();
    stage_at = absl::ZeroDuration();
    changed.SignalAll();
  }
  if (is_changed && options.on_change) options.on_change();
}

void Reader::Impl::OnWatchOver(const absl::Status& status) {
  absl::MutexLock lock(&mutex);
  if (is_ending) return;
  watch = nullptr;
  watch_at = clock->Now() + watch_backoff.Next();
  if (!status.ok()) LogDebug("watch of versions ended", {{"status", status.ToString()}});
  changed.SignalAll();
}

void Reader::Impl::StartWatch() {
  auto started = std::make_shared<Watch>(weak_from_this());
  {
    absl::MutexLock lock(&mutex);
    if (is_ending) return;
    watch = started;
  }
  stub->async()->WatchVersions(&started->context(), &started->request, started.get());
  rpc::StartClient(std::move(started));
}

// Sleeps until there is something to do. False: the reader ends.
bool Reader::Impl::Wait(bool& must_watch, std::optional<VersionName>& to_stage) {
  absl::MutexLock lock(&mutex);
  while (!is_ending) {
    const absl::Duration time = clock->Now();
    must_watch = watch == nullptr && time >= watch_at;
    to_stage.reset();
    if (MustStage() && time >= stage_at) to_stage = now.latest;
    if (must_watch || to_stage) {
      is_staging = to_stage;
      return true;
    }
    absl::Duration pause = absl::InfiniteDuration();
    if (watch == nullptr) pause = std::min(pause, watch_at - time);
    if (MustStage()) pause = std::min(pause, stage_at - time);
    changed.WaitWithTimeout(&mutex, pause);
  }
  return false;
}

void Reader::Impl::Run() {
  bool must_watch = false;
  std::optional<VersionName> to_stage;
  while (Wait(must_watch, to_stage)) {
    if (must_watch) StartWatch();
    if (!to_stage) continue;
    const absl::Status status = Stage(*to_stage);
    if (!status.ok()) Failed(*to_stage, status);
  }
}

void Reader::Impl::Failed(const VersionName& name, const absl::Status& status) {
  absl::MutexLock lock(&mutex);
  is_staging.reset();
  if (is_ending) return;
  now.status = status;
  if (absl::IsDataLoss(status)) {
    ++stats.num_verify_failures;
    GetMetrics().verify_failures.Add();
  }
  stage_at = clock->Now() + stage_backoff.Next();
  LogWarning("version not staged", {{"version", ToString(name)}, {"status", status.ToString()}});
}

absl::StatusOr<Manifest> Reader::Impl::GetManifest(const VersionName& name) {
  v1::GetManifestRequest request;
  ToProto(name, request.mutable_version());
  v1::GetManifestResponse response;
  const auto context = rpc::CallContext(kUnaryTimeout);
  {
    const ScopedCall scoped(this, context.get());
    MOERL_RETURN_IF_ERROR(
        rpc::FromGrpc(stub->GetManifest(context.get(), request, &response), "weight_sync: GetManifest"));
  }
  absl::StatusOr<Manifest> manifest = weights::FromProto(response.manifest());
  if (!manifest.ok()) return absl::DataLossError(manifest.status().message());
  if (manifest->version != name) {
    return absl::DataLossError(
        absl::StrCat("manifest: asked for version ", ToString(name), ", got ", ToString(manifest->version)));
  }
  return manifest;
}

absl::Status Reader::Impl::Stage(const VersionName& name) {
  MOERL_ASSIGN_OR_RETURN(Manifest manifest, GetManifest(name));
  if (options.check) {
    if (absl::Status status = options.check(manifest); !status.ok()) {
      {
        absl::MutexLock lock(&mutex);
        refused = name;
      }
      return status;
    }
  }
  std::shared_ptr<const LocalVersion> current;
  absl::Duration heard_at;
  {
    absl::MutexLock lock(&mutex);
    current = now.version;
    heard_at = latest_heard_at;
  }
  const std::string path = PathOf(manifest);
  MOERL_ASSIGN_OR_RETURN(std::unique_ptr<Staging> staging, Staging::Begin(std::move(manifest), path, current.get()));
  if (staging->missing_bytes() > 0) {
    const uint64_t lease_id = staging->missing_bytes() >= options.lease_bytes_min ? Lease(name) : 0;
    const absl::Duration began = clock->Now();
    const absl::Status status = Fetch(*staging);
    GetMetrics().fetch_seconds.Observe(absl::ToDoubleSeconds(clock->Now() - began));
    if (lease_id != 0) Release(lease_id);
    MOERL_RETURN_IF_ERROR(status);
  }
  Install(Staging::Finish(std::move(staging)), heard_at);
  if (!path.empty()) RemoveFilesBut(path);
  return absl::OkStatus();
}

absl::Status Reader::Impl::Fetch(Staging& staging) {
  const auto context = rpc::CallContext(kFetchTimeout);
  const ScopedCall scoped(this, context.get());
  const auto stream = stub->FetchChunks(context.get());
  absl::Status received = Receive(*stream, staging);
  if (received.ok()) stream->WritesDone();
  if (absl::IsDataLoss(received)) context->TryCancel();  // otherwise the server has ended it, and says why
  v1::FetchChunksResponse rest;
  while (stream->Read(&rest)) {
  }
  const absl::Status status = rpc::FromGrpc(stream->Finish(), "weight_sync: FetchChunks");
  if (absl::IsDataLoss(received)) return received;
  return status.ok() ? received : status;
}

// Asks for all that is missing and takes it. A stream that ends early is UNAVAILABLE here; its status says more.
absl::Status Reader::Impl::Receive(grpc::ClientReaderWriter<v1::FetchChunksRequest, v1::FetchChunksResponse>& stream,
                                   Staging& staging) {
  absl::Status ended = absl::UnavailableError("weight_sync: FetchChunks: the stream ended early");
  // Half of it is given back late, and the next chunk must fit in the rest.
  const uint64_t credit_max = std::max<uint64_t>(options.credit_bytes, 2 * kChunkBytesMax);
  v1::FetchChunksRequest credit;
  credit.set_credit_bytes(credit_max);
  if (!stream.Write(credit)) return ended;
  uint64_t spent = 0;

  const std::vector<ChunkRef> missing = staging.Missing();
  for (size_t begin = 0; begin < missing.size(); begin += kAskedAtOnce) {
    const size_t end = std::min(begin + kAskedAtOnce, missing.size());
    v1::FetchChunksRequest wants;
    ToProto(staging.manifest().version, wants.mutable_wants()->mutable_version());
    for (size_t i = begin; i < end; ++i) weights::ToProto(missing[i], wants.mutable_wants()->add_chunks());
    if (!stream.Write(wants)) return ended;
    for (size_t i = begin; i < end; ++i) {
      v1::FetchChunksResponse response;
      if (!stream.Read(&response)) return ended;
      MOERL_RETURN_IF_ERROR(staging.Put(missing[i], response.chunk().data()));
      spent += missing[i].bytes;
      if (2 * spent >= credit_max) {  // half of it is on its way while the other half is given back
        credit.set_credit_bytes(spent);
        if (!stream.Write(credit)) return ended;
        spent = 0;
      }
      GetMetrics().fetched_bytes.Add(missing[i].bytes);
      absl::MutexLock lock(&mutex);
      stats.fetched_bytes += missing[i].bytes;
    }
  }
  return absl::OkStatus();
}

// 0 when there is none to be had: the fetch is tried without, and again if its version is collected meanwhile.
uint64_t Reader::Impl::Lease(const VersionName& name) {
  v1::AcquireLeaseRequest request;
  ToProto(name, request.mutable_version());
  request.set_holder(options.holder);
  request.set_duration_ms(kLeaseDurationMs);
  request.set_request_id(NewRequestId());
  v1::AcquireLeaseResponse response;
  const auto context = rpc::CallContext(kUnaryTimeout);
  const ScopedCall scoped(this, context.get());
  return stub->AcquireLease(context.get(), request, &response).ok() ? response.lease_id() : 0;
}

void Reader::Impl::Release(uint64_t lease_id) {
  v1::ReleaseLeaseRequest request;
  request.set_lease_id(lease_id);
  v1::ReleaseLeaseResponse response;
  const auto context = rpc::CallContext(kUnaryTimeout);
  const ScopedCall scoped(this, context.get());
  (void)stub->ReleaseLease(context.get(), request, &response);  // it ends by itself otherwise
}

void Reader::Impl::Install(std::shared_ptr<const LocalVersion> version, absl::Duration heard_at) {
  const std::string name = ToString(version->name());
  double seconds = 0;
  {
    absl::MutexLock lock(&mutex);
    is_staging.reset();
    stage_backoff.Reset();
    if (IsRetired(version->name(), now.forks)) return;  // while the last chunks came
    now.version = std::move(version);
    now.status = absl::OkStatus();
    ++stats.num_versions;
    stats.last_stage = clock->Now() - heard_at;
    seconds = absl::ToDoubleSeconds(stats.last_stage);
    GetMetrics().stage_seconds.Observe(seconds);
  }
  LogInfo("version staged", {{"version", name}, {"seconds", seconds}});
  if (options.on_change) options.on_change();
}

std::string Reader::Impl::PathOf(const Manifest& manifest) const {
  if (options.directory.empty()) return {};
  return JoinPath(options.directory, absl::StrCat(manifest.version.epoch, "-", manifest.version.number, "-",
                                                  manifest.root.ToHex().substr(0, 16), std::string(kSuffix)));
}

// A mapping keeps a removed file alive.
void Reader::Impl::RemoveFilesBut(const std::string& path) {
  const absl::StatusOr<std::vector<std::string>> names = PosixEnv()->List(options.directory);
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    const std::string other = JoinPath(options.directory, name);
    if (absl::EndsWith(name, kSuffix) && other != path) (void)PosixEnv()->Remove(other);
  }
}

Reader::Reader(std::shared_ptr<grpc::Channel> channel, ReaderOptions options)
    : impl_(std::make_shared<Impl>(std::move(options))) {
  GetMetrics();  // a scrape finds them all from the start
  impl_->stub = v1::WeightSyncService::NewStub(std::move(channel));
  if (!impl_->options.directory.empty()) (void)PosixEnv()->CreateDirs(impl_->options.directory);  // Stage reports it
  impl_->thread = std::thread([impl = impl_.get()] { impl->Run(); });
}

Reader::~Reader() {
  std::shared_ptr<Impl::Watch> watch;
  {
    absl::MutexLock lock(&impl_->mutex);
    impl_->is_ending = true;
    if (impl_->call != nullptr) impl_->call->TryCancel();
    watch = std::move(impl_->watch);
    impl_->changed.SignalAll();
  }
  if (watch != nullptr) watch->Cancel();
  impl_->thread.join();
}

Readable Reader::Now() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->now;
}

ReaderStats Reader::Stats() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->stats;
}

absl::Status Reader::WaitReady(absl::Duration timeout) const {
  absl::MutexLock lock(&impl_->mutex);
  const auto is_ready = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return impl_->now.version != nullptr; };
  if (impl_->mutex.AwaitWithTimeout(absl::Condition(&is_ready), timeout)) return absl::OkStatus();
  if (!impl_->now.status.ok()) return absl::DeadlineExceededError(impl_->now.status.ToString());
  return absl::DeadlineExceededError(impl_->has_latest
                                         ? absl::StrCat("weights: still fetching version ", ToString(impl_->now.latest))
                                         : "weights: weight_sync has no READY version, or is away");
}

}  // namespace moerl::weights
