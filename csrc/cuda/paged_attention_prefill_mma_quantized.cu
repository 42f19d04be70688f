// The prefill kernel on mma.sync for quantised caches, e4m3 and int8; the kernel: paged_attention_prefill_mma.cuh.
#include "paged_attention_prefill_mma.cuh"

namespace research_engine::cuda::prefill_mma {

void launch_quantized(const PagedAttention& args, const AttentionParams& params, Stream stream) {
  if (args.key_cache.dtype == DType::f8e4m3) return launch_for_type<__nv_fp8_e4m3>(args, params, stream);
  launch_for_type<int8_t>(args, params, stream);
}

}  // namespace research_engine::cuda::prefill_mma
