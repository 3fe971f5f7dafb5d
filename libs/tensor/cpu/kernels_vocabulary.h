// Softmax over the vocabulary in blocks with a running (max, sum) (Milakov & Gimelshein, 2018). Included once by
// each instruction set.
namespace moerl::tensor::MOERL_ISA {

MOERL_INLINE float Exp1(float x) {
  float lanes[kLanes];
  Store(Exp(Set1(x)), lanes, Full{});
  return lanes[0];
}

// Sum of e^(z - max), and of e^(z - max) (z - max), over earlier columns and these n.
static void SoftmaxBlock(float* logits, int64_t n, float temperature, bool entropy, SoftmaxState* state) {
  // 1. z and its maximum.
  F32x16 largest = Set1(-__builtin_inff());
  const F32x16 divisor = Set1(temperature);
  ForLanes(n, [&](int64_t i, auto lanes) {
    F32x16 z = Load(logits + i, lanes);
    if (temperature != 1.0f) {
      z = Div(z, divisor);
      Store(z, logits + i, lanes);
    }
    largest = Max(KeepLanes(z, lanes.count, -__builtin_inff()), largest);
  });
  const float block_max = MaxTree(largest);
  const float max = block_max > state->max ? block_max : state->max;

  // 2. The block's sums.
  F32x16 sum = Zero(), weighted = Zero();
  ForLanes(n, [&](int64_t i, auto lanes) {
    const F32x16 shifted = Sub(Load(logits + i, lanes), Set1(max));
    const F32x16 e = KeepLanes(Exp(shifted), lanes.count, 0.0f);
    sum = Add(sum, e);
    if (entropy) weighted = Fma(e, KeepLanes(shifted, lanes.count, 0.0f), weighted);
  });

  // 3. Earlier sums move to the new maximum.
  const float correction = Exp1(state->max - max);
  if (entropy) {
    const float earlier = state->sum == 0 ? 0.0f : state->weighted + (state->max - max) * state->sum;
    state->weighted = earlier * correction + SumTree(weighted);
  }
  state->sum = state->sum * correction + SumTree(sum);
  state->max = max;
}

static void SoftmaxBlockBackward(const float* logits, int64_t n, float temperature, const RowStats& stats, float factor,
                                 float* dz) {
  const F32x16 divisor = Set1(temperature), max = Set1(stats.max), log_sum = Set1(stats.log_sum);
  ForLanes(n, [&](int64_t i, auto lanes) {
    F32x16 z = Load(logits + i, lanes);
    if (temperature != 1.0f) z = Div(z, divisor);
    const F32x16 p = Exp(Sub(Sub(z, max), log_sum));
    Store(Mul(p, Set1(-factor)), dz + i, lanes);
  });
}

}  // namespace moerl::tensor::MOERL_ISA
