// How a lane gets its part of the weights, the left side of two products, from what lies in shared memory: weights of T
// as they are, codes as the T that they are without their scale. One word per output and group of inputs says
// what codes stand for.
//
// A piece is what a warp's 32 lanes hold of one part and block. Sums of codes are in units of a scale: that of the group whose
// inputs were added last. Where the next group begins they are brought to its scale, and where a split ends they are multiplied
// by it. So a weight's value is never rounded to T, and a scale costs nothing while its group lasts.
#pragma once

#include "mma.cuh"
#include "pairs.cuh"
#include "warp.cuh"

constexpr int TILE = 128;  // outputs of a block, 32 of a warp
constexpr int STEP = 64;   // inputs of a stage of the pipeline
constexpr int BLOCK = 32;  // inputs of two products
constexpr int PARTS = 2;   // 16 outputs each, of a warp
constexpr int CELLS = TILE * STEP;

// What a weight is stored as: of T itself, or codes of 8 or 4 bits.
struct Plain {
  static constexpr int BITS = 16;
};
struct E4m3 {
  static constexpr int BITS = 8;
};
struct Int8 {
  static constexpr int BITS = 8;
};
struct Int4 {
  static constexpr int BITS = 4;
};
template <class Code>
constexpr bool IS_PLAIN = Code::BITS == 16;

// Bytes of a step of a weight.
template <class Code>
struct Step {
  static constexpr int CODES = CELLS * Code::BITS / 8;
  static constexpr int WORDS = IS_PLAIN<Code> ? 0 : STEP / BLOCK * TILE * 4;
};

// The step that split `split` begins with. A split's sums start from zero and are added to those of the splits before: a
// result's bits hang on this.
__device__ inline int border(int split, int n_steps, int n_splits) {
  return static_cast<int>(static_cast<long long>(split) * n_steps / n_splits);
}

// Goes through inputs, BLOCK at a time, from `first_input` on, and says where words are to be taken: at the first and wherever
// a group begins.
struct Groups {
  int size, n_left = 0, n_next;

  __device__ Groups(int size, int first_input) : size(size), n_next(size - first_input % size) {}

  __device__ bool begins() {
    const bool is_first = n_left == 0;
    if (is_first) n_left = n_next, n_next = size;
    n_left -= BLOCK;
    return is_first;
  }
};

// Of a lane's outputs, read at once.
template <int N_PARTS>
struct alignas(8 * N_PARTS) Words {
  unsigned words[2 * N_PARTS];
};

// The scales of a lane's outputs: eight of each part, and eight more.
template <int N_PARTS>
struct Scales {
  float units[N_PARTS][2], coming[N_PARTS][2];

  __device__ Scales() {
#pragma unroll
    for (int i = 0; i < 2 * N_PARTS; ++i) units[i / 2][i % 2] = 1.0f;
  }

  // What sums are to be multiplied by, so that they are in units of the scales that were taken last.
  __device__ float change(int part, int half) {
    const float quotient = units[part][half] * about_one_over(coming[part][half]);
    units[part][half] = coming[part][half];
    return quotient;
  }

  // words [part][half]: those of the lane's outputs. unused: bits that are no part of a scale
  __device__ void take_scales(const Words<N_PARTS>& of, unsigned unused = 0u) {
#pragma unroll
    for (int i = 0; i < 2 * N_PARTS; ++i) coming[i / 2][i % 2] = __uint_as_float(of.words[i] & ~unused);
  }

  // A sum's value. Rounded by itself: other blocks read it from memory before they add it.
  __device__ float value(int part, int half, float sum) const { return __fmul_rn(sum, units[part][half]); }
};

// N_PARTS: that the warp has.
template <class T, class Code, int N_PARTS = PARTS>
struct Meaning;

template <class T, int N_PARTS>
struct Meaning<T, Plain, N_PARTS> {
  static constexpr int EACH = 16;  // bytes of a lane that lie side by side in a piece

  // mine: the lane's part of a piece [product][lane][8 values]
  __device__ void widen(const unsigned char* mine, int, unsigned (&weights)[2][4]) const {
#pragma unroll
    for (int product = 0; product < 2; ++product) {
      const uint4 four = reinterpret_cast<const uint4*>(mine)[product * WARP];
      weights[product][0] = four.x, weights[product][1] = four.y, weights[product][2] = four.z, weights[product][3] = four.w;
    }
  }

  __device__ float value(int, int, float sum) const { return sum; }
};

// A word is the output's float32 scale.
template <class T, int N_PARTS>
struct Meaning<T, E4m3, N_PARTS> : Scales<N_PARTS> {
  static constexpr int EACH = 16;

  // words [part][half]: of the lane's outputs
  __device__ void take(const unsigned char* words) { this->take_scales(*reinterpret_cast<const Words<N_PARTS>*>(words)); }

  // mine: [product][first or last 8 inputs][2 inputs][half]
  __device__ void widen(const unsigned char* mine, int, unsigned (&weights)[2][4]) const {
    const uint4 four = *reinterpret_cast<const uint4*>(mine);
    const unsigned codes[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) weights[i / 4][i % 4] = raised<T>(i % 2 == 0 ? codes[i / 2] << 8 : codes[i / 2]);
  }
};

// Four bits (seven) in the lowest bits of this are it plus the code, of both halves of a register.
template <class T>
constexpr unsigned MANY = 0x64006400u;  // twice 1024
template <>
constexpr unsigned MANY<bfloat16> = 0x43004300u;  // twice 128

// Eight bits with a sign. A word is the output's float32 scale. The code's sign is a bit of bfloat16's exponent here, where it is
// worth as much as in the code: 128.
template <class T, int N_PARTS>
struct Meaning<T, Int8, N_PARTS> : Scales<N_PARTS> {
  static constexpr int EACH = 16;
  const unsigned low_bits = kept(0x007f007fu), signs = kept(0x00800080u);

  // words [part][half]: of the lane's outputs
  __device__ void take(const unsigned char* words) { this->take_scales(*reinterpret_cast<const Words<N_PARTS>*>(words)); }

  // mine: as of e4m3
  __device__ void widen(const unsigned char* mine, int, unsigned (&weights)[2][4]) const {
    const uint4 four = *reinterpret_cast<const uint4*>(mine);
    const unsigned codes[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned two = codes[i / 2] >> i % 2 * 8;
      const Pair<T> more = as_pair<T>((two & low_bits) | MANY<T>), sign = as_pair<T>((two & signs) | MANY<T>);
      weights[i / 4][i % 4] = bits_of(__hsub2(more, sign));
    }
  }
};

// code - zero. A word is the output's float32 scale, whose last five bits are free, and in these the zero.
template <class T, int N_PARTS>
struct Meaning<T, Int4, N_PARTS> : Scales<N_PARTS> {
  static constexpr int EACH = 8;
  const unsigned low_bits = kept(0x000f000fu);
  Pair<T> zeros[N_PARTS][2];

  // words [part][half]: of the lane's outputs
  __device__ void take(const unsigned char* words) {
    const Words<N_PARTS> of = *reinterpret_cast<const Words<N_PARTS>*>(words);
    this->take_scales(of, 0x1fu);
#pragma unroll
    for (int i = 0; i < 2 * N_PARTS; ++i) zeros[i / 2][i % 2] = as_pair<T>((of.words[i] & 0x1fu) * 0x00010001u | MANY<T>);
  }

  // mine: [product][2 inputs][first or last 8 inputs][half], the earlier in lower bits
  __device__ void widen(const unsigned char* mine, int part, unsigned (&weights)[2][4]) const {
    const uint2 two = *reinterpret_cast<const uint2*>(mine);
    const unsigned codes[2] = {two.x, two.y};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Pair<T> more = as_pair<T>((codes[i / 4] >> i % 4 * 4 & low_bits) | MANY<T>);
      weights[i / 4][i % 4] = bits_of(__hsub2(more, zeros[part][i % 2]));
    }
  }
};
