// Whether the token drawn among all of a row is kept by top_k, top_p and min_p. Its place follows from what comes before it: sums
// over the row, where the cut itself takes amounts by bucket and a search. Weights are taken by one instruction each, and a
// token too near the cut to tell counts as not kept: then the exact search decides.
#pragma once

#include "row.cuh"

using Amount = unsigned long long;

// By which share sums of weights may be off, at most: 2**-34 for each token of a row of up to 2**21, which exact masses are cut
// by, and the roundings of fast exponentials and of sums in float32, below 2e-5 together.
constexpr double OFF = 0x1p-12;

// Sums over a row's tokens, in units of 2**-34 of the largest one's weight.
struct Standing {
  Amount total;
  Amount before;    // of those before the drawn token: of larger logits, or equal ones with lower ids
  Amount n_before;  // how many these are
};

// The token that was drawn, and a thread's part of the sums.
struct Drawn {
  float logit;
  int token;
  float largest;  // logit of the row
  float total = 0.0f, before = 0.0f;
  unsigned n_before = 0;

  __device__ Drawn(float logit, int token, float largest) : logit(logit), token(token), largest(largest) {}

  // x: the lane's logits of a segment.
  __device__ void compare(int segment, const float (&x)[OWN]) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const float weight = power_of_two((x[i] - largest) * LOG2E);
      total += weight;
      if (x[i] > logit || (x[i] == logit && Row::token(segment, i) < token)) before += weight, ++n_before;
    }
  }

  // A warp's part to the row's.
  __device__ void add_to(Standing* standing) {
    const float all = warp_sum(total), some = warp_sum(before);
    const unsigned n = __reduce_add_sync(FULL_WARP, n_before);
    if (threadIdx.x % WARP > 0) return;
    atomicAdd(&standing->total, static_cast<Amount>(all * MASS_ONE));
    if (n == 0) return;
    atomicAdd(&standing->before, static_cast<Amount>(some * MASS_ONE));
    atomicAdd(&standing->n_before, static_cast<Amount>(n));
  }
};

// Whether the token is kept for certain. standing: of the whole row, which other blocks have added to.
__device__ inline bool survives(const Wish& wish, const Standing* standing, const Drawn& drawn) {
  const float weight = weight_of(drawn.logit - drawn.largest);
  if (wish.min_p > 0.0f && weight < wish.min_p) return false;
  if (wish.top_k > 0 && __ldcg(&standing->n_before) >= wish.top_k) return false;
  if (wish.top_p >= 1.0f) return true;
  const double before = static_cast<double>(__ldcg(&standing->before));
  // What top_k keeps, of which top_p is a share, is unknown here; it is no less than what comes before the token, and its own.
  const double least = wish.top_k > 0 ? before + weight * MASS_ONE : static_cast<double>(__ldcg(&standing->total));
  return before * (1.0 + OFF) < wish.top_p * least * (1.0 - OFF);
}
