/* Parallel loops of code that TVM's virtual machine runs, on the threads of the library (pool.c).
 *
 * Generated code reaches its launcher through the variable __TVMBackendParallelLaunch, a weak symbol that TVM sets by
 * name when it loads the library. The strong, hidden definition at the end of this file replaces it at link time, so
 * that TVM does not find the name and leaves it alone. Hosts in Python and C++ use this pool without any setup. */
#include <stdatomic.h>
#include <stddef.h>
#include <tvm/ffi/c_api.h>

#include "pool.h"

/* TVMParallelGroupEnv and FTVMParallelLambda of tvm/runtime/c_backend_api.h. Task k of num_task computes the share of
 * the loop that these two numbers determine: any num_task computes the whole loop. */
typedef struct {
    void* sync_handle;
    int32_t num_task;
} Group;
typedef int (*Lambda)(int task, Group* group, void* data);

typedef struct {
    Lambda lambda;
    void* data;
    _Atomic(TVMFFIObjectHandle) error; /* the first one */
} Loop;

static _Thread_local int requested_threads; /* 0: as many as the mask has CPUs */
static _Thread_local int64_t planned_tasks; /* of the following launch; 0: no plan, 1: it gets no workers */
static _Thread_local int in_task;           /* a launch from inside a task gets no workers */

/* Set the number of tasks of the following loop, or 0. Generated code calls it (schedules/cpu/elementwise/loops.py)
 * before a loop that is worth several shares per thread, and with 1 before one with too little work to be shared. */
LOWERING_HIDDEN int lowering_plan_launch(int64_t tasks) {
    planned_tasks = tasks;
    return 0;
}

static int run_task(Lambda lambda, void* data, int number, int count, void* arrivals) {
    Group group = {arrivals, count};
    const int was_in_task = in_task;
    in_task = 1;
    const int status = lambda(number, &group, data);
    in_task = was_in_task;
    return status;
}

static int run_share(void* data, int number, int count, int thread, void* arrivals) {
    (void)thread;
    Loop* loop = data;
    if (run_task(loop->lambda, loop->data, number, count, arrivals) == 0) return 0;
    TVMFFIObjectHandle error = NULL, none = NULL;
    TVMFFIErrorMoveFromRaised(&error); /* raised errors belong to a thread */
    if (!atomic_compare_exchange_strong(&loop->error, &none, error)) TVMFFIObjectDecRef(error);
    return -1;
}

/* TVMBackendParallelLaunch. num_task is 0, which means as many as are useful, in all code of TVM's LLVM back end. */
static int launch(Lambda lambda, void* data, int num_task) {
    const int64_t tasks = planned_tasks;
    planned_tasks = 0;
    if (tasks == 1 || in_task || requested_threads == 1) {
        int arrivals = 0;
        return run_task(lambda, data, 0, 1, &arrivals);
    }
    Loop loop = {lambda, data, NULL};
    const int status = run_on_pool(run_share, &loop, tasks, num_task > 0 ? num_task : requested_threads);
    TVMFFIObjectHandle error = atomic_load(&loop.error);
    if (error != NULL) {
        TVMFFIErrorSetRaised(error);
        TVMFFIObjectDecRef(error);
    }
    return status;
}

LOWERING_HIDDEN int (*__TVMBackendParallelLaunch)(Lambda, void*, int) = launch;

/* The packed function lowering_set_threads(n): launches of the calling thread use n threads, at most MAX_TASKS. With 0
 * they use as many as its affinity mask has CPUs. */
__attribute__((visibility("default"))) int __tvm_ffi_lowering_set_threads(void* self, const TVMFFIAny* args,
                                                                          int32_t num_args, TVMFFIAny* result) {
    (void)self, (void)num_args, (void)result;
    const int64_t n = args[0].v_int64;
    requested_threads = n < 0 ? 0 : n > MAX_TASKS ? MAX_TASKS : (int)n;
    return 0;
}
