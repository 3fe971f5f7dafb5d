// A peer that sends broken messages in whole envelopes (right header, right digest), from another node or through the
// rings of this one: the receiver must name it or wait, never crash, read past an end, or write outside its output.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "libs/ep/combiner.h"
#include "libs/ep/dispatcher.h"
#include "libs/ep/links.h"
#include "libs/ep/records.h"
#include "libs/fabric/in_process_fabric.h"
#include "tests/unit/ep/seeds.h"

namespace moerl::ep {
namespace {

constexpr int kHidden = 8, kExperts = 4, kTokens = 3;
constexpr size_t kRowBytes = kHidden * sizeof(float);

// Rank 0 runs the protocol; the test speaks for rank 1.
struct World {
  explicit World(bool is_one_node) : fabric({.node_of = {0, is_one_node ? 0 : 1}}) {
    for (int rank = 0; rank < 2; ++rank) {
      hub[rank] = std::make_unique<fabric::Hub>(fabric.Open(rank), fabric::Hub::Options());
      topology[rank] = std::make_unique<Topology>(hub[rank]->membership());
      links[rank] = std::make_unique<Links>(hub[rank].get(), topology[rank].get(), 0);
      LinkSizes sizes;
      sizes.route_bytes = 256;
      sizes.part_bytes = 1024;
      sizes.rows_slots = sizes.part_slots = sizes.ring_entries = 4;
      sizes.control_record_bytes = sizes.row_record_bytes = sizes.partial_record_bytes = 256;
      MOERL_CHECK(links[rank]->Open(sizes).ok());
    }
    const std::string offers[] = {links[0]->Offer(), links[1]->Offer()};
    for (auto& l : links) MOERL_CHECK(l->Connect(offers).ok());
    map = std::make_unique<ExpertMap>(*ExpertMap::Create(hub[0]->membership(), {0, 0, 1, 1}));
    dispatcher = std::make_unique<Dispatcher>(hub[0].get(), topology[0].get(), map.get(), links[0].get(),
                                              [this](uint64_t, size_t bytes) {
                                                output.reset(new std::byte[bytes]);
                                                return output.get();
                                              });
    combiner = std::make_unique<Combiner>(hub[0].get(), topology[0].get(), map.get(), links[0].get());
  }
  ~World() {
    for (auto& l : links) l->Close();
  }

  void Step() {
    for (int i = 0; i < 6; ++i) {
      for (auto& h : hub) h->Progress();
      links[0]->Move();
      if (!hub[0]->failure().ok()) return;
      dispatcher->Move();
      combiner->Move();
      links[0]->Move();
      links[1]->Move();
    }
  }

  // Every token of rank 0 goes to experts 1 (here) and 2 (rank 1).
  void PostDispatch() {
    auto route = std::make_shared<Route>();
    route->num_tokens = kTokens;
    route->top_k = 2;
    for (uint32_t t = 0; t < kTokens; ++t) {
      route->own.row.push_back(t);
      route->own.ids.insert(route->own.ids.end(), {1, 2});
      route->own.first_id.push_back(2 * t + 2);
      route->choice.insert(route->choice.end(), {0, 1});
      route->own_weights.insert(route->own_weights.end(), {0.5f, 0.5f});
    }
    x.assign(kTokens * kHidden, 1.0f);
    dispatcher->Post(1, route, false, reinterpret_cast<const std::byte*>(x.data()), kRowBytes);
  }

  bool PostCombine() {
    Dispatcher::Op* op = dispatcher->Find(1);
    if (op == nullptr || !op->is_done) return false;
    CombineWork work;
    work.route = op->route;
    rows.assign(op->route->num_rows() * kHidden, 1.0f);
    out.assign(kTokens * kHidden, 0.0f);
    work.rows_fp32 = rows.data();
    work.hidden = kHidden;
    work.out = out.data();
    combiner->Post(2, work);
    return true;
  }

  fabric::InProcessFabric fabric;
  std::unique_ptr<fabric::Hub> hub[2];
  std::unique_ptr<Topology> topology[2];
  std::unique_ptr<Links> links[2];
  std::unique_ptr<ExpertMap> map;
  std::unique_ptr<Dispatcher> dispatcher;
  std::unique_ptr<Combiner> combiner;
  std::unique_ptr<std::byte[]> output;
  std::vector<float> x, rows, out;
};

using Bytes = std::vector<std::byte>;

template <typename T>
void Append(Bytes* bytes, const T& value) {
  const std::byte* at = reinterpret_cast<const std::byte*>(&value);
  bytes->insert(bytes->end(), at, at + sizeof(value));
}

Bytes RouteMessage() {
  Bytes bytes;
  Append(&bytes, RouteRecord{1, 2, kRowBytes, 1, 0, 2});
  Append(&bytes, uint32_t{1});
  Append(&bytes, uint32_t{2});
  return bytes;
}

// Two tokens of rank 1: one for experts 0 and 1, one for 1 and 3.
Bytes RowsMessage() {
  Bytes bytes;
  for (uint32_t row = 0; row < 2; ++row) {
    const size_t begin = bytes.size();
    Append(&bytes, RowRecord{1, row, 1, 2});
    Append(&bytes, 0.5f);
    Append(&bytes, 0.5f);
    Append(&bytes, static_cast<uint16_t>(row == 0 ? 0 : 1));
    Append(&bytes, static_cast<uint16_t>(row == 0 ? 1 : 3));
    bytes.resize(begin + RowRecordBytes(2, kRowBytes));
  }
  return bytes;
}

Bytes PartMessage() {
  Bytes bytes;
  for (uint32_t row = 0; row < kTokens; ++row) {
    const size_t begin = bytes.size();
    Append(&bytes, PartialRecord{2, row, 0, 2, 4, 0, 0, 0});
    bytes.resize(begin + PartialRecordBytes(0, false, kHidden));
  }
  return bytes;
}

void Damage(std::mt19937_64& random, Bytes* bytes) {
  for (int flips = static_cast<int>(random() % 4); flips > 0 && !bytes->empty(); --flips) {
    const size_t at = random() % bytes->size();
    (*bytes)[at] = random() % 2 == 0 ? static_cast<std::byte>(random()) : (*bytes)[at] ^ std::byte(1 << random() % 8);
  }
  if (random() % 8 == 0) bytes->resize(random() % (bytes->size() + 1));
  if (random() % 8 == 0) bytes->resize(std::min<size_t>(bytes->size() + random() % 64, 1024));
}

void Send(fabric::WireSender& sender, uint64_t sequence, uint16_t count, const Bytes& bytes, size_t limit) {
  const absl::Span<std::byte> to = sender.Reserve();
  if (to.empty()) return;
  const size_t n = std::min({bytes.size(), to.size(), limit});
  if (n > 0) std::memcpy(to.data(), bytes.data(), n);
  sender.Publish(sequence, 0, count, n);
}

void Push(fabric::SpscRing& ring, const Bytes& bytes) {
  std::byte* to = ring.Reserve();
  if (to == nullptr) return;
  const size_t n = std::min(bytes.size(), ring.message_bytes_max());
  if (n > 0) std::memcpy(to, bytes.data(), n);
  ring.Publish(n);
}

Bytes ControlRecord(bool is_ready) {
  Bytes bytes;
  Append(&bytes, RouteRecord{1, 0, 0, 1, static_cast<uint16_t>(is_ready ? 1 : 0), is_ready ? 0u : 2u});
  if (is_ready) return bytes;
  Append(&bytes, uint32_t{1});
  Append(&bytes, uint32_t{2});
  return bytes;
}

// The records of a message one by one, as rings carry them.
std::vector<Bytes> Split(const Bytes& message, size_t records) {
  std::vector<Bytes> split;
  const size_t bytes = message.size() / records;
  for (size_t i = 0; i < records; ++i)
    split.emplace_back(message.begin() + static_cast<ptrdiff_t>(i * bytes),
                       message.begin() + static_cast<ptrdiff_t>((i + 1) * bytes));
  return split;
}

enum class Outcome { kFinished, kNamed, kWaits };

// Rank 0's dispatch and combine with what rank 1 says, every second message broken where there is a `random`.
Outcome RunOnce(bool is_one_node, std::mt19937_64* random) {
  World world(is_one_node);
  Links& peer = *world.links[1];
  const auto damaged = [&](Bytes bytes) {
    if (random != nullptr && (*random)() % 2 == 0) Damage(*random, &bytes);
    return bytes;
  };
  const auto push = [&](Links::Channel channel, const Bytes& bytes) {
    Push(peer.RingTo(channel, 0), damaged(bytes));
    world.Step();
  };
  world.PostDispatch();
  world.Step();
  if (is_one_node) {
    for (const bool is_ready : {false, true}) push(Links::kControlRing, ControlRecord(is_ready));
    for (const Bytes& row : Split(RowsMessage(), 2)) push(Links::kRowRing, row);
  } else {
    Send(peer.ToNode(Links::kRoute, 0), 1, 1, damaged(RouteMessage()), 256);
    world.Step();
    Send(peer.ToNode(Links::kRows, 0), 1, 2, damaged(RowsMessage()), 1024);
    world.Step();
  }
  if (world.PostCombine()) {
    world.Step();
    if (is_one_node) {
      for (const Bytes& partial : Split(PartMessage(), kTokens)) push(Links::kPartialRing, partial);
    } else {
      Send(peer.PartToPeer(0), 2, kTokens, damaged(PartMessage()), 1024);
      world.Step();
    }
  }
  const absl::Status& failure = world.hub[0]->failure();
  if (!failure.ok()) {
    EXPECT_TRUE(absl::IsDataLoss(failure) && absl::StrContains(failure.message(), "from rank 1")) << failure;
    return Outcome::kNamed;
  }
  const Combiner::Op* combine = world.combiner->Find(2);
  return combine != nullptr && combine->is_done ? Outcome::kFinished : Outcome::kWaits;
}

class Malformed : public testing::TestWithParam<bool> {};

TEST_P(Malformed, WholeMessagesFinishBothOperations) { EXPECT_EQ(RunOnce(GetParam(), nullptr), Outcome::kFinished); }

TEST_P(Malformed, BrokenMessagesAreNamedAndNeverCrash) {
  const SeedRange seeds = Seeds(5000);
  std::map<Outcome, uint64_t> num;
  for (uint64_t seed = seeds.first; seed < seeds.last; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937_64 random(seed);
    ++num[RunOnce(GetParam(), &random)];
  }
  if (seeds.last - seeds.first < 100) return;  // a replay
  EXPECT_GT(num[Outcome::kFinished], 0u);
  EXPECT_GT(num[Outcome::kNamed], num[Outcome::kWaits]);
}

INSTANTIATE_TEST_SUITE_P(From, Malformed, testing::Bool(), [](const testing::TestParamInfo<bool>& info) {
  return info.param ? "ThisNode" : "AnotherNode";
});

}  // namespace
}  // namespace moerl::ep
