// Elements of quantised caches as operands of 16-bit products.
#pragma once

#include "paged_attention.cuh"

namespace research_engine::cuda {

// Four neighbouring elements as two pairs of float16, exactly.
template <typename C> __device__ __forceinline__ uint2 widen(uint32_t four);
// e4m3 before sm_89, which has no instruction for it: sign, exponent and mantissa move to where float16 has them, whose exponent is
// biased by 8 more.
__device__ __forceinline__ uint2 widen_by_shifts(uint32_t four) {
  const uint32_t pairs[2] = {__byte_perm(four, 0, 0x1404), __byte_perm(four, 0, 0x3424)};  // in the upper bytes of 16 bits
  uint32_t result[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t moved = (pairs[i] & 0x80008000u) | (pairs[i] >> 1 & 0x3f803f80u);
    __half2 pair;
    memcpy(&pair, &moved, 4);
    pair = __hmul2(pair, __float2half2_rn(256.0f));
    memcpy(&result[i], &pair, 4);
  }
  if ((((four & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0) {  // NaN is all ones
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if ((pairs[i] & 0x7f00u) == 0x7f00u) result[i] |= 0x7fffu;
      if ((pairs[i] & 0x7f000000u) == 0x7f000000u) result[i] |= 0x7fff0000u;
    }
  }
  return make_uint2(result[0], result[1]);
}
template <> __device__ __forceinline__ uint2 widen<__nv_fp8_e4m3>(uint32_t four) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  return widen_by_shifts(four);
#else
  const __half2_raw low = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(four & 0xffffu), __NV_E4M3);
  const __half2_raw high = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(four >> 16), __NV_E4M3);
  return make_uint2(low.x | static_cast<uint32_t>(low.y) << 16, high.x | static_cast<uint32_t>(high.y) << 16);
#endif
}
// With 128 added, a byte is the low half of float16's 1,024 + byte.
template <> __device__ __forceinline__ uint2 widen<int8_t>(uint32_t four) {
  const uint32_t bytes = four ^ 0x80808080u;
  const uint32_t pairs[2] = {__byte_perm(bytes, 0x64646464u, 0x4140), __byte_perm(bytes, 0x64646464u, 0x4342)};
  uint32_t result[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    __half2 pair;
    memcpy(&pair, &pairs[i], 4);
    pair = __hsub2(pair, __float2half2_rn(1152.0f));
    memcpy(&result[i], &pair, 4);
  }
  return make_uint2(result[0], result[1]);
}

// Four neighbouring elements of a query of 16-bit floats, at a multiple of four, as pairs of float16.
__device__ __forceinline__ uint2 load_query_4(const AttentionParams& p, int64_t at) {
  if (p.query_type == DType::f16) return *reinterpret_cast<const uint2*>(static_cast<const __half*>(p.query) + at);
  const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p.query) + at);
  __nv_bfloat16 elements[4];
  memcpy(elements, &raw, sizeof(raw));
  const __half2 low = __floats2half2_rn(to_float(elements[0]), to_float(elements[1]));
  const __half2 high = __floats2half2_rn(to_float(elements[2]), to_float(elements[3]));
  uint2 pairs;
  memcpy(&pairs.x, &low, 4);
  memcpy(&pairs.y, &high, 4);
  return pairs;
}

}  // namespace research_engine::cuda
