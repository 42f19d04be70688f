// The part of DLPack's binary interface that bindings.cpp reads: torch fills a DLTensor from a Python tensor without
// allocating, through the function table behind `torch.Tensor.__dlpack_c_exchange_api__` (DLPack 1.3).
#pragma once

#include <cstdint>

namespace research_engine::dlpack {

struct Device { int32_t type; int32_t id; };
constexpr int32_t kCpu = 1, kCuda = 2, kCudaHost = 3;

struct DataType { uint8_t code; uint8_t bits; uint16_t lanes; };
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kFloat8E4M3FN = 10;

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // borrows; 0, or -1 with a Python error set
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace research_engine::dlpack
