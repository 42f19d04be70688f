// reshape_and_cache: writes the keys and values of this step's tokens into their slots of the paged KV cache.
//
// Layout     key, value [T, Hkv, D], tokens and heads strided; caches [N, Hkv, B, D], a (block, head) tile contiguous;
//            slot_mapping int64 [at most T], slot = block * B + offset.
// Algorithm  1. The slots decide how many rows are written: rows past slot_mapping are padding.
//            2. A slot outside of [0, N * B) is skipped (-1 marks padding): never a wild write.
//            3. threadIdx.x walks the (head, vector) items of one token, threadIdx.y counts tokens of the block.
//            4. Elements are moved as bytes: 16 at a time when everything is aligned, else one element at a time.
// Roofline   memory: 4 T Hkv D elements moved (key and value, read and written), no arithmetic.
// Reached    not measured yet.
#include "../common/cuda_dtype.h"
#include "launch.cuh"

namespace research_engine::cuda {
namespace {

constexpr int kThreads = 256;
constexpr const char* kOp = "reshape_and_cache";

// Strides count units, not elements.
template <typename Unit> struct Rows {
  const Unit* tokens;
  int64_t token_stride, head_stride;
  Unit* cache;
  int64_t block_stride, tile_stride;
};

template <typename Unit> struct WriteParams {
  Rows<Unit> key, value;
  const int64_t* slot_mapping;
  int64_t num_slots, capacity, block_size;
  int num_heads, head_units;
};

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    reshape_and_cache_kernel(const __grid_constant__ AfterPredecessor<WriteParams<Unit>> after) {
  const WriteParams<Unit>& p = after.wait();
  const Rows<Unit>&key = p.key, &value = p.value;
  const int num_heads = p.num_heads, head_units = p.head_units;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= p.num_slots) return;
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0 || slot >= p.capacity) return;
  const int64_t block = slot / p.block_size, offset = slot % p.block_size;
  for (int item = threadIdx.x; item < num_heads * head_units; item += blockDim.x) {
    const int64_t head = item / head_units;
    const int unit = item % head_units;
    const int64_t in_tile = offset * head_units + unit;
    key.cache[block * key.block_stride + head * key.tile_stride + in_tile] =
        key.tokens[token * key.token_stride + head * key.head_stride + unit];
    value.cache[block * value.block_stride + head * value.tile_stride + in_tile] =
        value.tokens[token * value.token_stride + head * value.head_stride + unit];
  }
}

template <typename Unit>
Rows<Unit> rows_of(const TensorView& tokens, const TensorView& cache) {
  const int64_t elements = static_cast<int64_t>(sizeof(Unit)) / element_size(cache.dtype);
  return {tokens.ptr<const Unit>(),           tokens.strides[0] / elements, tokens.strides[1] / elements,
          cache.ptr<Unit>(), cache.strides[0] / elements,  cache.strides[1] / elements};
}

bool rows_aligned(const TensorView& tokens, const TensorView& cache) {
  return vector_aligned(tokens, tokens.strides[0]) && vector_aligned(tokens, tokens.strides[1]) &&
         vector_aligned(cache, cache.strides[0]) && vector_aligned(cache, cache.strides[1]) &&
         vector_aligned(cache, cache.shape[3]);
}

template <typename Unit>
void write_rows(const TensorView& key, const TensorView& value, const TensorView& key_cache,
                const TensorView& value_cache, const TensorView& slot_mapping, Stream stream) {
  const int64_t num_slots = slot_mapping.shape[0] < key.shape[0] ? slot_mapping.shape[0] : key.shape[0];
  const int64_t num_heads = key.shape[1], block_size = key_cache.shape[2];
  const int64_t head_units = key.shape[2] * element_size(key.dtype) / static_cast<int64_t>(sizeof(Unit));
  unsigned width = 32;
  while (width < kThreads && width < num_heads * head_units) width *= 2;
  const dim3 threads(width, kThreads / width);
  const WriteParams<Unit> params{rows_of<Unit>(key, key_cache), rows_of<Unit>(value, value_cache),
                                 slot_mapping.ptr<const int64_t>(), num_slots, key_cache.shape[0] * block_size, block_size,
                                 static_cast<int>(num_heads), static_cast<int>(head_units)};
  launch_after(kOp, reshape_and_cache_kernel<Unit>, {ceil_div(num_slots, threads.y), threads}, stream, params);
}

}  // namespace

void reshape_and_cache(TensorView key, TensorView value, TensorView key_cache, TensorView value_cache,
                       TensorView slot_mapping, TensorView key_scale, TensorView value_scale, Stream stream) {
  if (slot_mapping.shape[0] == 0 || key.numel() == 0) return;
  const DeviceGuard guard(key.device, kOp);
  if (key_cache.dtype != key.dtype) {  // in rotary.cu: a rotation of nothing
    return write_quantized(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale, stream);
  }
  if (rows_aligned(key, key_cache) && rows_aligned(value, value_cache)) {
    return write_rows<uint4>(key, value, key_cache, value_cache, slot_mapping, stream);
  }
  switch (element_size(key.dtype)) {
    case 4: return write_rows<uint32_t>(key, value, key_cache, value_cache, slot_mapping, stream);
    case 2: return write_rows<uint16_t>(key, value, key_cache, value_cache, slot_mapping, stream);
    case 1: return write_rows<uint8_t>(key, value, key_cache, value_cache, slot_mapping, stream);
    default: throw std::runtime_error("reshape_and_cache: keys of 8-byte elements have no CUDA kernel");
  }
}

}  // namespace research_engine::cuda
