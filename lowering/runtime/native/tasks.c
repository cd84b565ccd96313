/* Scratch memory and parallel loops of kernels (tasks.h). A library has threads of its own (pool.c). */
#include "tasks.h"
#ifdef LOWERING_LIBRARY
#include "pool.h"
#endif

LOWERING_HIDDEN LOWERING_PER_THREAD Context lowering_context;

/* -- scratch memory ----------------------------------------------------------------------------------------------- */

static void* allocate(int type, int id, uint64_t bytes, int code, int bits) {
    (void)type, (void)id, (void)code, (void)bits;
    Context* context = &lowering_context;
    const int64_t rounded = (int64_t)((bytes + 63) & ~UINT64_C(63));
    if (rounded < 0 || rounded > context->bytes - context->used) return NULL;
    char* memory = context->scratch + context->used;
    context->used += rounded;
    return memory;
}

static int release(int type, int id, void* memory) {
    (void)type, (void)id;
    lowering_context.used = (char*)memory - lowering_context.scratch;
    return 0;
}

/* -- parallel loops ----------------------------------------------------------------------------------------------- */

/* TVMParallelGroupEnv and FTVMParallelLambda of tvm/runtime/c_backend_api.h. Any number of tasks computes the whole
 * loop. */
typedef struct {
    void* sync_handle;
    int32_t num_task;
} Group;
typedef int (*Lambda)(int task, Group* group, void* data);

typedef struct {
    Lambda lambda;
    void* data;
    Group group;
    Context caller;
    int failed;
} Job;

/* Return the context of a task that has part `number` of the scratch memory. */
static Context enter(const Job* job, int number) {
    Context context = {NULL, 1, job->caller.scratch + number * job->caller.bytes, job->caller.bytes, 0, NULL, 0};
    if (number == 0) context.used = job->caller.used;
    return context;
}

static int launch_serial(Lambda lambda, void* data) {
    Group group = {NULL, 1};
    const Context before = lowering_context;
    lowering_context.threads = NULL, lowering_context.thread_count = 1;
    const int status = lambda(0, &group, data);
    lowering_context = before;
    return status;
}

static void run_task(void* data, int number) {
    Job* job = data;
    const Context before = lowering_context;
    lowering_context = enter(job, number);
    if (job->lambda(number, &job->group, job->data) != 0) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
    lowering_context = before;
}

#ifdef LOWERING_LIBRARY
static int run_share(void* data, int number, int count, int thread, void* arrivals) {
    const Job* job = data;
    Group group = {arrivals, count};
    const Context before = lowering_context;
    lowering_context = enter(job, thread);
    const int status = job->lambda(number, &group, job->data);
    lowering_context = before;
    return status;
}
#endif

/* TVMBackendParallelLaunch. */
static int launch(Lambda lambda, void* data, int num_task) {
    (void)num_task;
    Context* context = &lowering_context;
    const lowering_threads* threads = context->threads;
    const int64_t planned_tasks = context->planned_tasks;
    context->planned_tasks = 0;
    if (planned_tasks == 1 || (threads == NULL && context->thread_count == 1)) return launch_serial(lambda, data);
    Job job = {lambda, data, {NULL, 0}, *context, 0};
#ifdef LOWERING_LIBRARY
    if (threads == NULL) return run_on_pool(run_share, &job, planned_tasks, context->thread_count);
#endif
    job.group.num_task = threads->count;
    threads->run(threads->pool, run_task, &job, threads->count);
    return job.failed ? -1 : 0;
}

/* Kernels call these by weak variables, which TVM sets when it loads a library. */
LOWERING_HIDDEN void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = allocate;
LOWERING_HIDDEN int (*__TVMBackendFreeWorkspace)(int, int, void*) = release;
LOWERING_HIDDEN int (*__TVMBackendParallelLaunch)(Lambda, void*, int) = launch;

/* Set the number of tasks of the following loop, or 0 (schedules/cpu/elementwise/loops.py): 1 is computed serially. */
LOWERING_HIDDEN int lowering_plan_launch(int64_t tasks) {
    lowering_context.planned_tasks = tasks;
    return 0;
}
