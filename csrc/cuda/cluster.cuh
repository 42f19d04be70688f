// Thread block clusters of sm_90: their barrier, a neighbour's shared memory, their launch. Code for other GPUs has clusters of one
// thread block, and launches no others.
#pragma once

#include "../common/cuda_launch.h"

namespace research_engine::cuda {
namespace {

// Of all threads of the cluster; what they wrote before their fence, to any block's memory, can be read after `wait`. The fence
// waits for memory, and so is for the threads that need it.
__device__ __forceinline__ void cluster_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The place in the shared memory of the cluster's block `rank` where this block has `*mine`. That block has to run: from the
// cluster's first barrier until it leaves its last one.
template <typename T> __device__ __forceinline__ T* cluster_peer(T* mine, int rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(mine), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  return mine;
#endif
}

// Whether the code that this device runs of a kernel is code with clusters.
template <typename... Parameters> bool has_clusters(const char* op, void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), op);
  return attributes.ptxVersion >= 90;
}

// `launch` of clusters of `cluster` neighbouring thread blocks, a power of two up to 8, where has_clusters(kernel).
template <typename... Parameters, typename... Arguments>
void launch_clusters(const char* op, void (*kernel)(Parameters...), int64_t blocks, int cluster, dim3 threads, int64_t shared_bytes,
                     Stream stream, const Arguments&... arguments) {
  if (cluster == 1) return launch(op, kernel, blocks, threads, shared_bytes, stream, arguments...);
  if (blocks <= 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), op);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), op);
}

}  // namespace
}  // namespace research_engine::cuda
