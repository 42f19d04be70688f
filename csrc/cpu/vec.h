// One vector register of floats, on the compilers' vector extensions: the widest that the target has (AVX-512, AVX2, else
// 128 bits), with loads and stores that convert from and to bfloat16. The same source compiles for any CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#include <immintrin.h>
#endif

namespace research_engine::cpu {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Vec = float __attribute__((vector_size(kLanes * 4)));
using VecI = int32_t __attribute__((vector_size(kLanes * 4)));

struct bf16 {
  uint16_t bits;
};

// 4 bits of exponent (bias 7), 3 of mantissa, no infinity, NaN at 0x7f; the largest value is 448 (Micikevicius et al., 2209.05433).
struct e4m3 {
  uint8_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  // To the nearest, ties to even; a NaN stays one even where its payload would round away.
  out->bits = static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float to_float(int8_t x) { return x; }
inline float to_float(e4m3 x) {
  const uint32_t magnitude = x.bits & 0x7f;
  float value = magnitude * 0x1p-9f;  // below 2^-6: no leading one
  if (magnitude >= 8) {
    const uint32_t bits = (magnitude << 20) + (120u << 23);
    std::memcpy(&value, &bits, 4);
  }
  if (magnitude == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
  return x.bits & 0x80 ? -value : value;
}

// To the nearest, ties to even, saturated: to +-127 (NaN becomes 0), or to +-448 (NaN stays one).
inline void from_float(float x, int8_t* out) {
  *out = x != x ? 0 : static_cast<int8_t>(std::nearbyint(x < -127 ? -127 : x > 127 ? 127 : x));
}
inline void from_float(float x, e4m3* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const float magnitude = std::fabs(x);
  uint32_t code;
  if (x != x) {
    code = 0x7f;
  } else if (magnitude >= 448) {
    code = 0x7e;
  } else if (magnitude < 0x1p-6f) {
    code = static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p9f));  // 8 is the smallest with a leading one
  } else {
    std::memcpy(&bits, &magnitude, 4);
    code = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120u << 3);
  }
  out->bits = static_cast<uint8_t>(sign | code);
}

inline Vec broadcast(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const bf16* p) {
  using Half = uint16_t __attribute__((vector_size(kLanes * 2)));
  using Bits = uint32_t __attribute__((vector_size(kLanes * 4)));
  Half half;
  std::memcpy(&half, p, sizeof half);
  const Bits bits = __builtin_convertvector(half, Bits) << 16;
  return reinterpret_cast<Vec>(bits);
}

inline Vec load(const int8_t* p) {
  using Byte = int8_t __attribute__((vector_size(kLanes)));
  Byte byte;
  std::memcpy(&byte, p, sizeof byte);
  return __builtin_convertvector(byte, Vec);
}

inline Vec load(const e4m3* p) {
  using Byte = uint8_t __attribute__((vector_size(kLanes)));
  Byte byte;
  std::memcpy(&byte, p, sizeof byte);
  const VecI bits = __builtin_convertvector(byte, VecI), magnitude = bits & 0x7f;
  const VecI large = (magnitude << 20) + (120 << 23), small = reinterpret_cast<VecI>(__builtin_convertvector(magnitude, Vec) * 0x1p-9f);
  VecI value = magnitude < 8 ? small : large;
  value = magnitude == 0x7f ? VecI{} + 0x7fc00000 : value;
  return reinterpret_cast<Vec>(value | (bits & 0x80) << 24);
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline void store(bf16* p, Vec v) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512F__)
  const __m256bh half = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
  std::memcpy(p, &half, sizeof half);
#else
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int i = 0; i < kLanes; ++i) from_float(lanes[i], p + i);
#endif
}

// The first n < kLanes elements; the rest of the register is 0, and nothing past them is touched.
template <typename T>
inline Vec load_first(const T* p, int n) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}

template <typename T>
inline void store_first(T* p, Vec v, int n) {
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(p, lanes, n * sizeof(T));
}

inline float sum(Vec v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  return lanes[0];
}

// Maxima that are NaN where either operand is.
inline float max(float a, float b) { return a > b || a != a ? a : b; }
inline Vec max(Vec a, Vec b) { return (a > b) | (a != a) ? a : b; }

inline float max(Vec v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lanes[i] = max(lanes[i], lanes[i + step]);
  return lanes[0];
}

inline VecI lane_index() {
  VecI index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}

#if defined(__clang__)
inline Vec select_lanes(Vec a, Vec b, VecI from) {
  float pool[2 * kLanes], lanes[kLanes];
  std::memcpy(pool, &a, sizeof a);
  std::memcpy(pool + kLanes, &b, sizeof b);
  for (int i = 0; i < kLanes; ++i) lanes[i] = pool[from[i]];
  return load(lanes);
}
#else
inline Vec select_lanes(Vec a, Vec b, VecI from) { return __builtin_shuffle(a, b, from); }
#endif

// Lane i of the result is the sum of v[i]'s lanes: log2(kLanes) rounds of halving, each of which folds two registers into
// one. Round `half` keeps, in lanes whose index has that bit clear, the sums of the first and, elsewhere, of the second.
template <int half = kLanes / 2>
inline Vec sum_each(Vec* v) {
  VecI keep, fold;
  for (int i = 0; i < kLanes; ++i) {
    const bool second = i & half;
    keep[i] = second ? kLanes + (i ^ half) : i;
    fold[i] = second ? kLanes + i : i | half;
  }
  for (int i = 0; i < half; ++i) v[i] = select_lanes(v[i], v[i + half], keep) + select_lanes(v[i], v[i + half], fold);
  if constexpr (half > 1) return sum_each<half / 2>(v);
  return v[0];
}

// e^x: x = n ln 2 + r with |r| <= ln 2 / 2, Taylor's polynomial of degree 7 on r (its remainder is below 2^-28), 2^n by the
// exponent field. Within 2 ulp; 0 below -87.3 (no subnormal results), infinity above 88.7; NaN stays NaN.
inline Vec exp(Vec x) {
  constexpr float kLow = -87.33f, kHigh = 88.72f;
  Vec clamped = x < kLow ? broadcast(kLow) : x;
  clamped = clamped > kHigh ? broadcast(kHigh) : clamped;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Vec shifted = clamped * 1.44269504088896341f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = r * (1.0f / 5040) + (1.0f / 720);
  p = p * r + (1.0f / 120);
  p = p * r + (1.0f / 24);
  p = p * r + (1.0f / 6);
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // 2^n in two factors, so that n = 128 does not overflow the exponent field before the product does.
  const VecI whole = reinterpret_cast<VecI>(shifted) - 0x4b400000;
  const VecI first = whole >> 1;
  const VecI low_bits = (first + 127) << 23, high_bits = (whole - first + 127) << 23;
  Vec result = p * reinterpret_cast<Vec>(low_bits) * reinterpret_cast<Vec>(high_bits);
  result = x < kLow ? Vec{} : result;
  return x > kHigh ? broadcast(std::numeric_limits<float>::infinity()) : result;
}

}  // namespace research_engine::cpu
