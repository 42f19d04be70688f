// What a tensor is to the kernels: a pointer, a shape, strides in elements, a type and a device. Nothing of Python or torch.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace research_engine {

enum class DType : int8_t { f32 = 0, f16 = 1, bf16 = 2, f8e4m3 = 3, i32 = 4, i64 = 5, u8 = 6, i8 = 7 };

constexpr int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::f32: case DType::i32: return 4;
    case DType::f16: case DType::bf16: return 2;
    case DType::i64: return 8;
    default: return 1;
  }
}

// A view never owns its memory. `data == nullptr` stands for "argument not given".
struct TensorView {
  static constexpr int kMaxDims = 6;
  static constexpr int kCpu = -1;

  void* data = nullptr;
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};  // in elements
  int ndim = 0;
  DType dtype = DType::f32;
  int device = kCpu;  // CUDA ordinal, or kCpu

  explicit operator bool() const { return data != nullptr; }
  template <typename T> T* ptr() const { return static_cast<T*>(data); }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
};

}  // namespace research_engine
