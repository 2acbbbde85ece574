// The pick among a block's tokens: noise in float32 bounds for all that could win, exactly for those left.
#pragma once

#include "row.cuh"

// What a draw depends on besides the logits.
struct Draw {
  float temperature;
  Stream stream;
  Key cut;        // smaller keys (of logits) are out of play; 0 keeps all
  float min_p;    // 0 if off
  float largest;  // logit of the row; read only for min_p
  float inverse;  // of the temperature, rounded

  __device__ float value(float logit, unsigned word) const { return logit / temperature + gumbel(word); }

  // No more than the value of a token, but close, to start the search for the best from.
  __device__ float least_value(Key key) const {
    const float exact = value_of(key) / temperature;
    return exact + gumbel_floor(word_of(stream, token_of(key))) - fabsf(exact) * 1e-6f;
  }

  __device__ bool keeps(float logit, int token) const {
    return logit > -infinity() && key_of(logit, token) >= cut &&
           !(min_p > 0.0f && weight_of(logit - largest) < min_p);
  }
};

// Decides cheaply which tokens cannot reach `bar`, which some token does. A draw G reaches g only if its t is at
// most exp(-g), as -log1p(-t) >= t; the slack covers the rounding of all that. Answers "may" where infinities leave no
// answer.
struct Bar {
  float inverse, bar, slack;

  __device__ Bar(float inverse, float bar)
      : inverse(inverse), bar(bar), slack((fabsf(bar) + 64.0f) * 1e-6f + 1e-4f) {}

  __device__ bool may_reach(float logit) const { return !(logit * inverse + MOST_GUMBEL + slack < bar); }

  __device__ bool may_reach(float logit, unsigned word) const {
    const float most_t = power_of_two((logit * inverse + (slack - bar)) * LOG2E) * 0x1p32f + 1.0f;
    return !(most_t < __uint2float_rn(~word));
  }
};

// Largest key of a value in a chunk. x: this thread's logits, -inf where it has none in play. top: the warp's largest logit
// in play, or of the row; 0 if no token reaches what one of the block's tops does. The chunk's first token is a multiple of
// 4. All threads call it; the first of them gets the answer.
__device__ inline Key drawn(const Draw& draw, const Row& row, int segment, const float (&x)[OWN], Key top) {
  __shared__ unsigned short found[CHUNK];  // tokens worth an exact look, counted from the chunk's first
  __shared__ Key tops[CHUNK_WARPS], tallest[1];
  __shared__ float bars[1];
  __shared__ int n_found[1];
  const int first = segment / CHUNK_WARPS * CHUNK, lane = threadIdx.x % WARP;
  if (lane == 0) tops[threadIdx.x / WARP] = top;
  __syncthreads();
  if (threadIdx.x < WARP) {  // a bar is a hash and two logarithms: one warp has it made
    const Key most = warp_max(lane < CHUNK_WARPS ? tops[lane] : 0);
    const float bar = draw.least_value(most);
    if (lane == 0) tallest[0] = most, bars[0] = bar, n_found[0] = 0;
  }
  __syncthreads();
  if (!is_finite(value_of(tallest[0]))) return 0;
  float bar = bars[0];
  const Bar start(draw.inverse, bar);
#pragma unroll
  for (int i = 0; i < OWN; i += 8) {
    float most[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* four = x + i + 4 * half;
      most[half] = fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3]));
    }
    if (!start.may_reach(fmaxf(most[0], most[1]))) continue;
    const int token = Row::token(segment, i);
    const Words words[2] = {words_of(draw.stream, token / 4), words_of(draw.stream, token / 4 + WARP)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned(&four)[4] = words[half].of;
      if (!start.may_reach(most[half], max(max(four[0], four[1]), max(four[2], four[3])))) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float logit = x[i + 4 * half + j];
        const int own = Row::token(segment, i + 4 * half + j);
        if (start.may_reach(logit, four[j]) && draw.keeps(logit, own))
          found[atomicAdd(n_found, 1)] = static_cast<unsigned short>(own - first);
      }
    }
  }
  __syncthreads();
  const int n = n_found[0];
  Key best = 0;
  for (int i = threadIdx.x - lane; i < n; i += CHUNK_WARPS * WARP) {
    if (i + lane < n) {
      const int token = first + found[i + lane];
      const unsigned word = word_of(draw.stream, token);
      const float logit = row.logits[token];
      if (Bar(draw.inverse, bar).may_reach(logit, word)) {
        const Key key = key_of(draw.value(logit, word), token);
        best = key > best ? key : best;
      }
    }
    bar = fmaxf(bar, warp_max(best ? value_of(best) : -infinity()));  // the next 32 must reach the best so far
  }
  return n <= WARP ? warp_max(best) : block_max(best);  // the first warp's alone, or everybody's
}
