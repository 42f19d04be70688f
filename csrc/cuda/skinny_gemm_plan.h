// How skinny_gemm deals a weight out to the multiprocessors of an sm_90a device, and for how many rows (skinny_gemm_wgmma.cu).
#pragma once

#include <cstdint>

#include "../common/ops.h"

namespace research_engine::cuda {

constexpr int kClusterSizes[] = {1, 2, 4, 8};  // blocks that share the depth
constexpr int kMostWgmmaRows = 64;             // of x

struct WgmmaPlan {
  int cluster = 0;  // index of its size, which is 2 to the power of it
  int units = 0;    // of 64 rows of W in a tile
  int rows = 0;     // of x, for which this is at least as fast as a library's product
};

bool wgmma_available(int device);
bool wgmma_takes(const SkinnyGemm& args);  // up to kMostWgmmaRows rows aligned to 16 bytes
// `columns` are of out.
WgmmaPlan plan_wgmma(int64_t columns, int64_t depth, bool gated, int device);
void launch_wgmma(const SkinnyGemm& args, const WgmmaPlan& plan, Stream stream);

}  // namespace research_engine::cuda
