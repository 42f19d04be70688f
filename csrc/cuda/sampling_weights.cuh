// The weights of common/sampling_math.h without conversions between integers and floats, and the largest of many logits.
//
// Costs are floats c in 2^-24 octaves. Added to 2^47, whose last bit is an octave, c rounded towards zero leaves the octave in the
// sum's last bits; the rest, added to 2^24, leaves the fraction's even part: the f of mantissa_of. Its result p is in [0.5, 1), so
// that its bits are its 24-bit mantissa but for a constant. 20 instructions a logit, the conversion from 16 bits included.
#pragma once

#include "../common/cuda_dtype.h"
#include "../common/sampling_math.h"

namespace research_engine::cuda {
namespace {

class Weigher {
 public:
  // `scale` is finite.
  __device__ __forceinline__ Weigher(float top, float scale) : top_(top), scale_(scale) {}

  // sampling::weight_of(sampling::cost_of(top - x, scale)), or 0 from kCostEnd on.
  __device__ __forceinline__ uint64_t operator()(float x) const {
    constexpr int kShift = 23;
    constexpr float kOctaves = 140737488355328.0f + kShift * 16777216.0f;
    constexpr float kNothing = 40.5f * 16777216.0f;  // the octave's shift leaves nothing of a mantissa below 2^24
    const float cost = fminf(__fmul_rn(top_ - x, scale_), kNothing);
    const float octaves = __fadd_rz(cost, kOctaves);
    const float rest = __fadd_rz(cost - (octaves - kOctaves), 16777216.0f);
    const float f = fmaf(rest, 5.9604644775390625e-08f, -1.0f);
    const uint32_t mantissa = (__float_as_uint(sampling::mantissa_polynomial(f)) - 0x3e800000u) << 7;
    return (static_cast<uint64_t>(mantissa) << 32) >> (__float_as_uint(octaves) & 63);
  }

 private:
  float top_, scale_;
};

// A vector's logits as float32: `unpack` with one instruction for each of two bfloat16.
template <typename T> __device__ __forceinline__ void widen(const uint4& raw, float (&x)[kWidth<T>]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
    unpack<T>(raw, x);
  }
}

// The larger, NaN where there is one.
__device__ __forceinline__ float nan_max(float a, float b) {
#ifdef __CUDA_ARCH__
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a != a ? a : b != b ? b : a > b ? a : b;
#endif
}

// The largest of the vectors added; NaN once there was one.
template <typename T> class Largest {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

 public:
  __device__ __forceinline__ Largest() {
    for (Pair& pair : pairs_) pair.x = pair.y = from_float<T>(-INFINITY);
  }
  __device__ __forceinline__ void add(const uint4& raw) {
    Pair pairs[4];
    memcpy(pairs, &raw, sizeof(raw));
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs_[i] = __hmax2_nan(pairs_[i], pairs[i]);
  }
  __device__ __forceinline__ float value() const {
    const Pair pair = __hmax2_nan(__hmax2_nan(pairs_[0], pairs_[1]), __hmax2_nan(pairs_[2], pairs_[3]));
    return nan_max(to_float(pair.x), to_float(pair.y));
  }

 private:
  Pair pairs_[4];
};
template <> class Largest<float> {
 public:
  __device__ __forceinline__ void add(const uint4& raw) {
    float x[4];
    widen<float>(raw, x);
    value_[0] = nan_max(nan_max(value_[0], x[0]), x[1]);
    value_[1] = nan_max(nan_max(value_[1], x[2]), x[3]);
  }
  __device__ __forceinline__ float value() const { return nan_max(value_[0], value_[1]); }

 private:
  float value_[2] = {-INFINITY, -INFINITY};
};

// The largest of a vector.
template <typename T> __device__ __forceinline__ float vector_max(const uint4& raw) {
  if constexpr (std::is_same_v<T, float>) {
    float x[4];
    widen<float>(raw, x);
    return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair pairs[4];
    memcpy(pairs, &raw, sizeof(raw));
    const Pair pair = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(to_float(pair.x), to_float(pair.y));
  }
}

// An integer that rises with x, above all others for NaN, and back.
__device__ __forceinline__ int order_of(float x) {
  const int bits = static_cast<int>(__float_as_uint(x));
  return x != x ? INT32_MAX : bits < 0 ? bits ^ INT32_MAX : bits;
}
__device__ __forceinline__ float float_of(int order) {
  return __uint_as_float(static_cast<uint32_t>(order < 0 ? order ^ INT32_MAX : order));
}

}  // namespace
}  // namespace research_engine::cuda
