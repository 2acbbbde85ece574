// Two narrow floats in a register, and e4m3: eight bits with four of exponent (bias 7) and three of mantissa, no
// infinities, NaN only with all seven bits set. Moved to where a wider format has its exponent and mantissa, a code's bits
// are its value but for a power of two, zeros and subnormals included.
#pragma once

#include "device.cuh"

struct float8 {
  unsigned char bits;
};

template <class T>
struct PairOf;
template <>
struct PairOf<bfloat16> {
  using Type = __nv_bfloat162;
};
template <>
struct PairOf<float16> {
  using Type = __half2;
};
template <class T>
using Pair = typename PairOf<T>::Type;

template <class T>
__device__ inline Pair<T> as_pair(unsigned bits) {
  Pair<T> pair;
  memcpy(&pair, &bits, 4);
  return pair;
}
template <class P>
__device__ inline unsigned bits_of(const P& pair) {
  unsigned bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

// Two T of a register as floats, the lower first.
template <class T>
__device__ inline float2 widened_pair(unsigned both);
template <>
__device__ inline float2 widened_pair<bfloat16>(unsigned both) {
  return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
}
template <>
__device__ inline float2 widened_pair<float16>(unsigned both) {
  return __half22float2(as_pair<float16>(both));
}

template <class T>
constexpr int MANTISSA_SHIFT = 1;  // from a code in the upper half of 16 bits to T's exponent and mantissa
template <>
constexpr int MANTISSA_SHIFT<bfloat16> = 4;
template <class T>
constexpr unsigned RAISE = 0x5c005c00u;  // twice 2^8, what float16 then lacks
template <>
constexpr unsigned RAISE<bfloat16> = 0x7b807b80u;  // twice 2^120

// Two codes, each in the upper half of 16 bits, as two T; what the lower halves hold does not matter. Not for NaN.
template <class T>
__device__ inline unsigned raised(unsigned codes) {
  const unsigned moved = (codes & 0x80008000u) | ((codes & 0x7f007f00u) >> MANTISSA_SHIFT<T>);
  return bits_of(__hmul2(as_pair<T>(moved), as_pair<T>(RAISE<T>)));
}

// The two codes of `codes` that `bytes` names.
template <class T>
__device__ inline unsigned raised_pair(unsigned codes, unsigned bytes) {
  return raised<T>(__byte_perm(codes, 0u, bytes));
}

// Sixteen codes as T, exactly.
template <class T>
__device__ inline void widen16(const Vector16<float8>& codes, Vector16<T> (&to)[2]) {
  unsigned words[4], wide[8], full = 0;
  memcpy(words, &codes, 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    wide[2 * i] = raised_pair<T>(words[i], 0x1404u);
    wide[2 * i + 1] = raised_pair<T>(words[i], 0x3424u);
    full |= (words[i] & 0x7f7f7f7fu) + 0x01010101u;
  }
  memcpy(to, wide, 32);
  if ((full & 0x80808080u) == 0) return;
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if ((words[i / 4] >> i % 4 * 8 & 0x7fu) == 0x7fu) to[i / 8].values[i % 8] = narrowed<T>(__uint_as_float(0x7fc00000u));
}
