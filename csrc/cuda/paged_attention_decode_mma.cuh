// Paged attention, the decode path on tensor cores: float16 and bfloat16, caches of the same or of e4m3 or int8; one query token
// a row.
//
// Computes   out[h] = softmax(scale q[h] K^T) V for the G query heads of a KV head at once: they are the columns of one
//            matrix tile, so K and V are read once for all of them (once per 16 heads, per 8 where D > 128).
// Work       The keys of every (row, head group) are cut into units of 64 (or of split_size). All units of the batch, in a
//            line, are dealt out in equal runs to the thread blocks, two to a multiprocessor: no tail, whatever the lengths.
//            Every block finds its run by itself from seq_lens, so nothing is planned on the host and a captured graph may be
//            replayed with other lengths. A run is a sequence of pieces, each inside one (row, head group):
//
//              units   | row 0, group 0      | row 0, group 1      | row 1, group 0 | ...
//              blocks  | block 0    | block 1    | block 2    | block 3    | ...
//              pieces  | a          | b      | c  | d         | ...       b and c end in the same block
//
//            Small batches, whose (row, head group)s are fewer than the blocks, have a second way: a cluster of up to 16 blocks
//            for each, which share its units. The blocks take it when the rows are even enough, which they all find alike.
// Warp       A warp takes 16 of every 64 keys, through a ring of shared-memory stages of its own, filled by asynchronous
//            copies up to kStages - 1 steps ahead, across the borders of pieces: the loop has no block-wide barrier. What it does
//            with them is in paged_attention_decode_tile.cuh.
// Merge      At a piece's end the four warps add up in shared memory in fixed order. A piece that is its row's whole is
//            finished there; otherwise it leaves a float32 partial, and the block that arrives last for the row, by a counter,
//            adds the partials in the order of their keys. The counter is zero again afterwards.
//            In a cluster every block adds up some of the columns, out of the shared memory of all: one barrier in place of
//            a write, a fence, a counter and two reads of the L2 cache, one after the other.
// Determinism  The result depends on how the line is cut, so on the batch. With a fixed split_size every unit is a piece, cut
//            at multiples of split_size, without clusters: a row's bits depend on its own keys alone.
// Workspace  float32: [counters of blocks, as int32][with split_size: counters of rows and groups][slots][heads of a group, at most 16][2 + D]
//            (maximum in base 2, sum, then the values). The first 1,024 have to be zero at the first call
//            and are zero after each.
// Versions   1 keys in equal runs, heads as the 16 rows of the product, 3 stages: 549 us at 128 x 4,096. 2 one pass to merge: 547,
//            and 15.0 us instead of 32 at 1 x 1,024. 3 heads as the 8 columns: 529. 4 L2 prefetch of 128 bytes: 524. 5 two
//            stages: 503, the memory system had been over-full. 6 quantised caches (not measured yet). 7 clusters for small batches,
//            keys and values first out of the L2 cache: on another H200 14.7 to 13.9 us at 1 x 1,024, 37.0 to 29.1 at 8 x 2,048, 565 to
//            529 at 128 x 4,096; 8 heads a tile above D = 128, where 16 spilled 860 bytes.
// Roofline   2 x keys x Hkv x D elements of 2 bytes, or of 1; the products are 13 % of the tensor rate when memory is saturated (G <= 16).
// Reached    one H200, bf16, blocks of 16, version 5 (docs/performance.md): 4.28 TB/s at 128 x 4,096 tokens with 32/8 heads of 128,
//            4.44 with 32/32; 14.1 us at 1 x 1,024, 5.0 of them an empty launch's. Geometric mean over 16 configurations 0.98 of
//            FlashInfer 0.6.11, from 0.93 to 1.09.
#pragma once

#include <algorithm>

#include "cluster.cuh"
#include "launch.cuh"
#include "paged_attention_decode_tile.cuh"

namespace research_engine::cuda::decode {

constexpr const char* kOp = "paged_attention (path decode, tensor cores)";


template <typename C, int kD, int kRows> class DecodeBlock : DecodeTile<C, kD, kRows> {
  using Tile = DecodeTile<C, kD, kRows>;
  using typename Tile::Shape;
  static constexpr int kGroup = most_heads(kD);
  using Tile::kHeadTiles, Tile::kQuantized, Tile::kTiles;
  using Tile::g_, Tile::lane_, Tile::out_, Tile::p_, Tile::q_, Tile::sum_, Tile::top_, Tile::warp_;

 public:
  __device__ __forceinline__ DecodeBlock(const AttentionParams& p, char* shared)
      : Tile(p) {
    stages_ = shared;
    ring_ = shared_address(shared) + warp_ * 2 * Shape::kTileBytes;
    policy_ = read_once_policy();
    sums_ = reinterpret_cast<float*>(shared + Shape::kStages * Shape::kStageBytes);
    ends_ = reinterpret_cast<float2*>(sums_ + kRows * Shape::kSumStride);
    factors_ = reinterpret_cast<float*>(ends_ + kWarps * kRows);
    tops_ = factors_ + kRows;
    flag_ = reinterpret_cast<int*>(tops_ + kRows);
    groups_per_head_ = (p.group_size + kGroup - 1) / kGroup;
  }

  __device__ __forceinline__ void run(Plan& plan) {
    prefetch_tables();
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
      if (key < use.key_end) this->attend(use, key, ring_ + slot * Shape::kStageBytes);
      __syncwarp();
      slot = (slot + 1) % Shape::kStages;
      use.key += kStep;
      fresh = use.key >= use.key_end;
      if (fresh) {
        if (plan.by_cluster) {
          end_in_cluster(use);
          break;
        }
        end_piece(use, plan);
        if (!decode::next_piece(use, plan, p_)) break;
      }
    }
  }

 private:
  // Asks for the block tables while the lengths, which say what is needed of them, are on their way; small batches alone wait
  // for either.
  __device__ __forceinline__ void prefetch_tables() const {
    constexpr int kEntries = 128 / sizeof(int32_t);
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * 32 + lane_) * kEntries;
    if (warp_ == 0 && p_.table_entries <= static_cast<int64_t>(gridDim.x) * 32 * kEntries && at < p_.table_entries) {
      prefetch_l2(p_.block_tables + at);
    }
  }

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
          copy_async_16(keys + Shape::offset(row, chunk), key_head + at * p_.key_block_stride + offset, block >= 0, policy_);
          copy_async_16(values + Shape::offset(row, chunk), value_head + at * p_.value_block_stride + offset, block >= 0, policy_);
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
      copy_async_16(tile + Shape::offset(row, chunk), rows + i * Shape::kInChunk, row >= low && row < high, policy_);
    }
  }

  __device__ __forceinline__ int first_head(const Cursor& c) const {
    return c.group / groups_per_head_ * p_.group_size + c.group % groups_per_head_ * kGroup;
  }
  __device__ __forceinline__ int num_heads(const Cursor& c) const {
    return min(kGroup, p_.group_size - c.group % groups_per_head_ * kGroup);
  }

  __device__ __forceinline__ void begin_piece(const Cursor& c) {
    const int64_t rows = c.row.token * p_.query_token_stride + first_head(c) * p_.query_head_stride;
    this->begin(rows, first_head(c), num_heads(c));
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
              float2* target = reinterpret_cast<float2*>(row + this->column(t));
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

  // Ends a (row, head group) that one cluster shares: every warp leaves its sums in shared memory, and every block of the cluster adds up a
  // part of the result's columns out of all of them. A team of as many lanes as blocks takes four neighbouring columns of a head.
  __device__ __forceinline__ void end_in_cluster(const Cursor& c) {
    static_assert(kWarps * kRows * Shape::kSumStride * 4 <= Shape::kStages * Shape::kStageBytes, "the sums take the ring's place");
    const int size = p_.cluster, rank = blockIdx.x % size;
    __syncthreads();
    float* mine = reinterpret_cast<float*>(stages_) + warp_ * kRows * Shape::kSumStride;
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) sum_[h][b] += __shfl_xor_sync(0xffffffffu, sum_[h][b], mask);
        const int row = h * 8 + q_ * 2 + b;
        if (g_ == 0) ends_[warp_ * kRows + row] = make_float2(top_[h][b], sum_[h][b]);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          *reinterpret_cast<float2*>(mine + row * Shape::kSumStride + this->column(t)) =
              make_float2(out_[t][h][b], out_[t][h][2 + b]);
        }
      }
    }
    if (size > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }

    const int heads = num_heads(c), first = first_head(c), member = threadIdx.x % size;
    const uint32_t ends = cluster_address(shared_address(ends_), member);
    const uint32_t sums = cluster_address(shared_address(stages_), member);
    for (int base = rank * (kThreads / size); base < heads * (kD / 4); base += kThreads) {
      const int item = base + static_cast<int>(threadIdx.x) / size;
      const bool there = item < heads * (kD / 4);
      const int h = there ? item / (kD / 4) : 0, at = item % (kD / 4) * 4;
      float2 end[kWarps];
      float4 part[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) end[w] = load_cluster_8(ends + (w * kRows + h) * 8);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) part[w] = load_cluster_16(sums + ((w * kRows + h) * Shape::kSumStride + at) * 4);
      float top = fmaxf(fmaxf(end[0].x, end[1].x), fmaxf(end[2].x, end[3].x));
      for (int mask = 1; mask < size; mask *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
      float sum = 0.0f;
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float scale = exp2_fast(end[w].x - finite_top(top));
        sum += scale * end[w].y;
        total.x += scale * part[w].x;
        total.y += scale * part[w].y;
        total.z += scale * part[w].z;
        total.w += scale * part[w].w;
      }
      for (int mask = 1; mask < size; mask *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        total.x += __shfl_xor_sync(0xffffffffu, total.x, mask);
        total.y += __shfl_xor_sync(0xffffffffu, total.y, mask);
        total.z += __shfl_xor_sync(0xffffffffu, total.z, mask);
        total.w += __shfl_xor_sync(0xffffffffu, total.w, mask);
      }
      if (member == 0 && there) {
        const RowEnd result = end_row(p_, top, sum, first + h);
        const float factor = result.factor * (kQuantized ? head_scale(p_.value_scale, first / p_.group_size) : 1.0f);
        write_pair(c.row, first + h, at, total.x * factor, total.y * factor);
        write_pair(c.row, first + h, at + 2, total.z * factor, total.w * factor);
        if (at == 0 && p_.lse != nullptr) p_.lse[c.row.token * p_.lse_token_stride + (first + h) * p_.lse_head_stride] = result.lse;
      }
    }
    if (size > 1) cluster_barrier();  // nobody leaves while others read its shared memory
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

  char* stages_;            // the ring of stages
  float* sums_;             // [kRows][kSumStride]
  float2* ends_;            // [kWarps][kRows]: maximum and sum of a warp
  float *factors_, *tops_;  // [kRows]
  int* flag_;
  uint64_t policy_;
  uint32_t ring_;
  int groups_per_head_, block_;
};

template <typename C, int kD, int kRows>
__global__ void __launch_bounds__(kThreads, MmaShape<C, kD, kRows>::kBlocksPerSm)
    decode_mma_kernel(const __grid_constant__ AfterPredecessor<AttentionParams> after) {
  const AttentionParams& p = after.wait();
  extern __shared__ __align__(128) char shared[];
  Plan plan;
  plan.num_rows = static_cast<int>(p.num_rows);
  plan.num_groups = head_groups(p.num_kv_heads, p.group_size, kD);
  plan.fixed = p.split_size > 0;
  plan.unit_keys = plan.fixed ? p.split_size : kStep;
  DecodeBlock<C, kD, kRows>(p, shared).run(plan);
}

#ifndef __CUDACC_RTC__  // the host's part
// How many clusters of `size` blocks the current device holds; asked for once.
template <typename C, int kD, int kRows> int64_t clusters_of(int size) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices][kMostCluster + 1] = {};  // and 1 more
  int device = 0;
  check(cudaGetDevice(&device), kOp);
  int count = device < kDevices ? known[device][size].load(std::memory_order_relaxed) - 1 : -1;
  if (count < 0) {
    count = active_clusters(kOp, decode_mma_kernel<C, kD, kRows>, {size, kThreads, MmaShape<C, kD, kRows>::kSharedBytes, size});
    if (device < kDevices) known[device][size].store(count + 1, std::memory_order_relaxed);
  }
  return count;
}

inline int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), kOp);
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), kOp);
  return count;
}

using DecodeKernel = void (*)(AfterPredecessor<AttentionParams>);

// With fewer (row, head group)s than blocks, each may be given a cluster of them, the largest that all fit in at once;
// `clusters(size)` is how many of them the device holds.
template <typename Clusters>
void launch_in_clusters(DecodeKernel kernel, LaunchShape shape, AttentionParams p, const Clusters& clusters, Stream stream) {
  const int64_t lines = p.num_rows * head_groups(p.num_kv_heads, p.group_size, p.head_size), blocks = shape.blocks;
  p.cluster = p.split_size == 0 && lines <= blocks ? 1 : 0;
  for (int size = kMostCluster; size > 1 && p.cluster == 1; size /= 2) {
    if (lines * size > blocks) continue;
    const int64_t most = std::min<int64_t>(clusters(size), blocks / size);
    if (lines > most) continue;
    shape.cluster = p.cluster = size;
    shape.blocks = most * size;
  }
  // Measured on an H200: a block that has a multiprocessor for itself, where two fit, takes little more than half the time for a
  // step, and to cut by load costs three steps more than a cluster; six where one block fills a multiprocessor.
  const bool shared = blocks > multiprocessors();
  p.cluster_cost = shared && lines * p.cluster <= multiprocessors() ? 9 : 16;
  p.cluster_slack = shared ? 48 : 100;
  launch_after(kOp, kernel, shape, stream, p);
}

template <typename C, int kD, int kRows> void launch_for_rows(const AttentionParams& p, int64_t blocks, Stream stream) {
  launch_in_clusters(decode_mma_kernel<C, kD, kRows>, {blocks, kThreads, MmaShape<C, kD, kRows>::kSharedBytes}, p,
                     clusters_of<C, kD, kRows>, stream);
}

template <typename C, int kD> void launch_for_head_size(const AttentionParams& p, int64_t blocks, Stream stream) {
  if constexpr (most_heads(kD) > 8) {
    if (p.group_size > 8) return launch_for_rows<C, kD, 16>(p, blocks, stream);
  }
  launch_for_rows<C, kD, 8>(p, blocks, stream);
}

// The same for quantised caches, in a file of their own.
void launch_quantized(const AttentionParams& p, DType cache, int64_t blocks, Stream stream);
#endif

}  // namespace research_engine::cuda::decode
