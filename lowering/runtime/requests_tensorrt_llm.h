/* A call of GptAttention, as its checks see it. */
#ifndef LOWERING_REQUESTS_TENSORRT_LLM_H
#define LOWERING_REQUESTS_TENSORRT_LLM_H

#include "requests.h"

/* Numbers, in the order of lowering/ops/tensorrt_llm/table_checks.py. -1: there is no such thing. */
enum {
    CACHED,
    CROSS,
    STREAMING,
    COMPATIBLE,
    ONE_MORE_BLOCK,
    ROWS,
    SEQUENCES, /* of padded rows, `EACH` for each */
    EACH,
    BEAMS,
    LAYER,
    BLOCK, /* tokens in a block; 0: a contiguous cache, of `SLOTS` */
    SLOTS,
    POOL_BLOCKS,
    POOL_LAYERS, /* 0: the pool has no such axis */
    CROSS_ROWS,
    CROSS_SEQUENCES,
    CROSS_EACH,
    MASK_KEYS,
    PACKED_MASK_KEYS,
    LOGN_POSITIONS,
    BIAS_ROWS,
    BIAS_KEYS,
    COS_POSITIONS,
    LONG_COS_POSITIONS,
    ORIGINAL, /* the length up to which longrope uses the short table */
    NUMBERS
};

/* Lengths beyond it are refused: then no sum of some of them overflows. */
static const int64_t LONGEST = INT64_C(1) << 40;

typedef struct {
    const TVMFFIAny* node;
    const int64_t* numbers;
    Table context_lengths, types, past, sequence_length, again, windows, sink_length, indirection, offsets, mapping,
        encoder;
    int64_t requests, contexts; /* the first of them are in the context phase */
    int64_t window, sinks;      /* -1: no window */
} Call;

/* A request: its tokens in this call, before it, and with it; prompt is what context_lengths says. */
typedef struct {
    int context;
    int64_t own, past, total, prompt;
} Request;

static inline Request request_of(const Call* call, int64_t b) {
    Request r = {b < call->contexts, 1, 0, 0, at(&call->context_lengths, b)};
    if (r.context) r.own = r.prompt;
    if (given(&call->past)) r.past = at(&call->past, b);
    r.total = r.past + r.own;
    return r;
}

/* The oldest token behind the sinks that a request sees. */
static inline int64_t oldest_of(const Call* call, const Request* r) {
    if (call->window < 0) return 0;
    const int more = call->numbers[COMPATIBLE] && !r->context;
    return most(r->past - (call->window - call->sinks - 1) - more, 0);
}

/* Whether the slots that a call needs are there, and are written by one alone. Lengths were checked before. */
__attribute__((visibility("hidden"))) int lowering_tensorrt_llm_slots(const Call* call);

#endif
