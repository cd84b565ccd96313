/* Run compiled models in C99 programs on Linux, and in whatever calls C: compile lowering.c into the program.
 *
 *   lowering_model* model;
 *   lowering_error error;
 *   if (lowering_load("out", &model, &error) != 0) return report(error.code, error.text);
 *
 *   const int64_t shape[] = {4, 64};
 *   const lowering_array inputs[] = {{x, 2, shape}};          (all inputs of the model, in its order)
 *   lowering_bound* bound;
 *   if (lowering_bind(model, inputs, 0, &bound, &error) != 0) return report(error.code, error.text);
 *   void* const outputs[] = {y};                              (lowering_get_output says the shape of each)
 *   if (lowering_run(bound, outputs, &error) != 0) return report(error.code, error.text);
 *
 * Functions return 0, or -1 and fill in the error, which may be NULL. Any number of threads may call functions of one
 * model at the same time, and each bound call is for one of them at a time. After fork, the child may use models that
 * were loaded before.
 *
 * model.so is code that runs with all rights of the process: load only files that you trust. It stays in memory until
 * lowering_unload; the weights are read, so that later changes of weights.bin do not matter. */
#ifndef LOWERING_H
#define LOWERING_H

#include "library.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lowering_model lowering_model;
typedef struct lowering_bound lowering_bound;

/* A tensor of the caller: compact, and at a multiple of the size of an element. */
typedef struct {
    void* data;
    int32_t rank;
    const int64_t* shape;
} lowering_array;

/* Load model.so and weights.bin of a folder. */
int lowering_load(const char* folder, lowering_model** model, lowering_error* error);

/* Unload a model, after its bound calls. NULL is accepted. */
void lowering_unload(lowering_model* model);

/* Return the names, types and shapes of inputs and outputs, and the symbolic sizes. */
const lowering_library* lowering_describe(const lowering_model* model);

/* Check inputs, and allocate the workspace of calls on them. The arrays stay the caller's, and each run reads their
 * current content; those that outputs replace are written. The shapes are copied. threads is the largest number of
 * threads of a run, or 0 for as many as the calling thread may use CPUs now. */
int lowering_bind(const lowering_model* model, const lowering_array* inputs, int32_t threads, lowering_bound** bound,
                  lowering_error* error);

/* Release a bound call. NULL is accepted. */
void lowering_unbind(lowering_bound* bound);

/* Return output `number`. Its data is that of the input that it replaces, memory that the last run has allocated, or
 * NULL where lowering_run gets it. Sizes that depend on data are LOWERING_COMPUTED before the first run. */
lowering_array lowering_get_output(const lowering_bound* bound, int32_t number);

/* Compute the outputs. outputs has their memory, by number, which overlaps no other memory of the call; entries of
 * outputs that replace an input, or that a run allocates, are not read. After an error the content of outputs, and of
 * inputs that outputs replace, is undefined. */
int lowering_run(lowering_bound* bound, void* const* outputs, lowering_error* error);

/* Let later runs tell an observer of each kernel, in the thread of the run; NULL ends that. */
void lowering_observe(lowering_bound* bound, const lowering_observer* observer);

#ifdef __cplusplus
}
#endif

#endif
