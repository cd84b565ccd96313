// What generated kernels call and the emulator provides. Plain C, so that every kernel library finds it by name.
//
// Shared memory has 32-bit addresses (`uint32_t`), as in PTX. Element kinds: 0 float16, 1 bfloat16, 2 TF32.
#pragma once
#include <cstddef>
#include <cstdint>

struct emu_dim {
  unsigned x, y, z;
};

// A register operand that wgmma reads later on: its value now, and where it lies if it is a variable.
struct emu_register {
  uint32_t value;
  const uint32_t* where;
  emu_register(const uint32_t& variable) : value(variable), where(&variable) {}
  emu_register(uint32_t&& value) : value(value), where(nullptr) {}
};

// A `__shared__` array of fixed size.
struct emu_shared_array {
  const char* name;
  size_t bytes, alignment;
};

// What a kernel library says about each kernel, under the name emu_kernel_NAME.
struct emu_kernel {
  void (*entry)(void** parameters);
  int max_threads;                     // of __launch_bounds__, 0 if unknown
  size_t dynamic_alignment;            // of the extern __shared__ array
  int arrays;
  const emu_shared_array* shared;
  int parameters;
  const char* const* restricted;       // names of those that are __restrict__, null for others
  const size_t* bytes;                 // of each parameter
  const char* file;                    // that its library was made from
};

extern "C" {
// ---- where the running thread is
__attribute__((const)) emu_dim emu_thread_index();
__attribute__((const)) emu_dim emu_block_index();
__attribute__((const)) emu_dim emu_block_size();
__attribute__((const)) emu_dim emu_grid_size();
__attribute__((const)) uint32_t emu_cluster_rank();

// ---- memory
__attribute__((const)) void* emu_dynamic_shared();
__attribute__((const)) void* emu_static_shared(int number);
uint32_t emu_shared_address(const void* generic);
void* emu_shared_pointer(uint32_t address);
uint32_t emu_map_shared(uint32_t address, uint32_t rank);    // the same offset in another block of the cluster
// Checks an access that the compiler's instrumentation does not see as a whole; it must be aligned to its size.
enum emu_access_kind { EMU_READ, EMU_WRITE, EMU_ATOMIC };
void emu_access(const void* generic, size_t bytes, emu_access_kind kind);
[[noreturn]] void emu_trap(const char* message);
// False for the one step that is to be left out, see mutations.py.
bool emu_keeps(int step);

// ---- meeting points
void emu_barrier(int id, int count, int arrive_only);   // count 0: all threads of the block
int emu_barrier_count(int predicate);                    // of all threads of the block: how many predicates are true
void emu_cluster_arrive(int relaxed);
void emu_cluster_wait();
void emu_syncwarp(uint32_t mask);
uint32_t emu_active_mask();
// Lane `source` of the mask gives its 8 bytes; -1 keeps the own ones.
uint64_t emu_shuffle(uint32_t mask, uint64_t value, int source);
uint32_t emu_ballot(uint32_t mask, int predicate);

// ---- matrices in registers
void emu_ldmatrix(uint32_t* d, int count, int transposed, uint32_t address);
void emu_stmatrix(const uint32_t* s, int count, int transposed, uint32_t address);
void emu_mma(float* d, const uint32_t* a, const uint32_t* b, const float* c, int k, int kind);

// ---- cp.async
void emu_cp_async(uint32_t destination, const void* source, int bytes, int source_bytes);
void emu_cp_async_commit();
void emu_cp_async_wait(int groups);                      // all but the newest `groups`; -1: what is not committed too
void emu_cp_async_arrive(uint32_t mbarrier, int no_increment);

// ---- mbarriers
void emu_mbarrier_init(uint32_t address, uint32_t count);
void emu_mbarrier_invalidate(uint32_t address);
uint64_t emu_mbarrier_arrive(uint32_t address, uint32_t count, uint32_t expect_bytes, int remote);
void emu_mbarrier_expect(uint32_t address, uint32_t bytes);
bool emu_mbarrier_test(uint32_t address, uint32_t parity);      // yields if the phase is not complete
bool emu_mbarrier_test_state(uint32_t address, uint64_t state);

// ---- bulk copies
void emu_tma_load(uint32_t destination, const void* map, const int* coordinates, int rank, uint32_t mbarrier);
void emu_tma_multicast(uint32_t destination, const void* map, const int* coordinates, int rank, uint32_t mbarrier,
                       uint32_t mask);
void emu_tma_store(const void* map, const int* coordinates, int rank, uint32_t source);
void emu_bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t mbarrier);
void emu_bulk_store(void* destination, uint32_t source, uint32_t bytes);
void emu_bulk_commit();
void emu_bulk_wait(int groups, int read_only);

// ---- wgmma; a or a_descriptor gives A, transposed: the rows of the operand are contiguous
void emu_wgmma_fence();
void emu_wgmma(float* const* d, int n, int kind, const emu_register* a, uint64_t a_descriptor, uint64_t b_descriptor,
               uint32_t scale_d, int scale_a, int scale_b, int a_transposed, int b_transposed);
void emu_wgmma_commit();
void emu_wgmma_wait(int groups);

// ---- fences that mean something here
void emu_fence_proxy_async();
void emu_fence_mbarrier_init();

// ---- instrumentation: gcc's -fsanitize=thread calls __tsan_read4(address) and so on, see runtime/instrumentation.cpp
}
