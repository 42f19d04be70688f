// What the paged attention kernels share: their parameters, which keys a row sees, how a score becomes a probability.
#pragma once

#include <cstdint>

#include "../common/cuda_dtype.h"
#include "../common/cuda_launch.h"

namespace research_engine::cuda {

constexpr int kMaxHeadSize = 256;

// Every workspace begins with this many int32 counters, zero between launches: [0, kPrefillCounters) of the decode kernel's
// blocks, then two of the prefill kernel.
constexpr int kCounters = 1024, kPrefillCounters = kCounters - 4;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Division of 0 <= n < 2^31 by a number known at launch, as one multiplication and one shift
// (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994).
struct Divisor {
  uint32_t value = 1, multiplier = 1, shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : value(divisor) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }
  __device__ int divide(int n) const {
    return static_cast<int>((__umulhi(static_cast<uint32_t>(n), multiplier) + static_cast<uint32_t>(n)) >> shift);
  }
};

// Passed to every kernel by value. Strides count elements.
struct AttentionParams {
  const void *query, *key_cache, *value_cache;
  const int32_t *block_tables, *query_start_loc, *seq_lens;
  void* out;
  float* lse;  // may be null, as may be alibi_slopes and sinks
  const float *alibi_slopes, *sinks;
  const float *key_scale, *value_scale;  // of the KV heads of quantised caches, or null: 1
  DType query_type;
  float* workspace;
  int64_t query_token_stride, query_head_stride, out_token_stride, out_head_stride, lse_token_stride, lse_head_stride;
  int64_t key_block_stride, key_head_stride, value_block_stride, value_head_stride, table_stride;
  int64_t num_tokens;
  int num_requests, num_query_heads, num_kv_heads, group_size, head_size;
  Divisor block_size;
  float scale, softcap;
  int window;  // 0: none
  bool causal;
  bool vectors;         // every row of the caches can be read in 16-byte vectors
  bool single_queries;  // auto path: the decode kernel takes requests of one query token, the prefill kernel the rest
  // The decode kernel alone: a row is cut into at most num_splits ranges of split_size keys.
  int64_t num_rows;
  int split_size, num_splits;
  // The tensor-core decode kernel alone.
  int64_t num_counters;   // of its workspace
  Divisor unit;           // keys that it cuts rows by: split_size or, if that is 0, its own
  Divisor groups;         // of query heads that share a KV head
  int64_t table_entries;  // of block_tables, with the gaps between its rows
  int cluster;            // thread blocks that may share a row's keys of one head group; 0: cut by load alone
  int cluster_cost;       // of a step of theirs, in sixteenths of a step of blocks that fill the device
  int cluster_slack;      // by how much more than blocks cut by load a cluster may take, likewise
};

// One row: a query token of a request.
struct Row {
  int request = -1;  // -1: no such row, nothing to do
  int64_t token = 0;
  int position = 0;    // of the query token in its sequence; negative when there are more queries than keys
  int begin = 0, end = 0;  // the keys it sees
};

// Last request that starts at or before `token`, so that empty requests are passed over.
__device__ inline int find_request(const AttentionParams& p, int64_t token) {
  int low = 0, high = p.num_requests;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.query_start_loc[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ inline int first_key(const AttentionParams& p, int position) {
  return p.window > 0 ? max(0, position - p.window + 1) : 0;
}

__device__ inline int end_key(const AttentionParams& p, int position, int seq_len) {
  return max(0, p.causal ? position + 1 : seq_len);
}

// Row `index` of `request`, whose queries are [first, first + length).
__device__ inline Row request_row(const AttentionParams& p, int request, int first, int length, int index) {
  Row row;
  row.request = request;
  row.token = first + index;
  const int seq_len = p.seq_lens[request];
  row.position = seq_len - length + index;
  row.end = end_key(p, row.position, seq_len);
  row.begin = min(row.end, first_key(p, row.position));
  return row;
}

// The row of a token of the batch; tokens past the last request are padding.
__device__ inline Row token_row(const AttentionParams& p, int64_t token) {
  if (token < p.query_start_loc[0] || token >= p.query_start_loc[p.num_requests]) return Row{};
  const int request = find_request(p, token);
  const int first = p.query_start_loc[request];
  return request_row(p, request, first, p.query_start_loc[request + 1] - first, static_cast<int>(token) - first);
}

__device__ inline float alibi_slope(const AttentionParams& p, int head) {
  return p.alibi_slopes != nullptr ? p.alibi_slopes[head] : 0.0f;
}

// q.k, scale included, to the score in base 2: softcap, then ALiBi. Masking is the caller's.
__device__ inline float score(const AttentionParams& p, float dot, float slope, int distance) {
  if (p.softcap > 0) dot = p.softcap * tanhf(dot / p.softcap);
  return (dot + slope * static_cast<float>(distance)) * kLog2E;
}

// Reference point of the exponentials: a row that has seen nothing must not compute inf - inf.
__device__ inline float finite_top(float top) { return top == -INFINITY ? 0.0f : top; }

// Ends a row: its scores' maximum (base 2) and sum of exponentials, with the sink as one more logit, give the factor that
// normalises the accumulator and the natural-log lse. An empty row gives 0 and -inf (its sink alone without values).
struct RowEnd {
  float factor, lse;
};
__device__ inline RowEnd end_row(const AttentionParams& p, float top, float sum, int head) {
  float with_sink = top;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head] * kLog2E;
    with_sink = fmaxf(top, sink);
    sum = sum * exp2f(top - finite_top(with_sink)) + exp2f(sink - finite_top(with_sink));
  }
  if (sum == 0.0f) return {0.0f, -INFINITY};
  return {exp2f(top - finite_top(with_sink)) / sum, (with_sink + log2f(sum)) * kLn2};
}

__device__ inline float head_scale(const float* scales, int kv_head) { return scales != nullptr ? scales[kv_head] : 1.0f; }

// Queries and outputs beside caches of C: of the same type, or, where C is quantised, of any type, told apart at run time.
template <typename C> __device__ inline float load_query(const AttentionParams& p, int64_t at) {
  if constexpr (sizeof(C) > 1) return to_float(static_cast<const C*>(p.query)[at]);
  if (p.query_type == DType::bf16) return to_float(static_cast<const __nv_bfloat16*>(p.query)[at]);
  if (p.query_type == DType::f16) return to_float(static_cast<const __half*>(p.query)[at]);
  return static_cast<const float*>(p.query)[at];
}
template <typename C> __device__ inline void store_out(const AttentionParams& p, int64_t at, float value) {
  if constexpr (sizeof(C) > 1) {
    static_cast<C*>(p.out)[at] = from_float<C>(value);
  } else if (p.query_type == DType::bf16) {
    static_cast<__nv_bfloat16*>(p.out)[at] = from_float<__nv_bfloat16>(value);
  } else if (p.query_type == DType::f16) {
    static_cast<__half*>(p.out)[at] = from_float<__half>(value);
  } else {
    static_cast<float*>(p.out)[at] = value;
  }
}

#ifndef __CUDACC_RTC__  // the host's part
// By the type of the caches.
void launch_simple_attention(const AttentionParams& params, DType dtype, Stream stream);
void launch_decode_attention(const AttentionParams& params, DType dtype, Stream stream);
void launch_prefill_attention(const AttentionParams& params, DType dtype, Stream stream);

// The decode kernel on tensor cores: whether it takes these arguments, float32 elements of workspace, launch.
bool decode_mma_supports(const PagedAttention& args, const AttentionParams& params);
int64_t decode_mma_workspace(const PagedAttention& args);
void launch_decode_mma(const PagedAttention& args, AttentionParams params, Stream stream);

// The prefill kernel on sm_90a's warpgroup tensor cores: whether device and arguments suit it, launch. `counters`, int32 [2] in
// device memory, zero before and after, lets blocks take the next tile when they are done with one; without (null) tiles are
// dealt in a fixed pattern. Launches that may run at the same time need counters of their own.
bool prefill_wgmma_supports(const PagedAttention& args, const AttentionParams& params);
void launch_prefill_wgmma(const PagedAttention& args, AttentionParams params, Stream stream, int32_t* counters = nullptr);

// The prefill kernel on mma.sync (sm_80 on), quantised caches too: whether device and arguments suit it, launch.
bool prefill_mma_supports(const PagedAttention& args, const AttentionParams& params);
void launch_prefill_mma(const PagedAttention& args, const AttentionParams& params, Stream stream);
#endif

// A thread block of the decode kernel takes up to 8 query heads of a KV head; the number of such groups in G.
__host__ __device__ inline int decode_head_groups(int group_size) { return (group_size + 7) / 8; }

}  // namespace research_engine::cuda
