// Rows of logits to tokens, in three kernels: `scan` reads every logit once, writes changed rows down, and draws for rows
// that are not truncated; `weigh` finds the cut of the others; `draw` draws for those and answers for all. Blocks of rows
// that a kernel has nothing to do for end at once. Results depend on a row's own logits and parameters alone: what blocks
// add up together are whole numbers, and what they compare is ordered totally.
#include "change.cuh"
#include "cut.cuh"
#include "draw.cuh"

constexpr int PART = 2 * CUT_WARPS * SEGMENT;  // tokens a block weighs
constexpr int HALF_MASS = 17;  // PART masses, at most 2**34 each, fit 32 bits twice if cut here

// Of one row: what the kernels hand to each other.
struct Work {
  Key* tops;         // [n_segments]
  Key* winners;      // [n_chunks]: best value of every chunk
  Amount* amounts;   // [2, N_BUCKETS]: tokens, then masses
  Amount* part_mass; // [n_parts]
  Key* cut;          // []
  int* arrived;      // [2]: blocks that have weighed, that have drawn
};

__device__ inline int pieces(int n, int size) { return (n + size - 1) / size; }

// The workspace holds these one after another, each for all rows.
__device__ inline Work work_of(Key* workspace, int n_rows, int row, int vocab) {
  const long long n_segments = pieces(vocab, SEGMENT), n_chunks = pieces(vocab, CHUNK), n_parts = pieces(vocab, PART);
  Work work;
  work.tops = workspace + row * n_segments;
  workspace += n_rows * n_segments;
  work.winners = workspace + row * n_chunks;
  workspace += n_rows * n_chunks;
  work.part_mass = workspace + row * n_parts;
  workspace += n_rows * n_parts;
  work.cut = workspace + row;
  workspace += n_rows;
  work.arrived = reinterpret_cast<int*>(workspace + row);
  workspace += n_rows;
  work.amounts = workspace + row * 2LL * N_BUCKETS;
  return work;
}

__device__ inline Draw draw_of(const Wish& wish, Key cut, float largest) {
  return {wish.temperature, wish.stream, cut, wish.min_p, largest, 1.0f / wish.temperature};
}

// The others take for logits what this one has written to `changed` [n_rows, vocab], where that is not null.
__global__ void __launch_bounds__(CHUNK_WARPS* WARP, 5)
    scan(const float* logits, int n_rows, int vocab, const float* temperature, const int* top_k, const float* top_p,
         const float* min_p, const long long* seed, const long long* position, Key* workspace, const int* starts,
         const int* token_ids, const float* bias, const float* repeat, const float* penalty, const int* index,
         const unsigned* allowed, int n_words, float* changed) {
  const int n_chunks = pieces(vocab, CHUNK);
  const int row_id = blockIdx.x / n_chunks, chunk = blockIdx.x % n_chunks;
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
  if (chunk == 0 && threadIdx.x < 2) work.arrived[threadIdx.x] = 0;
  if (wish.truncates())
    for (int i = chunk * blockDim.x + threadIdx.x; i < 2 * N_BUCKETS; i += n_chunks * blockDim.x) work.amounts[i] = 0;

  float largest = -infinity();
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    if (!(x[i] == x[i])) x[i] = infinity();  // both end the row
    largest = fmaxf(largest, x[i]);
  }
  int at = 0;
#pragma unroll
  for (int i = OWN - 1; i >= 0; --i)
    if (x[i] == largest) at = i;
  Key top = warp_max(key_of(largest, Row::token(segment, at)));
  if (threadIdx.x % WARP == 0 && segment < row.n_segments()) work.tops[segment] = top;
  if (wish.greedy || wish.restricts()) return;

  top = block_max(top);
  Key winner = 0;
  if (is_finite(value_of(top))) {
    const Draw draw = draw_of(wish, 0, 0.0f);
    winner = drawn(draw, row, segment, x, draw.least_value(top));
  }
  if (threadIdx.x == 0) work.winners[chunk] = winner;
}

// Shared memory of `weigh`: what a block adds up in buckets, then the search of a row's last block.
union Weighing {
  struct {
    unsigned n_in[N_BUCKETS];
    unsigned low[N_BUCKETS];   // of masses, HALF_MASS bits each
    unsigned high[N_BUCKETS];  // of masses, the bits above
  } sums;
  Search search;
};

// Adds a block's tokens to the row's amounts by bucket, as far as they are asked for; returns their mass (the thread's
// share), 0 if `wants_mass` is false and nothing else needs masses.
__device__ inline Amount weigh_part(const Row& row, const Wish& wish, int part, float largest, Amount* amounts,
                                    bool wants_mass, Weighing& shared) {
  const bool counts = wish.truncates() && wish.top_k > 0, weighs = wish.truncates() && wish.top_p < 1.0f;
  const bool has_masses = weighs || wants_mass;
  auto& sums = shared.sums;
  for (int i = threadIdx.x; i < N_BUCKETS; i += blockDim.x) sums.n_in[i] = sums.low[i] = sums.high[i] = 0;
  __syncthreads();
  Amount total = 0;
  for (int half = 0; half < 2; ++half) {
    const int segment = (part * 2 + half) * CUT_WARPS + threadIdx.x / WARP;
    if (segment >= row.n_segments()) break;
    float x[OWN];
    row.load(segment, x);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const float distance = x[i] - largest;
      const int bucket = bucket_of(distance);
      if (bucket == LAST_BUCKET) continue;  // weighs nothing, and is not counted: it is what the others leave
      if (counts) atomicAdd(&sums.n_in[bucket], 1u);
      if (!has_masses) continue;
      const Amount mass = mass_of(distance);
      const unsigned low = mass & ((1u << HALF_MASS) - 1), high = static_cast<unsigned>(mass >> HALF_MASS);
      if (weighs && low) atomicAdd(&sums.low[bucket], low);
      if (weighs && high) atomicAdd(&sums.high[bucket], high);
      total += mass;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < N_BUCKETS; i += blockDim.x) {
    const Amount mass = sums.low[i] + (static_cast<Amount>(sums.high[i]) << HALF_MASS);
    if (sums.n_in[i]) atomicAdd(&amounts[i], static_cast<Amount>(sums.n_in[i]));
    if (mass) atomicAdd(&amounts[N_BUCKETS + i], mass);
  }
  return total;
}

__global__ void __launch_bounds__(CUT_WARPS* WARP)
    weigh(const float* logits, int n_rows, int vocab, const float* temperature, const int* top_k, const float* top_p,
          const float* min_p, const long long* seed, const long long* position, Key* workspace, int wants_mass) {
  __shared__ Weighing shared[1];
  const int n_parts = pieces(vocab, PART);
  // from the last row: of a batch larger than the L2 cache, that is what `scan` has left there
  const int row_id = n_rows - 1 - blockIdx.x / n_parts, part = blockIdx.x % n_parts;
  const Wish wish = Columns{temperature, top_k, top_p, min_p, seed, position}.of(row_id, vocab);
  if (!wish.truncates() && !wants_mass) return;
  const Work work = work_of(workspace, n_rows, row_id, vocab);
  const Row row{logits + static_cast<long long>(row_id) * vocab, vocab, work.tops};
  const float largest = value_of(row.top());
  if (!is_finite(largest)) return;
  const Amount mass = block_sum(weigh_part(row, wish, part, largest, work.amounts, wants_mass != 0, shared[0]));
  if (threadIdx.x == 0) work.part_mass[part] = mass;
  if (!wish.truncates() || !arrives_last(work.arrived, n_parts)) return;
  const Key cut = cut_of(row, wish, largest, work.amounts, work.amounts + N_BUCKETS, shared[0].search);
  if (threadIdx.x == 0) *work.cut = cut;
}

// The answer of a row whose chunks are done. token_id, probability: the row's, the latter null if unwanted.
__device__ inline void answer(const Row& row, const Wish& wish, const Work& work, Key top, long long* token_id,
                              float* probability) {
  Key winner = wish.greedy ? top : 0;
  if (!wish.greedy && is_finite(value_of(top)))
    for (int i = threadIdx.x; i < pieces(row.vocab, CHUNK); i += blockDim.x) {
      const Key other = __ldcg(work.winners + i);
      winner = other > winner ? other : winner;
    }
  winner = block_max(winner);
  if (threadIdx.x != 0) return;
  const float largest = value_of(top);
  *token_id = is_finite(largest) ? token_of(winner) : -1;
  if (probability == nullptr) return;
  *probability = 0.0f;
  if (!is_finite(largest)) return;
  Amount total = 0;
  for (int i = 0; i < pieces(row.vocab, PART); ++i) total += work.part_mass[i];
  const Amount mass = mass_of(row.logits[token_of(winner)] - largest);
  *probability = static_cast<float>(static_cast<double>(mass) / static_cast<double>(total));
}

__global__ void __launch_bounds__(CHUNK_WARPS* WARP)
    draw(const float* logits, int n_rows, int vocab, const float* temperature, const int* top_k, const float* top_p,
         const float* min_p, const long long* seed, const long long* position, Key* workspace, long long* token_ids,
         float* probability) {
  const int n_chunks = pieces(vocab, CHUNK);
  const int row_id = blockIdx.x / n_chunks, chunk = blockIdx.x % n_chunks;
  const Wish wish = Columns{temperature, top_k, top_p, min_p, seed, position}.of(row_id, vocab);
  if (!wish.restricts() && chunk > 0) return;
  const Work work = work_of(workspace, n_rows, row_id, vocab);
  const Row row{logits + static_cast<long long>(row_id) * vocab, vocab, work.tops};
  const Key top = row.top();
  const float largest = value_of(top);
  if (wish.restricts()) {
    Key winner = 0;
    if (is_finite(largest)) {
      const Draw draw = draw_of(wish, wish.truncates() ? *work.cut : 0, largest);
      const float bar = draw.least_value(top);  // the largest logit is always in play
      const int segment = chunk * CHUNK_WARPS + threadIdx.x / WARP;
      const Key best = segment < row.n_segments() ? row.tops[segment] : 0;
      const bool hopes = best != 0 && best >= draw.cut && Bar(draw.inverse, bar).may_reach(value_of(best));
      if (__syncthreads_or(hopes)) {
        float x[OWN];
        for (int i = 0; i < OWN; ++i) x[i] = -infinity();
        if (hopes) row.load(segment, x);
        winner = drawn(draw, row, segment, x, bar);
      }
    }
    if (threadIdx.x == 0) work.winners[chunk] = winner;
    if (!arrives_last(work.arrived + 1, n_chunks)) return;
  }
  answer(row, wish, work, top, token_ids + row_id, probability == nullptr ? nullptr : probability + row_id);
}
