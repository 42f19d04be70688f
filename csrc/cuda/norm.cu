// rms_norm and fused_add_rms_norm: out = x / sqrt(mean(x^2) + eps) * (weight_offset + weight) over rows of H elements
// (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019); the fused form first adds x to the residual.
//
// Layout     x, out, residual [T, H], the elements of a row contiguous, rows strided; weight [H].
// Algorithm  1. One thread block a row. A row of up to 2 x 1,024 vectors of 16 bytes stays in registers: every load, the
//               weight's too, is under way before the first is used. Longer or unaligned rows are walked twice.
//            2. Squares are summed in float32; the fused form stores x + residual, rounded, and squares that.
//            3. Sum over the warp by shuffles, over the warps through shared memory, in a fixed order. Threads and order
//               follow from H alone, so that a row has the same bits in every batch.
//            4. Scale, multiply by the weight, round once.
// Roofline   memory: 2 T H elements moved by rms_norm, 4 T H by the fused form, against some 4 T H float operations.
// Versions   1 two passes over the row: 34 us for 2,048 fused rows of 4,096 in bf16, since a thread's loads wait for each other.
//            2 the row in registers.
// Reached    see docs/performance.md.
// Tried      on an H200, us at 8,192 x 4,096 plain and fused (this kernel: 41.4 and 71.3; a copy of the plain form's bytes: 38.2):
//            loads and stores that leave the L2 cache first 41.9 and 74.6; one vector a thread 45.5 and 71.6, four 52.6 and 71.3;
//            a persistent grid with the next row in registers 40.1 and 75.2, with a ring of bulk copies 39.6 and 75.2 at best. Four
//            in a hundred of the plain form are not worth a second kernel.
#include <algorithm>

#include "../common/cuda_dtype.h"
#include "launch.cuh"

namespace research_engine::cuda {
namespace {

// Sum over the thread block, the same bits in every thread. `partial` holds one float a warp.
__device__ float block_sum(float value, float* partial) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) sum += partial[warp];
  return sum;
}

template <typename T> struct NormParams {
  const T* x;
  int64_t x_stride;
  T* residual;  // null in the plain form
  int64_t residual_stride;
  const T* weight;
  T* out;  // x itself in the fused form
  int64_t out_stride;
  int hidden_size;
  float eps, weight_offset;
};

// A row in registers: thread t holds the 16-byte vectors t, t + blockDim.x ...
template <typename T, int kVectors, bool kFused>
__global__ void __launch_bounds__(1024) rms_norm_kernel(const __grid_constant__ AfterPredecessor<NormParams<T>> after) {
  const NormParams<T>& p = after.wait();
  __shared__ float partial[32];
  const int64_t row = blockIdx.x;
  const auto* x_row = reinterpret_cast<const uint4*>(p.x + row * p.x_stride);
  auto* residual_row = reinterpret_cast<uint4*>(p.residual + (kFused ? row * p.residual_stride : 0));
  const int vectors = p.hidden_size / kWidth<T>;
  uint4 held[kVectors], addends[kVectors], weights[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at >= vectors) continue;
    held[v] = x_row[at];
    if constexpr (kFused) addends[v] = residual_row[at];
    weights[v] = reinterpret_cast<const uint4*>(p.weight)[at];
  }

  float sum = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at >= vectors) continue;
    float values[kWidth<T>];
    unpack<T>(held[v], values);
    if constexpr (kFused) {
      float addend[kWidth<T>];
      unpack<T>(addends[v], addend);
#pragma unroll
      for (int e = 0; e < kWidth<T>; ++e) values[e] += addend[e];
      held[v] = pack<T>(values);
      residual_row[at] = held[v];
      unpack<T>(held[v], values);
    }
#pragma unroll
    for (int e = 0; e < kWidth<T>; ++e) sum += values[e] * values[e];
  }
  const float factor = 1.0f / sqrtf(block_sum(sum, partial) / p.hidden_size + p.eps);

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at >= vectors) continue;
    float values[kWidth<T>], scales[kWidth<T>];
    unpack<T>(held[v], values);
    unpack<T>(weights[v], scales);
#pragma unroll
    for (int e = 0; e < kWidth<T>; ++e) values[e] = values[e] * factor * (scales[e] + p.weight_offset);
    reinterpret_cast<uint4*>(p.out + row * p.out_stride)[at] = pack<T>(values);
  }
}

// Any row, element by element, read twice.
template <typename T>
__global__ void __launch_bounds__(1024)
    rms_norm_elements_kernel(const __grid_constant__ AfterPredecessor<NormParams<T>> after) {
  const NormParams<T>& p = after.wait();
  __shared__ float partial[32];
  const int64_t row = blockIdx.x;
  const int hidden_size = p.hidden_size;
  const T* x = p.x + row * p.x_stride;
  T* out = p.out + row * p.out_stride;
  T* residual = p.residual != nullptr ? p.residual + row * p.residual_stride : nullptr;
  float sum = 0;
  for (int i = threadIdx.x; i < hidden_size; i += blockDim.x) {
    float value = to_float(x[i]);
    if (residual != nullptr) {
      residual[i] = from_float<T>(value + to_float(residual[i]));
      value = to_float(residual[i]);
    }
    sum += value * value;
  }
  const float factor = 1.0f / sqrtf(block_sum(sum, partial) / hidden_size + p.eps);
  // Each thread reads back the elements that it wrote itself, so that no further barrier is needed.
  const T* normed = residual != nullptr ? residual : x;
  for (int i = threadIdx.x; i < hidden_size; i += blockDim.x) {
    out[i] = from_float<T>(to_float(normed[i]) * factor * (to_float(p.weight[i]) + p.weight_offset));
  }
}

constexpr int64_t kMostVectors = 2;  // of a thread

void norm(const char* op, TensorView x, TensorView residual, TensorView weight, TensorView out, float eps,
          float weight_offset, Stream stream) {
  const int64_t rows = x.shape[0], hidden_size = x.shape[1];
  if (rows == 0 || hidden_size == 0) return;
  const DeviceGuard guard(x.device, op);
  dispatch_float(x.dtype, op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto kernel, int64_t wanted_threads) {
      const int64_t warps = std::min<int64_t>(ceil_div(wanted_threads, 32), 32);
      const NormParams<T> params{x.ptr<const T>(), x.strides[0], residual.ptr<T>(), residual.strides[0],
                                 weight.ptr<const T>(), out.ptr<T>(), out.strides[0], static_cast<int>(hidden_size),
                                 eps, weight_offset};
      launch_after(op, kernel, {rows, static_cast<unsigned>(32 * warps)}, stream, params);
    };
    const int64_t vectors = hidden_size / kWidth<T>;
    const bool aligned = hidden_size % kWidth<T> == 0 && vector_aligned(x, x.strides[0]) &&
                         vector_aligned(out, out.strides[0]) && vector_aligned(weight, 0) &&
                         (!residual || vector_aligned(residual, residual.strides[0]));
    if (!aligned || vectors > kMostVectors * 1024) {
      run(rms_norm_elements_kernel<T>, ceil_div(hidden_size, 4));
    } else if (vectors <= 256) {  // a short row: the fewest instructions in a row
      run(residual ? rms_norm_kernel<T, 1, true> : rms_norm_kernel<T, 1, false>, vectors);
    } else {
      run(residual ? rms_norm_kernel<T, 2, true> : rms_norm_kernel<T, 2, false>, ceil_div(vectors, 2));
    }
  });
}

}  // namespace

void rms_norm(TensorView x, TensorView weight, TensorView out, float eps, float weight_offset, Stream stream) {
  norm("rms_norm", x, TensorView{}, weight, out, eps, weight_offset, stream);
}

void fused_add_rms_norm(TensorView x, TensorView residual, TensorView weight, float eps, float weight_offset,
                        Stream stream) {
  norm("fused_add_rms_norm", x, residual, weight, x, eps, weight_offset, stream);
}

}  // namespace research_engine::cuda
