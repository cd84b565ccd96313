// Device and shared memory: one range of addresses, with a map of the bytes that may be accessed.
//
// Shared memory is a window at its beginning, so that 32-bit addresses of shared memory are offsets in it. Blocks of a
// cluster have a part of it each.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "../include/interface.h"

namespace emulation {

constexpr size_t BLOCK_WINDOW = 1 << 18;
constexpr size_t SHARED_WINDOW = 8 * BLOCK_WINDOW;
constexpr size_t CAPACITY = size_t(16) << 30;
constexpr int WINDOWS = 64;               // addresses at which all of it lies, CAPACITY apart, see aliasing.h
constexpr unsigned char POISON = 0xFF;    // NaN in every float type, -1 in every integer

extern char* arena;                       // null until the first use
extern size_t arena_bytes;                // of all windows

// Maps windows 1 to `last`.
void open_windows(int last);
// Device memory, poisoned; null if memory is exhausted.
void* allocate(size_t bytes);
// False if the pointer is not the beginning of an allocation.
bool release(void* pointer);
// The allocation around an offset in the arena: its offset and its bytes, 0 if there is none.
std::pair<size_t, size_t> allocation_around(size_t offset);
size_t bytes_free();

// Whether all bytes lie in one allocation.
bool accessible(uint64_t address, size_t bytes);
// Fails unless all bytes are accessible; `what` names the access.
void check(uint64_t address, size_t bytes, const char* what);
inline void check(const void* pointer, size_t bytes, const char* what) { check((uint64_t)pointer, bytes, what); }

inline bool in_shared(uint64_t address) { return address - (uint64_t)arena < SHARED_WINDOW; }
inline bool in_arena(uint64_t address) { return address - (uint64_t)arena < arena_bytes; }
// Of an address in the arena.
inline size_t offset_of(uint64_t address) { return (address - (uint64_t)arena) % CAPACITY; }
inline int window_of(uint64_t address) { return (address - (uint64_t)arena) / CAPACITY; }
inline char* shared(uint32_t address) { return arena + address; }
// The block of the cluster whose shared memory it is.
inline int block_of(uint32_t address) { return address / BLOCK_WINDOW; }
// The address of the same in the shared memory of a block.
inline uint32_t in_block(uint32_t address, int rank) { return address % BLOCK_WINDOW + rank * BLOCK_WINDOW; }
// Pointer to `bytes` of the running thread's own shared memory, checked for room and alignment.
char* shared(uint32_t address, size_t bytes, size_t alignment, const char* what);

// Lays out dynamic and static shared memory of a kernel, with unusable gaps between them, for each block of a cluster.
void lay_out_shared(const emu_kernel& kernel, size_t dynamic_bytes, int cluster);
// Poisons it for the next cluster.
void poison_shared();
// End of the used part of the window.
size_t shared_end();

}  // namespace emulation
