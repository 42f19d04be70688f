// sample with logits of float32.
#include "sampling_launch.cuh"

namespace research_engine::cuda {
template void launch_sampling<float>(SamplingParams, int64_t, bool, bool, int, Stream);
}  // namespace research_engine::cuda
