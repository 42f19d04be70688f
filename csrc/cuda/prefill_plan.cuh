// The order of work of the prefill kernels on tensor cores: which tile of query rows an item is, and which keys the tile needs.
#pragma once

#include <algorithm>

#include "paged_attention.cuh"

namespace research_engine::cuda::prefill {

struct PlanParams {
  AttentionParams attention;
  Divisor group;
  int tiles;          // of query rows, all requests, an upper bound
  int section_heads;  // KV heads whose tiles run side by side
  int copy_rows;      // a power of two; tile 0 of the keys starts at a multiple
};

// A tile of query rows.
struct Tile {
  int steps;  // tiles of keys; -1: there are no more tiles of rows
  int request, kv_head;
  int first_query;           // token of the request's first query
  int first_row, total_rows;  // of the request
  int position;              // of the request's first query
  int seq_len;
  int start;  // key at which tile 0 starts
};

__device__ __forceinline__ int first_tile(const AttentionParams& a, int request, int tile_rows) {
  return static_cast<int>(static_cast<int64_t>(a.query_start_loc[request]) * a.group_size / tile_rows) + request;
}

// The tile of rows that stands at `item` of the order of work; false when it is empty or not this path's. A warp calls it.
template <int kRows, int kKeys> __device__ bool plan_tile(const PlanParams& p, int item, int lane, Tile& tile) {
  const AttentionParams& a = p.attention;
  const int section = item / (p.tiles * p.section_heads);
  const int heads = min(p.section_heads, a.num_kv_heads - section * p.section_heads);
  const int within = item - section * p.tiles * p.section_heads;
  const int index = p.tiles - 1 - within / heads;
  int request = 0;  // the last that starts at or before `index`: 32 probes at a time
  for (int count = a.num_requests; count > 1;) {
    const int step = (count + 31) / 32;
    const bool before = lane * step < count && first_tile(a, request + lane * step, kRows) <= index;
    const int last = 31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, before) | 1u));
    request += last * step;
    count = min(step, count - last * step);
  }
  const int length = a.query_start_loc[request + 1] - a.query_start_loc[request];
  tile.seq_len = a.seq_lens[request];  // on its way with the others
  tile.request = request;
  tile.kv_head = section * p.section_heads + within % heads;
  tile.first_query = a.query_start_loc[request];
  tile.total_rows = length * a.group_size;
  tile.first_row = (index - first_tile(a, request, kRows)) * kRows;
  if (tile.first_row >= tile.total_rows || (a.single_queries && length == 1)) return false;
  tile.position = tile.seq_len - length;
  const int last_row = min(tile.first_row + kRows, tile.total_rows) - 1;
  const int begin = first_key(a, tile.position + p.group.divide(tile.first_row));
  const int end = end_key(a, tile.position + p.group.divide(last_row), tile.seq_len);
  tile.start = begin & ~(p.copy_rows - 1);
  tile.steps = end > begin ? (end - tile.start + kKeys - 1) / kKeys : 0;
  return true;
}

#ifndef __CUDACC_RTC__  // the host's part
// Plans the launch for tiles of `rows`: fills in all but copy_rows, and returns how many items there are, at most.
inline int64_t plan_rows(const PagedAttention& args, const AttentionParams& params, int rows, const char* op, PlanParams& p) {
  p.attention = params;
  p.group = Divisor(static_cast<uint32_t>(params.group_size));
  p.tiles = static_cast<int>(params.num_tokens * params.group_size / rows + params.num_requests);
  // A KV head's keys and values are read by all its tiles: keep those of the heads in work within two thirds of the L2 cache.
  int cache_bytes = 0;
  check(cudaDeviceGetAttribute(&cache_bytes, cudaDevAttrL2CacheSize, args.query.device), op);
  const int64_t head_bytes = std::max<int64_t>(args.max_seq_len, 1) * params.head_size * 2 * element_size(args.key_cache.dtype);
  p.section_heads = static_cast<int>(std::clamp<int64_t>(int64_t{cache_bytes} * 2 / 3 / head_bytes, 1, params.num_kv_heads));
  return int64_t{p.tiles} * params.num_kv_heads;
}
#endif

}  // namespace research_engine::cuda::prefill
