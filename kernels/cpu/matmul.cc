#include "matmul.h"

#include <atomic>
#include <cmath>

#include "microkernels.h"

namespace twinjet {
namespace {

bool runs(Instructions instructions) {
  __builtin_cpu_init();
  if (instructions == Instructions::kAvx2) return true;  // or the library would not be used at all
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

using MultiplyTile = void (*)(Format, int64_t, const uint8_t*, int64_t, int64_t, const TileInputs&, float*);

MultiplyTile microkernels(Instructions instructions) {
  return instructions == Instructions::kAvx512Vnni ? multiply_tile_vnni : multiply_tile_avx2;
}

// Set before main by the best there is, and later by tests and benchmarks only.
std::atomic<MultiplyTile> chosen{
    microkernels(runs(Instructions::kAvx512Vnni) ? Instructions::kAvx512Vnni : Instructions::kAvx2)};

// Largest magnitude of 32 floats.
TWINJET_INLINE float largest(const __m256 (&v)[4]) {
  return max8(_mm256_max_ps(_mm256_max_ps(abs8(v[0]), abs8(v[1])), _mm256_max_ps(abs8(v[2]), abs8(v[3]))));
}

}  // namespace

Activations::Activations(const KernelScope& scope, const Matrix& matrix, int64_t num_rows)
    : plan(num_rows), num_inputs(matrix.num_inputs), num_groups((matrix.num_inputs + kGroup - 1) / kGroup) {
  const int64_t groups = num_rows * num_groups;
  if (matrix.needs(Activation::kInt8)) {
    integers_ = scope.scratch().take<int8_t>(groups * kGroup);
    scales_ = scope.scratch().take<float>(groups * 2);
    offsets_ = scope.scratch().take<int32_t>(groups * 4);
  }
  if (matrix.needs(Activation::kInt16)) {
    wide_ = scope.scratch().take<int16_t>(groups * kGroup);
    wide_scales_ = scope.scratch().take<float>(groups * 2);
  }
  if (matrix.needs(Activation::kFloat)) floats_ = scope.scratch().take<float>(groups * kGroup);
}

void Activations::set_group(int64_t tile, int64_t r, int64_t group, const float* values) const {
  const int64_t at = plan.first_row(tile) * num_groups + group * plan.rows(tile) + r;
  __m256 v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(values + 8 * i);
  if (floats_ != nullptr) {
    for (int i = 0; i < 4; ++i) _mm256_storeu_ps(floats_ + at * kGroup + 8 * i, v[i]);
  }
  if (integers_ == nullptr && wide_ == nullptr) return;
  const float peak = largest(v);
  const bool vanishes = peak < kVanishing;
  if (wide_ != nullptr) {
    const __m256 inverse = _mm256_set1_ps(vanishes ? 0.0f : 32767.0f / peak);
    for (int i = 0; i < 4; i += 2) {
      const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
      const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(v[i + 1], inverse));
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide_ + at * kGroup + 8 * i), packed);
    }
    wide_scales_[2 * at] = vanishes ? 0.0f : peak / 32767.0f;
    wide_scales_[2 * at + 1] = 0.0f;  // no format of this kind has a minimum
  }
  if (integers_ == nullptr) return;
  const __m256 inverse = _mm256_set1_ps(vanishes ? 0.0f : 127.0f / peak);
  __m256i q[4];
  for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
  const int32_t first = sum8(_mm256_add_epi32(q[0], q[1])), second = sum8(_mm256_add_epi32(q[2], q[3]));
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  // Packing works within 128-bit lanes: put the eight runs of four back in order.
  const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(integers_ + at * kGroup), ordered);
  const float scale = vanishes ? 0.0f : peak / 127.0f;
  scales_[2 * at] = scale;
  scales_[2 * at + 1] = scale * static_cast<float>(first + second);
  const __m128i offsets = _mm_setr_epi32(32 * first, 32 * second, 128 * (first + second), 0);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(offsets_ + 4 * at), offsets);
}

void Activations::set_row(int64_t row, const float* values) const {
  const int64_t tile = plan.tile_of(row), r = row - plan.first_row(tile);
  const int64_t whole = num_inputs / kGroup;
  for (int64_t g = 0; g < whole; ++g) set_group(tile, r, g, values + g * kGroup);
  if (whole < num_groups) {
    float rest[kGroup] = {};
    std::copy(values + whole * kGroup, values + num_inputs, rest);
    set_group(tile, r, whole, rest);
  }
}

void multiply_tile(const Activations& acts, int64_t tile, const Segment& segment, int64_t panel, int64_t num_panels,
                   float* out) {
  const TileInputs in = acts.tile(tile);
  chosen.load(std::memory_order_relaxed)(segment.format, acts.plan.rows(tile), segment.panel(panel), num_panels,
                                         segment.num_groups, in, out);
}

}  // namespace twinjet

extern "C" int64_t twinjet_instructions() {
  using namespace twinjet;
  const bool vnni = chosen.load() == microkernels(Instructions::kAvx512Vnni);
  return static_cast<int64_t>(vnni ? Instructions::kAvx512Vnni : Instructions::kAvx2);
}

extern "C" int twinjet_use_instructions(int64_t number) {
  using namespace twinjet;
  const Instructions instructions = static_cast<Instructions>(number);
  if (!runs(instructions)) return 0;
  chosen.store(microkernels(instructions));
  return 1;
}
