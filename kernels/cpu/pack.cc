// GGUF blocks (as ggml-common.h in llama.cpp defines them) into panels, and back to floats.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "simd.h"
#include "threads.h"
#include "weights.h"

namespace twinjet {
namespace {

// GGUF's own numbers.
enum class Quant : int64_t {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kBF16 = 30,
};

// 32 inputs of one column: integers as stored, unsigned but for 8 bits, and scales as stored.
struct Group {
  int32_t q[kGroup];
  uint16_t scale, minimum;         // float16; of K-quants the super-scales
  int32_t sub_scale, sub_minimum;  // of K-quants; with 6 bits the scales of the two halves
};

uint16_t load16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

uint32_t load32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

float half_at(const uint8_t* p) { return f16_to_f32(load16(p)); }

// Low nibbles are inputs 0-15, high ones 16-31.
void split_nibbles(const uint8_t* p, int32_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = p[i] & 15;
    q[i + 16] = p[i] >> 4;
  }
}

void add_fifth_bits(uint32_t bits, int32_t* q) {
  for (int i = 0; i < 32; ++i) q[i] |= static_cast<int32_t>(bits >> i & 1) << 4;
}

// Six-bit scale and minimum of one of the eight groups of a Q4_K or Q5_K block.
void k_scales(const uint8_t* s, int j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = s[j] & 63;
    *minimum = s[j + 4] & 63;
  } else {
    *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    *minimum = s[j + 4] >> 4 | (s[j] >> 6) << 4;
  }
}

int64_t row_bytes(Quant quant, int64_t K) {
  switch (quant) {
    case Quant::kF32: return K * 4;
    case Quant::kF16: return K * 2;
    case Quant::kBF16: return K * 2;
    case Quant::kQ4_0: return K / 32 * 18;
    case Quant::kQ4_1: return K / 32 * 20;
    case Quant::kQ5_0: return K / 32 * 22;
    case Quant::kQ5_1: return K / 32 * 24;
    case Quant::kQ8_0: return K / 32 * 34;
    case Quant::kQ4_K: return K / 256 * 144;
    case Quant::kQ5_K: return K / 256 * 176;
    case Quant::kQ6_K: return K / 256 * 210;
  }
  return 0;
}

void read_group(Quant quant, const uint8_t* row, int64_t g, Group* out) {
  *out = {};
  const int64_t part = g % 8;  // of a block of 256
  switch (quant) {
    case Quant::kQ4_0: {
      const uint8_t* block = row + g * 18;
      split_nibbles(block + 2, out->q);
      out->scale = load16(block);
      return;
    }
    case Quant::kQ4_1: {
      const uint8_t* block = row + g * 20;
      split_nibbles(block + 4, out->q);
      out->scale = load16(block);
      out->minimum = load16(block + 2);
      return;
    }
    case Quant::kQ5_0: {
      const uint8_t* block = row + g * 22;
      split_nibbles(block + 6, out->q);
      add_fifth_bits(load32(block + 2), out->q);
      out->scale = load16(block);
      return;
    }
    case Quant::kQ5_1: {
      const uint8_t* block = row + g * 24;
      split_nibbles(block + 8, out->q);
      add_fifth_bits(load32(block + 4), out->q);
      out->scale = load16(block);
      out->minimum = load16(block + 2);
      return;
    }
    case Quant::kQ8_0: {
      const uint8_t* block = row + g * 34;
      for (int i = 0; i < 32; ++i) out->q[i] = static_cast<int8_t>(block[2 + i]);
      out->scale = load16(block);
      return;
    }
    case Quant::kQ4_K:
    case Quant::kQ5_K: {
      const bool five = quant == Quant::kQ5_K;
      const uint8_t* block = row + g / 8 * (five ? 176 : 144);
      const uint8_t* nibbles = block + (five ? 48 : 16) + part / 2 * 32;
      for (int i = 0; i < 32; ++i) {
        out->q[i] = part % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
        if (five) out->q[i] |= (block[16 + i] >> part & 1) << 4;
      }
      k_scales(block + 4, static_cast<int>(part), &out->sub_scale, &out->sub_minimum);
      out->scale = load16(block);
      out->minimum = load16(block + 2);
      return;
    }
    case Quant::kQ6_K: {
      const uint8_t* block = row + g / 8 * 210;
      const uint8_t* low = block + part / 4 * 64 + part % 2 * 32;
      const uint8_t* high = block + 128 + part / 4 * 32;
      for (int i = 0; i < 32; ++i) {
        const int nibble = part % 4 < 2 ? low[i] & 15 : low[i] >> 4;
        out->q[i] = nibble | (high[i] >> (2 * (part % 4)) & 3) << 4;
      }
      out->scale = load16(block + 208);
      out->sub_scale = static_cast<int8_t>(block[192 + 2 * part]);
      out->sub_minimum = static_cast<int8_t>(block[192 + 2 * part + 1]);
      return;
    }
    default: return;
  }
}

void put16(uint8_t* p, uint16_t v) { std::memcpy(p, &v, sizeof(v)); }

// Where an input of a column lies among 8 columns x 4 inputs.
constexpr int64_t lane_of(int64_t column, int64_t k) { return column / 8 * 32 + column % 8 * 4 + k % 4; }
// The byte of its low four bits; those of inputs 16.. are the high nibble.
constexpr int64_t nibble_byte(int64_t column, int64_t k) { return k % 16 / 4 * 64 + lane_of(column, k); }
constexpr int64_t fifth_byte(int64_t column, int64_t k) { return 256 + lane_of(column, k); }
constexpr int64_t upper_byte(int64_t column, int64_t k) { return 256 + k / 16 * 64 + lane_of(column, k); }
constexpr int64_t q8_byte(Format format, int64_t column, int64_t k) {
  return format == Format::kQ8Wide ? k / 2 * 32 + column * 2 + k % 2 : k / 4 * 64 + lane_of(column, k);
}

bool eight_bits(Format format) { return format == Format::kQ8 || format == Format::kQ8Wide; }

int32_t get_integer(Format format, const uint8_t* group, int64_t column, int64_t k) {
  if (eight_bits(format)) return static_cast<int8_t>(group[q8_byte(format, column, k)]);
  const int32_t low = group[nibble_byte(column, k)] >> (k < 16 ? 0 : 4) & 15;
  if (has_fifth_bit(format)) return low | (group[fifth_byte(column, k)] >> k / 4 & 1) << 4;
  if (format == Format::kQ6K) return low | (group[upper_byte(column, k)] >> (k % 16 / 4 * 2) & 3) << 4;
  return low;
}

void put_integer(Format format, int32_t q, int64_t column, int64_t k, uint8_t* group) {
  if (eight_bits(format)) {
    group[q8_byte(format, column, k)] = static_cast<uint8_t>(q);
    return;
  }
  group[nibble_byte(column, k)] |= static_cast<uint8_t>((q & 15) << (k < 16 ? 0 : 4));
  if (has_fifth_bit(format)) group[fifth_byte(column, k)] |= static_cast<uint8_t>(q >> 4 << k / 4);
  if (format == Format::kQ6K) group[upper_byte(column, k)] |= static_cast<uint8_t>(q >> 4 << (k % 16 / 4 * 2));
}

bool finite16(uint16_t bits) { return (bits & 0x7C00) != 0x7C00; }

// `super`: where the group's super-scales lie, in formats that have them.
bool put_group(Format format, const Group& group, int64_t column, uint8_t* super, uint8_t* out) {
  for (int64_t k = 0; k < kGroup; ++k) put_integer(format, group.q[k], column, k, out);
  uint8_t* scales = out + scales_at(format);
  if (super_bytes(format) == 0) {
    put16(scales + 2 * column, group.scale);
    if (format == Format::kQ4M || format == Format::kQ5M) put16(scales + 32 + 2 * column, group.minimum);
  } else {
    put16(super + 2 * column, group.scale);
    if (format != Format::kQ6K) put16(super + 32 + 2 * column, group.minimum);
    scales[column] = static_cast<uint8_t>(group.sub_scale);
    scales[16 + column] = static_cast<uint8_t>(group.sub_minimum);
  }
  return finite16(group.scale) && finite16(group.minimum);
}

// Scale of each half of a group, and its minimum, as floats.
struct GroupScales {
  float scale[2];
  float minimum;
};

GroupScales get_scales(Format format, const uint8_t* super, const uint8_t* group, int64_t column) {
  const uint8_t* scales = group + scales_at(format);
  const float own = half_at(scales + 2 * column);
  switch (format) {
    case Format::kQ4: return {{own, own}, -8.0f * own};
    case Format::kQ5: return {{own, own}, -16.0f * own};
    case Format::kQ4M:
    case Format::kQ5M: return {{own, own}, half_at(scales + 32 + 2 * column)};
    case Format::kQ4K:
    case Format::kQ5K: {
      const float scale = half_at(super + 2 * column) * static_cast<float>(scales[column]);
      return {{scale, scale}, -(half_at(super + 32 + 2 * column) * static_cast<float>(scales[16 + column]))};
    }
    case Format::kQ6K: {
      const float d = half_at(super + 2 * column);
      const int8_t* halves = reinterpret_cast<const int8_t*>(scales);
      return {{d * static_cast<float>(halves[column]), d * static_cast<float>(halves[16 + column])}, 0.0f};
    }
    default: return {{own, own}, 0.0f};
  }
}

bool put_floats(Quant quant, const uint8_t* row, int64_t first, int64_t count, int64_t column, uint8_t* out) {
  bool finite = true;
  for (int64_t k = 0; k < count; ++k) {
    if (quant == Quant::kF32) {
      const uint32_t bits = load32(row + 4 * (first + k));
      std::memcpy(out + 4 * (k * kPanel + column), &bits, 4);
      finite &= (bits & 0x7F800000) != 0x7F800000;
    } else {
      const uint16_t bits = load16(row + 2 * (first + k));
      put16(out + 2 * (k * kPanel + column), bits);
      const uint16_t exponent = quant == Quant::kF16 ? 0x7C00 : 0x7F80;
      finite &= (bits & exponent) != exponent;
    }
  }
  return finite;
}

}  // namespace

void dequantize_column(const Segment& segment, int64_t column, int64_t num_inputs, float* out) {
  const Format format = segment.format;
  const uint8_t* panel = segment.panel(column / kPanel);
  const int64_t c = column % kPanel;
  for (int64_t g = 0; g < segment.num_groups; ++g) {
    const int64_t count = std::min(kGroup, num_inputs - g * kGroup);
    const uint8_t* group = panel + group_at(format, g);
    float* to = out + g * kGroup;
    if (activation_of(format) == Activation::kFloat) {
      for (int64_t k = 0; k < count; ++k) {
        const int64_t at = k * kPanel + c;
        if (format == Format::kF32) {
          std::memcpy(to + k, group + 4 * at, 4);
        } else {
          const uint16_t bits = load16(group + 2 * at);
          to[k] = format == Format::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
        }
      }
      continue;
    }
    const GroupScales scales = get_scales(format, panel + super_at(format, g), group, c);
    const int32_t less = format == Format::kQ6K ? 32 : 0;
    for (int64_t k = 0; k < count; ++k) {
      // As GGUF's readers round it: the product, then the sum.
      to[k] = scales.scale[k / 16] * static_cast<float>(get_integer(format, group, c, k) - less) + scales.minimum;
    }
  }
}

}  // namespace twinjet

// Packs a tensor [num_columns, num_inputs] of GGUF type `quant` into `out`, which must be zeroed.
// Returns 0, or 1 if a scale or a weight is not finite.
extern "C" __attribute__((visibility("default"))) int twinjet_pack(int64_t format_number, int64_t quant_number,
                                                                   const uint8_t* data, int64_t num_columns,
                                                                   int64_t num_inputs, uint8_t* out) {
  using namespace twinjet;
  const Format format = static_cast<Format>(format_number);
  const Quant quant = static_cast<Quant>(quant_number);
  const int64_t num_groups = (num_inputs + kGroup - 1) / kGroup;
  const int64_t stride = row_bytes(quant, num_inputs);
  std::atomic<bool> finite{true};
  KernelScope scope(Clocked::kNot);
  scope.pool().run((num_columns + kPanel - 1) / kPanel, [&](int64_t panel, int) {
    bool good = true;
    uint8_t* first = out + panel * groups_bytes(format, num_groups);
    for (int64_t column = 0; column < std::min(kPanel, num_columns - panel * kPanel); ++column) {
      const uint8_t* row = data + (panel * kPanel + column) * stride;
      for (int64_t g = 0; g < num_groups; ++g) {
        uint8_t* to = first + group_at(format, g);
        if (activation_of(format) == Activation::kFloat) {
          good &= put_floats(quant, row, g * kGroup, std::min(kGroup, num_inputs - g * kGroup), column, to);
        } else {
          Group group;
          read_group(quant, row, g, &group);
          good &= put_group(format, group, column, first + super_at(format, g), to);
        }
      }
    }
    if (!good) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load() ? 0 : 1;
}
