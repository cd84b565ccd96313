#include "fibers.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "accesses.h"
#include "asynchronous.h"
#include "failure.h"
#include "memory.h"
#include "meeting.h"
#include "ordering.h"
#include "settings.h"

// Saves the callee-saved registers and the stack pointer in *from, goes on with the stack `to`. x86-64.
extern "C" void emu_switch(void** from, void* to);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch, @function
emu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size emu_switch, .-emu_switch
)");

namespace emulation {

// The device of $CUDA_EMULATION_DEVICE, where no one calls emu_set_device: capability, SMs, bytes of shared memory.
static Settings from_environment() {
  Settings found;
  int capability, sm_count;
  size_t shared_memory;
  const char* text = getenv("CUDA_EMULATION_DEVICE");
  if (text && sscanf(text, "%d %d %zu", &capability, &sm_count, &shared_memory) == 3) {
    found.major = capability / 10, found.minor = capability % 10;
    found.sm_count = sm_count, found.shared_memory = shared_memory;
  }
  return found;
}

Settings settings = from_environment();
Block block;
std::vector<Thread> threads;
Thread* current = nullptr;
unsigned long progress = 0;

namespace {

void* scheduler_stack_pointer;
void (*entry_point)(void**);
void** entry_parameters;
std::string message;
sigjmp_buf launch;
bool launched = false;
char* stacks;

// Stacks lie above each other with an unusable page below each, so that a stack that overflows is noticed.
char* stack_of(int number) {
  constexpr size_t page = 4096;
  if (!stacks) {
    stacks = (char*)mmap(nullptr, MAX_THREADS * STACK, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int i = 0; i < MAX_THREADS; i++) mprotect(stacks + i * STACK, page, PROT_NONE);
  }
  return stacks + number * STACK;
}

void run_thread() {
  entry_point(entry_parameters);
  leave_block();
  current->done = true;
  block.alive[current->rank]--;
  block.running--;
  progress++;
  yield();
  abort();
}

void prepare(Thread& thread, int number) {
  unsigned x = block.size.x, y = block.size.y;
  thread.number = number;
  thread.rank = number / block.each;
  thread.block_index = block.index;
  thread.block_index.x += thread.rank;
  unsigned own = number % block.each;
  thread.index = {own % x, own / x % y, own / (x * y)};
  thread.stack = stack_of(number);
  void** top = (void**)(thread.stack + STACK - 64);
  *--top = nullptr;                     // run_thread does not return
  *--top = (void*)run_thread;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  thread.stack_pointer = top;
}

std::string describe(const Thread& thread) {
  char text[160];
  switch (thread.waits) {
    case Waits::barrier: return describe_barrier(thread.waits_for);
    case Waits::cluster: return "barrier.cluster, which not all threads reach";
    case Waits::mbarrier: return describe_mbarrier(thread.waits_for);
    case Waits::warp: snprintf(text, sizeof text, "%s, which not all lanes reach", thread.operation); return text;
    case Waits::warpgroup: snprintf(text, sizeof text, "%s, which not all of the warpgroup reach", thread.operation); return text;
    default: return "something that never comes";
  }
}

// "deadlock: threads 0-127 wait for ...; threads 128-255 wait for ..."
[[noreturn]] void report_deadlock() {
  current = nullptr;
  std::string text;
  for (size_t i = 0; i < threads.size();) {
    if (threads[i].done) { i++; continue; }
    std::string what = describe(threads[i]);
    size_t last = i;
    while (last + 1 < threads.size() && !threads[last + 1].done && describe(threads[last + 1]) == what) last++;
    if (text.size() > 600) { text += "; and more"; break; }
    text += (text.empty() ? " thread " : "; thread ") + std::to_string(i);
    if (last > i) text += " to " + std::to_string(last);
    text += ": " + what;
    i = last + 1;
  }
  fail("deadlock:%s", text.c_str());
}

void run_threads() {
  int n = block.threads, idle = 0;
  unsigned long seen = progress;
  while (block.running) {
    for (int i = 0; i < n; i++) {
      Thread& thread = threads[settings.descending ? n - 1 - i : i];
      if (thread.done) continue;
      current = &thread;
      emu_switch(&scheduler_stack_pointer, thread.stack_pointer);
      current = nullptr;
    }
    if (progress != seen) idle = 0;
    else if (run_asynchronous()) idle = 0;
    else if (++idle > 3) report_deadlock();
    seen = progress;
  }
}

void on_signal(int signal, siginfo_t* info, void*) {
  if (!launched) {                      // not ours: what would have happened without us
    ::signal(signal, SIG_DFL);
    raise(signal);
    return;
  }
  if (signal == SIGFPE) fail("integer division by zero");
  fail("access to %p, which is not memory (or a stack of more than %zu KB)", info->si_addr, STACK >> 10);
}

}  // namespace

bool on_a_stack(uint64_t address) { return address - (uint64_t)stacks < MAX_THREADS * STACK; }

void yield() { emu_switch(&current->stack_pointer, scheduler_stack_pointer); }

void fail(const char* format, ...) {
  char text[1024], where[96] = "";
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  auto [bx, by, bz] = current ? current->block_index : block.index;
  if (current) {
    auto [x, y, z] = current->index;
    snprintf(where, sizeof where, "block (%u, %u, %u), thread (%u, %u, %u): ", bx, by, bz, x, y, z);
  } else if (launched) {
    snprintf(where, sizeof where, "block (%u, %u, %u): ", bx, by, bz);
  }
  message = std::string(where) + text;
  if (!launched) {
    fprintf(stderr, "CUDA emulation: %s\n", message.c_str());
    abort();
  }
  siglongjmp(launch, 1);
}

const char* failure() { return message.c_str(); }
void set_failure(const char* text) { message = text; }

bool run_block(void (*entry)(void**), void** parameters) {
  static char signal_stack[64 << 10];
  stack_t alternative{signal_stack, 0, sizeof signal_stack}, previous_stack;
  struct sigaction action {}, previous[3];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int signals[3] = {SIGSEGV, SIGBUS, SIGFPE};

  entry_point = entry;
  entry_parameters = parameters;
  threads.assign(block.threads, Thread());
  for (int i = 0; i < block.threads; i++) prepare(threads[i], i);
  std::fill_n(block.alive, block.cluster, block.each);
  block.running = block.threads;
  poison_shared();
  reset_ordering();
  reset_meetings();
  reset_asynchronous();
  reset_accesses();

  sigaltstack(&alternative, &previous_stack);
  for (int i = 0; i < 3; i++) sigaction(signals[i], &action, &previous[i]);
  bool good = sigsetjmp(launch, 1) == 0;
  if (good) {
    launched = true;
    run_threads();
    end_asynchronous();
    end_accesses();
  }
  launched = false;
  current = nullptr;
  for (int i = 0; i < 3; i++) sigaction(signals[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
  return good;
}

}  // namespace emulation

using namespace emulation;

emu_dim emu_thread_index() { return current->index; }
emu_dim emu_block_index() { return current->block_index; }
uint32_t emu_cluster_rank() { return current->rank; }
emu_dim emu_block_size() { return block.size; }
emu_dim emu_grid_size() { return block.grid; }
void emu_trap(const char* text) { fail("%s", text); }

void emu_set_device(int capability, int sm_count, size_t shared_memory) {
  settings.major = capability / 10;
  settings.minor = capability % 10;
  settings.sm_count = sm_count;
  settings.shared_memory = shared_memory;
}
void emu_set_order(int descending, int arrivals, int races) {
  settings.descending = descending;
  settings.arrivals = (Arrivals)arrivals;
  settings.races = races;
}

bool emu_keeps(int step) {
  if (step != settings.left_out) return true;
  settings.reached = true;
  return false;
}
int emu_leave_out(int step) {
  bool reached = settings.reached;
  settings.left_out = step;
  settings.reached = false;
  return reached;
}

long long emu_take_matmuls() { return std::exchange(settings.matmuls, 0); }

const char* emu_take_failure() {
  static std::string taken;
  taken = message;
  message.clear();
  return taken.c_str();
}
