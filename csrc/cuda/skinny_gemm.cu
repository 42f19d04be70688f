// skinny_gemm: how the kernel of skinny_gemm.cuh is launched for a weight: the cluster that shares its depth, rows of x a pass.
#include "skinny_gemm.cuh"

#include <algorithm>
#include <atomic>

namespace research_engine::cuda {
namespace {

constexpr const char* kOp = "skinny_gemm";
constexpr int kWarps = 8, kStages = 5;
constexpr int kMostRows = 16, kMostDevices = 64;
constexpr int kClusterSizes[] = {1, 2, 4, 8};

template <int kTokenTiles> using Shared = SkinnyGemmShared<kTokenTiles, kWarps, kStages>;
template <typename T, int kTokenTiles> constexpr auto kKernel = &skinny_gemm_kernel<T, kTokenTiles, kWarps, kStages>;

int64_t shared_bytes(int tokens, int units, int cluster_size) {
  return tokens <= 8 ? Shared<1>::bytes(tokens, units, cluster_size) : Shared<2>::bytes(tokens, units, cluster_size);
}

// What is asked of a device once. Clusters that fit at a time, a block a multiprocessor; none where it runs code of before sm_90.
struct Device {
  int multiprocessors = 0, shared_bytes = 0;
  int clusters[std::size(kClusterSizes)] = {};

  explicit Device(int device) {
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kOp);
    check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), kOp);
    const auto kernel = kKernel<__nv_bfloat16, 1>;
    const bool sm90_code = runs_sm90_code(kOp, reinterpret_cast<const void*>(kernel));
    clusters[0] = multiprocessors;
    for (size_t i = 1; sm90_code && i < std::size(kClusterSizes); ++i) {
      clusters[i] = active_clusters(kOp, kernel, {kClusterSizes[i], 32 * kWarps, shared_bytes, kClusterSizes[i]});
    }
  }
};

const Device& device_of(int ordinal) {
  static std::atomic<const Device*> known[kMostDevices];
  if (ordinal >= kMostDevices) throw std::invalid_argument("skinny_gemm: device " + std::to_string(ordinal) + "; at most 64 are known");
  const Device* found = known[ordinal].load(std::memory_order_acquire);
  if (found == nullptr) {
    const Device* made = new Device(ordinal);  // kept; a thread that comes second drops its own
    if (known[ordinal].compare_exchange_strong(found, made)) found = made;
    else delete made;
  }
  return *found;
}

struct Plan {
  int cluster = 0;  // index of its size
  int rows = 0;     // of x, in one pass over the weight
};

// Depends on the weight's shape alone, so that a row's sum has one order. The cost is in bytes of the busiest multiprocessor: its
// units, an eighth of a tile for reading x, and what a cluster's barriers take, once for each pass that 16 rows need.
Plan make_plan(const Device& device, int tiles, int units) {
  constexpr int64_t kBarrierBytes = 14000;  // some 400 ns
  Plan best;
  int64_t best_cost = INT64_MAX;
  for (int i = 0; i < static_cast<int>(std::size(kClusterSizes)); ++i) {
    const int size = kClusterSizes[i];
    int rows = kMostRows;
    while (rows > 0 && shared_bytes(rows, units, size) > device.shared_bytes) --rows;
    if (rows == 0 || device.clusters[i] == 0 || size > std::max(units, 1)) continue;
    const int64_t tile_bytes = ceil_div(units, size) * kWarpUnitBytes;
    const int64_t pass = ceil_div(tiles, device.clusters[i]) * tile_bytes + tile_bytes / 8 + i * kBarrierBytes;
    const int64_t cost = pass * ceil_div(kMostRows, rows);
    if (cost < best_cost) best = {i, rows}, best_cost = cost;
  }
  return best;
}

int count_tiles(int64_t columns, bool gated) { return static_cast<int>(ceil_div(columns, gated ? 8 : 16)); }

}  // namespace

int64_t skinny_gemm_rows(int64_t columns, int64_t depth, int device) {
  const DeviceGuard guard(device, kOp);
  return make_plan(device_of(device), count_tiles(columns, false), static_cast<int>(ceil_div(depth, kUnitDepth))).rows;
}

void skinny_gemm(const SkinnyGemm& args, Stream stream) {
  const int64_t tokens = args.x.shape[0], columns = args.out.shape[1];
  if (tokens == 0 || columns == 0) return;
  if (!vector_aligned(args.x, tokens > 1 ? args.x.strides[0] : 8) ||
      !vector_aligned(args.weight, args.weight.shape[0] > 1 ? args.weight.strides[0] : 8)) {
    throw std::invalid_argument("skinny_gemm: rows of x and weight have to be aligned to 16 bytes");
  }
  const DeviceGuard guard(args.x.device, kOp);
  const Device& device = device_of(args.x.device);
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
  const Plan plan = make_plan(device, p.tiles, p.units);
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
    const int64_t bytes = shared_bytes(p.tokens, p.units, p.cluster_size);
    const auto start = [&](auto kernel) { launch_after(kOp, kernel, {blocks, 32 * kWarps, bytes, p.cluster_size, args.overlap}, stream, p); };
    switch (args.x.dtype) {
      case DType::bf16: start(p.tokens <= 8 ? kKernel<__nv_bfloat16, 1> : kKernel<__nv_bfloat16, 2>); break;
      case DType::f16: start(p.tokens <= 8 ? kKernel<__half, 1> : kKernel<__half, 2>); break;
      default: throw std::invalid_argument("skinny_gemm: the CUDA kernel takes float16 and bfloat16");
    }
  }
}

}  // namespace research_engine::cuda
