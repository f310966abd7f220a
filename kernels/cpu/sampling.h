// Choosing tokens from logits: greedy, or by inverting the cumulative distribution at a number that belongs to (seed,
// choice, position). Nothing sorts the vocabulary.
//
// What a row gets is a function of the row alone: sums are taken over strides of 256 logits, counted from 0, and then over
// strides, in double precision.
#pragma once

#include <cstdint>

#include "batch.h"
#include "threads.h"

namespace twinjet {

constexpr int64_t kMaxLogprobs = 64;  // most alternatives per token

// result [S, 2 + 2 n]: token, bits of its log-probability, n most likely ids, bits of their log-probabilities (natural, before
// temperature and filters; zeros unless some row of the step asked). Rows that are not samples become zeros.
// logits [S, V], row i those of sample i; n <= V and n <= kMaxLogprobs.
void sample(const StepView& step, const float* logits, int64_t V, int64_t n, int32_t* result, ThreadPool& threads,
            Scratch& scratch);

// In [0, 1): the number that jax.random.uniform gives for the key `seed` with choice and position folded in, by Threefry
// (Salmon et al., 2011: "Parallel random numbers: as easy as 1, 2, 3").
float draw_uniform(uint32_t seed_high, uint32_t seed_low, uint32_t choice, uint32_t position);

}  // namespace twinjet
