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

// 32 inputs of one column.
struct Group {
  int32_t q[kGroup];
  float scale[2];  // of each half
  float minimum;
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
  out->minimum = 0.0f;
  const int64_t part = g % 8;  // of a block of 256
  switch (quant) {
    case Quant::kQ4_0: {
      const uint8_t* block = row + g * 18;
      split_nibbles(block + 2, out->q);
      out->scale[0] = out->scale[1] = half_at(block);
      return;  // less 8, which the format implies
    }
    case Quant::kQ4_1: {
      const uint8_t* block = row + g * 20;
      split_nibbles(block + 4, out->q);
      out->scale[0] = out->scale[1] = half_at(block);
      out->minimum = half_at(block + 2);
      return;
    }
    case Quant::kQ5_0: {
      const uint8_t* block = row + g * 22;
      split_nibbles(block + 6, out->q);
      add_fifth_bits(load32(block + 2), out->q);
      for (int32_t& q : out->q) q -= 16;
      out->scale[0] = out->scale[1] = half_at(block);
      return;
    }
    case Quant::kQ5_1: {
      const uint8_t* block = row + g * 24;
      split_nibbles(block + 8, out->q);
      add_fifth_bits(load32(block + 4), out->q);
      out->scale[0] = out->scale[1] = half_at(block);
      out->minimum = half_at(block + 2);
      return;
    }
    case Quant::kQ8_0: {
      const uint8_t* block = row + g * 34;
      for (int i = 0; i < 32; ++i) out->q[i] = static_cast<int8_t>(block[2 + i]);
      out->scale[0] = out->scale[1] = half_at(block);
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
      int scale, minimum;
      k_scales(block + 4, static_cast<int>(part), &scale, &minimum);
      out->scale[0] = out->scale[1] = half_at(block) * static_cast<float>(scale);  // exact: 11 and 6 bits
      out->minimum = -(half_at(block + 2) * static_cast<float>(minimum));
      return;
    }
    case Quant::kQ6_K: {
      const uint8_t* block = row + g / 8 * 210;
      const uint8_t* low = block + part / 4 * 64 + part % 2 * 32;
      const uint8_t* high = block + 128 + part / 4 * 32;
      const float d = half_at(block + 208);
      for (int i = 0; i < 32; ++i) {
        const int nibble = part % 4 < 2 ? low[i] & 15 : low[i] >> 4;
        out->q[i] = (nibble | (high[i] >> (2 * (part % 4)) & 3) << 4) - 32;
      }
      for (int half = 0; half < 2; ++half) {
        out->scale[half] = d * static_cast<float>(static_cast<int8_t>(block[192 + 2 * part + half]));
      }
      return;
    }
    default: return;
  }
}

void put16(uint8_t* p, uint16_t v) { std::memcpy(p, &v, sizeof(v)); }
void put32(uint8_t* p, float v) { std::memcpy(p, &v, sizeof(v)); }

// Where an input of a column lies in a 4-bit group, and in which nibble.
constexpr int64_t q4_byte(int64_t column, int64_t k) {
  return k % 16 / 4 * 64 + column / 8 * 32 + column % 8 * 4 + k % 4;
}
constexpr int64_t q8_byte(int64_t column, int64_t k) { return k / 2 * 32 + column * 2 + k % 2; }

bool put_group(Format format, const Group& group, int64_t column, uint8_t* out) {
  const bool four = activation_of(format) == Activation::kInt8;
  for (int64_t k = 0; k < kGroup; ++k) {
    if (four) {
      out[q4_byte(column, k)] |= static_cast<uint8_t>(group.q[k] << (k < 16 ? 0 : 4));
    } else {
      out[q8_byte(column, k)] = static_cast<uint8_t>(group.q[k]);
    }
  }
  uint8_t* scales = out + (four ? 256 : 512);
  switch (format) {
    case Format::kQ4:
    case Format::kQ8: put16(scales + 2 * column, f32_to_f16(group.scale[0])); break;
    case Format::kQ4M:
    case Format::kQ8M:
      put16(scales + 2 * column, f32_to_f16(group.scale[0]));
      put16(scales + 32 + 2 * column, f32_to_f16(group.minimum));
      break;
    case Format::kQ4MF:
    case Format::kQ8MF:
      put32(scales + 4 * column, group.scale[0]);
      put32(scales + 64 + 4 * column, group.minimum);
      break;
    case Format::kQ8H:
      put32(scales + 4 * column, group.scale[0]);
      put32(scales + 64 + 4 * column, group.scale[1]);
      break;
    default: break;
  }
  return std::isfinite(group.scale[0]) && std::isfinite(group.scale[1]) && std::isfinite(group.minimum);
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
  const uint8_t* group = segment.panel(column / kPanel);
  const int64_t c = column % kPanel;
  const Activation kind = activation_of(segment.format);
  for (int64_t g = 0; g < segment.num_groups; ++g, group += group_bytes(segment.format)) {
    const int64_t count = std::min(kGroup, num_inputs - g * kGroup);
    float* to = out + g * kGroup;
    if (kind == Activation::kFloat) {
      for (int64_t k = 0; k < count; ++k) {
        const int64_t at = k * kPanel + c;
        if (segment.format == Format::kF32) {
          std::memcpy(to + k, group + 4 * at, 4);
        } else {
          const uint16_t bits = load16(group + 2 * at);
          to[k] = segment.format == Format::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
        }
      }
      continue;
    }
    const bool four = kind == Activation::kInt8;
    const uint8_t* scales = group + (four ? 256 : 512);
    float scale[2], minimum = 0.0f;
    switch (segment.format) {
      case Format::kQ4:
        scale[0] = scale[1] = half_at(scales + 2 * c);
        minimum = -8.0f * scale[0];
        break;
      case Format::kQ8: scale[0] = scale[1] = half_at(scales + 2 * c); break;
      case Format::kQ4M:
      case Format::kQ8M:
        scale[0] = scale[1] = half_at(scales + 2 * c);
        minimum = half_at(scales + 32 + 2 * c);
        break;
      case Format::kQ8H:
        std::memcpy(&scale[0], scales + 4 * c, 4);
        std::memcpy(&scale[1], scales + 64 + 4 * c, 4);
        break;
      default:
        std::memcpy(&scale[0], scales + 4 * c, 4);
        scale[1] = scale[0];
        std::memcpy(&minimum, scales + 64 + 4 * c, 4);
        break;
    }
    for (int64_t k = 0; k < count; ++k) {
      const int32_t q = four ? group[q4_byte(c, k)] >> (k < 16 ? 0 : 4) & 15 : static_cast<int8_t>(group[q8_byte(c, k)]);
      // As GGUF's readers round it: the product, then the sum.
      to[k] = scale[k / 16] * static_cast<float>(q) + minimum;
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
  KernelScope scope;
  scope.pool().run((num_columns + kPanel - 1) / kPanel, [&](int64_t panel, int) {
    bool good = true;
    for (int64_t column = 0; column < std::min(kPanel, num_columns - panel * kPanel); ++column) {
      const uint8_t* row = data + (panel * kPanel + column) * stride;
      for (int64_t g = 0; g < num_groups; ++g) {
        uint8_t* to = out + (panel * num_groups + g) * group_bytes(format);
        if (activation_of(format) == Activation::kFloat) {
          good &= put_floats(quant, row, g * kGroup, std::min(kGroup, num_inputs - g * kGroup), column, to);
        } else {
          Group group;
          read_group(quant, row, g, &group);
          good &= put_group(format, group, column, to);
        }
      }
    }
    if (!good) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load() ? 0 : 1;
}
