// Launches that overlap with the kernel before them in the stream (programmatic dependent launch) and launches of clusters, on
// sm_90; on older GPUs plain ones.
//
// Why        A decode step is hundreds of short kernels, one waiting for the other. Without help the next one's blocks are only
//            sent out when the last block of this one has left and its memory is flushed, some microseconds each time.
// How        A kernel launched with cudaLaunchAttributeProgrammaticStreamSerialization may start when every block of its
//            predecessor has executed griddepcontrol.launch_dependents (or has left). It waits inside, in griddepcontrol.wait,
//            until the predecessor's grid has ended and its memory is visible.
// The rule   A kernel that may start early has to wait before it reads what any kernel before it wrote, before it writes what
//            any kernel before it reads or writes, and at all: for the wait is what makes the order transitive. If C waits for
//            B and B ended without waiting for A, C may run beside A. So every thread block waits, even one without work.
// Enforced   by types. `launch_after` is the only way to get the attribute, and takes kernels of one argument only, an
//            AfterPredecessor<Params>; the parameters, so every pointer that a kernel has, come out of its wait().
//            What is left to the author: wait() is the kernel's first statement, with no return before it; before it there
//            may only be reads of memory that no kernel writes, through constants().
//
//              struct Params { const float* in; float* out; };
//              __global__ void kernel(const __grid_constant__ AfterPredecessor<Params> after) {
//                const Params& p = after.wait();
//                ...
//              }
//              launch_after("op", kernel, {blocks, threads}, stream, Params{in, out});
//
// Mixing     Kernels of other libraries, copies and `launch` of cuda_launch.h need no change: launched plainly, they begin when
//            what is before them has ended; before one of ours, they let it start when their blocks have left.
// Dependents are let go at once: blocks of theirs only take places that this grid, all of whose blocks run by then, leaves free.
// Switch     RESEARCH_ENGINE_PDL=0 in the environment turns the overlap off, to measure it. Results are the same.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "../common/cuda_launch.h"

namespace research_engine::cuda {

template <typename Params> class AfterPredecessor {
 public:
  explicit AfterPredecessor(const Params& params) : params_(params) {}

  // Ends when every kernel launched before in the stream has. Without effect in a kernel that was launched plainly.
  __device__ __forceinline__ const Params& wait() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    return params_;
  }

  // The parameters before the wait, for what no kernel writes, such as a model's weights: to have it on its way by then.
  __device__ __forceinline__ const Params& constants() const { return params_; }

 private:
  Params params_;
};

#ifndef __CUDACC_RTC__  // the host's part
struct LaunchShape {
  int64_t blocks;
  dim3 threads;
  int64_t shared_bytes = 0;
  int cluster = 1;  // neighbouring blocks that can read each other's shared memory; divides `blocks`
  bool overlap = true;
};

// Whether the current device runs code of `kernel` that was compiled for sm_90 or later: code for older GPUs neither waits nor
// knows clusters. All files of a build have the same targets, so that one kernel answers for all on a device.
inline bool runs_sm90_code(const char* op, const void* kernel) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices] = {};  // 0: not asked yet, 1: no, 2: yes
  int device = 0;
  check(cudaGetDevice(&device), op);
  int answer = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (answer == 0) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), op);
    answer = attributes.ptxVersion >= 90 ? 2 : 1;
    if (device < kDevices) known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
}

inline bool overlap_wanted() {
  static const bool wanted = [] {
    const char* value = std::getenv("RESEARCH_ENGINE_PDL");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return wanted;
}

namespace detail {

inline void allow(const char* op, const void* kernel, const LaunchShape& shape) {
  if (shape.shared_bytes > 32 * 1024) {  // see `launch`
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes)), op);
  }
  if (shape.cluster > 8) check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), op);
}

inline cudaLaunchAttribute cluster_attribute(int size) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(size);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

inline cudaLaunchConfig_t configuration(const LaunchShape& shape, Stream stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  return config;
}

}  // namespace detail

// How many clusters of this shape the current device holds at once; 0 where it has none.
template <typename Params>
int active_clusters(const char* op, void (*kernel)(AfterPredecessor<Params>), const LaunchShape& shape) {
  const void* function = reinterpret_cast<const void*>(kernel);
  if (!runs_sm90_code(op, function)) return 0;
  detail::allow(op, function, shape);
  cudaLaunchAttribute attribute = detail::cluster_attribute(shape.cluster);
  cudaLaunchConfig_t config = detail::configuration(shape, nullptr);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, function, &config) != cudaSuccess) {
    cudaGetLastError();  // a size that the device does not take
    return 0;
  }
  return count;
}

// Launches on the caller's stream, to start while the kernel before it ends unless the shape says otherwise.
template <typename Params>
void launch_after(const char* op, void (*kernel)(AfterPredecessor<Params>), const LaunchShape& shape, Stream stream,
                  const Params& params) {
  if (!check_grid(op, shape.blocks)) return;
  const void* function = reinterpret_cast<const void*>(kernel);
  detail::allow(op, function, shape);
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = detail::configuration(shape, stream);
  config.attrs = attributes;
  if (shape.cluster > 1) attributes[config.numAttrs++] = detail::cluster_attribute(shape.cluster);
  if (shape.overlap && overlap_wanted() && runs_sm90_code(op, function)) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++] = cudaLaunchAttribute{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, AfterPredecessor<Params>(params)), op);
}

#endif

}  // namespace research_engine::cuda
