#include <numeric>

#include "tests/unit/tensor/oracle.h"

namespace moerl::tensor {
namespace {

struct Case {
  int64_t rows, vocabulary, cols;
  Tensor h, w;
  std::vector<int32_t> targets;
  std::vector<float> temperatures;
  std::vector<int32_t> kept_ids;
  std::vector<int64_t> kept_begin = {0};

  Case(Random* random, DType dtype, int64_t rows, int64_t vocabulary, int64_t cols)
      : rows(rows),
        vocabulary(vocabulary),
        cols(cols),
        h(random->Matrix(dtype, rows, cols)),
        w(random->Matrix(dtype, vocabulary, cols, 0.5f)) {
    for (int64_t t = 0; t < rows; ++t) {
      temperatures.push_back(t % 3 == 0 ? 1.0f : 0.3f + 0.4f * static_cast<float>(t % 5));
      std::vector<int32_t> all(vocabulary);
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random->engine);
      all.resize(random->Int(1, vocabulary));
      std::sort(all.begin(), all.end());
      kept_ids.insert(kept_ids.end(), all.begin(), all.end());
      kept_begin.push_back(static_cast<int64_t>(kept_ids.size()));
      targets.push_back(all[random->Int(0, static_cast<int64_t>(all.size()) - 1)]);
    }
  }
  KeptIds kept() const { return {kept_ids, kept_begin}; }
  PackedWeight Head(Backend& backend, DType dtype) const {
    PackedWeight head = backend.NewPacked(dtype, 1, vocabulary, cols, true);
    backend.Pack(w.mat(), 0, 0, &head);
    return head;
  }

  // Log-probabilities (and entropies) in double.
  Doubles Oracle(const Doubles& hd, const Doubles& wd, bool with_kept, Doubles* entropy = nullptr) const {
    const Doubles logits = MatMulOracle(hd, wd, rows, vocabulary, cols);
    Doubles result;
    for (int64_t t = 0; t < rows; ++t) {
      Doubles z;
      int64_t target = 0;
      for (int64_t j = 0; j < vocabulary; ++j) {
        const bool is_kept = std::binary_search(kept_ids.begin() + kept_begin[t], kept_ids.begin() + kept_begin[t + 1],
                                                static_cast<int32_t>(j));
        if (with_kept && !is_kept) continue;
        if (j == targets[t]) target = static_cast<int64_t>(z.size());
        z.push_back(logits[t * vocabulary + j] / temperatures[t]);
      }
      const Doubles p = SoftmaxOracle(z);
      result.push_back(std::log(p[target]));
      if (entropy == nullptr) continue;
      entropy->push_back(0);
      for (const double x : p) entropy->back() -= x > 0 ? x * std::log(x) : 0;
    }
    return result;
  }
};

TEST(LogProbs, MatchDoubleWithTemperaturesKeptIdsAndEntropy) {
  Random random(1);
  auto backend = NewBackend(CpuIsa::kBest, 2);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Case c(&random, dtype, 70, 2501, 24);
    const PackedWeight head = c.Head(*backend, dtype);
    for (const bool with_kept : {false, true}) {
      const KeptIds kept = c.kept();
      std::vector<float> logprobs(c.rows), entropy(c.rows);
      std::vector<RowStats> stats(c.rows);
      backend->LogProbs(c.h.mat(), head, c.targets, c.temperatures, with_kept ? &kept : nullptr, logprobs.data(),
                        stats.data(), entropy.data());
      Doubles want_entropy;
      ExpectNear(VectorMat(logprobs), c.Oracle(ToDoubles(c.h.mat()), ToDoubles(c.w.mat()), with_kept, &want_entropy),
                 1e-6);
      ExpectNear(VectorMat(entropy), want_entropy, 2e-6);
    }
  }
}

TEST(LogProbs, ASamplerWithWholeLogitsGetsTheSameBits) {
  Random random(2);
  for (int round = 0; round < 30; ++round) {
    const DType dtype = round % 2 == 0 ? DType::kF32 : DType::kBf16;
    auto backend = NewBackend(CpuIsa::kBest, 1 + round % 2);
    const Case c(&random, dtype, random.Int(1, 80), random.Int(1, 3000), random.Int(1, 40));
    const PackedWeight head = c.Head(*backend, dtype);
    const KeptIds kept = c.kept();
    const KeptIds* which = round % 3 == 0 ? &kept : nullptr;
    std::vector<float> logprobs(c.rows);
    std::vector<RowStats> stats(c.rows), row_stats(c.rows);
    backend->LogProbs(c.h.mat(), head, c.targets, c.temperatures, which, logprobs.data(), stats.data(), nullptr);
    Tensor logits(DType::kF32, {c.rows, c.vocabulary});
    backend->Gemm(c.h.mat(), head, {}, logits.mat());
    backend->LogitStats(logits.mat(), c.temperatures, which, row_stats.data());
    for (int64_t t = 0; t < c.rows; ++t) {
      const float z = logits.data()[t * c.vocabulary + c.targets[t]] / c.temperatures[t];
      ASSERT_EQ(logprobs[t], (z - row_stats[t].max) - row_stats[t].log_sum) << "round " << round;
      ASSERT_EQ(std::memcmp(&stats[t], &row_stats[t], sizeof(RowStats)), 0);
    }
  }
}

TEST(LogProbs, BackwardMatchesFiniteDifferences) {
  Random random(3);
  auto backend = NewBackend();
  const Case c(&random, DType::kF32, 5, 43, 6);
  const PackedWeight head = c.Head(*backend, DType::kF32);
  const std::vector<float> g = random.Vector(c.rows);
  for (const bool with_kept : {false, true}) {
    const KeptIds kept = c.kept();
    const KeptIds* which = with_kept ? &kept : nullptr;
    std::vector<float> logprobs(c.rows);
    std::vector<RowStats> stats(c.rows);
    Tensor dh(DType::kF32, {c.rows, c.cols}), dhead(DType::kF32, {c.vocabulary, c.cols});
    backend->Zero(dhead.mat());
    backend->LogProbs(c.h.mat(), head, c.targets, c.temperatures, which, logprobs.data(), stats.data(), nullptr);
    backend->LogProbsBackward(c.h.mat(), head, c.targets, c.temperatures, which, stats.data(), g.data(), dh.mat(),
                              dhead.mat());
    const Doubles hd = ToDoubles(c.h.mat()), wd = ToDoubles(c.w.mat()), gd(g.begin(), g.end());
    ExpectNear(dh.mat(), NumericGradient([&](const Doubles& v) { return DotOf(c.Oracle(v, wd, with_kept), gd); }, hd),
               1e-5, "dh");
    ExpectNear(dhead.mat(),
               NumericGradient([&](const Doubles& v) { return DotOf(c.Oracle(hd, v, with_kept), gd); }, wd), 1e-5,
               "dhead");
  }
}

TEST(LogProbs, AllPathsAndThreadsAgree) {
  Random random(4);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Case c(&random, dtype, 75, 1501, 37);
    const std::vector<float> g = random.Vector(c.rows);
    ExpectAllPathsAgree(
        [&](Backend& b) {
          Outputs out;
          const PackedWeight head = c.Head(b, dtype);
          std::vector<float> logprobs(c.rows), entropy(c.rows);
          std::vector<RowStats> stats(c.rows);
          Tensor dh(DType::kF32, {c.rows, c.cols}), dhead(DType::kF32, {c.vocabulary, c.cols});
          b.Zero(dhead.mat());
          b.LogProbs(c.h.mat(), head, c.targets, c.temperatures, nullptr, logprobs.data(), stats.data(),
                     entropy.data());
          b.LogProbsBackward(c.h.mat(), head, c.targets, c.temperatures, nullptr, stats.data(), g.data(), dh.mat(),
                             dhead.mat());
          out.Add(logprobs);
          out.Add(entropy);
          out.AddRaw(stats);
          out.Add(dh.mat());
          out.Add(dhead.mat());
          return out;
        },
        Name(dtype));
  }
}

TEST(LogProbs, ARowDoesNotDependOnItsBatch) {
  Random random(5);
  auto backend = NewBackend(CpuIsa::kBest, 2);
  for (int round = 0; round < 40; ++round) {
    const DType dtype = round % 2 == 0 ? DType::kF32 : DType::kBf16;
    const Case c(&random, dtype, random.Int(1, 150), random.Int(1, 2500), random.Int(1, 50));
    const PackedWeight head = c.Head(*backend, dtype);
    std::vector<float> all(c.rows), one(1);
    std::vector<RowStats> stats(c.rows);
    backend->LogProbs(c.h.mat(), head, c.targets, c.temperatures, nullptr, all.data(), stats.data(), nullptr);
    const int64_t row = random.Int(0, c.rows - 1);
    backend->LogProbs(c.h.mat().Rows(row, 1), head, {&c.targets[row], 1}, {&c.temperatures[row], 1}, nullptr,
                      one.data(), stats.data(), nullptr);
    ASSERT_EQ(one[0], all[row]) << "round " << round;
  }
}

TEST(Embed, GathersAndItsBackwardAddsInTokenOrder) {
  Random random(6);
  auto backend = NewBackend(CpuIsa::kBest, 2);
  const std::vector<int32_t> ids = {3, 0, 3, 7};
  const Tensor table = random.Matrix(DType::kBf16, 8, 21), dy = random.Matrix(DType::kF32, 4, 21);
  Tensor y(DType::kF32, {4, 21}), dtable(DType::kF32, {8, 21});
  backend->Embed(table.mat(), ids, y.mat());
  backend->Zero(dtable.mat());
  backend->EmbedBackward(dy.mat(), ids, dtable.mat());
  for (int64_t c = 0; c < 21; ++c) {
    EXPECT_EQ(At(y.mat(), 2, c), At(table.mat(), 3, c));
    EXPECT_EQ(dtable.data()[3 * 21 + c], dy.data()[c] + dy.data()[2 * 21 + c]);
    EXPECT_EQ(dtable.data()[1 * 21 + c], 0.0f);
  }
}

}  // namespace
}  // namespace moerl::tensor
