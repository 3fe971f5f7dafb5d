#include "services/weight_sync/service.h"

#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/field_rules.h"
#include "libs/base/metrics.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/stream.h"

namespace moerl {
namespace {

using weights::ChunkRef;

const absl::Duration kRetryDelay = absl::Milliseconds(200);

absl::Status Busy() {
  return rpc::WithRetryDelay(absl::ResourceExhaustedError("weight_sync: too many requests wait for the disk"),
                             kRetryDelay);
}

absl::Status Draining() { return rpc::WithRetryDelay(absl::UnavailableError("weight_sync is draining"), kRetryDelay); }

Counter& PutBytes() {
  static Counter& counter = GetCounter("moerl_weight_sync_put_bytes_total", "Chunk bytes stored for publishers.");
  return counter;
}

Counter& FetchedBytes() {
  static Counter& counter = GetCounter("moerl_weight_sync_fetched_bytes_total", "Chunk bytes sent to readers.");
  return counter;
}

absl::StatusOr<VersionName> FromProto(const v1::VersionName& proto, const char* field) {
  const VersionName name{.epoch = static_cast<int64_t>(proto.epoch()), .number = static_cast<int64_t>(proto.number())};
  if (name.epoch >= 0 && name.number >= 0) return name;
  return rpc::InvalidField(field, "epoch and number are at most 2^63 - 1");
}

void ToProto(const VersionName& name, v1::VersionName* proto) {
  proto->set_epoch(static_cast<uint64_t>(name.epoch));
  proto->set_number(static_cast<uint64_t>(name.number));
}

void ToProto(const Fork& fork, v1::Fork* proto) {
  proto->set_epoch(static_cast<uint64_t>(fork.epoch));
  proto->set_step(static_cast<uint64_t>(fork.step));
}

v1::VersionState ToProto(VersionState state) {
  switch (state) {
    case VersionState::kStaging:
      return v1::VERSION_STATE_STAGING;
    case VersionState::kReady:
      return v1::VERSION_STATE_READY;
    case VersionState::kRetiredByCount:
      return v1::VERSION_STATE_RETIRED_BY_COUNT;
    case VersionState::kRetiredByLineage:
      return v1::VERSION_STATE_RETIRED_BY_LINEAGE;
  }
  return v1::VERSION_STATE_UNSPECIFIED;
}

std::shared_ptr<const v1::WatchVersionsResponse> ToProto(const VersionsNow& now) {
  auto proto = std::make_shared<v1::WatchVersionsResponse>();
  if (now.latest) {
    ToProto(*now.latest, proto->mutable_latest());
    proto->set_root(std::string(now.root.view()));
  }
  for (const Fork& fork : now.forks) ToProto(fork, proto->add_forks());
  return proto;
}

// The request's id and the digest of its other fields. Requests have no maps, so that equal ones serialize equally.
template <typename Request>
RequestKey KeyOf(const Request& request) {
  if (request.request_id().empty()) return {};
  Request body = request;
  body.clear_request_id();
  return {.id = request.request_id(),
          .body = weights::Hasher().AddText(request.GetTypeName()).AddText(body.SerializeAsString()).Finish()};
}

template <typename Refs>
absl::StatusOr<std::vector<ChunkRef>> FromProto(const Refs& protos) {
  std::vector<ChunkRef> refs;
  refs.reserve(protos.size());
  for (const v1::ChunkRef& proto : protos) {
    MOERL_ASSIGN_OR_RETURN(const ChunkRef ref, weights::FromProto(proto));
    refs.push_back(ref);
  }
  return refs;
}

}  // namespace

// ------------------------------------------------------------------------------------------------ WatchVersions
// Sends the newest state when the reader has taken the last one; what came between is skipped.
class WeightSyncService::Watch final : public rpc::ServerStream<v1::WatchVersionsResponse> {
 public:
  Watch() : rpc::ServerStream<v1::WatchVersionsResponse>(1) {}

  void Offer(std::shared_ptr<const v1::WatchVersionsResponse> now) {
    absl::MutexLock lock(&mutex_);
    if (now == sent_) return;
    next_ = std::move(now);
    SendNext();
  }

 private:
  void OnDrained() override {
    absl::MutexLock lock(&mutex_);
    SendNext();
  }

  void SendNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (next_ == nullptr || !Send(*next_)) return;
    sent_ = std::exchange(next_, nullptr);
  }

  absl::Mutex mutex_;
  std::shared_ptr<const v1::WatchVersionsResponse> next_ ABSL_GUARDED_BY(mutex_), sent_ ABSL_GUARDED_BY(mutex_);
};

// ------------------------------------------------------------------------------------------------ PutChunks
// One message at a time: the next is read when the disk has what came before, or when there is still room in the batch.
class WeightSyncService::Put final : public rpc::ServerBidiStream<v1::PutChunksRequest, v1::PutChunksResponse>,
                                     public std::enable_shared_from_this<Put> {
 public:
  Put(Store* store, DiskPool* disk)
      : rpc::ServerBidiStream<v1::PutChunksRequest, v1::PutChunksResponse>(kAnswersMax), store_(store), disk_(disk) {}

 private:
  static constexpr size_t kAnswersMax = 4096;

  bool OnMessage(v1::PutChunksRequest& request) override {
    if (absl::Status status = CheckRules(request); !status.ok()) return Fail(status);
    if (request.has_header() == header_.has_value()) {
      return Fail(rpc::InvalidField("header", "it is the first message of the stream, and only that"));
    }
    if (request.has_header()) {
      header_ = request.header();
      return true;
    }
    if (request.has_offer()) {
      return OnDisk([this, offer = std::move(*request.mutable_offer())] { return Answer(offer); });
    }
    if (!request.has_chunk()) return Fail(rpc::InvalidField("event", "a header, an offer or a chunk"));
    batch_bytes_ += request.chunk().data().size();
    batch_.push_back(std::move(*request.mutable_chunk()));
    if (batch_bytes_ < kPutBytesMax && batch_.size() < kPutChunksMax) return true;
    return OnDisk([] { return absl::OkStatus(); });
  }

  void OnHalfClosed() override {
    OnDisk([this] {
      End(absl::OkStatus());
      return absl::OkStatus();
    });
  }

  bool Fail(const absl::Status& status) {
    End(status);
    return false;
  }

  // Stores the batch, then runs `then`, on a disk thread; reads on afterwards.
  bool OnDisk(std::function<absl::Status()> then) {
    const bool is_queued = disk_->Submit([self = shared_from_this(), this, then = std::move(then)] {
      absl::Status status = StoreBatch();
      if (status.ok()) status = then();
      if (!status.ok()) End(status);
      if (!is_over()) ReadNext();
    });
    return is_queued ? false : Fail(Busy());
  }

  absl::Status StoreBatch() {
    if (batch_.empty()) return absl::OkStatus();
    std::vector<ChunkBytes> chunks;
    for (const v1::ChunkData& chunk : batch_) {
      MOERL_ASSIGN_OR_RETURN(const ChunkRef ref, weights::FromProto(chunk.ref()));
      chunks.push_back({.ref = ref, .data = chunk.data()});
    }
    MOERL_RETURN_IF_ERROR(
        store_->Put(static_cast<int64_t>(header_->publisher_epoch()), static_cast<int64_t>(header_->number()), chunks));
    v1::PutChunksResponse response;
    response.mutable_stored()->set_num_chunks(static_cast<uint32_t>(batch_.size()));
    response.mutable_stored()->set_num_bytes(batch_bytes_);
    PutBytes().Add(static_cast<double>(batch_bytes_));
    batch_.clear();
    batch_bytes_ = 0;
    return Answer(std::move(response));
  }

  absl::Status Answer(const v1::ChunkOffer& offer) {
    MOERL_ASSIGN_OR_RETURN(const std::vector<ChunkRef> refs, FromProto(offer.chunks()));
    MOERL_ASSIGN_OR_RETURN(const std::vector<bool> are_wanted,
                           store_->Offer(static_cast<int64_t>(header_->publisher_epoch()),
                                         static_cast<int64_t>(header_->number()), header_->shard(), refs));
    v1::PutChunksResponse response;
    for (bool is_wanted : are_wanted) response.mutable_answer()->add_are_wanted(is_wanted);
    return Answer(std::move(response));
  }

  absl::Status Answer(v1::PutChunksResponse response) {
    if (Send(std::move(response)) || is_over()) return absl::OkStatus();
    return absl::ResourceExhaustedError("PutChunks: the client does not read the answers");
  }

  Store* const store_;
  DiskPool* const disk_;
  // Touched by OnMessage, or by the disk task between two of them.
  std::optional<v1::PutChunksHeader> header_;
  std::vector<v1::ChunkData> batch_;
  size_t batch_bytes_ = 0;
};

// ------------------------------------------------------------------------------------------------ FetchChunks
// Sends what was asked for in order, within the reader's credit and about kFetchBytesMax.
class WeightSyncService::Fetch final : public rpc::ServerBidiStream<v1::FetchChunksRequest, v1::FetchChunksResponse>,
                                       public std::enable_shared_from_this<Fetch> {
 public:
  // The queue takes twice what there is room for: OnDrained may come late, when more is queued again, and makes room
  // anew.
  Fetch(Store* store, DiskPool* disk)
      : rpc::ServerBidiStream<v1::FetchChunksRequest, v1::FetchChunksResponse>(2 * kFetchChunksMax + 1),
        store_(store),
        disk_(disk) {}

 private:
  struct Want {
    VersionName version;
    ChunkRef ref;
  };

  bool OnMessage(v1::FetchChunksRequest& request) override {
    const absl::Status status = Take(request);
    if (!status.ok()) End(status);
    if (status.ok()) Pump();
    return status.ok();
  }

  absl::Status Take(const v1::FetchChunksRequest& request) {
    MOERL_RETURN_IF_ERROR(CheckRules(request));
    absl::MutexLock lock(&mutex_);
    if (!request.has_wants()) {
      if (__builtin_add_overflow(credit_bytes_, request.credit_bytes(), &credit_bytes_)) credit_bytes_ = ~uint64_t{0};
      return absl::OkStatus();
    }
    MOERL_ASSIGN_OR_RETURN(const VersionName version, FromProto(request.wants().version(), "wants.version"));
    MOERL_ASSIGN_OR_RETURN(const std::vector<ChunkRef> refs, FromProto(request.wants().chunks()));
    if (wants_.size() + refs.size() > kWantsMax) {
      return rpc::InvalidField("wants", absl::StrCat("at most ", kWantsMax, " chunks may be outstanding on a stream"));
    }
    for (const ChunkRef& ref : refs) wants_.push_back({.version = version, .ref = ref});
    return absl::OkStatus();
  }

  void OnHalfClosed() override {
    {
      absl::MutexLock lock(&mutex_);
      is_half_closed_ = true;
    }
    Pump();
  }

  void OnDrained() override {
    {
      absl::MutexLock lock(&mutex_);
      queued_bytes_ = 0;
      num_queued_ = 0;
    }
    Pump();
  }

  // Starts a disk task when something can be sent and none runs.
  void Pump() {
    absl::MutexLock lock(&mutex_);
    if (is_reading_ || is_over()) return;
    if (wants_.empty()) {
      if (is_half_closed_) End(absl::OkStatus());
      return;
    }
    if (wants_.front().ref.bytes > credit_bytes_) {
      if (is_half_closed_) End(rpc::InvalidField("credit_bytes", "the stream was closed with too few for its wants"));
      return;
    }
    if (!HasRoom()) return;
    is_reading_ = true;
    if (!disk_->Submit([self = shared_from_this()] { self->SendChunks(); })) {
      is_reading_ = false;
      End(Busy());
    }
  }

  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return num_queued_ < kFetchChunksMax && queued_bytes_ < kFetchBytesMax;
  }

  // On a disk thread.
  void SendChunks() {
    while (const std::optional<Want> want = NextWant()) {
      absl::StatusOr<std::string> data = store_->ReadChunk(want->version, want->ref);
      if (!data.ok()) return End(data.status());
      v1::FetchChunksResponse response;
      weights::ToProto(want->ref, response.mutable_chunk()->mutable_ref());
      response.mutable_chunk()->set_data(*std::move(data));
      if (!Send(std::move(response))) return;  // the call is over
      FetchedBytes().Add(want->ref.bytes);
    }
    Pump();  // credit or room may have come since
  }

  // Takes the next chunk that may be sent; nothing ends this task.
  std::optional<Want> NextWant() {
    absl::MutexLock lock(&mutex_);
    if (wants_.empty() || wants_.front().ref.bytes > credit_bytes_ || !HasRoom() || is_over()) {
      is_reading_ = false;
      return std::nullopt;
    }
    const Want want = wants_.front();
    wants_.pop_front();
    credit_bytes_ -= want.ref.bytes;
    queued_bytes_ += want.ref.bytes;
    ++num_queued_;
    return want;
  }

  Store* const store_;
  DiskPool* const disk_;
  absl::Mutex mutex_;
  std::deque<Want> wants_ ABSL_GUARDED_BY(mutex_);
  uint64_t credit_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Sent since the stream's queue was last empty, but for a chunk that was being read just then.
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t num_queued_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_half_closed_ ABSL_GUARDED_BY(mutex_) = false;
};

// ------------------------------------------------------------------------------------------------ the service
WeightSyncService::WeightSyncService(std::unique_ptr<Store> store)
    : store_(std::move(store)), now_(ToProto(store_->Now())) {
  store_->OnChange([this] { Announce(); });
  PutBytes();  // a scrape finds them from the start
  FetchedBytes();
}

WeightSyncService::~WeightSyncService() = default;

// Runs on the thread that changed the store. Offers under the lock, as whoever offers does, so that no watch hears of a
// state after a newer one: it would stay with the older until the next change.
void WeightSyncService::Announce() {
  const VersionsNow versions = store_->Now();
  absl::MutexLock lock(&mutex_);
  if (versions.num_changes < num_changes_) return;  // another thread has announced a newer state
  num_changes_ = versions.num_changes;
  now_ = ToProto(versions);
  std::erase_if(watches_, [](const auto& watch) { return watch.expired(); });
  for (const auto& weak : watches_) {
    if (auto watch = weak.lock()) watch->Offer(now_);
  }
}

void WeightSyncService::EndWatches() {
  absl::MutexLock lock(&mutex_);
  is_draining_ = true;
  for (const auto& weak : watches_) {
    if (auto watch = weak.lock()) watch->End(Draining());
  }
  watches_.clear();
}

grpc::ServerUnaryReactor* WeightSyncService::OnDisk(grpc::CallbackServerContext* context,
                                                    const google::protobuf::Message& request,
                                                    std::function<absl::Status()> task) {
  if (absl::Status status = CheckRules(request); !status.ok()) return rpc::Reply(context, status);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (!disk_.Submit([reactor, task = std::move(task)] { reactor->Finish(rpc::ToGrpc(task())); })) {
    reactor->Finish(rpc::ToGrpc(Busy()));
  }
  return reactor;
}

grpc::ServerUnaryReactor* WeightSyncService::AcquirePublisher(grpc::CallbackServerContext* context,
                                                              const v1::AcquirePublisherRequest* request,
                                                              v1::AcquirePublisherResponse* response) {
  return OnDisk(context, *request, [=, this]() -> absl::Status {
    MOERL_ASSIGN_OR_RETURN(const int64_t epoch, store_->AcquirePublisher(request->run_id(), KeyOf(*request)));
    response->set_epoch(static_cast<uint64_t>(epoch));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* WeightSyncService::RecordForks(grpc::CallbackServerContext* context,
                                                         const v1::RecordForksRequest* request,
                                                         v1::RecordForksResponse*) {
  return OnDisk(context, *request, [=, this]() -> absl::Status {
    std::vector<Fork> forks;
    for (const v1::Fork& fork : request->forks()) {
      forks.push_back({.epoch = static_cast<int64_t>(fork.epoch()), .step = static_cast<int64_t>(fork.step())});
      if (forks.back().epoch < 0 || forks.back().step < 0) {
        return rpc::InvalidField(absl::StrCat("forks[", forks.size() - 1, "]"), "epoch and step are at most 2^63 - 1");
      }
    }
    return store_->RecordForks(static_cast<int64_t>(request->publisher_epoch()), forks);
  });
}

grpc::ServerUnaryReactor* WeightSyncService::BeginVersion(grpc::CallbackServerContext* context,
                                                          const v1::BeginVersionRequest* request,
                                                          v1::BeginVersionResponse* response) {
  return OnDisk(context, *request, [=, this]() -> absl::Status {
    const auto number = static_cast<int64_t>(request->number());
    if (number < 0) return rpc::InvalidField("number", "at most 2^63 - 1");
    MOERL_ASSIGN_OR_RETURN(const VersionName name,
                           store_->Begin(static_cast<int64_t>(request->publisher_epoch()), number,
                                         request->num_shards(), request->num_bytes(), KeyOf(*request)));
    ToProto(name, response->mutable_version());
    return absl::OkStatus();
  });
}

grpc::ServerBidiReactor<v1::PutChunksRequest, v1::PutChunksResponse>* WeightSyncService::PutChunks(
    grpc::CallbackServerContext*) {
  return rpc::Start(std::make_shared<Put>(store_.get(), &disk_));
}

grpc::ServerUnaryReactor* WeightSyncService::CommitVersion(grpc::CallbackServerContext* context,
                                                           const v1::CommitVersionRequest* request,
                                                           v1::CommitVersionResponse* response) {
  return OnDisk(context, *request, [=, this]() -> absl::Status {
    MOERL_ASSIGN_OR_RETURN(const weights::Manifest manifest, weights::FromProto(request->manifest()));
    MOERL_ASSIGN_OR_RETURN(const Store::Committed committed,
                           store_->Commit(static_cast<int64_t>(request->publisher_epoch()), manifest, KeyOf(*request)));
    ToProto(committed.name, response->mutable_version());
    response->set_was_ready(committed.was_ready);
    return absl::OkStatus();
  });
}

grpc::ServerWriteReactor<v1::WatchVersionsResponse>* WeightSyncService::WatchVersions(grpc::CallbackServerContext*,
                                                                                      const v1::WatchVersionsRequest*) {
  auto watch = std::make_shared<Watch>();
  {
    absl::MutexLock lock(&mutex_);
    if (is_draining_) return rpc::Refuse<v1::WatchVersionsResponse>(Draining());
    watches_.push_back(watch);
    watch->Offer(now_);
  }
  return rpc::Start(std::move(watch));
}

grpc::ServerUnaryReactor* WeightSyncService::GetManifest(grpc::CallbackServerContext* context,
                                                         const v1::GetManifestRequest* request,
                                                         v1::GetManifestResponse* response) {
  return OnDisk(context, *request, [=, this]() -> absl::Status {
    std::optional<VersionName> name;
    if (request->has_version()) {
      MOERL_ASSIGN_OR_RETURN(name, FromProto(request->version(), "version"));
    }
    MOERL_ASSIGN_OR_RETURN(const std::string serialized, store_->GetManifest(name));
    if (!response->mutable_manifest()->ParseFromString(serialized))
      return absl::InternalError("manifest does not decode");
    return absl::OkStatus();
  });
}

grpc::ServerBidiReactor<v1::FetchChunksRequest, v1::FetchChunksResponse>* WeightSyncService::FetchChunks(
    grpc::CallbackServerContext*) {
  return rpc::Start(std::make_shared<Fetch>(store_.get(), &disk_));
}

grpc::ServerUnaryReactor* WeightSyncService::AcquireLease(grpc::CallbackServerContext* context,
                                                          const v1::AcquireLeaseRequest* request,
                                                          v1::AcquireLeaseResponse* response) {
  return OnDisk(context, *request, [=, this]() -> absl::Status {
    MOERL_ASSIGN_OR_RETURN(const VersionName name, FromProto(request->version(), "version"));
    MOERL_ASSIGN_OR_RETURN(
        const int64_t id,
        store_->AcquireLease(name, request->holder(), absl::Milliseconds(request->duration_ms()), KeyOf(*request)));
    response->set_lease_id(static_cast<uint64_t>(id));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* WeightSyncService::ReleaseLease(grpc::CallbackServerContext* context,
                                                          const v1::ReleaseLeaseRequest* request,
                                                          v1::ReleaseLeaseResponse*) {
  return OnDisk(context, *request,
                [=, this] { return store_->ReleaseLease(static_cast<int64_t>(request->lease_id())); });
}

grpc::ServerUnaryReactor* WeightSyncService::ListVersions(grpc::CallbackServerContext* context,
                                                          const v1::ListVersionsRequest* request,
                                                          v1::ListVersionsResponse* response) {
  return OnDisk(context, *request, [=, this]() -> absl::Status {
    for (const VersionInfo& info : store_->List()) {
      v1::VersionInfo* proto = response->add_versions();
      ToProto(info.row.name, proto->mutable_version());
      proto->set_state(ToProto(info.row.state));
      if (info.row.state != VersionState::kStaging) proto->set_root(std::string(info.row.root.view()));
      proto->set_num_bytes(info.row.bytes);
      proto->set_num_leases(static_cast<uint32_t>(info.num_leases));
    }
    for (const Fork& fork : store_->Now().forks) ToProto(fork, response->add_forks());
    response->set_publisher_epoch(static_cast<uint64_t>(store_->epoch()));
    return absl::OkStatus();
  });
}

}  // namespace moerl
