// Products with a weight of 4 or 8 bits an element, and the weight back as floats.
//
// out[t, n] = sum over k of x[t, k] w[n, k],  w[n, k] = scales[k / g, n] (q[n, k] - zeros[k / g, n]) + offsets[k / g, n], where q is
// an unsigned integer of 4 or 8 bits or an e4m3 number (then zeros is 0).
//
// Layout: q as int32 [N / 32, K / E, 32], E = 8 elements of 4 bits or 4 of 8 bits a word, the lowest bits first: the words of 32
// columns n lie side by side, so that a register of words is a register of columns, and a thread reads its share from front
// to back. scales and offsets float32 [K / g, N], zeros uint8; N is padded to a multiple of 32. x and out [T, .], rows strided.
// Algorithm: a thread takes 32 columns. Element i of a register of words becomes a register of floats (an integer: its bits under
// the exponent of 2^23, less 2^23 + zero, exact), which is multiplied with up to 8 rows of x, sums in registers. At the end of
// a group the sums are scaled and added to the totals. K is never split: a row does not depend on its batch.
// Roofline: memory; K N / 2 (or K N) bytes of weights and (4 + 1) N K / g of scales and zeros, against 2 T K N operations. Beside a
// multiplication a row and element it takes three instructions an element to make it a float (float8: eight).
// Reached, one core of an EPYC (Zen 4), N = 4096, K = 14336, T = 1: see docs/performance.md.
#include <algorithm>
#include <vector>

#include "common/ops.h"
#include "cpu/dispatch.h"

namespace research_engine::cpu {
namespace {

constexpr int kColumns = 32;              // of a tile
constexpr int kVecs = 2;                  // registers of columns that are worked on at once
constexpr int kRows = kLanes == 16 ? 8 : 4;

template <QuantizedKind kind>
constexpr int kElements = kind == QuantizedKind::int4 ? 8 : 4;  // of a word

// What an element of a word stands for, and what is subtracted from it.
template <QuantizedKind kind>
inline Vec decode(VecI words, int element, Vec zero) {
  constexpr float kTwo23 = 8388608.0f;
  if constexpr (kind == QuantizedKind::float8) {
    const VecI bits = words >> (8 * element), magnitude = bits & 0x7f;
    const VecI large = (magnitude << 20) + (120 << 23);
    const VecI small = reinterpret_cast<VecI>(__builtin_convertvector(magnitude, Vec) * 0x1p-9f);
    return reinterpret_cast<Vec>((magnitude < 8 ? small : large) | (bits & 0x80) << 24);
  } else {
    constexpr int kBits = kind == QuantizedKind::int4 ? 4 : 8;
    const VecI bits = (words >> (kBits * element) & ((1 << kBits) - 1)) | 0x4b000000;  // 2^23 + q
    return reinterpret_cast<Vec>(bits) - (zero + kTwo23);
  }
}

inline VecI load_words(const int32_t* p) {
  VecI words;
  std::memcpy(&words, p, sizeof words);
  return words;
}

template <QuantizedKind kind>
struct Product {
  const float* x;  // [T, K], contiguous
  int64_t tokens, depth, group_size, padded_columns;
  const int32_t* words;
  const float *scales, *offsets;
  const uint8_t* zeros;
  const float* group_sums;  // [T, K / g] of x, with offsets alone
  const float* bias = nullptr;  // padded to whole tiles, or none

  Vec zero(int64_t group, int64_t column) const {
    if constexpr (kind == QuantizedKind::float8) return Vec{};
    if (zeros == nullptr) return broadcast(kind == QuantizedKind::int4 ? 8.0f : 128.0f);
    using Byte = uint8_t __attribute__((vector_size(kLanes)));
    Byte bytes;
    std::memcpy(&bytes, zeros + group * padded_columns + column, sizeof bytes);
    return __builtin_convertvector(bytes, Vec);
  }

  // totals[r][v] of rows [row, row + kCount) and columns [column, column + kVecs * kLanes).
  template <int kCount>
  void rows(int64_t row, int64_t column, Vec (&totals)[kRows][kVecs]) const {
    constexpr int kPerWord = kElements<kind>;
    const float* left = x + row * depth;
    const int32_t* source = words + column / kColumns * (depth / kPerWord) * kColumns + column % kColumns;
    const int64_t groups = depth / group_size;
    for (int r = 0; r < kCount; ++r)
      for (int v = 0; v < kVecs; ++v) totals[r][v] = Vec{};
    for (int64_t group = 0, k = 0; group < groups; ++group) {
      Vec sums[kCount][kVecs] = {}, zeros_here[kVecs];
      for (int v = 0; v < kVecs; ++v) zeros_here[v] = zero(group, column + v * kLanes);
      for (const int64_t end = k + group_size; k < end; k += kPerWord, source += kColumns) {
        VecI here[kVecs];
        for (int v = 0; v < kVecs; ++v) here[v] = load_words(source + v * kLanes);
#pragma GCC unroll 8
        for (int e = 0; e < kPerWord; ++e) {
          Vec weight[kVecs];
          for (int v = 0; v < kVecs; ++v) weight[v] = decode<kind>(here[v], e, zeros_here[v]);
          for (int r = 0; r < kCount; ++r) {
            const Vec factor = broadcast(left[r * depth + k + e]);
            for (int v = 0; v < kVecs; ++v) sums[r][v] += factor * weight[v];
          }
        }
      }
      for (int v = 0; v < kVecs; ++v) {
        const int64_t at = group * padded_columns + column + v * kLanes;
        const Vec scale = load(scales + at);
        for (int r = 0; r < kCount; ++r) {
          totals[r][v] += sums[r][v] * scale;
          if (offsets != nullptr) totals[r][v] += load(offsets + at) * group_sums[(row + r) * groups + group];
        }
      }
    }
  }

  void some_rows(int count, int64_t row, int64_t column, Vec (&totals)[kRows][kVecs]) const {
    switch (count) {
      case 1: return rows<1>(row, column, totals);
      case 2: return rows<2>(row, column, totals);
      case 3: return rows<3>(row, column, totals);
      case 4: return rows<4>(row, column, totals);
    }
    if constexpr (kRows > 4) {
      switch (count) {
        case 5: return rows<5>(row, column, totals);
        case 6: return rows<6>(row, column, totals);
        case 7: return rows<7>(row, column, totals);
        case 8: return rows<8>(row, column, totals);
      }
    }
  }

  void run(const TensorView& out) const {
    const int64_t columns = out.shape[1], tiles = (columns + kColumns - 1) / kColumns;
#pragma omp parallel for schedule(static) if (tokens * depth * columns > 4 * kParallelElements)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      for (int64_t row = 0; row < tokens; row += kRows) {
        const int count = static_cast<int>(std::min<int64_t>(kRows, tokens - row));
        for (int part = 0; part < kColumns; part += kVecs * kLanes) {
          const int64_t column = tile * kColumns + part;
          Vec totals[kRows][kVecs];
          some_rows(count, row, column, totals);
          for (int r = 0; bias != nullptr && r < count; ++r)
            for (int v = 0; v < kVecs; ++v) totals[r][v] += load(bias + column + v * kLanes);
          dispatch(out.dtype, [&](auto zero) {
            for (int r = 0; r < count; ++r) {
              auto* target = out.ptr<decltype(zero)>() + (row + r) * out.strides[0] + column;
              for (int v = 0; v < kVecs; ++v) {
                const int64_t left_over = std::clamp<int64_t>(columns - column - v * kLanes, 0, kLanes);
                if (left_over == kLanes) store(target + v * kLanes, totals[r][v]);
                else if (left_over > 0) store_first(target + v * kLanes, totals[r][v], static_cast<int>(left_over));
              }
            }
          });
        }
      }
    }
  }

  // out[n, k] of the whole weight.
  void write(const TensorView& out) const {
    constexpr int kPerWord = kElements<kind>;
    const int64_t columns = out.shape[0], tiles = (columns + kColumns - 1) / kColumns;
#pragma omp parallel for schedule(static) if (depth * columns > kParallelElements)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int32_t* source = words + tile * (depth / kPerWord) * kColumns;
      const int count = static_cast<int>(std::min<int64_t>(kColumns, columns - tile * kColumns));
      for (int64_t k = 0; k < depth; k += kPerWord, source += kColumns) {
        float block[kPerWord][kColumns];
        const int64_t group = k / group_size;
        for (int c = 0; c < kColumns; c += kLanes) {
          const int64_t at = group * padded_columns + tile * kColumns + c;
          const Vec offset = offsets == nullptr ? Vec{} : load(offsets + at);
          for (int e = 0; e < kPerWord; ++e)
            store(block[e] + c, decode<kind>(load_words(source + c), e, zero(group, tile * kColumns + c)) * load(scales + at) + offset);
        }
        dispatch(out.dtype, [&](auto zero) {
          for (int c = 0; c < count; ++c) {
            auto* target = out.ptr<decltype(zero)>() + (tile * kColumns + c) * out.strides[0] + k;
            for (int e = 0; e < kPerWord; ++e) from_float(block[e][c], target + e);
          }
        });
      }
    }
  }
};

// Calls f with the Product of the weight's kind, all of it but x.
template <typename F>
void with_product(const QuantizedWeight& w, int64_t depth, F&& f) {
  const auto make = [&](auto product) {
    product.depth = depth;
    product.group_size = w.group_size;
    product.padded_columns = w.scales.shape[1];
    product.words = w.weight.ptr<int32_t>();
    product.scales = w.scales.ptr<float>();
    product.offsets = w.offsets.ptr<float>();
    product.zeros = w.zeros.ptr<uint8_t>();
    f(product);
  };
  switch (w.kind) {
    case QuantizedKind::int4: return make(Product<QuantizedKind::int4>{});
    case QuantizedKind::int8: return make(Product<QuantizedKind::int8>{});
    case QuantizedKind::float8: return make(Product<QuantizedKind::float8>{});
  }
}

}  // namespace

void quantized_matmul(const QuantizedMatmul& args) {
  const int64_t tokens = args.x.shape[0], depth = args.x.shape[1], groups = depth / args.weight.group_size;
  if (tokens == 0) return;
  static thread_local std::vector<float> scratch;  // rows of x in float32, then their sums
  scratch.resize(tokens * (depth + groups));
  float *x = scratch.data(), *sums = x + tokens * depth;
  dispatch(args.x.dtype, [&](auto zero) {
    for (int64_t t = 0; t < tokens; ++t) {
      const auto* row = args.x.ptr<decltype(zero)>() + t * args.x.strides[0];
      for (int64_t k = 0; k < depth; ++k) x[t * depth + k] = to_float(row[k]);
    }
  });
  if (args.weight.offsets) {
    for (int64_t i = 0; i < tokens * groups; ++i) {
      const float* first = x + i * args.weight.group_size;
      float total = 0;
      for (int64_t k = 0; k < args.weight.group_size; ++k) total += first[k];
      sums[i] = total;
    }
  }
  static thread_local std::vector<float> bias;  // in float32, padded as the weight
  bias.assign(args.bias ? args.weight.scales.shape[1] : 0, 0.0f);
  if (args.bias) {
    dispatch(args.bias.dtype, [&](auto zero) {
      for (int64_t n = 0; n < args.out.shape[1]; ++n) bias[n] = to_float(args.bias.ptr<decltype(zero)>()[n]);
    });
  }
  const float* added = args.bias ? bias.data() : nullptr;  // thread_local names are each thread's own
  with_product(args.weight, depth, [&](auto product) {
    product.x = x;
    product.bias = added;
    product.tokens = tokens;
    product.group_sums = sums;
    product.run(args.out);
  });
}

void dequantize_weight(const QuantizedWeight& weight, TensorView out) {
  with_product(weight, out.shape[1], [&](auto product) { product.write(out); });
}

}  // namespace research_engine::cpu
