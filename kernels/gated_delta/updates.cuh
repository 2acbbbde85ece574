// What updates need besides the state: `prepare` writes it, `advance` copies it into shared memory some updates ahead. All is
// float32, padded with zeros to whole pieces of 16 bytes. First come all updates of histories, then all rows.
//
// A key, a query and a decay per key are vectors over the rows of a state. They are turned, so that 16 bytes of one are what
// a lane of `advance` needs of it: the eight lanes of a column have every eighth row.
#pragma once

#include "warp.cuh"

constexpr int COLUMNS = 16;  // of a state, that a block of `advance` takes
constexpr int ROW_LANES = 8;  // lanes of one column

enum Kind { FLOAT32, BFLOAT16, FLOAT16 };  // of a pass's rows, as in cuda.py

// Where row i of a state lies in a turned vector.
__device__ inline int turned_place(int i) { return i / 32 * 32 + i % ROW_LANES * 4 + i / ROW_LANES % 4; }

struct Sizes {
  int n_history, n_rows;  // updates
  int n_key, n_value;     // heads
  int d_key, d_value;
  int n_places;  // of a turned vector: as many as `advance` has rows

  __device__ int n_updates() const { return n_history + n_rows; }
  __device__ int n_columns() const { return (d_value + COLUMNS - 1) / COLUMNS * COLUMNS; }
  __device__ long long mixed_width() const { return 2LL * n_key * d_key + static_cast<long long>(n_value) * d_value; }
  // Which of all heads one is, of updates, rows or parked records one after another.
  __device__ long long key_head(int of, int head) const { return static_cast<long long>(of) * n_key + head; }
  __device__ long long value_head(int of, int head) const { return static_cast<long long>(of) * n_value + head; }
};

// The workspace holds these one after another; `workspace_size` in cuda.py has its size.
struct Updates {
  float* keys;     // [n_updates, n_key, n_places]
  float* queries;  // [n_rows, n_key, n_places]
  float* values;   // [n_updates, n_value, n_columns]: of rows; of histories the deltas
  float4* gates;   // [n_updates, n_value]: the decay, if it is the head's; beta; where the row is parked, as bits; nothing
  float* decays;   // [n_updates, n_value, n_places], if every key dimension has its own

  __device__ Updates(float* workspace, const Sizes& sizes) {
    const long long n = sizes.n_updates(), n_value = sizes.n_value, n_key = sizes.n_key;
    keys = workspace;
    queries = keys + n * n_key * sizes.n_places;
    values = queries + sizes.n_rows * n_key * sizes.n_places;
    gates = reinterpret_cast<float4*>(values + n * n_value * sizes.n_columns());
    decays = reinterpret_cast<float*>(gates + n * n_value);
  }
};

// A pass's rows, of one kind of floats; raw_decay and raw_beta may be float32 besides.
struct Rows {
  const void* mixed;      // [n_rows, 2 * n_key * d_key + n_value * d_value]
  const void* raw_decay;  // [n_rows, n_value], or [n_rows, n_value, d_key] if every key dimension decays by itself
  const void* raw_beta;   // [n_rows, n_value]
  const float* a_log;     // [n_value]
  const float* dt_bias;   // as a row of raw_decay
  const int* parks;       // [n_rows]
  bool per_key, wide_gates;
  float scale;  // of queries
};

// Records of earlier passes.
struct Parked {
  const float* keys;    // [n_parked, n_key, d_key]
  const float* deltas;  // [n_parked, n_value, d_value]
  const float* decays;  // [n_parked, n_value] or [n_parked, n_value, d_key]
  bool per_key;
};

constexpr int MOST_PLACES = 256, OWN_PLACES = MOST_PLACES / WARP;

// Writes a vector of which a lane has every 32nd row, and zeros behind its end.
__device__ inline void write_turned(float* to, const float (&own)[OWN_PLACES], int n_places) {
#pragma unroll
  for (int j = 0; j < OWN_PLACES; ++j)
    if (j * WARP < n_places) to[turned_place(j * WARP + threadIdx.x % WARP)] = own[j];
}

// Reads d values, every 32nd by one lane; zeros behind the end.
template <class T>
__device__ inline void read_head(float (&own)[OWN_PLACES], const T* from, int d) {
#pragma unroll
  for (int j = 0; j < OWN_PLACES; ++j) {
    const int i = j * WARP + threadIdx.x % WARP;
    own[j] = i < d ? widened(from[i]) : 0.0f;
  }
}

// x / sqrt(Σ x² + 1e-6) * scale
__device__ inline void normalise(float (&own)[OWN_PLACES], float scale) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < OWN_PLACES; ++j) squares = __fmaf_rn(own[j], own[j], squares);
  const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(warp_sum(squares) + 1e-6f));
#pragma unroll
  for (int j = 0; j < OWN_PLACES; ++j) own[j] = own[j] * inverse * scale;
}

// log(1 + e^x) as max(x, 0) + 2 atanh(u / (2 + u)) with u = e^-|x|, which keeps its digits where it is tiny.
__device__ inline float softplus(float x) {
  const float u = expf(-fabsf(x)), z = __fdiv_rn(u, 2.0f + u), square = z * z;
  float total = 1.0f / 15;  // 1 + z²/3 + z⁴/5 + …: atanh(z) / z within 2e-9 for z <= 1/3
#pragma unroll
  for (int power = 13; power > 0; power -= 2) total = __fmaf_rn(total, square, 1.0f / power);
  return (x < 0.0f ? 0.0f : x) + 2.0f * z * total;  // NaN stays
}

__device__ inline float decay_of(float raw, float dt_bias, float rate) { return expf(-rate * softplus(raw + dt_bias)); }

// The query and the key of one key head of a row.
template <class T>
__device__ inline void prepare_heads(const Rows& rows, const Updates& to, const Sizes& sizes, int row, int head) {
  const T* query_at = static_cast<const T*>(rows.mixed) + row * sizes.mixed_width() + head * sizes.d_key;
  float query[OWN_PLACES], key[OWN_PLACES];
  read_head(query, query_at, sizes.d_key);
  read_head(key, query_at + sizes.n_key * sizes.d_key, sizes.d_key);
  normalise(query, rows.scale);
  normalise(key, 1.0f);
  write_turned(to.queries + sizes.key_head(row, head) * sizes.n_places, query, sizes.n_places);
  write_turned(to.keys + sizes.key_head(sizes.n_history + row, head) * sizes.n_places, key, sizes.n_places);
}

// Decays and beta of one value head of a row, made of T.
template <class T>
__device__ inline void prepare_gates(const Rows& rows, const Updates& to, const Sizes& sizes, int row, int head) {
  const long long place = sizes.value_head(row, head), after = sizes.value_head(sizes.n_history + row, head);
  const T* raw_decay = static_cast<const T*>(rows.raw_decay) + place * (rows.per_key ? sizes.d_key : 1);
  const float rate = expf(rows.a_log[head]);
  if (rows.per_key) {
    float raw[OWN_PLACES], bias[OWN_PLACES];
    read_head(raw, raw_decay, sizes.d_key);
    read_head(bias, rows.dt_bias + head * sizes.d_key, sizes.d_key);
#pragma unroll
    for (int j = 0; j < OWN_PLACES; ++j)
      if (j * WARP < sizes.n_places) raw[j] = decay_of(raw[j], bias[j], rate);
    write_turned(to.decays + after * sizes.n_places, raw, sizes.n_places);
  }
  if (threadIdx.x % WARP != 0) return;
  const float beta = __fdiv_rn(1.0f, 1.0f + expf(-widened(static_cast<const T*>(rows.raw_beta)[place])));
  const float decay = rows.per_key ? 0.0f : decay_of(widened(*raw_decay), rows.dt_bias[head], rate);
  to.gates[after] = make_float4(decay, beta, __int_as_float(rows.parks[row]), 0.0f);
}

// n values or deltas of a head, and zeros behind their end.
template <class T>
__device__ inline void prepare_values(float* to, const T* from, int n, int n_columns) {
  for (int begin = 0; begin < n_columns; begin += WARP * 4) {
    float some[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = begin + j * WARP + threadIdx.x % WARP;
      some[j] = i < n ? widened(from[i]) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = begin + j * WARP + threadIdx.x % WARP;
      if (i < n_columns) to[i] = some[j];
    }
  }
}

// One head of a row of T: key heads first, then value heads.
template <class T>
__device__ inline void prepare_row(const Rows& rows, const Updates& to, const Sizes& sizes, int row, int head) {
  if (head < sizes.n_key) return prepare_heads<T>(rows, to, sizes, row, head);
  head -= sizes.n_key;
  const T* values = static_cast<const T*>(rows.mixed) + row * sizes.mixed_width() + 2LL * sizes.n_key * sizes.d_key;
  float* after = to.values + sizes.value_head(sizes.n_history + row, head) * sizes.n_columns();
  prepare_values(after, values + head * sizes.d_value, sizes.d_value, sizes.n_columns());
  if (rows.wide_gates) {
    prepare_gates<float>(rows, to, sizes, row, head);
  } else {
    prepare_gates<T>(rows, to, sizes, row, head);
  }
}

// The same of an update of a history, which lies in place `row` of the pool.
__device__ inline void gather(const Parked& parked, const Updates& to, const Sizes& sizes, int update, int row, int head) {
  float own[OWN_PLACES];
  if (head < sizes.n_key) {
    read_head(own, parked.keys + sizes.key_head(row, head) * sizes.d_key, sizes.d_key);
    return write_turned(to.keys + sizes.key_head(update, head) * sizes.n_places, own, sizes.n_places);
  }
  head -= sizes.n_key;
  const long long before = sizes.value_head(row, head), after = sizes.value_head(update, head);
  const float* deltas = parked.deltas + before * sizes.d_value;
  if (parked.per_key) {
    read_head(own, parked.decays + before * sizes.d_key, sizes.d_key);
    write_turned(to.decays + after * sizes.n_places, own, sizes.n_places);
  } else if (threadIdx.x % WARP == 0) {
    to.gates[after] = make_float4(parked.decays[before], 0.0f, 0.0f, 0.0f);
  }
  prepare_values(to.values + after * sizes.n_columns(), deltas, sizes.d_value, sizes.n_columns());
}
