/* Threads for the parallel loops of compiled code (pool.c). */
#ifndef LOWERING_POOL_H
#define LOWERING_POOL_H

#include <stdint.h>

#include "tasks.h"

/* Compute share `number` of `count` of a loop, by thread `thread` of those that compute it. Return 0, or another value
 * if it fails. TVMBackendParallelBarrier counts at int k * 16 of `arrivals`, zeros at first, those of share k, in a
 * loop with one for each thread. */
typedef int (*Share)(void* data, int number, int count, int thread, void* arrivals);

/* Return the number of CPUs of the calling thread's affinity mask. */
int count_cpus(void);

/* Compute a loop by this number of threads; 0: as many as `count_cpus`. A loop with a planned number of tasks has
 * several shares per thread; without, which is 0, it has one. Return 0, or -1 if a share failed. */
int run_on_pool(Share run, void* data, int64_t tasks, int threads);

#endif
