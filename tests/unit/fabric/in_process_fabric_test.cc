#include "libs/fabric/in_process_fabric.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <thread>

#include "libs/fabric/chaos_transport.h"
#include "libs/fabric/spsc_ring.h"

namespace moerl::fabric {
namespace {

constexpr size_t kSlots = 16;
constexpr size_t kSlotBytes = 64;

// Two ranks, rank 0 writes numbered slots to rank 1. Gives what arrived, in order of arrival.
struct Pair {
  explicit Pair(uint64_t chaos_seed, size_t capacity = 4096) : fabric({.node_of = {0, 1}}) {
    if (chaos_seed != 0) {
      fabric.set_decorator([=, this](int rank, std::unique_ptr<Transport> base) {
        chaos[rank] =
            new ChaosTransport(std::move(base), {.seed = chaos_seed * 2 + rank, .completion_capacity = capacity});
        return std::unique_ptr<Transport>(chaos[rank]);
      });
    }
    a = fabric.Open(0);
    b = fabric.Open(1);
    from = *a.transport->Register(source.data(), source.size());
    to = *b.transport->Register(target.data(), target.size());
  }
  bool Send(uint32_t slot) {
    std::memset(source.data() + slot * kSlotBytes, 1 + static_cast<int>(slot), kSlotBytes);
    return a.transport->Write({.peer = 1,
                               .region = from.id,
                               .source = source.data() + slot * kSlotBytes,
                               .to = to.remote,
                               .to_offset = slot * kSlotBytes,
                               .bytes = kSlotBytes,
                               .immediate = slot,
                               .context = slot});
  }
  bool IsWhole(uint32_t slot) const {
    for (size_t i = 0; i < kSlotBytes; ++i) {
      if (target[slot * kSlotBytes + i] != std::byte(1 + slot)) return false;
    }
    return true;
  }
  InProcessFabric fabric;
  ChaosTransport* chaos[2] = {nullptr, nullptr};
  Endpoint a, b;
  std::array<std::byte, kSlots * kSlotBytes> source{}, target{};
  Region from, to;
};

TEST(InProcessFabric, DeliversBytesBeforeTheImmediate) {
  Pair pair(0);
  ASSERT_TRUE(pair.Send(3));
  std::array<Event, 4> events;
  ASSERT_EQ(pair.b.transport->Poll(absl::MakeSpan(events)), 1u);
  EXPECT_EQ(events[0].kind, Event::Kind::kArrived);
  EXPECT_EQ(events[0].immediate, 3u);
  EXPECT_TRUE(pair.IsWhole(3));
  ASSERT_EQ(pair.a.transport->Poll(absl::MakeSpan(events)), 1u);
  EXPECT_EQ(events[0].kind, Event::Kind::kSent);
}

TEST(InProcessFabric, WritesToAClosedRegionLandNowhere) {
  Pair pair(0);
  pair.b.transport->Close();
  ASSERT_TRUE(pair.Send(1));
  std::array<Event, 4> events;
  EXPECT_EQ(pair.b.transport->Poll(absl::MakeSpan(events)), 0u);
  EXPECT_FALSE(pair.IsWhole(1));
}

TEST(InProcessFabric, WaitReturnsForAWakeThatCameFirst) {
  Pair pair(0);
  pair.b.transport->Wake();
  const absl::Time start = absl::Now();
  pair.b.transport->Wait(absl::Seconds(20));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST(ChaosTransport, ReordersAndTearsButNeverTheImmediate) {
  int num_reordered = 0, num_torn = 0, num_sent_before_arrival = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Pair pair(seed);
    for (uint32_t slot = 0; slot < kSlots; ++slot) ASSERT_TRUE(pair.Send(slot));
    std::vector<uint32_t> arrived;
    size_t num_sent = 0;
    for (int step = 0; step < 100000 && (arrived.size() < kSlots || num_sent < kSlots); ++step) {
      std::array<Event, 2> events;
      num_sent += pair.a.transport->Poll(absl::MakeSpan(events));
      const size_t n = pair.b.transport->Poll(absl::MakeSpan(events));
      for (size_t i = 0; i < n; ++i) {
        ASSERT_TRUE(pair.IsWhole(events[i].immediate)) << "seed " << seed;
        arrived.push_back(events[i].immediate);
      }
      if (num_sent > arrived.size()) ++num_sent_before_arrival;
      for (uint32_t slot = 0; slot < kSlots; ++slot) {
        const std::byte* bytes = pair.target.data() + slot * kSlotBytes;
        if (bytes[0] == std::byte(0) && bytes[kSlotBytes - 1] != std::byte(0)) ++num_torn;
      }
    }
    ASSERT_EQ(arrived.size(), kSlots) << "seed " << seed;
    if (!std::is_sorted(arrived.begin(), arrived.end())) ++num_reordered;
  }
  EXPECT_GT(num_reordered, 190);
  EXPECT_GT(num_torn, 100);
  EXPECT_GT(num_sent_before_arrival, 100);
}

TEST(ChaosTransport, ReplaysFromItsSeed) {
  std::vector<uint32_t> order[2];
  for (auto& run : order) {
    Pair pair(77);
    for (uint32_t slot = 0; slot < kSlots; ++slot) ASSERT_TRUE(pair.Send(slot));
    while (run.size() < kSlots) {
      std::array<Event, 8> events;
      pair.a.transport->Poll(absl::MakeSpan(events));
      const size_t n = pair.b.transport->Poll(absl::MakeSpan(events));
      for (size_t i = 0; i < n; ++i) run.push_back(events[i].immediate);
    }
  }
  EXPECT_EQ(order[0], order[1]);
}

TEST(ChaosTransport, ACutLinkDeliversNothingAndStillCompletesLocally) {
  Pair pair(5);
  pair.chaos[0]->Cut(1);
  ASSERT_TRUE(pair.Send(0));
  std::array<Event, 8> events;
  size_t num_sent = 0;
  for (int i = 0; i < 1000; ++i) {
    num_sent += pair.a.transport->Poll(absl::MakeSpan(events));
    ASSERT_EQ(pair.b.transport->Poll(absl::MakeSpan(events)), 0u);
  }
  EXPECT_EQ(num_sent, 1u);
  pair.chaos[0]->Heal(1);
  size_t num_arrived = 0;
  for (int i = 0; i < 1000; ++i) {
    pair.a.transport->Poll(absl::MakeSpan(events));
    num_arrived += pair.b.transport->Poll(absl::MakeSpan(events));
  }
  EXPECT_EQ(num_arrived, 1u);
}

TEST(ChaosTransport, SaysWhenACompletionQueueOverflows) {
  Pair pair(9, /*capacity=*/3);
  for (uint32_t slot = 0; slot < kSlots; ++slot) ASSERT_TRUE(pair.Send(slot));
  while (pair.chaos[0]->Advance()) {
  }
  EXPECT_FALSE(pair.a.transport->status().ok());
}

TEST(SpscRing, CarriesMessagesWholeAndInOrderBetweenThreads) {
  InProcessFabric fabric({.node_of = {0, 0}});
  Endpoint a = fabric.Open(0), b = fabric.Open(1);
  constexpr size_t kEntries = 3, kMax = 100;
  const size_t bytes = SpscRing::Bytes(kEntries, kMax);
  SpscRing in(*a.node_memory->Map(0, 1, "ring", bytes), kEntries, kMax);
  SpscRing out(*b.node_memory->Map(0, 1, "ring", bytes), kEntries, kMax);
  constexpr uint32_t kMessages = 20000;
  std::thread producer([&] {
    for (uint32_t i = 0; i < kMessages; ++i) {
      std::byte* to;
      while ((to = in.Reserve()) == nullptr) std::this_thread::yield();
      std::memset(to, static_cast<int>(i % 251), i % (kMax + 1));
      in.Publish(i % (kMax + 1));
    }
  });
  for (uint32_t i = 0; i < kMessages; ++i) {
    absl::Span<const std::byte> message;
    while ((message = out.Front()).data() == nullptr) std::this_thread::yield();
    ASSERT_EQ(message.size(), i % (kMax + 1));
    for (const std::byte b : message) ASSERT_EQ(b, std::byte(i % 251));
    out.Pop();
  }
  producer.join();
}

TEST(NodeMemory, RefusesTwoSizesOfOneBlock) {
  InProcessFabric fabric({.node_of = {0, 0}});
  Endpoint a = fabric.Open(0), b = fabric.Open(1);
  ASSERT_TRUE(a.node_memory->Map(0, 1, "ring", 4096).ok());
  EXPECT_EQ(b.node_memory->Map(0, 1, "ring", 8192).status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace moerl::fabric
