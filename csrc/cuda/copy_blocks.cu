// copy_blocks: copies whole KV blocks inside one cache (copy on write), all layers, keys and values in one launch.
//
// Layout     kv_cache [L, 2, N, Hkv, B, D], a block contiguous; pairs int64 [P, 2] = (source, destination) on the device.
// Algorithm  1. Work is P x L x 2 blocks, each cut into even chunks of up to 32 KiB. A persistent grid walks the chunks, a cache
//               plane's after the other's.
//            2. On sm_90 a thread block is one thread that has the copy engine bring chunks to a ring of six places in shared
//               memory and write them from there: four on their way in, two on their way out. No register holds data.
//            3. On older GPUs, for blocks of less than 16 KiB and for unaligned ones, 256 threads move a chunk in 16-byte vectors
//               (single bytes when unaligned), eight in flight a thread, past the L1 cache and first to leave the L2 cache; the
//               next chunk's pair is asked for before the current chunk is moved.
//            4. A pair with an id outside of [0, N) is skipped: never a wild access.
//            5. No pair's source may be another's destination, and destinations are distinct (the Python edge checks).
// Roofline   memory: 2 x P x L x 2 x Hkv B D elements moved, no arithmetic.
// Versions   1 a thread block a chunk of 16 KiB, four vectors in flight.
//            2 chunks of 32 KiB by 256 threads as in step 3: 602 us for 512 pairs and 43.1 us for 32 pairs of a cache of 32 layers
//              and blocks of 32 KiB on an H200, 3.57 and 3.11 TB/s.
//            3 the copy engine: 553 and 40.1 us, 3.88 and 3.34 TB/s, of 504 and 38.2 us that a contiguous copy of the same bytes
//              takes.
// Tried      on the same machine, us for 512 and 32 pairs: plain loads and stores instead of the hints 575 and 42.0; a thread block
//            a chunk 565 and 41.6; two vectors in flight 595 and 42.1; the next chunk's loads before this one's stores 571 and
//            40.6 at best; the copy engine in the order pair, layer, side 563 and 40.5, with 16 KiB x 6 of two blocks a
//            multiprocessor 564 and 40.4, with 4 KiB x 8 of six 556 and 40.7.
#include <algorithm>

#include "../common/cuda_dtype.h"
#include "launch.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

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

constexpr int64_t kChunkBytes = 32 * 1024;
constexpr int kPlaces = 6;  // of the ring
constexpr int kDraining = 2;  // of them, those on their way out

struct BulkParams {
  char* cache;
  int64_t layer_stride, side_stride, block_stride, block_bytes, num_blocks;
  const int64_t* pairs;
  int64_t num_pairs, chunks, chunk_bytes, work;
};

template <int kCount> __global__ void __launch_bounds__(32) copy_blocks_bulk_kernel(const BulkParams p) {
  if constexpr (kHasBulkCopies) {
    extern __shared__ __align__(128) char ring[];
    if (threadIdx.x != 0) return;
    const uint32_t data = shared_address(ring), full = data + static_cast<uint32_t>(kCount * p.chunk_bytes);
#pragma unroll
    for (int i = 0; i < kCount; ++i) mbarrier_init(full + 8 * i, 1);
    mbarrier_init_fence();
    char* to[kCount];  // null: nothing to do
    int bytes[kCount];
    const auto load = [&](int64_t item, int place) {
      const int64_t chunk = item % p.chunks, block = item / p.chunks;
      const int64_t pair = block % p.num_pairs, side = block / p.num_pairs % 2, layer = block / p.num_pairs / 2;
      const int64_t source = p.pairs[2 * pair], destination = p.pairs[2 * pair + 1], first = chunk * p.chunk_bytes;
      const bool valid = source >= 0 && source < p.num_blocks && destination >= 0 && destination < p.num_blocks;
      char* base = p.cache + layer * p.layer_stride + side * p.side_stride + first;
      to[place] = valid ? base + destination * p.block_stride : nullptr;
      bytes[place] = static_cast<int>(min(p.chunk_bytes, p.block_bytes - first));
      const uint32_t barrier = full + 8 * place;
      if (valid) {
        mbarrier_arrive_expect(barrier, bytes[place]);
        bulk_load(data + static_cast<uint32_t>(place * p.chunk_bytes), base + source * p.block_stride, bytes[place], barrier);
      } else {
        mbarrier_arrive(barrier);  // ends the phase, as a load would
      }
    };
    constexpr int kLoading = kCount - kDraining;
    const int64_t step = gridDim.x;
#pragma unroll
    for (int i = 0; i < kLoading; ++i) {
      if (blockIdx.x + i * step < p.work) load(blockIdx.x + i * step, i);
    }
    uint32_t parity = 0;
    for (int64_t round = blockIdx.x; round < p.work; round += kCount * step) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int64_t item = round + i * step, next = item + kLoading * step;
        if (item >= p.work) break;
        mbarrier_wait(full + 8 * i, parity);
        if (to[i] != nullptr) bulk_store(to[i], data + static_cast<uint32_t>(i * p.chunk_bytes), bytes[i]);
        bulk_commit();
        if (next < p.work) {
          bulk_wait_read<kDraining>();  // the place's last chunk has left it
          load(next, (i + kLoading) % kCount);
        }
      }
      parity ^= 1;
    }
    bulk_wait();
  }
}

int multiprocessors(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), kOp);
  return count;
}

void copy_bulk(const TensorView& cache, const TensorView& pairs, Stream stream) {
  const int64_t bytes = element_size(cache.dtype), block_bytes = cache.shape[3] * cache.shape[4] * cache.shape[5] * bytes;
  const int64_t share = ceil_div(block_bytes, ceil_div(block_bytes, kChunkBytes));
  const int64_t chunk_bytes = ceil_div(share, 128) * 128, chunks = ceil_div(block_bytes, chunk_bytes);
  const int64_t work = pairs.shape[0] * cache.shape[0] * 2 * chunks;
  const BulkParams p{cache.ptr<char>(),
                     cache.strides[0] * bytes,
                     cache.strides[1] * bytes,
                     cache.strides[2] * bytes,
                     block_bytes,
                     cache.shape[2],
                     pairs.ptr<const int64_t>(),
                     pairs.shape[0],
                     chunks,
                     chunk_bytes,
                     work};
  launch(kOp, copy_blocks_bulk_kernel<kPlaces>, std::min<int64_t>(work, multiprocessors(cache.device)), 32,
         kPlaces * (chunk_bytes + 8), stream, p);
}

template <typename Unit> void copy(const TensorView& cache, const TensorView& pairs, Stream stream) {
  const int64_t bytes = element_size(cache.dtype), unit = static_cast<int64_t>(sizeof(Unit));
  const int64_t num_layers = cache.shape[0], num_blocks = cache.shape[2];
  const int64_t block_units = cache.shape[3] * cache.shape[4] * cache.shape[5] * bytes / unit;
  const int64_t chunks = ceil_div(block_units, kThreads * kInFlight);
  const int64_t work = pairs.shape[0] * num_layers * 2 * chunks;
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
  launch(kOp, copy_blocks_kernel<Unit>, std::min<int64_t>(work, kBlocksPerSm * multiprocessors(cache.device)), kThreads, 0, stream, p);
}

}  // namespace

void copy_blocks(TensorView kv_cache, TensorView pairs, Stream stream) {
  if (pairs.shape[0] == 0 || kv_cache.numel() == 0) return;
  const DeviceGuard guard(kv_cache.device, kOp);
  const int64_t block_elements = kv_cache.shape[3] * kv_cache.shape[4] * kv_cache.shape[5];
  if (vector_aligned(kv_cache, kv_cache.strides[0]) && vector_aligned(kv_cache, kv_cache.strides[1]) &&
      vector_aligned(kv_cache, kv_cache.strides[2]) && vector_aligned(kv_cache, block_elements)) {
    const bool bulk = block_elements * element_size(kv_cache.dtype) >= kChunkBytes / 2 &&
                      runs_sm90_code(kOp, reinterpret_cast<const void*>(copy_blocks_bulk_kernel<kPlaces>));
    bulk ? copy_bulk(kv_cache, pairs, stream) : copy<uint4>(kv_cache, pairs, stream);
  } else {
    copy<uint8_t>(kv_cache, pairs, stream);
  }
}

}  // namespace research_engine::cuda
