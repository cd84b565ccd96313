#ifndef LOWERING_TYPES
#define LOWERING_TYPES

#include <stddef.h>
#include <stdint.h>

/* The stable code of a cause, which the page of error codes lists, and a text that says what is wrong. */
typedef struct {
    char code[64];
    char text[960];
} lowering_error;

/* Threads of the caller. run calls task(data, 0) to task(data, count - 1), in any order and on any threads, and returns
 * when all of them have returned. */
typedef struct {
    void* pool;
    int count; /* of tasks of a loop, at most 1024 */
    void (*run)(void* pool, void (*task)(void* data, int number), void* data, int count);
} lowering_threads;

/* Memory of the caller. allocate returns `bytes` bytes, at a multiple of 16, or NULL; release takes what it returned.
 * The thread of the call calls them. */
typedef struct {
    void* owner;
    void* (*allocate)(void* owner, size_t bytes);
    void (*release)(void* owner, void* memory);
} lowering_memory;

#endif
