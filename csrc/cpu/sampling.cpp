// sample on the CPU: one token a row of logits, and its log-probability, its rank and the most probable tokens beside it.
//
// Definition: common/sampling_math.h, shared with the CUDA kernel, so that both draw the same token.
// Algorithm: a row a thread. The row is widened to float32 and changed; costs are integers. Truncation packs (cost, id) of the
// tokens within a bound into 64-bit words and selects, then sorts, no more of them than it has to; the draw walks the row.
// Roofline: memory for greedy rows (S V e bytes); otherwise some 20 operations a token.
#include <algorithm>
#include <limits>
#include <vector>

#include "common/ops.h"
#include "common/sampling_math.h"
#include "cpu/dispatch.h"

namespace research_engine::cpu {

namespace {

using namespace sampling;

constexpr float kInf = std::numeric_limits<float>::infinity();

float number(const TensorView& view, int64_t row, float otherwise) {
  return view ? view.ptr<float>()[row * view.strides[0]] : otherwise;
}

// Scratch of one thread.
struct Scratch {
  std::vector<float> logits, changed;
  std::vector<uint32_t> costs;
  std::vector<uint64_t> order;  // cost << 32 | id
};

// A row as float32; its largest element, or NaN where it has one.
template <typename T> float widen(const T* from, std::vector<float>& to) {
  const int64_t size = static_cast<int64_t>(to.size());
  Vec tops = broadcast(-kInf);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec values = load(from + i);
    store(to.data() + i, values);
    tops = max(tops, values);
  }
  float top = max(tops);
  for (; i < size; ++i) top = max(top, to[i] = to_float(from[i]));
  return top;
}

void change_row(const Sampling& args, int64_t row, std::vector<float>& x) {
  const int64_t vocab_size = static_cast<int64_t>(x.size());
  const auto known = [&](int64_t id) { return id >= 0 && id < vocab_size; };
  const auto bias = [&](bool forbidding) {
    if (!args.bias_tokens) return;
    const int32_t* tokens = args.bias_tokens.ptr<int32_t>() + row * args.bias_tokens.strides[0];
    const float* values = args.bias_values.ptr<float>() + row * args.bias_values.strides[0];
    for (int64_t i = 0; i < args.bias_tokens.shape[1]; ++i) {
      if (known(tokens[i]) && (values[i] == -kInf) == forbidding) x[tokens[i]] = forbidding ? -kInf : x[tokens[i]] + values[i];
    }
  };
  bias(false);
  const int64_t slot = args.seen_tokens ? args.slots.ptr<int32_t>()[row] : -1;
  if (slot >= 0) {
    const float repetition = number(args.repetition_penalty, row, 1), presence = number(args.presence_penalty, row, 0);
    const float frequency = number(args.frequency_penalty, row, 0);
    const int32_t* tokens = args.seen_tokens.ptr<int32_t>() + slot * args.seen_tokens.strides[0];
    const int32_t* counts = args.seen_counts.ptr<int32_t>() + slot * args.seen_counts.strides[0];
    const int64_t seen = args.seen_lengths.ptr<int32_t>()[slot];
    for (int64_t i = 0; i < seen; ++i) {
      if (known(tokens[i])) x[tokens[i]] = penalize(x[tokens[i]], repetition, presence, frequency, counts[i]);
    }
  }
  bias(true);
  if (args.allowed_tokens) {
    const uint32_t* words = args.allowed_tokens.ptr<uint32_t>() + row * args.allowed_tokens.strides[0];
    for (int64_t id = 0; id < vocab_size; ++id) {
      if (!(words[id / 32] >> (id % 32) & 1)) x[id] = -kInf;
    }
  }
}

// The shortest beginning of `order` that has `count` tokens, or a mass of `mass`; sorted up to there. Its mass in `mass`.
int64_t cut_order(std::vector<uint64_t>& order, int64_t count, bool by_mass, uint64_t& mass) {
  const auto cost = [](uint64_t word) { return static_cast<uint32_t>(word >> 32); };
  const uint64_t wanted = std::max<uint64_t>(mass, 1);
  uint64_t sum = 0;
  int64_t kept = 0, sorted = 0;
  const int64_t size = static_cast<int64_t>(order.size());
  count = std::min(std::max<int64_t>(count, 1), size);
  while (kept < count && !(by_mass && sum >= wanted)) {
    if (kept == sorted) {  // sort four times as much as before
      const int64_t next = std::min(count, std::max<int64_t>(256, 4 * sorted));
      if (next < size) std::nth_element(order.begin() + sorted, order.begin() + next, order.end());
      std::sort(order.begin() + sorted, order.begin() + next);
      sorted = next;
    }
    sum += weight_of(cost(order[kept++]));
  }
  mass = sum;
  return kept;
}

int64_t draw_row(const Sampling& args, int64_t row, const std::vector<float>& x, float top, Scratch& scratch) {
  const int64_t vocab_size = static_cast<int64_t>(x.size());
  const float temperature = number(args.temperature, row, 0);
  if (!(temperature > 0)) return std::find(x.begin(), x.end(), top) - x.begin();

  const float scale = kCostScale / temperature;
  const int64_t top_k = args.top_k ? args.top_k.ptr<int32_t>()[row] : 0;
  const bool by_count = top_k > 0 && top_k < vocab_size;
  const float top_p = number(args.top_p, row, 1);
  const uint64_t least = least_weight(number(args.min_p, row, 0));
  const uint32_t bound = least > 1 ? cost_bound(least) : kCostEnd - 1;
  auto& costs = scratch.costs;
  costs.resize(vocab_size);
  uint64_t total = 0;
  for (int64_t id = 0; id < vocab_size; ++id) {
    costs[id] = cost_of(top - x[id], scale);
    if (costs[id] <= bound) total += weight_of(costs[id]);
  }
  uint64_t last = ~uint64_t{0};  // of the kept, as cost << 32 | id
  if (by_count || top_p < 1) {
    auto& order = scratch.order;
    order.clear();
    uint32_t nearer = bound;
    if (!by_count) {  // tokens that, all together, weigh less than what top_p spares
      const uint64_t weight = (total - share_of(top_p, total)) / static_cast<uint64_t>(vocab_size);
      if (weight > 1) nearer = std::min(nearer, cost_bound(weight));
    }
    for (int64_t id = 0; id < vocab_size; ++id) {
      if (costs[id] <= nearer) order.push_back(static_cast<uint64_t>(costs[id]) << 32 | static_cast<uint64_t>(id));
    }
    int64_t kept = static_cast<int64_t>(order.size());
    if (by_count) {
      total = 0;
      kept = cut_order(order, top_k, false, total);
    }
    if (top_p < 1) {
      order.resize(kept);
      total = share_of(top_p, total);
      kept = cut_order(order, kept, true, total);
    }
    last = order[kept - 1];
  }
  const auto* seeds = args.seeds.ptr<int64_t>();
  const auto* positions = args.positions.ptr<int64_t>();
  const uint64_t target =
      draw_target(random_bits(static_cast<uint64_t>(seeds[row]), static_cast<uint64_t>(positions[row])), total);
  uint64_t sum = 0;
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (costs[id] > bound || (static_cast<uint64_t>(costs[id]) << 32 | static_cast<uint64_t>(id)) > last) continue;
    sum += weight_of(costs[id]);
    if (sum > target) return id;
  }
  return kNothingLeft;  // not reached: the target is below the total
}

void report_row(const Sampling& args, int64_t row, const std::vector<float>& x, int64_t token, float top, Scratch& scratch) {
  const int64_t vocab_size = static_cast<int64_t>(x.size());
  const bool usable = token >= 0 && top > -kInf && top < kInf;
  double norm = 0;
  float* logprob = args.logprobs.ptr<float>() + row;
  int64_t* rank = args.ranks.ptr<int64_t>() + row;
  *logprob = -kInf;
  *rank = 0;
  const auto log_probability = [&](float value) {
    return value > -kInf ? static_cast<float>(static_cast<double>(value) - top - norm) : -kInf;
  };
  if (usable) {
    uint64_t sum = 0;
    int64_t ahead = 0;
    for (int64_t id = 0; id < vocab_size; ++id) {
      const uint32_t cost = cost_of(top - x[id], kCostScale);
      if (cost < kCostEnd) sum += weight_of(cost);
      ahead += x[id] > x[token] || (x[id] == x[token] && id < token);
    }
    norm = std::log(static_cast<double>(sum) / kMostWeight);
    *logprob = log_probability(x[token]);
    *rank = ahead + 1;
  }
  if (!args.top_ids) return;
  const int64_t wanted = args.top_ids.shape[1], there = usable ? std::min(wanted, vocab_size) : 0;
  int64_t* ids = args.top_ids.ptr<int64_t>() + row * wanted;
  float* logprobs = args.top_logprobs.ptr<float>() + row * wanted;
  auto& order = scratch.order;
  order.resize(vocab_size);
  for (int64_t id = 0; id < vocab_size; ++id) order[id] = static_cast<uint64_t>(id);
  std::partial_sort(order.begin(), order.begin() + there, order.end(),
                    [&](uint64_t a, uint64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
  for (int64_t i = 0; i < wanted; ++i) {
    ids[i] = i < there ? static_cast<int64_t>(order[i]) : -1;
    logprobs[i] = i < there ? log_probability(x[order[i]]) : -kInf;
  }
}

void count_drawn(const Sampling& args, int64_t row, int64_t token) {
  const int64_t slot = args.slots.ptr<int32_t>()[row];
  if (slot < 0) return;
  int32_t* tokens = args.seen_tokens.ptr<int32_t>() + slot * args.seen_tokens.strides[0];
  int32_t* counts = args.seen_counts.ptr<int32_t>() + slot * args.seen_counts.strides[0];
  int32_t& length = args.seen_lengths.ptr<int32_t>()[slot];
  const int32_t* found = std::find(tokens, tokens + length, static_cast<int32_t>(token));
  if (found != tokens + length) {
    ++counts[found - tokens];
  } else if (length < args.seen_tokens.shape[1]) {
    tokens[length] = static_cast<int32_t>(token);
    counts[length++] = 1;
  }
}

}  // namespace

void sample(const Sampling& args) {
  const int64_t rows = args.logits.shape[0], vocab_size = args.logits.shape[1];
  const bool changes = args.seen_tokens || args.bias_tokens || args.allowed_tokens;
#pragma omp parallel if (rows * vocab_size > kParallelElements)
  {
    Scratch scratch;
    scratch.logits.resize(vocab_size);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < rows; ++row) {
      auto& x = scratch.logits;
      float raw_top = 0;
      dispatch(args.logits.dtype, [&](auto zero) {
        using T = decltype(zero);
        raw_top = widen(args.logits.ptr<T>() + row * args.logits.strides[0], x);
      });
      const std::vector<float>* used = &x;
      float top = raw_top;
      if (changes) {
        scratch.changed = x;
        change_row(args, row, scratch.changed);
        used = &scratch.changed;
        top = -kInf;
        for (const float value : *used) top = value > top ? value : top;
      }
      int64_t token = raw_top != raw_top ? kNotANumber : raw_top == kInf || top == kInf ? kInfinite : kNothingLeft;
      if (token == kNothingLeft && top > -kInf) token = draw_row(args, row, *used, top, scratch);
      args.token_ids.ptr<int64_t>()[row] = token;
      if (args.logprobs) report_row(args, row, x, token, raw_top, scratch);
      if (args.count_drawn && token >= 0) count_drawn(args, row, token);
    }
  }
}

}  // namespace research_engine::cpu
