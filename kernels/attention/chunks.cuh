// What is kept of a query between chunks of positions, and how chunks are joined; see attention.cu.
#pragma once

#include "device.cuh"

// Chunks of positions, which blocks work on side by side: short where a text begins, as a chunk's time is all that a short
// text takes, and longer behind, as each leaves sums to be joined.
constexpr int LONGEST = 512;
constexpr int SHORT_UNTIL = 1024, MIDDLE_UNTIL = 2048;
constexpr int N_SHORT = SHORT_UNTIL / (LONGEST / 4), N_MIDDLE = (MIDDLE_UNTIL - SHORT_UNTIL) / (LONGEST / 2);
__device__ inline int chunk_of(int position) {
  if (position < SHORT_UNTIL) return position / (LONGEST / 4);
  if (position < MIDDLE_UNTIL) return N_SHORT + (position - SHORT_UNTIL) / (LONGEST / 2);
  return N_SHORT + N_MIDDLE + (position - MIDDLE_UNTIL) / LONGEST;
}
// The first position of a chunk.
__device__ inline int first_of(int chunk) {
  if (chunk < N_SHORT) return chunk * (LONGEST / 4);
  if (chunk < N_SHORT + N_MIDDLE) return SHORT_UNTIL + (chunk - N_SHORT) * (LONGEST / 2);
  return MIDDLE_UNTIL + (chunk - N_SHORT - N_MIDDLE) * LONGEST;
}
// Positions by which the softmax moves on at a time within a chunk. Of 512 values 16 positions are what 32 are of 256: a stage
// keeps its size.
template <int D>
constexpr int STEP = D == 512 ? 16 : 32;
// Minus infinity.
__device__ inline float least() { return __uint_as_float(0xff800000u); }

// What of the softmax is known of a query so far: exponents are of 2, relative to `zero`, a score that none is far above.
struct alignas(8) Softmax {
  float zero, sum;
};

// Brings a query's softmax up to date with a later chunk's; its values so far count `before`, the chunk's `added`.
struct Shares {
  float before, added;
};
__device__ inline Shares shares_of(float total_zero, float chunk_zero) {
  const float zero = fmaxf(total_zero, chunk_zero), at = zero == least() ? 0.0f : zero;
  return {exp2f(total_zero - at), exp2f(chunk_zero - at)};
}
__device__ inline float joined(const Shares& shares, float total, float chunk) {
  return __fmaf_rn(shares.added, chunk, __fmul_rn(shares.before, total));
}
__device__ inline Shares join(Softmax& total, const Softmax& chunk) {
  const Shares shares = shares_of(total.zero, chunk.zero);
  total = {fmaxf(total.zero, chunk.zero), joined(shares, total.sum, chunk.sum)};
  return shares;
}

// Per head a score that joins the softmax of its queries and brings no value; logits: null where there are none. It joins
// after the last chunk, so nothing before depends on it.
struct Sinks {
  const float* logits;
  int n_heads;

  // What the sums of query row * n_heads + head are multiplied by at the end.
  __device__ float over(const Softmax& total, int query) const {
    if (logits == nullptr) return 1.0f / total.sum;
    const float logit = __fmul_rn(logits[query % n_heads], 1.44269504f);  // times log2(e), as scores are
    return 1.0f / (total.sum + exp2f(logit - total.zero));
  }
};

// Positions that a row sees, and the chunks they lie in.
struct Seen {
  int first, last;  // nothing: first > last

  __device__ int first_chunk() const { return chunk_of(first); }
  __device__ int n_chunks() const { return chunk_of(last) - chunk_of(first) + 1; }
  __device__ bool has(int at) const { return first <= at && at <= last; }
};

// What bounds the rows of a pass. wholes: [n_rows][2], begin and end of what a row belongs to; null: rows see none.
struct Bounds {
  int window;
  const int* wholes;

  __device__ Seen seen(int position, int row) const {
    Seen seen{max(position - window + 1, 0), position};
    if (wholes != nullptr) {
      seen.first = min(seen.first, wholes[2 * row]);
      seen.last = max(seen.last, wholes[2 * row + 1] - 1);
    }
    return seen;
  }
};

// Where a query's sums lie between chunks: sums[slot][query][d_value], softmax[slot][query]; slots are counted from the
// first chunk that the query sees.
struct Sums {
  float* sums;
  Softmax* softmax;
  int n_queries, d_value;

  __device__ float* at(int slot, int query) const { return sums + softmax_at(slot, query) * d_value; }
  __device__ long long softmax_at(int slot, int query) const { return static_cast<long long>(slot) * n_queries + query; }
};
