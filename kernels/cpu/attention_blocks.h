// Attention within a block of tokens: scores of query vectors with keys, and values weighed by them. AVX2.
#pragma once

#include <cstdint>

#include "kv.h"
#include "simd.h"

namespace twinjet {

constexpr int64_t kBlock = 64;  // tokens per step of the running softmax
constexpr int kMaxM = 6;        // query vectors of a microkernel: 6 x 16 sums fill 12 of 16 registers

TWINJET_INLINE __m256 load8(const uint16_t* p) { return load_f16(p); }
TWINJET_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
TWINJET_INLINE __m256 load8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

TWINJET_INLINE float exp1(float x) { return _mm256_cvtss_f32(exp8(_mm256_set1_ps(x))); }

// e**x for x <= 0, within 1.2e-7 of it relatively; below -87 the value there, which is as good as nothing. Exactly 1 at 0.
TWINJET_INLINE __m256 exp_nonpositive(__m256 x) {
  x = _mm256_max_ps(x, _mm256_set1_ps(-87.0f));
  // Adding 1.5 * 2**23 leaves x / ln 2, rounded, in the low bits. x = n ln 2 + r, ln 2 in two parts.
  const __m256 shift = _mm256_set1_ps(12582912.0f);
  const __m256 shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(1.44269504f), shift);
  const __m256 n = _mm256_sub_ps(shifted, shift);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  // 1 + r + r**2 P(r) with the least largest relative error, 3.1e-9, for |r| <= ln 2 / 2.
  __m256 p = _mm256_set1_ps(0.001381459878757596f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.008368716575205326f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.04166838899254799f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.1666652113199234f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.4999999403953552f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  // Times 2**n: n added to the exponent.
  const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
}

// scores[m][t] = sum over d of q[m][d] k[d][t], d ascending; 16 tokens. With kAhead it prefetches as many lines of
// `ahead` as the keys and values of 16 tokens take: 32 elements of each for every d.
template <int M, bool kAhead, class T>
void score_block(const float* q, int64_t H, const T* k, float* scores, const char* ahead) {
  __m256 sum[M][2];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm256_setzero_ps();
  for (int64_t d = 0; d < H; ++d) {
    const __m256 k0 = load8(k + d * kKVTokens), k1 = load8(k + d * kKVTokens + 8);
    if constexpr (kAhead) {
      // Of int8 half a line.
      if (sizeof(T) > 1 || d % 2 == 0) {
#pragma GCC unroll 2
        for (size_t at = 0; at < 32 * sizeof(T); at += 64) _mm_prefetch(ahead + d * 32 * sizeof(T) + at, _MM_HINT_T0);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const __m256 x = _mm256_broadcast_ss(q + m * H + d);
      sum[m][0] = _mm256_fmadd_ps(x, k0, sum[m][0]);
      sum[m][1] = _mm256_fmadd_ps(x, k1, sum[m][1]);
    }
  }
  if constexpr (kAhead && sizeof(T) == 1) {  // two lines of scales
    _mm_prefetch(ahead + H * 32, _MM_HINT_T0);
    _mm_prefetch(ahead + H * 32 + 64, _MM_HINT_T0);
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    _mm256_storeu_ps(scores + m * kBlock, sum[m][0]);
    _mm256_storeu_ps(scores + m * kBlock + 8, sum[m][1]);
  }
}

// acc[m][h] += sum over t in [begin, end) of p[m][t] v[t][h], t ascending.
template <int M, class T>
void weigh_block(const float* p, int64_t begin, int64_t end, const T* v, int64_t H, float* acc) {
  for (int64_t h = 0; h < H; h += 16) {
    __m256 sum[M][2];
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      sum[m][0] = _mm256_loadu_ps(acc + m * H + h);
      sum[m][1] = _mm256_loadu_ps(acc + m * H + h + 8);
    }
    for (int64_t t = begin; t < end; ++t) {
      const __m256 v0 = load8(v + t * H + h), v1 = load8(v + t * H + h + 8);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const __m256 x = _mm256_broadcast_ss(p + m * kBlock + t);
        sum[m][0] = _mm256_fmadd_ps(x, v0, sum[m][0]);
        sum[m][1] = _mm256_fmadd_ps(x, v1, sum[m][1]);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      _mm256_storeu_ps(acc + m * H + h, sum[m][0]);
      _mm256_storeu_ps(acc + m * H + h + 8, sum[m][1]);
    }
  }
}

template <bool kAhead, class T>
void score_vectors(int M, const float* q, int64_t H, const T* k, float* scores, const char* ahead) {
  switch (M) {
    case 1: return score_block<1, kAhead>(q, H, k, scores, ahead);
    case 2: return score_block<2, kAhead>(q, H, k, scores, ahead);
    case 3: return score_block<3, kAhead>(q, H, k, scores, ahead);
    case 4: return score_block<4, kAhead>(q, H, k, scores, ahead);
    case 5: return score_block<5, kAhead>(q, H, k, scores, ahead);
    default: return score_block<6, kAhead>(q, H, k, scores, ahead);
  }
}

template <class T>
void weigh_vectors(int M, const float* p, int64_t begin, int64_t end, const T* v, int64_t H, float* acc) {
  switch (M) {
    case 1: return weigh_block<1>(p, begin, end, v, H, acc);
    case 2: return weigh_block<2>(p, begin, end, v, H, acc);
    case 3: return weigh_block<3>(p, begin, end, v, H, acc);
    case 4: return weigh_block<4>(p, begin, end, v, H, acc);
    case 5: return weigh_block<5>(p, begin, end, v, H, acc);
    default: return weigh_block<6>(p, begin, end, v, H, acc);
  }
}

// fn(first, count) over `n` vectors in nearly equal groups of at most kMaxM.
template <class Fn>
TWINJET_INLINE void for_groups(int64_t n, Fn&& fn) {
  const int64_t num_groups = (n + kMaxM - 1) / kMaxM;
  for (int64_t group = 0, first = 0; group < num_groups; ++group) {
    const int64_t count = n / num_groups + (group < n % num_groups ? 1 : 0);
    fn(first, static_cast<int>(count));
    first += count;
  }
}

template <class T>
TWINJET_INLINE void convert(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 8) _mm256_storeu_ps(to + i, load8(from + i));
}

// rows[v][t] *= scales[t] for 16 tokens.
TWINJET_INLINE void scale_tokens(const void* scales, int64_t V, float* rows) {
  const float* s = static_cast<const float*>(scales);
  const __m256 s0 = _mm256_loadu_ps(s), s1 = _mm256_loadu_ps(s + 8);
  for (int64_t v = 0; v < V; ++v, rows += kBlock) {
    _mm256_storeu_ps(rows, _mm256_mul_ps(_mm256_loadu_ps(rows), s0));
    _mm256_storeu_ps(rows + 8, _mm256_mul_ps(_mm256_loadu_ps(rows + 8), s1));
  }
}

}  // namespace twinjet
