// RMSNorm, alone and fused with the residual addition.
//
// out[t, :] = x[t, :] / sqrt(mean(x[t, :]^2) + eps) * (weight_offset + weight), sums in float32. (Zhang and Sennrich, 2019, 1910.07467.)
// Layout: rows [T, H], a row contiguous, rows at any stride.
// Algorithm: one thread a row, two passes over it: the sum of squares in four registers, then the scaling; the second
// pass finds the row in the first-level cache.
// Roofline: memory; 2 T H elements (alone) or 4 T H (fused) move, against some 4 operations each.
#include <cmath>

#include "common/ops.h"
#include "cpu/dispatch.h"

namespace research_engine::cpu {
namespace {

// Sum of squares of row; with `residual`, first residual += row, and of that. What was rounded on storing is what counts.
template <typename T>
float sum_of_squares(const T* row, T* residual, int64_t n) {
  constexpr int kUnroll = 4;
  Vec sums[kUnroll] = {};
  const auto take = [&](int64_t i, int lanes, int slot) {
    Vec v = lanes == kLanes ? load(row + i) : load_first(row + i, lanes);
    if (residual) {
      v += lanes == kLanes ? load(residual + i) : load_first(residual + i, lanes);
      if (lanes == kLanes) {
        store(residual + i, v);
        v = load(residual + i);
      } else {
        store_first(residual + i, v, lanes);
        v = load_first(residual + i, lanes);
      }
    }
    sums[slot] += v * v;
  };
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= n; i += kUnroll * kLanes)
    for (int u = 0; u < kUnroll; ++u) take(i + u * kLanes, kLanes, u);
  for (; i + kLanes <= n; i += kLanes) take(i, kLanes, 0);
  if (i < n) take(i, static_cast<int>(n - i), 0);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
void scale(const T* row, const T* weight, T* out, int64_t n, float factor, float weight_offset) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(row + i) * factor * (load(weight + i) + weight_offset));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_first(out + i, load_first(row + i, rest) * factor * (load_first(weight + i, rest) + weight_offset), rest);
  }
}

}  // namespace

void rms_norm(TensorView x, TensorView weight, TensorView out, float eps, float weight_offset) {
  const int64_t rows = x.shape[0], n = x.shape[1];
  dispatch(x.dtype, [&](auto zero) {
    using T = decltype(zero);
#pragma omp parallel for schedule(static) if (rows * n > kParallelElements)
    for (int64_t t = 0; t < rows; ++t) {
      const T* row = x.ptr<T>() + t * x.strides[0];
      const float factor = 1 / std::sqrt(sum_of_squares<T>(row, nullptr, n) / n + eps);
      scale(row, weight.ptr<T>(), out.ptr<T>() + t * out.strides[0], n, factor, weight_offset);
    }
  });
}

void fused_add_rms_norm(TensorView x, TensorView residual, TensorView weight, float eps, float weight_offset) {
  const int64_t rows = x.shape[0], n = x.shape[1];
  dispatch(x.dtype, [&](auto zero) {
    using T = decltype(zero);
#pragma omp parallel for schedule(static) if (rows * n > kParallelElements)
    for (int64_t t = 0; t < rows; ++t) {
      T* row = x.ptr<T>() + t * x.strides[0];
      T* sums = residual.ptr<T>() + t * residual.strides[0];
      const float factor = 1 / std::sqrt(sum_of_squares<T>(row, sums, n) / n + eps);
      scale<T>(sums, weight.ptr<T>(), row, n, factor, weight_offset);
    }
  });
}

}  // namespace research_engine::cpu
