// The inner loops of paged attention on the CPU: dot products with keys, and small matrix products kept in registers.
#pragma once

#include <algorithm>

#include "cpu/vec.h"

namespace research_engine::cpu {

constexpr int kTileKeys = 64;                          // keys per tile: 16 KiB of float32 at D = 64
constexpr int kTileRows = 6;                           // accumulator rows of a matrix product
constexpr int kTileVecs = kLanes == 16 ? 4 : 2;        // accumulator registers per row: 24 of 32, or 12 of 16
static_assert(kTileKeys % (kLanes * kTileVecs) == 0);

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Asks for rows to be brought into the second-level cache. Blocks lie anywhere in memory, so the hardware's own prefetcher
// starts anew at each.
template <typename T>
inline void prefetch(const T* const* rows, int count, int head_size) {
  constexpr int kLine = 64 / sizeof(T);
  for (int j = 0; j < count; ++j)
    for (int d = 0; d < head_size; d += kLine) __builtin_prefetch(rows[j] + d, 0, 2);
}

// out[g, j] = query[g, :] . keys[j][:] for j < count. query rows are padded with zeros to `query_stride` elements.
// kLanes keys at a time: one register of partial sums each, folded together at the end; the keys stay in the first-level
// cache from one g to the next.
template <typename T>
void dot_keys(const float* query, int64_t query_stride, int groups, const T* const* keys, int count, int head_size,
              float* out, int64_t out_stride) {
  const int whole = head_size / kLanes * kLanes, rest = head_size - whole;
  for (int first = 0; first < count; first += kLanes) {
    const T* rows[kLanes];
    for (int j = 0; j < kLanes; ++j) rows[j] = keys[std::min(first + j, count - 1)];
    for (int g = 0; g < groups; ++g) {
      const float* q = query + g * query_stride;
      Vec sums[kLanes] = {};
      for (int d = 0; d < whole; d += kLanes) {
        const Vec part = load(q + d);
        for (int j = 0; j < kLanes; ++j) sums[j] += part * load(rows[j] + d);
      }
      if (rest) {
        const Vec part = load(q + whole);
        for (int j = 0; j < kLanes; ++j) sums[j] += part * load_first(rows[j] + whole, rest);
      }
      store(out + g * out_stride + first, sum_each(sums));
    }
  }
}

// c[r, :] += sum over k of a[r, k] * b(k)[:], for `rows` rows and kVecs registers of columns, all sums in registers.
template <int kRows, int kVecs, typename RowOfB>
inline void product_tile(const float* a, int64_t a_stride, int depth, const RowOfB& b, float* c, int64_t c_stride) {
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) sums[r][v] = load(c + r * c_stride + v * kLanes);
  for (int k = 0; k < depth; ++k) {
    const auto* row = b(k);
    Vec columns[kVecs];
    for (int v = 0; v < kVecs; ++v) columns[v] = load(row + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = broadcast(a[r * a_stride + k]);
      for (int v = 0; v < kVecs; ++v) sums[r][v] += factor * columns[v];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) store(c + r * c_stride + v * kLanes, sums[r][v]);
}

template <int kVecs, typename RowOfB>
inline void product_rows(int rows, const float* a, int64_t a_stride, int depth, const RowOfB& b, float* c, int64_t c_stride) {
  switch (rows) {
    case 1: return product_tile<1, kVecs>(a, a_stride, depth, b, c, c_stride);
    case 2: return product_tile<2, kVecs>(a, a_stride, depth, b, c, c_stride);
    case 3: return product_tile<3, kVecs>(a, a_stride, depth, b, c, c_stride);
    case 4: return product_tile<4, kVecs>(a, a_stride, depth, b, c, c_stride);
    case 5: return product_tile<5, kVecs>(a, a_stride, depth, b, c, c_stride);
    default: return product_tile<6, kVecs>(a, a_stride, depth, b, c, c_stride);
  }
}

// C[rows, columns] += A[rows, depth] B[depth, columns]; columns is a multiple of kLanes, row k of B is b(k).
template <typename RowOfB>
void add_product(int rows, int columns, int depth, const float* a, int64_t a_stride, const RowOfB& b, float* c, int64_t c_stride) {
  for (int column = 0; column < columns;) {
    const int vecs = std::min((columns - column) / kLanes, kTileVecs);
    const auto shifted = [&](int k) { return b(k) + column; };
    for (int r = 0; r < rows; r += kTileRows) {
      const int n = std::min(kTileRows, rows - r);
      const float* left = a + r * a_stride;
      float* sums = c + r * c_stride + column;
      if (vecs == kTileVecs) product_rows<kTileVecs>(n, left, a_stride, depth, shifted, sums, c_stride);
      else if (kTileVecs > 2 && vecs == 3) product_rows<3>(n, left, a_stride, depth, shifted, sums, c_stride);
      else if (kTileVecs > 2 && vecs == 2) product_rows<2>(n, left, a_stride, depth, shifted, sums, c_stride);
      else product_rows<1>(n, left, a_stride, depth, shifted, sums, c_stride);
    }
    column += vecs * kLanes;
  }
}

}  // namespace research_engine::cpu
