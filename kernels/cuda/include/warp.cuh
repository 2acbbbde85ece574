// Reductions over a warp and a block in a fixed order, so that a result never depends on timing.
#pragma once

#include "device.cuh"

template <class T>
__device__ inline T warp_sum(T value) {
#pragma unroll
  for (int apart = WARP / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(FULL_WARP, value, apart);
  return value;
}

template <class T>
__device__ inline T warp_max(T value) {
#pragma unroll
  for (int apart = WARP / 2; apart > 0; apart /= 2) {
    const T other = __shfl_xor_sync(FULL_WARP, value, apart);
    value = other > value ? other : value;
  }
  return value;
}

// Of 64 bits: two reductions of 32, each one instruction, instead of ten exchanges.
template <>
__device__ inline unsigned long long warp_max(unsigned long long value) {
  const unsigned high = static_cast<unsigned>(value >> 32), most = __reduce_max_sync(FULL_WARP, high);
  const unsigned low = __reduce_max_sync(FULL_WARP, high == most ? static_cast<unsigned>(value) : 0u);
  return static_cast<unsigned long long>(most) << 32 | low;
}

template <class T>
__device__ inline T warp_min(T value) {
#pragma unroll
  for (int apart = WARP / 2; apart > 0; apart /= 2) {
    const T other = __shfl_xor_sync(FULL_WARP, value, apart);
    value = other < value ? other : value;
  }
  return value;
}

// The constant, in a register from here on: an instruction takes one constant at most, and the compiler would move a second
// one to a register each time. It cannot know that launches have one layer of threads (launcher.py).
__device__ inline unsigned kept(unsigned constant) { return constant * blockDim.y; }

// The value, computed once: the compiler would compute what is cheap anew in every round of a loop.
__device__ inline int held(int value) {
#ifndef SLIPSTREAM_EMULATED
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// What follows in a branch that few take: kept a branch, of which the others pay nothing.
__device__ inline void seldom() {
#ifndef SLIPSTREAM_EMULATED
  asm volatile("");
#endif
}

// 1 / x to about the last bit, for normal x: the same on every call.
__device__ inline float about_one_over(float x) {
#ifdef SLIPSTREAM_EMULATED
  return 1.0f / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
