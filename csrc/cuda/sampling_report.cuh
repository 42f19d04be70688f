// What sample tells beside the token: log-probabilities, the rank, the most probable tokens; and the count of the drawn one.
#pragma once

#include "sampling.cuh"

namespace research_engine::cuda {
namespace {

// Log-probabilities and ranks, of the logits as they came. All blocks know the token.
template <typename T, bool kChanges> __device__ __forceinline__ void Row<T, kChanges>::report(int64_t token) {
  const bool usable = token >= 0 && raw_top_ > -INFINITY && raw_top_ < INFINITY;
  if (!usable) {
    if (rank_ != 0) return;
    if (threadIdx.x == 0) {
      p_.logprobs[row_] = -INFINITY;
      p_.ranks[row_] = 0;
    }
    for (int i = threadIdx.x; i < p_.num_top; i += kThreads) write_top(i, -1, -INFINITY);
    return;
  }
  const float value = raw_logit(static_cast<int>(token));
  const Weigher weigh(raw_top_, kCostScale);
  uint64_t sum = 0;
  uint32_t ahead = 0;
  visit<true>([&](int first, const float (&x)[kW], float most) {
#pragma unroll
    for (int e = 0; e < kW; ++e) {
      sum += weigh(x[e]);
      ahead += x[e] > value || (x[e] == value && first + e < token);
    }
  });
  Mail mail{};
  mail.sum = block_sum(sum);
  mail.more = block_sum(ahead);
  // The scale: 443 natural units in 40 octaves.
  if (p_.num_top > 0) mail.least = nth_best(share_of_block(p_.num_top), raw_best_, raw_top_, kCostScale / 16.0f);
  const Mail* all = exchange(mail);
  uint64_t rank = 1;
  float least = INFINITY;
  for (int r = 0; r < p_.num_blocks; ++r) {
    rank += all[r].more;
    least = fminf(least, all[r].least);
  }
  norm_ = log(static_cast<double>(total_of(all)) / kMostWeight);
  if (rank_ == 0 && threadIdx.x == 0) {
    p_.logprobs[row_] = static_cast<float>(static_cast<double>(value) - raw_top_ - norm_);
    p_.ranks[row_] = static_cast<int64_t>(rank);
  }
  if (p_.num_top > 0) report_top(least);
}

// The most probable tokens in order: those from `least` on are listed, and each counts the ones ahead of it.
template <typename T, bool kChanges> __device__ __forceinline__ void Row<T, kChanges>::report_top(float least) {
  const int wanted = min(p_.num_top, p_.vocab_size);
  if (rank_ == 0) {
    for (int i = wanted + threadIdx.x; i < p_.num_top; i += kThreads) write_top(i, -1, -INFINITY);
  }
  clear_list();
  if (least > -INFINITY && raw_best_ >= least) {
    visit<true>([&](int first, const float (&x)[kW], float most) {
      if (most < least) return;
#pragma unroll
      for (int e = 0; e < kW; ++e) {
        if (x[e] >= least) append(__float_as_uint(x[e]), first + e);
      }
    });
  }
  Mail mail{};
  __syncthreads();
  mail.id = s_->num_there;
  if (p_.num_blocks > 1) cluster_fence();
  const int listed = gather_list(exchange(mail));
  if (listed >= wanted) {
    for (int i = threadIdx.x; rank_ == 0 && i < listed; i += kThreads) {
      const float x = __uint_as_float(s_->list[i].key);
      const int id = s_->list[i].id;
      int ahead = 0;
      for (int j = 0; j < listed; ++j) {
        const float other = __uint_as_float(s_->list[j].key);
        ahead += other > x || (other == x && s_->list[j].id < id);
      }
      if (ahead < wanted) write_top(ahead, id, x);
    }
    return;
  }
  float last = INFINITY;  // one after the other: few tokens above -inf, or very many alike
  int last_id = -1;
  for (int i = 0; i < wanted; ++i) {
    float best = -INFINITY;
    int id = INT32_MAX;
    visit<true>([&](int first, const float (&x)[kW], float most) {
#pragma unroll
      for (int e = 0; e < kW; ++e) {
        const bool left = (x[e] < last || (x[e] == last && first + e > last_id)) && first + e < p_.vocab_size;
        if (left && (id == INT32_MAX || x[e] > best)) {
          best = x[e];
          id = first + e;
        }
      }
    });
    Mail mail{};
    mail.top = block_max(best);
    mail.id = block_min(best == mail.top ? id : INT32_MAX);
    const Mail* all = exchange(mail);
    last_id = INT32_MAX;
    for (int r = 0; r < p_.num_blocks; ++r) {  // smaller ids come first
      if (all[r].id == INT32_MAX || (last_id != INT32_MAX && !(all[r].top > last))) continue;
      last = all[r].top;
      last_id = all[r].id;
    }
    if (rank_ == 0 && threadIdx.x == 0) write_top(i, last_id, last);
  }
}

template <typename T, bool kChanges>
__device__ __forceinline__ void Row<T, kChanges>::write_top(int place, int64_t id, float x) {
  p_.top_ids[static_cast<int64_t>(row_) * p_.num_top + place] = id;
  p_.top_logprobs[static_cast<int64_t>(row_) * p_.num_top + place] =
      x > -INFINITY ? static_cast<float>(static_cast<double>(x) - raw_top_ - norm_) : -INFINITY;
}

// One more of the drawn token in the row's slot.
template <typename T, bool kChanges> __device__ __forceinline__ void Row<T, kChanges>::count(int token) {
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

}  // namespace
}  // namespace research_engine::cuda
