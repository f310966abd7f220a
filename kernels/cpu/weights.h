// Packed weight matrices: panels of 16 output columns, group after group of 32 inputs. Every GGUF type maps to one of
// these formats with its own integers, scales and minima, so no weight changes.
//
// One group of one panel, in bytes:
//   4-bit   [4 steps][2 halves][32]: a half is 8 columns x 4 inputs; low nibbles hold inputs 4 s.., high ones 16 + 4 s..
//   8-bit   [16 pairs][16 columns][2 inputs], signed
//   floats  [32 inputs][16 columns]
// then [16] scales and, in formats with a minimum, [16] minima. A weight is scale * integer + minimum.
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
  kQ4MF = 5,    // the same in float32: Q4_K
  kQ8 = 6,      // signed 8-bit, float16 scale: Q8_0, Q5_0
  kQ8M = 7,     // unsigned 5-bit in 8, float16 scale and minimum: Q5_1
  kQ8MF = 8,    // the same in float32: Q5_K
  kQ8H = 9,     // signed 8-bit, a float32 scale for each 16 inputs: Q6_K
};
constexpr int64_t kNumFormats = 10;

constexpr int64_t group_bytes(Format format) {
  switch (format) {
    case Format::kF32: return 32 * 16 * 4;
    case Format::kF16: return 32 * 16 * 2;
    case Format::kBF16: return 32 * 16 * 2;
    case Format::kQ4: return 256 + 32;
    case Format::kQ4M: return 256 + 64;
    case Format::kQ4MF: return 256 + 128;
    case Format::kQ8: return 512 + 32;
    case Format::kQ8M: return 512 + 64;
    case Format::kQ8MF: return 512 + 128;
    case Format::kQ8H: return 512 + 128;
  }
  return 0;
}

// What a format multiplies with.
enum class Activation { kInt8, kInt16, kFloat };

constexpr Activation activation_of(Format format) {
  if (format <= Format::kBF16) return Activation::kFloat;
  return format <= Format::kQ4MF ? Activation::kInt8 : Activation::kInt16;
}

// Consecutive output columns of one format: one tensor of the checkpoint.
struct Segment {
  Format format;
  int64_t first_column;  // in the matrix
  int64_t num_columns;
  int64_t num_groups;
  const uint8_t* panels;

  int64_t num_panels() const { return (num_columns + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const { return num_groups * group_bytes(format); }
  const uint8_t* panel(int64_t index) const { return panels + index * panel_bytes(); }
};

constexpr int64_t kMaxSegments = 4;

// Segments side by side, all over the same inputs.
struct Matrix {
  Segment segments[kMaxSegments];
  int64_t num_segments = 0;
  int64_t num_inputs = 0;
  int64_t num_columns = 0;

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
