// sample: one token a row of logits, by temperature, top-k, top-p, min-p, penalties, biases and a mask, without a sort; and its
// log-probability, its rank and the most probable tokens beside it.
//
// Definition csrc/common/sampling_math.h: integer costs and weights, so that sums do not depend on their order and a draw is the
//            same token here, on the CPU and in any batch.
// Layout     logits [S, V], rows strided. A row belongs to a cluster of 1, 2, 4 or 8 thread blocks of 512 threads, two to a
//            multiprocessor: few where rows fill the GPU, for every round of blocks has latencies of its own. Its vocabulary is cut
//            into steps of 32 vectors of 16 bytes; a block has a run of neighbouring steps, a warp a run of its block's. Blocks
//            tell each other sums and maxima through mail in shared memory.
// Algorithm  1. Penalties and biases: changed logits go to the cluster's slice of the workspace, their bits to a bitmap in shared
//               memory; the mask's bits are read beside the logits. Logits stay as they are, and so log-probabilities are of them.
//            2. Copy the row to shared memory, four steps on their way at a time, and find its largest logit, two at a time where
//               they have 16 bits. As much as fits stays there; the rest passes through a ring of four steps, and is copied again
//               from the L2 cache when it is needed again. First mail. Greedy rows end here.
//            3. Without truncation: the mass of all tokens (second mail); the block that holds the drawn point finds the warp by
//               the warps' masses, then gives that warp's steps to its warps, one each.
//            4. Otherwise a bound: no token of a cost above it can be kept. By min-p; by top-k: the worst of the blocks' k/n-th
//               best of their threads' best tokens; by top-p: a guess of some 2,500 tokens by the same means, listed while the mass
//               is summed, right if they have it; failing that, tokens that, all together, weigh less than 1 - p of the mass.
//            5. Up to 4,096 tokens within the bound, which is usual, are listed, and the cluster's first block goes on alone.
//            6. top-k, then top-p: a radix select over the 30 bits of the cost, 10 at a time, by histograms of counts and masses
//               in shared memory; ties at the cut are kept by id. Without a list the first histogram is of the row, and its bin at
//               the cut becomes the list. The draw: by a histogram of the masses over ids, or as in step 3.
// Roofline   memory: S V elements read once (256 x 131,072 in 16 bits: 67 MB, 14 us of 4.69 TB/s), given some 32 KiB under way in
//            a multiprocessor; 64 KiB are. A draw adds 20 instructions a logit (21 us of issue slots at 256 x 131,072) and what of
//            the row is not in shared memory: three quarters there, from an L2 cache that is smaller than the rows.
// Versions   1 a block of 1,024 threads a row: 157 us at 256 x 128,256 in float32, 56 us for one row, whose block walked the drawn
//              warp's steps one after the other and converted between integers and floats three times a logit.
//            2 clusters as large as keep a row in shared memory, weights without conversions, two blocks a multiprocessor: 65 us
//              greedy and 100 us drawn at 256 x 131,072, in four rounds of blocks; 10 and 14 us for one row.
//            3 one round of blocks where rows fill the GPU, and vectors loaded ahead into registers: 75 us greedy, 106 us drawn and
//              338 us by top-p at 256 x 131,072. The compiler kept those vectors in local memory, so that each load was waited for
//              where it was made: some 7 KB a microsecond and multiprocessor.
//            4 this one: asynchronous copies, which no register waits for. Tokens of a row without a list are measured eight at a
//              time: 30 us greedy, 74 drawn, 62 by top-k, 254 by top-p at 256 x 131,072; 9 and 14 us for one row.
#pragma once

#include "cluster.cuh"
#include "mma.cuh"
#include "sampling_params.cuh"
#include "sampling_weights.cuh"

namespace research_engine::cuda {
namespace {

using namespace sampling;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBlocksAnSm = 2;
constexpr int kMostBlocks = 8;      // of a row
constexpr int kBins = 2 * kThreads;  // of a histogram: 10 bits of the cost
constexpr int kListed = 4096;
constexpr int kGuessed = 2560;  // tokens that top-p is tried on first
constexpr int kAhead = 4;  // vectors on their way to a thread; a power of two
constexpr uint32_t kAll = 0xffffffffu;
constexpr int64_t kElsewhere = INT32_MIN;  // the token, in blocks that were not needed to find it

struct alignas(8) Listed {
  uint32_t key;  // a cost, or a logit's bits
  int id;
};

struct Histogram {
  uint32_t count[kBins], low[kBins], high[kBins];  // a mass is split in two, each of which adds up in 32 bits
};

// What a block tells the others of its row.
struct Mail {
  uint64_t sum, more, most, rest;
  float top, raw, least;
  int id;
};

struct Shared {
  Histogram bins;
  Listed list[kListed];
  Mail mail[2][kMostBlocks];
  uint64_t sums[kWarps], more[kWarps];
  uint64_t mass[kWarps];  // of the warps' kept tokens
  int orders[kWarps];
  // Results that one thread leaves for all.
  Mail found;
  int num_there, winner;  // tokens in the list, or wanted for it
};

// What is kept: tokens of a cost below `cost`, and those of `cost` up to `id`; its mass. Measures tokens by their weight, or counts
// those of `cost`.
struct Cut {
  uint32_t cost;
  int id;
  uint64_t mass;
  bool counts = false;
  __device__ __forceinline__ uint64_t operator()(uint32_t c, int i) const {
    if (counts) return c == cost;
    return c < cost || (c == cost && i <= id) ? weight_of(c) : 0;
  }
};

// Threads that have one of the n best tokens of a block, if these are dealt out by chance.
__device__ __forceinline__ int threads_reaching(int n) {
  return static_cast<int>(kThreads * (1.0f - expf(static_cast<float>(-n) / kThreads)));
}

// A block's part of a row. kChanges: there may be penalties, biases or a mask.
template <typename T, bool kChanges> class Row {
  static constexpr int kW = kWidth<T>;

 public:
  __device__ __forceinline__ Row(const SamplingParams& p, char* shared, int row)
      : p_(p), row_(row), rank_(blockIdx.x % p.num_blocks), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {
    s_ = reinterpret_cast<Shared*>(shared);
    cache_ = reinterpret_cast<uint4*>(shared + (sizeof(Shared) + 15) / 16 * 16);
    edited_ = reinterpret_cast<uint32_t*>(cache_ + static_cast<int64_t>(kWarps) * (p.cached_steps + p.ring_steps) * 32);
    logits_ = static_cast<const T*>(p.logits) + row * p.row_stride;
    changed_ = p.workspace + static_cast<int64_t>(blockIdx.x / p.num_blocks) * p.vocab_size;
    block_step_ = min(rank_ * p.block_steps, p.num_steps);
    block_end_ = min(block_step_ + p.block_steps, p.num_steps);
    allowed_ = kChanges && p.allowed != nullptr ? p.allowed + row * p.allowed_stride : nullptr;
  }

  __device__ __forceinline__ void run() {
    if (p_.num_blocks > 1) cluster_arrive_relaxed();  // the others run from the wait on
    temperature_ = p_.temperature[row_];
    const bool greedy = !(temperature_ > 0.0f);
    scale_ = kCostScale / temperature_;
    const int top_k = p_.top_k != nullptr ? p_.top_k[row_] : 0;
    top_k_ = !greedy && top_k > 0 && top_k < p_.vocab_size ? top_k : 0;
    top_p_ = !greedy && p_.top_p != nullptr ? p_.top_p[row_] : 1.0f;
    if (kChanges) edits_ = edit();
    first_pass();
    const float raw = block_max(raw_best_), top = kChanges ? block_max(best_) : raw;
    Mail mail{};
    mail.top = top;
    mail.raw = raw;
    mail.id = greedy ? first_of(top) : INT32_MAX;
    const int reached = top_k_ > 0 ? share_of_block(top_k_) : top_p_ < 1.0f ? threads_reaching(share_of_block(kGuessed)) : 0;
    mail.least = reached > 0 ? nth_best(reached, best_, top, scale_) : -INFINITY;
    if (p_.num_blocks > 1) cluster_wait();
    const Mail* all = exchange(mail);
    raw_top_ = top_ = -INFINITY;
    float least = top_k_ > 0 ? INFINITY : -INFINITY;
    int first = INT32_MAX;
    for (int r = 0; r < p_.num_blocks; ++r) {
      raw_top_ = nan_max(raw_top_, all[r].raw);
      if (all[r].top > top_) {
        top_ = all[r].top;
        first = all[r].id;
      }
      least = top_k_ > 0 ? fminf(least, all[r].least) : fmaxf(least, all[r].least);
    }
    int64_t token = raw_top_ != raw_top_ ? kNotANumber : raw_top_ == INFINITY || top_ == INFINITY ? kInfinite : kNothingLeft;
    if (token == kNothingLeft && top_ > -INFINITY) token = greedy ? first : draw(least);
    bool known_to_all = greedy || token < 0;
    if (p_.logprobs != nullptr) {
      token = tell(token);
      known_to_all = true;
      report(token);
    }
    if (token == kElsewhere || (known_to_all && rank_ != 0)) return;
    if (threadIdx.x == 0) p_.token_ids[row_] = token;
    if (p_.count_drawn && token >= 0) count(static_cast<int>(token));
  }

 private:
  // --- sampling_select.cuh
  __device__ __forceinline__ int64_t draw(float least);
  __device__ __forceinline__ uint32_t bound_of(uint64_t weight) const;
  __device__ __forceinline__ float least_logit() const;
  __device__ __forceinline__ float nth_best(int n, float best, float top, float scale);
  __device__ __forceinline__ const Mail* sum_masses(bool lists);
  __device__ __forceinline__ const Mail* sum_bounded(const Cut& cut);
  __device__ __forceinline__ void clear_bins();
  __device__ __forceinline__ void clear_list();
  __device__ __forceinline__ void append(uint32_t key, int id);
  __device__ __forceinline__ void list_tokens();
  __device__ __forceinline__ Mail list_mail();
  __device__ __forceinline__ int gather_list(const Mail* all);
  __device__ __forceinline__ void fill_bins(uint32_t path, int shift, int listed);
  __device__ __forceinline__ int list_bin(uint32_t path, int shift);
  __device__ __forceinline__ Cut select(bool by_mass, uint64_t target);
  __device__ __forceinline__ int tie(uint32_t wanted, uint64_t n);
  __device__ __forceinline__ int draw_listed(uint64_t target, const Cut& cut);
  __device__ __forceinline__ int64_t walk(const Mail* all, uint64_t target, const Cut& cut);
  // --- sampling_report.cuh
  __device__ __forceinline__ void report(int64_t token);
  __device__ __forceinline__ void report_top(float least);
  __device__ __forceinline__ void write_top(int place, int64_t id, float x);
  __device__ __forceinline__ void count(int token);

  // --- Logits

  // Step 1: changed logits of this part and their bits. False when the row has none.
  __device__ __forceinline__ bool edit() {
    const int slot = p_.slots != nullptr ? p_.slots[row_] : -1;
    const bool known = slot >= 0 && slot < p_.num_slots;
    const int seen = known ? min(max(p_.seen_lengths[slot], 0), p_.seen_capacity) : 0;
    const float repetition = known ? p_.repetition[row_] : 1.0f, presence = known ? p_.presence[row_] : 0.0f;
    const float frequency = known ? p_.frequency[row_] : 0.0f;
    const bool penalties = seen > 0 && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
    if (!penalties && p_.num_biases == 0) return false;
    for (int i = threadIdx.x; i < p_.block_steps * kW; i += kThreads) edited_[i] = 0;
    __syncthreads();
    const int32_t* tokens = p_.bias_tokens + row_ * p_.bias_stride;
    const float* values = p_.bias_values + row_ * p_.bias_stride;
    for (int i = threadIdx.x; i < p_.num_biases; i += kThreads) {
      if (is_here(tokens[i]) && values[i] > -INFINITY) change(tokens[i], raw_logit(tokens[i]) + values[i]);
    }
    __syncthreads();
    if (penalties) {
      const int32_t* list = p_.seen_tokens + slot * p_.seen_stride;
      const int32_t* counts = p_.seen_counts + slot * p_.seen_stride;
      for (int i = threadIdx.x; i < seen; i += kThreads) {
        const int id = list[i];
        if (!is_here(id)) continue;
        const float x = edited_bits(id) & 1 ? changed_[id] : raw_logit(id);
        change(id, penalize(x, repetition, presence, frequency, counts[i]));
      }
      __syncthreads();
    }
    for (int i = threadIdx.x; i < p_.num_biases; i += kThreads) {
      if (is_here(tokens[i]) && values[i] == -INFINITY) change(tokens[i], -INFINITY);
    }
    __syncthreads();
    return true;
  }

  __device__ __forceinline__ bool is_here(int id) const {
    return id >= first_id(block_step_, 0) && id < min(first_id(block_end_, 0), p_.vocab_size);
  }
  __device__ __forceinline__ float raw_logit(int id) const { return to_float(logits_[id]); }
  __device__ __forceinline__ uint32_t edited_bits(int id) const { return edited_[id / 32 - block_step_ * kW] >> id % 32; }
  __device__ __forceinline__ void change(int id, float value) {
    changed_[id] = value;
    atomicOr(&edited_[id / 32 - block_step_ * kW], 1u << id % 32);
  }

  __device__ __forceinline__ static int first_id(int step, int lane) { return (step * 32 + lane) * kW; }
  __device__ __forceinline__ int first_step(int warp) const { return min(block_step_ + warp * p_.warp_steps, block_end_); }
  __device__ __forceinline__ int num_steps(int warp) const {
    return min(p_.warp_steps, block_end_ - first_step(warp));
  }
  __device__ __forceinline__ bool is_whole(int id) const { return p_.aligned && id + kW <= p_.vocab_size; }
  // This lane's vector of a step, element by element; -inf past the vocabulary's end.
  __device__ __forceinline__ uint4 gather(int id) const {
    T elements[kW];
#pragma unroll
    for (int e = 0; e < kW; ++e) elements[e] = id + e < p_.vocab_size ? logits_[id + e] : from_float<T>(-INFINITY);
    uint4 raw;
    memcpy(&raw, elements, sizeof(raw));
    return raw;
  }
  __device__ __forceinline__ uint4 fetch(int step) const {
    const int id = first_id(step, lane_);
    return is_whole(id) ? *reinterpret_cast<const uint4*>(logits_ + id) : gather(id);
  }
  // Where this lane's vector of a warp's step is in shared memory: for good, or in the warp's ring.
  __device__ __forceinline__ uint4* place(int warp, int step) const {
    const int beyond = step - p_.cached_steps;
    const int slot = beyond < 0 ? step : p_.cached_steps + (beyond & (p_.ring_steps - 1));
    return cache_ + (warp * (p_.cached_steps + p_.ring_steps) + slot) * 32 + lane_;
  }
  // A vector never crosses a word of 32 bits.
  __device__ __forceinline__ void apply_changes(int id, float (&x)[kW]) const {
    if (!kChanges || id >= p_.vocab_size) return;
    if (edits_) {
      const uint32_t bits = edited_bits(id);
#pragma unroll
      for (int e = 0; e < kW; ++e) {
        if (bits >> e & 1) x[e] = changed_[id + e];
      }
    }
    if (allowed_ != nullptr) {
      const uint32_t bits = static_cast<uint32_t>(allowed_[id / 32]) >> id % 32;
#pragma unroll
      for (int e = 0; e < kW; ++e) x[e] = bits >> e & 1 ? x[e] : -INFINITY;
    }
  }

  // Calls f(step, vector) for this thread's vectors of steps from `step` to `steps` of its warp, in ascending order. Those from
  // `missing` on are brought to shared memory by asynchronous copies, which take no register while they are on their way. A thread
  // reads what it copied itself.
  template <typename F> __device__ __forceinline__ void stream(int step, int steps, int missing, F&& f) const {
    const int begin = first_id(first_step(warp_), lane_), ahead = (p_.ring_steps > 0 ? p_.ring_steps : kAhead) - 1;
    const T* from = logits_ + begin;
    missing = max(missing, step);
#pragma unroll 1
    for (int at = step - ahead; at < steps; ++at) {
      const int next = at + ahead;
      if (next >= missing && next < steps) {
        const int id = begin + next * (32 * kW);
        uint4* to = place(warp_, next);
        if (is_whole(id)) {
          copy_async_16(shared_address(to), from + next * (32 * kW), true);
        } else {
          *to = gather(id);
        }
      }
      commit_copies();  // a group a step, empty ones too
      if (at < step) continue;
      if (ahead > 0) {
        wait_copies<kAhead - 1>();
      } else {
        wait_copies<0>();
      }
      const uint4 raw = *place(warp_, at);
      f(at, raw);
    }
  }

  // Calls f(first id, logits, their largest) for this thread's vectors, or the ones of steps from `step` to `steps`, in ascending
  // order.
  template <bool kRaw, typename F> __device__ __forceinline__ void visit(F&& f) const { visit<kRaw>(f, 0, num_steps(warp_)); }
  template <bool kRaw, typename F> __device__ __forceinline__ void visit(F&& f, int step, int steps) const {
    const int begin = first_step(warp_);
    stream(step, steps, p_.cached_steps, [&](int at, const uint4& raw) {
      const int id = first_id(begin + at, lane_);
      float x[kW];
      widen<T>(raw, x);
      if (!kRaw) apply_changes(id, x);
      f(id, x, kChanges && !kRaw ? largest_of(x) : vector_max<T>(raw));
    });
  }

  // Calls f(cost, id) for this thread's tokens within the bound; they reach least_. One after the other where they are few.
  template <typename F> __device__ __forceinline__ void visit_bounded(bool few, F&& f) const {
    if (best_ < least_) return;
    visit<false>([&](int first, const float (&x)[kW], float most) {
      if (most < least_) return;
      if (few) {
        pick_bounded(first, x, f);
        return;
      }
#pragma unroll
      for (int e = 0; e < kW; ++e) {
        const uint32_t c = cost(x[e]);
        if (x[e] >= least_ && c <= bound_) f(c, first + e);
      }
    });
  }
  template <typename F> __device__ __forceinline__ void pick_bounded(int first, const float (&x)[kW], F&& f) const {
    uint32_t reaching = 0;
#pragma unroll
    for (int e = 0; e < kW; ++e) reaching |= x[e] >= least_ ? 1u << e : 0;
#pragma unroll 1
    for (; reaching != 0; reaching &= reaching - 1) {
      const int at = __ffs(static_cast<int>(reaching)) - 1;
      float value = x[0];
#pragma unroll
      for (int e = 1; e < kW; ++e) value = at == e ? x[e] : value;
      const uint32_t c = cost(value);
      if (c <= bound_) f(c, first + at);
    }
  }

  // Step 2.
  __device__ __forceinline__ void first_pass() {
    const int begin = first_step(warp_), steps = num_steps(warp_);
    const bool changes = kChanges && (edits_ || allowed_ != nullptr);
    Largest<T> largest;
    float changed_best = -INFINITY, reached = -INFINITY;
    stream(0, steps, 0, [&](int step, const uint4& raw) {
      largest.add(raw);
      if (changes) {
        float x[kW];
        widen<T>(raw, x);
        apply_changes(first_id(begin + step, lane_), x);
        changed_best = fmaxf(changed_best, largest_of(x));
      }
      if (step % kAhead < kAhead - 1 && step + 1 < steps) return;
      const float now = changes ? changed_best : largest.value();
      if (now > reached) {
        reached = now;
        best_step_ = step - step % kAhead;
      }
    });
    raw_best_ = largest.value();
    best_ = changes ? changed_best : raw_best_;
  }
  __device__ __forceinline__ static float largest_of(const float (&x)[kW]) {
    float largest = x[0];
#pragma unroll
    for (int e = 1; e < kW; ++e) largest = fmaxf(largest, x[e]);
    return largest;
  }

  // The smallest id of the block whose logit is `top`.
  __device__ __forceinline__ int first_of(float top) {
    int id = INT32_MAX;
    if (best_ == top) {
      const auto look = [&](int first, const float (&x)[kW], float) {
#pragma unroll
        for (int e = 0; e < kW; ++e) {
          if (x[e] == top) id = min(id, first + e);
        }
      };
      visit<false>(look, best_step_, min(best_step_ + kAhead, num_steps(warp_)));
    }
    return block_min(id);
  }

  // --- Blocks and clusters

  // Tells all blocks of the row, from the first threads' `mine`. Every block's, by rank; good until the exchange after the next.
  // Also a barrier.
  __device__ __forceinline__ const Mail* exchange(const Mail& mine) {
    Mail* all = s_->mail[turn_];
    turn_ ^= 1;
    if (static_cast<int>(threadIdx.x) < p_.num_blocks) {
      store_cluster(cluster_address(shared_address(all + rank_), threadIdx.x), mine);
      if (p_.num_blocks > 1) cluster_fence();
    }
    barrier();
    return all;
  }
  // Of the cluster, and of a block's threads for its own memory; other blocks' memory is for threads behind a fence.
  __device__ __forceinline__ void barrier() const {
    __syncthreads();
    if (p_.num_blocks > 1) {
      cluster_arrive_relaxed();
      cluster_wait();
    }
  }
  __device__ __forceinline__ int share_of_block(int count) const { return (count + p_.num_blocks - 1) / p_.num_blocks; }
  // A token that one block knows, or all, in all blocks.
  __device__ __forceinline__ int64_t tell(int64_t token) {
    Mail mail{};
    mail.id = static_cast<int>(token);
    const Mail* all = exchange(mail);
    int known = all[0].id;
    for (int r = 1; r < p_.num_blocks; ++r) known = max(known, all[r].id);
    return known;
  }

  // The largest over the block, in every thread; NaN where there is one.
  __device__ __forceinline__ float block_max(float value) { return float_of(~block_min(~order_of(value))); }
  __device__ __forceinline__ int block_min(int value) {
    value = __reduce_min_sync(kAll, value);
    if (lane_ == 0) s_->orders[warp_] = value;
    __syncthreads();
    value = __reduce_min_sync(kAll, s_->orders[lane_ % kWarps]);
    __syncthreads();
    return value;
  }

  __device__ __forceinline__ static uint64_t warp_sum(uint64_t value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(kAll, value, mask);
    return value;
  }
  // Inclusive scan over the lanes.
  __device__ __forceinline__ uint64_t warp_scan(uint64_t value) const {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint64_t other = __shfl_up_sync(kAll, value, step);
      if (lane_ >= step) value += other;
    }
    return value;
  }
  // The sum over the block, in every thread; the warps' own sums stay in s_->mass.
  __device__ __forceinline__ uint64_t block_sum(uint64_t value) {
    __syncthreads();
    value = warp_sum(value);
    if (lane_ == 0) s_->mass[warp_] = value;
    __syncthreads();
    return warp_sum(lane_ < kWarps ? s_->mass[lane_] : 0);
  }
  // Inclusive scan over the block; `warps` is scratch. Barriers before and after are the caller's.
  __device__ __forceinline__ uint64_t block_scan(uint64_t value, uint64_t* warps) const {
    const uint64_t within = warp_scan(value);
    if (lane_ == 31) warps[warp_] = within;
    __syncthreads();
    const uint64_t until = warp_scan(lane_ < kWarps ? warps[lane_] : 0);
    return within + (warp_ > 0 ? __shfl_sync(kAll, until, warp_ - 1) : 0);
  }

  __device__ __forceinline__ uint64_t total_of(const Mail* all) const {
    uint64_t total = 0;
    for (int r = 0; r < p_.num_blocks; ++r) total += all[r].sum;
    return total;
  }

  __device__ __forceinline__ uint32_t cost(float x) const { return cost_of(top_ - x, scale_); }

  const SamplingParams& p_;
  int row_, rank_, lane_, warp_, block_step_, block_end_;
  Shared* s_;
  uint4* cache_;
  uint32_t* edited_;  // a bit a token of this part
  const T* logits_;
  float* changed_;  // [V], where the bit is set
  const int32_t* allowed_;
  float temperature_ = 0, scale_ = 0, top_p_ = 1, top_ = 0, raw_top_ = 0;
  float best_ = 0, raw_best_ = 0;  // of this thread
  int best_step_ = 0;              // or one of the kAhead - 1 steps after it
  float least_ = -INFINITY;        // logits below it cost more than the bound
  double norm_ = 0;
  uint32_t bound_ = kCostEnd - 1;
  int top_k_ = 0;    // 0: off
  uint64_t listed_mass_ = 0;
  int listed_ = -1;  // tokens in the first block's list, or -1: it was too short
  int turn_ = 0;
  bool edits_ = false;
};

}  // namespace
}  // namespace research_engine::cuda

#include "sampling_report.cuh"
#include "sampling_select.cuh"
