// How a lane gets its part of the weights, the left side of two products, from what lies in shared memory: weights of T
// as they are, codes of 8 or 4 bits widened to T. One word per output and group of inputs says what codes stand for.
//
// A piece is what a warp's 32 lanes hold of one part and block. Codes are widened to the values that `dense()` has, to the bit.
#pragma once

#include "mma.cuh"
#include "pairs.cuh"
#include "warp.cuh"

constexpr int TILE = 128;  // outputs of a block, 32 of a warp
constexpr int STEP = 64;   // inputs of a stage of the pipeline
constexpr int BLOCK = 32;  // inputs of two products
constexpr int PARTS = 2;   // 16 outputs each, of a warp
constexpr int CELLS = TILE * STEP;

// Bytes of a step of a weight.
template <int BITS>
struct Step {
  static constexpr int CODES = CELLS * BITS / 8;
  static constexpr int WORDS = BITS == 16 ? 0 : STEP / BLOCK * TILE * 4;
};

// The step that split `split` begins with. A split's sums start from zero and are added to those of the splits before: a
// result's bits hang on this.
__device__ inline int border(int split, int n_steps, int n_splits) {
  return static_cast<int>(static_cast<long long>(split) * n_steps / n_splits);
}

// Of a lane's outputs, read at once.
template <int N_PARTS>
struct alignas(8 * N_PARTS) Words {
  unsigned words[2 * N_PARTS];
};

// N_PARTS: that the warp has.
template <class T, int BITS, int N_PARTS = PARTS>
struct Meaning;

template <class T, int N_PARTS>
struct Meaning<T, 16, N_PARTS> {
  // piece [product][lane][8 values]
  __device__ void widen(const unsigned char* piece, int, unsigned (&weights)[2][4]) const {
    const uint4* mine = reinterpret_cast<const uint4*>(piece) + threadIdx.x % WARP;
#pragma unroll
    for (int product = 0; product < 2; ++product) {
      const uint4 four = mine[product * WARP];
      weights[product][0] = four.x, weights[product][1] = four.y, weights[product][2] = four.z, weights[product][3] = four.w;
    }
  }
};

// e4m3. A word is the output's float32 scale times 2^120, which is what the codes' bits lack.
template <class T, int N_PARTS>
struct Meaning<T, 8, N_PARTS> {
  float scales[N_PARTS][2];

  // words [part][half]: of the lane's outputs
  __device__ void take(const unsigned* words) {
    const Words<N_PARTS> of = *reinterpret_cast<const Words<N_PARTS>*>(words);
#pragma unroll
    for (int i = 0; i < 2 * N_PARTS; ++i) scales[i / 2][i % 2] = __uint_as_float(of.words[i]);
  }

  // piece [lane][product][first or last 8 inputs][half][2 inputs]
  __device__ void widen(const unsigned char* piece, int part, unsigned (&weights)[2][4]) const {
    const uint4 four = reinterpret_cast<const uint4*>(piece)[threadIdx.x % WARP];
    const unsigned codes[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float scale = scales[part][i % 2];
      const unsigned some = codes[i / 2];
      weights[i / 4][i % 4] =
          packed_pair<T>(lowered(some, i % 2 * 2) * scale, lowered(some, i % 2 * 2 + 1) * scale);
    }
  }
};

// Four bits in the lowest bits of this are it plus the code, of both halves of a register.
template <class T>
constexpr unsigned MANY = 0x64006400u;  // twice 1024
template <>
constexpr unsigned MANY<bfloat16> = 0x43004300u;  // twice 128

// (code - zero) * scale. A word: the scale rounded to T in the upper half; in the lower the rest of it, a T whose last five
// bits are free, and in these the zero. So (code - zero) * rest is exact, and the sum is rounded once.
template <class T, int N_PARTS>
struct Meaning<T, 4, N_PARTS> {
  const unsigned low_bits = kept(0x000f000fu);
  Pair<T> zeros[N_PARTS][2], scales[N_PARTS][2], rests[N_PARTS][2];

  // words [part][half]: of the lane's outputs
  __device__ void take(const unsigned* words) {
    const Words<N_PARTS> of = *reinterpret_cast<const Words<N_PARTS>*>(words);
#pragma unroll
    for (int i = 0; i < 2 * N_PARTS; ++i) {
      const unsigned rest_and_zero = __byte_perm(of.words[i], 0u, 0x1010u);
      scales[i / 2][i % 2] = as_pair<T>(__byte_perm(of.words[i], 0u, 0x3232u));
      rests[i / 2][i % 2] = as_pair<T>(rest_and_zero & 0xffe0ffe0u);
      zeros[i / 2][i % 2] = as_pair<T>((rest_and_zero & 0x001f001fu) | MANY<T>);
    }
  }

  // piece [lane][product][2 inputs][first or last 8 inputs][half], the earlier in lower bits
  __device__ void widen(const unsigned char* piece, int part, unsigned (&weights)[2][4]) const {
    const uint2 two = reinterpret_cast<const uint2*>(piece)[threadIdx.x % WARP];
    const unsigned codes[2] = {two.x, two.y};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int half = i % 2;
      const Pair<T> raised = as_pair<T>((codes[i / 4] >> i % 4 * 4 & low_bits) | MANY<T>);
      const Pair<T> centred = __hsub2(raised, zeros[part][half]);
      weights[i / 4][i % 4] = bits_of(__hfma2(centred, scales[part][half], __hmul2(centred, rests[part][half])));
    }
  }
};
