// Paged attention, the decode path on tensor cores: float16 and bfloat16, caches of the same or of e4m3 or int8; one query token
// a row.
//
// Computes   out[h] = softmax(scale q[h] K^T) V for the G query heads of a KV head at once: they are the columns of one
//            matrix tile, so K and V are read once for all of them (G > 16: once per 16 heads).
// Work       The keys of every (row, head group) are cut into units of 64 (or of split_size). All units of the batch, in a
//            line, are dealt out in equal runs to the thread blocks, two to a multiprocessor: no tail, whatever the lengths.
//            Every block finds its run by itself from seq_lens, so nothing is planned on the host and a captured graph may be
//            replayed with other lengths. A run is a sequence of pieces, each inside one (row, head group):
//
//              units   | row 0, group 0      | row 0, group 1      | row 1, group 0 | ...
//              blocks  | block 0    | block 1    | block 2    | block 3    | ...
//              pieces  | a          | b      | c  | d         | ...       b and c end in the same block
//
// Warp       A warp takes 16 of every 64 keys, through a ring of shared-memory stages of its own, filled by asynchronous
//            copies up to kStages - 1 steps ahead, across the borders of pieces: the loop has no block-wide barrier.
//              S^T = K Q^T    [16 keys x 8 heads], D/16 products per 8 heads. A thread reads 16 bytes of a key row, which is
//                             two k-steps of the product when Q uses the same order of D.
//              P = exp2(S - max), online maximum and sum per head, float32
//              O^T += V^T P^T [D x 8 heads], D/16 products. A thread reads 16 bytes of four value rows and pairs the rows by
//                             byte permutation, so that V needs no transposing load; P^T is turned in registers.
//            Quantised elements are widened to float16 on the way from shared memory; the scale of a head's keys is a
//            factor of its scores, that of its values a factor of the result.
//            Heads are the short side of the products (8), so that G <= 8 wastes least.
// Merge      At a piece's end the four warps add up in shared memory in fixed order. A piece that is its row's whole is
//            finished there; otherwise it leaves a float32 partial, and the block that arrives last for the row, by a counter,
//            adds the partials in the order of their keys. The counter is zero again afterwards.
// Determinism  The result depends on how the line is cut, so on the batch. With a fixed split_size every unit is a piece, cut
//            at multiples of split_size: a row's bits depend on its own keys alone.
// Workspace  float32: [counters of blocks, as int32][with split_size: counters of rows and groups][slots][heads of a group, at most 16][2 + D]
//            (maximum in base 2, sum, then the values). The first 1,024 have to be zero at the first call
//            and are zero after each.
// Versions   1 keys in equal runs, heads as the 16 rows of the product, 3 stages: 549 us at 128 x 4,096. 2 one pass to merge: 547,
//            and 15.0 us instead of 32 at 1 x 1,024. 3 heads as the 8 columns: 529. 4 L2 prefetch of 128 bytes: 524. 5 two
//            stages: 503, the memory system had been over-full. 6 quantised caches (not measured yet).
// Roofline   2 x keys x Hkv x D elements of 2 bytes, or of 1; the products are 13 % of the tensor rate when memory is saturated (G <= 16).
// Reached    one H200, bf16, blocks of 16 (docs/performance.md): 4.28 TB/s at 128 x 4,096 tokens with 32/8 heads of 128, 4.44
//            with 32/32; 14.1 us at 1 x 1,024, 5.0 of them an empty launch's. Geometric mean over 16 configurations 0.98 of
//            FlashInfer 0.6.11, from 0.93 to 1.09.
#pragma once

#include <algorithm>
#include <type_traits>

#include "mma.cuh"
#include "paged_attention.cuh"
#include "paged_attention_decode_plan.cuh"
#include "quantized.cuh"

namespace research_engine::cuda::decode {

constexpr const char* kOp = "paged_attention (path decode, tensor cores)";

// Sizes for caches of C, head size kD and up to kRows (8 or 16) query heads.
template <typename C, int kD, int kRows> struct MmaShape {
  static constexpr int kInChunk = 16 / static_cast<int>(sizeof(C));
  static constexpr int kChunks = kD / kInChunk;  // of 16 bytes, in a row
  static constexpr bool kSwizzle = kChunks % 8 == 0;
  static constexpr int kRowChunks = kSwizzle ? kChunks : kChunks | 1;  // an odd stride spreads rows over the banks as well
  static constexpr int kTileBytes = kTile * kRowChunks * 16;
  static constexpr int kStageBytes = kWarps * 2 * kTileBytes;
  static constexpr int kBlocksPerSm =
      RESEARCH_ENGINE_DECODE_BLOCKS_PER_SM > 0 ? RESEARCH_ENGINE_DECODE_BLOCKS_PER_SM : kD <= 128 ? 2 : 1;
  static constexpr int kSumStride = kD + 4;  // float32 elements
  static constexpr int kMergeBytes = kRows * kSumStride * 4 + kWarps * kRows * 8 + kRows * 8 + 16;
  // Deeper rings lose bandwidth: at 256 x 2,048 an H200 read 4.15 TB/s with 3 stages and 4.26 with 2 (D = 128).
  static constexpr int kMostStages =
      RESEARCH_ENGINE_DECODE_STAGES > 0 ? RESEARCH_ENGINE_DECODE_STAGES : (kD < 128 ? 4 : 2) * (sizeof(C) == 1 ? 2 : 1);
  static constexpr int kBudget = (228 * 1024) / kBlocksPerSm - 1024 - kMergeBytes;
  static constexpr int kStages = kBudget / kStageBytes < kMostStages ? kBudget / kStageBytes : kMostStages;
  static constexpr int kSharedBytes = kStages * kStageBytes + kMergeBytes;
  static_assert(kStages >= 2, "a stage is loaded while another is used");

  static __device__ uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowChunks + (kSwizzle ? chunk ^ (row & 7) : chunk)) * 16;
  }
};

// Products are of 16-bit floats M: of the cache's own type, or of float16, to which quantised elements are widened.
template <typename C, int kD, int kRows> class DecodeBlock {
  using Shape = MmaShape<C, kD, kRows>;
  static constexpr bool kQuantized = sizeof(C) == 1;
  using M = std::conditional_t<kQuantized, __half, C>;
  static constexpr int kHeadTiles = kRows / 8;
  static constexpr int kTiles = kD / 16;  // output tiles of 16 columns of D, and k-steps of the scores
  static constexpr int kAhead = !kQuantized && kD >= 64 && kRows == 8 && kD <= 128 ? kD / 64 : 0;

 public:
  __device__ __forceinline__ DecodeBlock(const AttentionParams& p, char* shared) : p_(p) {
    lane_ = threadIdx.x % 32;
    warp_ = threadIdx.x / 32;
    g_ = lane_ / 4;
    q_ = lane_ % 4;
    ring_ = shared_address(shared) + warp_ * 2 * Shape::kTileBytes;
    sums_ = reinterpret_cast<float*>(shared + Shape::kStages * Shape::kStageBytes);
    ends_ = reinterpret_cast<float2*>(sums_ + kRows * Shape::kSumStride);
    factors_ = reinterpret_cast<float*>(ends_ + kWarps * kRows);
    tops_ = factors_ + kRows;
    flag_ = reinterpret_cast<int*>(tops_ + kRows);
    groups_per_head_ = (p.group_size + kGroup - 1) / kGroup;
  }

  __device__ __forceinline__ void run(Plan& plan) {
    Cursor use;
    if (!decode::find_share(p_, plan, use, reinterpret_cast<int*>(sums_))) return;
    __syncthreads();
    Cursor load = use;
    bool loading = true;
    fetch_block(load);
    for (int stage = 0; stage < Shape::kStages - 1; ++stage) loading = issue(load, plan, stage, loading);
    int slot = 0;
    bool fresh = true;
    while (true) {
      if (fresh) begin_piece(use);
      loading = issue(load, plan, (slot + Shape::kStages - 1) % Shape::kStages, loading);
      wait_copies<Shape::kStages - 1>();
      __syncwarp();
      const int key = use.key + warp_ * kTile;
      if (key < use.key_end) attend(use, key, ring_ + slot * Shape::kStageBytes);
      __syncwarp();
      slot = (slot + 1) % Shape::kStages;
      use.key += kStep;
      fresh = use.key >= use.key_end;
      if (fresh) {
        end_piece(use, plan);
        if (!decode::next_piece(use, plan, p_)) break;
      }
    }
  }

 private:
  // The block id of the next key to load; asked for one step before it is needed.
  __device__ __forceinline__ void fetch_block(const Cursor& c) {
    const int key = c.key + warp_ * kTile + lane_ % kTile;
    const bool valid = key >= c.row.begin && key < c.key_end;
    block_ = valid ? p_.block_tables[c.row.request * p_.table_stride + p_.block_size.divide(key)] : -1;
  }

  // Starts the copies of a step into a stage, and moves on. A group is committed even when nothing is left, so that counts hold.
  __device__ __forceinline__ bool issue(Cursor& c, const Plan& plan, int stage, bool loading) {
    if (loading) {
      const int first = c.key + warp_ * kTile;
      const int kv_head = c.group / groups_per_head_;
      const uint32_t keys = ring_ + stage * Shape::kStageBytes, values = keys + Shape::kTileBytes;
      const C* key_head = static_cast<const C*>(p_.key_cache) + kv_head * p_.key_head_stride;
      const C* value_head = static_cast<const C*>(p_.value_cache) + kv_head * p_.value_head_stride;
      if (p_.block_size.value % kTile == 0 && plan.unit_keys % kTile == 0) {  // the step's keys lie together in one block
        const int64_t block = max(static_cast<int>(__reduce_max_sync(0xffffffffu, block_)), 0);
        const int inside = first - p_.block_size.divide(first) * static_cast<int>(p_.block_size.value);
        const C* key_rows = key_head + block * p_.key_block_stride + inside * kD + lane_ * Shape::kInChunk;
        const C* value_rows = value_head + block * p_.value_block_stride + inside * kD + lane_ * Shape::kInChunk;
        const int low = c.row.begin - first, high = c.key_end - first;
        if (low <= 0 && high >= kTile) {
          copy_rows(keys, key_rows, 0, kTile);
          copy_rows(values, value_rows, 0, kTile);
        } else {
          copy_rows(keys, key_rows, low, high);
          copy_rows(values, value_rows, low, high);
        }
      } else {
        const int key = first + lane_ % kTile;
        const int inside = key - p_.block_size.divide(key) * static_cast<int>(p_.block_size.value);
#pragma unroll
        for (int i = 0; i < kTile * Shape::kChunks; i += 32) {
          const int row = (i + lane_) / Shape::kChunks, chunk = (i + lane_) % Shape::kChunks;
          const int64_t block = __shfl_sync(0xffffffffu, block_, row);
          const int offset = __shfl_sync(0xffffffffu, inside, row) * kD + chunk * Shape::kInChunk;
          const int64_t at = max(block, int64_t{0});
          if (beyond(i)) continue;
          copy_async_16(keys + Shape::offset(row, chunk), key_head + at * p_.key_block_stride + offset, block >= 0);
          copy_async_16(values + Shape::offset(row, chunk), value_head + at * p_.value_block_stride + offset, block >= 0);
        }
      }
      c.key += kStep;
      if (c.key >= c.key_end) loading = decode::next_piece(c, plan, p_);
      if (loading) fetch_block(c);
    }
    commit_copies();
    return loading;
  }

  // Whether this lane's chunk of the copies from `i` on is past the tile, whose chunks need not be a multiple of 32.
  __device__ __forceinline__ bool beyond(int i) const {
    return kTile * Shape::kChunks % 32 != 0 && i + lane_ >= kTile * Shape::kChunks;
  }

  // Rows [low, high) of a tile whose rows lie one behind the other, the others zero; `rows` is this lane's part of the first.
  __device__ __forceinline__ void copy_rows(uint32_t tile, const C* rows, int low, int high) {
#pragma unroll
    for (int i = 0; i < kTile * Shape::kChunks; i += 32) {
      const int row = (i + lane_) / Shape::kChunks, chunk = (i + lane_) % Shape::kChunks;
      if (beyond(i)) continue;
      copy_async_16(tile + Shape::offset(row, chunk), rows + i * Shape::kInChunk, row >= low && row < high);
    }
  }

  __device__ __forceinline__ int first_head(const Cursor& c) const {
    return c.group / groups_per_head_ * p_.group_size + c.group % groups_per_head_ * kGroup;
  }
  __device__ __forceinline__ int num_heads(const Cursor& c) const {
    return min(kGroup, p_.group_size - c.group % groups_per_head_ * kGroup);
  }

  // Reads Q in the order in which the products read K, and clears the accumulators.
  __device__ __forceinline__ void begin_piece(const Cursor& c) {
    const int heads = num_heads(c);
    if constexpr (kQuantized) scale_ = p_.scale * head_scale(p_.key_scale, c.group / groups_per_head_);
    const int64_t rows = c.row.token * p_.query_token_stride + first_head(c) * p_.query_head_stride;
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      const bool there = h * 8 + g_ < heads;
      const int64_t row = rows + (h * 8 + g_) * p_.query_head_stride;
      if constexpr (kQuantized) {
        read_query(row, h, there);
      } else {
        const C* query = static_cast<const C*>(p_.query) + row;
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
        slope_[h][b] = h * 8 + q_ * 2 + b < heads ? alibi_slope(p_, first_head(c) + h * 8 + q_ * 2 + b) : 0.0f;
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

  // Adds up the warps and writes the piece's result: the row's output, or a partial and perhaps the merge of all partials.
  __device__ __forceinline__ void end_piece(const Cursor& c, const Plan& plan) {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) sum_[h][b] += __shfl_xor_sync(0xffffffffu, sum_[h][b], mask);
        if (g_ == 0) ends_[warp_ * kRows + h * 8 + q_ * 2 + b] = make_float2(top_[h][b], sum_[h][b]);
      }
    }
    __syncthreads();
    float2 end[kHeadTiles][2];
    float rescale[kHeadTiles][2];
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float2* warps = ends_ + h * 8 + q_ * 2 + b;
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) top = fmaxf(top, warps[w * kRows].x);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += exp2_fast(warps[w * kRows].x - finite_top(top)) * warps[w * kRows].y;
        end[h][b] = make_float2(top, sum);
        rescale[h][b] = exp2_fast(top_[h][b] - finite_top(top));
      }
    }
    for (int w = 0; w < kWarps; ++w) {
      if (warp_ == w) {
#pragma unroll
        for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            float* row = sums_ + (h * 8 + q_ * 2 + b) * Shape::kSumStride;
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
              float2* target = reinterpret_cast<float2*>(row + column(t));
              const float2 before = w == 0 ? make_float2(0.0f, 0.0f) : *target;
              *target = make_float2(before.x + out_[t][h][b] * rescale[h][b], before.y + out_[t][h][2 + b] * rescale[h][b]);
            }
          }
        }
      }
      __syncthreads();
    }

    const int heads = num_heads(c), head = first_head(c);
    const int pair_begin = plan.end - c.left - c.unit;  // first unit of the (row, group) in the line
    int parts = c.num_units, counter = pair_begin, first_slot = pair_begin, slot = pair_begin + c.unit;
    if (!plan.fixed) {
      // A block has at most two partials: its first piece may continue a row (slot 2b), its last may begin one (2b + 1).
      counter = plan.block_of(pair_begin);
      parts = plan.block_of(pair_begin + c.num_units - 1) - counter + 1;
      first_slot = 2 * counter + (plan.begin_of(counter) == pair_begin ? 0 : 1);
      slot = blockIdx.x == counter ? first_slot : 2 * blockIdx.x;
    }
    if (parts == 1) {
      if (warp_ == 0 && g_ == 0) {
#pragma unroll
        for (int i = 0; i < kHeadTiles * 2; ++i) finish_row(c.row, heads, head, i / 2 * 8 + q_ * 2 + i % 2, end[i / 2][i % 2]);
      }
      __syncthreads();
      for (int item = threadIdx.x; item < heads * (kD / 4); item += kThreads) {
        const int h = item / (kD / 4), at = item % (kD / 4) * 4;
        const float4 value = *reinterpret_cast<const float4*>(sums_ + h * Shape::kSumStride + at);
        write_pair(c.row, head + h, at, value.x * factors_[h], value.y * factors_[h]);
        write_pair(c.row, head + h, at + 2, value.z * factors_[h], value.w * factors_[h]);
      }
      __syncthreads();
      return;
    }

    const int64_t slot_size = static_cast<int64_t>(min(p_.group_size, kGroup)) * (kD + 2);
    float* slots = p_.workspace + p_.num_counters;
    if (plan.fixed) counter += kCounters;
    float* mine = slots + slot * slot_size;
    for (int item = threadIdx.x; item < heads * (kD / 2); item += kThreads) {
      const int h = item / (kD / 2), at = item % (kD / 2) * 2;
      __stcg(reinterpret_cast<float2*>(mine + h * (kD + 2) + 2 + at),
             *reinterpret_cast<const float2*>(sums_ + h * Shape::kSumStride + at));
    }
    if (warp_ == 0 && g_ == 0) {
#pragma unroll
      for (int i = 0; i < kHeadTiles * 2; ++i) {
        const int h = i / 2 * 8 + q_ * 2 + i % 2;
        if (h < heads) __stcg(reinterpret_cast<float2*>(mine + h * (kD + 2)), end[i / 2][i % 2]);
      }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      int* arrived = reinterpret_cast<int*>(p_.workspace) + counter;
      *flag_ = atomicAdd(arrived, 1) == parts - 1;
      if (*flag_) *arrived = 0;
    }
    __syncthreads();
    if (*flag_) {
      __threadfence();
      merge_partials(c.row, slots, slot_size, plan.fixed ? first_slot : 2 * counter, plan.fixed ? 1 : 2, first_slot, parts, heads,
                     head);
    }
    __syncthreads();
  }

  // Adds a row's partials in the order of their keys. Partial s > 0 is in slot `base + s * step`, partial 0 in `first_slot`.
  __device__ __forceinline__ void merge_partials(const Row& row, const float* slots, int64_t slot_size, int base, int step,
                                                 int first_slot, int parts, int heads, int head) {
    const auto partial = [&](int s) { return slots + (s == 0 ? first_slot : base + s * step) * slot_size; };
    constexpr int kTeam = kThreads / kRows;  // threads that look at one head's maxima and sums
    const int mine = threadIdx.x / kTeam, member = threadIdx.x % kTeam;
    float top = -INFINITY, sum = 0.0f;
    if (mine < heads) {
#pragma unroll 4
      for (int s = member; s < parts; s += kTeam) add_end(top, sum, __ldcg(reinterpret_cast<const float2*>(partial(s) + mine * (kD + 2))));
    }
#pragma unroll
    for (int mask = kTeam / 2; mask > 0; mask /= 2) {
      const float other_top = __shfl_xor_sync(0xffffffffu, top, mask), other_sum = __shfl_xor_sync(0xffffffffu, sum, mask);
      add_end(top, sum, make_float2(other_top, other_sum));
    }
    if (member == 0 && mine < heads) {
      finish_row(row, heads, head, mine, make_float2(top, sum));
      tops_[mine] = finite_top(top);
    }
    __syncthreads();
    for (int item = threadIdx.x; item < heads * (kD / 4); item += kThreads) {
      const int h = item / (kD / 4), at = item % (kD / 4) * 4;
      const float reference = tops_[h];
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
      for (int s = 0; s < parts; ++s) {
        const float* from = partial(s) + h * (kD + 2);
        const float scale = exp2_fast(__ldcg(from) - reference);
        const float2 low = __ldcg(reinterpret_cast<const float2*>(from + 2 + at));
        const float2 high = __ldcg(reinterpret_cast<const float2*>(from + 4 + at));
        total.x += scale * low.x;
        total.y += scale * low.y;
        total.z += scale * high.x;
        total.w += scale * high.y;
      }
      write_pair(row, head + h, at, total.x * factors_[h], total.y * factors_[h]);
      write_pair(row, head + h, at + 2, total.z * factors_[h], total.w * factors_[h]);
    }
  }

  static __device__ __forceinline__ void add_end(float& top, float& sum, float2 other) {
    const float higher = fmaxf(top, other.x), reference = finite_top(higher);
    sum = sum * exp2_fast(top - reference) + other.y * exp2_fast(other.x - reference);
    top = higher;
  }

  // The factor that normalises a head's sums, for all threads, and its lse.
  __device__ __forceinline__ void finish_row(const Row& row, int heads, int head, int h, float2 end) {
    if (h >= heads) return;
    const RowEnd result = end_row(p_, end.x, end.y, head + h);
    factors_[h] = result.factor;
    if constexpr (kQuantized) factors_[h] *= head_scale(p_.value_scale, (head + h) / p_.group_size);
    if (p_.lse != nullptr) p_.lse[row.token * p_.lse_token_stride + (head + h) * p_.lse_head_stride] = result.lse;
  }

  __device__ __forceinline__ void write_pair(const Row& row, int head, int column, float first, float second) {
    const int64_t out = row.token * p_.out_token_stride + head * p_.out_head_stride + column;
    store_out<C>(p_, out, first);
    store_out<C>(p_, out + 1, second);
  }

  const AttentionParams& p_;
  float* sums_;             // [kRows][kSumStride]
  float2* ends_;            // [kWarps][kRows]: maximum and sum of a warp
  float *factors_, *tops_;  // [kRows]
  int* flag_;
  uint32_t ring_;
  int lane_, warp_, g_, q_, groups_per_head_, block_;
  float scale_;  // of quantised keys
  uint32_t query_[kTiles][kHeadTiles][2];
  float out_[kTiles][kHeadTiles][4];
  float top_[kHeadTiles][2], sum_[kHeadTiles][2], slope_[kHeadTiles][2];  // of heads 2 q and 2 q + 1
};

template <typename C, int kD, int kRows>
__global__ void __launch_bounds__(kThreads, MmaShape<C, kD, kRows>::kBlocksPerSm)
    decode_mma_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) char shared[];
  Plan plan;
  plan.num_rows = static_cast<int>(p.num_rows);
  plan.num_groups = p.num_kv_heads * ((p.group_size + kGroup - 1) / kGroup);
  plan.fixed = p.split_size > 0;
  plan.unit_keys = plan.fixed ? p.split_size : kStep;
  DecodeBlock<C, kD, kRows>(p, shared).run(plan);
}

#ifndef __CUDACC_RTC__  // the host's part
template <typename C, int kD> void launch_for_head_size(const AttentionParams& p, int64_t blocks, Stream stream) {
  if (std::min(p.group_size, kGroup) <= 8) {
    launch(kOp, decode_mma_kernel<C, kD, 8>, blocks, kThreads, MmaShape<C, kD, 8>::kSharedBytes, stream, p);
  } else {
    launch(kOp, decode_mma_kernel<C, kD, 16>, blocks, kThreads, MmaShape<C, kD, 16>::kSharedBytes, stream, p);
  }
}

// The same for quantised caches, in a file of their own.
void launch_quantized(const AttentionParams& p, DType cache, int64_t blocks, Stream stream);
#endif

}  // namespace research_engine::cuda::decode
