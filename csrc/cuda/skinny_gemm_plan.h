// How skinny_gemm deals a weight out to the multiprocessors of an sm_90a device (skinny_gemm_wgmma.cu).
#pragma once

#include <cstdint>

#include "../common/ops.h"

namespace research_engine::cuda {

constexpr int kClusterSizes[] = {1, 2, 4, 8};  // blocks that share the depth
constexpr int kMostWgmmaRows = 64;             // of x

struct WgmmaPlan {
  int cluster = 0;          // index of its size, which is 2 to the power of it
  int units = 0;            // of 64 rows of W in a tile
  int stages = 0;           // of the ring at most; 0: as many as there is room for
  int prefetched = 0;       // stages behind the ring's that are asked into L2 at the start
  int neighbours = 1;       // blocks that share a multiprocessor, with a block of the kernel behind it
  int promotion = 2;        // of W in L2, a CUtensorMapL2promotion: 128 bytes
  bool worthwhile = true;   // rather than the library's product
};

bool wgmma_available(int device);
bool wgmma_takes(const SkinnyGemm& args);  // up to kMostWgmmaRows rows aligned to 16 bytes
// `columns` are of out.
WgmmaPlan plan_wgmma(int64_t columns, int64_t depth, bool gated, int device);
void launch_wgmma(const SkinnyGemm& args, const WgmmaPlan& plan, Stream stream);

}  // namespace research_engine::cuda
