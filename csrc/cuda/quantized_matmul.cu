// quantized_matmul: arguments become launches of the kernel in quantized_matmul.cuh; dequantize_weight: the weight as floats.
//
// dequantize_weight
// Layout     the units of quantized_matmul.cuh in, [N, K] out, rows strided, aligned to 16 bytes.
// Algorithm  a block takes a unit, a thread the 16 bytes of four lanes of it, asked for together: of each of two columns 8
//            neighbours in depth (4 bits: twice), a vector each. Where a unit lies is the same for all threads of a block.
// Roofline   memory: K N / 2 or K N bytes read, K N e written.
// Versions   1 a thread 16 bytes, its place by 64-bit division: with the product that follows, 108 us for 4096 x 14336 to bf16, of
//            which the bytes take 35 (one H200). 2 as above: the first token of 512 of Qwen2.5-7B's shape from 25.8 to 23.9 ms.
#include "quantized_matmul.cuh"

namespace research_engine::cuda {
namespace {

constexpr const char* kMatmul = "quantized_matmul";
constexpr const char* kDequantize = "dequantize_weight";
constexpr int kThreads = 256;

int token_tiles(int64_t tokens) { return static_cast<int>(ceil_div(tokens, tokens <= 8 ? 8 : 16)); }

// How the line of units is dealt out: the runs of a token tile.
int64_t count_runs(int64_t total_units, int device) {
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kMatmul);
  return std::min<int64_t>(total_units, kBlocksPerMultiprocessor * multiprocessors);
}

// Rows of x that one launch takes: each tile of them has a counter for every tile of columns.
int64_t rows_at_once(int64_t padded_columns) {
  const int64_t column_tiles = padded_columns / kTileColumns;
  if (column_tiles > kMatmulCounters) {
    throw std::invalid_argument("quantized_matmul: a weight has at most " + std::to_string(kMatmulCounters * kTileColumns) + " columns");
  }
  return kMatmulCounters / column_tiles * 16;
}

template <QuantizedKind kind> __device__ inline float element_value(const uint32_t (&words)[4], int part, int half, int i) {
  const int step = i / 4, e = i % 4;
  if constexpr (kind == QuantizedKind::int4) {
    return (words[2 * (part % 2) + step] >> (16 * (e % 2) + 8 * (e / 2) + 4 * half)) & 15;
  } else {
    const uint32_t code = (words[2 * step + half] >> (8 * e)) & 255;
    if constexpr (kind == QuantizedKind::int8) return code;
    const uint32_t magnitude = code & 0x7f;
    const float value = magnitude < 8 ? magnitude * 0.001953125f : __uint_as_float((magnitude << 20) + (120u << 23));
    return code & 0x80 ? -value : value;
  }
}

template <QuantizedKind kind, typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const uint4* weight, const char* scales, const char* offsets, const uint8_t* zeros, T* out, int64_t out_stride,
                      int columns, int depth, int padded_columns, int units, int group_size, DType scale_dtype) {
  constexpr int kDepth = unit_depth(kind), kParts = kDepth / 128;  // of a vector
  constexpr int kVectors = kUnitVectors / kThreads;
  const int tile = blockIdx.x / units, begin = blockIdx.x % units * kDepth;
  uint4 vectors[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) vectors[v] = weight[int64_t{blockIdx.x} * kUnitVectors + v * kThreads + threadIdx.x];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t words[4] = {vectors[v].x, vectors[v].y, vectors[v].z, vectors[v].w};
    const int in_unit = v * kThreads + threadIdx.x, warp = in_unit / 128, m = in_unit / 64 % 2, lane = in_unit % 32;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int part = in_unit / 32 % 2 * kParts + i;
      const int k = begin + warp / 4 * (kDepth / 2) + 32 * part + 8 * (lane % 4);
      if (k >= depth) continue;
      const int64_t group = static_cast<int64_t>(k / group_size) * padded_columns;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = tile * kTileColumns + warp % 4 * 32 + m * 16 + half * 8 + lane / 4;
        if (n >= columns) continue;
        const int64_t at = group + n;
        const float scale = load_scale(scales, at, scale_dtype), offset = offsets == nullptr ? 0 : load_scale(offsets, at, scale_dtype);
        float zero = 0;
        if constexpr (kind != QuantizedKind::float8) zero = zeros != nullptr ? zeros[at] : kind == QuantizedKind::int4 ? 8 : 128;
#pragma unroll
        for (int w = 0; w < 8 / kWidth<T>; ++w) {
          float values[kWidth<T>];
#pragma unroll
          for (int e = 0; e < kWidth<T>; ++e) {
            values[e] = (element_value<kind>(words, part, half, w * kWidth<T> + e) - zero) * scale + offset;
          }
          *reinterpret_cast<uint4*>(out + n * out_stride + k + w * kWidth<T>) = pack<T>(values);
        }
      }
    }
  }
}

template <QuantizedKind kind> void launch_dequantize(const QuantizedWeight& w, const TensorView& out, Stream stream) {
  const int units = static_cast<int>(ceil_div(out.shape[1], unit_depth(kind)));
  const int64_t blocks = w.scales.shape[1] / kTileColumns * units;
  dispatch_float(out.dtype, kDequantize, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(kDequantize, dequantize_kernel<kind, T>, blocks, kThreads, 0, stream, w.weight.ptr<const uint4>(),
           w.scales.ptr<const char>(), w.offsets.ptr<const char>(), w.zeros.ptr<const uint8_t>(), out.ptr<T>(), out.strides[0],
           static_cast<int>(out.shape[0]), static_cast<int>(out.shape[1]), static_cast<int>(w.scales.shape[1]), units,
           static_cast<int>(w.group_size), w.scales.dtype);
  });
}

}  // namespace

int64_t quantized_matmul_workspace(QuantizedKind kind, int64_t tokens, int64_t columns, int64_t depth, int device) {
  tokens = std::min(tokens, rows_at_once(columns));
  const int64_t total = columns / kTileColumns * ceil_div(depth, unit_depth(kind));
  const int64_t sums = kTileColumns * (tokens <= 8 ? 8 : 16);
  return kMatmulCounters + token_tiles(tokens) * count_runs(total, device) * 2 * sums;
}

void quantized_matmul(const QuantizedMatmul& args, Stream stream) {
  const QuantizedWeight& w = args.weight;
  if (args.x.shape[0] == 0) return;
  if (!vector_aligned(args.x, args.x.shape[0] > 1 ? args.x.strides[0] : 8)) {
    throw std::invalid_argument("quantized_matmul: rows of x have to be aligned to 16 bytes");
  }
  const DeviceGuard guard(args.x.device, kMatmul);
  MatmulParams p{};
  p.scales = w.scales.ptr<const char>();
  p.offsets = w.offsets.ptr<const char>();
  p.bias = args.bias.ptr<const char>();
  p.weight = w.weight.ptr<const uint4>();
  p.zeros = w.zeros.ptr<const uint8_t>();
  p.x_stride = args.x.strides[0];
  p.out_stride = args.out.strides[0];
  p.columns = static_cast<int>(args.out.shape[1]);
  p.depth = static_cast<int>(args.x.shape[1]);
  p.padded_columns = static_cast<int>(w.scales.shape[1]);
  p.group_size = static_cast<int>(w.group_size);
  p.groups = p.depth / p.group_size;
  const int unit = unit_depth(w.kind);
  const bool one_group = p.groups == 1 || p.group_size % unit == 0;  // of a unit
  p.aligned_groups = one_group || unit % p.group_size == 0;
  p.group_rows = one_group ? 1 : p.aligned_groups ? unit / p.group_size : (unit - 32) / p.group_size + 2;
  const int warp_depth = unit / 2;  // what a warp takes of a unit begins at a multiple of it
  p.same_group = one_group || p.group_size % warp_depth == 0 ? warp_depth / 32 - 1 : p.group_size % 64 == 0 ? 1 : 0;
  p.group_inverse = static_cast<uint32_t>(ceil_div(1 << 20, p.group_size / 32));
  if (!p.aligned_groups && p.group_size >= 32000) {
    throw std::invalid_argument("quantized_matmul: groups of " + std::to_string(p.group_size) + " have to be multiples of 256");
  }
  p.units = static_cast<int>(ceil_div(p.depth, unit));
  const int64_t total = static_cast<int64_t>(p.padded_columns / kTileColumns) * p.units;
  if (total > INT32_MAX) throw std::invalid_argument("quantized_matmul: the weight has more than 2^31 units of 8 KiB");
  p.runs = static_cast<int>(count_runs(total, args.x.device));
  p.run_units = static_cast<int>(total / p.runs);
  p.longer_runs = static_cast<int>(total % p.runs);
  p.scale_dtype = w.scales.dtype;
  const int64_t tokens = args.x.shape[0], step = rows_at_once(p.padded_columns);
  const int64_t needed = quantized_matmul_workspace(w.kind, tokens, p.padded_columns, p.depth, args.x.device);
  if (!args.workspace || args.workspace.numel() < needed) {
    throw std::invalid_argument("quantized_matmul: a workspace of " + std::to_string(needed) + " float32 is needed, got " +
                                std::to_string(args.workspace ? args.workspace.numel() : 0));
  }
  p.counters = args.workspace.ptr<int>();
  p.partials = args.workspace.ptr<float>() + kMatmulCounters;
  for (int64_t row = 0; row < tokens; row += step) {
    p.x = args.x.ptr<const char>() + 2 * row * p.x_stride;
    p.out = args.out.ptr<char>() + 2 * row * p.out_stride;
    p.tokens = static_cast<int>(std::min(step, tokens - row));
    switch (w.kind) {
      case QuantizedKind::int4: launch_quantized_matmul<QuantizedKind::int4>(p, args.x.dtype, args.overlap, stream); break;
      case QuantizedKind::int8: launch_quantized_matmul<QuantizedKind::int8>(p, args.x.dtype, args.overlap, stream); break;
      case QuantizedKind::float8: launch_quantized_matmul<QuantizedKind::float8>(p, args.x.dtype, args.overlap, stream); break;
    }
  }
}

void dequantize_weight(const QuantizedWeight& w, TensorView out, Stream stream) {
  if (out.numel() == 0) return;
  if (!vector_aligned(out, out.strides[0])) {
    throw std::invalid_argument("dequantize_weight: rows of out have to be aligned to 16 bytes");
  }
  const DeviceGuard guard(out.device, kDequantize);
  switch (w.kind) {
    case QuantizedKind::int4: launch_dequantize<QuantizedKind::int4>(w, out, stream); break;
    case QuantizedKind::int8: launch_dequantize<QuantizedKind::int8>(w, out, stream); break;
    case QuantizedKind::float8: launch_dequantize<QuantizedKind::float8>(w, out, stream); break;
  }
}

}  // namespace research_engine::cuda
