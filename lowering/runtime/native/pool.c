/* Threads for the parallel loops of compiled code, linked into every model.so.
 *
 * TVM's pool pins the calling thread to one CPU and gives every calling thread workers of its own. In contrast:
 *   - A loop uses as many threads as the affinity mask of the calling thread has CPUs, read for every loop, or as many
 *     as the caller asks for.
 *   - Only workers are moved: each takes over the mask of the thread it works for, and no other mask is changed.
 *   - All calling threads of the library share the workers. A loop takes idle ones and never waits for busy ones, so
 *     that concurrent callers share the CPUs of a mask instead of oversubscribing them.
 *   - A thread computes its own shares of a loop first, whose data may be in its caches or in memory near to it, and
 *     then those that slower threads have not begun: other programs use their CPU, or it has a lower clock. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pool.h"

/* STACK_WORKERS: loops of fewer workers need no heap memory. SHARES_PER_THREAD: at least, of a planned loop. At most
 * one part in UNFILLED of them is empty. */
enum { STACK_WORKERS = 32, SHARES_PER_THREAD = 4, UNFILLED = 64 };

/* The shares of a loop that a thread computes first, in a cache line of their own. */
typedef struct {
    _Alignas(64) atomic_int arrivals; /* at a barrier (pool.h) */
    atomic_int next;
    int end;
} Shares;

/* How often a waiting thread polls before it sleeps: about 20 microseconds on the CPU, then about 100 in which it
 * yields to other threads. Few pauses within a model are longer, and waking up takes as long. */
enum { SPINS = 500, YIELDS = 300 };

/* One loop, on the stack of the calling thread. */
typedef struct {
    Share run;
    void* data;
    int count;      /* of shares */
    Shares* shares; /* of each thread */
    int threads;
    int is_planned;      /* threads take over shares */
    atomic_uint pending; /* workers that have not finished, + SLEEPER while the calling thread sleeps */
    atomic_int failed;
} Job;
#define SLEEPER 0x80000000u

typedef struct Worker {
    struct Worker* next; /* in the list of idle workers, or of those that one loop has taken */
    struct Worker* next_worker;
    pthread_t thread;
    cpu_set_t mask;
    int has_new_mask; /* the thread does not have the mask yet */
    Job* job;
    int number; /* of the thread in the job */
    atomic_uint state;
} Worker;
enum { IDLE, ASLEEP, WORKING, LEAVING };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards both lists */
static Worker* idle;
static Worker* all_workers;

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

/* Compute the shares of a thread, and in planned loops what others have not begun of theirs. */
static void compute_shares(Job* job, int thread) {
    for (int k = 0; k < (job->is_planned ? job->threads : 1); ++k) {
        Shares* shares = &job->shares[(thread + k) % job->threads];
        while (atomic_load_explicit(&shares->next, memory_order_relaxed) < shares->end) {
            const int number = atomic_fetch_add_explicit(&shares->next, 1, memory_order_relaxed);
            if (number >= shares->end) break;
            if (job->run(job->data, number, job->count, thread, job->shares) == 0) continue;
            atomic_store(&job->failed, 1);
            return;
        }
    }
}

static void* work(void* argument) {
    Worker* self = argument;
    while (wait_for_work(self) == WORKING) {
        Job* job = self->job;
        if (self->has_new_mask) {
            sched_setaffinity(0, sizeof(self->mask), &self->mask);
            self->has_new_mask = 0;
        }
        compute_shares(job, self->number);
        atomic_store(&self->state, IDLE);
        /* Once no worker is pending, the calling thread continues, its job is gone, and this worker may be
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

/* -- loops ----------------------------------------------------------------------------------------------------------- */

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

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Return how many tasks a share has, of which a thread computes `tasks` in all. */
static int64_t choose_share(int64_t tasks) {
    for (int64_t count = tasks < SHARES_PER_THREAD ? tasks : SHARES_PER_THREAD;; ++count) {
        const int64_t share = divide_up(tasks, count);
        if (share * count - tasks <= tasks / UNFILLED) return share; /* true where count = tasks */
    }
}

/* Divide a loop into shares of equal size, and return their number. The shares of a thread follow each other, and have
 * nearly as many tasks as those of any other thread. */
static int divide_loop(int64_t tasks, int threads, Shares* shares) {
    const int64_t count = tasks < 1 ? threads : divide_up(tasks, choose_share(divide_up(tasks, threads)));
    for (int k = 0; k < threads; ++k) {
        atomic_init(&shares[k].arrivals, 0);
        atomic_init(&shares[k].next, (int)(count * k / threads));
        shares[k].end = (int)(count * (k + 1) / threads);
    }
    return (int)count;
}

LOWERING_HIDDEN int count_cpus(void) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    /* It cannot be read on machines with more than 1024 CPUs. */
    return sched_getaffinity(0, sizeof(mask), &mask) == 0 ? CPU_COUNT(&mask) : 1;
}

static int run_alone(Share run, void* data) {
    Shares shares = {0};
    return run(data, 0, 1, 0, &shares) != 0 ? -1 : 0;
}

LOWERING_HIDDEN int run_on_pool(Share run, void* data, int64_t tasks, int threads) {
    Worker* taken = NULL;
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof(mask), &mask) != 0) threads = threads == 0 ? 1 : threads;
    if (threads == 0) threads = CPU_COUNT(&mask);
    if (threads > MAX_TASKS) threads = MAX_TASKS;
    int workers = threads > 1 ? take_workers(threads - 1, &mask, &taken) : 0;
    if (workers == 0) return run_alone(run, data);

    /* Callers may have small stacks. */
    Shares stack_shares[STACK_WORKERS], *shares = stack_shares, *heap_shares = NULL;
    if (workers >= STACK_WORKERS) {
        shares = heap_shares = aligned_alloc(_Alignof(Shares), (size_t)(workers + 1) * sizeof(Shares));
        if (shares == NULL) {
            give_back_workers(taken);
            return run_alone(run, data);
        }
    }
    threads = workers + 1;
    const int count = divide_loop(tasks, threads, shares);
    Job job = {run, data, count, shares, threads, tasks > 0, (unsigned)workers, 0};
    int number = 1;
    for (Worker *worker = taken, *next; worker != NULL; worker = next) {
        next = worker->next;
        worker->job = &job;
        worker->number = number++;
        set_state(worker, WORKING);
    }
    compute_shares(&job, 0);
    wait_for_workers(&job);
    give_back_workers(taken);
    free(heap_shares);
    return atomic_load(&job.failed) ? -1 : 0;
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
