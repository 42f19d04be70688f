// sample: the launch of the kernel in sampling.cuh: blocks of a row, and memory.
#include "sampling.cuh"

namespace research_engine::cuda {
namespace {

constexpr int kBlocksAnSm = 2;

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

// Rows at a time that have changes, each with a slice of the workspace.
int64_t changed_rows(int64_t rows, int device) {
  return std::min<int64_t>(rows, device_attribute(cudaDevAttrMultiProcessorCount, device));
}

// Thread blocks of a row: as few as keep its part in shared memory, and more as long as all fit the GPU at a time and have a
// vector a thread.
int blocks_of(int64_t rows, int64_t steps, int64_t available, int device) {
  const int64_t places = kBlocksAnSm * device_attribute(cudaDevAttrMultiProcessorCount, device);
  int blocks = 1;
  while (blocks < kMostBlocks && steps >= 2 * blocks * kWarps &&
         (ceil_div(steps, blocks) * 512 > available || rows * blocks * 2 <= places)) {
    blocks *= 2;
  }
  return blocks;
}

}  // namespace

int64_t sample_workspace(int64_t rows, int64_t vocab_size, int device) { return changed_rows(rows, device) * vocab_size; }

void sample(const Sampling& args, Stream stream) {
  const int64_t rows = args.logits.shape[0], vocab_size = args.logits.shape[1];
  if (rows == 0) return;
  const int device = args.logits.device;
  const DeviceGuard guard(device, kOp);
  const bool edits = args.seen_tokens || args.bias_tokens;
  const int64_t clusters = edits ? changed_rows(rows, device) : rows;
  if (edits && (!args.workspace || args.workspace.numel() < clusters * vocab_size)) {
    throw std::invalid_argument("sample: penalties and biases need a workspace of " + std::to_string(clusters * vocab_size) +
                                " float32, got " + std::to_string(args.workspace ? args.workspace.numel() : 0));
  }
  SamplingParams p{};
  p.logits = args.logits.data;
  p.row_stride = args.logits.strides[0];
  p.num_rows = static_cast<int>(rows);
  p.vocab_size = static_cast<int>(vocab_size);
  p.temperature = args.temperature.ptr<const float>();
  p.top_k = args.top_k.ptr<const int32_t>();
  p.top_p = args.top_p.ptr<const float>();
  p.min_p = args.min_p.ptr<const float>();
  p.seeds = args.seeds.ptr<const int64_t>();
  p.positions = args.positions.ptr<const int64_t>();
  if (args.seen_tokens) {
    p.repetition = args.repetition_penalty.ptr<const float>();
    p.presence = args.presence_penalty.ptr<const float>();
    p.frequency = args.frequency_penalty.ptr<const float>();
    p.seen_tokens = args.seen_tokens.ptr<int32_t>();
    p.seen_counts = args.seen_counts.ptr<int32_t>();
    p.seen_lengths = args.seen_lengths.ptr<int32_t>();
    p.seen_stride = args.seen_tokens.strides[0];
    p.seen_capacity = static_cast<int>(args.seen_tokens.shape[1]);
    p.num_slots = static_cast<int>(args.seen_tokens.shape[0]);
    p.slots = args.slots.ptr<const int32_t>();
    p.count_drawn = args.count_drawn;
  }
  if (args.bias_tokens) {
    p.bias_tokens = args.bias_tokens.ptr<const int32_t>();
    p.bias_values = args.bias_values.ptr<const float>();
    p.bias_stride = args.bias_tokens.strides[0];
    p.num_biases = static_cast<int>(args.bias_tokens.shape[1]);
  }
  if (args.allowed_tokens) {
    p.allowed = args.allowed_tokens.ptr<const int32_t>();
    p.allowed_stride = args.allowed_tokens.strides[0];
  }
  p.workspace = args.workspace.ptr<float>();
  p.token_ids = args.token_ids.ptr<int64_t>();
  p.logprobs = args.logprobs.ptr<float>();
  p.ranks = args.ranks.ptr<int64_t>();
  p.top_ids = args.top_ids.ptr<int64_t>();
  p.top_logprobs = args.top_logprobs.ptr<float>();
  p.num_top = args.top_ids ? static_cast<int>(args.top_ids.shape[1]) : 0;
  p.aligned = vector_aligned(args.logits, args.logits.strides[0]);

  dispatch_float(args.logits.dtype, kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch_kernel = [&](auto kernel) {
      p.num_steps = static_cast<int>(ceil_div(vocab_size, 32 * kWidth<T>));
      // A multiprocessor's shared memory is that of its blocks, of each of which the system takes 1 KiB.
      const int64_t memory = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) / kBlocksAnSm - 1024;
      const int64_t fixed = (sizeof(Shared) + 15) / 16 * 16;
      p.num_blocks = runs_sm90_code(kOp, reinterpret_cast<const void*>(kernel)) ? blocks_of(clusters, p.num_steps, memory - fixed, device) : 1;
      p.block_steps = static_cast<int>(ceil_div(p.num_steps, p.num_blocks));
      p.warp_steps = static_cast<int>(ceil_div(p.block_steps, kWarps));
      const int64_t bitmap = edits ? int64_t{4} * p.block_steps * kWidth<T> : 0, available = memory - fixed - bitmap;
      if (fixed + bitmap > device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
        throw std::invalid_argument("sample: penalties and biases over a vocabulary of " + std::to_string(vocab_size) +
                                    " need a bit a token in shared memory, which this GPU has too little of");
      }
      p.cached_steps = static_cast<int>(std::min<int64_t>(p.warp_steps, std::max<int64_t>(available, 0) / (kWarps * 512)));
      const int64_t shared_bytes = fixed + bitmap + int64_t{kWarps} * p.cached_steps * 512;
      launch_after(kOp, kernel, {clusters * p.num_blocks, kThreads, shared_bytes, p.num_blocks}, stream, p);
    };
    if (edits || args.allowed_tokens) {
      launch_kernel(sampling_kernel<T, true>);
    } else {
      launch_kernel(sampling_kernel<T, false>);
    }
  });
}

}  // namespace research_engine::cuda
