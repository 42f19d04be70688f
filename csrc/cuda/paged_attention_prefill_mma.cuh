// Paged attention, the prefill path on `mma.sync` (sm_80 and later): float16 and bfloat16, caches of the same or of e4m3 or int8;
// many query tokens a row.
//
// Computes   tiles of (token, query head) rows of one KV head, row = token * G + g, so that its G heads share K and V; a tile walks
//            its keys from the first to the last and never writes a score (FlashAttention-2, Dao, 2023).
// Block      four warps. Each has 32 rows of a tile of 128 (D > 128: 16 of 64) and all 64 (32) keys of a step: what a warp reads
//            of K and V from shared memory serves two products, without which shared memory would be the limit.
//
//              copies        | V[n]      | K[n+1]                | V[n+1]    | K[n+2]
//              tensor cores  | S = Q K^T |         | O += P V    | S = Q K^T |         | O += P V
//              softmax       |           | S -> P  |             |           | S -> P  |
//                            ^ barrier   ^ barrier
//
//            One buffer for K and one for V: each is filled while the other is used. Two blocks of a multiprocessor fill each
//            other's gaps.
// Layout     In shared memory: queries [rows, kD], K and V [keys, kD], 16-bit; row r's chunk c of 16 bytes lies at c ^ (r % 8)
//            within its eight, so that eight rows of a column lie in eight banks' groups for `ldmatrix`. A thread holds S and
//            O as the product leaves them (mma.cuh), and S, packed, is the left operand of P V.
//            A warp looks up the cache blocks of its share of the keys, a lane a key, one step ahead, and hands the addresses
//            round by shuffles: any block size, one division a key.
// Quantised  Rows of bytes are copied to a buffer of their own a step ahead; every thread widens the 16 bytes that it copied
//            itself to float16, into the same K and V tiles. The products see no difference; the key's scale is a factor of the
//            scores, the value's of the result. Queries become float16 as well, and end at 65,504.
// Masks      Only steps that cross a row's first or last key are masked. Rows of K and V that nobody sees are zeros in shared
//            memory: what unused slots hold, NaN included, has no effect. A warp sits out the steps that its rows see nothing of.
// Determinism  Steps start at multiples of 64 (32) keys from key 0, in order; a step of which a row sees nothing multiplies by one
//            and adds zero: a row's bits depend on its own keys alone, with a sliding window too.
// Head sizes  64, 96, 128, 192 and 256 are built; others, multiples of 8, are padded with zeros to the next.
// Versions   1 as above.
// Roofline   4 x rows x keys x D operations on the tensor cores (312 TFLOP/s on an A100; on an H200, where `mma.sync` reaches some
//            60 % of what `wgmma` does, this kernel serves what the other cannot: quantised caches).
// Reached    one H200, bf16, 8,192 tokens: 312 TFLOP/s; 268 over float8 and int8.
#pragma once

#include <type_traits>

#include "mma.cuh"
#include "paged_attention.cuh"
#include "prefill_plan.cuh"
#include "quantized.cuh"

namespace research_engine::cuda::prefill_mma {

using prefill::PlanParams;
using prefill::Tile;

constexpr const char* kOp = "paged_attention (path prefill_mma)";
constexpr int kWarps = 4, kThreads = kWarps * 32;

// Sizes for caches of C and heads of up to kD elements.
template <typename C, int kD> struct MmaTiles {
  static constexpr int kRowTiles = kD <= 128 ? 2 : 1;  // of 16 rows, of a warp
  static constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows;
  static constexpr int kKeys = kD <= 128 ? 64 : 32, kWarpKeys = kKeys / kWarps;
  static constexpr int kChunks = kD / 8;  // of 16 bytes, in a row of 16-bit floats
  static constexpr bool kSwizzle = kChunks % 8 == 0;
  static constexpr int kRowBytes = (kSwizzle ? kChunks : kChunks | 1) * 16;  // an odd stride spreads rows over the banks as well
  static constexpr int kQueryBytes = kRows * kRowBytes, kTileBytes = kKeys * kRowBytes;
  static constexpr int kInChunk = 16 / static_cast<int>(sizeof(C));
  static constexpr int kCacheChunks = kD / kInChunk;  // in a row of the cache
  // A warp copies kAtOnce rows of its share of a tile at once, by kCopiers lanes, kCopies times.
  static constexpr int kAtOnce = kCacheChunks > 16 ? 1 : kCacheChunks > 8 ? 2 : kCacheChunks > 4 ? 4 : 8;
  static constexpr int kCopiers = kAtOnce * kCacheChunks, kCopies = kWarpKeys / kAtOnce;
  static constexpr int kRawBytes = sizeof(C) == 1 ? kKeys * kD : 0;
  static constexpr int kSharedBytes = kQueryBytes + 2 * (kTileBytes + kRawBytes);
  static constexpr int kBlocksPerSm = 2;  // by registers

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + (kSwizzle ? chunk ^ (row & 7) : chunk) * 16);
  }
  // `rows`, a multiple of kAtOnce, further down from an `address` in one of the first kAtOnce rows of a multiple of eight.
  static __device__ __forceinline__ uint32_t below(uint32_t address, int rows) {
    return (kSwizzle ? address ^ static_cast<uint32_t>(rows % 8 * 16) : address) + static_cast<uint32_t>(rows * kRowBytes);
  }
  // `chunks`, an even number, further in the row of `address`, which is at chunk 0 or 1 of it.
  static __device__ __forceinline__ uint32_t advance(uint32_t address, int chunks) {
    if constexpr (!kSwizzle) return address + static_cast<uint32_t>(chunks * 16);
    return (address ^ static_cast<uint32_t>(chunks % 8 * 16)) + static_cast<uint32_t>(chunks / 8 * 128);
  }
};

// What a block looks up once a step or less: it lies in shared memory, since the accumulators take the registers.
struct Control {
  Tile tile;
  int begin, end;  // keys that any row of the tile sees
  struct {
    int begin, end;              // keys that any row of the warp sees
    int clean_begin, clean_end;  // keys that all of them see
  } warps[kWarps];
};

// The same lane, but the compiler does not know: what is computed from it stays where it is, and takes no registers for the whole
// loop.
__device__ __forceinline__ int opaque_lane(int lane) {
  asm volatile("" : "+r"(lane));
  return lane & 31;
}

// One tile of query rows. Products are of 16-bit floats M: of the cache's own type, or of float16, to which quantised elements are
// widened.
template <typename C, int kD> class RowTile {
  using Shape = MmaTiles<C, kD>;
  static constexpr bool kQuantized = sizeof(C) == 1;
  using M = std::conditional_t<kQuantized, __half, C>;
  static constexpr int kRowTiles = Shape::kRowTiles, kKeys = Shape::kKeys;

 public:
  __device__ __forceinline__ RowTile(const PlanParams& p, Control& control, char* shared)
      : p_(p), a_(p.attention), control_(control), tile_(control.tile), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {
    g_ = lane_ / 4;
    q_ = lane_ % 4;
    queries_ = shared_address(shared) + warp_ * Shape::kWarpRows * Shape::kRowBytes;
    keys_ = shared_address(shared) + Shape::kQueryBytes;
    values_ = keys_ + Shape::kTileBytes;
    raw_ = values_ + Shape::kTileBytes + (warp_ * Shape::kWarpKeys * Shape::kCacheChunks + lane_) * 16;
    factor_ = scored() ? 1.0f : scale() * kLog2E;
  }

  __device__ __forceinline__ void run() {
    begin_rows();
    load_queries();
    commit_copies();
    if (tile_.steps > 0) {
      const int start = tile_.start;
      fetch_block(start);
      copy<false>(start);
      commit_copies();
      if constexpr (kQuantized) {
        copy<true>(start);
        commit_copies();
        fetch_block(start + kKeys);
      }
      for (int key = start; key < control_.end; key += kKeys) step(key);
    }
    wait_copies<0>();  // without keys nothing has waited for the queries yet, in whose place the output is laid
    __syncthreads();
    end_rows();
  }

 private:
  __device__ __forceinline__ int position_of(int row) const { return tile_.position + p_.group.divide(row); }
  __device__ __forceinline__ int first_row() const { return tile_.first_row + warp_ * Shape::kWarpRows; }
  __device__ __forceinline__ float scale() const {
    return a_.scale * (kQuantized ? head_scale(a_.key_scale, tile_.kv_head) : 1.0f);
  }
  // Whether scores are finished before their maximum; otherwise the scale is folded into the exponent.
  __device__ __forceinline__ bool scored() const { return a_.softcap > 0.0f || a_.alibi_slopes != nullptr || !(a_.scale > 0.0f); }

  // One step: the keys [key, key + kKeys). Their K is under way, and with quantised caches their V.
  __device__ __forceinline__ void step(int key) {
    const bool more = key + kKeys < control_.end;
    const bool active = key < control_.warps[warp_].end && key + kKeys > control_.warps[warp_].begin;
    if constexpr (kQuantized) {
      wait_copies<1>();
      widen_tile(keys_, raw_);
      if (more) copy<false>(key + kKeys);
      commit_copies();
      __syncthreads();  // K is there, and V of the step before is used up
      if (active) multiply_keys();
      wait_copies<1>();
      widen_tile(values_, raw_ + Shape::kRawBytes);
      if (more) copy<true>(key + kKeys);
      commit_copies();
      fetch_block(key + 2 * kKeys);
      __syncthreads();  // V is there, and K is used up
    } else {
      wait_copies<0>();
      __syncthreads();
      copy<true>(key);
      commit_copies();
      fetch_block(key + kKeys);
      if (active) multiply_keys();
      wait_copies<0>();
      __syncthreads();
      if (more) copy<false>(key + kKeys);
      commit_copies();
    }
    if (active) {
      softmax(key);
      multiply_values();
    }
  }

  // This lane's row of the warp: where its query or output begins, in elements; -1 where there is none.
  __device__ __forceinline__ int64_t row_offset(int64_t token_stride, int64_t head_stride) const {
    const int row = first_row() + lane_ % Shape::kWarpRows;
    if (row >= tile_.total_rows) return -1;
    const int token = p_.group.divide(row), head = tile_.kv_head * a_.group_size + row - token * a_.group_size;
    return (tile_.first_query + token) * token_stride + head * head_stride;
  }

  // The warp's own rows of queries, which nobody else reads.
  __device__ __forceinline__ void load_queries() {
    const int64_t offset = row_offset(a_.query_token_stride, a_.query_head_stride);
#pragma unroll 4
    for (int i = 0; i < Shape::kWarpRows * Shape::kChunks / 32; ++i) {
      const int item = i * 32 + lane_, row = item / Shape::kChunks, chunk = item % Shape::kChunks;
      const int64_t from = __shfl_sync(0xffffffffu, offset, row);
      const bool valid = from >= 0 && chunk * 8 < a_.head_size;
      const uint32_t target = queries_ + Shape::offset(row, chunk);
      if constexpr (kQuantized) {
        uint4 value = make_uint4(0, 0, 0, 0);
        if (valid) {
          const uint2 low = load_query_4(a_, from + chunk * 8), high = load_query_4(a_, from + chunk * 8 + 4);
          value = make_uint4(low.x, low.y, high.x, high.y);
        }
        store_shared_16(target, value);
      } else {
        copy_async_16(target, static_cast<const C*>(a_.query) + (valid ? from + chunk * 8 : 0), valid);
      }
    }
  }

  __device__ __forceinline__ void begin_rows() {
    if (threadIdx.x == 0) {
      const int last = min(tile_.first_row + Shape::kRows, tile_.total_rows) - 1;
      control_.begin = first_key(a_, position_of(tile_.first_row));
      control_.end = end_key(a_, position_of(last), tile_.seq_len);
    }
    if (lane_ == 0) {
      const bool any = first_row() < tile_.total_rows;
      const int last = min(first_row() + Shape::kWarpRows, tile_.total_rows) - 1;
      control_.warps[warp_] = {any ? first_key(a_, position_of(first_row())) : 0,
                               any ? end_key(a_, position_of(last), tile_.seq_len) : 0,
                               first_key(a_, position_of(first_row() + Shape::kWarpRows - 1)),
                               end_key(a_, position_of(first_row()), tile_.seq_len)};
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top_[m][half] = -INFINITY;
        sum_[m][half] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out_[m][n][e] = 0.0f;
      }
    }
  }

  // The cache block of this lane's key of a step, asked for before it is needed; -1: nobody sees the key.
  __device__ __forceinline__ void fetch_block(int start) {
    const int key = start + warp_ * Shape::kWarpKeys + lane_ % Shape::kWarpKeys;
    const bool seen = key >= control_.begin && key < control_.end;
    block_ = seen ? a_.block_tables[tile_.request * a_.table_stride + a_.block_size.divide(key)] : -1;
  }

  // Starts the copies of the warp's rows of a tile of keys or values, whose blocks were fetched. A lane has the address of one row,
  // and copies one chunk of every kAtOnce-th.
  template <bool kValues> __device__ __forceinline__ void copy(int start) {
    const int lane = opaque_lane(lane_), key = start + warp_ * Shape::kWarpKeys + lane % Shape::kWarpKeys;
    const int slot = key - a_.block_size.divide(key) * static_cast<int>(a_.block_size.value);
    const int64_t offset = tile_.kv_head * (kValues ? a_.value_head_stride : a_.key_head_stride) +
                           block_ * (kValues ? a_.value_block_stride : a_.key_block_stride) +
                           static_cast<int64_t>(slot) * a_.head_size;
    const C* own = static_cast<const C*>(kValues ? a_.value_cache : a_.key_cache) + (block_ < 0 ? 0 : offset);
    const uint32_t seen = __ballot_sync(0xffffffffu, block_ >= 0);
    const int row = lane / Shape::kCacheChunks, chunk = lane % Shape::kCacheChunks;
    const uint32_t wanted = chunk * Shape::kInChunk < a_.head_size ? seen >> row : 0;
    const uint32_t tile = kValues ? values_ : keys_, raw = raw_ + (kValues ? Shape::kRawBytes : 0);
    const uint32_t first = kQuantized ? raw : tile + Shape::offset(warp_ * Shape::kWarpKeys + row, chunk);
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i) {
      const int rows = i * Shape::kAtOnce;
      const uint64_t from = __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(own), rows + row);
      const uint32_t target = kQuantized ? first + i * Shape::kCopiers * 16 : Shape::below(first, rows);
      if (lane < Shape::kCopiers) {
        copy_async_16(target, reinterpret_cast<const C*>(from) + chunk * Shape::kInChunk, (wanted >> rows & 1) != 0);
      }
    }
  }

  // What this thread copied of a quantised tile, as float16, to where the products read it.
  __device__ __forceinline__ void widen_tile(uint32_t tile, uint32_t raw) {
    const int lane = opaque_lane(lane_);
    if (lane >= Shape::kCopiers) return;
    const uint32_t first =
        tile + Shape::offset(warp_ * Shape::kWarpKeys + lane / Shape::kCacheChunks, lane % Shape::kCacheChunks * 2);
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i) {
      const uint4 bytes = load_shared_16(raw + i * Shape::kCopiers * 16);
      const uint2 a = widen<C>(bytes.x), b = widen<C>(bytes.y), c = widen<C>(bytes.z), d = widen<C>(bytes.w);
      const uint32_t target = Shape::below(first, i * Shape::kAtOnce);
      store_shared_16(target, make_uint4(a.x, a.y, b.x, b.y));
      store_shared_16(Shape::kSwizzle ? target ^ 16 : target + 16, make_uint4(c.x, c.y, d.x, d.y));
    }
  }

  // S = Q K^T.
  __device__ __forceinline__ void multiply_keys() {
    const int lane = opaque_lane(lane_);
    const uint32_t query = queries_ + Shape::offset(lane % 16, lane / 16);
    const uint32_t key = keys_ + Shape::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores_[m][n][e] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      uint32_t rows[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) load_matrices(rows[m], Shape::advance(query, 2 * k) + m * 16 * Shape::kRowBytes);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t columns[4];
        load_matrices(columns, Shape::advance(key, 2 * k) + n * 16 * Shape::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_add<M>(scores_[m][2 * n], rows[m], columns[0], columns[1]);
          multiply_add<M>(scores_[m][2 * n + 1], rows[m], columns[2], columns[3]);
        }
      }
    }
  }

  // Calls function(score, m, half, column): of row m * 16 + half * 8 + g and column 2 q + `column`.
  template <typename Function> __device__ __forceinline__ void for_scores(Function&& function) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) function(scores_[m][n][e], m, e / 2, n * 8 + e % 2);
      }
    }
  }

  // Softcap, ALiBi and scales that are not positive: products to scores in base 2.
  __device__ __forceinline__ void finish_scores(int first) {
    if (a_.softcap > 0.0f) {  // c tanh(x / c) = c - 2 c / (1 + e^(2 x / c))
      const float inner = scale() * (2.0f * kLog2E) / a_.softcap, outer = a_.softcap * kLog2E;
      for_scores([&](float& score, int, int, int) { score = outer - __fdividef(2.0f * outer, 1.0f + exp2_fast(score * inner)); });
    } else {
      const float factor = scale() * kLog2E;
      for_scores([&](float& score, int, int, int) { score *= factor; });
    }
    if (a_.alibi_slopes == nullptr) return;
    float slope[kRowTiles][2], nearest[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(first_row() + m * 16 + half * 8 + g_, tile_.total_rows - 1), token = p_.group.divide(row);
        slope[m][half] = alibi_slope(a_, tile_.kv_head * a_.group_size + row - token * a_.group_size) * kLog2E;
        nearest[m][half] = slope[m][half] * static_cast<float>(first + 2 * q_ - tile_.position - token);
      }
    }
    for_scores([&](float& score, int m, int half, int column) {
      score += nearest[m][half] + slope[m][half] * static_cast<float>(column);
    });
  }

  __device__ __forceinline__ void mask(int first) {
    int begin[kRowTiles][2], end[kRowTiles][2];  // columns that a row sees
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int offset = first + 2 * q_, position = position_of(first_row() + m * 16 + half * 8 + g_);
        begin[m][half] = first_key(a_, position) - offset;
        end[m][half] = min(tile_.seq_len, end_key(a_, position, tile_.seq_len)) - offset;
      }
    }
    for_scores([&](float& score, int m, int half, int column) {
      score = (column >= begin[m][half]) & (column < end[m][half]) ? score : -INFINITY;
    });
  }

  // Scores of the keys from `first` on to weights, in place; what was summed so far shrinks to the new maximum.
  __device__ __forceinline__ void softmax(int first) {
    if (scored()) finish_scores(first);
    if (first < control_.warps[warp_].clean_begin || first + kKeys > control_.warps[warp_].clean_end) mask(first);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float rescale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float tops[2] = {top_[m][half], scores_[m][0][2 * half]};  // two chains, for latency
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          tops[0] = fmaxf(tops[0], scores_[m][n][2 * half]);
          tops[1] = fmaxf(tops[1], scores_[m][n][2 * half + 1]);
        }
        float top = fmaxf(tops[0], tops[1]);
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float reference = finite_top(top) * factor_;
        rescale[half] = exp2_fast(__fmul_rn(top_[m][half], factor_) - reference);  // 1 where the maximum stays, see wgmma's
        top_[m][half] = top;
        float sums[2] = {sum_[m][half] * rescale[half], 0.0f};
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores_[m][n][2 * half + e];
            score = exp2_fast(score * factor_ - reference);
            sums[e] += score;
          }
        }
        sum_[m][half] = sums[0] + sums[1];
      }
      if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) out_[m][n][e] *= rescale[e / 2];
        }
      }
    }
  }

  // O += P V.
  __device__ __forceinline__ void multiply_values() {
    const int lane = opaque_lane(lane_);
    const uint32_t value = values_ + Shape::offset(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t weights[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = scores_[m][2 * k + i / 2] + i % 2 * 2;
          weights[m][i] = pack_pair<M>(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kD / 16; ++n) {
        uint32_t columns[4];
        load_matrices_transposed(columns, Shape::advance(value, 2 * n) + k * 16 * Shape::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_add<M>(out_[m][2 * n], weights[m], columns[0], columns[1]);
          multiply_add<M>(out_[m][2 * n + 1], weights[m], columns[2], columns[3]);
        }
      }
    }
  }

  __device__ __forceinline__ uint32_t pack_out(float low, float high) const {
    if constexpr (kQuantized) {
      if (a_.query_type == DType::bf16) return pack_pair<__nv_bfloat16>(low, high);
    }
    return pack_pair<M>(low, high);
  }

  // Divides by the sums and writes; the rows' queries give their place in shared memory to the output, for whole vectors.
  __device__ __forceinline__ void end_rows() {
    const float scale = kQuantized ? head_scale(a_.value_scale, tile_.kv_head) : 1.0f;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = sum_[m][half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int own = m * 16 + half * 8 + g_, row = first_row() + own;
        const int token = p_.group.divide(row), head = tile_.kv_head * a_.group_size + row - token * a_.group_size;
        const RowEnd end = end_row(a_, top_[m][half] * factor_, sum, head);
        if (a_.lse != nullptr && q_ == 0 && row < tile_.total_rows) {
          a_.lse[(tile_.first_query + token) * a_.lse_token_stride + head * a_.lse_head_stride] = end.lse;
        }
        const float factor = end.factor * scale;
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) {
          store_shared_4(queries_ + Shape::offset(own, n) + q_ * 4,
                         pack_out(out_[m][n][2 * half] * factor, out_[m][n][2 * half + 1] * factor));
        }
      }
    }
    __syncwarp();
    const int64_t offset = row_offset(a_.out_token_stride, a_.out_head_stride);
#pragma unroll 4
    for (int i = 0; i < Shape::kWarpRows * Shape::kChunks / 32; ++i) {
      const int item = i * 32 + lane_, row = item / Shape::kChunks, chunk = item % Shape::kChunks;
      const int64_t to = __shfl_sync(0xffffffffu, offset, row);
      if (to < 0 || chunk * 8 >= a_.head_size) continue;
      *reinterpret_cast<uint4*>(static_cast<M*>(a_.out) + to + chunk * 8) = load_shared_16(queries_ + Shape::offset(row, chunk));
    }
  }

  const PlanParams& p_;
  const AttentionParams& a_;
  Control& control_;
  const Tile& tile_;
  int lane_, warp_, g_, q_;
  uint32_t queries_, keys_, values_, raw_;  // in shared memory: the warp's queries, the tiles, what this thread copies first
  int block_;
  float factor_;  // from a finished score, or a product, to base 2
  float top_[kRowTiles][2], sum_[kRowTiles][2];
  float scores_[kRowTiles][kKeys / 8][4], out_[kRowTiles][kD / 8][4];
};

template <typename C, int kD>
__global__ void __launch_bounds__(kThreads, MmaTiles<C, kD>::kBlocksPerSm)
    prefill_mma_kernel(const __grid_constant__ PlanParams p) {
  using Shape = MmaTiles<C, kD>;
  extern __shared__ __align__(128) char shared[];
  __shared__ Control control;
  Tile tile;
  if (!prefill::plan_tile<Shape::kRows, Shape::kKeys>(p, static_cast<int>(blockIdx.x), threadIdx.x % 32, tile)) return;
  if (threadIdx.x == 0) control.tile = tile;
  __syncthreads();
  RowTile<C, kD>(p, control, shared).run();
}

template <typename C, int kD> void launch_tiles(const PagedAttention& args, const AttentionParams& params, Stream stream) {
  using Shape = MmaTiles<C, kD>;
  PlanParams p{};
  const int64_t items = prefill::plan_rows(args, params, Shape::kRows, kOp, p);
  p.copy_rows = Shape::kKeys;
  launch(kOp, prefill_mma_kernel<C, kD>, items, kThreads, Shape::kSharedBytes, stream, p);
}

template <typename C> void launch_for_type(const PagedAttention& args, const AttentionParams& params, Stream stream) {
  if (params.head_size <= 64) return launch_tiles<C, 64>(args, params, stream);
  if (params.head_size <= 96) return launch_tiles<C, 96>(args, params, stream);
  if (params.head_size <= 128) return launch_tiles<C, 128>(args, params, stream);
  if (params.head_size <= 192) return launch_tiles<C, 192>(args, params, stream);
  return launch_tiles<C, 256>(args, params, stream);
}

// The same for quantised caches, in a file of their own.
void launch_quantized(const PagedAttention& args, const AttentionParams& params, Stream stream);

}  // namespace research_engine::cuda::prefill_mma
