// Packed weight matrices: panels of 16 output columns, group after group of 32 inputs. Every GGUF type maps to one of
// these formats with its own integers, scales and minima, so no weight changes.
//
// One group of one panel, in bytes:
//   4-bit   [4 steps][2 halves][32]: a half is 8 columns x 4 inputs; low nibbles hold inputs 4 s.., high ones 16 + 4 s..
//   5-bit   the low four bits as above, then [2 halves][32] of fifth bits: bit s of a byte belongs to inputs 4 s..
//   6-bit   the low four bits, then [2][2 halves][32] of upper pairs: bits 2 s.. of a byte to inputs 4 s.., 16 + 4 s..
//   8-bit   [8 steps][2 halves][32], signed; for 16-bit inputs [16 pairs][16 columns][2 inputs]
//   floats  [32 inputs][16 columns]
// then [16] float16 scales and, in formats with a minimum, [16] minima. A weight is scale * integer + minimum.
//
// K-quants scale twice: eight groups follow [16] float16 super-scales (and as many for minima), and a group ends with
// [16] 8-bit scales and minima (4 and 5 bits: unsigned), or scales of inputs 0-15 and of 16-31 (6 bits: signed). The
// product of the two is exact in float32.
#pragma once

#include <cstdint>

namespace twinjet {

constexpr int64_t kPanel = 16;   // output columns
constexpr int64_t kGroup = 32;   // inputs

// The numbers are part of the packed layout; ops/cpu_weights.py has them too.
enum class Format : int64_t {
  kF32 = 0,
  kF16 = 1,
  kBF16 = 2,
  kQ4 = 3,      // unsigned 4-bit less 8, float16 scale: Q4_0
  kQ4M = 4,     // unsigned 4-bit, float16 scale and minimum: Q4_1
  kQ4K = 5,     // unsigned 4-bit, scaled twice: Q4_K
  kQ5 = 6,      // unsigned 5-bit less 16, float16 scale: Q5_0
  kQ5M = 7,     // unsigned 5-bit, float16 scale and minimum: Q5_1
  kQ5K = 8,     // unsigned 5-bit, scaled twice: Q5_K
  kQ6K = 9,     // unsigned 6-bit less 32, scaled twice, for each 16 inputs: Q6_K
  kQ8 = 10,     // signed 8-bit, float16 scale: Q8_0
  kQ8Wide = 11,  // the same, for inputs of 16 bits
};
constexpr int64_t kNumFormats = 12;

constexpr int64_t kSuperGroups = 8;  // groups under one super-scale

constexpr bool has_fifth_bit(Format format) {
  return format == Format::kQ5 || format == Format::kQ5M || format == Format::kQ5K;
}
constexpr bool has_minimum(Format format) {
  return format != Format::kQ8 && format != Format::kQ8Wide && format != Format::kQ6K;
}

// Super-scales before every kSuperGroups groups; 0: the format has none.
constexpr int64_t super_bytes(Format format) {
  switch (format) {
    case Format::kQ4K: return 64;
    case Format::kQ5K: return 64;
    case Format::kQ6K: return 32;
    default: return 0;
  }
}

constexpr bool scaled_twice(Format format) { return super_bytes(format) > 0; }

// Where a group's scales begin.
constexpr int64_t scales_at(Format format) {
  switch (format) {
    case Format::kF32: return 32 * 16 * 4;
    case Format::kF16: return 32 * 16 * 2;
    case Format::kBF16: return 32 * 16 * 2;
    case Format::kQ4: return 256;
    case Format::kQ4M: return 256;
    case Format::kQ4K: return 256;
    case Format::kQ5: return 256 + 64;
    case Format::kQ5M: return 256 + 64;
    case Format::kQ5K: return 256 + 64;
    case Format::kQ6K: return 256 + 128;
    case Format::kQ8: return 512;
    case Format::kQ8Wide: return 512;
  }
  return 0;
}

constexpr int64_t group_bytes(Format format) {
  if (format <= Format::kBF16) return scales_at(format);
  const bool two_halves = format == Format::kQ4M || format == Format::kQ5M;
  return scales_at(format) + (two_halves ? 64 : 32);
}

// Bytes of the first `num_groups` groups of a panel; of whole super-groups where the format has them.
constexpr int64_t groups_bytes(Format format, int64_t num_groups) {
  return num_groups * group_bytes(format) + num_groups / kSuperGroups * super_bytes(format);
}

// Where a group begins in its panel.
constexpr int64_t group_at(Format format, int64_t group) { return groups_bytes(format, group) + super_bytes(format); }

// Where a group's super-scales begin in its panel.
constexpr int64_t super_at(Format format, int64_t group) {
  return groups_bytes(format, group / kSuperGroups * kSuperGroups);
}

// What a format multiplies with.
enum class Activation { kInt8, kInt16, kFloat };

constexpr Activation activation_of(Format format) {
  if (format <= Format::kBF16) return Activation::kFloat;
  return format == Format::kQ8Wide ? Activation::kInt16 : Activation::kInt8;
}

// Consecutive output columns of one format: one tensor of the checkpoint.
struct Segment {
  Format format;
  int64_t first_column;  // in the matrix
  int64_t num_columns;
  int64_t num_groups;
  const uint8_t* panels;

  int64_t num_panels() const { return (num_columns + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const { return groups_bytes(format, num_groups); }
  const uint8_t* panel(int64_t index) const { return panels + index * panel_bytes(); }
};

constexpr int64_t kMaxSegments = 4;

// Segments side by side, all over the same inputs.
struct Matrix {
  Segment segments[kMaxSegments];
  int64_t num_segments = 0;
  int64_t num_inputs = 0;
  int64_t num_columns = 0;
  const uint8_t* next = nullptr;  // what the layers' order needs next: the bytes behind, up to the end of all weights
  int64_t next_bytes = 0;

  bool needs(Activation kind) const {
    for (int64_t i = 0; i < num_segments; ++i) {
      if (activation_of(segments[i].format) == kind) return true;
    }
    return false;
  }
};

// One column of a segment as floats, [num_inputs].
void dequantize_column(const Segment& segment, int64_t column, int64_t num_inputs, float* out);

}  // namespace twinjet
