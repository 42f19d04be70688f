// sample with logits of bfloat16.
#include "sampling_launch.cuh"

namespace research_engine::cuda {
template void launch_sampling<__nv_bfloat16>(SamplingParams, int64_t, bool, bool, int, Stream);
}  // namespace research_engine::cuda
