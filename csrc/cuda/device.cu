// The CUDA devices of this machine: how many, and what they are called.
#include "../common/cuda_launch.h"

namespace research_engine::cuda {

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

std::string device_description(int device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "device_description");
  return std::string(properties.name) + ", sm_" + std::to_string(properties.major) +
         std::to_string(properties.minor) + ", " + std::to_string(properties.multiProcessorCount) + " SMs";
}

}  // namespace research_engine::cuda
