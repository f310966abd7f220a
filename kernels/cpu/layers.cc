// The dense ops of a layer, each fused into one call: norms, quantisation, products, rotation, residuals.
#include <cmath>
#include <cstring>
#include <utility>

#include "batch.h"
#include "ffi.h"
#include "kv.h"
#include "matmul.h"
#include "simd.h"
#include "threads.h"
#include "weights.h"

namespace twinjet {

using Numbers = ffi::Span<const int64_t>;

namespace {

// A matrix as an attribute: inputs, then for each segment its format, columns and place in the blob.
ffi::Error read_matrix(Numbers numbers, BytesBuffer blob, Matrix* matrix) {
  const int64_t num_segments = (static_cast<int64_t>(numbers.size()) - 1) / 3;
  if (num_segments < 1 || num_segments > kMaxSegments) return invalid("a matrix of " + std::to_string(num_segments) + " segments");
  matrix->num_inputs = numbers[0];
  const int64_t num_groups = (numbers[0] + kGroup - 1) / kGroup;
  for (int64_t i = 0; i < num_segments; ++i) {
    const int64_t format = numbers[1 + 3 * i], num_columns = numbers[2 + 3 * i], offset = numbers[3 + 3 * i];
    if (format < 0 || format >= kNumFormats) return invalid("unknown weight format " + std::to_string(format));
    Segment segment{static_cast<Format>(format), matrix->num_columns, num_columns, num_groups, blob.typed_data() + offset};
    const int64_t end = offset + segment.num_panels() * segment.panel_bytes();
    if (offset < 0 || end > static_cast<int64_t>(blob.element_count())) return invalid("a matrix ends outside the weights");
    matrix->segments[i] = segment;
    matrix->num_columns += num_columns;
    matrix->next = blob.typed_data() + end;
    matrix->next_bytes = static_cast<int64_t>(blob.element_count()) - end;
  }
  matrix->num_segments = num_segments;
  return ffi::Error::Success();
}

#define TWINJET_TRY(expression)                          \
  do {                                                   \
    ffi::Error error = (expression);                     \
    if (error.failure()) return error;                   \
  } while (0)

// Floats at a byte offset of the blob; -1: none.
const float* floats_at(BytesBuffer blob, int64_t offset) {
  return offset < 0 ? nullptr : reinterpret_cast<const float*>(blob.typed_data() + offset);
}

// 1 / sqrt(mean of squares + eps), summed in eight lanes and then in a fixed order.
float inverse_rms(const float* x, int64_t n, float eps) {
  __m256 sum = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    sum = _mm256_fmadd_ps(v, v, sum);
  }
  float total = sum8(sum);
  for (; i < n; ++i) total = std::fma(x[i], x[i], total);
  return 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
}

// out = x / rms(x) * weight; out may be x.
void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  const float inverse = inverse_rms(x, n, eps);
  const __m256 inverse8 = _mm256_set1_ps(inverse);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), inverse8);
    _mm256_storeu_ps(out + i, _mm256_mul_ps(v, _mm256_loadu_ps(weight + i)));
  }
  for (; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

// Elements that are worth claiming a task, and as many as a task has at most.
constexpr int64_t kLeastElements = 1024, kMostElements = 8192;

// Rows of a task: shared evenly, where they are few.
int64_t row_grain(const KernelScope& scope, int64_t num_rows, int64_t width) {
  const int64_t even = (num_rows + scope.pool().num_threads() - 1) / scope.pool().num_threads();
  return std::clamp<int64_t>(even, std::max<int64_t>(1, kLeastElements / width), std::max<int64_t>(1, kMostElements / width));
}

// out = a + b for up to 16 columns.
TWINJET_INLINE void add_columns(const float* a, const float* b, int64_t count, float* out) {
  if (count == kPanel) {
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(a), _mm256_loadu_ps(b)));
    _mm256_storeu_ps(out + 8, _mm256_add_ps(_mm256_loadu_ps(a + 8), _mm256_loadu_ps(b + 8)));
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
  }
}

// Rows `x` (by index), normed if `weight`, as activations.
template <class RowAt>
void set_rows(const KernelScope& scope, const Activations& acts, RowAt&& row_at, const float* weight, float eps) {
  const int64_t D = acts.num_inputs;
  float* normed = scope.scratch().take<float>(scope.pool().num_threads() * D);
  scope.for_ranges(acts.plan.num_rows, row_grain(scope, acts.plan.num_rows, D), [&](int64_t begin, int64_t end, int thread) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = row_at(row);
      if (weight != nullptr) {
        rms_norm(x, weight, D, eps, normed + thread * D);
        x = normed + thread * D;
      }
      acts.set_row(row, x);
    }
  });
}

// out = x + product, or x + norm(product).
void product_add(const KernelScope& scope, const Matrix& matrix, const Activations& acts, const float* x,
                 const float* post_norm, float eps, float* out) {
  const int64_t D = matrix.num_columns, rows = acts.plan.num_rows;
  if (post_norm == nullptr) {
    multiply(scope, matrix, acts, [&](int64_t column, int64_t count, int64_t first, int64_t n, const float* tile) {
      for (int64_t r = 0; r < n; ++r) {
        const int64_t at = (first + r) * D + column;
        add_columns(x + at, tile + r * kPanel, count, out + at);
      }
    });
    return;
  }
  float* product = scope.scratch().take<float>(rows * D);
  multiply(scope, matrix, acts, [&](int64_t column, int64_t count, int64_t first, int64_t n, const float* tile) {
    for (int64_t r = 0; r < n; ++r) std::memcpy(product + (first + r) * D + column, tile + r * kPanel, count * 4);
  });
  scope.for_ranges(rows, row_grain(scope, rows, D), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* y = product + row * D;
      rms_norm(y, post_norm, D, eps, y);
      for (int64_t i = 0; i < D; ++i) out[row * D + i] = x[row * D + i] + y[i];
    }
  });
}

// Rotates the first `dims` of a head: out[i] = x[i] cos[i] + partner[i] sin[i], where the table has the signs.
// `table` is [2, dims].
void rotate(float* x, const float* table, int64_t dims, bool adjacent) {
  const float* cos = table;
  const float* sin = table + dims;
  if (adjacent) {
    int64_t i = 0;
    for (; i + 8 <= dims; i += 8) {
      const __m256 v = _mm256_loadu_ps(x + i);
      const __m256 turned = _mm256_mul_ps(_mm256_permute_ps(v, 0xB1), _mm256_loadu_ps(sin + i));
      _mm256_storeu_ps(x + i, _mm256_fmadd_ps(v, _mm256_loadu_ps(cos + i), turned));
    }
    for (; i < dims; i += 2) {
      const float a = x[i], b = x[i + 1];
      x[i] = std::fma(a, cos[i], b * sin[i]);
      x[i + 1] = std::fma(b, cos[i + 1], a * sin[i + 1]);
    }
    return;
  }
  const int64_t half = dims / 2;
  int64_t i = 0;
  for (; i + 8 <= half; i += 8) {
    const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + half + i);
    const __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + half + i);
    _mm256_storeu_ps(x + i, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
    _mm256_storeu_ps(x + half + i, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i], c = cos[i], s = sin[half + i];
    x[i] = std::fma(a, c, -(b * s));
    x[half + i] = std::fma(b, c, a * s);
  }
}

ffi::Error qkv(F32Buffer x, BytesBuffer blob, ffi::AnyBuffer pool, I32Buffer packed, F32Buffer rope, ResultF32 q,
               ResultAny pool_out, int64_t T, int64_t B, int64_t MP, int64_t layer, int64_t num_heads,
               int64_t num_kv_heads, int64_t head_dim, int64_t num_pages, int64_t page_size, Numbers weights,
               int64_t norm, int64_t q_norm, int64_t k_norm, bool adjacent, float eps) {
  KernelScope scope;
  Matrix matrix;
  TWINJET_TRY(read_matrix(weights, blob, &matrix));
  const StepView step(packed.typed_data(), T, B, MP);
  const int64_t rows = step.num_rows(), N = num_heads, K = num_kv_heads, H = head_dim, D = matrix.num_inputs;
  if (matrix.num_columns != (N + 2 * K) * H) return invalid("qkv matrix of another width");
  if (pool.untyped_data() != pool_out->untyped_data()) return invalid("the KV pool was copied: it is not donated");
  KVPool kv{pool.untyped_data(), {num_pages, page_size, K, H, {}}};
  if (!kv_type(pool, &kv.layout.type)) return invalid("expected a KV pool of float16, float32 or int8");
  const int64_t rope_dims = rope.dimensions()[2];

  const float* in = x.typed_data();
  const Activations acts(scope, matrix, rows);
  set_rows(scope, acts, [&](int64_t row) { return in + row * D; }, floats_at(blob, norm), eps);

  float* heads_out = q->typed_data();
  float* kv_rows = scope.scratch().take<float>(rows * 2 * K * H);
  multiply(scope, matrix, acts, [&](int64_t column, int64_t count, int64_t first, int64_t n, const float* tile) {
    // A panel may straddle queries and keys where heads are narrower than it.
    for (int64_t r = 0; r < n; ++r) {
      const int64_t row = first + r;
      const int64_t to_q = std::clamp<int64_t>(N * H - column, 0, count);
      std::memcpy(heads_out + row * N * H + column, tile + r * kPanel, to_q * 4);
      std::memcpy(kv_rows + row * 2 * K * H + (column + to_q - N * H), tile + r * kPanel + to_q, (count - to_q) * 4);
    }
  });

  const float* q_weight = floats_at(blob, q_norm);
  const float* k_weight = floats_at(blob, k_norm);
  scope.for_ranges(rows, row_grain(scope, rows, (N + 2 * K) * H), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const float* table = rope.typed_data() + row * 2 * rope_dims;
      for (int64_t head = 0; head < N + K; ++head) {
        const bool query = head < N;
        float* v = query ? heads_out + (row * N + head) * H : kv_rows + (row * 2 * K + head - N) * H;
        const float* weight = query ? q_weight : k_weight;
        if (weight != nullptr) rms_norm(v, weight, H, eps, v);
        rotate(v, table, rope_dims, adjacent);
      }
      const int64_t position = step.position(row);
      const int64_t page = step.pages(step.slot(row))[position / page_size];
      const float* keys = kv_rows + row * 2 * K * H;
      for (int64_t head = 0; head < K; ++head) {
        append_kv(kv, layer, page, position, head, keys + head * H, keys + (K + head) * H);
      }
    }
  });
  return ffi::Error::Success();
}

ffi::Error project(F32Buffer attended, F32Buffer x, BytesBuffer blob, I32Buffer packed, ResultF32 out, int64_t T,
                   int64_t B, int64_t MP, Numbers weights, int64_t post_norm, float eps) {
  KernelScope scope;
  Matrix matrix;
  TWINJET_TRY(read_matrix(weights, blob, &matrix));
  const int64_t rows = StepView(packed.typed_data(), T, B, MP).num_rows();
  const float* in = attended.typed_data();
  const Activations acts(scope, matrix, rows);
  set_rows(scope, acts, [&](int64_t row) { return in + row * matrix.num_inputs; }, nullptr, eps);
  product_add(scope, matrix, acts, x.typed_data(), floats_at(blob, post_norm), eps, out->typed_data());
  return ffi::Error::Success();
}

// act(gate) * up for 32 columns of up to kTileRows rows, into the activations of the next product.
template <class Activate>
TWINJET_INLINE void gate_group(const float* gate, const float* up, int64_t count, int64_t num_rows, int64_t tile,
                               int64_t group, const Activations& next, Activate&& activate) {
  // [panel of two][row][16]
  for (int64_t r = 0; r < num_rows; ++r) {
    alignas(32) float h[kGroup];
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t at = (i / 2 * num_rows + r) * kPanel + i % 2 * 8;
      _mm256_store_ps(h + 8 * i, _mm256_mul_ps(activate(_mm256_load_ps(gate + at)), _mm256_load_ps(up + at)));
    }
    for (int64_t i = count; i < kGroup; ++i) h[i] = 0.0f;
    next.set_group(tile, r, group, h);
  }
}

void gated_product(const KernelScope& scope, const Matrix& gate_up, const Activations& acts, const Activations& next,
                   bool gelu) {
  const Segment &gate = gate_up.segments[0], &up = gate_up.segments[1];
  const int64_t num_tiles = acts.plan.num_tiles;
  if (num_tiles == 0) return;
  const int64_t num_blocks = (num_tiles + kBlockTiles - 1) / kBlockTiles;
  const int64_t block_tiles = (num_tiles + num_blocks - 1) / num_blocks;
  const int64_t num_groups = next.num_groups;
  static_assert(kTilePanels * kPanel == kGroup);
  const bool streamed = is_streamed(num_tiles);
  const int64_t group_bytes = kTilePanels * (gate.panel_bytes() + up.panel_bytes());
  const int64_t grain = streamed ? streamed_grain(scope, num_groups, group_bytes) : 1;
  const int64_t chunks = (num_groups + grain - 1) / grain;
  scope.pool().run(num_blocks * chunks, [&](int64_t task, int) {
    const int64_t first_tile = task / chunks * block_tiles, last_tile = std::min(num_tiles, first_tile + block_tiles);
    const int64_t first_group = task % chunks * grain, last_group = std::min(num_groups, first_group + grain);
    alignas(64) float g[kTilePanels * kTileRows * kPanel] = {};
    alignas(64) float u[kTilePanels * kTileRows * kPanel] = {};
    for (int64_t group = first_group; group < last_group; ++group) {
      const int64_t count = std::min(kGroup, gate.num_columns - group * kGroup);
      const int64_t num_panels = (count + kPanel - 1) / kPanel;
      for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        const bool from_memory = streamed && tile == first_tile;
        multiply_panels(acts, tile, gate, kTilePanels * group, num_panels, from_memory, g);
        multiply_panels(acts, tile, up, kTilePanels * group, num_panels, from_memory, u);
        const int64_t rows = acts.plan.rows(tile);  // the next product's tiles are the same
        if (gelu) {
          gate_group(g, u, count, rows, tile, group, next, [](__m256 v) { return gelu_tanh8(v); });
        } else {
          gate_group(g, u, count, rows, tile, group, next, [](__m256 v) { return silu8(v); });
        }
      }
    }
  });
}

ffi::Error mlp(F32Buffer x, BytesBuffer blob, I32Buffer packed, ResultF32 out, int64_t T, int64_t B, int64_t MP,
               Numbers gate_up, Numbers down, int64_t norm, int64_t post_norm, bool gelu, float eps) {
  KernelScope scope;
  Matrix wide, narrow;
  TWINJET_TRY(read_matrix(gate_up, blob, &wide));
  TWINJET_TRY(read_matrix(down, blob, &narrow));
  if (wide.num_segments != 2 || wide.segments[0].num_columns != narrow.num_inputs ||
      wide.segments[1].num_columns != narrow.num_inputs) {
    return invalid("gate and up of other widths than down");
  }
  const int64_t rows = StepView(packed.typed_data(), T, B, MP).num_rows();
  const float* in = x.typed_data();
  const Activations acts(scope, wide, rows), hidden(scope, narrow, rows);
  set_rows(scope, acts, [&](int64_t row) { return in + row * wide.num_inputs; }, floats_at(blob, norm), eps);
  gated_product(scope, wide, acts, hidden, gelu);
  product_add(scope, narrow, hidden, in, floats_at(blob, post_norm), eps, out->typed_data());
  return ffi::Error::Success();
}

ffi::Error head(F32Buffer x, BytesBuffer blob, I32Buffer packed, ResultF32 logits, int64_t T, int64_t B, int64_t MP,
                Numbers weights, int64_t norm, float eps) {
  KernelScope scope;
  Matrix matrix;
  TWINJET_TRY(read_matrix(weights, blob, &matrix));
  const StepView step(packed.typed_data(), T, B, MP);
  const int64_t V = matrix.num_columns;
  const float* in = x.typed_data();
  const Activations acts(scope, matrix, step.num_samples());
  set_rows(scope, acts, [&](int64_t i) { return in + step.sample_row(i) * matrix.num_inputs; }, floats_at(blob, norm), eps);
  float* out = logits->typed_data();
  multiply(scope, matrix, acts, [&](int64_t column, int64_t count, int64_t first, int64_t n, const float* tile) {
    for (int64_t r = 0; r < n; ++r) std::memcpy(out + (first + r) * V + column, tile + r * kPanel, count * 4);
  });
  return ffi::Error::Success();
}

ffi::Error embed(BytesBuffer blob, I32Buffer packed, I32Buffer last_token, ResultF32 out, int64_t T, int64_t B,
                 int64_t MP, Numbers weights, float scale) {
  KernelScope scope;
  Matrix matrix;
  TWINJET_TRY(read_matrix(weights, blob, &matrix));
  const StepView step(packed.typed_data(), T, B, MP);
  const int64_t D = matrix.num_inputs;
  const Segment& table = matrix.segments[0];
  scope.for_ranges(step.num_rows(), row_grain(scope, step.num_rows(), D), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t token = step.token_id(row);
      if (token < 0) token = last_token.typed_data()[step.slot(row)];
      token = std::clamp<int64_t>(token, 0, table.num_columns - 1);
      float* to = out->typed_data() + row * D;
      dequantize_column(table, token, D, to);
      for (int64_t i = 0; i < D; ++i) to[i] *= scale;
    }
  });
  return ffi::Error::Success();
}

// Cosines and signed sines of every row: [T, 2, dims], ordered like the dimensions they multiply.
ffi::Error rope(I32Buffer packed, ResultF32 out, int64_t T, int64_t B, int64_t MP, ffi::Span<const float> frequencies,
                bool adjacent) {
  KernelScope scope;
  const StepView step(packed.typed_data(), T, B, MP);
  const int64_t half = static_cast<int64_t>(frequencies.size()), dims = 2 * half;
  scope.for_ranges(step.num_rows(), row_grain(scope, step.num_rows(), 16 * dims), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* cos = out->typed_data() + row * 2 * dims;
      float* sin = cos + dims;
      const float position = static_cast<float>(step.position(row));
      for (int64_t i = 0; i < half; ++i) {
        const float angle = position * frequencies[i];
        const float c = std::cos(angle), s = std::sin(angle);
        const int64_t a = adjacent ? 2 * i : i, b = adjacent ? 2 * i + 1 : half + i;
        cos[a] = cos[b] = c;
        sin[a] = -s;
        sin[b] = s;
      }
    }
  });
  return ffi::Error::Success();
}

// A plain product of all rows, for tests and benchmarks.
ffi::Error matmul(F32Buffer x, BytesBuffer blob, ResultF32 out, Numbers weights) {
  KernelScope scope(Clocked::kNot);
  Matrix matrix;
  TWINJET_TRY(read_matrix(weights, blob, &matrix));
  const int64_t rows = x.dimensions()[0], N = matrix.num_columns;
  const Activations acts(scope, matrix, rows);
  set_rows(scope, acts, [&](int64_t row) { return x.typed_data() + row * matrix.num_inputs; }, nullptr, 0.0f);
  multiply(scope, matrix, acts, [&](int64_t column, int64_t count, int64_t first, int64_t n, const float* tile) {
    for (int64_t r = 0; r < n; ++r) {
      std::memcpy(out->typed_data() + (first + r) * N + column, tile + r * kPanel, count * 4);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace twinjet

namespace ffi = xla::ffi;
using twinjet::BytesBuffer;
using twinjet::F32Buffer;
using twinjet::I32Buffer;
using twinjet::Numbers;

TWINJET_HANDLER(twinjet_qkv, twinjet::qkv,
                ffi::Ffi::Bind().Arg<F32Buffer>().Arg<BytesBuffer>().Arg<ffi::AnyBuffer>().Arg<I32Buffer>()
                    .Arg<F32Buffer>().Ret<F32Buffer>().Ret<ffi::AnyBuffer>()
                    .Attr<int64_t>("T").Attr<int64_t>("B").Attr<int64_t>("MP").Attr<int64_t>("layer")
                    .Attr<int64_t>("num_heads").Attr<int64_t>("num_kv_heads").Attr<int64_t>("head_dim")
                    .Attr<int64_t>("num_pages").Attr<int64_t>("page_size").Attr<Numbers>("weights")
                    .Attr<int64_t>("norm").Attr<int64_t>("q_norm").Attr<int64_t>("k_norm").Attr<bool>("adjacent")
                    .Attr<float>("eps"));

TWINJET_HANDLER(twinjet_project, twinjet::project,
                ffi::Ffi::Bind().Arg<F32Buffer>().Arg<F32Buffer>().Arg<BytesBuffer>().Arg<I32Buffer>().Ret<F32Buffer>()
                    .Attr<int64_t>("T").Attr<int64_t>("B").Attr<int64_t>("MP").Attr<Numbers>("weights")
                    .Attr<int64_t>("post_norm").Attr<float>("eps"));

TWINJET_HANDLER(twinjet_mlp, twinjet::mlp,
                ffi::Ffi::Bind().Arg<F32Buffer>().Arg<BytesBuffer>().Arg<I32Buffer>().Ret<F32Buffer>()
                    .Attr<int64_t>("T").Attr<int64_t>("B").Attr<int64_t>("MP").Attr<Numbers>("gate_up")
                    .Attr<Numbers>("down").Attr<int64_t>("norm").Attr<int64_t>("post_norm").Attr<bool>("gelu")
                    .Attr<float>("eps"));

TWINJET_HANDLER(twinjet_head, twinjet::head,
                ffi::Ffi::Bind().Arg<F32Buffer>().Arg<BytesBuffer>().Arg<I32Buffer>().Ret<F32Buffer>()
                    .Attr<int64_t>("T").Attr<int64_t>("B").Attr<int64_t>("MP").Attr<Numbers>("weights")
                    .Attr<int64_t>("norm").Attr<float>("eps"));

TWINJET_HANDLER(twinjet_embed, twinjet::embed,
                ffi::Ffi::Bind().Arg<BytesBuffer>().Arg<I32Buffer>().Arg<I32Buffer>().Ret<F32Buffer>()
                    .Attr<int64_t>("T").Attr<int64_t>("B").Attr<int64_t>("MP").Attr<Numbers>("weights")
                    .Attr<float>("scale"));

TWINJET_HANDLER(twinjet_rope, twinjet::rope,
                ffi::Ffi::Bind().Arg<I32Buffer>().Ret<F32Buffer>()
                    .Attr<int64_t>("T").Attr<int64_t>("B").Attr<int64_t>("MP")
                    .Attr<ffi::Span<const float>>("frequencies").Attr<bool>("adjacent"));

TWINJET_HANDLER(twinjet_matmul, twinjet::matmul,
                ffi::Ffi::Bind().Arg<F32Buffer>().Arg<BytesBuffer>().Ret<F32Buffer>().Attr<Numbers>("weights"));
