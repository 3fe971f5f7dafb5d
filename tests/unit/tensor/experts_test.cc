#include <map>
#include <numeric>

#include "libs/tensor/cpu/combine_program.h"
#include "libs/tensor/expert_plan.h"
#include "tests/unit/tensor/oracle.h"

namespace moerl::tensor {
namespace {

const RouterKind kKinds[] = {RouterKind::kSoftmaxTopK, RouterKind::kSoftmaxTopKNormalised, RouterKind::kTopKSoftmax,
                             RouterKind::kSigmoidTopK, RouterKind::kSigmoidTopKNormalised};

bool IsSigmoid(RouterKind kind) {
  return kind == RouterKind::kSigmoidTopK || kind == RouterKind::kSigmoidTopKNormalised;
}

// What RouterWeights calls probs.
Doubles ProbsOracle(const Doubles& logits, RouterKind kind) {
  if (!IsSigmoid(kind)) return SoftmaxOracle(logits);
  Doubles s;
  for (const double z : logits) s.push_back(1 / (1 + std::exp(-z)));
  const double sum = std::accumulate(s.begin(), s.end(), 0.0);
  for (double& x : s) x /= sum;
  return s;
}

// The routing weights of given ids, from the formulas.
Doubles WeightsOracle(const Doubles& logits, RouterKind kind, const std::vector<int32_t>& ids) {
  Doubles w, chosen;
  const Doubles p = SoftmaxOracle(logits);
  for (const int32_t id : ids) {
    w.push_back(IsSigmoid(kind) ? 1 / (1 + std::exp(-logits[id])) : p[id]);
    chosen.push_back(logits[id]);
  }
  if (kind == RouterKind::kTopKSoftmax) return SoftmaxOracle(chosen);
  const double sum = std::accumulate(w.begin(), w.end(), 0.0);
  if (kind == RouterKind::kSoftmaxTopKNormalised || kind == RouterKind::kSigmoidTopKNormalised) {
    for (double& x : w) x /= sum;
  }
  return w;
}

TEST(Router, ChoosesTheLargestWithTiesToTheLowestId) {
  auto backend = NewBackend();
  const std::vector<float> logits = {1, 3, 2, 3, 3, -1, 2, 0};
  for (const RouterKind kind : kKinds) {
    std::vector<int32_t> ids(2);
    backend->RouterSelect(VectorMat(logits), kind, 2, nullptr, absl::MakeSpan(ids));
    EXPECT_EQ(ids, (std::vector<int32_t>{1, 3}));
    ids.resize(4);
    backend->RouterSelect(VectorMat(logits), kind, 4, nullptr, absl::MakeSpan(ids));
    EXPECT_EQ(ids, (std::vector<int32_t>{1, 2, 3, 4}));
  }
}

TEST(Router, BiasChoosesButNeverWeighs) {
  auto backend = NewBackend();
  const std::vector<float> logits = {0, 1, 2, 3}, bias = {9, 0, 0, 0};
  for (const RouterKind kind : kKinds) {
    std::vector<int32_t> ids(2);
    backend->RouterSelect(VectorMat(logits), kind, 2, bias.data(), absl::MakeSpan(ids));
    EXPECT_EQ(ids, (std::vector<int32_t>{0, 3}));
    std::vector<float> weights(2);
    backend->RouterWeights(VectorMat(logits), kind, 2, ids, Mat(weights.data(), 1, 2), {});
    ExpectNear(VectorMat(weights), WeightsOracle({0, 1, 2, 3}, kind, ids), 1e-6);
  }
}

TEST(Router, SigmoidScoresAtTheirLimitsTieToTheLowestIdAndStayFinite) {
  auto backend = NewBackend();
  for (const float z : {90.0f, -200.0f}) {
    const std::vector<float> logits(20, z);
    std::vector<int32_t> ids(3);
    backend->RouterSelect(VectorMat(logits), RouterKind::kSigmoidTopKNormalised, 3, nullptr, absl::MakeSpan(ids));
    EXPECT_EQ(ids, (std::vector<int32_t>{0, 1, 2}));
    std::vector<float> weights(3), probs(20);
    backend->RouterWeights(VectorMat(logits), RouterKind::kSigmoidTopKNormalised, 3, ids, Mat(weights.data(), 1, 3),
                           Mat(probs.data(), 1, 20));
    for (const float w : weights) EXPECT_FLOAT_EQ(w, z > 0 ? 1.0f / 3 : 0.0f);
    for (const float p : probs) EXPECT_FLOAT_EQ(p, z > 0 ? 1.0f / 20 : 0.0f);
  }
}

TEST(Router, WeightsAndGradientsMatchTheFormulas) {
  Random random(1);
  auto backend = NewBackend();
  for (const RouterKind kind : kKinds) {
    for (const bool with_probs : {false, true}) {
      const int64_t experts = 21;
      const int top_k = 4;
      const Tensor logits = random.Matrix(DType::kF32, 1, experts), dw = random.Matrix(DType::kF32, 1, top_k),
                   dp = random.Matrix(DType::kF32, 1, experts);
      std::vector<int32_t> ids(top_k);
      backend->RouterSelect(logits.mat(), kind, top_k, nullptr, absl::MakeSpan(ids));
      Tensor weights(DType::kF32, {1, top_k}), probs(DType::kF32, {1, experts}), dz(DType::kF32, {1, experts});
      backend->RouterWeights(logits.mat(), kind, top_k, ids, weights.mat(), probs.mat());
      const Doubles z = ToDoubles(logits.mat());
      ExpectNear(weights.mat(), WeightsOracle(z, kind, ids), 1e-6);
      ExpectNear(probs.mat(), ProbsOracle(z, kind), 1e-6);
      backend->RouterBackward(logits.mat(), kind, top_k, ids, dw.mat(), with_probs ? dp.mat() : ConstMat(), dz.mat());
      const auto loss = [&](const Doubles& v) {
        return DotOf(WeightsOracle(v, kind, ids), ToDoubles(dw.mat())) +
               (with_probs ? DotOf(ProbsOracle(v, kind), ToDoubles(dp.mat())) : 0.0);
      };
      ExpectNear(dz.mat(), NumericGradient(loss, z), 1e-5);
    }
  }
}

TEST(Router, ReplayedIdsInAnyOrderGiveTheSameWeights) {
  Random random(2);
  auto backend = NewBackend();
  const Tensor logits = random.Matrix(DType::kF32, 1, 16);
  for (const RouterKind kind : kKinds) {
    const std::vector<int32_t> forward = {2, 5, 11}, shuffled = {11, 2, 5}, missing = {11, -1, 5};
    std::vector<float> a(3), b(3), c(3);
    backend->RouterWeights(logits.mat(), kind, 3, forward, Mat(a.data(), 1, 3), {});
    backend->RouterWeights(logits.mat(), kind, 3, shuffled, Mat(b.data(), 1, 3), {});
    backend->RouterWeights(logits.mat(), kind, 3, missing, Mat(c.data(), 1, 3), {});
    EXPECT_EQ(b, (std::vector<float>{a[2], a[0], a[1]}));
    EXPECT_EQ(c[1], 0.0f);
  }
}

// The tree of the design, recursively on one number.
struct Partial {
  bool present = false;
  float value = 0;
};
Partial TreeOracle(int a, int b, const std::map<int, float>& leaves, int wire) {
  Partial p;
  if (b - a == 1) {
    const auto it = leaves.find(a);
    if (it != leaves.end()) p = {true, it->second};
  } else {
    const int middle = a + (b - a + 1) / 2;
    const Partial left = TreeOracle(a, middle, leaves, wire), right = TreeOracle(middle, b, leaves, wire);
    p.present = left.present || right.present;
    p.value = !left.present ? right.value : !right.present ? left.value : left.value + right.value;
  }
  if (p.present && wire > 0 && b - a >= wire) p.value = RoundToBf16(p.value);
  return p;
}

TEST(Combine, IsTheTreeToTheBit) {
  Random random(3);
  auto backend = NewBackend(CpuIsa::kBest, 2);
  for (int round = 0; round < 500; ++round) {
    const int experts = static_cast<int>(random.Int(1, 70)),
              top_k = static_cast<int>(random.Int(1, std::min(experts, 9)));
    const int wire = static_cast<int>(random.Int(0, experts));
    const int64_t tokens = random.Int(1, 5), cols = random.Int(1, 40);
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<int32_t> all(experts);
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random.engine);
      for (int i = 0; i < top_k; ++i) ids.push_back(random.Int(0, 9) == 0 ? -1 : all[i]);
    }
    const ExpertPlan plan = MakeExpertPlan(ids, top_k, experts);
    const int64_t rows = plan.offsets.back();
    const Tensor x = random.Matrix(round % 2 == 0 ? DType::kF32 : DType::kBf16, rows, cols);
    const Tensor weights = random.Matrix(DType::kF32, tokens, top_k);
    Tensor out(DType::kF32, {tokens, cols});
    backend->Combine(x.mat().Rows(0, rows), {ids, plan.row_of_slot, top_k, experts, wire}, weights.mat(), out.mat());
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t c = 0; c < cols; ++c) {
        std::map<int, float> leaves;
        for (int i = 0; i < top_k; ++i) {
          if (ids[t * top_k + i] < 0) continue;
          const float value = static_cast<float>(At(x.mat(), plan.row_of_slot[t * top_k + i], c));
          leaves[ids[t * top_k + i]] = weights.data()[t * top_k + i] * value;
        }
        const Partial want = TreeOracle(0, experts, leaves, wire);
        ASSERT_EQ(out.data()[t * cols + c], want.present ? want.value : 0.0f) << "round " << round;
      }
    }
  }
}

TEST(Combine, BackwardGivesRowAndWeightGradients) {
  Random random(4);
  auto backend = NewBackend();
  const int experts = 6, top_k = 2;
  const std::vector<int32_t> ids = {0, 5, -1, 2, 2, 3};
  const ExpertPlan plan = MakeExpertPlan(ids, top_k, experts);
  const int64_t tokens = 3, cols = 19, rows = plan.offsets.back();
  const Tensor x = random.Matrix(DType::kF32, rows, cols), w = random.Matrix(DType::kF32, tokens, top_k),
               dout = random.Matrix(DType::kF32, tokens, cols);
  Tensor dx(DType::kF32, {rows, cols}), dw(DType::kF32, {tokens, top_k});
  const CombinePlan combine{ids, plan.row_of_slot, top_k, experts, 0};
  backend->CombineBackward(dout.mat(), x.mat(), combine, w.mat(), dx.mat(), dw.mat());
  const Doubles g = ToDoubles(dout.mat());
  const auto loss = [&](const Doubles& xs, const Doubles& ws) {
    double sum = 0;
    for (int64_t slot = 0; slot < tokens * top_k; ++slot) {
      if (ids[slot] < 0) continue;
      for (int64_t c = 0; c < cols; ++c)
        sum += ws[slot] * xs[plan.row_of_slot[slot] * cols + c] * g[slot / top_k * cols + c];
    }
    return sum;
  };
  const Doubles xd = ToDoubles(x.mat()), wd = ToDoubles(w.mat());
  ExpectNear(dx.mat(), NumericGradient([&](const Doubles& v) { return loss(v, wd); }, xd), 1e-5);
  ExpectNear(dw.mat(), NumericGradient([&](const Doubles& v) { return loss(xd, v); }, wd), 1e-5);
}

TEST(ExpertPlan, SortsRowsByExpertThenToken) {
  const std::vector<int32_t> ids = {3, 0, -1, 3, 0, 1};
  const ExpertPlan plan = MakeExpertPlan(ids, 2, 4);
  EXPECT_EQ(plan.offsets, (std::vector<int64_t>{0, 2, 3, 3, 5}));
  EXPECT_EQ(plan.token_of_row, (std::vector<int32_t>{0, 2, 2, 0, 1}));
  EXPECT_EQ(plan.row_of_slot, (std::vector<int32_t>{3, 0, -1, 4, 1, 2}));
}

TEST(Experts, AllPathsAndThreadsAgree) {
  Random random(5);
  const int experts = 37, top_k = 5;
  const int64_t tokens = 200, cols = 75;
  const Tensor logits = random.Matrix(DType::kF32, tokens, experts, 2), dout = random.Matrix(DType::kF32, tokens, cols),
               dw = random.Matrix(DType::kF32, tokens, top_k), dp = random.Matrix(DType::kF32, tokens, experts);
  const Tensor source = random.Matrix(DType::kBf16, tokens, cols);
  for (const RouterKind kind : kKinds) {
    ExpectAllPathsAgree(
        [&](Backend& b) {
          Outputs out;
          std::vector<int32_t> ids(tokens * top_k);
          Tensor weights(DType::kF32, {tokens, top_k}), probs(DType::kF32, {tokens, experts});
          Tensor dz(DType::kF32, {tokens, experts}), y(DType::kF32, {tokens, cols}),
              dweights(DType::kF32, {tokens, top_k});
          b.RouterSelect(logits.mat(), kind, top_k, nullptr, absl::MakeSpan(ids));
          b.RouterWeights(logits.mat(), kind, top_k, ids, weights.mat(), probs.mat());
          b.RouterBackward(logits.mat(), kind, top_k, ids, dw.mat(), dp.mat(), dz.mat());
          const ExpertPlan plan = MakeExpertPlan(ids, top_k, experts);
          Tensor rows(DType::kBf16, {plan.offsets.back(), cols}), drows(DType::kBf16, {plan.offsets.back(), cols});
          b.GatherRows(source.mat(), plan.token_of_row, rows.mat());
          const CombinePlan combine{ids, plan.row_of_slot, top_k, experts, 5};
          b.Combine(rows.mat(), combine, weights.mat(), y.mat());
          b.CombineBackward(dout.mat(), rows.mat(), combine, weights.mat(), drows.mat(), dweights.mat());
          out.AddRaw(ids);
          for (const ConstMat m : {weights.mat(), probs.mat(), dz.mat(), y.mat(), drows.mat(), dweights.mat()})
            out.Add(m);
          return out;
        },
        "router kind " + std::to_string(static_cast<int>(kind)));
  }
}

}  // namespace
}  // namespace moerl::tensor
