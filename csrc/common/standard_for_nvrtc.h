// The part of the standard library that device code uses, for kernels compiled at run time: NVRTC comes without its headers.
// Stands in for <algorithm>, <cstdint>, <type_traits> and their like (research_engine/kernels/jit/compilation.py).
#pragma once

using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;  // as the host's, on Linux
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using intptr_t = long;
using uintptr_t = unsigned long;

#ifndef INT32_MAX
#define INT32_MAX 2147483647
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

namespace std {

using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;

template <bool kChoice, typename A, typename B> struct conditional {
  using type = A;
};
template <typename A, typename B> struct conditional<false, A, B> {
  using type = B;
};
template <bool kChoice, typename A, typename B> using conditional_t = typename conditional<kChoice, A, B>::type;

template <typename A, typename B> inline constexpr bool is_same_v = false;
template <typename A> inline constexpr bool is_same_v<A, A> = true;

template <typename T> __host__ __device__ constexpr T min(T a, T b) { return b < a ? b : a; }
template <typename T> __host__ __device__ constexpr T max(T a, T b) { return a < b ? b : a; }

}  // namespace std
