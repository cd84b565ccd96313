/* A call of GptAttention, as its checks read it. */
#ifndef LOWERING_REQUESTS_TENSORRT_LLM_H
#define LOWERING_REQUESTS_TENSORRT_LLM_H

#include "requests.h"

/* Numbers, in the order of lowering/ops/tensorrt_llm/table_checks.py. -1 marks an absent one. */
enum {
    USES_CACHE,
    IS_CROSS,
    IS_STREAMING,
    IS_COMPATIBLE,
    HAS_EXTRA_BLOCK,
    ROWS,
    SEQUENCES, /* of padded rows, `ROWS_EACH` for each */
    ROWS_EACH,
    BEAMS,
    LAYER,
    BLOCK, /* tokens in a block; 0: a contiguous cache, of `SLOTS` */
    SLOTS,
    POOL_BLOCKS,
    POOL_LAYERS, /* 0: the pool lacks this axis */
    CROSS_ROWS,
    CROSS_SEQUENCES,
    CROSS_ROWS_EACH,
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

/* Longer lengths are rejected, so that the addition of a few lengths does not overflow. */
static const int64_t MAX_LENGTH = INT64_C(1) << 40;

typedef struct {
    const Node* node;
    const int64_t* numbers;
    Table context_lengths, types, past, sequence_length, host_context_lengths, windows, sink_length, indirection,
        offsets, mapping, encoder;
    int64_t requests, contexts; /* the first `contexts` requests are in the context phase */
    int64_t window, sinks;      /* -1: no window */
} Call;

/* A request: its new tokens in this call, its past tokens, and both together. prompt is its context length. */
typedef struct {
    int is_context;
    int64_t new_tokens, past, total, prompt;
} Request;

static inline Request request_of(const Call* call, int64_t b) {
    Request r = {b < call->contexts, 1, 0, 0, at(&call->context_lengths, b)};
    if (r.is_context) r.new_tokens = r.prompt;
    if (is_given(&call->past)) r.past = at(&call->past, b);
    r.total = r.past + r.new_tokens;
    return r;
}

/* Return the oldest token after the sinks that a request attends to. */
static inline int64_t oldest_of(const Call* call, const Request* r) {
    if (call->window < 0) return 0;
    const int extra = call->numbers[IS_COMPATIBLE] && !r->is_context;
    return max_of(r->past - (call->window - call->sinks - 1) - extra, 0);
}

/* Check that the slots that a call needs exist, and are written by one request only. Lengths were checked before. */
__attribute__((visibility("hidden"))) int lowering_tensorrt_llm_slots(const Call* call);

#endif
