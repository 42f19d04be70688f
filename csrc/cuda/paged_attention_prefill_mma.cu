// The prefill kernel on mma.sync for caches of 16-bit floats, and the choice of it; the kernel: paged_attention_prefill_mma.cuh.
#include "paged_attention_prefill_mma.cuh"

namespace research_engine::cuda {

bool prefill_mma_supports(const PagedAttention& args, const AttentionParams& params) {
  using namespace prefill_mma;
  const DType query = args.query.dtype, cache = args.key_cache.dtype;
  if ((query != DType::bf16 && query != DType::f16) || params.head_size % 8 != 0 || params.head_size > kMaxHeadSize) return false;
  if ((cache != query && cache != DType::f8e4m3 && cache != DType::i8) || !params.vectors) return false;
  if (!vector_aligned(args.query, params.query_token_stride) || !vector_aligned(args.query, params.query_head_stride) ||
      !vector_aligned(args.out, params.out_token_stride) || !vector_aligned(args.out, params.out_head_stride)) {
    return false;
  }
  if (args.query.shape[0] * params.num_query_heads >= int64_t{1} << 30) return false;  // rows and items count in 32 bits
  int major = 0, shared = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, args.query.device), kOp);
  check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, args.query.device), kOp);
  return major >= 8 && shared >= MmaTiles<__nv_fp8_e4m3, 256>::kSharedBytes;
}

void launch_prefill_mma(const PagedAttention& args, const AttentionParams& params, Stream stream) {
  if (args.key_cache.dtype != args.query.dtype) return prefill_mma::launch_quantized(args, params, stream);
  if (args.query.dtype == DType::bf16) return prefill_mma::launch_for_type<__nv_bfloat16>(args, params, stream);
  prefill_mma::launch_for_type<__half>(args, params, stream);
}

}  // namespace research_engine::cuda
