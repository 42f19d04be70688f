// Paged attention, the simple path: one warp a (query token, query head), key after key. The baseline of the other two.
//
// Layout     see paged_attention.cu.
// Algorithm  1. Each lane holds elements lane, lane + 32, ... of the query and of the accumulator (any D up to 256).
//            2. For each key that the row sees: read its block id, multiply, sum over the lanes by shuffles.
//            3. Online softmax in float32: rescale the accumulator when the maximum grows, add p times the value.
// Roofline   memory, with nothing shared between the G heads of a KV head: 2 Hq D elements a row and key.
// Reached    not measured yet.
#include "paged_attention.cuh"

namespace research_engine::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kElements = kMaxHeadSize / 32;

template <typename T>  // of the caches
__global__ void __launch_bounds__(32 * kWarps) simple_attention_kernel(const AttentionParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item >= p.num_tokens * p.num_query_heads) return;
  const int head = static_cast<int>(item % p.num_query_heads), kv_head = head / p.group_size;
  const Row row = token_row(p, item / p.num_query_heads);
  if (row.request < 0) return;

  const int64_t query_row = row.token * p.query_token_stride + head * p.query_head_stride;
  const float scale = p.scale * head_scale(p.key_scale, kv_head);
  float query[kElements], accumulator[kElements];
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    query[e] = lane + 32 * e < p.head_size ? load_query<T>(p, query_row + lane + 32 * e) * scale : 0.0f;
    accumulator[e] = 0.0f;
  }
  const int32_t* table = p.block_tables + row.request * p.table_stride;
  const float slope = alibi_slope(p, head);
  float top = -INFINITY, sum = 0.0f;
  for (int key = row.begin; key < row.end; ++key) {
    const int column = p.block_size.divide(key);
    const int64_t block = table[column];
    const int64_t offset = static_cast<int64_t>(key - column * static_cast<int>(p.block_size.value)) * p.head_size;
    const T* key_row = static_cast<const T*>(p.key_cache) + block * p.key_block_stride + kv_head * p.key_head_stride + offset;
    const T* value_row =
        static_cast<const T*>(p.value_cache) + block * p.value_block_stride + kv_head * p.value_head_stride + offset;
    float dot = 0.0f;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (lane + 32 * e < p.head_size) dot += query[e] * to_float(key_row[lane + 32 * e]);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
    const float logit = score(p, dot, slope, key - row.position);
    const float new_top = fmaxf(top, logit);
    const float rescale = exp2f(top - finite_top(new_top)), weight = exp2f(logit - finite_top(new_top));
    top = new_top;
    sum = sum * rescale + weight;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      accumulator[e] *= rescale;
      if (lane + 32 * e < p.head_size) accumulator[e] += weight * to_float(value_row[lane + 32 * e]);
    }
  }

  const RowEnd end = end_row(p, top, sum, head);
  const int64_t out_row = row.token * p.out_token_stride + head * p.out_head_stride;
  const float factor = end.factor * head_scale(p.value_scale, kv_head);
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    if (lane + 32 * e < p.head_size) store_out<T>(p, out_row + lane + 32 * e, accumulator[e] * factor);
  }
  if (lane == 0 && p.lse != nullptr) p.lse[row.token * p.lse_token_stride + head * p.lse_head_stride] = end.lse;
}

}  // namespace

void launch_simple_attention(const AttentionParams& params, DType dtype, Stream stream) {
  const char* op = "paged_attention (path simple)";
  dispatch_cache(dtype, op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(op, simple_attention_kernel<T>, ceil_div(params.num_tokens * params.num_query_heads, kWarps), 32 * kWarps, 0,
           stream, params);
  });
}

}  // namespace research_engine::cuda
