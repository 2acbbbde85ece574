// A block's columns of one head's state: from the store to registers, what an update does to them, and back.
//
// A lane has one column and every eighth row of it, a warp four columns, a block's warps COLUMNS columns side by side, so that
// whole sectors are read and written. The rows are in registers from the state's one reading to its one writing; on the way
// there and back a block's columns lie in shared memory, turned from lines of the store into columns.
#pragma once

#include "copy.cuh"
#include "gated_delta/updates.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int LINE = COLUMNS + 4;  // floats of a row in shared memory: lanes of eight rows then touch all banks

// Which part of a state a thread has.
struct Lane {
  int first_row, column;  // column: of the block's

  __device__ Lane() : first_row(threadIdx.x % WARP / 4), column(threadIdx.x / WARP * 4 + threadIdx.x % 4) {}
};

// A state's block of columns in the store.
struct Stored {
  float* first;   // its row 0
  int n_rows, n_columns;  // that exist; n_columns may be more than COLUMNS
  int to_next_row;
  bool in_pieces;  // rows lie on 16 bytes

  // Begins to copy it to `tile` [D][LINE], with zeros where nothing exists; copies_commit and a barrier are the caller's.
  template <int D>
  __device__ void fetch(float* tile) const {
    if (in_pieces) {
      each_piece<D>([&](int row, int column, bool exists) {
        copy16(tile + row * LINE + column, exists ? at(row, column) : first, exists);
      });
    } else {
      each_value<D>([&](int row, int column, bool exists) {
        tile[row * LINE + column] = exists ? __ldcg(at(row, column)) : 0.0f;
      });
    }
  }

  // Writes what `tile` holds.
  template <int D>
  __device__ void keep(const float* tile) const {
    if (in_pieces) {
      each_piece<D>([&](int row, int column, bool exists) {
        if (exists) store16(at(row, column), load16(tile + row * LINE + column));
      });
    } else {
      each_value<D>([&](int row, int column, bool exists) {
        if (exists) *at(row, column) = tile[row * LINE + column];
      });
    }
  }

  __device__ float* at(int row, int column) const { return first + (row * to_next_row + column); }

 private:
  // Calls what(row, column, whether that exists) for a thread's pieces of 16 bytes, or for its values.
  template <int D, class What>
  __device__ void each_piece(const What& what) const {
    const int column = threadIdx.x % (COLUMNS / 4) * 4;
#pragma unroll
    for (int begin = 0; begin < D; begin += THREADS * 4 / COLUMNS) {
      const int row = begin + threadIdx.x / (COLUMNS / 4);
      what(row, column, row < n_rows && column < n_columns);
    }
  }
  template <int D, class What>
  __device__ void each_value(const What& what) const {
    const int column = threadIdx.x % COLUMNS;
#pragma unroll 4
    for (int begin = 0; begin < D; begin += THREADS / COLUMNS) {
      const int row = begin + threadIdx.x / COLUMNS;
      what(row, column, row < n_rows && column < n_columns);
    }
  }
};

// A lane's part of a vector over the rows of a state: N = D / ROW_LANES values.
template <int N>
__device__ inline void take(float (&own)[N], const float* turned, const Lane& lane) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(turned + i * ROW_LANES + lane.first_row * 4);
    own[i] = four.x, own[i + 1] = four.y, own[i + 2] = four.z, own[i + 3] = four.w;
  }
}

// A lane's rows of a column of `tile`, taken from there and put there.
template <int N>
__device__ inline void take_column(float (&state)[N], const float* tile, const Lane& lane) {
#pragma unroll
  for (int i = 0; i < N; ++i) state[i] = tile[(lane.first_row + i * ROW_LANES) * LINE + lane.column];
}
template <int N>
__device__ inline void put_column(const float (&state)[N], float* tile, const Lane& lane) {
#pragma unroll
  for (int i = 0; i < N; ++i) tile[(lane.first_row + i * ROW_LANES) * LINE + lane.column] = state[i];
}

// decay * state, rounded. decays: the vector of them; null: `decay` is the head's.
template <bool PER_KEY, int N>
__device__ inline void decayed(float (&state)[N], float decay, const float* decays, const Lane& lane) {
  if constexpr (PER_KEY) {
    float own[N];
    take(own, decays, lane);
#pragma unroll
    for (int i = 0; i < N; ++i) state[i] = __fmul_rn(state[i], own[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) state[i] = __fmul_rn(state[i], decay);
  }
}

// + key ⊗ delta: the product and the sum rounded, as the definition has it, for rows and for histories.
template <int N>
__device__ inline void moved(float (&state)[N], const float (&key)[N], float delta) {
#pragma unroll
  for (int i = 0; i < N; ++i) state[i] = __fadd_rn(state[i], __fmul_rn(key[i], delta));
}

// A lane's share of Σ_i weights[i] * row i, fused; even and odd ones apart, as two chains are half as long.
template <int N>
__device__ inline float weighed(const float (&state)[N], const float (&weights)[N]) {
  float even = __fmul_rn(state[0], weights[0]), odd = __fmul_rn(state[1], weights[1]);
#pragma unroll
  for (int i = 2; i < N; i += 2) {
    even = __fmaf_rn(state[i], weights[i], even);
    odd = __fmaf_rn(state[i + 1], weights[i + 1], odd);
  }
  return __fadd_rn(even, odd);
}

// The sum of the shares of a column's lanes, in all of them alike.
__device__ inline float added_up(float share) {
#pragma unroll
  for (int apart = 4; apart < WARP; apart *= 2) share = __fadd_rn(share, __shfl_xor_sync(FULL_WARP, share, apart));
  return share;
}
