#include <cmath>
#include <limits>

#include "libs/tensor/cpu/coming_weights.h"
#include "tests/unit/tensor/oracle.h"

namespace moerl::tensor {
namespace {

struct Shape {
  int64_t m, n, k;
};

PackedWeight PackOne(Backend& backend, DType dtype, ConstMat w) {
  PackedWeight packed = backend.NewPacked(dtype, 1, w.rows, w.cols, true);
  backend.Pack(w, 0, 0, &packed);
  return packed;
}

double Tolerance(DType dtype) { return dtype == DType::kF32 ? 2e-6 : 2e-6; }  // inputs are exact in both

TEST(Gemm, MatchesDoubleInEveryLayoutAndType) {
  Random random(1);
  auto backend = NewBackend();
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const Shape s : {Shape{1, 1, 1}, {3, 33, 7}, {8, 32, 64}, {70, 65, 129}, {9, 257, 31}, {2, 300, 40}}) {
      const Tensor x = random.Matrix(dtype, s.m, s.k), w = random.Matrix(dtype, s.n, s.k);
      const PackedWeight packed = PackOne(*backend, dtype, w.mat());
      const std::vector<float> bias = random.Vector(s.n);
      Tensor y(DType::kF32, {s.m, s.n});
      Doubles want = MatMulOracle(ToDoubles(x.mat()), ToDoubles(w.mat()), s.m, s.n, s.k);

      backend->Gemm(x.mat(), packed, {}, y.mat());
      ExpectNear(y.mat(), want, Tolerance(dtype), "plain");

      GemmOptions options;
      options.bias = bias.data();
      options.add = true;
      backend->Gemm(x.mat(), packed, options, y.mat());
      for (size_t i = 0; i < want.size(); ++i) want[i] = 2 * want[i] + bias[i % s.n];
      ExpectNear(y.mat(), want, Tolerance(dtype), "bias and add");

      const Tensor dy = random.Matrix(dtype, s.m, s.n);
      Tensor dx(DType::kBf16, {s.m, s.k});
      Doubles transposed(s.m * s.k);
      for (int64_t i = 0; i < s.m; ++i) {
        for (int64_t j = 0; j < s.n; ++j) {
          for (int64_t l = 0; l < s.k; ++l) transposed[i * s.k + l] += At(dy.mat(), i, j) * At(w.mat(), j, l);
        }
      }
      options = {};
      options.transposed = true;
      backend->Gemm(dy.mat(), packed, options, dx.mat());
      ExpectNear(dx.mat(), transposed, 1.0 / 256, "transposed, bf16 out");
    }
  }
}

TEST(Gemm, RoundsFp32RowsWhenWeightsAreBf16) {
  Random random(2);
  auto backend = NewBackend();
  const Tensor x = random.Matrix(DType::kF32, 5, 47), w = random.Matrix(DType::kF32, 40, 47);
  Tensor x16(DType::kBf16, {5, 47}), y(DType::kF32, {5, 40}), y16(DType::kF32, {5, 40});
  backend->Cast(x.mat(), x16.mat());
  const PackedWeight packed = PackOne(*backend, DType::kBf16, w.mat());
  backend->Gemm(x.mat(), packed, {}, y.mat());
  backend->Gemm(x16.mat(), packed, {}, y16.mat());
  EXPECT_TRUE(SameBits(y.mat(), y16.mat()));
}

TEST(Gemm, GivesTheSameBitsWhateverWeightsAreAnnounced) {
  Random random(9);
  auto backend = NewBackend();
  const Tensor x = random.Matrix(DType::kBf16, 33, 40), w = random.Matrix(DType::kBf16, 100, 40);
  const PackedWeight packed = PackOne(*backend, DType::kBf16, w.mat()),
                     other = PackOne(*backend, DType::kBf16, w.mat());
  Tensor alone(DType::kF32, {33, 100}), announced(DType::kF32, {33, 100});
  backend->Gemm(x.mat(), packed, {}, alone.mat());
  backend->WillRead(other);
  backend->Gemm(x.mat(), packed, {}, announced.mat());
  EXPECT_TRUE(SameBits(alone.mat(), announced.mat()));
  backend->Gemm(x.mat(), other, {}, announced.mat());
  EXPECT_TRUE(SameBits(alone.mat(), announced.mat()));
}

TEST(ComingWeights, AreFetchedInOrderOnceAndNotTooFarAhead) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  const char* first = reinterpret_cast<const char*>(uintptr_t{1} << 32);  // never read
  const char *second = first + 64 * kMiB, *elsewhere = second + 64 * kMiB;
  ComingWeights coming;
  EXPECT_EQ(coming.During(elsewhere, kMiB, 1), nullptr);
  coming.Add(first, 12 * kMiB);
  coming.Add(first, 12 * kMiB);  // again: no second time
  coming.Add(second, kMiB);

  LaterWeight* later = coming.During(elsewhere, kMiB, 1);
  ASSERT_NE(later, nullptr);
  EXPECT_EQ(later->next, first);
  EXPECT_EQ(later->end - first, 8 * kMiB);
  later->next = later->end;
  later = coming.During(elsewhere, kMiB, 1);  // the first is as far ahead as it may be
  ASSERT_NE(later, nullptr);
  EXPECT_EQ(later->next, second);

  later = coming.During(first + 9 * kMiB, kMiB, 1);  // reading has overtaken fetching
  ASSERT_NE(later, nullptr);
  EXPECT_EQ(later->next, first + 10 * kMiB);
  EXPECT_EQ(later->end, first + 12 * kMiB);

  coming.Done(second);  // whatever came before it has been read, or never will be
  EXPECT_EQ(coming.During(elsewhere, kMiB, 1), nullptr);
}

// One pair of VDPBF16PS as the processor manual writes it, in exact arithmetic: flush, odd, flush, even, flush.
float PairOracle(float acc, float x0, float x1, float w0, float w1) {
  const auto flush = [](float v) {
    return std::fabs(v) < std::numeric_limits<float>::min() ? std::copysign(0.0f, v) : v;
  };
  acc = flush(std::fma(flush(x1), flush(w1), flush(acc)));
  return flush(std::fma(flush(x0), flush(w0), acc));
}

TEST(Gemm, Bf16ChainsAreFusedPairsOddFirstWithDenormalsFlushed) {
  Random random(3);
  for (const float scale : {1.0f, 1e-19f, 1e-20f, 1e-38f}) {
    const Tensor x = random.Matrix(DType::kBf16, 4, 37, scale), w = random.Matrix(DType::kBf16, 50, 37, scale);
    for (const CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
      if (!CpuHas(isa)) continue;
      auto backend = NewBackend(isa);
      Tensor y(DType::kF32, {4, 50});
      backend->Gemm(x.mat(), PackOne(*backend, DType::kBf16, w.mat()), {}, y.mat());
      for (int64_t i = 0; i < 4; ++i) {
        for (int64_t j = 0; j < 50; ++j) {
          float acc = 0;
          for (int64_t k = 0; k < 38; k += 2) {
            const auto element = [&](const Tensor& t, int64_t row, int64_t col) {
              return col < 37 ? static_cast<float>(At(t.mat(), row, col)) : 0.0f;
            };
            acc = PairOracle(acc, element(x, i, k), element(x, i, k + 1), element(w, j, k), element(w, j, k + 1));
          }
          ASSERT_EQ(std::memcmp(&acc, &y.data()[i * 50 + j], 4), 0) << "path " << static_cast<int>(isa) << " " << scale;
        }
      }
    }
  }
}

TEST(Gemm, AllPathsAndThreadsAgreeForEveryRowCount) {
  Random random(4);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Shape s{70, 97, 75};
    const Tensor x = random.Matrix(dtype, s.m, s.k), w = random.Matrix(DType::kF32, s.n, s.k);
    ExpectAllPathsAgree(
        [&](Backend& backend) {
          Outputs out;
          const PackedWeight packed = PackOne(backend, dtype, w.mat());
          for (int64_t m = 1; m <= s.m; ++m) {
            Tensor y(DType::kF32, {m, s.n}), y16(DType::kBf16, {m, s.n});
            backend.Gemm(x.mat().Rows(0, m), packed, {}, y.mat());
            backend.Gemm(x.mat().Rows(0, m), packed, {}, y16.mat());
            out.Add(y.mat());
            out.Add(y16.mat());
          }
          return out;
        },
        Name(dtype));
  }
}

TEST(Gemm, LargeCallsAgreeOnOneAndTwoThreads) {
  Random random(5);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Tensor x = random.Matrix(dtype, 150, 200), w = random.Matrix(dtype, 500, 200),
                 dy = random.Matrix(dtype, 150, 500);
    ExpectAllPathsAgree(
        [&](Backend& backend) {
          Outputs out;
          Tensor y(DType::kF32, {150, 500}), dw(DType::kF32, {500, 200});
          backend.Zero(dw.mat());
          backend.Gemm(x.mat(), PackOne(backend, dtype, w.mat()), {}, y.mat());
          backend.WeightGrad(dy.mat(), x.mat(), dtype, dw.mat());
          out.Add(y.mat());
          out.Add(dw.mat());
          return out;
        },
        Name(dtype));
  }
}

// The row rule: a row alone, anywhere in a batch, among any others.
TEST(Gemm, ARowDoesNotDependOnItsBatch) {
  Random random(6);
  auto backend = NewBackend(CpuIsa::kBest, 2);
  for (int round = 0; round < 200; ++round) {
    const DType dtype = round % 2 == 0 ? DType::kF32 : DType::kBf16;
    const Shape s{random.Int(1, 70), random.Int(1, 200), random.Int(1, 150)};
    const Tensor x = random.Matrix(dtype, s.m, s.k), w = random.Matrix(DType::kF32, s.n, s.k);
    const PackedWeight packed = PackOne(*backend, dtype, w.mat());
    Tensor all(DType::kF32, {s.m, s.n}), one(DType::kF32, {1, s.n});
    backend->Gemm(x.mat(), packed, {}, all.mat());
    const int64_t row = random.Int(0, s.m - 1);
    backend->Gemm(x.mat().Rows(row, 1), packed, {}, one.mat());
    ASSERT_TRUE(SameBits(one.mat(), all.mat().Rows(row, 1))) << "round " << round;
  }
}

TEST(Gemm, GroupsEqualDenseCallsToTheBit) {
  Random random(7);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    auto backend = NewBackend(CpuIsa::kBest, 2);
    const std::vector<int64_t> offsets = {0, 5, 5, 6, 40};
    const int64_t n = 70, k = 33, groups = 4;
    const Tensor x = random.Matrix(dtype, 40, k), dy = random.Matrix(dtype, 40, n),
                 w = random.Matrix(DType::kF32, groups * n, k);
    PackedWeight packed = backend->NewPacked(dtype, groups, n, k, true);
    for (int64_t g = 0; g < groups; ++g) {
      backend->Pack(w.mat().Rows(g * n, 20), g, 0, &packed);  // in two parts, as q and k share a weight
      backend->Pack(w.mat().Rows(g * n + 20, n - 20), g, 20, &packed);
    }
    Tensor y(DType::kF32, {40, n}), dx(DType::kF32, {40, k}), dw(DType::kF32, {groups * n, k});
    Tensor y1(DType::kF32, {40, n}), dx1(DType::kF32, {40, k}), dw1(DType::kF32, {groups * n, k});
    backend->Zero(dw.mat());
    backend->Zero(dw1.mat());
    GemmOptions transposed;
    transposed.transposed = true;
    backend->GroupedGemm(x.mat(), offsets, packed, {}, y.mat());
    backend->GroupedGemm(dy.mat(), offsets, packed, transposed, dx.mat());
    backend->GroupedWeightGrad(dy.mat(), x.mat(), offsets, dtype, dw.mat());
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = offsets[g], count = offsets[g + 1] - begin;
      const PackedWeight one = PackOne(*backend, dtype, w.mat().Rows(g * n, n));
      backend->Gemm(x.mat().Rows(begin, count), one, {}, y1.mat().Rows(begin, count));
      backend->Gemm(dy.mat().Rows(begin, count), one, transposed, dx1.mat().Rows(begin, count));
      backend->WeightGrad(dy.mat().Rows(begin, count), x.mat().Rows(begin, count), dtype, dw1.mat().Rows(g * n, n));
    }
    EXPECT_TRUE(SameBits(y.mat(), y1.mat()));
    EXPECT_TRUE(SameBits(dx.mat(), dx1.mat()));
    EXPECT_TRUE(SameBits(dw.mat(), dw1.mat()));
  }
}

TEST(WeightGrad, IsTheSumOverTokensAndGoesOnFromWhereItWas) {
  Random random(8);
  auto backend = NewBackend(CpuIsa::kBest, 2);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const int64_t tokens = 131, n = 45, k = 70, first = 64;
    const Tensor dy = random.Matrix(dtype, tokens, n), x = random.Matrix(dtype, tokens, k);
    Tensor whole(DType::kF32, {n, k}), parts(DType::kF32, {n, k});
    backend->Zero(whole.mat());
    backend->Zero(parts.mat());
    backend->WeightGrad(dy.mat(), x.mat(), dtype, whole.mat());
    backend->WeightGrad(dy.mat().Rows(0, first), x.mat().Rows(0, first), dtype, parts.mat());
    backend->WeightGrad(dy.mat().Rows(first, tokens - first), x.mat().Rows(first, tokens - first), dtype, parts.mat());
    Doubles want(n * k);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < k; ++j) want[i * k + j] += At(dy.mat(), t, i) * At(x.mat(), t, j);
      }
    }
    ExpectNear(whole.mat(), want, 2e-6);
    EXPECT_TRUE(SameBits(whole.mat(), parts.mat())) << "two micro-batches of even length continue one chain";
  }
}

TEST(WeightGrad, OfSequencesOneByOneAgreesWithPacked) {
  Random random(9);
  auto backend = NewBackend();
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const int64_t n = 32, k = 64;
    const std::vector<int64_t> offsets = {0, 37, 70, 71, 200};
    const Tensor dy = random.Matrix(dtype, 200, n), x = random.Matrix(dtype, 200, k);
    Tensor packed(DType::kF32, {n, k}), single(DType::kF32, {n, k});
    backend->Zero(packed.mat());
    backend->Zero(single.mat());
    backend->WeightGrad(dy.mat(), x.mat(), dtype, packed.mat());
    for (size_t s = 0; s + 1 < offsets.size(); ++s) {
      const int64_t begin = offsets[s], count = offsets[s + 1] - begin;
      backend->WeightGrad(dy.mat().Rows(begin, count), x.mat().Rows(begin, count), dtype, single.mat());
    }
    ExpectNear(packed.mat(), ToDoubles(single.mat()), 1e-6);
  }
}

}  // namespace
}  // namespace moerl::tensor
