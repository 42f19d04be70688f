// The kernel of sampling.cuh and its launch: blocks of a row, and memory.
#pragma once

#include "launch.cuh"
#include "sampling.cuh"

namespace research_engine::cuda {
namespace {

template <typename T, bool kChanges>
__global__ void __launch_bounds__(kThreads, kBlocksAnSm) sampling_kernel(const __grid_constant__ AfterPredecessor<SamplingParams> after) {
  const SamplingParams& p = after.wait();
  extern __shared__ __align__(128) char shared[];
  const int clusters = gridDim.x / p.num_blocks;
  for (int row = blockIdx.x / p.num_blocks; row < p.num_rows; row += clusters) {
    Row<T, kChanges>(p, shared, row).run();
    if (row + clusters < p.num_rows) __syncthreads();  // shared memory is the next row's
  }
}

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device), kOp);
  return value;
}

// Thread blocks of a row. Blocks run in rounds, as many as fit the GPU at a time; a round costs what its blocks' parts do and
// kRoundBytes more, however small they are. All blocks have a vector a thread. Clusters of more than two do not fill a GPU: an
// H200's 264 places hold 62 of four blocks and 30 of eight, and 64 rows in clusters of four were two rounds.
int blocks_of(int64_t rows, int64_t row_bytes, int device) {
  constexpr int64_t kRoundBytes = 96 * 1024;
  const int64_t places = kBlocksAnSm * device_attribute(cudaDevAttrMultiProcessorCount, device);
  int best = 1;
  int64_t least = INT64_MAX;
  for (int blocks = 1; blocks <= kMostBlocks && (blocks == 1 || row_bytes >= int64_t{16} * kThreads * blocks); blocks *= 2) {
    const int64_t clusters = (blocks > 2 ? places * 15 / 16 : places) / blocks;
    const int64_t cost = ceil_div(rows, std::max<int64_t>(clusters, 1)) * (kRoundBytes + row_bytes / blocks);
    if (cost < least) {
      least = cost;
      best = blocks;
    }
  }
  return best;
}

}  // namespace

template <typename T>
void launch_sampling(SamplingParams p, int64_t clusters, bool edits, bool changes, int device, Stream stream) {
  const int64_t vocab_size = p.vocab_size;
  const auto launch_kernel = [&](auto kernel) {
    p.num_steps = static_cast<int>(ceil_div(vocab_size, 32 * kWidth<T>));
    // A multiprocessor's shared memory is that of its blocks, of each of which the system takes 1 KiB.
    const int64_t memory = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) / kBlocksAnSm - 1024;
    const int64_t fixed = (sizeof(Shared) + 15) / 16 * 16;
    const int64_t row_bytes = vocab_size * static_cast<int64_t>(sizeof(T));
    p.num_blocks = runs_sm90_code(kOp, reinterpret_cast<const void*>(kernel)) ? blocks_of(clusters, row_bytes, device) : 1;
    p.block_steps = static_cast<int>(ceil_div(p.num_steps, p.num_blocks));
    p.warp_steps = static_cast<int>(ceil_div(p.block_steps, kWarps));
    // A ring of kAhead steps if a row is too long, or of one where even that does not fit.
    constexpr int64_t kStepBytes = kWarps * 512;
    const int64_t most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const int64_t tables = fixed + (edits ? int64_t{4} * p.block_steps * kWidth<T> : 0);
    const int64_t slots = std::max<int64_t>(memory - tables, 0) / kStepBytes;
    const bool whole = slots >= p.warp_steps;
    p.ring_steps = whole ? 0 : tables + kAhead * kStepBytes <= most ? kAhead : 1;
    p.cached_steps = whole ? p.warp_steps : static_cast<int>(std::max<int64_t>(slots - p.ring_steps, 0));
    const int64_t shared_bytes = tables + (p.cached_steps + p.ring_steps) * kStepBytes;
    if (shared_bytes > most) {
      throw std::invalid_argument("sample: a vocabulary of " + std::to_string(vocab_size) + " needs " +
                                  std::to_string(shared_bytes) + " bytes of shared memory (penalties and biases a bit a token), " +
                                  "this GPU has " + std::to_string(most));
    }
    launch_after(kOp, kernel, {clusters * p.num_blocks, kThreads, shared_bytes, p.num_blocks}, stream, p);
  };
  if (changes) {
    launch_kernel(sampling_kernel<T, true>);
  } else {
    launch_kernel(sampling_kernel<T, false>);
  }
}

}  // namespace research_engine::cuda
