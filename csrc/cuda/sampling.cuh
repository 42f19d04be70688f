// sample: one token a row of logits, by temperature, top-k, top-p, min-p, penalties, biases and a mask, without a sort; and its
// log-probability, its rank and the most probable tokens beside it.
//
// Definition csrc/common/sampling_math.h: integer costs and weights, so that sums do not depend on their order and a draw is the
//            same token here, on the CPU and in any batch.
// Layout     logits [S, V], rows strided. A row belongs to one thread block of 1,024 threads, one to a multiprocessor. Its
//            vocabulary is cut into steps of 32 vectors of 16 bytes, and a warp has a run of neighbouring steps.
// Algorithm  1. Penalties and biases: changed logits go to the block's slice of the workspace, their bits to a bitmap in shared
//               memory; the mask's bits are read beside the logits. Logits stay as they are, and so log-probabilities are of them.
//            2. Read the row once; its first steps stay in shared memory (190 KiB), the others are read again from the L2 cache.
//               Every thread keeps its largest logit. Greedy rows end here.
//            3. Bound: no token of a cost above it can be kept. By min-p; by top-k: the k-th best of the 1,024 threads' best
//               tokens; by top-p: tokens that, all together, weigh less than 1 - p of the mass (one pass for the mass).
//            4. If at most 2,048 tokens are within the bound, which is usual, they are listed, and all that follows reads the list.
//            5. top-k, then top-p: a radix select over the 30 bits of the cost, 10 at a time, by histograms of counts and masses
//               in shared memory; ties at the cut are kept by id.
//            6. Masses of the warps, in the order of ids; the warp that holds the drawn point walks its steps.
// Roofline   memory: S V elements read once (256 x 131,072 in 16 bits: 67 MB, 14 us of 4.69 TB/s); beyond 190 KiB of a row each
//            pass reads the rest from L2. About 10 operations a token and pass.
// Versions   1 this one. A row's blocks were not spread over a cluster: from 132 rows on every multiprocessor has a row.
// Reached    not measured yet.
#pragma once

#include <algorithm>

#include "../common/cuda_dtype.h"
#include "../common/cuda_launch.h"
#include "../common/sampling_math.h"

namespace research_engine::cuda {
namespace {

using namespace sampling;

constexpr const char* kOp = "sample";
constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBins = 1024;  // of a histogram: 10 bits of the cost
constexpr int kListed = 2048;
constexpr int kAhead = 4;  // vectors of the first pass in flight in a thread
constexpr uint32_t kAll = 0xffffffffu;

struct SamplingParams {
  const void* logits;
  int64_t row_stride, seen_stride, bias_stride, allowed_stride;
  int num_rows, vocab_size, num_steps, warp_steps, cached_steps;  // cached_steps: of a warp, in shared memory
  bool aligned;
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t *seeds, *positions;
  const float *repetition, *presence, *frequency;
  int32_t *seen_tokens, *seen_counts, *seen_lengths;
  const int32_t* slots;
  int num_slots, seen_capacity;
  bool count_drawn;
  const int32_t* bias_tokens;
  const float* bias_values;
  int num_biases;
  const int32_t* allowed;
  float* workspace;
  int64_t *token_ids, *ranks, *top_ids;
  float *logprobs, *top_logprobs;
  int num_top;
};

struct Listed {
  uint32_t key;  // a cost, or a logit's bits
  int id;
};

struct Histogram {
  uint32_t count[kBins], low[kBins], high[kBins];  // mass: low + 2^12 high, to be shifted by the octave
};

struct Shared {
  Histogram bins;
  Listed list[kListed];
  uint64_t sums[kWarps], more[kWarps];
  float tops[kWarps];
  int ids[kWarps];
  uint64_t mass[kWarps];  // of the warps' kept tokens
  // Results that one thread leaves for all.
  int listed, bin, winner;
  uint64_t before_count, before_mass, total_count, total_mass, rest;
  float top;
};

// What is kept: tokens of a cost below `cost`, and those of `cost` up to `id`.
struct Cut {
  uint32_t cost;
  int id;
  uint64_t mass;
  __device__ bool keeps(uint32_t c, int i) const { return c < cost || (c == cost && i <= id); }
};

template <typename T> class Row {
  static constexpr int kW = kWidth<T>;

 public:
  __device__ __forceinline__ Row(const SamplingParams& p, char* shared, int row) : p_(p), row_(row) {
    lane_ = threadIdx.x % 32;
    warp_ = threadIdx.x / 32;
    s_ = reinterpret_cast<Shared*>(shared);
    cache_ = reinterpret_cast<uint4*>(shared + (sizeof(Shared) + 15) / 16 * 16);
    edited_ = reinterpret_cast<uint32_t*>(cache_ + static_cast<int64_t>(kWarps) * p.cached_steps * 32);
    logits_ = static_cast<const T*>(p.logits) + row * p.row_stride;
    changed_ = p.workspace + static_cast<int64_t>(blockIdx.x) * p.vocab_size;
    first_step_ = min(warp_ * p.warp_steps, p.num_steps);
    end_step_ = min(first_step_ + p.warp_steps, p.num_steps);
    allowed_ = p.allowed == nullptr ? nullptr : p.allowed + row * p.allowed_stride;
  }

  __device__ __forceinline__ void run() {
    const bool edits = edit();
    float best = -INFINITY, raw_best = -INFINITY;  // of this thread
    bool not_a_number = false, infinite = false;
    first_pass(edits, best, raw_best, not_a_number, infinite);
    const bool any_nan = __syncthreads_or(not_a_number), any_infinite = __syncthreads_or(infinite);
    const float top = block_max(best);
    int64_t token = any_nan ? kNotANumber : any_infinite || top == INFINITY ? kInfinite : kNothingLeft;
    if (token == kNothingLeft && top > -INFINITY) token = draw(edits, top, best);
    if (threadIdx.x == 0) p_.token_ids[row_] = token;
    if (p_.logprobs != nullptr) report(token, raw_best);
    if (p_.count_drawn && token >= 0) count(static_cast<int>(token));
    __syncthreads();  // shared memory is the next row's
  }

 private:
  // Step 1: changed logits and their bits. False when the row has none.
  __device__ __forceinline__ bool edit() {
    const int slot = p_.slots != nullptr ? p_.slots[row_] : -1;
    const bool known = slot >= 0 && slot < p_.num_slots;
    const int seen = known ? min(max(p_.seen_lengths[slot], 0), p_.seen_capacity) : 0;
    const float repetition = known ? p_.repetition[row_] : 1.0f, presence = known ? p_.presence[row_] : 0.0f;
    const float frequency = known ? p_.frequency[row_] : 0.0f;
    const bool penalties = seen > 0 && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
    if (!penalties && p_.num_biases == 0) return false;
    for (int i = threadIdx.x; i < (p_.vocab_size + 31) / 32; i += kThreads) edited_[i] = 0;
    __syncthreads();
    const int32_t* tokens = p_.bias_tokens + row_ * p_.bias_stride;
    const float* values = p_.bias_values + row_ * p_.bias_stride;
    for (int i = threadIdx.x; i < p_.num_biases; i += kThreads) {
      if (in_vocabulary(tokens[i]) && values[i] > -INFINITY) change(tokens[i], raw_logit(tokens[i]) + values[i]);
    }
    __syncthreads();
    if (penalties) {
      const int32_t* list = p_.seen_tokens + slot * p_.seen_stride;
      const int32_t* counts = p_.seen_counts + slot * p_.seen_stride;
      for (int i = threadIdx.x; i < seen; i += kThreads) {
        const int id = list[i];
        if (!in_vocabulary(id)) continue;
        const float x = edited_[id / 32] >> id % 32 & 1 ? changed_[id] : raw_logit(id);
        change(id, penalize(x, repetition, presence, frequency, counts[i]));
      }
      __syncthreads();
    }
    for (int i = threadIdx.x; i < p_.num_biases; i += kThreads) {
      if (in_vocabulary(tokens[i]) && values[i] == -INFINITY) change(tokens[i], -INFINITY);
    }
    __syncthreads();
    return true;
  }

  __device__ __forceinline__ bool in_vocabulary(int id) const { return id >= 0 && id < p_.vocab_size; }
  __device__ __forceinline__ float raw_logit(int id) const { return to_float(logits_[id]); }
  __device__ __forceinline__ void change(int id, float value) {
    changed_[id] = value;
    atomicOr(&edited_[id / 32], 1u << id % 32);
  }

  __device__ __forceinline__ int first_id(int step) const { return (step * 32 + lane_) * kW; }
  __device__ __forceinline__ uint4 fetch(int step) const {
    const int id = first_id(step);
    if (p_.aligned && id + kW <= p_.vocab_size) return *reinterpret_cast<const uint4*>(logits_ + id);
    return load_elements(logits_ + min(id, p_.vocab_size - 1), p_.vocab_size - id);
  }
  __device__ __forceinline__ uint4 again(int step) const {
    const int within = step - first_step_;
    return within < p_.cached_steps ? cache_[(warp_ * p_.cached_steps + within) * 32 + lane_] : fetch(step);
  }
  // Logits of a step's vector; -inf past the vocabulary's end.
  __device__ __forceinline__ void raw_values(const uint4& raw, int id, float (&x)[kW]) const {
    unpack<T>(raw, x);
    if (id + kW > p_.vocab_size) {
#pragma unroll
      for (int e = 0; e < kW; ++e) x[e] = id + e < p_.vocab_size ? x[e] : -INFINITY;
    }
  }
  // The same with changes and mask. A vector never crosses a word of 32 bits.
  __device__ __forceinline__ void apply_changes(bool edits, int id, float (&x)[kW]) const {
    if (id >= p_.vocab_size) return;
    if (edits) {
      const uint32_t bits = edited_[id / 32] >> id % 32;
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

  // Calls f(first id, logits) for this thread's vectors in ascending order.
  template <bool kRaw, typename F> __device__ __forceinline__ void visit(bool edits, F&& f) const {
    for (int step = first_step_; step < end_step_; ++step) {
      const int id = first_id(step);
      float x[kW];
      raw_values(again(step), id, x);
      if (!kRaw) apply_changes(edits, id, x);
      f(id, x);
    }
  }

  // Step 2.
  __device__ __forceinline__ void first_pass(bool edits, float& best, float& raw_best, bool& not_a_number, bool& infinite) {
    for (int at = first_step_; at < end_step_; at += kAhead) {
      uint4 raw[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (at + a < end_step_) raw[a] = fetch(at + a);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (at + a >= end_step_) break;
        const int within = at + a - first_step_, id = first_id(at + a);
        if (within < p_.cached_steps) cache_[(warp_ * p_.cached_steps + within) * 32 + lane_] = raw[a];
        float x[kW];
        raw_values(raw[a], id, x);
#pragma unroll
        for (int e = 0; e < kW; ++e) {
          not_a_number |= x[e] != x[e];
          raw_best = fmaxf(raw_best, x[e]);
        }
        apply_changes(edits, id, x);
#pragma unroll
        for (int e = 0; e < kW; ++e) best = fmaxf(best, x[e]);
      }
    }
    infinite = raw_best == INFINITY;
    __syncthreads();
  }

  __device__ __forceinline__ float block_max(float value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, __shfl_xor_sync(kAll, value, mask));
    if (lane_ == 0) s_->tops[warp_] = value;
    __syncthreads();
    value = s_->tops[lane_];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, __shfl_xor_sync(kAll, value, mask));
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
  // The sum over the thread block, in every thread; the warps' own sums stay in s_->mass.
  __device__ __forceinline__ uint64_t block_sum(uint64_t value) {
    value = warp_sum(value);
    if (lane_ == 0) s_->mass[warp_] = value;
    __syncthreads();
    return warp_sum(s_->mass[lane_]);
  }

  // Steps 3 to 6: the token of a row whose largest logit is `top`.
  __device__ __forceinline__ int64_t draw(bool edits, float top, float best) {
    const float temperature = p_.temperature[row_];
    if (!(temperature > 0.0f)) return first_of(edits, top, best);
    top_ = top;
    scale_ = kCostScale / temperature;
    edits_ = edits;
    const int top_k = p_.top_k != nullptr ? p_.top_k[row_] : 0;
    const bool by_count = top_k > 0 && top_k < p_.vocab_size;
    const float top_p = p_.top_p != nullptr ? p_.top_p[row_] : 1.0f;
    const bool by_mass = top_p < 1.0f;
    const uint64_t least = least_weight(p_.min_p != nullptr ? p_.min_p[row_] : 0.0f);
    bound_ = least > 1 ? cost_bound(least) : kCostEnd - 1;
    listed_ = -1;

    uint64_t total = 0;
    if (!by_count) total = sum_masses();
    Cut cut{kCostEnd, 0, total};
    if (by_count || by_mass) {
      if (by_count) {
        bound_ = min(bound_, bound_by_threads(top_k, best));
      } else {
        const uint64_t spare = total - share_of(top_p, total);
        const uint64_t weight = spare / static_cast<uint64_t>(p_.vocab_size);
        if (weight > 1) bound_ = min(bound_, cost_bound(weight));
      }
      list_tokens();
      if (by_count) cut = select(false, static_cast<uint64_t>(top_k));
      if (by_mass) cut = select(true, share_of(top_p, cut.mass));
      total = cut.mass;
      sum_kept(cut);
    }
    return walk(draw_target(random_bits(static_cast<uint64_t>(p_.seeds[row_]), static_cast<uint64_t>(p_.positions[row_])), total),
                [&](uint32_t cost, int id) { return cut.keeps(cost, id) ? weight_of(cost) : 0; });
  }

  // The smallest id whose logit is `top`.
  __device__ __forceinline__ int64_t first_of(bool edits, float top, float best) {
    int id = INT32_MAX;
    if (best == top) {
      visit<false>(edits, [&](int first, const float (&x)[kW]) {
#pragma unroll
        for (int e = 0; e < kW; ++e) {
          if (x[e] == top) id = min(id, first + e);
        }
      });
    }
    return block_min(id);
  }
  __device__ __forceinline__ int block_min(int value) {
    value = __reduce_min_sync(kAll, value);
    if (lane_ == 0) s_->ids[warp_] = value;
    __syncthreads();
    value = __reduce_min_sync(kAll, s_->ids[lane_]);
    __syncthreads();
    return value;
  }

  __device__ __forceinline__ uint32_t cost(float x) const { return cost_of(top_ - x, scale_); }

  // Calls f(cost, id) for every token within the bound: from the list, or for this thread's part of the row.
  template <typename F> __device__ __forceinline__ void each(F&& f) const {
    if (listed_ >= 0) {
      for (int i = threadIdx.x; i < listed_; i += kThreads) f(s_->list[i].key, s_->list[i].id);
      return;
    }
    visit<false>(edits_, [&](int first, const float (&x)[kW]) {
#pragma unroll
      for (int e = 0; e < kW; ++e) {
        const uint32_t c = cost(x[e]);
        if (c <= bound_) f(c, first + e);
      }
    });
  }

  // The mass within the bound, in every thread, and of each warp's part in s_->mass.
  __device__ __forceinline__ uint64_t sum_masses() {
    uint64_t sum = 0;
    each([&](uint32_t c, int) { sum += weight_of(c); });
    return block_sum(sum);
  }

  // The masses of what is kept, by warp. A token's warp is the one whose part of the row it is in.
  __device__ __forceinline__ void sum_kept(const Cut& cut) {
    __syncthreads();
    if (listed_ < 0) {
      uint64_t sum = 0;
      each([&](uint32_t c, int id) { sum += cut.keeps(c, id) ? weight_of(c) : 0; });
      block_sum(sum);
      return;
    }
    if (threadIdx.x < kWarps) s_->mass[threadIdx.x] = 0;
    __syncthreads();
    each([&](uint32_t c, int id) {
      if (cut.keeps(c, id)) add_mass(id, weight_of(c));
    });
    __syncthreads();
  }
  __device__ __forceinline__ void add_mass(int id, uint64_t mass) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&s_->mass[id / (32 * kW) / p_.warp_steps]), static_cast<unsigned long long>(mass));
  }

  // A cost that at least k tokens do not exceed: the end of the bin that holds the k-th best of the threads' best.
  __device__ __forceinline__ uint32_t bound_by_threads(int k, float best) {
    if (k > kThreads) return kCostEnd - 1;
    clear_bins();
    const uint32_t c = cost(best);
    if (c < kCostEnd) atomicAdd(&s_->bins.count[c >> 20], 1u);
    __syncthreads();
    const uint64_t there = s_->bins.count[threadIdx.x];
    const uint64_t until = block_scan(there, s_->sums);
    if (threadIdx.x == 0) s_->bin = kBins;
    __syncthreads();
    if (until - there < static_cast<uint64_t>(k) && until >= static_cast<uint64_t>(k)) s_->bin = threadIdx.x;
    __syncthreads();
    const int bin = s_->bin;
    __syncthreads();
    return bin == kBins ? kCostEnd - 1 : min((static_cast<uint32_t>(bin) + 1) << 20, kCostEnd) - 1;
  }

  __device__ __forceinline__ void clear_bins() {
    __syncthreads();
    s_->bins.count[threadIdx.x] = s_->bins.low[threadIdx.x] = s_->bins.high[threadIdx.x] = 0;
    __syncthreads();
  }
  // Inclusive scan over the thread block; `warps` is scratch. Barriers before and after are the caller's.
  __device__ __forceinline__ uint64_t block_scan(uint64_t value, uint64_t* warps) const {
    const uint64_t within = warp_scan(value);
    if (lane_ == 31) warps[warp_] = within;
    __syncthreads();
    const uint64_t until = warp_scan(warps[lane_]);
    return within + (warp_ > 0 ? __shfl_sync(kAll, until, warp_ - 1) : 0);
  }

  // Appends to the list; what does not fit is counted alone.
  __device__ __forceinline__ void append(bool wanted, uint32_t key, int id) {
    if (!wanted) return;
    const int place = atomicAdd(&s_->listed, 1);
    if (place < kListed) s_->list[place] = {key, id};
  }

  // Step 4.
  __device__ __forceinline__ void list_tokens() {
    __syncthreads();
    if (threadIdx.x == 0) s_->listed = 0;
    __syncthreads();
    const float least = least_logit();
    for (int step = first_step_; step < end_step_; ++step) {
      if (*static_cast<volatile int*>(&s_->listed) > kListed) break;
      const int id = first_id(step);
      float x[kW];
      raw_values(again(step), id, x);
      apply_changes(edits_, id, x);
#pragma unroll
      for (int e = 0; e < kW; ++e) {
        if (x[e] < least) continue;
        const uint32_t c = cost(x[e]);
        append(c <= bound_, c, id + e);
      }
    }
    __syncthreads();
    if (s_->listed <= kListed) listed_ = s_->listed;
  }
  // A logit below which costs are above the bound; spares most tokens the cost.
  __device__ __forceinline__ float least_logit() const {
    const float distance = (static_cast<float>(bound_) + 1.0f) * 1.0001f / scale_ + fabsf(top_) * 1e-5f;
    return distance < INFINITY ? top_ - distance : -INFINITY;
  }

  // Step 5: the shortest beginning of the tokens within the bound, by (cost, id), of `target` tokens or of a mass of `target`;
  // all of them where that is less.
  __device__ __forceinline__ Cut select(bool by_mass, uint64_t target) {
    uint32_t path = 0;
    uint64_t before_count = 0, before_mass = 0;
#pragma unroll 1
    for (int level = 0; level < 3; ++level) {
      const int shift = 20 - 10 * level;
      clear_bins();
      each([&](uint32_t c, int) {
        if (level > 0 && c >> (shift + 10) != path) return;
        const uint32_t bin = (c >> shift) & (kBins - 1), octave = c >> kCostBits, m = mantissa_of(c);
        const uint32_t mass = octave > 16 ? m >> (octave - 16) : m;
        atomicAdd(&s_->bins.count[bin], 1u);
        atomicAdd(&s_->bins.low[bin], mass & 0xfffu);
        atomicAdd(&s_->bins.high[bin], mass >> 12);
      });
      __syncthreads();
      const uint32_t octave = (path << 10 | threadIdx.x) << shift >> kCostBits;
      const uint64_t count = s_->bins.count[threadIdx.x];
      const uint64_t sum = static_cast<uint64_t>(s_->bins.high[threadIdx.x]) << 12;
      const uint64_t mass = (sum + s_->bins.low[threadIdx.x]) << (octave > 16 ? 0 : 16 - octave);
      const uint64_t counts = before_count + block_scan(count, s_->sums), masses = before_mass + block_scan(mass, s_->more);
      if (level == 0) {
        if (threadIdx.x == kThreads - 1) {
          s_->total_count = counts;
          s_->total_mass = masses;
        }
        __syncthreads();
        target = max(min(target, by_mass ? s_->total_mass : s_->total_count), uint64_t{1});
      }
      const uint64_t until = by_mass ? masses : counts, here = by_mass ? mass : count;
      if (until >= target && until - here < target) {
        s_->bin = threadIdx.x;
        s_->before_count = counts - count;
        s_->before_mass = masses - mass;
        s_->rest = count;
      }
      __syncthreads();
      path = path << 10 | static_cast<uint32_t>(s_->bin);
      before_count = s_->before_count;
      before_mass = s_->before_mass;
    }
    const uint64_t ties = s_->rest, weight = weight_of(path);
    const uint64_t wanted = by_mass ? (target - before_mass + weight - 1) / weight : target - before_count;
    Cut cut{path, INT32_MAX, before_mass + wanted * weight};
    if (wanted < ties) cut.id = static_cast<int>(tie(path, wanted));
    __syncthreads();
    return cut;
  }

  // The id of the n-th token, from 1, of exactly this cost.
  __device__ __forceinline__ int64_t tie(uint32_t wanted, uint64_t n) {
    __syncthreads();
    if (listed_ < 0) {
      uint64_t sum = 0;
      each([&](uint32_t c, int) { sum += c == wanted; });
      block_sum(sum);
    } else {
      if (threadIdx.x < kWarps) s_->mass[threadIdx.x] = 0;
      __syncthreads();
      each([&](uint32_t c, int id) {
        if (c == wanted) add_mass(id, 1);
      });
      __syncthreads();
    }
    return walk(n - 1, [&](uint32_t c, int) { return c == wanted ? uint64_t{1} : uint64_t{0}; });
  }

  // Step 6: the first token, in the order of ids, at which the running sum of weights exceeds `target`; s_->mass has the warps' sums.
  template <typename F> __device__ __forceinline__ int64_t walk(uint64_t target, F&& weight) {
    const uint64_t mine = s_->mass[lane_], until = warp_scan(mine);
    const uint32_t beyond = __ballot_sync(kAll, until > target);
    const int owner = beyond != 0 ? __ffs(static_cast<int>(beyond)) - 1 : kWarps - 1;
    uint64_t rest = target - __shfl_sync(kAll, until - mine, owner);
    if (warp_ == owner) {
      for (int step = first_step_; step < end_step_; ++step) {
        const int id = first_id(step);
        float x[kW];
        raw_values(again(step), id, x);
        apply_changes(edits_, id, x);
        uint64_t weights[kW], sum = 0;
#pragma unroll
        for (int e = 0; e < kW; ++e) {
          const uint32_t c = cost(x[e]);
          weights[e] = c <= bound_ ? weight(c, id + e) : 0;
          sum += weights[e];
        }
        const uint64_t until_lane = warp_scan(sum);
        const uint32_t found = __ballot_sync(kAll, until_lane > rest);
        if (found != 0) {
          if (lane_ == __ffs(static_cast<int>(found)) - 1) {
            rest -= until_lane - sum;
            int e = 0;
#pragma unroll
            for (int i = 0; i < kW; ++i) {
              if (i == e && rest >= weights[i]) {
                rest -= weights[i];
                ++e;
              }
            }
            s_->winner = id + e;
          }
          break;
        }
        rest -= __shfl_sync(kAll, until_lane, 31);
      }
    }
    __syncthreads();
    const int winner = s_->winner;
    __syncthreads();
    return winner;
  }

  // Log-probabilities and ranks, of the logits as they came.
  __device__ __forceinline__ void report(int64_t token, float raw_best) {
    const float top = block_max(raw_best);
    const bool usable = token >= 0 && top > -INFINITY && top < INFINITY;
    uint64_t sum = 0, ahead = 0;
    const float value = usable ? raw_logit(static_cast<int>(token)) : 0.0f;
    if (usable) {
      visit<true>(false, [&](int first, const float (&x)[kW]) {
#pragma unroll
        for (int e = 0; e < kW; ++e) {
          const uint32_t c = cost_of(top - x[e], kCostScale);
          sum += c < kCostEnd ? weight_of(c) : 0;
          ahead += x[e] > value || (x[e] == value && first + e < token);
        }
      });
    }
    sum = block_sum(sum);
    __syncthreads();
    ahead = block_sum(ahead);
    const double norm = log(static_cast<double>(sum)) - kWeightBits * 0.6931471805599453;
    norm_ = norm;
    if (threadIdx.x == 0) {
      p_.logprobs[row_] = usable ? static_cast<float>(static_cast<double>(value) - top - norm) : -INFINITY;
      p_.ranks[row_] = usable ? static_cast<int64_t>(ahead) + 1 : 0;
    }
    if (p_.num_top > 0) report_top(usable, top, raw_best);
  }

  // The most probable tokens in order: those within a bound are listed, and each counts the ones ahead of it.
  __device__ __forceinline__ void report_top(bool usable, float top, float raw_best) {
    const int wanted = p_.num_top;
    for (int i = threadIdx.x; i < wanted; i += kThreads) write_top(i, -1, -INFINITY, top);
    if (!usable) return;
    top_ = top;
    scale_ = kCostScale / 16.0f;  // 443 natural units in 40 octaves
    const uint32_t bound = bound_by_threads(wanted, raw_best);
    if (threadIdx.x == 0) s_->listed = 0;
    __syncthreads();
    if (bound < kCostEnd - 1) {
      visit<true>(false, [&](int first, const float (&x)[kW]) {
#pragma unroll
        for (int e = 0; e < kW; ++e) append(cost(x[e]) <= bound, __float_as_uint(x[e]), first + e);
      });
    }
    __syncthreads();
    const int listed = s_->listed;
    if (listed >= min(wanted, p_.vocab_size) && listed <= kListed) {
      for (int i = threadIdx.x; i < listed; i += kThreads) {
        const float x = __uint_as_float(s_->list[i].key);
        const int id = s_->list[i].id;
        int ahead = 0;
        for (int j = 0; j < listed; ++j) {
          const float other = __uint_as_float(s_->list[j].key);
          ahead += other > x || (other == x && s_->list[j].id < id);
        }
        if (ahead < wanted) write_top(ahead, id, x, top);
      }
      return;
    }
    float last = INFINITY;  // one after the other: few tokens above -inf, or very many alike
    int last_id = -1;
    for (int i = 0; i < min(wanted, p_.vocab_size); ++i) {
      float best = -INFINITY;
      int id = INT32_MAX;
      visit<true>(false, [&](int first, const float (&x)[kW]) {
#pragma unroll
        for (int e = 0; e < kW; ++e) {
          const bool left = (x[e] < last || (x[e] == last && first + e > last_id)) && first + e < p_.vocab_size;
          if (left && (id == INT32_MAX || x[e] > best)) {
            best = x[e];
            id = first + e;
          }
        }
      });
      last = block_max(best);
      last_id = block_min(id != INT32_MAX && best == last ? id : INT32_MAX);
      if (threadIdx.x == 0) write_top(i, last_id, last, top);
    }
  }
  __device__ __forceinline__ void write_top(int place, int64_t id, float x, float top) {
    p_.top_ids[static_cast<int64_t>(row_) * p_.num_top + place] = id;
    p_.top_logprobs[static_cast<int64_t>(row_) * p_.num_top + place] =
        x > -INFINITY ? static_cast<float>(static_cast<double>(x) - top - norm_) : -INFINITY;
  }

  // One more of the drawn token in the row's slot.
  __device__ __forceinline__ void count(int token) {
    const int slot = p_.slots[row_];
    if (slot < 0 || slot >= p_.num_slots) return;
    const int seen = min(max(p_.seen_lengths[slot], 0), p_.seen_capacity);
    int32_t* tokens = p_.seen_tokens + slot * p_.seen_stride;
    int32_t* counts = p_.seen_counts + slot * p_.seen_stride;
    bool found = false;
    for (int i = threadIdx.x; i < seen; i += kThreads) {
      if (tokens[i] == token) {
        ++counts[i];
        found = true;
      }
    }
    if (!__syncthreads_or(found) && threadIdx.x == 0 && seen < p_.seen_capacity) {
      tokens[seen] = token;
      counts[seen] = 1;
      p_.seen_lengths[slot] = seen + 1;
    }
  }

  const SamplingParams& p_;
  int row_, lane_, warp_, first_step_, end_step_;
  Shared* s_;
  uint4* cache_;
  uint32_t* edited_;  // a bit a token
  const T* logits_;
  float* changed_;  // [V], where the bit is set
  const int32_t* allowed_;
  float top_ = 0, scale_ = 0;
  double norm_ = 0;
  uint32_t bound_ = kCostEnd - 1;
  int listed_ = -1;  // tokens in the list, or -1: it was too short
  bool edits_ = false;
};

}  // namespace
}  // namespace research_engine::cuda
