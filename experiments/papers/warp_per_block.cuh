// Paged attention for one query token a row as the PagedAttention paper (SOSP 2023) has it: a warp reads one KV block at a time.
//
// Computes   out = softmax(scale q K^T) V for each query head by itself, out of caches of 16-bit floats. It stands in for the decode
//            kernel, whose launcher it keeps, as a variant: path="decode[source=experiments/papers/warp_per_block.cuh]".
// Work       A thread block of four warps takes a (row, query head) from end to end, then the next one, a grid further on.
// Algorithm  1. Scores. The warps take the row's KV blocks in turn. A warp looks up where its block lies, asks for the block's keys,
//               16 bytes a lane, multiplies them by the query, sums over the lanes of a key and writes the scores to shared memory.
//               What it reads at once is one block, and of a block at most 16 keys: a block of one is 256 bytes at D = 128, half
//               a warp's load, where a block of 16 is eight loads of all lanes, on their way together.
//            2. Softmax over the scores, by the whole thread block.
//            3. Values. The warps take the blocks in turn again, and add the values times their weights in registers.
//            4. The warps' sums are added up through shared memory.
//            A row of more than kStretch keys is taken in stretches of so many, with a maximum and a sum that are carried on.
// Roofline   2 x keys x Hq x D elements of 2 bytes: with several query heads a KV head each reads the keys again, as in the paper.
// Why        Only the unit of reading differs from the decode kernel's (tiles of 16 keys whatever the block), so that the two
//            together show what of the block size's cost is the kernel's (pagedattention_fig_18b_gpu.yaml).
#pragma once

#include "launch.cuh"
#include "paged_attention.cuh"
#include "paged_attention_decode_plan.cuh"

namespace research_engine::cuda::decode {

// What the variant's launcher reads, by the names that it reads.
template <typename C, int kD, int kRows> struct MmaShape {
  static constexpr int kStretch = 2048;    // keys whose scores are in shared memory
  static constexpr int kBlocksPerSm = RESEARCH_ENGINE_DECODE_BLOCKS_PER_SM > 0 ? RESEARCH_ENGINE_DECODE_BLOCKS_PER_SM : 6;
  static constexpr int kStages = 1;        // nothing is copied ahead
  static constexpr int kSharedBytes = (kStretch + kWarps * kD + kWarps) * 4;
};

template <typename C, int kD, int kRows> class WarpPerBlock {
  using Shape = MmaShape<C, kD, kRows>;
  static constexpr int kElements = 8;                    // of a 16-byte load
  static constexpr int kLanes = kD / kElements;          // of a key
  static constexpr int kKeys = 32 / kLanes;              // of a load of all lanes
  static constexpr int kLoads = kTile / kKeys;           // on their way together
  static_assert(sizeof(C) == 2, "caches of 16-bit floats");
  static_assert(kD % kElements == 0 && 32 % kLanes == 0 && kLoads > 0, "head sizes of 16, 32, 64, 128 and 256");

 public:
  __device__ WarpPerBlock(const AttentionParams& p, float* shared)
      : p_(p), scores_(shared), sums_(shared + Shape::kStretch), reduced_(sums_ + kWarps * kD) {
    lane_ = threadIdx.x % 32;
    warp_ = threadIdx.x / 32;
  }

  __device__ void attend(const Row& row, int head) {
    const int kv_head = head / p_.group_size;
    table_ = p_.block_tables + row.request * p_.table_stride;
    keys_ = static_cast<const C*>(p_.key_cache) + kv_head * p_.key_head_stride;
    values_ = static_cast<const C*>(p_.value_cache) + kv_head * p_.value_head_stride;
    const C* query = static_cast<const C*>(p_.query) + row.token * p_.query_token_stride + head * p_.query_head_stride;
    const float scale = p_.scale * head_scale(p_.key_scale, kv_head), slope = alibi_slope(p_, head);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      query_[e] = to_float(query[lane_ % kLanes * kElements + e]) * scale;
      out_[e] = 0.0f;
    }
    float top = -INFINITY, sum = 0.0f;
    for (int begin = row.begin; begin < row.end; begin += min(Shape::kStretch, row.end - begin)) {
      const int end = begin + min(Shape::kStretch, row.end - begin);
      multiply_keys(begin, end);
      __syncthreads();
      const float new_top = fmaxf(top, reduce(score_all(begin, end, row.position, slope), Larger{}, -INFINITY));
      const float reference = finite_top(new_top), rescale = exp2f(top - reference);
      top = new_top;
      sum = sum * rescale + reduce(weigh_all(end - begin, reference), Sum{}, 0.0f);
#pragma unroll
      for (int e = 0; e < kElements; ++e) out_[e] *= rescale;
      add_values(begin, end);
      __syncthreads();  // the scores are read before the next stretch's, or the next row's, are written
    }
    write(row, head, end_row(p_, top, sum, head), head_scale(p_.value_scale, kv_head));
  }

 private:
  struct Larger {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  };
  struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
  };

  // Calls use(first key, its elements) for what this warp reads of the keys [begin, end): the parts of its blocks in them, each in
  // loads of kTile keys or, at a part's end, fewer. The part of a block is used before the next block is asked for.
  template <typename Use>
  __device__ __forceinline__ void for_blocks(const C* head, int64_t block_stride, int begin, int end, const Use& use) const {
    const int size = static_cast<int>(p_.block_size.value), last = p_.block_size.divide(end - 1);
#pragma unroll 1
    for (int column = p_.block_size.divide(begin) + warp_; column <= last; column += kWarps) {
      const int start = column * size;
      const int from = max(begin, start), to = start + min(size, end - start);
      const C* block = head + int64_t{table_[column]} * block_stride;
#pragma unroll 1
      for (int key = from; key < to; key += kTile) {
        const uint4* rows = reinterpret_cast<const uint4*>(block + (key - start) * kD) + lane_;  // a block's keys lie together
        uint4 loaded[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          loaded[i] = make_uint4(0, 0, 0, 0);
          if (i * kKeys + lane_ / kLanes < to - key) loaded[i] = rows[i * 32];
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (key + i * kKeys >= to) break;  // for all lanes alike
          float elements[kElements];
          unpack<C>(loaded[i], elements);
          use(key + i * kKeys + lane_ / kLanes, to, elements);
        }
      }
    }
  }

  // The keys [begin, end) times the query, to shared memory.
  __device__ void multiply_keys(int begin, int end) {
    for_blocks(keys_, p_.key_block_stride, begin, end, [&](int key, int to, const float(&elements)[kElements]) {
      float dot = 0.0f;
#pragma unroll
      for (int e = 0; e < kElements; ++e) dot += query_[e] * elements[e];
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
      if (lane_ % kLanes == 0 && key < to) scores_[key - begin] = dot;
    });
  }

  // Products to scores in base 2, by the whole thread block; returns the greatest of this thread's.
  __device__ float score_all(int begin, int end, int position, float slope) {
    float top = -INFINITY;
    for (int i = threadIdx.x; i < end - begin; i += kThreads) {
      scores_[i] = score(p_, scores_[i], slope, begin + i - position);
      top = fmaxf(top, scores_[i]);
    }
    return top;
  }

  // Scores to weights, by the same threads; returns the sum of this thread's.
  __device__ float weigh_all(int count, float reference) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      scores_[i] = exp2f(scores_[i] - reference);
      sum += scores_[i];
    }
    return sum;
  }

  __device__ void add_values(int begin, int end) {
    for_blocks(values_, p_.value_block_stride, begin, end, [&](int key, int to, const float(&elements)[kElements]) {
      const float weight = key < to ? scores_[key - begin] : 0.0f;
#pragma unroll
      for (int e = 0; e < kElements; ++e) out_[e] += weight * elements[e];
    });
  }

  // The values of all threads joined, for all of them. What was written to shared memory before may be read afterwards.
  template <typename Join> __device__ float reduce(float value, const Join& join, float none) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = join(value, __shfl_xor_sync(0xffffffffu, value, mask));
    if (lane_ == 0) reduced_[warp_] = value;
    __syncthreads();
    value = none;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value = join(value, reduced_[w]);
    __syncthreads();
    return value;
  }

  // The sums of the lanes that have the same elements, then of the warps.
  __device__ void write(const Row& row, int head, const RowEnd& end, float scale) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
#pragma unroll
      for (int mask = kLanes; mask < 32; mask *= 2) out_[e] += __shfl_xor_sync(0xffffffffu, out_[e], mask);
      if (lane_ < kLanes) sums_[warp_ * kD + lane_ * kElements + e] = out_[e];
    }
    __syncthreads();
    const int64_t out_row = row.token * p_.out_token_stride + head * p_.out_head_stride;
    for (int i = threadIdx.x; i < kD; i += kThreads) {
      float value = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) value += sums_[w * kD + i];
      store_out<C>(p_, out_row + i, value * end.factor * scale);
    }
    if (threadIdx.x == 0 && p_.lse != nullptr) p_.lse[row.token * p_.lse_token_stride + head * p_.lse_head_stride] = end.lse;
    __syncthreads();
  }

  const AttentionParams& p_;
  float *scores_, *sums_, *reduced_;
  const int32_t* table_;
  const C *keys_, *values_;
  float query_[kElements], out_[kElements];  // of this lane's part of D
  int lane_, warp_;
};

template <typename C, int kD, int kRows>
__global__ void __launch_bounds__(kThreads, MmaShape<C, kD, kRows>::kBlocksPerSm)
    decode_mma_kernel(const __grid_constant__ AfterPredecessor<AttentionParams> after) {
  const AttentionParams& p = after.wait();
  extern __shared__ __align__(16) float shared[];
  WarpPerBlock<C, kD, kRows> warps(p, shared);
  const int items = static_cast<int>(p.num_rows) * p.num_query_heads;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Row row = grid_row(p, item / p.num_query_heads);
    if (row.request >= 0) warps.attend(row, item % p.num_query_heads);
  }
}

}  // namespace research_engine::cuda::decode
