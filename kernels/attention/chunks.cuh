// What is kept of a query between chunks of positions, and how chunks are joined; see attention.cu.
#pragma once

#include "device.cuh"

constexpr int CHUNK = 512;
// Minus infinity.
__device__ inline float least() { return __uint_as_float(0xff800000u); }

// What of the softmax is known of a query so far: exponents are of 2, relative to `largest`.
struct Softmax {
  float largest, sum;
};

// Brings a query's softmax up to date with a later chunk's; its values so far count `before`, the chunk's `added`.
struct Shares {
  float before, added;
};
__device__ inline Shares join(Softmax& total, const Softmax& chunk) {
  const float largest = fmaxf(total.largest, chunk.largest), at = largest == least() ? 0.0f : largest;
  const Shares shares{exp2f(total.largest - at), exp2f(chunk.largest - at)};
  total.sum = __fmaf_rn(shares.added, chunk.sum, __fmul_rn(shares.before, total.sum));
  total.largest = largest;
  return shares;
}
__device__ inline float joined(const Shares& shares, float total, float chunk) {
  return __fmaf_rn(shares.added, chunk, __fmul_rn(shares.before, total));
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
    return 1.0f / (total.sum + exp2f(logit - total.largest));
  }
};

// Positions that a row sees, and the chunks they lie in.
struct Seen {
  int first, last;  // nothing: first > last

  __device__ int first_chunk() const { return first / CHUNK; }
  __device__ int n_chunks() const { return last / CHUNK - first / CHUNK + 1; }
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
