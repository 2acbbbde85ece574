// Warp operations and asynchronous copies of the emulated machine; the headers in kernels/cuda/include call them.
#pragma once

#include "machine.h"
#include "narrow.h"

namespace emulator {

inline unsigned char* dynamic_shared() { return machine->shared; }

struct Shuffle {
  unsigned char in[16], out[16];
  unsigned from, size;
};

inline void shuffle(void** arguments, unsigned mask) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!((mask >> lane) & 1u)) continue;
    Shuffle& mine = *static_cast<Shuffle*>(arguments[lane]);
    if (!((mask >> mine.from) & 1u)) fail("lane %u reads lane %u, which is not in mask %08x", lane, mine.from, mask);
    memcpy(mine.out, static_cast<Shuffle*>(arguments[mine.from])->in, mine.size);
  }
}

template <class T>
T shuffled(unsigned mask, T value, unsigned from) {
  static_assert(sizeof(T) <= 16);
  Shuffle mine;
  mine.size = sizeof(T);
  mine.from = from;
  memcpy(mine.in, &value, sizeof(T));
  collective(mask, shuffle, &mine);
  memcpy(&value, mine.out, sizeof(T));
  return value;
}

inline unsigned lane() { return machine->current->index & 31u; }

// Lanes are grouped by `width`; a lane outside of its group is not read.
inline unsigned up(unsigned by, unsigned width) {
  return (lane() & (width - 1)) >= by ? lane() - by : lane();
}
inline unsigned down(unsigned by, unsigned width) {
  return (lane() & (width - 1)) + by < width ? lane() + by : lane();
}
inline unsigned across(unsigned bits, unsigned width) {
  const unsigned from = lane() ^ bits;  // an earlier group may be read, a later one not
  return from / width <= lane() / width ? from : lane();
}
inline unsigned at(unsigned index, unsigned width) { return (lane() & ~(width - 1)) | (index & (width - 1)); }

struct Votes {
  uint64_t value;
  unsigned out;
};

inline void ballot(void** arguments, unsigned mask) {
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; ++i)
    if (((mask >> i) & 1u) && static_cast<Votes*>(arguments[i])->value) votes |= 1u << i;
  for (unsigned i = 0; i < 32; ++i)
    if ((mask >> i) & 1u) static_cast<Votes*>(arguments[i])->out = votes;
}

inline void match(void** arguments, unsigned mask) {
  for (unsigned i = 0; i < 32; ++i) {
    if (!((mask >> i) & 1u)) continue;
    Votes& mine = *static_cast<Votes*>(arguments[i]);
    mine.out = 0;
    for (unsigned j = 0; j < 32; ++j)
      if (((mask >> j) & 1u) && static_cast<Votes*>(arguments[j])->value == mine.value) mine.out |= 1u << j;
  }
}

template <class T>
struct Reduced {
  T value, out;
};

template <class T, T (*OF)(T, T)>
void reduce(void** arguments, unsigned mask) {
  bool any = false;
  T total{};
  for (unsigned i = 0; i < 32; ++i) {
    if (!((mask >> i) & 1u)) continue;
    const T value = static_cast<Reduced<T>*>(arguments[i])->value;
    total = any ? OF(total, value) : value;
    any = true;
  }
  for (unsigned i = 0; i < 32; ++i)
    if ((mask >> i) & 1u) static_cast<Reduced<T>*>(arguments[i])->out = total;
}

template <class T, T (*OF)(T, T)>
T reduced(unsigned mask, T value) {
  Reduced<T> mine{value, value};
  collective(mask, reduce<T, OF>, &mine);
  return mine.out;
}

inline void nothing(void**, unsigned) {}

// ---- tensor cores

template <class T>
float half_of(unsigned both, unsigned which) {
  T value;
  const uint16_t bits = static_cast<uint16_t>(both >> (16 * which));
  memcpy(&value, &bits, 2);
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(value);
  else
    return __bfloat162float(value);
}

struct Product {
  const unsigned* a;
  const unsigned* b;
  float* c;
};

template <class T>
void multiply(void** arguments, unsigned) {
  float a[16][16], b[16][8];
  for (unsigned lane = 0; lane < 32; ++lane) {
    const Product& mine = *static_cast<Product*>(arguments[lane]);
    const unsigned group = lane / 4, pair = lane % 4;
    for (unsigned which = 0; which < 2; ++which) {
      for (unsigned i = 0; i < 4; ++i)
        a[group + 8 * (i % 2)][2 * pair + which + 8 * (i / 2)] = half_of<T>(mine.a[i], which);
      for (unsigned i = 0; i < 2; ++i) b[2 * pair + which + 8 * i][group] = half_of<T>(mine.b[i], which);
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    const Product& mine = *static_cast<Product*>(arguments[lane]);
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      double sum = mine.c[i];
      for (unsigned k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * b[k][column];
      mine.c[i] = static_cast<float>(sum);
    }
  }
}

template <class T>
void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  Product mine{a, b, c};
  collective(0xffffffffu, multiply<T>, &mine);
}

struct Matrices {
  unsigned* registers;
  const void* row;
  int n;
  bool transposed;
};

inline void matrices(void** arguments, unsigned) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    const Matrices& mine = *static_cast<Matrices*>(arguments[lane]);
    for (int i = 0; i < mine.n; ++i) {
      unsigned both = 0;
      for (unsigned which = 0; which < 2; ++which) {
        const unsigned second = 2 * (lane % 4) + which;
        const unsigned row = mine.transposed ? second : lane / 4, column = mine.transposed ? lane / 4 : second;
        const void* start = static_cast<Matrices*>(arguments[8 * i + row])->row;
        uint16_t value;
        memcpy(&value, static_cast<const uint16_t*>(start) + column, 2);
        both |= static_cast<unsigned>(value) << (16 * which);
      }
      mine.registers[i] = both;
    }
  }
}

inline void load_matrices(unsigned* registers, int n, bool transposed, const void* row) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(row);
  const uintptr_t low = reinterpret_cast<uintptr_t>(machine->shared);
  if (lane() < unsigned(8 * n)) {
    if (start % 16) fail("load_matrices from an address that is no multiple of 16");
    const bool dynamic = start >= low && start < reinterpret_cast<uintptr_t>(&*machine->shared_bytes.end());
    const bool fixed = row >= static_cast<void*>(__bss_start) && row < static_cast<void*>(_end);
    if (!dynamic && !fixed) fail("load_matrices from memory that is not shared");
  }
  Matrices mine{registers, row, n, transposed};
  collective(0xffffffffu, matrices, &mine);
}

// ---- copies that arrive as late as they may

inline void copy_later(void* to, const void* from, bool wanted) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || (wanted && reinterpret_cast<uintptr_t>(from) % 16))
    fail("copy16 between addresses that are no multiples of 16");
  auto& groups = machine->current->copies;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({to, from, wanted});
}

inline void copies_commit() {
  auto& groups = machine->current->copies;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

inline void copies_wait(int n_left) {
  auto& groups = machine->current->copies;
  while (static_cast<int>(groups.size()) - 1 > n_left) {
    for (const Copy& one : groups.front()) {
      if (one.wanted)
        memcpy(one.to, one.from, 16);
      else
        memset(one.to, 0, 16);
    }
    groups.erase(groups.begin());
  }
}

// ---- barriers in shared memory, and bulk copies, which arrive when somebody waits for them, or at once

inline void settle(Arrivals& here, const void* barrier) {
  if (here.n_waiting > 0 || machine->hurries) {
    for (const BulkCopy& one : here.copies) {
      memcpy(one.to, one.from, one.n_bytes);
      here.n_bytes_missing -= one.n_bytes;
    }
    here.copies.clear();
  }
  if (here.n_missing > 0 || here.n_bytes_missing != 0 || !here.copies.empty()) return;
  ++here.phase;
  here.n_missing = here.n_expected;
  here.n_waiting = 0;
  for (Fiber& other : machine->fibers)
    if (other.state == State::AT_ARRIVALS && other.arrivals == barrier) other.state = State::READY;
}

inline Arrivals& arrivals_at(const void* barrier) {
  const auto found = machine->arrivals.find(barrier);
  if (found == machine->arrivals.end()) fail("a barrier is used that was not begun");
  return found->second;
}

inline void arrivals_init(const void* barrier, unsigned n) {
  Arrivals& here = machine->arrivals[barrier];
  here = {};
  here.n_expected = here.n_missing = n;
}

inline void arrive(const void* barrier, unsigned n_bytes) {
  Arrivals& here = arrivals_at(barrier);
  if (here.n_missing == 0) fail("more threads arrive at a barrier than it expects");
  here.n_bytes_missing += n_bytes;
  --here.n_missing;
  settle(here, barrier);
}

inline void arrivals_wait(const void* barrier, unsigned parity) {
  Arrivals& here = arrivals_at(barrier);
  while (here.phase % 2 == parity) {
    ++here.n_waiting;
    machine->current->state = State::AT_ARRIVALS;
    machine->current->arrivals = barrier;
    settle(here, barrier);
    if (machine->current->state == State::AT_ARRIVALS) yield();
  }
}

inline void bulk_copy(void* to, const void* from, unsigned n_bytes, const void* barrier) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || n_bytes % 16)
    fail("a bulk copy of %u bytes: addresses and size must be multiples of 16", n_bytes);
  Arrivals& here = arrivals_at(barrier);
  here.copies.push_back({to, from, n_bytes});
  settle(here, barrier);
}

// ---- products of warpgroups, computed when they are waited for: each warp its own 16 rows

// Where 16 bits of the right side lie: one of its 16 inputs, of a column.
inline const void* arranged(const void* columns, int, unsigned input, unsigned column) {
  return static_cast<const uint16_t*>(columns) + column / 8 * 128 + input / 8 * 64 + column % 8 * 8 + input % 8;
}
// In panels of lines of 128 bytes: bits 4 to 6 of an address are turned by bits 7 to 9.
inline const void* turned_line(const void* columns, unsigned bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(columns) + bytes;
  return reinterpret_cast<const void*>(address ^ (address >> 7 & 7) << 4);
}
inline const void* with_lines(const void* columns, int, unsigned input, unsigned column) {
  return turned_line(columns, column * 128 + input * 2);
}
inline const void* along_lines(const void* columns, int to_next_panel, unsigned input, unsigned column) {
  return turned_line(columns, column / 64 * (to_next_panel * 2) + input * 128 + column % 64 * 2);
}

template <class T>
void multiply_columns(void** arguments, unsigned) {
  const std::vector<GroupProduct>* of[32];
  for (unsigned lane = 0; lane < 32; ++lane) of[lane] = static_cast<const std::vector<GroupProduct>*>(arguments[lane]);
  for (size_t product = 0; product < of[0]->size(); ++product) {
    const GroupProduct& common = (*of[0])[product];
    for (unsigned n = 0; n < common.n_eights; ++n) {
      unsigned b[32][2];
      Product eight[32];
      void* pointers[32];
      for (unsigned lane = 0; lane < 32; ++lane) {
        for (unsigned i = 0; i < 4; ++i) {
          const unsigned input = i / 2 * 8 + lane % 4 * 2 + i % 2;
          memcpy(reinterpret_cast<char*>(b[lane]) + 2 * i, common.place(common.columns, common.to_next_panel, input, 8 * n + lane / 4), 2);
        }
        const GroupProduct& mine = (*of[lane])[product];
        eight[lane] = {mine.a, b[lane], mine.sums + 4 * n};
        pointers[lane] = &eight[lane];
      }
      multiply<T>(pointers, 0xffffffffu);
    }
  }
}

// A launch has one dtype. Not among what is poisoned for each block.
inline Operation columns_of __attribute__((section(".emulator_state"))) = nullptr;

template <class T>
void multiply_later(float* sums, unsigned n_eights, const unsigned* a, const void* columns,
                    decltype(GroupProduct::place) place = arranged, int to_next_panel = 0) {
  const unsigned aligned = place == arranged ? 128 : place == with_lines ? 32 : 1024;
  if (reinterpret_cast<uintptr_t>(columns) % aligned) fail("columns at an address that is no multiple of %u", aligned);
  columns_of = multiply_columns<T>;
  auto& groups = machine->current->products;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({sums, n_eights, a, columns, to_next_panel, place});
}

inline void products_commit() { machine->current->products.emplace_back(); }

inline void products_wait(int n_left) {
  auto& groups = machine->current->products;
  while (static_cast<int>(groups.size()) - 1 > n_left) {
    collective(0xffffffffu, columns_of, &groups.front());
    groups.erase(groups.begin());
  }
}

struct Turned {
  unsigned in, out;
};

inline void turn(void** arguments, unsigned) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    unsigned both = 0;
    for (unsigned which = 0; which < 2; ++which) {
      const unsigned row = 2 * (lane % 4) + which, column = lane / 4;  // of the matrix as it was
      const unsigned in = static_cast<Turned*>(arguments[row * 4 + column / 2])->in;
      both |= (in >> (16 * (column % 2)) & 0xffffu) << (16 * which);
    }
    static_cast<Turned*>(arguments[lane])->out = both;
  }
}

inline unsigned turned(unsigned both) {
  Turned mine{both, 0};
  collective(0xffffffffu, turn, &mine);
  return mine.out;
}

}  // namespace emulator
