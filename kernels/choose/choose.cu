// Rows of logits to tokens, in five kernels. `scan` reads every logit once, writes changed rows down, and draws among all
// tokens of a row. `stand` looks whether what it drew survives the row's truncation: the largest value of all tokens is the
// largest of those kept if it is kept, and most draws are. For the rows that are left open `weigh` adds up amounts by bucket,
// `cut` finds where truncation cuts, and `draw` draws once more. Results depend on a row's own logits and parameters alone:
// what blocks add up together are whole numbers, and what they compare is ordered totally.
#include "change.cuh"
#include "cut.cuh"
#include "draw.cuh"
#include "standing.cuh"

constexpr int PART = CUT_WARPS * SEGMENT;  // tokens a block weighs
constexpr int HALF_MASS = 17;  // masses, at most 2**34 each, are added up in two halves
static_assert(static_cast<long long>(PART) << HALF_MASS <= 1LL << 32, "a block's halves fit 32 bits");

// Of one row: what blocks have found together.
struct State {
  Standing standing;  // of what `scan` drew
  Amount mass;        // of all tokens, where it is asked for
  Key top, cut;       // of a row that is open; the cut once it is searched for
  int arrived[2];     // blocks that have looked at the standing, drawn
};

// Rows that are to be drawn anew, in any order.
struct Open {
  int* n;     // []
  int* rows;  // [n_rows], of which the first n are
};

// Of one row: what the kernels hand to each other.
struct Work {
  State* state;
  Key* tops;        // [n_segments]
  Key* winners;     // [n_chunks]: best value of every chunk
  Amount* amounts;  // [2, N_BUCKETS]: tokens, then masses
};

__device__ inline int pieces(int n, int size) { return (n + size - 1) / size; }

__device__ inline Open open_of(Key* workspace) {
  int* n = reinterpret_cast<int*>(workspace);
  return {n, n + 1};
}

// The workspace holds open rows, then these one after another, each for all rows.
__device__ inline Work work_of(Key* workspace, int n_rows, int row, int vocab) {
  const long long n_segments = pieces(vocab, SEGMENT), n_chunks = pieces(vocab, CHUNK);
  Work work;
  workspace += pieces(1 + n_rows, sizeof(Key) / sizeof(int));
  work.state = reinterpret_cast<State*>(workspace) + row;
  workspace += n_rows * static_cast<long long>(sizeof(State) / sizeof(Key));
  work.tops = workspace + row * n_segments;
  workspace += n_rows * n_segments;
  work.winners = workspace + row * n_chunks;
  workspace += n_rows * n_chunks;
  work.amounts = workspace + row * 2LL * N_BUCKETS;
  return work;
}

// The best value of a row's chunks. The block's threads all call it.
__device__ inline Key best_of(const Work& work, int vocab) {
  Key winner = 0;
  for (int i = threadIdx.x; i < pieces(vocab, CHUNK); i += blockDim.x) {
    const Key other = __ldcg(work.winners + i);
    winner = other > winner ? other : winner;
  }
  return block_max(winner);
}

// Grid: chunks, rows. The others take for logits what this one has written to `changed` [n_rows, vocab], where that is not null.
__global__ void __launch_bounds__(CHUNK_WARPS* WARP, 5)
    scan(const float* logits, int n_rows, int vocab, const float* temperature, const int* top_k, const float* top_p,
         const float* min_p, const long long* seed, const long long* position, Key* workspace, const int* starts,
         const int* token_ids, const float* bias, const float* repeat, const float* penalty, const int* index,
         const unsigned* allowed, int n_words, float* changed) {
  let_next_begin();
  wait_for_earlier();
  const int row_id = blockIdx.y, chunk = blockIdx.x;
  const Wish wish = Columns{temperature, top_k, top_p, min_p, seed, position}.of(row_id, vocab);
  const Work work = work_of(workspace, n_rows, row_id, vocab);
  const long long first = static_cast<long long>(row_id) * vocab;
  if (changed != nullptr)
    change_chunk({starts, token_ids, bias, repeat, penalty}, {index, allowed, n_words}, row_id, chunk, vocab,
                 logits + first, changed + first);
  const Row row{(changed == nullptr ? logits : changed) + first, vocab, work.tops};
  const int segment = chunk * CHUNK_WARPS + threadIdx.x / WARP;
  float x[OWN];
  row.load(segment, x, changed != nullptr);
  if (chunk == 0 && threadIdx.x == 0) *work.state = {};
  if (row_id == 0 && chunk == 0 && threadIdx.x == 0) *open_of(workspace).n = 0;

  float largest = x[0];
#pragma unroll
  for (int i = 1; i < OWN; ++i) largest = larger_or_nan(largest, x[i]);
  int at = 0;
#pragma unroll
  for (int i = OWN - 1; i >= 0; --i)
    if (x[i] == largest) at = i;
  if (!(largest == largest)) largest = infinity();  // both end the row
  const Key top = warp_max(key_of(largest, Row::token(segment, at)));
  if (threadIdx.x % WARP == 0 && segment < row.n_segments()) work.tops[segment] = top;
  if (wish.greedy) return;
  const Key winner = drawn({wish.temperature, wish.stream, 0, 0.0f, 0.0f, 1.0f / wish.temperature}, row, segment, x, top);
  if (threadIdx.x == 0) work.winners[chunk] = winner;
}

// Writes a row's answer. top: its largest logit; winner: the token drawn; probability: null if unwanted. One thread calls it.
__device__ inline void answer(const Row& row, const State& state, Key top, Key winner, long long* token_id,
                              float* probability) {
  const float largest = value_of(top);
  *token_id = is_finite(largest) ? token_of(winner) : -1;
  if (probability == nullptr) return;
  *probability = 0.0f;
  if (!is_finite(largest)) return;
  const Amount mass = mass_of(row.logits[token_of(winner)] - largest);
  *probability = static_cast<float>(static_cast<double>(mass) / static_cast<double>(__ldcg(&state.mass)));
}

// Adds what a warp's segments weigh.
__device__ inline void add_masses(const Row& row, float largest, int first, int step, Amount* mass) {
  Amount own = 0;
  for (int segment = first; segment < row.n_segments(); segment += step) {
    float x[OWN];
    row.load(segment, x);
#pragma unroll
    for (int i = 0; i < OWN; ++i) own += mass_of(x[i] - largest);
  }
  own = warp_sum(own);
  if (threadIdx.x % WARP == 0) atomicAdd(mass, own);
}

// Where the rows' draws stand; rows that stay open get no answer yet. Grid: any number of blocks for a row, rows.
__global__ void __launch_bounds__(CUT_WARPS* WARP)
    stand(const float* logits, int n_rows, int vocab, const float* temperature, const int* top_k, const float* top_p,
          const float* min_p, const long long* seed, const long long* position, Key* workspace, long long* token_ids,
          float* probability) {
  let_next_begin();
  wait_for_earlier();
  // from the last row: of a batch larger than the L2 cache, that is what `scan` has left there
  const int row_id = n_rows - 1 - blockIdx.y;
  const Wish wish = Columns{temperature, top_k, top_p, min_p, seed, position}.of(row_id, vocab);
  const bool weighs = probability != nullptr, together = weighs || wish.truncates();
  if (!together && blockIdx.x > 0) return;
  const Work work = work_of(workspace, n_rows, row_id, vocab);
  const Row row{logits + static_cast<long long>(row_id) * vocab, vocab, work.tops};
  const int first = blockIdx.x * CUT_WARPS + threadIdx.x / WARP, step = gridDim.x * CUT_WARPS;  // segments of the warp
  float x[OWN];  // on its way while the row's largest are looked for
  if (wish.truncates()) row.load(first, x);
  const Key top = row.top();
  const float largest = value_of(top);
  const Key winner = wish.greedy || !is_finite(largest) ? top : best_of(work, vocab);
  Drawn drawn(row.logits[token_of(winner)], token_of(winner), largest);
  if (wish.truncates()) {
    for (int segment = first; segment < row.n_segments(); segment += step) {
      drawn.compare(segment, x);
      row.load(segment + step, x);
    }
    drawn.add_to(&work.state->standing);
  }
  if (weighs) add_masses(row, largest, first, step, &work.state->mass);
  if (together && !arrives_last(work.state->arrived, gridDim.x)) return;
  if (wish.restricts() && is_finite(largest) && !survives(wish, &work.state->standing, drawn)) {
    if (threadIdx.x == 0) {
      const Open open = open_of(workspace);
      work.state->top = top;
      open.rows[atomicAdd(open.n, 1)] = row_id;
    }
    for (int i = threadIdx.x; i < 2 * N_BUCKETS; i += blockDim.x) work.amounts[i] = 0;
  } else if (threadIdx.x == 0) {
    answer(row, *work.state, top, winner, token_ids + row_id, weighs ? probability + row_id : nullptr);
  }
}

// What a block adds up in buckets, in shared memory.
struct Buckets {
  unsigned n_in[N_BUCKETS];
  unsigned low[N_BUCKETS];   // of masses, HALF_MASS bits each
  unsigned high[N_BUCKETS];  // of masses, the bits above
};

// Adds a block's tokens to the row's amounts by bucket, as far as truncation asks for them.
__device__ inline void weigh_part(const Row& row, const Wish& wish, int part, float largest, Amount* amounts,
                                  Buckets& sums) {
  const bool counts = wish.top_k > 0, weighs = wish.top_p < 1.0f;
  float x[OWN];
  row.load(part * CUT_WARPS + threadIdx.x / WARP, x);
  for (int i = threadIdx.x; i < N_BUCKETS; i += blockDim.x) sums.n_in[i] = sums.low[i] = sums.high[i] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const float distance = x[i] - largest;
    const int bucket = bucket_of(distance);
    if (bucket == LAST_BUCKET) continue;  // weighs nothing, and is not counted: it is what the others leave
    if (counts) atomicAdd(&sums.n_in[bucket], 1u);
    if (!weighs) continue;
    const Amount mass = mass_of(distance);
    const unsigned low = mass & ((1u << HALF_MASS) - 1), high = static_cast<unsigned>(mass >> HALF_MASS);
    if (low) atomicAdd(&sums.low[bucket], low);
    if (high) atomicAdd(&sums.high[bucket], high);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < N_BUCKETS; i += blockDim.x) {
    const Amount mass = sums.low[i] + (static_cast<Amount>(sums.high[i]) << HALF_MASS);
    if (sums.n_in[i]) atomicAdd(&amounts[i], static_cast<Amount>(sums.n_in[i]));
    if (mass) atomicAdd(&amounts[N_BUCKETS + i], mass);
  }
  __syncthreads();  // the sums have been read when the next part begins
}

// Grid: blocks that share the parts of open rows.
__global__ void __launch_bounds__(CUT_WARPS* WARP)
    weigh(const float* logits, int n_rows, int vocab, const float* temperature, const int* top_k, const float* top_p,
          const float* min_p, const long long* seed, const long long* position, Key* workspace) {
  let_next_begin();
  wait_for_earlier();
  __shared__ Buckets sums[1];
  const Open open = open_of(workspace);
  const int n_parts = pieces(vocab, PART), n = *open.n * n_parts;
  for (int i = blockIdx.x; i < n; i += gridDim.x) {
    const int row_id = open.rows[i / n_parts];
    const Wish wish = Columns{temperature, top_k, top_p, min_p, seed, position}.of(row_id, vocab);
    if (!wish.truncates()) continue;
    const Work work = work_of(workspace, n_rows, row_id, vocab);
    const Row row{logits + static_cast<long long>(row_id) * vocab, vocab, work.tops};
    weigh_part(row, wish, i % n_parts, value_of(work.state->top), work.amounts, sums[0]);
  }
}

// Grid: blocks that share the open rows.
__global__ void __launch_bounds__(CUT_WARPS* WARP, 1)
    cut(const float* logits, int n_rows, int vocab, const float* temperature, const int* top_k, const float* top_p,
        const float* min_p, const long long* seed, const long long* position, Key* workspace) {
  let_next_begin();
  wait_for_earlier();
  __shared__ Search search[1];
  const Open open = open_of(workspace);
  for (int i = blockIdx.x; i < *open.n; i += gridDim.x) {
    const int row_id = open.rows[i];
    const Wish wish = Columns{temperature, top_k, top_p, min_p, seed, position}.of(row_id, vocab);
    if (!wish.truncates()) continue;
    const Work work = work_of(workspace, n_rows, row_id, vocab);
    const Row row{logits + static_cast<long long>(row_id) * vocab, vocab, work.tops};
    const Key cut = cut_of(row, wish, value_of(work.state->top), work.amounts, work.amounts + N_BUCKETS, search[0]);
    if (threadIdx.x == 0) work.state->cut = cut;
    __syncthreads();  // the search has been read when the next row begins
  }
}

// Grid: blocks that share the chunks of open rows.
__global__ void __launch_bounds__(CHUNK_WARPS* WARP, 4)
    draw(const float* logits, int n_rows, int vocab, const float* temperature, const int* top_k, const float* top_p,
         const float* min_p, const long long* seed, const long long* position, Key* workspace, long long* token_ids,
         float* probability) {
  let_next_begin();
  wait_for_earlier();
  const Open open = open_of(workspace);
  const int n_chunks = pieces(vocab, CHUNK), n = *open.n * n_chunks;
  for (int i = blockIdx.x; i < n; i += gridDim.x) {
    const int row_id = open.rows[i / n_chunks], chunk = i % n_chunks;
    const Wish wish = Columns{temperature, top_k, top_p, min_p, seed, position}.of(row_id, vocab);
    const Work work = work_of(workspace, n_rows, row_id, vocab);
    const Row row{logits + static_cast<long long>(row_id) * vocab, vocab, work.tops};
    const Key top = work.state->top;
    const Draw draw{wish.temperature, wish.stream, work.state->cut, wish.min_p, value_of(top), 1.0f / wish.temperature};
    const int segment = chunk * CHUNK_WARPS + threadIdx.x / WARP;
    const Key best = segment < row.n_segments() ? row.tops[segment] : 0;
    const float bar = draw.least_value(top);  // the largest logit is always in play
    const bool hopes = best != 0 && best >= draw.cut && Bar(draw.inverse, bar).may_reach(value_of(best));
    Key winner = 0;
    if (__syncthreads_or(hopes)) {
      float x[OWN];
      for (int j = 0; j < OWN; ++j) x[j] = -infinity();
      if (hopes) row.load(segment, x);
      winner = drawn(draw, row, segment, x, top);
    }
    if (threadIdx.x == 0) work.winners[chunk] = winner;
    if (!arrives_last(work.state->arrived + 1, n_chunks)) continue;
    const Key most = best_of(work, vocab);
    float* wanted = probability == nullptr ? nullptr : probability + row_id;
    if (threadIdx.x == 0) answer(row, *work.state, top, most, token_ids + row_id, wanted);
  }
}
