// gather_cache: keys and values of requests out of the paged cache into rows that lie one behind the other.
//
// Layout     caches [N, Hkv, B, D], a (block, head) tile contiguous; block_tables int32 [R, columns]; start_loc int32 [R + 1]: the
//            rows of request r in key, value [T, Hkv, D]; starts int32 [R]: the token that its first row is.
// Algorithm  1. threadIdx.x walks the (head, vector) items of one token, threadIdx.y counts tokens of the block.
//            2. The request of a token by binary search over start_loc; rows past the last request are padding.
//            3. Vectors of 16 bytes (8 of quantised elements) where everything is aligned, else single elements; quantised
//               elements are multiplied with their head's scale.
//            4. A token past the table or a block outside of the cache is skipped: never a wild access.
// Roofline   memory: 2 T Hkv D elements read and as many written.
// Reached    3.98 TB/s on an H200, 93 % of a copy (docs/performance.md).
#include "paged_attention.cuh"

namespace research_engine::cuda {
namespace {

constexpr int kThreads = 256;
constexpr const char* kOp = "gather_cache";

struct Side {
  const void* cache;
  int64_t block_stride, tile_stride;
  void* rows;
  int64_t token_stride, head_stride;
  const float* scales;
};

struct GatherParams {
  Side sides[2];
  const int32_t *block_tables, *start_loc, *starts;
  int64_t table_stride, num_tokens, num_blocks;
  int columns, num_requests, num_heads, head_size;
  Divisor block_size;
};

template <typename E, int kCount> struct alignas(sizeof(E) * kCount) Pack {
  E values[kCount];
};

template <typename T, typename C, int kStep>
__global__ void __launch_bounds__(kThreads) gather_cache_kernel(const __grid_constant__ GatherParams p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= p.num_tokens || token < p.start_loc[0] || token >= p.start_loc[p.num_requests]) return;
  int request = 0;
  for (int high = p.num_requests; high - request > 1;) {
    const int middle = (request + high) / 2;
    if (p.start_loc[middle] <= token) {
      request = middle;
    } else {
      high = middle;
    }
  }
  const int position = (p.starts != nullptr ? p.starts[request] : 0) + static_cast<int>(token - p.start_loc[request]);
  if (position < 0) return;
  const int column = p.block_size.divide(position);
  if (column >= p.columns) return;
  const int64_t block = p.block_tables[request * p.table_stride + column];
  if (block < 0 || block >= p.num_blocks) return;
  const int64_t in_tile = static_cast<int64_t>(position - column * static_cast<int>(p.block_size.value)) * p.head_size;
  const int steps = p.head_size / kStep;
  for (int item = threadIdx.x; item < p.num_heads * steps; item += blockDim.x) {
    const int head = item / steps, element = item % steps * kStep;
    Pack<C, kStep> from[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int64_t at = block * p.sides[s].block_stride + head * p.sides[s].tile_stride + in_tile + element;
      from[s] = *reinterpret_cast<const Pack<C, kStep>*>(static_cast<const C*>(p.sides[s].cache) + at);
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      Pack<T, kStep> to;
      if constexpr (sizeof(C) == 1) {
        const float scale = head_scale(p.sides[s].scales, head);
#pragma unroll
        for (int e = 0; e < kStep; ++e) to.values[e] = from_float<T>(to_float(from[s].values[e]) * scale);
      } else {
        memcpy(&to, &from[s], sizeof(to));
      }
      const int64_t at = token * p.sides[s].token_stride + head * p.sides[s].head_stride + element;
      *reinterpret_cast<Pack<T, kStep>*>(static_cast<T*>(p.sides[s].rows) + at) = to;
    }
  }
}

Side side_of(const TensorView& cache, const TensorView& rows, const TensorView& scales) {
  return {cache.data, cache.strides[0], cache.strides[1], rows.data, rows.strides[0], rows.strides[1], scales.ptr<const float>()};
}

bool aligned(const TensorView& view, int64_t step) {
  const int64_t bytes = step * element_size(view.dtype);
  const auto fits = [&](int64_t stride) { return stride * element_size(view.dtype) % bytes == 0; };
  return reinterpret_cast<uintptr_t>(view.data) % bytes == 0 && fits(view.strides[0]) && fits(view.strides[1]);
}

}  // namespace

void gather_cache(TensorView key_cache, TensorView value_cache, TensorView block_tables, TensorView start_loc, TensorView starts,
                  TensorView key, TensorView value, TensorView key_scale, TensorView value_scale, Stream stream) {
  if (key.numel() == 0 || block_tables.shape[0] == 0 || key_cache.numel() == 0) return;
  const DeviceGuard guard(key.device, kOp);
  GatherParams p{};
  p.sides[0] = side_of(key_cache, key, key_scale);
  p.sides[1] = side_of(value_cache, value, value_scale);
  p.block_tables = block_tables.ptr<const int32_t>();
  p.start_loc = start_loc.ptr<const int32_t>();
  p.starts = starts.ptr<const int32_t>();
  p.table_stride = block_tables.strides[0];
  p.columns = static_cast<int>(block_tables.shape[1]);
  p.num_requests = static_cast<int>(block_tables.shape[0]);
  p.num_tokens = key.shape[0];
  p.num_blocks = key_cache.shape[0];
  p.num_heads = static_cast<int>(key.shape[1]);
  p.head_size = static_cast<int>(key.shape[2]);
  p.block_size = Divisor(static_cast<uint32_t>(key_cache.shape[2]));
  const auto launch_for = [&](auto rows, auto cached) {
    using T = typename decltype(rows)::type;
    using C = typename decltype(cached)::type;
    constexpr int kStep = kWidth<T>;
    bool vectors = p.head_size % kStep == 0;
    for (const TensorView& view : {key_cache, value_cache, key, value}) vectors = vectors && aligned(view, kStep);
    unsigned width = 32;
    while (width < kThreads && width < p.num_heads * p.head_size / (vectors ? kStep : 1)) width *= 2;
    const dim3 threads(width, kThreads / width);
    launch(kOp, vectors ? gather_cache_kernel<T, C, kStep> : gather_cache_kernel<T, C, 1>, ceil_div(p.num_tokens, threads.y),
           threads, 0, stream, p);
  };
  dispatch_float(key.dtype, kOp, [&](auto rows) {
    if (key_cache.dtype == DType::f8e4m3) return launch_for(rows, TypeTag<__nv_fp8_e4m3>{});
    if (key_cache.dtype == DType::i8) return launch_for(rows, TypeTag<int8_t>{});
    launch_for(rows, rows);
  });
}

}  // namespace research_engine::cuda
