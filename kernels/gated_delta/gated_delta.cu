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

constexpr int AHEAD = 8, STAGES = 3;  // updates of a stage; of the stages one is used and two are on their way

// The updates of a block's span: those of its history, then its rows.
struct Walk {
  int first_fold, n_folds, first_row, n_rows, head, key_head;

  __device__ int n_steps() const { return n_folds + n_rows; }

  // Begins to copy a stage, a warp whole updates.
  template <bool PER_KEY, int D>
  __device__ void fetch(Step<PER_KEY, D>* to, int stage, const Updates& from, const Sizes& sizes) const {
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < AHEAD; i += WARPS) {
      const int step = stage * AHEAD + i, row = first_row + step - n_folds;
      if (step >= n_steps()) return;
      const int update = step < n_folds ? first_fold + step : sizes.n_history + row;
      const long long own = sizes.value_head(update, head);
#pragma unroll
      for (int j = lane * 4; j < D; j += WARP * 4) {
        copy16(to[i].key + j, from.keys + sizes.key_head(update, key_head) * D + j);
        if (step >= n_folds) copy16(to[i].query + j, from.queries + sizes.key_head(row, key_head) * D + j);
        if (PER_KEY) copy16(to[i].decays + j, from.decays + own * D + j);
      }
      const float* values = from.values + own * sizes.n_columns() + blockIdx.x * COLUMNS;
      if (lane < COLUMNS / 4) copy16(to[i].values + lane * 4, values + lane * 4);
      if (lane == COLUMNS / 4) copy16(&to[i].gates, from.gates + own);
    }
  }
};

// Where a pass leaves results.
struct Results {
  void* out;  // [n_rows, n_value, d_value]
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
  __device__ void park(const Step<PER_KEY, D>& step, const Sizes& sizes, int park, int head, int key_head) const {
    const bool first_of_group = head % (sizes.n_value / sizes.n_key) == 0;
    const long long own = sizes.value_head(park, head);
    if (!PER_KEY && threadIdx.x == 0) decays[own] = step.gates.x;
    for (int i = threadIdx.x; i < sizes.d_key; i += THREADS) {
      if (PER_KEY) decays[own * sizes.d_key + i] = step.decays[turned_place(i)];
      if (first_of_group) keys[sizes.key_head(park, key_head) * sizes.d_key + i] = step.key[turned_place(i)];
    }
  }
};

// A lane's column of a state on its way through the updates of a span.
template <bool PER_KEY, int D>
struct Column {
  Lane lane;
  float state[D / ROW_LANES];
  float read = 0.0f;  // the lane's share of what the last row reads, added up with the next row's first sum
  int row = -1;       // whose that is

  __device__ void fold(const Step<PER_KEY, D>& step) {
    float key[D / ROW_LANES];
    take(key, step.key, lane);
    decayed<PER_KEY>(state, step.gates.x, step.decays, lane);
    moved(state, key, step.values[lane.column]);
  }

  // Returns the delta.
  __device__ float advance(const Step<PER_KEY, D>& step, const Results& results, const Sizes& sizes, int head) {
    float weights[D / ROW_LANES];
    take(weights, step.key, lane);
    decayed<PER_KEY>(state, step.gates.x, step.decays, lane);
    float predicted = weighed(state, weights);
    add_up(predicted, read);
    put(results, sizes, head);
    const float delta = __fmul_rn(step.gates.y, __fsub_rn(step.values[lane.column], predicted));
    moved(state, weights, delta);
    take(weights, step.query, lane);
    read = weighed(state, weights);
    return delta;
  }

  __device__ void finish(const Results& results, const Sizes& sizes, int head) {
    float nothing = 0.0f;
    add_up(nothing, read);
    put(results, sizes, head);
  }

  __device__ int column() const { return blockIdx.x * COLUMNS + lane.column; }
  __device__ bool writes(const Sizes& sizes) const { return lane.first_row == 0 && column() < sizes.d_value; }

  __device__ void put(const Results& results, const Sizes& sizes, int head) const {
    if (row >= 0 && writes(sizes)) results.put(sizes.value_head(row, head) * sizes.d_value + column(), read);
  }
};

// Grid: blocks of columns, value heads, spans. Runs behind `prepare` alone: until that has ended it reads what `prepare` does
// not write, which nothing else can write any more.
template <bool PER_KEY, int D>
__global__ void __launch_bounds__(THREADS, 4)
    advance(float* workspace, float* states, float* parked_keys, float* parked_deltas, float* parked_decays, void* out,
            const int* span_starts, const int* slot_ids, const int* history_starts, const int* settled, int n_history,
            int n_rows, int n_key, int n_value, int d_key, int d_value, int kind, int in_pieces) {
  let_next_begin();
  const Sizes sizes{n_history, n_rows, n_key, n_value, d_key, d_value, D};
  const int span = blockIdx.z, head = blockIdx.y, first = history_starts[span], begin = span_starts[span];
  const int n_settled = settled[span], key_head = head / (n_value / n_key);
  const Walk walk{first, history_starts[span + 1] - first, begin, span_starts[span + 1] - begin, head, key_head};
  const long long place = sizes.value_head(slot_ids[span], head) * d_key * d_value + blockIdx.x * COLUMNS;
  const Stored stored{states + place, d_key, d_value - static_cast<int>(blockIdx.x) * COLUMNS, d_value, in_pieces != 0};
  float* tile = dynamic_shared<float>();
  auto* stages = reinterpret_cast<Step<PER_KEY, D>*>(tile + D * LINE);
  if (walk.n_steps() > 0) stored.fetch<D>(tile);
  wait_for_earlier();
  if (walk.n_steps() == 0) return;
  const Updates updates(workspace, sizes);
  walk.fetch(stages, 0, updates, sizes);
  copies_commit();
  walk.fetch(stages + AHEAD, 1, updates, sizes);
  copies_commit();

  const Results results{out, parked_keys, parked_deltas, parked_decays, kind};
  Column<PER_KEY, D> column;
  const auto keep = [&](int step) {
    if (step + 1 != n_settled) return;
    put_column(column.state, tile, column.lane);
    __syncthreads();
    stored.keep<D>(tile);
  };
  for (int stage = 0; stage * AHEAD < walk.n_steps(); ++stage) {
    copies_wait<1>();
    __syncthreads();  // this stage has arrived for all, and the one before is free
    walk.fetch(stages + (stage + 2) % STAGES * AHEAD, stage + 2, updates, sizes);
    copies_commit();
    if (stage == 0) take_column(column.state, tile, column.lane);
    const Step<PER_KEY, D>* now = stages + stage % STAGES * AHEAD;
    int step = stage * AHEAD;
    const int end = min(step + AHEAD, walk.n_steps());
    for (; step < min(end, walk.n_folds); ++step, ++now) {
      column.fold(*now);
      keep(step);
    }
    for (; step < end; ++step, ++now) {
      const float delta = column.advance(*now, results, sizes, head);
      column.row = begin + step - walk.n_folds;
      keep(step);
      const int park = __float_as_int(now->gates.z);
      if (park < 0) continue;
      if (column.writes(sizes)) parked_deltas[sizes.value_head(park, head) * d_value + column.column()] = delta;
      if (blockIdx.x == 0) results.park(*now, sizes, park, head, key_head);
    }
  }
  copies_wait<0>();
  column.finish(results, sizes, head);
}
