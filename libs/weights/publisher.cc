#include "libs/weights/publisher.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/channel.h"
#include "libs/rpc/status.h"
#include "libs/weights/retry.h"
#include "moerl/v1/weight_sync.grpc.pb.h"

namespace moerl::weights {
namespace {

constexpr size_t kOfferedAtOnce = 8192;  // chunks a message: 8192 references of 40 bytes, a third of a MiB
constexpr absl::Duration kUnaryTimeout = absl::Seconds(20);
// A stream of puts lives while it moves; this bounds a server that holds it open and does nothing.
constexpr absl::Duration kPutTimeout = absl::Minutes(10);

struct Piece {
  ChunkRef ref;
  std::span<const std::byte> data;
};

}  // namespace

struct Publisher::Impl {
  using PutStream = grpc::ClientReaderWriter<v1::PutChunksRequest, v1::PutChunksResponse>;

  std::unique_ptr<v1::WeightSyncService::Stub> stub;
  PublisherOptions options;
  std::atomic<int64_t> epoch{0};

  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::WeightSyncService::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                        Response*),
                    const char* name, const Request& request, Response& response) {
    return Retry(options.patience, [&] {
      const auto context = rpc::CallContext(std::min(kUnaryTimeout, options.patience));
      return rpc::FromGrpc((stub.get()->*method)(context.get(), request, &response),
                           absl::StrCat("weight_sync: ", name));
    });
  }

  absl::Status Put(int64_t number, int shard, std::span<const Piece> pieces);
  bool OfferAndSend(PutStream& stream, std::span<const Piece> pieces);
};

// False when the stream has ended; its status says why.
bool Publisher::Impl::OfferAndSend(PutStream& stream, std::span<const Piece> pieces) {
  v1::PutChunksRequest request;
  for (const Piece& piece : pieces) ToProto(piece.ref, request.mutable_offer()->add_chunks());
  if (!stream.Write(request)) return false;
  v1::PutChunksResponse response;
  do {  // what was stored of an earlier offer is said first
    if (!stream.Read(&response)) return false;
  } while (!response.has_answer());
  for (size_t i = 0; i < pieces.size(); ++i) {
    const bool is_answered = static_cast<int>(i) < response.answer().are_wanted_size();
    if (is_answered && !response.answer().are_wanted(static_cast<int>(i))) continue;
    request.Clear();
    ToProto(pieces[i].ref, request.mutable_chunk()->mutable_ref());
    request.mutable_chunk()->set_data(pieces[i].data.data(), pieces[i].data.size());
    if (!stream.Write(request)) return false;
  }
  return true;
}

absl::Status Publisher::Impl::Put(int64_t number, int shard, std::span<const Piece> pieces) {
  const auto context = rpc::CallContext(kPutTimeout);
  const std::unique_ptr<PutStream> stream = stub->PutChunks(context.get());
  v1::PutChunksRequest request;
  request.mutable_header()->set_publisher_epoch(static_cast<uint64_t>(epoch.load()));
  request.mutable_header()->set_number(static_cast<uint64_t>(number));
  request.mutable_header()->set_shard(static_cast<uint32_t>(shard));
  bool is_open = stream->Write(request);
  while (is_open && !pieces.empty()) {
    const std::span<const Piece> offered = pieces.first(std::min(kOfferedAtOnce, pieces.size()));
    is_open = OfferAndSend(*stream, offered);
    pieces = pieces.subspan(offered.size());
  }
  if (is_open) stream->WritesDone();  // otherwise the server has ended it, and says why
  v1::PutChunksResponse response;
  while (stream->Read(&response)) {
  }
  absl::Status status = rpc::FromGrpc(stream->Finish(), "weight_sync: PutChunks");
  if (status.ok() && !is_open) status = absl::UnavailableError("weight_sync: PutChunks: the stream ended early");
  return status;
}

Publisher::Publisher(std::shared_ptr<grpc::Channel> channel, const PublisherOptions& options)
    : impl_(new Impl{.stub = v1::WeightSyncService::NewStub(std::move(channel)), .options = options}) {}

Publisher::~Publisher() = default;

void Publisher::UseEpoch(int64_t epoch) { impl_->epoch = epoch; }

absl::StatusOr<int64_t> Publisher::Acquire(const std::string& run_id) {
  v1::AcquirePublisherRequest request;
  request.set_run_id(run_id);
  request.set_request_id(NewRequestId());
  v1::AcquirePublisherResponse response;
  MOERL_RETURN_IF_ERROR(
      impl_->Call(&v1::WeightSyncService::Stub::AcquirePublisher, "AcquirePublisher", request, response));
  impl_->epoch = static_cast<int64_t>(response.epoch());
  return impl_->epoch.load();
}

absl::Status Publisher::RecordForks(std::span<const Fork> forks) {
  v1::RecordForksRequest request;
  request.set_publisher_epoch(static_cast<uint64_t>(impl_->epoch.load()));
  for (const Fork& fork : forks) {
    v1::Fork* proto = request.add_forks();
    proto->set_epoch(static_cast<uint64_t>(fork.epoch));
    proto->set_step(static_cast<uint64_t>(fork.step));
  }
  v1::RecordForksResponse response;
  return impl_->Call(&v1::WeightSyncService::Stub::RecordForks, "RecordForks", request, response);
}

absl::Status Publisher::Begin(int64_t number, int num_shards, uint64_t bytes) {
  v1::BeginVersionRequest request;
  request.set_publisher_epoch(static_cast<uint64_t>(impl_->epoch.load()));
  request.set_number(static_cast<uint64_t>(number));
  request.set_num_shards(static_cast<uint32_t>(num_shards));
  request.set_num_bytes(bytes);
  v1::BeginVersionResponse response;
  return impl_->Call(&v1::WeightSyncService::Stub::BeginVersion, "BeginVersion", request, response);
}

absl::StatusOr<std::string> Publisher::PutShard(int64_t number, int shard, std::span<const TensorView> tensors) {
  std::vector<TensorEntry> entries;
  std::vector<Piece> pieces;
  std::set<Digest> offered;  // a chunk that occurs twice is put once
  for (const TensorView& tensor : tensors) {
    MOERL_ASSIGN_OR_RETURN(TensorEntry entry, Describe(tensor, impl_->options.chunk_bytes));
    const auto chunks = SplitIntoChunks(tensor.data, impl_->options.chunk_bytes);
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (offered.insert(entry.chunks[i].sha256).second) pieces.push_back({.ref = entry.chunks[i], .data = chunks[i]});
    }
    entries.push_back(std::move(entry));
  }
  if (!pieces.empty()) {  // a rank may have nothing of its own
    MOERL_RETURN_IF_ERROR(Retry(impl_->options.patience, [&] { return impl_->Put(number, shard, pieces); }));
  }
  return EncodeShard(entries);
}

absl::StatusOr<Publisher::Committed> Publisher::Commit(int64_t number, std::span<const std::string> shards,
                                                       const std::string& model_config_json,
                                                       const std::string& numerics_fingerprint) {
  MOERL_ASSIGN_OR_RETURN(Manifest manifest, JoinShards({.epoch = impl_->epoch.load(), .number = number}, shards));
  manifest.model_config_json = model_config_json;
  manifest.numerics_fingerprint = numerics_fingerprint;
  v1::CommitVersionRequest request;
  request.set_publisher_epoch(static_cast<uint64_t>(impl_->epoch.load()));
  *request.mutable_manifest() = ToProto(manifest);
  v1::CommitVersionResponse response;
  MOERL_RETURN_IF_ERROR(impl_->Call(&v1::WeightSyncService::Stub::CommitVersion, "CommitVersion", request, response));
  return Committed{.name = {.epoch = static_cast<int64_t>(response.version().epoch()),
                            .number = static_cast<int64_t>(response.version().number())},
                   .root = manifest.root,
                   .was_ready = response.was_ready()};
}

absl::StatusOr<Publisher::Committed> Publisher::Publish(int64_t number, std::span<const TensorView> tensors,
                                                        const std::string& model_config_json,
                                                        const std::string& numerics_fingerprint) {
  uint64_t bytes = 0;
  for (const TensorView& tensor : tensors) bytes += tensor.data.size();
  MOERL_RETURN_IF_ERROR(Begin(number, 1, bytes));
  MOERL_ASSIGN_OR_RETURN(const std::string shard, PutShard(number, 0, tensors));
  return Commit(number, {{shard}}, model_config_json, numerics_fingerprint);
}

absl::StatusOr<VersionName> Publisher::LatestReady() {
  v1::ListVersionsRequest request;
  v1::ListVersionsResponse response;
  MOERL_RETURN_IF_ERROR(impl_->Call(&v1::WeightSyncService::Stub::ListVersions, "ListVersions", request, response));
  const v1::VersionInfo* latest = nullptr;
  for (const v1::VersionInfo& info : response.versions()) {
    if (info.state() != v1::VERSION_STATE_READY) continue;
    if (latest == nullptr || info.version().number() > latest->version().number()) latest = &info;
  }
  if (latest == nullptr) return absl::NotFoundError("weight_sync: no version is READY yet");
  return VersionName{.epoch = static_cast<int64_t>(latest->version().epoch()),
                     .number = static_cast<int64_t>(latest->version().number())};
}

}  // namespace moerl::weights
