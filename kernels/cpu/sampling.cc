#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "simd.h"

namespace twinjet {
namespace {

constexpr int64_t kStride = 256;              // logits summed together, and the grain of a draw
constexpr int64_t kPartStrides = 32;          // strides that a thread takes at a time
constexpr int64_t kPart = kPartStrides * kStride;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Key {
  uint32_t a, b;
};

// Threefry-2x32 with 20 rounds: the counter enciphered under the key.
Key threefry(Key key, Key counter) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key.a, key.b, key.a ^ key.b ^ 0x1BD11BDA};
  uint32_t x = counter.a + keys[0], y = counter.b + keys[1];
  for (uint32_t group = 0; group < 5; ++group) {
    for (int r : kRotations[group % 2]) {
      x += y;
      y = (y << r) | (y >> (32 - r));
      y ^= x;
    }
    x += keys[(group + 1) % 3];
    y += keys[(group + 2) % 3] + group + 1;
  }
  return {x, y};
}

float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

int32_t as_bits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Orders like the number; both zeros alike.
uint32_t ordered(float value) {
  const uint32_t bits = static_cast<uint32_t>(as_bits(value + 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// One sample's logits and how to choose among them.
struct Row {
  const float* logits;  // [V]
  int64_t V;
  float temperature, top_p, min_p;
  int32_t top_k;  // 0: off
  float highest;  // of all logits

  bool draws() const { return temperature > 0.0f; }
  bool filters() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
  // Whether the sum over the whole vocabulary is needed to draw.
  bool needs_sums() const { return draws() && top_k == 0 && (top_p < 1.0f || !filters()); }
};

// Eight logits from `at` on; minus infinity past the end.
TWINJET_INLINE __m256 logits8(const float* logits, int64_t at, int64_t V) {
  if (at + 8 <= V) return _mm256_loadu_ps(logits + at);
  alignas(32) float tail[8];
  for (int64_t i = 0; i < 8; ++i) tail[i] = at + i < V ? logits[at + i] : kNothing;
  return _mm256_load_ps(tail);
}

// Shares of the distribution, of which the most likely has 1.
TWINJET_INLINE __m256 weight8(__m256 logits, __m256 highest, __m256 temperature) {
  return exp8(_mm256_div_ps(_mm256_sub_ps(logits, highest), temperature));
}

float find_peaks(const float* logits, int64_t begin, int64_t V, float* peaks) {
  float highest = kNothing;
  for (int64_t at = begin; at < std::min(V, begin + kPart); at += kStride) {
    __m256 peak = _mm256_set1_ps(kNothing);
    for (int64_t i = at; i < std::min(V, at + kStride); i += 8) peak = _mm256_max_ps(peak, logits8(logits, i, V));
    const float most = max8(peak);
    *peaks++ = most;
    highest = std::max(highest, most);
  }
  return highest;
}

void sum_strides(const float* logits, int64_t begin, int64_t V, float highest, float temperature, const float* peaks,
                 float* sums) {
  const __m256 highest8 = _mm256_set1_ps(highest), temperature8 = _mm256_set1_ps(temperature);
  for (int64_t at = begin; at < std::min(V, begin + kPart); at += kStride, ++peaks, ++sums) {
    // e**-88 is no normal number, so the whole stride adds nothing.
    if ((*peaks - highest) / temperature < -88.0f) {
      *sums = 0.0f;
      continue;
    }
    __m256 sum = _mm256_setzero_ps();
    for (int64_t i = at; i < std::min(V, at + kStride); i += 8) {
      sum = _mm256_add_ps(sum, weight8(logits8(logits, i, V), highest8, temperature8));
    }
    *sums = sum8(sum);
  }
}

// First index with the highest logit.
int32_t first_of(const Row& row, const float* peaks) {
  for (int64_t at = 0; at < row.V; at += kStride, ++peaks) {
    if (*peaks != row.highest) continue;
    for (int64_t i = at; i < std::min(row.V, at + kStride); ++i) {
      if (row.logits[i] == row.highest) return static_cast<int32_t>(i);
    }
  }
  return 0;  // only where no number is the highest: all are NaN
}

// Tokens that may survive the filters, in order of index.
struct Candidates {
  int32_t* index;
  float* logit;
  float* weight;
  int64_t count;
};

// One thread's memory.
struct Workspace {
  Candidates candidates;  // V entries
  uint32_t* keys;         // [V]
  float* amounts;         // [V]
  double* buckets;        // [kBuckets]
};

constexpr int kDigits[] = {11, 11, 10};  // bits of a key, from the top
constexpr int64_t kBuckets = 1 << 11;

// The highest key for which the amounts of all entries at or over it reach `enough`; 0 if all together do not.
// Radix select: keys [n] and amounts [n] are consumed.
uint32_t threshold(uint32_t* keys, float* amounts, int64_t n, double enough, double* buckets) {
  double over = 0.0;
  uint32_t prefix = 0;
  int shift = 32;
  for (int digits : kDigits) {
    shift -= digits;
    const uint32_t mask = (1u << digits) - 1;
    std::fill_n(buckets, mask + 1, 0.0);
    for (int64_t i = 0; i < n; ++i) buckets[(keys[i] >> shift) & mask] += amounts[i];
    int64_t bucket = mask;
    for (; bucket >= 0; --bucket) {
      if (buckets[bucket] > 0.0 && over + buckets[bucket] >= enough) break;
      over += buckets[bucket];
    }
    if (bucket < 0) return 0;
    prefix |= static_cast<uint32_t>(bucket) << shift;
    if (shift == 0) break;
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (((keys[i] >> shift) & mask) != static_cast<uint32_t>(bucket)) continue;
      keys[kept] = keys[i];
      amounts[kept++] = amounts[i];
    }
    n = kept;
  }
  return prefix;
}

// Entries with a logit of at least `lowest` and a weight of at least `least`.
void collect(const Row& row, const float* peaks, float lowest, float least, Candidates& found) {
  const __m256 highest8 = _mm256_set1_ps(row.highest), temperature8 = _mm256_set1_ps(row.temperature);
  const __m256 lowest8 = _mm256_set1_ps(lowest), least8 = _mm256_set1_ps(least);
  // A stride's peak has its largest weight but for an error of exp8.
  const float surely_less = least * 0.999f;
  found.count = 0;
  for (int64_t at = 0; at < row.V; at += kStride, ++peaks) {
    if (!(*peaks >= lowest)) continue;
    const float most = _mm256_cvtss_f32(weight8(_mm256_set1_ps(*peaks), highest8, temperature8));
    if (most < surely_less) continue;
    for (int64_t i = at; i < std::min(row.V, at + kStride); i += 8) {
      const __m256 logits = logits8(row.logits, i, row.V);
      const __m256 high = _mm256_cmp_ps(logits, lowest8, _CMP_GE_OQ);
      if (_mm256_movemask_ps(high) == 0) continue;
      const __m256 weights = weight8(logits, highest8, temperature8);
      unsigned hits = _mm256_movemask_ps(_mm256_and_ps(high, _mm256_cmp_ps(weights, least8, _CMP_GE_OQ)));
      if (i + 8 > row.V) hits &= (1u << (row.V - i)) - 1;
      if (hits == 0) continue;
      alignas(32) float logit[8], weight[8];
      _mm256_store_ps(logit, logits);
      _mm256_store_ps(weight, weights);
      for (; hits != 0; hits &= hits - 1) {
        const int lane = __builtin_ctz(hits);
        found.index[found.count] = static_cast<int32_t>(i + lane);
        found.logit[found.count] = logit[lane];
        found.weight[found.count++] = weight[lane];
      }
    }
  }
}

void keep(Candidates& from, uint32_t lowest_key, float least_weight) {
  int64_t kept = 0;
  for (int64_t i = 0; i < from.count; ++i) {
    if (ordered(from.logit[i]) < lowest_key || from.weight[i] < least_weight) continue;
    from.index[kept] = from.index[i];
    from.logit[kept] = from.logit[i];
    from.weight[kept++] = from.weight[i];
  }
  from.count = kept;
}

double sum(const float* values, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += values[i];
  return total;
}

// First of n weights at which their running sum, from `base` on, exceeds `target`, and which is not zero; the last that is
// not zero where rounding leaves none; -1 if all are zero.
int64_t invert(const float* weights, int64_t n, double base, double target) {
  int64_t last = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (!(weights[i] > 0.0f)) continue;
    last = i;
    base += weights[i];
    if (base > target) break;
  }
  return last;
}

int64_t num_strides(int64_t V) { return (V + kStride - 1) / kStride; }

// sums [strides]: weights of the whole vocabulary.
int32_t draw_any(const Row& row, const float* sums, double u, int32_t otherwise) {
  const int64_t strides = num_strides(row.V);
  const double target = u * sum(sums, strides);
  const int64_t stride = invert(sums, strides, 0.0, target);
  if (stride < 0) return otherwise;
  const double base = sum(sums, stride);
  alignas(32) float weights[kStride];
  const __m256 highest8 = _mm256_set1_ps(row.highest), temperature8 = _mm256_set1_ps(row.temperature);
  const int64_t at = stride * kStride, size = std::min(kStride, row.V - at);
  for (int64_t i = 0; i < size; i += 8) {
    _mm256_store_ps(weights + i, weight8(logits8(row.logits, at + i, row.V), highest8, temperature8));
  }
  const int64_t within = invert(weights, size, base, target);
  return within < 0 ? otherwise : static_cast<int32_t>(at + within);
}

// The k-th largest of `n` peaks is at most the k-th largest of all logits.
float bound_of(const float* peaks, int64_t n, int64_t k, const Workspace& work) {
  if (k > n) return kNothing;
  for (int64_t i = 0; i < n; ++i) work.keys[i] = ordered(peaks[i]);
  std::fill_n(work.amounts, n, 1.0f);
  const uint32_t key = threshold(work.keys, work.amounts, n, static_cast<double>(k), work.buckets);
  return as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// sums [strides] if row.needs_sums().
int32_t draw_filtered(const Row& row, const float* peaks, const float* sums, double u, Workspace& work,
                      int32_t otherwise) {
  const int64_t strides = num_strides(row.V);
  Candidates& found = work.candidates;
  double total = 0.0;  // of what top-p shares out
  if (row.top_k > 0) {
    collect(row, peaks, bound_of(peaks, strides, row.top_k, work), 0.0f, found);
    for (int64_t i = 0; i < found.count; ++i) work.keys[i] = ordered(found.logit[i]);
    std::fill_n(work.amounts, found.count, 1.0f);
    keep(found, threshold(work.keys, work.amounts, found.count, row.top_k, work.buckets), 0.0f);
    total = sum(found.weight, found.count);
  } else if (row.top_p < 1.0f) {
    total = sum(sums, strides);
    // All that is lighter than this weighs less than what top-p leaves out; half of it, for rounding.
    const double lightest = 0.5 * (1.0 - static_cast<double>(row.top_p)) * total / static_cast<double>(row.V);
    collect(row, peaks, kNothing, static_cast<float>(lightest), found);
  } else {
    collect(row, peaks, kNothing, row.min_p, found);
  }
  if (row.top_p < 1.0f) {
    for (int64_t i = 0; i < found.count; ++i) work.keys[i] = ordered(found.logit[i]);
    std::copy_n(found.weight, found.count, work.amounts);
    const double mass = static_cast<double>(row.top_p) * total;
    keep(found, threshold(work.keys, work.amounts, found.count, mass, work.buckets), 0.0f);
  }
  if (row.min_p > 0.0f) keep(found, 0, row.min_p);
  const int64_t chosen = invert(found.weight, found.count, 0.0, u * sum(found.weight, found.count));
  return chosen < 0 ? otherwise : found.index[chosen];
}

// The n largest logits, of equal ones the first, in descending order.
void find_top(const Row& row, const float* peaks, int64_t n, int32_t* ids, float* logits) {
  int64_t count = 0;
  for (int64_t at = 0; at < row.V; at += kStride, ++peaks) {
    if (count == n && !(*peaks > logits[n - 1])) continue;
    for (int64_t i = at; i < std::min(row.V, at + kStride); i += 8) {
      unsigned hits = 0xFF;
      if (count == n) {
        const __m256 least = _mm256_set1_ps(logits[n - 1]);
        hits = _mm256_movemask_ps(_mm256_cmp_ps(logits8(row.logits, i, row.V), least, _CMP_GT_OQ));
      }
      if (i + 8 > row.V) hits &= (1u << (row.V - i)) - 1;
      for (; hits != 0; hits &= hits - 1) {
        const int32_t index = static_cast<int32_t>(i + __builtin_ctz(hits));
        const float logit = row.logits[index];
        if (count == n && !(logit > logits[n - 1])) continue;
        int64_t to = count < n ? count++ : n - 1;
        for (; to > 0 && logit > logits[to - 1]; --to) {
          logits[to] = logits[to - 1];
          ids[to] = ids[to - 1];
        }
        logits[to] = logit;
        ids[to] = index;
      }
    }
  }
}

void write_logprobs(const Row& row, const float* peaks, const float* sums, int64_t n, int32_t* result) {
  const double log_total = std::log(sum(sums, num_strides(row.V)));
  const auto logprob = [&](float logit) {
    return as_bits(static_cast<float>(static_cast<double>(logit) - row.highest - log_total));
  };
  result[1] = logprob(row.logits[result[0]]);
  float logits[kMaxLogprobs];
  find_top(row, peaks, n, result + 2, logits);
  for (int64_t i = 0; i < n; ++i) result[2 + n + i] = logprob(logits[i]);
}

}  // namespace

float draw_uniform(uint32_t seed_high, uint32_t seed_low, uint32_t choice, uint32_t position) {
  const Key key = threefry(threefry({seed_high, seed_low}, {0, choice}), {0, position});
  const Key bits = threefry(key, {0, 0});
  return as_float(((bits.a ^ bits.b) >> 9) | 0x3F800000u) - 1.0f;
}

void sample(const StepView& step, const float* logits, int64_t V, int64_t n, int32_t* result, ThreadPool& threads,
            Scratch& scratch) {
  const int64_t count = step.num_samples(), width = 2 + 2 * n;
  const int64_t strides = num_strides(V), parts = (V + kPart - 1) / kPart;
  const bool with_logprobs = step.num_with_logprobs() > 0;
  std::memset(result, 0, step.S * width * sizeof(int32_t));

  Row* rows = scratch.take<Row>(count);
  float* peaks = scratch.take<float>(count * strides);
  float* part_peaks = scratch.take<float>(count * parts);
  bool any_sums = with_logprobs, any_filter = false;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t top_k = step.top_k(i);
    rows[i] = {logits + i * V, V, step.temperature(i), step.top_p(i), step.min_p(i), top_k < V ? top_k : 0, kNothing};
    any_sums |= rows[i].needs_sums();
    any_filter |= rows[i].draws() && rows[i].filters();
  }
  threads.run(count * parts, [&](int64_t task, int) {
    const int64_t i = task / parts, part = task % parts;
    part_peaks[task] = find_peaks(rows[i].logits, part * kPart, V, peaks + i * strides + part * kPartStrides);
  });
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t part = 0; part < parts; ++part) {
      rows[i].highest = std::max(rows[i].highest, part_peaks[i * parts + part]);
    }
  }

  float* sums = any_sums ? scratch.take<float>(count * strides) : nullptr;            // at the row's temperature
  float* plain_sums = with_logprobs ? scratch.take<float>(count * strides) : nullptr;  // at 1
  if (any_sums) {
    threads.run(count * parts, [&](int64_t task, int) {
      const Row& row = rows[task / parts];
      const int64_t begin = task % parts * kPart, at = task / parts * strides + task % parts * kPartStrides;
      if (row.needs_sums()) {
        sum_strides(row.logits, begin, V, row.highest, row.temperature, peaks + at, sums + at);
      }
      if (with_logprobs) sum_strides(row.logits, begin, V, row.highest, 1.0f, peaks + at, plain_sums + at);
    });
  }

  Workspace* work = scratch.take<Workspace>(threads.num_threads());
  for (int thread = 0; any_filter && thread < threads.num_threads(); ++thread) {
    work[thread] = {{scratch.take<int32_t>(V), scratch.take<float>(V), scratch.take<float>(V), 0},
                    scratch.take<uint32_t>(V), scratch.take<float>(V), scratch.take<double>(kBuckets)};
  }
  threads.run(count, [&](int64_t i, int thread) {
    const Row& row = rows[i];
    const float* row_peaks = peaks + i * strides;
    const float* row_sums = sums + i * strides;
    int32_t token = first_of(row, row_peaks);
    if (row.draws()) {
      const double u = draw_uniform(step.seed_high(i), step.seed_low(i), static_cast<uint32_t>(step.choice(i)),
                                    static_cast<uint32_t>(step.sample_position(i)));
      token = row.filters() ? draw_filtered(row, row_peaks, row_sums, u, work[thread], token)
                            : draw_any(row, row_sums, u, token);
    }
    result[i * width] = token;
    if (with_logprobs) write_logprobs(row, row_peaks, plain_sums + i * strides, n, result + i * width);
  });
}

}  // namespace twinjet
