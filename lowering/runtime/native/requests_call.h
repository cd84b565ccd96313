/* The arguments of a check of requests. */
#ifndef LOWERING_REQUESTS_CALL_H
#define LOWERING_REQUESTS_CALL_H

#include <stddef.h>
#include <stdint.h>

/* A tensor of int32 or int64; data is NULL if the node lacks this input. */
typedef struct {
    const void* data;
    const int64_t* shape;
    int ndim, narrow;
} Table;

/* A call of a check: the name of the node for errors, sizes, and tables in the order of the operator. */
typedef struct Node Node;
typedef struct {
    const Node* node;
    const int64_t* sizes;
    int64_t size_count;
    const Table* tables;
} Requests;

#ifdef LOWERING_C_CODE
#include "types.h"

/* The name of a node, and memory and the error of a call. */
struct Node {
    const char* name;
    lowering_error* error;
    void* memory;
    int64_t bytes;
};
#endif

#endif
