/* Scratch memory and parallel loops of kernels: what a thread computes with. */
#ifndef LOWERING_TASKS_H
#define LOWERING_TASKS_H

#include "call.h"

#define LOWERING_HIDDEN __attribute__((visibility("hidden")))

/* With LOWERING_ONE_THREAD, one call of the model runs at a time, and the code needs no thread-local memory. */
#ifdef LOWERING_ONE_THREAD
#define LOWERING_PER_THREAD
#else
#define LOWERING_PER_THREAD _Thread_local
#endif

enum { MAX_TASKS = 1024 }; /* of a loop */

/* Kernels allocate and free scratch memory of their task like on a stack. */
typedef struct {
    const lowering_threads* threads; /* of the caller; NULL inside of a task */
    int thread_count;                /* of the library, without those; 1 inside of a task */
    char* scratch;                   /* of task or thread 0 */
    int64_t bytes, used;             /* of each task or thread */
    const lowering_observer* observer;
    int64_t planned_tasks;           /* of the following loop; 0: no plan, 1: the calling thread computes it */
} Context;

extern LOWERING_HIDDEN LOWERING_PER_THREAD Context lowering_context;

/* How many parts of the scratch memory a loop may use at a time. */
static inline int64_t count_tasks(const lowering_threads* threads, int thread_count) {
    return threads != NULL ? threads->count : thread_count;
}

#endif
