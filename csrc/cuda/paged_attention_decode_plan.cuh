// How the decode kernel on tensor cores deals the keys of a batch out to its warps, without the host.
//
// The keys of every (row, head group) are cut into units; all units of the batch lie in a line, rows outside, groups inside.
// Warp w of n takes the units [begin_of(w), begin_of(w + 1)): equal runs, but for one unit, those of a thread block side by side.
// A run is a sequence of pieces, each inside one (row, group). Or each (row, group) has a cluster of blocks, whose warps share its
// units: so when the host has launched enough of them and the longest row does not hold them up for long.
#pragma once

#include <algorithm>

#include "paged_attention.cuh"

namespace research_engine::cuda::decode {

// Variants, for measuring: warps of a thread block, blocks of a multiprocessor and stages of a ring (0: by the head size).
#ifndef RESEARCH_ENGINE_DECODE_WARPS
#define RESEARCH_ENGINE_DECODE_WARPS 4
#endif
#ifndef RESEARCH_ENGINE_DECODE_BLOCKS_PER_SM
#define RESEARCH_ENGINE_DECODE_BLOCKS_PER_SM 0
#endif
#ifndef RESEARCH_ENGINE_DECODE_STAGES
#define RESEARCH_ENGINE_DECODE_STAGES 0
#endif
constexpr int kWarps = RESEARCH_ENGINE_DECODE_WARPS;
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 16;             // keys of a warp's step
constexpr int kWholeRow = 1 << 30;     // as a split_size: no row is cut
constexpr int kSlotHead = 4;           // float32 of a partial before its values: maximum in base 2, sum, and two to align
constexpr int kMostCluster = 16;       // thread blocks; 16 gain some 4 % from 4,096 to 16,384 keys, and lose 15 % at 1,024

// Thread blocks of a multiprocessor, among which its shared memory is divided.
__host__ __device__ constexpr int blocks_of_sm(int head_size) {
  return RESEARCH_ENGINE_DECODE_BLOCKS_PER_SM > 0 ? RESEARCH_ENGINE_DECODE_BLOCKS_PER_SM : head_size <= 128 ? 2 : 1;
}

// Query heads that share a tile: as many as a thread has registers for.
__host__ __device__ constexpr int most_heads(int head_size) { return head_size > 128 ? 8 : 16; }

// The groups of at most so many query heads that share a KV head, of all KV heads.
__host__ __device__ constexpr int head_groups(int num_kv_heads, int group_size, int head_size) {
  return num_kv_heads * ((group_size + most_heads(head_size) - 1) / most_heads(head_size));
}

__device__ inline Row grid_row(const AttentionParams& p, int index) {
  if (!p.single_queries) return token_row(p, index);
  const int seq_len = p.seq_lens[index], first = p.query_start_loc[index];  // asked for together: their latencies overlap
  if (p.query_start_loc[index + 1] - first != 1) return Row{};
  Row row;
  row.request = index;
  row.token = first;
  row.position = seq_len - 1;
  row.end = seq_len;
  row.begin = min(row.end, first_key(p, row.position));
  return row;
}

// Where in the line of units a warp, or its loads ahead of it, stands.
struct Cursor {
  Row row;
  int index;             // of the row in the grid
  int group;             // head group of the row
  int unit, num_units;   // within the (row, group)
  int piece;             // units of the current piece
  int left;              // units of the warp from the current piece's first on
  int key, key_end;      // next step of the piece; keys below row.begin or from key_end on are masked
};

struct Plan {
  int num_rows, num_groups;
  bool fixed;      // every unit is a piece
  bool by_cluster = false;  // every (row, group) belongs to one cluster, of p.cluster blocks, and to no other
  int total;        // units of the batch
  int num_warps;    // of the grid that take part
  int share, more;  // units of a warp; the first `more` warps have one more

  __device__ int begin_of(int warp) const { return warp * share + min(warp, more); }
  __device__ int warp_of(int unit) const {
    const int larger = more * (share + 1);
    return unit < larger ? unit / (share + 1) : more + (unit - larger) / share;
  }
  __device__ int block_begin(int block) const { return begin_of(min(block * kWarps, num_warps)); }
  __device__ int block_of(int unit) const { return warp_of(unit) / kWarps; }
};

__device__ inline int units_of(const AttentionParams& p, const Row& row) {
  if (row.request < 0) return 0;
  if (row.begin >= row.end) return 1;  // an empty row still has an output
  return p.unit.divide(row.end - 1) - p.unit.divide(row.begin) + 1;
}

__device__ inline void start_piece(Cursor& c, const Plan& plan, const AttentionParams& p) {
  c.piece = plan.fixed ? 1 : min(c.left, c.num_units - c.unit);
  const int first = p.unit.divide(c.row.begin) + c.unit;
  c.key = first * static_cast<int>(p.unit.value);
  c.key_end = min(static_cast<int64_t>(c.row.end), static_cast<int64_t>(first + c.piece) * p.unit.value);
}

// Steps to the next piece; false when the warp's run is over.
__device__ inline bool next_piece(Cursor& c, const Plan& plan, const AttentionParams& p) {
  c.left -= c.piece;
  if (c.left <= 0) return false;
  c.unit += c.piece;
  if (c.unit == c.num_units) {
    c.unit = 0;
    if (++c.group == plan.num_groups) {
      c.group = 0;
      do {
        c.row = grid_row(p, ++c.index);
        c.num_units = units_of(p, c.row);
      } while (c.num_units == 0);
    }
  }
  start_piece(c, plan, p);
  return true;
}

// The warp's share when every (row, group) has a cluster. Returns false for blocks without keys and for clusters to spare; a warp
// that gets no unit has a piece without keys, for it has its part in adding up.
__device__ inline bool find_cluster_share(const AttentionParams& p, const Plan& plan, Cursor& c) {
  const int cluster = blockIdx.x / p.cluster, rank = blockIdx.x % p.cluster * kWarps + threadIdx.x / 32;
  c.index = cluster / plan.num_groups;
  if (c.index >= plan.num_rows) return false;
  c.group = cluster % plan.num_groups;
  c.row = grid_row(p, c.index);
  c.num_units = units_of(p, c.row);
  if (c.num_units == 0) return false;
  const int share = c.num_units / (p.cluster * kWarps), more = c.num_units % (p.cluster * kWarps);
  c.unit = rank * share + min(rank, more);
  c.left = share + (rank < more ? 1 : 0);
  if (c.left > 0) {
    start_piece(c, plan, p);
  } else {
    c.left = c.piece = 1;
    c.key = c.key_end = c.row.end;
  }
  return true;
}

// The warp's share of the line: every thread counts the units of a run of rows, a scan over threads finds the owners of the
// first units of the block's warps. Returns false when there is nothing for this block; a warp of another block may have
// nothing left. All threads call it.
__device__ inline bool find_share(const AttentionParams& p, Plan& plan, Cursor& c, int* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int per_thread = (plan.num_rows + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * per_thread, plan.num_rows);
  const int last = min(first + per_thread, plan.num_rows);
  int mine = 0, longest = 0;
#pragma unroll 2
  for (int index = first; index < last; ++index) {
    const int units = units_of(p, grid_row(p, index));
    mine += units;
    longest = max(longest, units);
  }
  mine *= plan.num_groups;
  int until = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, until, step);
    if (lane >= step) until += other;
  }
  longest = __reduce_max_sync(0xffffffffu, longest);
  if (lane == 31) {
    scratch[warp] = until;
    scratch[kWarps + warp] = longest;
  }
  __syncthreads();
  int before = until - mine;
  plan.total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += scratch[w];
    plan.total += scratch[w];
    longest = max(longest, scratch[kWarps + w]);
  }
  if (plan.total == 0) return false;
  plan.num_warps = min(static_cast<int>(gridDim.x) * kWarps, plan.total);
  if (p.cluster > 0) {
    const int64_t steps = (longest + p.cluster * kWarps - 1) / (p.cluster * kWarps);
    plan.by_cluster = (steps * p.cluster_cost - p.cluster_slack) * plan.num_warps <= int64_t{plan.total} * 16;
  }
  if (plan.by_cluster) return find_cluster_share(p, plan, c);
  const int first_warp = blockIdx.x * kWarps;
  if (first_warp >= plan.num_warps) return false;
  plan.share = plan.total / plan.num_warps;
  plan.more = plan.total - plan.share * plan.num_warps;
  int* owned = scratch + 2 * kWarps;
#pragma unroll 1
  for (int w = 0; w < kWarps && first_warp + w < plan.num_warps; ++w) {
    const int begin = plan.begin_of(first_warp + w);
    if (begin < before || begin >= before + mine) continue;
    int at = before;
#pragma unroll 1
    for (int index = first;; ++index) {
      const int units = units_of(p, grid_row(p, index)) * plan.num_groups;
      if (begin < at + units) {
        owned[2 * w] = index;
        owned[2 * w + 1] = begin - at;
        break;
      }
      at += units;
    }
  }
  __syncthreads();
  c.left = 0;
  if (first_warp + warp >= plan.num_warps) return true;
  c.index = owned[2 * warp];
  c.row = grid_row(p, c.index);
  c.num_units = units_of(p, c.row);
  c.group = owned[2 * warp + 1] / c.num_units;
  c.unit = owned[2 * warp + 1] % c.num_units;
  c.left = plan.begin_of(first_warp + warp + 1) - plan.begin_of(first_warp + warp);
  start_piece(c, plan, p);
  return true;
}

#ifndef __CUDACC_RTC__  // the host's part
// How many thread blocks, counters and slots a call takes; counts are upper bounds made from max_seq_len.
struct Sizes {
  int64_t blocks, counters, slots, units;  // units of a (row, head group) at most
  int64_t workspace(const PagedAttention& args) const {
    if (slots == 0) return 0;
    const int64_t group = args.query.shape[1] / args.key_cache.shape[1];
    return counters + slots * std::min<int64_t>(group, most_heads(static_cast<int>(args.query.shape[2]))) *
                          (args.query.shape[2] + kSlotHead);
  }
};

// Warps of a thread block and blocks of a multiprocessor of the kernel that will run.
inline int64_t block_warps(const PagedAttention& args) { return args.variant.kernel != nullptr ? args.variant.threads / 32 : kWarps; }
inline int blocks_per_sm(const PagedAttention& args) {
  return args.variant.kernel != nullptr ? args.variant.blocks_per_sm : blocks_of_sm(static_cast<int>(args.query.shape[2]));
}

// With a split_size, pieces of that many keys; with 0, what the kernel cuts by load.
inline Sizes sizes_of(const PagedAttention& args, int64_t split_size) {
  const int64_t rows = args.path == 0 ? args.seq_lens.shape[0] : args.query.shape[0], warps = block_warps(args);
  const int num_kv_heads = static_cast<int>(args.key_cache.shape[1]), group = static_cast<int>(args.query.shape[1]) / num_kv_heads;
  const int64_t lines = rows * head_groups(num_kv_heads, group, static_cast<int>(args.query.shape[2]));
  const int64_t keys = std::max<int64_t>(args.max_seq_len, 1), unit_keys = split_size > 0 ? split_size : kTile;
  const bool windowed = args.causal && args.sliding_window > 0 && args.sliding_window < keys;
  Sizes sizes{};
  sizes.units = ceil_div(keys, unit_keys);  // with a window never more: a workspace is asked for without one
  if (windowed) sizes.units = std::min(sizes.units, ceil_div(args.sliding_window, unit_keys) + 1);
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, args.query.device), "paged_attention");
  sizes.blocks = std::min<int64_t>(std::max(lines, ceil_div(lines * sizes.units, warps)),
                                   std::min<int64_t>(kPrefillCounters, multiprocessors * blocks_per_sm(args)));
  if (sizes.units > 1) {
    sizes.counters = kCounters + (split_size > 0 ? ceil_div(lines * sizes.units, 4) * 4 : 0);  // slots stay aligned
    sizes.slots = split_size > 0 ? lines * sizes.units : 2 * sizes.blocks;
  }
  return sizes;
}
#endif

}  // namespace research_engine::cuda::decode
