// Ragged paged attention, and moving rows of keys and values in and out of the paged pool.
//
// The sum of a row over its tokens is a function of the row alone. Tokens are walked in blocks of 64 and segments of 256,
// both counted from position 0; a segment starts from nothing, and segments are merged in ascending order. What a mask
// hides contributes exactly nothing. So rows may be grouped, and segments spread over threads, in any way.
#pragma once

#include <cstdint>

#include "batch.h"
#include "kv.h"
#include "threads.h"

namespace twinjet {

enum class KVType { kF16, kF32 };

struct KVPool {
  void* data;  // [L, P, G/16, K, 2, 16 * H] of `type`
  KVType type;
  KVLayout layout;
};

struct AttendShape {
  int64_t num_heads;  // N, a multiple of the layout's K
  int64_t layer;
  int64_t window;  // a row at position p sees (p - window, p]; 0: [0, p]
  float scale;     // multiplies the dot products
  float soft_cap;  // then c * tanh(score / c); 0: none
};

// Whether the kernels take such a pool; otherwise the caller has to use another backend.
bool kv_supported(const KVLayout& layout, int64_t num_heads);

// out [T, N, H] of q [T, N, H], rows and pages from `step`. Padding rows of `out` become zeros.
void attend(const AttendShape& shape, const KVPool& pool, const StepView& step, const float* q, float* out,
            ThreadPool& threads, Scratch& scratch);

// Writes one token's key [H] and value [H] of one head. Values over a float16's range become its largest, NaN too: the
// pool stays finite. `page` is the page table's entry for `position`.
void append_kv(const KVPool& pool, int64_t layer, int64_t page, int64_t position, int64_t head, const float* key,
               const float* value);

// kv [L, 2, M, K, H] of the pool's type, of pool rows (page * G + offset) [M]; zeros where a row is out of range.
void gather_kv(const KVPool& pool, int64_t num_layers, const int32_t* rows, int64_t M, void* kv, ThreadPool& threads);

// The opposite; rows out of range are skipped.
void scatter_kv(const KVPool& pool, int64_t num_layers, const int32_t* rows, int64_t M, const void* kv,
                ThreadPool& threads);

}  // namespace twinjet
