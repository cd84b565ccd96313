/* Parts of a static object (emission/static_source.py): errors, checks of data, memory and tasks of kernels. The
 * generated C code of a model includes this file, after its header. It needs no header of a C library, memcpy and memset
 * of the functions in one, and no memory but the caller's. */
#ifndef LOWERING_STATIC_MAIN_H
#define LOWERING_STATIC_MAIN_H

#include "scan.h"
#include "static_errors.h"
#if defined(__riscv) && !defined(__riscv_zfh)
#include "static_half.h"
#endif

#define LOWERING_HIDDEN __attribute__((visibility("hidden")))

/* With LOWERING_ONE_THREAD, one call of the model runs at a time, and the code needs no thread-local memory. */
#ifdef LOWERING_ONE_THREAD
#define LOWERING_PER_THREAD
#else
#define LOWERING_PER_THREAD _Thread_local
#endif

void* memcpy(void* to, const void* from, size_t bytes);

enum { MAX_TASKS = 1024 }; /* of a loop */

__attribute__((cold, unused)) static int fail_memory(lowering_error* error) {
    return fail(error, "run.out_of_memory", "The sizes need more memory than a machine has.");
}

__attribute__((cold, unused)) static int fail_kernel(lowering_error* error, const char* name) {
    Message message = begin_error(error, "run.kernel_failed");
    say(&message, "The kernel '");
    say(&message, name);
    say(&message, "' failed: it lacks scratch memory.");
    return -1;
}

/* -- checks ------------------------------------------------------------------------------------------------------- */

/* Check a symbolic size of the caller. */
static int check_size(lowering_error* error, const char* name, int64_t size, int64_t least, int64_t most) {
    if (size >= least && size <= most) return 0;
    Message message = begin_error(error, "input.dimension_out_of_range");
    say(&message, "The size '");
    say(&message, name);
    say(&message, "' is ");
    say_number(&message, size);
    say(&message, ", and must be ");
    say_number(&message, least);
    say(&message, " to ");
    say_number(&message, most);
    say(&message, ".");
    return -1;
}

__attribute__((unused)) static int check_threads(lowering_error* error, const lowering_threads* threads) {
    if (threads == NULL) return 0;
    if (threads->run == NULL) return fail(error, "run.threads_missing", "The threads of the call lack the function run.");
    return check_size(error, "threads", threads->count, 1, MAX_TASKS);
}

/* Check that memory is given for a tensor with elements, at a multiple of `alignment` bytes. */
static int check_memory(lowering_error* error, const char* name, const void* data, int64_t bytes, uintptr_t alignment) {
    if (data != NULL && (uintptr_t)data % alignment == 0) return 0;
    if (bytes == 0) return 0;
    Message message = begin_error(error, data == NULL ? "run.tensor_missing" : "run.tensor_unaligned");
    say(&message, "'");
    say(&message, name);
    say(&message, data == NULL ? "' is NULL, and needs " : "' does not begin at a multiple of ");
    say_number(&message, data == NULL ? bytes : (int64_t)alignment);
    say(&message, " bytes.");
    return -1;
}

/* Check dimension `axis` of a tensor inside the model, which `text` describes. */
static int check_dim(lowering_error* error, const char* text, int axis, int64_t size, int64_t expected) {
    if (size == expected) return 0;
    Message message = begin_error(error, "run.size_mismatch");
    say(&message, text);
    say(&message, "; its size along axis ");
    say_number(&message, axis);
    say(&message, " is ");
    say_number(&message, size);
    say(&message, ", not ");
    say_number(&message, expected);
    say(&message, ".");
    return -1;
}

/* Check that a size of the caller is the number in the data of an input. */
__attribute__((unused)) static int check_value(lowering_error* error, const char* name, int64_t size, int64_t value) {
    if (size == value) return 0;
    Message message = begin_error(error, "run.size_mismatch");
    say(&message, "The size '");
    say(&message, name);
    say(&message, "' is ");
    say_number(&message, size);
    say(&message, ", and the input that contains it says ");
    say_number(&message, value);
    say(&message, ".");
    return -1;
}

/* Check sizes computed from data: none is negative, and with `others` they form a tensor that fits into memory. With
 * itemsize 0 they are not dimensions of one tensor. */
__attribute__((unused)) static int check_sizes(lowering_error* error, const int64_t* sizes, int count,
                                               const int64_t* others, int other_count, int64_t itemsize,
                                               const char* name) {
    const int64_t largest = INT64_C(1) << 40;
    double bytes = (double)itemsize;
    const char *code = NULL, *what = NULL;
    for (int k = 0; k < count; ++k) {
        if (sizes[k] < 0) code = "run.negative_size", what = ", one of which is negative.";
        else if (sizes[k] > largest) code = "run.size_too_large", what = ", one of which is larger than 2^40.";
        if (code != NULL) break;
        bytes *= (double)sizes[k];
    }
    for (int k = 0; k < other_count; ++k) bytes *= (double)others[k];
    if (code == NULL && bytes > LOWERING_MOST_BYTES) code = "run.out_of_memory", what = ": more memory than a machine has.";
    if (code == NULL) return 0;
    Message message = begin_error(error, code);
    say(&message, name);
    say(&message, " requires the sizes [");
    for (int k = 0; k < count; ++k) {
        if (k > 0) say(&message, ", ");
        say_number(&message, sizes[k]);
    }
    say(&message, "]");
    say(&message, what);
    return -1;
}

/* Check a condition of the model on its sizes. Each {} in the text stands for the next of the numbers. */
__attribute__((unused)) static int check_condition(lowering_error* error, int is_true, const char* code, const char* text,
                                                   const int64_t* numbers, int count) {
    if (is_true) return 0;
    Message message = begin_error(error, code);
    for (char letter[2] = {0, 0}; *text != 0; ++text) {
        if (text[0] == '{' && text[1] == '}' && count > 0) {
            say_number(&message, *numbers++);
            --count, ++text;
        } else {
            letter[0] = *text;
            say(&message, letter);
        }
    }
    return -1;
}

/* The integers of a tensor, and the description of their bounds: element i must be less than bounds[i mod count], and
 * at least 0 or, with from_the_back, at least minus that bound. */
typedef struct {
    const void* data;
    int bits, is_signed, rank;
    const int64_t* shape;
    const int64_t* bounds;
    int count, from_the_back;
    const char* name;
    const char* const* bounded; /* names of the dimensions of the bounds */
} Indices;

__attribute__((cold)) static int reject_index(lowering_error* error, const Indices* indices, int64_t at, int k,
                                              int64_t low, int64_t last) {
    Message message = begin_error(error, "run.index_out_of_range");
    say(&message, indices->name);
    say(&message, " contains ");
    say_number(&message, integer_at(indices->data, indices->bits, indices->is_signed, at));
    int64_t inner = 1;
    for (int axis = 0; axis < indices->rank; ++axis) inner *= indices->shape[axis];
    for (int axis = 0; axis < indices->rank; ++axis) {
        inner /= indices->shape[axis];
        say(&message, axis == 0 ? " at [" : ", ");
        say_number(&message, at / inner % indices->shape[axis]);
    }
    say(&message, indices->rank > 0 ? "], and " : ", and ");
    say(&message, indices->bounded[k]);
    if (last < low) {
        say(&message, " is empty: no index is legal.");
        return -1;
    }
    say(&message, " allows ");
    say_number(&message, low);
    say(&message, " to ");
    say_number(&message, last);
    say(&message, ".");
    return -1;
}

__attribute__((unused)) static int check_indices(lowering_error* error, const Indices* indices) {
    int64_t volume = 1;
    for (int axis = 0; axis < indices->rank; ++axis) volume *= indices->shape[axis];
    if (indices->count == 1) {
        const int64_t last = indices->bounds[0] - 1, low = indices->from_the_back ? -indices->bounds[0] : 0;
        if (!any_outside(indices->data, indices->bits, indices->is_signed, volume, low, last)) return 0;
    }
    for (int64_t i = 0; i < volume; ++i) {
        const int k = (int)(i % indices->count);
        const int64_t index = integer_at(indices->data, indices->bits, indices->is_signed, i);
        const int64_t last = indices->bounds[k] - 1, low = indices->from_the_back ? -indices->bounds[k] : 0;
        if (index < low || index > last) return reject_index(error, indices, i, k, low, last);
    }
    return 0;
}

/* -- numbers ------------------------------------------------------------------------------------------------------ */

__attribute__((unused)) static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
__attribute__((unused)) static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
/* The bytes of a block of memory, of which a size that is negative has none. */
__attribute__((unused)) static inline int64_t round_up(int64_t bytes) { return (max_of(bytes, 0) + 63) / 64 * 64; }

__attribute__((unused)) static inline double double_min_of(double a, double b) { return a < b ? a : b; }
__attribute__((unused)) static inline double double_max_of(double a, double b) { return a > b ? a : b; }

/* 0 if b is: sizes of the caller may be, and their checks come later. */
__attribute__((unused)) static inline int64_t floor_div(int64_t a, int64_t b) {
    if (b == 0) return 0;
    const int64_t quotient = a / b;
    return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

__attribute__((unused)) static inline int64_t floor_mod(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }

/* -- memory and tasks of kernels ---------------------------------------------------------------------------------- */

/* What a thread computes with: the scratch memory of its task, in which kernels allocate and free like on a stack. */
typedef struct {
    const lowering_threads* threads; /* NULL inside of a task, and for a caller without threads */
    char* scratch;                   /* of task 0 */
    int64_t bytes, used;             /* of each task */
    int is_serial;                   /* the following loop is computed by the calling thread */
} Context;

static LOWERING_PER_THREAD Context context;

static void* allocate(int type, int id, uint64_t bytes, int code, int bits) {
    (void)type, (void)id, (void)code, (void)bits;
    const int64_t rounded = (int64_t)((bytes + 63) & ~UINT64_C(63));
    if (rounded < 0 || rounded > context.bytes - context.used) return NULL;
    char* memory = context.scratch + context.used;
    context.used += rounded;
    return memory;
}

static int release(int type, int id, void* memory) {
    (void)type, (void)id;
    context.used = (char*)memory - context.scratch;
    return 0;
}

/* TVMParallelGroupEnv and FTVMParallelLambda of tvm/runtime/c_backend_api.h. */
typedef struct {
    void* sync_handle;
    int32_t num_task;
} Group;
typedef int (*Lambda)(int task, Group* group, void* data);

static int launch_serial(Lambda lambda, void* data) {
    Group group = {NULL, 1};
    const lowering_threads* threads = context.threads;
    context.threads = NULL, context.is_serial = 0;
    const int status = lambda(0, &group, data);
    context.threads = threads;
    return status;
}

typedef struct {
    Lambda lambda;
    void* data;
    Group group;
    Context caller;
    int failed;
} Job;

static void run_task(void* data, int number) {
    Job* job = data;
    const Context before = context;
    context = (Context){NULL, job->caller.scratch + number * job->caller.bytes, job->caller.bytes, 0, 0};
    if (number == 0) context.used = job->caller.used;
    if (job->lambda(number, &job->group, job->data) != 0) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
    context = before;
}

/* TVMBackendParallelLaunch. Any number of tasks computes the whole loop. */
static int launch(Lambda lambda, void* data, int num_task) {
    (void)num_task;
    const lowering_threads* threads = context.threads;
    if (threads == NULL || context.is_serial) return launch_serial(lambda, data);
    Job job = {lambda, data, {NULL, threads->count}, context, 0};
    threads->run(threads->pool, run_task, &job, threads->count);
    return job.failed ? -1 : 0;
}

/* Kernels call these by weak variables, which TVM sets when it loads a library. */
LOWERING_HIDDEN void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = allocate;
LOWERING_HIDDEN int (*__TVMBackendFreeWorkspace)(int, int, void*) = release;
LOWERING_HIDDEN int (*__TVMBackendParallelLaunch)(Lambda, void*, int) = launch;

/* The number of tasks of the following loop, or 0 (schedules/cpu/elementwise/loops.py): 1 is computed serially. */
LOWERING_HIDDEN int lowering_plan_launch(int64_t tasks) { return context.is_serial = tasks == 1; }

#endif
