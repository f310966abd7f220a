// Defines handlers that XLA calls, and checks that concern all of them.
#pragma once

#include <string>

#include "kv.h"
#include "xla/ffi/api/ffi.h"

// As XLA_FFI_DEFINE_HANDLER_SYMBOL, visible outside the library.
#define TWINJET_HANDLER(symbol, impl, ...)                                                              \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame* call_frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, impl, __VA_ARGS__)

namespace twinjet {

namespace ffi = xla::ffi;

using F32Buffer = ffi::Buffer<ffi::F32>;
using I32Buffer = ffi::Buffer<ffi::S32>;
using BytesBuffer = ffi::Buffer<ffi::U8>;
using ResultF32 = ffi::Result<F32Buffer>;
using ResultI32 = ffi::Result<I32Buffer>;
using ResultAny = ffi::Result<ffi::AnyBuffer>;

inline ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument("twinjet kernels: " + message); }

// The type of a KV pool; false: of none.
inline bool kv_type(const ffi::AnyBuffer& pool, KVType* type) {
  switch (pool.element_type()) {
    case ffi::F16: *type = KVType::kF16; return true;
    case ffi::F32: *type = KVType::kF32; return true;
    case ffi::S8: *type = KVType::kI8; return true;
    default: return false;
  }
}

}  // namespace twinjet
