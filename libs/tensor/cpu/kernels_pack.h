// Packing: weights and tokens into panels. Included once by each instruction set.
//
// fp32 panels are [depth][32]; bf16 panels are [depth/2][32][2]. Both are 32-bit words [step][32]: a step is one
// depth (fp32) or a pair of depths (bf16), so whole blocks are moved as words of 16 lanes.
namespace moerl::tensor::MOERL_ISA {

MOERL_INLINE float LoadOne(const float* p) { return *p; }
MOERL_INLINE float LoadOne(const Bf16* p) { return __builtin_bit_cast(float, static_cast<uint32_t>(p->bits) << 16); }
MOERL_INLINE void CopyOne(const float* from, float* to) { *to = *from; }
MOERL_INLINE void CopyOne(const Bf16* from, Bf16* to) { *to = *from; }
MOERL_INLINE void CopyOne(const float* from, Bf16* to) { Store(Set1(*from), to, Tail{1}); }
MOERL_INLINE void CopyOne(const Bf16* from, float* to) { *to = LoadOne(from); }

// Depths in a step.
MOERL_INLINE constexpr int64_t StepOf(const float*) { return 1; }
MOERL_INLINE constexpr int64_t StepOf(const Bf16*) { return 2; }

// Where element (n, k) of a weight of `depth` inputs is inside its group.
template <typename T>
MOERL_INLINE int64_t PackedIndex(const T* type, int64_t n, int64_t k, int64_t depth) {
  const int64_t step = StepOf(type), padded = (depth + step - 1) / step * step;
  return n / kPanel * padded * kPanel + k / step * step * kPanel + n % kPanel * step + k % step;
}

template <typename F>
MOERL_INLINE void WithType(DType dtype, F f) {
  if (dtype == DType::kF32) {
    f(static_cast<float*>(nullptr));
  } else {
    f(static_cast<Bf16*>(nullptr));
  }
}

// Words pass through memcpy: rows of bf16 need not be aligned to words, nor may they be read as floats.
MOERL_INLINE F32x16 WordsAt(const void* p) {
  alignas(64) float words[kLanes];
  __builtin_memcpy(words, p, sizeof(words));
  return Load(words, Full{});
}
MOERL_INLINE void StoreWords(F32x16 a, void* p) {
  alignas(64) float words[kLanes];
  Store(a, words, Full{});
  __builtin_memcpy(p, words, sizeof(words));
}

// Sixteen steps of one row as words: 16 fp32 or 16 pairs of bf16.
template <typename From>
MOERL_INLINE F32x16 LoadWords(const From* p, const float*) {
  return Load(p, Full{});
}
MOERL_INLINE F32x16 LoadWords(const Bf16* p, const Bf16*) { return WordsAt(p); }
MOERL_INLINE F32x16 LoadWords(const float* p, const Bf16*) {
  alignas(64) Bf16 pairs[2 * kLanes];
  Store(Load(p, Full{}), pairs, Full{});
  Store(Load(p + kLanes, Full{}), pairs + kLanes, Full{});
  return WordsAt(pairs);
}

// src rows [rows, depth] are rows row_begin .. of the weight: blocks of 16 rows by 16 steps are transposed in
// registers, what is left goes one by one.
template <typename From, typename To>
MOERL_INLINE void PackRowsAs(const ConstMat& src, int64_t row_begin, To* panels) {
  constexpr int64_t kSteps = kLanes * StepOf(static_cast<To*>(nullptr));
  const From* from = static_cast<const From*>(src.data);
  for (int64_t r = 0; r < src.rows;) {
    const int64_t n = row_begin + r;
    const bool whole = n % kLanes == 0 && r + kLanes <= src.rows;
    int64_t k = 0;
    for (; whole && k + kSteps <= src.cols; k += kSteps) {
      F32x16 words[kLanes];
      for (int i = 0; i < kLanes; ++i) words[i] = LoadWords(from + (r + i) * src.stride + k, panels);
      TransposeWords(words);
      char* to = reinterpret_cast<char*>(panels + PackedIndex(panels, n, k, src.cols));
      for (int i = 0; i < kLanes; ++i) StoreWords(words[i], to + i * kPanel * static_cast<int64_t>(sizeof(float)));
    }
    const int64_t count = whole ? kLanes : 1;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = k; c < src.cols; ++c) {
        CopyOne(from + (r + i) * src.stride + c, panels + PackedIndex(panels, n + i, c, src.cols));
      }
    }
    r += count;
  }
}

static void PackRows(const ConstMat& src, int64_t row_begin, DType dtype, void* panels) {
  WithType(src.dtype, [&](auto* from) {
    WithType(dtype, [&](auto* to) {
      PackRowsAs<std::remove_pointer_t<decltype(from)>>(src, row_begin, static_cast<decltype(to)>(panels));
    });
  });
}

// Lanes of one step from rows t and t + 1 of the same columns (fp32 uses only the first), as words.
template <typename From, typename Lanes>
MOERL_INLINE void StoreStep(const From* even, const From*, Lanes lanes, float* out) {
  Store(Load(even, lanes), out, Full{});
}
template <typename From, typename Lanes>
MOERL_INLINE void StoreStep(const From* even, const From* odd, Lanes lanes, Bf16* out) {
  StorePairs(Load(even, lanes), odd == nullptr ? Zero() : Load(odd, lanes), out);
}

// At most kPanel columns of x [tokens, columns] as one panel, depth = tokens; columns and pairs that x lacks are 0.
template <typename From, typename To>
MOERL_INLINE void PackTokensAs(const ConstMat& x, To* panel) {
  constexpr int64_t kStep = StepOf(static_cast<To*>(nullptr));
  const From* from = static_cast<const From*>(x.data);
  for (int64_t t = 0; t < x.rows; t += kStep) {
    const From* even = from + t * x.stride;
    const From* odd = t + 1 < x.rows ? even + x.stride : nullptr;
    for (int64_t c = 0; c < kPanel; c += kLanes) {
      To* out = panel + t * kPanel + c * kStep;
      const int64_t left = x.cols - c;
      if (left >= kLanes) {
        StoreStep(even + c, odd == nullptr ? nullptr : odd + c, Full{}, out);
      } else {
        const Tail tail{left > 0 ? static_cast<int>(left) : 0};
        StoreStep(even + c, odd == nullptr ? nullptr : odd + c, tail, out);
      }
    }
  }
}

static void PackTokens(const ConstMat& x, DType dtype, void* panel) {
  WithType(x.dtype, [&](auto* from) {
    WithType(dtype, [&](auto* to) {
      PackTokensAs<std::remove_pointer_t<decltype(from)>>(x, static_cast<decltype(to)>(panel));
    });
  });
}

// src [rows, columns] are depths row_begin .. of the transpose, whose panels are over columns and whose depth is n.
// Whole panels and steps are packed as tokens are, the rest one by one.
template <typename From, typename To>
MOERL_INLINE void PackTransposedAs(const ConstMat& src, int64_t row_begin, int64_t n, To* panels) {
  constexpr int64_t kStep = StepOf(static_cast<To*>(nullptr));
  const From* from = static_cast<const From*>(src.data);
  for (int64_t c = 0; c < src.cols; c += kPanel) {
    const int64_t width = src.cols - c < kPanel ? src.cols - c : kPanel;
    // A last odd row shares its step with a row of another source unless it is the weight's last.
    const int64_t whole = row_begin % kStep != 0 ? 0 : src.rows / kStep * kStep;
    ConstMat part = src;
    part.data = from + c;
    part.rows = whole;
    part.cols = width;
    PackTokensAs<From>(part, panels + PackedIndex(panels, c, row_begin, n));
    for (int64_t r = whole; r < src.rows; ++r) {
      for (int64_t i = 0; i < width; ++i) {
        CopyOne(from + r * src.stride + c + i, panels + PackedIndex(panels, c + i, row_begin + r, n));
      }
    }
  }
}

static void PackTransposed(const ConstMat& src, int64_t row_begin, int64_t n, DType dtype, void* panels) {
  WithType(src.dtype, [&](auto* from) {
    WithType(dtype, [&](auto* to) {
      PackTransposedAs<std::remove_pointer_t<decltype(from)>>(src, row_begin, n, static_cast<decltype(to)>(panels));
    });
  });
}

}  // namespace moerl::tensor::MOERL_ISA
