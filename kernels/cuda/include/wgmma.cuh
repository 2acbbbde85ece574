// Tensor-core products of a warpgroup, four neighbouring warps (wgmma): 64 x 16 times 16 x 128 or 192, narrow floats in,
// float32 sums. Hopper alone has them. On an H200 a sum has the bits of mma_16x8x16 over the same 16 products, infinities and
// NaN included.
//
// The left side is in registers, 16 rows in each warp, as mma.cuh has it; sums are, too: sums[4 n + i] is what c[i] is
// there, of columns 8 n to 8 n + 7. The right side lies in shared memory: [8 columns][first or last 8 of 16 inputs][column]
// [8 inputs], 128-byte aligned.
//
// Products run beside the threads, in groups. Neither sums nor left sides may be touched until the group was waited for, but
// by further products.
#pragma once

#include "device.cuh"

#if defined(SLIPSTREAM_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WARPGROUPS  // what is compiled: elsewhere kernels of these products are empty, and never launched
#endif

// sums += a * columns, of which there are 2 N; all four warps call it.
template <class T, int N>
__device__ inline void multiply_group(float (&sums)[N], const unsigned (&a)[4], const T* columns);

#ifdef SLIPSTREAM_EMULATED
template <>
inline void multiply_group<bfloat16>(float (&sums)[64], const unsigned (&a)[4], const bfloat16* columns) {
  emulator::multiply_later<bfloat16>(sums, 64 / 4, a, columns);
}
template <>
inline void multiply_group<bfloat16>(float (&sums)[96], const unsigned (&a)[4], const bfloat16* columns) {
  emulator::multiply_later<bfloat16>(sums, 96 / 4, a, columns);
}
template <>
inline void multiply_group<float16>(float (&sums)[64], const unsigned (&a)[4], const float16* columns) {
  emulator::multiply_later<float16>(sums, 64 / 4, a, columns);
}
template <>
inline void multiply_group<float16>(float (&sums)[96], const unsigned (&a)[4], const float16* columns) {
  emulator::multiply_later<float16>(sums, 96 / 4, a, columns);
}
#else
// Where the columns lie: 128 bytes from the first 8 inputs to the last, 256 from 8 columns to the next 8.
__device__ inline unsigned long long columns_at(const void* columns) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(columns));
  return (address & 0x3ffffu) >> 4 | 128ull >> 4 << 16 | 256ull >> 4 << 32;
}

#define SUMS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, " \
  "%43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_96 \
  SUMS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define EIGHT(s, i) \
  "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]), "+f"(s[i + 5]), "+f"(s[i + 6]), "+f"(s[i + 7])
#define OPERANDS_64(s) \
  EIGHT(s, 0), EIGHT(s, 8), EIGHT(s, 16), EIGHT(s, 24), EIGHT(s, 32), EIGHT(s, 40), EIGHT(s, 48), EIGHT(s, 56)
#define OPERANDS_96(s) OPERANDS_64(s), EIGHT(s, 64), EIGHT(s, 72), EIGHT(s, 80), EIGHT(s, 88)

template <>
__device__ inline void multiply_group<bfloat16>(float (&sums)[64], const unsigned (&a)[4], const bfloat16* columns) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SUMS_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
               : OPERANDS_64(sums)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns_at(columns)));
}
template <>
__device__ inline void multiply_group<bfloat16>(float (&sums)[96], const unsigned (&a)[4], const bfloat16* columns) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" SUMS_96 "}, {%96, %97, %98, %99}, %100, 1, 1, 1, 0;"
               : OPERANDS_96(sums)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns_at(columns)));
}
template <>
__device__ inline void multiply_group<float16>(float (&sums)[64], const unsigned (&a)[4], const float16* columns) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" SUMS_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
               : OPERANDS_64(sums)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns_at(columns)));
}
template <>
__device__ inline void multiply_group<float16>(float (&sums)[96], const unsigned (&a)[4], const float16* columns) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" SUMS_96 "}, {%96, %97, %98, %99}, %100, 1, 1, 1, 0;"
               : OPERANDS_96(sums)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns_at(columns)));
}
#endif

// Makes the compiler have a left side ready, so that nothing is left to do for it between group_begin and the products.
__device__ inline void in_registers(unsigned (&a)[4]) {
#ifndef SLIPSTREAM_EMULATED
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
#endif
}

// Before products whose sums or left sides the threads have written.
__device__ inline void group_begin() {
#ifndef SLIPSTREAM_EMULATED
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Ends a group of products.
__device__ inline void group_commit() {
#ifdef SLIPSTREAM_EMULATED
  emulator::products_commit();
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most N groups of the warpgroup are still under way.
template <int N>
__device__ inline void group_wait() {
#ifdef SLIPSTREAM_EMULATED
  emulator::products_wait(N);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}

// A warpgroup's threads have N registers each from here on; a kernel is begun with as many for all.
template <int N>
__device__ inline void more_registers() {
#ifndef SLIPSTREAM_EMULATED
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N>
__device__ inline void fewer_registers() {
#ifndef SLIPSTREAM_EMULATED
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
