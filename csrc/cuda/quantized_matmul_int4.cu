// The product of quantized_matmul.cuh with weights of 4 bits, integers; a file of its own, for it compiles long.
#include "quantized_matmul.cuh"

namespace research_engine::cuda {
template void launch_quantized_matmul<QuantizedKind::int4>(MatmulParams, DType, bool, Stream);
}  // namespace research_engine::cuda
