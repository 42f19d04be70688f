// The rules that need an argument's values, not its shape alone; they read host memory. Each throws std::invalid_argument,
// which names the argument, the value and the rule. The bindings apply them to every CPU call.
#pragma once

#include "common/ops.h"

namespace research_engine {

// Of every call, CUDA's too: in a tensor that an op writes no two indices lead to one element.
void check_written(const char* name, const TensorView& tensor);
void check_attention_values(const PagedAttention& args);
// Slots in [0, capacity), or -1 for a token to skip.
void check_slots(const TensorView& slot_mapping, int64_t capacity);
// Scales of a quantised cache's heads: positive and finite; none is fine.
void check_scales(const char* name, const TensorView& scales);
void check_positions(const TensorView& positions, int64_t limit);
// Block ids in range and no destination twice; within one cache (`same_cache`), no source that is also a destination:
// the copies run in no particular order.
void check_block_pairs(const TensorView& pairs, int64_t num_source_blocks, int64_t num_destination_blocks, bool same_cache);
// Rows of requests in order, tokens that the tables have columns for, blocks of the cache.
void check_gather_values(const TensorView& block_tables, const TensorView& start_loc, const TensorView& starts, int64_t rows,
                         int64_t block_size, int64_t num_blocks);
// Temperatures that are not negative; slots and lengths in range.
void check_sampling_values(const Sampling& args);

}  // namespace research_engine
