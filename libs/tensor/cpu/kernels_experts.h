// Routing and the combine tree. Included once by each instruction set.
namespace moerl::tensor::MOERL_ISA {

// p = e^(z - max z) / sum, the sum in 16 lanes.
MOERL_INLINE void Softmax(const float* z, int64_t n, float* p) {
  F32x16 largest = Set1(-__builtin_inff());
  ForLanes(n, [&](int64_t i, auto lanes) {
    largest = Max(KeepLanes(Load(z + i, lanes), lanes.count, -__builtin_inff()), largest);
  });
  const F32x16 max = Set1(MaxTree(largest));
  F32x16 sum = Zero();
  ForLanes(n, [&](int64_t i, auto lanes) {
    const F32x16 e = KeepLanes(Exp(Sub(Load(z + i, lanes), max)), lanes.count, 0.0f);
    sum = Add(sum, e);
    Store(e, p + i, lanes);
  });
  const F32x16 total = Set1(SumTree(sum));
  ForLanes(n, [&](int64_t i, auto lanes) { Store(Div(Load(p + i, lanes), total), p + i, lanes); });
}

MOERL_INLINE bool IsSigmoid(RouterKind kind) {
  return kind == RouterKind::kSigmoidTopK || kind == RouterKind::kSigmoidTopKNormalised;
}

// s = sigmoid(z); returns their sum in 16 lanes.
MOERL_INLINE float Sigmoids(const float* z, int64_t n, float* s) {
  F32x16 sum = Zero();
  ForLanes(n, [&](int64_t i, auto lanes) {
    const F32x16 score = KeepLanes(Sigmoid(Load(z + i, lanes)), lanes.count, 0.0f);
    sum = Add(sum, score);
    Store(score, s + i, lanes);
  });
  return SumTree(sum);
}

static void RouterScores(const float* logits, int64_t experts, RouterKind kind, float* scores) {
  if (IsSigmoid(kind)) return static_cast<void>(Sigmoids(logits, experts, scores));
  if (kind != RouterKind::kTopKSoftmax) return Softmax(logits, experts, scores);
  ForLanes(experts, [&](int64_t i, auto lanes) { Store(Load(logits + i, lanes), scores + i, lanes); });
}

// The chosen slots (id >= 0) in ascending id; returns their number.
MOERL_INLINE int AscendingSlots(const int32_t* ids, int top_k, int* slots) {
  int count = 0;
  for (int i = 0; i < top_k; ++i) {
    if (ids[i] < 0) continue;
    int at = count++;
    for (; at > 0 && ids[slots[at - 1]] > ids[i]; --at) slots[at] = slots[at - 1];
    slots[at] = i;
  }
  return count;
}

// What DeepSeek-V3 and GLM-4.5 add to a sum of sigmoid scores before they divide by it.
constexpr float kScoreSumFloor = 1e-20f;

MOERL_INLINE float SumOfChosen(const float* scores, const int32_t* ids, const int* slots, int count) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += scores[ids[slots[i]]];
  return sum;
}

MOERL_INLINE void SigmoidWeights(const float* logits, int64_t experts, bool normalised, const int32_t* ids, int top_k,
                                 float* weights, float* probs) {
  float s[kMaxExperts];
  int slots[kMaxTopK] = {};
  const int count = AscendingSlots(ids, top_k, slots);
  const F32x16 total = Set1(Sigmoids(logits, experts, s) + kScoreSumFloor);
  if (probs != nullptr) {
    ForLanes(experts, [&](int64_t i, auto lanes) { Store(Div(Load(s + i, lanes), total), probs + i, lanes); });
  }
  const float divisor = normalised ? SumOfChosen(s, ids, slots, count) + kScoreSumFloor : 1.0f;
  for (int i = 0; i < top_k; ++i) weights[i] = 0;
  for (int i = 0; i < count; ++i) weights[slots[i]] = s[ids[slots[i]]] / divisor;
}

static void RouterWeights(const float* logits, int64_t experts, RouterKind kind, const int32_t* ids, int top_k,
                          float* weights, float* probs) {
  if (IsSigmoid(kind)) {
    const bool normalised = kind == RouterKind::kSigmoidTopKNormalised;
    return SigmoidWeights(logits, experts, normalised, ids, top_k, weights, probs);
  }
  float p[kMaxExperts];
  int slots[kMaxTopK] = {};
  const int count = AscendingSlots(ids, top_k, slots);
  for (int i = 0; i < top_k; ++i) weights[i] = 0;
  if (probs != nullptr || kind != RouterKind::kTopKSoftmax) Softmax(logits, experts, p);
  if (probs != nullptr) ForLanes(experts, [&](int64_t i, auto lanes) { Store(Load(p + i, lanes), probs + i, lanes); });
  if (count == 0) return;

  float chosen[kMaxTopK] = {};
  for (int i = 0; i < count; ++i) chosen[i] = (kind == RouterKind::kTopKSoftmax ? logits : p)[ids[slots[i]]];
  if (kind == RouterKind::kTopKSoftmax) {
    float max = chosen[0];
    for (int i = 1; i < count; ++i) max = chosen[i] > max ? chosen[i] : max;
    ForLanes(count,
             [&](int64_t i, auto lanes) { Store(Exp(Sub(Load(chosen + i, lanes), Set1(max))), chosen + i, lanes); });
  }
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += chosen[i];
  const float divisor = kind == RouterKind::kSoftmaxTopK ? 1.0f : sum;
  for (int i = 0; i < count; ++i) weights[slots[i]] = chosen[i] / divisor;
}

// dz += p (dp - sum dp p).
MOERL_INLINE void SoftmaxBackward(const float* p, const float* dp, int64_t n, float* dz) {
  F32x16 products = Zero();
  ForLanes(n, [&](int64_t i, auto lanes) { products = Fma(Load(p + i, lanes), Load(dp + i, lanes), products); });
  const F32x16 mean = Set1(SumTree(products));
  ForLanes(n, [&](int64_t i, auto lanes) {
    const F32x16 g = Mul(Load(p + i, lanes), Sub(Load(dp + i, lanes), mean));
    Store(Add(Load(dz + i, lanes), g), dz + i, lanes);
  });
}

// s = sigmoid(z), w_i = s_i / (sum of the chosen s) and p = s / sum s, or w = s:
// ds_j = (dp_j - sum dp p) / sum s, and for the chosen + (dw_i - sum dw w) / (their sum); dz = ds s (1 - s).
MOERL_INLINE void SigmoidBackward(const float* logits, int64_t experts, bool normalised, const int32_t* ids, int top_k,
                                  const float* dweights, const float* dprobs, float* dlogits) {
  float s[kMaxExperts], ds[kMaxExperts];
  int slots[kMaxTopK] = {};
  const int count = AscendingSlots(ids, top_k, slots);
  const float total = Sigmoids(logits, experts, s) + kScoreSumFloor;
  F32x16 products = Zero();
  if (dprobs != nullptr) {
    ForLanes(experts, [&](int64_t i, auto lanes) {
      products = Fma(Div(Load(s + i, lanes), Set1(total)), Load(dprobs + i, lanes), products);
    });
  }
  const F32x16 mean_dp = Set1(SumTree(products));
  ForLanes(experts, [&](int64_t i, auto lanes) {
    const F32x16 d = dprobs == nullptr ? Zero() : Div(Sub(Load(dprobs + i, lanes), mean_dp), Set1(total));
    Store(d, ds + i, lanes);
  });
  const float divisor = normalised ? SumOfChosen(s, ids, slots, count) + kScoreSumFloor : 1.0f;
  float mean = 0;
  for (int i = 0; i < count && normalised; ++i) mean += dweights[slots[i]] * (s[ids[slots[i]]] / divisor);
  for (int i = 0; i < count; ++i) ds[ids[slots[i]]] += (dweights[slots[i]] - mean) / divisor;
  ForLanes(experts, [&](int64_t i, auto lanes) {
    const F32x16 si = Load(s + i, lanes);
    Store(Mul(Load(ds + i, lanes), Mul(si, Sub(Set1(1.0f), si))), dlogits + i, lanes);
  });
}

// Both renormalised softmax kinds have w = q / sum q over the chosen, q = p or e^z:
// dq_i = (dw_i - sum dw w) / sum q, and for q = e^z then dz_i = w_i (dw_i - sum dw w).
static void RouterBackward(const float* logits, int64_t experts, RouterKind kind, const int32_t* ids, int top_k,
                           const float* dweights, const float* dprobs, float* dlogits) {
  if (IsSigmoid(kind)) {
    const bool normalised = kind == RouterKind::kSigmoidTopKNormalised;
    return SigmoidBackward(logits, experts, normalised, ids, top_k, dweights, dprobs, dlogits);
  }
  float p[kMaxExperts], dp[kMaxExperts], weights[kMaxTopK];
  int slots[kMaxTopK] = {};
  const int count = AscendingSlots(ids, top_k, slots);
  RouterWeights(logits, experts, kind, ids, top_k, weights, p);
  ForLanes(experts, [&](int64_t i, auto lanes) {
    Store(dprobs == nullptr ? Zero() : Load(dprobs + i, lanes), dp + i, lanes);
    Store(Zero(), dlogits + i, lanes);
  });

  float mean = 0, sum = 0;
  for (int i = 0; i < count; ++i) {
    mean += dweights[slots[i]] * weights[slots[i]];
    sum += p[ids[slots[i]]];
  }
  for (int i = 0; i < count; ++i) {
    const float dw = dweights[slots[i]];
    const int32_t id = ids[slots[i]];
    if (kind == RouterKind::kSoftmaxTopK) {
      dp[id] += dw;
    } else if (kind == RouterKind::kSoftmaxTopKNormalised) {
      dp[id] += (dw - mean) / sum;
    } else {
      dlogits[id] = weights[slots[i]] * (dw - mean);
    }
  }
  if (dprobs != nullptr || kind != RouterKind::kTopKSoftmax) SoftmaxBackward(p, dp, experts, dlogits);
}

// ---- combine ----------------------------------------------------------------------------------------------

MOERL_INLINE F32x16 RoundToBf16(F32x16 a) {
  Bf16 rounded[kLanes];
  Store(a, rounded, Full{});
  return Load(rounded, Full{});
}

// Runs the tree's post-order program on a stack, V vectors of columns at a time.
template <int V, typename T, typename Lanes>
MOERL_INLINE void CombineColumns(const CombineProgram& program, const void* const* rows, const float* weights,
                                 int64_t at, float* out, Lanes lanes) {
  F32x16 stack[kMaxTreeDepth][V];
  int top = 0;
  for (int i = 0; i < program.length; ++i) {
    const int step = program.steps[i];
    if (step == CombineProgram::kAdd) {
      --top;
      for (int v = 0; v < V; ++v) stack[top - 1][v] = Add(stack[top - 1][v], stack[top][v]);
    } else if (step == CombineProgram::kRound) {
      for (int v = 0; v < V; ++v) stack[top - 1][v] = RoundToBf16(stack[top - 1][v]);
    } else {
      const T* row = static_cast<const T*>(rows[step]) + at;
      for (int v = 0; v < V; ++v) stack[top][v] = Mul(Set1(weights[step]), Load(row + v * kLanes, lanes));
      ++top;
    }
  }
  for (int v = 0; v < V; ++v) Store(top == 0 ? Zero() : stack[0][v], out + at + v * kLanes, lanes);
}

static void CombineRows(const CombineProgram& program, const void* const* rows, const float* weights, DType dtype,
                        int64_t cols, float* out) {
  constexpr int V = 4;
  WithType(dtype, [&](auto* t) {
    using T = MOERL_TYPE(t);
    int64_t at = 0;
    for (; at + V * kLanes <= cols; at += V * kLanes) CombineColumns<V, T>(program, rows, weights, at, out, Full{});
    ForLanes(at, cols, [&](int64_t i, auto lanes) { CombineColumns<1, T>(program, rows, weights, i, out, lanes); });
  });
}

static float Dot(const void* x, DType x_dtype, const void* y, DType y_dtype, int64_t cols) {
  F32x16 sum = Zero();
  WithTypes(x_dtype, y_dtype, [&](auto* a, auto* b) {
    const auto* xs = static_cast<decltype(a)>(const_cast<void*>(x));
    const auto* ys = static_cast<decltype(b)>(const_cast<void*>(y));
    ForLanes(cols, [&](int64_t i, auto lanes) { sum = Fma(Load(xs + i, lanes), Load(ys + i, lanes), sum); });
  });
  return SumTree(sum);
}

static void ScaledRow(float factor, const void* x, DType x_dtype, void* y, DType y_dtype, int64_t cols) {
  WithTypes(x_dtype, y_dtype, [&](auto* a, auto* b) {
    const auto* xs = static_cast<decltype(a)>(const_cast<void*>(x));
    auto* ys = static_cast<decltype(b)>(y);
    ForLanes(cols, [&](int64_t i, auto lanes) { Store(Mul(Set1(factor), Load(xs + i, lanes)), ys + i, lanes); });
  });
}

}  // namespace moerl::tensor::MOERL_ISA
