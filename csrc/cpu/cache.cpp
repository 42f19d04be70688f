// Writing into the paged KV cache, reading requests out of it, and moving whole blocks within it or between two.
//
// Layout: a cache of one layer is [N, Hkv, B, D] with contiguous (block, head) tiles; whole caches are [L, 2, N, Hkv, B, D]
// with contiguous blocks. Slot s is row s % B of block s / B.
// Algorithm: memcpy, or for caches of e4m3 and int8 a division by the head's scale and a rounding; threads share the tokens,
// or the (layer, key or value, pair) triples.
// Roofline: memory; every byte is read once and written once.
#include <cstring>

#include "common/ops.h"
#include "cpu/dispatch.h"

namespace research_engine::cpu {

namespace {

// cache row = row / scale, rounded and saturated.
void quantise_row(const TensorView& from, int64_t source, const TensorView& cache, int64_t target, int64_t size, float scale) {
  dispatch(from.dtype, [&](auto zero) {
    const auto* x = from.ptr<decltype(zero)>() + source;
    dispatch_cache(cache.dtype, [&](auto stored) {
      auto* out = cache.ptr<decltype(stored)>() + target;
      for (int64_t d = 0; d < size; ++d) from_float(to_float(x[d]) / scale, out + d);
    });
  });
}

}  // namespace

void reshape_and_cache(TensorView key, TensorView value, TensorView key_cache, TensorView value_cache, TensorView slot_mapping,
                       TensorView key_scale, TensorView value_scale) {
  const int64_t tokens = slot_mapping.shape[0], heads = key.shape[1], head_size = key.shape[2];
  const int64_t num_blocks = key_cache.shape[0], block_size = key_cache.shape[2];
  const int64_t element = element_size(key.dtype), row_bytes = head_size * element;
  const auto write = [&](const TensorView& from, const TensorView& cache, const TensorView& scale, int64_t t, int64_t h,
                         int64_t block, int64_t offset) {
    const int64_t source = t * from.strides[0] + h * from.strides[1];
    const int64_t target = block * cache.strides[0] + h * cache.strides[1] + offset * cache.strides[2];
    if (cache.dtype == from.dtype) std::memcpy(cache.ptr<char>() + target * element, from.ptr<char>() + source * element, row_bytes);
    else quantise_row(from, source, cache, target, head_size, scale ? scale.ptr<float>()[h * scale.strides[0]] : 1.0f);
  };
#pragma omp parallel for schedule(static) if (tokens * heads * head_size > kParallelElements)
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t slot = slot_mapping.ptr<int64_t>()[t * slot_mapping.strides[0]];
    if (slot < 0 || slot >= num_blocks * block_size) continue;
    for (int64_t h = 0; h < heads; ++h) {
      write(key, key_cache, key_scale, t, h, slot / block_size, slot % block_size);
      write(value, value_cache, value_scale, t, h, slot / block_size, slot % block_size);
    }
  }
}

void gather_cache(TensorView key_cache, TensorView value_cache, TensorView block_tables, TensorView start_loc, TensorView starts,
                  TensorView key, TensorView value, TensorView key_scale, TensorView value_scale) {
  const int64_t requests = block_tables.shape[0], heads = key.shape[1], head_size = key.shape[2], block_size = key_cache.shape[2];
  const auto read = [&](const TensorView& cache, const TensorView& rows, const TensorView& scale, int64_t t, int64_t h,
                        int64_t block, int64_t offset) {
    const int64_t source = block * cache.strides[0] + h * cache.strides[1] + offset * cache.strides[2];
    const int64_t target = t * rows.strides[0] + h * rows.strides[1];
    const float factor = scale ? scale.ptr<float>()[h * scale.strides[0]] : 1.0f;
    dispatch(rows.dtype, [&](auto zero) {
      auto* out = rows.ptr<decltype(zero)>() + target;
      if (cache.dtype == rows.dtype) {
        std::memcpy(out, cache.ptr<decltype(zero)>() + source, head_size * sizeof(zero));
        return;
      }
      dispatch_cache(cache.dtype, [&](auto stored) {
        const auto* x = cache.ptr<decltype(stored)>() + source;
        for (int64_t d = 0; d < head_size; ++d) from_float(to_float(x[d]) * factor, out + d);
      });
    });
  };
#pragma omp parallel for schedule(dynamic) if (key.numel() > kParallelElements)
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t begin = start_loc.ptr<int32_t>()[r], end = start_loc.ptr<int32_t>()[r + 1];
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = t - begin + (starts ? starts.ptr<int32_t>()[r] : 0);
      const int64_t block = block_tables.ptr<int32_t>()[r * block_tables.strides[0] + position / block_size];
      for (int64_t h = 0; h < heads; ++h) {
        read(key_cache, key, key_scale, t, h, block, position % block_size);
        read(value_cache, value, value_scale, t, h, block, position % block_size);
      }
    }
  }
}

namespace {

void move_blocks(const TensorView& source, const TensorView& destination, const TensorView& pairs) {
  const int64_t layers = source.shape[0], count = pairs.shape[0];
  const int64_t element = element_size(source.dtype);
  const int64_t block_bytes = source.shape[3] * source.shape[4] * source.shape[5] * element;
#pragma omp parallel for collapse(2) schedule(static) if (layers * count * block_bytes > 8 * kParallelElements)
  for (int64_t plane = 0; plane < 2 * layers; ++plane) {
    for (int64_t p = 0; p < count; ++p) {
      const int64_t* pair = pairs.ptr<int64_t>() + p * pairs.strides[0];
      const auto at = [&](const TensorView& cache, int64_t block) {
        const int64_t offset = plane / 2 * cache.strides[0] + plane % 2 * cache.strides[1] + block * cache.strides[2];
        return cache.ptr<char>() + offset * element;
      };
      std::memcpy(at(destination, pair[pairs.strides[1]]), at(source, pair[0]), block_bytes);
    }
  }
}

}  // namespace

void copy_blocks(TensorView kv_cache, TensorView pairs) { move_blocks(kv_cache, kv_cache, pairs); }

void swap_blocks(TensorView source, TensorView destination, TensorView pairs) { move_blocks(source, destination, pairs); }

}  // namespace research_engine::cpu
