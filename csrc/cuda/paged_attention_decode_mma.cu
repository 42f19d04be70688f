// The decode kernel on tensor cores for caches of 16-bit floats, and the choice of it; the kernel: paged_attention_decode_mma.cuh.
#include <map>
#include <tuple>

#include "paged_attention_decode_mma.cuh"

namespace research_engine::cuda {
namespace {

using namespace decode;

template <typename T> void launch_for_type(const AttentionParams& p, const Sizes& sizes, Stream stream) {
  switch (p.head_size) {
    case 64: return launch_for_head_size<T, 64>(p, sizes, stream);
    case 80: return launch_for_head_size<T, 80>(p, sizes, stream);
    case 96: return launch_for_head_size<T, 96>(p, sizes, stream);
    case 112: return launch_for_head_size<T, 112>(p, sizes, stream);
    case 128: return launch_for_head_size<T, 128>(p, sizes, stream);
    case 192: return launch_for_head_size<T, 192>(p, sizes, stream);
    default: return launch_for_head_size<T, 256>(p, sizes, stream);
  }
}

// A kernel compiled at run time (research_engine/kernels/jit) in the built one's place.
void launch_compiled(const KernelVariant& variant, const AttentionParams& p, const Sizes& sizes, Stream stream) {
  // A built kernel is asked first whether launches may overlap: one answer serves all, and this one may know more.
  runs_sm90_code(kOp, reinterpret_cast<const void*>(decode_mma_kernel<__half, 64, 8>));
  const DecodeKernel kernel = variant_kernel<AfterPredecessor<AttentionParams>>(kOp, variant);
  const auto clusters = [&](int size) {
    static thread_local std::map<std::tuple<void*, int, int>, int> known;
    int device = 0;
    check(cudaGetDevice(&device), kOp);
    const auto [found, fresh] = known.try_emplace({variant.kernel, device, size}, 0);
    if (fresh) found->second = active_clusters(kOp, kernel, {size, variant.threads, variant.shared_bytes, size});
    return found->second;
  };
  launch_in_clusters(kernel, {sizes.blocks, variant.threads, variant.shared_bytes}, p, sizes.units, clusters, stream);
}

}  // namespace

bool decode_mma_supports(const PagedAttention& args, const AttentionParams& params) {
  if (args.query.dtype != DType::bf16 && args.query.dtype != DType::f16) return false;
  const bool aligned = vector_aligned(args.query, params.query_token_stride) && vector_aligned(args.query, params.query_head_stride) &&
                       vector_aligned(args.out, params.out_token_stride) && vector_aligned(args.out, params.out_head_stride);
  if (args.variant.kernel != nullptr) return params.head_size % 16 == 0 && params.vectors && aligned;
  const int sizes[] = {64, 128, 256, 80, 96, 112, 192};  // float8 has the first three, int8 the first two
  const int built = args.key_cache.dtype == DType::f8e4m3 ? 3 : args.key_cache.dtype == DType::i8 ? 2 : 7;
  if (std::find(sizes, sizes + built, params.head_size) == sizes + built || !params.vectors) return false;
  if (!aligned) return false;
  int shared = 0;
  check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, args.query.device), kOp);
  return shared >= 226 * 1024 || (params.head_size <= 128 && shared >= 113 * 1024);
}

int64_t decode_mma_workspace(const PagedAttention& args) { return decode::sizes_of(args, args.split_size).workspace(args); }

void launch_decode_mma(const PagedAttention& args, AttentionParams params, Stream stream) {
  decode::Sizes sizes = decode::sizes_of(args, args.split_size);
  params.split_size = static_cast<int>(std::min<int64_t>(args.split_size, kWholeRow));
  const int64_t available = args.workspace ? args.workspace.numel() : 0;
  if (sizes.workspace(args) > available) {
    if (args.split_size > 0) {
      throw std::runtime_error("paged_attention: split_size " + std::to_string(args.split_size) + " needs a workspace of " +
                               std::to_string(sizes.workspace(args)) + " float32, got " + std::to_string(available));
    }
    params.split_size = kWholeRow;  // no row is split, so no workspace is needed
    sizes.counters = 0;
  }
  params.unit = Divisor(params.split_size > 0 ? params.split_size : kTile);
  params.groups = Divisor(static_cast<uint32_t>(head_groups(1, params.group_size, params.head_size)));
  params.num_rows = args.path == 0 ? args.seq_lens.shape[0] : args.query.shape[0];
  params.num_counters = sizes.counters;
  params.table_entries = (args.block_tables.shape[0] - 1) * args.block_tables.strides[0] + args.block_tables.shape[1];
  if (args.split_size > 0 && sizes.slots > 0) {  // one counter a row and group: too many to keep from call to call
    check(cudaMemsetAsync(params.workspace + kCounters, 0, (sizes.counters - kCounters) * 4, static_cast<cudaStream_t>(stream)),
          kOp);
  }
  if (args.variant.kernel != nullptr) {
    launch_compiled(args.variant, params, sizes, stream);
  } else if (args.key_cache.dtype != args.query.dtype) {
    decode::launch_quantized(params, args.key_cache.dtype, sizes, stream);
  } else if (args.query.dtype == DType::bf16) {
    launch_for_type<__nv_bfloat16>(params, sizes, stream);
  } else {
    launch_for_type<__half>(params, sizes, stream);
  }
}

}  // namespace research_engine::cuda
