// Copies of whole pieces from device to shared memory by the copy engine (cp.async.bulk), and the barriers in shared memory
// that they arrive at (mbarrier). Hopper and later.
//
// A barrier goes through phases. A phase ends when as many threads have arrived as barrier_init says and all bytes that
// barrier_expect has named are there; then the next begins. The first phase has parity 0, the next 1, then 0 again.
#pragma once

#include "device.cuh"

using Barrier = unsigned long long;

__device__ inline unsigned shared_address(const void* shared) {
#ifdef SLIPSTREAM_EMULATED
  return 0;
#else
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
#endif
}

// One thread calls it; others may use the barrier after barriers_begin and a __syncthreads.
__device__ inline void barrier_init(Barrier* barrier, unsigned n_arrivals) {
#ifdef SLIPSTREAM_EMULATED
  emulator::arrivals_init(barrier, n_arrivals);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_arrivals) : "memory");
#endif
}
__device__ inline void barriers_begin() {
#ifndef SLIPSTREAM_EMULATED
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ inline void barrier_arrive(Barrier* barrier) {
#ifdef SLIPSTREAM_EMULATED
  emulator::arrive(barrier, 0);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Arrives, and has the phase wait for so many bytes of copies besides.
__device__ inline void barrier_expect(Barrier* barrier, unsigned n_bytes) {
#ifdef SLIPSTREAM_EMULATED
  emulator::arrive(barrier, n_bytes);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_bytes)
               : "memory");
#endif
}

// Waits for the end of a phase of that parity. Of the phase before the first, too, which has ended.
__device__ inline void barrier_wait(Barrier* barrier, unsigned parity) {
#ifdef SLIPSTREAM_EMULATED
  emulator::arrivals_wait(barrier, parity);
#else
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
      "@!ended bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// n_bytes and both addresses: multiples of 16. The copy arrives at `barrier`, whose phase must expect it.
__device__ inline void bulk_copy(void* to_shared, const void* from, unsigned n_bytes, Barrier* barrier) {
#ifdef SLIPSTREAM_EMULATED
  emulator::bulk_copy(to_shared, from, n_bytes, barrier);
#else
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to_shared)),
               "l"(from), "r"(n_bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

// Goes round COUNT stages, each with its barriers; the parity changes with every round.
template <int COUNT>
struct Turn {
  int stage = 0;
  unsigned parity = 0;
  __device__ void next() {
    if (++stage == COUNT) stage = 0, parity ^= 1;
  }
};
