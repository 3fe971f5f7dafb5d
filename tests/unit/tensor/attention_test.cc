#include <limits>
#include <numeric>

#include "tests/unit/tensor/oracle.h"

namespace moerl::tensor {
namespace {

struct Heads {
  int64_t q, kv, d;
};

// A cache whose every byte is NaN until something is written, with pages handed out in a shuffled order.
struct Pool {
  std::vector<char> memory;
  KvCache cache;
  std::vector<int32_t> free;

  Pool(Random* random, DType dtype, Heads heads, int64_t pages) {
    cache.dtype = dtype;
    cache.kv_heads = heads.kv;
    cache.head_dim = heads.d;
    cache.page_stride_bytes = (KvPageBytes(dtype, heads.kv, heads.d) + 63) / 64 * 64;
    memory.assign(cache.page_stride_bytes * pages, static_cast<char>(0xff));
    cache.base = memory.data();
    free.resize(pages);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random->engine);
  }
  std::vector<int32_t> Take(int64_t positions) {
    std::vector<int32_t> taken;
    for (int64_t at = 0; at < positions; at += kPageTokens) {
      taken.push_back(free.back());
      free.pop_back();
    }
    return taken;
  }
};

TEST(Attention, MatchesDouble) {
  Random random(1);
  auto backend = NewBackend();
  for (const Heads heads : {Heads{4, 2, 16}, {6, 1, 24}, {2, 2, 7}, {8, 2, 64}}) {
    const std::vector<int64_t> offsets = {0, 1, 64, 64, 264};
    const int64_t rows = offsets.back();
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const Tensor q = random.Matrix(dtype, rows, heads.q * heads.d),
                   k = random.Matrix(dtype, rows, heads.kv * heads.d),
                   v = random.Matrix(dtype, rows, heads.kv * heads.d);
      Tensor out(DType::kF32, {rows, heads.q * heads.d});
      std::vector<RowStats> stats(rows * heads.q);
      const float scale = 0.3f;
      backend->AttentionPacked(q.mat(), k.mat(), v.mat(), offsets, heads.d, scale, out.mat(), stats.data());
      ExpectNear(out.mat(),
                 AttentionOracle(ToDoubles(q.mat()), ToDoubles(k.mat()), ToDoubles(v.mat()), offsets, heads.q, heads.kv,
                                 heads.d, scale),
                 2e-6);
    }
  }
}

// One sequence's rows by prefill in chunks of random sizes, decode one by one, alone or among others, equal the
// packed form bit by bit; whatever else is in the cache is NaN.
TEST(Attention, PrefillDecodeAndPackedGiveTheSameBits) {
  for (int round = 0; round < 60; ++round) {
    Random random(1000 + round);
    const DType dtype = round % 2 == 0 ? DType::kF32 : DType::kBf16;
    const Heads heads = round % 3 == 0 ? Heads{4, 2, 16} : round % 3 == 1 ? Heads{3, 1, 20} : Heads{2, 2, 33};
    auto backend = NewBackend(CpuIsa::kBest, 1 + round % 2);
    const int64_t sequences = random.Int(1, 4);
    std::vector<int64_t> offsets = {0};
    for (int64_t s = 0; s < sequences; ++s) offsets.push_back(offsets.back() + random.Int(1, 230));
    const int64_t rows = offsets.back();
    const Tensor q = random.Matrix(dtype, rows, heads.q * heads.d), k = random.Matrix(dtype, rows, heads.kv * heads.d),
                 v = random.Matrix(dtype, rows, heads.kv * heads.d);
    Tensor packed(DType::kF32, {rows, heads.q * heads.d}), paged(DType::kF32, {rows, heads.q * heads.d});
    backend->AttentionPacked(q.mat(), k.mat(), v.mat(), offsets, heads.d, 0.25f, packed.mat(), nullptr);

    Pool pool(&random, dtype, heads, 32);
    std::vector<std::vector<int32_t>> pages;
    for (int64_t s = 0; s < sequences; ++s) pages.push_back(pool.Take(offsets[s + 1] - offsets[s]));
    std::vector<int64_t> done(sequences, 0);
    for (bool more = true; more;) {
      more = false;
      std::vector<SequenceChunk> chunks;
      for (int64_t s = 0; s < sequences; ++s) {
        const int64_t left = offsets[s + 1] - offsets[s] - done[s];
        const int64_t count = std::min(left, random.Int(0, 2) == 0 ? random.Int(1, 150) : random.Int(0, 1));
        if (count > 0) chunks.push_back({offsets[s] + done[s], count, done[s], pages[s].data()});
        done[s] += count;
        more = more || count < left;
      }
      backend->KvWrite(k.mat(), v.mat(), chunks, pool.cache);
      backend->AttentionPaged(q.mat(), chunks, pool.cache, 0.25f, paged.mat());
    }
    ASSERT_TRUE(SameBits(packed.mat(), paged.mat())) << "round " << round;
  }
}

TEST(Attention, AllPathsAndThreadsAgree) {
  Random random(3);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Heads heads{4, 2, 21};
    const std::vector<int64_t> offsets = {0, 70, 71, 230};
    const int64_t rows = offsets.back();
    const Tensor q = random.Matrix(dtype, rows, heads.q * heads.d), k = random.Matrix(dtype, rows, heads.kv * heads.d),
                 v = random.Matrix(dtype, rows, heads.kv * heads.d),
                 dout = random.Matrix(dtype, rows, heads.q * heads.d);
    ExpectAllPathsAgree(
        [&](Backend& backend) {
          Tensor out(dtype, {rows, heads.q * heads.d}), dq(DType::kF32, {rows, heads.q * heads.d}),
              dk(DType::kF32, {rows, heads.kv * heads.d}), dv(DType::kBf16, {rows, heads.kv * heads.d});
          std::vector<RowStats> stats(rows * heads.q);
          backend.AttentionPacked(q.mat(), k.mat(), v.mat(), offsets, heads.d, 0.3f, out.mat(), stats.data());
          backend.AttentionPackedBackward(q.mat(), k.mat(), v.mat(), offsets, heads.d, 0.3f, out.mat(), stats.data(),
                                          dout.mat(), dq.mat(), dk.mat(), dv.mat());
          Outputs o;
          o.Add(out.mat());
          o.Add(dq.mat());
          o.Add(dk.mat());
          o.Add(dv.mat());
          o.AddRaw(stats);
          return o;
        },
        Name(dtype));
  }
}

TEST(Attention, BackwardMatchesFiniteDifferences) {
  Random random(4);
  auto backend = NewBackend();
  const Heads heads{4, 2, 5};
  const std::vector<int64_t> offsets = {0, 3, 70};
  const int64_t rows = offsets.back();
  const float scale = 0.4f;
  const Tensor q = random.Matrix(DType::kF32, rows, heads.q * heads.d),
               k = random.Matrix(DType::kF32, rows, heads.kv * heads.d),
               v = random.Matrix(DType::kF32, rows, heads.kv * heads.d),
               dout = random.Matrix(DType::kF32, rows, heads.q * heads.d);
  Tensor out(DType::kF32, {rows, heads.q * heads.d}), dq(DType::kF32, {rows, heads.q * heads.d}),
      dk(DType::kF32, {rows, heads.kv * heads.d}), dv(DType::kF32, {rows, heads.kv * heads.d});
  std::vector<RowStats> stats(rows * heads.q);
  backend->AttentionPacked(q.mat(), k.mat(), v.mat(), offsets, heads.d, scale, out.mat(), stats.data());
  backend->AttentionPackedBackward(q.mat(), k.mat(), v.mat(), offsets, heads.d, scale, out.mat(), stats.data(),
                                   dout.mat(), dq.mat(), dk.mat(), dv.mat());
  const Doubles qd = ToDoubles(q.mat()), kd = ToDoubles(k.mat()), vd = ToDoubles(v.mat()), g = ToDoubles(dout.mat());
  const auto loss = [&](const Doubles& a, const Doubles& b, const Doubles& c) {
    return DotOf(AttentionOracle(a, b, c, offsets, heads.q, heads.kv, heads.d, scale), g);
  };
  ExpectNear(dq.mat(), NumericGradient([&](const Doubles& x) { return loss(x, kd, vd); }, qd), 1e-5, "dq");
  ExpectNear(dk.mat(), NumericGradient([&](const Doubles& x) { return loss(qd, x, vd); }, kd), 1e-5, "dk");
  ExpectNear(dv.mat(), NumericGradient([&](const Doubles& x) { return loss(qd, kd, x); }, vd), 1e-5, "dv");
}

TEST(Attention, BackwardOfASequenceDoesNotDependOnItsBatch) {
  Random random(5);
  auto backend = NewBackend();
  const Heads heads{4, 2, 16};
  const std::vector<int64_t> offsets = {0, 90, 223};
  const int64_t rows = offsets.back(), c = heads.q * heads.d, ckv = heads.kv * heads.d;
  const Tensor q = random.Matrix(DType::kBf16, rows, c), k = random.Matrix(DType::kBf16, rows, ckv),
               v = random.Matrix(DType::kBf16, rows, ckv), dout = random.Matrix(DType::kF32, rows, c);
  Tensor out(DType::kF32, {rows, c}), dq(DType::kF32, {rows, c}), dk(DType::kF32, {rows, ckv}),
      dv(DType::kF32, {rows, ckv});
  std::vector<RowStats> stats(rows * heads.q);
  backend->AttentionPacked(q.mat(), k.mat(), v.mat(), offsets, heads.d, 0.2f, out.mat(), stats.data());
  backend->AttentionPackedBackward(q.mat(), k.mat(), v.mat(), offsets, heads.d, 0.2f, out.mat(), stats.data(),
                                   dout.mat(), dq.mat(), dk.mat(), dv.mat());
  const int64_t begin = 90, count = 133;
  const std::vector<int64_t> alone = {0, count};
  Tensor dq1(DType::kF32, {count, c}), dk1(DType::kF32, {count, ckv}), dv1(DType::kF32, {count, ckv});
  backend->AttentionPackedBackward(q.mat().Rows(begin, count), k.mat().Rows(begin, count), v.mat().Rows(begin, count),
                                   alone, heads.d, 0.2f, out.mat().Rows(begin, count), stats.data() + begin * heads.q,
                                   dout.mat().Rows(begin, count), dq1.mat(), dk1.mat(), dv1.mat());
  EXPECT_TRUE(SameBits(dq.mat().Rows(begin, count), dq1.mat()));
  EXPECT_TRUE(SameBits(dk.mat().Rows(begin, count), dk1.mat()));
  EXPECT_TRUE(SameBits(dv.mat().Rows(begin, count), dv1.mat()));
}

}  // namespace
}  // namespace moerl::tensor
