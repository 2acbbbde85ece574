// Copies from device to shared memory that run beside the thread (cp.async). What was copied may be read after
// copies_wait and a barrier. Both addresses must be multiples of 16.
#pragma once

#include "device.cuh"

// 16 bytes; with `wanted` false the target is filled with zeros and `from` is not read.
__device__ inline void copy16(void* to_shared, const void* from, bool wanted = true) {
#ifdef SLIPSTREAM_EMULATED
  emulator::copy_later(to_shared, from, wanted);
#else
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
  const int n_bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(n_bytes)
               : "memory");
#endif
}

// Ends a group of copies of this thread.
__device__ inline void copies_commit() {
#ifdef SLIPSTREAM_EMULATED
  emulator::copies_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most N of this thread's groups are still under way.
template <int N>
__device__ inline void copies_wait() {
#ifdef SLIPSTREAM_EMULATED
  emulator::copies_wait(N);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
