// Tensor-core products of a warpgroup, four neighbouring warps (wgmma): 64 x 16 times 16 x 128 or 192, narrow floats in,
// float32 sums. Hopper alone has them. On an H200 a sum has the bits of mma_16x8x16 over the same 16 products, infinities and
// NaN included.
//
// The left side is in registers, 16 rows in each warp, as mma.cuh has it; sums are, too: sums[4 n + i] is what c[i] is
// there, of columns 8 n to 8 n + 7. The right side lies in shared memory: [8 columns][first or last 8 of 16 inputs][column]
// [8 inputs], 128-byte aligned.
//
// Or it is made of panels: lines of 64 values one after another, one line for each of any number of positions. The eight pieces
// of a line, 16 bytes each, are turned by its number (`piece_of_line`), so panels begin at multiples of 1,024 bytes.
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

constexpr int LINE = 64;  // values
// Where values 8 piece to 8 piece + 7 of a line of a panel begin.
__device__ inline int piece_of_line(int line, int piece) { return line * LINE + (piece ^ line % 8) * 8; }

// A right side in panels, as the products take it.
template <class T>
struct Lines {
#ifdef SLIPSTREAM_EMULATED
  const T* first;
  int to_next_panel;
  __device__ Lines further(int values) const { return {first + values, to_next_panel}; }
#else
  unsigned long long descriptor;
  __device__ Lines further(int values) const { return {descriptor + values * sizeof(T) / 16}; }
#endif
};

// From `first` on; values of lines 64 and on lie in another panel, `to_next_panel` values further.
template <class T>
__device__ inline Lines<T> lines_at(const T* first, int to_next_panel);

// sums[n][i]: what c[i] of mma.cuh is, of columns 8 n to 8 n + 7.
//
// Columns are 64 lines of a panel, from a multiple of 8 on; 16 values of each are multiplied, value 0, 16, 32 or 48 of the first
// line being `lines`. ANEW: the sums are those products alone.
template <class T, bool ANEW>
__device__ inline void multiply_with_lines(float (&sums)[8][4], const unsigned (&a)[4], const Lines<T>& lines);
// Columns are the values of 16 lines, from a multiple of 8 on.
template <class T>
__device__ inline void multiply_along_lines(float (&sums)[8][4], const unsigned (&a)[4], const Lines<T>& lines);
template <class T>
__device__ inline void multiply_along_lines(float (&sums)[16][4], const unsigned (&a)[4], const Lines<T>& lines);

#ifdef SLIPSTREAM_EMULATED
template <class T>
inline Lines<T> lines_at(const T* first, int to_next_panel) {
  return {first, to_next_panel};
}
template <class T, bool ANEW>
inline void multiply_with_lines(float (&sums)[8][4], const unsigned (&a)[4], const Lines<T>& lines) {
  if (ANEW) memset(sums, 0, sizeof sums);
  emulator::multiply_later<T>(sums[0], 8, a, lines.first, emulator::with_lines);
}
template <class T>
inline void multiply_along_lines(float (&sums)[8][4], const unsigned (&a)[4], const Lines<T>& lines) {
  emulator::multiply_later<T>(sums[0], 8, a, lines.first, emulator::along_lines, lines.to_next_panel);
}
template <class T>
inline void multiply_along_lines(float (&sums)[16][4], const unsigned (&a)[4], const Lines<T>& lines) {
  emulator::multiply_later<T>(sums[0], 16, a, lines.first, emulator::along_lines, lines.to_next_panel);
}
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
// 1,024 bytes from 8 lines to the next 8; bits 4 to 6 of an address are turned by bits 7 to 9.
template <class T>
__device__ inline Lines<T> lines_at(const T* first, int to_next_panel) {
  const unsigned long long address = static_cast<unsigned>(__cvta_generic_to_shared(first)) & 0x3ffffu, apart = to_next_panel * sizeof(T);
  return {address >> 4 | apart >> 4 << 16 | 1024ull >> 4 << 32 | 1ull << 62};
}

#define SUMS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FOUR(s) "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
#define FOURS_8(s, n) \
  FOUR(s[n]), FOUR(s[n + 1]), FOUR(s[n + 2]), FOUR(s[n + 3]), FOUR(s[n + 4]), FOUR(s[n + 5]), FOUR(s[n + 6]), FOUR(s[n + 7])
#define LEFT(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// By type of the values. adds: 0 or 1, whether to what sums are; turned: 1 where columns are values of lines.
#define OF_64(type, adds, turned) \
  "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" SUMS_32 "}, {%32, %33, %34, %35}, %36, " adds ", 1, 1, " turned ";"
#define OF_128(type) \
  "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" SUMS_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
#define PRODUCTS_OF_PANELS(T, type)                                                                                     \
  template <bool ANEW>                                                                                                  \
  __device__ inline void with_lines(float (&sums)[8][4], const unsigned (&a)[4], const Lines<T>& lines) {               \
    if constexpr (ANEW)                                                                                                 \
      asm volatile(OF_64(type, "0", "0") : FOURS_8(sums, 0) : LEFT(a), "l"(lines.descriptor));                          \
    else                                                                                                                \
      asm volatile(OF_64(type, "1", "0") : FOURS_8(sums, 0) : LEFT(a), "l"(lines.descriptor));                          \
  }                                                                                                                     \
  template <>                                                                                                           \
  __device__ inline void multiply_along_lines(float (&sums)[8][4], const unsigned (&a)[4], const Lines<T>& lines) {     \
    asm volatile(OF_64(type, "1", "1") : FOURS_8(sums, 0) : LEFT(a), "l"(lines.descriptor));                            \
  }                                                                                                                     \
  template <>                                                                                                           \
  __device__ inline void multiply_along_lines(float (&sums)[16][4], const unsigned (&a)[4], const Lines<T>& lines) {    \
    asm volatile(OF_128(type) : FOURS_8(sums, 0), FOURS_8(sums, 8) : LEFT(a), "l"(lines.descriptor));                   \
  }
PRODUCTS_OF_PANELS(bfloat16, "bf16")
PRODUCTS_OF_PANELS(float16, "f16")

template <class T, bool ANEW>
__device__ inline void multiply_with_lines(float (&sums)[8][4], const unsigned (&a)[4], const Lines<T>& lines) {
  with_lines<ANEW>(sums, a, lines);
}
#endif

constexpr int PANEL_ALIGNMENT = 1024;  // bytes
// The block's dynamic shared memory from where panels may begin; a launch asks for PANEL_ALIGNMENT bytes more.
template <class T>
__device__ inline T* dynamic_panels() {
#ifdef SLIPSTREAM_EMULATED
  return dynamic_shared<T>();  // as they may
#else
  unsigned char* bytes = dynamic_shared<unsigned char>();
  return reinterpret_cast<T*>(bytes + (-static_cast<unsigned>(__cvta_generic_to_shared(bytes)) & (PANEL_ALIGNMENT - 1)));
#endif
}

// Has the compiler read sums only behind the group_wait before this.
template <int N>
__device__ inline void are_there(float (&sums)[N][4]) {
#ifndef SLIPSTREAM_EMULATED
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("" : FOUR(sums[n])::"memory");
#endif
}

// What threads have written or copied into shared memory, and this one may read, is seen by the products that it begins next.
__device__ inline void show_to_products() {
#ifndef SLIPSTREAM_EMULATED
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

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
