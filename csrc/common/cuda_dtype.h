// Storage types of the CUDA ops: conversion to and from float32, vectors of them, dispatch by DType.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "tensor_view.h"

namespace research_engine::cuda {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(__nv_fp8_e4m3 value) { return static_cast<float>(value); }
__device__ inline float to_float(int8_t value) { return value; }

template <typename T> __device__ inline T from_float(float value);
template <> __device__ inline float from_float<float>(float value) { return value; }
template <> __device__ inline __half from_float<__half>(float value) { return __float2half_rn(value); }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
// Quantised elements: to the nearest, ties to even, saturated at +-448 (NaN stays one) and +-127 (NaN becomes 0).
template <> __device__ inline __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float value) {
  __nv_fp8_e4m3 result;
  result.__x = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  return result;
}
template <> __device__ inline int8_t from_float<int8_t>(float value) {
  const float bounded = value < -127.0f ? -127.0f : value > 127.0f ? 127.0f : value;
  return static_cast<int8_t>(value != value ? 0.0f : rintf(bounded));
}

// A vector: 16 bytes, of quantised elements 8 bytes; and how many elements it has.
template <typename T> using Vector = std::conditional_t<sizeof(T) == 1, uint2, uint4>;
template <typename T> inline constexpr int kWidth = static_cast<int>(sizeof(Vector<T>) / sizeof(T));

template <typename T> __device__ inline void unpack(const Vector<T>& raw, float (&values)[kWidth<T>]) {
  T elements[kWidth<T>];
  memcpy(elements, &raw, sizeof(raw));
#pragma unroll
  for (int e = 0; e < kWidth<T>; ++e) values[e] = to_float(elements[e]);
}

template <typename T> __device__ inline uint4 pack(const float (&values)[kWidth<T>]) {
  T elements[kWidth<T>];
#pragma unroll
  for (int e = 0; e < kWidth<T>; ++e) elements[e] = from_float<T>(values[e]);
  uint4 raw;
  memcpy(&raw, elements, sizeof(raw));
  return raw;
}

// A vector whose address need not be aligned; elements from `count` on read as zero and are not touched.
template <typename T> __device__ inline Vector<T> load_elements(const T* source, int count) {
  T elements[kWidth<T>];
#pragma unroll
  for (int e = 0; e < kWidth<T>; ++e) elements[e] = e < count ? source[e] : from_float<T>(0.0f);
  Vector<T> raw;
  memcpy(&raw, elements, sizeof(raw));
  return raw;
}

#ifndef __CUDACC_RTC__  // the host's part
// True when rows that start at `data` and lie `stride` elements apart can be read in 16-byte vectors.
inline bool vector_aligned(const TensorView& view, int64_t stride) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && stride * element_size(view.dtype) % 16 == 0;
}

template <typename T> struct TypeTag { using type = T; };

// Calls function(TypeTag<T>{}) with the C++ type of `dtype`.
template <typename Function> void dispatch_float(DType dtype, const char* op, Function&& function) {
  switch (dtype) {
    case DType::f32: return function(TypeTag<float>{});
    case DType::f16: return function(TypeTag<__half>{});
    case DType::bf16: return function(TypeTag<__nv_bfloat16>{});
    default:
      throw std::runtime_error(std::string(op) + ": dtype code " + std::to_string(static_cast<int>(dtype)) +
                               " has no CUDA kernel; float32, float16 and bfloat16 have");
  }
}

// The same for KV caches, which may be quantised.
template <typename Function> void dispatch_cache(DType dtype, const char* op, Function&& function) {
  switch (dtype) {
    case DType::f8e4m3: return function(TypeTag<__nv_fp8_e4m3>{});
    case DType::i8: return function(TypeTag<int8_t>{});
    default: return dispatch_float(dtype, op, function);
  }
}
#endif

}  // namespace research_engine::cuda
