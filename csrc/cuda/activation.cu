// silu_and_mul: out[t, i] = silu(x[t, i]) * x[t, I + i], silu(a) = a / (1 + exp(-a)); the gate of a SwiGLU block
// (Shazeer, "GLU Variants Improve Transformer", 2020).
//
// Layout     x [T, 2I], out [T, I], the elements of a row contiguous, rows strided.
// Algorithm  1. A row is cut into chunks of one 16-byte vector a thread (one element when unaligned).
//            2. The grid counts (row, chunk) pairs along x, in 64-bit offsets.
//            3. Each thread reads its gate and its up vector, computes in float32 and rounds once.
// Roofline   memory: 3 T I elements moved against some 5 T I float operations.
// Versions   1 expf and an exact division: 88 us for 2,048 rows of 2 x 14,336 in bf16, bound by arithmetic. 2 the two special
//            function instructions and no more: 2 ulp of a float32.
// Reached    see docs/performance.md.
#include "../common/cuda_dtype.h"
#include "../common/cuda_launch.h"

namespace research_engine::cuda {
namespace {

constexpr int kThreads = 256;
constexpr const char* kOp = "silu_and_mul";

// Where exp(-a) is beyond float32 the quotient is -0, and so is what this gives.
__device__ __forceinline__ float silu(float a) { return __fdividef(a, 1.0f + __expf(-a)); }

template <typename T, int kStep>
__global__ void __launch_bounds__(kThreads) silu_and_mul_kernel(const T* x, int64_t x_stride, T* out,
                                                                int64_t out_stride, int64_t size, unsigned chunks) {
  const int64_t row = blockIdx.x / chunks;
  const int64_t i = (static_cast<int64_t>(blockIdx.x % chunks) * kThreads + threadIdx.x) * kStep;
  if (i >= size) return;
  x += row * x_stride + i;
  out += row * out_stride + i;
  if constexpr (kStep > 1) {
    float gate[kWidth<T>], up[kWidth<T>];
    unpack<T>(*reinterpret_cast<const uint4*>(x), gate);
    unpack<T>(*reinterpret_cast<const uint4*>(x + size), up);
#pragma unroll
    for (int e = 0; e < kStep; ++e) gate[e] = silu(gate[e]) * up[e];
    *reinterpret_cast<uint4*>(out) = pack<T>(gate);
  } else {
    out[0] = from_float<T>(silu(to_float(x[0])) * to_float(x[size]));
  }
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
    const int64_t chunks = ceil_div(size, kThreads * (vectors ? kWidth<T> : 1));
    const auto kernel = vectors ? silu_and_mul_kernel<T, kWidth<T>> : silu_and_mul_kernel<T, 1>;
    launch(kOp, kernel, rows * chunks, kThreads, 0, stream, x.ptr<const T>(), x.strides[0], out.ptr<T>(),
           out.strides[0], size, static_cast<unsigned>(chunks));
  });
}

}  // namespace research_engine::cuda
