// A row as it is to be picked from: its entries applied, and -inf for what its mask does not allow.
#pragma once

#include "row.cuh"

// The columns of `Edits`.
struct Edits {
  const int* starts;     // [n_rows + 1]; null: there are no entries
  const int* token_ids;  // [n]
  const float* bias;     // [n]
  const float* repeat;   // [n]
  const float* penalty;  // [n]

  __device__ float edited(float logit, int entry) const {
    const float biased = logit + bias[entry];
    const float repeated = biased > 0.0f ? biased / repeat[entry] : biased * repeat[entry];
    return repeated - penalty[entry];
  }
};

// The columns of `Masks`.
struct Masks {
  const int* index;         // [n_rows]; null: no row has a mask
  const unsigned* allowed;  // [n_masked, n_words]
  int n_words;

  // A row's bits, [n_words]; null: every token may be picked.
  __device__ const unsigned* of(int row) const {
    return index == nullptr || index[row] < 0 ? nullptr : allowed + static_cast<long long>(index[row]) * n_words;
  }
};

// Writes one chunk of a row to `changed`. logits, changed: the row's, [vocab]. All threads of a block call it, and see
// what it has written.
__device__ inline void change_chunk(const Edits& edits, const Masks& masks, int row, int chunk, int vocab,
                                    const float* logits, float* changed) {
  const unsigned* words = masks.of(row);
  const auto allows = [&](int token) { return words == nullptr || words[token / WARP] >> token % WARP & 1; };
  const int first = chunk * CHUNK, end = min(first + CHUNK, vocab);
  for (int token = first + threadIdx.x; token < end; token += blockDim.x)
    changed[token] = allows(token) ? logits[token] : -infinity();
  __syncthreads();
  if (edits.starts == nullptr) return;
  for (int entry = edits.starts[row] + threadIdx.x; entry < edits.starts[row + 1]; entry += blockDim.x) {
    const int token = edits.token_ids[entry];
    if (token >= first && token < end && allows(token)) changed[token] = edits.edited(logits[token], entry);
  }
  __syncthreads();
}
