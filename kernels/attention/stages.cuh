// Steps of keys and values on their way from the store's pages to products; see attention.cu.
#pragma once

#include "attention/chunks.cuh"
#include "copy.cuh"
#include "pairs.cuh"

// Stages of the pipeline of steps. Keys and values of eight bits are made T once a step has arrived, where the first stage
// would be; the room of the others holds twice as many of them.
template <class T, class KV, int D>
constexpr int STAGES = (D >= 256 ? 2 : 3) * (sizeof(T) / sizeof(KV)) - 2 * (sizeof(T) / sizeof(KV) - 1);

// The store as a block sees it: one K/V head of one span's pages.
template <class KV>
struct Pages {
  const KV* keys;
  const KV* values;
  const int* table;  // of the span
  int n_kv, head, size, d_head, d_value;
};

// Row `row` of a tile [STEP<D>][D], values 8 chunk to 8 chunk + 7; turned so that eight rows fill all banks.
template <int D>
__device__ inline int cell(int row, int chunk) {
  return row * D + (chunk ^ (row & 7)) * 8;
}

// The cell of the same row an even number of chunks further, from one of chunk 0 or 1. Chunks are turned by XOR, and so are the
// low bits of the distance; `from` depends on the lane alone and is computed once for all steps.
__device__ inline int further(int from, int n_chunks) { return (from ^ (n_chunks & 6) * 8) + (n_chunks & ~7) * 8; }

// Where values 16 / sizeof(KV) chunk and on of row `row` lie in a stage: those of T as products want them.
template <class KV, int D>
__device__ inline int arrival(int row, int chunk) {
  if constexpr (sizeof(KV) == 1) return row * D + chunk * 16;
  return cell<D>(row, chunk);
}

template <class KV, int D>
__device__ inline void fetch(const Pages<KV>& pages, const int* rows, int step, KV* stage) {
  constexpr int N = 16 / sizeof(KV);
  const int chunk = threadIdx.x % (D / N);
#pragma unroll 4
  for (int row = threadIdx.x / (D / N); row < STEP<D>; row += blockDim.x / (D / N)) {
    const int place = rows[step * STEP<D> + row];
    const auto copy = [&](KV* to, const KV* store, int width) {
      const bool wanted = place >= 0 && chunk * N < width;
      copy16(to + arrival<KV, D>(row, chunk), store + (wanted ? static_cast<long long>(place) * width + chunk * N : 0), wanted);
    };
    copy(stage, pages.keys, pages.d_head);
    copy(stage + STEP<D> * D, pages.values, pages.d_value);
  }
}

// The keys and values of a stage as T, for all warps.
template <class T, int D>
__device__ inline const T* as_products_want(const T* stage) {
  return stage;
}
template <class T, int D>
__device__ inline const T* as_products_want(const float8* stage) {
  T* tile = dynamic_shared<T>();
  for (int i = threadIdx.x; i < 2 * STEP<D> * (D / 16); i += blockDim.x) {
    const int row = i / (D / 16), chunk = i % (D / 16);  // values are rows STEP and on: a multiple of 8, as cells repeat
    Vector16<T> wide[2];
    widen16<T>(load16(stage + i * 16), wide);
    store16(tile + cell<D>(row, 2 * chunk), wide[0]);
    store16(tile + cell<D>(row, 2 * chunk + 1), wide[1]);
  }
  __syncthreads();
  return tile;
}
