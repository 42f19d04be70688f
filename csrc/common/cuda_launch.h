// What every CUDA op does around its kernel: device guard, launch with checked errors, large shared memory, grid bounds.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "ops.h"

namespace research_engine::cuda {

inline void check(cudaError_t status, const char* op) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a sticky error stays; any other must not surface again at somebody else's check
  throw std::runtime_error(std::string(op) + ": CUDA error " + cudaGetErrorName(status) + ": " +
                           cudaGetErrorString(status));
}

// Makes the tensors' device current while an op runs, whatever device the caller had.
class DeviceGuard {
 public:
  DeviceGuard(int device, const char* op) {
    check(cudaGetDevice(&previous_), op);
    if (device == previous_) return;
    check(cudaSetDevice(device), op);
    restore_ = true;
  }
  ~DeviceGuard() {
    if (restore_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool restore_ = false;
};

// Launches on the caller's stream. Only gridDim.x is used: y and z end at 65,535, x at 2^31 - 1.
template <typename... Parameters, typename... Arguments>
void launch(const char* op, void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int64_t shared_bytes,
            Stream stream, const Arguments&... arguments) {
  if (blocks <= 0) return;
  if (blocks > INT32_MAX) {
    throw std::runtime_error(std::string(op) + ": " + std::to_string(blocks) +
                             " thread blocks exceed the limit of 2147483647 in one launch; split the batch");
  }
  if (shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          op);
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  check(cudaGetLastError(), op);
}

// Whether the current device runs code that was compiled for sm_90 or later, in which alone cluster.cuh does anything. All kernels
// are compiled for the same architectures, so any one of them answers; a device is asked once.
template <typename... Parameters>
bool runs_sm90_code(const char* op, void (*kernel)(Parameters...)) {
  static std::atomic<int> known[64];  // 0: not asked yet, 1: no, 2: yes
  int device = 0;
  check(cudaGetDevice(&device), op);
  if (device < 64 && known[device] != 0) return known[device] == 2;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), op);
  const bool yes = attributes.ptxVersion >= 90;
  if (device < 64) known[device] = yes ? 2 : 1;
  return yes;
}

// A launch in clusters of neighbouring blocks, and, with `overlap`, one that may begin before the kernel ahead of it in the stream
// has ended (programmatic dependent launch): the kernel has to wait for it by itself. Both need code of sm_90.
class ClusterLaunch {
 public:
  ClusterLaunch(int64_t blocks, dim3 threads, int64_t shared_bytes, int cluster_size, bool overlap, Stream stream) {
    config_.gridDim = dim3(static_cast<unsigned>(blocks));
    config_.blockDim = threads;
    config_.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config_.stream = static_cast<cudaStream_t>(stream);
    config_.attrs = attributes_;
    if (cluster_size > 1) {
      attributes_[config_.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes_[config_.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
    }
    if (overlap) {
      attributes_[config_.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes_[config_.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
  const cudaLaunchConfig_t& config() const { return config_; }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attributes_[2] = {};
};

template <typename... Parameters>
void allow_shared_bytes(const char* op, void (*kernel)(Parameters...), int64_t shared_bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), op);
}

template <typename... Parameters, typename... Arguments>
void launch_cluster(const char* op, void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int64_t shared_bytes,
                    int cluster_size, bool overlap, Stream stream, const Arguments&... arguments) {
  allow_shared_bytes(op, kernel, shared_bytes);
  const ClusterLaunch launch(blocks, threads, shared_bytes, cluster_size, overlap, stream);
  check(cudaLaunchKernelEx(&launch.config(), kernel, static_cast<Parameters>(arguments)...), op);
}

// `launch` for a kernel that begins with `start_overlapped` (cluster.cuh): overlapped where it can be.
template <typename... Parameters, typename... Arguments>
void launch_overlapped(const char* op, void (*kernel)(Parameters...), int64_t blocks, dim3 threads, Stream stream,
                       const Arguments&... arguments) {
  if (blocks <= 0 || blocks > INT32_MAX || !runs_sm90_code(op, kernel)) {
    return launch(op, kernel, blocks, threads, 0, stream, arguments...);
  }
  const ClusterLaunch launch(blocks, threads, 0, 1, true, stream);
  check(cudaLaunchKernelEx(&launch.config(), kernel, static_cast<Parameters>(arguments)...), op);
}

// Clusters of this size that the current device runs at a time.
template <typename... Parameters>
int max_clusters(const char* op, void (*kernel)(Parameters...), dim3 threads, int64_t shared_bytes, int cluster_size) {
  allow_shared_bytes(op, kernel, shared_bytes);
  const ClusterLaunch launch(cluster_size, threads, shared_bytes, cluster_size, false, nullptr);
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config()), op);
  return clusters;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace research_engine::cuda
