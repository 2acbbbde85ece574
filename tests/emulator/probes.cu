// Kernels that test the emulator itself; those named bad_ do what must be reported.
#include "bulk.cuh"
#include "copy.cuh"
#include "mma.cuh"
#include "warp.cuh"
#include "wgmma.cuh"

__global__ void shuffles(const float* x, float* out) {
  const int i = threadIdx.x;
  const float value = x[i];
  out[i] = warp_sum(value);
  out[64 + i] = __shfl_up_sync(FULL_WARP, value, 1);
  out[128 + i] = __shfl_down_sync(FULL_WARP, value, 3, 16);
  out[192 + i] = __shfl_xor_sync(FULL_WARP, value, 5);
  out[256 + i] = __shfl_sync(FULL_WARP, value, 2, 8);
  out[320 + i] = static_cast<float>(__popc(__ballot_sync(FULL_WARP, value > 0.0f)));
  if (i % 2 == 0) {  // half of the warp among itself
    out[384 + i] = __shfl_sync(0x55555555u, value, 30);
  } else {
    out[384 + i] = static_cast<float>(__reduce_add_sync(0xaaaaaaaau, i));
  }
}

// Sums of blocks of 96 values by halving in shared memory.
template <class T>
__global__ void block_sums(const T* x, float* sums, int* n_done) {
  __shared__ float tile[96];
  float* also = dynamic_shared<float>();
  tile[threadIdx.x] = widened(x[blockIdx.x * 96 + threadIdx.x]);
  __syncthreads();
  for (unsigned n = 48; n >= 3; n /= 2) {
    if (threadIdx.x < n) tile[threadIdx.x] += tile[threadIdx.x + n];
    __syncthreads();
  }
  if (threadIdx.x == 0) also[5] = tile[0] + tile[1] + tile[2];
  __syncthreads();
  if (threadIdx.x == 95) sums[blockIdx.x] = also[5];
  if (threadIdx.x == 0) atomicAdd(n_done, 1);
}

// out [16, 8] = a [16, 16] b [8, 16] transposed: one tensor-core product fed by load_matrices.
template <class T>
__global__ void product(const T* a, const T* b, float* out) {
  __shared__ __align__(16) T tile[24 * 16];
  const int lane = threadIdx.x;
  copy16(tile + 8 * lane, a + 8 * lane);
  copy16(tile + 256 + 8 * (lane % 16), b + 8 * (lane % 16), lane < 16 || b != nullptr);
  copies_commit();
  copies_wait<0>();
  __syncwarp();
  unsigned left[4], right[2];
  float c[4] = {};
  load_matrices<4>(left, tile + (lane % 16) * 16 + lane / 16 * 8);
  load_matrices<2>(right, tile + 256 + (lane % 8) * 16 + lane / 8 % 2 * 8);
  mma_16x8x16<T>(c, left, right);
  for (int i = 0; i < 4; ++i) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

// out [16, 8] = a [16, 16] b [16, 8]: the right side turned while it is read.
template <class T>
__global__ void product_turned(const T* a, const T* b, float* out) {
  __shared__ __align__(16) T tile[16 * 16 + 16 * 8];
  const int lane = threadIdx.x;
  store16(tile + 8 * lane, load16(a + 8 * lane));
  if (lane < 16) store16(tile + 256 + 8 * lane, load16_once(b + 8 * lane));
  __syncwarp();
  unsigned left[4], right[2];
  float c[4] = {};
  load_matrices<4>(left, tile + (lane % 16) * 16 + lane / 16 * 8);
  load_matrices<2, true>(right, tile + 256 + lane % 16 * 8);
  mma_16x8x16<T>(c, left, right);
  for (int i = 0; i < 4; ++i) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

// out [64, 128] = a [64, 16] times columns, which lie in the order of wgmma.cuh: one product of a warpgroup, twice.
template <class T>
__global__ void group_product(const T* a, const T* columns, float* out) {
  __shared__ __align__(128) T tile[2048];
  __shared__ Barrier arrived;
  if (threadIdx.x == 0) {
    barrier_init(&arrived, 1);
    barriers_begin();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    barrier_expect(&arrived, sizeof tile);
    bulk_copy(tile, columns, sizeof tile / 2, &arrived);
    bulk_copy(tile + 1024, columns + 1024, sizeof tile / 2, &arrived);
  }
  barrier_wait(&arrived, 0);
  const int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane / 4;
  unsigned left[4];
  for (int i = 0; i < 4; ++i) memcpy(left + i, a + (row + i % 2 * 8) * 16 + lane % 4 * 2 + i / 2 * 8, 4);
  float sums[64] = {};
  group_begin();
  multiply_group<T>(sums, left, tile);
  group_commit();
  group_begin();
  multiply_group<T>(sums, left, tile);
  group_commit();
  group_wait<0>();
  for (int i = 0; i < 64; ++i) out[(row + i / 2 % 2 * 8) * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i] / 2;
}

// out [8, 8] = x turned, 16 bits each.
__global__ void turned_matrix(const unsigned* x, unsigned* out) { out[threadIdx.x] = turned(x[threadIdx.x]); }

__global__ void unwritten(float* out) {
  __shared__ float tile[32];
  if (threadIdx.x == 3) tile[3] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x] + dynamic_shared<float>()[threadIdx.x] * 0.0f;
}

__global__ void scaled(const float* x, float* out, int n, float by, long long skip) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i + skip] * by;
}

__global__ void bad_barrier(float* out) {
  if (threadIdx.x < 5) return;
  __syncthreads();
  out[0] = 1.0f;
}

__global__ void bad_deadlock(float* out) {
  if (threadIdx.x == 0) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  out[0] = 1.0f;
}

__global__ void bad_mask(float* out) { out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 0); }

__global__ void bad_lane(float* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 20);
}

__global__ void bad_end(float* out, int i) { out[i] = out[i + 1]; }

__global__ void bad_alignment(float* out) { store16(out, load16(out + 1)); }

__global__ void bad_index(float* out, int i) {
  __shared__ float tile[8];
  tile[i] = 1.0f;
  out[0] = tile[i];
}

__global__ void bad_wait(const float* x, float* out) {
  __shared__ __align__(16) float tile[4];
  copy16(tile, x);
  copies_commit();
  copies_wait<1>();
  out[0] = tile[0];
  copies_wait<0>();
}

// What a bulk copy brings is read before it was waited for.
__global__ void bad_arrival(const float* x, float* out) {
  __shared__ __align__(16) float tile[4];
  __shared__ Barrier arrived;
  barrier_init(&arrived, 1);
  barrier_expect(&arrived, 16);
  bulk_copy(tile, x, 16, &arrived);
  out[0] = tile[0];
  barrier_wait(&arrived, 0);
  out[1] = tile[0];
}

// Sums are read while one group of products is still under way.
__global__ void bad_group(float* out) {
  __shared__ __align__(128) bfloat16 tile[2048];
  for (int i = threadIdx.x; i < 2048; i += 128) tile[i] = narrowed<bfloat16>(1.0f);
  __syncthreads();
  const unsigned left[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  float sums[64] = {};
  for (int i = 0; i < 2; ++i) {
    group_begin();
    multiply_group<bfloat16>(sums, left, tile);
    group_commit();
  }
  group_wait<1>();
  out[threadIdx.x] = sums[0];
  group_wait<0>();
}

__global__ void bad_left(float*) {
  __shared__ __align__(128) bfloat16 tile[2048];
  const unsigned left[4] = {};
  float sums[64] = {};
  group_begin();
  multiply_group<bfloat16>(sums, left, tile);
  group_commit();
}

__global__ void bad_forever(float* out) {
  __shared__ Barrier arrived;
  if (threadIdx.x == 0) barrier_init(&arrived, 2);
  __syncthreads();
  if (threadIdx.x == 0) barrier_arrive(&arrived);
  barrier_wait(&arrived, 0);
  out[0] = 1.0f;
}

__global__ void bad_begin(float* out) {
  __shared__ Barrier arrived;
  barrier_arrive(&arrived);
  out[0] = 1.0f;
}

// Right only if thread 0 runs first: a barrier is missing.
__global__ void bad_race(float* out) {
  __shared__ float tile[1];
  if (threadIdx.x == 0) tile[0] = 2.0f;
  out[threadIdx.x] = tile[0];
}

// Every thread of a warp has written before the warp goes on, but nobody waits for the other warp.
__global__ void bad_warp_race(float* out) {
  __shared__ float tile[64];
  tile[threadIdx.x] = 2.0f;
  __syncwarp();
  __syncwarp();
  out[threadIdx.x] = tile[63 - threadIdx.x];
}
