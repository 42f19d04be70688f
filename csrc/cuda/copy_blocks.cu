// copy_blocks: copies whole KV blocks inside one cache (copy on write), all layers, keys and values in one launch.
//
// Layout     kv_cache [L, 2, N, Hkv, B, D], a block contiguous; pairs int64 [P, 2] = (source, destination) on the device.
// Algorithm  1. Work is P x L x 2 blocks, each cut into chunks of 32 KiB; a persistent grid walks the chunks, neighbours side by
//               side, and asks for the next chunk's pair before it moves the current one.
//            2. A thread block moves its chunk in 16-byte vectors (single bytes when unaligned), eight in flight a thread, past
//               the L1 cache and first to leave the L2 cache: nobody reads them soon.
//            3. A pair with an id outside of [0, N) is skipped: never a wild access.
//            4. No pair's source may be another's destination, and destinations are distinct (the Python edge checks).
// Roofline   memory: 2 x P x L x 2 x Hkv B D elements moved, no arithmetic.
// Versions   1 a thread block a chunk of 16 KiB, four vectors in flight. 2 this one.
// Reached    3.54 TB/s on an H200, 83 % of a copy (docs/performance.md).
#include <algorithm>

#include "../common/cuda_dtype.h"
#include "../common/cuda_launch.h"

namespace research_engine::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 8;
constexpr int kBlocksPerSm = 8;
constexpr const char* kOp = "copy_blocks";

// Strides and sizes count units.
template <typename Unit> struct CopyParams {
  Unit* cache;
  int64_t layer_stride, side_stride, block_stride, block_units, num_blocks;
  const int64_t* pairs;
  int64_t num_layers, chunks, work;
};

template <typename Unit> struct Chunk {
  const Unit* from = nullptr;  // null: nothing to do
  Unit* to = nullptr;
  int64_t first = 0;  // unit of the block
};

template <typename Unit> __device__ inline Chunk<Unit> find_chunk(const CopyParams<Unit>& p, int64_t item) {
  if (item >= p.work) return {};
  const int64_t place = item / p.chunks;
  const int64_t side = place % 2, layer = place / 2 % p.num_layers, pair = place / 2 / p.num_layers;
  const int64_t source = p.pairs[2 * pair], destination = p.pairs[2 * pair + 1];
  if (source < 0 || source >= p.num_blocks || destination < 0 || destination >= p.num_blocks) return {};
  Unit* base = p.cache + layer * p.layer_stride + side * p.side_stride;
  return {base + source * p.block_stride, base + destination * p.block_stride, (item - place * p.chunks) * kThreads * kInFlight};
}

template <typename Unit> __global__ void __launch_bounds__(kThreads) copy_blocks_kernel(const CopyParams<Unit> p) {
  Chunk<Unit> next = find_chunk(p, blockIdx.x);
  for (int64_t item = blockIdx.x; item < p.work; item += gridDim.x) {
    const Chunk<Unit> chunk = next;
    next = find_chunk(p, item + gridDim.x);
    if (chunk.from == nullptr) continue;
    const int64_t first = chunk.first + threadIdx.x;
    Unit held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k * kThreads < p.block_units) held[k] = __ldcs(chunk.from + first + k * kThreads);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k * kThreads < p.block_units) __stcs(chunk.to + first + k * kThreads, held[k]);
    }
  }
}

template <typename Unit> void copy(const TensorView& cache, const TensorView& pairs, Stream stream) {
  const int64_t bytes = element_size(cache.dtype), unit = static_cast<int64_t>(sizeof(Unit));
  const int64_t num_layers = cache.shape[0], num_blocks = cache.shape[2];
  const int64_t block_units = cache.shape[3] * cache.shape[4] * cache.shape[5] * bytes / unit;
  const int64_t chunks = ceil_div(block_units, kThreads * kInFlight);
  const int64_t work = pairs.shape[0] * num_layers * 2 * chunks;
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, cache.device), kOp);
  const CopyParams<Unit> p{cache.ptr<Unit>(),
                           cache.strides[0] * bytes / unit,
                           cache.strides[1] * bytes / unit,
                           cache.strides[2] * bytes / unit,
                           block_units,
                           num_blocks,
                           pairs.ptr<const int64_t>(),
                           num_layers,
                           chunks,
                           work};
  launch(kOp, copy_blocks_kernel<Unit>, std::min<int64_t>(work, kBlocksPerSm * multiprocessors), kThreads, 0, stream, p);
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
