/* A call of a model's C code: what the caller provides. Tensors are in the order of the model. */
#ifndef LOWERING_CALL_H
#define LOWERING_CALL_H

#include "types.h"

/* A kernel. values are its arguments: the number of a scalar; the address, the bytes and the shape of a tensor. */
typedef struct {
    const char* name;
    /* Count what its arithmetic depends on: the pairs of queries and keys that see each other, and the keys that no
     * query sees. NULL for other kernels than attentions. */
    int32_t (*count)(const int64_t* values, int64_t* counts);
} lowering_kernel;

/* Who is told of every kernel, before and after it runs. */
typedef struct {
    void* owner;
    void (*observe)(void* owner, const lowering_kernel* kernel, int32_t is_before, const int64_t* values);
} lowering_observer;

typedef struct {
    const int64_t* sizes;        /* the values of symbolic sizes */
    void* const* inputs;         /* compact, at multiples of the size of an element */
    void* const* outputs;        /* likewise; a void** to set for one of new memory, NULL for one that replaces an input */
    int64_t* const* shapes;      /* those of outputs of new memory, to set */
    const void* weights;         /* weights.bin, at a multiple of 64 bytes */
    void* workspace;             /* at a multiple of 64 bytes */
    int64_t workspace_bytes;
    const lowering_memory* memory;     /* NULL: malloc, in a library */
    const lowering_threads* threads; /* NULL: thread_count threads of the library */
    int32_t thread_count;            /* 1: the calling thread computes alone */
    const lowering_observer* observer; /* of a library; may be NULL */
} lowering_call;

#endif
