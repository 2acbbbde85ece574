// Attention on Hopper, for heads up to 128: what attention.cu computes, bit for bit, by products of warpgroups.
//
// A block has 64 queries of one K/V head and span for each of its multiplying warpgroups; a last warpgroup copies keys and values,
// TILE positions at a time, for all of them. Groups wait for each other nowhere, so that one multiplies while another is at
// its softmax. Queries and weights are left sides, in registers, keys and values right sides, in panels (wgmma.cuh).
#include "attention/queries.cuh"
#include "bulk.cuh"
#include "copy.cuh"
#include "wgmma.cuh"

constexpr int TEAM = 4 * WARP;           // threads of a warpgroup
constexpr int TILE = 64;                 // positions of a stage: two steps of the softmax
template <int N_GROUPS>
constexpr int STAGES = N_GROUPS == 1 ? 3 : 4;
// Registers of a thread that multiplies, and of one that copies: two blocks of one group share a multiprocessor.
template <int N_GROUPS>
constexpr int MANY = N_GROUPS == 1 ? 208 : 216;
template <int N_GROUPS>
constexpr int FEW = N_GROUPS == 1 ? 48 : 72;

// Values of a stage's keys, or of its values: panels [D / LINE][TILE][LINE].
template <int D>
constexpr int SIZE = TILE * D;

// Value 8 piece and on of a position's keys or values.
__device__ inline int cell(int position, int piece) {
  return piece / 8 * (TILE * LINE) + piece_of_line(position, piece % 8);
}

// What a launch works on.
template <class T>
struct Store {
  const T* keys;
  const T* values;
  const int* table;  // of the span
  int n_kv, page_size, d_head, d_value;

  // Where a position's row of the block's head is, in rows.
  __device__ int row(int position) const {
    return (table[position / page_size] * n_kv + blockIdx.x) * page_size + position % page_size;
  }
};

// The chunks that a block goes through. Blocks along y share an item's, what takes longest first; one block joins them itself.
struct Chunks {
  Seen seen;  // by the block's queries

  __device__ bool walks() const { return gridDim.y == 1; }
  __device__ int chunk(int i) const { return walks() ? seen.first_chunk() + i : seen.first_chunk() + seen.n_chunks() - 1 - i; }
  // Tiles of a chunk that some query sees.
  __device__ int begin(int chunk) const { return max(first_of(chunk), seen.first) / TILE; }
  __device__ int end(int chunk) const { return min(first_of(chunk + 1) - 1, seen.last) / TILE + 1; }
};

// Tiles on their way through shared memory: stages, and for each whether its tile has arrived and whether all have read it.
template <class T>
struct Pipe {
  T* stages;
  Barrier* arrived;
  Barrier* free;
};

// The copies of all of a block's tiles, by a warpgroup. A warp copies OWN positions of each, a lane the same piece of some.
template <class T, int D, int N_STAGES>
__device__ inline void feed(const Store<T>& store, const Chunks& chunks, const Pipe<T>& pipe) {
  constexpr int OF_LINE = D / 8, AT_ONCE = WARP / OF_LINE, OWN = TILE / (TEAM / WARP);
  const int lane = threadIdx.x % WARP, first = threadIdx.x % TEAM / WARP * OWN, piece = lane % OF_LINE, line = lane / OF_LINE;
  const bool has_key = piece * 8 < store.d_head, has_value = piece * 8 < store.d_value;
  const T *keys = store.keys + piece * 8, *values = store.values + piece * 8;
  const int place = held(cell(first + line, piece));
  const auto arrive = [&](Barrier* barrier) {
    show_to_products();
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  Barrier* under_way = nullptr;  // of the tile before
  Turn<N_STAGES> turn;
  for (int i = blockIdx.y; i < chunks.seen.n_chunks(); i += gridDim.y) {
    const int chunk = chunks.chunk(i);
    for (int tile = chunks.begin(chunk); tile < chunks.end(chunk); ++tile, turn.next()) {
      const int looked_up = tile * TILE + first + lane % OWN;
      const int own = chunks.seen.has(looked_up) ? store.row(looked_up) : -1;
      wait_for_earlier();  // page tables are of the pass, keys and values of the kernel before
      T* stage = pipe.stages + turn.stage * (2 * SIZE<D>) + place;
      barrier_wait(pipe.free + turn.stage, turn.parity ^ 1);
#pragma unroll
      for (int n = 0; n < OWN; n += AT_ONCE) {  // lines are turned by XOR, and so are the low bits of the distance
        const int row = __shfl_sync(FULL_WARP, own, n + line);
        T* to = reinterpret_cast<T*>(reinterpret_cast<size_t>(stage) ^ n % 8 * 16) + n * LINE;
        copy16(to, keys + static_cast<size_t>(static_cast<unsigned>(row)) * store.d_head, row >= 0 && has_key);
        copy16(to + SIZE<D>, values + static_cast<size_t>(static_cast<unsigned>(row)) * store.d_value, row >= 0 && has_value);
      }
      copies_commit();
      copies_wait<1>();
      if (under_way != nullptr) arrive(under_way);
      under_way = pipe.arrived + turn.stage;
    }
  }
  wait_for_earlier();
  copies_wait<0>();
  if (under_way != nullptr) arrive(under_way);
}

// A lane's part of its queries, as left sides.
template <class T, int D>
__device__ inline void take_queries(const Queries<D>& mine, const T* q, int d_head, unsigned (&queries)[D / 16][4]) {
  const int pair = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < D / 4; ++i) {
    const int half = i % 2, column = i / 4 * 16 + i % 4 / 2 * 8 + 2 * pair;
    unsigned both = 0;
    if (mine.seen[half].last >= 0 && column < d_head)
      both = *reinterpret_cast<const unsigned*>(q + static_cast<long long>(mine.index[half]) * d_head + column);
    queries[i / 4][i % 4] = both;
  }
#pragma unroll
  for (int k = 0; k < D / 16; ++k) in_registers(queries[k]);
}

template <int D>
using Weights = unsigned[TILE / STEP<D>][STEP<D> / 16][4];  // of a tile, as left sides

// A tile of a group's queries; its products with `weights` are under way afterwards. Those of the tile before have ended when
// `scored` is called.
template <class T, int D, class Scored>
__device__ inline void advance(Queries<D>& mine, const unsigned (&queries)[D / 16][4], int tile, float scale, const T* stage,
                               const Lines<T>& lines, Weights<D>& weights, const Scored& scored) {
  float scores[TILE / STEP<D>][STEP<D> / 8][4];
  float(&every)[TILE / 8][4] = reinterpret_cast<float(&)[TILE / 8][4]>(scores);
  group_begin();
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    const Lines<T> keys = lines.further(k / 4 * (TILE * LINE) + k % 4 * 16);
    if (k == 0) {
      multiply_with_lines<T, true>(every, queries[k], keys);
    } else {
      multiply_with_lines<T, false>(every, queries[k], keys);
    }
  }
  group_commit();
  group_wait<0>();
  are_there(every);
  scored();
  const auto of_values = [](int row, int piece) { return cell(row, piece); };
#pragma unroll
  for (int half = 0; half < TILE / STEP<D>; ++half) {
    const int at = tile * TILE + half * STEP<D>;
    if (mine.first.first >= at + STEP<D> || mine.last.last < at) continue;
    // All lanes agree; the vote has the compiler know it, too.
    const bool partly = __any_sync(FULL_WARP, mine.last.first > at || mine.first.last < at + STEP<D> - 1);
    float before[2];
    const bool rises = soften<T, D, STEP<D>>(mine, at, partly, scale, scores[half], weights[half], before);
    group_wait<0>();
    are_there(mine.sums);
    if (rises) rescale<D>(mine, before);
    const T* values = stage + SIZE<D> + half * STEP<D> * LINE;
    const bool odd = partly && has_odd<T, D, STEP<D>>(values, of_values);
    if (odd) gather_odd<T, D, STEP<D>>(mine, at, weights[half], values, of_values);
    in_registers(weights[half][0]);
    in_registers(weights[half][1]);
    group_begin();
#pragma unroll
    for (int k = 0; k < STEP<D> / 16; ++k)  // were these in the other branch, the assembler would wait for all products
      if (!odd) multiply_along_lines<T>(mine.sums, weights[half][k], lines.further(SIZE<D> + (half * STEP<D> + k * 16) * LINE));
    group_commit();
    weigh<T, D, STEP<D>>(mine, weights[half]);
  }
}

// The sums of a lane's queries over the chunks so far, of a block that joins them itself. They are seldom wanted: in shared memory
// behind the stages, or in L2 where two blocks would not fit a multiprocessor otherwise.
template <class T, int D, int N_GROUPS>
struct Totals {
  static constexpr int N_THREADS = N_GROUPS * TEAM;
  float2* own;

  __device__ Totals(T* stages, float* sums) {
    const long long block = static_cast<long long>(blockIdx.z) * gridDim.x + blockIdx.x;
    T* behind = stages + STAGES<N_GROUPS> * 2 * SIZE<D>;
    own = reinterpret_cast<float2*>(sums == nullptr ? reinterpret_cast<float*>(behind) : sums + block * (D / 2 * N_THREADS));
    own += threadIdx.x;
  }
  __device__ float2& at(int n, int half) { return own[(n * 2 + half) * N_THREADS]; }
};

// All of a block's tiles, by one group.
template <class T, int D, int N_GROUPS>
__device__ inline void multiply_all(Queries<D>& mine, const unsigned (&queries)[D / 16][4], const Chunks& chunks, float scale,
                                    const Pipe<T>& pipe, const Sums& memory, const Sinks& sinks, T* out) {
  constexpr int N_STAGES = STAGES<N_GROUPS>;
  Totals<T, D, N_GROUPS> totals(pipe.stages, memory.sums);
  Softmax total[2];
  Weights<D> weights;
  const Lines<T> lines = lines_at<T>(pipe.stages, TILE * LINE);
  Turn<N_STAGES> turn;
  const auto release = [&](int stage) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(pipe.free + stage);
  };
  for (int i = blockIdx.y; i < chunks.seen.n_chunks(); i += gridDim.y) {
    const int chunk = chunks.chunk(i), end = chunks.end(chunk);
    clear<D>(mine);
    int used = -1;  // the stage of the last tile
    for (int tile = chunks.begin(chunk); tile < end; ++tile, turn.next()) {
      barrier_wait(pipe.arrived + turn.stage, turn.parity);
      if (mine.first.first >= (tile + 1) * TILE || mine.last.last < tile * TILE) {
        release(turn.stage);
        continue;
      }
      const int first = turn.stage * (2 * SIZE<D>);
      advance<T, D>(mine, queries, tile, scale, pipe.stages + first, lines.further(first), weights, [&] {
        if (used >= 0) release(used);
      });
      used = turn.stage;
    }
    group_wait<0>();
    are_there(mine.sums);
    if (used >= 0) release(used);
    add_up<D>(mine);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Seen& own = mine.seen[half];
      const int slot = chunk - own.first_chunk();
      if (own.last < 0 || slot < 0 || slot >= own.n_chunks()) continue;
      if (chunks.walks()) {
        add_chunk<D>(mine, half, slot, total[half], totals);
      } else {
        leave<D>(mine, half, slot, memory);
      }
    }
  }
  if (!chunks.walks()) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (mine.seen[half].last >= 0) write<T, D>(mine, half, total[half], totals, memory.d_value, sinks, out);
}

// Grid and arguments: as of attention.cu; an item is 64 queries for each warpgroup but the last. sums, where one block goes
// through all of an item's chunks: 64 x D for each warpgroup, or null.
template <class T, int D, int N_GROUPS>
__global__ void __launch_bounds__((N_GROUPS + 1) * TEAM, N_GROUPS == 1 ? 2 : 1)
    attention_groups(const T* q, const T* keys, const T* values, const int* span_starts, const int* n_past, const int* page_table,
                     const int* wholes, const float* sinks, T* out, float* sums, float* softmax, int n_rows, int n_spans,
                     int n_pages_max, int n_heads, int n_kv, int page_size, int d_head, int d_value, int window, float scale) {
#ifdef HAS_WARPGROUPS
  constexpr int N_STAGES = STAGES<N_GROUPS>;
  __shared__ Barrier arrived[N_STAGES], free[N_STAGES];
  let_next_begin();
  constexpr int GROUP = TEAM / WARP * QUERIES;
  const int team = threadIdx.x / TEAM;
  if (threadIdx.x == 0) {
    for (int i = 0; i < N_STAGES; ++i) barrier_init(arrived + i, TEAM / WARP), barrier_init(free + i, N_GROUPS * (TEAM / WARP));
    barriers_begin();
  }
  __syncthreads();
  const int number = gridDim.y == 1 ? gridDim.z - 1 - blockIdx.z : blockIdx.z;
  const Item item(number, GROUP * N_GROUPS, n_heads / n_kv, n_spans, span_starts, n_past);
  if (item.first == item.end) return wait_for_earlier();
  const Bounds bounds{window, wholes};
  const Chunks chunks{item.all(bounds)};
  const Pipe<T> pipe{dynamic_panels<T>(), arrived, free};
  if (team == N_GROUPS) {
    const int* table = page_table + static_cast<long long>(item.span) * n_pages_max;
    fewer_registers<FEW<N_GROUPS>>();
    feed<T, D, N_STAGES>({keys, values, table, n_kv, page_size, d_head, d_value}, chunks, pipe);
  } else {
    const Sums memory{sums, reinterpret_cast<Softmax*>(softmax), n_rows * n_heads, d_value};
    more_registers<MANY<N_GROUPS>>();
    Queries<D> mine;
    place<D>(mine, item, item.first + team * GROUP, GROUP, bounds, n_heads);
    wait_for_earlier();
    unsigned queries[D / 16][4];
    take_queries<T, D>(mine, q, d_head, queries);
    multiply_all<T, D, N_GROUPS>(mine, queries, chunks, scale, pipe, memory, {sinks, n_heads}, out);
  }
#endif
}
