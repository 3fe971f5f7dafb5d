#ifndef MOERL_SERVICES_WEIGHT_SYNC_SERVICE_H_
#define MOERL_SERVICES_WEIGHT_SYNC_SERVICE_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "moerl/v1/weight_sync.grpc.pb.h"
#include "services/weight_sync/disk_pool.h"
#include "services/weight_sync/store.h"

namespace moerl {

// WeightSyncService: protos in, protos out. What it answers is decided and kept by the Store, which DiskPool's threads
// wait for; no reactor blocks.
//
// Memory: a PutChunks stream holds at most kPutBytesMax and one message, a FetchChunks stream kFetchBytesMax and one
// chunk, for a moment twice that, whatever its client does; the pool's queue holds requests of at most the server's
// message size each.
class WeightSyncService final : public v1::WeightSyncService::CallbackService {
 public:
  static constexpr int kDiskThreads = 4;
  static constexpr size_t kDiskQueueMax = 1024;
  static constexpr size_t kPutBytesMax = 8 << 20;  // written, synced and recorded together
  static constexpr size_t kPutChunksMax = 256;
  static constexpr size_t kFetchBytesMax = 2 << 20;  // sent, and not yet taken over by the transport
  static constexpr size_t kFetchChunksMax = 64;
  static constexpr size_t kWantsMax = 65'536;  // asked for on one stream, and not yet sent

  explicit WeightSyncService(std::unique_ptr<Store> store);
  ~WeightSyncService() override;

  // Ends what has no end of its own: watches get UNAVAILABLE and come back to the next server.
  void EndWatches();

  Store& store() { return *store_; }

 private:
  class Watch;
  class Put;
  class Fetch;

  grpc::ServerUnaryReactor* AcquirePublisher(grpc::CallbackServerContext* context,
                                             const v1::AcquirePublisherRequest* request,
                                             v1::AcquirePublisherResponse* response) override;
  grpc::ServerUnaryReactor* RecordForks(grpc::CallbackServerContext* context, const v1::RecordForksRequest* request,
                                        v1::RecordForksResponse* response) override;
  grpc::ServerUnaryReactor* BeginVersion(grpc::CallbackServerContext* context, const v1::BeginVersionRequest* request,
                                         v1::BeginVersionResponse* response) override;
  grpc::ServerBidiReactor<v1::PutChunksRequest, v1::PutChunksResponse>* PutChunks(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* CommitVersion(grpc::CallbackServerContext* context, const v1::CommitVersionRequest* request,
                                          v1::CommitVersionResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchVersionsResponse>* WatchVersions(grpc::CallbackServerContext* context,
                                                                     const v1::WatchVersionsRequest* request) override;
  grpc::ServerUnaryReactor* GetManifest(grpc::CallbackServerContext* context, const v1::GetManifestRequest* request,
                                        v1::GetManifestResponse* response) override;
  grpc::ServerBidiReactor<v1::FetchChunksRequest, v1::FetchChunksResponse>* FetchChunks(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* AcquireLease(grpc::CallbackServerContext* context, const v1::AcquireLeaseRequest* request,
                                         v1::AcquireLeaseResponse* response) override;
  grpc::ServerUnaryReactor* ReleaseLease(grpc::CallbackServerContext* context, const v1::ReleaseLeaseRequest* request,
                                         v1::ReleaseLeaseResponse* response) override;
  grpc::ServerUnaryReactor* ListVersions(grpc::CallbackServerContext* context, const v1::ListVersionsRequest* request,
                                         v1::ListVersionsResponse* response) override;

  // Answers a unary call from a disk thread, after checking the request's field rules.
  grpc::ServerUnaryReactor* OnDisk(grpc::CallbackServerContext* context, const google::protobuf::Message& request,
                                   std::function<absl::Status()> task);
  void Announce();

  const std::unique_ptr<Store> store_;
  absl::Mutex mutex_;
  int64_t num_changes_ ABSL_GUARDED_BY(mutex_) = 0;  // that now_ shows
  std::shared_ptr<const v1::WatchVersionsResponse> now_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<Watch>> watches_ ABSL_GUARDED_BY(mutex_);
  bool is_draining_ ABSL_GUARDED_BY(mutex_) = false;
  DiskPool disk_{kDiskThreads, kDiskQueueMax};  // last: its tasks use the above
};

}  // namespace moerl

#endif  // MOERL_SERVICES_WEIGHT_SYNC_SERVICE_H_
