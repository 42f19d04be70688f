// The producer's side of the wgmma prefill kernel (paged_attention_prefill_wgmma.cu): tile sizes, and how queries,
// keys and values come into shared memory.
#pragma once

#include <algorithm>

#include "mma.cuh"
#include "paged_attention.cuh"
#include "prefill_plan.cuh"
#include "wgmma.cuh"

namespace research_engine::cuda::prefill {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kGroupRows = 64;      // of a consumer's tile

// Variants, for measuring: the warps of the producer warpgroup that bring keys and values (the others plan and bring queries).
#ifndef RESEARCH_ENGINE_PREFILL_COPIERS
#define RESEARCH_ENGINE_PREFILL_COPIERS 2
#endif
#ifndef RESEARCH_ENGINE_PREFILL_KEYS  // keys of a tile; 0: by the head size
#define RESEARCH_ENGINE_PREFILL_KEYS 0
#endif
#ifndef RESEARCH_ENGINE_PREFILL_SLOTS  // tiles that the ring has at most
#define RESEARCH_ENGINE_PREFILL_SLOTS 8
#endif
constexpr int kCopiers = RESEARCH_ENGINE_PREFILL_COPIERS;
static_assert(kCopiers >= 1 && kCopiers <= 2);

// Sizes for heads of up to kD elements.
template <int kD> struct WgmmaShape {
  static constexpr int kConsumers = 2;
  static constexpr int kRows = kConsumers * kGroupRows;
  static constexpr int kKeys = RESEARCH_ENGINE_PREFILL_KEYS > 0 ? RESEARCH_ENGINE_PREFILL_KEYS : kD <= 128 ? 128 : 64;
  static constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
  static constexpr int kProducerRegisters = kD <= 192 ? 56 : 40;  // of the 168 that every thread starts with
  static constexpr int kConsumerRegisters = kD <= 192 ? 224 : 232;
  static constexpr int kAtoms = kD / 64;
  static constexpr int kQueryBytes = kRows * kD * 2, kQueryAtom = kRows * kAtomRow;
  // A tile of keys or values lies in its slot as [keys / 8][atoms of 64 elements][8 keys]: one tensor copy can bring all elements of
  // a cache block, and the steps between its parts are known when compiling.
  static constexpr int kTileAtom = kAtomGroup, kTileGroup = kAtoms * kAtomGroup, kSlotBytes = kKeys * kD * 2;
  static constexpr int kQuerySlots = kD <= 192 ? 2 : 1;
  static constexpr int kSlots = std::min(RESEARCH_ENGINE_PREFILL_SLOTS, (224 * 1024 - kQuerySlots * kQueryBytes) / kSlotBytes);
  static_assert(kSlots >= 4, "two tiles of keys in use, two on their way");
};

template <int kD> struct Control {
  using Shape = WgmmaShape<kD>;
  uint64_t full[Shape::kSlots], empty[Shape::kSlots];
  uint64_t planned[Shape::kQuerySlots], queries_full[Shape::kQuerySlots], queries_empty[Shape::kQuerySlots];
  Tile tile[Shape::kQuerySlots];
};

template <int kD> constexpr int shared_bytes() {  // the base is moved to a multiple of 1,024
  using Shape = WgmmaShape<kD>;
  return 1024 + Shape::kQuerySlots * Shape::kQueryBytes + Shape::kSlots * Shape::kSlotBytes +
         static_cast<int>(sizeof(Control<kD>));
}

struct PrefillParams : PlanParams {  // copy_rows: keys of one tensor copy, a power of two that divides block size and tile
  CUtensorMap keys, values;
  bool whole_copies;  // a copy brings all elements of its keys; otherwise the 64 of an atom, and at most 8 keys
  int* counters;  // [2]: tiles dealt, blocks done; zero before and after; may be null
};

// Place in a ring of kSlots, and the parity of the pass.
template <int kSlots> struct Place {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// The first producer warps: keys and values of one tile after another, in the order in which the consumers use them. With two of
// them one brings the keys and the other the values. Every lane has a copy of its own to make, and where it is from is looked up
// a tile ahead: the instruction that starts a copy takes its operands from registers of the warp, and the way there is the cost.
template <int kD> class CacheCopier {
  using Shape = WgmmaShape<kD>;

 public:
  __device__ __forceinline__ CacheCopier(const PrefillParams& p, Control<kD>* control, uint32_t ring, int warp, int lane)
      : p_(p), control_(control), ring_(ring), lane_(lane), keys_(warp == 0), values_(warp == kCopiers - 1) {}

  __device__ __forceinline__ void run() {
    Place<Shape::kQuerySlots> plan;
    if (lane_ == 0) {
      prefetch_map(&p_.keys);
      prefetch_map(&p_.values);
    }
    while (true) {
      mbarrier_wait(shared_address(&control_->planned[plan.slot]), plan.parity);
      tile_ = control_->tile[plan.slot];
      __syncwarp();
      mbarrier_arrive(shared_address(&control_->queries_empty[plan.slot]));
      plan.next();
      if (tile_.steps < 0) break;
      int block = 0, next = block_of(tile_.steps - 1, lane_);
      for (int step = tile_.steps - 1; step >= -1; --step) {
        const int previous = block;
        block = next;
        next = block_of(step - 1, lane_);
        if (step >= 0) {
          if (keys_) copy(&p_.keys, step, block);
          place_.next();
        }
        if (step + 1 < tile_.steps) {
          if (values_) copy(&p_.values, step + 1, previous);
          place_.next();
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int key_of(int step, int copy) const {
    return tile_.start + step * Shape::kKeys + copy * p_.copy_rows;
  }
  // The cache block that has the keys of a copy.
  __device__ __forceinline__ int block_of(int step, int copy) const {
    const AttentionParams& a = p_.attention;
    const int key = key_of(step, copy);
    const bool needed = step >= 0 && copy * p_.copy_rows < Shape::kKeys && key < tile_.seq_len;
    return needed ? a.block_tables[tile_.request * a.table_stride + a.block_size.divide(key)] : 0;
  }

  // Keys or values of the tile `step`; `block` is the lane's first copy's.
  __device__ __forceinline__ void copy(const CUtensorMap* map, int step, int block) {
    const AttentionParams& a = p_.attention;
    const int block_size = static_cast<int>(a.block_size.value);
    const int keys = min(Shape::kKeys, tile_.seq_len - key_of(step, 0));
    const uint32_t full = shared_address(&control_->full[place_.slot]);
    const uint32_t slot = ring_ + place_.slot * Shape::kSlotBytes;
    mbarrier_wait(shared_address(&control_->empty[place_.slot]), place_.parity ^ 1);
    if (lane_ == 0) mbarrier_arrive_expect(full, ((keys + p_.copy_rows - 1) & ~(p_.copy_rows - 1)) * Shape::kAtoms * kAtomRow);
    __syncwarp();
    for (int copy = lane_; copy * p_.copy_rows < keys; copy += 32) {
      if (copy >= 32) block = block_of(step, copy);
      const int key = key_of(step, copy), row = key - a.block_size.divide(key) * block_size;
      const uint32_t target = slot + copy * p_.copy_rows / 8 * Shape::kTileGroup + copy * p_.copy_rows % 8 * kAtomRow;
      if (p_.whole_copies) {
        tensor_copy(target, map, full, 0, 0, 0, tile_.kv_head * (block_size / 8) + row / 8, block);
      } else {
#pragma unroll
        for (int atom = 0; atom < Shape::kAtoms; ++atom) {
          tensor_copy(target + atom * Shape::kTileAtom, map, full, atom * 64, row, tile_.kv_head, block);
        }
      }
    }
  }

  const PrefillParams& p_;
  Control<kD>* control_;
  uint32_t ring_;
  int lane_;
  bool keys_, values_;  // what this warp brings
  Tile tile_;
  Place<Shape::kSlots> place_;
};

// The block's next item of work: its own number first, then from the counter, or to and fro: 0 1 2 | 5 4 3 | 6 7 8 | ...
__device__ __forceinline__ int deal(const PrefillParams& p, int round, int lane) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  if (round == 0) return block;
  if (p.counters == nullptr) return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  int dealt = 0;
  if (lane == 0) dealt = atomicAdd(p.counters, 1);
  return blocks + __shfl_sync(0xffffffffu, dealt, 0);
}

// The last block to leave clears the counters for the next launch.
__device__ __forceinline__ void end_dealing(const PrefillParams& p) {
  if (p.counters == nullptr) return;
  __threadfence();
  if (atomicAdd(p.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) p.counters[0] = p.counters[1] = 0;
}

// The other producer warps: the first plans, all bring queries.
template <typename T, int kD>
__device__ __forceinline__ void bring_queries(const PrefillParams& p, Control<kD>* control, uint32_t queries, int warp, int lane) {
  using Shape = WgmmaShape<kD>;
  constexpr int kChunks = kD / 8;
  const AttentionParams& a = p.attention;
  Place<Shape::kQuerySlots> place;
  for (int round = 0;;) {
    const uint32_t planned = shared_address(&control->planned[place.slot]);
    const uint32_t full = shared_address(&control->queries_full[place.slot]);
    if (warp == kCopiers) {
      mbarrier_wait(shared_address(&control->queries_empty[place.slot]), place.parity ^ 1);
      Tile tile{};
      int item;
      do {
        item = deal(p, round++, lane);
      } while (item < p.tiles * a.num_kv_heads && !plan_tile<Shape::kRows, Shape::kKeys>(p, item, lane, tile));
      if (item >= p.tiles * a.num_kv_heads) tile.steps = -1;
      if (lane == 0) {
        control->tile[place.slot] = tile;
        mbarrier_arrive(planned);
      }
    }
    mbarrier_wait(planned, place.parity);
    const Tile tile = control->tile[place.slot];
    if (tile.steps >= 0) {
      const T* source = static_cast<const T*>(a.query) + tile.first_query * a.query_token_stride +
                        tile.kv_head * a.group_size * a.query_head_stride;
      const uint32_t target = queries + place.slot * Shape::kQueryBytes;
#pragma unroll 4
      for (int i = (warp - kCopiers) * 32 + lane; i < Shape::kRows * kChunks; i += (4 - kCopiers) * 32) {
        const int row = i / kChunks, chunk = i % kChunks;
        const int index = tile.first_row + row;
        const bool valid = index < tile.total_rows && chunk * 8 < a.head_size;
        const int token = p.group.divide(index), head = index - token * a.group_size;
        const T* from = source + token * a.query_token_stride + head * a.query_head_stride + chunk * 8;
        copy_async_16(target + chunk / 8 * Shape::kQueryAtom + row * kAtomRow + ((chunk ^ row) & 7) * 16, valid ? from : source,
                      valid);
      }
      commit_copies();
      wait_copies<0>();
      async_proxy_fence();
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full);
    if (tile.steps < 0) break;
    place.next();
  }
  if (warp == kCopiers && lane == 0) end_dealing(p);
}

}  // namespace research_engine::cuda::prefill
