#include "libs/ep/buffer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "libs/collective/fabric_collective.h"
#include "libs/ep/all_to_all.h"
#include "libs/ep/fp8.h"
#include "libs/ep/records.h"
#include "libs/fabric/chaos_transport.h"
#include "libs/fabric/in_process_fabric.h"

namespace moerl::ep {
namespace {

constexpr int kHidden = 64;
constexpr int kExperts = 8;

// Ranks as threads, as processes would use the library: blocking calls, progress threads between nodes.
class Ranks {
 public:
  explicit Ranks(std::vector<int> node_of, absl::Duration timeout = absl::Seconds(20))
      : fabric_({.node_of = node_of}), timeout_(timeout) {}

  void Run(const std::function<void(Group&)>& body) {
    std::vector<fabric::Endpoint> endpoints;
    for (int rank = 0; rank < fabric_.size(); ++rank) {
      endpoints.push_back(fabric_.Open(rank));
      if (watch_) endpoints.back().watch = watch_();
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < fabric_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        Group::Options options;
        options.timeout = timeout_;
        options.spin = absl::ZeroDuration();
        Group group(std::move(endpoints[rank]), options);
        body(group);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  std::function<std::unique_ptr<fabric::PeerWatch>()> watch_;

 private:
  fabric::InProcessFabric fabric_;
  const absl::Duration timeout_;
};

std::unique_ptr<Buffer> NewBuffer(Group& group, BufferOptions options = {}) {
  options.hidden = kHidden;
  options.top_k_max = 4;
  auto buffer = Buffer::Create(&group, *ExpertMap::Aligned(group.membership(), kExperts), options);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  return *std::move(buffer);
}

// Token t of rank r is all (r * 1000 + t + shift), chooses experts t and t + 3, with weights 1 and 0.5.
struct Batch {
  Batch(int rank, int tokens, float shift = 0) : count(tokens) {
    for (int t = 0; t < tokens; ++t) {
      x.insert(x.end(), kHidden, static_cast<float>(rank * 1000 + t) + shift);
      ids.insert(ids.end(), {(t + 3) % kExperts, t % kExperts});
      weights.insert(weights.end(), {0.5f, 1.0f});
    }
    out.resize(x.size());
  }
  DispatchInput Input() const { return {x.data(), RowType::kFp32, false, count, 2, ids.data(), weights.data()}; }
  int count;
  std::vector<float> x, weights, out;
  std::vector<int32_t> ids;
};

// Experts multiply by their number: out = x * (t % 8 + 0.5 * ((t + 3) % 8)).
std::vector<float> RunExperts(const Buffer& buffer, int rank, const Dispatched& d) {
  std::vector<float> y(d.num_rows * kHidden);
  const std::vector<int>& experts = buffer.map().experts_of_rank(rank);
  for (size_t e = 0; e < experts.size(); ++e) {
    for (int64_t i = d.offsets[e] * kHidden; i < d.offsets[e + 1] * kHidden; ++i) {
      y[i] = reinterpret_cast<const float*>(d.x)[i] * static_cast<float>(experts[e]);
    }
  }
  return y;
}

void ExpectSum(const Batch& batch, int rank, float shift = 0) {
  for (int t = 0; t < batch.count; ++t) {
    const float factor = static_cast<float>(t % kExperts) + 0.5f * static_cast<float>((t + 3) % kExperts);
    for (int i = 0; i < kHidden; ++i) {
      ASSERT_EQ(batch.out[t * kHidden + i], (static_cast<float>(rank * 1000 + t) + shift) * factor);
    }
  }
}

TEST(Buffer, ForwardWorksOnOneNodeAndOnSeveral) {
  for (const std::vector<int>& nodes : {std::vector<int>{0}, {0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 1}}) {
    Ranks(nodes).Run([](Group& group) {
      std::unique_ptr<Buffer> buffer = NewBuffer(group);
      for (const int tokens : {0, 1, 30}) {
        Batch batch(group.rank(), group.rank() == 1 ? 0 : tokens);
        const auto d = buffer->Dispatch(batch.Input());
        ASSERT_TRUE(d.ok()) << d.status();
        const std::vector<float> y = RunExperts(*buffer, group.rank(), *d);
        CombineInput combine;
        combine.handle = d->handle;
        combine.rows = y.data();
        combine.out = batch.out.data();
        ASSERT_TRUE(buffer->Combine(combine).ok());
        ExpectSum(batch, group.rank());
      }
      ASSERT_TRUE(buffer->Close().ok());
    });
  }
}

TEST(Buffer, GradientsTakeTheSameRoutesBackwardWithoutCounts) {
  Ranks({0, 0, 1}).Run([](Group& group) {
    std::unique_ptr<Buffer> buffer = NewBuffer(group);
    Batch batch(group.rank(), 10);
    const auto d = buffer->Dispatch(batch.Input());
    ASSERT_TRUE(d.ok()) << d.status();
    const uint64_t route_bytes = buffer->stats().route_bytes;
    const Batch gradient(group.rank(), 10, 0.25f);
    const auto g = buffer->Dispatch(d->handle, gradient.x.data(), RowType::kFp32);
    ASSERT_TRUE(g.ok()) << g.status();
    EXPECT_EQ(buffer->stats().route_bytes, route_bytes);
    ASSERT_EQ(g->num_rows, d->num_rows);
    // The gradient of a routing weight is <d_out, y>; that of a row is whatever the expert makes: here a copy.
    std::vector<float> d_weight(g->num_rows);
    for (int64_t row = 0; row < g->num_rows; ++row) d_weight[row] = reinterpret_cast<const float*>(g->x)[row * kHidden];
    std::vector<float> d_weights(batch.weights.size());
    CombineInput combine;
    combine.handle = d->handle;
    combine.rows = g->x;
    combine.is_weighted = false;
    combine.has_scalars = true;
    combine.scalars = d_weight.data();
    combine.out = batch.out.data();
    combine.scalars_out = d_weights.data();
    ASSERT_TRUE(buffer->Combine(combine).ok());
    for (size_t i = 0; i < batch.out.size(); ++i) ASSERT_EQ(batch.out[i], 2 * gradient.x[i]);
    for (int t = 0; t < 10; ++t) {
      ASSERT_EQ(d_weights[2 * t], gradient.x[t * kHidden]);
      ASSERT_EQ(d_weights[2 * t + 1], gradient.x[t * kHidden]);
    }
    ASSERT_TRUE(buffer->Close().ok());
  });
}

TEST(Buffer, TwoGroupsWithFourOperationsInFlightDoNotDisturbEachOther) {
  Ranks first({0, 1, 1}), second({0, 0, 1});
  const auto body = [](Group& group) {
    std::unique_ptr<Buffer> buffers[] = {NewBuffer(group), NewBuffer(group)};
    for (int round = 0; round < 20; ++round) {
      std::vector<Batch> batches;
      std::vector<Ticket> tickets;
      for (int i = 0; i < 4; ++i) batches.emplace_back(group.rank(), 5 + i, static_cast<float>(i));
      for (int i = 0; i < 4; ++i) tickets.push_back(*buffers[i % 2]->SendDispatch(batches[i].Input()));
      for (int i = 3; i >= 0; --i) {
        Buffer& buffer = *buffers[i % 2];
        const auto d = buffer.ReceiveDispatch(tickets[i]);
        ASSERT_TRUE(d.ok()) << d.status();
        const std::vector<float> y = RunExperts(buffer, group.rank(), *d);
        CombineInput combine;
        combine.handle = d->handle;
        combine.rows = y.data();
        combine.out = batches[i].out.data();
        ASSERT_TRUE(buffer.Combine(combine).ok());
        ExpectSum(batches[i], group.rank(), static_cast<float>(i));
      }
    }
    for (auto& buffer : buffers) ASSERT_TRUE(buffer->Close().ok());
  };
  std::thread other([&] { second.Run(body); });
  first.Run(body);
  other.join();
}

TEST(Buffer, NamesTheRankThatDoesNotCome) {
  std::atomic<bool> is_over = false;
  Ranks({0, 1}, absl::Milliseconds(300)).Run([&](Group& group) {
    std::unique_ptr<Buffer> buffer = NewBuffer(group);
    if (group.rank() == 1) {
      while (!is_over) std::this_thread::yield();
      return;
    }
    const Batch batch(group.rank(), 4);
    const absl::Status status = buffer->Dispatch(batch.Input()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    for (const char* part : {"dispatch 1", "on rank 0", "counts expected, none received from rank 1 (node 1"}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status;
    }
    EXPECT_EQ(buffer->SendDispatch(batch.Input()).status(), status);  // the group is of no use any more
    is_over = true;
  });
}

class Scripted : public fabric::PeerWatch {
 public:
  explicit Scripted(const std::atomic<bool>* is_lost) : is_lost_(is_lost) {}
  fabric::PeerState state(int rank, std::string* reason) const override {
    if (rank != 1 || !*is_lost_) return fabric::PeerState::kAlive;
    if (reason != nullptr) *reason = "its process ended";
    return fabric::PeerState::kLost;
  }

 private:
  const std::atomic<bool>* is_lost_;
};

TEST(Buffer, TurnsALostRankInTheMiddleOfACombineIntoAnError) {
  std::atomic<bool> is_lost = false, is_over = false;
  Ranks ranks({0, 1}, absl::Milliseconds(1));  // far shorter than the wait: peers that are alive may take their time
  ranks.watch_ = [&] { return std::make_unique<Scripted>(&is_lost); };
  ranks.Run([&](Group& group) {
    std::unique_ptr<Buffer> buffer = NewBuffer(group);
    Batch batch(group.rank(), 16);
    const auto d = buffer->Dispatch(batch.Input());
    ASSERT_TRUE(d.ok()) << d.status();
    if (group.rank() == 1) {
      absl::SleepFor(absl::Milliseconds(50));
      is_lost = true;
      while (!is_over) std::this_thread::yield();
      return;
    }
    const std::vector<float> y(d->num_rows * kHidden);
    CombineInput combine;
    combine.handle = d->handle;
    combine.rows = y.data();
    combine.out = batch.out.data();
    const absl::Status status = buffer->Combine(combine);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    for (const char* part : {"lost rank 1 (node 1", "its process ended", "combine 2", "16 rows expected"}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status;
    }
    is_over = true;
  });
}

TEST(Buffer, RefusesBadArgumentsByName) {
  Ranks({0}).Run([](Group& group) {
    std::unique_ptr<Buffer> buffer = NewBuffer(group);
    Batch batch(0, 3);
    batch.ids[3] = kExperts;
    EXPECT_EQ(buffer->SendDispatch(batch.Input()).status().message(),
              "ep: dispatch: topk_ids[1, 1] is 8, expected -1 to 7");
    batch.ids[3] = batch.ids[2];
    EXPECT_EQ(buffer->SendDispatch(batch.Input()).status().message(), "ep: dispatch: topk_ids[1] names expert 4 twice");
    EXPECT_EQ(Buffer::Open(&group, *ExpertMap::Aligned(group.membership(), 4), {.hidden = 0}).status().code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ExpertMap::Create(group.membership(), {0, 1}).status().message(),
              "ep: expert 1 is given to rank 1, the group has ranks 0 to 0");
  });
}

TEST(Buffer, RefusesRanksWithOtherOptions) {
  Ranks({0, 1}).Run([](Group& group) {
    BufferOptions options;
    options.hidden = kHidden;
    options.top_k_max = group.rank() == 0 ? 2 : 3;
    const auto buffer = Buffer::Create(&group, *ExpertMap::Aligned(group.membership(), kExperts), options);
    EXPECT_EQ(buffer.status().code(), absl::StatusCode::kFailedPrecondition);
  });
}

TEST(Buffer, GivesTheBitsOfThePlainAllToAllForFewerBytes) {
  Ranks({0, 0, 1, 1}).Run([](Group& group) {
    std::unique_ptr<Buffer> buffer = NewBuffer(group);
    auto collective = collective::FabricCollective::Create(&group.hub(), {});
    ASSERT_TRUE(collective.ok()) << collective.status();
    AllToAll plain(collective->get(), &buffer->map(), kHidden);
    for (const int wire_block : {kNoWireBlock, 2}) {
      Batch batch(group.rank(), 25, 0.37f);
      const auto d = buffer->Dispatch(batch.Input());
      const uint64_t before = (*collective)->bytes_posted();
      const auto p = plain.Dispatch(batch.Input());
      ASSERT_TRUE(d.ok() && p.ok()) << d.status() << p.status();
      ASSERT_EQ(d->num_rows, p->num_rows);
      EXPECT_EQ(std::memcmp(d->x, p->x.data(), p->x.size()), 0);
      EXPECT_EQ(d->offsets, absl::MakeConstSpan(p->offsets));
      EXPECT_EQ(d->weights, absl::MakeConstSpan(p->weights));
      const std::vector<float> y = RunExperts(*buffer, group.rank(), *d);
      CombineInput combine;
      combine.handle = d->handle;
      combine.rows = y.data();
      combine.wire_block = wire_block;
      combine.out = batch.out.data();
      ASSERT_TRUE(buffer->Combine(combine).ok());
      std::vector<float> out(batch.out.size());
      ASSERT_TRUE(plain.Combine(*p, y.data(), wire_block, out.data()).ok());
      EXPECT_EQ(out, batch.out);
      EXPECT_LT(buffer->stats().row_bytes, (*collective)->bytes_posted() - before);
    }
    ASSERT_TRUE((*collective)->Barrier().ok());
    ASSERT_TRUE(buffer->Close().ok());
  });
}

// docs/ep.md has the formula.
TEST(Buffer, ReceiveMemoryFollowsTheFormula) {
  Ranks({0, 0, 1, 1, 2}).Run([](Group& group) {
    BufferOptions options;
    options.rows_slots = 3;
    options.part_slots = 2;
    options.ring_entries = 4;
    std::unique_ptr<Buffer> buffer = NewBuffer(group, options);
    const Topology& t = group.topology();
    const auto slot = [](size_t payload) { return (16 + 48 + payload + 63) / 64 * 64; };
    const auto ring = [&](size_t record) { return 128 + options.ring_entries * (8 + (record + 7) / 8 * 8); };
    const size_t in_peers = t.in_peers().size(), nodes = t.num_nodes() - 1, local = t.local_ranks().size() - 1;
    const size_t experts_node = buffer->map().max_experts_of_node(), experts_rank = buffer->map().max_experts_of_rank();
    const size_t wire = in_peers * (slot(24 + 4 * experts_node) + 3 * slot(64 << 10)) + nodes * 2 * slot(64 << 10);
    const size_t rings = local * (ring(24 + 4 * experts_rank) + ring(RowRecordBytes(4, kHidden * 4)) +
                                  ring(PartialRecordBytes(4, false, kHidden)));
    EXPECT_EQ(buffer->stats().receive_bytes, wire + rings);
  });
}

// One rank of 32 nodes of 8, 256 experts, 128 tokens of 7168 a rank: DeepEP's low-latency buffer has, twice, a place
// for every token of every rank at every expert it holds.
TEST(Buffer, ReceiveMemoryIsFarBelowOneSizedForTheWorstCase) {
  constexpr size_t kTokens = 128, kModelHidden = 7168, kModelExperts = 256, kRanks = 256, kNodes = 32;
  const size_t worst = 2 * kModelExperts / kRanks * kRanks * kTokens * (kModelHidden * 2 + 16);
  const auto slot = [](size_t payload) { return (16 + 48 + payload + 63) / 64 * 64; };
  const size_t pools = (kNodes - 1) * (slot(24 + 4 * 8) + 8 * slot(64 << 10) + 8 * slot(64 << 10));
  const size_t rings = 7 * 64 * (RowRecordBytes(8, kModelHidden * 4) + PartialRecordBytes(8, false, kModelHidden));
  std::cout << "worst case " << worst / 1e6 << " MB, pools " << (pools + rings) / 1e6 << " MB" << std::endl;
  EXPECT_GT(worst, 8 * (pools + rings));
}

TEST(Fp8, RoundsToNearestAndSaturates) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    EXPECT_EQ(Fp8FromFloat(FloatFromFp8(static_cast<uint8_t>(code))), code);
  }
  // Every value rounds to the nearest code, checked against all of them.
  for (int i = -5000; i <= 5000; ++i) {
    const float value = static_cast<float>(i) * 0.0937f;
    float best = 1e9f;
    for (int code = 0; code < 256; ++code) {
      if ((code & 0x7f) != 0x7f) best = std::min(best, std::abs(FloatFromFp8(static_cast<uint8_t>(code)) - value));
    }
    EXPECT_EQ(std::abs(FloatFromFp8(Fp8FromFloat(value)) - value), best) << value;
  }
}

TEST(Fp8, RowsComeBackCloseAndTakeHalfTheBytes) {
  std::vector<float> x(7168), back(7168);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i)) * static_cast<float>(i % 97);
  std::vector<std::byte> row(Fp8RowBytes(x.size()));
  QuantizeFp8(x, row.data());
  DequantizeFp8(row.data(), absl::MakeSpan(back));
  double dot = 0, squares = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    dot += 2.0 * x[i] * back[i];
    squares += static_cast<double>(x[i]) * x[i] + static_cast<double>(back[i]) * back[i];
  }
  EXPECT_LT(1 - dot / squares, 9e-4);
  EXPECT_LE(row.size(), 0.52 * 2 * x.size());
}

}  // namespace
}  // namespace moerl::ep
