// The decode kernel on tensor cores for quantised caches, e4m3 and int8; the kernel: paged_attention_decode_mma.cuh.
#include "paged_attention_decode_mma.cuh"

namespace research_engine::cuda::decode {

void launch_quantized(const AttentionParams& p, DType cache, const Sizes& sizes, Stream stream) {
  if (cache == DType::f8e4m3) {
    if (p.head_size == 64) return launch_for_head_size<__nv_fp8_e4m3, 64>(p, sizes, stream);
    if (p.head_size == 128) return launch_for_head_size<__nv_fp8_e4m3, 128>(p, sizes, stream);
    return launch_for_head_size<__nv_fp8_e4m3, 256>(p, sizes, stream);
  }
  if (p.head_size == 64) return launch_for_head_size<int8_t, 64>(p, sizes, stream);
  return launch_for_head_size<int8_t, 128>(p, sizes, stream);
}

}  // namespace research_engine::cuda::decode
