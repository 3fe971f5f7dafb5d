#ifndef MOERL_TESTS_UNIT_TENSOR_ORACLE_H_
#define MOERL_TESTS_UNIT_TENSOR_ORACLE_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "libs/tensor/backend.h"
#include "libs/tensor/cpu/cpu_backend.h"

// What the tensor tests compare with: slow, obvious formulas in double, numeric gradients of them, and every
// CPU path beside every other.
namespace moerl::tensor {

using Doubles = std::vector<double>;

inline std::unique_ptr<Backend> NewBackend(CpuIsa isa = CpuIsa::kBest, int threads = 1) {
  CpuOptions options;
  options.isa = isa;
  options.threads = threads;
  return NewCpuBackend(options).value();
}

struct Random {
  std::mt19937 engine;
  explicit Random(uint32_t seed) : engine(seed) {}

  int64_t Int(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine); }
  float Normal() { return std::normal_distribution<float>()(engine); }

  Tensor Matrix(DType dtype, int64_t rows, int64_t cols, float scale = 1) {
    Tensor t(dtype, {std::max<int64_t>(rows, 1), cols});
    for (int64_t i = 0; i < t.size(); ++i) {
      const float value = Normal() * scale;
      if (dtype == DType::kF32) {
        t.data<float>()[i] = value;
      } else {
        t.data<Bf16>()[i] = ToBf16(value);
      }
    }
    return t;
  }
  std::vector<float> Vector(int64_t size, float scale = 1) {
    std::vector<float> v(size);
    for (float& x : v) x = Normal() * scale;
    return v;
  }
};

inline double At(ConstMat x, int64_t row, int64_t col) {
  return x.dtype == DType::kF32 ? x.Row<float>(row)[col] : ToFloat(x.Row<Bf16>(row)[col]);
}

inline Doubles ToDoubles(ConstMat x) {
  Doubles d;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) d.push_back(At(x, r, c));
  }
  return d;
}

// |got - want| <= tolerance * largest |want|.
inline void ExpectNear(ConstMat got, const Doubles& want, double tolerance, const std::string& what = "") {
  ASSERT_EQ(static_cast<size_t>(got.rows * got.cols), want.size()) << what;
  double largest = 1e-30;
  for (const double w : want) largest = std::max(largest, std::fabs(w));
  for (int64_t r = 0; r < got.rows; ++r) {
    for (int64_t c = 0; c < got.cols; ++c) {
      const double w = want[r * got.cols + c];
      ASSERT_LE(std::fabs(At(got, r, c) - w), tolerance * largest) << what << " at " << r << "," << c << " want " << w;
    }
  }
}

inline ConstMat VectorMat(const std::vector<float>& v) { return ConstMat(v.data(), 1, static_cast<int64_t>(v.size())); }

inline bool SameBits(ConstMat a, ConstMat b) {
  if (a.dtype != b.dtype || a.rows != b.rows || a.cols != b.cols) return false;
  for (int64_t r = 0; r < a.rows; ++r) {
    if (std::memcmp(a.RowBytes(r), b.RowBytes(r), a.cols * SizeOf(a.dtype)) != 0) return false;
  }
  return true;
}

// Outputs of one run, compared bit by bit with another run's.
struct Outputs {
  std::vector<std::string> bytes;
  void Add(ConstMat x) {
    std::string all;
    for (int64_t r = 0; r < x.rows; ++r) all.append(x.RowBytes(r), x.cols * SizeOf(x.dtype));
    bytes.push_back(all);
  }
  void Add(const std::vector<float>& v) { Add(VectorMat(v)); }
  template <typename T>
  void AddRaw(const std::vector<T>& v) {
    bytes.emplace_back(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T));
  }
};

// Runs on every path this processor has, with 1 and 2 threads; all must give the bits of the portable one.
inline void ExpectAllPathsAgree(const std::function<Outputs(Backend&)>& run, const std::string& what) {
  const Outputs want = run(*NewBackend(CpuIsa::kPortable, 1));
  for (const CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!CpuHas(isa)) continue;
    for (const int threads : {1, 2}) {
      if (isa == CpuIsa::kPortable && threads == 1) continue;
      const Outputs got = run(*NewBackend(isa, threads));
      ASSERT_EQ(got.bytes.size(), want.bytes.size());
      for (size_t i = 0; i < want.bytes.size(); ++i) {
        ASSERT_TRUE(got.bytes[i] == want.bytes[i])
            << what << ": output " << i << " differs on path " << static_cast<int>(isa) << ", threads " << threads;
      }
    }
  }
}

// Central differences of f at x.
inline Doubles NumericGradient(const std::function<double(const Doubles&)>& f, Doubles x, double step = 1e-5) {
  Doubles gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double kept = x[i];
    x[i] = kept + step;
    const double up = f(x);
    x[i] = kept - step;
    const double down = f(x);
    x[i] = kept;
    gradient[i] = (up - down) / (2 * step);
  }
  return gradient;
}

inline double DotOf(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// ---- formulas ---------------------------------------------------------------------------------------------

// x [m, k] by w [n, k]: [m, n].
inline Doubles MatMulOracle(const Doubles& x, const Doubles& w, int64_t m, int64_t n, int64_t k) {
  Doubles y(m * n);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t l = 0; l < k; ++l) y[i * n + j] += x[i * k + l] * w[j * k + l];
    }
  }
  return y;
}

inline Doubles RmsNormOracle(const Doubles& x, const Doubles& gain, double eps) {
  const size_t width = gain.size();
  Doubles y(x.size());
  for (size_t at = 0; at < x.size(); at += width) {
    double squares = 0;
    for (size_t i = 0; i < width; ++i) squares += x[at + i] * x[at + i];
    const double inv = 1 / std::sqrt(squares / static_cast<double>(width) + eps);
    for (size_t i = 0; i < width; ++i) y[at + i] = gain[i] * x[at + i] * inv;
  }
  return y;
}

// Causal attention of packed sequences; q [T, hq*d], k, v [T, hkv*d].
inline Doubles AttentionOracle(const Doubles& q, const Doubles& k, const Doubles& v,
                               const std::vector<int64_t>& offsets, int64_t hq, int64_t hkv, int64_t d, double scale) {
  Doubles out(q.size());
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    for (int64_t t = offsets[s]; t < offsets[s + 1]; ++t) {
      for (int64_t h = 0; h < hq; ++h) {
        const int64_t g = h / (hq / hkv);
        Doubles p;
        double largest = -1e300, sum = 0;
        for (int64_t u = offsets[s]; u <= t; ++u) {
          double dot = 0;
          for (int64_t i = 0; i < d; ++i) dot += q[(t * hq + h) * d + i] * k[(u * hkv + g) * d + i];
          p.push_back(dot * scale);
          largest = std::max(largest, p.back());
        }
        for (double& e : p) sum += e = std::exp(e - largest);
        for (int64_t u = offsets[s]; u <= t; ++u) {
          for (int64_t i = 0; i < d; ++i) {
            out[(t * hq + h) * d + i] += p[u - offsets[s]] / sum * v[(u * hkv + g) * d + i];
          }
        }
      }
    }
  }
  return out;
}

inline Doubles SoftmaxOracle(const Doubles& z) {
  const double largest = *std::max_element(z.begin(), z.end());
  Doubles p;
  double sum = 0;
  for (const double x : z) {
    p.push_back(std::exp(x - largest));
    sum += p.back();
  }
  for (double& x : p) x /= sum;
  return p;
}

}  // namespace moerl::tensor

#endif  // MOERL_TESTS_UNIT_TENSOR_ORACLE_H_
