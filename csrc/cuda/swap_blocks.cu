// swap_blocks: moves KV blocks between a cache on the device and one in pinned host memory, either way, by the copy engine.
//
// Layout     source [L, 2, N, Hkv, B, D], destination [L, 2, M, Hkv, B, D], a block contiguous in both;
//            pairs int64 [P, 2] = (source block, destination block) in host memory, read before the call returns.
// Algorithm  1. Neighbouring pairs whose source and destination both count up by one merge into a run.
//            2. A run is one strided copy over all layers, keys and values: width = the run's bytes, height = 2 L rows.
//            3. Where layers and sides are not evenly spaced, or the pitch passes the device's limit, one copy a row.
//            4. Everything is queued on the caller's stream, so that it is ordered after the step that wrote the blocks.
//            5. Pageable host memory is refused: such a copy would be staged, and no longer asynchronous.
// Roofline   the host link: P x 2 L x Hkv B D elements over PCIe or NVLink-C2C, no arithmetic.
// Reached    not measured yet.
#include "../common/cuda_launch.h"

namespace research_engine::cuda {
namespace {

constexpr const char* kOp = "swap_blocks";

void require_pinned(const TensorView& cache, const char* name) {
  if (cache.device != TensorView::kCpu) return;
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, cache.data), kOp);
  if (attributes.type == cudaMemoryTypeUnregistered) {
    throw std::runtime_error(std::string("swap_blocks: ") + name +
                             " is in pageable host memory; allocate it pinned (torch.empty(..., pin_memory=True))");
  }
}

struct Rows {
  char* data;
  int64_t layer_bytes, side_bytes, block_bytes;  // distance of neighbours
  explicit Rows(const TensorView& cache)
      : data(cache.ptr<char>()),
        layer_bytes(cache.strides[0] * element_size(cache.dtype)),
        side_bytes(cache.strides[1] * element_size(cache.dtype)),
        block_bytes(cache.strides[2] * element_size(cache.dtype)) {}
};

}  // namespace

void swap_blocks(TensorView source, TensorView destination, TensorView pairs, Stream stream) {
  if (pairs.shape[0] == 0 || source.numel() == 0) return;
  if (source.device == TensorView::kCpu && destination.device == TensorView::kCpu) {
    throw std::runtime_error("swap_blocks: source and destination are both in host memory; one must be on a device");
  }
  const DeviceGuard guard(source.device == TensorView::kCpu ? destination.device : source.device, kOp);
  require_pinned(source, "source");
  require_pinned(destination, "destination");

  const int64_t num_layers = source.shape[0];
  const int64_t block_bytes = source.shape[3] * source.shape[4] * source.shape[5] * element_size(source.dtype);
  const Rows from(source), to(destination);
  int max_pitch = 0, device = 0;
  check(cudaGetDevice(&device), kOp);
  check(cudaDeviceGetAttribute(&max_pitch, cudaDevAttrMaxPitch, device), kOp);
  const bool even = (num_layers == 1 || (from.layer_bytes == 2 * from.side_bytes && to.layer_bytes == 2 * to.side_bytes)) &&
                    from.side_bytes <= max_pitch && to.side_bytes <= max_pitch;
  const bool dense = from.block_bytes == block_bytes && to.block_bytes == block_bytes;
  const auto queue = static_cast<cudaStream_t>(stream);

  const int64_t* pair = pairs.ptr<const int64_t>();
  const int64_t count = pairs.shape[0], pair_stride = pairs.strides[0], pair_step = pairs.strides[1];
  const auto block = [&](int64_t index, int which) { return pair[index * pair_stride + which * pair_step]; };
  for (int64_t first = 0, length; first < count; first += length) {
    length = 1;
    while (dense && first + length < count && block(first + length, 0) == block(first, 0) + length &&
           block(first + length, 1) == block(first, 1) + length) {
      ++length;
    }
    const char* read = from.data + block(first, 0) * from.block_bytes;
    char* write = to.data + block(first, 1) * to.block_bytes;
    const int64_t bytes = length * block_bytes;
    if (even) {
      check(cudaMemcpy2DAsync(write, to.side_bytes, read, from.side_bytes, bytes, 2 * num_layers, cudaMemcpyDefault,
                              queue), kOp);
      continue;
    }
    for (int64_t row = 0; row < 2 * num_layers; ++row) {
      check(cudaMemcpyAsync(write + row / 2 * to.layer_bytes + row % 2 * to.side_bytes,
                            read + row / 2 * from.layer_bytes + row % 2 * from.side_bytes, bytes, cudaMemcpyDefault,
                            queue), kOp);
    }
  }
}

}  // namespace research_engine::cuda
