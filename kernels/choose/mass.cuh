// mass.py on the device, bit for bit, and the buckets of truncate.py. Only without fused multiply-adds.
#pragma once

#include "device.cuh"

constexpr int N_BUCKETS = 2048;
constexpr int LAST_BUCKET = N_BUCKETS - 1;  // what lies 32 or more below the largest logit: its masses are 0
constexpr float PER_UNIT = 64.0f;           // buckets per unit of logit
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LEAST_LOG2 = -64.0f;
constexpr float MASS_ONE = 0x1p34f;

// Rounding down at this height leaves whole numbers, also negative ones: floor() and the conversion to int run at an
// eighth of the rate of an addition.
constexpr float WHOLE = 12582912.0f;  // 1.5 * 2**23

// Valid for -4,000,000 < x < 4,000,000.
__device__ inline float floor_of(float x, int& whole) {
  const float raised = __fadd_rd(x, WHOLE);
  whole = __float_as_int(raised) - __float_as_int(WHOLE);
  return raised - WHOLE;
}

// exp(distance) for distance <= 0, a logit minus the row's largest.
__device__ inline float weight_of(float distance) {
  const float y = fmaxf(distance * LOG2E, LEAST_LOG2);
  int exponent;
  const float f = y - floor_of(y, exponent);
  float power = 0.00021612914861179888f * f + 0.0012467845808714628f;
  power = power * f + 0.009675451554358006f;
  power = power * f + 0.055485282093286514f;
  power = power * f + 0.2402293086051941f;
  power = power * f + 0.6931470632553101f;
  power = power * f + 1.0f;
  return power * __int_as_float((exponent + 127) * (1 << 23));
}

__device__ inline unsigned long long mass_of(float distance) {
  return static_cast<unsigned long long>(weight_of(distance) * MASS_ONE);
}

// Which bucket a distance falls into: 0 is next to the largest logit.
__device__ inline int bucket_of(float distance) {
  int bucket;
  floor_of(fminf(distance * -PER_UNIT, static_cast<float>(LAST_BUCKET)), bucket);
  return bucket;
}
