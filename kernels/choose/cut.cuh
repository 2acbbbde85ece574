// top_k and top_p without a sort, as in truncate.py: amounts (tokens or masses) in buckets of equal distance from the
// largest logit, then exactly in the one bucket the cut falls into. A cut is a key: smaller keys are out of play.
#pragma once

#include "standing.cuh"

constexpr int CUT_WARPS = 16;
constexpr int LISTED = 2048;  // tokens of a bucket that are noted down; a fuller one is read again every time
constexpr int DIGITS = 11;    // bits that one round of the exact search settles

// Shared memory of the search. Places are complements of keys: they grow from the largest logit down.
struct Search {
  Amount amounts[N_BUCKETS];
  unsigned n_in[N_BUCKETS];
  Key places[LISTED];
  Amount warp_sums[CUT_WARPS];
  Amount rest;
  Key place;
  unsigned n_found;
  int reached;
};

// The tokens of one bucket. Those below an earlier cut are among them, at the end, where no later cut reaches.
struct Bucket {
  const Row& row;
  Search& search;
  float largest;
  int bucket;

  // take(place) for each of them, by reading the row. AT_ONCE: segments of a warp whose loads are under way together.
  template <int AT_ONCE, class TAKE>
  __device__ void read(TAKE take) const {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int first = 0; first < row.n_segments(); first += CUT_WARPS * WARP) {
      const int own = first + lane * CUT_WARPS + warp;  // a lane looks at one of the warp's segments
      const bool wanted = own < row.n_segments() && bucket_of(value_of(row.tops[own]) - largest) <= bucket;
      unsigned left = __ballot_sync(FULL_WARP, wanted);
      while (left != 0) {
        float x[AT_ONCE][OWN];
        int segments[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          segments[i] = left == 0 ? row.n_segments() : first + (__ffs(left) - 1) * CUT_WARPS + warp;  // behind the last: none
          left &= left - 1;
          row.load(segments[i], x[i]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE * OWN; ++i) {
          const int token = Row::token(segments[i / OWN], i % OWN);
          const float logit = x[i / OWN][i % OWN];
          if (token < row.vocab && bucket_of(logit - largest) == bucket) take(~key_of(logit, token));
        }
      }
    }
  }

  // The same from the list, where it holds them all.
  template <class TAKE>
  __device__ void each(TAKE take) const {
    if (search.n_found > LISTED) return read<1>(take);
    for (unsigned i = threadIdx.x; i < search.n_found; i += CUT_WARPS * WARP) take(search.places[i]);
  }

  __device__ Amount mass_at(Key place) const { return mass_of(value_of(~place) - largest); }
};

// The first of search.amounts at which their sum reaches `need` becomes search.reached, and what is needed of it
// search.rest. Where the sum stays below, it is the last one, whose amount nobody counts.
__device__ inline void reach(Search& search, Amount need) {
  constexpr int EACH = N_BUCKETS / (CUT_WARPS * WARP);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  __syncthreads();
  Amount own = 0;
  for (int i = 0; i < EACH; ++i) own += search.amounts[threadIdx.x * EACH + i];
  Amount until = own;
  for (int apart = 1; apart < WARP; apart *= 2) {
    const Amount other = __shfl_up_sync(FULL_WARP, until, apart);
    if (lane >= apart) until += other;
  }
  if (lane == WARP - 1) search.warp_sums[warp] = until;
  __syncthreads();
  for (int i = 0; i < warp; ++i) until += search.warp_sums[i];
  Amount before = until - own;
  if (before < need && (need <= until || threadIdx.x == CUT_WARPS * WARP - 1)) {
    int i = threadIdx.x * EACH;
    for (; i < threadIdx.x * EACH + EACH - 1 && before + search.amounts[i] < need; ++i) before += search.amounts[i];
    search.reached = i;
    search.rest = need - before;
  }
  __syncthreads();
}

// Notes down the bucket's tokens; returns the first place among them and, in `last`, the last, counted from there.
__device__ inline Key list(const Bucket& bucket, Key& last) {
  Search& search = bucket.search;
  if (threadIdx.x == 0) search.n_found = 0;
  __syncthreads();
  Key nearest = 0, furthest = 0;  // nearest as a key, so that it is the largest
  bucket.read<4>([&](Key place) {
    const unsigned i = atomicAdd(&search.n_found, 1u);
    if (i < LISTED) search.places[i] = place;
    nearest = ~place > nearest ? ~place : nearest;
    furthest = place > furthest ? place : furthest;
  });
  nearest = block_max(nearest);
  last = block_max(furthest) - ~nearest;
  return ~nearest;
}

// Key of the token at which the bucket's amounts, larger logits and lower ids first, reach `need`.
__device__ inline Key cut_in(const Bucket& bucket, Amount need, bool by_mass) {
  Search& search = bucket.search;
  Key last;
  Key first = list(bucket, last);
  int shift = max(0, 64 - __clzll(static_cast<long long>(last)) - DIGITS);
  for (;;) {
    for (int i = threadIdx.x; i < N_BUCKETS; i += CUT_WARPS * WARP) search.amounts[i] = search.n_in[i] = 0;
    __syncthreads();
    bucket.each([&](Key place) {
      if (place - first > last) return;
      const unsigned digit = static_cast<unsigned>((place - first) >> shift);
      atomicAdd(&search.amounts[digit], by_mass ? bucket.mass_at(place) : 1ull);
      atomicAdd(&search.n_in[digit], 1u);
    });
    reach(search, need);
    need = search.rest;
    first += static_cast<Key>(search.reached) << shift;
    last = (1ull << shift) - 1;
    const bool alone = search.n_in[search.reached] == 1;
    __syncthreads();
    if (shift == 0) return ~first;
    if (alone) break;
    shift = max(0, shift - DIGITS);
  }
  bucket.each([&](Key place) {
    if (place - first <= last) search.place = place;
  });
  __syncthreads();
  return ~search.place;
}

// Mass of the bucket's tokens down to a cut.
__device__ inline Amount mass_down_to(const Bucket& bucket, Key cut) {
  Amount total = 0;
  bucket.each([&](Key place) {
    if (place <= ~cut) total += bucket.mass_at(place);
  });
  return block_sum(total);
}

// The row's cut; 0 keeps all. counted, weighed: [N_BUCKETS], tokens and masses by bucket, the last one's not counted.
// A block of CUT_WARPS warps calls it.
__device__ inline Key cut_of(const Row& row, const Wish& wish, float largest, const Amount* counted,
                             const Amount* weighed, Search& search) {
  Key cut = 0;
  int furthest = N_BUCKETS;  // bucket of the cut
  Amount of_it = 0;          // mass that the cut keeps of it
  if (wish.top_k > 0) {
    for (int i = threadIdx.x; i < N_BUCKETS; i += CUT_WARPS * WARP) search.amounts[i] = __ldcg(counted + i);
    reach(search, wish.top_k);
    const Bucket bucket{row, search, largest, search.reached};
    cut = cut_in(bucket, search.rest, false);
    furthest = bucket.bucket;
    if (wish.top_p < 1.0f) of_it = mass_down_to(bucket, cut);
  }
  if (wish.top_p < 1.0f) {
    __syncthreads();
    Amount total = 0;
    for (int i = threadIdx.x; i < N_BUCKETS; i += CUT_WARPS * WARP) {
      const Amount amount = i < furthest ? __ldcg(weighed + i) : i == furthest ? of_it : 0;
      search.amounts[i] = amount;
      total += amount;
    }
    total = block_sum(total);
    const double need = ceil(static_cast<double>(wish.top_p) * static_cast<double>(total));
    reach(search, need > 1.0 ? static_cast<Amount>(need) : 1);
    cut = cut_in({row, search, largest, search.reached}, search.rest, true);
  }
  return cut;
}
