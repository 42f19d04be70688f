// The rules of common/value_checks.h.
#include "common/value_checks.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_set>

namespace research_engine {
namespace {

std::string text(const char* part) { return part; }
std::string text(int64_t part) { return std::to_string(part); }
std::string text(const std::string& part) { return part; }

// No string streams: those of another C++ runtime in the process may take their place, and crash.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::string message;
  ((message += text(parts)), ...);
  throw std::invalid_argument(message);
}

int64_t at32(const TensorView& x, int64_t i) { return x.ptr<int32_t>()[i * x.strides[0]]; }

std::string list(const int64_t* numbers, int count) {
  std::string result;
  for (int i = 0; i < count; ++i) result += (i ? ", " : "") + std::to_string(numbers[i]);
  return "[" + result + "]";
}

// By size of stride, a dimension has to step past all that the smaller ones span.
bool may_overlap_itself(const TensorView& x) {
  int order[TensorView::kMaxDims], count = 0;
  for (int i = 0; i < x.ndim; ++i) {
    if (x.shape[i] == 0) return false;
    if (x.shape[i] > 1) order[count++] = i;
  }
  std::sort(order, order + count, [&](int a, int b) { return x.strides[a] < x.strides[b]; });
  int64_t span = 1;
  for (int i = 0; i < count; ++i) {
    if (x.strides[order[i]] < span) return true;
    span += (x.shape[order[i]] - 1) * x.strides[order[i]];
  }
  return false;
}

}  // namespace

void check_written(const char* name, const TensorView& tensor) {
  if (may_overlap_itself(tensor))
    refuse(name, ": shape ", list(tensor.shape, tensor.ndim), ", strides ", list(tensor.strides, tensor.ndim),
           "; elements share memory, but it is written: each needs a place of its own");
}

void check_attention_values(const PagedAttention& a) {
  const int64_t requests = a.seq_lens.shape[0], tokens = a.query.shape[0];
  const int64_t columns = a.block_tables.shape[1], block_size = a.key_cache.shape[2], num_blocks = a.key_cache.shape[0];
  if (at32(a.query_start_loc, 0) != 0) refuse("query_start_loc[0] is ", at32(a.query_start_loc, 0), ", expected 0");
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t first = at32(a.query_start_loc, r), q_len = at32(a.query_start_loc, r + 1) - first;
    const int64_t length = at32(a.seq_lens, r);
    if (q_len < 0 || first + q_len > tokens)
      refuse("query_start_loc[", r + 1, "] is ", first + q_len, ", expected at least ", first, " (the one before) and at most ", tokens,
             " (query's rows)");
    if (length < 0 || length > columns * block_size)
      refuse("seq_lens[", r, "] is ", length, ", expected 0 to ", columns * block_size, " (block_tables has ", columns,
             " columns of ", block_size, " slots)");
    if (a.max_query_len > 0 && q_len > a.max_query_len)
      refuse("request ", r, " has ", q_len, " query rows, above max_query_len = ", a.max_query_len);
    if (a.max_seq_len > 0 && length > a.max_seq_len)
      refuse("seq_lens[", r, "] is ", length, ", above max_seq_len = ", a.max_seq_len);
    if (q_len == 0) continue;
    const int32_t* table = a.block_tables.ptr<int32_t>() + r * a.block_tables.strides[0];
    // A window leaves blocks behind it unread, and an engine may have given them away.
    const int64_t first_key = a.sliding_window > 0 ? std::max<int64_t>(0, length - q_len - a.sliding_window + 1) : 0;
    for (int64_t c = first_key / block_size; c < (length + block_size - 1) / block_size; ++c)
      if (table[c] < 0 || table[c] >= num_blocks)
        refuse("block_tables[", r, ", ", c, "] is ", table[c], ", expected 0 to ", num_blocks - 1, " (the cache has ", num_blocks,
               " blocks, and seq_lens[", r, "] = ", length, " needs this one)");
  }
}

void check_slots(const TensorView& slot_mapping, int64_t capacity) {
  for (int64_t t = 0; t < slot_mapping.shape[0]; ++t) {
    const int64_t slot = slot_mapping.ptr<int64_t>()[t * slot_mapping.strides[0]];
    if (slot < -1 || slot >= capacity)
      refuse("slot_mapping[", t, "] is ", slot, ", expected -1 (skip) or 0 to ", capacity - 1, " (num_blocks * block_size - 1)");
  }
}

void check_scales(const char* name, const TensorView& scales) {
  if (!scales) return;
  for (int64_t h = 0; h < scales.shape[0]; ++h) {
    const float scale = scales.ptr<float>()[h * scales.strides[0]];
    if (!(scale > 0) || std::isinf(scale)) refuse(name, "[", h, "] is ", std::to_string(scale), ", expected a positive, finite number");
  }
}

void check_positions(const TensorView& positions, int64_t limit) {
  for (int64_t t = 0; t < positions.shape[0]; ++t) {
    const int64_t position = positions.ptr<int64_t>()[t * positions.strides[0]];
    if (position < 0 || position >= limit)
      refuse("positions[", t, "] is ", position, ", expected 0 to ", limit - 1, " (cos_sin's rows)");
  }
}

void check_block_pairs(const TensorView& pairs, int64_t num_source_blocks, int64_t num_destination_blocks, bool same_cache) {
  const auto value = [&](int64_t p, int side) { return pairs.ptr<int64_t>()[p * pairs.strides[0] + side * pairs.strides[1]]; };
  std::unordered_set<int64_t> destinations;
  for (int64_t p = 0; p < pairs.shape[0]; ++p) {
    for (int side = 0; side < 2; ++side) {
      const int64_t block = value(p, side), limit = side ? num_destination_blocks : num_source_blocks;
      if (block < 0 || block >= limit)
        refuse("pairs[", p, ", ", side, "] is ", block, ", expected 0 to ", limit - 1, " (a block of the ", side ? "destination" : "source", ")");
    }
    if (!destinations.insert(value(p, 1)).second) refuse("pairs: block ", value(p, 1), " is a destination twice");
  }
  if (!same_cache) return;
  for (int64_t p = 0; p < pairs.shape[0]; ++p)
    if (destinations.count(value(p, 0)))
      refuse("pairs: block ", value(p, 0), " is both a source and a destination; copy in two calls");
}

void check_gather_values(const TensorView& block_tables, const TensorView& start_loc, const TensorView& starts, int64_t rows,
                         int64_t block_size, int64_t num_blocks) {
  const int64_t requests = block_tables.shape[0], columns = block_tables.shape[1];
  const auto at32 = [](const TensorView& v, int64_t i) { return static_cast<int64_t>(v.ptr<int32_t>()[i]); };
  if (at32(start_loc, 0) < 0) refuse("start_loc[0] is ", at32(start_loc, 0), ", expected 0 or more");
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t begin = at32(start_loc, r), end = at32(start_loc, r + 1), first = starts ? at32(starts, r) : 0;
    if (end < begin || end > rows)
      refuse("start_loc[", r + 1, "] is ", end, ", expected at least ", begin, " (the one before) and at most ", rows, " (key's rows)");
    if (first < 0 || first + end - begin > columns * block_size)
      refuse("request ", r, " asks for tokens ", first, " to ", first + end - begin, ", expected 0 to ", columns * block_size,
             " (block_tables has ", columns, " columns of ", block_size, " slots)");
    for (int64_t c = first / block_size; begin < end && c <= (first + end - begin - 1) / block_size; ++c) {
      const int64_t block = block_tables.ptr<int32_t>()[r * block_tables.strides[0] + c];
      if (block < 0 || block >= num_blocks)
        refuse("block_tables[", r, ", ", c, "] is ", block, ", expected 0 to ", num_blocks - 1, " (the cache has ", num_blocks, " blocks)");
    }
  }
}

void check_sampling_values(const Sampling& args) {
  const int64_t rows = args.logits.shape[0];
  for (int64_t row = 0; row < rows; ++row) {
    const float temperature = args.temperature.ptr<float>()[row];
    if (!(temperature >= 0)) refuse("temperature[", row, "] is ", temperature, ", expected 0 (greedy) or more");
  }
  if (!args.seen_tokens) return;
  const int64_t num_slots = args.seen_tokens.shape[0], capacity = args.seen_tokens.shape[1];
  std::unordered_set<int32_t> used;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t slot = args.slots.ptr<int32_t>()[row];
    if (slot < -1 || slot >= num_slots)
      refuse("slots[", row, "] is ", slot, ", expected -1 (none) or 0 to ", num_slots - 1, " (seen_tokens' rows)");
    if (slot < 0) continue;
    if (!used.insert(slot).second) refuse("slots[", row, "] is ", slot, ", which another row has");
    const int32_t length = args.seen_lengths.ptr<int32_t>()[slot];
    if (length < 0 || length > capacity)
      refuse("seen_lengths[", slot, "] is ", length, ", expected 0 to ", capacity, " (seen_tokens' columns)");
  }
}

}  // namespace research_engine
