// CUDA's words for a host compiler. Included before a .cu file; see machine.h for what happens then.
#pragma once

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>

#include "collectives.h"
#include "narrow.h"

#define SLIPSTREAM_EMULATED 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __shared__ static
#define __constant__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (emulator::machine->current->thread)
#define blockIdx (emulator::machine->block_index)
#define blockDim (emulator::machine->block)
#define gridDim (emulator::machine->grid)
constexpr int warpSize = 32;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {__low2float(x), __high2float(x)}; }
inline float2 __half22float2(__half2 x) { return {__low2float(x), __high2float(x)}; }

// ---- barriers

inline void __syncthreads() { emulator::barrier(0, emulator::machine->fibers.size()); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::collective(mask, emulator::nothing, nullptr); }
inline int __syncthreads_or(int value) {
  static int any[1];  // like shared memory: poisoned per block
  __syncthreads();
  any[0] = 0;
  __syncthreads();
  if (value) any[0] = 1;
  __syncthreads();
  return any[0];
}
inline int __syncthreads_and(int value) { return !__syncthreads_or(!value); }
inline int __syncthreads_count(int value) {
  static int n[1];
  __syncthreads();
  n[0] = 0;
  __syncthreads();
  n[0] += value != 0;
  __syncthreads();
  return n[0];
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- warps

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  return emulator::shuffled(mask, value, emulator::at(from, width));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return emulator::shuffled(mask, value, emulator::up(by, width));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return emulator::shuffled(mask, value, emulator::down(by, width));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return emulator::shuffled(mask, value, emulator::across(bits, width));
}
inline unsigned __ballot_sync(unsigned mask, int value) {
  emulator::Votes mine{value != 0, 0};
  emulator::collective(mask, emulator::ballot, &mine);
  return mine.out;
}
inline int __any_sync(unsigned mask, int value) { return __ballot_sync(mask, value) != 0; }
inline int __all_sync(unsigned mask, int value) { return __ballot_sync(mask, value) == mask; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  emulator::Votes mine{0, 0};
  memcpy(&mine.value, &value, sizeof(T));
  emulator::collective(mask, emulator::match, &mine);
  return mine.out;
}
namespace emulator {
template <class T> T plus(T a, T b) { return a + b; }
template <class T> T larger(T a, T b) { return a > b ? a : b; }
template <class T> T smaller(T a, T b) { return a < b ? a : b; }
template <class T> T both(T a, T b) { return a & b; }
template <class T> T either(T a, T b) { return a | b; }
}  // namespace emulator
template <class T> T __reduce_add_sync(unsigned m, T x) { return emulator::reduced<T, emulator::plus<T>>(m, x); }
template <class T> T __reduce_max_sync(unsigned m, T x) { return emulator::reduced<T, emulator::larger<T>>(m, x); }
template <class T> T __reduce_min_sync(unsigned m, T x) { return emulator::reduced<T, emulator::smaller<T>>(m, x); }
inline unsigned __reduce_and_sync(unsigned m, unsigned x) { return emulator::reduced<unsigned, emulator::both>(m, x); }
inline unsigned __reduce_or_sync(unsigned m, unsigned x) { return emulator::reduced<unsigned, emulator::either>(m, x); }

// ---- atomics: fibers change only at barriers, so plain code is atomic

template <class T> using Same = typename std::enable_if<true, T>::type;  // takes no part in finding T
template <class T> T atomicAdd(T* at, Same<T> value) { T was = *at; *at = was + value; return was; }
template <class T> T atomicMax(T* at, Same<T> value) { T was = *at; *at = was > value ? was : value; return was; }
template <class T> T atomicMin(T* at, Same<T> value) { T was = *at; *at = was < value ? was : value; return was; }
template <class T> T atomicOr(T* at, Same<T> value) { T was = *at; *at = was | value; return was; }
template <class T> T atomicAnd(T* at, Same<T> value) { T was = *at; *at = was & value; return was; }
template <class T> T atomicExch(T* at, Same<T> value) { T was = *at; *at = value; return was; }
template <class T> T atomicCAS(T* at, Same<T> expected, Same<T> value) {
  T was = *at;
  if (was == expected) *at = value;
  return was;
}
inline unsigned atomicInc(unsigned* at, unsigned most) {
  unsigned was = *at;
  *at = was >= most ? 0 : was + 1;
  return was;
}

// ---- memory

template <class T> T __ldg(const T* at) { return *at; }
template <class T> T __ldcs(const T* at) { return *at; }
template <class T> T __ldcg(const T* at) { return *at; }
template <class T> void __stcs(T* at, T value) { *at = value; }
template <class T> void __stcg(T* at, T value) { *at = value; }

// ---- arithmetic

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fadd_rd(float a, float b) {
  const double exact = static_cast<double>(a) + static_cast<double>(b);  // where the exponents are not far apart
  const float sum = static_cast<float>(exact);
  return sum > exact ? std::nextafterf(sum, -INFINITY) : sum;
}
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float one_over_root(float x) { return 1.0f / sqrtf(x); }
#define rsqrtf one_over_root  // some C libraries have these names too
#define __expf expf
#define __logf logf
#define __log2f log2f
#define __exp2f exp2f
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
inline int __float_as_int(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(unsigned x) { float value; memcpy(&value, &x, 4); return value; }
inline float __int_as_float(int x) { float value; memcpy(&value, &x, 4); return value; }
inline long long __double_as_longlong(double x) { long long bits; memcpy(&bits, &x, 8); return bits; }
inline double __longlong_as_double(long long x) { double value; memcpy(&value, &x, 8); return value; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned turned = 0;
  for (int i = 0; i < 32; ++i) turned |= ((x >> i) & 1u) << (31 - i);
  return turned;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (static_cast<uint64_t>(a) * b) >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  const uint64_t both = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<unsigned>((both << (by & 31u)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  const uint64_t both = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<unsigned>(both >> (by & 31u));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = (static_cast<uint64_t>(y) << 32) | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>((both >> (8 * ((selector >> (4 * i)) & 7u))) & 0xffu) << (8 * i);
  return result;
}
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
  else return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
  else return T(a) < T(b) ? T(b) : T(a);
}
