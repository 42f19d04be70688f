// rms_norm and fused_add_rms_norm: out = x / sqrt(mean(x^2) + eps) * (weight_offset + weight) over rows of H elements
// (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019); the fused form first adds x to the residual.
//
// Layout     x, out, residual [T, H], the elements of a row contiguous, rows strided; weight [H].
// Algorithm  1. One thread block a row; each thread walks the row in 16-byte vectors (single elements when unaligned).
//            2. Pass one sums the squares in float32; the fused form stores x + residual, rounded, and squares that.
//            3. Sum over the warp by shuffles, over the warps through shared memory, in a fixed order.
//            4. Pass two reads the row again (from L1 or L2), scales it, multiplies by the weight and rounds once.
// Roofline   memory: 2 T H elements moved by rms_norm, 4 T H by the fused form, against some 4 T H float operations.
// Reached    not measured yet.
#include "../common/cuda_dtype.h"
#include "../common/cuda_launch.h"
#include "cluster.cuh"

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

// `residual` is null in the plain form; in the fused form `out` is x itself.
template <typename T, int kStep>
__global__ void __launch_bounds__(1024) rms_norm_kernel(const T* x, int64_t x_stride, T* residual,
                                                        int64_t residual_stride, const T* weight, T* out,
                                                        int64_t out_stride, int hidden_size, float eps,
                                                        float weight_offset) {
  __shared__ float partial[32];
  start_overlapped();
  const int64_t row = blockIdx.x;
  x += row * x_stride;
  out += row * out_stride;
  if (residual != nullptr) residual += row * residual_stride;
  const T* normed = residual != nullptr ? residual : x;

  float sum = 0;
  for (int i = threadIdx.x * kStep; i < hidden_size; i += blockDim.x * kStep) {
    float values[kWidth<T>];
    unpack<T>(kStep > 1 ? *reinterpret_cast<const uint4*>(x + i) : load_elements(x + i, 1), values);
    if (residual != nullptr) {
      float addend[kWidth<T>];
      unpack<T>(kStep > 1 ? *reinterpret_cast<const uint4*>(residual + i) : load_elements(residual + i, 1), addend);
#pragma unroll
      for (int e = 0; e < kStep; ++e) values[e] = to_float(from_float<T>(values[e] + addend[e]));
      if constexpr (kStep > 1) {
        *reinterpret_cast<uint4*>(residual + i) = pack<T>(values);
      } else {
        residual[i] = from_float<T>(values[0]);
      }
    }
#pragma unroll
    for (int e = 0; e < kStep; ++e) sum += values[e] * values[e];
  }
  const float factor = 1.0f / sqrtf(block_sum(sum, partial) / hidden_size + eps);

  // Each thread reads back the elements that it wrote itself, so that no further barrier is needed.
  for (int i = threadIdx.x * kStep; i < hidden_size; i += blockDim.x * kStep) {
    if constexpr (kStep > 1) {
      float values[kWidth<T>], weights[kWidth<T>];
      unpack<T>(*reinterpret_cast<const uint4*>(normed + i), values);
      unpack<T>(*reinterpret_cast<const uint4*>(weight + i), weights);
#pragma unroll
      for (int e = 0; e < kStep; ++e) values[e] = values[e] * factor * (weights[e] + weight_offset);
      *reinterpret_cast<uint4*>(out + i) = pack<T>(values);
    } else {
      out[i] = from_float<T>(to_float(normed[i]) * factor * (to_float(weight[i]) + weight_offset));
    }
  }
}

void norm(const char* op, TensorView x, TensorView residual, TensorView weight, TensorView out, float eps,
          float weight_offset, Stream stream) {
  const int64_t rows = x.shape[0], hidden_size = x.shape[1];
  if (rows == 0 || hidden_size == 0) return;
  const DeviceGuard guard(x.device, op);
  dispatch_float(x.dtype, op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool vectors = hidden_size % kWidth<T> == 0 && vector_aligned(x, x.strides[0]) &&
                         vector_aligned(out, out.strides[0]) && vector_aligned(weight, 0) &&
                         (!residual || vector_aligned(residual, residual.strides[0]));
    const int64_t steps = vectors ? hidden_size / kWidth<T> : hidden_size;
    const int64_t warps = ceil_div(ceil_div(steps, 32), 4);  // four steps a thread, until 1,024 threads are reached
    const unsigned threads = static_cast<unsigned>(32 * (warps < 32 ? warps : 32));
    const auto kernel = vectors ? rms_norm_kernel<T, kWidth<T>> : rms_norm_kernel<T, 1>;
    launch_overlapped(op, kernel, rows, threads, stream, x.ptr<const T>(), x.strides[0], residual.ptr<T>(),
           residual.strides[0], weight.ptr<const T>(), out.ptr<T>(), out.strides[0], static_cast<int>(hidden_size), eps,
           weight_offset);
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
