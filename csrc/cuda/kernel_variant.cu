// Loads kernels that were compiled at run time (research_engine/kernels/jit).
#include "../common/cuda_launch.h"

namespace research_engine::cuda {

void* load_kernel(const std::string& code, const std::string& symbol) {
#if CUDART_VERSION >= 12080
  const char* op = "kernels.jit";
  cudaLibrary_t library = nullptr;
  cudaKernel_t kernel = nullptr;
  check(cudaLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), op);
  check(cudaLibraryGetKernel(&kernel, library, symbol.c_str()), op);
  return kernel;  // the runtime's functions take it in place of a kernel's address
#else
  throw std::invalid_argument("kernels.jit: variants of built kernels need a build with CUDA 12.8 or later, and this is " +
                              std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10));
#endif
}

}  // namespace research_engine::cuda
