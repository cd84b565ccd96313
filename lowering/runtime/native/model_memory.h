/* Memory that a model's C code allocates: blocks of the caller's memory, and the functions of loops.
 *
 * A function owns the blocks that it has allocated, and those of the results that it got. Before it returns it retains
 * the blocks of its own results for its caller, and releases what it owns. After an error nothing is released until
 * the call ends, which frees all blocks. */
#ifndef LOWERING_MODEL_MEMORY_H
#define LOWERING_MODEL_MEMORY_H

#include "model_checks.h"

/* A block, 64 bytes before its data. */
typedef struct Block {
    struct Block *before, *after; /* in the list of the call's blocks */
    void* memory;                 /* as the caller gave it */
    void* data;                   /* at a multiple of 64 bytes */
    int64_t owners;
} Block;

/* The blocks of a call. */
typedef struct {
    const lowering_memory* memory;
    Block* blocks;
    Block* scratch; /* what kernels use in place of the workspace's */
} Heap;

/* The blocks that a function owns, each as often as it is listed. */
typedef struct {
    Heap* heap;
    Block** owned;
    int count;
} Frame;

/* An argument or a result of a function. The block is NULL where the call owns the memory. */
typedef struct {
    void* data;
    Block* block;
    int64_t shape[LOWERING_RANK];
} Tensor;

#ifdef LOWERING_LIBRARY
#include "heap.h"
#endif

/* Return the memory of a call, or NULL with an error. */
static const lowering_memory* choose_memory(lowering_error* error, const lowering_memory* memory) {
#ifdef LOWERING_LIBRARY
    if (memory == NULL) return &lowering_heap;
#endif
    if (memory != NULL && memory->allocate != NULL && memory->release != NULL) return memory;
    fail(error, "run.memory_missing",
                "The model has loops, or tensors whose size depends on data, and the call lacks functions for memory.");
    return NULL;
}

/* Return a new block with one owner, or NULL. `exact` is the size without wrapping around. */
static Block* allocate_in_heap(Heap* heap, int64_t bytes, double exact) {
    if (!(exact <= LOWERING_MOST_BYTES)) return NULL;
    char* memory = heap->memory->allocate(heap->memory->owner, (size_t)max_of(bytes, 0) + 128);
    if (memory == NULL) return NULL;
    char* data = memory + 64 + (-(uintptr_t)memory & 63);
    Block* block = (Block*)(void*)(data - 64);
    *block = (Block){NULL, heap->blocks, memory, data, 1};
    if (heap->blocks != NULL) heap->blocks->before = block;
    return heap->blocks = block;
}

static void release_block(Heap* heap, Block* block) {
    if (block == NULL || --block->owners > 0) return;
    if (block->before != NULL) block->before->after = block->after;
    else heap->blocks = block->after;
    if (block->after != NULL) block->after->before = block->before;
    heap->memory->release(heap->memory->owner, block->memory);
}

__attribute__((unused)) static void release_heap(Heap* heap) {
    while (heap->blocks != NULL) {
        heap->blocks->owners = 1;
        release_block(heap, heap->blocks);
    }
}

/* Let a function own a block, if it is one. */
static void own(Frame* frame, Block* block) {
    if (block != NULL) frame->owned[frame->count++] = block;
}

__attribute__((unused)) static Block* allocate_block(Frame* frame, int64_t bytes, double exact) {
    Block* block = allocate_in_heap(frame->heap, bytes, exact);
    own(frame, block);
    return block;
}

__attribute__((unused)) static void release_frame(Frame* frame) {
    for (int k = 0; k < frame->count; ++k) release_block(frame->heap, frame->owned[k]);
}

/* Return a result, whose block gets the caller as owner. */
__attribute__((unused)) static Tensor retain(Tensor tensor) {
    if (tensor.block != NULL) ++tensor.block->owners;
    return tensor;
}

/* Provide at least `bytes` of scratch memory for each task of the following kernels. It never shrinks: kernels whose
 * scratch memory is in the workspace do not call this. */
__attribute__((unused)) static int reserve_scratch(Frame* frame, int64_t bytes, double exact) {
    Context* context = &lowering_context;
    const int64_t tasks = count_tasks(context->threads, context->thread_count);
    if (!(exact <= LOWERING_MOST_BYTES)) return -1;
    if (bytes <= context->bytes) return 0;
    Block* block = allocate_in_heap(frame->heap, bytes * tasks, exact * (double)tasks);
    if (block == NULL) return -1;
    release_block(frame->heap, frame->heap->scratch);
    frame->heap->scratch = block;
    context->scratch = block->data, context->bytes = bytes;
    return 0;
}

/* Memory of an output whose size depends on data. */
typedef struct {
    const void* data;
    int64_t bytes;
    void** output; /* where the caller learns of it */
} NewOutput;

/* Copy outputs into new memory of the caller, at least one byte each; none at an error. */
__attribute__((unused)) static int allocate_outputs(const Heap* heap, const NewOutput* new_outputs, int count) {
    for (int k = 0; k < count; ++k) {
        const size_t bytes = (size_t)max_of(new_outputs[k].bytes, 1);
        *new_outputs[k].output = heap->memory->allocate(heap->memory->owner, bytes);
        if (*new_outputs[k].output == NULL) {
            while (k-- > 0) {
                heap->memory->release(heap->memory->owner, *new_outputs[k].output);
                *new_outputs[k].output = NULL;
            }
            return -1;
        }
        if (new_outputs[k].bytes > 0) memcpy(*new_outputs[k].output, new_outputs[k].data, (size_t)new_outputs[k].bytes);
    }
    return 0;
}

#endif
