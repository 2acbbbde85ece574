// Queries of a warp, their softmax and their sums: what the kernels of attention.cu and warpgroups.cu have in common, so that
// a query has the same bits in both.
#pragma once

#include "attention/chunks.cuh"
#include "mma.cuh"
#include "warp.cuh"

constexpr int QUERIES = 16;
// Columns of values that a warp sums: its registers have no room for more. Where heads are wider, SLICES warps have the same
// queries and scores, and each its columns.
template <int D>
constexpr int COLUMNS = D < 256 ? D : 256;
template <int D>
constexpr int SLICES = D / COLUMNS<D>;

template <int D>
__device__ inline int slice() {
  return threadIdx.x / WARP % SLICES<D>;
}
template <int D>
__device__ inline int first_column() {
  return slice<D>() * COLUMNS<D>;
}

// A warp's two query rows of a lane: the one of its group, and the one eight further.
template <int D>
struct Queries {
  float sums[COLUMNS<D> / 8][4];  // from first_column on
  float weight[2];                // sums of weights
  float zero[2];                  // a score whose weight is 1; least() before the first that is seen
  Seen first, last;  // what the first of the queries and the last see; what others see begins and ends between
  Seen seen[2];      // no query: nothing
  int index[2];      // row * n_heads + head

  __device__ Softmax softmax(int half) const { return {zero[half], weight[half]}; }
};

// What a block works on: some queries of a span, counted over its rows and the heads that read one K/V head.
struct Item {
  int span, row, past;  // the span, its first row, and the positions before that
  int first, end;       // the queries; first == end: there are not so many items
  int share;            // heads that read a K/V head

  // Spans have their items one after another, of `size` queries each.
  __device__ Item(int number, int size, int share, int n_spans, const int* span_starts, const int* n_past)
      : row(0), past(0), first(0), end(0), share(share) {
    for (span = 0; span < n_spans; ++span) {
      past = n_past[span], row = span_starts[span];  // beside the next start, not after it
      const int n = (span_starts[span + 1] - row) * share, n_items = (n + size - 1) / size;
      if (number < n_items) {
        first = number * size, end = min(first + size, n);
        return;
      }
      number -= n_items;
    }
  }

  // What a query sees; one that there is not: nothing.
  __device__ Seen seen(int query, const Bounds& bounds) const {
    if (query >= end) return {0, -1};
    return bounds.seen(past + query / share, row + query / share);
  }
  // Among those of all rows and heads.
  __device__ int index(int query, int n_heads) const {
    return (row + query / share) * n_heads + blockIdx.x * share + query % share;
  }
  // What all queries see between them.
  __device__ Seen all(const Bounds& bounds) const { return {seen(first, bounds).first, seen(end - 1, bounds).last}; }
};

// The warp's queries, of `n` from `first` on that neighbouring warps have.
template <int D>
__device__ inline void place(Queries<D>& mine, const Item& item, int first, int n, const Bounds& bounds, int n_heads) {
  mine.first = item.seen(first, bounds);
  mine.last = first < item.end ? item.seen(min(first + n, item.end) - 1, bounds) : mine.first;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = first + threadIdx.x / WARP % (n / QUERIES) * QUERIES + threadIdx.x % WARP / 4 + 8 * half;
    mine.seen[half] = item.seen(query, bounds);
    mine.index[half] = item.index(query, n_heads);
  }
}

// What scores may be above the exponents' zero, so that few steps scale all sums: weights then are at most 2^SLACK.
constexpr float SLACK = 8.0f;

// The scores of N positions from `at` on become weights: the left side of the next product. partly: some query does not see all
// positions. True if the sums so far have to be multiplied by `before`.
template <class T, int D, int N>
__device__ inline bool soften(Queries<D>& mine, int at, bool partly, float scale, float (&scores)[N / 8][4],
                              unsigned (&weights)[N / 16][4], float (&before)[2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) scores[i / 4][i % 4] = __fmul_rn(scores[i / 4][i % 4], scale);
  if (partly) {
    seldom();
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
      if (!mine.seen[i % 4 / 2].has(at + i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2)) scores[i / 4][i % 4] = least();
  }
  float largest[2] = {least(), least()};
#pragma unroll
  for (int i = 0; i < N / 4; ++i)
    largest[i % 2] = fmaxf(largest[i % 2], fmaxf(scores[i / 2][2 * (i % 2)], scores[i / 2][2 * (i % 2) + 1]));
  const bool rises = __any_sync(FULL_WARP, largest[0] > mine.zero[0] + SLACK || largest[1] > mine.zero[1] + SLACK);
  if (rises) {
    seldom();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& most = largest[half];
      most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
      most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
      const float zero = most > mine.zero[half] + SLACK ? most : mine.zero[half];
      before[half] = zero == least() ? 1.0f : power_of_two(mine.zero[half] - zero);
      mine.zero[half] = zero;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float zero = mine.zero[half] == least() ? 0.0f : mine.zero[half];
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
      weights[n / 2][n % 2 * 2 + half] =
          packed_pair<T>(power_of_two(scores[n][2 * half] - zero), power_of_two(scores[n][2 * half + 1] - zero));
  }
  return rises;
}

template <int D>
__device__ inline void rescale(Queries<D>& mine, const float (&before)[2]) {
#pragma unroll
  for (int i = 0; i < COLUMNS<D> / 2; ++i) mine.sums[i / 4][i % 4] = __fmul_rn(mine.sums[i / 4][i % 4], before[i % 4 / 2]);
#pragma unroll
  for (int half = 0; half < 2; ++half) mine.weight[half] = __fmul_rn(mine.weight[half], before[half]);
}

// Sums up the weights, as rounded: what values are multiplied by. A lane has those of its own columns. (By a product with ones
// it would wait for the tensor cores, which are busy.)
template <class T, int D, int N>
__device__ inline void weigh(Queries<D>& mine, const unsigned (&weights)[N / 16][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float2 two = widened_pair<T>(weights[n / 2][n % 2 * 2 + half]);
      mine.weight[half] += two.x + two.y;
    }
  }
}

// Begins a chunk.
template <int D>
__device__ inline void clear(Queries<D>& mine) {
#pragma unroll
  for (int half = 0; half < 2; ++half) mine.zero[half] = least(), mine.weight[half] = 0.0f;
#pragma unroll
  for (int i = 0; i < COLUMNS<D> / 2; ++i) mine.sums[i / 4][i % 4] = 0.0f;
}

// Ends a chunk: all lanes of a query have the sum of its weights.
template <int D>
__device__ inline void add_up(Queries<D>& mine) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& weight = mine.weight[half];
    weight += __shfl_xor_sync(FULL_WARP, weight, 1);
    weight += __shfl_xor_sync(FULL_WARP, weight, 2);
  }
}

// Whether one of two values is infinite or NaN: all bits of its exponent are set.
template <class T>
constexpr unsigned EXPONENT = 0x7c00u;
template <>
constexpr unsigned EXPONENT<bfloat16> = 0x7f80u;
template <class T>
__device__ inline bool low_is_odd(unsigned both) { return (both & EXPONENT<T>) == EXPONENT<T>; }
template <class T>
__device__ inline bool high_is_odd(unsigned both) { return low_is_odd<T>(both >> 16); }

// Whether N positions have such values. cell(row, chunk): where a row's values 8 chunk and on are; from first_column on, as for
// gather_odd.
template <class T, int D, int N, class Cell>
__device__ inline bool has_odd(const T* values, const Cell& cell) {
  bool any = false;
  for (int i = threadIdx.x % WARP; i < N * COLUMNS<D> / 8; i += WARP) {
    const Vector16<T> eight = load16(values + cell(i / (COLUMNS<D> / 8), i % (COLUMNS<D> / 8)));
    unsigned words[4];
    memcpy(words, &eight, 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) any |= low_is_odd<T>(words[j]) || high_is_odd<T>(words[j]);
  }
  return __any_sync(FULL_WARP, any);
}

// Adds the weighted values of N positions, where some query does not see a position and has weight 0 there, but 0 times infinity
// is NaN: odd values are left out of the products, then added to the queries that see them. Sums are in memory meanwhile, and
// the loop is rolled: it hardly ever runs, and must not take the other way's registers.
template <class T, int D, int N, class Cell>
__device__ inline void gather_odd(
    Queries<D>& mine, int at, const unsigned (&weights)[N / 16][4], const T* values, const Cell& cell) {
  const int lane = threadIdx.x % WARP, pair = lane % 4;
  float sums[COLUMNS<D> / 8][4];
  memcpy(sums, mine.sums, sizeof sums);
#pragma unroll 1
  for (int n = 0; n < COLUMNS<D> / 8; ++n) {
#pragma unroll
    for (int k = 0; k < N / 16; ++k) {
      unsigned some[2];
      load_matrices<2, true>(some, values + cell(k * 16 + lane % 16, n));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        some[i] &= (low_is_odd<T>(some[i]) ? 0u : 0xffffu) | (high_is_odd<T>(some[i]) ? 0u : 0xffff0000u);
      mma_16x8x16<T>(sums[n], weights[k], some);
    }
#pragma unroll 1
    for (int row = 0; row < N; ++row) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float value = widened(values[cell(row, n) + 2 * pair + i]);
        if (value - value == 0.0f) continue;
        if (mine.seen[0].has(at + row)) sums[n][i] += value;
        if (mine.seen[1].has(at + row)) sums[n][2 + i] += value;
      }
    }
  }
  memcpy(mine.sums, sums, sizeof sums);
}

// Leaves a chunk's sums of one query in memory, for merge_chunks.
template <int D>
__device__ inline void leave(const Queries<D>& mine, int half, int slot, const Sums& memory) {
  const int pair = threadIdx.x % 4, column = first_column<D>();
  float* to = memory.at(slot, mine.index[half]) + column;
#pragma unroll
  for (int n = 0; n < COLUMNS<D> / 8; ++n)
    if (column + n * 8 < memory.d_value)
      *reinterpret_cast<float2*>(to + n * 8 + 2 * pair) = make_float2(mine.sums[n][2 * half], mine.sums[n][2 * half + 1]);
  if (pair == 0 && column == 0) memory.softmax[memory.softmax_at(slot, mine.index[half])] = mine.softmax(half);
}

// Joins a chunk of one query to those before. totals.at(n, half): a lane's columns 8 n + 2 pair, +1.
template <int D, class Totals>
__device__ inline void add_chunk(const Queries<D>& mine, int half, int slot, Softmax& total, Totals& totals) {
  const bool is_first = slot == 0;  // chosen value by value: two loops in a branch spilled
  if (is_first) total = {least(), 0.0f};
  const Shares shares = join(total, mine.softmax(half));
  if (is_first) total = mine.softmax(half);
#pragma unroll
  for (int n = 0; n < COLUMNS<D> / 8; ++n) {
    float2& two = totals.at(n, half);
    const float2 own = make_float2(mine.sums[n][2 * half], mine.sums[n][2 * half + 1]);
    const float2 both = make_float2(joined(shares, two.x, own.x), joined(shares, two.y, own.y));
    two = is_first ? own : both;
  }
}

// The result of one query whose chunks are all joined.
template <class T, int D, class Totals>
__device__ inline void write(
    const Queries<D>& mine, int half, const Softmax& total, Totals& totals, int d_value, const Sinks& sinks, T* out) {
  const int column = first_column<D>();
  const float over = sinks.over(total, mine.index[half]);
  T* to = out + static_cast<long long>(mine.index[half]) * d_value + column + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < COLUMNS<D> / 8; ++n) {
    if (column + n * 8 >= d_value) continue;
    const float2 two = totals.at(n, half);
    *reinterpret_cast<unsigned*>(to + n * 8) = packed_pair<T>(__fmul_rn(two.x, over), __fmul_rn(two.y, over));
  }
}

