// y = x W^T + bias for many rows, on Hopper: what matmul.cu computes, bit for bit, by products of warpgroups.
//
// A block has one place after another: 128 outputs of 128 or 192 rows. A warp of its own has the copy engine bring codes and
// rows; two warpgroups multiply, each 64 of the outputs, and wait for each other nowhere, so that one multiplies while the
// other makes weights of codes, or stores. Weights are the left side, in registers, as matmul.cu packs and widens them; rows
// the right side, from shared memory, in the order that `arrange` has put them in.
#include "bulk.cuh"
#include "fragments.cuh"
#include "wgmma.cuh"

constexpr int MULTIPLIERS = 256;            // threads of two warpgroups
constexpr int THREADS = MULTIPLIERS + 128;  // the third warpgroup has the warp that copies, and registers to give away
constexpr int MOST_SHARED = 224 * 1024;

// A stage of the pipeline, of which there are as many as fit.
template <class Code, int ROWS>
struct Stage {
  static constexpr int CODES = Step<Code>::CODES, WORDS = Step<Code>::WORDS;
  static constexpr int SIZE = CODES + WORDS + ROWS * STEP * 2;
  static constexpr int COUNT = MOST_SHARED / SIZE;
};

// What a launch works on.
template <class T>
struct Work {
  const T* rows;               // [n_across][n_steps][ROWS * STEP]
  const unsigned char* codes;  // [n_tiles][n_steps][Stage::CODES]
  const unsigned* words;       // [n_tiles][n_groups][TILE]; none for 16 bits
  int n_across, n_tiles, n_steps, n_splits, n_groups;
  int group;                   // inputs that share a word, a multiple of BLOCK

  __device__ int border(int split) const { return ::border(split, n_steps, n_splits); }
  __device__ int n_places() const { return n_across * n_tiles; }
};

// Places are numbered across the rows first, eight at a time: blocks that run at once share weights, and their rows stay in L2.
struct Place {
  static constexpr int AT_ONCE = 8;
  int across, tile;  // of rows, and of outputs

  template <class T>
  __device__ Place(const Work<T>& work, int number) {
    const int before = number / (AT_ONCE * work.n_tiles) * AT_ONCE, rest = number - before * work.n_tiles;
    const int side_by_side = min(AT_ONCE, work.n_across - before);
    across = before + rest % side_by_side, tile = rest / side_by_side;
  }
};

// The copies of all of a block's places, by one thread.
template <class T, class Code, int ROWS, int COUNT>
__device__ inline void feed(const Work<T>& work, unsigned char* stages, Barrier* arrived, Barrier* free) {
  using Bytes = Stage<Code, ROWS>;
  constexpr int OF_ROWS = ROWS * STEP * 2, OF_WORDS = TILE * 4;
  Turn<COUNT> turn;
  for (int number = blockIdx.x; number < work.n_places(); number += gridDim.x) {
    const Place place(work, number);
    const long long tile = place.tile;
    const unsigned* words = work.words + tile * work.n_groups * TILE;  // of the next group to come
    Groups groups(work.group, 0);
    for (int step = 0; step < work.n_steps; ++step, turn.next()) {
      unsigned char* stage = stages + turn.stage * Bytes::SIZE;
      Barrier* barrier = arrived + turn.stage;
      barrier_wait(free + turn.stage, turn.parity ^ 1);
      const bool begin[2] = {!IS_PLAIN<Code> && groups.begins(), !IS_PLAIN<Code> && groups.begins()};  // of the step's blocks
      barrier_expect(barrier, Bytes::CODES + (begin[0] + begin[1]) * OF_WORDS + OF_ROWS);
      bulk_copy(stage, work.codes + (tile * work.n_steps + step) * Bytes::CODES, Bytes::CODES, barrier);
      for (int block = 0; block < STEP / BLOCK; ++block) {
        if (!begin[block]) continue;
        bulk_copy(stage + Bytes::CODES + block * OF_WORDS, words, OF_WORDS, barrier);
        words += TILE;
      }
      const T* rows = work.rows + (static_cast<long long>(place.across) * work.n_steps + step) * (ROWS * STEP);
      bulk_copy(stage + Bytes::CODES + Bytes::WORDS, rows, OF_ROWS, barrier);
    }
  }
}

// Where a thread stands: its warpgroup has one of each warp's two parts of 16 outputs (fragments.cuh).
struct Lane {
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, part = threadIdx.x / (4 * WARP);
  int group = lane / 4, pair = lane % 4;
};

template <int ROWS>
using Sums = float[ROWS / 2];    // of a warp's 16 outputs, as in wgmma.cuh
using Weights = unsigned[2][4];  // the left sides of two products: 32 inputs

// The weights of block 0 or 1 of a stage. True if a group begins there: sums have to be brought to its scale.
template <class T, class Code, int ROWS>
__device__ inline bool take(const Lane& at, const unsigned char* stage, int block, Groups& groups, Meaning<T, Code, 1>& meaning,
                            Weights& weights) {
  using Bytes = Stage<Code, ROWS>;
  constexpr int OF_PART = Bytes::CODES / 4 / (STEP / BLOCK) / PARTS;  // bytes of a warp's part and block
  constexpr int OF_WORDS = TILE * 4;
  bool begins = false;
  if constexpr (!IS_PLAIN<Code>) {
    begins = groups.begins();
    if (begins) meaning.take(stage + Bytes::CODES + block * OF_WORDS + ((at.warp * 8 + at.group) * PARTS + at.part) * 8);
  }
  const unsigned char* codes = stage + ((at.warp * (STEP / BLOCK) + block) * PARTS + at.part) * OF_PART;
  meaning.widen(codes + at.lane * Meaning<T, Code, 1>::EACH, 0, weights);
  in_registers(weights[0]);
  in_registers(weights[1]);
  return begins;
}

// Brings sums to the scales that were taken last.
template <class T, class Code, int ROWS>
__device__ inline void change_units(Meaning<T, Code, 1>& meaning, Sums<ROWS>& sums) {
  if constexpr (!IS_PLAIN<Code>) {
    const float quotients[2] = {meaning.change(0, 0), meaning.change(0, 1)};
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) sums[i] *= quotients[i % 4 / 2];
  }
}

// Begins their products with the rows of the same stage.
template <class T, class Code, int ROWS>
__device__ inline void multiply(const unsigned char* stage, int block, const Weights& weights, Sums<ROWS>& sums) {
  using Bytes = Stage<Code, ROWS>;
  const T* rows = reinterpret_cast<const T*>(stage + Bytes::CODES + Bytes::WORDS) + block * (ROWS * BLOCK);
  group_begin();
  multiply_group<T>(sums, weights[0], rows);
  multiply_group<T>(sums, weights[1], rows + ROWS * 16);
  group_commit();
}

// Adds a split's sums to those of the splits before it.
template <class T, class Code, int ROWS>
__device__ inline void join(Sums<ROWS>& total, const Meaning<T, Code, 1>& meaning, const Sums<ROWS>& sums) {
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) total[i] += meaning.value(0, i % 4 / 2, sums[i]);
}

// out [n_rows, n_out] of T, or wide_out of float, whichever is not null. A lane has two rows of an output, and stores two
// outputs of a row.
template <class T, int ROWS>
__device__ inline void store(const Lane& at, const Sums<ROWS>& total, const Place& place, const T* bias, T* out, float* wide_out,
                             int n_rows, int n_out) {
  const int first_row = place.across * ROWS, first_output = place.tile * TILE + (at.warp * PARTS + at.part) * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // eight outputs each
    const int output = first_output + half * 8 + at.group, turned_output = first_output + half * 8 + 2 * at.pair;
    const float added = bias == nullptr || output >= n_out ? 0.0f : widened(bias[output]);
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
      const float low = total[n * 4 + half * 2] + added, high = total[n * 4 + half * 2 + 1] + added;
      const int row = first_row + n * 8 + 2 * at.pair, turned_row = first_row + n * 8 + at.group;
      if (out == nullptr) {
        if (output >= n_out) continue;
        if (row < n_rows) wide_out[static_cast<long long>(row) * n_out + output] = low;
        if (row + 1 < n_rows) wide_out[static_cast<long long>(row + 1) * n_out + output] = high;
        continue;
      }
      const unsigned both = turned(packed_pair<T>(low, high));
      T* to = out + static_cast<long long>(turned_row) * n_out + turned_output;
      if (turned_row >= n_rows || turned_output >= n_out) continue;
      if (n_out % 2 == 0) {
        *reinterpret_cast<unsigned*>(to) = both;
      } else {
        T values[2];
        memcpy(values, &both, 4);
        to[0] = values[0];
        if (turned_output + 1 < n_out) to[1] = values[1];
      }
    }
  }
}

// All of a block's places, by the two warpgroups. Weights of 32 inputs are made while those before are multiplied.
template <class T, class Code, int ROWS, int COUNT>
__device__ inline void multiply_all(const Work<T>& work, const unsigned char* stages, Barrier* arrived, Barrier* free,
                                    const T* bias, T* out, float* wide_out, int n_rows, int n_out) {
  constexpr int SIZE = Stage<Code, ROWS>::SIZE;
  const Lane at;
  Turn<COUNT> turn;
  Groups groups(work.group, 0);
  Meaning<T, Code, 1> meaning;
  Weights first, second;  // of a stage
  barrier_wait(arrived, 0);
  bool changes = take<T, Code, ROWS>(at, stages, 0, groups, meaning, first);
  for (int number = blockIdx.x; number < work.n_places(); number += gridDim.x) {
    Sums<ROWS> total = {};
    const int n_steps = work.n_steps + (number + gridDim.x < work.n_places());  // that arrive, with the next place's first
    int step = 0;
    for (int split = 0; split < work.n_splits; ++split) {
      Sums<ROWS> sums = {};
      for (; step < work.border(split + 1); ++step) {
        const int own = turn.stage;
        const unsigned char* stage = stages + own * SIZE;
        if (changes) change_units<T, Code, ROWS>(meaning, sums);
        multiply<T, Code, ROWS>(stage, 0, first, sums);
        if (take<T, Code, ROWS>(at, stage, 1, groups, meaning, second)) {
          group_wait<0>();
          change_units<T, Code, ROWS>(meaning, sums);
        }
        multiply<T, Code, ROWS>(stage, 1, second, sums);
        turn.next();
        group_wait<1>();  // `first` is free
        if (step + 1 < n_steps) {
          barrier_wait(arrived + turn.stage, turn.parity);
          if (step + 1 == work.n_steps) groups = Groups(work.group, 0);
          changes = take<T, Code, ROWS>(at, stages + turn.stage * SIZE, 0, groups, meaning, first);
        }
        group_wait<0>();
        if (at.lane == 0) barrier_arrive(free + own);
      }
      join<T, Code, ROWS>(total, meaning, sums);
    }
    store<T, ROWS>(at, total, Place(work, number), bias, out, wide_out, n_rows, n_out);
  }
}

// Grid: as many blocks as can run at once, or places. rows: what `arrange` makes of x. codes, words, group: as in matmul.cu.
template <class T, class Code, int ROWS>
__global__ void __launch_bounds__(THREADS, 1)
    prompt(const T* rows, const unsigned char* codes, const unsigned* words, const T* bias, T* out, float* wide_out, int n_rows,
           int n_out, int n_steps, int n_splits, int n_groups, int group) {
#ifdef HAS_WARPGROUPS
  constexpr int COUNT = Stage<Code, ROWS>::COUNT;
  constexpr int MANY = 240, FEW = 24;  // registers of a thread; a block has 65,536, and begins with 168 for each
  __shared__ Barrier arrived[COUNT], free[COUNT];
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < COUNT; ++i) barrier_init(arrived + i, 1), barrier_init(free + i, MULTIPLIERS / WARP);
    barriers_begin();
  }
  __syncthreads();
  wait_for_earlier();
  unsigned char* stages = dynamic_shared<unsigned char>();
  const int n_across = (n_rows + ROWS - 1) / ROWS, n_tiles = (n_out + TILE - 1) / TILE;
  const Work<T> work{rows, codes, words, n_across, n_tiles, n_steps, n_splits, n_groups, group};
  if (threadIdx.x < MULTIPLIERS) {
    more_registers<MANY>();
    multiply_all<T, Code, ROWS, COUNT>(work, stages, arrived, free, bias, out, wide_out, n_rows, n_out);
  } else {
    fewer_registers<FEW>();
    if (threadIdx.x == MULTIPLIERS) feed<T, Code, ROWS, COUNT>(work, stages, arrived, free);
  }
#endif
}

// x [n_rows, n_in] as [n_across][n_steps][16 inputs][8 rows][half][row][8 inputs], filled up with zeros; inputs are permuted
// within 32 as weights are (matmul.cu). A thread has 32 inputs of a row. Grid: steps, n_across; n_in: a multiple of 8; width: rows
// of a block.
template <class T>
__global__ void __launch_bounds__(STEP / BLOCK * 192) arrange(const T* x, T* rows, int n_rows, int n_in, int width) {
  let_next_begin();
  wait_for_earlier();
  const int own = threadIdx.x % width, block = threadIdx.x / width;
  const int row = blockIdx.y * width + own, input = blockIdx.x * STEP + block * BLOCK;
  unsigned words[4][4] = {};  // [pair][two inputs]
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    if (row < n_rows && input + 8 * pair < n_in) {
      const Vector16<T> eight = load16(x + static_cast<long long>(row) * n_in + input + 8 * pair);
      memcpy(words[pair], &eight, 16);
    }
  T* to = rows + (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * (width * STEP);
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // product, half
    const unsigned four[4] = {words[0][i], words[1][i], words[2][i], words[3][i]};
    Vector16<T> eight;
    memcpy(&eight, four, 16);
    const int line = ((block * 2 + i / 2) * (width / 8) + own / 8) * 2 + i % 2;
    store16(to + (line * 8 + own % 8) * 8, eight);
  }
}
