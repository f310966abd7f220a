// Products of a few rows with a panel or two, once for each instruction set. What they compute is the same bits: exact
// integer dots, and float operations of each column and row in one order.
//
// Their sources are compiled for instructions that the processor may lack, so they share nothing with other sources that
// the linker could take from them: no templates or inline functions of ours that are not inlined.
#pragma once

#include <cstdint>

#include "weights.h"

namespace twinjet {

// Rows of a microkernel at most.
constexpr int64_t kTileRows = 6;

// One tile's rows as activations, [group][row][32], and for integers [group][row] what belongs to a group. Kinds that no
// format of the matrix needs are null.
struct TileInputs {
  const int16_t* wide;  // 16-bit integers
  const float* wide_scales;
  const int8_t* integers;
  const float* scales;     // pairs of the scale and scale * sum
  const int32_t* offsets;  // 32 * sum of inputs 0-15, 32 * sum of inputs 16-31, 128 * sum, 0
  const float* floats;
};

enum class Instructions : int64_t {
  kAvx2 = 0,        // with FMA and F16C
  kAvx512Vnni = 1,  // F, BW, VL and VNNI
};

// Panels of a microkernel at most.
constexpr int64_t kTilePanels = 2;

// out [num_panels, num_rows, 16] = rows times panels, which follow one another.
void multiply_tile_avx2(Format format, int64_t num_rows, const uint8_t* panels, int64_t num_panels, int64_t num_groups,
                        const TileInputs& in, float* out);
void multiply_tile_vnni(Format format, int64_t num_rows, const uint8_t* panels, int64_t num_panels, int64_t num_groups,
                        const TileInputs& in, float* out);

}  // namespace twinjet
