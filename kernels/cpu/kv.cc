#include "kv.h"

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace twinjet {
namespace {

constexpr float kLargest16 = 65504.0f;
constexpr float kLargest32 = 3.4028235e38f;

// Finite, and NaN the largest: with its operands in this order, the minimum with a NaN is the other number.
TWINJET_INLINE __m256 bounded(__m256 v, float largest) {
  return _mm256_max_ps(_mm256_min_ps(v, _mm256_set1_ps(largest)), _mm256_set1_ps(-largest));
}

// Each stores a row [H] at a stride; of int8, its scale at `scale`.
void store_row(const float* from, int64_t H, uint16_t* to, int64_t stride, uint16_t*) {
  alignas(16) uint16_t half[8];
  for (int64_t h = 0; h < H; h += 8) {
    const __m256 finite = bounded(_mm256_loadu_ps(from + h), kLargest16);
    if (stride == 1) {
      store_f16(to + h, finite);
      continue;
    }
    store_f16(half, finite);
    for (int64_t i = 0; i < 8; ++i) to[(h + i) * stride] = half[i];
  }
}

void store_row(const float* from, int64_t H, float* to, int64_t stride, float*) {
  for (int64_t h = 0; h < H; ++h) {
    const float x = from[h] < kLargest32 ? from[h] : kLargest32;  // NaN too
    to[h * stride] = x > -kLargest32 ? x : -kLargest32;
  }
}

void store_row(const float* from, int64_t H, int8_t* to, int64_t stride, int8_t* scale) {
  __m256 most = _mm256_setzero_ps();
  for (int64_t h = 0; h < H; h += 8) most = _mm256_max_ps(most, abs8(bounded(_mm256_loadu_ps(from + h), kLargest32)));
  const float peak = max8(most);
  const bool vanishes = peak < kVanishing;
  const __m256 inverse = _mm256_set1_ps(vanishes ? 0.0f : 127.0f / peak);
  const float step = vanishes ? 0.0f : peak / 127.0f;
  std::memcpy(scale, &step, sizeof(step));
  alignas(32) int32_t whole[8];
  for (int64_t h = 0; h < H; h += 8) {
    const __m256 finite = bounded(_mm256_loadu_ps(from + h), kLargest32);
    _mm256_store_si256(reinterpret_cast<__m256i*>(whole), _mm256_cvtps_epi32(_mm256_mul_ps(finite, inverse)));
    for (int64_t i = 0; i < 8; ++i) to[(h + i) * stride] = static_cast<int8_t>(std::clamp(whole[i], -127, 127));
  }
}

// Where a token's scale lies among the 16 of its block; nothing of that kind for floats.
template <class T>
T* scale_in(const KVLayout& layout, T* block, int64_t scales_at, int64_t token) {
  return layout.type == KVType::kI8 ? block + scales_at + 4 * token : nullptr;
}

template <class T>
void append_typed(const KVPool& pool, int64_t layer, int64_t page, int64_t position, int64_t head, const float* key,
                  const float* value) {
  const KVLayout& layout = pool.layout;
  T* block = static_cast<T*>(pool.data) + layout.block_at(layer, page, position, head);
  const int64_t token = position % kKVTokens, H = layout.head_dim;
  store_row(key, H, block + layout.key_at(0, token), kKVTokens, scale_in(layout, block, layout.key_scales_at(), token));
  store_row(value, H, block + layout.value_at(token, 0), 1, scale_in(layout, block, layout.value_scales_at(), token));
}

// fn(block, token, kv index of the key, kv index of the value) for all rows in range, heads and layers; `missing` with
// the same indices for rows out of range.
template <class T, class Fn, class Missing>
void for_rows(const KVPool& pool, int64_t num_layers, const int32_t* rows, int64_t M, ThreadPool& threads, Fn&& fn,
              Missing&& missing) {
  const KVLayout& layout = pool.layout;
  const int64_t K = layout.num_heads, W = layout.row_elements(), num_rows = layout.num_pages * layout.page_size;
  constexpr int64_t kGrain = 32;  // rows per task
  const int64_t grains = (M + kGrain - 1) / kGrain;
  threads.run(num_layers * grains, [&](int64_t task, int) {
    const int64_t layer = task / grains;
    for (int64_t m = task % grains * kGrain; m < std::min(M, (task % grains + 1) * kGrain); ++m) {
      for (int64_t head = 0; head < K; ++head) {
        const int64_t key = ((layer * 2 * M + m) * K + head) * W, value = key + M * K * W;
        if (rows[m] < 0 || rows[m] >= num_rows) {
          missing(key, value);
          continue;
        }
        const int64_t position = rows[m] % layout.page_size;
        T* block = static_cast<T*>(pool.data) + layout.block_at(layer, rows[m] / layout.page_size, position, head);
        fn(block, position % kKVTokens, key, value);
      }
    }
  });
}

template <class T>
void gather_typed(const KVPool& pool, int64_t num_layers, const int32_t* rows, int64_t M, T* kv, ThreadPool& threads) {
  const KVLayout& layout = pool.layout;
  const int64_t H = layout.head_dim, W = layout.row_elements();
  for_rows<T>(
      pool, num_layers, rows, M, threads,
      [&](const T* block, int64_t token, int64_t key, int64_t value) {
        for (int64_t h = 0; h < H; ++h) kv[key + h] = block[layout.key_at(h, token)];
        std::memcpy(kv + value, block + layout.value_at(token, 0), H * sizeof(T));
        if (W == H) return;
        std::memcpy(kv + key + H, scale_in(layout, block, layout.key_scales_at(), token), sizeof(float));
        std::memcpy(kv + value + H, scale_in(layout, block, layout.value_scales_at(), token), sizeof(float));
      },
      [&](int64_t key, int64_t value) {
        std::memset(kv + key, 0, W * sizeof(T));
        std::memset(kv + value, 0, W * sizeof(T));
      });
}

template <class T>
void scatter_typed(const KVPool& pool, int64_t num_layers, const int32_t* rows, int64_t M, const T* kv,
                   ThreadPool& threads) {
  const KVLayout& layout = pool.layout;
  const int64_t H = layout.head_dim, W = layout.row_elements();
  for_rows<T>(
      pool, num_layers, rows, M, threads,
      [&](T* block, int64_t token, int64_t key, int64_t value) {
        for (int64_t h = 0; h < H; ++h) block[layout.key_at(h, token)] = kv[key + h];
        std::memcpy(block + layout.value_at(token, 0), kv + value, H * sizeof(T));
        if (W == H) return;
        std::memcpy(scale_in(layout, block, layout.key_scales_at(), token), kv + key + H, sizeof(float));
        std::memcpy(scale_in(layout, block, layout.value_scales_at(), token), kv + value + H, sizeof(float));
      },
      [](int64_t, int64_t) {});
}

}  // namespace

bool kv_supported(const KVLayout& layout, int64_t num_heads) {
  return layout.page_size > 0 && layout.page_size % kKVTokens == 0 && layout.head_dim > 0 &&
         layout.head_dim % 16 == 0 && layout.num_heads > 0 && num_heads > 0 && num_heads % layout.num_heads == 0;
}

void append_kv(const KVPool& pool, int64_t layer, int64_t page, int64_t position, int64_t head, const float* key,
               const float* value) {
  switch (pool.layout.type) {
    case KVType::kF16: return append_typed<uint16_t>(pool, layer, page, position, head, key, value);
    case KVType::kF32: return append_typed<float>(pool, layer, page, position, head, key, value);
    case KVType::kI8: return append_typed<int8_t>(pool, layer, page, position, head, key, value);
  }
}

void gather_kv(const KVPool& pool, int64_t num_layers, const int32_t* rows, int64_t M, void* kv, ThreadPool& threads) {
  switch (pool.layout.type) {
    case KVType::kF16: return gather_typed(pool, num_layers, rows, M, static_cast<uint16_t*>(kv), threads);
    case KVType::kF32: return gather_typed(pool, num_layers, rows, M, static_cast<float*>(kv), threads);
    case KVType::kI8: return gather_typed(pool, num_layers, rows, M, static_cast<int8_t*>(kv), threads);
  }
}

void scatter_kv(const KVPool& pool, int64_t num_layers, const int32_t* rows, int64_t M, const void* kv,
                ThreadPool& threads) {
  switch (pool.layout.type) {
    case KVType::kF16: return scatter_typed(pool, num_layers, rows, M, static_cast<const uint16_t*>(kv), threads);
    case KVType::kF32: return scatter_typed(pool, num_layers, rows, M, static_cast<const float*>(kv), threads);
    case KVType::kI8: return scatter_typed(pool, num_layers, rows, M, static_cast<const int8_t*>(kv), threads);
  }
}

}  // namespace twinjet
