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

// The left operand: row r at depth step i is at data + r * row + i * step; a step is one k (fp32) or a pair (bf16).
template <typename T>
struct Rows {
  const T* data;
  int64_t row, step;
};

// What a tile fetches into the second-level cache while it multiplies: the panels that come after its own, so that
// waiting for memory and multiplying overlap. A step of a panel is two lines in either type.
enum class Fetches {
  kPanels,         // as many lines as it reads
  kShare,          // its share of them, among several tiles of rows
  kShareAndLater,  // and two lines a step of a weight of later calls, about what memory gives meanwhile
};
struct Ahead {
  const char* lines;  // of the first panel to come
  int64_t step;       // bytes to move on a step
  const char* later;  // of the weight of later calls
};
inline constexpr int64_t kLineBytes = 64, kStepBytes = 2 * kLineBytes;

template <int P, Fetches kFetches>
MOERL_INLINE void Fetch(Ahead* ahead, int64_t panel_bytes) {
#pragma GCC unroll 8
  for (int line = 0; line < (kFetches == Fetches::kPanels ? 2 * P : 1); ++line) {
    __builtin_prefetch(ahead->lines + line / 2 * panel_bytes + line % 2 * kLineBytes, 0, 2);
  }
  ahead->lines += ahead->step;
  if constexpr (kFetches == Fetches::kShareAndLater) {
    __builtin_prefetch(ahead->later, 0, 2);
    __builtin_prefetch(ahead->later + kLineBytes, 0, 2);
    ahead->later += kStepBytes;
  }
}

// One chain step per accumulator and k. w is the first panel; V = 2 P vectors of columns.
template <int R, int P, Fetches kFetches>
MOERL_INLINE void MultiplyAdd(F32x16 (&acc)[R][2 * P], Rows<float> x, const float* w, int64_t panel_stride, int64_t k,
                              Ahead ahead) {
  const float* xi = x.data;
  for (int64_t i = 0; i < k; ++i) {
    Fetch<P, kFetches>(&ahead, panel_stride * static_cast<int64_t>(sizeof(float)));
    F32x16 columns[2 * P];
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; ++v) columns[v] = Load(w + (v / 2) * panel_stride + (v % 2) * kLanes, Full{});
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 row = Set1(xi[r * x.row]);
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; ++v) acc[r][v] = Fma(row, columns[v], acc[r][v]);
    }
    xi += x.step;
    w += kPanel;
  }
}

template <int R, int P>
MOERL_INLINE void MultiplyAddPair(F32x16 (&acc)[R][2 * P], const Bf16* x, int64_t x_row, const Bf16* w,
                                  int64_t panel_stride) {
  Pairs columns[2 * P];
#pragma GCC unroll 8
  for (int v = 0; v < 2 * P; ++v) columns[v] = LoadPairs(w + (v / 2) * panel_stride + (v % 2) * 2 * kLanes);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Pairs row = Set1Pair(x + r * x_row);
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; ++v) acc[r][v] = DotPairs(acc[r][v], row, columns[v]);
  }
}

template <int R, int P, Fetches kFetches>
MOERL_INLINE void MultiplyAdd(F32x16 (&acc)[R][2 * P], Rows<Bf16> x, const Bf16* w, int64_t panel_stride, int64_t k,
                              Ahead ahead) {
  const Bf16* xi = x.data;
  for (int64_t pair = k / 2; pair > 0; --pair) {
    Fetch<P, kFetches>(&ahead, panel_stride * static_cast<int64_t>(sizeof(Bf16)));
    MultiplyAddPair<R, P>(acc, xi, x.row, w, panel_stride);
    xi += x.step;
    w += 2 * kPanel;
  }
  if (k % 2 != 0) {
    Bf16 last[R][2] = {};
    for (int r = 0; r < R; ++r) last[r][0] = xi[r * x.row];
    MultiplyAddPair<R, P>(acc, last[0], 2, w, panel_stride);
  }
}

// The chains of one tile. Where DotPairs needs denormals flushed, that is switched on around a call that the
// compiler cannot look into, and nothing but the chains runs under it.
template <int R, int P, Fetches kFetches>
__attribute__((noinline)) void MultiplyAddTile(F32x16 (*acc)[2 * P], const Rows<Bf16>& x, const Bf16* w,
                                               int64_t panel_stride, int64_t k, Ahead ahead) {
  F32x16 local[R][2 * P];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < 2 * P; ++v) local[r][v] = acc[r][v];
  }
  MultiplyAdd<R, P, kFetches>(local, x, w, panel_stride, k, ahead);
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < 2 * P; ++v) acc[r][v] = local[r][v];
  }
}

template <int R, int P, Fetches kFetches>
MOERL_INLINE void Chains(F32x16 (&acc)[R][2 * P], Rows<float> x, const float* w, int64_t panel_stride, int64_t k,
                         Ahead ahead) {
  MultiplyAdd<R, P, kFetches>(acc, x, w, panel_stride, k, ahead);
}
template <int R, int P, Fetches kFetches>
MOERL_INLINE void Chains(F32x16 (&acc)[R][2 * P], Rows<Bf16> x, const Bf16* w, int64_t panel_stride, int64_t k,
                         Ahead ahead) {
  if constexpr (kPairsFlushThemselves) {
    MultiplyAdd<R, P, kFetches>(acc, x, w, panel_stride, k, ahead);
  } else {
    FlushDenormals flush;
    MultiplyAddTile<R, P, kFetches>(acc, x, w, panel_stride, k, ahead);
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

// The lines of y that the next tile writes come while this one multiplies.
template <int R, int P>
MOERL_INLINE void FetchOutputs(const GemmCall& c, int64_t row, int64_t column) {
  const int64_t size = c.y_dtype == DType::kBf16 ? sizeof(Bf16) : sizeof(float);
  const char* y = static_cast<const char*>(c.y) + (row * c.y_stride + column) * size;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; ++v) __builtin_prefetch(y + (r * c.y_stride + v * kLanes) * size, 1, 2);
  }
}

// The next lines of a later weight, as many as a panel has; none are left at its end, where the last are asked for
// again.
MOERL_INLINE const char* TakeLater(LaterWeight* later, int64_t panel_bytes) {
  if (later->end - later->next < panel_bytes) return later->end - panel_bytes;
  const char* lines = later->next;
  later->next += panel_bytes;
  return lines;
}

// The tile of R rows from `row` and P panels from `column`; among `tiles` of rows over these panels it is number
// `tile`, and fetches that share of the panels to come.
template <int R, int P, Fetches kFetches, typename T>
__attribute__((noinline)) void GemmTile(const GemmCall& c, int64_t row, int64_t column, int64_t tile, int64_t tiles) {
  F32x16 acc[R][2 * P];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; ++v) acc[r][v] = Zero();
  }
  if (tile + 1 < tiles) {
    FetchOutputs<R, P>(c, row + R, column);
  } else {
    FetchOutputs<R, P>(c, row - tile * kTileRows, column + P * kPanel);
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
  const Rows<T> x{static_cast<const T*>(c.x) + row * c.x_stride, c.x_stride, c.x_step};
  const T* w = static_cast<const T*>(c.w) + column / kPanel * c.panel_stride;
  const int64_t panel_bytes = c.panel_stride * static_cast<int64_t>(sizeof(T));
  const char* next = reinterpret_cast<const char*>(w) + P * panel_bytes;
  if (column + P * kPanel >= c.n) next = static_cast<const char*>(c.next_w == nullptr ? c.w : c.next_w);
  Ahead ahead{next + panel_bytes / tiles * tile, kStepBytes / tiles, nullptr};
  if constexpr (kFetches == Fetches::kShareAndLater) ahead.later = TakeLater(c.later, panel_bytes);
  Chains<R, P, kFetches>(acc, x, w, c.panel_stride, c.k, ahead);
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

template <int R, Fetches kFetches, typename T>
MOERL_INLINE void GemmRows(const GemmCall& c, int64_t row, int64_t column_begin, int64_t column_end, int64_t tile,
                           int64_t tiles) {
  constexpr int P = kFetches == Fetches::kPanels ? kPanelsAtOnce<R> : 1;
  int64_t column = column_begin;
  for (; column + (P - 1) * kPanel < column_end; column += P * kPanel) {
    GemmTile<R, P, kFetches, T>(c, row, column, tile, tiles);
  }
  for (; column < column_end; column += kPanel) GemmTile<R, 1, kFetches, T>(c, row, column, tile, tiles);
}

inline constexpr int64_t kRowBlockBytes = 256 << 10;

// Rows in blocks that stay in the second-level cache with one panel; each panel is read once a block.
template <Fetches kFetches, typename T>
MOERL_INLINE void GemmBlocks(const GemmCall& c) {
  const int64_t row_bytes = c.k * static_cast<int64_t>(sizeof(T));
  const int64_t wanted = kRowBlockBytes / (row_bytes > 0 ? row_bytes : 1) / kTileRows * kTileRows;
  const int64_t block = wanted < 8 * kTileRows ? 8 * kTileRows : wanted;
  for (int64_t begin = 0; begin < c.m; begin += block) {
    const int64_t end = begin + block < c.m ? begin + block : c.m;
    const int64_t tiles = (end - begin + kTileRows - 1) / kTileRows;
    for (int64_t column = 0; column < c.n; column += kPanel) {
      int64_t row = begin, tile = 0;
      for (; row + kTileRows <= end; row += kTileRows) {
        GemmTile<kTileRows, 1, kFetches, T>(c, row, column, tile++, tiles);
      }
      if (row == end) continue;
      WithCount<kTileRows>(static_cast<int>(end - row), [&](auto r) {
        GemmRows<r.value, kFetches, T>(c, row, column, column + kPanel, tile, tiles);
      });
    }
  }
}

template <typename T>
MOERL_INLINE void Gemm(const GemmCall& c) {
  if (c.m > kTileRows) {
    return c.later == nullptr ? GemmBlocks<Fetches::kShare, T>(c) : GemmBlocks<Fetches::kShareAndLater, T>(c);
  }
  if (c.m == 0) return;
  WithCount<kTileRows>(static_cast<int>(c.m),
                       [&](auto r) { GemmRows<r.value, Fetches::kPanels, T>(c, 0, 0, c.n, 0, 1); });
}

static void GemmF32(const GemmCall& c) { Gemm<float>(c); }

static void GemmBf16(const GemmCall& c) { Gemm<Bf16>(c); }

}  // namespace moerl::tensor::MOERL_ISA
