// Attention of ragged spans over paged keys and values. A query is one head of one row; QUERIES of them that read the same
// K/V head are the left side of a warp's products, keys and then values the right side.
//
// What a query adds up in which order depends on its position alone: where chunks begin is fixed (chunks.cuh), within a chunk
// the softmax moves on STEP positions at a time, and chunks are joined in ascending order, by the block that made them or by
// merge_chunks. A step of which a query sees nothing leaves its sums as they are, so its neighbours do not matter.
#include "attention/chunks.cuh"
#include "attention/stages.cuh"
#include "mma.cuh"
#include "warp.cuh"

constexpr int QUERIES = 16;
constexpr int MOST_WARPS = 4;
constexpr int AHEAD = 16;  // chunks whose sums merge_chunks has under way
// Columns of values that a warp sums: its registers have no room for more. Where heads are wider, SLICES warps have the same
// queries and scores, and each its columns.
template <int D>
constexpr int COLUMNS = D < 256 ? D : 256;
template <int D>
constexpr int SLICES = D / COLUMNS<D>;

template <int D>
__device__ inline int slice() {
  return threadIdx.x / WARP % SLICES<D>;
}
template <int D>
__device__ inline int first_column() {
  return slice<D>() * COLUMNS<D>;
}

// A warp's two query rows of a lane: the one of its group, and the one eight further.
template <int D>
struct Queries {
  float sums[COLUMNS<D> / 8][4];  // from first_column on
  Softmax softmax[2];
  Seen first, last;  // what the warp's first query sees and its last; what others do begins and ends between
  Seen seen[2];      // no query: nothing
  int index[2];      // row * n_heads + head
};

// The warp's queries [QUERIES][D], behind the stages: in registers they would leave too few for the sums. Warps that have
// the same ones share them.
template <class T, int D>
__device__ inline T* queries_of_warp() {
  return dynamic_shared<T>() + STAGES<T, T, D> * (2 * STEP<D> * D) + threadIdx.x / (WARP * SLICES<D>) * (QUERIES * D);
}

template <class T, int D>
__device__ inline void score(const T* keys, float (&scores)[STEP<D> / 8][4]) {
  const int lane = threadIdx.x % WARP;
  const int query = cell<D>(lane % 16, lane / 16), key = cell<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const T* queries = queries_of_warp<T, D>();
#pragma unroll(D == 512 ? 8 : D / 16)  // whole, 512 spilled where stores are float8
  for (int k = 0; k < D / 16; ++k) {
    unsigned q[4];
    load_matrices<4>(q, queries + further(query, 2 * k));
#pragma unroll
    for (int n = 0; n < STEP<D> / 8; n += 2) {
      unsigned some[4];
      load_matrices<4>(some, keys + further(key, 2 * k) + n * 8 * D);
      mma_16x8x16<T>(scores[n], q, {some[0], some[1]});
      mma_16x8x16<T>(scores[n + 1], q, {some[2], some[3]});
    }
  }
}

// Scores of positions at … to weights as the left side of the next product, the sums so far scaled to the new largest.
// partly: some query does not see all of the positions.
template <class T, int D>
__device__ inline void soften(Queries<D>& mine, int at, bool partly, float scale, float (&scores)[STEP<D> / 8][4],
                              unsigned (&weights)[STEP<D> / 16][4]) {
  const int pair = threadIdx.x % 4;
  float before[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = least();
#pragma unroll
    for (int i = 0; i < STEP<D> / 4; ++i) {
      float& one = scores[i / 2][2 * half + i % 2];
      one = __fmul_rn(one, scale);
      if (partly && !mine.seen[half].has(at + i / 2 * 8 + 2 * pair + i % 2)) one = least();
      largest = fmaxf(largest, one);
    }
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
    Softmax& softmax = mine.softmax[half];
    largest = fmaxf(largest, softmax.largest);
    const float zero = largest == least() ? 0.0f : largest;
    before[half] = power_of_two(softmax.largest - zero);
    softmax.largest = largest;
    softmax.sum = __fmul_rn(softmax.sum, before[half]);
#pragma unroll
    for (int n = 0; n < STEP<D> / 8; ++n) {
      const unsigned both =
          packed_pair<T>(power_of_two(scores[n][2 * half] - zero), power_of_two(scores[n][2 * half + 1] - zero));
      T rounded[2];
      memcpy(rounded, &both, 4);
      softmax.sum += widened(rounded[0]) + widened(rounded[1]);  // what the values are multiplied by
      weights[n / 2][n % 2 * 2 + half] = both;
    }
  }
  if (!__any_sync(FULL_WARP, before[0] != 1.0f || before[1] != 1.0f)) return;  // as behind the first steps nearly always
#pragma unroll
  for (int i = 0; i < COLUMNS<D> / 2; ++i) mine.sums[i / 4][i % 4] = __fmul_rn(mine.sums[i / 4][i % 4], before[i % 4 / 2]);
}

// Whether one of two values is infinite or NaN: all bits of its exponent are set.
template <class T>
constexpr unsigned EXPONENT = 0x7c00u;
template <>
constexpr unsigned EXPONENT<bfloat16> = 0x7f80u;
template <class T>
__device__ inline bool low_is_odd(unsigned both) { return (both & EXPONENT<T>) == EXPONENT<T>; }
template <class T>
__device__ inline bool high_is_odd(unsigned both) { return low_is_odd<T>(both >> 16); }

// Whether a step has such values. values: from first_column on, as for gather.
template <class T, int D>
__device__ inline bool has_odd(const T* values) {
  bool any = false;
  for (int i = threadIdx.x % WARP; i < STEP<D> * COLUMNS<D> / 8; i += WARP) {
    const Vector16<T> eight = load16(values + cell<D>(i / (COLUMNS<D> / 8), i % (COLUMNS<D> / 8)));
    unsigned words[4];
    memcpy(words, &eight, 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) any |= low_is_odd<T>(words[j]) || high_is_odd<T>(words[j]);
  }
  return __any_sync(FULL_WARP, any);
}

// Adds the weighted values.
template <class T, int D>
__device__ inline void gather(Queries<D>& mine, const unsigned (&weights)[STEP<D> / 16][4], const T* values) {
  const int lane = threadIdx.x % WARP, value = cell<D>(lane % 16, lane / 16);
#pragma unroll
  for (int k = 0; k < STEP<D> / 16; ++k) {
#pragma unroll
    for (int n = 0; n < COLUMNS<D> / 8; n += 2) {
      unsigned some[4];
      load_matrices<4, true>(some, values + further(value, n) + k * 16 * D);
      mma_16x8x16<T>(mine.sums[n], weights[k], {some[0], some[1]});
      mma_16x8x16<T>(mine.sums[n + 1], weights[k], {some[2], some[3]});
    }
  }
}

// As gather, where some query does not see a position and has weight 0 there, but 0 times infinity is NaN: odd values are
// left out of the products, then added to the queries that see them. Sums are in memory meanwhile, and the loop is rolled:
// it hardly ever runs, and must not take the other's registers.
template <class T, int D>
__device__ inline void gather_odd(
    Queries<D>& mine, int at, const unsigned (&weights)[STEP<D> / 16][4], const T* values) {
  const int lane = threadIdx.x % WARP, pair = lane % 4;
  float sums[COLUMNS<D> / 8][4];
  memcpy(sums, mine.sums, sizeof sums);
#pragma unroll 1
  for (int n = 0; n < COLUMNS<D> / 8; ++n) {
#pragma unroll
    for (int k = 0; k < STEP<D> / 16; ++k) {
      unsigned some[2];
      load_matrices<2, true>(some, values + cell<D>(k * 16 + lane % 16, n));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        some[i] &= (low_is_odd<T>(some[i]) ? 0u : 0xffffu) | (high_is_odd<T>(some[i]) ? 0u : 0xffff0000u);
      mma_16x8x16<T>(sums[n], weights[k], some);
    }
#pragma unroll 1
    for (int row = 0; row < STEP<D>; ++row) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float value = widened(values[cell<D>(row, n) + 2 * pair + i]);
        if (value - value == 0.0f) continue;
        if (mine.seen[0].has(at + row)) sums[n][i] += value;
        if (mine.seen[1].has(at + row)) sums[n][2 + i] += value;
      }
    }
  }
  memcpy(mine.sums, sums, sizeof sums);
}

// One step of a warp: STEP positions from `at` on.
template <class T, int D>
__device__ inline void advance(Queries<D>& mine, int at, float scale, const T* stage) {
  if (mine.first.first >= at + STEP<D> || mine.last.last < at) return;
  float scores[STEP<D> / 8][4] = {};
  unsigned weights[STEP<D> / 16][4];
  // All lanes agree; the vote has the compiler know it, too.
  const bool partly = __any_sync(FULL_WARP, mine.last.first > at || mine.first.last < at + STEP<D> - 1);
  score<T, D>(stage, scores);
  soften<T, D>(mine, at, partly, scale, scores, weights);
  const T* values = stage + STEP<D> * D + first_column<D>();
  if (partly && has_odd<T, D>(values)) {
    gather_odd<T, D>(mine, at, weights, values);
  } else {
    gather<T, D>(mine, weights, values);
  }
}

// The softmax and the sums of one chunk, for queries that see positions from `seen.first` to `seen.last` between them.
template <class T, class KV, int D>
__device__ inline void run_chunk(
    Queries<D>& mine, const Pages<KV>& pages, const Seen& seen, int chunk, float scale) {
  __shared__ int rows[LONGEST];  // of the store, a head's own; -1: nobody sees it
  constexpr int N_STAGES = STAGES<T, KV, D>, SIZE = 2 * STEP<D> * D;
  KV* stages = dynamic_shared<KV>();
  if constexpr (sizeof(KV) < sizeof(T)) stages += SIZE * (sizeof(T) / sizeof(KV));
  const int start = first_of(chunk), length = first_of(chunk + 1) - start;
  for (int i = threadIdx.x; i < length; i += blockDim.x) {
    const int at = start + i;
    rows[i] = -1;
    if (seen.has(at)) rows[i] = (pages.table[at / pages.size] * pages.n_kv + pages.head) * pages.size + at % pages.size;
  }
  __syncthreads();  // the rows are there, and the last chunk's stages free; its rows were read before its last step
  const int begin = max(seen.first - start, 0) / STEP<D>, end = min(seen.last - start, length - 1) / STEP<D> + 1;
#pragma unroll
  for (int i = 0; i < N_STAGES - 1; ++i) {
    if (begin + i < end) fetch<KV, D>(pages, rows, begin + i, stages + i * SIZE);
    copies_commit();
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) mine.softmax[half] = {least(), 0.0f};
#pragma unroll
  for (int i = 0; i < COLUMNS<D> / 2; ++i) mine.sums[i / 4][i % 4] = 0.0f;
  int stage = 0;
  for (int step = begin; step < end; ++step) {
    copies_wait<N_STAGES - 2>();
    __syncthreads();  // this step has arrived for all, and the last one's stage is free
    const int ahead = step + N_STAGES - 1;
    if (ahead < end) fetch<KV, D>(pages, rows, ahead, stages + (stage + N_STAGES - 1) % N_STAGES * SIZE);
    copies_commit();
    advance<T, D>(mine, start + step * STEP<D>, scale, as_products_want<T, D>(stages + stage * SIZE));
    stage = (stage + 1) % N_STAGES;
  }
  copies_wait<0>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // a lane has the weights of its own columns
    float& sum = mine.softmax[half].sum;
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
  }
}

// Leaves a chunk's sums of one query in memory, for merge_chunks.
template <int D>
__device__ inline void leave(const Queries<D>& mine, int half, int slot, const Sums& memory) {
  const int pair = threadIdx.x % 4, column = first_column<D>();
  float* to = memory.at(slot, mine.index[half]) + column;
#pragma unroll
  for (int n = 0; n < COLUMNS<D> / 8; ++n)
    if (column + n * 8 < memory.d_value)
      *reinterpret_cast<float2*>(to + n * 8 + 2 * pair) = make_float2(mine.sums[n][2 * half], mine.sums[n][2 * half + 1]);
  if (pair == 0 && column == 0) memory.softmax[memory.softmax_at(slot, mine.index[half])] = mine.softmax[half];
}

// Joins a chunk of one query to those before, which the same lanes left in slot 0; writes the result after the last.
template <class T, int D>
__device__ inline void join_chunk(
    const Queries<D>& mine, int half, int slot, int n_chunks, Softmax& total, const Sums& memory, const Sinks& sinks, T* out) {
  const int pair = threadIdx.x % 4, column = first_column<D>();
  float* between = n_chunks > 1 ? memory.at(0, mine.index[half]) + column + 2 * pair : nullptr;
  Shares shares{0.0f, 1.0f};
  if (slot == 0) {
    total = mine.softmax[half];
  } else {
    shares = join(total, mine.softmax[half]);
  }
  T* to = out + static_cast<long long>(mine.index[half]) * memory.d_value + column + 2 * pair;
  const float over = sinks.over(total, mine.index[half]);
#pragma unroll
  for (int n = 0; n < COLUMNS<D> / 8; ++n) {
    if (column + n * 8 >= memory.d_value) continue;
    float2 two = make_float2(mine.sums[n][2 * half], mine.sums[n][2 * half + 1]);
    if (slot > 0) {
      const float2 before = *reinterpret_cast<const float2*>(between + n * 8);
      two = make_float2(joined(shares, before.x, two.x), joined(shares, before.y, two.y));
    }
    if (slot < n_chunks - 1) {
      *reinterpret_cast<float2*>(between + n * 8) = two;
    } else {
      const unsigned both = packed_pair<T>(__fmul_rn(two.x, over), __fmul_rn(two.y, over));
      *reinterpret_cast<unsigned*>(to + n * 8) = both;
    }
  }
}

// The sums of a lane's queries over the chunks so far, in registers, but for a few of 128 columns, which spilled on sm_100.
template <int D>
struct Totals {
  static constexpr int N = COLUMNS<D> / 8, SHARED = D == 128 ? 6 : 0;
  float2 kept[N - SHARED][2];

  __device__ float2& at(int n, int half) {
    if constexpr (SHARED > 0) {
      __shared__ float2 others[SHARED][2][MOST_WARPS * WARP];
      if (n >= N - SHARED) return others[n - (N - SHARED)][half][threadIdx.x];
    }
    return kept[n][half];
  }
};

// Joins a chunk of one query to those before.
template <int D>
__device__ inline void add_chunk(const Queries<D>& mine, int half, int slot, Softmax& total, Totals<D>& totals) {
  const bool is_first = slot == 0;  // chosen value by value: two loops in a branch spilled
  if (is_first) total = {least(), 0.0f};
  const Shares shares = join(total, mine.softmax[half]);
  if (is_first) total = mine.softmax[half];
#pragma unroll
  for (int n = 0; n < COLUMNS<D> / 8; ++n) {
    float2& two = totals.at(n, half);
    const float2 own = make_float2(mine.sums[n][2 * half], mine.sums[n][2 * half + 1]);
    const float2 both = make_float2(joined(shares, two.x, own.x), joined(shares, two.y, own.y));
    two = is_first ? own : both;
  }
}

// The result of one query whose chunks are all joined.
template <class T, int D>
__device__ inline void write(
    const Queries<D>& mine, int half, const Softmax& total, Totals<D>& totals, int d_value, const Sinks& sinks, T* out) {
  const int column = first_column<D>();
  const float over = sinks.over(total, mine.index[half]);
  T* to = out + static_cast<long long>(mine.index[half]) * d_value + column + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < COLUMNS<D> / 8; ++n) {
    if (column + n * 8 >= d_value) continue;
    const float2 two = totals.at(n, half);
    *reinterpret_cast<unsigned*>(to + n * 8) = packed_pair<T>(__fmul_rn(two.x, over), __fmul_rn(two.y, over));
  }
}

// The warp's queries of a span: those from `first` to `end`, counted over its rows and the heads of the K/V head. They
// arrive with the first step of the first chunk, so that nothing waits for them before pages are looked up.
template <class T, int D>
__device__ inline void take_queries(
    Queries<D>& mine, const T* q, int first, int end, int n_past, int first_row, const Bounds& bounds, int n_heads, int share, int d_head) {
  const int lane = threadIdx.x % WARP;
  const auto index_of = [&](int query) { return (first_row + query / share) * n_heads + blockIdx.x * share + query % share; };
  const auto seen_by = [&](int query) {
    return query < end ? bounds.seen(n_past + query / share, first_row + query / share) : Seen{0, -1};
  };
  mine.first = seen_by(first);
  mine.last = first < end ? seen_by(min(first + QUERIES, end) - 1) : mine.first;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = first + lane / 4 + 8 * half;
    mine.seen[half] = seen_by(query);
    mine.index[half] = index_of(query);
  }
  if (first >= end) return;
  for (int i = lane + slice<D>() * WARP; i < QUERIES * D / 8; i += WARP * SLICES<D>) {
    const int row = i / (D / 8), chunk = i % (D / 8);
    const bool wanted = first + row < end && chunk * 8 < d_head;
    const long long from = wanted ? static_cast<long long>(index_of(first + row)) * d_head + chunk * 8 : 0;
    copy16(queries_of_warp<T, D>() + cell<D>(row, chunk), q + from, wanted);
  }
}

// Grid: K/V heads, chunks (one block: it goes through all and joins them), items. An item is QUERIES queries of one span per
// SLICES warps, n_tiles times; a block's other warps help to fetch. Spans have their items one after another, and there may be
// more blocks than items. Blocks along y share the chunks that an item sees. What takes longest begins first: an item's last
// chunks, of all heads, so that those which find no place at first are short; or, where a block goes through all of an item's,
// the last items. scale: times log2(e). window: at most 2^30, which means none. d_head, d_value: multiples of 8, at most D; of
// 16 where keys and values are float8.
//
// WALKS: for one block along y, whose sums over all chunks are in registers; heads wider than 128 leave no room for them.
template <class T, class KV, int D, bool WALKS>
__global__ void __launch_bounds__(MOST_WARPS * WARP, WALKS || D >= 256 ? 2 : 3)
    attention(const T* q, const KV* keys, const KV* values, const int* span_starts, const int* n_past, const int* page_table,
              const int* wholes, const float* sinks, T* out, float* sums, float* softmax, int n_rows, int n_spans, int n_pages_max, int n_heads, int n_kv,
              int page_size, int d_head, int d_value, int window, float scale, int n_tiles) {
  let_next_begin();
  wait_for_earlier();
  const int share = n_heads / n_kv, size = QUERIES * n_tiles;
  int span = 0, item = gridDim.y == 1 ? gridDim.z - 1 - blockIdx.z : blockIdx.z, n = 0, past = 0;
  for (; span < n_spans; ++span) {
    past = n_past[span];  // beside the starts, not after them
    n = (span_starts[span + 1] - span_starts[span]) * share;
    const int n_items = (n + size - 1) / size;
    if (item < n_items) break;
    item -= n_items;
  }
  if (span == n_spans) return;
  const long long table = static_cast<long long>(span) * n_pages_max;
  const Pages<KV> pages{keys, values, page_table + table, n_kv, static_cast<int>(blockIdx.x), page_size, d_head, d_value};
  const Sums memory{sums, reinterpret_cast<Softmax*>(softmax), n_rows * n_heads, d_value};
  const Bounds bounds{window, wholes};
  const int first_row = item * size / share, last_row = (min((item + 1) * size, n) - 1) / share;  // of the span
  const Seen seen{bounds.seen(past + first_row, span_starts[span] + first_row).first,
                  bounds.seen(past + last_row, span_starts[span] + last_row).last};
  const int first_chunk = seen.first_chunk(), n_chunks = seen.n_chunks();
  if (static_cast<int>(blockIdx.y) >= n_chunks) return;
  const int tile = threadIdx.x / (WARP * SLICES<D>), first = tile < n_tiles ? item * size + tile * QUERIES : n;
  Queries<D> mine;
  take_queries<T, D>(mine, q, first, n, past, span_starts[span], bounds, n_heads, share, d_head);
  const Sinks sink{sinks, n_heads};
  Softmax total[2];
  [[maybe_unused]] Totals<D> totals;
  for (int i = blockIdx.y; i < n_chunks; i += gridDim.y) {
    const int chunk = first_chunk + (gridDim.y == 1 ? i : n_chunks - 1 - i);
    run_chunk<T, KV, D>(mine, pages, seen, chunk, scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Seen& own = mine.seen[half];
      const int slot = chunk - own.first_chunk();
      if (own.last < 0 || slot < 0 || slot >= own.n_chunks()) continue;
      if constexpr (WALKS) {
        add_chunk<D>(mine, half, slot, total[half], totals);
      } else if (D > 128 && gridDim.y == 1) {
        join_chunk<T, D>(mine, half, slot, own.n_chunks(), total[half], memory, sink, out);
      } else {
        leave<D>(mine, half, slot, memory);
      }
    }
  }
  if constexpr (WALKS) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (mine.seen[half].last >= 0) write<T, D>(mine, half, total[half], totals, d_value, sink, out);
  }
}

// Joins the chunks of a query, for a grid of `attention` with several blocks along y. A warp makes 2 WARP columns of the
// result; n_parts warps make a query's.
template <class T>
__global__ void __launch_bounds__(MOST_WARPS * WARP, 1)
    merge_chunks(const float* sums, const float* softmax, const int* span_starts, const int* n_past, const int* wholes,
                 const float* sinks, T* out, int n_rows, int n_spans, int n_heads, int n_parts, int d_value, int window) {
  let_next_begin();
  wait_for_earlier();
  const int warp = blockIdx.x * MOST_WARPS + threadIdx.x / WARP, query = warp / n_parts, row = query / n_heads;
  const int column = (warp % n_parts * WARP + threadIdx.x % WARP) * 2;
  int span = 0, start = 0, past = 0;
  for (; span < n_spans; ++span) {
    start = span_starts[span], past = n_past[span];  // beside the next start, not after it
    if (span_starts[span + 1] > row) break;
  }
  if (row >= n_rows || span == n_spans || column >= d_value) return;
  const Seen seen = Bounds{window, wholes}.seen(past + row - start, row);
  const int n_queries = n_rows * n_heads, n_chunks = seen.n_chunks();
  Softmax total{};
  float2 whole{};
  for (int begin = 0; begin < n_chunks; begin += AHEAD) {
    Softmax chunks[AHEAD];
    float2 some[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const long long place = static_cast<long long>(min(begin + i, n_chunks - 1)) * n_queries + query;
      const float2 pair = *reinterpret_cast<const float2*>(softmax + 2 * place);
      chunks[i] = {pair.x, pair.y};
      some[i] = *reinterpret_cast<const float2*>(sums + place * d_value + column);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (begin + i == 0) {
        total = chunks[i], whole = some[i];
      } else if (begin + i < n_chunks) {
        const Shares shares = join(total, chunks[i]);
        whole = make_float2(joined(shares, whole.x, some[i].x), joined(shares, whole.y, some[i].y));
      }
    }
  }
  const float over = Sinks{sinks, n_heads}.over(total, query);
  const unsigned both = packed_pair<T>(__fmul_rn(whole.x, over), __fmul_rn(whole.y, over));
  *reinterpret_cast<unsigned*>(out + static_cast<long long>(query) * d_value + column) = both;
}
