// Launches kernels that were compiled at run time (research_engine/kernels/jit): they are the driver's functions, not the runtime's.
#include <cuda.h>

#include "../common/cuda_launch.h"

namespace research_engine::cuda {

void* driver_function(const char* name, const char* op) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found), op);
#else
  check(cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found), op);
#endif
  if (found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(std::string(op) + ": this driver has no " + name + "; CUDA 12 or later has");
  }
  return entry;
}

void launch_variant(const char* op, const KernelVariant& variant, int64_t blocks, Stream stream, const void* parameter,
                    int64_t parameter_bytes) {
  if (variant.parameter_bytes != parameter_bytes) {
    throw std::invalid_argument(std::string(op) + ": the variant's kernel takes " + std::to_string(variant.parameter_bytes) +
                                " bytes of parameters, the built one " + std::to_string(parameter_bytes) +
                                ": its source is of another version than the build; run `pip install -e .` again");
  }
  if (blocks <= 0) return;
  static const auto launch_kernel = reinterpret_cast<decltype(&cuLaunchKernel)>(driver_function("cuLaunchKernel", op));
  void* parameters[] = {const_cast<void*>(parameter)};
  const CUresult status =
      launch_kernel(static_cast<CUfunction>(variant.function), static_cast<unsigned>(blocks), 1, 1, variant.threads, 1, 1,
                    variant.shared_bytes, static_cast<CUstream>(stream), parameters, nullptr);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(op) + ": cuLaunchKernel of a variant failed with CUresult " + std::to_string(status));
  }
}

}  // namespace research_engine::cuda
