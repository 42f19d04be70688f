// How the decode kernel on tensor cores brings pieces of a row together and writes it.
//
// A (row, head group) that one warp has whole goes from registers to the output. A part of one stays in shared memory until the
// warps of the block have done their runs; then the block adds up neighbouring parts, writes what is complete, and leaves at most
// two partials in the workspace, which the last block to come for a row adds. With split_size every unit is a partial there. In
// a cluster each block adds up some of the columns, out of the shared memory of all. Everywhere in the order of the keys.
#pragma once

#include "cluster.cuh"
#include "paged_attention_decode_tile.cuh"

namespace research_engine::cuda::decode {

template <typename C, int kD, int kRows> class DecodeMerge : protected DecodeTile<C, kD, kRows> {
 protected:
  using Tile = DecodeTile<C, kD, kRows>;
  using typename Tile::M;
  using typename Tile::Shape;
  using Tile::kHeadTiles, Tile::kQuantized, Tile::kTiles;
  using Tile::g_, Tile::lane_, Tile::out_, Tile::p_, Tile::q_, Tile::sum_, Tile::top_, Tile::warp_;
  static constexpr int kGroup = most_heads(kD);

  // A part of a (row, head group) that a warp leaves for others to add up.
  struct Open {
    int token, group, begin, end, num_units;  // the row's token, head group, units
  };

  __device__ __forceinline__ DecodeMerge(const AttentionParams& p, char* shared) : Tile(p) {
    stages_ = shared;
    firsts_ = reinterpret_cast<float*>(shared + kWarps * Shape::kRingBytes);
    queries_ = reinterpret_cast<char*>(firsts_ + kWarps * kRows * Shape::kSumStride);
    open_ = reinterpret_cast<Open*>(queries_ + kWarps * Shape::kQueryBytes);
    last_ = reinterpret_cast<int*>(open_ + 2 * kWarps);
  }

  // 4 * kWarps numbers of shared memory, free until the block's first piece ends.
  __device__ __forceinline__ int* scratch() const { return last_ + 4; }

  // The warp has left nothing yet. With split_size nothing is left here, but where the block begins.
  __device__ __forceinline__ void clear(const Cursor& c) {
    if (lane_ < 2) open_[2 * warp_ + lane_] = {c.index, c.group, c.unit, 0, 0};
  }

  __device__ __forceinline__ int first_head(int group) const {
    const int kv_head = p_.groups.divide(group);
    return kv_head * p_.group_size + (group - kv_head * static_cast<int>(p_.groups.value)) * kGroup;
  }
  __device__ __forceinline__ int num_heads(int group) const {
    return min(kGroup, p_.group_size - (group - p_.groups.divide(group) * static_cast<int>(p_.groups.value)) * kGroup);
  }

  // Ends a piece: a whole (row, head group) is written, a part is left in shared memory or, with split_size, in the workspace.
  __device__ __forceinline__ void end_piece(const Cursor& c, const Plan& plan) {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) sum_[h][b] += __shfl_xor_sync(0xffffffffu, sum_[h][b], mask);
      }
    }
    if (c.piece == c.num_units) {
      write_row(c);
    } else if (plan.fixed) {
      leave_in_workspace(c, plan);
    } else {
      leave_in_block(c, c.left == c.piece);
    }
  }

  __device__ __forceinline__ void write_row(const Cursor& c) {
    const int heads = num_heads(c.group), first = first_head(c.group);
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int mine = h * 8 + q_ * 2 + b;
        if (mine >= heads) continue;
        const float factor = finish_row(c.row.token, first + mine, top_[h][b], sum_[h][b], g_ == 0);
        char* out = out_row(c.row.token, first + mine);
        const auto pair = [&](int t) { return pack(out_[t][h][b] * factor, out_[t][h][2 + b] * factor); };
#pragma unroll
        for (int t = 0; t + 4 <= kTiles; t += 4) {  // four tiles have eight neighbouring columns
          *reinterpret_cast<uint4*>(out + 2 * this->column(t)) = make_uint4(pair(t), pair(t + 1), pair(t + 2), pair(t + 3));
        }
        if constexpr (kTiles % 4 >= 2) {
          constexpr int t = kTiles / 4 * 4;
          *reinterpret_cast<uint2*>(out + 2 * this->column(t)) = make_uint2(pair(t), pair(t + 1));
        }
        if constexpr (kTiles % 2 == 1) *reinterpret_cast<uint32_t*>(out + 2 * this->column(kTiles - 1)) = pair(kTiles - 1);
      }
    }
  }

  // The output has 16-bit elements and rows aligned to 16 bytes.
  __device__ __forceinline__ char* out_row(int64_t token, int head) const {
    return static_cast<char*>(p_.out) + 2 * (token * p_.out_token_stride + head * p_.out_head_stride);
  }
  __device__ __forceinline__ uint32_t pack(float low, float high) const {
    if constexpr (kQuantized) {
      return p_.query_type == DType::bf16 ? pack_pair<__nv_bfloat16>(low, high) : pack_pair<__half>(low, high);
    } else {
      return pack_pair<C>(low, high);
    }
  }

  // The sums of parts in shared memory: part 0 of a warp has a place of its own, part 1, its last, the ring's.
  __device__ __forceinline__ float* part_sums(int part) const {
    return part % 2 == 0 ? firsts_ + part / 2 * kRows * Shape::kSumStride
                         : reinterpret_cast<float*>(stages_ + part / 2 * Shape::kRingBytes);
  }

  __device__ __forceinline__ void leave_in_block(const Cursor& c, bool last) {
    static_assert(kRows * Shape::kSumStride * 4 <= Shape::kRingBytes, "a warp's last sums take its ring's place");
    const int part = 2 * warp_ + (last ? 1 : 0);
    float* sums = part_sums(part);
    if (lane_ == 0) open_[part] = {static_cast<int>(c.row.token), c.group, c.unit, c.unit + c.piece, c.num_units};
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int row = h * 8 + q_ * 2 + b;
        leave_head(sums + row * Shape::kSumStride, h, b);
      }
    }
  }

  // A head's D sums and, behind them, its maximum and its sum of exponentials.
  __device__ __forceinline__ void leave_head(float* to, int h, int b) const {
    if (g_ == 0) *reinterpret_cast<float2*>(to + kD) = make_float2(top_[h][b], sum_[h][b]);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      *reinterpret_cast<float2*>(to + this->column(t)) = make_float2(out_[t][h][b], out_[t][h][2 + b]);
    }
  }

  // Adds up what the warps of the block left, in the order of the keys: a (row, head group) that lies within the block is written,
  // one that does not leaves a partial, and the block that comes last for it adds those. A block has at most two such partials: its
  // first may continue a row (slot 2b), its last may begin one (slot 2b + 1). With split_size partials are there already, one a
  // unit. All threads call it.
  __device__ __forceinline__ void settle(const Plan& plan) {
    __syncthreads();
    int waiting = 0;
    if (!plan.fixed) {
      for (Group group = group_from(0); group.part < 2 * kWarps; group = group_from(group.next)) {
        if (!add_parts(plan, group)) waiting |= 1 << group.part;
      }
      if (waiting == 0) return;
    }
    __threadfence();
    int index = open_[0].token, group = open_[0].group, at = plan.block_begin(blockIdx.x), begin = at - open_[0].begin;
    while (true) {
      Partials partials;
      if (plan.fixed) {
        if (at >= plan.block_begin(blockIdx.x + 1)) break;
        const Row row = grid_row(p_, index);
        const int units = units_of(p_, row);
        partials = {static_cast<int>(row.token), group, kCounters + begin, units, min(plan.block_begin(blockIdx.x + 1), begin + units) - at,
                    begin, begin, 1};
        at += partials.count;
        begin += units;
        if (units == 0 || ++group == plan.num_groups) {
          group = 0;
          ++index;
        }
        if (units <= 1) continue;  // written by its warp
      } else {
        if (waiting == 0) break;
        partials = partials_of(plan, group_from(__ffs(waiting) - 1));
        waiting &= waiting - 1;
      }
      __syncthreads();
      if (threadIdx.x == 0) *last_ = arrives_last(partials);
      __syncthreads();
      if (*last_) merge_partials(partials);
    }
  }

  // The partials of a (row, head group): partial 0 in `first_slot`, partial s > 0 in slot base + s step; `count` are of this block.
  struct Partials {
    int token, group, counter, parts, count, first_slot, base, step;
  };

  // Parts [part, next) of one (row, head group), which lie side by side; `open` is all of them together.
  struct Group {
    Open open;
    int part, next;
    __device__ bool whole() const { return open.begin == 0 && open.end == open.num_units; }
  };
  __device__ __forceinline__ Group group_from(int part) const {
    Group group{};
#pragma unroll 1
    while (part < 2 * kWarps && open_[part].num_units == 0) ++part;
    group.part = group.next = part;
    if (part == 2 * kWarps) return group;
    group.open = open_[part];
#pragma unroll 1
    for (; group.next < 2 * kWarps; ++group.next) {
      const Open& other = open_[group.next];
      if (other.num_units == 0) continue;
      if (other.token != group.open.token || other.group != group.open.group) break;
      group.open.end = other.end;
    }
    return group;
  }

  // Those of a (row, head group) that several blocks share, one a block.
  __device__ __forceinline__ Partials partials_of(const Plan& plan, const Group& group) const {
    const int warp = blockIdx.x * kWarps + group.part / 2;
    const int length = open_[group.part].end - group.open.begin;  // of the group's first part, a warp's first piece or its last
    const int begin = (group.part % 2 == 0 ? plan.begin_of(warp) : plan.begin_of(warp + 1) - length) - group.open.begin;
    const int counter = plan.block_of(begin), parts = plan.block_of(begin + group.open.num_units - 1) - counter + 1;
    const int first_slot = 2 * counter + (plan.block_begin(counter) == begin ? 0 : 1);
    return {group.open.token, group.open.group, counter, parts, 1, first_slot, 2 * counter, 2};
  }

  // Returns whether the group was whole, so that its row is written.
  __device__ __forceinline__ bool add_parts(const Plan& plan, const Group& group) {
    const int heads = num_heads(group.open.group), first = first_head(group.open.group);
    const bool whole = group.whole();
    float* mine = nullptr;
    if (!whole) {
      const Partials partials = partials_of(plan, group);
      mine = slots() + (static_cast<int>(blockIdx.x) == partials.counter ? partials.first_slot : 2 * blockIdx.x) * slot_size();
    }
#pragma unroll 1
    for (int item = threadIdx.x; item < heads * (kD / 4); item += kThreads) {
      const int h = item / (kD / 4), at = item % (kD / 4) * 4;
      float top = -INFINITY, sum = 0.0f;
#pragma unroll 1
      for (int i = group.part; i < group.next; ++i) {
        if (open_[i].num_units > 0) top = fmaxf(top, part_sums(i)[h * Shape::kSumStride + kD]);
      }
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int i = group.part; i < group.next; ++i) {
        if (open_[i].num_units == 0) continue;
        const float* row = part_sums(i) + h * Shape::kSumStride;
        const float scale = exp2_fast(row[kD] - finite_top(top));
        sum += scale * row[kD + 1];
        add_scaled(total, scale, *reinterpret_cast<const float4*>(row + at));
      }
      if (whole) {
        write_four(group.open.token, first + h, at, top, sum, total);
      } else {
        float* to = mine + h * (kD + kSlotHead);
        __stcg(reinterpret_cast<float4*>(to + kSlotHead + at), total);
        if (at == 0) __stcg(reinterpret_cast<float4*>(to), make_float4(top, sum, 0.0f, 0.0f));
      }
    }
    return whole;
  }

  __device__ __forceinline__ int64_t slot_size() const { return static_cast<int64_t>(min(p_.group_size, kGroup)) * (kD + kSlotHead); }
  __device__ __forceinline__ float* slots() const { return p_.workspace + p_.num_counters; }

  // Whether all others have come; the counter is then zero again.
  __device__ __forceinline__ bool arrives_last(const Partials& partials) const {
    int* arrived = reinterpret_cast<int*>(p_.workspace) + partials.counter;
    const bool last = atomicAdd(arrived, partials.count) == partials.parts - partials.count;
    if (last) {
      *arrived = 0;
      __threadfence();
    }
    return last;
  }

  // With split_size: the piece is a partial of its own.
  __device__ __forceinline__ void leave_in_workspace(const Cursor& c, const Plan& plan) {
    const int unit = plan.begin_of(blockIdx.x * kWarps + warp_ + 1) - c.left;  // in the line
    float* mine = slots() + unit * slot_size();
    const int heads = num_heads(c.group);
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int row = h * 8 + q_ * 2 + b;
        if (row >= heads) continue;
        float* to = mine + row * (kD + kSlotHead);
        if (g_ == 0) __stcg(reinterpret_cast<float4*>(to), make_float4(top_[h][b], sum_[h][b], 0.0f, 0.0f));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          __stcg(reinterpret_cast<float2*>(to + kSlotHead + this->column(t)), make_float2(out_[t][h][b], out_[t][h][2 + b]));
        }
      }
    }
  }

  // Ends a (row, head group) that one cluster shares: every warp leaves its sums in shared memory, and every block of the cluster
  // adds up a part of the result's columns out of all of them. A team of as many lanes as blocks takes four neighbouring columns
  // of a head.
  __device__ __forceinline__ void end_in_cluster(const Cursor& c) {
    const int size = p_.cluster, rank = blockIdx.x % size;
    float* mine = part_sums(2 * warp_ + 1);
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) sum_[h][b] += __shfl_xor_sync(0xffffffffu, sum_[h][b], mask);
        leave_head(mine + (h * 8 + q_ * 2 + b) * Shape::kSumStride, h, b);
      }
    }
    if (size > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }

    const int heads = num_heads(c.group), first = first_head(c.group), member = threadIdx.x % size;
    const uint32_t sums = cluster_address(shared_address(stages_), member);
#pragma unroll 1
    for (int base = rank * (kThreads / size); base < heads * (kD / 4); base += kThreads) {
      const int item = base + static_cast<int>(threadIdx.x) / size;
      const bool there = item < heads * (kD / 4);
      const int h = there ? item / (kD / 4) : 0, at = item % (kD / 4) * 4;
      float2 end[kWarps];
      float4 part[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) end[w] = load_cluster_8(sums + w * Shape::kRingBytes + (h * Shape::kSumStride + kD) * 4);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) part[w] = load_cluster_16(sums + w * Shape::kRingBytes + (h * Shape::kSumStride + at) * 4);
      float top = -INFINITY;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, end[w].x);
      for (int mask = 1; mask < size; mask *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
      float sum = 0.0f;
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float scale = exp2_fast(end[w].x - finite_top(top));
        sum += scale * end[w].y;
        add_scaled(total, scale, part[w]);
      }
      for (int mask = 1; mask < size; mask *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        total.x += __shfl_xor_sync(0xffffffffu, total.x, mask);
        total.y += __shfl_xor_sync(0xffffffffu, total.y, mask);
        total.z += __shfl_xor_sync(0xffffffffu, total.z, mask);
        total.w += __shfl_xor_sync(0xffffffffu, total.w, mask);
      }
      if (member == 0 && there) {
        write_four(c.row.token, first + h, at, top, sum, total);
      }
    }
    if (size > 1) cluster_barrier();  // nobody leaves while others read its shared memory
  }

  // Adds a row's partials in the order of their keys, from shared memory, to which all that it holds are copied at once. Loops are
  // not unrolled: what runs once costs more to fetch than to execute.
  __device__ __forceinline__ void merge_partials(const Partials& partials) const {
    constexpr int kHeadChunks = kD / 4 + 1;  // of 16 bytes
    const int heads = num_heads(partials.group), head = first_head(partials.group), chunks = heads * kHeadChunks;
    const int room = static_cast<int>(reinterpret_cast<const char*>(open_) - stages_) / (chunks * 16);
    const uint32_t held = shared_address(stages_);
    constexpr int kItems = (kRows * (kD / 4) + kThreads - 1) / kThreads;  // of a thread: four columns of a head
    float top[kItems], sum[kItems];
    float4 total[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      top[i] = -INFINITY;
      sum[i] = 0.0f;
      total[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll 1
    for (int from = 0; from < partials.parts; from += room) {
      const int count = min(room, partials.parts - from);
      int part = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
#pragma unroll 1
      for (int at = threadIdx.x; at < count * chunks; at += kThreads) {
        const int slot = from + part == 0 ? partials.first_slot : partials.base + (from + part) * partials.step;
        copy_async_16(held + at * 16, slots() + slot * slot_size() + chunk * 4, true);
        for (chunk += kThreads; chunk >= chunks; chunk -= chunks) ++part;
      }
      commit_copies();
      wait_copies<0>();
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int item = threadIdx.x + i * kThreads, h = item / (kD / 4), at = item % (kD / 4) * 4;
        if (h >= heads) continue;
        const float* rows = reinterpret_cast<const float*>(stages_) + h * (kD + kSlotHead);
        float higher = top[i];
#pragma unroll 1
        for (int s = 0; s < count; ++s) higher = fmaxf(higher, rows[s * chunks * 4]);
        const float rescale = exp2_fast(top[i] - finite_top(higher));
        top[i] = higher;
        sum[i] *= rescale;
        total[i] = make_float4(total[i].x * rescale, total[i].y * rescale, total[i].z * rescale, total[i].w * rescale);
#pragma unroll 1
        for (int s = 0; s < count; ++s) {
          const float* row = rows + s * chunks * 4;
          const float scale = exp2_fast(row[0] - finite_top(higher));
          sum[i] += scale * row[1];
          add_scaled(total[i], scale, *reinterpret_cast<const float4*>(row + kSlotHead + at));
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = threadIdx.x + i * kThreads, h = item / (kD / 4), at = item % (kD / 4) * 4;
      if (h < heads) write_four(partials.token, head + h, at, top[i], sum[i], total[i]);
    }
  }

  static __device__ __forceinline__ void add_scaled(float4& total, float scale, const float4& part) {
    total.x += scale * part.x;
    total.y += scale * part.y;
    total.z += scale * part.z;
    total.w += scale * part.w;
  }

  // The factor that normalises a head's sums; one of the threads that ask for it writes the lse.
  __device__ __forceinline__ float finish_row(int64_t token, int head, float top, float sum, bool writes) const {
    const RowEnd result = end_row(p_, top, sum, head);
    if (writes && p_.lse != nullptr) p_.lse[token * p_.lse_token_stride + head * p_.lse_head_stride] = result.lse;
    return kQuantized ? result.factor * head_scale(p_.value_scale, head / p_.group_size) : result.factor;
  }

  __device__ __forceinline__ void write_four(int64_t token, int head, int column, float top, float sum, const float4& total) const {
    const float factor = finish_row(token, head, top, sum, column == 0);
    *reinterpret_cast<uint2*>(out_row(token, head) + 2 * column) =
        make_uint2(pack(total.x * factor, total.y * factor), pack(total.z * factor, total.w * factor));
  }

  char *stages_, *queries_;  // [kWarps] rings of stages; [kWarps][kStages][kRows][kD] where they are copied ahead
  float* firsts_;            // [kWarps][kRows][kSumStride]: sums of a warp's first piece, if it is a part
  Open* open_;               // [kWarps][2]
  int* last_;                // whether this block is the last that a row waited for
};

}  // namespace research_engine::cuda::decode
