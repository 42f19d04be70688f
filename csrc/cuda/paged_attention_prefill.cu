// Paged attention, the prefill path: tiles of query rows against tiles of keys, the scores never leaving the chip
// (FlashAttention-2, Dao, 2023), in float32 arithmetic.
//
// Layout     see paged_attention.cu. A tile's rows are (token, query head) pairs of one KV head: row = token * G + g, so
//            that its G heads share each K and V tile. In shared memory, float32: queries [rows, D + 4], K then V in the
//            same [keys, D + 4], probabilities [rows, keys + 4]; the padding keeps 16-byte reads free of bank conflicts.
// Algorithm  1. Find the request of this tile by binary search: request r's tiles start at floor(start_r G / rows) + r,
//               which leaves room for every partly filled tile without reading a length on the host.
//            2. Walk the keys that any row of the tile sees, in tiles that start at multiples of the tile size; keys that
//               no row sees are not read but taken as zero.
//            3. 16 x 16 threads: scores from register tiles, mask, online softmax over the 16 threads of a row.
//            4. V (and the next K) is on its way from memory to registers while the scores (and the output) are computed.
//            5. Output += probabilities x V; at the end scale each row by its sum.
// A row's bits depend on its own keys alone: a tile that it sees nothing of multiplies by one and adds zero.
// Roofline   operations: 4 x rows x keys x D on the float32 units (67 TFLOP/s on an H200); memory: 2 x keys x D elements
//            a tile of rows.
// Reached    not measured yet.
#include "paged_attention.cuh"

namespace research_engine::cuda {
namespace {

constexpr int kSide = 16;  // the thread block is kSide x kSide
constexpr int kThreads = kSide * kSide;
constexpr const char* kOp = "paged_attention (path prefill)";

// Tiles for heads of up to kCapacity elements; at 256, they fit the 99 KiB of shared memory of sm_86 and sm_89 as well.
template <typename T, int kCapacity> struct PrefillShape {
  static constexpr int kRows = kCapacity > 128 ? 32 : 64;
  static constexpr int kKeys = kCapacity > 128 ? 32 : 64;
  static constexpr int kStride = kCapacity + 4;
  static constexpr int kProbStride = kKeys + 4;
  static constexpr int kVectors = kCapacity / kWidth<T>;           // of a K or V row
  static constexpr int kLoads = kKeys * kVectors / kThreads;       // vectors of a tile, in one thread
  static constexpr int kSharedBytes =
      ((kRows + kKeys) * kStride + kRows * kProbStride) * static_cast<int>(sizeof(float));
};

__device__ inline int64_t first_tile(const AttentionParams& p, int request, int tile_rows) {
  return static_cast<int64_t>(p.query_start_loc[request]) * p.group_size / tile_rows + request;
}

template <typename T> __device__ inline void store_vector(float* target, const Vector<T>& raw) {
  float values[kWidth<T>];
  unpack<T>(raw, values);
#pragma unroll
  for (int e = 0; e < kWidth<T>; e += 4) {
    *reinterpret_cast<float4*>(target + e) = make_float4(values[e], values[e + 1], values[e + 2], values[e + 3]);
  }
}

// This thread's vectors of the K or V tile that starts at key `start`; keys outside of [begin, end) are zero.
template <typename T, int kCapacity>
__device__ inline void fetch_tile(const AttentionParams& p, const T* head, int64_t block_stride, const int32_t* table,
                                  int start, int begin, int end, Vector<T> (&staged)[PrefillShape<T, kCapacity>::kLoads]) {
  using Shape = PrefillShape<T, kCapacity>;
#pragma unroll
  for (int load = 0; load < Shape::kLoads; ++load) {
    const int item = threadIdx.x + load * kThreads;
    const int key = start + item / Shape::kVectors, element = item % Shape::kVectors * kWidth<T>;
    staged[load] = Vector<T>{};
    if (key < begin || key >= end || element >= p.head_size) continue;
    const int column = p.block_size.divide(key);
    const T* source = head + table[column] * block_stride +
                      static_cast<int64_t>(key - column * static_cast<int>(p.block_size.value)) * p.head_size + element;
    staged[load] =
        p.vectors ? *reinterpret_cast<const Vector<T>*>(source) : load_elements(source, p.head_size - element);
  }
}

template <typename T, int kCapacity>
__device__ inline void store_tile(const AttentionParams& p, float* tile,
                                  const Vector<T> (&staged)[PrefillShape<T, kCapacity>::kLoads]) {
  using Shape = PrefillShape<T, kCapacity>;
#pragma unroll
  for (int load = 0; load < Shape::kLoads; ++load) {
    const int item = threadIdx.x + load * kThreads;
    const int element = item % Shape::kVectors * kWidth<T>;
    if (element < p.head_size) store_vector<T>(tile + item / Shape::kVectors * Shape::kStride + element, staged[load]);
  }
}

template <typename T, int kCapacity>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 1 : 2)
    prefill_attention_kernel(const AttentionParams p) {
  using Shape = PrefillShape<T, kCapacity>;
  constexpr int kRows = Shape::kRows / kSide, kKeys = Shape::kKeys / kSide;  // of the score tile, in one thread
  constexpr int kColumns = kCapacity / (4 * kSide);                         // groups of 4 output elements, in one thread
  extern __shared__ float4 shared[];
  float* queries = reinterpret_cast<float*>(shared);
  float* tile = queries + Shape::kRows * Shape::kStride;
  float* probabilities = tile + Shape::kKeys * Shape::kStride;

  // Late tiles see most keys: they come first.
  const int kv_head = static_cast<int>(blockIdx.x % p.num_kv_heads);
  const int64_t tile_index = (gridDim.x - 1 - blockIdx.x) / p.num_kv_heads;
  int request = 0;
  for (int high = p.num_requests; high - request > 1;) {
    const int middle = (request + high) / 2;
    if (first_tile(p, middle, Shape::kRows) <= tile_index) {
      request = middle;
    } else {
      high = middle;
    }
  }
  const int first_query = p.query_start_loc[request];
  const int query_len = p.query_start_loc[request + 1] - first_query;
  const int64_t total_rows = static_cast<int64_t>(query_len) * p.group_size;
  const int64_t first_row = (tile_index - first_tile(p, request, Shape::kRows)) * Shape::kRows;
  if (first_row >= total_rows || (p.single_queries && query_len == 1)) return;

  // Keys that any row of the tile sees: from the first row's first to the last row's last.
  const int64_t last_row = min(first_row + Shape::kRows, total_rows) - 1;
  const int seq_len = p.seq_lens[request], first_position = seq_len - query_len;
  const int begin = first_key(p, first_position + static_cast<int>(first_row / p.group_size));
  const int end = end_key(p, first_position + static_cast<int>(last_row / p.group_size), seq_len);

  // This thread: rows thread_row + 16 i, keys thread_column + 16 j, output elements 4 thread_column + 64 c.
  const int thread_row = threadIdx.x / kSide, thread_column = threadIdx.x % kSide;
  int positions[kRows];
  float slopes[kRows], top[kRows], sum[kRows], output[kRows][kColumns][4];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t index = first_row + thread_row + kSide * i;  // rows past the last compute on zeros, and write nothing
    positions[i] = first_position + static_cast<int>(index / p.group_size);
    slopes[i] = alibi_slope(p, kv_head * p.group_size + static_cast<int>(index % p.group_size));
    top[i] = -INFINITY;
    sum[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) output[i][c][e] = 0.0f;
    }
  }

  for (int item = threadIdx.x; item < Shape::kRows * (kCapacity / 4); item += kThreads) {
    const int row = item / (kCapacity / 4), element = item % (kCapacity / 4) * 4;
    const int64_t index = first_row + row;
    if (element >= p.head_size) continue;
    const int64_t source = (first_query + index / p.group_size) * p.query_token_stride +
                           (kv_head * p.group_size + index % p.group_size) * p.query_head_stride + element;
    float values[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      values[e] = index < total_rows && element + e < p.head_size ? load_query<T>(p, source + e) : 0.0f;
    }
    *reinterpret_cast<float4*>(queries + row * Shape::kStride + element) =
        make_float4(values[0], values[1], values[2], values[3]);
  }

  const int32_t* table = p.block_tables + request * p.table_stride;
  const T* key_head = static_cast<const T*>(p.key_cache) + kv_head * p.key_head_stride;
  const T* value_head = static_cast<const T*>(p.value_cache) + kv_head * p.value_head_stride;
  const float scale = p.scale * head_scale(p.key_scale, kv_head);
  Vector<T> staged[Shape::kLoads];
  int start = begin / Shape::kKeys * Shape::kKeys;
  if (start < end) fetch_tile<T, kCapacity>(p, key_head, p.key_block_stride, table, start, begin, end, staged);
  for (; start < end; start += Shape::kKeys) {
    store_tile<T, kCapacity>(p, tile, staged);
    __syncthreads();
    fetch_tile<T, kCapacity>(p, value_head, p.value_block_stride, table, start, begin, end, staged);

    float scores[kRows][kKeys] = {};
    for (int d = 0; d < p.head_size; d += 4) {  // rows are zero from head_size to the next multiple of 4
      float4 query[kRows], key[kKeys];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        query[i] = *reinterpret_cast<const float4*>(queries + (thread_row + kSide * i) * Shape::kStride + d);
      }
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        key[j] = *reinterpret_cast<const float4*>(tile + (thread_column + kSide * j) * Shape::kStride + d);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          scores[i][j] += query[i].x * key[j].x;
          scores[i][j] += query[i].y * key[j].y;
          scores[i][j] += query[i].z * key[j].z;
          scores[i][j] += query[i].w * key[j].w;
        }
      }
    }

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float new_top = top[i];
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        const int key = start + thread_column + kSide * j;
        const bool visible = key >= first_key(p, positions[i]) && key < end_key(p, positions[i], seq_len);
        scores[i][j] = visible ? score(p, scores[i][j] * scale, slopes[i], key - positions[i]) : -INFINITY;
        new_top = fmaxf(new_top, scores[i][j]);
      }
#pragma unroll
      for (int mask = kSide / 2; mask > 0; mask /= 2) {
        new_top = fmaxf(new_top, __shfl_xor_sync(0xffffffffu, new_top, mask));
      }
      const float rescale = exp2f(top[i] - finite_top(new_top));
      top[i] = new_top;
      sum[i] *= rescale;
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        const float weight = exp2f(scores[i][j] - finite_top(new_top));
        sum[i] += weight;
        probabilities[(thread_row + kSide * i) * Shape::kProbStride + thread_column + kSide * j] = weight;
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) output[i][c][e] *= rescale;
      }
    }
    __syncthreads();  // K is used up, the probabilities are there
    store_tile<T, kCapacity>(p, tile, staged);
    __syncthreads();
    if (start + Shape::kKeys < end) {
      fetch_tile<T, kCapacity>(p, key_head, p.key_block_stride, table, start + Shape::kKeys, begin, end, staged);
    }

    for (int k = 0; k < Shape::kKeys; k += 4) {
      float weights[kRows][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        *reinterpret_cast<float4*>(weights[i]) =
            *reinterpret_cast<const float4*>(probabilities + (thread_row + kSide * i) * Shape::kProbStride + k);
      }
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float4 value =
              *reinterpret_cast<const float4*>(tile + (k + kk) * Shape::kStride + 4 * kSide * c + 4 * thread_column);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            output[i][c][0] += weights[i][kk] * value.x;
            output[i][c][1] += weights[i][kk] * value.y;
            output[i][c][2] += weights[i][kk] * value.z;
            output[i][c][3] += weights[i][kk] * value.w;
          }
        }
      }
    }
    __syncthreads();  // V and the probabilities are used up
  }

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int mask = kSide / 2; mask > 0; mask /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], mask);
    const int64_t index = first_row + thread_row + kSide * i;
    if (index >= total_rows) continue;
    const int64_t token = first_query + index / p.group_size;
    const int head = kv_head * p.group_size + static_cast<int>(index % p.group_size);
    const RowEnd row_end = end_row(p, top[i], sum[i], head);
    const int64_t out = token * p.out_token_stride + head * p.out_head_stride;
    const float factor = row_end.factor * head_scale(p.value_scale, kv_head);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int element = 4 * kSide * c + 4 * thread_column + e;
        if (element < p.head_size) store_out<T>(p, out + element, output[i][c][e] * factor);
      }
    }
    if (thread_column == 0 && p.lse != nullptr) {
      p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = row_end.lse;
    }
  }
}

template <typename T, int kCapacity> void launch_tiles(const AttentionParams& p, Stream stream) {
  using Shape = PrefillShape<T, kCapacity>;
  const int64_t tiles = p.num_tokens * p.group_size / Shape::kRows + p.num_requests;
  launch(kOp, prefill_attention_kernel<T, kCapacity>, tiles * p.num_kv_heads, kThreads, Shape::kSharedBytes, stream, p);
}

}  // namespace

void launch_prefill_attention(const AttentionParams& params, DType dtype, Stream stream) {
  dispatch_cache(dtype, kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (params.head_size <= 64) {
      launch_tiles<T, 64>(params, stream);
    } else if (params.head_size <= 128) {
      launch_tiles<T, 128>(params, stream);
    } else {
      launch_tiles<T, 256>(params, stream);
    }
  });
}

}  // namespace research_engine::cuda
