// noise.py on the device, bit for bit. Only for sources compiled without fused multiply-adds.
#pragma once

#include "device.cuh"

constexpr double LN2 = 0.6931471805599453;
constexpr double ROOT_HALF = 0.7071067811865476;
constexpr float MOST_E = 23.0f;
constexpr float MOST_GUMBEL = 22.9f;

struct Words {
  unsigned of[4];
};

// Which noise a row draws from.
struct Stream {
  unsigned key_low, key_high, position;
};

// Philox4x32-10 of one counter.
__device__ inline Words philox(unsigned a, unsigned b, unsigned c, unsigned d, unsigned k0, unsigned k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned left = a * 0xD2511F53u, left_high = __umulhi(a, 0xD2511F53u);
    const unsigned right = c * 0xCD9E8D57u, right_high = __umulhi(c, 0xCD9E8D57u);
    a = right_high ^ b ^ k0;
    c = left_high ^ d ^ k1;
    b = right;
    d = left;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

// The words of tokens 4 * quad … 4 * quad + 3.
__device__ inline Words words_of(const Stream& stream, int quad) {
  return philox(quad, stream.position, 0, 0, stream.key_low, stream.key_high);
}

__device__ inline unsigned word_of(const Stream& stream, int token) {
  const Words words = words_of(stream, token / 4);
  const unsigned low = token & 1 ? words.of[1] : words.of[0], high = token & 1 ? words.of[3] : words.of[2];
  return token & 2 ? high : low;
}

__device__ inline double atanh_series(double s) {
  const double z = s * s;
  double total = 1.0 / 21.0;
#pragma unroll
  for (int k = 19; k > 0; k -= 2) total = total * z + 1.0 / k;
  return s * total;
}

// Of a normal number.
__device__ inline double exact_log(double x) {
  const long long bits = __double_as_longlong(x);
  double mantissa = __longlong_as_double((bits & 0x000fffffffffffffLL) | 0x3fe0000000000000LL);  // ½ … 1
  int exponent = static_cast<int>(bits >> 52) - 1022;
  if (mantissa < ROOT_HALF) {
    mantissa = mantissa * 2;
    exponent -= 1;
  }
  return exponent * LN2 + 2 * atanh_series((mantissa - 1) / (mantissa + 1));
}

__device__ inline float gumbel(unsigned word) {
  const double t = (__uint2float_rn(~word) + 0.5f) * 0x1p-32f;
  double e = MOST_E;
  if (t < 0.25) {
    e = 2 * atanh_series(t / (2 - t));
  } else if (t < 1) {
    e = -exact_log(1 - t);
  }
  e = e < MOST_E ? e : MOST_E;
  return static_cast<float>(-exact_log(static_cast<float>(e)));
}

// A little less than gumbel(word), from float32's fast logarithms: to compare with where a bound will do. Off by at most
// 0.004.
__device__ inline float gumbel_floor(unsigned word) {
  const float t = (__uint2float_rn(~word) + 0.5f) * 0x1p-32f;
  // E from above: -log1p(-t) <= t / (1 - t), which is close where the fast logarithm is coarse
  const float e = t < 0x1p-9f ? t / (1.0f - t) : fminf(1e-6f - __logf(1.0f - t), MOST_E);
  return -__logf(e) - 1e-3f;
}
