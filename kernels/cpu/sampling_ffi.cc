// XLA's view of sampling.
#include "ffi.h"
#include "sampling.h"

namespace twinjet {
namespace {

ffi::Error run_sample(F32Buffer logits, I32Buffer packed, I32Buffer, ResultI32 result, ResultI32 last_token, int64_t T,
                      int64_t B, int64_t MP) {
  const StepView step(packed.typed_data(), T, B, MP);
  const auto from = logits.dimensions(), to = result->dimensions();
  if (from.size() != 2 || to.size() != 2 || from[0] != step.S || to[0] != step.S || to[1] < 2 || to[1] % 2 != 0 ||
      last_token->element_count() != static_cast<size_t>(B) ||
      packed.element_count() != static_cast<size_t>(step.size)) {
    return invalid("sample: expected logits [S, V], a result [S, 2 + 2 n] and last tokens [B]");
  }
  const int64_t V = from[1], n = (to[1] - 2) / 2;
  if (V < 1 || n > V || n > kMaxLogprobs) {
    return invalid("sample: cannot give " + std::to_string(n) + " of " + std::to_string(V) + " log-probabilities");
  }
  KernelScope scope;
  sample(step, logits.typed_data(), V, n, result->typed_data(), scope.pool(), scope.scratch());
  for (int64_t i = 0; i < step.num_samples(); ++i) {
    last_token->typed_data()[step.sample_slot(i)] = result->typed_data()[i * to[1]];
  }
  scope.ends_step(step.tag(), result->typed_data(), step.num_samples() * to[1]);
  return ffi::Error::Success();
}

}  // namespace

TWINJET_HANDLER(twinjet_sample, run_sample,
                ffi::Ffi::Bind()
                    .Arg<F32Buffer>()  // logits [S, V]
                    .Arg<I32Buffer>()  // packed
                    .Arg<I32Buffer>()  // last_token [B], the result's own buffer
                    .Ret<I32Buffer>()  // [S, 2 + 2 n]
                    .Ret<I32Buffer>()  // last_token [B]
                    .Attr<int64_t>("T")
                    .Attr<int64_t>("B")
                    .Attr<int64_t>("MP"));

}  // namespace twinjet
