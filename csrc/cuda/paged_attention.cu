// Paged attention: softmax(scale q k^T, masked) v over keys and values in cache blocks, for a batch of prefills, chunks and
// decodes at once (Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023). This file turns
// the arguments into launches; the kernels are in paged_attention_{simple,decode,prefill}.cu.
//
// Layout     query, out [T, Hq, D], tokens and heads strided; caches [N, Hkv, B, D], a (block, head) tile contiguous; key j of
//            request r lies in block block_tables[r, j / B] at offset j % B; query head h reads KV head h / G.
// Row i      of a request with q queries and a length of s is at position s - q + i. It sees keys j <= position (all j < s
//            when not causal), and no more than the last `window` of them up to its own.
// Score      scale q.k, then softcap c tanh(x / c), then + slope (j - position); masked is -inf; a sink is one more logit of
//            the row, without a value. lse is the natural logarithm of the denominator, sink included.
// Paths      0 auto: requests of one query token take the decode kernel, the others the prefill kernel; which is which is
//            found on the device, so both are launched where the batch may hold both, and a captured graph may be replayed
//            with other lengths up to max_query_len and max_seq_len. 1 simple, 2 decode, 3 prefill: all rows. The decode kernel is
//            the one on tensor cores where it takes the arguments, and so is the prefill kernel, wgmma before mma.sync; 4 and 5
//            force those without, 6 the prefill kernel on mma.sync where it takes the arguments.
// Built for  any D from 1 to 256 (rows of whole 16-byte vectors are faster), any block size, any G, 16 and 32 bit floats; caches
//            of the queries' type, or e4m3 or int8 with a scale a KV head: an element stands for itself times the scale.
#include <algorithm>

#include "paged_attention.cuh"

namespace research_engine::cuda {
namespace {

constexpr const char* kOp = "paged_attention";
enum Path { kAuto = 0, kSimple = 1, kDecode = 2, kPrefill = 3, kDecodeFma = 4, kPrefillFma = 5, kPrefillMma = 6 };

// How the decode kernel cuts its rows.
struct SplitPlan {
  int64_t rows = 0, size = INT32_MAX, count = 1;
  int64_t workspace = 0;  // float32 elements
};

constexpr int64_t kMinSplit = 256;    // keys below which a split is not worth its merge
constexpr int64_t kSplitMultiple = 64;
constexpr int64_t kBlocksPerSm = 4;   // thread blocks that keep a multiprocessor busy

int64_t multiprocessors(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), kOp);
  return count;
}

// `limit` bounds the number of splits that the op may choose itself; a fixed split_size is not bent.
SplitPlan plan_splits(const PagedAttention& args, int64_t limit) {
  SplitPlan plan;
  plan.rows = args.path != kAuto ? args.query.shape[0] : args.seq_lens.shape[0];
  if (args.path == kSimple || args.path == kPrefill || plan.rows == 0 || args.max_seq_len <= 1) return plan;
  const int64_t keys = args.max_seq_len;
  const bool windowed = args.causal && args.sliding_window > 0 && args.sliding_window < keys;
  const int64_t seen = windowed ? args.sliding_window : keys;  // most keys that one row sees
  const int64_t num_heads = args.query.shape[1], num_kv_heads = args.key_cache.shape[1];

  if (args.split_size > 0) {
    plan.size = args.split_size;
  } else {
    const int64_t blocks = plan.rows * num_kv_heads * decode_head_groups(static_cast<int>(num_heads / num_kv_heads));
    const int64_t wanted = ceil_div(kBlocksPerSm * multiprocessors(args.query.device), blocks);
    // A window rarely starts at a split's start, which takes one split more.
    const int64_t count = std::min({wanted, ceil_div(seen, kMinSplit), limit - (windowed ? 1 : 0)});
    if (count <= 1) return plan;
    plan.size = ceil_div(ceil_div(seen, count), kSplitMultiple) * kSplitMultiple;
  }
  plan.size = std::min<int64_t>(plan.size, INT32_MAX / 2);
  plan.count = std::min(ceil_div(keys, plan.size), ceil_div(seen, plan.size) + (windowed ? 1 : 0));
  if (plan.count > 1) plan.workspace = plan.rows * num_heads * plan.count * (args.query.shape[2] + 2);
  return plan;
}

SplitPlan plan_within_workspace(const PagedAttention& args) {
  const SplitPlan plan = plan_splits(args, INT32_MAX);
  const int64_t available = args.workspace ? std::max<int64_t>(args.workspace.numel() - kCounters, 0) : 0;
  if (plan.workspace <= available) return plan;
  if (args.split_size > 0) {
    throw std::invalid_argument("paged_attention: split_size " + std::to_string(args.split_size) + " needs a workspace of " +
                                std::to_string(plan.workspace + kCounters) + " float32, got " +
                                std::to_string(available + kCounters));
  }
  return plan_splits(args, available / (plan.workspace / plan.count));
}

AttentionParams make_params(const PagedAttention& args) {
  AttentionParams p{};
  p.query = args.query.data;
  p.key_cache = args.key_cache.data;
  p.value_cache = args.value_cache.data;
  p.block_tables = args.block_tables.ptr<const int32_t>();
  p.query_start_loc = args.query_start_loc.ptr<const int32_t>();
  p.seq_lens = args.seq_lens.ptr<const int32_t>();
  p.out = args.out.data;
  p.lse = args.lse.ptr<float>();
  p.alibi_slopes = args.alibi_slopes.ptr<const float>();
  p.sinks = args.sinks.ptr<const float>();
  p.key_scale = args.key_scale.ptr<const float>();
  p.value_scale = args.value_scale.ptr<const float>();
  p.query_type = args.query.dtype;
  p.workspace = args.workspace.ptr<float>();  // begins with kCounters int32
  p.query_token_stride = args.query.strides[0];
  p.query_head_stride = args.query.strides[1];
  p.out_token_stride = args.out.strides[0];
  p.out_head_stride = args.out.strides[1];
  p.lse_token_stride = args.lse.strides[0];
  p.lse_head_stride = args.lse.strides[1];
  p.key_block_stride = args.key_cache.strides[0];
  p.key_head_stride = args.key_cache.strides[1];
  p.value_block_stride = args.value_cache.strides[0];
  p.value_head_stride = args.value_cache.strides[1];
  p.table_stride = args.block_tables.strides[0];
  p.num_tokens = args.query.shape[0];
  p.num_requests = static_cast<int>(args.seq_lens.shape[0]);
  p.num_query_heads = static_cast<int>(args.query.shape[1]);
  p.num_kv_heads = static_cast<int>(args.key_cache.shape[1]);
  p.group_size = p.num_query_heads / p.num_kv_heads;
  p.head_size = static_cast<int>(args.query.shape[2]);
  p.block_size = Divisor(static_cast<uint32_t>(args.key_cache.shape[2]));
  p.scale = args.scale;
  p.softcap = args.softcap;
  p.window = static_cast<int>(std::min<int64_t>(args.sliding_window, 1 << 30));
  p.causal = args.causal;
  p.vectors = true;
  for (const TensorView& cache : {args.key_cache, args.value_cache}) {
    p.vectors = p.vectors && vector_aligned(cache, cache.strides[0]) && vector_aligned(cache, cache.strides[1]) &&
                vector_aligned(cache, p.head_size);
  }
  p.single_queries = args.path == kAuto;
  return p;
}

bool takes_prefill(const PagedAttention& args) {
  return args.path == kPrefill || (args.path == kAuto && args.max_query_len > 1);
}

void launch_prefill(const PagedAttention& args, const AttentionParams& params, Stream stream) {
  const bool wgmma = args.path != kPrefillMma && prefill_wgmma_supports(args, params);
  if (!wgmma && args.variant.kernel != nullptr) {
    throw std::invalid_argument("paged_attention: a variant of path prefill needs sm_90, queries and caches of the same 16-bit "
                                "floats, rows aligned to 16 bytes and a head size that is a multiple of 8");
  }
  if (!wgmma) {
    if (prefill_mma_supports(args, params)) return launch_prefill_mma(args, params, stream);
    return launch_prefill_attention(params, args.key_cache.dtype, stream);
  }
  const bool counters = args.workspace && args.workspace.numel() >= kCounters;
  launch_prefill_wgmma(args, params, stream, counters ? args.workspace.ptr<int32_t>() + kPrefillCounters : nullptr);
}

}  // namespace

int64_t paged_attention_workspace(const PagedAttention& args) {
  if (args.path == kSimple || args.query.numel() == 0 || args.seq_lens.shape[0] == 0) return 0;
  const AttentionParams params = make_params(args);
  const int64_t prefill = takes_prefill(args) && prefill_wgmma_supports(args, params) ? kCounters : 0;
  if (args.path == kPrefill || args.path == kPrefillFma || args.path == kPrefillMma) return prefill;
  // Where out and the values lie is not known here; with a split_size this is also enough for the kernel without tensor cores, which
  // a call takes whose rows of them are not aligned.
  if (args.path != kDecodeFma && decode_mma_supports(args, params)) return std::max(prefill, decode_mma_workspace(args));
  const int64_t partials = plan_splits(args, INT32_MAX).workspace;
  return partials > 0 ? kCounters + partials : prefill;
}

void paged_attention(const PagedAttention& args, Stream stream) {
  if (args.query.numel() == 0 || args.seq_lens.shape[0] == 0) return;
  const int64_t head_size = args.query.shape[2];
  if (head_size > kMaxHeadSize) {
    throw std::invalid_argument("paged_attention: head size " + std::to_string(head_size) +
                             " is not built for CUDA; 1 to " + std::to_string(kMaxHeadSize) + " are");
  }
  const DeviceGuard guard(args.query.device, kOp);
  AttentionParams params = make_params(args);
  const DType dtype = args.key_cache.dtype;
  switch (args.path) {
    case kSimple: return launch_simple_attention(params, dtype, stream);
    case kPrefillFma: return launch_prefill_attention(params, dtype, stream);
    case kPrefill:
    case kPrefillMma: return launch_prefill(args, params, stream);
    case kAuto:
    case kDecode:
    case kDecodeFma: break;
    default: throw std::invalid_argument("paged_attention: path " + std::to_string(args.path) +
                                         " is none of 0 (auto), 1 (simple), 2 (decode), 3 (prefill), 4 and 5 (those without "
                                         "tensor cores), 6 (prefill on mma.sync)");
  }
  if (args.path != kDecodeFma && decode_mma_supports(args, params)) {
    launch_decode_mma(args, params, stream);
  } else if (args.variant.kernel != nullptr) {
    throw std::invalid_argument("paged_attention: a variant of path decode needs 16-bit queries, rows aligned to 16 bytes and a "
                                "head size that is a multiple of 16");
  } else {
    const SplitPlan plan = plan_within_workspace(args);
    AttentionParams split = params;
    split.num_rows = plan.rows;
    split.split_size = static_cast<int>(plan.size);
    split.num_splits = static_cast<int>(plan.count);
    if (split.workspace != nullptr) split.workspace += kCounters;
    launch_decode_attention(split, dtype, stream);
  }
  if (takes_prefill(args)) launch_prefill(args, params, stream);
}

}  // namespace research_engine::cuda
