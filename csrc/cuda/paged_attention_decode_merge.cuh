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
    int index, group, begin, end, num_units;  // row in the grid, head group, units
  };

  __device__ __forceinline__ DecodeMerge(const AttentionParams& p, char* shared) : Tile(p) {
    stages_ = shared;
    firsts_ = reinterpret_cast<float*>(shared + kWarps * Shape::kRingBytes);
    queries_ = reinterpret_cast<char*>(firsts_ + kWarps * kRows * Shape::kSumStride);
    open_ = reinterpret_cast<Open*>(queries_ + kWarps * Shape::kQueryBytes);
    last_ = reinterpret_cast<int*>(open_ + 2 * kWarps);
    groups_per_head_ = (p.group_size + kGroup - 1) / kGroup;
  }

  // 4 * kWarps numbers of shared memory, free until the block's first piece ends.
  __device__ __forceinline__ int* scratch() const { return last_ + 2 * kWarps; }

  // The warp has left nothing yet.
  __device__ __forceinline__ void clear() {
    if (lane_ < 2) open_[2 * warp_ + lane_].num_units = 0;
  }

  __device__ __forceinline__ int first_head(int group) const {
    return group / groups_per_head_ * p_.group_size + group % groups_per_head_ * kGroup;
  }
  __device__ __forceinline__ int num_heads(int group) const {
    return min(kGroup, p_.group_size - group % groups_per_head_ * kGroup);
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
      const bool last = c.left == c.piece;
      leave_in_block(c, last ? 1 : 0);
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
        constexpr int kTogether = !kQuantized && kD % 64 == 0 ? 4 : 1;  // tiles of neighbouring columns
        if (kTogether == 4 && p_.out_vectors) {
          C* out = static_cast<C*>(p_.out) + c.row.token * p_.out_token_stride + (first + mine) * p_.out_head_stride;
#pragma unroll
          for (int t = 0; t < kTiles; t += kTogether) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) pairs[i] = pack_pair<M>(out_[t + i][h][b] * factor, out_[t + i][h][2 + b] * factor);
            *reinterpret_cast<uint4*>(out + this->column(t)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
          }
        } else {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            write_pair(c.row.token, first + mine, this->column(t), out_[t][h][b] * factor, out_[t][h][2 + b] * factor);
          }
        }
      }
    }
  }

  // The sums of parts in shared memory: part 0 of a warp has a place of its own, part 1, its last, the ring's.
  __device__ __forceinline__ float* part_sums(int part) const {
    return part % 2 == 0 ? firsts_ + part / 2 * kRows * Shape::kSumStride
                         : reinterpret_cast<float*>(stages_ + part / 2 * Shape::kRingBytes);
  }

  __device__ __forceinline__ void leave_in_block(const Cursor& c, int which) {
    static_assert(kRows * Shape::kSumStride * 4 <= Shape::kRingBytes, "a warp's last sums take its ring's place");
    const int part = 2 * warp_ + which;
    float* sums = part_sums(part);
    if (lane_ == 0) open_[part] = {c.index, c.group, c.unit, c.unit + c.piece, c.num_units};
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
  // first may continue a row (slot 2b), its last may begin one (slot 2b + 1). They are left and counted side by side.
  __device__ __forceinline__ void settle(const Plan& plan) {
    int waiting = 0;
    for (Group group = group_from(0); group.part < 2 * kWarps; group = group_from(group.next)) {
      if (!add_parts(plan, group)) waiting |= 1 << group.part;
    }
    if (waiting == 0) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x < 2 * kWarps && waiting >> threadIdx.x & 1) {
      const Shared shared = shared_with(plan, group_from(threadIdx.x));
      last_[threadIdx.x] = arrives_last(shared.counter, shared.parts);
    }
    __syncthreads();
    for (; waiting != 0; waiting &= waiting - 1) {
      const int part = __ffs(waiting) - 1;
      if (!last_[part]) continue;
      const Group group = group_from(part);
      const Shared shared = shared_with(plan, group);
      merge_partials(grid_row(p_, group.open.index).token, 2 * shared.counter, 2, shared.first_slot, shared.parts,
                     num_heads(group.open.group), first_head(group.open.group), threadIdx.x, kThreads);
    }
  }

  // Parts [part, next) of one (row, head group), which lie side by side; `open` is all of them together.
  struct Group {
    Open open;
    int part, next;
    __device__ bool whole() const { return open.begin == 0 && open.end == open.num_units; }
  };
  __device__ __forceinline__ Group group_from(int part) const {
    Group group{};
    while (part < 2 * kWarps && open_[part].num_units == 0) ++part;
    group.part = group.next = part;
    if (part == 2 * kWarps) return group;
    group.open = open_[part];
    for (; group.next < 2 * kWarps; ++group.next) {
      const Open& other = open_[group.next];
      if (other.num_units == 0) continue;
      if (other.index != group.open.index || other.group != group.open.group) break;
      group.open.end = other.end;
    }
    return group;
  }

  // The partials of a (row, head group) that several blocks share.
  struct Shared {
    int counter, parts, first_slot, slot;
  };
  __device__ __forceinline__ Shared shared_with(const Plan& plan, const Group& group) const {
    const int warp = blockIdx.x * kWarps + group.part / 2;
    const int length = open_[group.part].end - group.open.begin;  // of the group's first part, a warp's first piece or its last
    const int begin = (group.part % 2 == 0 ? plan.begin_of(warp) : plan.begin_of(warp + 1) - length) - group.open.begin;
    Shared shared;
    shared.counter = plan.block_of(begin);
    shared.parts = plan.block_of(begin + group.open.num_units - 1) - shared.counter + 1;
    shared.first_slot = 2 * shared.counter + (plan.block_begin(shared.counter) == begin ? 0 : 1);
    shared.slot = static_cast<int>(blockIdx.x) == shared.counter ? shared.first_slot : 2 * blockIdx.x;
    return shared;
  }

  // Returns whether the group was whole, so that its row is written.
  __device__ __forceinline__ bool add_parts(const Plan& plan, const Group& group) {
    const int heads = num_heads(group.open.group), first = first_head(group.open.group);
    const bool whole = group.whole();
    const int64_t token = grid_row(p_, group.open.index).token;
    float* mine = whole ? nullptr : slots() + shared_with(plan, group).slot * slot_size();
    for (int item = threadIdx.x; item < heads * (kD / 4); item += kThreads) {
      const int h = item / (kD / 4), at = item % (kD / 4) * 4;
      float top = -INFINITY, sum = 0.0f;
      for (int i = group.part; i < group.next; ++i) {
        if (open_[i].num_units > 0) top = fmaxf(top, part_sums(i)[h * Shape::kSumStride + kD]);
      }
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int i = group.part; i < group.next; ++i) {
        if (open_[i].num_units == 0) continue;
        const float* row = part_sums(i) + h * Shape::kSumStride;
        const float scale = exp2_fast(row[kD] - finite_top(top));
        sum += scale * row[kD + 1];
        add_scaled(total, scale, *reinterpret_cast<const float4*>(row + at));
      }
      if (whole) {
        write_four(token, first + h, at, top, sum, total);
      } else {
        float* to = mine + h * (kD + kSlotHead);
        __stcg(reinterpret_cast<float4*>(to + kSlotHead + at), total);
        if (at == 0) __stcg(reinterpret_cast<float2*>(to), make_float2(top, sum));
      }
    }
    return whole;
  }

  __device__ __forceinline__ int64_t slot_size() const { return static_cast<int64_t>(min(p_.group_size, kGroup)) * (kD + kSlotHead); }
  __device__ __forceinline__ float* slots() const { return p_.workspace + p_.num_counters; }

  // Whether all other parts of a row have come; its counter is then zero again.
  __device__ __forceinline__ bool arrives_last(int counter, int parts) const {
    int* arrived = reinterpret_cast<int*>(p_.workspace) + counter;
    const bool last = atomicAdd(arrived, 1) == parts - 1;
    if (last) {
      *arrived = 0;
      __threadfence();
    }
    return last;
  }

  // With split_size: the piece is a partial of its own, and the warp that comes last for the row adds them.
  __device__ __forceinline__ void leave_in_workspace(const Cursor& c, const Plan& plan) {
    const int warp = blockIdx.x * kWarps + warp_;
    const int begin = plan.begin_of(warp + 1) - c.left - c.unit;  // first unit of the (row, group) in the line
    float* mine = slots() + (begin + c.unit) * slot_size();
    const int heads = num_heads(c.group);
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int row = h * 8 + q_ * 2 + b;
        if (row >= heads) continue;
        float* to = mine + row * (kD + kSlotHead);
        if (g_ == 0) __stcg(reinterpret_cast<float2*>(to), make_float2(top_[h][b], sum_[h][b]));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          __stcg(reinterpret_cast<float2*>(to + kSlotHead + this->column(t)), make_float2(out_[t][h][b], out_[t][h][2 + b]));
        }
      }
    }
    __threadfence();
    __syncwarp();
    int last = 0;
    if (lane_ == 0) last = arrives_last(kCounters + begin, c.num_units);
    if (__shfl_sync(0xffffffffu, last, 0)) {
      merge_partials(c.row.token, begin, 1, begin, c.num_units, heads, first_head(c.group), lane_, 32);
    }
  }

  // Ends a (row, head group) that one cluster shares: every warp leaves its sums in shared memory, and every block of the cluster adds up a
  // part of the result's columns out of all of them. A team of as many lanes as blocks takes four neighbouring columns of a head.
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

  // Adds a row's partials in the order of their keys. Partial s > 0 is in slot `base + s * step`, partial 0 in `first_slot`.
  __device__ __forceinline__ void merge_partials(int64_t token, int base, int step, int first_slot, int parts, int heads, int head,
                                                 int thread, int threads) const {
    if (parts <= 4) {
      merge_by<4>(token, base, step, first_slot, parts, heads, head, thread, threads);
    } else {
      constexpr int kMany = kRows == 8 && kD <= 128 ? 17 : 8;  // as registers allow; 33 blocks share a row at batch 1, 8 KV heads
      merge_by<kMany>(token, base, step, first_slot, parts, heads, head, thread, threads);
    }
  }
  template <int kTogether>  // loads on their way at once
  __device__ __forceinline__ void merge_by(int64_t token, int base, int step, int first_slot, int parts, int heads, int head, int thread,
                                           int threads) const {
    for (int item = thread; item < heads * (kD / 4); item += threads) {
      const int h = item / (kD / 4), at = item % (kD / 4) * 4;
      float top = -INFINITY, sum = 0.0f;
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int s = 0; s < parts; s += kTogether) {
        float2 end[kTogether];
        float4 part[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int slot = s + i == 0 ? first_slot : base + (s + i) * step;
          const float* from = slots() + slot * slot_size() + h * (kD + kSlotHead);
          const bool there = s + i < parts;
          end[i] = there ? __ldcg(reinterpret_cast<const float2*>(from)) : make_float2(-INFINITY, 0.0f);
          part[i] = there ? __ldcg(reinterpret_cast<const float4*>(from + kSlotHead + at)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        float higher = top;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) higher = fmaxf(higher, end[i].x);
        const float rescale = exp2_fast(top - finite_top(higher));
        top = higher;
        sum *= rescale;
        total = make_float4(total.x * rescale, total.y * rescale, total.z * rescale, total.w * rescale);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const float scale = exp2_fast(end[i].x - finite_top(top));
          sum += scale * end[i].y;
          add_scaled(total, scale, part[i]);
        }
      }
      write_four(token, head + h, at, top, sum, total);
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
    const float x = total.x * factor, y = total.y * factor, z = total.z * factor, w = total.w * factor;
    if (!kQuantized && p_.out_vectors) {
      C* out = static_cast<C*>(p_.out) + token * p_.out_token_stride + head * p_.out_head_stride + column;
      *reinterpret_cast<uint2*>(out) = make_uint2(pack_pair<M>(x, y), pack_pair<M>(z, w));
    } else {
      write_pair(token, head, column, x, y);
      write_pair(token, head, column + 2, z, w);
    }
  }

  __device__ __forceinline__ void write_pair(int64_t token, int head, int column, float first, float second) const {
    const int64_t out = token * p_.out_token_stride + head * p_.out_head_stride + column;
    store_out<C>(p_, out, first);
    store_out<C>(p_, out + 1, second);
  }

  char *stages_, *queries_;  // [kWarps] rings of stages; [kWarps][kStages][kRows][kD] where they are copied ahead
  float* firsts_;            // [kWarps][kRows][kSumStride]: sums of a warp's first piece, if it is a part
  Open* open_;               // [kWarps][2]
  int* last_;                // [kWarps][2]: whether this block is the last that the part's row waited for
  int groups_per_head_;
};

}  // namespace research_engine::cuda::decode
