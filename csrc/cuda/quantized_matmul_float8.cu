// The product of quantized_matmul.cuh with float8 weights (e4m3); a file of its own, for it compiles long.
#include "quantized_matmul.cuh"

namespace research_engine::cuda {
template void launch_quantized_matmul<QuantizedKind::float8>(MatmulParams, DType, bool, Stream);
}  // namespace research_engine::cuda
