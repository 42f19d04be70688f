// Paged attention, the decode path on tensor cores: float16 and bfloat16, caches of the same or of e4m3 or int8; one query token
// a row.
//
// Computes   out[h] = softmax(scale q[h] K^T) V for the G query heads of a KV head at once: they are the columns of one
//            matrix tile, so K and V are read once for all of them (once per 16 heads, per 8 where D > 128).
// Work       The keys of every (row, head group) are cut into units of 16 (or of split_size). All units of the batch, in a line,
//            are dealt out in equal runs to the warps, four a thread block, two blocks a multiprocessor: no tail, whatever the
//            lengths. Every block finds its runs by itself from seq_lens, so nothing is planned on the host and a captured graph
//            may be replayed with other lengths. A run is a sequence of pieces, each inside one (row, head group):
//
//              units   | row 0, group 0      | row 0, group 1      | row 1, group 0 | ...
//              warps   | warp 0     | warp 1     | warp 2     | warp 3     | ...
//              pieces  | a          | b      | c  | d         | ...       b and c end in the same warp
//
//            Small batches, whose (row, head group)s are fewer than the blocks, have a second way: a cluster of up to 16 blocks
//            for each, whose warps share its units. The blocks take it when the rows are even enough, which they all find alike.
// Warp       A warp goes through its run alone, 16 keys a step, through a ring of shared-memory stages of its own, filled by
//            asynchronous copies up to kStages - 1 steps ahead, across the borders of pieces: nothing in the loop waits for
//            another warp. Queries come with the first copies of a piece, entries of the block table 32 at a time, asked for while
//            those before are used: with memory at its limit each load that is waited for costs 2 us. What a warp does with keys
//            and values is in paged_attention_decode_tile.cuh.
// Merge      A (row, head group) that one warp has whole it writes. Otherwise a piece stays in shared memory, and at its end the
//            block adds up what its warps left: what is complete then is written, what is not is a float32 partial, at most two
//            a block, and the block that arrives last for the row, by a counter, adds the partials. All in the order of keys.
//            The counter is zero again afterwards.
//            In a cluster every block adds up some of the columns, out of the shared memory of all: one barrier in place of
//            a write, a fence, a counter and a read of the L2 cache, one after the other.
// Determinism  The result depends on how the line is cut, so on the batch. With a fixed split_size every unit is a piece, cut
//            at multiples of split_size, of one warp, and a partial of its own: a row's bits depend on its own keys alone.
// Workspace  float32: [counters of blocks, as int32][with split_size: counters of rows and groups][slots][heads of a group, at
//            most 16][4 + D] (maximum in base 2, sum, two to align, then the values). The first 1,024 have to be zero at the
//            first call and are zero after each.
// Versions   1 keys in equal runs, heads as the 16 rows of the product, 3 stages: 549 us at 128 x 4,096. 2 one pass to merge: 547,
//            and 15.0 us instead of 32 at 1 x 1,024. 3 heads as the 8 columns: 529. 4 L2 prefetch of 128 bytes: 524. 5 two
//            stages: 503, the memory system had been over-full. 6 quantised caches (not measured yet). 7 clusters for small batches,
//            keys and values first out of the L2 cache: on another H200 14.7 to 13.9 us at 1 x 1,024, 37.0 to 29.1 at 8 x 2,048, 565 to
//            529 at 128 x 4,096; 8 heads a tile above D = 128, where 16 spilled 860 bytes. 8 a run a warp, not a block; queries and
//            block tables ahead: on a third H200 112 to 82 us at 256 x 1 to 400, 59.4 to 53.8 at 256 x 128, even lengths up
//            to 5 % slower, 10 % with heads of 64. 9 no hint for the cache where much is read: 532 to 508 at 128 x 4,096, 281 to 267 at
//            32 x 8,192 (a hint of the usual policy: 555 and 297); clusters of 16 for long rows: 28.2 to 21.5 at 1 x 8,192; 5,600
//            instructions instead of 10,200, since each is a read of memory when caches are cold: 52.3 instead of 53.7 at 256 x 128.
// Roofline   2 x keys x Hkv x D elements of 2 bytes, or of 1; the products are 13 % of the tensor rate when memory is saturated (G <= 16).
// Reached    one H200, bf16, blocks of 16 (docs/performance.md): 4.23 TB/s at 128 x 4,096 tokens with 32/8 heads of 128, 4.34 with
//            32/32 (a plain read: 4.39); 12.4 us at 1 x 1,024, 3.5 of them an empty launch's. FlashInfer 0.6.11 takes 1.02 of its
//            time (geometric mean over 16 configurations), from 0.88 at 1 x 65,536 to 1.25 at 8 x 2,048.
#pragma once

#include <algorithm>

#include "launch.cuh"
#include "paged_attention_decode_merge.cuh"

namespace research_engine::cuda::decode {

constexpr const char* kOp = "paged_attention (path decode, tensor cores)";

// Up to so many bytes keys and values leave the L2 cache first, so that they do not push dirty lines out, which takes time. Beyond,
// lines that stay cost more than they save: 4 % at 1 GB on an H200, whose L2 cache holds 60 MB.
constexpr int64_t kReadOnceBytes = 384 << 20;
constexpr uint64_t kNoHint = 0;

template <typename C, int kD, int kRows> class DecodeBlock : DecodeMerge<C, kD, kRows> {
  using Base = DecodeMerge<C, kD, kRows>;
  using typename Base::Shape;
  using Base::kQuantized;
  using Base::lane_, Base::p_, Base::queries_, Base::stages_, Base::warp_;

 public:
  __device__ __forceinline__ DecodeBlock(const AttentionParams& p, char* shared)
      : Base(p, shared), ring_(shared_address(shared) + warp_ * Shape::kRingBytes) {}

  __device__ __forceinline__ void run(Plan& plan) {
    prefetch_tables();
    Cursor use;
    if (!decode::find_share(p_, plan, use, this->scratch())) return;
    this->clear(use);
    const int64_t bytes = static_cast<int64_t>(plan.total) * p_.unit.value * (2 * kD * static_cast<int>(sizeof(C)));
    policy_ = bytes > kReadOnceBytes ? kNoHint : read_once_policy();
    if (use.left > 0) stream(use, plan);
    if (plan.by_cluster) {
      this->end_in_cluster(use);
    } else {
      this->settle(plan);
    }
  }

 private:
  // Goes through the warp's run. In a cluster it ends with sums in registers, otherwise with nothing but what `settle` adds up.
  __device__ __forceinline__ void stream(Cursor& use, const Plan& plan) {
    scattered_ = p_.block_size.value % kTile != 0 || p_.unit.value % kTile != 0;
    Load load;
    load.ahead = use;
    load.next_blocks = fetch_blocks(use);
    load.fresh = true;
    advance(load, plan);
    for (int stage = 0; stage < Shape::kStages - 1; ++stage) issue(load, plan, stage);
    int slot = 0;
    bool fresh = true;
    while (true) {
      issue(load, plan, (slot + Shape::kStages - 1) % Shape::kStages);
      wait_copies<Shape::kStages - 1>();
      __syncwarp();
      if (fresh) begin_piece(use, slot);
      if (use.key < use.key_end) this->attend(use, use.key, ring_ + slot * Shape::kStageBytes);
      __syncwarp();
      slot = (slot + 1) % Shape::kStages;
      use.key += kTile;
      fresh = use.key >= use.key_end;
      if (fresh) {
        if (plan.by_cluster) break;
        this->end_piece(use, plan);
        if (!decode::next_piece(use, plan, p_)) break;
      }
    }
  }

  // Asks for the block tables while the lengths, which say what is needed of them, are on their way; small batches alone wait
  // for either.
  __device__ __forceinline__ void prefetch_tables() const {
    constexpr int kEntries = 128 / sizeof(int32_t);
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * 32 + lane_) * kEntries;
    if (warp_ == 0 && p_.table_entries <= static_cast<int64_t>(gridDim.x) * 32 * kEntries && at < p_.table_entries) {
      prefetch_l2(p_.block_tables + at);
    }
  }

  // A stretch of a piece whose entries of the block table the warp's lanes hold: of 32 tiles, or, where a tile's keys may lie in
  // several blocks, of 32 keys. Stretches are asked for while the one before is copied.
  struct Load {
    int key, stretch_end, begin, end;  // of the next tile; keys outside of [begin, end) are masked
    int kv_head;
    int64_t token;
    int first_head, heads;
    int blocks, from;  // this lane's entry, and the key from which lane 0's serves
    bool fresh;        // the tile is a piece's first
    bool more;         // false at the end of the run
    Cursor ahead;      // the next stretch
    int next_blocks;   // this lane's entry for it
  };

  __device__ __forceinline__ int fetch_blocks(const Cursor& c) {
    const int span = scattered_ ? 1 : kTile, key = c.key + lane_ * span;
    const bool valid = key + span > c.row.begin && key < c.key_end;
    return valid ? p_.block_tables[c.row.request * p_.table_stride + p_.block_size.divide(key)] : -1;
  }

  // Moves the loads on to the stretch ahead, whose entries have come, and asks for those of the one after.
  __device__ __forceinline__ void advance(Load& load, const Plan& plan) {
    Cursor& ahead = load.ahead;
    load.more = ahead.left > 0;
    if (!load.more) return;
    const int stretch = scattered_ ? 32 : 32 * kTile;
    load.key = load.from = ahead.key;
    load.stretch_end = min(static_cast<int64_t>(ahead.key) + stretch, static_cast<int64_t>(ahead.key_end));
    load.begin = ahead.row.begin;
    load.end = ahead.key_end;
    load.kv_head = p_.groups.divide(ahead.group);
    load.token = ahead.row.token;
    load.first_head = this->first_head(ahead.group);
    load.heads = this->num_heads(ahead.group);
    load.blocks = load.next_blocks;
    ahead.key = load.stretch_end;
    if (ahead.key < ahead.key_end || decode::next_piece(ahead, plan, p_)) load.next_blocks = fetch_blocks(ahead);
  }

  // Starts the copies of a tile into a stage, and moves on. A group is committed even when nothing is left, so that counts hold.
  __device__ __forceinline__ void issue(Load& load, const Plan& plan, int stage) {
    if (load.more) {
      const uint32_t keys = ring_ + stage * Shape::kStageBytes, values = keys + Shape::kTileBytes;
      if constexpr (Shape::kQueryAhead) {
        if (load.fresh) copy_queries(load, stage);
      }
      const C* key_head = static_cast<const C*>(p_.key_cache) + load.kv_head * p_.key_head_stride;
      const C* value_head = static_cast<const C*>(p_.value_cache) + load.kv_head * p_.value_head_stride;
      if (!scattered_) {  // the tile's keys lie together in one block
        const int64_t block = max(__shfl_sync(0xffffffffu, load.blocks, (load.key - load.from) / kTile), 0);
        const int inside = load.key - p_.block_size.divide(load.key) * static_cast<int>(p_.block_size.value);
        const C* key_rows = key_head + block * p_.key_block_stride + inside * kD + lane_ * Shape::kInChunk;
        const C* value_rows = value_head + block * p_.value_block_stride + inside * kD + lane_ * Shape::kInChunk;
        const int low = load.begin - load.key, high = load.end - load.key;
        if (low <= 0 && high >= kTile) {
          copy_rows(keys, key_rows);
          copy_rows(values, value_rows);
        } else {
#pragma unroll 1
          for (int i = 0; i < kTile * Shape::kChunks; i += 32) {  // rows [low, high), the others zero
            const int row = (i + lane_) / Shape::kChunks, chunk = (i + lane_) % Shape::kChunks;
            if (beyond(i)) continue;
            const bool valid = row >= low && row < high;
            copy(keys + Shape::offset(row, chunk), key_rows + i * Shape::kInChunk, valid);
            copy(values + Shape::offset(row, chunk), value_rows + i * Shape::kInChunk, valid);
          }
        }
      } else {
        const int key = load.key + lane_ % kTile;
        const int inside = key - p_.block_size.divide(key) * static_cast<int>(p_.block_size.value);
#pragma unroll 1
        for (int i = 0; i < kTile * Shape::kChunks; i += 32) {
          const int row = (i + lane_) / Shape::kChunks, chunk = (i + lane_) % Shape::kChunks;
          const int64_t block = __shfl_sync(0xffffffffu, load.blocks, (load.key - load.from + row) % 32);
          const int offset = __shfl_sync(0xffffffffu, inside, row % kTile) * kD + chunk * Shape::kInChunk;
          const int64_t at = max(block, int64_t{0});
          if (beyond(i)) continue;
          copy(keys + Shape::offset(row, chunk), key_head + at * p_.key_block_stride + offset, block >= 0);
          copy(values + Shape::offset(row, chunk), value_head + at * p_.value_block_stride + offset, block >= 0);
        }
      }
      load.key += kTile;
      load.fresh = load.key >= load.end;
      if (load.key >= load.stretch_end) advance(load, plan);
    }
    commit_copies();
  }

  // The queries of the piece that begins with the tile of this stage.
  __device__ __forceinline__ void copy_queries(const Load& load, int stage) {
    const C* rows = static_cast<const C*>(p_.query) + load.token * p_.query_token_stride + load.first_head * p_.query_head_stride;
    const uint32_t to = shared_address(queries_) + warp_ * Shape::kQueryBytes + stage * kRows * kD * sizeof(C);
    for (int item = lane_; item < load.heads * Shape::kChunks; item += 32) {
      const int head = item / Shape::kChunks, chunk = item % Shape::kChunks;
      copy_async_16(to + item * 16, rows + head * p_.query_head_stride + chunk * Shape::kInChunk, true);
    }
  }

  // Whether this lane's chunk of the copies from `i` on is past the tile, whose chunks need not be a multiple of 32.
  __device__ __forceinline__ bool beyond(int i) const {
    return kTile * Shape::kChunks % 32 != 0 && i + lane_ >= kTile * Shape::kChunks;
  }

  __device__ __forceinline__ void copy(uint32_t to, const void* from, bool valid) const {
    if (policy_ == kNoHint) {
      copy_async_16(to, from, valid);
    } else {
      copy_async_16(to, from, valid, policy_);
    }
  }

  // A tile whose rows lie one behind the other; `rows` is this lane's part of the first.
  __device__ __forceinline__ void copy_rows(uint32_t tile, const C* rows) {
#pragma unroll
    for (int i = 0; i < kTile * Shape::kChunks; i += 32) {
      const int row = (i + lane_) / Shape::kChunks, chunk = (i + lane_) % Shape::kChunks;
      if (beyond(i)) continue;
      copy(tile + Shape::offset(row, chunk), rows + i * Shape::kInChunk, true);
    }
  }

  __device__ __forceinline__ void begin_piece(const Cursor& c, int stage) {
    if constexpr (Shape::kQueryAhead) {
      const char* rows = queries_ + warp_ * Shape::kQueryBytes + stage * kRows * kD * sizeof(C);
      this->begin(rows, kD, this->first_head(c.group), this->num_heads(c.group));
    } else {
      const int64_t rows = c.row.token * p_.query_token_stride + this->first_head(c.group) * p_.query_head_stride;
      this->begin(static_cast<const char*>(p_.query) + 2 * rows, p_.query_head_stride, this->first_head(c.group), this->num_heads(c.group));
    }
  }

  uint64_t policy_;
  uint32_t ring_;
  bool scattered_;  // a tile's keys may lie in several blocks
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
// `clusters(size)` is how many of them the device holds, `units` how many a (row, head group) has at most.
template <typename Clusters>
void launch_in_clusters(DecodeKernel kernel, LaunchShape shape, AttentionParams p, int64_t units, const Clusters& clusters,
                        Stream stream) {
  const int64_t lines = p.num_rows * head_groups(p.num_kv_heads, p.group_size, p.head_size), blocks = shape.blocks;
  const int warps = static_cast<int>(shape.threads.x) / 32;
  // Measured on an H200: a block that has a multiprocessor for itself, where two fit, takes little more than half the time for a
  // step, and to cut by load costs three steps more than a cluster; six where one block fills a multiprocessor.
  const bool shared = blocks > multiprocessors();
  p.cluster_slack = shared ? 48 : 100;
  const auto cost = [&](int size) { return shared && lines * size <= multiprocessors() ? 9 : 16; };
  p.cluster = p.split_size == 0 && lines <= blocks ? 1 : 0;
  p.cluster_cost = cost(1);
  for (int size = kMostCluster; size > 1 && p.cluster == 1; size /= 2) {
    if (lines * size > blocks) continue;
    const int64_t most = std::min<int64_t>(clusters(size), blocks / size);
    if (lines > most) continue;
    if (size == kMostCluster && units < 4 * size * warps) continue;
    // Where clusters leave multiprocessors idle, they cost 15 % of rows so long that equal runs are faster.
    const int64_t steps = ceil_div(units, size * warps), runs = std::min(blocks * warps, lines * units);
    if (cost(size) < 16 && (steps * cost(size) - p.cluster_slack) * runs > lines * units * 16) break;
    shape.cluster = p.cluster = size;
    shape.blocks = most * size;
    p.cluster_cost = cost(size);
  }
  launch_after(kOp, kernel, shape, stream, p);
}

template <typename C, int kD, int kRows> void launch_for_rows(const AttentionParams& p, const Sizes& sizes, Stream stream) {
  launch_in_clusters(decode_mma_kernel<C, kD, kRows>, {sizes.blocks, kThreads, MmaShape<C, kD, kRows>::kSharedBytes}, p,
                     sizes.units, clusters_of<C, kD, kRows>, stream);
}

template <typename C, int kD> void launch_for_head_size(const AttentionParams& p, const Sizes& sizes, Stream stream) {
  if constexpr (most_heads(kD) > 8) {
    if (p.group_size > 8) return launch_for_rows<C, kD, 16>(p, sizes, stream);
  }
  launch_for_rows<C, kD, 8>(p, sizes, stream);
}

// The same for quantised caches, in a file of their own.
void launch_quantized(const AttentionParams& p, DType cache, const Sizes& sizes, Stream stream);
#endif

}  // namespace research_engine::cuda::decode
