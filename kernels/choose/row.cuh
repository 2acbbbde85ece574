// A row of logits as the kernels of `choose` see it: what is asked of it, its segments, and keys that order its tokens.
#pragma once

#include "block.cuh"
#include "mass.cuh"
#include "noise.cuh"

constexpr int OWN = 16;                        // logits of a segment that one lane holds, in four 16-byte loads
constexpr int SEGMENT = OWN * WARP;            // what a warp reads at once
constexpr int CHUNK_WARPS = 8;
constexpr int CHUNK = CHUNK_WARPS * SEGMENT;   // tokens a block scans or draws from
constexpr float MOST_GREEDY = 1e-5f;           // temperature; the least float32 that is not below 1e-5 is the next one

__device__ inline float infinity() { return __int_as_float(0x7f800000); }
__device__ inline bool is_finite(float x) { return fabsf(x) < infinity(); }

// A token with its logit or value: larger values have larger keys, and so have lower ids of equal values. None is 0.
using Key = unsigned long long;

__device__ inline Key key_of(float value, int token) {
  const unsigned bits = __float_as_uint(value + 0.0f);  // one zero
  const unsigned ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(ordered) << 32 | ~static_cast<unsigned>(token);
}

__device__ inline float value_of(Key key) {
  const unsigned ordered = static_cast<unsigned>(key >> 32);
  return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

__device__ inline int token_of(Key key) { return static_cast<int>(~static_cast<unsigned>(key)); }

// `RowParams` of one row.
struct Wish {
  float temperature;
  int top_k;    // 0 if off
  float top_p;  // 1 if off
  float min_p;  // 0 if off
  Stream stream;
  bool greedy;

  __device__ bool truncates() const { return !greedy && (top_k > 0 || top_p < 1.0f); }
  // Whether a token may be out of play for what other tokens are, so that the row must be known before a draw.
  __device__ bool restricts() const { return truncates() || (!greedy && min_p > 0.0f); }
};

// The columns of `RowParams`.
struct Columns {
  const float* temperature;   // [n_rows]
  const int* top_k;           // [n_rows]
  const float* top_p;         // [n_rows]
  const float* min_p;         // [n_rows]
  const long long* seed;      // [n_rows]
  const long long* position;  // [n_rows]

  __device__ Wish of(int row, int vocab) const {
    const unsigned long long key = seed[row];
    const int k = top_k[row];
    Wish wish;
    wish.temperature = temperature[row];
    wish.top_k = k > 0 && k < vocab ? k : 0;
    wish.top_p = top_p[row] < 1.0f ? top_p[row] : 1.0f;
    wish.min_p = min_p[row];
    wish.stream = {static_cast<unsigned>(key), static_cast<unsigned>(key >> 32), static_cast<unsigned>(position[row])};
    wish.greedy = wish.temperature <= MOST_GREEDY;
    return wish;
  }
};

struct Row {
  const float* logits;  // [vocab]
  int vocab;
  const Key* tops;  // [n_segments]: largest logit of every segment

  __device__ int n_segments() const { return (vocab + SEGMENT - 1) / SEGMENT; }

  // Where logit i of this lane stands in the vocabulary; grows with i.
  __device__ static int token(int segment, int i) {
    return segment * SEGMENT + i / 4 * (4 * WARP) + threadIdx.x % WARP * 4 + i % 4;
  }

  // This lane's logits of a segment; -inf beyond the vocabulary. is_fresh: whether this kernel has written them.
  __device__ void load(int segment, float (&x)[OWN], bool is_fresh = false) const {
    const bool aligned = reinterpret_cast<unsigned long long>(logits) % 16 == 0;
    if (aligned && (segment + 1) * SEGMENT <= vocab) {
#pragma unroll
      for (int i = 0; i < OWN; i += 4) {
        const float* at = logits + token(segment, i);
        const Vector16<float> four = is_fresh ? load16(at) : load16_once(at);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i + j] = four.values[j];
      }
    } else {
#pragma unroll
      for (int i = 0; i < OWN; ++i) x[i] = token(segment, i) < vocab ? logits[token(segment, i)] : -infinity();
    }
  }

  // Its largest logit, of the lowest id; the block's threads all call it.
  __device__ Key top() const {
    Key largest = 0;
    for (int i = threadIdx.x; i < n_segments(); i += blockDim.x) largest = tops[i] > largest ? tops[i] : largest;
    return block_max(largest);
  }
};
