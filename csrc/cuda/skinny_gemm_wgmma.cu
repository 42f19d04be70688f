// skinny_gemm for 9 to 64 rows on sm_90a: how the kernel of skinny_gemm_wgmma.cuh is launched for a weight.
#include "skinny_gemm_wgmma.cuh"

#include <algorithm>

#include "device_facts.cuh"
#include "skinny_gemm_plan.h"
#include "tensor_map.cuh"

namespace research_engine::cuda {
namespace {

using namespace wide;

constexpr const char* kOp = "skinny_gemm";
constexpr int kPrefetchedStages = 4;  // behind the ring, asked into L2 at the start

// Calls function(Shape<...>{}) with the fewest tokens that hold `tokens`.
template <int kUnits, typename Function> void with_tokens(int tokens, Function&& function) {
  if (tokens <= 32) return function(Shape<32, kUnits>{});
  if (tokens <= 48) return function(Shape<48, kUnits>{});
  return function(Shape<64, kUnits>{});
}
template <typename Function> void with_shape(int tokens, int units, Function&& function) {
  if (units == 1) return with_tokens<1>(tokens, function);
  if (units == 2) return with_tokens<2>(tokens, function);
  return with_tokens<3>(tokens, function);
}

// What is asked of a device once.
struct Device {
  bool has_kernel = false;
  int shared_bytes = 0;  // of a block
  int clusters[std::size(kClusterSizes)] = {};  // that it holds at a time, a block a multiprocessor

  explicit Device(int device) {
    const auto kernel = &skinny_gemm_wgmma_kernel<__nv_bfloat16, Shape<32, 2>>;
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), kOp);
    has_kernel = attributes.maxThreadsPerBlock >= kThreads;
    if (!has_kernel) return;
    check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), kOp);
    check(cudaDeviceGetAttribute(&clusters[0], cudaDevAttrMultiProcessorCount, device), kOp);
    for (size_t i = 1; i < std::size(kClusterSizes); ++i) {
      clusters[i] = active_clusters(kOp, kernel, {kClusterSizes[i], kThreads, shared_bytes, kClusterSizes[i]});
    }
  }
};

int count_tiles(int64_t columns, bool gated, int units) {
  return static_cast<int>(ceil_div(columns, gated ? kUnitRows : units * kUnitRows));
}

// Rows of x up to which the kernel was as fast as cuBLAS or faster on an H200, each in a chain of launches over weights that L2 does
// not hold (times in skinny_gemm_wgmma.cuh). `busy` is the part of the device's time that the plan has work for.
int rows_worthwhile(int64_t columns, int64_t depth, double busy) {
  // Few columns: a library shares the depth by way of global memory. 4096 x 14336, 3584 x 18944, 576 x 1536 won by 6 to 27 %.
  if (depth >= 2 * columns) return busy >= 0.5 ? kMostWgmmaRows : 0;
  // 6144 x 4096 and 4608 x 3584 (0.73) did not win; 3584 x 3584 (0.85), 4096 x 4096 and 128256 x 4096 (0.95 and above) did.
  if (busy < 0.8) return 0;
  // At 64 rows 4096 x 4096 lost, at 48 it won by 14 %. 49152 x 576 writes much for what it reads: won by 4 % at 32, lost at 64.
  return depth >= 2048 ? 48 : 32;
}

}  // namespace

bool wgmma_available(int device) {
  const DeviceGuard guard(device, kOp);
  return device_of<Device>(kOp, device).has_kernel;
}

bool wgmma_takes(const SkinnyGemm& args) {
  const auto expressible = [](const TensorView& matrix) {  // by a tensor map: rows apart, and not too far
    return matrix.shape[0] <= 1 || (matrix.strides[0] >= matrix.shape[1] && matrix.strides[0] < int64_t{1} << 39);
  };
  return wgmma_available(args.x.device) && expressible(args.x) && expressible(args.weight);
}

// Of the ways to deal the weight out to the clusters the one whose blocks have least to do: in steps of 64 rows of W, with what a step
// has beside W's bytes, and in a cluster two such steps for every doubling of its size and every further tile. Of 14 matrices timed on
// an H200 (66 clusters of 2, some 30 of 4, 15 of 8) it picks the fastest way for 11 and one at most 9 % slower for the others. Neither
// the rows of x nor anything but the weight's shape decides.
WgmmaPlan plan_wgmma(int64_t columns, int64_t depth, bool gated, int ordinal) {
  const Device& device = device_of<Device>(kOp, ordinal);
  const int steps = static_cast<int>(ceil_div(depth, kDepth));
  WgmmaPlan best;
  double least = 0.0, busy = 0.0;
  for (size_t i = 0; i < std::size(kClusterSizes); ++i) {
    const int size = kClusterSizes[i];
    if (device.clusters[i] == 0 || size > steps) continue;
    for (const int units : {3, 2, 1}) {
      if (gated && units != 2) continue;
      const double rounds = static_cast<double>(ceil_div(count_tiles(columns, gated, units), device.clusters[i]));
      const double work = rounds * static_cast<double>(ceil_div(steps, size)), meetings = static_cast<double>(i) + rounds - 1.0;
      const double cost = work * (units + 0.2) + (size > 1 ? 2.0 * meetings : 0.0);
      if (best.units != 0 && cost >= least) continue;
      best.cluster = static_cast<int>(i);
      best.units = units;
      least = cost;
      const double of_weight = static_cast<double>(ceil_div(columns, kUnitRows)) * steps;
      busy = of_weight / (work * units * device.clusters[0]);
    }
  }
  best.rows = gated ? 0 : rows_worthwhile(columns, depth, busy);
  return best;
}

void launch_wgmma(const SkinnyGemm& args, const WgmmaPlan& plan, Stream stream) {
  const DeviceGuard guard(args.x.device, kOp);
  const Device& device = device_of<Device>(kOp, args.x.device);
  const int64_t tokens = args.x.shape[0];
  Params p{};
  p.bias = args.bias.ptr<const char>();
  p.out = args.out.ptr<char>();
  p.out_stride = args.out.strides[0];
  p.tokens = static_cast<int>(tokens);
  p.columns = static_cast<int>(args.out.shape[1]);
  p.up_row = args.gated ? p.columns : 0;
  p.depth_steps = static_cast<int>(ceil_div(args.x.shape[1], kDepth));
  p.tiles = count_tiles(p.columns, args.gated, plan.units);
  p.cluster_size = kClusterSizes[plan.cluster];
  p.cluster_shift = plan.cluster;
  p.float_out = args.out.dtype == DType::f32;
  const int64_t row_bytes = 2 * args.x.shape[1];  // where there is one row its stride means nothing
  const auto map = [&](const TensorView& matrix, int box_rows, CUtensorMapL2promotion promotion) {
    return matrix_map(kOp, matrix.dtype, matrix.data, matrix.shape[0], matrix.shape[1],
                      matrix.shape[0] > 1 ? 2 * matrix.strides[0] : row_bytes, box_rows, promotion);
  };
  p.weight = map(args.weight, kUnitRows, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  const int64_t blocks = static_cast<int64_t>(std::min(p.tiles, device.clusters[plan.cluster])) * p.cluster_size;
  with_shape(p.tokens, plan.units, [&](auto shape) {
    using S = decltype(shape);
    p.x = map(args.x, S::kTokens, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
    const int64_t left = device.shared_bytes - shared_bytes<S>(0, p.cluster_size);
    p.stages = static_cast<int>(std::min<int64_t>(kMostStages, left / S::kStageBytes));
    p.prefetched = kPrefetchedStages;
    const LaunchShape launch{blocks, kThreads, shared_bytes<S>(p.stages, p.cluster_size), p.cluster_size, args.overlap};
    const auto kernel = args.x.dtype == DType::bf16 ? &skinny_gemm_wgmma_kernel<__nv_bfloat16, S> : &skinny_gemm_wgmma_kernel<__half, S>;
    // Else a multiprocessor may be set up for this block alone, and the next kernel's has no room beside it.
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared), kOp);
    launch_after(kOp, kernel, launch, stream, p);
  });
}

}  // namespace research_engine::cuda
