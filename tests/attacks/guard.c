/* Memory in which a foreign access shows. Preloaded into the processes that run attacks.
 *
 * Blocks lie in one arena of inaccessible pages, each alone on pages of its own with GAP bytes of nothing around. A block
 * ends exactly at its last page (side 1) or begins exactly at its first (side 0), whatever alignment was asked for:
 * kernels for the CPU take any. The rest of the pages on the other side contains a pattern that must still be there when
 * the block is freed or `guard_damage` is asked. Fresh memory contains another pattern, with floats NaN or enormous.
 * Freed blocks become inaccessible for good: an arena serves one attack.
 *
* While `guard_watch(1)` is on, posix_memalign gives such blocks, which is where TVM's CPU device takes tensors from, and
 * so do the workspaces of kernels. A fault ends the process with FAULT, after a line on the descriptor that
 * `guard_start` was told.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { PAGE = 4096, GAP = 256 << 10, MOST = 1 << 14, FAULT = 97 };
static const unsigned char MARK = 0xC9;

typedef struct {
    uintptr_t pages, pages_end, begin, size;
    int freed;
    char label[48];
} Block;

static Block blocks[MOST];
static int count, watching, side, report = 2;
static unsigned char poison;
static uintptr_t arena, arena_end, next;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static int in_arena(const void* pointer) { return (uintptr_t)pointer - arena < arena_end - arena; }

static void stop(const char* line, size_t length) {
    if (write(report, line, length) < 0) _exit(FAULT + 1);
    _exit(FAULT);
}

static void fault(int signal, siginfo_t* info, void* context) {
    uintptr_t at = (uintptr_t)info->si_addr;
    const char* what = ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2 ? "write" : "read";
    char line[320];
    int length = 0;
    for (int k = 0; k < count && in_arena(info->si_addr); k++) {
        Block* b = &blocks[k];
        if (at < b->pages - GAP / 2 || at >= b->pages_end + GAP / 2) continue;
        if (b->freed)
            length = snprintf(line, sizeof line, "%s of freed memory (%s, %zu bytes)\n", what, b->label, b->size);
        else if (at < b->begin)
            length = snprintf(line, sizeof line, "%s %zu bytes before %s (%zu bytes)\n", what, b->begin - at, b->label, b->size);
        else
            length = snprintf(line, sizeof line, "%s %zu bytes after the end of %s (%zu bytes)\n", what,
                              at - b->begin - b->size, b->label, b->size);
    }
    if (!length) length = snprintf(line, sizeof line, "%s at %p, where there is nothing (signal %d)\n", what, info->si_addr, signal);
    stop(line, length);
}

/* Reserves `bytes` and takes over SIGSEGV and SIGBUS; lines about faults go to descriptor `fd`. */
int guard_start(size_t bytes, int which_side, int pattern, int fd) {
    static char stack[64 << 10];
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    void* memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return errno;
    arena = next = (uintptr_t)memory;
    arena_end = arena + bytes;
    side = which_side, poison = pattern, report = fd;
    sigaltstack(&alternate, NULL);
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    return 0;
}

void guard_watch(int on) { watching = on; }

/* A block, or NULL where the arena or the table is full. */
void* guard_new(size_t size, const char* label) {
    size_t room = size > (size_t)1 << 40 ? size : (size + PAGE - 1) / PAGE * PAGE;
    void* result = NULL;
    if (!room) room = PAGE;
    pthread_mutex_lock(&mutex);
    if (count < MOST && room < arena_end - next && room + 2 * GAP < arena_end - next) {
        Block* b = &blocks[count];
        b->pages = next + GAP;
        b->pages_end = b->pages + room;
        b->begin = side ? b->pages_end - size : b->pages;
        b->size = size;
        b->freed = 0;
        snprintf(b->label, sizeof b->label, "%s", label);
        if (mprotect((void*)b->pages, room, PROT_READ | PROT_WRITE) == 0) {
            memset((void*)b->pages, MARK, room);
            memset((void*)b->begin, poison, size);
            next = b->pages_end + GAP;
            count++;
            result = (void*)b->begin;
        }
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Whether something around the block was written to, and where, counted from its first byte. */
static int damaged(const Block* b, long* at) {
    for (uintptr_t p = b->pages; p < b->pages_end; p++) {
        if (p == b->begin) p += b->size;
        if (p == b->pages_end || *(unsigned char*)p == MARK) continue;
        *at = (long)(p - b->begin);
        return 1;
    }
    return 0;
}

static int describe(const Block* b, long at, char* line, size_t room) {
    return snprintf(line, room, "write at byte %ld of %s (%zu bytes)\n", at, b->label, b->size);
}

/* Writes a line about the first block whose surroundings were written to; its length, 0 if there is none. */
int guard_damage(char* line, size_t room) {
    long at;
    for (int k = 0; k < count; k++)
        if (!blocks[k].freed && damaged(&blocks[k], &at)) return describe(&blocks[k], at, line, room);
    return 0;
}

static void release(void* pointer) {
    for (int k = 0; k < count; k++) {
        Block* b = &blocks[k];
        if (b->begin != (uintptr_t)pointer || b->freed) continue;
        long at;
        char line[160];
        if (damaged(b, &at)) stop(line, describe(b, at, line, sizeof line));
        mprotect((void*)b->pages, b->pages_end - b->pages, PROT_NONE);
        b->freed = 1;
        return;
    }
    static const char line[] = "free of memory that is not in use\n";
    stop(line, sizeof line - 1);
}

int posix_memalign(void** result, size_t alignment, size_t size) {
    static int (*real)(void**, size_t, size_t);
    if (!watching) {
        if (!real) real = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
        return real(result, alignment, size);
    }
    *result = guard_new(size, "a tensor of the runtime");
    return *result ? 0 : ENOMEM;
}

void free(void* pointer) {
    static void (*real)(void*);
    if (pointer && in_arena(pointer)) {
        release(pointer);
        return;
    }
    if (!real) real = (void (*)(void*))dlsym(RTLD_NEXT, "free");
    real(pointer);
}

/* Instead of libtvm_runtime's. */
void* TVMBackendAllocWorkspace(int device_type, int device_id, uint64_t size, int code, int bits) {
    (void)device_type, (void)device_id, (void)code, (void)bits;
    return guard_new(size, "a kernel's workspace");
}

int TVMBackendFreeWorkspace(int device_type, int device_id, void* pointer) {
    (void)device_type, (void)device_id;
    release(pointer);
    return 0;
}
