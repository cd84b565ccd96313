/* Runs the parallel loops of generated code; linked into every model.so in place of TVM's thread pool.
 *
 * TVM's pool pins the thread that calls it to one CPU and gives every calling thread workers of its own. Here
 *   - a launch uses as many threads as the affinity mask of the calling thread has CPUs, read at every launch, or as
 *     many as `lowering_set_threads` said for the calling thread;
 *   - only workers are moved: each takes over the mask of the thread it works for, nobody else's mask is touched;
 *   - workers are shared by all calling threads of the library. A launch takes idle ones and never waits for others, so
 *     that concurrent callers share the CPUs of a mask instead of oversubscribing them.
 *
 * Generated code reaches its launcher through the variable __TVMBackendParallelLaunch, a weak symbol that TVM fills in
 * by name when it loads the library. The strong, hidden definition at the end of this file replaces it at link time;
 * TVM no longer finds the name and leaves it alone. Hosts in Python and C++ get this pool without doing anything.
 */
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
 * the loop that these two numbers determine: any num_task computes the whole. */
typedef struct {
    void* sync_handle;
    int32_t num_task;
} Group;
typedef int (*Lambda)(int task, Group* group, void* data);

/* TVMBackendParallelBarrier counts arrivals in sync_handle: task k in element k * BARRIER_STRIDE. */
enum { BARRIER_STRIDE = 16 };

/* Threads of a launch that take no memory from the heap, and the most that a launch may have. */
enum { FEW = 32, MOST = 1024 };

/* How often a waiting thread looks before it sleeps: some 20 microseconds on the CPU, then some 100 in which any other
 * thread may have it. Few pauses within a model are longer, and waking up takes as long. */
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
    struct Worker* next_made;
    pthread_t thread;
    cpu_set_t mask;
    int moved; /* mask is not yet the thread's */
    Job* job;
    int task;
    atomic_uint state;
} Worker;
enum { IDLE, ASLEEP, WORKING, LEAVING };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards both lists */
static Worker* idle;
static Worker* made;

static _Thread_local int requested_threads; /* 0: as many as the mask has CPUs */
static _Thread_local int alone;             /* the next launch gets no workers */
static _Thread_local int in_task;           /* a launch from inside a task gets no workers */

static void futex_sleep(atomic_uint* word, unsigned value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(atomic_uint* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

/* The pause before look number `look`. */
static void wait_a_little(int look) {
    if (look >= SPINS) {
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
    for (int look = 0; look < SPINS + YIELDS; ++look) {
        unsigned state = atomic_load(&self->state);
        if (state != IDLE) return state;
        wait_a_little(look);
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
        if (self->moved) {
            sched_setaffinity(0, sizeof(self->mask), &self->mask);
            self->moved = 0;
        }
        if (job->lambda(self->task, &job->group, job->data) != 0) {
            TVMFFIObjectHandle error = NULL, none = NULL;
            TVMFFIErrorMoveFromRaised(&error); /* raised errors belong to a thread */
            if (!atomic_compare_exchange_strong(&job->error, &none, error)) TVMFFIObjectDecRef(error);
        }
        atomic_store(&self->state, IDLE);
        /* Once nothing is pending the launching thread goes on, its job is gone, and this worker may get another. */
        if (atomic_fetch_sub(&job->pending, 1) == SLEEPER + 1) futex_wake(&job->pending);
    }
    return NULL;
}

static Worker* make_worker(const cpu_set_t* mask) {
    Worker* worker = calloc(1, sizeof(Worker));
    if (worker == NULL) return NULL;
    worker->mask = *mask; /* inherited from the thread that makes it */
    sigset_t all, before; /* the host's signals are for the host's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&worker->thread, NULL, work, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(worker);
        return NULL;
    }
    worker->next_made = made;
    return made = worker;
}

static int count_made(const cpu_set_t* mask) {
    int count = 0;
    for (Worker* worker = made; worker != NULL; worker = worker->next_made) count += CPU_EQUAL(&worker->mask, mask);
    return count;
}

/* Takes up to `wanted` idle workers, and makes new ones unless as many already work under the same mask. */
static int take_workers(int wanted, const cpu_set_t* mask, Worker** taken) {
    int count = 0;
    *taken = NULL;
    pthread_mutex_lock(&mutex);
    while (count < wanted) {
        Worker* worker = idle;
        if (worker != NULL) {
            idle = worker->next;
            if (!CPU_EQUAL(&worker->mask, mask)) {
                worker->mask = *mask;
                worker->moved = 1;
            }
        } else if (count_made(mask) >= wanted || (worker = make_worker(mask)) == NULL) {
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
    for (int look = 0; look < SPINS + YIELDS; ++look) {
        if (atomic_load(&job->pending) == 0) return;
        wait_a_little(look);
    }
    unsigned pending = atomic_fetch_or(&job->pending, SLEEPER) | SLEEPER;
    while (pending != SLEEPER) {
        futex_sleep(&job->pending, pending);
        pending = atomic_load(&job->pending);
    }
}

/* Generated code says before a loop whether its work is too little to be shared (schedules/cpu/loops.py): so it holds
 * the loop once, and not a serial one beside it. */
__attribute__((visibility("hidden"))) int lowering_launch_alone(int yes) { return alone = yes; }

static int launch_alone(Lambda lambda, void* data) {
    atomic_int arrivals = 0;
    Group group = {&arrivals, 1};
    int was_in_task = in_task;
    alone = 0, in_task = 1;
    int result = lambda(0, &group, data);
    in_task = was_in_task;
    return result;
}

/* TVMBackendParallelLaunch. num_task is 0 in all code that TVM's LLVM back end generates: as many as are useful. */
static int launch(Lambda lambda, void* data, int num_task) {
    if (alone || in_task || requested_threads == 1) return launch_alone(lambda, data);
    Worker* taken = NULL;
    cpu_set_t mask;
    CPU_ZERO(&mask);
    int threads = 1; /* when the mask cannot be read: machines with more than 1024 CPUs */
    if (sched_getaffinity(0, sizeof(mask), &mask) == 0) threads = CPU_COUNT(&mask);
    if (requested_threads > 0) threads = requested_threads;
    if (num_task > 0) threads = num_task;
    if (threads > MOST) threads = MOST;
    int workers = threads > 1 ? take_workers(threads - 1, &mask, &taken) : 0;

    /* Callers may have small stacks. */
    atomic_int few[FEW * BARRIER_STRIDE], *arrivals = few, *many = NULL;
    if (workers >= FEW) {
        many = malloc((size_t)(workers + 1) * BARRIER_STRIDE * sizeof(atomic_int));
        if (many == NULL) give_back_workers(taken), taken = NULL, workers = 0;
        else arrivals = many;
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
    free(many);

    TVMFFIObjectHandle error = atomic_load(&job.error);
    if (error != NULL) {
        if (result == 0) TVMFFIErrorSetRaised(error);
        TVMFFIObjectDecRef(error);
        result = -1;
    }
    return result;
}

__attribute__((visibility("hidden"))) int (*__TVMBackendParallelLaunch)(Lambda, void*, int) = launch;

/* The packed function lowering_set_threads(n): launches of the calling thread use n threads, at most MOST; 0: as its
 * affinity mask says. */
__attribute__((visibility("default"))) int __tvm_ffi_lowering_set_threads(void* self, const TVMFFIAny* args,
                                                                          int32_t num_args, TVMFFIAny* result) {
    (void)self, (void)num_args, (void)result;
    const int64_t n = args[0].v_int64;
    requested_threads = n < 0 ? 0 : n > MOST ? MOST : (int)n;
    return 0;
}

/* -- loading, forking, unloading ---------------------------------------------------------------------------------- */

/* The child of a fork has none of the workers. */
static void forget_workers(void) {
    pthread_mutex_init(&mutex, NULL);
    idle = made = NULL;
}

__attribute__((constructor)) static void load(void) { pthread_atfork(NULL, NULL, forget_workers); }

/* Before its code is unmapped every worker must have left it. At exit those that still work are left alone. */
__attribute__((destructor)) static void unload(void) {
    pthread_mutex_lock(&mutex);
    Worker* leaving = idle;
    idle = made = NULL;
    pthread_mutex_unlock(&mutex);
    for (Worker *worker = leaving, *next; worker != NULL; worker = next) {
        next = worker->next;
        set_state(worker, LEAVING);
        pthread_join(worker->thread, NULL);
        free(worker);
    }
}
