// out = x W^T (+ bias) for at most 16 rows of x and a 16-bit weight as it lies in the checkpoint, bound by reading that weight.
//
// Computes   out[t, n] = sum over k of x[t, k] W[n, k] + bias[n]; gated: silu(out[t, i]) * out[t, I + i] for the 2 I columns.
// Layout     x [T, K], W [N, K], out [T, N], rows strided, bfloat16 or float16, out also float32; K a multiple of 8, rows of x and
//            W aligned to 16 bytes.
// Algorithm  1. W is the left operand of mma.m16n8k16, 16 of its rows at a time (gated: 8 rows of the gate and 8 of the up
//               projection, so that a thread holds both), x the right one, 8 of its rows each. The columns of a product, 2 quad,
//               2 quad + 1, 2 quad + 8 and 2 quad + 9, stand for the depths 8 quad + 4 step + (0, 1, 2, 3) of 32, for W as for x:
//               a lane's share of a row is 16 contiguous bytes, and W needs no packing.
//            2. A unit is 16 rows by 64 in depth. The warps of a block take the units of a tile of rows in turn. Every thread
//               copies the very bytes that it will multiply, asynchronously, into a ring of its own of kStages units: no barrier
//               is needed, the ring runs on across tiles, and kWarps * (kStages - 1) * 2 KiB are under way on a multiprocessor.
//            3. One block a multiprocessor stays for all tiles that are its own and keeps x in shared memory. Where all of x does
//               not fit, a cluster of blocks shares the depth.
//            4. After four tiles (two where there are more than 8 rows of x) the warps' sums are added in their order, then those
//               of the cluster's blocks in theirs, in the block whose turn it is; the cluster's barrier is awaited a round later.
//               The order is that of K and of the cluster: a row's bits do not depend on the other rows.
//            5. Launched with overlap, the ring is filled while kernels ahead still run: W, a constant, does not depend on them.
// Roofline   memory: N K 2 bytes; x is read once a block, through L2.
// Reached    on one H200, in a graph of launches over weights that L2 does not hold, with overlap, at one row, in bf16: 4.46 TB/s
//            for 128256 x 4096, 4.32 for 28672 x 4096, 4.21 for 4096 x 14336, 3.94 for 6144 x 4096, 3.62 for 4096 x 4096; cuBLAS in
//            the same run 4.27, 4.16, 3.67, 3.32, 2.50. This was with sums added up after every tile and without clusters.
// Tried      64, 80 and 96 KiB under way an SM: the more the better, by up to 5 %. A cluster of 2, 4 or 8 where x fits in a block:
//            slower by 3 to 130 %, as it meets after every tile. L2 prefetch of 256 bytes with the copies: slower by 4 to 13 %.
#pragma once

#include "../common/cuda_dtype.h"
#include "cluster.cuh"
#include "launch.cuh"
#include "mma.cuh"

namespace research_engine::cuda {

constexpr int kUnitDepth = 64, kWarpUnitBytes = 16 * kUnitDepth * 2;  // 2 KiB
constexpr int kRowPadding = 64;  // bytes after a row of x in shared memory: 2 rows by 4 lanes then read from all banks

struct SkinnyGemmParams {
  const char *x, *weight, *bias;  // bias may be null
  char* out;
  int64_t x_stride, weight_stride, out_stride;  // x and W in bytes, out in elements
  int tokens, depth;
  int tiles, tile_rows;  // gated: 8 rows of out's, else 16
  int columns;           // of out
  int high_rows;         // from a row of W to the one that shares its thread: 8, or I where gated
  int units;             // of the whole depth
  int cluster_size;
  bool gated, float_out;
};

// Units of the depth that the block of a rank takes.
__host__ __device__ inline int first_unit_of(int units, int cluster_size, int rank) {
  return static_cast<int>(static_cast<int64_t>(units) * rank / cluster_size);
}

constexpr int kRoundPairs = 256;  // of a round's tiles by tokens: sums of a row of W and of the one that shares its thread

// Shared memory, in this order: the rings, the warps' sums of a round, those of the cluster's blocks, x.
__host__ __device__ constexpr int ring_bytes(int warps, int stages) { return warps * stages * kWarpUnitBytes; }
__host__ __device__ constexpr int sums_bytes(int warps) { return warps * kRoundPairs * 8; }
__host__ __device__ constexpr int gathered_bytes(int cluster_size) { return cluster_size > 1 ? cluster_size * kRoundPairs * 8 : 0; }
__host__ __device__ constexpr int x_pitch_bytes(int units, int cluster_size) {
  return (units + cluster_size - 1) / cluster_size * (kUnitDepth * 2) + kRowPadding;
}
inline int64_t skinny_gemm_shared_bytes(int warps, int stages, int tokens, int units, int cluster_size) {
  return ring_bytes(warps, stages) + sums_bytes(warps) + gathered_bytes(cluster_size) +
         static_cast<int64_t>(tokens) * x_pitch_bytes(units, cluster_size);
}

// Copies this lane's bytes of one unit after the other, tile after tile.
template <int kWarps, int kStages>
struct WeightStream {
  const SkinnyGemmParams& p;
  const int steps, first_depth, tile_step;
  const uint32_t ring;  // this lane's place in the warp's
  const uint64_t policy;
  int tile, step = 0, stage = 0, depth = 0;
  bool low_valid = false, high_valid = false;
  const char *low = nullptr, *high = nullptr;

  __device__ WeightStream(const SkinnyGemmParams& params, uint32_t warp_ring, int first_tile, int tile_stride, int first_unit, int warp_steps)
      : p(params), steps(warp_steps), first_depth(first_unit * kUnitDepth + threadIdx.x % 4 * 8), tile_step(tile_stride),
        ring(warp_ring + threadIdx.x % 32 * 16), policy(read_once_policy()), tile(steps > 0 ? first_tile : params.tiles) {
    begin_tile();
  }

  __device__ void begin_tile() {
    const int row = tile * p.tile_rows + static_cast<int>(threadIdx.x) % 32 / 4;  // of out's columns
    low_valid = row < p.columns;
    high_valid = p.gated ? low_valid : row + 8 < p.columns;
    depth = first_depth;
    low = p.weight + (low_valid ? row : 0) * p.weight_stride + 2 * depth;
    high = p.weight + (high_valid ? row + p.high_rows : 0) * p.weight_stride + 2 * depth;
  }

  __device__ void next() {
    if (tile < p.tiles) {
      const uint32_t target = ring + stage * kWarpUnitBytes;
#pragma unroll
      for (int part = 0; part < 2; ++part) {  // zeros where there is no row, and past the depth
        const bool inside = depth + 32 * part < p.depth;
        copy_async_16(target + 1024 * part, inside ? low + 64 * part : p.weight, low_valid && inside, policy);
        copy_async_16(target + 1024 * part + 512, inside ? high + 64 * part : p.weight, high_valid && inside, policy);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      depth += kWarps * kUnitDepth;
      low += kWarps * kUnitDepth * 2;
      high += kWarps * kUnitDepth * 2;
      if (++step == steps) {
        step = 0;
        tile += tile_step;
        begin_tile();
      }
    }
    commit_copies();  // also without copies, so that the groups count the units
  }
};

template <typename T, int kTokenTiles, int kWarps, int kStages>
__global__ void __launch_bounds__(32 * kWarps, 1) skinny_gemm_kernel(const __grid_constant__ AfterPredecessor<SkinnyGemmParams> after) {
  const SkinnyGemmParams& p = after.constants();  // only the weight is read before the wait
  constexpr int kThreads = 32 * kWarps, kLoadsAtOnce = 8;
  constexpr int kRoundTiles = 4 / kTokenTiles;  // tiles whose sums a thread keeps before they are added up
  extern __shared__ __align__(16) char shared[];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, row = lane / 4, quad = lane % 4;
  const int rank = p.cluster_size > 1 ? cluster_rank() : 0;
  const int first_tile = blockIdx.x / p.cluster_size, tile_step = gridDim.x / p.cluster_size;
  const int unit_begin = first_unit_of(p.units, p.cluster_size, rank), unit_end = first_unit_of(p.units, p.cluster_size, rank + 1);
  const int steps = unit_begin + warp < unit_end ? (unit_end - unit_begin - warp - 1) / kWarps + 1 : 0;
  const uint32_t ring = shared_address(shared) + warp * (kStages * kWarpUnitBytes);
  float* sums = reinterpret_cast<float*>(shared + ring_bytes(kWarps, kStages));  // [warp][tile][token tile][4][lane]
  float2* gathered = reinterpret_cast<float2*>(shared + ring_bytes(kWarps, kStages) + sums_bytes(kWarps));  // [rank][tile][token tile][2][lane]
  const int x_offset = ring_bytes(kWarps, kStages) + sums_bytes(kWarps) + gathered_bytes(p.cluster_size);
  const int x_vectors = (unit_end - unit_begin) * (kUnitDepth / 8);
  const int x_pitch = x_pitch_bytes(p.units, p.cluster_size);

  WeightStream<kWarps, kStages> stream(p, ring, first_tile, tile_step, unit_begin + warp, steps);
#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) stream.next();
  if (p.cluster_size > 1) cluster_arrive();  // from here on the others may store into this block
  after.wait();

#pragma unroll 1
  for (int begin = thread; begin < p.tokens * x_vectors; begin += kThreads * kLoadsAtOnce) {
    uint4 loaded[kLoadsAtOnce];
    int target[kLoadsAtOnce];
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      const int index = begin + i * kThreads, token = index / x_vectors, vector = index - token * x_vectors;
      const int depth = unit_begin * kUnitDepth + 8 * vector;
      target[i] = token < p.tokens ? token * x_pitch + 16 * vector : -1;
      loaded[i] = make_uint4(0, 0, 0, 0);  // past the depth
      if (token < p.tokens && depth < p.depth) loaded[i] = __ldcg(reinterpret_cast<const uint4*>(p.x + token * p.x_stride + 2 * depth));
    }
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      if (target[i] >= 0) *reinterpret_cast<uint4*>(shared + x_offset + target[i]) = loaded[i];
    }
  }
  __syncthreads();

  // A pair of sums of this thread, those of a row of W and of the one that shares its thread: to out.
  const int token = thread / 64 % kTokenTiles * 8 + 2 * quad + thread / 32 % 2, own_tile = thread / (64 * kTokenTiles) * tile_step;
  const bool writes = thread < kRoundPairs && token < p.tokens;
  const auto finish = [&](int round, float2 pair) {
    const int column = (round + own_tile) * p.tile_rows + row;
    const auto bias = [&](int n) { return p.bias == nullptr ? 0.0f : to_float(reinterpret_cast<const T*>(p.bias)[n]); };
    const auto store = [&](int n, float value) {
      const int64_t index = token * p.out_stride + n;
      if (p.float_out) {
        reinterpret_cast<float*>(p.out)[index] = value;
      } else {
        reinterpret_cast<T*>(p.out)[index] = from_float<T>(value);
      }
    };
    if (column >= p.columns) return;
    if (p.gated) {
      const float gate = pair.x + bias(column), up = pair.y + bias(column + p.high_rows);
      store(column, gate / (1.0f + expf(-gate)) * up);
    } else {
      store(column, pair.x + bias(column));
      if (column + 8 < p.columns) store(column + 8, pair.y + bias(column + 8));
    }
  };
  // The sums of the cluster's blocks for a round, in the block that they were stored into.
  const auto finish_gathered = [&](int round) {
    if (!writes) return;
    float2 total = gathered[thread];
#pragma unroll 1
    for (int r = 1; r < p.cluster_size; ++r) {
      const float2 other = gathered[r * kRoundPairs + thread];
      total.x += other.x;
      total.y += other.y;
    }
    finish(round, total);
  };

  const uint32_t own_x = shared_address(shared) + x_offset + row * x_pitch + quad * 16 + warp * (kUnitDepth * 2);
  int stage = 0, turn = 0;  // turn: the rank that finishes the round
  // This warp's units of the next tile.
  const auto multiply_tile = [&](float (&totals)[kTokenTiles][4]) {
    uint32_t x_address = own_x;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_copies<kStages - 2>();
      stream.next();  // into the stage that was read in the last step
      const uint32_t unit = ring + stage * kWarpUnitBytes + lane * 16;
      stage = stage + 1 == kStages ? 0 : stage + 1;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint4 low = load_shared_16(unit + 1024 * part), high = load_shared_16(unit + 1024 * part + 512);
        const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          uint4 right = make_uint4(0, 0, 0, 0);
          if (8 * t + row < p.tokens) right = load_shared_16(x_address + 8 * t * x_pitch + 64 * part);
          multiply_add<T>(totals[t], first, right.x, right.y);
          multiply_add<T>(totals[t], second, right.z, right.w);
        }
      }
      x_address += kWarps * kUnitDepth * 2;
    }
  };

  int last_round = -1;
#pragma unroll 1
  for (int round = first_tile; round < p.tiles; round += kRoundTiles * tile_step) {
    float totals[kRoundTiles][kTokenTiles][4] = {};
#pragma unroll
    for (int i = 0; i < kRoundTiles; ++i) {
      if (round + i * tile_step < p.tiles) multiply_tile(totals[i]);
    }
    if (last_round >= 0) __syncthreads();  // all have read the sums of the last round
#pragma unroll
    for (int i = 0; i < kRoundTiles; ++i) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[warp * (2 * kRoundPairs) + (i * kTokenTiles + t) * 128 + e * 32 + lane] = totals[i][t][e];
      }
    }
    __syncthreads();
    float2 pair = make_float2(0.0f, 0.0f);
    if (writes) {
      const float* from = sums + thread / 64 * 128 + thread % 64;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        pair.x += from[w * (2 * kRoundPairs)];
        pair.y += from[w * (2 * kRoundPairs) + 64];
      }
    }
    if (p.cluster_size == 1) {
      if (writes) finish(round, pair);
    } else {
      cluster_wait();  // all sums of the last round are there
      if (last_round >= 0) {
        if (turn == rank) finish_gathered(last_round);
        turn = turn + 1 == p.cluster_size ? 0 : turn + 1;
      }
      if (writes) store_remote(shared_address(gathered + rank * kRoundPairs + thread), turn, pair);
      cluster_arrive();
    }
    last_round = round;
  }
  if (p.cluster_size > 1) {
    cluster_wait();
    if (last_round >= 0 && turn == rank) finish_gathered(last_round);
  }
}

}  // namespace research_engine::cuda
