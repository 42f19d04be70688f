// Instructions of sm_90 that CUDA C++ has no short names for: thread block clusters, and launches that overlap the kernel before.
//
// Compiled for older architectures they do nothing, so that a kernel has to be launched there in clusters of one and without
// overlap: `runs_sm90_code` (cuda_launch.h) tells which code the device runs.
#pragma once

#include <cstdint>

namespace research_engine::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Lets kernels that were launched with overlap start as soon as every block of this one has called this or ended.
__device__ __forceinline__ void let_dependents_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits until the kernels that this one overlaps are complete, and sees what they wrote.
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// The two halves of a barrier over all threads of the cluster; what was written before one is seen after the other.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Stores into the shared memory of the block of that rank, at the address that `address` is here.
__device__ __forceinline__ void store_remote(uint32_t address, int rank, float2 value) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(value.x), "f"(value.y) : "memory");
}
#else
__device__ __forceinline__ void let_dependents_start() {}
__device__ __forceinline__ void wait_for_prerequisites() {}
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void store_remote(uint32_t, int, float2) {}
#endif

// First of all in a kernel launched with overlap: only its own launch is hidden, and nothing is read or written before its turn.
__device__ __forceinline__ void start_overlapped() {
  let_dependents_start();
  wait_for_prerequisites();
}

}  // namespace research_engine::cuda
