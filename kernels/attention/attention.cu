// Attention of ragged spans over paged keys and values. A query is one head of one row; QUERIES of them that read the same
// K/V head are the left side of a warp's products, keys and then values the right side.
//
// What a query adds up in which order depends on its position alone: where chunks begin is fixed (chunks.cuh), within a chunk
// the softmax moves on STEP positions at a time, and chunks are joined in ascending order, by the block that made them or by
// merge_chunks. A step of which a query sees nothing leaves its sums as they are, so its neighbours do not matter. On Hopper
// warpgroups.cu takes the place of heads up to 128, but for keys and values of eight bits.
#include "attention/queries.cuh"
#include "attention/stages.cuh"

constexpr int MOST_WARPS = 4;

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

// One step of a warp: STEP positions from `at` on.
template <class T, int D>
__device__ inline void advance(Queries<D>& mine, int at, float scale, const T* stage) {
  if (mine.first.first >= at + STEP<D> || mine.last.last < at) return;
  float scores[STEP<D> / 8][4] = {};
  unsigned weights[STEP<D> / 16][4];
  // All lanes agree; the vote has the compiler know it, too.
  const bool partly = __any_sync(FULL_WARP, mine.last.first > at || mine.first.last < at + STEP<D> - 1);
  score<T, D>(stage, scores);
  float before[2];
  if (soften<T, D, STEP<D>>(mine, at, partly, scale, scores, weights, before)) rescale<D>(mine, before);
  weigh<T, D, STEP<D>>(mine, weights);
  const T* values = stage + STEP<D> * D + first_column<D>();
  const auto of_values = [](int row, int chunk) { return cell<D>(row, chunk); };
  if (partly && has_odd<T, D, STEP<D>>(values, of_values)) {
    gather_odd<T, D, STEP<D>>(mine, at, weights, values, of_values);
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
  clear<D>(mine);
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
  add_up<D>(mine);
}

// Joins a chunk of one query to those before, which the same lanes left in slot 0; writes the result after the last.
template <class T, int D>
__device__ inline void join_chunk(
    const Queries<D>& mine, int half, int slot, int n_chunks, Softmax& total, const Sums& memory, const Sinks& sinks, T* out) {
  const int pair = threadIdx.x % 4, column = first_column<D>();
  float* between = n_chunks > 1 ? memory.at(0, mine.index[half]) + column + 2 * pair : nullptr;
  Shares shares{0.0f, 1.0f};
  if (slot == 0) {
    total = mine.softmax(half);
  } else {
    shares = join(total, mine.softmax(half));
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

// Copies the warp's queries, from `first` on, which arrive with the first step of the first chunk: nothing waits for them before
// pages are looked up.
template <class T, int D>
__device__ inline void take_queries(const T* q, const Item& item, int first, int n_heads, int d_head) {
  for (int i = threadIdx.x % WARP + slice<D>() * WARP; i < QUERIES * D / 8; i += WARP * SLICES<D>) {
    const int row = i / (D / 8), chunk = i % (D / 8), query = first + row;
    const bool wanted = query < item.end && chunk * 8 < d_head;
    const long long from = item.index(query, n_heads);
    copy16(queries_of_warp<T, D>() + cell<D>(row, chunk), q + (wanted ? from * d_head + chunk * 8 : 0), wanted);
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
  const int number = gridDim.y == 1 ? gridDim.z - 1 - blockIdx.z : blockIdx.z;
  const Item item(number, QUERIES * n_tiles, n_heads / n_kv, n_spans, span_starts, n_past);
  if (item.first == item.end) return;
  const int* table = page_table + static_cast<long long>(item.span) * n_pages_max;
  const Pages<KV> pages{keys, values, table, n_kv, static_cast<int>(blockIdx.x), page_size, d_head, d_value};
  const Sums memory{sums, reinterpret_cast<Softmax*>(softmax), n_rows * n_heads, d_value};
  const Bounds bounds{window, wholes};
  const Seen seen = item.all(bounds);
  const int first_chunk = seen.first_chunk(), n_chunks = seen.n_chunks();
  if (static_cast<int>(blockIdx.y) >= n_chunks) return;
  const int tile = threadIdx.x / (WARP * SLICES<D>), first = tile < n_tiles ? item.first + tile * QUERIES : item.end;
  Queries<D> mine;
  place<D>(mine, item, first, QUERIES, bounds, n_heads);
  if (first < item.end) take_queries<T, D>(q, item, first, n_heads, d_head);
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

// AHEAD chunks of a query, for a lane's two columns.
template <int AHEAD>
struct Some {
  Softmax chunks[AHEAD];
  float2 sums[AHEAD];
};

// Joins the chunks of a query, for a grid with several blocks along y. A warp makes 2 WARP columns of the result; n_parts warps
// make a query's. AHEAD chunks are added while as many are under way.
template <class T, int AHEAD>
__global__ void __launch_bounds__(MOST_WARPS * WARP, AHEAD == 8 ? 4 : 3)
    merge_chunks(const float* sums, const float* softmax, const int* span_starts, const int* n_past, const int* wholes,
                 const float* sinks, T* out, int n_rows, int n_spans, int n_heads, int n_parts, int d_value, int window) {
  let_next_begin();
  const int warp = blockIdx.x * MOST_WARPS + threadIdx.x / WARP, query = warp / n_parts, row = query / n_heads;
  const int column = (warp % n_parts * WARP + threadIdx.x % WARP) * 2;
  int span = 0, start = 0, past = 0;
  for (; span < n_spans; ++span) {
    start = span_starts[span], past = n_past[span];  // beside the next start, not after it
    if (span_starts[span + 1] > row) break;
  }
  wait_for_earlier();
  if (row >= n_rows || span == n_spans || column >= d_value) return;
  const Seen seen = Bounds{window, wholes}.seen(past + row - start, row);
  const int n_queries = n_rows * n_heads, n_chunks = seen.n_chunks();
  const auto load = [&](int begin, Some<AHEAD>& some) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const long long place = static_cast<long long>(min(begin + i, n_chunks - 1)) * n_queries + query;
      memcpy(&some.chunks[i], softmax + 2 * place, sizeof(Softmax));
      some.sums[i] = *reinterpret_cast<const float2*>(sums + place * d_value + column);
    }
  };
  Softmax total{};
  float2 whole{};
  Some<AHEAD> next;
  load(0, next);
  for (int begin = 0; begin < n_chunks; begin += AHEAD) {
    const Some<AHEAD> some = next;
    if (begin + AHEAD < n_chunks) load(begin + AHEAD, next);
    Shares shares[AHEAD];  // before any is used, as they do not need each other
    float zero = begin == 0 ? some.chunks[0].zero : total.zero;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      shares[i] = shares_of(zero, some.chunks[i].zero);
      zero = fmaxf(zero, some.chunks[i].zero);
    }
    total.zero = zero;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (begin + i == 0) {
        total.sum = some.chunks[i].sum, whole = some.sums[i];
      } else if (begin + i < n_chunks) {
        total.sum = joined(shares[i], total.sum, some.chunks[i].sum);
        whole = make_float2(joined(shares[i], whole.x, some.sums[i].x), joined(shares[i], whole.y, some.sums[i].y));
      }
    }
  }
  const float over = Sinks{sinks, n_heads}.over(total, query);
  const unsigned both = packed_pair<T>(__fmul_rn(whole.x, over), __fmul_rn(whole.y, over));
  *reinterpret_cast<unsigned*>(out + static_cast<long long>(query) * d_value + column) = both;
}
