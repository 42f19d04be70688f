// rotary_embedding, alone and fused with the write into the KV cache; and that write alone for quantised caches.
// (Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.)
//
// Layout     query [T, Hq, D], key, value [T, Hkv, D], tokens and heads strided, the elements of a head contiguous;
//            cos_sin float32 [max_position, rotary_dim], cosines in the first half of a row, sines in the second;
//            caches [N, Hkv, B, D], a (block, head) tile contiguous; slot_mapping int64 [at most T].
// Algorithm  1. Pairs of head h: (i, i + rotary_dim / 2), or (2i, 2i + 1) when interleaved; elements from rotary_dim on are
//               left alone.
//            2. threadIdx.x walks the items of one token, threadIdx.y counts tokens of the block. An item is 16 bytes of either
//               side of pairs (one pair where rows are not aligned), of the rest of a key, or of a value.
//            3. (a, b) -> (a cos - b sin, b cos + a sin) in float32, rounded once. A key is then stored in its slot and stays
//               as it was, or, without a cache, is stored in place.
//            4. Quantised caches take x / scale of the head, rounded to the nearest and saturated.
//            5. A position outside of the table gives NaN: it cannot raise here, and must not pass for a rotation. A slot
//               outside of the cache is skipped.
// Roofline   memory: 2 T (Hq + Hkv) rotary_dim elements moved (the table stays in cache), 3 operations an element; fused:
//            2 T Hq D of queries, T Hkv D of keys and of values read, and as many written to the cache.
// Versions   1 a thread a pair, element by element. 2 vectors of 16 bytes: with 2-byte accesses a warp asks for 64 bytes at a
//            time. 3 the cache write fused: the rotated key is not written and read again.
// Reached    2.5 TB/s on an H200 at 8,192 tokens of 32 + 8 heads of 128 (docs/performance.md).
#include <algorithm>
#include <initializer_list>

#include "../common/cuda_dtype.h"
#include "launch.cuh"

namespace research_engine::cuda {
namespace {

constexpr int kThreads = 256;

template <typename E, int kCount> struct alignas(sizeof(E) * kCount) Pack {
  E values[kCount];
};

struct Heads {
  void* data = nullptr;
  int64_t token_stride = 0, head_stride = 0;
  int count = 0;
};

struct Cache {
  void* data = nullptr;
  int64_t block_stride = 0, head_stride = 0;
  const float* scales = nullptr;
};

struct RotaryParams {
  const int64_t* positions;
  const float* cos_sin;
  int64_t table_stride, max_position, num_tokens;
  int half, head_size;
  bool interleaved;
  Heads query, key, value;
  Cache key_cache, value_cache;  // null data: keys are rotated in place
  const int64_t* slot_mapping;
  int64_t num_slots, capacity, block_size;
};

// `from` in float32, rounded to the tokens' type before: the same bits as when a rotated key had been stored in between.
template <typename C, int kStep> __device__ inline void store_in_cache(const Cache& cache, int64_t at, int head, const float (&from)[kStep]) {
  Pack<C, kStep> out;
  const float scale = cache.scales != nullptr ? cache.scales[head] : 1.0f;
#pragma unroll
  for (int e = 0; e < kStep; ++e) out.values[e] = from_float<C>(sizeof(C) == 1 ? from[e] / scale : from[e]);
  *reinterpret_cast<Pack<C, kStep>*>(static_cast<C*>(cache.data) + at) = out;
}

// kStep elements or pairs at a time. C: of the cache.
template <typename T, typename C, int kStep>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const __grid_constant__ AfterPredecessor<RotaryParams> after) {
  const RotaryParams& p = after.wait();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= p.num_tokens) return;
  const bool caching = p.key_cache.data != nullptr;
  const int64_t slot = caching && token < p.num_slots ? p.slot_mapping[token] : -1;
  const bool stored = slot >= 0 && slot < p.capacity;
  const int64_t block = stored ? slot / p.block_size : 0, in_tile = stored ? slot % p.block_size * p.head_size : 0;

  if (p.half > 0) {
    const int64_t position = p.positions[token];
    const bool known = position >= 0 && position < p.max_position;
    const float* table = p.cos_sin + (known ? position : 0) * p.table_stride;
    const int steps = p.half / kStep;
    for (int item = threadIdx.x; item < (p.query.count + p.key.count) * steps; item += blockDim.x) {
      const int pair = item % steps * kStep;
      int head = item / steps;
      const bool is_key = head >= p.query.count;
      if (is_key) head -= p.query.count;
      const Heads& heads = is_key ? p.key : p.query;
      if (is_key && caching && !stored) continue;
      T* row = static_cast<T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
      const int low_at = p.interleaved ? 2 * pair : pair, high_at = p.interleaved ? 2 * pair + kStep : pair + p.half;
      const Pack<T, kStep> low = *reinterpret_cast<const Pack<T, kStep>*>(row + low_at);
      const Pack<T, kStep> high = *reinterpret_cast<const Pack<T, kStep>*>(row + high_at);
      const Pack<float, kStep> cosines = *reinterpret_cast<const Pack<float, kStep>*>(table + pair);
      const Pack<float, kStep> sines = *reinterpret_cast<const Pack<float, kStep>*>(table + p.half + pair);
      float rotated[2 * kStep];  // as they lie: `low` first
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        const float cosine = known ? cosines.values[e] : nanf(""), sine = known ? sines.values[e] : nanf("");
        const auto element = [&](int i) { return to_float(i < kStep ? low.values[i] : high.values[i - kStep]); };
        const float a = p.interleaved ? element(2 * e) : element(e);
        const float b = p.interleaved ? element(2 * e + 1) : element(e + kStep);
        const float turned_a = a * cosine - b * sine, turned_b = b * cosine + a * sine;
        if (p.interleaved) {  // uniform; indices stay constants
          rotated[2 * e] = turned_a;
          rotated[2 * e + 1] = turned_b;
        } else {
          rotated[e] = turned_a;
          rotated[e + kStep] = turned_b;
        }
      }
      Pack<T, kStep> out[2];
#pragma unroll
      for (int e = 0; e < 2 * kStep; ++e) out[e / kStep].values[e % kStep] = from_float<T>(rotated[e]);
      if (is_key && caching) {
        const int64_t at = block * p.key_cache.block_stride + head * p.key_cache.head_stride + in_tile;
        float sides[2][kStep];
#pragma unroll
        for (int e = 0; e < 2 * kStep; ++e) sides[e / kStep][e % kStep] = to_float(out[e / kStep].values[e % kStep]);
        store_in_cache<C, kStep>(p.key_cache, at + low_at, head, sides[0]);
        store_in_cache<C, kStep>(p.key_cache, at + high_at, head, sides[1]);
      } else {
        *reinterpret_cast<Pack<T, kStep>*>(row + low_at) = out[0];
        *reinterpret_cast<Pack<T, kStep>*>(row + high_at) = out[1];
      }
    }
  }
  if (!stored) return;
  // What is copied as it is: the keys' elements past rotary_dim, and the values.
  const int rest = (p.head_size - 2 * p.half) / kStep, whole = p.head_size / kStep;
  for (int item = threadIdx.x; item < p.key.count * (rest + whole); item += blockDim.x) {
    const bool is_key = item < p.key.count * rest;
    const int within = is_key ? item : item - p.key.count * rest, steps = is_key ? rest : whole;
    const int head = within / steps, element = (is_key ? 2 * p.half : 0) + within % steps * kStep;
    const Heads& heads = is_key ? p.key : p.value;
    const Cache& cache = is_key ? p.key_cache : p.value_cache;
    const T* row = static_cast<const T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
    const Pack<T, kStep> from = *reinterpret_cast<const Pack<T, kStep>*>(row + element);
    float values[kStep];
#pragma unroll
    for (int e = 0; e < kStep; ++e) values[e] = to_float(from.values[e]);
    store_in_cache<C, kStep>(cache, block * cache.block_stride + head * cache.head_stride + in_tile + element, head, values);
  }
}

Heads heads_of(const TensorView& view) {
  return {view.data, view.strides[0], view.strides[1], static_cast<int>(view.shape[1])};
}

// Whether rows can be accessed `step` elements at a time.
bool aligned(const TensorView& view, int64_t step) {
  const int64_t bytes = step * element_size(view.dtype);
  const auto fits = [&](int64_t stride) { return stride * element_size(view.dtype) % bytes == 0; };
  return !view || (reinterpret_cast<uintptr_t>(view.data) % bytes == 0 && fits(view.strides[0]) && fits(view.strides[1]));
}

void run(const char* op, RotaryParams p, std::initializer_list<TensorView> rows, const TensorView& table, DType type, DType cache,
         Stream stream) {
  const int64_t items = int64_t{p.query.count + 2 * p.key.count} * p.head_size;
  if (p.num_tokens == 0 || items == 0) return;
  const auto launch_for = [&](auto tokens, auto cached) {
    using T = typename decltype(tokens)::type;
    using C = typename decltype(cached)::type;
    constexpr int kStep = kWidth<T>;
    bool vectors = p.half % kStep == 0 && p.head_size % kStep == 0 &&
                   (!table || (reinterpret_cast<uintptr_t>(table.data) % (4 * kStep) == 0 && table.strides[0] % kStep == 0));
    for (const TensorView& view : rows) vectors = vectors && aligned(view, kStep);
    unsigned width = 32;
    while (width < kThreads && width < items / (vectors ? 2 * kStep : 2)) width *= 2;
    const dim3 threads(width, kThreads / width);
    launch_after(op, vectors ? rotary_kernel<T, C, kStep> : rotary_kernel<T, C, 1>, {ceil_div(p.num_tokens, threads.y), threads},
                 stream, p);
  };
  dispatch_float(type, op, [&](auto tokens) {
    if (cache == DType::f8e4m3) return launch_for(tokens, TypeTag<__nv_fp8_e4m3>{});
    if (cache == DType::i8) return launch_for(tokens, TypeTag<int8_t>{});
    launch_for(tokens, tokens);
  });
}

void add_table(RotaryParams& p, const TensorView& positions, const TensorView& cos_sin, bool interleaved) {
  p.positions = positions.ptr<const int64_t>();
  p.cos_sin = cos_sin.ptr<const float>();
  p.table_stride = cos_sin.strides[0];
  p.max_position = cos_sin.shape[0];
  p.half = static_cast<int>(cos_sin.shape[1] / 2);
  p.interleaved = interleaved;
}

void add_cache(RotaryParams& p, const TensorView& key, const TensorView& value, const TensorView& key_cache,
               const TensorView& value_cache, const TensorView& slot_mapping, const TensorView& key_scale,
               const TensorView& value_scale) {
  p.key = heads_of(key);
  p.value = heads_of(value);
  p.head_size = static_cast<int>(key.shape[2]);
  p.key_cache = {key_cache.data, key_cache.strides[0], key_cache.strides[1], key_scale.ptr<const float>()};
  p.value_cache = {value_cache.data, value_cache.strides[0], value_cache.strides[1], value_scale.ptr<const float>()};
  p.slot_mapping = slot_mapping.ptr<const int64_t>();
  p.num_slots = slot_mapping.shape[0];
  p.block_size = key_cache.shape[2];
  p.capacity = key_cache.shape[0] * p.block_size;
}

}  // namespace

void rotary_embedding(TensorView positions, TensorView query, TensorView key, TensorView cos_sin, bool interleaved,
                      Stream stream) {
  constexpr const char* kOp = "rotary_embedding";
  if (cos_sin.shape[1] == 0) return;
  const DeviceGuard guard(query.device, kOp);
  RotaryParams p{};
  add_table(p, positions, cos_sin, interleaved);
  p.num_tokens = query.shape[0];
  p.head_size = static_cast<int>(query.shape[2]);
  p.query = heads_of(query);
  p.key = heads_of(key);
  run(kOp, p, {query, key}, cos_sin, query.dtype, query.dtype, stream);
}

void rotary_and_cache(TensorView positions, TensorView query, TensorView key, TensorView value, TensorView cos_sin,
                      TensorView key_cache, TensorView value_cache, TensorView slot_mapping, bool interleaved, TensorView key_scale,
                      TensorView value_scale, Stream stream) {
  constexpr const char* kOp = "rotary_and_cache";
  const DeviceGuard guard(query.device, kOp);
  RotaryParams p{};
  add_table(p, positions, cos_sin, interleaved);
  p.num_tokens = query.shape[0];
  p.query = heads_of(query);
  add_cache(p, key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale);
  run(kOp, p, {query, key, value, key_cache, value_cache}, cos_sin, query.dtype, key_cache.dtype, stream);
}

void write_quantized(TensorView key, TensorView value, TensorView key_cache, TensorView value_cache, TensorView slot_mapping,
                     TensorView key_scale, TensorView value_scale, Stream stream) {
  RotaryParams p{};
  p.num_tokens = std::min(key.shape[0], slot_mapping.shape[0]);
  add_cache(p, key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale);
  run("reshape_and_cache", p, {key, value, key_cache, value_cache}, TensorView{}, key.dtype, key_cache.dtype, stream);
}

}  // namespace research_engine::cuda
