// bfloat16 and float16 on the host, with those of CUDA's functions that our kernels use.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float __low2float(__nv_bfloat162 x) { return __bfloat162float(x.x); }
inline float __high2float(__nv_bfloat162 x) { return __bfloat162float(x.y); }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t x) { return {x}; }

inline float __half2float(__half x) {
  _Float16 narrow;
  memcpy(&narrow, &x, 2);
  return static_cast<float>(narrow);
}
inline __half __float2half_rn(float x) {
  const _Float16 narrow = static_cast<_Float16>(x);
  __half value;
  memcpy(&value, &narrow, 2);
  return value;
}
inline __half __float2half(float x) { return __float2half_rn(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float __low2float(__half2 x) { return __half2float(x.x); }
inline float __high2float(__half2 x) { return __half2float(x.y); }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(uint16_t x) { return {x}; }

// Arithmetic on two at once: exact in double, or as good as, then rounded once.
inline __half rounded(__half, double x) {
  const _Float16 narrow = static_cast<_Float16>(x);
  __half value;
  memcpy(&value, &narrow, 2);
  return value;
}
inline __nv_bfloat16 rounded(__nv_bfloat16, double x) {
  float narrow = static_cast<float>(x);
  if (narrow != x) {  // cut off, the last bit set: the next rounding then sees that there was more
    uint32_t bits;
    memcpy(&bits, &narrow, 4);
    if (std::fabs(static_cast<double>(narrow)) > std::fabs(x)) bits -= 1;
    bits |= 1;
    memcpy(&narrow, &bits, 4);
  }
  return __float2bfloat16_rn(narrow);
}
template <class Two, class Of>
Two of_both(Of of, Two a, Two b, Two c) {
  return {rounded(a.x, of(__low2float(a), __low2float(b), __low2float(c))),
          rounded(a.x, of(__high2float(a), __high2float(b), __high2float(c)))};
}
template <class Two>
Two __hsub2(Two a, Two b) {
  return of_both([](double x, double y, double) { return x - y; }, a, b, b);
}
template <class Two>
Two __hmul2(Two a, Two b) {
  return of_both([](double x, double y, double) { return x * y; }, a, b, b);
}
template <class Two>
Two __hfma2(Two a, Two b, Two c) {
  return of_both([](double x, double y, double z) { return std::fma(x, y, z); }, a, b, c);
}
