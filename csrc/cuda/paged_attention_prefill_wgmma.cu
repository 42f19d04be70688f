// Paged attention, the prefill path on Hopper's warpgroup tensor cores (sm_90a): float16 and bfloat16, many query tokens a row.
//
// Computes   tiles of (token, query head) rows of one KV head, row = token * G + g, so that its G heads share K and V; a tile
//            walks its keys from the last to the first and never writes a score (FlashAttention-3, Shah et al., 2024).
// Block      a producer warpgroup and two consumers of 64 rows each; registers move to the consumers.
//
//              producer warps 0, 1  K and V of a tile of keys to a ring in shared memory, one tensor copy per cache block, each
//                                   issued by a lane of its own; where a head has no whole blocks (D = 80, strides), one for 8 keys
//                                   and 64 elements, and elements past the head size arrive as zeros
//              producer warps 2, 3  choose the next tile of rows, and bring its queries while the current tile is computed
//              consumer             S = Q K'^T of the next keys K' and O += P V of the current ones are issued together; the
//                                   softmax turns S into the next P
//
//            The consumers take turns at issuing ("ping-pong"): one computes exponentials while the other multiplies.
//
//              tensor cores | A: QK PV | B: QK PV | A: QK PV | B: QK PV | ...
//              consumer A   |          | softmax  |          | softmax  |
//              consumer B   | softmax  |          | softmax  |          |
//
// Ring       One ring for both: K[n-1], K[n-2], V[n-1], K[n-3], V[n-2], ..., V[0], in the order of use. Shared memory holds
//            atoms [rows, 64 elements] of 128 bytes a row, 128-byte swizzle (wgmma.cuh): queries as D / 64 atoms of all rows, keys
//            and values as [keys / 8][D / 64] atoms of 8 rows, which is how one copy of a whole cache block arrives.
// Masks      Only tiles that cross a row's first or last key are masked. Value rows past the sequence's end (or before the
//            window) are zeroed in shared memory: what unused slots hold, NaN included, has no effect.
// Work       A persistent grid. Request r's tiles start at floor(start_r G / rows) + r, which leaves room for every partly
//            filled tile without reading a length on the host; late tiles, which see most keys, first; KV heads innermost, as
//            many as fit the L2 cache. Tiles are dealt by a counter if the caller has one, otherwise to and fro.
// Determinism  A row's bits depend on its own request alone: tiles of keys start at its first key, the order is fixed.
// Roofline   4 x rows x keys x D operations on the tensor cores; per 128 x 128 tile at D = 128 they take 2,048 cycles, and its
//            16,384 exponentials 1,024 of the special function units: hence the overlap.
// Critical   From a consumer's products to its next ones: maxima, exponentials (8 cycles each of a warp), sums, rounding, rescaling.
//            The wait for the values' product comes after the maxima, so that rounding and rescaling are arithmetic between
//            exponentials; what an operand's address takes is done in registers of the warp, with constants known when compiling.
// Versions   1 a tensor copy a block and atom, one warp that issues them: 404 TFLOP/s at 8,192 tokens with blocks of 16.
//            2 both atoms of a head of 128 in one copy, two warps: 0.77 of the time over nine configurations, in one run.
//            3 a lane a copy, cache blocks looked up a tile ahead, one layout with steps known when compiling: 0.77 again.
//            4 the values' product waited for before the exponentials: 0.94.
//            5 output rescaled only where a maximum of the warp moved: 0.97; copies without promotion in the L2 cache: 0.99; keys and
//            values asked for at once.
// Reached    one H200, bf16, D = 128, causal (docs/performance.md): 650 TFLOP/s at 8,192 tokens with blocks of 16, 668 for 2,048 tokens
//            after 30,720 others; FlashAttention-3 takes 1.00 of the time (geometric mean of 9), from 0.94 to 1.09.
#include <algorithm>
#include <numeric>

#include "mma.cuh"
#include "paged_attention.cuh"
#include "prefill_producer.cuh"
#include "wgmma.cuh"
#ifndef __CUDACC_RTC__
#include "tensor_map.cuh"
#endif

namespace research_engine::cuda {
namespace {

using namespace prefill;

constexpr const char* kOp = "paged_attention (path prefill, wgmma)";

// A consumer warpgroup: 64 rows of every tile. kScored: softcap, ALiBi or an unusual scale, so that scores are computed before
// their maximum; otherwise the scale is folded into the exponent.
template <typename T, int kD, bool kScored> class Consumer {
  using Shape = WgmmaShape<kD>;
  using Scores = Wgmma<T, Shape::kKeys>;
  using Output = Wgmma<T, kD>;
  static constexpr int kConsumerThreads = Shape::kConsumers * kGroupThreads;
  static constexpr int kAllBarrier = 1, kTurnBarrier = 2;  // the second and on, one for each consumer

 public:
  __device__ __forceinline__ Consumer(const PrefillParams& p, Control<kD>* control, uint32_t queries, uint32_t ring, int group)
      : p_(p), control_(control), queries_(uniform(queries)), ring_(uniform(ring)), group_(group) {
    lane_ = threadIdx.x % 32;
    q_ = lane_ % 4;
    row_ = group * kGroupRows + threadIdx.x / 32 % 4 * 16 + lane_ / 4;
    factor_ = kScored ? 1.0f : p.attention.scale * kLog2E;
  }

  __device__ __forceinline__ void run() {
    if (group_ == Shape::kConsumers - 1) block_barrier_arrive(kTurnBarrier, 2 * kGroupThreads);  // the first begins
    while (true) {
      mbarrier_wait(shared_address(&control_->queries_full[plan_.slot]), plan_.parity);
      tile_ = control_->tile[plan_.slot];
      if (tile_.steps < 0) return;
      rows_ = uniform(queries_ + plan_.slot * Shape::kQueryBytes + group_ * kGroupRows * kAtomRow);
      begin_rows();
      if (tile_.steps > 0) {
        first_step();
        // Tiles of keys that every row sees all of need no mask.
        const int clean_end = max(0, rows_end_ - tile_.start) / Shape::kKeys;
        const int clean_begin = max(0, rows_begin_ - tile_.start + Shape::kKeys - 1) / Shape::kKeys;
        int t = tile_.steps - 2;
        for (; t >= max(0, clean_end); --t) step<true>(t);
        for (; t >= clean_begin; --t) step<false>(t);
        for (; t >= 0; --t) step<true>(t);
        release_queries();
        last_step();
      } else {
        release_queries();
      }
      plan_.next();
      end_rows();
    }
  }

 private:
  // Transposes 4 x 4 words over the four lanes of a quad: word j of lane i becomes word i of lane j.
  static __device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int quad_lane) {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      const bool upper = (quad_lane & mask) != 0;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int low = mask == 1 ? 2 * pair : pair, high = low + mask;
        const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words[low] : words[high], mask);
        words[low] = upper ? other : words[low];
        words[high] = upper ? words[high] : other;
      }
    }
  }

  __device__ __forceinline__ void begin_rows() {
    const AttentionParams& a = p_.attention;
    const int first = tile_.first_row + group_ * kGroupRows;
    rows_end_ = min(tile_.seq_len, end_key(a, tile_.position + p_.group.divide(first), tile_.seq_len));
    rows_begin_ = first_key(a, tile_.position + p_.group.divide(first + kGroupRows - 1));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = tile_.first_row + row_ + half * 8;
      const int token = p_.group.divide(index);
      position_[half] = tile_.position + token;
      begin_[half] = first_key(a, position_[half]);
      end_[half] = min(tile_.seq_len, end_key(a, position_[half], tile_.seq_len));
      if constexpr (kScored) {
        slope_[half] = alibi_slope(a, tile_.kv_head * a.group_size + index - token * a.group_size);
      }
      top_[half] = -INFINITY;
      sum_[half] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) out_[i] = 0.0f;
  }

  __device__ __forceinline__ void release(uint32_t barrier) {
    __syncwarp();  // one lane speaks for the warp: what the others read must have been read
    if (lane_ == 0) mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void release_queries() { mbarrier_arrive(shared_address(&control_->queries_empty[plan_.slot])); }
  __device__ __forceinline__ void wait_full(const Place<Shape::kSlots>& place) {
    mbarrier_wait(shared_address(&control_->full[place.slot]), place.parity);
  }
  // Both: asked for the second while the first answers.
  __device__ __forceinline__ void wait_full(const Place<Shape::kSlots>& first, const Place<Shape::kSlots>& second) {
    const bool one = mbarrier_try_wait(shared_address(&control_->full[first.slot]), first.parity);
    const bool other = mbarrier_try_wait(shared_address(&control_->full[second.slot]), second.parity);
    if (one && other) return;
    wait_full(first);
    wait_full(second);
  }
  __device__ __forceinline__ void release_slot(const Place<Shape::kSlots>& place) {
    release(shared_address(&control_->empty[place.slot]));
  }

  __device__ __forceinline__ uint32_t slot_address(const Place<Shape::kSlots>& place) const {
    return uniform(ring_ + place.slot * Shape::kSlotBytes);
  }

  // S = Q K^T, issued and committed.
  __device__ __forceinline__ void multiply_keys(uint32_t slot) {
    const uint64_t a = operand(rows_, 16, kAtomGroup), b = operand(slot, 16, Shape::kTileGroup);
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      Scores::shared_shared(scores_, advance(a, k / 4 * Shape::kQueryAtom + k % 4 * 32),
                            advance(b, k / 4 * Shape::kTileAtom + k % 4 * 32), k > 0);
    }
    wgmma_commit();
  }

  // O += P V, issued and committed.
  __device__ __forceinline__ void multiply_values(uint32_t slot) {
    const uint64_t b = operand(slot, Shape::kTileAtom, Shape::kTileGroup);
#pragma unroll
    for (int k = 0; k < Shape::kKeys / 16; ++k) Output::registers_shared(out_, weights_[k], advance(b, k * 2 * Shape::kTileGroup));
    wgmma_commit();
  }

  // Zeroes the value rows of a slot that no row of the tile may see; all consumers, each a part.
  __device__ __forceinline__ void clean_values(const Place<Shape::kSlots>& place, int first, int begin, int end) {
    wait_full(place);
    constexpr int kChunks = kD / 8;
    for (int i = threadIdx.x - kGroupThreads; i < Shape::kKeys * kChunks; i += kConsumerThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      if (first + row >= begin && first + row < end) continue;
      clear_shared_16(ring_ + place.slot * Shape::kSlotBytes + chunk / 8 * Shape::kTileAtom + row / 8 * Shape::kTileGroup +
                      row % 8 * kAtomRow + chunk % 8 * 16);
    }
    async_proxy_fence();
    block_barrier_sync(kAllBarrier, kConsumerThreads);
  }
  __device__ __forceinline__ bool starts_early() const { return tile_begin() > tile_.start; }
  __device__ __forceinline__ int tile_begin() const {
    return first_key(p_.attention, tile_.position + p_.group.divide(tile_.first_row));
  }

  // The last tile of keys: only its scores, there is nothing to multiply yet.
  __device__ __forceinline__ void first_step() {
    const int t = tile_.steps - 1, first = tile_.start + t * Shape::kKeys;
    const Place<Shape::kSlots> keys = ring_place_;
    ring_place_.next();
    wait_full(keys);
    pin(scores_);
    wgmma_fence();
    multiply_keys(slot_address(keys));
    if (first + Shape::kKeys > tile_.seq_len) {
      Place<Shape::kSlots> values = ring_place_;
      if (t > 0) values.next();
      clean_values(values, first, 0, tile_.seq_len);
    }
    wgmma_wait<0>();
    pin(scores_);
    release_slot(keys);
    float rescale[2], reference[2];
    softmax_maxima<true>(first, rescale, reference);
    softmax_exponentials(rescale, reference);
    pack_weights();
  }

  // Scores of tile t, and the values of tile t + 1.
  template <bool kMask> __device__ __forceinline__ void step(int t) {
    const Place<Shape::kSlots> keys = ring_place_;
    ring_place_.next();
    const Place<Shape::kSlots> values = ring_place_;
    ring_place_.next();
    const uint32_t keys_slot = slot_address(keys), values_slot = slot_address(values);
    wait_full(keys, values);
    block_barrier_sync(kTurnBarrier + group_, 2 * kGroupThreads);
    pin(scores_);
    pin(out_);
    pin(weights_);
    wgmma_fence();
    multiply_keys(keys_slot);
    multiply_values(values_slot);
    block_barrier_arrive(kTurnBarrier + (group_ + 1 == Shape::kConsumers ? 0 : group_ + 1), 2 * kGroupThreads);
    wgmma_wait<1>();
    pin(scores_);
    release_slot(keys);
    float rescale[2], reference[2];
    softmax_maxima<kMask>(tile_.start + t * Shape::kKeys, rescale, reference);
    // By now the values' product has ended: what follows is one run of instructions, arithmetic between exponentials.
    wgmma_wait<0>();
    pin(out_);
    release_slot(values);
    softmax_exponentials(rescale, reference);
    pack_weights();
    // Where no maximum of the warp moved the factors are 1: leaving them out changes no bit.
    if (__any_sync(0xffffffffu, (rescale[0] != 1.0f) | (rescale[1] != 1.0f))) {
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) out_[i] *= rescale[i / 2 % 2];
    }
  }

  // The values of tile 0.
  __device__ __forceinline__ void last_step() {
    const Place<Shape::kSlots> values = ring_place_;
    ring_place_.next();
    if (starts_early()) clean_values(values, tile_.start, tile_begin(), INT32_MAX);
    wait_full(values);
    pin(out_);
    pin(weights_);
    wgmma_fence();
    multiply_values(slot_address(values));
    wgmma_wait<0>();
    pin(out_);
    release_slot(values);
  }

  // The scores of the keys from `first` on, masked; each row's maximum so far, in base 2, and the factor by which what was summed
  // before shrinks.
  template <bool kMask> __device__ __forceinline__ void softmax_maxima(int first, float (&rescale)[2], float (&reference)[2]) {
    const AttentionParams& a = p_.attention;
    constexpr int kCount = Shape::kKeys / 2;
    if constexpr (kScored) {
      if (a.softcap > 0) {  // c tanh(x / c) = c - 2 c / (1 + e^(2 x / c))
        const float inner = a.scale * (2.0f * kLog2E) / a.softcap, outer = a.softcap * kLog2E;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          scores_[i] = outer - __fdividef(2.0f * outer, 1.0f + exp2_fast(scores_[i] * inner));
        }
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) scores_[i] *= a.scale * kLog2E;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float slope = slope_[half] * kLog2E, nearest = slope * static_cast<float>(first + 2 * q_ - position_[half]);
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
          scores_[i / 2 * 4 + half * 2 + i % 2] += nearest + slope * static_cast<float>(i / 2 * 8 + i % 2);
        }
      }
    }
    if constexpr (kMask) {
      const int offset = first + 2 * q_;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int half = i / 2 % 2, column = i / 4 * 8 + i % 2;
        const bool seen = (column >= begin_[half] - offset) & (column < end_[half] - offset);
        scores_[i] = seen ? scores_[i] : -INFINITY;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tops[2] = {top_[half], scores_[2 * half]};  // two chains each, for latency
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        tops[0] = fmaxf(tops[0], scores_[4 * i + 2 * half]);
        tops[1] = fmaxf(tops[1], scores_[4 * i + 2 * half + 1]);
      }
      float top = fmaxf(tops[0], tops[1]);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      reference[half] = finite_top(top) * factor_;
      // Rounded as `reference` is: fused with the subtraction, a tile that brings no new maximum would not give 1 exactly, and a
      // row's bits would depend on how many such tiles its neighbours need.
      rescale[half] = exp2_fast(__fmul_rn(top_[half], factor_) - reference[half]);
      top_[half] = top;
    }
  }

  // Scores to weights, in place, and their sums.
  __device__ __forceinline__ void softmax_exponentials(const float (&rescale)[2], const float (&reference)[2]) {
    constexpr int kCount = Shape::kKeys / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sums[2] = {sum_[half] * rescale[half], 0.0f};
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = scores_[4 * i + 2 * half + e];
          s = exp2_fast(s * factor_ - reference[half]);
          sums[e] += s;
        }
      }
      sum_[half] = sums[0] + sums[1];
    }
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int k = 0; k < Shape::kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights_[k][i] = pack_pair<T>(scores_[8 * k + 2 * i], scores_[8 * k + 2 * i + 1]);
    }
  }

  __device__ __forceinline__ void end_rows() {
    const AttentionParams& a = p_.attention;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int index = tile_.first_row + row_ + half * 8;
      const bool valid = index < tile_.total_rows;
      const int64_t token = tile_.first_query + p_.group.divide(index);
      const int head = valid ? tile_.kv_head * a.group_size + index - p_.group.divide(index) * a.group_size : 0;
      const RowEnd end = end_row(a, top_[half] * factor_, sum, head);
      T* out = static_cast<T*>(a.out) + token * a.out_token_stride + head * a.out_head_stride;
#pragma unroll
      for (int i = 0; i < kD / 32; ++i) {  // four groups of 8 columns, one for each lane of the quad
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = out_ + 4 * (4 * i + j) + 2 * half;
          words[j] = pack_pair<T>(pair[0] * end.factor, pair[1] * end.factor);
        }
        transpose_quad(words, q_);
        const int column = (4 * i + q_) * 8;
        if (valid && column < a.head_size) store_global_16(out + column, words);
      }
      if (valid && q_ == 0 && a.lse != nullptr) a.lse[token * a.lse_token_stride + head * a.lse_head_stride] = end.lse;
    }
  }

  const PrefillParams& p_;
  Control<kD>* control_;
  uint32_t queries_, ring_, rows_;  // in shared memory; rows_: this warpgroup's queries
  int group_, lane_, q_, row_;  // row_: the thread's first row in the tile; its second is 8 further
  float factor_;                // from a score to base 2
  Tile tile_;
  Place<Shape::kSlots> ring_place_;
  Place<Shape::kQuerySlots> plan_;
  int rows_begin_, rows_end_;  // keys that all rows of the warpgroup see
  int position_[2], begin_[2], end_[2];
  float slope_[2], top_[2], sum_[2];
  float scores_[Shape::kKeys / 2], out_[kD / 2];
  uint32_t weights_[Shape::kKeys / 16][4];
};

template <typename T, int kD, bool kScored> __device__ __forceinline__ void run_block(const PrefillParams& p) {
  using Shape = WgmmaShape<kD>;
  extern __shared__ char raw[];
  const uint32_t base = (shared_address(raw) + 1023) / 1024 * 1024;
  const uint32_t ring = base + Shape::kQuerySlots * Shape::kQueryBytes;
  auto* control = reinterpret_cast<Control<kD>*>(raw + (ring + Shape::kSlots * Shape::kSlotBytes - shared_address(raw)));
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kSlots; ++i) {
      mbarrier_init(shared_address(&control->full[i]), 1);
      mbarrier_init(shared_address(&control->empty[i]), 4 * Shape::kConsumers);
    }
    for (int i = 0; i < Shape::kQuerySlots; ++i) {
      mbarrier_init(shared_address(&control->planned[i]), 1);
      mbarrier_init(shared_address(&control->queries_full[i]), 4 - kCopiers);
      mbarrier_init(shared_address(&control->queries_empty[i]), 128 * Shape::kConsumers + 32 * kCopiers);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
  if (warp < 4) {
    give_registers<Shape::kProducerRegisters>();
    if (warp < kCopiers) {
      CacheCopier<kD>(p, control, ring, warp, lane).run();
    } else {
      bring_queries<T, kD>(p, control, base, warp, lane);
    }
  } else {
    take_registers<Shape::kConsumerRegisters>();
    Consumer<T, kD, kScored>(p, control, base, ring, warp / 4 - 1).run();
  }
}

// Only sm_90a has these instructions: for other targets the kernel is empty, and the launcher never starts it there.
template <typename T, int kD, bool kScored>
__global__ void __launch_bounds__(WgmmaShape<kD>::kThreads, 1) prefill_wgmma_kernel(const __grid_constant__ PrefillParams p) {
  if constexpr (kHasWgmma) run_block<T, kD, kScored>(p);
}

#ifndef __CUDACC_RTC__  // the host's part
CUtensorMap tensor_map(const TensorView& cache, int rank, const cuuint64_t* sizes, const cuuint64_t* strides,
                       const cuuint32_t* box) {
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult status = encode_tiled(kOp)(
      &map, cache.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, cache.data,
      sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(kOp) + ": cuTensorMapEncodeTiled failed with CUresult " + std::to_string(status));
  }
  return map;
}

// Boxes of 64 elements and `rows` keys of one (block, head); elements past the head size arrive as zeros.
CUtensorMap atom_map(const TensorView& cache, int rows) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(cache.shape[3]), static_cast<cuuint64_t>(cache.shape[2]),
                              static_cast<cuuint64_t>(cache.shape[1]), static_cast<cuuint64_t>(cache.shape[0])};
  const cuuint64_t strides[] = {sizes[0] * 2, static_cast<cuuint64_t>(cache.strides[1]) * 2,
                                static_cast<cuuint64_t>(cache.strides[0]) * 2};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(rows), 1, 1};
  return tensor_map(cache, 4, sizes, strides, box);
}

// Boxes of all elements of `rows` keys: (element of an atom, key of a group, atom, group of any head, block).
CUtensorMap whole_map(const TensorView& cache, int rows) {
  const auto atoms = static_cast<cuuint64_t>(cache.shape[3] / 64), groups = static_cast<cuuint64_t>(cache.shape[2] / 8);
  const cuuint64_t sizes[] = {64, 8, atoms, groups * static_cast<cuuint64_t>(cache.shape[1]),
                              static_cast<cuuint64_t>(cache.shape[0])};
  const cuuint64_t row = atoms * kAtomRow, strides[] = {row, kAtomRow, 8 * row, static_cast<cuuint64_t>(cache.strides[0]) * 2};
  const cuuint32_t box[] = {64, 8, static_cast<cuuint32_t>(atoms), static_cast<cuuint32_t>(rows / 8), 1};
  return tensor_map(cache, 5, sizes, strides, box);
}

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device), kOp);
  return value;
}

// A (block, head) that is one run of memory, whole groups of 8 keys and whole atoms: one copy brings all of it.
bool has_whole_blocks(const PagedAttention& args, int head_size, int copy_rows) {
  bool whole = args.key_cache.shape[3] == head_size && copy_rows % 8 == 0;
  for (const TensorView& cache : {args.key_cache, args.value_cache}) {
    whole = whole && cache.strides[1] == cache.shape[2] * cache.shape[3];
  }
  return whole;
}

template <typename T, int kD>
void launch_tiles(const PagedAttention& args, const AttentionParams& params, PrefillParams& p, Stream stream) {
  using Shape = WgmmaShape<kD>;
  const AttentionParams& a = p.attention;
  const int64_t items = plan_rows(args, params, Shape::kRows, kOp, p);
  p.copy_rows = std::gcd(static_cast<int>(a.block_size.value), args.variant.kernel != nullptr ? args.variant.keys : Shape::kKeys);
  p.whole_copies = has_whole_blocks(args, kD, p.copy_rows);
  if (!p.whole_copies) p.copy_rows = std::min(p.copy_rows, 8);
  p.keys = p.whole_copies ? whole_map(args.key_cache, p.copy_rows) : atom_map(args.key_cache, p.copy_rows);
  p.values = p.whole_copies ? whole_map(args.value_cache, p.copy_rows) : atom_map(args.value_cache, p.copy_rows);
  const int64_t blocks = std::min<int64_t>(items, device_attribute(cudaDevAttrMultiProcessorCount, args.query.device));
  if (args.variant.kernel != nullptr) return launch_variant(kOp, args.variant, blocks, stream, p);
  const bool plain = a.softcap <= 0.0f && a.alibi_slopes == nullptr && a.scale > 0.0f;
  const auto kernel = plain ? prefill_wgmma_kernel<T, kD, false> : prefill_wgmma_kernel<T, kD, true>;
  launch(kOp, kernel, blocks, Shape::kThreads, shared_bytes<kD>(), stream, p);
}

template <typename T>
void launch_for_type(const PagedAttention& args, const AttentionParams& params, PrefillParams& p, Stream stream) {
  const int head_size = params.head_size;
  if (head_size <= 64) return launch_tiles<T, 64>(args, params, p, stream);
  if (head_size <= 128) return launch_tiles<T, 128>(args, params, p, stream);
  if (head_size <= 192) return launch_tiles<T, 192>(args, params, p, stream);
  return launch_tiles<T, 256>(args, params, p, stream);
}
#endif

}  // namespace

#ifndef __CUDACC_RTC__
bool prefill_wgmma_supports(const PagedAttention& args, const AttentionParams& params) {
  if ((args.query.dtype != DType::bf16 && args.query.dtype != DType::f16) || args.key_cache.dtype != args.query.dtype) return false;
  if (params.head_size % 8 != 0 || params.head_size > kMaxHeadSize || !params.vectors) return false;
  if (!vector_aligned(args.query, params.query_token_stride) || !vector_aligned(args.query, params.query_head_stride) ||
      !vector_aligned(args.out, params.out_token_stride) || !vector_aligned(args.out, params.out_head_stride)) {
    return false;
  }
  for (const TensorView& cache : {args.key_cache, args.value_cache}) {  // what a tensor map can express
    for (const int64_t stride : {cache.strides[0], cache.strides[1]}) {
      if (stride <= 0 || stride >= int64_t{1} << 39) return false;
    }
  }
  if (args.query.shape[0] * params.num_query_heads >= int64_t{1} << 30) return false;  // rows and items count in 32 bits
  return device_attribute(cudaDevAttrComputeCapabilityMajor, args.query.device) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor, args.query.device) == 0;
}

void launch_prefill_wgmma(const PagedAttention& args, AttentionParams params, Stream stream, int32_t* counters) {
  PrefillParams p{};
  p.counters = counters;
  if (args.query.dtype == DType::bf16) {
    launch_for_type<__nv_bfloat16>(args, params, p, stream);
  } else {
    launch_for_type<__half>(args, params, p, stream);
  }
}
#endif

}  // namespace research_engine::cuda
