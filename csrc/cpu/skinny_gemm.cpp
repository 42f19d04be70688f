// A product of few rows with a weight as it lies in the checkpoint.
//
// out[t, n] = sum over k of x[t, k] W[n, k] + bias[n]; gated: silu(out[t, i]) * out[t, I + i] for the 2 I columns.
// Layout: x [T, K], W [N, K], out [T, N] (gated [T, N / 2]), rows contiguous, at any stride.
// Algorithm: threads share the rows of W; a row passes once, a register at a time, each multiplied with all rows of x, which stay
// in the first-level cache. A row of x adds up in the same order whatever rows are beside it.
// Roofline: memory; N K elements of W are read against 2 T N K operations.
#include "common/ops.h"
#include "cpu/dispatch.h"

namespace research_engine::cpu {
namespace {

constexpr int kRowsAtOnce = 8;

// Dot products of kCount rows of x with one row of W.
template <int kCount, typename T>
void dot(const T* x, int64_t stride, int64_t depth, const T* w, float* results) {
  Vec sums[kCount] = {};
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    const Vec weight = load(w + k);
    for (int t = 0; t < kCount; ++t) sums[t] += load(x + t * stride + k) * weight;
  }
  if (k < depth) {
    const int rest = static_cast<int>(depth - k);
    const Vec weight = load_first(w + k, rest);
    for (int t = 0; t < kCount; ++t) sums[t] += load_first(x + t * stride + k, rest) * weight;
  }
  for (int t = 0; t < kCount; ++t) results[t] = sum(sums[t]);
}

void store_result(const TensorView& out, int64_t t, int64_t n, float value) {
  const int64_t index = t * out.strides[0] + n;
  if (out.dtype == DType::f32) out.ptr<float>()[index] = value;
  else from_float(value, out.ptr<bf16>() + index);
}

}  // namespace

void skinny_gemm(const SkinnyGemm& args) {
  const int64_t tokens = args.x.shape[0], columns = args.out.shape[1], depth = args.x.shape[1];
  dispatch(args.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto product = [&](int64_t first, int count, int64_t n, float* results) {
      const T* rows = args.x.ptr<T>() + first * args.x.strides[0];
      const T* w = args.weight.ptr<T>() + n * args.weight.strides[0];
      if (count == kRowsAtOnce) {
        dot<kRowsAtOnce>(rows, args.x.strides[0], depth, w, results);
      } else {
        for (int t = 0; t < count; ++t) dot<1>(rows + t * args.x.strides[0], args.x.strides[0], depth, w, results + t);
      }
      for (int t = 0; args.bias && t < count; ++t) results[t] += to_float(args.bias.ptr<T>()[n]);
    };
#pragma omp parallel for schedule(static) if (columns * depth > kParallelElements)
    for (int64_t n = 0; n < columns; ++n) {
      for (int64_t first = 0; first < tokens; first += kRowsAtOnce) {
        const int count = static_cast<int>(tokens - first < kRowsAtOnce ? tokens - first : kRowsAtOnce);
        float results[kRowsAtOnce], up[kRowsAtOnce];
        product(first, count, n, results);
        if (args.gated) product(first, count, columns + n, up);
        for (int t = 0; t < count; ++t) {
          const float value = args.gated ? results[t] / (1.0f + std::exp(-results[t])) * up[t] : results[t];
          store_result(args.out, first + t, n, value);
        }
      }
    }
  });
}

}  // namespace research_engine::cpu
