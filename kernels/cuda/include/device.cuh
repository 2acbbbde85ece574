// What every kernel starts from: narrow floats, dynamic shared memory, 16-byte accesses.
//
// Under SLIPSTREAM_EMULATED these headers are compiled by a host compiler (tests/emulator); everything that needs PTX
// has a second body there, and kernels themselves contain no PTX.
#pragma once

#ifndef SLIPSTREAM_EMULATED
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

using bfloat16 = __nv_bfloat16;
using float16 = __half;

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int WARP = 32;

// Programmatic dependent launch: a kernel of an `early` source (source.py) begins while the kernel before it still runs.
// Until wait_for_earlier returns it may read only what no kernel writes any more, and write nothing: weights, and what describes a
// pass (its spans, positions and page tables), which kernels write that are followed by some that do not begin early. The
// kernel behind it may begin once all blocks have called let_next_begin. Before Hopper kernels run one after another.
__device__ inline void let_next_begin() {
#if !defined(SLIPSTREAM_EMULATED) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_earlier() {
#if !defined(SLIPSTREAM_EMULATED) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The block's dynamic shared memory. Its size is the launch's; all calls give the same bytes, 128-byte aligned.
template <class T>
__device__ inline T* dynamic_shared() {
#ifdef SLIPSTREAM_EMULATED
  return reinterpret_cast<T*>(emulator::dynamic_shared());
#else
  extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
#endif
}

__device__ inline float widened(float x) { return x; }
__device__ inline float widened(bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widened(float16 x) { return __half2float(x); }

// float32 to T, to nearest even.
template <class T>
__device__ inline T narrowed(float x);
template <>
__device__ inline float narrowed<float>(float x) { return x; }
template <>
__device__ inline bfloat16 narrowed<bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ inline float16 narrowed<float16>(float x) { return __float2half_rn(x); }

// 2^x, or 0 where that is no normal number, by one instruction.
__device__ inline float power_of_two(float x) {
#ifdef SLIPSTREAM_EMULATED
  return x < -126.0f ? 0.0f : exp2f(x);
#else
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#endif
}

// The larger, or NaN where either is none.
__device__ inline float larger_or_nan(float x, float y) {
#ifdef SLIPSTREAM_EMULATED
  return x == x && !(x >= y) ? y : x;
#else
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
  return most;
#endif
}

// 16 bytes as N values of T; moved by one instruction, so addresses must be multiples of 16.
template <class T>
struct alignas(16) Vector16 {
  static constexpr int N = 16 / sizeof(T);
  T values[N];
};

template <class T>
__device__ inline Vector16<T> load16(const T* address) {
  const uint4 bits = *reinterpret_cast<const uint4*>(address);
  return *reinterpret_cast<const Vector16<T>*>(&bits);
}

// For what is read once by one block and never written while the kernel runs: it does not push others out of L1.
template <class T>
__device__ inline Vector16<T> load16_once(const T* address) {
#ifdef SLIPSTREAM_EMULATED
  return load16(address);
#else
  uint4 bits;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(address));
  return *reinterpret_cast<const Vector16<T>*>(&bits);
#endif
}

// From L2, where other blocks have put it; zeros if it is not wanted. Without a branch, so that many wait at once.
__device__ inline float4 load16_if(bool wanted, const float4* address) {
  float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#ifdef SLIPSTREAM_EMULATED
  if (wanted) four = __ldcg(address);
#else
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; @p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%5]; }"
               : "+f"(four.x), "+f"(four.y), "+f"(four.z), "+f"(four.w)
               : "r"(static_cast<int>(wanted)), "l"(address)
               : "memory");
#endif
  return four;
}

template <class T>
__device__ inline void store16(T* address, const Vector16<T>& vector) {
  *reinterpret_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(&vector);
}
