// out = x W^T (+ bias) for 9 to 64 rows of x on Hopper's warpgroup tensor cores (sm_90a), bound by reading the weight once.
//
// Computes   as skinny_gemm.cuh: out[t, n] = sum over k of x[t, k] W[n, k] + bias[n]; gated: silu(out[t, i]) * out[t, I + i].
// Layout     x [T, K], W [N, K], out [T, N], rows strided, bfloat16 or float16, out also float32; K a multiple of 8, rows of x and
//            W aligned to 16 bytes.
// Algorithm  1. W is the left operand of wgmma, 64 of its rows at a time, x the right one, all of its rows: a product of 64 x T, with
//               both in shared memory. A tile is kUnits times 64 rows (gated: 64 of the gate and the same 64 of the up projection, so
//               that a thread holds both).
//            2. One thread of a block copies: a stage of the ring is the tile and x by 64 in depth. A tile's rows are read once, and
//               of x T / (64 kUnits) times their bytes, out of L2. A warpgroup multiplies; it has time to spare, so that the ring is
//               nearly always empty, which is to say under way.
//            3. The blocks of a cluster take the same tiles and share the depth. At a tile's end each has its own eighths of x's rows
//               to finish, and sends its sums of the others' into their shared memory (st.async, counted by the receiver's
//               mbarrier). The ring runs on meanwhile, and none waits for the others before the next tile's end.
//            4. Sums are added in the order of the cluster's blocks, whatever T is: a row's bits depend on no other row, nor on how
//               many there are.
//            5. Launched with overlap, the ring's part of W is on its way while kernels ahead still run: W, a constant, does not
//               depend on them.
//            6. How a weight is dealt out (units, cluster) is decided by its shape in skinny_gemm_wgmma.cu, and so is up to how many
//               rows this kernel is taken rather than a library's product.
// Roofline   memory: N K 2 bytes; x and what of x is read again come out of L2.
// Reached    on one H200 (reads at 4.3 TB/s), in a graph of launches over weights that L2 does not hold, with overlap, bf16, us at 16,
//            32, 48 and 64 rows, cuBLAS in the same run behind the stroke (gated: without silu_and_mul, some 2 us more):
//              4096 x 4096            11.1 / 12.9     11.0 / 13.1     11.7 / 13.7     12.3 / 11.9    3.1 TB/s at 32 rows
//              4096 x 14336           30.0 / 32.0     29.8 / 32.8     31.1 / 33.4     31.8 / 34.9    3.9
//              128256 x 4096         250.5 / 252.4   251.5 / 266.3   257.5 / 268.0   265.5 / 282.3   4.2
//              6144 x 4096            15.3 / 15.5     15.5 / 15.4     16.5 / 15.9     17.6 / 15.9    3.2
//              28672 x 4096, gated    62.7 / 57.1     61.8 / 58.1     64.8 / 62.1     67.5 / 62.5    3.8
//            With nothing asked into L2 at the start: 3584 x 3584 9.1 / 11.4 at 32 rows, 3584 x 18944 34.8 / 38.9, 576 x 1536
//            3.5 / 4.8, 49152 x 576 17.1 / 17.8, but 4608 x 3584 14.0 (best of 12 ways) / 11.3: 72 units of 64 rows are a few more than
//            the 66 clusters of 2, and no way to deal them out has work for more than 3/4 of the device's time.
// Tried      Tiles of 1, 2 and 3 units by clusters of 1, 2, 4 and 8. Stages: the more the better, at 3 instead of all that fit slower by
//            30 to 80 %. 2, 4, 8 and 16 stages behind the ring's asked into L2: 4 is the fastest or as fast, up to 4 % against none; 16
//            slower. Half of the shared memory for a block, so that the next kernel's lies beside it: equal for 4096 x 4096, 3.2 instead
//            of 3.7 for 960 x 576, where cuBLAS has 3.1, else slower by 2 to 12 %. L2 promotion of W to 256 bytes: slower by up to 3 %;
//            none: equal. Without overlap: slower by 1 to 12 %.
#pragma once

#include "../common/cuda_dtype.h"
#include "cluster.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

namespace research_engine::cuda::wide {

constexpr int kDepth = 64;                                     // of a stage: a row of an atom
constexpr int kUnitRows = 64, kUnitBytes = kUnitRows * kAtomRow;  // of W in a product, and in a stage
constexpr int kConsumers = 128, kThreads = kConsumers + 32;
constexpr int kMostStages = 12;

template <int kTokens_, int kUnits_> struct Shape {
  static constexpr int kTokens = kTokens_, kUnits = kUnits_;
  static constexpr int kGroups = kTokens / 8;  // of 8 tokens: what one block of the cluster finishes for all
  static constexpr int kWeightBytes = kUnits * kUnitBytes, kStageBytes = kWeightBytes + kTokens * kAtomRow;
  static constexpr int kGroupBytes = kUnits * kConsumers * 16;  // sums of a group
};

struct Params {
  CUtensorMap weight, x;  // boxes of 64 rows, of kTokens rows
  const char* bias;       // may be null
  char* out;
  int64_t out_stride;  // in elements
  int tokens, columns;
  int up_row;  // gated: I, the row of the first up projection; else 0
  int tiles, depth_steps;
  int cluster_size, cluster_shift;  // a power of two, and of which
  int stages;
  int prefetched;  // stages behind those of the ring that are asked into L2 at the start
  bool float_out;
};

// Shared memory: the ring, the sums received from the cluster, this.
struct Control {
  uint64_t full[kMostStages], empty[kMostStages];
  uint64_t received;  // the others' sums of a tile
  uint64_t may_send;  // the others have read those of the last tile
};

template <typename S> __host__ __device__ constexpr int received_bytes(int cluster_size) {
  return (cluster_size - 1) * ((S::kGroups + cluster_size - 1) / cluster_size) * S::kGroupBytes;
}
template <typename S> constexpr int64_t shared_bytes(int stages, int cluster_size) {
  return stages * S::kStageBytes + received_bytes<S>(cluster_size) + static_cast<int64_t>(sizeof(Control));
}

// This block's steps of the depth.
__device__ __forceinline__ int first_step(const Params& p, int rank) {
  return static_cast<int>(static_cast<int64_t>(p.depth_steps) * rank / p.cluster_size);
}

struct Place {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++slot == stages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// The steps of a block: tile after tile, each through the block's part of the depth.
struct Walk {
  const int begin, end, tile_step;
  int tile, step;
  __device__ __forceinline__ Walk(const Params& p, int rank)
      : begin(first_step(p, rank)), end(first_step(p, rank + 1)), tile_step(gridDim.x / p.cluster_size), tile(blockIdx.x / p.cluster_size),
        step(begin) {}
  __device__ __forceinline__ void next() {
    if (++step == end) {
      step = begin;
      tile += tile_step;
    }
  }
};

// What the one thread of a block that copies does.
template <typename S> class Producer {
 public:
  __device__ __forceinline__ Producer(const Params& p, uint32_t ring, Control* control, int rank)
      : p_(p), ring_(ring), full_(shared_address(control->full)), empty_(shared_address(control->empty)), policy_(read_once_policy()),
        rank_(rank) {}

  // The first stages' rows of W, and those of some stages more into L2.
  __device__ __forceinline__ void fill() {
    Walk walk(p_, rank_);
    for (; ahead_ < p_.stages && walk.tile < p_.tiles; walk.next()) copy_weight(walk, ahead_++);
    for (int i = 0; i < p_.prefetched && walk.tile < p_.tiles; ++i, walk.next()) {
#pragma unroll
      for (int u = 0; u < S::kUnits; ++u) prefetch_tensor(&p_.weight, walk.step * kDepth, row_of(walk, u));
    }
  }

  // Their rows of x, then all other stages.
  __device__ __forceinline__ void run() {
    Place place;
    for (Walk walk(p_, rank_); walk.tile < p_.tiles; walk.next()) {
      if (ahead_ > 0) {
        --ahead_;
      } else {
        mbarrier_wait(empty_ + 8 * place.slot, place.parity ^ 1);
        copy_weight(walk, place.slot);
      }
      tensor_copy(ring_ + place.slot * S::kStageBytes + S::kWeightBytes, &p_.x, full_ + 8 * place.slot, walk.step * kDepth, 0);
      place.next(p_.stages);
    }
  }

 private:
  __device__ __forceinline__ int row_of(const Walk& walk, int unit) const {  // of W
    return p_.up_row > 0 ? walk.tile * kUnitRows + unit * p_.up_row : (walk.tile * S::kUnits + unit) * kUnitRows;
  }

  __device__ __forceinline__ void copy_weight(const Walk& walk, int slot) {
    const uint32_t barrier = full_ + 8 * slot, target = ring_ + slot * S::kStageBytes;
    mbarrier_arrive_expect(barrier, S::kStageBytes);
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) {
      tensor_copy(target + u * kUnitBytes, &p_.weight, barrier, walk.step * kDepth, row_of(walk, u), policy_);
    }
  }

  const Params& p_;
  const uint32_t ring_, full_, empty_;
  const uint64_t policy_;
  const int rank_;
  int ahead_ = 0;  // stages whose rows of W were asked for before x was there
};

// The warpgroup that multiplies.
template <typename T, typename S> class Consumer {
  using Product = Wgmma<T, S::kTokens>;

 public:
  __device__ __forceinline__ Consumer(const Params& p, uint32_t ring, uint32_t received, Control* control, int rank)
      : p_(p), ring_(ring), received_(received), full_(shared_address(control->full)), empty_(shared_address(control->empty)),
        received_barrier_(shared_address(&control->received)), may_send_(shared_address(&control->may_send)), rank_(rank),
        per_rank_((S::kGroups + p.cluster_size - 1) / p.cluster_size) {}

  __device__ __forceinline__ void run() {
    const Walk walk(p_, rank_);
    const int steps = walk.end - walk.begin;
    uint32_t parity = 0;  // of the tile, counted from the block's first
    for (int tile = walk.tile; tile < p_.tiles; tile += walk.tile_step, parity ^= 1) {
      multiply(steps);
      if (p_.cluster_size > 1) {
        if (tile == walk.tile) {
          cluster_wait();  // the others' barriers are there
        } else {
          mbarrier_wait(may_send_, parity ^ 1);
        }
        send();
        mbarrier_wait(received_barrier_, parity);
      }
#pragma unroll
      for (int i = 0; i < S::kGroups; ++i) {
        if (owner_of(i) == rank_) finish(tile, i);
      }
      // Nothing is sent to a block behind the last tile: it may have left.
      if (p_.cluster_size > 1 && tile + walk.tile_step < p_.tiles) {
        block_barrier_sync(1, kConsumers);
        const int peer = threadIdx.x;
        if (peer < p_.cluster_size && peer != rank_) mbarrier_arrive_remote(cluster_address(may_send_, peer));
      }
    }
  }

 private:
  __device__ __forceinline__ void pin_sums() {
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) pin(sums_[u]);
  }

  __device__ __forceinline__ void release(int slot) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty_ + 8 * slot);
  }

  // All of the tile's steps. One step's products are under way while the next one's are issued.
  __device__ __forceinline__ void multiply(int steps) {
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      mbarrier_wait(full_ + 8 * place_.slot, place_.parity);
      const uint32_t stage = ring_ + place_.slot * S::kStageBytes;
      const uint64_t a = operand(stage, 16, kAtomGroup), b = operand(stage + S::kWeightBytes, 16, kAtomGroup);
      pin_sums();
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
        for (int u = 0; u < S::kUnits; ++u) {
          Product::shared_shared(sums_[u], advance(a, u * kUnitBytes + 32 * k), advance(b, 32 * k), step > 0 || k > 0);
        }
      }
      wgmma_commit();
      pin_sums();
      wgmma_wait<1>();
      if (step > 0) release(before);
      before = place_.slot;
      place_.next(p_.stages);
    }
    wgmma_wait<0>();
    pin_sums();
    release(before);
  }

  __device__ __forceinline__ int owner_of(int group) const { return group & (p_.cluster_size - 1); }

  // Where the sums of a rank's own group of index `index` lie in its block, from block `source`.
  __device__ __forceinline__ uint32_t received_from(int source, int owner, int index) const {
    return received_ + ((source < owner ? source : source - 1) * per_rank_ + index) * S::kGroupBytes + threadIdx.x * 16;
  }

  __device__ __forceinline__ void send() {
    if (threadIdx.x == 0) {
      const int own_groups = (S::kGroups - rank_ + p_.cluster_size - 1) / p_.cluster_size;  // 0 where rank >= kGroups
      mbarrier_arrive_expect(received_barrier_, (p_.cluster_size - 1) * max(own_groups, 0) * S::kGroupBytes);
    }
#pragma unroll
    for (int i = 0; i < S::kGroups; ++i) {
      const int owner = owner_of(i);
      if (owner == rank_) continue;
      const uint32_t target = cluster_address(received_from(rank_, owner, i >> p_.cluster_shift), owner);
      const uint32_t barrier = cluster_address(received_barrier_, owner);
#pragma unroll
      for (int u = 0; u < S::kUnits; ++u) {
        const float* from = sums_[u] + 4 * i;
        store_async(target + u * (kConsumers * 16), make_float4(from[0], from[1], from[2], from[3]), barrier);
      }
    }
  }

  // A group of 8 tokens, of this block's own: the cluster's sums to out.
  __device__ __forceinline__ void finish(int tile, int i) {
    float4 totals[S::kUnits];
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) {
      const float* own = sums_[u] + 4 * i;
      totals[u] = make_float4(own[0], own[1], own[2], own[3]);
      if (p_.cluster_size == 1) continue;
      const float4 mine = totals[u];
      totals[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int r = 0; r < p_.cluster_size; ++r) {
        float4 other = mine;
        if (r != rank_) {
          const uint4 raw = load_shared_16(received_from(r, rank_, i >> p_.cluster_shift) + u * (kConsumers * 16));
          other = make_float4(__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w));
        }
        totals[u] = make_float4(totals[u].x + other.x, totals[u].y + other.y, totals[u].z + other.z, totals[u].w + other.w);
      }
    }
    const int lane = threadIdx.x % 32, token = 8 * i + 2 * (lane % 4), row = threadIdx.x / 32 * 16 + lane / 4;
    if constexpr (S::kUnits == 2) {
      if (p_.up_row > 0) {
        const auto gate = [&](int column, float gate_sum, float up_sum, int t) {
          const float g = gate_sum + bias(column), up = up_sum + bias(column + p_.up_row);
          store(t, column, g / (1.0f + expf(-g)) * up);
        };
        const int column = tile * kUnitRows + row;
        if (column < p_.columns) {
          gate(column, totals[0].x, totals[1].x, token);
          gate(column, totals[0].y, totals[1].y, token + 1);
        }
        if (column + 8 < p_.columns) {
          gate(column + 8, totals[0].z, totals[1].z, token);
          gate(column + 8, totals[0].w, totals[1].w, token + 1);
        }
        return;
      }
    }
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) {
      const int column = (tile * S::kUnits + u) * kUnitRows + row;
      if (column < p_.columns) {
        const float b = bias(column);
        store(token, column, totals[u].x + b);
        store(token + 1, column, totals[u].y + b);
      }
      if (column + 8 < p_.columns) {
        const float b = bias(column + 8);
        store(token, column + 8, totals[u].z + b);
        store(token + 1, column + 8, totals[u].w + b);
      }
    }
  }

  __device__ __forceinline__ float bias(int n) const {
    return p_.bias == nullptr ? 0.0f : to_float(reinterpret_cast<const T*>(p_.bias)[n]);
  }

  __device__ __forceinline__ void store(int token, int column, float value) const {
    if (token >= p_.tokens) return;
    const int64_t index = token * p_.out_stride + column;
    if (p_.float_out) {
      reinterpret_cast<float*>(p_.out)[index] = value;
    } else {
      reinterpret_cast<T*>(p_.out)[index] = from_float<T>(value);
    }
  }

  const Params& p_;
  const uint32_t ring_, received_, full_, empty_, received_barrier_, may_send_;
  const int rank_, per_rank_;
  Place place_;
  float sums_[S::kUnits][S::kTokens / 2];
};

// `wait` ends when the kernels ahead have.
template <typename T, typename S, typename Wait> __device__ __forceinline__ void run_block(const Params& p, const Wait& wait) {
  extern __shared__ __align__(1024) char raw[];
  const uint32_t ring = shared_address(raw), received = ring + p.stages * S::kStageBytes;
  auto* control = reinterpret_cast<Control*>(raw + p.stages * S::kStageBytes + received_bytes<S>(p.cluster_size));
  const int rank = p.cluster_size > 1 ? cluster_rank() : 0;
  Producer<S> producer(p, ring, control, rank);
  if (threadIdx.x == kConsumers) {
    prefetch_map(&p.weight);
    prefetch_map(&p.x);
    for (int i = 0; i < p.stages; ++i) {
      mbarrier_init(shared_address(&control->full[i]), 1);
      mbarrier_init(shared_address(&control->empty[i]), kConsumers / 32);
    }
    mbarrier_init(shared_address(&control->received), 1);
    mbarrier_init(shared_address(&control->may_send), max(p.cluster_size - 1, 1));
    mbarrier_init_fence();
    producer.fill();
  }
  __syncthreads();
  if (p.cluster_size > 1) cluster_arrive_relaxed();  // the barriers were released to the cluster above
  wait();
  if (threadIdx.x < kConsumers) {
    Consumer<T, S>(p, ring, received, control, rank).run();
  } else {
    if (threadIdx.x == kConsumers) producer.run();
    __syncwarp();
    if (p.cluster_size > 1) cluster_wait();  // every thread that arrives waits
  }
}

// Only sm_90a has these instructions. For other targets the kernel is empty and takes a warp alone, by which the launcher knows it.
template <typename T, typename S>
__global__ void __launch_bounds__(kHasWgmma ? kThreads : 32, 1)
    skinny_gemm_wgmma_kernel(const __grid_constant__ AfterPredecessor<Params> after) {
  const Params& p = after.constants();  // only the weight is read before the wait
  if constexpr (kHasWgmma) run_block<T, S>(p, [&] { after.wait(); });
}

}  // namespace research_engine::cuda::wide
