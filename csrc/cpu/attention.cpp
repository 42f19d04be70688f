// Paged attention over a mixed batch: decode rows and prefill rows, each with its own kernel, in one parallel region.
//
// out[t, h] = softmax(bias(scale * query[t, h] . keys)) . values over the keys that row t sees. Row i of a request with
// q_len queries and seq_len keys stands at position p = seq_len - q_len + i and sees keys j <= p (causal; else all),
// j > p - window. Scores: softcap c * tanh(s / c), then + slope * (j - p), then the mask. A sink adds exp(sink) to the
// denominator alone. lse = log(denominator), sink included. No key and no sink: out 0, lse -infinity.
//
// Layout: caches [N, Hkv, B, D] with contiguous (block, head) tiles, reached through block_tables; every other tensor's
// last dimension is contiguous. Caches of e4m3 and int8 stand for their elements times the head's scale: the kernels work
// on the elements, the key's scale is a factor of the query, the value's of the result.
// Algorithm (Dao et al., 2205.14135; Rabe and Staats, 2112.05682; the cache of Kwon et al., 2309.06180):
//   decode   one item is (token, KV head, split of its keys): a tile of 64 keys is read once, multiplied with all G query
//            heads by dot products, and its values are added up in registers; splits merge afterwards, in order.
//   prefill  one item is (request, KV head, some 96 rows of queries x heads): keys are transposed into a packed tile, so
//            that both products are register-blocked matrix products; softmax is online.
// What an item computes depends on its own request alone; splits are of equal size where split_size is given.
// Roofline: decode reads 2 * seq_len * D elements per (request, KV head): memory. Prefill takes 4 D operations per (query,
// head, key): the FMA units.
// Reached, one core of an EPYC 9004, float32, 9/3 heads of 64, blocks of 16: decode of 16 requests over 221 MB of scattered
// blocks 10 GB/s (plain reads of such blocks: 13), from cache 29 GB/s; prefill 41 to 50 GFLOP/s (MKL's product there: 61).
#include <cmath>
#include <limits>
#include <vector>

#include "common/ops.h"
#include "cpu/attention_tiles.h"
#include "cpu/dispatch.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace research_engine::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kPrefillRows = 96;
constexpr int64_t kShortestSplit = 128;
enum Path { kAuto = 0, kDecode = 2, kPrefill = 3 };  // 1 is the simple CUDA kernel

struct Item {
  int64_t request, head;        // head: of the KV heads
  int64_t first_row, num_rows;  // query rows of the request; one for decode
  int64_t first_key, last_key;  // decode: this split's share of the keys
  int64_t partial;              // decode: its place among the partial results, or -1 for the only split
};

// A row whose splits have to be merged: partial results [first, first + count).
struct Merge {
  int64_t token, head, first, count;
};

class Attention {
 public:
  explicit Attention(const PagedAttention& args)
      : a_(args),
        heads_(args.key_cache.shape[1]),
        groups_(static_cast<int>(args.query.shape[1] / heads_)),
        head_size_(static_cast<int>(args.query.shape[2])),
        padded_(static_cast<int>(round_up(head_size_, kLanes))),
        block_size_(args.key_cache.shape[2]) {}

  void run() {
    plan();
    partials_.resize(num_partials_ * partial_stride());
    const int64_t count = static_cast<int64_t>(items_.size());
#pragma omp parallel if (work_ > kParallelElements)
    {
      static thread_local std::vector<float> scratch;
      if (static_cast<int64_t>(scratch.size()) < scratch_size()) scratch.resize(scratch_size());
      float* aligned = scratch.data() + (-(reinterpret_cast<uintptr_t>(scratch.data()) / 4) & 15);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < count; ++i) {
        dispatch_cache(a_.key_cache.dtype, [&](auto zero) {
          using T = decltype(zero);
          if (items_[i].first_key >= 0) decode<T>(items_[i], aligned);
          else prefill<T>(items_[i], aligned);
        });
      }
#pragma omp for schedule(static)
      for (int64_t m = 0; m < static_cast<int64_t>(merges_.size()); ++m) merge(merges_[m]);
    }
  }

 private:
  int64_t query_start(int64_t r) const { return a_.query_start_loc.ptr<int32_t>()[r * a_.query_start_loc.strides[0]]; }
  int64_t seq_len(int64_t r) const { return a_.seq_lens.ptr<int32_t>()[r * a_.seq_lens.strides[0]]; }

  // The keys [first, last) that a row at `position` sees.
  int64_t first_visible(int64_t position) const {
    return a_.sliding_window > 0 ? std::max<int64_t>(0, position - a_.sliding_window + 1) : 0;
  }
  int64_t last_visible(int64_t position, int64_t length) const {
    return a_.causal ? std::clamp<int64_t>(position + 1, 0, length) : length;
  }

  int64_t partial_stride() const { return groups_ * (padded_ + 2); }
  int64_t scratch_size() const {
    const int64_t rows = std::max(kPrefillRows, groups_);
    return 16 + rows * (2 * padded_ + kTileKeys + 2) + kTileKeys * 2 * static_cast<int64_t>(padded_);
  }

  void plan();
  template <typename T> int rows_of_keys(const TensorView& cache, const Item& item, int64_t first, int64_t last, const T** rows) const;
  void bias(float* scores, int count, int64_t first_key, int64_t position, int64_t query_head) const;
  void load_query(const Item& item, int64_t row, int64_t group, float* out) const;
  template <typename T> void decode(const Item& item, float* scratch) const;
  template <typename T> void prefill(const Item& item, float* scratch) const;
  void merge(const Merge& m) const;
  void finish(int64_t token, int64_t query_head, const float* sums, float maximum, float total) const;

  const PagedAttention& a_;
  const int64_t heads_;
  const int groups_, head_size_, padded_;
  const int64_t block_size_;
  int64_t work_ = 0, num_partials_ = 0;
  std::vector<Item> items_;
  std::vector<Merge> merges_;
  mutable std::vector<float> partials_;
};

// Lists the items, prefill (the long ones) first, and how decode rows are split.
void Attention::plan() {
  const int64_t requests = a_.seq_lens.shape[0];
  const auto is_decode = [&](int64_t q_len) { return a_.path == kDecode || (a_.path == kAuto && q_len <= 2); };
  int64_t decode_keys = 0;
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t start = query_start(r), q_len = query_start(r + 1) - start, length = seq_len(r);
    work_ += q_len * length * groups_ * heads_ * head_size_;
    if (is_decode(q_len)) {
      for (int64_t i = 0; i < q_len; ++i) {
        const int64_t position = length - q_len + i;
        decode_keys += std::max<int64_t>(0, last_visible(position, length) - first_visible(position));
      }
      continue;
    }
    const int64_t tile = std::max(1, kPrefillRows / groups_);
    // The last rows see the most keys; starting with them evens out the threads' ends.
    for (int64_t row = (q_len - 1) / tile * tile; row >= 0; row -= tile)
      for (int64_t h = 0; h < heads_; ++h) items_.push_back({r, h, row, std::min(tile, q_len - row), -1, -1, -1});
  }
  int64_t split = a_.split_size;
  if (split <= 0) {  // some four items a thread
#ifdef _OPENMP
    const int64_t threads = omp_get_max_threads();
#else
    const int64_t threads = 1;
#endif
    split = threads == 1 ? std::numeric_limits<int64_t>::max() / 2
                         : std::max(kShortestSplit, round_up(decode_keys * heads_ / (4 * threads), kTileKeys));
  }
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t start = query_start(r), q_len = query_start(r + 1) - start, length = seq_len(r);
    if (!is_decode(q_len)) continue;
    for (int64_t i = 0; i < q_len; ++i) {
      const int64_t position = length - q_len + i;
      const int64_t first = first_visible(position), last = std::max(first, last_visible(position, length));
      const int64_t splits = std::max<int64_t>(1, (last - first + split - 1) / split);
      for (int64_t h = 0; h < heads_; ++h) {
        if (splits > 1) merges_.push_back({start + i, h, num_partials_, splits});
        for (int64_t s = 0; s < splits; ++s)
          items_.push_back({r, h, i, 1, first + s * split, std::min(last, first + (s + 1) * split), splits > 1 ? num_partials_++ : -1});
      }
    }
  }
}

// Pointers to the rows of keys [first, last), at most a tile, through the block table; returns how many.
template <typename T>
int Attention::rows_of_keys(const TensorView& cache, const Item& item, int64_t first, int64_t last, const T** rows) const {
  const int32_t* table = a_.block_tables.ptr<int32_t>() + item.request * a_.block_tables.strides[0];
  int count = 0;
  for (int64_t key = first; key < last;) {
    const int64_t offset = key % block_size_;
    const T* row = cache.ptr<T>() + table[key / block_size_] * cache.strides[0] + item.head * cache.strides[1] + offset * head_size_;
    const int64_t end = std::min(last, key - offset + block_size_);
    for (; key < end; ++key, row += head_size_) rows[count++] = row;
  }
  return count;
}

// Softcap and ALiBi on a row's scores; nothing is masked here.
void Attention::bias(float* scores, int count, int64_t first_key, int64_t position, int64_t query_head) const {
  if (a_.softcap > 0) {
    for (int j = 0; j < count; j += kLanes) {
      const Vec e = exp(load(scores + j) * (2 / a_.softcap));
      store(scores + j, a_.softcap - 2 * a_.softcap / (e + 1.0f));  // c * tanh(s / c)
    }
  }
  if (a_.alibi_slopes) {
    const float slope = a_.alibi_slopes.ptr<float>()[query_head * a_.alibi_slopes.strides[0]];
    for (int j = 0; j < count; ++j) scores[j] += slope * static_cast<float>(first_key + j - position);
  }
}

inline float scale_of_head(const TensorView& scales, int64_t head) {
  return scales ? scales.ptr<float>()[head * scales.strides[0]] : 1.0f;
}

void Attention::load_query(const Item& item, int64_t row, int64_t group, float* out) const {
  const float factor = a_.scale * scale_of_head(a_.key_scale, item.head);
  const int64_t offset = (query_start(item.request) + row) * a_.query.strides[0] + (item.head * groups_ + group) * a_.query.strides[1];
  dispatch(a_.query.dtype, [&](auto zero) {
    const auto* q = a_.query.ptr<decltype(zero)>() + offset;
    for (int d = 0; d < head_size_; ++d) out[d] = to_float(q[d]) * factor;
  });
  for (int d = head_size_; d < padded_; ++d) out[d] = 0;
}

// Online softmax over one tile: scores become exp(score - new maximum), sums shrink to the new maximum. The scores past
// `count`, up to a whole register, become 0.
inline void softmax_tile(float* scores, int count, float* sums, int padded, float& maximum, float& total) {
  for (int j = count; j < round_up(count, kLanes); ++j) scores[j] = -kInfinity;
  Vec highest = broadcast(-kInfinity);
  for (int j = 0; j < count; j += kLanes) highest = max(load(scores + j), highest);
  const float new_maximum = max(maximum, max(highest));
  if (new_maximum == -kInfinity) {  // nothing seen so far: exp(-inf - -inf) would be NaN
    for (int j = 0; j < count; j += kLanes) store(scores + j, Vec{});
    return;
  }
  Vec added = {};
  for (int j = 0; j < count; j += kLanes) {
    const Vec e = exp(load(scores + j) - new_maximum);
    store(scores + j, e);
    added += e;
  }
  if (new_maximum != maximum) {
    const float shrink = std::exp(maximum - new_maximum);
    for (int d = 0; d < padded; d += kLanes) store(sums + d, load(sums + d) * shrink);
    total *= shrink;
    maximum = new_maximum;
  }
  total += sum(added);
}

template <typename T>
void Attention::decode(const Item& item, float* scratch) const {
  float* query = scratch;
  float* sums = query + groups_ * padded_;
  float* scores = sums + groups_ * padded_;
  float* maximum = scores + groups_ * kTileKeys;
  float* total = maximum + groups_;
  for (int g = 0; g < groups_; ++g) load_query(item, item.first_row, g, query + g * padded_);
  std::fill_n(sums, groups_ * padded_, 0.0f);
  std::fill_n(maximum, groups_, -kInfinity);
  std::fill_n(total, groups_, 0.0f);

  const int64_t length = seq_len(item.request);
  const int64_t position = length - (query_start(item.request + 1) - query_start(item.request)) + item.first_row;
  const int whole = head_size_ / kLanes * kLanes;
  // This tile and the next, which is fetched while this one is worked on: keys behind the products with keys, values behind
  // the sums of values. On 221 MB of scattered blocks that took 28 % off the time.
  struct Tile {
    const T *keys[kTileKeys], *values[kTileKeys];
    int count;
  } tiles[2];
  const auto find_rows = [&](int64_t key, Tile& tile) {
    const int64_t end = std::min(key + kTileKeys, item.last_key);
    tile.count = key < end ? rows_of_keys<T>(a_.key_cache, item, key, end, tile.keys) : 0;
    if (key < end) rows_of_keys<T>(a_.value_cache, item, key, end, tile.values);
  };
  int current = 0;
  find_rows(item.first_key, tiles[0]);
  prefetch(tiles[0].values, tiles[0].count, head_size_);
  for (int64_t key = item.first_key; key < item.last_key; key += kTileKeys, current ^= 1) {
    const Tile& tile = tiles[current];
    Tile& next = tiles[current ^ 1];
    const int count = tile.count;
    find_rows(key + kTileKeys, next);
    prefetch(next.keys, next.count, head_size_);
    dot_keys<T>(query, padded_, groups_, tile.keys, count, head_size_, scores, kTileKeys);
    for (int g = 0; g < groups_; ++g) {
      bias(scores + g * kTileKeys, count, key, position, item.head * groups_ + g);
      softmax_tile(scores + g * kTileKeys, count, sums + g * padded_, padded_, maximum[g], total[g]);
    }
    prefetch(next.values, next.count, head_size_);
    add_product(groups_, whole, count, scores, kTileKeys, [&](int k) { return tile.values[k]; }, sums, padded_);
    if (whole < head_size_) {
      for (int k = 0; k < count; ++k) {
        const Vec tail = load_first(tile.values[k] + whole, head_size_ - whole);
        for (int g = 0; g < groups_; ++g) {
          float* target = sums + g * padded_ + whole;
          store(target, load(target) + tail * scores[g * kTileKeys + k]);
        }
      }
    }
  }
  for (int g = 0; g < groups_; ++g) {
    if (item.partial < 0) {
      finish(query_start(item.request) + item.first_row, item.head * groups_ + g, sums + g * padded_, maximum[g], total[g]);
    } else {
      float* partial = partials_.data() + item.partial * partial_stride() + g * (padded_ + 2);
      std::copy_n(sums + g * padded_, padded_, partial);
      partial[padded_] = maximum[g];
      partial[padded_ + 1] = total[g];
    }
  }
}

void Attention::merge(const Merge& m) const {
  for (int g = 0; g < groups_; ++g) {
    float* first = partials_.data() + m.first * partial_stride() + g * (padded_ + 2);
    float maximum = -kInfinity, total = 0;
    for (int64_t s = 0; s < m.count; ++s) maximum = max(maximum, first[s * partial_stride() + padded_]);
    if (maximum != -kInfinity) {
      for (int64_t s = 0; s < m.count; ++s) {
        float* partial = first + s * partial_stride();
        const float weight = std::exp(partial[padded_] - maximum);
        total += weight * partial[padded_ + 1];
        for (int d = 0; d < padded_; d += kLanes)
          store(first + d, s == 0 ? load(partial + d) * weight : load(first + d) + load(partial + d) * weight);
      }
    }
    finish(m.token, m.head * groups_ + g, first, maximum, total);
  }
}

template <typename T>
void Attention::prefill(const Item& item, float* scratch) const {
  const int rows = static_cast<int>(item.num_rows) * groups_;  // token-major: row = token * G + group
  float* query = scratch;
  float* sums = query + rows * padded_;
  float* scores = sums + rows * padded_;
  float* keys = scores + rows * kTileKeys;          // [D, 64]
  float* values = keys + padded_ * kTileKeys;       // [64, D padded]
  float* maximum = values + padded_ * kTileKeys;
  float* total = maximum + rows;
  for (int i = 0; i < rows; ++i) load_query(item, item.first_row + i / groups_, i % groups_, query + i * padded_);
  std::fill_n(sums, rows * padded_, 0.0f);
  std::fill_n(maximum, rows, -kInfinity);
  std::fill_n(total, rows, 0.0f);

  const int64_t length = seq_len(item.request);
  const int64_t first_position = length - (query_start(item.request + 1) - query_start(item.request)) + item.first_row;
  const int64_t last_position = first_position + item.num_rows - 1;
  const int64_t end = last_visible(last_position, length);
  const T* pointers[kTileKeys];
  for (int64_t key = first_visible(first_position); key < end; key += kTileKeys) {
    const int count = rows_of_keys<T>(a_.key_cache, item, key, std::min(key + kTileKeys, end), pointers);
    for (int j = 0; j < count; ++j)
      for (int d = 0; d < head_size_; ++d) keys[d * kTileKeys + j] = to_float(pointers[j][d]);
    for (int d = 0; d < head_size_; ++d) std::fill(keys + d * kTileKeys + count, keys + (d + 1) * kTileKeys, 0.0f);
    std::fill_n(scores, rows * kTileKeys, 0.0f);
    add_product(rows, kTileKeys, head_size_, query, padded_, [&](int k) { return keys + k * kTileKeys; }, scores, kTileKeys);

    for (int i = 0; i < rows; ++i) {
      float* row = scores + i * kTileKeys;
      const int64_t position = first_position + i / groups_;
      bias(row, count, key, position, item.head * groups_ + i % groups_);
      const int low = static_cast<int>(std::clamp<int64_t>(first_visible(position) - key, 0, count));
      const int high = static_cast<int>(std::clamp<int64_t>(last_visible(position, length) - key, 0, count));
      std::fill(row, row + low, -kInfinity);
      std::fill(row + std::max(low, high), row + kTileKeys, -kInfinity);
      softmax_tile(row, kTileKeys, sums + i * padded_, padded_, maximum[i], total[i]);
    }

    rows_of_keys<T>(a_.value_cache, item, key, key + count, pointers);
    bool finite = true;
    for (int j = 0; j < count; ++j) {
      float* target = values + j * padded_;
      for (int d = 0; d < head_size_; ++d) {
        target[d] = to_float(pointers[j][d]);
        finite &= target[d] - target[d] == 0;
      }
      std::fill(target + head_size_, target + padded_, 0.0f);
    }
    const auto value_row = [&](int k) { return values + k * padded_; };
    if (finite) {
      add_product(rows, padded_, count, scores, kTileKeys, value_row, sums, padded_);
    } else {
      // 0 * infinity is NaN: each row multiplies what it sees and nothing else.
      for (int i = 0; i < rows; ++i) {
        const int64_t position = first_position + i / groups_;
        const int low = static_cast<int>(std::clamp<int64_t>(first_visible(position) - key, 0, count));
        const int high = static_cast<int>(std::clamp<int64_t>(last_visible(position, length) - key, low, count));
        add_product(1, padded_, high - low, scores + i * kTileKeys + low, kTileKeys, [&](int k) { return value_row(low + k); },
                    sums + i * padded_, padded_);
      }
    }
  }
  const int64_t first_token = query_start(item.request) + item.first_row;
  for (int i = 0; i < rows; ++i)
    finish(first_token + i / groups_, item.head * groups_ + i % groups_, sums + i * padded_, maximum[i], total[i]);
}

// Adds the sink, divides, and writes one head of one row.
void Attention::finish(int64_t token, int64_t query_head, const float* sums, float maximum, float total) const {
  float factor = 1;
  if (a_.sinks) {
    const float sink = a_.sinks.ptr<float>()[query_head * a_.sinks.strides[0]];
    const float highest = max(maximum, sink);
    if (highest != -kInfinity) {
      factor = std::exp(maximum - highest);
      total = total * factor + std::exp(sink - highest);
      maximum = highest;
    }
  }
  const float scale = total == 0 ? 0 : factor / total * scale_of_head(a_.value_scale, query_head / groups_);
  dispatch(a_.out.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* out = a_.out.ptr<T>() + token * a_.out.strides[0] + query_head * a_.out.strides[1];
    for (int d = 0; d < head_size_; ++d) from_float(total == 0 ? 0.0f : sums[d] * scale, out + d);
  });
  if (a_.lse) {
    float* lse = a_.lse.ptr<float>() + token * a_.lse.strides[0] + query_head * a_.lse.strides[1];
    *lse = total == 0 ? -kInfinity : maximum + std::log(total);
  }
}

}  // namespace

void paged_attention(const PagedAttention& args) { Attention(args).run(); }

}  // namespace research_engine::cpu
