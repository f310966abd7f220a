// Products of up to six rows with one panel or two, by AVX-512 with VNNI: a register holds one step of all 16 columns,
// and four products are added to a 32-bit sum at once, so no sum needs widening. With two panels an input that is loaded
// serves two products; with one, loads bound it where the weights are in a cache (Zen 4 loads one register in a cycle, and
// multiplies one). Weights are not prefetched as they are for AVX2: on Zen 4, the processor at hand, its own prefetching
// reads 30% faster without.
#include "microkernels.h"
#include "simd.h"

namespace twinjet {
namespace {

TWINJET_INLINE __m512i load(const void* p) { return _mm512_loadu_si512(p); }

// Four bytes, sixteen times.
TWINJET_INLINE __m512i broadcast4(const void* p) {
  int bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return _mm512_set1_epi32(bits);
}

TWINJET_INLINE __m512 halves(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
TWINJET_INLINE __m512 bytes_to_floats(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
TWINJET_INLINE __m512 signed_bytes_to_floats(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
TWINJET_INLINE __m512 negated(__m512 v) {
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(v), _mm512_set1_epi32(static_cast<int>(0x80000000u))));
}

template <Format F>
TWINJET_INLINE __m512 group_scale(const uint8_t* super, const uint8_t* group, int part) {
  const uint8_t* scales = group + scales_at(F);
  if constexpr (F == Format::kQ6K) {
    return _mm512_mul_ps(halves(super), signed_bytes_to_floats(scales + 16 * part));
  } else if constexpr (scaled_twice(F)) {
    return _mm512_mul_ps(halves(super), bytes_to_floats(scales));
  } else {
    return halves(scales);
  }
}

template <Format F>
TWINJET_INLINE __m512 group_minimum(const uint8_t* super, const uint8_t* group, __m512 scale) {
  const uint8_t* scales = group + scales_at(F);
  if constexpr (F == Format::kQ4) return _mm512_mul_ps(scale, _mm512_set1_ps(-8.0f));
  if constexpr (F == Format::kQ5) return _mm512_mul_ps(scale, _mm512_set1_ps(-16.0f));
  if constexpr (scaled_twice(F)) return _mm512_mul_ps(negated(halves(super + 32)), bytes_to_floats(scales + 16));
  return halves(scales + 32);
}

// acc += scales * dot + minima * sum, in the order of the other instruction sets.
template <Format F, int R>
TWINJET_INLINE void add_group(__m512 (&acc)[R], const __m512i (&dot)[R], const uint8_t* super, const uint8_t* group,
                              const float* scales, int part) {
  const __m512 scale = group_scale<F>(super, group, part);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(scales[2 * r]));
    acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r]), both, acc[r]);
  }
  if constexpr (has_minimum(F)) {
    const __m512 minimum = group_minimum<F>(super, group, scale);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) acc[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(scales[2 * r + 1]), acc[r]);
  }
}

// 16 columns x 4 inputs of a step, unsigned: 8-bit weights plus 128.
template <Format F>
TWINJET_INLINE __m512i unpack(const uint8_t* group, int step) {
  if constexpr (F == Format::kQ8) return _mm512_xor_si512(load(group + step * 64), _mm512_set1_epi8(-128));
  __m512i w = load(group + (step & 3) * 64);
  if (step >= 4) w = _mm512_srli_epi16(w, 4);
  w = _mm512_and_si512(w, _mm512_set1_epi8(15));
  if constexpr (has_fifth_bit(F)) {
    const __m512i bits = load(group + 256);
    const __m512i placed = step < 4 ? _mm512_slli_epi16(bits, 4 - step) : _mm512_srli_epi16(bits, step - 4);
    w = _mm512_or_si512(w, _mm512_and_si512(placed, _mm512_set1_epi8(16)));
  }
  if constexpr (F == Format::kQ6K) {
    const __m512i bits = load(group + 256 + step / 4 * 64);
    const int at = 2 * (step & 3);
    const __m512i placed = at < 4 ? _mm512_slli_epi16(bits, 4 - at) : _mm512_srli_epi16(bits, at - 4);
    w = _mm512_or_si512(w, _mm512_and_si512(placed, _mm512_set1_epi8(48)));
  }
  return w;
}

// What is multiplied of these formats is signed weights plus 32 or 128, so that products are too large by as much times
// the sum of the inputs: the offset, by number (microkernels.h).
constexpr bool has_offset(Format f) { return f == Format::kQ6K || f == Format::kQ8; }
constexpr int offset_of(Format f, int part) { return f == Format::kQ8 ? 2 : part; }

// Steps [first, last) of a group of each panel, `stride` bytes apart, less the offset.
template <Format F, int R, int C>
TWINJET_INLINE void add_steps(__m512i (&dot)[C][R], const uint8_t* group, int64_t stride, const int8_t* a,
                              const int32_t* offsets, int first, int last) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) dot[c][r] = _mm512_setzero_si512();
  }
#pragma GCC unroll 8
  for (int step = first; step < last; ++step) {
    __m512i w[C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) w[c] = unpack<F>(group + c * stride, step);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512i x = broadcast4(a + r * kGroup + 4 * step);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) dot[c][r] = _mm512_dpbusd_epi32(dot[c][r], w[c], x);
    }
  }
  if constexpr (has_offset(F)) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512i offset = _mm512_set1_epi32(offsets[4 * r]);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) dot[c][r] = _mm512_sub_epi32(dot[c][r], offset);
    }
  }
}

template <int R, int C>
TWINJET_INLINE void store(const __m512 (&acc)[C][R], float* out) {
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + (c * R + r) * kPanel, acc[c][r]);
  }
}

template <int R, int C>
TWINJET_INLINE void clear(__m512 (&acc)[C][R]) {
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) acc[c][r] = _mm512_setzero_ps();
  }
}

// Integer weights. Groups of one super-scale go together.
template <Format F, int R, int C>
__attribute__((noinline)) void tile_integers(const uint8_t* group, const TileInputs& in, int64_t num_groups, float* out) {
  constexpr int64_t kTogether = scaled_twice(F) ? kSuperGroups : 1;
  const int64_t stride = groups_bytes(F, num_groups);
  const int8_t* a = in.integers;
  const float* scales = in.scales;
  const int32_t* offsets = in.offsets;
  __m512 acc[C][R];
  clear(acc);
  for (int64_t g = 0; g < num_groups; g += kTogether) {
    const uint8_t* super = group;
    group += super_bytes(F);
    for (int64_t i = 0; i < kTogether; ++i) {
      __m512i dot[C][R];
      constexpr int kParts = F == Format::kQ6K ? 2 : 1;  // scales within the 32 inputs
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        add_steps<F>(dot, group, stride, a, offsets + offset_of(F, part), 8 / kParts * part, 8 / kParts * (part + 1));
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
          add_group<F, R>(acc[c], dot[c], super + c * stride, group + c * stride, scales, part);
        }
      }
      group += group_bytes(F);
      a += R * kGroup;
      scales += 2 * R;
      offsets += 4 * R;
    }
  }
  store(acc, out);
}

// 8-bit weights with 16-bit inputs, which are multiplied at half the rate, so loads do not bound it: panels go one by
// one, which is faster.
template <int R, int C>
__attribute__((noinline)) void tile_wide(const uint8_t* group, const int16_t* a, const float* scales, int64_t num_groups,
                                       float* out) {
  constexpr Format F = Format::kQ8Wide;
  for (int c = 0; c < C; ++c) {
    const int16_t* inputs = a;
    const float* row_scales = scales;
    __m512 acc[1][R];
    clear(acc);
    for (int64_t g = 0; g < num_groups; ++g) {
      __m512i dot[R];
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) dot[r] = _mm512_setzero_si512();
#pragma GCC unroll 16
      for (int pair = 0; pair < 16; ++pair) {
        const __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 32 * pair)));
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          dot[r] = _mm512_dpwssd_epi32(dot[r], w, broadcast4(inputs + r * kGroup + 2 * pair));
        }
      }
      add_group<F, R>(acc[0], dot, group, group, row_scales, 0);
      group += group_bytes(F);
      inputs += R * kGroup;
      row_scales += 2 * R;
    }
    store(acc, out + c * R * kPanel);
  }
}

template <int R, int C>
TWINJET_INLINE void multiply_rows(Format format, const uint8_t* panels, int64_t num_groups, const TileInputs& in,
                                  float* out) {
#define TWINJET_CASE(format) \
  case Format::format: return tile_integers<Format::format, R, C>(panels, in, num_groups, out);
  switch (format) {
    TWINJET_CASE(kQ4)
    TWINJET_CASE(kQ4M)
    TWINJET_CASE(kQ4K)
    TWINJET_CASE(kQ5)
    TWINJET_CASE(kQ5M)
    TWINJET_CASE(kQ5K)
    TWINJET_CASE(kQ6K)
    TWINJET_CASE(kQ8)
    case Format::kQ8Wide: return tile_wide<R, C>(panels, in.wide, in.wide_scales, num_groups, out);
    default: return;
  }
#undef TWINJET_CASE
}

template <int C>
TWINJET_INLINE void multiply_panels(Format format, int64_t num_rows, const uint8_t* panels, int64_t num_groups,
                                    const TileInputs& in, float* out) {
  switch (num_rows) {
    case 1: return multiply_rows<1, C>(format, panels, num_groups, in, out);
    case 2: return multiply_rows<2, C>(format, panels, num_groups, in, out);
    case 3: return multiply_rows<3, C>(format, panels, num_groups, in, out);
    case 4: return multiply_rows<4, C>(format, panels, num_groups, in, out);
    case 5: return multiply_rows<5, C>(format, panels, num_groups, in, out);
    case 6: return multiply_rows<6, C>(format, panels, num_groups, in, out);
  }
}

}  // namespace

void multiply_tile_vnni(Format format, int64_t num_rows, const uint8_t* panels, int64_t num_panels,
                        int64_t num_groups, const TileInputs& in, float* out) {
  // Products of floats are no faster with wider registers, being bound by reading the weights.
  if (activation_of(format) == Activation::kFloat) {
    return multiply_tile_avx2(format, num_rows, panels, num_panels, num_groups, in, out);
  }
  if (num_panels == 2) return multiply_panels<2>(format, num_rows, panels, num_groups, in, out);
  multiply_panels<1>(format, num_rows, panels, num_groups, in, out);
}

}  // namespace twinjet
