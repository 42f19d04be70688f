// The arithmetic of sampling, the same bits on the CPU and on a GPU: every multiplication that an addition could follow is an
// explicit fmaf, sums are of integers, and so no order of summation and no compiler changes which token is drawn.
//
// cost     of a token, in units of 2^-24 octaves: floor((x_max - x) / temperature * log2(e) * 2^24), below kCostEnd = 40 octaves
// weight   2^(40 - cost), an integer from 1 to just below 2^40; tokens of 40 octaves and more weigh nothing (2^18 of them, together,
//          less than a four-millionth of the largest token)
// order    of truncation (top-k, top-p): by cost, then by id
// draw     the first token, in the order of ids, at which the running sum of weights exceeds floor(u * total), u of 53 bits from
//          Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) keyed by (seed, position)
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define RESEARCH_ENGINE_BOTH __host__ __device__ __forceinline__
#else
#define RESEARCH_ENGINE_BOTH inline
#endif

namespace research_engine::sampling {

constexpr uint32_t kCostBits = 24;                      // of an octave
constexpr uint32_t kCostEnd = 40u << kCostBits;         // no weight from here on
constexpr uint32_t kNoCost = 0xffffffffu;
constexpr float kCostScale = 1.4426950408889634f * 16777216.0f;  // log2(e) in cost units
constexpr uint64_t kMostWeight = 0xffffff0000;  // of no cost

// Status of a row in place of a token.
constexpr int64_t kNothingLeft = -1, kNotANumber = -2, kInfinite = -3;

// `scale` is kCostScale / temperature, `distance` x_max - x, not negative.
RESEARCH_ENGINE_BOTH uint32_t cost_of(float distance, float scale) {
  if (!(distance > 0.0f)) return 0;  // 0 * inf at a vanishing temperature
  const float cost = distance * scale;
  return cost < static_cast<float>(kCostEnd) ? static_cast<uint32_t>(cost) : kNoCost;
}

// 2^-f for f in [0, 1), to 2.1e-7; from a half to just below 1.
RESEARCH_ENGINE_BOTH float mantissa_polynomial(float f) {
  float p = fmaf(-0.000944903411436826f, f, 0.00920579768717289f);
  p = fmaf(p, f, -0.055297356098890305f);
  p = fmaf(p, f, 0.2401801496744156f);
  p = fmaf(p, f, -0.69314366579055786f);
  return fmaf(p, f, 0.99999994039535522f);
}

// 2^(24 - fraction of the cost's octave), from 2^23 to 2^24 - 1. It never rises with the cost, which was tried for all 2^24
// fractions and needs the last bit left out.
RESEARCH_ENGINE_BOTH uint32_t mantissa_of(uint32_t cost) {
  const float f = static_cast<float>(cost & 0xfffffeu) * 5.9604644775390625e-08f;  // 2^-24, exact
  return static_cast<uint32_t>(mantissa_polynomial(f) * 16777216.0f);              // exact: it has 24 bits
}

RESEARCH_ENGINE_BOTH uint64_t weight_of(uint32_t cost) {  // cost < kCostEnd
  return (static_cast<uint64_t>(mantissa_of(cost)) << 16) >> (cost >> kCostBits);
}

// The highest product word: floor(a b / 2^64).
RESEARCH_ENGINE_BOTH uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// A share in [0, 1] of `total`, rounded down; the share itself is rounded down to 32 bits.
RESEARCH_ENGINE_BOTH uint64_t share_of(float share, uint64_t total) {
  if (!(share < 1.0f)) return total;
  if (!(share > 0.0f)) return 0;
  return multiply_high(static_cast<uint64_t>(share * 4294967296.0f) << 32, total);
}

// The largest cost that weighs at least `weight`, which is from 1 to kMostWeight: weights fall with the cost.
RESEARCH_ENGINE_BOTH uint32_t cost_bound(uint64_t weight) {
  uint32_t low = 0, high = kCostEnd;  // low weighs enough, high does not
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (weight_of(middle) >= weight) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The least weight that min_p leaves: min_p times the largest.
RESEARCH_ENGINE_BOTH uint64_t least_weight(float min_p) {
  if (!(min_p > 0.0f)) return 1;
  const uint64_t weight = min_p < 1.0f ? static_cast<uint64_t>(min_p * 1099511627776.0f) : kMostWeight;
  return weight < 1 ? 1 : weight < kMostWeight ? weight : kMostWeight;
}

// A seen token's logit: the repetition penalty, then presence and frequency for tokens of the output. Extremes stay finite.
RESEARCH_ENGINE_BOTH float penalize(float x, float repetition, float presence, float frequency, int32_t count) {
  constexpr float kMost = 3.4028234663852886e38f;
  if (repetition != 1.0f) {
    x = x > 0.0f ? x / repetition : x * repetition;
    x = x != x ? 0.0f : x > kMost ? kMost : x < -kMost ? -kMost : x;
  }
  if (count > 0) x -= fmaf(frequency, static_cast<float>(count), presence);
  return x;
}

// 64 random bits of which the first 53 are used: u = (bits >> 11) * 2^-53.
RESEARCH_ENGINE_BOTH uint64_t random_bits(uint64_t seed, uint64_t position) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<uint64_t>(c0) << 32 | c1;
}

// The running sum of weights that the drawn token is the first to exceed.
RESEARCH_ENGINE_BOTH uint64_t draw_target(uint64_t bits, uint64_t total) { return multiply_high(bits >> 11 << 11, total); }

}  // namespace research_engine::sampling
