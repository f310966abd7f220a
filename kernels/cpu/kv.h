// Where keys and values lie in the pool: one array [L, P, G/16, K, 2, 16 * H] of float16 or float32.
//
// The unit is a block of 16 tokens of one KV head: keys as [H][16 tokens], so that a dot product with a query needs no
// horizontal sums, then values as [16 tokens][H]. The pool never holds anything but finite numbers.
#pragma once

#include <cstdint>

namespace twinjet {

constexpr int64_t kKVTokens = 16;  // a page holds a whole number of these

struct KVLayout {
  int64_t num_pages;   // P
  int64_t page_size;   // G, a multiple of 16
  int64_t num_heads;   // K
  int64_t head_dim;    // H

  int64_t block_elements() const { return 2 * kKVTokens * head_dim; }
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
  int64_t value_at(int64_t token, int64_t dim) const { return kKVTokens * head_dim + token * head_dim + dim; }
};

}  // namespace twinjet
