// The packed int32 array of one step, as ops/batch.py (StepLayout) lays it out: keep the two alike.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace twinjet {

// Padding comes last in every part, so the first `num_...` entries are the real ones.
class StepView {
 public:
  static constexpr int64_t kNumCounts = 5;
  static constexpr int64_t kMaxTileRows = 128;

  struct Tile {
    int32_t slot, first_row, num_rows, first_position;
  };

  // T rows (the bucket's size), B slots, MP page table entries per slot.
  StepView(const int32_t* packed, int64_t T, int64_t B, int64_t MP) : T(T), B(B), MP(MP), counts_(packed) {
    S = std::min(T, B);
    const int64_t tile_rows = std::min(T, kMaxTileRows);
    max_tiles = T / tile_rows + std::min(T / 2, B);
    rows_ = counts_ + kNumCounts;
    samples_ = rows_ + 3 * T;
    singles_ = samples_ + 10 * S;
    tiles_ = singles_ + S;
    page_table_ = tiles_ + 4 * max_tiles;
    size = page_table_ + B * MP - packed;
  }

  int64_t num_samples() const { return counts_[0]; }
  int64_t num_singles() const { return counts_[1]; }
  int64_t num_tiles() const { return counts_[2]; }
  int64_t num_with_logprobs() const { return counts_[3]; }
  int32_t tag() const { return counts_[4]; }

  // Rows that are not padding: they come first.
  int64_t num_rows() const {
    int64_t n = num_singles();
    for (int64_t i = 0; i < num_tiles(); ++i) n += tile(i).num_rows;
    return n;
  }

  int32_t token_id(int64_t row) const { return rows_[row]; }  // -1: the slot's last token
  int32_t slot(int64_t row) const { return rows_[T + row]; }
  int32_t position(int64_t row) const { return rows_[2 * T + row]; }

  int32_t single_row(int64_t index) const { return singles_[index]; }
  Tile tile(int64_t index) const {
    const int32_t* at = tiles_ + 4 * index;
    return {at[0], at[1], at[2], at[3]};
  }
  // MP page numbers of one slot.
  const int32_t* pages(int64_t slot) const { return page_table_ + slot * MP; }

  int32_t sample_row(int64_t i) const { return samples_[i]; }
  int32_t sample_slot(int64_t i) const { return samples_[S + i]; }
  int32_t sample_position(int64_t i) const { return samples_[2 * S + i]; }  // of the token to be chosen
  float temperature(int64_t i) const { return as_float(samples_[3 * S + i]); }
  int32_t top_k(int64_t i) const { return samples_[4 * S + i]; }
  float top_p(int64_t i) const { return as_float(samples_[5 * S + i]); }
  float min_p(int64_t i) const { return as_float(samples_[6 * S + i]); }
  uint32_t seed_low(int64_t i) const { return static_cast<uint32_t>(samples_[7 * S + i]); }
  uint32_t seed_high(int64_t i) const { return static_cast<uint32_t>(samples_[8 * S + i]); }
  int32_t choice(int64_t i) const { return samples_[9 * S + i]; }

  int64_t T, B, MP;
  int64_t S;  // most samples, and most singles
  int64_t max_tiles;
  int64_t size;  // of the packed array

 private:
  static float as_float(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  const int32_t* counts_;
  const int32_t* rows_;
  const int32_t* samples_;
  const int32_t* singles_;
  const int32_t* tiles_;
  const int32_t* page_table_;
};

}  // namespace twinjet
