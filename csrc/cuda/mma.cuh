// Instructions that CUDA C++ has no names for: asynchronous copies to shared memory and 16-bit matrix products (sm_80 on).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace research_engine::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, past the L1 cache; zeros instead when not `valid` (nothing is read then).
__device__ inline void copy_async_16(uint32_t destination, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}
// How the L2 cache keeps what is read once: first out, so that it drives nothing else out, dirty lines above all. No hint at all is not
// the same as a hint of the usual policy, which was found to take longer than either.
__device__ inline uint64_t read_once_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void copy_async_16(uint32_t destination, const void* source, bool valid, uint64_t policy) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(destination), "l"(source),
               "r"(bytes), "l"(policy)
               : "memory");
}
__device__ inline void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until no more than kPending of this thread's groups are under way.
template <int kPending> __device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline uint4 load_shared_16(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}
__device__ inline uint2 load_shared_8(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}
__device__ inline uint32_t load_shared_4(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

__device__ inline void store_shared_16(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ inline void store_shared_4(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes, and receives of each
// matrix, with g = lane / 4 and q = lane % 4, the pair [g][2q, 2q+1]; transposed, the pair [2q, 2q+1][g].
__device__ inline void load_matrices(uint32_t (&pairs)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&pairs)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(address)
               : "memory");
}

// c += a b for a [16 x 16], b [16 x 8], c [16 x 8] in float32. With g = lane / 4 and q = lane % 4 a thread holds
//   a0 = a[g][2q, 2q+1]   a1 = a[g+8][2q, 2q+1]   a2 = a[g][2q+8, 2q+9]   a3 = a[g+8][2q+8, 2q+9]
//   b0 = b[2q, 2q+1][g]   b1 = b[2q+8, 2q+9][g]
//   c0, c1 = c[g][2q, 2q+1]   c2, c3 = c[g+8][2q, 2q+1]
template <typename T> __device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ inline void multiply_add<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The transpose of an 8 x 8 matrix of 16-bit elements whose row g = lane / 4 has columns 2q, 2q+1 (q = lane % 4) in this thread.
__device__ inline uint32_t transpose_8x8(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Two floats as a pair of 16-bit ones, the first in the low half.
template <typename T> __device__ inline uint32_t pack_pair(float low, float high);
template <> __device__ inline uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <> __device__ inline uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// a & b | c, in one instruction also where b and c are constants.
__device__ inline uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace research_engine::cuda
