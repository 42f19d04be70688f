// Paged attention, the decode path: one thread block a (row, KV head, key split); K and V are read once for its G heads.
// Split partials and their merge as in Flash-Decoding (Dao et al., 2023).
//
// Layout     see paged_attention.cu. A vector of a K or V row belongs to one lane; kLanes lanes make a row, so a
//            warp reads 32 / kLanes rows at once. Partials, float32: [rows, Hq, S, D] accumulators, then [rows, Hq, S, 2]
//            (maximum in base 2, sum).
// Algorithm  1. Find the row's keys and this split's share of them; leave when there is none.
//            2. A warp loads kUnroll K and V vectors a lane, then forms kHeads x kUnroll dot products by shuffles.
//            3. Online softmax in float32; every group of kLanes lanes keeps its own maximum, sum and accumulator.
//            4. Merge the groups by shuffles and the warps through shared memory, in a fixed order.
//            5. A row of one split is finished here; otherwise it leaves a partial, and a second kernel merges them.
// Splits     start at multiples of split_size and depend on nothing but the row's own keys, as does the choice between
//            finishing and merging: with a fixed split_size a row's bits do not depend on the batch.
// Roofline   memory: 2 x keys x Hkv x D elements, 4 x keys x Hq x D operations; G operations a byte in 16 bit. The float32
//            units and the shuffles become the limit at about G = 8 on an H200.
// Reached    not measured yet.
#include "paged_attention.cuh"

namespace research_engine::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr const char* kOp = "paged_attention (path decode)";

// The keys of one split of a row; `count` splits have keys (one, if the row is empty).
struct Split {
  int count, begin, end;
};

// Splits that the host's bound on seq_lens did not foresee fall to the last one: slower, never out of bounds.
__device__ Split split_of(const AttentionParams& p, const Row& row, int index) {
  const int first = row.begin / p.split_size;
  const int needed = row.end > row.begin ? (row.end - 1) / p.split_size + 1 - first : 1;
  Split split;
  split.count = min(needed, p.num_splits);
  split.begin = max(row.begin, (first + index) * p.split_size);
  split.end = index >= split.count - 1 ? row.end : (first + index + 1) * p.split_size;
  return split;
}

// Row `index` of the grid: a request of one query token on the auto path, else any token of the batch.
__device__ Row grid_row(const AttentionParams& p, int64_t index) {
  if (!p.single_queries) return token_row(p, index);
  const int request = static_cast<int>(index);
  const int first = p.query_start_loc[request];
  if (p.query_start_loc[request + 1] - first != 1) return Row{};
  return request_row(p, request, first, 1, 0);
}

template <typename T>
__device__ void write_row(const AttentionParams& p, const Row& row, int head, int element, float value, const RowEnd& end) {
  const float factor = end.factor * head_scale(p.value_scale, head / p.group_size);
  store_out<T>(p, row.token * p.out_token_stride + head * p.out_head_stride + element, value * factor);
  if (element == 0 && p.lse != nullptr) p.lse[row.token * p.lse_token_stride + head * p.lse_head_stride] = end.lse;
}

// kLanes lanes x kVectors vectors of 16 bytes hold a row of up to kCapacity elements, for up to kHeads query heads.
template <typename T, int kLanes, int kVectors, int kHeads> struct DecodeShape {
  static constexpr int kElements = kVectors * kWidth<T>;  // of a row, in one lane
  static constexpr int kCapacity = kLanes * kElements;
  static constexpr int kRows = 32 / kLanes;  // of K or V, in one warp
  static constexpr int kUnroll = kVectors > 1 ? 2 : 4;
  static constexpr int kStep = kWarps * kRows * kUnroll;  // keys that the thread block takes at once
  static constexpr int kSharedBytes = kWarps * kHeads * (kCapacity + 2) * static_cast<int>(sizeof(float));
};

template <typename T, int kLanes, int kVectors, int kHeads>
__global__ void __launch_bounds__(kThreads) decode_attention_kernel(const AttentionParams p) {
  using Shape = DecodeShape<T, kLanes, kVectors, kHeads>;
  constexpr int kElements = Shape::kElements, kRows = Shape::kRows, kUnroll = Shape::kUnroll;
  extern __shared__ float shared[];

  unsigned index = blockIdx.x;
  const int split_index = static_cast<int>(index % p.num_splits);
  index /= p.num_splits;
  const int head_groups = decode_head_groups(p.group_size);
  const int head_group = static_cast<int>(index % head_groups);
  index /= head_groups;
  const int kv_head = static_cast<int>(index % p.num_kv_heads);
  const int64_t grid_index = index / p.num_kv_heads;
  const Row row = grid_row(p, grid_index);
  if (row.request < 0) return;
  const Split split = split_of(p, row, split_index);
  if (split_index >= split.count) return;

  // The heads of this thread block, shared out evenly among the groups.
  const int share = (p.group_size + head_groups - 1) / head_groups;
  const int first_head = kv_head * p.group_size + head_group * share;
  const int num_heads = min(share, p.group_size - head_group * share);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_lane = lane % kLanes, sub_row = lane / kLanes;
  const float scale = p.scale * head_scale(p.key_scale, kv_head);
  float query[kHeads][kElements], accumulator[kHeads][kElements], top[kHeads], sum[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int64_t query_row =
        row.token * p.query_token_stride + (first_head + min(h, num_heads - 1)) * p.query_head_stride;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int element = (row_lane + e / kWidth<T> * kLanes) * kWidth<T> + e % kWidth<T>;
      query[h][e] = element < p.head_size ? load_query<T>(p, query_row + element) * scale : 0.0f;
      accumulator[h][e] = 0.0f;
    }
    top[h] = -INFINITY;
    sum[h] = 0.0f;
  }

  const int32_t* table = p.block_tables + row.request * p.table_stride;
  const T* key_head = static_cast<const T*>(p.key_cache) + kv_head * p.key_head_stride;
  const T* value_head = static_cast<const T*>(p.value_cache) + kv_head * p.value_head_stride;
  for (int base = split.begin; base < split.end; base += Shape::kStep) {
    // Keys past the end are read as the last key, which exists, and masked: the loads need no branch.
    const T *key_rows[kUnroll], *value_rows[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int key = min(base + (u * kWarps + warp) * kRows + sub_row, split.end - 1);
      const int column = p.block_size.divide(key);
      const int64_t block = table[column];
      const int64_t offset = static_cast<int64_t>(key - column * static_cast<int>(p.block_size.value)) * p.head_size;
      key_rows[u] = key_head + block * p.key_block_stride + offset;
      value_rows[u] = value_head + block * p.value_block_stride + offset;
    }
    Vector<T> keys[kUnroll][kVectors], values[kUnroll][kVectors];
    if (p.vectors) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int element = (row_lane + v * kLanes) * kWidth<T>;
          const int inside = element < p.head_size ? element : 0;  // lanes past the row read its start, to no effect
          keys[u][v] = *reinterpret_cast<const Vector<T>*>(key_rows[u] + inside);
          values[u][v] = *reinterpret_cast<const Vector<T>*>(value_rows[u] + inside);
        }
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int element = (row_lane + v * kLanes) * kWidth<T>;
          keys[u][v] = load_elements(key_rows[u] + element, p.head_size - element);
          values[u][v] = load_elements(value_rows[u] + element, p.head_size - element);
        }
      }
    }

    float weights[kHeads][kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) weights[h][u] = 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float parts[kWidth<T>];
        unpack<T>(keys[u][v], parts);
        const bool inside = (row_lane + v * kLanes) * kWidth<T> < p.head_size;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          float dot = 0.0f;
#pragma unroll
          for (int e = 0; e < kWidth<T>; ++e) dot += query[h][v * kWidth<T> + e] * parts[e];
          if (inside) weights[h][u] += dot;
        }
      }
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) weights[h][u] += __shfl_xor_sync(0xffffffffu, weights[h][u], mask);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float slope = alibi_slope(p, first_head + min(h, num_heads - 1));
      float new_top = top[h];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int key = base + (u * kWarps + warp) * kRows + sub_row;
        const float logit = score(p, weights[h][u], slope, key - row.position);
        weights[h][u] = key < split.end ? logit : -INFINITY;
        new_top = fmaxf(new_top, weights[h][u]);
      }
      const float rescale = exp2f(top[h] - finite_top(new_top));
      top[h] = new_top;
      sum[h] *= rescale;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        weights[h][u] = exp2f(weights[h][u] - finite_top(new_top));
        sum[h] += weights[h][u];
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) accumulator[h][e] *= rescale;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float parts[kWidth<T>];
        unpack<T>(values[u][v], parts);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
#pragma unroll
          for (int e = 0; e < kWidth<T>; ++e) accumulator[h][v * kWidth<T> + e] += weights[h][u] * parts[e];
        }
      }
    }
  }

  // Rows of the warp into its first kLanes lanes, then warps through shared memory.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int mask = kLanes; mask < 32; mask *= 2) {
      const float other_top = __shfl_xor_sync(0xffffffffu, top[h], mask);
      const float other_sum = __shfl_xor_sync(0xffffffffu, sum[h], mask);
      const float new_top = fmaxf(top[h], other_top);
      const float mine = exp2f(top[h] - finite_top(new_top)), theirs = exp2f(other_top - finite_top(new_top));
      top[h] = new_top;
      sum[h] = sum[h] * mine + other_sum * theirs;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const float other = __shfl_xor_sync(0xffffffffu, accumulator[h][e], mask);
        accumulator[h][e] = accumulator[h][e] * mine + other * theirs;
      }
    }
  }
  float* shared_rows = shared;                                          // [kWarps][kHeads][kCapacity]
  float* shared_ends = shared + kWarps * kHeads * Shape::kCapacity;     // [kWarps][kHeads][2]
  if (sub_row == 0) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float* target = shared_rows + (warp * kHeads + h) * Shape::kCapacity;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        target[(row_lane + e / kWidth<T> * kLanes) * kWidth<T> + e % kWidth<T>] = accumulator[h][e];
      }
      if (row_lane == 0) {
        shared_ends[(warp * kHeads + h) * 2] = top[h];
        shared_ends[(warp * kHeads + h) * 2 + 1] = sum[h];
      }
    }
  }
  __syncthreads();

  for (int item = threadIdx.x; item < num_heads * p.head_size; item += kThreads) {
    const int h = item / p.head_size, element = item % p.head_size, head = first_head + h;
    float all_top = -INFINITY;
    for (int w = 0; w < kWarps; ++w) all_top = fmaxf(all_top, shared_ends[(w * kHeads + h) * 2]);
    float all_sum = 0.0f, value = 0.0f;
    for (int w = 0; w < kWarps; ++w) {
      const float rescale = exp2f(shared_ends[(w * kHeads + h) * 2] - finite_top(all_top));
      all_sum += rescale * shared_ends[(w * kHeads + h) * 2 + 1];
      value += rescale * shared_rows[(w * kHeads + h) * Shape::kCapacity + element];
    }
    if (split.count == 1) {
      write_row<T>(p, row, head, element, value, end_row(p, all_top, all_sum, head));
      continue;
    }
    const int64_t slot = (grid_index * p.num_query_heads + head) * p.num_splits + split_index;
    p.workspace[slot * p.head_size + element] = value;
    if (element == 0) {
      float* end = p.workspace + p.num_rows * p.num_query_heads * p.num_splits * p.head_size + slot * 2;
      end[0] = all_top;
      end[1] = all_sum;
    }
  }
}

// Merges the partials of the rows that have several, in the order of their keys: one thread block a (row, query head).
template <typename T> __global__ void __launch_bounds__(kThreads) merge_splits_kernel(const AttentionParams p) {
  const int64_t grid_index = blockIdx.x / p.num_query_heads;
  const int head = static_cast<int>(blockIdx.x % p.num_query_heads);
  const Row row = grid_row(p, grid_index);
  if (row.request < 0) return;
  const int count = split_of(p, row, 0).count;
  if (count == 1) return;

  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.num_splits;
  const float* partials = p.workspace + first * p.head_size;
  const float* ends = p.workspace + p.num_rows * p.num_query_heads * p.num_splits * p.head_size + first * 2;
  float top = -INFINITY;
  for (int s = 0; s < count; ++s) top = fmaxf(top, ends[2 * s]);
  for (int element = threadIdx.x; element < p.head_size; element += kThreads) {
    float sum = 0.0f, value = 0.0f;
    for (int s = 0; s < count; ++s) {
      const float rescale = exp2f(ends[2 * s] - finite_top(top));
      sum += rescale * ends[2 * s + 1];
      value += rescale * partials[static_cast<int64_t>(s) * p.head_size + element];
    }
    write_row<T>(p, row, head, element, value, end_row(p, top, sum, head));
  }
}

template <typename T, int kLanes, int kVectors> void launch_for_group(const AttentionParams& p, Stream stream) {
  const int groups = decode_head_groups(p.group_size);
  const int64_t share = ceil_div(p.group_size, groups);
  const int64_t blocks = p.num_rows * p.num_kv_heads * groups * p.num_splits;
  if (share == 1) {
    using Shape = DecodeShape<T, kLanes, kVectors, 1>;
    launch(kOp, decode_attention_kernel<T, kLanes, kVectors, 1>, blocks, kThreads, Shape::kSharedBytes, stream, p);
  } else if (share <= 4) {
    using Shape = DecodeShape<T, kLanes, kVectors, 4>;
    launch(kOp, decode_attention_kernel<T, kLanes, kVectors, 4>, blocks, kThreads, Shape::kSharedBytes, stream, p);
  } else {
    using Shape = DecodeShape<T, kLanes, kVectors, 8>;
    launch(kOp, decode_attention_kernel<T, kLanes, kVectors, 8>, blocks, kThreads, Shape::kSharedBytes, stream, p);
  }
}

}  // namespace

void launch_decode_attention(const AttentionParams& params, DType dtype, Stream stream) {
  dispatch_cache(dtype, kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kRowLanes = 128 / kWidth<T>;  // lanes of a row of 128 elements: 16 in 8 and 16 bit, 32 in float32
    if (params.head_size <= 64) {
      launch_for_group<T, kRowLanes / 2, 1>(params, stream);
    } else if (params.head_size <= 128) {
      launch_for_group<T, kRowLanes, 1>(params, stream);
    } else {
      launch_for_group<T, 32, 256 / (32 * kWidth<T>)>(params, stream);
    }
    if (params.num_splits > 1) {
      launch(kOp, merge_splits_kernel<T>, params.num_rows * params.num_query_heads, kThreads, 0, stream, params);
    }
  });
}

}  // namespace research_engine::cuda
