/* What every library needs of the C library: memory for calls of a caller that provides none. */
#include "heap.h"

#include <stdlib.h>

static void* allocate_memory(void* owner, size_t bytes) {
    (void)owner;
    return malloc(bytes);
}

static void release_memory(void* owner, void* memory) {
    (void)owner;
    free(memory);
}

const lowering_memory lowering_heap = {NULL, allocate_memory, release_memory};

void lowering_release(void* memory) { free(memory); }
