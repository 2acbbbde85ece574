// Which rows a kernel has work for, found by all blocks alike, so that as many blocks as run at a time share it, however few
// rows there are.
#pragma once

#include "block.cuh"

// Calls work(row, piece) for the pieces of the rows of which `wanted(row)` holds that are this block's. All threads call it and
// all blocks together take every piece once. blockDim.x: a multiple of WARP, and 512 at most.
template <class WANTED, class WORK>
__device__ inline void share_out(int n_rows, int n_pieces, WANTED wanted, WORK work) {
  __shared__ short rows[512];  // counted from the first of a round
  __shared__ int n_before[512 / WARP + 1];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
  int next = blockIdx.x;  // the block's next piece
  for (int first = 0; first < n_rows; first += blockDim.x) {
    const int own = first + threadIdx.x;
    const bool is_wanted = own < n_rows && wanted(own);
    const unsigned all = __ballot_sync(FULL_WARP, is_wanted);
    __syncthreads();  // the round before has been read
    if (lane == 0) n_before[warp + 1] = __popc(all);
    __syncthreads();
    if (threadIdx.x == 0) {
      n_before[0] = 0;
      for (int i = 0; i < n_warps; ++i) n_before[i + 1] += n_before[i];
    }
    __syncthreads();
    if (is_wanted) rows[n_before[warp] + __popc(all & ((1u << lane) - 1))] = static_cast<short>(threadIdx.x);
    __syncthreads();
    const int n = n_before[n_warps] * n_pieces;
    for (; next < n; next += gridDim.x) work(first + rows[next / n_pieces], next % n_pieces);
    next -= n;
  }
}
