// skinny_gemm: which kernel takes how many rows, and how the one of skinny_gemm.cuh is launched for a weight: the cluster that shares
// its depth, rows of x a pass.
#include "skinny_gemm.cuh"

#include <algorithm>

#include "device_facts.cuh"
#include "skinny_gemm_plan.h"

namespace research_engine::cuda {
namespace {

constexpr const char* kOp = "skinny_gemm";
constexpr int kWarps = 8, kMostRows = 16;
constexpr int kFewRows = 8;  // above them the time of mma.sync, and x in shared memory, tell
constexpr int kLargeShared = 160 * 1024;  // bytes a block: A100 and H100 have more, GPUs for desks some 100 KiB

// Stages of the rings, as many as leave room for x.
constexpr int count_stages(bool large, int token_tiles) { return !large ? 3 : token_tiles == 1 ? 6 : 5; }

template <typename T, bool kLarge, int kTokenTiles>
constexpr auto kKernel = &skinny_gemm_kernel<T, kTokenTiles, kWarps, count_stages(kLarge, kTokenTiles)>;

template <typename T> auto kernel_for(bool large, int tokens) {
  if (large) return tokens <= 8 ? kKernel<T, true, 1> : kKernel<T, true, 2>;
  return tokens <= 8 ? kKernel<T, false, 1> : kKernel<T, false, 2>;
}

// What is asked of a device once. Clusters that fit at a time, a block a multiprocessor; none where it runs code of before sm_90.
struct Device {
  int multiprocessors = 0, shared_bytes = 0;
  bool large = false;
  int clusters[std::size(kClusterSizes)] = {};

  explicit Device(int device) {
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kOp);
    check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), kOp);
    large = shared_bytes >= kLargeShared;
    const auto kernel = kernel_for<__nv_bfloat16>(large, 1);
    const bool sm90_code = runs_sm90_code(kOp, reinterpret_cast<const void*>(kernel));
    clusters[0] = multiprocessors;
    for (size_t i = 1; sm90_code && i < std::size(kClusterSizes); ++i) {
      clusters[i] = active_clusters(kOp, kernel, {kClusterSizes[i], 32 * kWarps, shared_bytes, kClusterSizes[i]});
    }
  }
};

struct Plan {
  int cluster = 0;  // index of its size
  int rows = 0;     // of x, in one pass over the weight
};

// The smallest cluster whose blocks have room for x, or for as many of its rows as the kernel takes in a pass; where none has, the rows
// for which the one that takes most has.
Plan make_plan(const Device& device, int64_t tokens, int units) {
  Plan plan;
  const int most = static_cast<int>(std::min<int64_t>(tokens, kMostRows));
  for (int i = 0; i < static_cast<int>(std::size(kClusterSizes)); ++i) {
    if (device.clusters[i] == 0 || kClusterSizes[i] > units) continue;
    const auto fits = [&](int rows) {
      return skinny_gemm_shared_bytes(kWarps, count_stages(device.large, rows <= 8 ? 1 : 2), rows, units, kClusterSizes[i]) <= device.shared_bytes;
    };
    int rows = most;
    while (rows > 0 && !(fits(rows) && (rows == tokens || fits(std::min(rows, 8))))) --rows;  // also those left for the last pass
    if (rows > plan.rows) plan = {i, rows};
    if (rows == most) break;
  }
  return plan;
}

int count_tiles(int64_t columns, bool gated) { return static_cast<int>(ceil_div(columns, gated ? 8 : 16)); }

}  // namespace

int64_t skinny_gemm_rows(int64_t columns, int64_t depth, bool gated, int device) {
  const DeviceGuard guard(device, kOp);
  const int rows = make_plan(device_of<Device>(kOp, device), kMostRows, static_cast<int>(ceil_div(depth, kUnitDepth))).rows;
  if (rows < kFewRows || !wgmma_available(device)) return rows;
  return std::max(rows, plan_wgmma(columns, depth, gated, device).rows);
}

void skinny_gemm(const SkinnyGemm& args, Stream stream) {
  const int64_t tokens = args.x.shape[0], columns = args.out.shape[1];
  if (tokens == 0 || columns == 0) return;
  if (!vector_aligned(args.x, tokens > 1 ? args.x.strides[0] : 8) ||
      !vector_aligned(args.weight, args.weight.shape[0] > 1 ? args.weight.strides[0] : 8)) {
    throw std::invalid_argument("skinny_gemm: rows of x and weight have to be aligned to 16 bytes");
  }
  const DeviceGuard guard(args.x.device, kOp);
  if (tokens > kFewRows && wgmma_takes(args)) {
    // Where a library's product is faster than it, the other kernel is about as fast up to 16 rows, gated a little faster.
    const WgmmaPlan plan = plan_wgmma(columns, args.x.shape[1], args.gated, args.x.device);
    if (plan.rows > 0 || tokens > kMostRows) return launch_wgmma(args, plan, stream);
  }
  const Device& device = device_of<Device>(kOp, args.x.device);
  SkinnyGemmParams p{};
  p.weight = args.weight.ptr<const char>();
  p.bias = args.bias.ptr<const char>();
  p.x_stride = 2 * args.x.strides[0];
  p.weight_stride = 2 * args.weight.strides[0];
  p.out_stride = args.out.strides[0];
  p.depth = static_cast<int>(args.x.shape[1]);
  p.columns = static_cast<int>(columns);
  p.tiles = count_tiles(columns, args.gated);
  p.tile_rows = args.gated ? 8 : 16;
  p.high_rows = args.gated ? p.columns : 8;
  p.units = static_cast<int>(ceil_div(p.depth, kUnitDepth));
  p.gated = args.gated;
  p.float_out = args.out.dtype == DType::f32;
  const Plan plan = make_plan(device, tokens, p.units);
  if (plan.rows == 0) {
    throw std::invalid_argument("skinny_gemm: a row of x, " + std::to_string(p.depth) + " elements, does not fit in the shared memory of " +
                                "device " + std::to_string(args.x.device) + "; use torch's product");
  }
  p.cluster_size = kClusterSizes[plan.cluster];
  const int64_t blocks = static_cast<int64_t>(std::min(p.tiles, device.clusters[plan.cluster])) * p.cluster_size;
  for (int64_t row = 0; row < tokens; row += plan.rows) {
    p.x = args.x.ptr<const char>() + row * p.x_stride;
    p.out = args.out.ptr<char>() + row * p.out_stride * element_size(args.out.dtype);
    p.tokens = static_cast<int>(std::min<int64_t>(plan.rows, tokens - row));
    const int stages = count_stages(device.large, p.tokens <= 8 ? 1 : 2);
    const int64_t bytes = skinny_gemm_shared_bytes(kWarps, stages, p.tokens, p.units, p.cluster_size);
    const LaunchShape shape{blocks, 32 * kWarps, bytes, p.cluster_size, args.overlap};
    switch (args.x.dtype) {
      case DType::bf16: launch_after(kOp, kernel_for<__nv_bfloat16>(device.large, p.tokens), shape, stream, p); break;
      case DType::f16: launch_after(kOp, kernel_for<__half>(device.large, p.tokens), shape, stream, p); break;
      default: throw std::invalid_argument("skinny_gemm: the CUDA kernel takes float16 and bfloat16");
    }
  }
}

}  // namespace research_engine::cuda
