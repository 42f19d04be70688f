// Rotary position embedding, in place. (Su et al., 2021, 2104.09864.)
//
// A pair (a, b) of a head becomes (a cos - b sin, b cos + a sin) with the angle of its position. The pairs are
// (i, i + rotary_dim / 2), or (2i, 2i + 1) when interleaved; elements from rotary_dim on stay.
// Layout: query [T, Hq, D], key [T, Hkv, D], heads contiguous, any token and head strides; cos_sin [max_position, rotary_dim]
// float32, cosines first.
// Algorithm: threads share the tokens; a token's cosines and sines serve all its heads from the first-level cache.
// Roofline: memory; 2 T (Hq + Hkv) rotary_dim elements move, against 3 operations each.
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

}  // namespace research_engine::cpu
