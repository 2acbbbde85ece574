// A row's inputs as the columns that products with codes of GGUF's types have, where these are not one for each input
// (columns.py). A thread has 8 inputs; n_in: a multiple of 256, so a warp's are all there, or none.
#include "device.cuh"
#include "warp.cuh"

constexpr int THREADS = 128, EACH = 8;
constexpr int BLOCK = 256, GROUP = 32, SUMS = 32;  // inputs of a block and of a group; columns behind a block

// Grid: inputs / (THREADS * EACH), rows. Behind each block four columns for each of its groups: the sum of its inputs as T, what
// that rounding left, and both 16 times.
template <class T>
__global__ void __launch_bounds__(THREADS) with_sums(const T* x, T* columns, int n_in) {
  let_next_begin();
  wait_for_earlier();
  const int item = blockIdx.x * THREADS + threadIdx.x, input = item * EACH;
  if (input >= n_in) return;
  const long long row = blockIdx.y;
  const Vector16<T> eight = load16(x + row * n_in + input);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; ++i) sum += widened(eight.values[i]);
#pragma unroll
  for (int apart = 1; apart < GROUP / EACH; apart *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, apart);
  T* block = columns + row * (n_in / BLOCK * (BLOCK + SUMS)) + input / BLOCK * (BLOCK + SUMS);
  store16(block + input % BLOCK, eight);
  if (input % GROUP != 0) return;
  const T high = narrowed<T>(sum);
  const T low = narrowed<T>(sum - widened(high));
  T* four = block + BLOCK + input % BLOCK / GROUP * 4;
  four[0] = high, four[1] = low;
  four[2] = narrowed<T>(widened(high) * 16.0f), four[3] = narrowed<T>(widened(low) * 16.0f);
}

// The same grid. Of each 16 inputs these, then 16 times these.
template <class T>
__global__ void __launch_bounds__(THREADS) with_sixteens(const T* x, T* columns, int n_in) {
  let_next_begin();
  wait_for_earlier();
  const int item = blockIdx.x * THREADS + threadIdx.x, input = item * EACH;
  if (input >= n_in) return;
  const long long row = blockIdx.y;
  const Vector16<T> eight = load16(x + row * n_in + input);
  Vector16<T> more;
#pragma unroll
  for (int i = 0; i < EACH; ++i) more.values[i] = narrowed<T>(widened(eight.values[i]) * 16.0f);
  T* to = columns + row * 2 * n_in + input / 16 * 32 + input % 16;
  store16(to, eight);
  store16(to + 16, more);
}
