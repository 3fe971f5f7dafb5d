#include "libs/ep/buffer.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/metrics.h"
#include "libs/base/status_macros.h"
#include "libs/ep/fp8.h"
#include "libs/ep/records.h"

namespace moerl::ep {
namespace {

constexpr size_t kAlignment = 64;

size_t ElementBytes(RowType type) { return type == RowType::kFp32 ? 4 : 2; }

// Enough parts in flight to cover a few milliseconds of waking up, within bounded memory: fewer, the more nodes.
uint32_t AutoSlots(int num_nodes) { return static_cast<uint32_t>(std::clamp(256 / std::max(1, num_nodes - 1), 8, 64)); }

LinkSizes SizesOf(const ExpertMap& map, const BufferOptions& options, int num_nodes) {
  LinkSizes sizes;
  sizes.row_record_bytes = RowRecordBytes(options.top_k_max, static_cast<size_t>(options.hidden) * 4);
  sizes.partial_record_bytes = PartialRecordBytes(options.top_k_max, /*is_bf16=*/false, options.hidden);
  sizes.control_record_bytes = sizeof(RouteRecord) + sizeof(uint32_t) * map.max_experts_of_rank();
  sizes.route_bytes = sizeof(RouteRecord) + sizeof(uint32_t) * map.max_experts_of_node();
  sizes.part_bytes = std::max({options.part_bytes, sizes.row_record_bytes, sizes.partial_record_bytes});
  sizes.rows_slots = options.rows_slots != 0 ? options.rows_slots : AutoSlots(num_nodes);
  sizes.part_slots = options.part_slots != 0 ? options.part_slots : AutoSlots(num_nodes);
  sizes.ring_entries = options.ring_entries;
  return sizes;
}

}  // namespace

// Of all buffers of this process.
struct Buffer::Metrics {
  static Metrics& Get() {
    static auto& metrics = *new Metrics();
    return metrics;
  }
  static Counter& Bytes(absl::string_view kind, absl::string_view over) {
    return GetCounter("moerl_ep_sent_bytes_total",
                      "Bytes this rank sent: rows, partial sums and routes over the network, headers included, and "
                      "everything that went to ranks of its node through memory.",
                      {{"kind", kind}, {"over", over}});
  }
  static Histogram& Wait(absl::string_view operation) {
    static constexpr double kBounds[] = {1e-5,  2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01,
                                         0.025, 0.05,   0.1,  0.25, 0.5,    1,    2.5,  5,      10,   25};
    return GetHistogram("moerl_ep_wait_seconds",
                        "Time this rank waited for an operation it had begun; the rank that waits least is the one the "
                        "others wait for.",
                        kBounds, {{"operation", operation}});
  }

  Histogram& dispatch_wait = Wait("dispatch");
  Histogram& combine_wait = Wait("combine");
  Counter& row_bytes = Bytes("rows", "network");
  Counter& partial_bytes = Bytes("partials", "network");
  Counter& route_bytes = Bytes("routes", "network");
  Counter& ring_bytes = Bytes("all", "memory");
  Counter& stalled = GetCounter("moerl_ep_stalled_seconds_total",
                                "Time in which a message was ready for another node and its slot there was not free.");
  Counter& tokens = GetCounter("moerl_ep_tokens_total", "Tokens this rank dispatched.");
  Counter& rows = GetCounter("moerl_ep_rows_received_total", "Rows that came for this rank's experts.");
  Counter& failures = GetCounter("moerl_ep_failures_total", "Operations that ended in an error, a lost rank for one.");
};

// Memory of outputs and quantised rows, reused: large blocks cost page faults each time they are new. Blocks are a
// little larger than asked for, since the number of rows changes a little from one operation to the next.
struct Buffer::Pool {
  static constexpr size_t kKept = 6;
  struct Block {
    std::byte* data;
    size_t bytes;
  };
  absl::Mutex mutex;
  std::vector<Block> free ABSL_GUARDED_BY(mutex);

  ~Pool() {
    for (const Block& block : free) ::operator delete (block.data, std::align_val_t{kAlignment});
  }
  static std::shared_ptr<std::byte> Take(const std::shared_ptr<Pool>& pool, size_t bytes) {
    Block block = {nullptr, bytes + bytes / 8};
    {
      absl::MutexLock lock(&pool->mutex);
      const auto is_better = [bytes](const Block& a, const Block& b) {  // fits, and more closely
        return a.bytes >= bytes && (b.bytes < bytes || a.bytes < b.bytes);
      };
      const auto found = std::min_element(pool->free.begin(), pool->free.end(), is_better);
      if (found != pool->free.end() && found->bytes >= bytes) {
        block = *found;
        pool->free.erase(found);
      }
    }
    if (block.data == nullptr) {
      block.data = static_cast<std::byte*>(::operator new (block.bytes + 1, std::align_val_t{kAlignment}));
    }
    return {block.data, [pool, block](std::byte*) { pool->Give(block); }};
  }
  void Give(const Block& block) {
    absl::MutexLock lock(&mutex);
    free.push_back(block);
    if (free.size() <= kKept) return;
    ::operator delete (free.front().data, std::align_val_t{kAlignment});
    free.erase(free.begin());
  }
};

// What an operation needs beside the state machines.
struct Buffer::Pending {
  bool is_combine = false;
  std::shared_ptr<std::byte> output;     // dispatch
  std::shared_ptr<std::byte> quantised;  // fp8 rows to send
  size_t row_bytes = 0;
};

Buffer::Buffer(Group* group, ExpertMap map, BufferOptions options)
    : group_(group),
      map_(std::move(map)),
      options_(options),
      id_(group->hub().NextBufferId()),
      links_(&group->hub(), &group->topology(), id_),
      pool_(std::make_shared<Pool>()),
      dispatcher_(&group->hub(), &group->topology(), &map_, &links_,
                  [this](uint64_t sequence, size_t bytes) {
                    Pending& pending = pending_[sequence];
                    pending.output = Pool::Take(pool_, bytes);
                    return pending.output.get();
                  }),
      combiner_(&group->hub(), &group->topology(), &map_, &links_) {
  Metrics::Get();  // a scrape finds them all from the start
}

absl::StatusOr<std::unique_ptr<Buffer>> Buffer::Open(Group* group, ExpertMap map, BufferOptions options) {
  const auto bad = [](std::string what) { return absl::InvalidArgumentError(absl::StrCat("ep: ", what)); };
  if (options.hidden <= 0) return bad(absl::StrCat("hidden: ", options.hidden, ", expected at least 1"));
  if (options.top_k_max < 1 || options.top_k_max > kTopKMax) {
    return bad(absl::StrCat("top_k_max: ", options.top_k_max, ", expected 1 to ", kTopKMax));
  }
  if (options.ring_entries < 1 || options.operations_max < 1) {
    return bad("ring_entries and operations_max must be at least 1");
  }
  std::unique_ptr<Buffer> buffer;  // its destructor takes the lock
  absl::MutexLock lock(&group->hub().mutex());
  buffer.reset(new Buffer(group, std::move(map), options));
  MOERL_RETURN_IF_ERROR(buffer->links_.Open(SizesOf(buffer->map_, options, group->topology().num_nodes())));
  return buffer;
}

std::string Buffer::Offer() const {
  const uint64_t digest[] = {map_.digest(), static_cast<uint64_t>(options_.hidden),
                             static_cast<uint64_t>(options_.top_k_max), options_.ring_entries};
  return std::string(reinterpret_cast<const char*>(digest), sizeof(digest)) + links_.Offer();
}

absl::Status Buffer::Connect(absl::Span<const std::string> offers) {
  constexpr size_t kDigestBytes = 4 * sizeof(uint64_t);
  const std::string mine = Offer();
  std::vector<std::string> links;
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    if (offers[rank].compare(0, kDigestBytes, mine, 0, kDigestBytes) != 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "ep: buffer ", id_, " of ", group_->hub().name_of(static_cast<int>(rank)),
          " has another expert map, hidden, top_k_max or ring_entries than here; give all ranks the same"));
    }
    links.push_back(offers[rank].substr(kDigestBytes));
  }
  absl::MutexLock lock(&group_->hub().mutex());
  MOERL_RETURN_IF_ERROR(links_.Connect(links));
  group_->hub().AddMover(this);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Buffer>> Buffer::Create(Group* group, ExpertMap map, BufferOptions options) {
  MOERL_ASSIGN_OR_RETURN(std::unique_ptr<Buffer> buffer, Open(group, std::move(map), options));
  MOERL_CHECK(group->hub().exchange() != nullptr);
  MOERL_ASSIGN_OR_RETURN(std::vector<std::string> offers,
                         group->hub().exchange()->AllGather(absl::StrCat("ep buffer ", buffer->id_), buffer->Offer(),
                                                            group->hub().options().setup_timeout));
  MOERL_RETURN_IF_ERROR(buffer->Connect(offers));
  return buffer;
}

Buffer::~Buffer() {
  absl::MutexLock lock(&group_->hub().mutex());
  group_->hub().RemoveMover(this);
  links_.Close();
}

absl::Status Buffer::Close() {
  MOERL_CHECK(pending_.empty());
  fabric::Hub& hub = group_->hub();
  MOERL_RETURN_IF_ERROR(hub.Await([this] { return links_.is_idle() && links_.has_all_credits(); },
                                  [] {
                                    return fabric::Hub::Missing{{}, "closing a buffer: credits not back"};
                                  }));
  return hub.exchange()->AllGather(absl::StrCat("ep close ", id_), "", hub.options().setup_timeout).status();
}

bool Buffer::Move() {
  bool moved = links_.Move();
  moved |= dispatcher_.Move();
  moved |= combiner_.Move();
  moved |= links_.Move();
  return moved;
}

// ---------------------------------------------------------------- dispatch

absl::Status Buffer::CheckInput(const DispatchInput& input) const {
  const auto bad = [](std::string what) { return absl::InvalidArgumentError(absl::StrCat("ep: dispatch: ", what)); };
  if (input.num_tokens < 0 || input.num_tokens > kTokensMax) {
    return bad(absl::StrCat("num_tokens is ", input.num_tokens, ", expected 0 to ", kTokensMax));
  }
  if (input.top_k < 1 || input.top_k > options_.top_k_max) {
    return bad(absl::StrCat("top_k is ", input.top_k, ", the buffer was made for 1 to ", options_.top_k_max));
  }
  if (input.num_tokens > 0 && (input.x == nullptr || input.topk_ids == nullptr))
    return bad("x and topk_ids are needed");
  for (int64_t token = 0; token < input.num_tokens; ++token) {
    const int32_t* ids = input.topk_ids + token * input.top_k;
    for (int j = 0; j < input.top_k; ++j) {
      if (ids[j] < -1 || ids[j] >= map_.num_experts()) {
        return bad(
            absl::StrCat("topk_ids[", token, ", ", j, "] is ", ids[j], ", expected -1 to ", map_.num_experts() - 1));
      }
      for (int i = 0; i < j; ++i) {
        if (ids[j] >= 0 && ids[i] == ids[j]) {
          return bad(absl::StrCat("topk_ids[", token, "] names expert ", ids[j], " twice"));
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Buffer::CheckRoom() const {
  if (pending_.size() < static_cast<size_t>(options_.operations_max)) return group_->hub().failure();
  return absl::ResourceExhaustedError(absl::StrCat("ep: ", pending_.size(), " operations in flight on one buffer, ",
                                                   "operations_max is ", options_.operations_max,
                                                   "; receive one first"));
}

absl::StatusOr<Ticket> Buffer::SendDispatch(const DispatchInput& input) {
  MOERL_RETURN_IF_ERROR(CheckInput(input));
  auto route = std::make_shared<Route>();
  route->num_tokens = static_cast<int>(input.num_tokens);
  route->top_k = input.top_k;
  RowList& own = route->own;
  for (int64_t token = 0; token < input.num_tokens; ++token) {
    const int32_t* ids = input.topk_ids + token * input.top_k;
    uint8_t order[kTopKMax];
    int n = 0;
    for (int j = 0; j < input.top_k; ++j) {
      if (ids[j] >= 0) order[n++] = static_cast<uint8_t>(j);
    }
    std::sort(order, order + n, [ids](uint8_t a, uint8_t b) { return ids[a] < ids[b]; });
    for (int i = 0; i < n; ++i) {
      own.ids.push_back(static_cast<uint16_t>(ids[order[i]]));
      route->choice.push_back(order[i]);
      route->own_weights.push_back(input.weights == nullptr ? 1.0f : input.weights[token * input.top_k + order[i]]);
    }
    own.row.push_back(static_cast<uint32_t>(token));
    own.first_id.push_back(static_cast<uint32_t>(own.ids.size()));
  }
  return Post(std::move(route), /*is_cached=*/false, input.x, input.type, input.to_fp8);
}

absl::StatusOr<Ticket> Buffer::SendDispatch(const Handle& handle, const void* x, RowType type, bool to_fp8) {
  MOERL_CHECK(handle != nullptr);
  return Post(std::const_pointer_cast<Route>(handle), /*is_cached=*/true, x, type, to_fp8);
}

absl::StatusOr<Ticket> Buffer::Post(std::shared_ptr<Route> route, bool is_cached, const void* x, RowType type,
                                    bool to_fp8) {
  const size_t hidden = options_.hidden;
  const size_t num_tokens = route->num_tokens;
  std::shared_ptr<std::byte> quantised;
  size_t row_bytes = hidden * ElementBytes(type);
  if (to_fp8) {
    quantised = Pool::Take(pool_, num_tokens * Fp8RowBytes(hidden));
    std::vector<float> row(hidden);
    for (size_t token = 0; token < num_tokens; ++token) {
      if (type == RowType::kFp32) {
        std::memcpy(row.data(), static_cast<const float*>(x) + token * hidden, hidden * sizeof(float));
      } else {
        FromBf16(static_cast<const uint16_t*>(x) + token * hidden, static_cast<int>(hidden), row.data());
      }
      QuantizeFp8(row, quantised.get() + token * Fp8RowBytes(hidden));
    }
    row_bytes = Fp8RowBytes(hidden);
  }

  absl::MutexLock lock(&group_->hub().mutex());
  MOERL_RETURN_IF_ERROR(CheckRoom());
  const uint64_t sequence = next_sequence_++;
  Pending& pending = pending_[sequence];
  pending.quantised = std::move(quantised);
  pending.row_bytes = row_bytes;
  const std::byte* payload = to_fp8 ? pending.quantised.get() : static_cast<const std::byte*>(x);
  dispatcher_.Post(sequence, std::move(route), is_cached, payload, row_bytes);
  Started();
  return Ticket{sequence};
}

// Lets what was posted leave at once, where no thread does it.
void Buffer::Started() {
  if (group_->hub().has_progress_thread()) {
    group_->hub().Kick();
  } else {
    group_->hub().Progress();
  }
}

bool Buffer::IsDoneLocked(uint64_t sequence) {
  if (pending_[sequence].is_combine) return combiner_.Find(sequence)->is_done;
  return dispatcher_.Find(sequence)->is_done;
}

bool Buffer::IsDone(Ticket ticket) {
  absl::MutexLock lock(&group_->hub().mutex());
  return IsDoneLocked(ticket.sequence);
}

absl::StatusOr<Dispatched> Buffer::ReceiveDispatch(Ticket ticket) {
  const uint64_t sequence = ticket.sequence;
  const auto missing = [&] {
    fabric::Hub::Missing who;
    dispatcher_.DescribeMissing(*dispatcher_.Find(sequence), &who);
    who.what = absl::StrCat("dispatch ", sequence, " of buffer ", id_, " on ", group_->hub().name_of(group_->rank()),
                            ": ", who.what);
    return who;
  };
  const absl::Time began = absl::Now();
  MOERL_RETURN_IF_ERROR(Await(sequence, missing));
  absl::MutexLock lock(&group_->hub().mutex());
  Measure(/*is_combine=*/false, began);
  const Dispatcher::Op& op = *dispatcher_.Find(sequence);
  Pending& pending = pending_[sequence];
  Dispatched result;
  result.handle = op.route;
  result.num_rows = op.route->num_rows();
  Metrics::Get().tokens.Add(op.route->num_tokens);
  Metrics::Get().rows.Add(static_cast<double>(result.num_rows));
  result.x = pending.output.get();
  result.row_bytes = pending.row_bytes;
  result.offsets = op.route->offsets;
  result.weights = op.route->row_weights;
  result.memory = std::move(pending.output);
  dispatcher_.Erase(sequence);
  pending_.erase(sequence);
  return result;
}

absl::StatusOr<Dispatched> Buffer::Dispatch(const DispatchInput& input) {
  MOERL_ASSIGN_OR_RETURN(const Ticket ticket, SendDispatch(input));
  return ReceiveDispatch(ticket);
}

absl::StatusOr<Dispatched> Buffer::Dispatch(const Handle& handle, const void* x, RowType type, bool to_fp8) {
  MOERL_ASSIGN_OR_RETURN(const Ticket ticket, SendDispatch(handle, x, type, to_fp8));
  return ReceiveDispatch(ticket);
}

// ---------------------------------------------------------------- combine

absl::StatusOr<Ticket> Buffer::SendCombine(const CombineInput& input) {
  MOERL_CHECK(input.handle != nullptr);
  CombineWork work;
  work.route = input.handle;
  if (input.type == RowType::kFp32) {
    work.rows_fp32 = static_cast<const float*>(input.rows);
  } else {
    work.rows_bf16 = static_cast<const uint16_t*>(input.rows);
  }
  work.is_weighted = input.is_weighted;
  work.hidden = options_.hidden;
  work.wire_block = input.wire_block;
  work.has_scalars = input.has_scalars;
  work.scalars = input.scalars;
  work.out = input.out;
  work.scalars_out = input.scalars_out;
  absl::MutexLock lock(&group_->hub().mutex());
  MOERL_RETURN_IF_ERROR(CheckRoom());
  const uint64_t sequence = next_sequence_++;
  pending_[sequence].is_combine = true;
  combiner_.Post(sequence, std::move(work));
  Started();
  return Ticket{sequence};
}

absl::Status Buffer::ReceiveCombine(Ticket ticket) {
  const uint64_t sequence = ticket.sequence;
  const auto missing = [&] {
    fabric::Hub::Missing who;
    combiner_.DescribeMissing(*combiner_.Find(sequence), &who);
    who.what = absl::StrCat("combine ", sequence, " of buffer ", id_, " on ", group_->hub().name_of(group_->rank()),
                            ": ", who.what);
    return who;
  };
  const absl::Time began = absl::Now();
  MOERL_RETURN_IF_ERROR(Await(sequence, missing));
  absl::MutexLock lock(&group_->hub().mutex());
  Measure(/*is_combine=*/true, began);
  combiner_.Erase(sequence);
  pending_.erase(sequence);
  return absl::OkStatus();
}

absl::Status Buffer::Combine(const CombineInput& input) {
  MOERL_ASSIGN_OR_RETURN(const Ticket ticket, SendCombine(input));
  return ReceiveCombine(ticket);
}

absl::Status Buffer::Await(uint64_t sequence, absl::FunctionRef<fabric::Hub::Missing()> missing) {
  const absl::Status status = group_->hub().Await([&] { return IsDoneLocked(sequence); }, missing);
  if (!status.ok()) Metrics::Get().failures.Add();
  return status;
}

void Buffer::Measure(bool is_combine, absl::Time began) {
  Metrics& metrics = Metrics::Get();
  (is_combine ? metrics.combine_wait : metrics.dispatch_wait).Observe(absl::ToDoubleSeconds(absl::Now() - began));
  const Stats now = StatsLocked();
  metrics.row_bytes.Add(static_cast<double>(now.row_bytes - measured_.row_bytes));
  metrics.partial_bytes.Add(static_cast<double>(now.partial_bytes - measured_.partial_bytes));
  metrics.route_bytes.Add(static_cast<double>(now.route_bytes - measured_.route_bytes));
  metrics.ring_bytes.Add(static_cast<double>(now.ring_bytes - measured_.ring_bytes));
  metrics.stalled.Add(absl::ToDoubleSeconds(now.stalled - measured_.stalled));
  measured_ = now;
}

Buffer::Stats Buffer::stats() {
  absl::MutexLock lock(&group_->hub().mutex());
  return StatsLocked();
}

Buffer::Stats Buffer::StatsLocked() const {
  Stats stats;
  stats.rows = dispatcher_.rows_crossed();
  stats.partials = combiner_.partials_crossed();
  stats.row_bytes = links_.bytes_posted(Links::kRows);
  stats.partial_bytes = links_.bytes_posted(Links::kPart);
  stats.route_bytes = links_.bytes_posted(Links::kRoute);
  stats.ring_bytes = links_.ring_bytes_published();
  stats.stalled = links_.stalled();
  stats.receive_bytes = links_.receive_bytes();
  return stats;
}

bool Buffer::is_quiet() {
  absl::MutexLock lock(&group_->hub().mutex());
  return links_.is_idle() && links_.has_all_credits();
}

}  // namespace moerl::ep
