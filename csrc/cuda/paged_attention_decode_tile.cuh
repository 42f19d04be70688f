// The inner loop of the decode kernel on tensor cores: what a warp does with 16 keys and values in shared memory.
//
//   S^T = K Q^T    [16 keys x 8 heads], D/16 products per 8 heads. A thread reads 16 bytes of a key row, which is two k-steps of
//                  the product when Q uses the same order of D.
//   P = exp2(S - max), online maximum and sum per head, float32
//   O^T += V^T P^T [D x 8 heads], D/16 products. A thread reads 16 bytes of four value rows and pairs the rows by byte
//                  permutation, so that V needs no transposing load; P^T is turned in registers.
//
// Heads are the short side of the products (8), so that G <= 8 wastes least. Quantised elements are widened to float16 on the way
// from shared memory; the scale of a head's keys is a factor of its scores, that of its values a factor of the result, which is
// the caller's.
#pragma once

#include <type_traits>

#include "mma.cuh"
#include "paged_attention.cuh"
#include "paged_attention_decode_plan.cuh"
#include "quantized.cuh"

namespace research_engine::cuda::decode {

// Sizes for caches of C, head size kD and up to kRows (8 or 16) query heads.
template <typename C, int kD, int kRows> struct MmaShape {
  static constexpr int kInChunk = 16 / static_cast<int>(sizeof(C));
  static constexpr int kChunks = kD / kInChunk;  // of 16 bytes, in a row
  static constexpr bool kSwizzle = kChunks % 8 == 0;
  static constexpr int kRowChunks = kSwizzle ? kChunks : kChunks | 1;  // an odd stride spreads rows over the banks as well
  static constexpr int kTileBytes = kTile * kRowChunks * 16;
  static constexpr int kStageBytes = 2 * kTileBytes;  // of one warp
  static constexpr int kBlocksPerSm = blocks_of_sm(kD);
  static constexpr int kSumStride = kD + 4;  // float32 elements of a head's sums, with its maximum and sum of exponentials
  static constexpr int kFixedBytes = kWarps * (kRows * kSumStride * 4 + 56) + 16;
  // Deeper rings lose bandwidth: at 256 x 2,048 an H200 read 4.15 TB/s with 3 stages and 4.26 with 2 (D = 128).
  static constexpr int kMostStages =
      RESEARCH_ENGINE_DECODE_STAGES > 0 ? RESEARCH_ENGINE_DECODE_STAGES : (kD < 128 ? 4 : 2) * (sizeof(C) == 1 ? 2 : 1);
  static constexpr int kBudget = ((228 * 1024) / kBlocksPerSm - 1024 - kFixedBytes) / kWarps;
  // Queries are copied like keys, ahead of their use, where shared memory has room for them.
  static constexpr int kQueryTile = kRows * kD * static_cast<int>(sizeof(C));
  static constexpr bool kQueryAhead = sizeof(C) > 1 && (kStageBytes + kQueryTile) * (kMostStages < 3 ? kMostStages : 3) <= kBudget;
  static constexpr int kPerStage = kStageBytes + (kQueryAhead ? kQueryTile : 0);
  static constexpr int kStages = kBudget / kPerStage < kMostStages ? kBudget / kPerStage : kMostStages;
  static constexpr int kRingBytes = kStages * kStageBytes, kQueryBytes = kQueryAhead ? kStages * kQueryTile : 0;
  static constexpr int kSharedBytes = kWarps * (kRingBytes + kQueryBytes) + kFixedBytes;
  static_assert(kStages >= 2, "a stage is loaded while another is used");

  static __device__ uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowChunks + (kSwizzle ? chunk ^ (row & 7) : chunk)) * 16;
  }
};

// Products are of 16-bit floats M: of the cache's own type, or of float16, to which quantised elements are widened.
template <typename C, int kD, int kRows> class DecodeTile {
 protected:
  using Shape = MmaShape<C, kD, kRows>;
  static constexpr bool kQuantized = sizeof(C) == 1;
  using M = std::conditional_t<kQuantized, __half, C>;
  static constexpr int kHeadTiles = kRows / 8;
  static constexpr int kTiles = kD / 16;  // output tiles of 16 columns of D, and k-steps of the scores
  static constexpr int kAhead = !kQuantized && kD >= 64 && kRows == 8 && kD <= 128 ? kD / 64 : 0;

  __device__ __forceinline__ explicit DecodeTile(const AttentionParams& p) : p_(p) {
    lane_ = threadIdx.x % 32;
    warp_ = threadIdx.x / 32;
    g_ = lane_ / 4;
    q_ = lane_ % 4;
  }

  // Reads the queries of `heads` heads, `stride` elements apart, in the order in which the products read K, and clears sums.
  __device__ __forceinline__ void begin(const char* rows, int64_t stride, int first_head, int heads) {
    if constexpr (kQuantized) scale_ = p_.scale * head_scale(p_.key_scale, first_head / p_.group_size);
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      const bool there = h * 8 + g_ < heads;
      const int64_t row = (h * 8 + g_) * stride;
      if constexpr (kQuantized) {
        read_query((rows - static_cast<const char*>(p_.query)) / 2 + row, h, there);
      } else {
        const C* query = reinterpret_cast<const C*>(rows) + row;
#pragma unroll
        for (int i = 0; i < kD / 32; ++i) {
          const uint4 part = there ? *reinterpret_cast<const uint4*>(query + i * 32 + q_ * 8) : make_uint4(0, 0, 0, 0);
          query_[2 * i][h][0] = part.x;
          query_[2 * i][h][1] = part.y;
          query_[2 * i + 1][h][0] = part.z;
          query_[2 * i + 1][h][1] = part.w;
        }
        if constexpr (kD % 32 != 0) {
          const uint2 part = there ? *reinterpret_cast<const uint2*>(query + kD / 32 * 32 + q_ * 4) : make_uint2(0, 0);
          query_[kTiles - 1][h][0] = part.x;
          query_[kTiles - 1][h][1] = part.y;
        }
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        top_[h][b] = -INFINITY;
        sum_[h][b] = 0.0f;
        slope_[h][b] = h * 8 + q_ * 2 + b < heads ? alibi_slope(p_, first_head + h * 8 + q_ * 2 + b) : 0.0f;
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out_[t][h][e] = 0.0f;
      }
    }
  }

  // One step: the warp's 16 keys from `key` on, which lie in the stage at `keys`. Element e of a thread's scores belongs to key
  // g + 8 (e / 2) and head 2 q + e % 2.
  __device__ __forceinline__ void attend(const Cursor& c, int key, uint32_t keys) {
    float scores[kHeadTiles][4] = {}, odd[kHeadTiles][4] = {};  // two chains of products, to halve their latency
    if constexpr (kQuantized) {
      multiply_quantized_keys(keys, scores, odd);
    } else {
      multiply_keys(keys, scores, odd);
    }

    // The first value rows are asked for before the softmax, which hides their latency.
    const uint32_t values = keys + Shape::kTileBytes;
    uint4 ahead[kAhead > 0 ? kAhead : 1][4];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) ahead[i][r] = load_shared_16(values + Shape::offset(value_row(r), i * 8 + g_));
    }

    const bool whole = key >= c.row.begin && key + kTile <= c.key_end;
    const bool plain = p_.softcap <= 0.0f && p_.alibi_slopes == nullptr;
    const float scale = kQuantized ? scale_ : p_.scale;
    uint32_t weights[kHeadTiles][2];
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      float top[2], reference[2];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = key + g_ + e / 2 * 8;
        float s = scores[h][e] + odd[h][e];
        s = plain ? s * (scale * kLog2E) : score(p_, s * scale, slope_[h][e % 2], at - c.row.position);
        if (!whole && (at < c.row.begin || at >= c.key_end)) s = -INFINITY;
        scores[h][e] = s;
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) top[b] = fmaxf(scores[h][b], scores[h][2 + b]);
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
#pragma unroll
        for (int b = 0; b < 2; ++b) top[b] = fmaxf(top[b], __shfl_xor_sync(0xffffffffu, top[b], mask));
      }
      if (__any_sync(0xffffffffu, top[0] > top_[h][0] || top[1] > top_[h][1])) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          top[b] = fmaxf(top[b], top_[h][b]);
          const float rescale = exp2_fast(top_[h][b] - finite_top(top[b]));
          top_[h][b] = top[b];
          sum_[h][b] *= rescale;
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            out_[t][h][b] *= rescale;
            out_[t][h][2 + b] *= rescale;
          }
        }
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) reference[b] = finite_top(top_[h][b]);
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[h][e] = exp2_fast(scores[h][e] - reference[e % 2]);
#pragma unroll
      for (int b = 0; b < 2; ++b) sum_[h][b] += scores[h][b] + scores[h][2 + b];
      weights[h][0] = transpose_8x8(pack_pair<M>(scores[h][0], scores[h][1]));
      weights[h][1] = transpose_8x8(pack_pair<M>(scores[h][2], scores[h][3]));
    }

    if constexpr (kQuantized) {
      add_quantized_tile(values, weights);
    } else {
      add_float_tile(values, weights, ahead);
    }
  }

  // O^T += V^T P^T for caches of 16-bit floats; the first kAhead parts of the value rows are in `ahead`.
  __device__ __forceinline__ void add_float_tile(uint32_t values, const uint32_t (&weights)[kHeadTiles][2],
                                                 const uint4 (&ahead)[kAhead > 0 ? kAhead : 1][4]) {
#pragma unroll
    for (int i = 0; i < kD / 64; ++i) {  // 4 tiles
      uint4 part[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        part[r] = i < kAhead ? ahead[i < kAhead ? i : 0][r] : load_shared_16(values + Shape::offset(value_row(r), i * 8 + g_));
      }
      add_values(i * 4 + 0, weights, part[0].x, part[1].x, part[2].x, part[3].x);
      add_values(i * 4 + 1, weights, part[0].y, part[1].y, part[2].y, part[3].y);
      add_values(i * 4 + 2, weights, part[0].z, part[1].z, part[2].z, part[3].z);
      add_values(i * 4 + 3, weights, part[0].w, part[1].w, part[2].w, part[3].w);
    }
    constexpr int kDone = kD / 64 * 64;
    if constexpr (kD % 64 >= 32) {  // 2 tiles
      uint2 part[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) part[r] = load_shared_8(values + Shape::offset(value_row(r), kDone / 8 + g_ / 2) + g_ % 2 * 8);
      add_values(kDone / 16 + 0, weights, part[0].x, part[1].x, part[2].x, part[3].x);
      add_values(kDone / 16 + 1, weights, part[0].y, part[1].y, part[2].y, part[3].y);
    }
    if constexpr (kD % 32 != 0) {  // 1 tile
      uint32_t part[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) part[r] = load_shared_4(values + Shape::offset(value_row(r), kD / 8 - 2 + g_ / 4) + g_ % 4 * 4);
      add_values(kTiles - 1, weights, part[0], part[1], part[2], part[3]);
    }
  }

  // The same for quantised caches.
  __device__ __forceinline__ void add_quantized_tile(uint32_t values, const uint32_t (&weights)[kHeadTiles][2]) {
#pragma unroll
    for (int i = 0; i < kD / 128; ++i) {  // 8 tiles
      uint4 part[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) part[r] = load_shared_16(values + Shape::offset(value_row(r), i * 8 + g_));
      add_widened(i * 8, weights, part[0].x, part[1].x, part[2].x, part[3].x);
      add_widened(i * 8 + 2, weights, part[0].y, part[1].y, part[2].y, part[3].y);
      add_widened(i * 8 + 4, weights, part[0].z, part[1].z, part[2].z, part[3].z);
      add_widened(i * 8 + 6, weights, part[0].w, part[1].w, part[2].w, part[3].w);
    }
    if constexpr (kD % 128 >= 64) {  // 4 tiles
      constexpr int kDone = kD / 128 * 8;
      uint2 part[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) part[r] = load_shared_8(values + Shape::offset(value_row(r), kDone + g_ / 2) + g_ % 2 * 8);
      add_widened(kDone, weights, part[0].x, part[1].x, part[2].x, part[3].x);
      add_widened(kDone + 2, weights, part[0].y, part[1].y, part[2].y, part[3].y);
    }
    if constexpr (kD % 64 >= 32) {  // 2 tiles
      constexpr int kDone = kD / 64 * 4;
      uint32_t part[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) part[r] = load_shared_4(values + Shape::offset(value_row(r), kDone + g_ / 4) + g_ % 4 * 4);
      add_widened(kDone, weights, part[0], part[1], part[2], part[3]);
    }
    if constexpr (kD % 32 != 0) {  // 1 tile: two elements a row
      uint32_t part[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        part[r] = widen<C>(load_shared_4(values + Shape::offset(value_row(r), kD / 16 - 1) + g_ / 2 * 4) >> g_ % 2 * 16).x;
      }
      add_values(kTiles - 1, weights, part[0], part[1], part[2], part[3]);
    }
  }

  // scores and odd += K Q^T, of D in the order in which a thread reads 16 bytes of a row.
  __device__ __forceinline__ void multiply_keys(uint32_t keys, float (&scores)[kHeadTiles][4], float (&odd)[kHeadTiles][4]) {
#pragma unroll
    for (int i = 0; i < kD / 32; ++i) {
      const uint4 low = load_shared_16(keys + Shape::offset(g_, i * 4 + q_));
      const uint4 high = load_shared_16(keys + Shape::offset(g_ + 8, i * 4 + q_));
#pragma unroll
      for (int h = 0; h < kHeadTiles; ++h) {
        multiply_add<M>(scores[h], {low.x, high.x, low.y, high.y}, query_[2 * i][h][0], query_[2 * i][h][1]);
        multiply_add<M>(odd[h], {low.z, high.z, low.w, high.w}, query_[2 * i + 1][h][0], query_[2 * i + 1][h][1]);
      }
    }
    if constexpr (kD % 32 != 0) {
      const uint2 low = load_shared_8(keys + Shape::offset(g_, kD / 32 * 4 + q_ / 2) + q_ % 2 * 8);
      const uint2 high = load_shared_8(keys + Shape::offset(g_ + 8, kD / 32 * 4 + q_ / 2) + q_ % 2 * 8);
#pragma unroll
      for (int h = 0; h < kHeadTiles; ++h) {
        multiply_add<M>(scores[h], {low.x, high.x, low.y, high.y}, query_[kTiles - 1][h][0], query_[kTiles - 1][h][1]);
      }
    }
  }

  // The same for quantised caches.
  __device__ __forceinline__ void multiply_quantized_keys(uint32_t keys, float (&scores)[kHeadTiles][4],
                                                          float (&odd)[kHeadTiles][4]) {
#pragma unroll
    for (int i = 0; i < kD / 64; ++i) {
      const uint4 low = load_shared_16(keys + Shape::offset(g_, i * 4 + q_));
      const uint4 high = load_shared_16(keys + Shape::offset(g_ + 8, i * 4 + q_));
      multiply_widened(4 * i, low.x, high.x, scores);
      multiply_widened(4 * i + 1, low.y, high.y, odd);
      multiply_widened(4 * i + 2, low.z, high.z, scores);
      multiply_widened(4 * i + 3, low.w, high.w, odd);
    }
    if constexpr (kD % 64 >= 32) {
      const uint2 low = load_shared_8(keys + Shape::offset(g_, kD / 64 * 4 + q_ / 2) + q_ % 2 * 8);
      const uint2 high = load_shared_8(keys + Shape::offset(g_ + 8, kD / 64 * 4 + q_ / 2) + q_ % 2 * 8);
      multiply_widened(kD / 64 * 4, low.x, high.x, scores);
      multiply_widened(kD / 64 * 4 + 1, low.y, high.y, odd);
    }
    if constexpr (kD % 32 != 0) {
      multiply_widened(kTiles - 1, load_shared_4(keys + Shape::offset(g_, kD / 16 - 1) + q_ * 4),
                       load_shared_4(keys + Shape::offset(g_ + 8, kD / 16 - 1) + q_ * 4), scores);
    }
  }

  // A k-step from four elements of the thread's two key rows.
  __device__ __forceinline__ void multiply_widened(int step, uint32_t low, uint32_t high, float (&scores)[kHeadTiles][4]) {
    const uint2 first = widen<C>(low), second = widen<C>(high);
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      multiply_add<M>(scores[h], {first.x, second.x, first.y, second.y}, query_[step][h][0], query_[step][h][1]);
    }
  }

  // A row of Q as float16, in the order of quantised keys: a k-step is four neighbouring elements of each of four threads.
  __device__ __forceinline__ void read_query(int64_t row, int h, bool there) {
#pragma unroll
    for (int step = 0; step < kTiles; ++step) {
      const int whole = kD / 64 * 4, half = kD % 64 >= 32 ? 2 : 0;
      const int at = step < whole          ? step / 4 * 64 + q_ * 16 + step % 4 * 4
                     : step < whole + half ? kD / 64 * 64 + q_ * 8 + (step - whole) * 4
                                           : kD - 16 + q_ * 4;
      const uint2 pairs = there ? load_query_4(p_, row + at) : make_uint2(0, 0);
      query_[step][h][0] = pairs.x;
      query_[step][h][1] = pairs.y;
    }
  }

  // Value rows of a thread: a product's keys 2 q, 2 q + 1, 2 q + 8, 2 q + 9.
  __device__ __forceinline__ int value_row(int r) const { return 2 * q_ + r % 2 + r / 2 * 8; }

  // Two output tiles from four neighbouring quantised columns of four value rows.
  __device__ __forceinline__ void add_widened(int tile, const uint32_t (&weights)[kHeadTiles][2], uint32_t v0, uint32_t v1,
                                              uint32_t v2, uint32_t v3) {
    const uint2 w0 = widen<C>(v0), w1 = widen<C>(v1), w2 = widen<C>(v2), w3 = widen<C>(v3);
    add_values(tile, weights, w0.x, w1.x, w2.x, w3.x);
    add_values(tile + 1, weights, w0.y, w1.y, w2.y, w3.y);
  }

  // An output tile from a pair of neighbouring columns of four value rows.
  __device__ __forceinline__ void add_values(int tile, const uint32_t (&weights)[kHeadTiles][2], uint32_t v0, uint32_t v1, uint32_t v2,
                                             uint32_t v3) {
    const uint32_t pairs[4] = {__byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
                               __byte_perm(v2, v3, 0x7632)};
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) multiply_add<M>(out_[tile][h], pairs, weights[h][0], weights[h][1]);
  }

  // Column of D of elements 0 and 1 of this thread's part of an output tile; elements 2 and 3 are in the next column.
  __device__ __forceinline__ int column(int tile) const {
    if constexpr (kQuantized) {
      if (tile < kD / 128 * 8) return tile / 8 * 128 + g_ * 16 + tile % 8 * 2;
      if (kD % 128 >= 64 && tile < kD / 64 * 4) return kD / 128 * 128 + g_ * 8 + (tile - kD / 128 * 8) * 2;
    }
    if (!kQuantized && tile < kD / 64 * 4) return tile / 4 * 64 + g_ * 8 + tile % 4 * 2;
    if (kD % 64 >= 32 && tile < kD / 64 * 4 + 2) return kD / 64 * 64 + g_ * 4 + (tile - kD / 64 * 4) * 2;
    return kD - 16 + g_ * 2;
  }

  const AttentionParams& p_;
  int lane_, warp_, g_, q_;
  float out_[kTiles][kHeadTiles][4];
  float top_[kHeadTiles][2], sum_[kHeadTiles][2];  // of heads 2 q and 2 q + 1

 private:
  float scale_;  // of quantised keys
  uint32_t query_[kTiles][kHeadTiles][2];
  float slope_[kHeadTiles][2];
};

}  // namespace research_engine::cuda::decode
