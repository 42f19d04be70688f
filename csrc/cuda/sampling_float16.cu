// sample with logits of float16.
#include "sampling_launch.cuh"

namespace research_engine::cuda {
template void launch_sampling<__half>(SamplingParams, int64_t, bool, bool, int, Stream);
}  // namespace research_engine::cuda
