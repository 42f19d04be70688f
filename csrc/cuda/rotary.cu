// rotary_embedding: rotates pairs of query and key elements by the angle of their position, in place
// (Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021).
//
// Layout     query [T, Hq, D], key [T, Hkv, D], tokens and heads strided, the elements of a head contiguous;
//            cos_sin float32 [max_position, rotary_dim], cosines in the first half of a row, sines in the second.
// Algorithm  1. Pairs of head h: (i, i + rotary_dim / 2), or (2i, 2i + 1) when interleaved; elements from rotary_dim
//               on are left alone.
//            2. threadIdx.x walks the (head, pair) items of one token, threadIdx.y counts tokens of the block.
//            3. (a, b) -> (a cos - b sin, b cos + a sin) in float32, rounded once.
//            4. A position outside of the table gives NaN: it cannot raise here, and must not pass for a rotation.
// Roofline   memory: 2 T (Hq + Hkv) rotary_dim elements moved (the table stays in cache), 3 operations an element.
// Reached    not measured yet.
#include "../common/cuda_dtype.h"
#include "../common/cuda_launch.h"

namespace research_engine::cuda {
namespace {

constexpr int kThreads = 256;
constexpr const char* kOp = "rotary_embedding";

template <typename T> struct Heads {
  T* data;
  int64_t token_stride, head_stride;
  int count;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    rotary_kernel(const int64_t* positions, Heads<T> query, Heads<T> key, const float* cos_sin, int64_t table_stride,
                  int64_t max_position, int half, bool interleaved, int64_t num_tokens) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= num_tokens) return;
  const int64_t position = positions[token];
  const bool known = position >= 0 && position < max_position;
  const float* table = cos_sin + (known ? position : 0) * table_stride;
  const int items = (query.count + key.count) * half;
  for (int item = threadIdx.x; item < items; item += blockDim.x) {
    const int pair = item % half;
    int head = item / half;
    const bool is_key = head >= query.count;
    if (is_key) head -= query.count;
    const Heads<T>& heads = is_key ? key : query;
    T* row = heads.data + token * heads.token_stride + head * heads.head_stride;
    T* first = row + (interleaved ? 2 * pair : pair);
    T* second = first + (interleaved ? 1 : half);
    const float cosine = known ? table[pair] : nanf(""), sine = known ? table[half + pair] : nanf("");
    const float a = to_float(*first), b = to_float(*second);
    *first = from_float<T>(a * cosine - b * sine);
    *second = from_float<T>(b * cosine + a * sine);
  }
}

}  // namespace

void rotary_embedding(TensorView positions, TensorView query, TensorView key, TensorView cos_sin, bool interleaved,
                      Stream stream) {
  const int64_t num_tokens = query.shape[0];
  const int64_t half = cos_sin.shape[1] / 2;
  const int64_t items = (query.shape[1] + key.shape[1]) * half;
  if (num_tokens == 0 || items == 0) return;
  const DeviceGuard guard(query.device, kOp);
  dispatch_float(query.dtype, kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Heads<T> queries{query.ptr<T>(), query.strides[0], query.strides[1], static_cast<int>(query.shape[1])};
    const Heads<T> keys{key.ptr<T>(), key.strides[0], key.strides[1], static_cast<int>(key.shape[1])};
    unsigned width = 32;
    while (width < kThreads && width < items) width *= 2;
    const dim3 threads(width, kThreads / width);
    launch(kOp, rotary_kernel<T>, ceil_div(num_tokens, threads.y), threads, 0, stream,
           positions.ptr<const int64_t>(), queries, keys, cos_sin.ptr<const float>(), cos_sin.strides[0],
           cos_sin.shape[0], static_cast<int>(half), interleaved, num_tokens);
  });
}

}  // namespace research_engine::cuda
