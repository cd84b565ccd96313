// Every load and store of a kernel. Kernels are compiled with gcc's -fsanitize=thread, which calls a function before each
// access that may concern other threads; the sanitizer's own library is not used, these functions take its place.
#include "accesses.h"
#include "aliasing.h"
#include "failure.h"
#include "memory.h"
#include "ordering.h"
#include "wgmma.h"

using namespace emulation;

namespace {

void access(uint64_t address, size_t bytes, emu_access_kind kind, size_t alignment, const void* site) {
  if (!current) return;
  if (!in_arena(address)) {
    if (on_a_stack(address)) check_registers(address, bytes, kind != EMU_READ);
    else check(address, bytes, kind == EMU_READ ? "read" : "write");
    return;
  }
  const char* what = kind == EMU_READ ? "read" : kind == EMU_WRITE ? "write" : "atomic update";
  if (address % alignment)
    fail("%s of %zu bytes at an address that is not aligned to %zu bytes", what, bytes, alignment);
  check(address, bytes, what);
  if (in_shared(address) && kind != EMU_ATOMIC) order_access(address - (uint64_t)arena, bytes, kind == EMU_WRITE);
  note_aliases(address, bytes, kind != EMU_READ);
  if (kind != EMU_ATOMIC) count_access(site, address, bytes, kind == EMU_WRITE);
}

// TVM's reductions in the last warp exchange volatile values without __syncwarp and rely on lanes that step together: here
// every lane makes one volatile access before any makes its next.
void step_together(uint64_t address, size_t bytes, emu_access_kind kind, const void* site) {
  if (current && in_shared(address)) {
    progress++;
    yield();
  }
  access(address, bytes, kind, bytes, site);
}

}  // namespace

#define SITE __builtin_return_address(0)

void emu_access(const void* generic, size_t bytes, emu_access_kind kind) {
  if (!in_arena((uint64_t)generic)) check(generic, bytes, kind == EMU_READ ? "read" : "write");
  access((uint64_t)generic, bytes, kind, bytes, SITE);
}

extern "C" {

#define ACCESS(n) \
  void __tsan_read##n(void* p) { access((uint64_t)p, n, EMU_READ, n, SITE); } \
  void __tsan_write##n(void* p) { access((uint64_t)p, n, EMU_WRITE, n, SITE); } \
  void __tsan_volatile_read##n(void* p) { step_together((uint64_t)p, n, EMU_READ, SITE); } \
  void __tsan_volatile_write##n(void* p) { step_together((uint64_t)p, n, EMU_WRITE, SITE); } \
  void __tsan_unaligned_read##n(void* p) { access((uint64_t)p, n, EMU_READ, 1, SITE); } \
  void __tsan_unaligned_write##n(void* p) { access((uint64_t)p, n, EMU_WRITE, 1, SITE); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS

void __tsan_read_range(void* p, size_t bytes) { access((uint64_t)p, bytes, EMU_READ, 1, SITE); }
void __tsan_write_range(void* p, size_t bytes) { access((uint64_t)p, bytes, EMU_WRITE, 1, SITE); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
