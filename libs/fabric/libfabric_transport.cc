#include "libs/fabric/libfabric_transport.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <array>

#include "absl/base/call_once.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"

namespace moerl::fabric {
namespace {

// Events that may wait unpolled. Slots and writes of one rank stay below half of it (Hub::AddSlots).
constexpr size_t kCompletionsMax = 16384;
// Writes in flight of one endpoint.
constexpr size_t kOperationsMax = 1024;
// Sleep of a waiter where the provider has no descriptor to wait on; doubles up to the limit.
constexpr absl::Duration kPollPause = absl::Microseconds(200);
constexpr int kEmptyWakesMax = 8;
constexpr absl::Duration kFirstPause = absl::Microseconds(20);
constexpr int kPauseDoublingsMax = 8;  // the longest pause is 5.12 ms: idle costs little

template <typename Object>
struct CloseObject {
  void operator()(Object* object) const { fi_close(&object->fid); }
};
template <typename Object>
using Owned = std::unique_ptr<Object, CloseObject<Object>>;

absl::Status FabricError(absl::string_view what, int error) {
  return absl::UnavailableError(absl::StrCat("fabric: ", what, ": ", fi_strerror(std::abs(error))));
}

Info Hints() {
  Info hints(fi_allocinfo());
  hints->ep_attr->type = FI_EP_RDM;
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->cq_data_size = 4;
  hints->domain_attr->av_type = FI_AV_TABLE;
  return hints;
}

bool Serves(const fi_info& info, absl::string_view provider) {
  const absl::string_view name = info.fabric_attr->prov_name;
  // "tcp" is served by the utility provider on top of it.
  return name == provider || (provider == "tcp" && absl::StartsWith(name, "tcp;"));
}

// The provider over tcp fills 64 MB of buffers for two-sided messages, which moerl does not send, when an endpoint
// opens (38 ms; many times that on a busy machine, in the middle of reforming). An operator's own setting stands.
void ShrinkMessageBuffers() {
  static absl::once_flag once;
  absl::call_once(once, [] {
    setenv("FI_OFI_RXM_BUFFER_SIZE", "1024", /*overwrite=*/0);
    setenv("FI_OFI_RXM_MSG_RX_SIZE", "128", /*overwrite=*/0);
  });
}

}  // namespace

struct LibfabricTransport::Operation {
  fi_context2 context;  // the provider's, first: completions carry its address
  uint64_t user = 0;
};

struct LibfabricTransport::Objects {
  Info info;
  Owned<fid_fabric> fabric;
  Owned<fid_domain> domain;
  Owned<fid_av> av;
  Owned<fid_cq> cq;
  Owned<fid_ep> ep;
  std::vector<Owned<fid_mr>> regions;  // closed before the endpoint they may be bound to
  std::vector<fi_addr_t> peers;
  int wait_fd = -1;
};

void FreeInfo::operator()(fi_info* info) const { fi_freeinfo(info); }

absl::StatusOr<Info> FindProvider(absl::string_view provider, const std::string& local_address) {
  ShrinkMessageBuffers();
  const Info hints = Hints();
  fi_info* found = nullptr;
  const uint64_t flags = local_address.empty() ? 0 : FI_SOURCE;
  const int error =
      fi_getinfo(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION),
                 local_address.empty() ? nullptr : local_address.c_str(), nullptr, flags, hints.get(), &found);
  const Info all(error == 0 ? found : nullptr);
  for (const fi_info* info = all.get(); info != nullptr; info = info->next) {
    if (!Serves(*info, provider)) continue;
    Info chosen(fi_dupinfo(info));
    return chosen;
  }
  const uint32_t version = fi_version();
  return absl::NotFoundError(
      absl::StrCat("fabric: provider \"", provider, "\" asked for, not found",
                   local_address.empty() ? "" : absl::StrCat(" at ", local_address), " (libfabric ", FI_MAJOR(version),
                   ".", FI_MINOR(version), " offers ", absl::StrJoin(AvailableProviders(), ", "),
                   "); on EKS request vpc.amazonaws.com/efa in the pod, elsewhere set fabric.provider"));
}

std::vector<std::string> AvailableProviders() {
  const Info hints = Hints();
  fi_info* found = nullptr;
  std::vector<std::string> names;
  if (fi_getinfo(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), nullptr, nullptr, 0, hints.get(), &found) != 0)
    return names;
  const Info all(found);
  for (const fi_info* info = all.get(); info != nullptr; info = info->next) {
    for (const absl::string_view name : {"efa", "net", "tcp", "shm"}) {
      if (Serves(*info, name) && std::find(names.begin(), names.end(), name) == names.end()) names.emplace_back(name);
    }
  }
  return names;
}

LibfabricTransport::LibfabricTransport() = default;
LibfabricTransport::~LibfabricTransport() { Close(); }

absl::StatusOr<std::unique_ptr<LibfabricTransport>> LibfabricTransport::Open(Info info, uint64_t epoch,
                                                                             std::shared_ptr<OwnPage> own) {
  std::unique_ptr<LibfabricTransport> transport(new LibfabricTransport());
  transport->epoch_ = epoch;
  transport->own_ = std::move(own);
  transport->operations_.resize(kOperationsMax);
  for (Operation& operation : transport->operations_) transport->free_operations_.push_back(&operation);

  transport->objects_ = std::make_unique<Objects>();
  Objects& objects = *transport->objects_;
  objects.info = std::move(info);
  fid_fabric* fabric = nullptr;
  if (const int error = fi_fabric(objects.info->fabric_attr, &fabric, nullptr)) return FabricError("fi_fabric", error);
  objects.fabric.reset(fabric);
  fid_domain* domain = nullptr;
  if (const int error = fi_domain(fabric, objects.info.get(), &domain, nullptr)) return FabricError("fi_domain", error);
  objects.domain.reset(domain);
  fi_av_attr av_attr = {};
  av_attr.type = FI_AV_TABLE;
  fid_av* av = nullptr;
  if (const int error = fi_av_open(domain, &av_attr, &av, nullptr)) return FabricError("fi_av_open", error);
  objects.av.reset(av);

  fi_cq_attr cq_attr = {};
  cq_attr.size = kCompletionsMax;
  cq_attr.format = FI_CQ_FORMAT_DATA;
  fid_cq* cq = nullptr;
  // EFA of 1.17 has nothing to wait on; waiters then poll with pauses.
  for (const fi_wait_obj wait : {FI_WAIT_FD, FI_WAIT_NONE}) {
    cq_attr.wait_obj = wait;
    const int error = fi_cq_open(domain, &cq_attr, &cq, nullptr);
    if (error != 0 && wait == FI_WAIT_NONE) return FabricError("fi_cq_open", error);
    if (error != 0) continue;
    if (wait == FI_WAIT_FD && fi_control(&cq->fid, FI_GETWAIT, &objects.wait_fd) != 0) objects.wait_fd = -1;
    break;
  }
  objects.cq.reset(cq);

  fid_ep* ep = nullptr;
  if (const int error = fi_endpoint(domain, objects.info.get(), &ep, nullptr)) return FabricError("fi_endpoint", error);
  objects.ep.reset(ep);
  if (const int error = fi_ep_bind(ep, &av->fid, 0)) return FabricError("fi_ep_bind av", error);
  if (const int error = fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV)) return FabricError("fi_ep_bind cq", error);
  if (const int error = fi_enable(ep)) return FabricError("fi_enable", error);
  return transport;
}

absl::StatusOr<std::string> LibfabricTransport::Address() const {
  std::string address(512, '\0');
  size_t size = address.size();
  if (const int error = fi_getname(&objects_->ep->fid, address.data(), &size)) return FabricError("fi_getname", error);
  address.resize(size);
  return address;
}

absl::Status LibfabricTransport::Connect(Membership membership, const std::vector<std::string>& addresses) {
  MOERL_CHECK(addresses.size() == static_cast<size_t>(membership.size()) && objects_->peers.empty());
  membership_ = std::move(membership);
  objects_->peers.assign(addresses.size(), FI_ADDR_UNSPEC);
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    if (addresses[rank].empty()) continue;
    if (fi_av_insert(objects_->av.get(), addresses[rank].data(), 1, &objects_->peers[rank], 0, nullptr) != 1) {
      return absl::UnavailableError(
          absl::StrCat("fabric: the provider does not take the address of ", membership_.members[rank].name));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Region> LibfabricTransport::Register(std::byte* base, size_t bytes) {
  const uint64_t access = FI_WRITE | FI_REMOTE_WRITE;
  // 44 bits of epoch and 20 of counter.
  const uint64_t key = epoch_ << 20 | objects_->regions.size();
  fid_mr* region = nullptr;
  if (const int error = fi_mr_reg(objects_->domain.get(), base, bytes, access, 0, key, 0, &region, nullptr)) {
    return absl::ResourceExhaustedError(absl::StrCat("fabric: cannot register ", bytes, " bytes: ", fi_strerror(-error),
                                                     "; raise the memlock limit or use smaller pools"));
  }
  objects_->regions.emplace_back(region);
  const uint64_t mode = objects_->info->domain_attr->mr_mode;
  if (mode & FI_MR_ENDPOINT) {
    if (const int error = fi_mr_bind(region, &objects_->ep->fid, 0)) return FabricError("fi_mr_bind", error);
    if (const int error = fi_mr_enable(region)) return FabricError("fi_mr_enable", error);
  }
  const uint64_t address = mode & FI_MR_VIRT_ADDR ? reinterpret_cast<uint64_t>(base) : 0;
  return Region{.id = static_cast<int>(objects_->regions.size()) - 1,
                .base = base,
                .bytes = bytes,
                .remote = {.address = address, .key = fi_mr_key(region), .bytes = bytes}};
}

bool LibfabricTransport::Write(const WriteRequest& request) {
  MOERL_CHECK(request.bytes >= 1 && request.bytes <= kWriteBytesMax);
  MOERL_CHECK(request.to_offset + request.bytes <= request.to.bytes);
  MOERL_CHECK(objects_->peers[request.peer] != FI_ADDR_UNSPEC);
  if (free_operations_.empty()) return false;
  Operation* operation = free_operations_.back();
  const ssize_t posted = fi_writedata(objects_->ep.get(), request.source, request.bytes,
                                      fi_mr_desc(objects_->regions[request.region].get()), request.immediate,
                                      objects_->peers[request.peer], request.to.address + request.to_offset,
                                      request.to.key, &operation->context);
  if (posted == 0) {
    operation->user = request.context;
    free_operations_.pop_back();
    return true;
  }
  // A peer that is gone takes writes that never complete, like one that is slow; the failure detector tells them apart.
  if (posted != -FI_EAGAIN) free_operations_.pop_back();
  return posted != -FI_EAGAIN;
}

size_t LibfabricTransport::Poll(absl::Span<Event> events) {
  std::array<fi_cq_data_entry, 16> entries;
  size_t count = 0;
  while (count < events.size()) {
    const ssize_t read =
        fi_cq_read(objects_->cq.get(), entries.data(), std::min(entries.size(), events.size() - count));
    if (read == -FI_EAVAIL) {
      PollErrors();
      continue;
    }
    if (read <= 0) {
      if (read != 0 && read != -FI_EAGAIN && status_.ok())
        status_ = FabricError("completion queue", static_cast<int>(read));
      break;
    }
    for (ssize_t i = 0; i < read; ++i) {
      const fi_cq_data_entry& entry = entries[i];
      if (entry.flags & FI_WRITE) {
        Operation* operation = static_cast<Operation*>(entry.op_context);
        events[count++] = {.kind = Event::Kind::kSent, .immediate = 0, .context = operation->user};
        FreeOperation(operation);
      } else if (entry.flags & FI_REMOTE_CQ_DATA) {
        events[count++] = {.kind = Event::Kind::kArrived, .immediate = static_cast<uint32_t>(entry.data), .context = 0};
      }
    }
  }
  if (count > 0) num_empty_wakes_ = 0;
  return count;
}

// A failed write is a write to a peer that is gone. Its operation is not used again: the provider may still hold it.
void LibfabricTransport::PollErrors() {
  fi_cq_err_entry error = {};
  if (fi_cq_readerr(objects_->cq.get(), &error, 0) == 1 && error.err == FI_EOVERRUN && status_.ok()) {
    status_ = absl::InternalError(absl::StrCat("fabric: more than ", kCompletionsMax, " completions waited unread"));
  }
}

void LibfabricTransport::FreeOperation(Operation* operation) { free_operations_.push_back(operation); }

size_t LibfabricTransport::completion_capacity() const { return kCompletionsMax; }

// The wait descriptor of `net` stays readable without a completion for as long as it likes (seen with 1.17: 300,000
// empty wakes a second). After a few empty ones in a row the waits are pauses, longer and longer, until events come.
void LibfabricTransport::Wait(absl::Duration timeout) {
  fid* cq = &objects_->cq->fid;
  if (objects_->wait_fd < 0) {
    own_->Sleep(std::min(timeout, kPollPause), {});
  } else if (num_empty_wakes_ >= kEmptyWakesMax) {
    const int doublings = std::min(num_empty_wakes_++ - kEmptyWakesMax, kPauseDoublingsMax);
    own_->Sleep(std::min(timeout, kFirstPause * (1 << doublings)), {});
  } else if (fi_trywait(objects_->fabric.get(), &cq, 1) == 0) {
    const absl::Time start = absl::Now();
    own_->Sleep(timeout, {objects_->wait_fd});
    if (absl::Now() - start < kFirstPause) ++num_empty_wakes_;
  } else {
    ++num_empty_wakes_;
  }
}

void LibfabricTransport::Wake() {
  num_empty_wakes_ = 0;  // there is work: short pauses again
  own_->Ring();
}

void LibfabricTransport::Close() {
  if (objects_ == nullptr) return;
  objects_->regions.clear();
  objects_->ep.reset();
  objects_->cq.reset();
  objects_->av.reset();
  objects_->domain.reset();
  objects_->fabric.reset();
  objects_.reset();
}

}  // namespace moerl::fabric
