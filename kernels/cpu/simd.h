// AVX2, FMA and F16C helpers. Sums are taken in a fixed order, and every fused multiply-add is written as one, so that
// results do not depend on how the compiler contracts or vectorises.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define TWINJET_INLINE inline __attribute__((always_inline))

namespace twinjet {

// Numbers that are all smaller are rounded to nothing: the inverse of their scale would overflow.
constexpr float kVanishing = 1e-30f;

// Keeps the compiler from moving arithmetic on `v` across this point (GCC reorders integer sums and spills).
#define TWINJET_PIN(v) asm("" : "+x"(v))

TWINJET_INLINE __m256 load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

TWINJET_INLINE void store_f16(uint16_t* p, __m256 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

TWINJET_INLINE float f16_to_f32(uint16_t h) { return _cvtsh_ss(h); }
TWINJET_INLINE uint16_t f32_to_f16(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

TWINJET_INLINE float bf16_to_f32(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

// ((0+4)+(2+6)) + ((1+5)+(3+7)).
TWINJET_INLINE float sum8(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_movehdup_ps(s));
  return _mm_cvtss_f32(s);
}

TWINJET_INLINE float max8(__m256 v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  s = _mm_max_ss(s, _mm_movehdup_ps(s));
  return _mm_cvtss_f32(s);
}

TWINJET_INLINE int32_t sum8(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
  return _mm_cvtsi128_si32(s);
}

TWINJET_INLINE __m256 abs8(__m256 v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }

// e**x: relative error under 2e-7 for results that are normal numbers; below -87.3 it gives 0, above 88.3 the value there.
TWINJET_INLINE __m256 exp8(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(-87.33654f);
  const __m256 vanishes = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
  x = _mm256_min_ps(_mm256_max_ps(x, lowest), _mm256_set1_ps(88.3f));
  // x = n ln 2 + r, |r| <= ln 2 / 2; ln 2 in two parts, the first with trailing zeros so that n times it is exact.
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  // Taylor's series to the seventh power: its remainder is under 6e-9 there.
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(vanishes, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

// x / (1 + e**-x).
TWINJET_INLINE __m256 silu8(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return _mm256_div_ps(x, _mm256_add_ps(one, exp8(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

// x / (1 + e**(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x**3): the tanh form of GELU (Hendrycks and Gimpel, 2016).
TWINJET_INLINE __m256 gelu_tanh8(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 cubic = _mm256_fmadd_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(0.044715f), one);
  const __m256 u2 = _mm256_mul_ps(_mm256_mul_ps(x, cubic), _mm256_set1_ps(-2.0f * 0.7978845608f));
  return _mm256_div_ps(x, _mm256_add_ps(one, exp8(u2)));
}

}  // namespace twinjet
