// swap_blocks: moves KV blocks between a cache on the device and one in pinned host memory, either way.
//
// Layout     source [L, 2, N, Hkv, B, D], destination [L, 2, M, Hkv, B, D], a block contiguous in both;
//            pairs int64 [P, 2] = (source block, destination block) in host memory, read before the call returns.
// Algorithm  1. Neighbouring pairs whose source and destination both count up by one merge into a run.
//            2. A run of 256 KiB a row and more is one strided copy of the copy engine over all layers, keys and values:
//               width = the run's bytes, height = 2 L rows (one copy a row where the pitch passes the device's limit). It
//               leaves the multiprocessors free.
//            3. All other runs together are a kernel's, which reads or writes the mapped host memory in 16-byte vectors, on a
//               quarter of the multiprocessors; pairs travel as its arguments, 256 a launch.
//            4. Everything is queued on the caller's stream, so that it is ordered after the step that wrote the blocks.
//            5. Pageable host memory is refused: such a copy would be staged, and no longer asynchronous.
// Roofline   the host link: P x 2 L x Hkv B D elements over PCIe or NVLink-C2C, no arithmetic.
// Versions   1 every run a strided copy, and a copy a row and run for caches whose planes pass the pitch limit of 2 GiB: 32 KiB
//            a copy, and a few microseconds each. 2 small runs by a kernel.
// Reached    49 to 52 GB/s each way on an H200 with pieces of 32 KiB (docs/performance.md).
#include <algorithm>

#include "../common/cuda_dtype.h"
#include "../common/cuda_launch.h"

namespace research_engine::cuda {
namespace {

constexpr const char* kOp = "swap_blocks";

constexpr int kThreads = 512;
constexpr int kInFlight = 4;
constexpr int kPairs = 256;                        // of a launch
constexpr int64_t kEngineBytes = 256 * 1024;       // of a run's rows from which the copy engine takes it

// The device's address of a cache; pageable host memory is refused, and memory that is not mapped gives null.
void* device_address(const TensorView& cache, const char* name) {
  if (cache.device != TensorView::kCpu) return cache.data;
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, cache.data), kOp);
  if (attributes.type == cudaMemoryTypeUnregistered) {
    throw std::runtime_error(std::string("swap_blocks: ") + name +
                             " is in pageable host memory; allocate it pinned (torch.empty(..., pin_memory=True))");
  }
  return attributes.devicePointer;
}

// Blocks [source, source + length) to [destination, ...): offsets and strides in units, which are 16 bytes or one.
struct SwapParams {
  const void* from;
  void* to;
  int64_t from_layer, from_side, from_block, to_layer, to_side, to_block, block_units;
  int num_pairs;
  int num_planes;  // 2 L
  int pairs[kPairs][2];
};

template <typename Unit> __global__ void __launch_bounds__(kThreads) swap_blocks_kernel(const __grid_constant__ SwapParams p) {
  constexpr int64_t kChunk = kThreads * kInFlight;
  const int64_t chunks = (p.block_units + kChunk - 1) / kChunk, work = p.num_pairs * p.num_planes * chunks;
  for (int64_t item = blockIdx.x; item < work; item += gridDim.x) {
    const int64_t place = item / chunks, first = (item - place * chunks) * kChunk + threadIdx.x;
    const int pair = static_cast<int>(place / p.num_planes), plane = static_cast<int>(place % p.num_planes);
    const Unit* from = static_cast<const Unit*>(p.from) + plane / 2 * p.from_layer + plane % 2 * p.from_side +
                       p.pairs[pair][0] * p.from_block;
    Unit* to = static_cast<Unit*>(p.to) + plane / 2 * p.to_layer + plane % 2 * p.to_side + p.pairs[pair][1] * p.to_block;
    Unit held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k * kThreads < p.block_units) held[k] = __ldcs(from + first + k * kThreads);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k * kThreads < p.block_units) __stcs(to + first + k * kThreads, held[k]);
    }
  }
}

struct Rows {
  char* data;
  int64_t layer_bytes, side_bytes, block_bytes;  // distance of neighbours
  explicit Rows(const TensorView& cache)
      : data(cache.ptr<char>()),
        layer_bytes(cache.strides[0] * element_size(cache.dtype)),
        side_bytes(cache.strides[1] * element_size(cache.dtype)),
        block_bytes(cache.strides[2] * element_size(cache.dtype)) {}
};

}  // namespace

void swap_blocks(TensorView source, TensorView destination, TensorView pairs, Stream stream) {
  if (pairs.shape[0] == 0 || source.numel() == 0) return;
  if (source.device == TensorView::kCpu && destination.device == TensorView::kCpu) {
    throw std::runtime_error("swap_blocks: source and destination are both in host memory; one must be on a device");
  }
  const DeviceGuard guard(source.device == TensorView::kCpu ? destination.device : source.device, kOp);
  void* const readable = device_address(source, "source");
  void* const writable = device_address(destination, "destination");

  const int64_t num_layers = source.shape[0];
  const int64_t block_bytes = source.shape[3] * source.shape[4] * source.shape[5] * element_size(source.dtype);
  const Rows from(source), to(destination);
  int max_pitch = 0, multiprocessors = 0, device = 0;
  check(cudaGetDevice(&device), kOp);
  check(cudaDeviceGetAttribute(&max_pitch, cudaDevAttrMaxPitch, device), kOp);
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kOp);
  const bool even = (num_layers == 1 || (from.layer_bytes == 2 * from.side_bytes && to.layer_bytes == 2 * to.side_bytes)) &&
                    from.side_bytes <= max_pitch && to.side_bytes <= max_pitch;
  const bool dense = from.block_bytes == block_bytes && to.block_bytes == block_bytes;
  const bool mapped = readable != nullptr && writable != nullptr && source.shape[2] <= INT32_MAX && destination.shape[2] <= INT32_MAX;
  const auto queue = static_cast<cudaStream_t>(stream);

  const auto whole = [](const Rows& rows, const void* address) {
    return (reinterpret_cast<uintptr_t>(address) | rows.layer_bytes | rows.side_bytes | rows.block_bytes) % 16 == 0;
  };
  const bool vectors = whole(from, readable) && whole(to, writable) && block_bytes % 16 == 0;
  const int64_t unit = vectors ? 16 : 1;
  SwapParams p{readable,
               writable,
               from.layer_bytes / unit,
               from.side_bytes / unit,
               from.block_bytes / unit,
               to.layer_bytes / unit,
               to.side_bytes / unit,
               to.block_bytes / unit,
               block_bytes / unit,
               0,
               static_cast<int>(2 * num_layers),
               {}};
  const auto flush = [&] {
    const int64_t work = p.num_pairs * p.num_planes * ceil_div(p.block_units, kThreads * kInFlight);
    launch(kOp, vectors ? swap_blocks_kernel<uint4> : swap_blocks_kernel<uint8_t>,
           std::min<int64_t>(work, std::max(multiprocessors / 4, 1)), kThreads, 0, stream, p);
    p.num_pairs = 0;
  };

  const int64_t* pair = pairs.ptr<const int64_t>();
  const int64_t count = pairs.shape[0], pair_stride = pairs.strides[0], pair_step = pairs.strides[1];
  const auto block = [&](int64_t index, int which) { return pair[index * pair_stride + which * pair_step]; };
  for (int64_t first = 0, length; first < count; first += length) {
    length = 1;
    while (dense && first + length < count && block(first + length, 0) == block(first, 0) + length &&
           block(first + length, 1) == block(first, 1) + length) {
      ++length;
    }
    const int64_t bytes = length * block_bytes;
    if (mapped && bytes < kEngineBytes) {
      for (int64_t i = 0; i < length; ++i) {
        p.pairs[p.num_pairs][0] = static_cast<int>(block(first + i, 0));
        p.pairs[p.num_pairs][1] = static_cast<int>(block(first + i, 1));
        if (++p.num_pairs == kPairs) flush();
      }
      continue;
    }
    const char* read = from.data + block(first, 0) * from.block_bytes;
    char* write = to.data + block(first, 1) * to.block_bytes;
    if (even) {
      check(cudaMemcpy2DAsync(write, to.side_bytes, read, from.side_bytes, bytes, 2 * num_layers, cudaMemcpyDefault,
                              queue), kOp);
      continue;
    }
    for (int64_t row = 0; row < 2 * num_layers; ++row) {
      check(cudaMemcpyAsync(write + row / 2 * to.layer_bytes + row % 2 * to.side_bytes,
                            read + row / 2 * from.layer_bytes + row % 2 * from.side_bytes, bytes, cudaMemcpyDefault,
                            queue), kOp);
    }
  }
  flush();
}

}  // namespace research_engine::cuda
