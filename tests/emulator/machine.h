// A CUDA block on one host thread: its threads are fibers that run until they meet a barrier or a warp operation.
//
// Blocks run one after another. What is checked: a barrier or warp operation that some thread never reaches, lanes
// that have left, memory outside its tensor, misaligned accesses, shared memory read before it was written (it is
// poisoned), signed overflow and shifts that are too wide (the compiler's traps).
#pragma once

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <sys/mman.h>
#include <tuple>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// All of this library's uninitialised static data is shared memory: `__shared__` is `static`, and nothing else is
// left without an initial value.
extern char __bss_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));

namespace emulator {

enum class State { READY, AT_BARRIER, IN_WARP, AT_ARRIVALS, FINISHED };
using Operation = void (*)(void** arguments, unsigned mask);

struct Copy {
  void* to;
  const void* from;
  bool wanted;
};

struct BulkCopy {
  void* to;
  const void* from;
  unsigned n_bytes;
};

struct Arrivals {  // a barrier in shared memory
  unsigned n_expected = 0, n_missing = 0, phase = 0, n_waiting = 0;
  long long n_bytes_missing = 0;
  std::vector<BulkCopy> copies;
};

struct GroupProduct {  // of a warp with columns in shared memory, eight by eight
  float* sums;
  unsigned n_eights;
  const unsigned* a;
  const void* columns;
  int to_next_panel;  // 16-bit values, of columns in panels
  const void* (*place)(const void* columns, int to_next_panel, unsigned input, unsigned column);
};

struct Fiber {
  ucontext_t first;
  jmp_buf where;
  bool begun = false;
  dim3 thread;
  unsigned index = 0;
  State state = State::READY;
  int barrier = 0;
  unsigned mask = 0;
  Operation operation = nullptr;
  void* argument = nullptr;
  std::vector<std::vector<Copy>> copies;  // the last group is open
  std::vector<std::vector<GroupProduct>> products;  // not yet computed; the last group is open
  const void* arrivals = nullptr;         // that it waits for
};

struct Meeting {  // at one of the 16 barriers of a block
  unsigned n_there = 0, n_expected = 0;
};

struct Launch {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared;  // bytes of dynamic shared memory
  // Of threads and blocks: 0 ascending, 1 descending, others a random order of that seed; with 2 a warp goes on as long as it
  // can before the next one begins, so that it meets what a missing barrier would have kept from it. Bulk copies arrive as late
  // as they may, in odd orders as soon as they are begun.
  unsigned order;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<unsigned> turns;
  size_t together;  // threads that take turns until none of them can go on
  Fiber* current = nullptr;
  Meeting meetings[16];
  std::map<const void*, Arrivals> arrivals;  // by address
  unsigned n_finished = 0;
  char* stacks = nullptr;
  jmp_buf scheduler;
  sigjmp_buf outside;
  void (*body)(void*) = nullptr;
  void* body_argument = nullptr;
  dim3 grid, block, block_index;
  bool hurries = false;  // bulk copies
  std::vector<unsigned char> shared_bytes;
  unsigned char* shared = nullptr;
  char message[512] = "";
  void* fault_at = nullptr;  // where in the library's code
};

constexpr size_t STACK = 256 << 10;
inline Machine* machine __attribute__((section(".emulator_state"))) = nullptr;

[[noreturn]] inline void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  int n = vsnprintf(machine->message, sizeof machine->message, format, values);
  va_end(values);
  if (machine->current != nullptr && n < 400)
    snprintf(machine->message + n, sizeof machine->message - n, " [block %u %u %u, thread %u %u %u]",
             machine->block_index.x, machine->block_index.y, machine->block_index.z, machine->current->thread.x,
             machine->current->thread.y, machine->current->thread.z);
  siglongjmp(machine->outside, 1);
}

__attribute__((noinline)) inline void yield() {
  if (_setjmp(machine->current->where) == 0) _longjmp(machine->scheduler, 1);
}

inline void fiber_main() {
  for (;;) {  // once per block
    machine->body(machine->body_argument);
    if (!machine->current->copies.empty() &&
        (machine->current->copies.size() > 1 || !machine->current->copies.back().empty()))
      fail("the thread ends with copies under way");
    if (!machine->current->products.empty() && !machine->current->products.front().empty()) fail("the thread ends with products under way");
    machine->current->state = State::FINISHED;
    ++machine->n_finished;
    yield();
  }
}

inline void resume(Fiber& fiber) {
  machine->current = &fiber;
  if (_setjmp(machine->scheduler) == 0) {
    if (fiber.begun) _longjmp(fiber.where, 1);
    fiber.begun = true;
    setcontext(&fiber.first);
  }
  machine->current = nullptr;
}

// ---- barriers and warps

inline void barrier(int id, unsigned n_expected) {
  Fiber& me = *machine->current;
  Meeting& here = machine->meetings[id];
  if (machine->n_finished > 0 && n_expected == machine->fibers.size())
    fail("a barrier of all threads after %u of them have ended", machine->n_finished);
  if (here.n_there > 0 && here.n_expected != n_expected) fail("barrier %d is entered with two numbers of threads", id);
  me.state = State::AT_BARRIER;
  me.barrier = id;
  here.n_expected = n_expected;
  if (++here.n_there < n_expected) return yield();
  here.n_there = 0;
  for (Fiber& other : machine->fibers)
    if (other.state == State::AT_BARRIER && other.barrier == id) other.state = State::READY;
}

// Waits for the lanes of `mask`; the last one runs `operation` on everybody's argument.
inline void collective(unsigned mask, Operation operation, void* argument) {
  Fiber& me = *machine->current;
  const unsigned first = me.index & ~31u;
  if (!((mask >> (me.index & 31u)) & 1u)) fail("a lane calls a warp operation whose mask %08x leaves it out", mask);
  me.state = State::IN_WARP;
  me.mask = mask;
  me.operation = operation;
  me.argument = argument;
  void* arguments[32] = {};
  bool all_there = true;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!((mask >> lane) & 1u)) continue;
    if (first + lane >= machine->fibers.size()) fail("mask %08x names lanes that the block does not have", mask);
    Fiber& other = machine->fibers[first + lane];
    if (other.state == State::FINISHED) fail("mask %08x names lane %u, which has ended", mask, lane);
    arguments[lane] = other.argument;
    all_there = all_there && other.state == State::IN_WARP && other.mask == mask && other.operation == operation;
  }
  if (!all_there) return yield();
  operation(arguments, mask);
  for (unsigned lane = 0; lane < 32; ++lane)
    if ((mask >> lane) & 1u) machine->fibers[first + lane].state = State::READY;
}

// ---- running a block

inline void explain_deadlock() {
  unsigned n[5] = {};
  const Fiber* some[5] = {};
  for (const Fiber& fiber : machine->fibers) {
    ++n[static_cast<int>(fiber.state)];
    some[static_cast<int>(fiber.state)] = &fiber;
  }
  machine->current = nullptr;
  fail("threads wait for each other for ever in block %u %u %u: %u at barriers (thread %d at barrier %d), %u in warp "
       "operations (thread %d, mask %08x), %u at barriers in memory (thread %d), %u have ended",
       machine->block_index.x, machine->block_index.y, machine->block_index.z, n[1], some[1] ? int(some[1]->index) : -1,
       some[1] ? some[1]->barrier : -1, n[2], some[2] ? int(some[2]->index) : -1, some[2] ? some[2]->mask : 0u, n[3],
       some[3] ? int(some[3]->index) : -1, n[4]);
}

inline void run_block() {
  memset(__bss_start, 0xff, _end - __bss_start);
  memset(machine->shared, 0xff, machine->shared_bytes.size() - (machine->shared - machine->shared_bytes.data()));
  machine->n_finished = 0;
  machine->arrivals.clear();
  for (Fiber& fiber : machine->fibers) {
    fiber.state = State::READY;
    fiber.copies.clear();
    fiber.products.clear();
  }
  while (machine->n_finished < machine->fibers.size()) {
    bool any = false;
    for (size_t begin = 0; begin < machine->turns.size(); begin += machine->together) {
      const size_t end = std::min(begin + machine->together, machine->turns.size());
      for (bool ran = true; ran;) {
        ran = false;
        for (size_t i = begin; i < end; ++i) {
          Fiber& fiber = machine->fibers[machine->turns[i]];
          if (fiber.state != State::READY) continue;
          resume(fiber);
          ran = any = true;
        }
      }
    }
    if (!any) explain_deadlock();
  }
}

inline std::vector<unsigned> ordered(unsigned n, unsigned order) {
  std::vector<unsigned> turns(n);
  for (unsigned i = 0; i < n; ++i) turns[i] = order == 1 ? n - 1 - i : i;
  std::mt19937 random(order);
  if (order > 2)
    for (unsigned i = n; i > 1; --i) std::swap(turns[i - 1], turns[random() % i]);
  return turns;
}

inline void make_fibers(const Launch& launch) {
  const unsigned n = launch.block[0] * launch.block[1] * launch.block[2];
  void* stacks = mmap(nullptr, n * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) abort();
  machine->stacks = static_cast<char*>(stacks);
  machine->fibers = std::vector<Fiber>(n);
  for (unsigned i = 0; i < n; ++i) {
    Fiber& fiber = machine->fibers[i];
    fiber.index = i;
    fiber.thread = {i % launch.block[0], i / launch.block[0] % launch.block[1], i / launch.block[0] / launch.block[1]};
    mprotect(machine->stacks + i * STACK, 4096, PROT_NONE);  // too deep a stack shows
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = machine->stacks + i * STACK + 4096;
    // Tops of the stacks at different offsets: at one offset they would all want the same few lines of the caches.
    fiber.first.uc_stack.ss_size = STACK - 4096 - i * 1088 % (STACK / 2);
    makecontext(&fiber.first, fiber_main, 0);
  }
  machine->turns = ordered(n, launch.order);
  machine->together = launch.order == 2 ? 32 : n;
}

inline void run_blocks(const Launch& launch) {
  const unsigned n = launch.grid[0] * launch.grid[1] * launch.grid[2];
  for (unsigned i : ordered(n, launch.order)) {
    machine->block_index = {i % launch.grid[0], i / launch.grid[0] % launch.grid[1],
                            i / launch.grid[0] / launch.grid[1]};
    run_block();
  }
}

// ---- faults become messages

inline void on_fault(int number, siginfo_t* info, void* context) {
  ucontext_t* at = static_cast<ucontext_t*>(context);
#if defined(__x86_64__)
  machine->fault_at = reinterpret_cast<void*>(at->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  machine->fault_at = reinterpret_cast<void*>(at->uc_mcontext.pc);
#endif
  if (number == SIGSEGV || number == SIGBUS)
    fail("memory outside every tensor is accessed, at %p", info->si_addr);
  fail("the compiler's check failed: misaligned access, index outside a fixed array, signed overflow or too wide a shift");
}

struct Guard {
  static constexpr int NUMBERS[5] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
  struct sigaction before[5];
  stack_t stack_before;
  std::vector<char> stack = std::vector<char>(64 << 10);
  Guard() {
    stack_t mine = {};
    mine.ss_sp = stack.data();
    mine.ss_size = stack.size();
    sigaltstack(&mine, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 5; ++i) sigaction(NUMBERS[i], &action, &before[i]);
  }
  ~Guard() {
    for (int i = 0; i < 5; ++i) sigaction(NUMBERS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

// ---- launches, as the CUDA driver takes them: an array of addresses of arguments

template <class... A>
struct Call {
  void (*kernel)(A...);
  void** arguments;
  template <size_t... I>
  void now(std::index_sequence<I...>) {
    kernel(*reinterpret_cast<std::remove_reference_t<A>*>(arguments[I])...);
  }
  static void body(void* self) { static_cast<Call*>(self)->now(std::index_sequence_for<A...>()); }
};

// p pointer, i integer, f float, s anything else, one letter per parameter.
template <class... A>
const char* letters(void (*)(A...)) {
  static const char known[] = {(std::is_pointer_v<A>          ? 'p'
                                : std::is_integral_v<A>       ? 'i'
                                : std::is_same_v<A, float>    ? 'f'
                                                              : 's')...,
                               0};
  return known;
}

// 0, or 1 with a message. fault_at: how far into the library the fault was, or 0.
template <class... A>
int run(void (*kernel)(A...), void** arguments, const Launch& launch, char* message, uint64_t* fault_at) {
  Machine here;
  machine = &here;
  here.grid = {launch.grid[0], launch.grid[1], launch.grid[2]};
  here.block = {launch.block[0], launch.block[1], launch.block[2]};
  here.hurries = launch.order % 2 == 1;
  here.shared_bytes.resize(launch.shared + 1024);
  here.shared = here.shared_bytes.data() + (1024 - reinterpret_cast<uintptr_t>(here.shared_bytes.data()) % 1024) % 1024;
  Call<A...> call{kernel, arguments};
  here.body = Call<A...>::body;
  here.body_argument = &call;
  Guard guard;
  make_fibers(launch);
  const int failed = sigsetjmp(here.outside, 1);
  if (failed == 0) run_blocks(launch);
  munmap(here.stacks, here.fibers.size() * STACK);
  memcpy(message, here.message, sizeof here.message);
  *fault_at = here.fault_at ? reinterpret_cast<uint64_t>(here.fault_at) : 0;
  machine = nullptr;
  return failed;
}

}  // namespace emulator
