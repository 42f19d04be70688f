// copy_blocks: copies whole KV blocks inside one cache (copy on write), all layers, keys and values in one launch.
//
// Layout     kv_cache [L, 2, N, Hkv, B, D], a block contiguous; pairs int64 [P, 2] = (source, destination) on the device.
// Algorithm  1. Work is P x L x 2 blocks, each cut into chunks of 16 KiB; the grid counts chunks along x.
//            2. A thread block moves its chunk in 16-byte vectors (single bytes when unaligned), four in flight a thread.
//            3. A pair with an id outside of [0, N) is skipped: never a wild access.
//            4. No pair's source may be another's destination, and destinations are distinct (the Python edge checks).
// Roofline   memory: 2 x P x L x 2 x Hkv B D elements moved, no arithmetic.
// Reached    not measured yet.
#include "../common/cuda_dtype.h"
#include "../common/cuda_launch.h"

namespace research_engine::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;
constexpr const char* kOp = "copy_blocks";

// Strides and sizes count units.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    copy_blocks_kernel(Unit* cache, int64_t layer_stride, int64_t side_stride, int64_t block_stride,
                       int64_t block_units, int64_t num_blocks, const int64_t* pairs, int64_t num_layers,
                       int64_t chunks, int64_t work) {
  for (int64_t item = blockIdx.x; item < work; item += gridDim.x) {
    const int64_t chunk = item % chunks, place = item / chunks;
    const int64_t side = place % 2, layer = place / 2 % num_layers, pair = place / 2 / num_layers;
    const int64_t source = pairs[2 * pair], destination = pairs[2 * pair + 1];
    if (source < 0 || source >= num_blocks || destination < 0 || destination >= num_blocks) continue;
    Unit* base = cache + layer * layer_stride + side * side_stride;
    const Unit* from = base + source * block_stride;
    Unit* to = base + destination * block_stride;
    const int64_t first = chunk * kThreads * kInFlight + threadIdx.x;
    Unit held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t unit = first + k * kThreads;
      if (unit < block_units) held[k] = from[unit];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t unit = first + k * kThreads;
      if (unit < block_units) to[unit] = held[k];
    }
  }
}

template <typename Unit> void copy(const TensorView& cache, const TensorView& pairs, Stream stream) {
  const int64_t bytes = element_size(cache.dtype), unit = static_cast<int64_t>(sizeof(Unit));
  const int64_t num_layers = cache.shape[0], num_blocks = cache.shape[2];
  const int64_t block_units = cache.shape[3] * cache.shape[4] * cache.shape[5] * bytes / unit;
  const int64_t chunks = ceil_div(block_units, kThreads * kInFlight);
  const int64_t work = pairs.shape[0] * num_layers * 2 * chunks;
  const int64_t grid = work < INT32_MAX ? work : INT32_MAX;
  launch(kOp, copy_blocks_kernel<Unit>, grid, kThreads, 0, stream, cache.ptr<Unit>(),
         cache.strides[0] * bytes / unit, cache.strides[1] * bytes / unit, cache.strides[2] * bytes / unit, block_units,
         num_blocks, pairs.ptr<const int64_t>(), num_layers, chunks, work);
}

}  // namespace

void copy_blocks(TensorView kv_cache, TensorView pairs, Stream stream) {
  if (pairs.shape[0] == 0 || kv_cache.numel() == 0) return;
  const DeviceGuard guard(kv_cache.device, kOp);
  const int64_t block_elements = kv_cache.shape[3] * kv_cache.shape[4] * kv_cache.shape[5];
  if (vector_aligned(kv_cache, kv_cache.strides[0]) && vector_aligned(kv_cache, kv_cache.strides[1]) &&
      vector_aligned(kv_cache, kv_cache.strides[2]) && vector_aligned(kv_cache, block_elements)) {
    copy<uint4>(kv_cache, pairs, stream);
  } else {
    copy<uint8_t>(kv_cache, pairs, stream);
  }
}

}  // namespace research_engine::cuda
