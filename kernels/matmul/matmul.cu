// y = x W^T + bias for few rows: every weight is read once, straight into the registers of a tensor-core product.
//
// A block makes TILE outputs of at most 8 N_TILES rows. Weights are the product's left side (16 outputs), rows its right
// side (8 rows), so one row costs what eight cost. The bits of an output follow from the weight's shape alone: inputs
// are taken 16 at a time in ascending order within a split, splits are added in ascending order, in float32.
//
// Inputs lie in an order of their own (cuda.py packs weights so): of 32 inputs a lane takes 8 neighbours, those of its
// pair, in two products. So a lane reads 16 bytes of a row for two products, and 16 bytes of weights for one.
#include "copy.cuh"
#include "mma.cuh"

constexpr int TILE = 128;  // outputs of a block, 32 of a warp
constexpr int STEP = 64;   // inputs of a stage of the pipeline
constexpr int STAGES = 3;
constexpr int THREADS = 128;
constexpr int PARTS = 2;  // 16 outputs each, of a warp
constexpr int CELLS = TILE * STEP;

// Sums of a warp's outputs: [part of 16 outputs][eight rows][as in mma.cuh].
template <int N_TILES>
using Sums = float[PARTS][N_TILES][4];

// What a block works on. Steps are counted over all inputs; split s owns steps s * n_steps / n_splits up to the next's.
template <class T>
struct Work {
  const T* x;
  const T* weights;  // of this tile: [n_steps][CELLS]
  int first_row, n_rows, n_in, n_steps, n_splits;

  __device__ int border(int split) const { return static_cast<int>(static_cast<long long>(split) * n_steps / n_splits); }
};

// Row `row`, inputs 8 chunk to 8 chunk + 7 of a stage. Odd rows are turned by 64 bytes: two rows fill all banks.
__device__ inline int cell_of_row(int row, int chunk) { return row * STEP + ((chunk ^ ((row & 1) * 4)) * 8); }

template <class T, int N_TILES>
__device__ inline void fetch(const Work<T>& work, int step, T* stage) {
  const T* from = work.weights + static_cast<long long>(step) * CELLS;
#pragma unroll
  for (int i = 0; i < CELLS / 8 / THREADS; ++i) {
    const int cell = (i * THREADS + threadIdx.x) * 8;
    copy16(stage + cell, from + cell);
  }
  T* rows = stage + CELLS;
#pragma unroll
  for (int i = 0; i < N_TILES * 64 / THREADS; ++i) {
    const int row = (i * THREADS + threadIdx.x) / 8, chunk = threadIdx.x % 8;
    const int input = step * STEP + chunk * 8, place = work.first_row + row;
    const bool wanted = place < work.n_rows && input < work.n_in;
    const T* source = wanted ? work.x + static_cast<long long>(place) * work.n_in + input : work.x;
    copy16(rows + cell_of_row(row, chunk), source, wanted);
  }
}

template <class T, int N_TILES>
__device__ inline void multiply(const T* stage, Sums<N_TILES>& sums) {
  const int lane = threadIdx.x % WARP, group = lane / 4, pair = lane % 4;
  const T* weights = stage + (threadIdx.x / WARP) * (CELLS / (THREADS / WARP)) + lane * 8;
  const T* rows = stage + CELLS;
#pragma unroll
  for (int block = 0; block < STEP / 32; ++block) {
    uint4 x[N_TILES];
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
      x[n] = *reinterpret_cast<const uint4*>(rows + cell_of_row(8 * n + group, block * 4 + pair));
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const T* mine = weights + (block * PARTS + part) * 2 * WARP * 8;
      const uint4 first = *reinterpret_cast<const uint4*>(mine);
      const uint4 second = *reinterpret_cast<const uint4*>(mine + WARP * 8);
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        mma_16x8x16<T>(sums[part][n], {first.x, first.y, first.z, first.w}, {x[n].x, x[n].y});
        mma_16x8x16<T>(sums[part][n], {second.x, second.y, second.z, second.w}, {x[n].z, x[n].w});
      }
    }
  }
}

template <int N_TILES>
__device__ inline void add(Sums<N_TILES>& total, Sums<N_TILES>& sums) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[part][n][i] += sums[part][n][i];
        sums[part][n][i] = 0.0f;
      }
}

// Splits first_split up to end_split, one after another; the pipeline does not stop between them.
template <class T, int N_TILES>
__device__ inline void run_splits(const Work<T>& work, int first_split, int end_split, Sums<N_TILES>& total) {
  constexpr int STAGE = CELLS + 8 * N_TILES * STEP;
  T* stages = dynamic_shared<T>();
  const int begin = work.border(first_split), end = work.border(end_split);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (begin + i < end) fetch<T, N_TILES>(work, begin + i, stages + i * STAGE);
    copies_commit();
  }
  Sums<N_TILES> sums = {};
  int split = first_split, border = work.border(first_split + 1), stage = 0;
  for (int step = begin; step < end; ++step) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // this step has arrived for all, and the last one's stage is free
    const int ahead = step + STAGES - 1;
    if (ahead < end) fetch<T, N_TILES>(work, ahead, stages + (stage + STAGES - 1) % STAGES * STAGE);
    copies_commit();
    multiply<T, N_TILES>(stages + stage * STAGE, sums);
    stage = (stage + 1) % STAGES;
    if (step + 1 == border) {
      add<N_TILES>(total, sums);
      border = work.border(++split + 1);
    }
  }
  copies_wait<0>();
}

// Leaves the block's sums in memory. True in the block that comes last of its tile: it finds all of them there and adds
// them, from the first split to the last.
template <int N_TILES>
__device__ inline bool combine(float4* partials, int* n_done, int n_wanted, Sums<N_TILES>& total) {
  __shared__ int n_before;
  const int tile = blockIdx.x * gridDim.y + blockIdx.y, pair = threadIdx.x % 4, n_splits = gridDim.z;
  constexpr int SIZE = PARTS * N_TILES * THREADS;
  float4* mine = partials + (static_cast<long long>(tile) * n_splits + blockIdx.z) * SIZE + threadIdx.x;
#pragma unroll
  for (int i = 0; i < PARTS * N_TILES; ++i) {
    const float(&four)[4] = total[i / N_TILES][i % N_TILES];
    if (i % N_TILES * 8 + 2 * pair < n_wanted) __stcg(mine + i * THREADS, make_float4(four[0], four[1], four[2], four[3]));
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) n_before = atomicAdd(n_done + tile, 1);
  __syncthreads();
  if (n_before != n_splits - 1) return false;
  __threadfence();
  if (threadIdx.x == 0) n_done[tile] = 0;  // as the next launch wants it
#pragma unroll
  for (int i = 0; i < PARTS * N_TILES * 4; ++i) total[i / 4 / N_TILES][i / 4 % N_TILES][i % 4] = 0.0f;
  const float4* from = partials + static_cast<long long>(tile) * n_splits * SIZE + threadIdx.x;
  constexpr int AT_ONCE = 8 / N_TILES;  // as many as leave the registers to be read while others are waited for
#pragma unroll AT_ONCE
  for (int split = 0; split < n_splits; ++split, from += SIZE) {
#pragma unroll
    for (int i = 0; i < PARTS * N_TILES; ++i) {
      if (i % N_TILES * 8 + 2 * pair >= n_wanted) continue;
      const float4 four = __ldcg(from + i * THREADS);
      float(&sums)[4] = total[i / N_TILES][i % N_TILES];
      sums[0] += four.x, sums[1] += four.y, sums[2] += four.z, sums[3] += four.w;
    }
  }
  return true;
}

// out [n_rows, n_out] of T, or wide_out of float, whichever is not null.
template <class T, int N_TILES>
__device__ inline void store(const Sums<N_TILES>& total, const T* bias, T* out, float* wide_out, int n_rows, int n_out) {
  const int lane = threadIdx.x % WARP, group = lane / 4, pair = lane % 4;
#pragma unroll
  for (int i = 0; i < PARTS * 2; ++i) {  // eight outputs each
    const int output = blockIdx.y * TILE + threadIdx.x / WARP * (16 * PARTS) + i * 8 + group;
    if (output >= n_out) continue;
    const float added = bias == nullptr ? 0.0f : widened(bias[output]);
#pragma unroll
    for (int j = 0; j < N_TILES * 2; ++j) {
      const int row = blockIdx.x * (8 * N_TILES) + j / 2 * 8 + 2 * pair + j % 2;
      if (row >= n_rows) continue;
      const float sum = total[i / 2][j / 2][i % 2 * 2 + j % 2] + added;
      const long long place = static_cast<long long>(row) * n_out + output;
      if (out != nullptr) {
        out[place] = narrowed<T>(sum);
      } else {
        wide_out[place] = sum;
      }
    }
  }
}

// Grid: tiles of rows, tiles of outputs, and either all splits or one, for blocks that run all splits themselves.
// weights [n_tiles][n_steps][CELLS]. partials [grid x][grid y][splits][PARTS * N_TILES * THREADS] and n_done [grid x][grid y]
// of zeros, which it leaves as zeros, for a grid over splits. n_in: a multiple of 8; x 16-byte aligned.
template <class T, int N_TILES>
__global__ void __launch_bounds__(THREADS, N_TILES == 2 ? 4 : N_TILES == 4 ? 3 : 2)
    linear(const T* x, const T* weights, const T* bias, T* out, float* wide_out, float4* partials, int* n_done, int n_rows,
           int n_in, int n_out, int n_steps, int n_splits) {
  const int first_row = blockIdx.x * (8 * N_TILES);
  const T* mine = weights + static_cast<long long>(blockIdx.y) * n_steps * CELLS;
  const Work<T> work{x, mine, first_row, n_rows, n_in, n_steps, n_splits};
  Sums<N_TILES> total = {};
  const bool whole = gridDim.z == 1;
  const int first_split = blockIdx.z;
  run_splits<T, N_TILES>(work, first_split, whole ? n_splits : first_split + 1, total);
  if (!whole && !combine<N_TILES>(partials, n_done, n_rows - first_row, total)) return;
  store<T, N_TILES>(total, bias, out, wide_out, n_rows, n_out);
}
