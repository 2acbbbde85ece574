// `ngram`: blocks look for the longest run of a slot's last tokens in a chunk of its text each; then a warp per row takes
// the longest of all chunks, the newest of equals, and copies what followed.
#include "warp.cuh"

constexpr int N_MAX = 16;
constexpr int THREADS = 256;
constexpr int PER_THREAD = 8;
constexpr int CHUNK = THREADS * PER_THREAD;
// A run is its length and where it ends in one number, so that the greatest is the longest, and of equals the newest.
constexpr int END_BITS = 26;

// The row's text: its first token and its length, 0 for padding.
struct Text {
  const int* tokens;
  int length;
};

__device__ inline Text text_of(const int* tokens, const int* lengths, const long long* slots, long long capacity,
                               int row) {
  const long long slot = slots[row];
  if (slot < 0) return {tokens, 0};
  const int length = lengths[slot];
  return {tokens + slot * capacity, static_cast<int>(length < capacity ? length : capacity)};
}

// longest [n_active, n_chunks]: the longest run that ends in the chunk, or 0. Grid (n_chunks, n_active).
__global__ void __launch_bounds__(THREADS)
    find(const int* tokens, const int* lengths, const long long* slots, long long capacity, int* longest) {
  __shared__ int wanted[N_MAX];  // the last tokens, backwards
  __shared__ int of_warps[THREADS / WARP];
  const int row = blockIdx.y, thread = threadIdx.x;
  const Text text = text_of(tokens, lengths, slots, capacity, row);
  const int last = text.length - 1;  // a run that ends before it leaves a token to follow
  if (thread < N_MAX && thread <= last) wanted[thread] = text.tokens[last - thread];
  __syncthreads();

  int run = 0;
  const int first = blockIdx.x * CHUNK + thread;
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int end = first + i * THREADS;
    if (end >= last) continue;
    int n = 0;
    while (n < N_MAX && n <= end && __ldg(text.tokens + end - n) == wanted[n]) ++n;
    const int here = n ? n << END_BITS | end : 0;
    run = here > run ? here : run;
  }
  run = warp_max(run);
  if (thread % WARP == 0) of_warps[thread / WARP] = run;
  __syncthreads();
  if (thread < WARP) {
    run = warp_max(thread < THREADS / WARP ? of_warps[thread] : 0);
    if (thread == 0) longest[row * gridDim.x + blockIdx.x] = run;
  }
}

// Grid (n_active), one warp each.
__global__ void __launch_bounds__(WARP)
    take(const int* tokens, const int* lengths, const long long* slots, long long capacity, const int* longest,
         int n_chunks, int n_drafts_max, int* drafts, int* n_matched) {
  const int row = blockIdx.x, lane = threadIdx.x;
  const Text text = text_of(tokens, lengths, slots, capacity, row);
  int run = 0;
  for (int chunk = lane; chunk < n_chunks; chunk += WARP) {
    const int here = longest[row * n_chunks + chunk];
    run = here > run ? here : run;
  }
  run = warp_max(run);
  const int next = (run & ((1 << END_BITS) - 1)) + 1;
  const int period = run ? text.length - next : 1;
  for (int i = lane; i < n_drafts_max; i += WARP)
    drafts[row * n_drafts_max + i] = run ? text.tokens[next + i % period] : 0;
  if (lane == 0) n_matched[row] = run >> END_BITS;
}
