/* Tasks of a model's loops on new POSIX threads. A program with a thread pool gives them to that instead. */
#include <pthread.h>

typedef struct {
    void (*task)(void* data, int number);
    void* data;
    int number;
} Work;

static void* start_task(void* argument) {
    const Work* work = argument;
    work->task(work->data, work->number);
    return NULL;
}

static void run_on_new_threads(void* pool, void (*task)(void* data, int number), void* data, int count) {
    (void)pool;
    pthread_t* threads = calloc((size_t)count, sizeof(pthread_t));
    Work* work = calloc((size_t)count, sizeof(Work));
    int started = 1;
    for (; threads != NULL && work != NULL && started < count; ++started) {
        work[started] = (Work){task, data, started};
        if (pthread_create(&threads[started], NULL, start_task, &work[started]) != 0) break;
    }
    task(data, 0);
    for (int number = started; number < count; ++number) task(data, number); /* without a thread: one after the other */
    for (int number = 1; number < started; ++number) pthread_join(threads[number], NULL);
    free(work);
    free(threads);
}
