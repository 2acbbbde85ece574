// y = x W^T + bias: for few rows every weight is read once, straight into the registers of a tensor-core product.
//
// A block makes TILE outputs of at most 8 N_TILES rows. Weights are the product's left side (16 outputs), rows its right
// side (8 rows), so one row costs what eight cost. The bits of an output follow from the weight's shape and kind alone: inputs
// are taken 16 at a time in ascending order within a split, splits are added in ascending order, in float32. Of codes, scales
// meet the sums (fragments.cuh), at places that follow from the weight, too.
//
// Inputs lie in an order of their own (fragments.py packs weights so): of 32 inputs a lane takes 8 neighbours, those of
// its pair, in two products. So a lane reads 16 bytes of a row for two products, and of weights its own, without gaps.
//
// Weights are of T, or codes of 8 or 4 bits that are made T in registers; nothing else differs.
#include "copy.cuh"
#include "fragments.cuh"
#include "mma.cuh"

// Of 16 bits; codes have as many as that room holds. Two blocks of few rows and plain weights fill a multiprocessor of Hopper,
// one the 99 KiB of smaller ones.
template <class Code, int N_TILES>
constexpr int STAGES = IS_PLAIN<Code> && N_TILES <= 4 ? (N_TILES <= 2 ? 5 : 4) : 3;
// Blocks of a multiprocessor, for which registers have to do.
template <class Code, int N_TILES>
constexpr int BLOCKS = N_TILES > 8 ? 1 : N_TILES == 8 || IS_PLAIN<Code> ? 2 : 4;
constexpr int TEAM = 128;     // threads that have the same rows: four warps, each with outputs of its own
constexpr int COPIERS = 8;    // threads that copy a row's step

// Sums of more than eight tiles of rows do not fit a lane's registers. A block of more has teams, which share its weights
// and have their own rows, so that many rows read weights from L2 less often.
template <int N_TILES>
constexpr int TEAMS = N_TILES > 8 ? N_TILES / 8 : 1;
template <int N_TILES>
constexpr int OWN = N_TILES / TEAMS<N_TILES>;  // tiles of a team
template <int N_TILES>
constexpr int THREADS = TEAM * TEAMS<N_TILES>;

// Bytes of a stage of the pipeline, and how many there are.
template <class Code, int N_TILES>
struct Stage {
  static constexpr int CODES = Step<Code>::CODES, WORDS = Step<Code>::WORDS;
  static constexpr int ROWS = 8 * N_TILES * STEP * 2;
  static constexpr int SIZE = CODES + WORDS + ROWS;
  static constexpr int COUNT = STAGES<Code, N_TILES> * (CELLS * 2 + ROWS) / SIZE;
};

// Sums of a warp's outputs: [part of 16 outputs][eight rows][as in mma.cuh].
template <int N_TILES>
using Sums = float[PARTS][OWN<N_TILES>][4];

__device__ inline int warp_of_team() { return threadIdx.x / WARP % (TEAM / WARP); }
// The first row of the thread's team within its block.
template <int N_TILES>
__device__ inline int first_of_team() {
  return threadIdx.x / TEAM * (8 * OWN<N_TILES>);
}

// What a block works on. Steps are counted over all inputs.
template <class T>
struct Work {
  const T* x;
  const unsigned char* codes;  // of this tile: [n_steps][Stage::CODES]
  const unsigned* words;       // of this tile: [n_groups][TILE]; none for 16 bits
  int first_row, n_rows, n_in, n_steps, n_splits;
  int group;  // inputs that share a word, a multiple of BLOCK

  __device__ int border(int split) const { return ::border(split, n_steps, n_splits); }
};

// Row `row`, inputs 8 chunk to 8 chunk + 7 of a stage. Odd rows are turned by 64 bytes: two rows fill all banks.
__device__ inline int cell_of_row(int row, int chunk) { return row * STEP + ((chunk ^ ((row & 1) * 4)) * 8); }

// A thread's share of the copies, step after step. What can be kept between steps is: codes of 4 bits leave few
// instructions for addresses.
template <class T, class Code, int N_TILES>
struct Feed {
  using Bytes = Stage<Code, N_TILES>;
  static constexpr int COPYING = THREADS<N_TILES> / COPIERS, AT_ONCE = N_TILES == 1 ? 8 : COPYING, EACH = 8 * N_TILES / AT_ONCE;
  const Work<T>& work;
  const unsigned char* codes;
  const unsigned* words;  // of the next group to come
  Groups groups;
  const T* row;           // of AT_ONCE rows the thread copies 8 inputs of one
  int place, input;
  const int own = held(threadIdx.x * 16);  // bytes of a step's codes that lie before the thread's
  const int own_row = held(cell_of_row(threadIdx.x / COPIERS, threadIdx.x % COPIERS) * sizeof(T));

  __device__ Feed(const Work<T>& work, int step) : work(work), groups(work.group, step * STEP) {
    codes = work.codes + static_cast<long long>(step) * Bytes::CODES + own;
    place = work.first_row + threadIdx.x / COPIERS, input = step * STEP + threadIdx.x % COPIERS * 8;
    row = work.x + static_cast<long long>(place) * work.n_in + input;
    words = work.words + static_cast<long long>(step * STEP / work.group) * TILE + threadIdx.x % WARP * 4;
  }

  __device__ void next(unsigned char* stage) {
    next_weights(stage);
    next_rows(stage);
  }

  __device__ void next_weights(unsigned char* stage) {
#pragma unroll
    for (int i = 0; i < Bytes::CODES / 16 / THREADS<N_TILES>; ++i)
      copy16(stage + own + i * (THREADS<N_TILES> * 16), codes + i * (THREADS<N_TILES> * 16));
    codes += Bytes::CODES;
    if (!IS_PLAIN<Code> && threadIdx.x < WARP)
#pragma unroll
      for (int block = 0; block < STEP / BLOCK; ++block) {
        if (!groups.begins()) continue;
        copy16(stage + own + Bytes::CODES + block * (TILE * 4), words);
        words += TILE;
      }
  }

  __device__ void next_rows(unsigned char* stage) {
    if (AT_ONCE == COPYING || threadIdx.x < AT_ONCE * COPIERS)
#pragma unroll
      for (int i = 0; i < EACH; ++i) copy16(cell_of(stage, i), source(i), wanted(i));
    row += STEP, input += STEP;
  }

  // Those of the first `n` of N stages, loaded and stored: as copies they would end behind the weights of all these stages,
  // which need not wait for each other.
  template <int N>
  __device__ void first_rows(unsigned char* stages, int n) {
    if (AT_ONCE < COPYING && threadIdx.x >= AT_ONCE * COPIERS) {
      row += N * STEP, input += N * STEP;
      return;
    }
    Vector16<T> eight[N][EACH];
#pragma unroll
    for (int stage = 0; stage < N; ++stage, row += STEP, input += STEP) {
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        eight[stage][i] = {};
        if (stage < n && wanted(i)) eight[stage][i] = load16(source(i));
      }
    }
#pragma unroll
    for (int stage = 0; stage < N; ++stage) {
      if (stage >= n) break;
#pragma unroll
      for (int i = 0; i < EACH; ++i) store16(cell_of(stages + stage * Bytes::SIZE, i), eight[stage][i]);
    }
  }

  // Of the thread's i-th row: where 8 inputs of it go, where they come from, and whether there are such.
  __device__ T* cell_of(unsigned char* stage, int i) const {
    static_assert(AT_ONCE % 2 == 0, "the thread's rows are all odd or all even");
    return reinterpret_cast<T*>(stage + own_row + Bytes::CODES + Bytes::WORDS) + i * (AT_ONCE * STEP);
  }
  __device__ const T* source(int i) const { return row + static_cast<long long>(i * AT_ONCE) * work.n_in; }
  __device__ bool wanted(int i) const { return place + i * AT_ONCE < work.n_rows && input < work.n_in; }
};

// Brings sums to the scales that were taken last.
template <class T, class Code, int N_TILES>
__device__ inline void change_units(Meaning<T, Code>& meaning, Sums<N_TILES>& sums) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const float quotients[2] = {meaning.change(part, 0), meaning.change(part, 1)};
#pragma unroll
    for (int i = 0; i < OWN<N_TILES> * 4; ++i) sums[part][i / 4][i % 4] *= quotients[i % 4 / 2];
  }
}

// Where a lane's part of a stage lies, in bytes.
template <class T, class Code, int N_TILES>
struct Places {
  using Bytes = Stage<Code, N_TILES>;
  static constexpr int PIECE = Bytes::CODES / (TEAM / WARP) / (STEP / BLOCK) / PARTS;  // of a warp, block and part
  static constexpr int OF_ROWS = Bytes::CODES + Bytes::WORDS, OF_TILE = 8 * STEP * sizeof(T);
  int codes, words, rows[STEP / BLOCK];

  __device__ Places() {
    const int lane = threadIdx.x % WARP, warp = warp_of_team(), group = lane / 4, pair = lane % 4;
    codes = held(warp * (STEP / BLOCK * PARTS * PIECE) + lane * Meaning<T, Code>::EACH);
    words = held(Bytes::CODES + (warp * 8 + group) * 16);
#pragma unroll
    for (int i = 0; i < STEP / BLOCK; ++i)
      rows[i] = held(OF_ROWS + cell_of_row(first_of_team<N_TILES>() + group, i * 4 + pair) * sizeof(T));
  }
};

template <class T, class Code, int N_TILES>
__device__ inline void multiply(const unsigned char* stage, const Places<T, Code, N_TILES>& places, Groups& groups,
                                Meaning<T, Code>& meaning, Sums<N_TILES>& sums) {
  using At = Places<T, Code, N_TILES>;
#pragma unroll
  for (int block = 0; block < STEP / BLOCK; ++block) {
    uint4 x[OWN<N_TILES>];
#pragma unroll
    for (int n = 0; n < OWN<N_TILES>; ++n)
      x[n] = *reinterpret_cast<const uint4*>(stage + places.rows[block] + n * At::OF_TILE);
    if constexpr (!IS_PLAIN<Code>)
      if (groups.begins()) {
        meaning.take(stage + places.words + block * (TILE * 4));
        change_units<T, Code, N_TILES>(meaning, sums);
      }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      unsigned weights[2][4];
      meaning.widen(stage + places.codes + (block * PARTS + part) * At::PIECE, part, weights);
#pragma unroll
      for (int n = 0; n < OWN<N_TILES>; ++n) {
        mma_16x8x16<T>(sums[part][n], weights[0], {x[n].x, x[n].y});
        mma_16x8x16<T>(sums[part][n], weights[1], {x[n].z, x[n].w});
      }
    }
  }
}

template <class T, class Code, int N_TILES>
__device__ inline void add(Sums<N_TILES>& total, const Meaning<T, Code>& meaning, Sums<N_TILES>& sums) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
#pragma unroll
    for (int n = 0; n < OWN<N_TILES>; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[part][n][i] += meaning.value(part, i / 2, sums[part][n][i]);
        sums[part][n][i] = 0.0f;
      }
}

// Splits first_split up to end_split, one after another; the pipeline does not stop between them.
template <class T, class Code, int N_TILES>
__device__ inline void run_splits(const Work<T>& work, int first_split, int end_split, Sums<N_TILES>& total) {
  constexpr int SIZE = Stage<Code, N_TILES>::SIZE, COUNT = Stage<Code, N_TILES>::COUNT;
  unsigned char* stage = dynamic_shared<unsigned char>();
  const int begin = work.border(first_split), end = work.border(end_split);
  Feed<T, Code, N_TILES> feed(work, begin);
  Groups groups(work.group, begin * STEP);
  Meaning<T, Code> meaning;
#pragma unroll
  for (int i = 0; i < COUNT - 1; ++i) {
    if (begin + i < end) feed.next_weights(stage + i * SIZE);
    copies_commit();
  }
  wait_for_earlier();  // rows are what it has written
  feed.template first_rows<COUNT - 1>(stage, end - begin);
  const Places<T, Code, N_TILES> places;
  unsigned char* free = stage + (COUNT - 1) * SIZE;
  Sums<N_TILES> sums = {};
  int split = first_split, border = work.border(first_split + 1), n_behind = COUNT - 1;  // stages behind `stage`
  for (int step = begin; step < end; ++step) {
    copies_wait<COUNT - 2>();
    __syncthreads();  // this step has arrived for all, and the last one's stage is free
    if (step + COUNT - 1 < end) feed.next(free);
    copies_commit();
    multiply<T, Code, N_TILES>(stage, places, groups, meaning, sums);
    free = stage;
    stage += SIZE;
    if (--n_behind < 0) stage -= COUNT * SIZE, n_behind = COUNT - 1;
    if (step + 1 == border) {
      add<T, Code, N_TILES>(total, meaning, sums);
      border = work.border(++split + 1);
    }
  }
  copies_wait<0>();
}

// Leaves the block's sums in memory. True in the block that comes last of its tile: it finds all of them there and adds
// them, from the first split to the last. For blocks of one team.
template <int N_TILES>
__device__ inline bool combine(float4* partials, int* n_done, int n_wanted, Sums<N_TILES>& total) {
  __shared__ int n_before;
  const int tile = blockIdx.x * gridDim.y + blockIdx.y, pair = threadIdx.x % 4, n_splits = gridDim.z;
  constexpr int SIZE = PARTS * N_TILES * TEAM;
  float4* mine = partials + (static_cast<long long>(tile) * n_splits + blockIdx.z) * SIZE + threadIdx.x;
#pragma unroll
  for (int i = 0; i < PARTS * N_TILES; ++i) {
    const float(&four)[4] = total[i / N_TILES][i % N_TILES];
    if (i % N_TILES * 8 + 2 * pair < n_wanted) __stcg(mine + i * TEAM, make_float4(four[0], four[1], four[2], four[3]));
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
  constexpr int AT_ONCE = N_TILES == 8 ? 1 : 12 / N_TILES;  // as many as there are registers for
  for (int first = 0; first < n_splits; first += AT_ONCE, from += AT_ONCE * SIZE) {
    float4 fours[AT_ONCE][PARTS * N_TILES];
#pragma unroll
    for (int i = 0; i < AT_ONCE * PARTS * N_TILES; ++i) {
      const int split = i / (PARTS * N_TILES), tile = i % N_TILES;
      const bool wanted = first + split < n_splits && tile * 8 + 2 * pair < n_wanted;
      fours[split][i % (PARTS * N_TILES)] = load16_if(wanted, from + split * SIZE + i % (PARTS * N_TILES) * TEAM);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE * PARTS * N_TILES; ++i) {
      const float4 four = fours[i / (PARTS * N_TILES)][i % (PARTS * N_TILES)];
      float(&sums)[4] = total[i / N_TILES % PARTS][i % N_TILES];
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
    const int output = blockIdx.y * TILE + warp_of_team() * (16 * PARTS) + i * 8 + group;
    if (output >= n_out) continue;
    const float added = bias == nullptr ? 0.0f : widened(bias[output]);
#pragma unroll
    for (int j = 0; j < OWN<N_TILES> * 2; ++j) {
      const int row = blockIdx.x * (8 * N_TILES) + first_of_team<N_TILES>() + j / 2 * 8 + 2 * pair + j % 2;
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
// codes [n_tiles][n_steps][Stage::CODES]. words [n_tiles][n_groups][TILE], for codes of 8 and 4 bits; a group is `group`
// inputs. partials [grid x][grid y][splits][PARTS * N_TILES * TEAM] and n_done [grid x][grid y] of zeros, which it
// leaves as zeros, for a grid over splits, of blocks of one team. n_in: a multiple of 8; x 16-byte aligned.
template <class T, class Code, int N_TILES>
__global__ void __launch_bounds__(THREADS<N_TILES>, BLOCKS<Code, N_TILES>)
    linear(const T* x, const unsigned char* codes, const unsigned* words, const T* bias, T* out, float* wide_out,
           float4* partials, int* n_done, int n_rows, int n_in, int n_out, int n_steps, int n_splits, int n_groups, int group) {
  let_next_begin();
  const int first_row = blockIdx.x * (8 * N_TILES);
  const long long tile = blockIdx.y;
  const Work<T> work{x, codes + tile * n_steps * Stage<Code, N_TILES>::CODES, words + tile * n_groups * TILE,
                     first_row, n_rows, n_in, n_steps, n_splits, group};
  Sums<N_TILES> total = {};
  const bool whole = gridDim.z == 1;
  const int first_split = blockIdx.z;
  run_splits<T, Code, N_TILES>(work, first_split, whole ? n_splits : first_split + 1, total);
  if constexpr (TEAMS<N_TILES> == 1)
    if (!whole && !combine<N_TILES>(partials, n_done, n_rows - first_row, total)) return;
  store<T, N_TILES>(total, bias, out, wide_out, n_rows, n_out);
}
