// sample: its arguments as the kernel of sampling.cuh takes them, and its workspace.
#include "sampling_params.cuh"

namespace research_engine::cuda {
namespace {

// Rows at a time that have changes, each with a slice of the workspace.
int64_t changed_rows(int64_t rows, int device) {
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), kOp);
  return std::min<int64_t>(rows, processors);
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

  const bool changes = edits || args.allowed_tokens;
  dispatch_float(args.logits.dtype, kOp, [&](auto tag) {
    launch_sampling<typename decltype(tag)::type>(p, clusters, edits, changes, device, stream);
  });
}

}  // namespace research_engine::cuda
