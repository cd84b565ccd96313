/* Parts of a model's C code (emission/model_source.py), which includes this file: errors and checks of data. The code
 * needs no header of a C library, memcpy and memset of the functions in one, and no memory but the caller's. */
#ifndef LOWERING_MODEL_CHECKS_H
#define LOWERING_MODEL_CHECKS_H

#include "call.h"
#include "model_errors.h"
#include "scan.h"
#include "tasks.h"
#if defined(__riscv) && !defined(__riscv_zfh)
#include "half.h"
#endif

void* memcpy(void* to, const void* from, size_t bytes);

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

static int check_threads(lowering_error* error, const lowering_call* call) {
    if (call->threads == NULL) return check_size(error, "threads", call->thread_count, 1, MAX_TASKS);
    if (call->threads->run != NULL) return check_size(error, "threads", call->threads->count, 1, MAX_TASKS);
    return fail(error, "run.threads_missing", "The threads of the call lack the function run.");
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

static int check_workspace(lowering_error* error, const lowering_call* call, int64_t bytes) {
    if (check_memory(error, "workspace", call->workspace, bytes, 64) != 0) return -1;
    if (call->workspace_bytes >= bytes) return 0;
    Message message = begin_error(error, "run.workspace_too_small");
    say(&message, "The workspace has ");
    say_number(&message, call->workspace_bytes);
    say(&message, " bytes, and the call needs ");
    say_number(&message, bytes);
    say(&message, ".");
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

#endif
