// From a run-time dtype to a C++ type, and the decision whether a loop is worth other threads.
#pragma once

#include <stdexcept>

#include "common/tensor_view.h"
#include "cpu/vec.h"

namespace research_engine::cpu {

// Calls f with a value of the element type: dispatch(x.dtype, [&](auto zero) { using T = decltype(zero); ... }).
template <typename F>
void dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(bf16{});
    default: throw std::invalid_argument("the CPU ops take float32 and bfloat16");
  }
}

// The same for the dtypes of a KV cache.
template <typename F>
void dispatch_cache(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f8e4m3: return f(e4m3{});
    case DType::i8: return f(int8_t{});
    default: return dispatch(dtype, f);
  }
}

// Elements below which waking the other threads costs more than they save.
constexpr int64_t kParallelElements = 32768;

}  // namespace research_engine::cpu
