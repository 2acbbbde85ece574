// Over all threads of a block, which all call them: largest, smallest, sum of integers, and who comes last.
#pragma once

#include "warp.cuh"

template <class T, class OF>
__device__ inline T block_reduced(T value, OF of) {
  __shared__ T parts[WARP];
  const int lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP;
  value = of(value);
  __syncthreads();  // what an earlier call left has been read
  if (lane == 0) parts[threadIdx.x / WARP] = value;
  __syncthreads();
  return of(lane < n_warps ? parts[lane] : T{});  // 0 is no larger than a key and adds nothing
}

template <class T>
__device__ inline T block_max(T value) {
  return block_reduced(value, [](T x) { return warp_max(x); });
}

template <class T>
__device__ inline T block_sum(T value) {
  return block_reduced(value, [](T x) { return warp_sum(x); });
}

// Whether this is the last of n blocks to call it with that counter, which starts at 0. Then everything that the
// others wrote before is visible to reads that pass the L1 cache by (`__ldcg`).
__device__ inline bool arrives_last(int* counter, int n) {
  __shared__ int n_before[1];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) n_before[0] = atomicAdd(counter, 1);
  __syncthreads();
  __threadfence();
  return n_before[0] == n - 1;
}
