// GEMM on packed weights: y[m, n] = sum over k of x[m, k] w[n, k]. Included once by each instruction set.
//
// Every output is one chain of fused multiply-adds in ascending k, whatever tile computes it, so a row's bits do
// not depend on the tile's other rows. bf16 goes in pairs (odd element first), an odd k ends with a zero.
namespace moerl::tensor::MOERL_ISA {

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls f with the compile-time constant equal to n, 1 <= n <= Max.
template <int Max, typename F>
MOERL_INLINE void WithCount(int n, F f) {
  if constexpr (Max > 1) {
    if (n < Max) return WithCount<Max - 1>(n, f);
  }
  f(Count<Max>{});
}

template <typename F>
MOERL_INLINE void WithLanes(int64_t count, F f) {
  if (count >= kLanes) {
    f(Full{});
  } else {
    f(Tail{static_cast<int>(count)});
  }
}

// One chain step per accumulator and k. w[p] is panel p; V = 2 P vectors of columns.
template <int R, int P>
MOERL_INLINE void MultiplyAdd(F32x16 (&acc)[R][2 * P], const float* x, int64_t x_stride, const float* w,
                              int64_t panel_stride, int64_t k) {
  for (int64_t i = 0; i < k; ++i) {
    F32x16 columns[2 * P];
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; ++v) {
      columns[v] = Load(w + (v / 2) * panel_stride + i * kPanel + (v % 2) * kLanes, Full{});
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 row = Set1(x[r * x_stride + i]);
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; ++v) acc[r][v] = Fma(row, columns[v], acc[r][v]);
    }
  }
}

template <int R, int P>
MOERL_INLINE void MultiplyAddPair(F32x16 (&acc)[R][2 * P], const Bf16* x, int64_t x_stride, const Bf16* w,
                                  int64_t panel_stride) {
  Pairs columns[2 * P];
#pragma GCC unroll 8
  for (int v = 0; v < 2 * P; ++v) columns[v] = LoadPairs(w + (v / 2) * panel_stride + (v % 2) * 2 * kLanes);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Pairs row = Set1Pair(x + r * x_stride);
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; ++v) acc[r][v] = DotPairs(acc[r][v], row, columns[v]);
  }
}

template <int R, int P>
MOERL_INLINE void MultiplyAdd(F32x16 (&acc)[R][2 * P], const Bf16* x, int64_t x_stride, const Bf16* w,
                              int64_t panel_stride, int64_t k) {
  const int64_t even = k & ~int64_t{1};
  for (int64_t i = 0; i < even; i += 2) {
    MultiplyAddPair<R, P>(acc, x + i, x_stride, w + i * kPanel, panel_stride);
  }
  if (even < k) {
    Bf16 last[R][2] = {};
    for (int r = 0; r < R; ++r) last[r][0] = x[r * x_stride + even];
    MultiplyAddPair<R, P>(acc, last[0], 2, w + even * kPanel, panel_stride);
  }
}

// The chains of one tile. Where DotPairs needs denormals flushed, that is switched on around a call that the
// compiler cannot look into, and nothing but the chains runs under it.
template <int R, int P, typename T>
__attribute__((noinline)) void MultiplyAddTile(F32x16 (*acc)[2 * P], const T* x, int64_t x_stride, const T* w,
                                               int64_t panel_stride, int64_t k) {
  F32x16 local[R][2 * P];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < 2 * P; ++v) local[r][v] = acc[r][v];
  }
  MultiplyAdd<R, P>(local, x, x_stride, w, panel_stride, k);
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < 2 * P; ++v) acc[r][v] = local[r][v];
  }
}

template <int R, int P>
MOERL_INLINE void Chains(F32x16 (&acc)[R][2 * P], const float* x, int64_t x_stride, const float* w,
                         int64_t panel_stride, int64_t k) {
  MultiplyAdd<R, P>(acc, x, x_stride, w, panel_stride, k);
}
template <int R, int P>
MOERL_INLINE void Chains(F32x16 (&acc)[R][2 * P], const Bf16* x, int64_t x_stride, const Bf16* w, int64_t panel_stride,
                         int64_t k) {
  if constexpr (kPairsFlushThemselves) {
    MultiplyAdd<R, P>(acc, x, x_stride, w, panel_stride, k);
  } else {
    FlushDenormals flush;
    MultiplyAddTile<R, P, Bf16>(acc, x, x_stride, w, panel_stride, k);
  }
}

// Bias, addition to y, rounding to y's type; columns past n are not touched.
template <typename Y>
MOERL_INLINE void FinishVector(const GemmCall& c, F32x16 acc, int64_t row, int64_t column) {
  Y* y = static_cast<Y*>(c.y) + row * c.y_stride + column;
  WithLanes(c.n - column, [&](auto lanes) {
    if (c.bias != nullptr) acc = Add(acc, Load(c.bias + column, lanes));
    if (c.finish == Finish::kAdd) acc = Add(Load(y, lanes), acc);
    Store(acc, y, lanes);
  });
}

template <int R, int P, typename T>
__attribute__((noinline)) void GemmTile(const GemmCall& c, int64_t row, int64_t column) {
  F32x16 acc[R][2 * P];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; ++v) acc[r][v] = Zero();
  }
  if (c.finish == Finish::kChain) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; ++v) {
        const int64_t at = column + v * kLanes;
        if (at >= c.n) continue;
        const float* y = static_cast<const float*>(c.y) + (row + r) * c.y_stride + at;
        WithLanes(c.n - at, [&](auto lanes) { acc[r][v] = Load(y, lanes); });
      }
    }
  }
  const T* x = static_cast<const T*>(c.x) + row * c.x_stride;
  const T* w = static_cast<const T*>(c.w) + column / kPanel * c.panel_stride;
  Chains<R, P>(acc, x, c.x_stride, w, c.panel_stride, c.k);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; ++v) {
      const int64_t at = column + v * kLanes;
      if (at >= c.n) continue;
      if (c.y_dtype == DType::kBf16) {
        FinishVector<Bf16>(c, acc[r][v], row + r, at);
      } else {
        FinishVector<float>(c, acc[r][v], row + r, at);
      }
    }
  }
}

// Few rows take several panels at once: more independent chains, and more streams when memory is the limit.
template <int R>
inline constexpr int kPanelsAtOnce = R * 8 <= kAccumulators   ? 4
                                     : R * 4 <= kAccumulators ? 2
                                                              : 1;

template <int R, typename T>
MOERL_INLINE void GemmRows(const GemmCall& c, int64_t row, int64_t column_begin, int64_t column_end) {
  constexpr int P = kPanelsAtOnce<R>;
  int64_t column = column_begin;
  for (; column + (P - 1) * kPanel < column_end; column += P * kPanel) GemmTile<R, P, T>(c, row, column);
  for (; column < column_end; column += kPanel) GemmTile<R, 1, T>(c, row, column);
}

template <typename T>
MOERL_INLINE void Gemm(const GemmCall& c) {
  if (c.m <= kTileRows) {
    if (c.m > 0) WithCount<kTileRows>(static_cast<int>(c.m), [&](auto r) { GemmRows<r.value, T>(c, 0, 0, c.n); });
    return;
  }
  // One panel for all rows, so that it is read from the nearest cache.
  for (int64_t column = 0; column < c.n; column += kPanel) {
    const int64_t end = column + kPanel < c.n ? column + kPanel : c.n;
    int64_t row = 0;
    for (; row + kTileRows <= c.m; row += kTileRows) GemmTile<kTileRows, 1, T>(c, row, column);
    if (row < c.m) {
      WithCount<kTileRows>(static_cast<int>(c.m - row), [&](auto r) { GemmRows<r.value, T>(c, row, column, end); });
    }
  }
}

static void GemmF32(const GemmCall& c) { Gemm<float>(c); }

static void GemmBf16(const GemmCall& c) { Gemm<Bf16>(c); }

// ---- packing ----------------------------------------------------------------------------------------------

MOERL_INLINE void StoreOne(float value, float* p) { *p = value; }
MOERL_INLINE void StoreOne(float value, Bf16* p) { Store(Set1(value), p, Tail{1}); }
MOERL_INLINE float LoadOne(const float* p) { return *p; }
MOERL_INLINE float LoadOne(const Bf16* p) { return __builtin_bit_cast(float, static_cast<uint32_t>(p->bits) << 16); }
MOERL_INLINE void CopyOne(const float* from, float* to) { *to = *from; }
MOERL_INLINE void CopyOne(const Bf16* from, Bf16* to) { *to = *from; }
MOERL_INLINE void CopyOne(const float* from, Bf16* to) { StoreOne(*from, to); }
MOERL_INLINE void CopyOne(const Bf16* from, float* to) { *to = LoadOne(from); }

// Where element (n, k) of a weight of `depth` inputs is inside its group.
MOERL_INLINE int64_t PackedIndex(const float*, int64_t n, int64_t k, int64_t depth) {
  return n / kPanel * depth * kPanel + k * kPanel + n % kPanel;
}
MOERL_INLINE int64_t PackedIndex(const Bf16*, int64_t n, int64_t k, int64_t depth) {
  const int64_t even_depth = (depth + 1) & ~int64_t{1};
  return n / kPanel * even_depth * kPanel + (k & ~int64_t{1}) * kPanel + n % kPanel * 2 + (k & 1);
}

template <typename F>
MOERL_INLINE void WithType(DType dtype, F f) {
  if (dtype == DType::kF32) {
    f(static_cast<float*>(nullptr));
  } else {
    f(static_cast<Bf16*>(nullptr));
  }
}

static void PackRows(const ConstMat& src, int64_t row_begin, DType dtype, void* panels) {
  WithType(src.dtype, [&](auto* from_type) {
    WithType(dtype, [&](auto* to_type) {
      const auto* from = static_cast<decltype(from_type)>(const_cast<void*>(src.data));
      auto* to = static_cast<decltype(to_type)>(panels);
      for (int64_t r = 0; r < src.rows; ++r) {
        for (int64_t c = 0; c < src.cols; ++c) {
          CopyOne(from + r * src.stride + c, to + PackedIndex(to_type, row_begin + r, c, src.cols));
        }
      }
    });
  });
}

static void PackTransposed(const ConstMat& src, int64_t row_begin, int64_t n, DType dtype, void* panels) {
  WithType(src.dtype, [&](auto* from_type) {
    WithType(dtype, [&](auto* to_type) {
      const auto* from = static_cast<decltype(from_type)>(const_cast<void*>(src.data));
      auto* to = static_cast<decltype(to_type)>(panels);
      for (int64_t c = 0; c < src.cols; ++c) {
        for (int64_t r = 0; r < src.rows; ++r) {
          CopyOne(from + r * src.stride + c, to + PackedIndex(to_type, c, row_begin + r, n));
        }
      }
    });
  });
}

static void PackTokens(const ConstMat& x, DType dtype, void* panel) {
  WithType(x.dtype, [&](auto* from_type) {
    WithType(dtype, [&](auto* to_type) {
      const auto* from = static_cast<decltype(from_type)>(const_cast<void*>(x.data));
      auto* to = static_cast<decltype(to_type)>(panel);
      constexpr int64_t kTogether = sizeof(*to_type) == sizeof(float) ? 1 : 2;  // tokens a depth step
      for (int64_t t = 0; t < x.rows; t += kTogether) {
        for (int64_t c = 0; c < kPanel * kTogether; ++c) {
          const int64_t token = t + c % kTogether, column = c / kTogether;
          auto* element = to + t * kPanel + c;
          if (token < x.rows && column < x.cols) {
            CopyOne(from + token * x.stride + column, element);
          } else {
            *element = {};
          }
        }
      }
    });
  });
}

static void Transpose(const ConstMat& x, int64_t begin, int64_t end, DType dtype, void* out, int64_t out_stride) {
  WithType(x.dtype, [&](auto* from_type) {
    WithType(dtype, [&](auto* to_type) {
      const auto* from = static_cast<decltype(from_type)>(const_cast<void*>(x.data));
      auto* to = static_cast<decltype(to_type)>(out);
      for (int64_t c = begin; c < end; ++c) {
        auto* row = to + (c - begin) * out_stride;
        for (int64_t t = 0; t < x.rows; ++t) CopyOne(from + t * x.stride + c, row + t);
        if (x.rows % 2 != 0 && x.rows < out_stride) row[x.rows] = {};
      }
    });
  });
}

}  // namespace moerl::tensor::MOERL_ISA
