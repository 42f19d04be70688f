// merge_attention_states on the CPU: the attention over two disjoint sets of keys from that over each, by their lse.
//
// out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b); both parts empty: 0, and lse -infinity.
// Layout: [T, Hq, D], tokens and heads strided; lse float32 [T, Hq]. Threads share the tokens.
// Roofline: memory; 3 T Hq D elements.
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/ops.h"
#include "cpu/dispatch.h"

namespace research_engine::cpu {

void merge_attention_states(TensorView out_a, TensorView lse_a, TensorView out_b, TensorView lse_b, TensorView out, TensorView lse) {
  const int64_t tokens = out.shape[0], heads = out.shape[1], head_size = out.shape[2];
  dispatch(out.dtype, [&](auto zero) {
    using T = decltype(zero);
#pragma omp parallel for schedule(static) if (tokens * heads * head_size > kParallelElements)
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const float a = lse_a.ptr<float>()[t * lse_a.strides[0] + h], b = lse_b.ptr<float>()[t * lse_b.strides[0] + h];
        const float top = std::max(a, b);
        const bool empty = top == -std::numeric_limits<float>::infinity();
        const float weight_a = empty ? 0 : std::exp(a - top), weight_b = empty ? 0 : std::exp(b - top), sum = weight_a + weight_b;
        const float share_a = empty ? 0 : weight_a / sum, share_b = empty ? 0 : weight_b / sum;
        const T* from_a = out_a.ptr<T>() + t * out_a.strides[0] + h * out_a.strides[1];
        const T* from_b = out_b.ptr<T>() + t * out_b.strides[0] + h * out_b.strides[1];
        T* to = out.ptr<T>() + t * out.strides[0] + h * out.strides[1];
        for (int64_t e = 0; e < head_size; ++e) {  // a part without keys counts for nothing, whatever its output holds
          const float x = share_a > 0 ? to_float(from_a[e]) * share_a : 0, y = share_b > 0 ? to_float(from_b[e]) * share_b : 0;
          from_float(x + y, to + e);
        }
        lse.ptr<float>()[t * lse.strides[0] + h] = empty ? top : top + std::log(sum);
      }
    }
  });
}

}  // namespace research_engine::cpu
