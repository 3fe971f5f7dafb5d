// Row kernels: norms, rotations, activations, the optimiser. Included once by each instruction set.
namespace moerl::tensor::MOERL_ISA {

// Calls f(i, lanes) for i = 0, 16, 32, ... below n: full lanes, then what is left.
template <typename F>
MOERL_INLINE void ForLanes(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, Full{});
  if (i < n) f(i, Tail{static_cast<int>(n - i)});
}

template <typename F>
MOERL_INLINE void ForLanes(int64_t begin, int64_t end, F f) {
  ForLanes(end - begin, [&](int64_t i, auto lanes) { f(begin + i, lanes); });
}

// e^x as in math.cc, operation by operation.
MOERL_INLINE F32x16 Exp(F32x16 x) {
  using namespace exp_constants;  // NOLINT: a table of named coefficients
  const F32x16 clamped = Min(Max(x, Set1(kLowest)), Set1(kHighest));
  const F32x16 shifted = Fma(clamped, Set1(kLog2E), Set1(kRound));
  const F32x16 n = Sub(shifted, Set1(kRound));
  F32x16 r = Fma(n, Set1(-kLn2High), clamped);
  r = Fma(n, Set1(-kLn2Low), r);
  F32x16 p = Set1(kP5);
  p = Fma(p, r, Set1(kP4));
  p = Fma(p, r, Set1(kP3));
  p = Fma(p, r, Set1(kP2));
  p = Fma(p, r, Set1(kP1));
  p = Fma(p, r, Set1(kP0));
  p = Add(Fma(p, Mul(r, r), r), Set1(1.0f));
  F32x16 low, high;
  SplitPower(shifted, kRound, &low, &high);
  return NanOr(x, Mul(Mul(p, low), high));
}

static void ExpShifted(const float* x, int64_t count, float shift, float* y) {
  ForLanes(count, [&](int64_t i, auto lanes) { Store(Exp(Sub(Load(x + i, lanes), Set1(shift))), y + i, lanes); });
}

MOERL_INLINE F32x16 Sigmoid(F32x16 x) { return Div(Set1(1.0f), Add(Set1(1.0f), Exp(Sub(Zero(), x)))); }

template <typename T>
MOERL_INLINE const T* RowOf(const ConstMat& x, int64_t row) {
  return static_cast<const T*>(x.data) + row * x.stride;
}
template <typename T>
MOERL_INLINE T* RowOf(const Mat& x, int64_t row) {
  return static_cast<T*>(x.data) + row * x.stride;
}

// Calls f(X*, Y*) with null pointers of the two element types.
template <typename F>
MOERL_INLINE void WithTypes(DType x, DType y, F f) {
  WithType(x, [&](auto* a) { WithType(y, [&](auto* b) { f(a, b); }); });
}
#define MOERL_TYPE(pointer) std::remove_pointer_t<decltype(pointer)>

static void Cast(const ConstMat& x, const Mat& y, int64_t begin, int64_t end) {
  WithTypes(x.dtype, y.dtype, [&](auto* a, auto* b) {
    for (int64_t t = begin; t < end; ++t) {
      const auto* from = RowOf<MOERL_TYPE(a)>(x, t);
      auto* to = RowOf<MOERL_TYPE(b)>(y, t);
      ForLanes(x.cols, [&](int64_t i, auto lanes) { Store(Load(from + i, lanes), to + i, lanes); });
    }
  });
}

static void AddRows(const ConstMat& x, const Mat& y, int64_t begin, int64_t end) {
  WithType(x.dtype, [&](auto* a) {
    for (int64_t t = begin; t < end; ++t) {
      const auto* from = RowOf<MOERL_TYPE(a)>(x, t);
      float* to = RowOf<float>(y, t);
      ForLanes(x.cols,
               [&](int64_t i, auto lanes) { Store(Add(Load(to + i, lanes), Load(from + i, lanes)), to + i, lanes); });
    }
  });
}

static void ScaleRows(float factor, const Mat& y, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    float* row = RowOf<float>(y, t);
    ForLanes(y.cols, [&](int64_t i, auto lanes) { Store(Mul(Load(row + i, lanes), Set1(factor)), row + i, lanes); });
  }
}

static void ColumnSum(const ConstMat& x, float* sum, int64_t col_begin, int64_t col_end) {
  WithType(x.dtype, [&](auto* a) {
    ForLanes(col_begin, col_end, [&](int64_t i, auto lanes) {
      F32x16 acc = Load(sum + i, lanes);
      for (int64_t t = 0; t < x.rows; ++t) acc = Add(acc, Load(RowOf<MOERL_TYPE(a)>(x, t) + i, lanes));
      Store(acc, sum + i, lanes);
    });
  });
}

// y[h,:] = gain * (x[h,:] * inv), inv = 1 / sqrt(mean(x[h,:]^2) + eps), for each piece h of `width` columns.
static void RmsNorm(const ConstMat& x, const float* gain, int64_t width, float eps, const Mat& y, float* inv_rms,
                    int64_t begin, int64_t end) {
  const int64_t pieces = x.cols / width;
  WithTypes(x.dtype, y.dtype, [&](auto* a, auto* b) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < pieces; ++h) {
        const auto* from = RowOf<MOERL_TYPE(a)>(x, t) + h * width;
        auto* to = RowOf<MOERL_TYPE(b)>(y, t) + h * width;
        F32x16 squares = Zero();
        ForLanes(width, [&](int64_t i, auto lanes) {
          const F32x16 v = Load(from + i, lanes);
          squares = Fma(v, v, squares);
        });
        const float inv = 1.0f / __builtin_sqrtf(SumTree(squares) / static_cast<float>(width) + eps);
        if (inv_rms != nullptr) inv_rms[t * pieces + h] = inv;
        ForLanes(width, [&](int64_t i, auto lanes) {
          Store(Mul(Load(gain + i, lanes), Mul(Load(from + i, lanes), Set1(inv))), to + i, lanes);
        });
      }
    }
  });
}

// With n = x inv and g = dy gain: dx = inv (g - n mean(g n)).
static void RmsNormBackward(const ConstMat& dy, const ConstMat& x, const float* gain, int64_t width,
                            const float* inv_rms, bool add, const Mat& dx, int64_t begin, int64_t end) {
  const int64_t pieces = x.cols / width;
  WithTypes(dy.dtype, x.dtype, [&](auto* a, auto* b) {
    WithType(dx.dtype, [&](auto* d) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t h = 0; h < pieces; ++h) {
          const auto* g = RowOf<MOERL_TYPE(a)>(dy, t) + h * width;
          const auto* from = RowOf<MOERL_TYPE(b)>(x, t) + h * width;
          auto* to = RowOf<MOERL_TYPE(d)>(dx, t) + h * width;
          const F32x16 inv = Set1(inv_rms[t * pieces + h]);
          F32x16 products = Zero();
          ForLanes(width, [&](int64_t i, auto lanes) {
            const F32x16 gi = Mul(Load(g + i, lanes), Load(gain + i, lanes));
            products = Fma(gi, Mul(Load(from + i, lanes), inv), products);
          });
          const F32x16 mean = Set1(SumTree(products) / static_cast<float>(width));
          ForLanes(width, [&](int64_t i, auto lanes) {
            const F32x16 gi = Mul(Load(g + i, lanes), Load(gain + i, lanes));
            const F32x16 n = Mul(Load(from + i, lanes), inv);
            const F32x16 result = Mul(inv, Sub(gi, Mul(n, mean)));
            Store(add ? Add(Load(to + i, lanes), result) : result, to + i, lanes);
          });
        }
      }
    });
  });
}

// dgain[c] += dy[t,c] x[t,c] inv[t] over t, then over the pieces.
static void RmsNormGainGradient(const ConstMat& dy, const ConstMat& x, int64_t width, const float* inv_rms,
                                float* dgain, int64_t col_begin, int64_t col_end) {
  const int64_t pieces = x.cols / width;
  WithTypes(dy.dtype, x.dtype, [&](auto* a, auto* b) {
    ForLanes(col_begin, col_end, [&](int64_t i, auto lanes) {
      F32x16 acc = Load(dgain + i, lanes);
      for (int64_t t = 0; t < x.rows; ++t) {
        for (int64_t h = 0; h < pieces; ++h) {
          const F32x16 n = Mul(Load(RowOf<MOERL_TYPE(b)>(x, t) + h * width + i, lanes), Set1(inv_rms[t * pieces + h]));
          acc = Fma(Load(RowOf<MOERL_TYPE(a)>(dy, t) + h * width + i, lanes), n, acc);
        }
      }
      Store(acc, dgain + i, lanes);
    });
  });
}

// (a, b) becomes (a cos - b sin, b cos + a sin) for the halves a, b of the rotated columns.
static void Rope(const ConstMat& x, int64_t head_dim, const ConstMat& cos, const ConstMat& sin, bool inverse,
                 const Mat& y, int64_t begin, int64_t end) {
  const int64_t half = cos.cols;
  WithTypes(x.dtype, y.dtype, [&](auto* a, auto* b) {
    for (int64_t t = begin; t < end; ++t) {
      const float* c = RowOf<float>(cos, t);
      const float* s = RowOf<float>(sin, t);
      for (int64_t at = 0; at < x.cols; at += head_dim) {
        const auto* from = RowOf<MOERL_TYPE(a)>(x, t) + at;
        auto* to = RowOf<MOERL_TYPE(b)>(y, t) + at;
        ForLanes(half, [&](int64_t i, auto lanes) {
          const F32x16 first = Load(from + i, lanes), second = Load(from + half + i, lanes);
          const F32x16 ci = Load(c + i, lanes), si = Load(s + i, lanes);
          const F32x16 fs = Mul(first, si), ss = Mul(second, si);
          const F32x16 fc = Mul(first, ci), sc = Mul(second, ci);
          Store(inverse ? Add(fc, ss) : Sub(fc, ss), to + i, lanes);
          Store(inverse ? Sub(sc, fs) : Add(sc, fs), to + half + i, lanes);
        });
        ForLanes(2 * half, head_dim, [&](int64_t i, auto lanes) { Store(Load(from + i, lanes), to + i, lanes); });
      }
    }
  });
}

static void SwiGlu(const ConstMat& gate_up, const Mat& y, int64_t begin, int64_t end) {
  const int64_t width = gate_up.cols / 2;
  WithTypes(gate_up.dtype, y.dtype, [&](auto* a, auto* b) {
    for (int64_t t = begin; t < end; ++t) {
      const auto* gate = RowOf<MOERL_TYPE(a)>(gate_up, t);
      auto* to = RowOf<MOERL_TYPE(b)>(y, t);
      ForLanes(width, [&](int64_t i, auto lanes) {
        const F32x16 g = Load(gate + i, lanes);
        Store(Mul(Mul(g, Sigmoid(g)), Load(gate + width + i, lanes)), to + i, lanes);
      });
    }
  });
}

// silu'(g) = s (1 + g (1 - s)), s = sigmoid(g).
static void SwiGluBackward(const ConstMat& dy, const ConstMat& gate_up, const Mat& dgate_up, int64_t begin,
                           int64_t end) {
  const int64_t width = gate_up.cols / 2;
  WithTypes(dy.dtype, gate_up.dtype, [&](auto* a, auto* b) {
    WithType(dgate_up.dtype, [&](auto* d) {
      for (int64_t t = begin; t < end; ++t) {
        const auto* grad = RowOf<MOERL_TYPE(a)>(dy, t);
        const auto* gate = RowOf<MOERL_TYPE(b)>(gate_up, t);
        auto* to = RowOf<MOERL_TYPE(d)>(dgate_up, t);
        ForLanes(width, [&](int64_t i, auto lanes) {
          const F32x16 g = Load(gate + i, lanes), u = Load(gate + width + i, lanes), dyi = Load(grad + i, lanes);
          const F32x16 s = Sigmoid(g);
          const F32x16 slope = Mul(s, Fma(g, Sub(Set1(1.0f), s), Set1(1.0f)));
          Store(Mul(Mul(dyi, u), slope), to + i, lanes);
          Store(Mul(dyi, Mul(g, s)), to + width + i, lanes);
        });
      }
    });
  });
}

MOERL_INLINE float Sigmoid1(float x) {
  float lanes[kLanes];
  Store(Sigmoid(Set1(x)), lanes, Full{});
  return lanes[0];
}

static void SigmoidGate(const ConstMat& x, const ConstMat& gate, const Mat& y, int64_t begin, int64_t end) {
  WithTypes(x.dtype, y.dtype, [&](auto* a, auto* b) {
    for (int64_t t = begin; t < end; ++t) {
      const F32x16 s = Set1(Sigmoid1(*RowOf<float>(gate, t)));
      const auto* from = RowOf<MOERL_TYPE(a)>(x, t);
      auto* to = RowOf<MOERL_TYPE(b)>(y, t);
      ForLanes(x.cols, [&](int64_t i, auto lanes) { Store(Mul(s, Load(from + i, lanes)), to + i, lanes); });
    }
  });
}

static void SigmoidGateBackward(const ConstMat& dy, const ConstMat& x, const ConstMat& gate, const Mat& dx,
                                const Mat& dgate, int64_t begin, int64_t end) {
  WithTypes(dy.dtype, x.dtype, [&](auto* a, auto* b) {
    WithType(dx.dtype, [&](auto* d) {
      for (int64_t t = begin; t < end; ++t) {
        const float s = Sigmoid1(*RowOf<float>(gate, t));
        const auto* grad = RowOf<MOERL_TYPE(a)>(dy, t);
        const auto* from = RowOf<MOERL_TYPE(b)>(x, t);
        auto* to = RowOf<MOERL_TYPE(d)>(dx, t);
        F32x16 products = Zero();
        ForLanes(x.cols, [&](int64_t i, auto lanes) {
          const F32x16 g = Load(grad + i, lanes);
          products = Fma(g, Load(from + i, lanes), products);
          Store(Mul(Set1(s), g), to + i, lanes);
        });
        *RowOf<float>(dgate, t) = SumTree(products) * (s * (1.0f - s));
      }
    });
  });
}

// Loshchilov & Hutter, 2019, in the order of PyTorch: decay, moments, then
// master -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps).
static void AdamW(const AdamWOptions& o, const float* grad, float* master, float* m, float* v, int64_t begin,
                  int64_t end) {
  const double correction1 = 1.0 - __builtin_pow(o.beta1, static_cast<double>(o.step));
  const double correction2 = 1.0 - __builtin_pow(o.beta2, static_cast<double>(o.step));
  const F32x16 keep = Set1(static_cast<float>(1.0 - static_cast<double>(o.lr) * o.weight_decay));
  const F32x16 step_size = Set1(static_cast<float>(o.lr / correction1));
  const F32x16 root2 = Set1(static_cast<float>(__builtin_sqrt(correction2)));
  const F32x16 beta1 = Set1(o.beta1), beta2 = Set1(o.beta2), eps = Set1(o.eps), scale = Set1(o.grad_scale);
  const F32x16 rest1 = Set1(1.0f - o.beta1), rest2 = Set1(1.0f - o.beta2);
  ForLanes(begin, end, [&](int64_t i, auto lanes) {
    const F32x16 g = Mul(Load(grad + i, lanes), scale);
    const F32x16 mi = Fma(beta1, Load(m + i, lanes), Mul(rest1, g));
    const F32x16 vi = Fma(beta2, Load(v + i, lanes), Mul(rest2, Mul(g, g)));
    const F32x16 denominator = Add(Div(Sqrt(vi), root2), eps);
    const F32x16 decayed = Mul(Load(master + i, lanes), keep);
    Store(Sub(decayed, Mul(step_size, Div(mi, denominator))), master + i, lanes);
    Store(mi, m + i, lanes);
    Store(vi, v + i, lanes);
  });
}

static double SumSquares(const float* x, int64_t count) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] += static_cast<double>(x[i + l]) * static_cast<double>(x[i + l]);
  }
  for (int l = 0; i + l < count; ++l) lanes[l] += static_cast<double>(x[i + l]) * static_cast<double>(x[i + l]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

}  // namespace moerl::tensor::MOERL_ISA
