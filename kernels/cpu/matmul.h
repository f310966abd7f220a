// Products of a few or many rows with a packed matrix.
//
// A row's result is an exact integer dot product for each group of 32 inputs, then one chain of float32 fused
// multiply-adds over the groups in order. Nothing in it depends on the other rows, on tiles or on threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "microkernels.h"
#include "simd.h"
#include "threads.h"
#include "weights.h"

namespace twinjet {

// Rows cut into the fewest tiles of up to kTileRows, as even as possible.
struct TilePlan {
  explicit TilePlan(int64_t num_rows) : num_rows(num_rows) {
    num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    small = num_tiles ? num_rows / num_tiles : 0;
    num_large = num_tiles ? num_rows % num_tiles : 0;
  }
  int64_t first_row(int64_t tile) const { return tile * small + std::min(tile, num_large); }
  int64_t rows(int64_t tile) const { return small + (tile < num_large); }
  int64_t tile_of(int64_t row) const {
    const int64_t in_large = num_large * (small + 1);
    return row < in_large ? row / (small + 1) : num_large + (row - in_large) / small;
  }

  int64_t num_rows, num_tiles, small, num_large;
};

// Rows as kernels read them: within a tile of R rows [group][R][32], and for integers [group][R] pairs of the scale
// and scale * sum of the group.
class Activations {
 public:
  // `num_inputs` as in the matrix; memory from the scope's scratch. Holds the kinds that `matrix` needs.
  Activations(const KernelScope& scope, const Matrix& matrix, int64_t num_rows);

  // Sets one group of the r-th row of a tile from 32 floats (zeros past the last input).
  void set_group(int64_t tile, int64_t r, int64_t group, const float* values) const;
  // Sets a row from its inputs.
  void set_row(int64_t row, const float* values) const;

  const TilePlan plan;
  const int64_t num_inputs;
  const int64_t num_groups;
  // Where a tile's rows are; null where the matrix does not need the kind.
  TileInputs tile(int64_t tile) const {
    const int64_t at = plan.first_row(tile) * num_groups;
    return {at_group(wide_, at, kGroup),     at_group(wide_scales_, at, 2), at_group(integers_, at, kGroup),
            at_group(scales_, at, 2), at_group(offsets_, at, 4),     at_group(floats_, at, kGroup)};
  }

 private:
  template <class T>
  static const T* at_group(const T* first, int64_t group, int64_t size) {
    return first == nullptr ? nullptr : first + group * size;
  }

  int16_t* wide_ = nullptr;
  float* wide_scales_ = nullptr;
  int8_t* integers_ = nullptr;
  float* scales_ = nullptr;
  int32_t* offsets_ = nullptr;
  float* floats_ = nullptr;
};

// out [num_panels, R, 16] = one tile times up to kTilePanels panels.
void multiply_tile(const Activations& acts, int64_t tile, const Segment& segment, int64_t panel, int64_t num_panels,
                   float* out);

// Rows whose activations stay in the second-level cache while panels go by.
constexpr int64_t kBlockTiles = 22;

// Work of about this many multiply-adds is worth claiming on its own.
constexpr int64_t kTaskProducts = 64 * 1024;

// Bytes behind a matrix that are fetched while threads wait for the next one; they share a cache with activations.
constexpr int64_t kReadAhead = 256 * 1024;

// Weights that so few tiles use come from memory, whose reading ahead follows one panel at a time nearly twice as fast as
// two (Zen 4, 19 GB/s against 11).
constexpr int64_t kStreamedTiles = 4;

inline bool is_streamed(int64_t num_tiles) { return num_tiles <= kStreamedTiles; }

// How many of `count` things of so many bytes of such weights are claimed at once: long pieces, as memory likes best.
inline int64_t streamed_grain(const KernelScope& scope, int64_t count, int64_t bytes) {
  constexpr int64_t kMostBytes = 1 << 20;
  const int64_t threads = scope.pool().num_threads();
  return std::max<int64_t>(1, std::min((count + threads - 1) / threads, kMostBytes / bytes));
}

// As multiply_tile. `from_memory`: nobody has read these weights just now.
inline void multiply_panels(const Activations& acts, int64_t tile, const Segment& segment, int64_t panel,
                            int64_t num_panels, bool from_memory, float* out) {
  const int64_t together = from_memory ? 1 : num_panels;
  for (int64_t i = 0; i < num_panels; i += together) {
    multiply_tile(acts, tile, segment, panel + i, together, out + i * acts.plan.rows(tile) * kPanel);
  }
}

// Times all panels of a matrix: done(column, num_columns, first_row, num_rows, tile [num_rows, 16]), once for every
// panel and tile, from any thread.
template <class Done>
void multiply(const KernelScope& scope, const Matrix& matrix, const Activations& acts, Done&& done) {
  int64_t num_panels = 0;
  for (int64_t i = 0; i < matrix.num_segments; ++i) num_panels += matrix.segments[i].num_panels();
  const int64_t num_tiles = acts.plan.num_tiles;
  if (num_tiles == 0) return;
  const int64_t num_blocks = (num_tiles + kBlockTiles - 1) / kBlockTiles;
  const int64_t block_tiles = (num_tiles + num_blocks - 1) / num_blocks;
  const int64_t rows = std::min(acts.plan.num_rows, block_tiles * kTileRows);
  const int64_t panel_products = kPanel * matrix.num_inputs * std::max<int64_t>(1, rows / 2);
  const bool streamed = is_streamed(num_tiles);
  const int64_t even = (num_panels + 4 * scope.pool().num_threads() - 1) / (4 * scope.pool().num_threads());
  const int64_t most = streamed ? streamed_grain(scope, num_panels, matrix.segments[0].panel_bytes())
                                : std::max<int64_t>(1, std::min(even, kTaskProducts / panel_products));
  const int64_t grain = most > kTilePanels ? most / kTilePanels * kTilePanels : most;
  const int64_t chunks = (num_panels + grain - 1) / grain;
  scope.pool().run(num_blocks * chunks, [&](int64_t task, int) {
    const int64_t block = task / chunks;
    const int64_t first_tile = block * block_tiles, last_tile = std::min(num_tiles, first_tile + block_tiles);
    const int64_t first_panel = task % chunks * grain, last_panel = std::min(num_panels, first_panel + grain);
    alignas(64) float out[kTilePanels * kTileRows * kPanel];
    int64_t segment_index = 0, passed = 0;
    for (int64_t panel = first_panel, count; panel < last_panel; panel += count) {
      while (panel - passed >= matrix.segments[segment_index].num_panels()) {
        passed += matrix.segments[segment_index++].num_panels();
      }
      const Segment& segment = matrix.segments[segment_index];
      const int64_t first = panel - passed;
      count = std::min({kTilePanels, last_panel - panel, segment.num_panels() - first});
      for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        const int64_t num_rows = acts.plan.rows(tile);
        multiply_panels(acts, tile, segment, first, count, streamed && tile == first_tile, out);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t column = (first + i) * kPanel;
          const int64_t num_columns = std::min(kPanel, segment.num_columns - column);
          done(segment.first_column + column, num_columns, acts.plan.first_row(tile), num_rows,
               out + i * num_rows * kPanel);
        }
      }
    }
  });
  scope.pool().read_ahead(matrix.next, std::min(kReadAhead, matrix.next_bytes));
}

}  // namespace twinjet

// What products use: the best that this processor has (`Instructions`).
extern "C" __attribute__((visibility("default"))) int64_t twinjet_instructions();

// Makes products use these instructions (`Instructions`) from now on; 0: this processor lacks them. The results are the
// same bits, so this is for those who compare them, or their speed.
extern "C" __attribute__((visibility("default"))) int twinjet_use_instructions(int64_t instructions);
