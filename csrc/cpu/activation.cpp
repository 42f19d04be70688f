// The gated activation of Llama's feed-forward layer.
//
// out[t, i] = x[t, i] / (1 + exp(-x[t, i])) * x[t, I + i]: SiLU of the first half times the second. (Shazeer, 2020, 2002.05202.)
// Layout: x [T, 2I] and out [T, I], rows contiguous, at any stride.
// Algorithm: a register at a time, exp by polynomial; threads share the rows.
// Roofline: memory; 3 T I elements move, against some 20 operations for each of T I results.
#include "common/ops.h"
#include "cpu/dispatch.h"

namespace research_engine::cpu {

void silu_and_mul(TensorView x, TensorView out) {
  const int64_t rows = out.shape[0], n = out.shape[1];
  dispatch(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto gated = [](Vec gate, Vec up) { return gate / (1.0f + exp(-gate)) * up; };
#pragma omp parallel for schedule(static) if (rows * n > kParallelElements / 4)
    for (int64_t t = 0; t < rows; ++t) {
      const T* gate = x.ptr<T>() + t * x.strides[0];
      const T* up = gate + n;
      T* row = out.ptr<T>() + t * out.strides[0];
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store(row + i, gated(load(gate + i), load(up + i)));
      if (i < n) {
        const int rest = static_cast<int>(n - i);
        store_first(row + i, gated(load_first(gate + i, rest), load_first(up + i, rest)), rest);
      }
    }
  });
}

}  // namespace research_engine::cpu
