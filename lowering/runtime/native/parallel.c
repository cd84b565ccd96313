/* Thread pool for the parallel loops of generated code, linked into every model.so in place of TVM's thread pool.
 *
 * TVM's pool pins the calling thread to one CPU and gives every calling thread workers of its own. In contrast:
 *   - A launch uses as many threads as the affinity mask of the calling thread has CPUs, read at every launch, or as
 *     many as `lowering_set_threads` set for the calling thread.
 *   - Only workers are moved: each takes over the mask of the thread it works for, and no other mask is changed.
 *   - All calling threads of the library share the workers. A launch takes idle ones and never waits for busy ones, so
 *     that concurrent callers share the CPUs of a mask instead of oversubscribing them.
 *
 * Generated code reaches its launcher through the variable __TVMBackendParallelLaunch, a weak symbol that TVM sets by
 * name when it loads the library. The strong, hidden definition at the end of this file replaces it at link time, so
 * that TVM does not find the name and leaves it alone. Hosts in Python and C++ use this pool without any setup. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

/* TVMParallelGroupEnv and FTVMParallelLambda of tvm/runtime/c_backend_api.h. Task k of num_task computes the share of
 * the loop that these two numbers determine: any num_task computes the whole loop. */
typedef struct {
    void* sync_handle;
    int32_t num_task;
} Group;
typedef int (*Lambda)(int task, Group* group, void* data);

/* TVMBackendParallelBarrier counts arrivals in sync_handle: task k in element k * BARRIER_STRIDE. */
enum { BARRIER_STRIDE = 16 };

/* STACK_WORKERS: launches of fewer workers need no heap memory. MAX_THREADS: the largest number of threads. */
enum { STACK_WORKERS = 32, MAX_THREADS = 1024 };

/* How often a waiting thread polls before it sleeps: about 20 microseconds on the CPU, then about 100 in which it
 * yields to other threads. Few pauses within a model are longer, and waking up takes as long. */
enum { SPINS = 500, YIELDS = 300 };

/* One launch, on the stack of the launching thread. */
typedef struct {
    Lambda lambda;
    void* data;
    Group group;
    atomic_uint pending;               /* workers that have not finished, + SLEEPER while the launching thread sleeps */
    _Atomic(TVMFFIObjectHandle) error; /* the first error of a worker */
} Job;
#define SLEEPER 0x80000000u

typedef struct Worker {
    struct Worker* next; /* in the list of idle workers, or of those that one launch has taken */
    struct Worker* next_worker;
    pthread_t thread;
    cpu_set_t mask;
    int has_new_mask; /* the thread does not have the mask yet */
    Job* job;
    int task;
    atomic_uint state;
} Worker;
enum { IDLE, ASLEEP, WORKING, LEAVING };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards both lists */
static Worker* idle;
static Worker* all_workers;

static _Thread_local int requested_threads; /* 0: as many as the mask has CPUs */
static _Thread_local int is_serial;         /* the next launch gets no workers */
static _Thread_local int in_task;           /* a launch from inside a task gets no workers */

static void futex_sleep(atomic_uint* word, unsigned value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(atomic_uint* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

/* Pause before poll number `attempt`. */
static void pause_waiting(int attempt) {
    if (attempt >= SPINS) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* -- workers ------------------------------------------------------------------------------------------------------ */

static void set_state(Worker* worker, unsigned state) {
    if (atomic_exchange(&worker->state, state) == ASLEEP) futex_wake(&worker->state);
}

static unsigned wait_for_work(Worker* self) {
    for (int attempt = 0; attempt < SPINS + YIELDS; ++attempt) {
        unsigned state = atomic_load(&self->state);
        if (state != IDLE) return state;
        pause_waiting(attempt);
    }
    unsigned state = IDLE;
    if (!atomic_compare_exchange_strong(&self->state, &state, ASLEEP)) return state;
    while ((state = atomic_load(&self->state)) == ASLEEP) futex_sleep(&self->state, ASLEEP);
    return state;
}

static void* work(void* argument) {
    Worker* self = argument;
    in_task = 1;
    while (wait_for_work(self) == WORKING) {
        Job* job = self->job;
        if (self->has_new_mask) {
            sched_setaffinity(0, sizeof(self->mask), &self->mask);
            self->has_new_mask = 0;
        }
        if (job->lambda(self->task, &job->group, job->data) != 0) {
            TVMFFIObjectHandle error = NULL, none = NULL;
            TVMFFIErrorMoveFromRaised(&error); /* raised errors belong to a thread */
            if (!atomic_compare_exchange_strong(&job->error, &none, error)) TVMFFIObjectDecRef(error);
        }
        atomic_store(&self->state, IDLE);
        /* Once no worker is pending, the launching thread continues, its job is gone, and this worker may be
         * taken again. */
        if (atomic_fetch_sub(&job->pending, 1) == SLEEPER + 1) futex_wake(&job->pending);
    }
    return NULL;
}

static Worker* make_worker(const cpu_set_t* mask) {
    Worker* worker = calloc(1, sizeof(Worker));
    if (worker == NULL) return NULL;
    worker->mask = *mask; /* inherited from the creating thread */
    sigset_t all_signals, old_mask; /* the host's signals are for the host's threads */
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &old_mask);
    int failed = pthread_create(&worker->thread, NULL, work, worker);
    pthread_sigmask(SIG_SETMASK, &old_mask, NULL);
    if (failed) {
        free(worker);
        return NULL;
    }
    worker->next_worker = all_workers;
    return all_workers = worker;
}

static int count_workers(const cpu_set_t* mask) {
    int count = 0;
    for (Worker* worker = all_workers; worker != NULL; worker = worker->next_worker) {
        count += CPU_EQUAL(&worker->mask, mask);
    }
    return count;
}

/* Take up to `max_count` idle workers, and create new ones unless as many already work under the same mask. */
static int take_workers(int max_count, const cpu_set_t* mask, Worker** taken) {
    int count = 0;
    *taken = NULL;
    pthread_mutex_lock(&mutex);
    while (count < max_count) {
        Worker* worker = idle;
        if (worker != NULL) {
            idle = worker->next;
            if (!CPU_EQUAL(&worker->mask, mask)) {
                worker->mask = *mask;
                worker->has_new_mask = 1;
            }
        } else if (count_workers(mask) >= max_count || (worker = make_worker(mask)) == NULL) {
            break;
        }
        worker->next = *taken;
        *taken = worker;
        ++count;
    }
    pthread_mutex_unlock(&mutex);
    return count;
}

static void give_back_workers(Worker* taken) {
    if (taken == NULL) return;
    Worker* last = taken;
    while (last->next != NULL) last = last->next;
    pthread_mutex_lock(&mutex);
    last->next = idle;
    idle = taken;
    pthread_mutex_unlock(&mutex);
}

/* -- launching ---------------------------------------------------------------------------------------------------- */

static void wait_for_workers(Job* job) {
    for (int attempt = 0; attempt < SPINS + YIELDS; ++attempt) {
        if (atomic_load(&job->pending) == 0) return;
        pause_waiting(attempt);
    }
    unsigned pending = atomic_fetch_or(&job->pending, SLEEPER) | SLEEPER;
    while (pending != SLEEPER) {
        futex_sleep(&job->pending, pending);
        pending = atomic_load(&job->pending);
    }
}

/* Set whether the next launch runs serially. Generated code calls it before a loop with too little work to be shared
 * (schedules/cpu/elementwise/loops.py), so that it needs only one version of the loop. */
__attribute__((visibility("hidden"))) int lowering_launch_alone(int serial) { return is_serial = serial; }

static int launch_serial(Lambda lambda, void* data) {
    atomic_int arrivals = 0;
    Group group = {&arrivals, 1};
    int was_in_task = in_task;
    is_serial = 0, in_task = 1;
    int result = lambda(0, &group, data);
    in_task = was_in_task;
    return result;
}

/* TVMBackendParallelLaunch. num_task is 0, which means as many as are useful, in all code of TVM's LLVM back end. */
static int launch(Lambda lambda, void* data, int num_task) {
    if (is_serial || in_task || requested_threads == 1) return launch_serial(lambda, data);
    Worker* taken = NULL;
    cpu_set_t mask;
    CPU_ZERO(&mask);
    int threads = 1; /* when the mask cannot be read: machines with more than 1024 CPUs */
    if (sched_getaffinity(0, sizeof(mask), &mask) == 0) threads = CPU_COUNT(&mask);
    if (requested_threads > 0) threads = requested_threads;
    if (num_task > 0) threads = num_task;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    int workers = threads > 1 ? take_workers(threads - 1, &mask, &taken) : 0;

    /* Callers may have small stacks. */
    atomic_int stack_arrivals[STACK_WORKERS * BARRIER_STRIDE], *arrivals = stack_arrivals, *heap_arrivals = NULL;
    if (workers >= STACK_WORKERS) {
        heap_arrivals = malloc((size_t)(workers + 1) * BARRIER_STRIDE * sizeof(atomic_int));
        if (heap_arrivals == NULL) give_back_workers(taken), taken = NULL, workers = 0;
        else arrivals = heap_arrivals;
    }
    memset(arrivals, 0, (size_t)(workers + 1) * BARRIER_STRIDE * sizeof(atomic_int));
    Job job = {.lambda = lambda, .data = data, .group = {arrivals, workers + 1}, .pending = (unsigned)workers};
    int task = 1;
    for (Worker *worker = taken, *next; worker != NULL; worker = next) {
        next = worker->next;
        worker->job = &job;
        worker->task = task++;
        set_state(worker, WORKING);
    }
    in_task = 1;
    int result = lambda(0, &job.group, data);
    in_task = 0;
    wait_for_workers(&job);
    give_back_workers(taken);
    free(heap_arrivals);

    TVMFFIObjectHandle error = atomic_load(&job.error);
    if (error != NULL) {
        if (result == 0) TVMFFIErrorSetRaised(error);
        TVMFFIObjectDecRef(error);
        result = -1;
    }
    return result;
}

__attribute__((visibility("hidden"))) int (*__TVMBackendParallelLaunch)(Lambda, void*, int) = launch;

/* The packed function lowering_set_threads(n): launches of the calling thread use n threads, at most MAX_THREADS. With
 * 0 they use as many as its affinity mask has CPUs. */
__attribute__((visibility("default"))) int __tvm_ffi_lowering_set_threads(void* self, const TVMFFIAny* args,
                                                                          int32_t num_args, TVMFFIAny* result) {
    (void)self, (void)num_args, (void)result;
    const int64_t n = args[0].v_int64;
    requested_threads = n < 0 ? 0 : n > MAX_THREADS ? MAX_THREADS : (int)n;
    return 0;
}

/* -- loading, forking, unloading ---------------------------------------------------------------------------------- */

/* Discard the workers, which the child of a fork does not have. */
static void forget_workers(void) {
    pthread_mutex_init(&mutex, NULL);
    idle = all_workers = NULL;
}

__attribute__((constructor)) static void load(void) { pthread_atfork(NULL, NULL, forget_workers); }

/* End the idle workers before the code is unmapped. At exit those that still work are left running. */
__attribute__((destructor)) static void unload(void) {
    pthread_mutex_lock(&mutex);
    Worker* leaving = idle;
    idle = all_workers = NULL;
    pthread_mutex_unlock(&mutex);
    for (Worker *worker = leaving, *next; worker != NULL; worker = next) {
        next = worker->next;
        set_state(worker, LEAVING);
        pthread_join(worker->thread, NULL);
        free(worker);
    }
}
