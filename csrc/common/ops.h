// Every op, declared once; csrc/cpu and csrc/cuda define it twice. Arguments were checked at the Python edge
// (research_engine/kernels): here shapes, dtypes and bounds are taken for granted.
//
// Shape letters: T tokens of the batch, R requests, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size,
// N blocks, B block size, L layers, H hidden size, I intermediate size.
#pragma once

#include "tensor_view.h"

namespace research_engine {

using Stream = void*;  // cudaStream_t; the CPU ops take none

// A kernel that was compiled at run time, to be launched in the built one's place (research_engine/kernels/jit).
struct KernelVariant {
  void* kernel = nullptr;  // cudaKernel_t; null: the built kernel
  int threads = 0, shared_bytes = 0;
  int blocks_per_sm = 0;
  int keys = 0;             // that a step of a thread block takes
  int parameter_bytes = 0;  // size of its one parameter, to tell sources that are newer than the build
};

struct PagedAttention {
  TensorView query;            // [T, Hq, D], rows may be strided
  TensorView key_cache;        // [N, Hkv, B, D], a (block, head) tile is contiguous; of query's dtype, f8e4m3 or i8
  TensorView value_cache;      // [N, Hkv, B, D]
  TensorView block_tables;     // int32 [R, max_blocks]
  TensorView query_start_loc;  // int32 [R + 1]
  TensorView seq_lens;         // int32 [R], context length with this step's tokens
  TensorView out;              // [T, Hq, D]
  TensorView lse;              // float32 [T, Hq], natural log, or none
  TensorView alibi_slopes;     // float32 [Hq], or none
  TensorView sinks;            // float32 [Hq], or none
  TensorView key_scale;        // float32 [Hkv]: a stored key stands for itself times its head's scale; none: 1
  TensorView value_scale;      // float32 [Hkv], likewise
  TensorView workspace;        // float32, for split partials, or none
  float scale = 0;
  bool causal = true;
  int64_t sliding_window = 0;  // 0: no window; w: a row sees the last w keys, its own included
  float softcap = 0;           // 0: none; c: c * tanh(s / c), before masking
  int64_t max_query_len = 0;   // upper bound over the batch
  int64_t max_seq_len = 0;     // upper bound over the batch
  int path = 0;                // 0 automatic, 1 simple, 2 decode, 3 prefill; the CPU may know fewer
  int64_t split_size = 0;      // keys per split; 0: chosen by the op. Fixed: a row does not depend on its neighbours
  KernelVariant variant;       // CUDA, paths decode and prefill: of the kernel on tensor cores
};

enum class QuantizedKind : int { int4 = 0, int8 = 1, float8 = 2 };

// W[n, k] = scales[k / g, n] (q[n, k] - zeros[k / g, n]) + offsets[k / g, n] for n < N; q unsigned integers, or e4m3 without zeros.
struct QuantizedWeight {
  TensorView weight;   // int32, q in the device's layout (cpu/quantized_matmul.cpp, cuda/quantized_matmul.cuh), N padded to whole tiles
  TensorView scales;   // [K / g, N padded], float32; on CUDA also 16-bit floats
  TensorView zeros;    // uint8 [K / g, N padded], or none: half the range, 8 or 128
  TensorView offsets;  // as scales, or none: 0
  QuantizedKind kind = QuantizedKind::int4;
  int64_t group_size = 0;  // g, a multiple of 32
};

struct SkinnyGemm {
  TensorView x;          // [T, K], at most 64 rows, strided
  TensorView weight;     // [N, K], rows strided
  TensorView bias;       // [N], or none
  TensorView out;        // [T, N], gated: [T, N / 2]; of x's dtype or f32
  bool gated = false;    // out = silu(first half of the columns) * second half
  bool overlap = false;  // CUDA: may begin before kernels ahead of it end; none of them may write weight
};

struct QuantizedMatmul {
  TensorView x;    // [T, K], rows strided
  TensorView out;  // [T, N], rows strided
  QuantizedWeight weight;
  TensorView bias;       // [N], of x's dtype, or none
  TensorView workspace;  // CUDA: float32, zero before the first use; see quantized_matmul_workspace
  bool overlap = false;  // CUDA: may begin before kernels ahead of it end; none of them may write the weight
};

// S rows, V tokens of the vocabulary. Optional tensors may be none.
struct Sampling {
  TensorView logits;       // [S, V], rows strided; not changed
  TensorView temperature;  // float32 [S]; 0: greedy
  TensorView top_k;        // int32 [S], or none; below 1: off
  TensorView top_p;        // float32 [S], or none; 1 and above: off
  TensorView min_p;        // float32 [S], or none; 0: off
  TensorView seeds;        // int64 [S]
  TensorView positions;    // int64 [S]
  // Penalties: all of these or none. Slots hold the distinct tokens of a request, and how often each is in its output.
  TensorView repetition_penalty, presence_penalty, frequency_penalty;  // float32 [S]
  TensorView seen_tokens, seen_counts;                                 // int32 [slots, M]
  TensorView seen_lengths;                                             // int32 [slots]
  TensorView slots;                                                    // int32 [S]: a row's slot, or -1
  bool count_drawn = false;  // enter the drawn token into the row's slot
  TensorView bias_tokens;    // int32 [S, K] (-1: none), or none
  TensorView bias_values;    // float32 [S, K]; -inf forbids, whatever else holds
  TensorView allowed_tokens;  // int32 [S, ceil(V / 32)], a bit a token, lowest first, or none
  TensorView workspace;       // float32, CUDA: for penalties and biases
  TensorView token_ids;       // int64 [S]; -1 nothing left, -2 a logit is NaN, -3 a logit is +inf
  TensorView logprobs;        // float32 [S] of the drawn token before any change of its row, or none
  TensorView ranks;           // int64 [S], from 1
  TensorView top_ids;         // int64 [S, n], or none
  TensorView top_logprobs;    // float32 [S, n]
};

#define RESEARCH_ENGINE_OPS(STREAM_ARG)                                                                              \
  void paged_attention(const PagedAttention& args STREAM_ARG);                                                       \
  /* key, value [T, Hkv, D] into caches [N, Hkv, B, D] at slot_mapping int64 [T]; slot -1 is skipped. Caches of      \
     f8e4m3 or i8 take x / scale[head] (float32 [Hkv], or none: 1), to the nearest, ties to even, saturated */       \
  void reshape_and_cache(TensorView key, TensorView value, TensorView key_cache, TensorView value_cache,             \
                         TensorView slot_mapping, TensorView key_scale, TensorView value_scale STREAM_ARG);          \
  /* whole blocks inside one cache [L, 2, N, Hkv, B, D]; pairs int64 [P, 2] = (source, destination) */               \
  void copy_blocks(TensorView kv_cache, TensorView pairs STREAM_ARG);                                                \
  /* [T, H]; times weight_offset + weight */                                                                          \
  void rms_norm(TensorView x, TensorView weight, TensorView out, float eps, float weight_offset STREAM_ARG);         \
  /* residual += x; x = rms_norm(residual), both in place */                                                         \
  void fused_add_rms_norm(TensorView x, TensorView residual, TensorView weight, float eps,                           \
                          float weight_offset STREAM_ARG);                                                           \
  /* query [T, Hq, D], key [T, Hkv, D] rotated in place; cos_sin [max_position, rotary_dim], cosines first */        \
  void rotary_embedding(TensorView positions, TensorView query, TensorView key, TensorView cos_sin,                  \
                        bool interleaved STREAM_ARG);                                                                \
  /* queries rotated in place; keys rotated into the cache, `key` itself is not changed; values into the cache */    \
  void rotary_and_cache(TensorView positions, TensorView query, TensorView key, TensorView value, TensorView cos_sin, \
                        TensorView key_cache, TensorView value_cache, TensorView slot_mapping, bool interleaved,     \
                        TensorView key_scale, TensorView value_scale STREAM_ARG);                                    \
  void silu_and_mul(TensorView x, TensorView out STREAM_ARG); /* [T, 2I] -> [T, I] */                                \
  void skinny_gemm(const SkinnyGemm& args STREAM_ARG); /* out = x W^T + bias */                                      \
  void quantized_matmul(const QuantizedMatmul& args STREAM_ARG); /* out = x W^T + bias */                            \
  void dequantize_weight(const QuantizedWeight& weight, TensorView out STREAM_ARG); /* W as floats, [N, K] */        \
  void sample(const Sampling& args STREAM_ARG);                                                                      \
  /* the tokens [starts[r], ...) of every request out of the caches into key, value [T, Hkv, D], whose rows           \
     [start_loc[r], start_loc[r + 1]) are request r's; starts int32 [R] or none: 0; times the scales */  \
  void gather_cache(TensorView key_cache, TensorView value_cache, TensorView block_tables, TensorView start_loc,     \
                    TensorView starts, TensorView key, TensorView value, TensorView key_scale,                       \
                    TensorView value_scale STREAM_ARG);                                                              \
  /* [T, Hq, D] and natural-log lse float32 [T, Hq] of two disjoint sets of keys to those of both */                 \
  void merge_attention_states(TensorView out_a, TensorView lse_a, TensorView out_b, TensorView lse_b, TensorView out, \
                              TensorView lse STREAM_ARG);

namespace cpu {
RESEARCH_ENGINE_OPS()
// Blocks between two caches [L, 2, N, Hkv, B, D] on the host.
void swap_blocks(TensorView source, TensorView destination, TensorView pairs);
}  // namespace cpu

namespace cuda {
#define RESEARCH_ENGINE_STREAM , Stream stream
RESEARCH_ENGINE_OPS(RESEARCH_ENGINE_STREAM)
// Blocks between a cache on the device and one in pinned host memory, either way; pairs is host memory, copied into
// the launch, so that the caller may reuse it at once. Ordered on `stream`.
void swap_blocks(TensorView source, TensorView destination, TensorView pairs, Stream stream);
// float32 elements that paged_attention uses as `workspace` for these arguments (tensor data is not read):
// rows * Hq * S * (D + 2), where S splits a row at most (0 when S = 1, and on the paths that never split); rows = R on
// path 0 (requests of one query token take the split kernel) and T on path 2. A fixed split_size requires all of it;
// with split_size 0 the op makes do with fewer splits when the workspace is smaller or not given.
int64_t paged_attention_workspace(const PagedAttention& args);
// float32 elements that quantized_matmul uses as `workspace` for T rows of x and a weight of N padded columns and depth K.
int64_t quantized_matmul_workspace(QuantizedKind kind, int64_t tokens, int64_t columns, int64_t depth, int device);
// Rows of x, at most 64, that skinny_gemm multiplies in one pass over a weight of depth K for so many columns of out, and in no more
// time than a library's product; 0: none.
int64_t skinny_gemm_rows(int64_t columns, int64_t depth, bool gated, int device);
// reshape_and_cache where the caches' type is not the tokens'.
void write_quantized(TensorView key, TensorView value, TensorView key_cache, TensorView value_cache, TensorView slot_mapping,
                     TensorView key_scale, TensorView value_scale, Stream stream);
// float32 elements of `sample`'s workspace where it has penalties or biases.
int64_t sample_workspace(int64_t rows, int64_t vocab_size, int device);
int device_count();                              // 0 without a driver, never throws
std::string device_description(int device);      // "NVIDIA H200, sm_90, 132 SMs"
// Code of one architecture as a kernel, a cudaKernel_t that serves every device of it. Stays loaded: a CUDA graph may hold it.
void* load_kernel(const std::string& code, const std::string& symbol);
#undef RESEARCH_ENGINE_STREAM
}  // namespace cuda

#undef RESEARCH_ENGINE_OPS

}  // namespace research_engine
