// merge_attention_states: the attention over two disjoint sets of keys from that over each, by their lse
// (Dao et al., Flash-Decoding, 2023; a shared prefix and each request's own keys, for instance).
//
// Layout     out_a, out_b, out [T, Hq, D], tokens and heads strided; lse_a, lse_b, lse float32 [T, Hq], natural logarithms.
// Algorithm  1. A warp a (token, head): weights e^(lse_a - m) and e^(lse_b - m), m the larger, divided by their sum.
//            2. Elements are blended in float32 and rounded once. Both parts empty: 0, and lse -inf.
// Roofline   memory: 3 T Hq D elements moved.
// Reached    not measured yet.
#include "../common/cuda_dtype.h"
#include "../common/cuda_launch.h"

namespace research_engine::cuda {
namespace {

constexpr int kThreads = 256;
constexpr const char* kOp = "merge_attention_states";

template <typename T> struct State {
  T* out;
  float* lse;
  int64_t token_stride, head_stride, lse_stride;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(State<T> a, State<T> b, State<T> merged, int64_t num_rows, int num_heads, int head_size) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (row >= num_rows) return;
  const int64_t token = row / num_heads;
  const int head = static_cast<int>(row % num_heads), lane = threadIdx.x % 32;
  const float lse_a = a.lse[token * a.lse_stride + head], lse_b = b.lse[token * b.lse_stride + head];
  const float top = fmaxf(lse_a, lse_b);
  const bool empty = top == -INFINITY;
  const float weight_a = empty ? 0.0f : expf(lse_a - top), weight_b = empty ? 0.0f : expf(lse_b - top);
  const float sum = weight_a + weight_b, share_a = empty ? 0.0f : weight_a / sum, share_b = empty ? 0.0f : weight_b / sum;
  const T* from_a = a.out + token * a.token_stride + head * a.head_stride;
  const T* from_b = b.out + token * b.token_stride + head * b.head_stride;
  T* to = merged.out + token * merged.token_stride + head * merged.head_stride;
  __syncwarp();  // every lane has read the lse, which may be overwritten
  for (int e = lane; e < head_size; e += 32) {
    // A part without keys counts for nothing, whatever its output holds.
    const float x = share_a > 0.0f ? to_float(from_a[e]) * share_a : 0.0f;
    const float y = share_b > 0.0f ? to_float(from_b[e]) * share_b : 0.0f;
    to[e] = from_float<T>(x + y);
  }
  if (lane == 0) merged.lse[token * merged.lse_stride + head] = empty ? -INFINITY : top + logf(sum);
}

}  // namespace

void merge_attention_states(TensorView out_a, TensorView lse_a, TensorView out_b, TensorView lse_b, TensorView out,
                            TensorView lse, Stream stream) {
  if (out.numel() == 0) return;
  const DeviceGuard guard(out.device, kOp);
  dispatch_float(out.dtype, kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto state = [](const TensorView& o, const TensorView& l) {
      return State<T>{o.ptr<T>(), l.ptr<float>(), o.strides[0], o.strides[1], l.strides[0]};
    };
    const int64_t rows = out.shape[0] * out.shape[1];
    launch(kOp, merge_kernel<T>, ceil_div(rows * 32, kThreads), kThreads, 0, stream, state(out_a, lse_a), state(out_b, lse_b),
           state(out, lse), rows, static_cast<int>(out.shape[1]), static_cast<int>(out.shape[2]));
  });
}

}  // namespace research_engine::cuda
