// Where keys and values lie in the pool, and moving rows in and out of it.
//
// The pool is one array [L, P, G/16, K, 2, 16 * W] of float16, float32 or int8. Its unit is a block of 16 tokens of one
// KV head: keys as [H][16 tokens], so that a dot product with a query needs no horizontal sums, then values as
// [16 tokens][H]. Floats: W = H. int8: W = H + 4, and after the keys, and after the values, come 16 float32 scales, one
// for each token: a number is scale * integer. The pool never holds anything but finite numbers.
#pragma once

#include <cstdint>

#include "threads.h"

namespace twinjet {

constexpr int64_t kKVTokens = 16;  // a page holds a whole number of these

enum class KVType { kF16, kF32, kI8 };

struct KVLayout {
  int64_t num_pages;   // P
  int64_t page_size;   // G, a multiple of 16
  int64_t num_heads;   // K
  int64_t head_dim;    // H
  KVType type;

  // W: elements of one token's key, or value, of one head.
  int64_t row_elements() const { return head_dim + (type == KVType::kI8 ? 4 : 0); }
  int64_t half_elements() const { return kKVTokens * row_elements(); }
  int64_t block_elements() const { return 2 * half_elements(); }
  int64_t page_elements() const { return page_size / kKVTokens * num_heads * block_elements(); }
  int64_t layer_elements() const { return num_pages * page_elements(); }

  // First element of the block of `head` that holds a token; the same token's index within it is position % 16.
  // `page` is the page table's entry for position / page_size.
  int64_t block_at(int64_t layer, int64_t page, int64_t position, int64_t head) const {
    const int64_t block = position % page_size / kKVTokens;
    return layer * layer_elements() + page * page_elements() + (block * num_heads + head) * block_elements();
  }
  // Within a block.
  int64_t key_at(int64_t dim, int64_t token) const { return dim * kKVTokens + token; }
  int64_t value_at(int64_t token, int64_t dim) const { return half_elements() + token * head_dim + dim; }
  // Of the 16 scales; int8 only.
  int64_t key_scales_at() const { return kKVTokens * head_dim; }
  int64_t value_scales_at() const { return half_elements() + kKVTokens * head_dim; }
};

struct KVPool {
  void* data;  // [L, P, G/16, K, 2, 16 * W] of the layout's type
  KVLayout layout;
};

// Whether the kernels take such a pool; otherwise the caller has to use another backend.
bool kv_supported(const KVLayout& layout, int64_t num_heads);

// Writes one token's key [H] and value [H] of one head. Values over the type's range become its largest, NaN too: the
// pool stays finite. int8: the largest of a row becomes 127. `page` is the page table's entry for `position`.
void append_kv(const KVPool& pool, int64_t layer, int64_t page, int64_t position, int64_t head, const float* key,
               const float* value);

// kv [L, 2, M, K, W] of the pool's type, of pool rows (page * G + offset) [M]; zeros where a row is out of range. Of
// int8, a row's last four elements are its scale. Bit for bit what the pool holds.
void gather_kv(const KVPool& pool, int64_t num_layers, const int32_t* rows, int64_t M, void* kv, ThreadPool& threads);

// The opposite; rows out of range are skipped.
void scatter_kv(const KVPool& pool, int64_t num_layers, const int32_t* rows, int64_t M, const void* kv,
                ThreadPool& threads);

}  // namespace twinjet
