// How sample draws: bound, list, radix select of what is kept, and the walk to the drawn point (steps 3 to 6 of sampling.cuh).
#pragma once

#include "sampling.cuh"

namespace research_engine::cuda {
namespace {

// The token of a row; `least` is a logit that at least top_k tokens reach, or kGuessed at a guess. kElsewhere in blocks that do not
// come to know it.
template <typename T, bool kChanges> __device__ __forceinline__ int64_t Row<T, kChanges>::draw(float least) {
  const bool by_count = top_k_ > 0, by_mass = top_p_ < 1.0f;
  const uint64_t least_kept = least_weight(p_.min_p != nullptr ? p_.min_p[row_] : 0.0f);
  if (least_kept > 1) bound_ = bound_of(least_kept);
  const uint64_t bits = random_bits(static_cast<uint64_t>(p_.seeds[row_]), static_cast<uint64_t>(p_.positions[row_]));

  const uint32_t widest = bound_;
  uint64_t total = 0;
  if (by_count || least_kept > 1) {
    if (by_count) bound_ = min(widest, cost(least));
    list_tokens();
    total = listed_mass_;
  }
  if (!by_count && listed_ < 0) {
    const bool plain = least_kept == 1 && scale_ < INFINITY;
    bound_ = plain && by_mass ? min(widest, cost(least)) : widest;
    const Mail* all = plain ? sum_masses(by_mass) : sum_bounded(Cut{kCostEnd, 0, 0});
    total = total_of(all);
    if (!by_mass) return walk(all, draw_target(bits, total), Cut{kCostEnd, 0, total});
    if (plain) listed_ = gather_list(all);
  }
  const uint64_t kept = share_of(top_p_, total);
  if (!by_count && listed_mass_ < kept) listed_ = -1;
  if (listed_ >= 0 && rank_ != 0) return kElsewhere;
  if (listed_ < 0) {
    if (!by_count) bound_ = min(widest, bound_of(max((total - kept) / static_cast<uint64_t>(p_.vocab_size), uint64_t{1})));
    least_ = least_logit();
  }
  Cut cut{kCostEnd, 0, total};
#pragma unroll 1
  for (const bool mass : {false, true}) {
    if (mass ? by_mass : by_count) cut = select(mass, mass ? share_of(top_p_, cut.mass) : static_cast<uint64_t>(top_k_));
  }
  const uint64_t target = draw_target(bits, cut.mass);
  return listed_ >= 0 ? draw_listed(target, cut) : walk(sum_bounded(cut), target, cut);
}

// The largest cost that weighs at least `weight`, as sampling::cost_bound, by the lanes of a warp: 5 bits at a time.
template <typename T, bool kChanges> __device__ __forceinline__ uint32_t Row<T, kChanges>::bound_of(uint64_t weight) const {
  uint32_t low = 0;  // weighs enough
  for (int shift = 25; shift >= 0; shift -= 5) {
    const uint32_t c = low + (static_cast<uint32_t>(lane_) << shift);
    low += static_cast<uint32_t>(__popc(__ballot_sync(kAll, c < kCostEnd && weight_of(c) >= weight)) - 1) << shift;
  }
  return low;
}

// A logit below which costs are above the bound; spares most tokens the cost.
template <typename T, bool kChanges> __device__ __forceinline__ float Row<T, kChanges>::least_logit() const {
  const float distance = (static_cast<float>(bound_) + 1.0f) * 1.0001f / scale_ + fabsf(top_) * 1e-5f;
  return distance < INFINITY ? top_ - distance : -INFINITY;
}

// A logit that at least n tokens of this block reach: the n-th best of its threads' best tokens, or one in its sixteenth of an
// octave; -inf where there are not so many. `top` is at least all of them.
template <typename T, bool kChanges>
__device__ __forceinline__ float Row<T, kChanges>::nth_best(int n, float best, float top, float scale) {
  if (n > kThreads) return -INFINITY;
  clear_bins();
  if (threadIdx.x == 0) s_->winner = kBins;
  const uint32_t bin = cost_of(top - best, scale) >> 20;
  if (bin < kBins) atomicAdd(&s_->bins.count[bin], 1u);
  __syncthreads();
  const int here = 2 * threadIdx.x;
  const uint64_t first = s_->bins.count[here], both = first + s_->bins.count[here + 1];
  const uint64_t until = block_scan(both, s_->sums), wanted = static_cast<uint64_t>(n);
  if (until - both < wanted && until >= wanted) s_->winner = until - both + first >= wanted ? here : here + 1;
  __syncthreads();
  const int last = s_->winner;
  if (last == kBins) return -INFINITY;
  return float_of(block_min(order_of(static_cast<int>(bin) <= last ? best : INFINITY)));
}

// The blocks' masses, at a temperature that does not vanish; with `lists`, tokens within the bound are listed on the way.
template <typename T, bool kChanges> __device__ __forceinline__ const Mail* Row<T, kChanges>::sum_masses(bool lists) {
  least_ = least_logit();
  const float listed = lists ? least_ : INFINITY;
  clear_list();
  const Weigher weigh(top_, scale_);
  uint64_t sum = 0;
  visit<false>([&](int first, const float (&x)[kW], float most) {
#pragma unroll
    for (int e = 0; e < kW; ++e) sum += weigh(x[e]);
    if (most >= listed) pick_bounded(first, x, [&](uint32_t c, int id) { append(c, id); });
  });
  Mail mail{};
  if (lists) mail = list_mail();
  mail.sum = block_sum(sum);
  return exchange(mail);
}

// The blocks' sums of what the cut measures of the tokens within the bound.
template <typename T, bool kChanges>
__device__ __forceinline__ const Mail* Row<T, kChanges>::sum_bounded(const Cut& cut) {
  uint64_t sum = 0;
  visit_bounded(false, [&](uint32_t c, int id) { sum += cut(c, id); });
  Mail mail{};
  mail.sum = block_sum(sum);
  return exchange(mail);
}

template <typename T, bool kChanges> __device__ __forceinline__ void Row<T, kChanges>::clear_bins() {
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * kBins; i += kThreads) reinterpret_cast<uint32_t*>(&s_->bins)[i] = 0;
  __syncthreads();
}
template <typename T, bool kChanges> __device__ __forceinline__ void Row<T, kChanges>::clear_list() {
  __syncthreads();
  if (threadIdx.x == 0) s_->num_there = 0;
  __syncthreads();
}
// What does not fit is counted alone.
template <typename T, bool kChanges> __device__ __forceinline__ void Row<T, kChanges>::append(uint32_t key, int id) {
  const int place = atomicAdd(&s_->num_there, 1);
  if (place < kListed) s_->list[place] = {key, id};
}

// Step 5. Afterwards listed_ is -1 in all blocks, or not in any.
template <typename T, bool kChanges> __device__ __forceinline__ void Row<T, kChanges>::list_tokens() {
  least_ = least_logit();
  clear_list();
  visit_bounded(true, [&](uint32_t c, int id) { append(c, id); });
  listed_ = gather_list(exchange(list_mail()));
}

// The number of this block's listed tokens, and their mass in Mail::more.
template <typename T, bool kChanges> __device__ __forceinline__ Mail Row<T, kChanges>::list_mail() {
  __syncthreads();
  uint64_t mass = 0;
  for (int i = threadIdx.x; i < min(s_->num_there, kListed); i += kThreads) mass += weight_of(s_->list[i].key);
  Mail mail{};
  mail.more = block_sum(mass);
  mail.id = s_->num_there;
  if (p_.num_blocks > 1) cluster_fence();
  return mail;
}

// All blocks' lists to the first block's; how many tokens they have together, or -1 where that is too many. Sums their masses.
// No block's list is needed any longer afterwards but the first one's.
template <typename T, bool kChanges> __device__ __forceinline__ int Row<T, kChanges>::gather_list(const Mail* all) {
  listed_mass_ = 0;
  int total = 0;
  for (int r = 0; r < p_.num_blocks; ++r) {
    listed_mass_ += all[r].more;
    total += all[r].id;
  }
  if (total > kListed) return -1;
  if (p_.num_blocks == 1) return total;
  if (rank_ == 0) {
    for (int i = all[0].id + threadIdx.x; i < total; i += kThreads) {
      int r = 0, at = i;
      while (at >= all[r].id) at -= all[r++].id;
      s_->list[i] = load_cluster<Listed>(cluster_address(shared_address(s_->list + at), r));
    }
  }
  barrier();
  return total;
}

// Counts and masses by 10 bits of the cost, of tokens within the bound whose higher bits are `path`; in the first block of all
// blocks' tokens. From the first block's list of `listed` tokens, unless that is -1.
template <typename T, bool kChanges>
__device__ __forceinline__ void Row<T, kChanges>::fill_bins(uint32_t path, int shift, int listed) {
  clear_bins();
  const auto add = [&](uint32_t c) {
    if (c >> shift >> 10 != path) return;
    const uint32_t bin = (c >> shift) & (kBins - 1), octave = c >> kCostBits, m = mantissa_of(c);
    const uint32_t mass = octave > 16 ? m >> (octave - 16) : m;
    atomicAdd(&s_->bins.count[bin], 1u);
    atomicAdd(&s_->bins.low[bin], mass & 0xfffu);
    atomicAdd(&s_->bins.high[bin], mass >> 12);
  };
  if (listed >= 0) {
    for (int i = threadIdx.x; rank_ == 0 && i < listed; i += kThreads) add(s_->list[i].key);
  } else {
    visit_bounded(false, [&](uint32_t c, int) { add(c); });
  }
  if (listed < 0 && p_.num_blocks > 1) {
    cluster_fence();
    barrier();
    uint32_t* mine = reinterpret_cast<uint32_t*>(&s_->bins);
    for (int r = 1; r < p_.num_blocks && rank_ == 0; ++r) {
      const uint32_t theirs = cluster_address(shared_address(mine), r);
      for (int i = threadIdx.x; i < 3 * kBins; i += kThreads) mine[i] += load_cluster<uint32_t>(theirs + 4 * i);
    }
  }
  __syncthreads();
}

// Lists the tokens of costs whose higher bits are `path`, at most kListed, in the first block; their number.
template <typename T, bool kChanges> __device__ __forceinline__ int Row<T, kChanges>::list_bin(uint32_t path, int shift) {
  clear_list();
  visit_bounded(true, [&](uint32_t c, int id) {
    if (c >> shift == path) append(c, id);
  });
  return gather_list(exchange(list_mail()));
}

// Step 6: the shortest beginning of the tokens within the bound, by (cost, id), of `target` tokens or of a mass of `target`;
// all of them where that is less.
template <typename T, bool kChanges>
__device__ __forceinline__ Cut Row<T, kChanges>::select(bool by_mass, uint64_t target) {
  uint32_t path = 0;
  int listed = listed_;  // from where on the first block goes on alone
  Mail found{};  // sum, more: number and mass of the tokens before the bin; most: the bin's tokens; rest: of the target
#pragma unroll 1
  for (int shift = 20; shift >= 0; shift -= 10) {
    fill_bins(path, shift, listed);
    if (rank_ == 0) {
      uint64_t counts[2], masses[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bin = 2 * threadIdx.x + i, octave = (path << 10 | bin) << shift >> kCostBits;
        counts[i] = s_->bins.count[bin];
        const uint64_t mass = (static_cast<uint64_t>(s_->bins.high[bin]) << 12) + s_->bins.low[bin];
        masses[i] = mass << (octave > 16 ? 0 : 16 - octave);
      }
      const uint64_t count_until = block_scan(counts[0] + counts[1], s_->sums);
      const uint64_t mass_until = block_scan(masses[0] + masses[1], s_->more);
      if (shift == 20) {
        if (threadIdx.x == kThreads - 1) s_->found.sum = by_mass ? mass_until : count_until;
        __syncthreads();
        target = max(min(target, s_->found.sum), uint64_t{1});
        __syncthreads();
      }
      uint64_t count = found.sum + count_until - counts[0] - counts[1], mass = found.more + mass_until - masses[0] - masses[1];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint64_t before = by_mass ? mass : count, here = by_mass ? masses[i] : counts[i];
        if (before < target && target <= before + here) {
          s_->found.sum = count;
          s_->found.more = mass;
          s_->found.most = counts[i];
          s_->found.rest = target - before;
          s_->found.id = 2 * threadIdx.x + i;
        }
        count += counts[i];
        mass += masses[i];
      }
    }
    __syncthreads();
    found = listed_ >= 0 ? s_->found : exchange(s_->found)[0];
    path = path << 10 | static_cast<uint32_t>(found.id);
    if (listed < 0 && shift > 0) {  // nothing beyond the bin is kept; its own tokens may fit the list
      bound_ = min(bound_, ((path + 1) << shift) - 1);
      least_ = least_logit();
      if (found.most <= kListed) listed = list_bin(path, shift);
    }
  }
  const uint64_t weight = weight_of(path);
  const uint64_t wanted = by_mass ? (found.rest + weight - 1) / weight : found.rest;
  Cut cut{path, INT32_MAX, found.more + wanted * weight};
  if (wanted < found.most) cut.id = tie(path, wanted);
  return cut;
}

// The id of the n-th token, from 1, of exactly this cost.
template <typename T, bool kChanges> __device__ __forceinline__ int Row<T, kChanges>::tie(uint32_t wanted, uint64_t n) {
  const Cut alike{wanted, 0, 0, true};
  return listed_ >= 0 ? draw_listed(n - 1, alike) : static_cast<int>(tell(walk(sum_bounded(alike), n - 1, alike)));
}

// The first listed token, in the order of ids, at which the running sum of what the cut measures exceeds `target`.
template <typename T, bool kChanges>
__device__ __forceinline__ int Row<T, kChanges>::draw_listed(uint64_t target, const Cut& cut) {
  const int shift = max(22 - __clz(p_.vocab_size - 1), 0);  // ids of a bin: 2^shift, at most 512
  clear_list();
  clear_bins();
  for (int i = threadIdx.x; i < listed_; i += kThreads) {
    const Listed token = s_->list[i];
    const uint64_t mass = cut(token.key, token.id);
    if (mass == 0) continue;
    atomicAdd(&s_->bins.low[token.id >> shift], static_cast<uint32_t>(mass) & 0xfffffu);
    atomicAdd(&s_->bins.high[token.id >> shift], static_cast<uint32_t>(mass >> 20));
  }
  __syncthreads();
  uint64_t masses[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int bin = 2 * threadIdx.x + i;
    masses[i] = (static_cast<uint64_t>(s_->bins.high[bin]) << 20) + s_->bins.low[bin];
  }
  uint64_t before = block_scan(masses[0] + masses[1], s_->sums) - masses[0] - masses[1];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (before <= target && target < before + masses[i]) {
      s_->found.sum = target - before;
      s_->found.id = 2 * threadIdx.x + i;
    }
    before += masses[i];
  }
  __syncthreads();
  const uint64_t rest = s_->found.sum;
  uint32_t* places = s_->bins.count;
  for (int i = threadIdx.x; i < listed_; i += kThreads) {
    if (s_->list[i].id >> shift == s_->found.id) places[atomicAdd(&s_->num_there, 1)] = i;
  }
  __syncthreads();
  const int there = s_->num_there;
  for (int i = threadIdx.x; i < there; i += kThreads) {
    const Listed token = s_->list[places[i]];
    uint64_t sum = 0;
    for (int j = 0; j < there; ++j) {
      const Listed other = s_->list[places[j]];
      if (other.id < token.id) sum += cut(other.key, other.id);
    }
    if (sum <= rest && rest < sum + cut(token.key, token.id)) s_->winner = token.id;
  }
  __syncthreads();
  return s_->winner;
}

// The first token of the row within the bound, in the order of ids, at which the running sum of what the cut measures exceeds
// `target`; kElsewhere in blocks that do not have it. `all` are the blocks' sums, s_->mass the warps'.
template <typename T, bool kChanges>
__device__ __forceinline__ int64_t Row<T, kChanges>::walk(const Mail* all, uint64_t target, const Cut& cut) {
  int block = 0;
  while (block < p_.num_blocks - 1 && target >= all[block].sum) target -= all[block++].sum;
  if (rank_ != block) return kElsewhere;
  // The lane of the first sum that exceeds the target, which becomes relative to it.
  const auto descend = [&](uint64_t sum) {
    const uint64_t until = warp_scan(sum);
    const uint32_t beyond = __ballot_sync(kAll, until > target);
    const int lane = beyond != 0 ? __ffs(static_cast<int>(beyond)) - 1 : -1;
    target -= beyond != 0 ? __shfl_sync(kAll, until - sum, lane) : __shfl_sync(kAll, until, 31);
    return lane;
  };
  const int owner = descend(lane_ < kWarps ? s_->mass[lane_] : 0);
  for (int at = 0; at < num_steps(owner); at += kWarps) {  // its steps, a warp one
    float x[kW];
    uint64_t weights[kW], sum = 0;
    int id = 0;
    if (at + warp_ < num_steps(owner)) {
      const int step = at + warp_;
      id = first_id(first_step(owner) + step, lane_);
      widen<T>(step < p_.cached_steps ? *place(owner, step) : fetch(first_step(owner) + step), x);
      apply_changes(id, x);
#pragma unroll
      for (int e = 0; e < kW; ++e) {
        const uint32_t c = cost(x[e]);
        weights[e] = c <= bound_ ? cut(c, id + e) : 0;
        sum += weights[e];
      }
    }
    const uint64_t whole = warp_sum(sum);
    if (lane_ == 0) s_->sums[warp_] = whole;
    __syncthreads();
    const int warp = descend(lane_ < kWarps ? s_->sums[lane_] : 0);
    __syncthreads();
    if (warp < 0) continue;
    if (warp == warp_ && lane_ == descend(sum)) {
      int e = 0;
#pragma unroll
      for (int i = 0; i < kW; ++i) {
        if (i == e && target >= weights[i]) {
          target -= weights[i];
          ++e;
        }
      }
      s_->winner = id + e;
    }
    break;
  }
  __syncthreads();
  return s_->winner;
}

}  // namespace
}  // namespace research_engine::cuda
