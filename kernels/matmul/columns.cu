// A row's inputs as the columns that products with codes of GGUF's types have, where these are not one for each input
// (columns.py). A thread has 8 inputs; n_in: a multiple of 256, so a warp's are all there, or none.
#include "device.cuh"
#include "warp.cuh"

constexpr int THREADS = 128, EACH = 8;
constexpr int BLOCK = 256, GROUP = 32, SUMS = 32;  // inputs of a block and of a group; columns behind a block

// 8 inputs of a row, if the thread has such.
template <class T>
struct Eight {
  const int input = (blockIdx.x * THREADS + threadIdx.x) * EACH;
  const long long row = blockIdx.y;
  const bool exists;
  Vector16<T> vector = {};

  __device__ Eight(const T* x, int n_in) : exists(input < n_in) {
    if (exists) vector = load16(x + row * n_in + input);
  }
};

// Grid: inputs / (THREADS * EACH), rows. Behind each block four columns for each of its groups: the sum of its inputs as T, what
// that rounding left, and both 16 times.
template <class T>
__global__ void __launch_bounds__(THREADS) with_sums(const T* x, T* columns, int n_in) {
  let_next_begin();
  wait_for_earlier();
  const Eight<T> own(x, n_in);
  if (!own.exists) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; ++i) sum += widened(own.vector.values[i]);
#pragma unroll
  for (int apart = 1; apart < GROUP / EACH; apart *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, apart);
  T* block = columns + (own.row * (n_in / BLOCK) + own.input / BLOCK) * (BLOCK + SUMS);
  const int place = own.input % BLOCK;
  store16(block + place, own.vector);
  if (place % GROUP != 0) return;
  const T high = narrowed<T>(sum);
  const T low = narrowed<T>(sum - widened(high));
  T* four = block + BLOCK + place / GROUP * 4;
  four[0] = high, four[1] = low;
  four[2] = narrowed<T>(widened(high) * 16.0f), four[3] = narrowed<T>(widened(low) * 16.0f);
}

// The same grid. Of each 16 inputs these, then 16 times these.
template <class T>
__global__ void __launch_bounds__(THREADS) with_sixteens(const T* x, T* columns, int n_in) {
  let_next_begin();
  wait_for_earlier();
  const Eight<T> own(x, n_in);
  if (!own.exists) return;
  Vector16<T> more;
#pragma unroll
  for (int i = 0; i < EACH; ++i) more.values[i] = narrowed<T>(widened(own.vector.values[i]) * 16.0f);
  T* to = columns + own.row * 2 * n_in + own.input / 16 * 32 + own.input % 16;
  store16(to, own.vector);
  store16(to + 16, more);
}
