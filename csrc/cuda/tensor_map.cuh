// Tensor maps: what the copy engine of sm_90 knows of a tensor in global memory.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../common/cuda_launch.h"

namespace research_engine::cuda {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, without linking the driver: the extension has to load on machines that have none.
inline EncodeTiled encode_tiled(const char* op) {
  static const EncodeTiled function = [op] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found), op);
#else
    check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found), op);
#endif
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error(std::string(op) + ": this driver has no cuTensorMapEncodeTiled; CUDA 12 or later has");
    }
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

// Boxes of `box_rows` rows by 64 elements of a 16-bit matrix whose rows are `row_bytes` apart. Rows of a box are 128 bytes and
// swizzled (wgmma.cuh); what lies outside the matrix arrives as zeros.
inline CUtensorMap matrix_map(const char* op, DType dtype, const void* data, int64_t rows, int64_t columns, int64_t row_bytes, int box_rows,
                              CUtensorMapL2promotion promotion) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  CUtensorMap map{};
  const CUresult status = encode_tiled(op)(
      &map, dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(data), sizes,
      strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(op) + ": cuTensorMapEncodeTiled failed with CUresult " + std::to_string(status));
  }
  return map;
}

}  // namespace research_engine::cuda
