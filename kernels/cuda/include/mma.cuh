// Tensor-core products of one warp: 16 x 16 times 16 x 8, narrow floats in, float32 sums.
//
// Who holds what (lane = 4 * group + pair; two values to a register, the lower column or row in the low half):
//   a[0] row group,     columns 2 pair, +1    a[1] row group + 8, same columns    a[2], a[3] the same 8 columns on
//   b[0] rows 2 pair, +1 of column group      b[1] 8 rows on
//   c[0], c[1] row group, columns 2 pair, +1  c[2], c[3] row group + 8
#pragma once

#include "pairs.cuh"

// c += a * b; every lane of the warp calls it.
template <class T>
__device__ inline void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

#ifdef SLIPSTREAM_EMULATED
template <>
inline void mma_16x8x16<bfloat16>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  emulator::mma_16x8x16<bfloat16>(c, a, b);
}
template <>
inline void mma_16x8x16<float16>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  emulator::mma_16x8x16<float16>(c, a, b);
}
#else
template <>
__device__ inline void mma_16x8x16<bfloat16>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ inline void mma_16x8x16<float16>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// N 8 x 8 matrices of 16-bit values from shared memory, one register each. Lane 8 i + r gives the address of row r of
// matrix i, 16 bytes, aligned; lanes from 8 N on are not asked. A lane gets columns 2 pair, +1 of row group, or with
// TRANSPOSED rows 2 pair, +1 of column group.
template <int N, bool TRANSPOSED = false>
__device__ inline void load_matrices(unsigned (&registers)[N], const void* row) {
  static_assert(N == 1 || N == 2 || N == 4, "1, 2 or 4 matrices");
#ifdef SLIPSTREAM_EMULATED
  emulator::load_matrices(registers, N, TRANSPOSED, row);
#else
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (N == 4 && !TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (N == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (N == 2 && !TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(registers[0]), "=r"(registers[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (N == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(registers[0]), "=r"(registers[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (!TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(registers[0]) : "r"(address) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(registers[0])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// Two floats as one register of two T, `low` in the low half, by one instruction.
template <class T>
__device__ inline unsigned packed_pair(float low, float high);
template <>
__device__ inline unsigned packed_pair<bfloat16>(float low, float high) {
  return bits_of(__floats2bfloat162_rn(low, high));
}
template <>
__device__ inline unsigned packed_pair<float16>(float low, float high) {
  return bits_of(__floats2half2_rn(low, high));
}

// Turns an 8 x 8 matrix of 16-bit values, of which a lane has columns 2 pair, +1 of row group: it gets those of the turned one.
__device__ inline unsigned turned(unsigned both) {
#ifdef SLIPSTREAM_EMULATED
  return emulator::turned(both);
#else
  unsigned other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(both));
  return other;
#endif
}
