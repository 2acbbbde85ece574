// The gated delta rule, in two launches. `prepare`, a warp per update and head, gathers what histories have parked and
// normalises rows. `advance`, a block per span, value head and COLUMNS columns of its state, takes those through all updates
// of the span. Nothing that rows may be parked over is read by it: blocks of other heads and columns would still read a
// history while one parks over it. Every column is a chain of its own: no bit of it depends on what else a pass holds.
#include "gated_delta/columns.cuh"

// Grid: a warp for each update and head, key heads before value heads. kind: of mixed, and of raw_decay and raw_beta unless
// wide_gates. history_rows behind history_starts[n_spans] are padding.
__global__ void __launch_bounds__(THREADS)
    prepare(const void* mixed, const void* raw_decay, const void* raw_beta, const float* a_log, const float* dt_bias,
            const int* parks, const float* parked_keys, const float* parked_deltas, const float* parked_decays,
            const int* history_rows, const int* history_starts, float* workspace, int n_spans, int n_history, int n_rows,
            int n_key, int n_value, int d_key, int d_value, int n_places, int per_key, int kind, int wide_gates, float scale) {
  wait_for_earlier();
  let_next_begin();  // behind the wait, so that `advance` begins when nothing runs that came before this kernel
  const Sizes sizes{n_history, n_rows, n_key, n_value, d_key, d_value, n_places};
  const Updates to(workspace, sizes);
  const int warp = blockIdx.x * WARPS + threadIdx.x / WARP;
  const int update = warp / (n_key + n_value), head = warp % (n_key + n_value);
  if (update < n_history) {
    const int n = history_starts[n_spans], row = history_rows[update];  // side by side
    if (update < n) gather({parked_keys, parked_deltas, parked_decays, per_key != 0}, to, sizes, update, row, head);
  } else if (update < sizes.n_updates()) {
    const Rows rows{mixed, raw_decay, raw_beta, a_log, dt_bias, parks, per_key != 0, wide_gates != 0, scale};
    const int row = update - n_history;
    if (kind == BFLOAT16) {
      prepare_row<bfloat16>(rows, to, sizes, row, head);
    } else if (kind == FLOAT16) {
      prepare_row<float16>(rows, to, sizes, row, head);
    } else {
      prepare_row<float>(rows, to, sizes, row, head);
    }
  }
}

// What an update needs of `Updates`, as it lies in shared memory.
template <bool PER_KEY, int D>
struct Step {
  float key[D], query[D];
  float decays[PER_KEY ? D : 4];
  float values[COLUMNS];  // of a history: deltas
  float4 gates;
};

// Updates of a stage, as many as lanes have a column: what rows leave is written by one of these lanes each.
constexpr int AHEAD = ROW_LANES, STAGES = 3;  // of the stages one is used while two are on their way

// The updates of a block's span: those of its history, then its rows.
struct Walk {
  int first_fold, n_folds, first_row, n_rows, head, key_head;
  bool speaks_for_group;  // first of the value heads of a key head

  __device__ int n_steps() const { return n_folds + n_rows; }
  __device__ bool is_row(int step) const { return step >= n_folds && step < n_steps(); }
  __device__ int row_of(int step) const { return first_row + step - n_folds; }

  // Begins to copy a stage, a warp whole updates.
  template <bool PER_KEY, int D>
  __device__ void fetch(Step<PER_KEY, D>* to, int stage, const Updates& from, const Sizes& sizes) const {
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < AHEAD; i += WARPS) {
      const int step = stage * AHEAD + i, row = row_of(step);
      if (step >= n_steps()) return;
      const int update = step < n_folds ? first_fold + step : sizes.n_history + row;
      const int own = update * sizes.n_value + head;  // 32 bits: cuda.py refuses larger workspaces
#pragma unroll
      for (int begin = 0; begin < D; begin += WARP * 4) {
        const int j = begin + lane * 4;
        copy16(to[i].key + j, from.keys + ((update * sizes.n_key + key_head) * D + j));
        if (step >= n_folds) copy16(to[i].query + j, from.queries + ((row * sizes.n_key + key_head) * D + j));
        if (PER_KEY) copy16(to[i].decays + j, from.decays + (own * D + j));
      }
      const float* values = from.values + (own * sizes.n_columns() + static_cast<int>(blockIdx.x) * COLUMNS);
      if (lane < COLUMNS / 4) copy16(to[i].values + lane * 4, values + lane * 4);
      if (lane == COLUMNS / 4) copy16(&to[i].gates, from.gates + own);
    }
  }
};

// Where rows leave what comes of them.
struct Results {
  void* out;                      // [n_rows, n_value, d_value], of `kind`
  float *keys, *deltas, *decays;  // as Parked has them
  int kind;

  __device__ void put(long long at, float value) const {
    if (kind == FLOAT32) {
      static_cast<float*>(out)[at] = value;
    } else if (kind == BFLOAT16) {
      static_cast<bfloat16*>(out)[at] = narrowed<bfloat16>(value);
    } else {
      static_cast<float16*>(out)[at] = narrowed<float16>(value);
    }
  }

  // What one block of a head writes of a record for all of its columns, and one head of a group for the group.
  template <bool PER_KEY, int D>
  __device__ void park(const Step<PER_KEY, D>& step, const Sizes& sizes, const Walk& walk) const {
    const int park = __float_as_int(step.gates.z);
    if (park < 0) return;
    const long long own = sizes.value_head(park, walk.head);
    if (!PER_KEY && threadIdx.x == 0) decays[own] = step.gates.x;
#pragma unroll
    for (int j = 0; j < D; j += THREADS) {
      const int i = j + threadIdx.x, place = turned_place(i);
      if (i >= sizes.d_key) break;
      if (PER_KEY) decays[own * sizes.d_key + i] = step.decays[place];
      if (walk.speaks_for_group) keys[sizes.key_head(park, walk.key_head) * sizes.d_key + i] = step.key[place];
    }
  }
};

constexpr int SHARES = WARP + 4;  // so that lanes of eight updates touch all banks

// A lane's rows of a column on their way through the updates of a span.
template <bool PER_KEY, int D>
struct Column {
  Lane lane;
  float* shares;  // [AHEAD][SHARES], the warp's: of what a stage's rows read
  float state[D / ROW_LANES];
  float delta;  // of that update of a stage which the lane writes down

  __device__ void fold(const Step<PER_KEY, D>& step) {
    float key[D / ROW_LANES];
    take(key, step.key, lane);
    decayed<PER_KEY>(state, step.gates.x, step.decays, lane);
    moved(state, key, step.values[lane.column]);
  }

  // i: which update of its stage it is. No row waits for what the one before it reads: that is added up later.
  __device__ void advance(const Step<PER_KEY, D>& step, int i) {
    float key[D / ROW_LANES], query[D / ROW_LANES];
    take(key, step.key, lane);
    decayed<PER_KEY>(state, step.gates.x, step.decays, lane);
    const float predicted = added_up(weighed(state, key));
    const float moves = __fmul_rn(step.gates.y, __fsub_rn(step.values[lane.column], predicted));
    moved(state, key, moves);
    take(query, step.query, lane);
    shares[i * SHARES + threadIdx.x % WARP] = weighed(state, query);
    if (i == lane.first_row) delta = moves;
  }

  // What a row reads of the column: that update of a stage which the lane writes down.
  __device__ float read() const {
    const float* mine = shares + lane.first_row * SHARES + threadIdx.x % 4;
    float sums[ROW_LANES];
#pragma unroll
    for (int i = 0; i < ROW_LANES; ++i) sums[i] = mine[4 * i];
#pragma unroll
    for (int apart = 1; apart < ROW_LANES; apart *= 2) {
#pragma unroll
      for (int i = 0; i < ROW_LANES; i += 2 * apart) sums[i] = __fadd_rn(sums[i], sums[i + apart]);
    }
    return sums[0];
  }

  // Writes down what the rows of a stage leave.
  __device__ void leave(const Step<PER_KEY, D>* stage, int first_step, const Results& to, const Sizes& sizes, const Walk& walk) {
    __syncwarp();
    const int step = first_step + lane.first_row, column = blockIdx.x * COLUMNS + lane.column;
    if (walk.is_row(step) && column < sizes.d_value) {
      to.put(sizes.value_head(walk.row_of(step), walk.head) * sizes.d_value + column, read());
      const int park = __float_as_int(stage[lane.first_row].gates.z);
      if (park >= 0) to.deltas[sizes.value_head(park, walk.head) * sizes.d_value + column] = delta;
    }
#pragma unroll 1
    for (int i = blockIdx.x; i < AHEAD; i += gridDim.x)  // a head's blocks share the records
      if (walk.is_row(first_step + i)) to.park(stage[i], sizes, walk);
  }
};

// Takes a column through a stage's updates, and writes the state after n_settled.
template <bool PER_KEY, int D>
__device__ inline void run_stage(Column<PER_KEY, D>& column, const Step<PER_KEY, D>* stage, int first_step, const Walk& walk,
                                 int n_settled, const Stored& stored, float* tile) {
  const int n = min(AHEAD, walk.n_steps() - first_step);
  const int n_folds = walk.n_folds - first_step, n_until_settled = n_settled - first_step;
  for (int i = 0; i < n;) {
    int end = i < n_folds ? min(n, n_folds) : n;
    if (i < n_until_settled) end = min(end, n_until_settled);
    if (i < n_folds) {
      for (; i < end; ++i) column.fold(stage[i]);
    } else {
      for (; i < end; ++i) column.advance(stage[i], i);
    }
    if (i != n_until_settled) continue;
    put_column(column.state, tile, column.lane);
    __syncthreads();
    stored.keep<D>(tile);
  }
}

// Grid: blocks of columns, value heads, spans. Always launched behind a `prepare` of the same pass: what that one does not
// write, nothing else can be writing, so it is read before `prepare` has ended; from L2, where it certainly is.
template <bool PER_KEY, int D>
__global__ void __launch_bounds__(THREADS, D > 128 ? 2 : 4)
    advance(float* workspace, float* states, float* parked_keys, float* parked_deltas, float* parked_decays, void* out,
            const int* span_starts, const int* slot_ids, const int* history_starts, const int* settled, int n_history,
            int n_rows, int n_key, int n_value, int d_key, int d_value, int kind, int in_pieces) {
  __shared__ float shares[WARPS][AHEAD][SHARES];
  let_next_begin();
  const Sizes sizes{n_history, n_rows, n_key, n_value, d_key, d_value, D};
  const int span = blockIdx.z, head = blockIdx.y, first = __ldcg(history_starts + span);
  const int begin = __ldcg(span_starts + span), end = __ldcg(span_starts + span + 1);
  const int n_folds = __ldcg(history_starts + span + 1) - first, n_settled = __ldcg(settled + span);
  const int group = n_value / n_key;
  const Walk walk{first, n_folds, begin, end - begin, head, head / group, head % group == 0};
  const int n_columns_before = blockIdx.x * COLUMNS;
  float* columns = states + sizes.value_head(__ldcg(slot_ids + span), head) * d_key * d_value + n_columns_before;
  const Stored stored{columns, d_key, d_value - n_columns_before, d_value, in_pieces != 0};
  float* tile = dynamic_shared<float>();
  auto* stages = reinterpret_cast<Step<PER_KEY, D>*>(tile + D * LINE);
  if (walk.n_steps() > 0) stored.fetch<D>(tile);
  wait_for_earlier();
  if (walk.n_steps() == 0) return;
  const Updates updates(workspace, sizes);
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    walk.fetch(stages + stage * AHEAD, stage, updates, sizes);
    copies_commit();
  }
  const Results results{out, parked_keys, parked_deltas, parked_decays, kind};
  Column<PER_KEY, D> column;
  column.shares = shares[threadIdx.x / WARP][0];
  for (int stage = 0; stage * AHEAD < walk.n_steps(); ++stage) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // this stage has arrived for all, and the one before is free
    walk.fetch(stages + (stage + STAGES - 1) % STAGES * AHEAD, stage + STAGES - 1, updates, sizes);
    copies_commit();
    if (stage == 0) take_column(column.state, tile, column.lane);
    const Step<PER_KEY, D>* now = stages + stage % STAGES * AHEAD;
    run_stage(column, now, stage * AHEAD, walk, n_settled, stored, tile);
    if ((stage + 1) * AHEAD > walk.n_folds) column.leave(now, stage * AHEAD, results, sizes, walk);
  }
  copies_wait<0>();
}
