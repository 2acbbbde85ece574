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
    const float most_t = __expf(logit * inverse + (slack - bar)) * 0x1p32f + 1.0f;
    return !(most_t < __uint2float_rn(~word));
  }
};

// Largest key of a value in a chunk. x: this thread's logits, -inf where it has none in play. bar: reached by a token of
// the row that is in play. 0 if no token reaches it. The chunk's first token is a multiple of 4. All threads call it.
__device__ inline Key drawn(const Draw& draw, const Row& row, int segment, const float (&x)[OWN], float bar) {
  __shared__ unsigned short found[CHUNK];  // tokens worth an exact look, counted from the chunk's first
  __shared__ int n_found[1];
  const int first = segment / CHUNK_WARPS * CHUNK;
  if (threadIdx.x == 0) n_found[0] = 0;
  __syncthreads();
  const Bar start(draw.inverse, bar);
#pragma unroll
  for (int i = 0; i < OWN; i += 4) {
    const float most = fmaxf(fmaxf(x[i], x[i + 1]), fmaxf(x[i + 2], x[i + 3]));
    if (most == -infinity() || !start.may_reach(most)) continue;
    const int token = Row::token(segment, i);
    const Words words = words_of(draw.stream, token / 4);
    if (!start.may_reach(most, max(max(words.of[0], words.of[1]), max(words.of[2], words.of[3])))) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (start.may_reach(x[i + j], words.of[j]) && draw.keeps(x[i + j], token + j))
        found[atomicAdd(n_found, 1)] = static_cast<unsigned short>(token + j - first);
  }
  __syncthreads();
  Key best = 0;
  const int lane = threadIdx.x % WARP;
  for (int i = threadIdx.x - lane; i < n_found[0]; i += CHUNK_WARPS * WARP) {
    if (i + lane < n_found[0]) {
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
  return block_max(best);
}
