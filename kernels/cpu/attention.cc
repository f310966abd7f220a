#include "attention.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "attention_blocks.h"
#include "simd.h"

namespace twinjet {
namespace {

constexpr int64_t kSegment = 128;  // tokens that start from nothing: what one thread takes of a decoding row
constexpr int64_t kParts = kBlock / kKVTokens;
constexpr float kNegative = -1e30f;  // stands for minus infinity: it survives the subtraction of itself

// Query vectors (rows x heads of one KV head) that share a walk. Enough to pay for converting a block to float32, few
// enough for their sums to stay in the second-level cache with 256 dims.
constexpr int64_t kTileVectors = 48;

// Walks per thread under which tiles are cut into segments too.
constexpr int64_t kWalksPerThread = 4;

// Running maximum, sum of exponentials and weighted sum of values of some vectors, [V], [V], [V][H].
struct Sums {
  float* maximum;
  float* total;
  float* acc;

  void clear(int64_t V, int64_t H) const {
    std::fill_n(maximum, V, kNegative);
    std::fill_n(total, V, 0.0f);
    std::fill_n(acc, V * H, 0.0f);
  }
  Sums at(int64_t vector, int64_t H) const { return {maximum + vector, total + vector, acc + vector * H}; }
};

// Adds the sums of a later segment. Merging into nothing, or merging nothing, changes no bit but the sign of a zero.
void merge(const Sums& into, const Sums& segment, int64_t V, int64_t H) {
  for (int64_t v = 0; v < V; ++v) {
    const float maximum = std::max(into.maximum[v], segment.maximum[v]);
    const float keep = exp1(into.maximum[v] - maximum), add = exp1(segment.maximum[v] - maximum);
    into.maximum[v] = maximum;
    into.total[v] = __builtin_fmaf(segment.total[v], add, into.total[v] * keep);
    const __m256 keep8 = _mm256_set1_ps(keep), add8 = _mm256_set1_ps(add);
    for (int64_t h = v * H; h < (v + 1) * H; h += 8) {
      const __m256 kept = _mm256_mul_ps(_mm256_loadu_ps(into.acc + h), keep8);
      _mm256_storeu_ps(into.acc + h, _mm256_fmadd_ps(_mm256_loadu_ps(segment.acc + h), add8, kept));
    }
  }
}

// Rows of one sequence and the query heads of one KV head, which walk together.
struct Walk {
  const int32_t* pages;
  int64_t first_row, num_rows, first_position, head;
  int64_t first_segment, num_segments;
  Sums partials;       // of each segment, V vectors each; unused if the walk is not cut
  int32_t* remaining;  // segments not done; null: the walk is not cut
};

struct Item {
  const Walk* walk;
  int64_t first_segment, num_segments;
};

// One thread's memory.
struct Workspace {
  float* q;       // [V, H], scaled
  float* scores;  // [V, 64]; then what they weigh
  float* lanes;   // [V, 8], sums of exponentials of a segment
  float* shrink;  // [V]
  float* block;   // [16 * H], keys or values as float32
  Sums sums, segment;
};

Sums take_sums(Scratch& scratch, int64_t V, int64_t H) {
  return {scratch.take<float>(V), scratch.take<float>(V), scratch.take<float>(V * H)};
}

Workspace take_workspace(Scratch& scratch, int64_t V, int64_t H) {
  return {scratch.take<float>(V * H),         scratch.take<float>(V * kBlock), scratch.take<float>(V * 8),
          scratch.take<float>(V),             scratch.take<float>(kKVTokens * H), take_sums(scratch, V, H),
          take_sums(scratch, V, H)};
}

template <class T>
class Attention {
 public:
  Attention(const AttendShape& shape, const KVPool& pool, const float* q, float* out)
      : shape_(shape), layout_(pool.layout), data_(static_cast<const T*>(pool.data)), q_(q), out_(out),
        H_(pool.layout.head_dim), R_(shape.num_heads / pool.layout.num_heads) {}

  void run(const Item& item, const Workspace& work) const {
    const Walk& walk = *item.walk;
    const int64_t V = walk.num_rows * R_;
    load_queries(walk, work.q);
    if (walk.remaining == nullptr) {
      work.sums.clear(V, H_);
      for (int64_t s = 0; s < item.num_segments; ++s) {
        run_segment(walk, item.first_segment + s, work, work.segment);
        merge(work.sums, work.segment, V, H_);
      }
      finish(walk, work.sums);
      return;
    }
    for (int64_t s = 0; s < item.num_segments; ++s) {
      const int64_t segment = item.first_segment + s;
      run_segment(walk, segment, work, walk.partials.at((segment - walk.first_segment) * V, H_));
    }
    // Whoever is last merges them all.
    if (__atomic_sub_fetch(walk.remaining, item.num_segments, __ATOMIC_ACQ_REL) > 0) return;
    work.sums.clear(V, H_);
    for (int64_t s = 0; s < walk.num_segments; ++s) merge(work.sums, walk.partials.at(s * V, H_), V, H_);
    finish(walk, work.sums);
  }

 private:
  // Tokens have scales, which multiply their scores, and their weights, in place of their keys and values.
  static constexpr bool kScaled = std::is_same_v<T, int8_t>;

  const float* queries(const Walk& walk, int64_t row) const {
    return q_ + ((walk.first_row + row) * shape_.num_heads + walk.head * R_) * H_;
  }

  void load_queries(const Walk& walk, float* q) const {
    const __m256 scale = _mm256_set1_ps(shape_.scale);
    for (int64_t row = 0; row < walk.num_rows; ++row, q += R_ * H_) {
      const float* from = queries(walk, row);
      for (int64_t i = 0; i < R_ * H_; i += 8) _mm256_storeu_ps(q + i, _mm256_mul_ps(_mm256_loadu_ps(from + i), scale));
    }
  }

  void finish(const Walk& walk, const Sums& sums) const {
    for (int64_t row = 0; row < walk.num_rows; ++row) {
      float* to = out_ + (queries(walk, row) - q_);
      for (int64_t r = 0; r < R_; ++r) {
        const int64_t v = row * R_ + r;
        const __m256 total = _mm256_set1_ps(std::max(sums.total[v], 1e-30f));
        for (int64_t h = 0; h < H_; h += 8) {
          const __m256 mean = _mm256_div_ps(_mm256_loadu_ps(sums.acc + v * H_ + h), total);
          // A hidden token may have turned a negative zero positive: let every zero be positive.
          _mm256_storeu_ps(to + r * H_ + h, _mm256_add_ps(mean, _mm256_setzero_ps()));
        }
      }
    }
  }

  const T* kv_block(const Walk& walk, int64_t position) const {
    const int64_t page = walk.pages[position / layout_.page_size];
    return data_ + layout_.block_at(shape_.layer, page, position, walk.head);
  }

  // First position that a row sees.
  int64_t first_seen(int64_t position) const {
    return shape_.window > 0 ? std::max<int64_t>(position - shape_.window + 1, 0) : 0;
  }

  void run_segment(const Walk& walk, int64_t segment, const Workspace& work, const Sums& sums) const {
    const int64_t V = walk.num_rows * R_;
    const int64_t last_position = walk.first_position + walk.num_rows - 1;
    const int64_t begin = std::max(first_seen(walk.first_position), segment * kSegment) / kBlock;
    const int64_t end = std::min(last_position, (segment + 1) * kSegment - 1) / kBlock;
    sums.clear(V, H_);
    std::fill_n(work.lanes, V * 8, 0.0f);
    for (int64_t block = begin; block <= end; ++block) run_block(walk, block, work, sums);
    for (int64_t v = 0; v < V; ++v) sums.total[v] = sum8(_mm256_loadu_ps(work.lanes + v * 8));
  }

  void run_block(const Walk& walk, int64_t block, const Workspace& work, const Sums& sums) const {
    const int64_t V = walk.num_rows * R_;
    const int64_t origin = block * kBlock;
    const int64_t last_position = walk.first_position + walk.num_rows - 1;
    // Tokens of this block that any of the rows sees; nothing else is read into the sums.
    const int64_t begin = std::max<int64_t>(first_seen(walk.first_position) - origin, 0);
    const int64_t end = std::min(last_position - origin + 1, kBlock);
    const int64_t first_part = begin / kKVTokens, end_part = (end + kKVTokens - 1) / kKVTokens;
    const bool direct = V <= kMaxM;

    const T* parts[kParts];
    for (int64_t j = first_part; j < end_part; ++j) {
      parts[j] = kv_block(walk, origin + j * kKVTokens);
      float* scores = work.scores + j * kKVTokens;
      if (direct) {
        // The same part of the next block; close to the end, the last part.
        const int64_t next = std::min(origin + kBlock + j * kKVTokens, last_position);
        const char* ahead = reinterpret_cast<const char*>(kv_block(walk, next));
        score_vectors<true>(static_cast<int>(V), work.q, H_, parts[j], scores, ahead);
      } else {
        const float* keys = as_float(parts[j], work.block);
        for_groups(V, [&](int64_t v, int M) {
          score_vectors<false>(M, work.q + v * H_, H_, keys, scores + v * kBlock, nullptr);
        });
      }
      if constexpr (kScaled) scale_tokens(parts[j] + layout_.key_scales_at(), V, scores);
    }

    for (int64_t row = 0; row < walk.num_rows; ++row) {
      const int64_t position = walk.first_position + row;
      const int64_t seen_begin = std::max<int64_t>(first_seen(position) - origin, first_part * kKVTokens);
      const int64_t seen_end = std::min(position - origin + 1, end_part * kKVTokens);
      for (int64_t v = row * R_; v < (row + 1) * R_; ++v) {
        weigh_scores(work, v, sums.maximum + v, first_part * kKVTokens, end_part * kKVTokens, seen_begin, seen_end);
      }
    }
    for (int64_t v = 0; v < V; ++v) {
      const float shrink = work.shrink[v];
      if (shrink == 1.0f) continue;
      float* acc = sums.acc + v * H_;
      for (int64_t h = 0; h < H_; h += 8) {
        _mm256_storeu_ps(acc + h, _mm256_mul_ps(_mm256_loadu_ps(acc + h), _mm256_set1_ps(shrink)));
      }
    }

    for (int64_t j = first_part; j < end_part; ++j) {
      const T* from = parts[j] + layout_.value_at(0, 0);
      float* weights = work.scores + j * kKVTokens;
      if constexpr (kScaled) scale_tokens(parts[j] + layout_.value_scales_at(), V, weights);
      const int64_t t0 = std::max<int64_t>(begin - j * kKVTokens, 0), t1 = std::min(end - j * kKVTokens, kKVTokens);
      if (direct) {
        weigh_vectors(static_cast<int>(V), weights, t0, t1, from, H_, sums.acc);
        continue;
      }
      const float* values = as_float(from, work.block);
      for_groups(V, [&](int64_t v, int M) {
        weigh_vectors(M, weights + v * kBlock, t0, t1, values, H_, sums.acc + v * H_);
      });
    }
  }

  const float* as_float(const float* block, float*) const { return block; }
  template <class Stored>
  const float* as_float(const Stored* block, float* converted) const {
    convert(block, kKVTokens * H_, converted);
    return converted;
  }

  // Turns one vector's scores in [begin, end) into weights, of which those outside [seen_begin, seen_end) are zero.
  void weigh_scores(const Workspace& work, int64_t v, float* maximum, int64_t begin, int64_t end, int64_t seen_begin,
                    int64_t seen_end) const {
    float* scores = work.scores + v * kBlock;
    if (seen_begin >= seen_end) {
      std::fill(scores + begin, scores + end, 0.0f);
      work.shrink[v] = 1.0f;
      return;
    }
    const bool all_seen = seen_begin <= begin && seen_end >= end;
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i before = _mm256_set1_epi32(static_cast<int>(seen_begin) - 1);
    const __m256i after = _mm256_set1_epi32(static_cast<int>(seen_end));
    const auto seen = [&](int64_t t) {
      const __m256i at = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(t)));
      return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(at, before), _mm256_cmpgt_epi32(after, at)));
    };

    __m256 highest = _mm256_set1_ps(kNegative);
    for (int64_t t = begin; t < end; t += 8) {
      __m256 score = _mm256_loadu_ps(scores + t);
      if (shape_.soft_cap > 0.0f) score = capped(score);
      if (!all_seen) score = _mm256_blendv_ps(_mm256_set1_ps(kNegative), score, seen(t));
      _mm256_storeu_ps(scores + t, score);
      highest = _mm256_max_ps(highest, score);
    }
    const float before_max = *maximum, now = std::max(before_max, max8(highest));
    *maximum = now;
    const float shrink = before_max == now ? 1.0f : exp1(before_max - now);
    work.shrink[v] = shrink;

    __m256 total = _mm256_mul_ps(_mm256_loadu_ps(work.lanes + v * 8), _mm256_set1_ps(shrink));
    const __m256 now8 = _mm256_set1_ps(now);
    for (int64_t t = begin; t < end; t += 8) {
      __m256 weight = exp_nonpositive(_mm256_sub_ps(_mm256_loadu_ps(scores + t), now8));
      if (!all_seen) weight = _mm256_and_ps(weight, seen(t));
      _mm256_storeu_ps(scores + t, weight);
      total = _mm256_add_ps(total, weight);
    }
    _mm256_storeu_ps(work.lanes + v * 8, total);
  }

  // c tanh(x / c) = c - 2 c / (e**(2 x / c) + 1).
  __m256 capped(__m256 x) const {
    const __m256 cap = _mm256_set1_ps(shape_.soft_cap), one = _mm256_set1_ps(1.0f);
    const __m256 doubled = _mm256_div_ps(_mm256_add_ps(x, x), cap);
    const __m256 share = _mm256_div_ps(_mm256_set1_ps(2.0f), _mm256_add_ps(exp8(doubled), one));
    return _mm256_fnmadd_ps(cap, share, cap);
  }

  const AttendShape shape_;
  const KVLayout layout_;
  const T* const data_;
  const float* const q_;
  float* const out_;
  const int64_t H_, R_;
};

// Every row of the step in exactly one walk per KV head, and the walks cut into items, the longest first.
class Plan {
 public:
  Plan(const AttendShape& shape, const KVLayout& layout, const StepView& step, int num_threads, Scratch& scratch)
      : R_(shape.num_heads / layout.num_heads), H_(layout.head_dim), window_(shape.window), scratch_(scratch) {
    const int64_t tile_rows = std::max<int64_t>(kTileVectors / R_, 1);
    max_vectors = R_;
    int64_t num_tile_walks = 0, num_items_most = 0;
    for (int64_t i = 0; i < step.num_tiles(); ++i) {
      const int64_t walks = (step.tile(i).num_rows + tile_rows - 1) / tile_rows * layout.num_heads;
      num_tile_walks += walks;
      max_vectors = std::max(max_vectors, std::min<int64_t>(tile_rows, step.tile(i).num_rows) * R_);
    }
    const bool cut_tiles = num_tile_walks < kWalksPerThread * num_threads && num_threads > 1;
    const int64_t num_walks = num_tile_walks + step.num_singles() * layout.num_heads;
    walks_ = scratch.take<Walk>(num_walks);

    for (int64_t i = step.num_tiles() - 1; i >= 0; --i) {
      const StepView::Tile tile = step.tile(i);
      for (int64_t row = (tile.num_rows - 1) / tile_rows * tile_rows; row >= 0; row -= tile_rows) {
        const int64_t rows = std::min<int64_t>(tile_rows, tile.num_rows - row);
        num_items_most += add(step.pages(tile.slot), tile.first_row + row, rows, tile.first_position + row,
                              layout.num_heads, cut_tiles);
      }
    }
    for (int64_t i = 0; i < step.num_singles(); ++i) {
      const int64_t row = step.single_row(i);
      num_items_most += add(step.pages(step.slot(row)), row, 1, step.position(row), layout.num_heads, num_threads > 1);
    }

    items = scratch.take<Item>(num_items_most);
    for (int64_t i = 0; i < num_walks_; ++i) {
      const Walk& walk = walks_[i];
      const int64_t step_segments = walk.remaining == nullptr ? walk.num_segments : 1;
      for (int64_t s = 0; s < walk.num_segments; s += step_segments) {
        items[num_items++] = {&walk, walk.first_segment + s, step_segments};
      }
    }
  }

  Item* items = nullptr;
  int64_t num_items = 0;
  int64_t max_vectors;

 private:
  // Returns how many items it may become.
  int64_t add(const int32_t* pages, int64_t row, int64_t rows, int64_t position, int64_t num_heads, bool cut) {
    const int64_t first_seen = window_ > 0 ? std::max<int64_t>(position - window_ + 1, 0) : 0;
    const int64_t first = first_seen / kSegment, count = (position + rows - 1) / kSegment - first + 1;
    for (int64_t head = 0; head < num_heads; ++head) {
      Walk& walk = walks_[num_walks_++];
      walk = {pages, row, rows, position, head, first, count, {}, nullptr};
      if (cut && count > 1) {
        walk.partials = take_sums(scratch_, count * rows * R_, H_);
        walk.remaining = scratch_.take<int32_t>(1);
        *walk.remaining = static_cast<int32_t>(count);
      }
    }
    return count * num_heads;
  }

  const int64_t R_, H_, window_;
  Scratch& scratch_;
  Walk* walks_;
  int64_t num_walks_ = 0;
};

template <class T>
void attend_typed(const AttendShape& shape, const KVPool& pool, const StepView& step, const float* q, float* out,
                  ThreadPool& threads, Scratch& scratch) {
  const Plan plan(shape, pool.layout, step, threads.num_threads(), scratch);
  Workspace* work = scratch.take<Workspace>(threads.num_threads());
  for (int i = 0; i < threads.num_threads(); ++i) {
    work[i] = take_workspace(scratch, plan.max_vectors, pool.layout.head_dim);
  }
  const Attention<T> attention(shape, pool, q, out);
  threads.run(plan.num_items, [&](int64_t item, int thread) { attention.run(plan.items[item], work[thread]); });
}

}  // namespace

void attend(const AttendShape& shape, const KVPool& pool, const StepView& step, const float* q, float* out,
            ThreadPool& threads, Scratch& scratch) {
  const int64_t row_size = shape.num_heads * pool.layout.head_dim, num_rows = step.num_rows();
  std::memset(out + num_rows * row_size, 0, (step.T - num_rows) * row_size * sizeof(float));
  switch (pool.layout.type) {
    case KVType::kF16: return attend_typed<uint16_t>(shape, pool, step, q, out, threads, scratch);
    case KVType::kF32: return attend_typed<float>(shape, pool, step, q, out, threads, scratch);
    case KVType::kI8: return attend_typed<int8_t>(shape, pool, step, q, out, threads, scratch);
  }
}

}  // namespace twinjet
