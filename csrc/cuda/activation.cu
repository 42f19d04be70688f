// silu_and_mul: out[t, i] = silu(x[t, i]) * x[t, I + i], silu(a) = a / (1 + exp(-a)); the gate of a SwiGLU block
// (Shazeer, "GLU Variants Improve Transformer", 2020).
//
// Layout     x [T, 2I], out [T, I], the elements of a row contiguous, rows strided.
// Algorithm  1. A row is cut into chunks of one or four 16-byte vectors a thread (one element when unaligned).
//            2. The grid counts (row, chunk) pairs along x, in 64-bit offsets.
//            3. Each thread reads its gate and its up vectors, computes in float32 and rounds once.
// Roofline   memory: 3 T I elements moved against some 5 T I float operations.
// Versions   1 expf and an exact division: 88 us for 2,048 rows of 2 x 14,336 in bf16, bound by arithmetic. 2 the two special
//            function instructions and no more: 2 ulp of a float32. 3 four vectors a thread: 2.5 of 4.3 TB/s before.
// Reached    see docs/performance.md.
#include "../common/cuda_dtype.h"
#include "launch.cuh"

namespace research_engine::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kManyElements = 4 << 20;  // of out
constexpr const char* kOp = "silu_and_mul";

// Where exp(-a) is beyond float32 the quotient is -0, and so is what this gives.
__device__ __forceinline__ float silu(float a) { return __fdividef(a, 1.0f + __expf(-a)); }

template <typename T> struct GateParams {
  const T* x;
  int64_t x_stride;
  T* out;
  int64_t out_stride, size;
  unsigned chunks;
};

// kVectors of 16 bytes a thread, of gate and up each, all on their way before the first is used.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kThreads) silu_and_mul_kernel(const __grid_constant__ AfterPredecessor<GateParams<T>> after) {
  const GateParams<T>& p = after.wait();
  const int64_t row = blockIdx.x / p.chunks, vectors = p.size / kWidth<T>;
  const int64_t first = static_cast<int64_t>(blockIdx.x % p.chunks) * (kThreads * kVectors) + threadIdx.x;
  const auto* gates = reinterpret_cast<const uint4*>(p.x + row * p.x_stride) + first;
  const auto* ups = gates + vectors;
  auto* out = reinterpret_cast<uint4*>(p.out + row * p.out_stride) + first;
  uint4 gate[kVectors], up[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (first + v * kThreads >= vectors) continue;
    gate[v] = gates[v * kThreads];
    up[v] = ups[v * kThreads];
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (first + v * kThreads >= vectors) continue;
    float a[kWidth<T>], b[kWidth<T>];
    unpack<T>(gate[v], a);
    unpack<T>(up[v], b);
#pragma unroll
    for (int e = 0; e < kWidth<T>; ++e) a[e] = silu(a[e]) * b[e];
    out[v * kThreads] = pack<T>(a);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    silu_and_mul_elements_kernel(const __grid_constant__ AfterPredecessor<GateParams<T>> after) {
  const GateParams<T>& p = after.wait();
  const int64_t row = blockIdx.x / p.chunks, i = static_cast<int64_t>(blockIdx.x % p.chunks) * kThreads + threadIdx.x;
  if (i >= p.size) return;
  const T* x = p.x + row * p.x_stride + i;
  p.out[row * p.out_stride + i] = from_float<T>(silu(to_float(x[0])) * to_float(x[p.size]));
}

}  // namespace

void silu_and_mul(TensorView x, TensorView out, Stream stream) {
  const int64_t rows = out.shape[0], size = out.shape[1];
  if (rows == 0 || size == 0) return;
  const DeviceGuard guard(x.device, kOp);
  dispatch_float(x.dtype, kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool vectors = size % kWidth<T> == 0 && vector_aligned(x, x.strides[0]) &&
                         vector_aligned(out, out.strides[0]);
    const auto run = [&](auto kernel, int64_t elements) {
      const int64_t chunks = ceil_div(size, kThreads * elements);
      const GateParams<T> params{x.ptr<const T>(), x.strides[0], out.ptr<T>(), out.strides[0], size, static_cast<unsigned>(chunks)};
      launch_after(kOp, kernel, {rows * chunks, kThreads}, stream, params);
    };
    if (!vectors) return run(silu_and_mul_elements_kernel<T>, 1);
    // few rows: over as many multiprocessors as there are; many: as much under way in each as it takes
    rows * size < kManyElements ? run(silu_and_mul_kernel<T, 1>, kWidth<T>) : run(silu_and_mul_kernel<T, 4>, 4 * kWidth<T>);
  });
}

}  // namespace research_engine::cuda
