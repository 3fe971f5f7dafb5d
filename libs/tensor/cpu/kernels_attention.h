// Attention over a paged KV cache, and its backward. Included once by each instruction set.
//
// A page holds kPageTokens positions of every key head: keys as [D][64] (so that scores of 64 keys are 4 vectors
// and each score is one chain over D), then values as [64][D] (one chain over keys for every output column).
// Letters: S scores, P softmax numerators, D head size; the running (m, l) is Milakov & Gimelshein, 2018.
namespace moerl::tensor::MOERL_ISA {

// C[r][j] = (chain: C[r][j], else 0) + sum over k ascending of A[r][k] B[k][j], R rows, V vectors of columns of
// which the last has `lanes`. A's element (r, k) is a[r * a_row + k * a_k].
template <int R, int V, typename B, typename Lanes>
MOERL_INLINE void MatTile(const float* a, int64_t a_row, int64_t a_k, const B* b, int64_t b_stride, int64_t k,
                          bool chain, float* c, int64_t c_stride, Lanes lanes) {
  F32x16 acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V - 1; ++v) acc[r][v] = chain ? Load(c + r * c_stride + v * kLanes, Full{}) : Zero();
    acc[r][V - 1] = chain ? Load(c + r * c_stride + (V - 1) * kLanes, lanes) : Zero();
  }
  for (int64_t i = 0; i < k; ++i) {
    F32x16 columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V - 1; ++v) columns[v] = Load(b + i * b_stride + v * kLanes, Full{});
    columns[V - 1] = Load(b + i * b_stride + (V - 1) * kLanes, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 row = Set1(a[r * a_row + i * a_k]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[r][v] = Fma(row, columns[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V - 1; ++v) Store(acc[r][v], c + r * c_stride + v * kLanes, Full{});
    Store(acc[r][V - 1], c + r * c_stride + (V - 1) * kLanes, lanes);
  }
}

template <int R, typename B>
__attribute__((noinline)) void MatRows(const float* a, int64_t a_row, int64_t a_k, const B* b, int64_t b_stride,
                                       int64_t k, int64_t cols, bool chain, float* c, int64_t c_stride) {
  int64_t j = 0;
  if constexpr (R * 4 <= kAccumulators) {  // few rows: more columns at once, for more chains
    for (; j + 4 * kLanes <= cols; j += 4 * kLanes) {
      MatTile<R, 4>(a, a_row, a_k, b + j, b_stride, k, chain, c + j, c_stride, Full{});
    }
  }
  for (; j + 2 * kLanes <= cols; j += 2 * kLanes) {
    MatTile<R, 2>(a, a_row, a_k, b + j, b_stride, k, chain, c + j, c_stride, Full{});
  }
  ForLanes(j, cols, [&](int64_t at, auto lanes) {
    MatTile<R, 1>(a, a_row, a_k, b + at, b_stride, k, chain, c + at, c_stride, lanes);
  });
}

template <typename B>
MOERL_INLINE void MatMul(int64_t rows, const float* a, int64_t a_row, int64_t a_k, const B* b, int64_t b_stride,
                         int64_t k, int64_t cols, bool chain, float* c, int64_t c_stride) {
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t left = rows - r < kTileRows ? rows - r : kTileRows;
    WithCount<kTileRows>(static_cast<int>(left), [&](auto count) {
      MatRows<count.value>(a + r * a_row, a_row, a_k, b, b_stride, k, cols, chain, c + r * c_stride, c_stride);
    });
  }
}

template <typename K>
MOERL_INLINE K* KeysOf(const KvCache& cache, int64_t page, int64_t kv_head) {
  char* base = static_cast<char*>(cache.base) + page * cache.page_stride_bytes;
  return reinterpret_cast<K*>(base) + kv_head * cache.head_dim * kPageTokens;
}
template <typename K>
MOERL_INLINE K* ValuesOf(const KvCache& cache, int64_t page, int64_t kv_head) {
  return KeysOf<K>(cache, page, cache.kv_heads + kv_head);
}

static void KvWrite(const ConstMat& k, const ConstMat& v, const SequenceChunk& chunk, const KvCache& cache,
                    int64_t kv_head) {
  const int64_t d = cache.head_dim;
  WithTypes(k.dtype, cache.dtype, [&](auto* a, auto* b) {
    for (int64_t r = 0; r < chunk.rows; ++r) {
      const int64_t position = chunk.first_position + r;
      const int64_t slot = position % kPageTokens;
      const int64_t page = chunk.pages[position / kPageTokens];
      const auto* from_k = RowOf<MOERL_TYPE(a)>(k, chunk.row_begin + r) + kv_head * d;
      const auto* from_v = RowOf<MOERL_TYPE(a)>(v, chunk.row_begin + r) + kv_head * d;
      auto* keys = KeysOf<MOERL_TYPE(b)>(cache, page, kv_head);
      auto* values = ValuesOf<MOERL_TYPE(b)>(cache, page, kv_head) + slot * d;
      // A key goes to a line of its own for every column: all are asked for before the first is written.
      for (int64_t i = 0; i < d; ++i) __builtin_prefetch(keys + i * kPageTokens + slot, 1, 2);
      for (int64_t i = 0; i < d; ++i) CopyOne(from_k + i, keys + i * kPageTokens + slot);
      ForLanes(d, [&](int64_t i, auto lanes) { Store(Load(from_v + i, lanes), values + i, lanes); });
    }
  });
}

// Columns of the vectors that hold the first `count`.
MOERL_INLINE int64_t WholeVectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// One row's step over a block: scores [64] of which the first `valid` count become P; (m, l) and the output's
// scale move on. Returns what the output so far must be multiplied by.
MOERL_INLINE float SoftmaxStep(float* scores, int64_t valid, float scale, float* m, float* l) {
  F32x16 s[kPageTokens / kLanes];
  F32x16 largest = Set1(-__builtin_inff());
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    const int64_t here = valid - v * kLanes;
    const int count = here < 0 ? 0 : here > kLanes ? kLanes : static_cast<int>(here);
    s[v] = KeepLanes(Mul(Load(scores + v * kLanes, Full{}), Set1(scale)), count, -__builtin_inff());
    largest = Max(s[v], largest);
  }
  const float block_max = MaxTree(largest);
  const float new_max = block_max > *m ? block_max : *m;
  F32x16 sum = Zero();
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    const F32x16 p = Exp(Sub(s[v], Set1(new_max)));
    Store(p, scores + v * kLanes, Full{});
    sum = Add(sum, p);
  }
  float correction[kLanes];
  Store(Exp(Set1(*m - new_max)), correction, Full{});
  *l = *l * correction[0] + SumTree(sum);
  *m = new_max;
  return correction[0];
}

// Output rows [R][D] += P V over the keys each row may see, one chain over keys ascending; rows see ever more
// keys, so all share the first row's, then each goes on alone. A key that is not seen is never read.
template <typename K>
MOERL_INLINE void AddValues(int64_t rows, const float* p, const int64_t* valid, const K* values, int64_t d, float* out,
                            int64_t out_stride) {
  const int64_t shared = valid[0];
  MatMul(rows, p, kPageTokens, 1, values, d, shared, d, true, out, out_stride);
  for (int64_t r = 0; r < rows; ++r) {
    if (valid[r] == shared) continue;
    MatMul(1, p + r * kPageTokens + shared, kPageTokens, 1, values + shared * d, d, valid[r] - shared, d, true,
           out + r * out_stride, out_stride);
  }
}

// Asks for values before they are needed.
template <typename K>
MOERL_INLINE void FetchValues(const K* values, int64_t count) {
  constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(K));
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(values + i, 0, 2);
}

template <typename K>
MOERL_INLINE void AttendTile(const AttentionCall& call, const SequenceChunk& chunk, int64_t kv_head, int64_t begin,
                             int64_t count) {
  const int64_t d = call.cache->head_dim;
  const int64_t group = call.q_heads / call.cache->kv_heads;
  alignas(64) float q[kTileRows * kMaxHeadDim];
  alignas(64) float out[kTileRows * kMaxHeadDim];
  alignas(64) float scores[kTileRows * kPageTokens];
  float m[kTileRows], l[kTileRows];
  int64_t row[kTileRows], head[kTileRows], last[kTileRows];

  // 1. The rows' queries in fp32.
  for (int64_t r = 0; r < count; ++r) {
    row[r] = chunk.row_begin + (begin + r) / group;
    head[r] = kv_head * group + (begin + r) % group;
    last[r] = chunk.first_position + (begin + r) / group;
    m[r] = -__builtin_inff();
    l[r] = 0;
    WithType(call.q->dtype, [&](auto* t) {
      const auto* from = RowOf<MOERL_TYPE(t)>(*call.q, row[r]) + head[r] * d;
      ForLanes(d, [&](int64_t i, auto lanes) {
        Store(Load(from + i, lanes), q + r * d + i, lanes);
        Store(Zero(), out + r * d + i, lanes);
      });
    });
  }

  // 2. Blocks of 64 keys from position 0; rows are ordered by position, so those still in need of keys are last.
  for (int64_t start = 0; start <= last[count - 1]; start += kPageTokens) {
    int64_t first = 0;
    while (last[first] < start) ++first;
    const int64_t active = count - first;
    const int64_t page = chunk.pages[start / kPageTokens];
    const int64_t left = last[count - 1] - start + 1, most = left < kPageTokens ? left : kPageTokens;
    FetchValues(ValuesOf<K>(*call.cache, page, kv_head), d * most);
    MatMul(active, q + first * d, d, 1, KeysOf<K>(*call.cache, page, kv_head), kPageTokens, d, WholeVectors(most),
           false, scores, kPageTokens);
    int64_t valid[kTileRows];
    for (int64_t r = 0; r < active; ++r) {
      const int64_t seen = last[first + r] - start + 1;
      valid[r] = seen < kPageTokens ? seen : kPageTokens;
      const float correction =
          SoftmaxStep(scores + r * kPageTokens, valid[r], call.scale, &m[first + r], &l[first + r]);
      float* row_out = out + (first + r) * d;
      if (correction == 1.0f) continue;
      ForLanes(d, [&](int64_t i, auto lanes) {
        Store(Mul(Load(row_out + i, lanes), Set1(correction)), row_out + i, lanes);
      });
    }
    AddValues(active, scores, valid, ValuesOf<K>(*call.cache, page, kv_head), d, out + first * d, d);
  }

  // 3. Divide by the denominators.
  for (int64_t r = 0; r < count; ++r) {
    if (call.stats != nullptr) {
      RowStats* stats = call.stats + row[r] * call.q_heads + head[r];
      stats->max = m[r];
      stats->log_sum = l[r];  // the caller takes the logarithm
    }
    WithType(call.out->dtype, [&](auto* t) {
      auto* to = RowOf<MOERL_TYPE(t)>(*call.out, row[r]) + head[r] * d;
      ForLanes(d, [&](int64_t i, auto lanes) { Store(Div(Load(out + r * d + i, lanes), Set1(l[r])), to + i, lanes); });
    });
  }
}

static void Attention(const AttentionCall& call, const SequenceChunk& chunk, int64_t kv_head, int64_t begin,
                      int64_t end) {
  WithType(call.cache->dtype, [&](auto* k) {
    for (int64_t at = begin; at < end; at += kTileRows) {
      AttendTile<MOERL_TYPE(k)>(call, chunk, kv_head, at, end - at < kTileRows ? end - at : kTileRows);
    }
  });
}

// ---- backward (Dao et al., 2022): P is recomputed from the saved (max, log sum) ------------------------------

MOERL_INLINE void LoadHead(const ConstMat& x, int64_t begin, int64_t rows, int64_t at, int64_t d, float* to) {
  WithType(x.dtype, [&](auto* t) {
    for (int64_t r = 0; r < rows; ++r) {
      const auto* from = RowOf<MOERL_TYPE(t)>(x, begin + r) + at;
      ForLanes(d, [&](int64_t i, auto lanes) { Store(Load(from + i, lanes), to + r * d + i, lanes); });
    }
  });
}

MOERL_INLINE void StoreHead(const float* from, int64_t begin, int64_t rows, int64_t at, int64_t d, const Mat& y) {
  WithType(y.dtype, [&](auto* t) {
    for (int64_t r = 0; r < rows; ++r) {
      auto* to = RowOf<MOERL_TYPE(t)>(y, begin + r) + at;
      ForLanes(d, [&](int64_t i, auto lanes) { Store(Load(from + r * d + i, lanes), to + i, lanes); });
    }
  });
}

// Rows [rows][D] as blocks [D][64], zeros past the end.
MOERL_INLINE void TransposeBlocks(const float* x, int64_t rows, int64_t padded, int64_t d, float* out) {
  for (int64_t r = 0; r < padded; ++r) {
    float* block = out + r / kPageTokens * kPageTokens * d + r % kPageTokens;
    for (int64_t i = 0; i < d; ++i) block[i * kPageTokens] = r < rows ? x[r * d + i] : 0.0f;
  }
}

// P and dS = P (dP - delta) scale of 64 queries from `query` and 64 keys from `key`; what is masked is 0, whatever was
// there.
MOERL_INLINE void ScoreGradients(int64_t queries, int64_t query, int64_t key, float scale, const RowStats* stats,
                                 int64_t stats_stride, const float* delta, float* p, float* ds) {
  for (int64_t r = 0; r < queries; ++r) {
    const int64_t seen = query + r - key + 1;
    const RowStats& row = stats[r * stats_stride];
    for (int v = 0; v < kPageTokens / kLanes; ++v) {
      const int64_t here = seen - v * kLanes;
      const int count = here > kLanes ? kLanes : static_cast<int>(here);
      float* pv = p + r * kPageTokens + v * kLanes;
      float* dsv = ds + r * kPageTokens + v * kLanes;
      if (count <= 0) {
        Store(Zero(), pv, Full{});
        Store(Zero(), dsv, Full{});
        continue;
      }
      const F32x16 s = Mul(Load(pv, Full{}), Set1(scale));
      const F32x16 e = KeepLanes(Exp(Sub(Sub(s, Set1(row.max)), Set1(row.log_sum))), count, 0.0f);
      Store(e, pv, Full{});
      Store(Mul(Mul(e, Sub(Load(dsv, Full{}), Set1(delta[r]))), Set1(scale)), dsv, Full{});
    }
  }
}

static void AttentionBackward(const AttentionBackwardCall& c, int64_t begin, int64_t end, int64_t kv_head,
                              float* scratch) {
  const int64_t rows = end - begin, d = c.head_dim, group = c.q_heads / c.kv_heads;
  const int64_t padded = (rows + kPageTokens - 1) / kPageTokens * kPageTokens;
  const auto take = [&](int64_t floats) {
    float* taken = scratch;
    scratch += floats;
    return taken;
  };
  float* q = take(group * padded * d);     // [group][rows][D]
  float* dout = take(group * padded * d);  // [group][rows][D]
  float* dq = take(group * padded * d);    // [group][rows][D]
  float* k = take(padded * d);             // [rows][D]
  float* kt = take(padded * d);            // blocks [D][64]
  float* vt = take(padded * d);            // blocks [D][64]
  float* dk = take(padded * d);            // [rows][D]
  float* dv = take(padded * d);            // [rows][D], first v itself
  float* delta = take(padded * group);     // [group][rows]: dout . out
  float* p = take(kPageTokens * kPageTokens);
  float* ds = take(kPageTokens * kPageTokens);

  // 1. Everything of this key head in fp32, keys and values also transposed.
  LoadHead(*c.k, begin, rows, kv_head * d, d, k);
  LoadHead(*c.v, begin, rows, kv_head * d, d, dv);
  TransposeBlocks(k, rows, padded, d, kt);
  TransposeBlocks(dv, rows, padded, d, vt);
  for (int64_t g = 0; g < group; ++g) {
    const int64_t at = (kv_head * group + g) * d;
    LoadHead(*c.q, begin, rows, at, d, q + g * padded * d);
    LoadHead(*c.dout, begin, rows, at, d, dout + g * padded * d);
    float* out = dq + g * padded * d;
    LoadHead(*c.out, begin, rows, at, d, out);
    for (int64_t r = 0; r < rows; ++r) {
      F32x16 sum = Zero();
      ForLanes(d, [&](int64_t i, auto lanes) {
        sum = Fma(Load(dout + (g * padded + r) * d + i, lanes), Load(out + r * d + i, lanes), sum);
      });
      delta[g * padded + r] = SumTree(sum);
    }
  }
  for (int64_t i = 0; i < padded * d; ++i) dk[i] = dv[i] = 0.0f;
  for (int64_t i = 0; i < group * padded * d; ++i) dq[i] = 0.0f;

  // 2. For every block of keys, the heads of the group and blocks of queries that see it, in order.
  for (int64_t key = 0; key < rows; key += kPageTokens) {
    const int64_t keys = rows - key < kPageTokens ? rows - key : kPageTokens;
    for (int64_t g = 0; g < group; ++g) {
      for (int64_t query = key; query < rows; query += kPageTokens) {
        const int64_t queries = rows - query < kPageTokens ? rows - query : kPageTokens;
        const float* q_rows = q + (g * padded + query) * d;
        const float* dout_rows = dout + (g * padded + query) * d;
        // On the diagonal a tile of queries sees keys up to its last one, and a tile of keys is seen from its first on.
        const bool diagonal = query == key;
        const float* k_block = kt + key * d;
        const float* v_block = vt + key * d;
        for (int64_t r = 0; r < queries; r += kTileRows) {
          const int64_t tile = queries - r < kTileRows ? queries - r : kTileRows;
          const int64_t seen = diagonal ? WholeVectors(r + tile) : kPageTokens;
          MatMul(tile, q_rows + r * d, d, 1, k_block, kPageTokens, d, seen, false, p + r * kPageTokens, kPageTokens);
          MatMul(tile, dout_rows + r * d, d, 1, v_block, kPageTokens, d, seen, false, ds + r * kPageTokens,
                 kPageTokens);
        }
        const RowStats* stats = c.stats + (begin + query) * c.q_heads + kv_head * group + g;
        ScoreGradients(queries, query, key, c.scale, stats, c.q_heads, delta + g * padded + query, p, ds);
        for (int64_t r = 0; r < keys; r += kTileRows) {
          const int64_t tile = keys - r < kTileRows ? keys - r : kTileRows, from = diagonal ? r : 0;
          const int64_t at = from * kPageTokens + r;
          MatMul(tile, p + at, 1, kPageTokens, dout_rows + from * d, d, queries - from, d, true, dv + (key + r) * d, d);
          MatMul(tile, ds + at, 1, kPageTokens, q_rows + from * d, d, queries - from, d, true, dk + (key + r) * d, d);
        }
        for (int64_t r = 0; r < queries; r += kTileRows) {
          const int64_t tile = queries - r < kTileRows ? queries - r : kTileRows;
          const int64_t seen = diagonal && r + tile < keys ? r + tile : keys;
          MatMul(tile, ds + r * kPageTokens, kPageTokens, 1, k + key * d, d, seen, d, true,
                 dq + (g * padded + query + r) * d, d);
        }
      }
    }
  }

  // 3. Write out.
  StoreHead(dk, begin, rows, kv_head * d, d, *c.dk);
  StoreHead(dv, begin, rows, kv_head * d, d, *c.dv);
  for (int64_t g = 0; g < group; ++g) {
    StoreHead(dq + g * padded * d, begin, rows, (kv_head * group + g) * d, d, *c.dq);
  }
}

}  // namespace moerl::tensor::MOERL_ISA
