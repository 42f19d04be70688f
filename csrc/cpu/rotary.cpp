// Rotary position embedding, in place or, for keys, on the way into the KV cache. (Su et al., 2021, 2104.09864.)
//
// A pair (a, b) of a head becomes (a cos - b sin, b cos + a sin) with the angle of its position. The pairs are
// (i, i + rotary_dim / 2), or (2i, 2i + 1) when interleaved; elements from rotary_dim on stay.
// Layout: query [T, Hq, D], key [T, Hkv, D], heads contiguous, any token and head strides; cos_sin [max_position, rotary_dim]
// float32, cosines first.
// Algorithm: threads share the tokens; a token's cosines and sines serve all its heads from the first-level cache.
// Roofline: memory; 2 T (Hq + Hkv) rotary_dim elements move, against 3 operations each.
#include <cstring>
#include <vector>

#include "common/ops.h"
#include "cpu/dispatch.h"

namespace research_engine::cpu {
namespace {

template <typename T>
void rotate_halves(T* head, const float* cosines, const float* sines, int half) {
  T* other = head + half;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load(head + i), b = load(other + i), c = load(cosines + i), s = load(sines + i);
    store(head + i, a * c - b * s);
    store(other + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = to_float(head[i]), b = to_float(other[i]);
    from_float(a * cosines[i] - b * sines[i], head + i);
    from_float(b * cosines[i] + a * sines[i], other + i);
  }
}

template <typename T>
void rotate_neighbours(T* head, const float* cosines, const float* sines, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = to_float(head[2 * i]), b = to_float(head[2 * i + 1]);
    from_float(a * cosines[i] - b * sines[i], head + 2 * i);
    from_float(b * cosines[i] + a * sines[i], head + 2 * i + 1);
  }
}

}  // namespace

void rotary_embedding(TensorView positions, TensorView query, TensorView key, TensorView cos_sin, bool interleaved) {
  const int64_t tokens = query.shape[0];
  const int half = static_cast<int>(cos_sin.shape[1] / 2);
  const int64_t work = tokens * (query.shape[1] + key.shape[1]) * half;
  dispatch(query.dtype, [&](auto zero) {
    using T = decltype(zero);
#pragma omp parallel for schedule(static) if (work > kParallelElements)
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t position = positions.ptr<int64_t>()[t * positions.strides[0]];
      const float* cosines = cos_sin.ptr<float>() + position * cos_sin.strides[0];
      for (const TensorView* x : {&query, &key}) {
        for (int64_t h = 0; h < x->shape[1]; ++h) {
          T* head = x->ptr<T>() + t * x->strides[0] + h * x->strides[1];
          if (interleaved) rotate_neighbours(head, cosines, cosines + half, half);
          else rotate_halves(head, cosines, cosines + half, half);
        }
      }
    }
  });
}

void rotary_and_cache(TensorView positions, TensorView query, TensorView key, TensorView value, TensorView cos_sin,
                      TensorView key_cache, TensorView value_cache, TensorView slot_mapping, bool interleaved, TensorView key_scale,
                      TensorView value_scale) {
  // Keys stay as they are: a copy is rotated and written.
  const int64_t tokens = key.shape[0], heads = key.shape[1], head_bytes = key.shape[2] * element_size(key.dtype);
  std::vector<char> copied(static_cast<size_t>(tokens * heads * head_bytes));
  TensorView rotated = key;
  rotated.data = copied.data();
  rotated.strides[0] = heads * key.shape[2];
  rotated.strides[1] = key.shape[2];
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t from = (t * key.strides[0] + h * key.strides[1]) * element_size(key.dtype);
      std::memcpy(copied.data() + (t * heads + h) * head_bytes, key.ptr<char>() + from, head_bytes);
    }
  }
  rotary_embedding(positions, query, rotated, cos_sin, interleaved);
  reshape_and_cache(rotated, value, key_cache, value_cache, slot_mapping, key_scale, value_scale);
}

}  // namespace research_engine::cpu
