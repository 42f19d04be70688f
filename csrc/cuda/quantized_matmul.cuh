// out = x W^T for few rows of x and a weight of 4 or 8 bits an element (W4A16, W8A16), on the tensor cores of sm_80 on.
//
// Computes   out[t, n] = sum over groups of scales[group, n] sum over k of x[t, k] (q[n, k] - zeros[group, n])
//            (+ offsets[group, n] sum over k of x[t, k]) (+ bias[n]); q an unsigned integer, or an e4m3 number without zeros.
// Layout     x, out [T, .], rows strided, bfloat16 or float16. The weight lies in units of 16 KiB: 128 columns n by 256 (4 bits) or
//            128 (8 bits) of depth k, in the order of
//                n = 128 tile + 32 warp_n + 16 m + 8 half + row
//                k = depth unit + depth / 2 warp_k + 32 part + 8 quad + 4 step + e
//                unit -> warp (4 warp_k + warp_n) -> m -> vector -> lane (4 row + quad) -> 16 bytes
//            so that a lane's 16 bytes are its elements of W in products mma.m16n8k16. The columns of a product, 2 quad,
//            2 quad + 1, 2 quad + 8 and 2 quad + 9 of this lane, stand for the depths 8 quad + 4 step + (0, 1, 2, 3), for x as for
//            W: a lane's share of x is 16 contiguous bytes, too. 4 bits: a vector is two parts, word 2 (part % 2) + step has the
//            element (e, half) in bits 16 (e % 2) + 8 (e / 2) + 4 half, so that (word >> 4 i) & 0x000f000f is register i; 8 bits: a
//            vector is a part, and word 2 step + half has the element in byte e. scales, offsets [K / g, N], zeros uint8; N padded
//            to 128, the depth to a whole unit.
// Algorithm  1. W is the left operand: 16 columns n a product; 8 rows of x are its right one.
//            2. The units of all tiles of columns lie in one line, tile after tile, which is dealt out in equal runs to two thread
//               blocks a multiprocessor. Eight warps: four by columns (32 each), two by depth.
//            3. A ring of 3 to 5 units in shared memory, as many as two blocks of a multiprocessor have room for, is filled by
//               asynchronous copies, scales and x with them. Launched with overlap, the weight of its first units is on its
//               way while kernels ahead still run; the x of these is loaded then, past the copies.
//            4. Integers become 16-bit floats exactly: 4 bits under the exponent of 128 (float16: 1024), less 128 + zero; 8 bits
//               through float32. Products are exact, sums float32, and the group's scale is applied to the sums.
//            5. A run that holds all of a tile writes it. Otherwise its float32 sums go to the workspace, and whichever block
//               comes last, by a counter, adds those of the tile in the order of their runs and writes: the same bits always,
//               and for a row whatever rows are around it.
// Roofline   memory: K N / 2 (4 bits) or K N bytes, and K N / g (scale bytes + 1); x is read once a tile of columns, through L2.
// Reached    one H200, bf16, 4 bits, groups of 128, in a graph of launches over weights that L2 does not hold, with overlap, us:
//            4096 x 14336 16.0 at one row, 18.6 at 16 (1.91 and 1.65 TB/s); 14336 x 4096 17.1 and 19.8. Without overlap 19.9 and 23.1,
//            vLLM's Marlin 21.2 and 22.2; 19.9 and 22.5, Marlin 16.8 and 18.1. Aimed at 75 % of 4.3 TB/s.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../common/cuda_dtype.h"
#include "../common/cuda_launch.h"
#include "launch.cuh"
#include "mma.cuh"

namespace research_engine::cuda {

constexpr int kTileColumns = 128, kUnitBytes = 16384, kUnitVectors = kUnitBytes / 16;
constexpr int kMatmulThreads = 256, kMostStages = 5, kBlocksPerMultiprocessor = 2;
constexpr int kMatmulCounters = 16384;  // int32, at the begin of every workspace: what follows may hold anything

constexpr int unit_depth(QuantizedKind kind) { return kind == QuantizedKind::int4 ? 256 : 128; }

struct MatmulParams {
  const char *x, *scales, *offsets, *bias;  // offsets, bias and zeros may be null
  char* out;
  const uint4* weight;
  const uint8_t* zeros;
  int* counters;    // [token tiles, column tiles], at most kMatmulCounters, zero between launches
  float* partials;  // [token tiles, runs, 2, a tile's sums]
  int64_t x_stride, out_stride;  // in elements
  int tokens, token_tiles, columns, depth, padded_columns;
  int group_size, groups, group_rows;  // group_rows: of a unit, at most
  int same_group;                      // parts, less one, that always are of one group: 0, 1 or 3
  bool aligned_groups;                 // every unit begins with a group, or is in one
  uint32_t group_inverse;              // 2^20 / (g / 32), rounded up: n * it >> 20 is n / (g / 32) for n < g / 32 + 8
  int units, runs;                     // units of a column tile; runs of a token tile
  int run_units, longer_runs;          // units of a run; so many of the first runs have one more
  int stages, stage_bytes;             // of the ring
  DType scale_dtype;
};

// Waits until a thread's oldest copies, a group a unit, have landed when so many of `stages` - 1 groups are to stay under way.
__device__ inline void wait_oldest_unit(int stages) {
  if (stages >= kMostStages) wait_copies<kMostStages - 2>();
  else if (stages == 4) wait_copies<2>();
  else wait_copies<1>();
}

__device__ inline float load_scale(const char* scales, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::f32: return reinterpret_cast<const float*>(scales)[index];
    case DType::f16: return __half2float(reinterpret_cast<const __half*>(scales)[index]);
    default: return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(scales)[index]);
  }
}

// Scales of a lane's four columns, [m][half].
template <typename Storage> __device__ inline void load_scales(const Storage* scales, int column, float (&values)[2][2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i / 2][i % 2] = to_float(scales[column + 8 * i]);
}
__device__ inline void load_scales(const char* scales, int column, DType dtype, float (&values)[2][2]) {
  if (dtype == DType::f32) load_scales(reinterpret_cast<const float*>(scales), column, values);
  else if (dtype == DType::f16) load_scales(reinterpret_cast<const __half*>(scales), column, values);
  else load_scales(reinterpret_cast<const __nv_bfloat16*>(scales), column, values);
}

__device__ inline uint32_t subtract_pairs(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 result = __hsub2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(result);
}
__device__ inline uint32_t subtract_pairs(uint32_t a, uint32_t b, __half) {
  const __half2 result = __hsub2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(result);
}
__device__ inline uint32_t multiply_pairs(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 result = __hmul2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(result);
}
__device__ inline uint32_t multiply_pairs(uint32_t a, uint32_t b, __half) {
  const __half2 result = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(result);
}

// What is subtracted from the elements of a column: for 4 bits a pair of 128 (1024) + zero, for 8 bits the float 2^23 + zero.
template <QuantizedKind kind, typename T>
__device__ inline uint32_t shifted_zero(int zero) {
  if constexpr (kind == QuantizedKind::int4) {
    return ((std::is_same_v<T, __half> ? 0x6400u : 0x4300u) + zero) * 0x10001u;
  } else {
    return __float_as_uint(8388608.0f + static_cast<float>(zero));
  }
}

// The four registers of W for product `step` of a part, out of its vector; zeros of the lane's two columns.
template <QuantizedKind kind, typename T>
__device__ inline void weight_registers(const uint32_t (&words)[4], int part, int step, const uint32_t (&zeros)[2], uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kind == QuantizedKind::int4) {
      constexpr uint32_t kMagic = std::is_same_v<T, __half> ? 0x64006400u : 0x43004300u;
      const uint32_t shifted = and_or(words[2 * (part % 2) + step] >> (4 * i), 0x000f000fu, kMagic);
      a[i] = subtract_pairs(shifted, zeros[i % 2], T{});
    } else {
      const uint32_t word = words[2 * step + i % 2];
      const uint32_t first = 2 * (i / 2);  // byte of the pair
      if constexpr (kind == QuantizedKind::int8) {
        const float zero = __uint_as_float(zeros[i % 2]);
        const float low = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650u + first)) - zero;
        const float high = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7651u + first)) - zero;
        a[i] = pack_pair<T>(low, high);
      } else {
        // A byte to the upper half of each 16 bits: its sign is in place; its exponent is 120 (float16: 8) too small.
        const uint32_t bytes = __byte_perm(word, 0, (first + 1) << 12 | 4 << 8 | first << 4 | 4);
        if constexpr (std::is_same_v<T, __half>) {
          a[i] = multiply_pairs((bytes & 0x80008000u) | ((bytes >> 1) & 0x3f803f80u), 0x5c005c00u, T{});
        } else {
          a[i] = multiply_pairs((bytes & 0x80008000u) | ((bytes >> 4) & 0x07f007f0u), 0x7b807b80u, T{});
        }
      }
    }
  }
}

// A run's first unit, and the run that a unit of the line belongs to.
__device__ inline int first_unit(const MatmulParams& p, int run) { return run * p.run_units + min(run, p.longer_runs); }
__device__ inline int run_of(const MatmulParams& p, int unit) {
  const int in_longer = p.longer_runs * (p.run_units + 1);
  return unit < in_longer ? unit / (p.run_units + 1) : p.longer_runs + (unit - in_longer) / p.run_units;
}

// Copies units, in the order of the line, and the parts of x and of the scales that go with each: into a stage, in the order
// weight, x, scales, offsets, zeros. Every thread copies the four vectors of the weight that it will read; scales, offsets and
// zeros are copied by different warps.
template <QuantizedKind kind, int kTokens>
struct UnitCopies {
  static constexpr int kDepth = unit_depth(kind), kRowVectors = kDepth / 8, kRowBytes = 2 * kDepth + 64;
  static constexpr int kRowsAtOnce = kMatmulThreads / kRowVectors, kLoads = kRowsAtOnce < kTokens ? kTokens / kRowsAtOnce : 1;

  const MatmulParams& p;
  const uint4* weight;  // the next unit's, of this thread
  const char* x;        // of this thread's first row, at its place in the next unit
  int rows;             // of x, from that row on
  int k;                // of that place
  uint32_t own_vector, own_x;  // offsets in a stage
  int group, into_group;       // of the next unit's begin; how far into the group it is, in depths of 32
  int tile, unit, left, stage = 0;

  __device__ UnitCopies(const MatmulParams& params, int begin, int end, int first_token)
      : p(params), tile(begin / params.units), unit(begin % params.units), left(end - begin) {
    const int thread = threadIdx.x, row = thread / kRowVectors;
    weight = p.weight + static_cast<int64_t>(begin) * kUnitVectors + thread / 32 * 128 + thread % 32;
    own_vector = 16 * (thread / 32 * 128 + thread % 32);
    own_x = kUnitBytes + row * kRowBytes + thread % kRowVectors * 16;
    rows = row < kTokens ? p.tokens - first_token - row : 0;
    k = unit * kDepth + thread % kRowVectors * 8;
    x = p.x + 2 * ((first_token + row) * p.x_stride + k);
    group = unit * (kDepth / 32) / (p.group_size / 32);
    into_group = unit * (kDepth / 32) % (p.group_size / 32);
  }

  // The next unit with its x.
  __device__ void next(uint32_t ring) {
    if (left > 0) {
      const uint32_t target = ring + stage * p.stage_bytes;
      copy_constants(target);
      for_each_x([&](int, int offset, const char* source, bool present) { copy_async_16(target + offset, source, present); });
      advance();
    }
    commit_copies();  // also without copies, so that the groups count the units
  }

  // The first units of the ring without their x, which may not be there yet.
  __device__ void begin_constants(uint32_t ring) {
    UnitCopies ahead = *this;
#pragma unroll 1
    for (int s = 0; s < p.stages - 1; ++s) {
      if (ahead.left > 0) {
        ahead.copy_constants(ring + ahead.stage * p.stage_bytes);
        ahead.advance();
      }
      commit_copies();
    }
  }

  // The x of the first units, in place when this returns; a barrier makes it the block's. All of it is under way together.
  __device__ void load_first_x(char* shared) {
    uint4 loaded[kMostStages - 1][kLoads];
    UnitCopies ahead = *this;
#pragma unroll
    for (int s = 0; s < kMostStages - 1; ++s) {
      if (s >= p.stages - 1 || ahead.left <= 0) break;
      ahead.for_each_x([&](int i, int, const char* source, bool present) {
        loaded[s][i] = present ? __ldcg(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
      });
      ahead.advance();
    }
#pragma unroll
    for (int s = 0; s < kMostStages - 1; ++s) {
      if (s >= p.stages - 1 || left <= 0) break;
      char* target = shared + stage * p.stage_bytes;
      for_each_x([&](int i, int offset, const char*, bool) { *reinterpret_cast<uint4*>(target + offset) = loaded[s][i]; });
      advance();
    }
  }

 private:
  __device__ void advance() {
    --left;
    stage = stage + 1 == p.stages ? 0 : stage + 1;
    weight += kUnitVectors;
    x += 2 * kDepth;
    k += kDepth;
    into_group += kDepth / 32;
    const int groups = into_group * p.group_inverse >> 20;
    group += groups;
    into_group -= groups * (p.group_size / 32);
    if (++unit == p.units) {
      x -= 2 * kDepth * p.units;
      k -= kDepth * p.units;
      unit = group = into_group = 0;
      ++tile;
    }
  }

  // Calls take(number, offset in a stage, address, whether there is anything) for this thread's vectors of x: zeros belong
  // where there is no row, and past the depth.
  template <typename Take> __device__ void for_each_x(Take take) {
    const int present = k < p.depth ? rows : 0;
#pragma unroll
    for (int r = 0; r < kTokens; r += kRowsAtOnce) {
      if (kRowsAtOnce > kTokens && threadIdx.x >= kTokens * kRowVectors) break;
      take(r / kRowsAtOnce, own_x + r * kRowBytes, r < present ? x + 2 * r * p.x_stride : p.x, r < present);
    }
  }

  __device__ void copy_constants(uint32_t target) {
#pragma unroll
    for (int i = 0; i < 4; ++i) copy_async_16(target + own_vector + 512 * i, weight + 32 * i, true);
    target += kUnitBytes + kTokens * kRowBytes;
    const int scale_shift = p.scale_dtype == DType::f32 ? 2 : 1;
    copy_rows(target, p.scales, scale_shift, 0);
    target += p.group_rows << (7 + scale_shift);
    if (p.offsets != nullptr) {
      copy_rows(target, p.offsets, scale_shift, 2);
      target += p.group_rows << (7 + scale_shift);
    }
    if (p.zeros != nullptr) copy_rows(target, reinterpret_cast<const char*>(p.zeros), 0, 5);
  }

  // The rows of the unit's groups, elements of 1 << shift bytes, by the threads from a warp on.
  __device__ void copy_rows(uint32_t target, const char* rows, int shift, int first_warp) {
    const int vectors_shift = 3 + shift;  // of a row
    const int begin = (threadIdx.x - 32 * first_warp) & (kMatmulThreads - 1);
#pragma unroll 1
    for (int i = begin; i < p.group_rows << vectors_shift; i += kMatmulThreads) {
      const int row = min(group + (i >> vectors_shift), p.groups - 1);
      const int64_t element = static_cast<int64_t>(row) * p.padded_columns + tile * kTileColumns;
      copy_async_16(target + 16 * i, rows + (element << shift) + 16 * (i & ((1 << vectors_shift) - 1)), true);
    }
  }
};

// kOffsets: whether the weight has offsets; 4 bits alone may.
template <QuantizedKind kind, typename T, int kTokenTiles, bool kOffsets>
__global__ void __launch_bounds__(kMatmulThreads, kBlocksPerMultiprocessor)
    quantized_matmul_kernel(const __grid_constant__ AfterPredecessor<MatmulParams> after) {
  const MatmulParams& p = after.constants();  // only the weight and its scales are read before the wait
  constexpr int kDepth = unit_depth(kind), kParts = kDepth / 64, kVectorParts = kParts / 2, kTokens = 8 * kTokenTiles;
  constexpr int kRowBytes = UnitCopies<kind, kTokens>::kRowBytes;
  constexpr int kSums = 8 * kTokenTiles;  // a thread's: [m][token tile][4]
  extern __shared__ __align__(16) char shared[];
  __shared__ bool comes_last;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, warp_n = warp % 4, warp_k = warp / 4;
  const int row = lane / 4, quad = lane % 4;
  // tiles of tokens of a run side by side: they read the same weight at about the same time
  const int run = blockIdx.x / p.token_tiles, token_tile = blockIdx.x % p.token_tiles, first_token = token_tile * kTokens;
  const int begin = first_unit(p, run), end = first_unit(p, run + 1);
  const uint32_t ring = shared_address(shared);
  float* exchange = reinterpret_cast<float*>(shared + p.stages * p.stage_bytes);
  const int scale_bytes = p.scale_dtype == DType::f32 ? 4 : 2;
  const int own_column = warp_n * 32 + row;  // in the tile, of m = 0 and the lower half

  UnitCopies<kind, kTokens> copies(p, begin, end, first_token);
  copies.begin_constants(ring);
  after.wait();
  copies.load_first_x(shared);

  int tile = begin / p.units, at = begin % p.units, stage = 0;
  const int first_tile = tile;
  bool whole = at == 0;  // this run began the tile
  float totals[2][kTokenTiles][4] = {}, sums[2][kTokenTiles][4] = {}, x_sums[kTokenTiles][4] = {};  // x_sums: with offsets
#pragma unroll 1
  for (int unit = begin; unit < end; ++unit) {
    wait_oldest_unit(p.stages);
    __syncthreads();  // the unit is there for all, and the stage of the one before is free
    copies.next(ring);

    const int stage_offset = stage * p.stage_bytes;
    stage = stage + 1 == p.stages ? 0 : stage + 1;
    const char* x_rows = shared + stage_offset + kUnitBytes;
    const char* scales = x_rows + kTokens * kRowBytes;
    const char* offsets = scales + p.group_rows * kTileColumns * scale_bytes;
    const uint8_t* zeros = reinterpret_cast<const uint8_t*>(offsets + (kOffsets ? p.group_rows * kTileColumns * scale_bytes : 0));
    const int into_group = p.aligned_groups ? 0 : at * kDepth % p.group_size;
    int column = own_column;      // in the stage's scales and zeros
    uint32_t words[2][4], zero[2][2] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int k = warp_k * (kDepth / 2) + 32 * part;  // in the unit
      if (part % kVectorParts == 0) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int vector = warp * 128 + m * 64 + part / kVectorParts * 32 + lane;
          const uint4 four = *reinterpret_cast<const uint4*>(shared + stage_offset + 16 * vector);
          words[m][0] = four.x, words[m][1] = four.y, words[m][2] = four.z, words[m][3] = four.w;
        }
      }
      if ((part & p.same_group) == 0) {
        if (p.group_rows > 1) column = own_column + kTileColumns * ((into_group + k) / 32 * p.group_inverse >> 20);
        if constexpr (kind != QuantizedKind::float8) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            constexpr int kDefault = kind == QuantizedKind::int4 ? 8 : 128;
            zero[i / 2][i % 2] = shifted_zero<kind, T>(p.zeros == nullptr ? kDefault : zeros[column + 8 * i]);
          }
        }
      }
      uint4 x[kTokenTiles];
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
        x[t] = *reinterpret_cast<const uint4*>(x_rows + (8 * t + row) * kRowBytes + 2 * (k + 8 * quad));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t a[4];
          weight_registers<kind, T>(words[m], part, step, zero[m], a);
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t)
            multiply_add<T>(sums[m][t], a, step == 0 ? x[t].x : x[t].z, step == 0 ? x[t].y : x[t].w);
        }
      }
      if constexpr (kOffsets) {  // a row of ones gives the sums of x
        constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
        const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          multiply_add<T>(x_sums[t], ones, x[t].x, x[t].y);
          multiply_add<T>(x_sums[t], ones, x[t].z, x[t].w);
        }
      }
      if ((part + 1) & p.same_group && part + 1 < kParts) continue;  // the next part is of the same group
      float factors[2][2];
      load_scales(scales, column, p.scale_dtype, factors);
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const int m = i / (4 * kTokenTiles), t = i / 4 % kTokenTiles;
        totals[m][t][i % 4] += factors[m][i % 4 / 2] * sums[m][t][i % 4];
        sums[m][t][i % 4] = 0;
      }
      if constexpr (kOffsets) {
        load_scales(offsets, column, p.scale_dtype, factors);
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const int m = i / (4 * kTokenTiles), t = i / 4 % kTokenTiles;
          totals[m][t][i % 4] += factors[m][i % 4 / 2] * x_sums[t][i % 4];
        }
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) x_sums[i / 4][i % 4] = 0;
      }
    }
    ++at;
    if (at < p.units && unit + 1 < end) continue;

    // The end of the tile, or of the run. The two halves of the depth come together in the first four warps.
    float(&flat)[kSums] = reinterpret_cast<float(&)[kSums]>(totals);
    if (warp_k == 1)
#pragma unroll
      for (int i = 0; i < kSums; ++i) exchange[i * 128 + thread - 128] = flat[i];
    __syncthreads();
    if (warp_k == 0)
#pragma unroll
      for (int i = 0; i < kSums; ++i) flat[i] += exchange[i * 128 + thread];

    whole = whole && at == p.units;
    if (!whole) {
      constexpr int64_t kSlot = 128 * kSums;
      float* slots = p.partials + static_cast<int64_t>(token_tile) * p.runs * 2 * kSlot + thread;
      if (warp_k == 0)
#pragma unroll
        for (int i = 0; i < kSums; ++i) slots[(2 * run + (tile != first_tile)) * kSlot + i * 128] = flat[i];
      __threadfence();
      __syncthreads();
      const int first_run = run_of(p, tile * p.units), last_run = run_of(p, (tile + 1) * p.units - 1);
      if (thread == 0) {
        int* counter = p.counters + token_tile * (p.padded_columns / kTileColumns) + tile;
        comes_last = atomicAdd(counter, 1) == last_run - first_run;
        if (comes_last) *counter = 0;
      }
      __syncthreads();
      whole = comes_last;
      if (whole && warp_k == 0) {
        __threadfence();
#pragma unroll
        for (int i = 0; i < kSums; ++i) flat[i] = 0;
        constexpr int kAtOnce = 4;  // runs whose sums are under way together
        for (int r = first_run; r <= last_run; r += kAtOnce) {
          float theirs[kAtOnce][kSums];
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            const int of = min(r + j, last_run);
            const bool begun_by = first_unit(p, of) >= tile * p.units;  // then it is the run's first tile
            const float* slot = slots + (2 * of + !begun_by) * kSlot;
#pragma unroll
            for (int i = 0; i < kSums; ++i) theirs[j][i] = __ldcg(slot + i * 128);
          }
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            if (r + j > last_run) break;
#pragma unroll
            for (int i = 0; i < kSums; ++i) flat[i] += theirs[j][i];
          }
        }
      }
    }
    if (whole && warp_k == 0) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = first_token + 8 * t + 2 * quad + i % 2;
            const int column = tile * kTileColumns + own_column + 16 * m + 8 * (i / 2);
            if (token >= p.tokens || column >= p.columns) continue;
            const float bias = p.bias == nullptr ? 0.0f : to_float(reinterpret_cast<const T*>(p.bias)[column]);
            reinterpret_cast<T*>(p.out)[token * p.out_stride + column] = from_float<T>(totals[m][t][i] + bias);
          }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) flat[i] = 0;
    at = 0;
    ++tile;
    whole = true;
  }
}

// Stages of the ring: as many as leave room for two blocks on a multiprocessor, three where that takes more.
inline int ring_stages(int64_t stage_bytes, int64_t other_bytes, const char* op) {
  int device = 0, shared = 0, reserved = 0;
  check(cudaGetDevice(&device), op);
  check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), op);
  check(cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device), op);
  const int64_t room = shared / kBlocksPerMultiprocessor - reserved - 64 - other_bytes;  // 64: the kernel's static memory
  return static_cast<int>(std::clamp<int64_t>(room / stage_bytes, 3, kMostStages));
}

// Launches the kernel for weights of one kind; instantiated in quantized_matmul_{int4,int8,float8}.cu.
template <QuantizedKind kind>
void launch_quantized_matmul(MatmulParams p, DType dtype, bool overlap, Stream stream) {
  constexpr const char* kOp = "quantized_matmul";
  const auto start = [&](auto tag, auto token_tiles, auto with_offsets) {
    using T = typename decltype(tag)::type;
    constexpr int kTokenTiles = decltype(token_tiles)::value;
    constexpr bool kOffsets = decltype(with_offsets)::value && kind == QuantizedKind::int4;
    constexpr int kExchangeBytes = 128 * 8 * kTokenTiles * 4;
    const int scale_bytes = p.scale_dtype == DType::f32 ? 4 : 2;
    const int columns = kTileColumns * (scale_bytes * (p.offsets == nullptr ? 1 : 2) + (p.zeros == nullptr ? 0 : 1));
    p.stage_bytes = kUnitBytes + 8 * kTokenTiles * (2 * unit_depth(kind) + 64) + p.group_rows * columns;
    p.stages = ring_stages(p.stage_bytes, kExchangeBytes, kOp);
    p.token_tiles = static_cast<int>(ceil_div(p.tokens, 8 * kTokenTiles));
    const int64_t shared_bytes = p.stages * p.stage_bytes + kExchangeBytes;
    const LaunchShape shape{static_cast<int64_t>(p.token_tiles) * p.runs, kMatmulThreads, shared_bytes, 1, overlap};
    launch_after(kOp, quantized_matmul_kernel<kind, T, kTokenTiles, kOffsets>, shape, stream, p);
  };
  const auto with_tiles = [&](auto tag, auto token_tiles) {
    if (p.offsets == nullptr) start(tag, token_tiles, std::false_type{});
    else start(tag, token_tiles, std::true_type{});
  };
  const auto with_type = [&](auto tag) {
    if (p.tokens <= 8) with_tiles(tag, std::integral_constant<int, 1>{});
    else with_tiles(tag, std::integral_constant<int, 2>{});
  };
  if (dtype == DType::f16) with_type(TypeTag<__half>{});
  else with_type(TypeTag<__nv_bfloat16>{});
}

extern template void launch_quantized_matmul<QuantizedKind::int4>(MatmulParams, DType, bool, Stream);
extern template void launch_quantized_matmul<QuantizedKind::int8>(MatmulParams, DType, bool, Stream);
extern template void launch_quantized_matmul<QuantizedKind::float8>(MatmulParams, DType, bool, Stream);

}  // namespace research_engine::cuda
