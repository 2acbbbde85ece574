// `ngram`: blocks look for the newest match in a chunk of a slot's text each; then a warp per row takes the newest of
// all chunks and copies what followed.
#include "warp.cuh"

constexpr int N_MAX = 16;
constexpr int THREADS = 256;
constexpr int PER_THREAD = 8;
constexpr int CHUNK = THREADS * PER_THREAD;

// The row's text: its first token and its length, 0 for rows that draft nothing.
struct Text {
  const int* tokens;
  int length;
  int n;
};

__device__ inline Text text_of(const int* tokens, const int* lengths, const long long* slots, const int* n_match,
                               long long capacity, int row) {
  const long long slot = slots[row];
  const int n = n_match[row];
  if (slot < 0 || n < 1 || n > N_MAX) return {tokens, 0, 1};
  const int length = lengths[slot];
  return {tokens + slot * capacity, static_cast<int>(length < capacity ? length : capacity), n};
}

// newest [n_active, n_chunks]: the last start of a match in the chunk, or -1. Grid (n_chunks, n_active).
__global__ void __launch_bounds__(THREADS)
    find(const int* tokens, const int* lengths, const long long* slots, const int* n_match, long long capacity,
         int* newest) {
  __shared__ int wanted[N_MAX];
  __shared__ int of_warps[THREADS / WARP];
  const int row = blockIdx.y, thread = threadIdx.x;
  const Text text = text_of(tokens, lengths, slots, n_match, capacity, row);
  const int n_starts = text.length - text.n;  // a start below it leaves a token to follow
  if (thread < text.n && n_starts > 0) wanted[thread] = text.tokens[n_starts + thread];
  __syncthreads();

  int last = -1;
  const int first = blockIdx.x * CHUNK + thread;
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {  // upwards, so that the newest is written last
    const int start = first + i * THREADS;
    if (start >= n_starts) continue;
    bool same = true;
    for (int j = text.n - 1; j >= 0 && same; --j) same = __ldg(text.tokens + start + j) == wanted[j];
    if (same) last = start;
  }
  last = warp_max(last);
  if (thread % WARP == 0) of_warps[thread / WARP] = last;
  __syncthreads();
  if (thread < WARP) {
    last = warp_max(thread < THREADS / WARP ? of_warps[thread] : -1);
    if (thread == 0) newest[row * gridDim.x + blockIdx.x] = last;
  }
}

// Grid (n_active), one warp each.
__global__ void __launch_bounds__(WARP)
    take(const int* tokens, const int* lengths, const long long* slots, const int* n_match, long long capacity,
         const int* newest, int n_chunks, int n_drafts_max, int* drafts, int* n_drafts) {
  const int row = blockIdx.x, lane = threadIdx.x;
  const Text text = text_of(tokens, lengths, slots, n_match, capacity, row);
  int start = -1;
  for (int chunk = lane; chunk < n_chunks; chunk += WARP) {
    const int here = newest[row * n_chunks + chunk];
    start = here > start ? here : start;
  }
  start = warp_max(start);
  const int left = text.length - start - text.n;
  const int n = start < 0 ? 0 : left < n_drafts_max ? left : n_drafts_max;
  for (int i = lane; i < n_drafts_max; i += WARP)
    drafts[row * n_drafts_max + i] = i < n ? text.tokens[start + text.n + i] : 0;
  if (lane == 0) n_drafts[row] = n;
}
