// What the kernel of sampling.cuh is given, and its launches, a file a type of logits, for they compile long.
#pragma once

#include <algorithm>
#include <string>

#include "../common/cuda_dtype.h"
#include "../common/cuda_launch.h"

namespace research_engine::cuda {

struct SamplingParams {
  const void* logits;
  int64_t row_stride, seen_stride, bias_stride, allowed_stride;
  int num_rows, vocab_size, num_steps;
  int num_blocks, block_steps, warp_steps;  // blocks of a row; steps of a block, of a warp
  int cached_steps, ring_steps;  // of a warp in shared memory: the first ones for good, the others by turns
  bool aligned;
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t *seeds, *positions;
  const float *repetition, *presence, *frequency;
  int32_t *seen_tokens, *seen_counts, *seen_lengths;
  const int32_t* slots;
  int num_slots, seen_capacity;
  bool count_drawn;
  const int32_t* bias_tokens;
  const float* bias_values;
  int num_biases;
  const int32_t* allowed;
  float* workspace;
  int64_t *token_ids, *ranks, *top_ids;
  float *logprobs, *top_logprobs;
  int num_top;
};

// Rows of T, `clusters` at a time. `edits`: there are penalties or biases; `changes`: or a mask. Sets the fields of steps.
template <typename T> void launch_sampling(SamplingParams p, int64_t clusters, bool edits, bool changes, int device, Stream stream);
extern template void launch_sampling<float>(SamplingParams, int64_t, bool, bool, int, Stream);
extern template void launch_sampling<__half>(SamplingParams, int64_t, bool, bool, int, Stream);
extern template void launch_sampling<__nv_bfloat16>(SamplingParams, int64_t, bool, bool, int, Stream);

namespace {
constexpr const char* kOp = "sample";
}  // namespace

}  // namespace research_engine::cuda
