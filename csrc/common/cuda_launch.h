// What every CUDA op does around its kernel: device guard, launch with checked errors, large shared memory, grid bounds.
// A kernel compiled at run time (research_engine/kernels/jit) sees nothing of it: NVRTC takes no host code.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>

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

// False when there is nothing to launch. Only gridDim.x is used: y and z end at 65,535, x at 2^31 - 1.
inline bool check_grid(const char* op, int64_t blocks) {
  if (blocks > INT32_MAX) {
    throw std::runtime_error(std::string(op) + ": " + std::to_string(blocks) +
                             " thread blocks exceed the limit of 2147483647 in one launch; split the batch");
  }
  return blocks > 0;
}

// Launches on the caller's stream, to start when all before has ended; see ../cuda/launch.cuh for an earlier start.
template <typename... Parameters, typename... Arguments>
void launch(const char* op, void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int64_t shared_bytes,
            Stream stream, const Arguments&... arguments) {
  if (!check_grid(op, blocks)) return;
  if (shared_bytes > 32 * 1024) {  // from 48 KiB on it has to be asked for, a kernel's static shared memory included
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          op);
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  check(cudaGetLastError(), op);
}

// A kernel compiled at run time as the runtime's functions take it, after a look at the size of its one parameter.
template <typename Parameters> auto variant_kernel(const char* op, const KernelVariant& variant) {
  if (variant.parameter_bytes != static_cast<int>(sizeof(Parameters))) {
    throw std::invalid_argument(std::string(op) + ": the variant's kernel takes " + std::to_string(variant.parameter_bytes) +
                                " bytes of parameters, the built one " + std::to_string(sizeof(Parameters)) +
                                ": its source is of another version than the build; run `pip install -e .` again");
  }
  return reinterpret_cast<void (*)(Parameters)>(variant.kernel);
}

// `launch` for it: <<< >>> would call it.
template <typename Parameters>
void launch_variant(const char* op, const KernelVariant& variant, int64_t blocks, Stream stream, Parameters parameters) {
  const auto kernel = variant_kernel<Parameters>(op, variant);
  if (!check_grid(op, blocks)) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, variant.shared_bytes), op);
  void* arguments[] = {&parameters};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)), dim3(variant.threads), arguments,
                         variant.shared_bytes, static_cast<cudaStream_t>(stream)),
        op);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace research_engine::cuda
#endif
