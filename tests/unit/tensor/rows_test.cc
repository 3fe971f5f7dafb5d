#include <cmath>
#include <limits>

#include "libs/tensor/math.h"
#include "tests/unit/tensor/oracle.h"

namespace moerl::tensor {
namespace {

TEST(RmsNorm, MatchesDoubleWholeAndByPieces) {
  Random random(1);
  auto backend = NewBackend();
  for (const int64_t width : {1, 7, 16, 33, 64}) {
    for (const int64_t pieces : {1, 3}) {
      const Tensor x = random.Matrix(DType::kF32, 5, width * pieces);
      const std::vector<float> gain = random.Vector(width);
      Tensor y(DType::kF32, {5, width * pieces}), y16(DType::kBf16, {5, width * pieces});
      backend->RmsNorm(x.mat(), gain, 1e-5f, y.mat(), nullptr);
      backend->RmsNorm(x.mat(), gain, 1e-5f, y16.mat(), nullptr);
      const Doubles want = RmsNormOracle(ToDoubles(x.mat()), Doubles(gain.begin(), gain.end()), 1e-5f);
      ExpectNear(y.mat(), want, 1e-6);
      ExpectNear(y16.mat(), want, 1.0 / 256);
    }
  }
}

TEST(RmsNorm, BackwardMatchesFiniteDifferences) {
  Random random(2);
  auto backend = NewBackend();
  const int64_t rows = 4, width = 19, pieces = 2;
  const Tensor x = random.Matrix(DType::kF32, rows, width * pieces),
               dy = random.Matrix(DType::kF32, rows, width * pieces);
  const std::vector<float> gain = random.Vector(width);
  Tensor y(DType::kF32, {rows, width * pieces}), dx(DType::kF32, {rows, width * pieces});
  std::vector<float> inv(rows * pieces), dgain(width, 0.0f);
  backend->RmsNorm(x.mat(), gain, 1e-3f, y.mat(), inv.data());
  backend->RmsNormBackward(dy.mat(), x.mat(), gain, inv.data(), false, dx.mat(), dgain.data());
  const Doubles xd = ToDoubles(x.mat()), gd(gain.begin(), gain.end()), g = ToDoubles(dy.mat());
  Doubles want = NumericGradient([&](const Doubles& v) { return DotOf(RmsNormOracle(v, gd, 1e-3f), g); }, xd);
  ExpectNear(dx.mat(), want, 1e-5, "dx");
  ExpectNear(VectorMat(dgain),
             NumericGradient([&](const Doubles& v) { return DotOf(RmsNormOracle(xd, v, 1e-3f), g); }, gd), 1e-5,
             "dgain");
  backend->RmsNormBackward(dy.mat(), x.mat(), gain, inv.data(), true, dx.mat(), dgain.data());
  for (double& w : want) w *= 2;
  ExpectNear(dx.mat(), want, 1e-5, "added");
}

Doubles RopeOracle(const Doubles& x, const std::vector<int32_t>& positions, const std::vector<float>& inv_freq,
                   int64_t cols, int64_t d) {
  Doubles y = x;
  const int64_t half = static_cast<int64_t>(inv_freq.size());
  for (size_t t = 0; t < positions.size(); ++t) {
    for (int64_t at = 0; at < cols; at += d) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<float>(positions[t]) * inv_freq[i];  // fp32, as transformers
        const int64_t a = t * cols + at + i, b = a + half;
        y[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
        y[b] = x[b] * std::cos(angle) + x[a] * std::sin(angle);
      }
    }
  }
  return y;
}

TEST(Rope, RotatesHalvesLeavesTheRestAndTurnsBack) {
  Random random(3);
  auto backend = NewBackend();
  const int64_t d = 22, cols = 3 * d;
  const std::vector<int32_t> positions = {0, 1, 77, 40000};
  const std::vector<float> inv_freq = {1.0f, 0.37f, 0.1f, 0.013f, 0.004f, 0.0011f, 0.0002f};
  const Tensor x = random.Matrix(DType::kF32, 4, cols);
  Tensor cos(DType::kF32, {4, 7}), sin(DType::kF32, {4, 7}), y(DType::kF32, {4, cols});
  backend->RopeTable(positions, inv_freq, 1.0f, cos.mat(), sin.mat());
  backend->Rope(x.mat(), d, cos.mat(), sin.mat(), false, y.mat());
  ExpectNear(y.mat(), RopeOracle(ToDoubles(x.mat()), positions, inv_freq, cols, d), 1e-6);
  backend->Rope(y.mat(), d, cos.mat(), sin.mat(), true, y.mat());
  ExpectNear(y.mat(), ToDoubles(x.mat()), 1e-6, "in place, back");
}

double Silu(double g) { return g / (1 + std::exp(-g)); }

TEST(SwiGlu, AndItsBackwardMatchDouble) {
  Random random(4);
  auto backend = NewBackend();
  const int64_t rows = 3, f = 21;
  const Tensor x = random.Matrix(DType::kF32, rows, 2 * f, 3), dy = random.Matrix(DType::kF32, rows, f);
  const auto forward = [&](const Doubles& v) {
    Doubles y(rows * f);
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t i = 0; i < f; ++i) y[t * f + i] = Silu(v[t * 2 * f + i]) * v[t * 2 * f + f + i];
    }
    return y;
  };
  Tensor y(DType::kF32, {rows, f}), dx(DType::kF32, {rows, 2 * f});
  backend->SwiGlu(x.mat(), y.mat());
  backend->SwiGluBackward(dy.mat(), x.mat(), dx.mat());
  const Doubles xd = ToDoubles(x.mat()), g = ToDoubles(dy.mat());
  ExpectNear(y.mat(), forward(xd), 1e-6);
  ExpectNear(dx.mat(), NumericGradient([&](const Doubles& v) { return DotOf(forward(v), g); }, xd), 1e-5);
}

TEST(SwiGlu, SaturatesWithoutNaN) {
  auto backend = NewBackend();
  const std::vector<float> x = {-1000, 1000, -90, 3, 1, 1, 1, 1};
  std::vector<float> y(4);
  backend->SwiGlu(ConstMat(x.data(), 1, 8), Mat(y.data(), 1, 4));
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_EQ(y[1], 1000.0f);
  EXPECT_NEAR(y[2], 0.0f, 1e-30);
}

TEST(SigmoidGate, AndItsBackwardMatchDouble) {
  Random random(5);
  auto backend = NewBackend();
  const int64_t rows = 4, c = 18;
  const Tensor x = random.Matrix(DType::kF32, rows, c), gate = random.Matrix(DType::kF32, rows, 1),
               dy = random.Matrix(DType::kF32, rows, c);
  const auto forward = [&](const Doubles& v, const Doubles& s) {
    Doubles y = v;
    for (int64_t i = 0; i < rows * c; ++i) y[i] *= 1 / (1 + std::exp(-s[i / c]));
    return y;
  };
  Tensor y(DType::kF32, {rows, c}), dx(DType::kF32, {rows, c}), dgate(DType::kF32, {rows, 1});
  backend->SigmoidGate(x.mat(), gate.mat(), y.mat());
  backend->SigmoidGateBackward(dy.mat(), x.mat(), gate.mat(), dx.mat(), dgate.mat());
  const Doubles xd = ToDoubles(x.mat()), sd = ToDoubles(gate.mat()), g = ToDoubles(dy.mat());
  ExpectNear(y.mat(), forward(xd, sd), 1e-6);
  ExpectNear(dx.mat(), NumericGradient([&](const Doubles& v) { return DotOf(forward(v, sd), g); }, xd), 1e-5);
  ExpectNear(dgate.mat(), NumericGradient([&](const Doubles& v) { return DotOf(forward(xd, v), g); }, sd), 1e-5);
}

TEST(AdamW, FollowsThePaperOverSeveralSteps) {
  Random random(6);
  auto backend = NewBackend();
  const int64_t count = 37;
  std::vector<float> master = random.Vector(count), m(count, 0.0f), v(count, 0.0f);
  Doubles w(master.begin(), master.end()), md(count), vd(count);
  AdamWOptions o;
  o.lr = 0.01f;
  o.weight_decay = 0.1f;
  o.grad_scale = 0.5f;
  for (o.step = 1; o.step <= 5; ++o.step) {
    const std::vector<float> grad = random.Vector(count);
    backend->AdamW(o, grad.data(), count, master.data(), m.data(), v.data());
    for (int64_t i = 0; i < count; ++i) {
      const double g = grad[i] * 0.5;
      md[i] = o.beta1 * md[i] + (1 - o.beta1) * g;
      vd[i] = o.beta2 * vd[i] + (1 - o.beta2) * g * g;
      const double step = static_cast<double>(o.step);
      const double mh = md[i] / (1 - std::pow(o.beta1, step)), vh = vd[i] / (1 - std::pow(o.beta2, step));
      w[i] -= o.lr * o.weight_decay * w[i] + o.lr * mh / (std::sqrt(vh) + o.eps);
    }
  }
  ExpectNear(VectorMat(master), w, 2e-6);
}

TEST(SumSquares, IsExactEnoughAndShowsWhatIsNotFinite) {
  Random random(7);
  auto backend = NewBackend(CpuIsa::kBest, 2);
  std::vector<float> x = random.Vector(200001);
  double want = 0;
  for (const float e : x) want += static_cast<double>(e) * e;
  EXPECT_NEAR(backend->SumSquares(x.data(), 200001), want, want * 1e-12);
  x.assign(100, 3e38f);
  EXPECT_TRUE(std::isfinite(backend->SumSquares(x.data(), 100)));
  x[77] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(std::isfinite(backend->SumSquares(x.data(), 100)));
}

TEST(Rows, AllPathsAndThreadsAgree) {
  Random random(8);
  const int64_t rows = 300, d = 37, cols = 2 * d;
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Tensor x = random.Matrix(dtype, rows, cols), dy = random.Matrix(dtype, rows, cols);
    const Tensor half_dy = random.Matrix(dtype, rows, d), gate = random.Matrix(DType::kF32, rows, 1);
    const std::vector<float> gain = random.Vector(d), inv_freq = {1.0f, 0.3f, 0.02f, 0.001f, 0.0003f};
    std::vector<int32_t> positions(rows);
    for (int32_t& p : positions) p = static_cast<int32_t>(random.Int(0, 50000));
    ExpectAllPathsAgree(
        [&](Backend& b) {
          Outputs out;
          Tensor y(dtype, {rows, cols}), dx(DType::kF32, {rows, cols}), f(dtype, {rows, d}), df(dtype, {rows, cols});
          Tensor cos(DType::kF32, {rows, 5}), sin(DType::kF32, {rows, 5}), sum(DType::kF32, {rows, cols});
          Tensor dgate(DType::kF32, {rows, 1});
          std::vector<float> inv(rows * 2), dgain(d, 0.5f), columns(cols, 0.25f);
          b.RmsNorm(x.mat(), gain, 1e-6f, y.mat(), inv.data());
          out.Add(y.mat());
          b.RmsNormBackward(dy.mat(), x.mat(), gain, inv.data(), false, dx.mat(), dgain.data());
          out.Add(dx.mat());
          out.Add(dgain);
          b.RopeTable(positions, inv_freq, 1.1f, cos.mat(), sin.mat());
          b.Rope(x.mat(), d, cos.mat(), sin.mat(), false, y.mat());
          out.Add(y.mat());
          b.SwiGlu(x.mat(), f.mat());
          b.SwiGluBackward(half_dy.mat(), x.mat(), df.mat());
          out.Add(f.mat());
          out.Add(df.mat());
          b.SigmoidGate(x.mat(), gate.mat(), y.mat());
          out.Add(y.mat());
          b.SigmoidGateBackward(dy.mat(), x.mat(), gate.mat(), dx.mat(), dgate.mat());
          out.Add(dgate.mat());
          b.Cast(x.mat(), sum.mat());
          b.Add(dy.mat(), sum.mat());
          b.Scale(0.7f, sum.mat());
          out.Add(sum.mat());
          b.ColumnSum(x.mat(), columns.data());
          out.Add(columns);
          AdamWOptions o;
          o.lr = 0.01f;
          o.weight_decay = 0.1f;
          o.step = 3;
          Tensor m(DType::kF32, {rows, cols}), v(DType::kF32, {rows, cols});
          b.Zero(m.mat());
          b.Zero(v.mat());
          b.AdamW(o, dx.data(), dx.size(), sum.data(), m.data(), v.data());
          out.Add(sum.mat());
          out.AddRaw(std::vector<double>{b.SumSquares(sum.data(), sum.size())});
          return out;
        },
        Name(dtype));
  }
}

TEST(Rows, VectorExpGivesTheBitsOfTheScalarOne) {
  // Through the softmax statistics of one-logit rows: the only kernel that shows e^x by itself is the gate.
  auto backend = NewBackend();
  Random random(9);
  for (int i = 0; i < 20000; ++i) {
    const float x = random.Normal() * 30;
    const float one = 1;
    float y;
    backend->SigmoidGate(ConstMat(&one, 1, 1), ConstMat(&x, 1, 1), Mat(&y, 1, 1));
    ASSERT_EQ(y, 1.0f / (1.0f + Exp(0.0f - x))) << x;
  }
}

TEST(Rows, ARowDoesNotDependOnItsBatch) {
  Random random(10);
  auto backend = NewBackend(CpuIsa::kBest, 2);
  for (int round = 0; round < 100; ++round) {
    const int64_t rows = random.Int(1, 400), d = random.Int(1, 80);
    const Tensor x = random.Matrix(DType::kF32, rows, 2 * d);
    const std::vector<float> gain = random.Vector(d);
    Tensor y(DType::kBf16, {rows, 2 * d}), f(DType::kBf16, {rows, d}), y1(DType::kBf16, {1, 2 * d}),
        f1(DType::kBf16, {1, d});
    const int64_t row = random.Int(0, rows - 1);
    backend->RmsNorm(x.mat(), gain, 1e-6f, y.mat(), nullptr);
    backend->RmsNorm(x.mat().Rows(row, 1), gain, 1e-6f, y1.mat(), nullptr);
    backend->SwiGlu(x.mat(), f.mat());
    backend->SwiGlu(x.mat().Rows(row, 1), f1.mat());
    ASSERT_TRUE(SameBits(y.mat().Rows(row, 1), y1.mat()));
    ASSERT_TRUE(SameBits(f.mat().Rows(row, 1), f1.mat()));
  }
}

TEST(CpuBackend, RefusesWhatItCannotDo) {
  CpuOptions options;
  options.threads = 0;
  EXPECT_EQ(NewCpuBackend(options).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moerl::tensor
