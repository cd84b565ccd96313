/* What a model.so exports: the description of a model, and its functions, which lowering.c calls.
 *
 * Later versions of this interface append fields, and `bytes` says which a library has. */
#ifndef LOWERING_LIBRARY_H
#define LOWERING_LIBRARY_H

#include "call.h"

#define LOWERING_INTERFACE 1

/* In place of a size: it is computed in a call. */
#define LOWERING_COMPUTED INT64_MIN

/* An input or an output. Texts are UTF-8. */
typedef struct {
    const char* name;
    const char* dtype;    /* of the elements in memory: float32, int64, bfloat16, ... */
    int32_t itemsize;     /* bytes of an element */
    int32_t rank;
    const int64_t* shape; /* a size; -1 - k for symbolic size k; LOWERING_COMPUTED */
    int32_t replaced;     /* of an output: the input whose memory it takes over, or -1 */
    int32_t is_allocated; /* of an output: its shape depends on data, and a call allocates its memory */
} lowering_tensor;

/* A symbolic size. */
typedef struct {
    const char* name;
    int64_t lower, upper;   /* the smallest and the largest legal value */
    int32_t input, element; /* where it is element `element` of an input of int64, and -1 where shapes have it */
} lowering_size;

typedef struct {
    uint32_t interface;  /* LOWERING_INTERFACE */
    uint32_t bytes;      /* of this record */
    const char* version; /* of the compiler */
    const char* target;
    const char* const* cpu_features; /* names of Linux's /proc/cpuinfo, then NULL */
    int32_t size_count, input_count, output_count;
    const lowering_size* sizes;
    const lowering_tensor* inputs;
    const lowering_tensor* outputs;
    int64_t weights_bytes; /* of weights.bin that the code reads */
    int32_t allocates;     /* whether calls allocate memory */

    /* Return the number of CPUs that the calling thread may use. */
    int32_t (*count_cpus)(void);

    /* Release memory of an output that a call has allocated without lowering_memory. */
    void (*release)(void* memory);

    /* Return the bytes of the workspace of a call, of which it reads sizes and threads only; -1 with an error. Set the
     * sizes of all outputs, one after the other, where output_sizes is not NULL: LOWERING_COMPUTED where they depend
     * on data. */
    int64_t (*plan)(const lowering_call* call, int64_t* output_sizes, lowering_error* error);

    /* Compute the outputs. Return 0, or -1 with an error. */
    int32_t (*run)(const lowering_call* call, lowering_error* error);
} lowering_library;

/* The symbol of a library. */
extern const lowering_library lowering_description;

#endif
