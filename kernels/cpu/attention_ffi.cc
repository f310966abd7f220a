// XLA's view of attention and of the KV pool.
#include "attention.h"
#include "ffi.h"

namespace twinjet {
namespace {

// The pool in a buffer, and how many layers it has.
ffi::ErrorOr<KVPool> pool_of(ffi::AnyBuffer kv, KVLayout layout, int64_t num_heads, int64_t* num_layers) {
  if (!kv_supported(layout, num_heads)) {
    return ffi::Unexpected(invalid(
        "expected pages of a multiple of 16 tokens, a head dim that is a multiple of 16 and query heads that are a multiple "
        "of KV heads, got " + std::to_string(layout.page_size) + ", " + std::to_string(layout.head_dim) + ", " +
        std::to_string(num_heads) + " and " + std::to_string(layout.num_heads)));
  }
  if (!kv_type(kv, &layout.type)) return ffi::Unexpected(invalid("expected a KV pool of float16, float32 or int8"));
  const int64_t size = static_cast<int64_t>(kv.element_count());
  if (layout.num_pages <= 0 || size % layout.layer_elements() != 0) {
    return ffi::Unexpected(invalid("a KV pool of " + std::to_string(size) + " elements is no whole number of layers of " +
                                   std::to_string(layout.layer_elements())));
  }
  *num_layers = size / layout.layer_elements();
  return KVPool{kv.untyped_data(), layout};
}

ffi::Error run_attend(F32Buffer q, ffi::AnyBuffer kv, I32Buffer packed, ResultF32 out, int64_t T, int64_t B, int64_t MP,
                      int64_t layer, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t num_pages,
                      int64_t page_size, int64_t window, float scale, float soft_cap) {
  int64_t num_layers = 0;
  auto pool = pool_of(kv, {num_pages, page_size, num_kv_heads, head_dim, {}}, num_heads, &num_layers);
  if (pool.has_error()) return pool.error();
  const StepView step(packed.typed_data(), T, B, MP);
  const size_t size = static_cast<size_t>(T * num_heads * head_dim);
  if (q.element_count() != size || out->element_count() != size || layer < 0 || layer >= num_layers ||
      packed.element_count() != static_cast<size_t>(step.size)) {
    return invalid("attend: shapes do not fit the attributes");
  }
  const KernelScope scope;
  attend({num_heads, layer, window, scale, soft_cap}, *pool, step, q.typed_data(), out->typed_data(), scope.pool(),
         scope.scratch());
  return ffi::Error::Success();
}

ffi::Error run_append(F32Buffer keys, F32Buffer values, ffi::AnyBuffer, I32Buffer packed, ResultAny kv, int64_t T,
                      int64_t B, int64_t MP, int64_t layer, int64_t num_kv_heads, int64_t head_dim, int64_t num_pages,
                      int64_t page_size) {
  int64_t num_layers = 0;
  auto pool = pool_of(*kv, {num_pages, page_size, num_kv_heads, head_dim, {}}, num_kv_heads, &num_layers);
  if (pool.has_error()) return pool.error();
  const StepView step(packed.typed_data(), T, B, MP);
  const size_t size = static_cast<size_t>(T * num_kv_heads * head_dim);
  if (keys.element_count() != size || values.element_count() != size || layer < 0 || layer >= num_layers ||
      packed.element_count() != static_cast<size_t>(step.size)) {
    return invalid("append_kv: shapes do not fit the attributes");
  }
  const KernelScope scope(Clocked::kNot);
  for (int64_t row = 0; row < step.num_rows(); ++row) {
    const int64_t position = step.position(row), page = step.pages(step.slot(row))[position / page_size];
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      const int64_t at = (row * num_kv_heads + head) * head_dim;
      append_kv(*pool, layer, page, position, head, keys.typed_data() + at, values.typed_data() + at);
    }
  }
  return ffi::Error::Success();
}

ffi::Error run_gather(ffi::AnyBuffer kv, I32Buffer rows, ResultAny out, int64_t num_kv_heads, int64_t head_dim,
                      int64_t num_pages, int64_t page_size) {
  int64_t num_layers = 0;
  auto pool = pool_of(kv, {num_pages, page_size, num_kv_heads, head_dim, {}}, num_kv_heads, &num_layers);
  if (pool.has_error()) return pool.error();
  const int64_t M = static_cast<int64_t>(rows.element_count());
  if (out->element_type() != kv.element_type() ||
      static_cast<int64_t>(out->element_count()) != num_layers * 2 * M * num_kv_heads * pool->layout.row_elements()) {
    return invalid("gather_kv: expected [L, 2, M, K, W] of the pool's type");
  }
  const KernelScope scope(Clocked::kNot);
  gather_kv(*pool, num_layers, rows.typed_data(), M, out->untyped_data(), scope.pool());
  return ffi::Error::Success();
}

ffi::Error run_scatter(ffi::AnyBuffer, I32Buffer rows, ffi::AnyBuffer from, ResultAny kv, int64_t num_kv_heads,
                       int64_t head_dim, int64_t num_pages, int64_t page_size) {
  int64_t num_layers = 0;
  auto pool = pool_of(*kv, {num_pages, page_size, num_kv_heads, head_dim, {}}, num_kv_heads, &num_layers);
  if (pool.has_error()) return pool.error();
  const int64_t M = static_cast<int64_t>(rows.element_count());
  if (from.element_type() != kv->element_type() ||
      static_cast<int64_t>(from.element_count()) != num_layers * 2 * M * num_kv_heads * pool->layout.row_elements()) {
    return invalid("scatter_kv: expected [L, 2, M, K, W] of the pool's type");
  }
  const KernelScope scope(Clocked::kNot);
  scatter_kv(*pool, num_layers, rows.typed_data(), M, from.untyped_data(), scope.pool());
  return ffi::Error::Success();
}

}  // namespace

TWINJET_HANDLER(twinjet_attend, run_attend,
                ffi::Ffi::Bind()
                    .Arg<F32Buffer>()       // q [T, N * H]
                    .Arg<ffi::AnyBuffer>()  // KV pool
                    .Arg<I32Buffer>()       // packed
                    .Ret<F32Buffer>()       // [T, N * H]
                    .Attr<int64_t>("T")
                    .Attr<int64_t>("B")
                    .Attr<int64_t>("MP")
                    .Attr<int64_t>("layer")
                    .Attr<int64_t>("num_heads")
                    .Attr<int64_t>("num_kv_heads")
                    .Attr<int64_t>("head_dim")
                    .Attr<int64_t>("num_pages")
                    .Attr<int64_t>("page_size")
                    .Attr<int64_t>("window")
                    .Attr<float>("scale")
                    .Attr<float>("soft_cap"));

TWINJET_HANDLER(twinjet_append_kv, run_append,
                ffi::Ffi::Bind()
                    .Arg<F32Buffer>()       // keys [T, K, H]
                    .Arg<F32Buffer>()       // values [T, K, H]
                    .Arg<ffi::AnyBuffer>()  // KV pool, the result's own buffer
                    .Arg<I32Buffer>()       // packed
                    .Ret<ffi::AnyBuffer>()  // KV pool
                    .Attr<int64_t>("T")
                    .Attr<int64_t>("B")
                    .Attr<int64_t>("MP")
                    .Attr<int64_t>("layer")
                    .Attr<int64_t>("num_kv_heads")
                    .Attr<int64_t>("head_dim")
                    .Attr<int64_t>("num_pages")
                    .Attr<int64_t>("page_size"));

TWINJET_HANDLER(twinjet_gather_kv, run_gather,
                ffi::Ffi::Bind()
                    .Arg<ffi::AnyBuffer>()  // KV pool
                    .Arg<I32Buffer>()       // pool rows [M]
                    .Ret<ffi::AnyBuffer>()  // [L, 2, M, K, W]
                    .Attr<int64_t>("num_kv_heads")
                    .Attr<int64_t>("head_dim")
                    .Attr<int64_t>("num_pages")
                    .Attr<int64_t>("page_size"));

TWINJET_HANDLER(twinjet_scatter_kv, run_scatter,
                ffi::Ffi::Bind()
                    .Arg<ffi::AnyBuffer>()  // KV pool, the result's own buffer
                    .Arg<I32Buffer>()       // pool rows [M]
                    .Arg<ffi::AnyBuffer>()  // [L, 2, M, K, W]
                    .Ret<ffi::AnyBuffer>()  // KV pool
                    .Attr<int64_t>("num_kv_heads")
                    .Attr<int64_t>("head_dim")
                    .Attr<int64_t>("num_pages")
                    .Attr<int64_t>("page_size"));

}  // namespace twinjet
