// Products of up to six rows with one panel, by AVX2: 12 accumulators of 8 columns fill its 16 registers together with
// their operands.
#include "microkernels.h"
#include "simd.h"

namespace twinjet {
namespace {

TWINJET_INLINE __m256i broadcast4(const void* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return _mm256_set1_epi32(bits);
}

TWINJET_INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Eight bytes as floats.
TWINJET_INLINE __m256 bytes_to_floats(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
TWINJET_INLINE __m256 signed_bytes_to_floats(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

TWINJET_INLINE __m256 halves(const uint8_t* p, int half) {
  return load_f16(reinterpret_cast<const uint16_t*>(p) + 8 * half);
}

// Scale of the 8 columns of a half; with two scales in a group, of its part. Products of two are exact.
template <Format F>
TWINJET_INLINE __m256 group_scale(const uint8_t* super, const uint8_t* group, int half, int part) {
  const uint8_t* scales = group + scales_at(F);
  if constexpr (F == Format::kQ6K) {
    return _mm256_mul_ps(halves(super, half), signed_bytes_to_floats(scales + 16 * part + 8 * half));
  } else if constexpr (scaled_twice(F)) {
    return _mm256_mul_ps(halves(super, half), bytes_to_floats(scales + 8 * half));
  } else {
    return halves(scales, half);
  }
}

template <Format F>
TWINJET_INLINE __m256 group_minimum(const uint8_t* super, const uint8_t* group, int half, __m256 scale) {
  const uint8_t* scales = group + scales_at(F);
  if constexpr (F == Format::kQ4) return _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f));
  if constexpr (F == Format::kQ5) return _mm256_mul_ps(scale, _mm256_set1_ps(-16.0f));
  if constexpr (scaled_twice(F)) {
    // The negated product is exact too.
    const __m256 negated = _mm256_xor_ps(halves(super + 32, half), _mm256_set1_ps(-0.0f));
    return _mm256_mul_ps(negated, bytes_to_floats(scales + 16 + 8 * half));
  }
  return halves(scales + 32, half);
}

// With few rows the weights come from memory as fast as it can, if they are asked for early enough.
constexpr int64_t kPrefetchAhead = 1024;

template <Format F, int R>
TWINJET_INLINE void prefetch_group(const uint8_t* group) {
  if constexpr (R <= 4) {
    for (int64_t line = 0; line < group_bytes(F); line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(group + kPrefetchAhead + line), _MM_HINT_T0);
    }
  }
}

// acc += scales * dot + minima * sum, for both halves of all rows.
template <Format F, int R>
TWINJET_INLINE void add_group(__m256 (&acc)[R][2], const __m256i (&dot)[R][2], const uint8_t* super,
                              const uint8_t* group, const float* scales, int part) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256 scale = group_scale<F>(super, group, half, part);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(scales + 2 * r));
      acc[r][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[r][half]), both, acc[r][half]);
    }
    if constexpr (has_minimum(F)) {
      const __m256 minimum = group_minimum<F>(super, group, half, scale);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        acc[r][half] = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(scales + 2 * r + 1), acc[r][half]);
      }
    }
  }
}

template <int R>
TWINJET_INLINE void clear(__m256 (&acc)[R][2]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
}

template <int R>
TWINJET_INLINE void store(const __m256 (&acc)[R][2], float* out) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    _mm256_storeu_ps(out + r * kPanel, acc[r][0]);
    _mm256_storeu_ps(out + r * kPanel + 8, acc[r][1]);
  }
}

template <int R>
TWINJET_INLINE void clear(__m256i (&dot)[R][2]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) dot[r][0] = dot[r][1] = _mm256_setzero_si256();
}

// 32 weights of a step and half, unsigned but for 8 bits. Of fewer bits the same 64 bytes serve twice: for low nibbles and,
// four steps on, for the high ones.
template <Format F>
TWINJET_INLINE __m256i unpack(const uint8_t* group, int step, int half) {
  if constexpr (F == Format::kQ8) return load(group + step * 64 + half * 32);
  __m256i w = load(group + (step & 3) * 64 + half * 32);
  if (step >= 4) w = _mm256_srli_epi16(w, 4);
  w = _mm256_and_si256(w, _mm256_set1_epi8(15));
  if constexpr (has_fifth_bit(F)) {
    // Shifts of 16 bits carry nothing over into the one bit that is kept of each byte.
    const __m256i bits = load(group + 256 + half * 32);
    const __m256i placed = step < 4 ? _mm256_slli_epi16(bits, 4 - step) : _mm256_srli_epi16(bits, step - 4);
    w = _mm256_or_si256(w, _mm256_and_si256(placed, _mm256_set1_epi8(16)));
  }
  if constexpr (F == Format::kQ6K) {
    const __m256i bits = load(group + 256 + step / 4 * 64 + half * 32);
    const int at = 2 * (step & 3);
    const __m256i placed = at < 4 ? _mm256_slli_epi16(bits, 4 - at) : _mm256_srli_epi16(bits, at - 4);
    w = _mm256_or_si256(w, _mm256_and_si256(placed, _mm256_set1_epi8(48)));
  }
  return w;
}

// dot += weights of a step times four inputs of each row, in 16 bits, or in 32 with 8-bit weights. Signed weights (6 bits
// less 32, and 8 bits) are multiplied without their signs, which go to the inputs.
template <Format F, int R>
TWINJET_INLINE void add_step(__m256i (&dot)[R][2], const uint8_t* group, const int8_t* a, int step) {
  __m256i w0 = unpack<F>(group, step, 0), w1 = unpack<F>(group, step, 1);
  if constexpr (F == Format::kQ6K || F == Format::kQ8) {
    if constexpr (F == Format::kQ6K) {
      w0 = _mm256_sub_epi8(w0, _mm256_set1_epi8(32));
      w1 = _mm256_sub_epi8(w1, _mm256_set1_epi8(32));
    }
    const __m256i m0 = _mm256_abs_epi8(w0), m1 = _mm256_abs_epi8(w1);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256i x = broadcast4(a + r * kGroup + 4 * step);
      const __m256i p0 = _mm256_maddubs_epi16(m0, _mm256_sign_epi8(x, w0));
      const __m256i p1 = _mm256_maddubs_epi16(m1, _mm256_sign_epi8(x, w1));
      if constexpr (F == Format::kQ8) {
        dot[r][0] = _mm256_add_epi32(dot[r][0], _mm256_madd_epi16(p0, _mm256_set1_epi16(1)));
        TWINJET_PIN(dot[r][0]);
        dot[r][1] = _mm256_add_epi32(dot[r][1], _mm256_madd_epi16(p1, _mm256_set1_epi16(1)));
        TWINJET_PIN(dot[r][1]);
      } else {
        dot[r][0] = _mm256_add_epi16(dot[r][0], p0);
        TWINJET_PIN(dot[r][0]);
        dot[r][1] = _mm256_add_epi16(dot[r][1], p1);
        TWINJET_PIN(dot[r][1]);
      }
    }
  } else {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256i x = broadcast4(a + r * kGroup + 4 * step);
      dot[r][0] = _mm256_add_epi16(dot[r][0], _mm256_maddubs_epi16(w0, x));
      TWINJET_PIN(dot[r][0]);
      dot[r][1] = _mm256_add_epi16(dot[r][1], _mm256_maddubs_epi16(w1, x));
      TWINJET_PIN(dot[r][1]);
    }
  }
}

template <int R>
TWINJET_INLINE void widen(__m256i (&dot)[R][2]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    dot[r][0] = _mm256_madd_epi16(dot[r][0], _mm256_set1_epi16(1));
    dot[r][1] = _mm256_madd_epi16(dot[r][1], _mm256_set1_epi16(1));
  }
}

// The largest magnitude of a weight as multiplied.
template <Format F>
constexpr int kLargest = F == Format::kQ8 ? 128 : F == Format::kQ6K ? 32 : has_fifth_bit(F) ? 31 : 15;

// Steps whose sums of pairs of products stay within 16 bits.
template <Format F>
constexpr int kSteps16 = F == Format::kQ8 ? 1 : has_fifth_bit(F) || F == Format::kQ6K ? 4 : 8;

template <Format F, int R>
TWINJET_INLINE void multiply_group(__m256 (&acc)[R][2], const uint8_t* super, const uint8_t* group, const int8_t* a,
                                   const float* scales) {
  static_assert(kSteps16<F> * 2 * kLargest<F> * 127 < 32768);
  __m256i dot[R][2];
  clear(dot);
  if constexpr (kSteps16<F> != 4) {
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step) add_step<F>(dot, group, a, step);
    if constexpr (F != Format::kQ8) widen(dot);
    add_group<F, R>(acc, dot, super, group, scales, 0);
  } else if constexpr (F == Format::kQ6K) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      clear(dot);
#pragma GCC unroll 4
      for (int step = 4 * part; step < 4 * part + 4; ++step) add_step<F>(dot, group, a, step);
      widen(dot);
      add_group<F, R>(acc, dot, super, group, scales, part);
    }
  } else {
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) add_step<F>(dot, group, a, step);
    widen(dot);
    __m256i first[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) first[r][0] = dot[r][0], first[r][1] = dot[r][1];
    clear(dot);
#pragma GCC unroll 4
    for (int step = 4; step < 8; ++step) add_step<F>(dot, group, a, step);
    widen(dot);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      dot[r][0] = _mm256_add_epi32(dot[r][0], first[r][0]);
      dot[r][1] = _mm256_add_epi32(dot[r][1], first[r][1]);
    }
    add_group<F, R>(acc, dot, super, group, scales, 0);
  }
}

// Integer weights. Groups of one super-scale go together.
template <Format F, int R>
__attribute__((noinline)) void tile_integers(const uint8_t* group, const int8_t* a, const float* scales,
                                             int64_t num_groups, float* out) {
  constexpr int64_t kTogether = scaled_twice(F) ? kSuperGroups : 1;
  __m256 acc[R][2];
  clear(acc);
  for (int64_t g = 0; g < num_groups; g += kTogether) {
    const uint8_t* super = group;
    group += super_bytes(F);
    for (int64_t i = 0; i < kTogether; ++i) {
      prefetch_group<F, R>(group);
      multiply_group<F, R>(acc, super, group, a, scales);
      group += group_bytes(F);
      a += R * kGroup;
      scales += 2 * R;
    }
  }
  store(acc, out);
}

// 8-bit weights with 16-bit inputs.
template <Format F, int R>
__attribute__((noinline)) void tile_wide(const uint8_t* group, const int16_t* a, const float* scales,
                                         int64_t num_groups, float* out) {
  __m256 acc[R][2];
  clear(acc);
  for (int64_t g = 0; g < num_groups; ++g) {
    prefetch_group<F, R>(group);
    __m256i dot[R][2];
    clear(dot);
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      const __m128i* w = reinterpret_cast<const __m128i*>(group + 32 * pair);
      const __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128(w));
      const __m256i w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128(w + 1));
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m256i x = broadcast4(a + r * kGroup + 2 * pair);
        dot[r][0] = _mm256_add_epi32(dot[r][0], _mm256_madd_epi16(w0, x));
        TWINJET_PIN(dot[r][0]);
        dot[r][1] = _mm256_add_epi32(dot[r][1], _mm256_madd_epi16(w1, x));
        TWINJET_PIN(dot[r][1]);
      }
    }
    add_group<F, R>(acc, dot, group, group, scales, 0);
    group += group_bytes(F);
    a += R * kGroup;
    scales += 2 * R;
  }
  store(acc, out);
}

template <Format F>
TWINJET_INLINE __m256 load_floats(const uint8_t* group, int64_t at) {
  if constexpr (F == Format::kF32) return _mm256_loadu_ps(reinterpret_cast<const float*>(group) + at);
  const uint16_t* p = reinterpret_cast<const uint16_t*>(group) + at;
  if constexpr (F == Format::kF16) return load_f16(p);
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

template <Format F, int R>
__attribute__((noinline)) void tile_float(const uint8_t* group, const float* a, int64_t num_groups, float* out) {
  __m256 acc[R][2];
  clear(acc);
  for (int64_t g = 0; g < num_groups; ++g) {
    prefetch_group<F, R>(group);
#pragma GCC unroll 4
    for (int k = 0; k < kGroup; ++k) {
      const __m256 w0 = load_floats<F>(group, k * kPanel), w1 = load_floats<F>(group, k * kPanel + 8);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m256 x = _mm256_broadcast_ss(a + r * kGroup + k);
        acc[r][0] = _mm256_fmadd_ps(w0, x, acc[r][0]);
        acc[r][1] = _mm256_fmadd_ps(w1, x, acc[r][1]);
      }
    }
    group += group_bytes(F);
    a += R * kGroup;
  }
  store(acc, out);
}

template <int R>
void multiply_rows(Format format, const uint8_t* panel, int64_t num_groups, const TileInputs& in, float* out) {
#define TWINJET_CASE(kind, format, ...) \
  case Format::format: return tile_##kind<Format::format, R>(panel, __VA_ARGS__, num_groups, out);
  switch (format) {
    TWINJET_CASE(float, kF32, in.floats)
    TWINJET_CASE(float, kF16, in.floats)
    TWINJET_CASE(float, kBF16, in.floats)
    TWINJET_CASE(integers, kQ4, in.integers, in.scales)
    TWINJET_CASE(integers, kQ4M, in.integers, in.scales)
    TWINJET_CASE(integers, kQ4K, in.integers, in.scales)
    TWINJET_CASE(integers, kQ5, in.integers, in.scales)
    TWINJET_CASE(integers, kQ5M, in.integers, in.scales)
    TWINJET_CASE(integers, kQ5K, in.integers, in.scales)
    TWINJET_CASE(integers, kQ6K, in.integers, in.scales)
    TWINJET_CASE(integers, kQ8, in.integers, in.scales)
    TWINJET_CASE(wide, kQ8Wide, in.wide, in.wide_scales)
  }
#undef TWINJET_CASE
}

}  // namespace

void multiply_tile_avx2(Format format, int64_t num_rows, const uint8_t* panels, int64_t num_panels, int64_t num_groups,
                        const TileInputs& in, float* out) {
  for (int64_t i = 0; i < num_panels; ++i) {
    switch (num_rows) {
      case 1: multiply_rows<1>(format, panels, num_groups, in, out); break;
      case 2: multiply_rows<2>(format, panels, num_groups, in, out); break;
      case 3: multiply_rows<3>(format, panels, num_groups, in, out); break;
      case 4: multiply_rows<4>(format, panels, num_groups, in, out); break;
      case 5: multiply_rows<5>(format, panels, num_groups, in, out); break;
      case 6: multiply_rows<6>(format, panels, num_groups, in, out); break;
    }
    panels += groups_bytes(format, num_groups);
    out += num_rows * kPanel;
  }
}

}  // namespace twinjet
