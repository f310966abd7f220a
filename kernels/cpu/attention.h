// Ragged paged attention.
//
// The sum of a row over its tokens is a function of the row alone. Tokens are walked in blocks of 64 and segments of 128,
// both counted from position 0; a segment starts from nothing, and segments are merged in ascending order. What a mask
// hides contributes exactly nothing. So rows may be grouped, and segments spread over threads, in any way.
#pragma once

#include <cstdint>

#include "batch.h"
#include "kv.h"
#include "threads.h"

namespace twinjet {

struct AttendShape {
  int64_t num_heads;  // N, a multiple of the layout's K
  int64_t layer;
  int64_t window;  // a row at position p sees (p - window, p]; 0: [0, p]
  float scale;     // multiplies the dot products
  float soft_cap;  // then c * tanh(score / c); 0: none
};

// out [T, N, H] of q [T, N, H], rows and pages from `step`. Padding rows of `out` become zeros.
void attend(const AttendShape& shape, const KVPool& pool, const StepView& step, const float* q, float* out,
            ThreadPool& threads, Scratch& scratch);

}  // namespace twinjet
