// Thread block clusters of sm_90: a barrier over the blocks of a cluster, and the shared memory of another block.
// Compiled for older architectures a cluster is one block.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "mma.cuh"

namespace research_engine::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// What any thread of the cluster wrote before is visible to all of them after. All threads call it.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}
__device__ __forceinline__ float4 load_cluster_16(uint32_t address) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ float2 load_cluster_8(uint32_t address) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// The two halves of a barrier over all threads of the cluster; what was written before one is seen after the other.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// The same for writes before the writing thread's own fence alone: a fence waits for memory, which others need not.
__device__ __forceinline__ void cluster_fence() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Stores into the shared memory of the block of that rank, at the address that `address` is here.
__device__ __forceinline__ void store_remote(uint32_t address, int rank, float2 value) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(value.x), "f"(value.y) : "memory");
}
#define RESEARCH_ENGINE_CLUSTER_SPACE "shared::cluster"

#else  // a cluster is one block

__device__ __forceinline__ void cluster_barrier() { __syncthreads(); }
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int) { return address; }
__device__ __forceinline__ float4 load_cluster_16(uint32_t address) {
  const uint4 raw = load_shared_16(address);
  return make_float4(__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w));
}
__device__ __forceinline__ float2 load_cluster_8(uint32_t address) {
  const uint2 raw = load_shared_8(address);
  return make_float2(__uint_as_float(raw.x), __uint_as_float(raw.y));
}
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_fence() {}
__device__ __forceinline__ void cluster_arrive_relaxed() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void store_remote(uint32_t, int, float2) {}
#define RESEARCH_ENGINE_CLUSTER_SPACE "shared"

#endif

// A value of any type, by words of 8 bytes where it is aligned to them, else of 4, at a place of cluster_address. The block that has
// it must run: from the cluster's first barrier until it leaves its last one.
template <typename T> using ClusterWord = std::conditional_t<alignof(T) % 8 == 0, uint64_t, uint32_t>;
template <typename T> __device__ __forceinline__ T load_cluster(uint32_t address) {
  using Word = ClusterWord<T>;
  constexpr int kWords = sizeof(T) / sizeof(Word);
  static_assert(kWords * sizeof(Word) == sizeof(T));
  Word words[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if constexpr (sizeof(Word) == 8) {
      asm volatile("ld." RESEARCH_ENGINE_CLUSTER_SPACE ".u64 %0, [%1];" : "=l"(words[w]) : "r"(address + 8 * w) : "memory");
    } else {
      asm volatile("ld." RESEARCH_ENGINE_CLUSTER_SPACE ".u32 %0, [%1];" : "=r"(words[w]) : "r"(address + 4 * w) : "memory");
    }
  }
  T value;
  memcpy(&value, words, sizeof(value));
  return value;
}
template <typename T> __device__ __forceinline__ void store_cluster(uint32_t address, const T& value) {
  using Word = ClusterWord<T>;
  constexpr int kWords = sizeof(T) / sizeof(Word);
  static_assert(kWords * sizeof(Word) == sizeof(T));
  Word words[kWords];
  memcpy(words, &value, sizeof(value));
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if constexpr (sizeof(Word) == 8) {
      asm volatile("st." RESEARCH_ENGINE_CLUSTER_SPACE ".u64 [%0], %1;" ::"r"(address + 8 * w), "l"(words[w]) : "memory");
    } else {
      asm volatile("st." RESEARCH_ENGINE_CLUSTER_SPACE ".u32 [%0], %1;" ::"r"(address + 4 * w), "r"(words[w]) : "memory");
    }
  }
}
#undef RESEARCH_ENGINE_CLUSTER_SPACE

}  // namespace research_engine::cuda
