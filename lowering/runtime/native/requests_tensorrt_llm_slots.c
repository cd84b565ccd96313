/* Check the cache slots that a GptAttention reads and writes: they must exist, and be written by one request only.
 * Entries of kv_cache_block_offsets that no request needs may have any value. */
#include "requests_tensorrt_llm.h"

/* Slots by token: sinks first, then, from `start` on, `length` slots that form a ring. */
typedef struct {
    int64_t sinks, start, length;
} Ring;

static const int64_t ENDLESS = INT64_C(1) << 61;

static Ring ring_of(const Call* call) {
    const int64_t block = call->numbers[BLOCK];
    Ring ring = {call->sinks, call->sinks, ENDLESS};
    if (block) ring.start = (call->sinks + block - 1) / block * block;
    if (call->window >= 0) ring.length = call->window - call->sinks + (call->numbers[HAS_EXTRA_BLOCK] ? block : 0);
    return ring;
}

/* A half-open range. */
typedef struct {
    int64_t from, to;
} Range;

/* Compute the slots of the tokens after the sinks from `from` to `to` - 1: one range, or two if the ring wraps. */
static void find_ring_ranges(const Ring* ring, int64_t from, int64_t to, Range ranges[2]) {
    const int64_t index_after_sinks = max_of(from, ring->sinks) - ring->sinks,
                  count = min_of(to - ring->sinks - index_after_sinks, ring->length);
    const int64_t begin = index_after_sinks % ring->length, end = begin + count;
    ranges[0] = (Range){ring->start + begin, ring->start + min_of(end, ring->length)};
    ranges[1] = (Range){ring->start, ring->start + (count > 0 ? end - ring->length : 0)};
}

/* Compute the slots that a request reads or writes, and those that it writes in the context phase, sinks first. */
static void slots_of(const Call* call, const Ring* ring, int64_t b, Range needed[3], Range written[3]) {
    const Request r = request_of(call, b);
    if (call->numbers[IS_CROSS]) { /* a request's first call brings the keys of its encoder, later ones read them */
        const int64_t keys = at(&call->encoder, b);
        needed[0] = needed[1] = written[0] = written[1] = (Range){0, 0};
        needed[2] = (Range){0, keys};
        written[2] = (Range){0, r.past == 0 ? keys : 0};
        return;
    }
    needed[0] = (Range){0, min_of(r.total, ring->sinks)};
    written[0] = (Range){r.past, min_of(r.total, ring->sinks)};
    find_ring_ranges(ring, oldest_of(call, &r), r.total, needed + 1);
    find_ring_ranges(ring, r.past, r.total, written + 1);
}

static int64_t slot_of(const Ring* ring, int64_t token) {
    return token < ring->sinks ? token : ring->start + (token - ring->sinks) % ring->length;
}

/* Offsets of a layer in the table of blocks. Entries less than `entries` belong to the layer. */
typedef struct {
    int64_t first, beams, columns, entries;
} Blocks;

static int64_t entry(const Call* call, const Blocks* blocks, int64_t b, int64_t beam, int is_value, int64_t column) {
    return at(&call->offsets, blocks->first + ((b * blocks->beams + beam) * 2 + is_value) * blocks->columns + column);
}

static int find_blocks(const Call* call, Blocks* blocks) {
    const int64_t layers = max_of(call->numbers[POOL_LAYERS], 1);
    const int has_pools = call->offsets.ndim == 5;
    const int64_t pools = has_pools ? call->offsets.shape[0] : 1, *shape = call->offsets.shape + has_pools;
    int64_t pool = 0, layer = call->numbers[POOL_LAYERS] ? call->numbers[LAYER] : 0;
    if (is_given(&call->mapping)) {
        pool = at(&call->mapping, 2 * call->numbers[LAYER]);
        layer = at(&call->mapping, 2 * call->numbers[LAYER] + 1);
    }
    if ((has_pools && (pool < 0 || pool >= pools)) || layer < 0 || layer >= layers) {
        return reject("gpt_attention.pool_mapping_out_of_range", call->node,
                      "host_kv_cache_pool_mapping says that layer_idx " N " is layer " N " of pool " N
                      ", and there are " N " pools, of " N " layers: count pools and layers from 0.",
                      call->numbers[LAYER], layer, pool, pools, layers);
    }
    *blocks = (Blocks){0, shape[1], shape[3], (call->numbers[POOL_BLOCKS] * layers - layer) * 2};
    if (has_pools) blocks->first = pool * shape[0] * shape[1] * 2 * shape[3];
    return 0;
}

static int check_entry(const Call* call, const Blocks* blocks, int64_t b, int64_t beam, int64_t column) {
    for (int is_value = 0; is_value < 2; ++is_value) {
        const int64_t offset = entry(call, blocks, b, beam, is_value, column);
        if (offset >= 0 && offset < blocks->entries) continue;
        return reject("gpt_attention.block_out_of_range", call->node,
                      "the entry of kv_cache_block_offsets for request " N ", beam " N ", %s, column " N ", is " N
                      ", and entries of this layer in its pool are 0 to " N ": give a block that is in the pool.",
                      b, beam, is_value ? "V" : "K", column, offset, blocks->entries - 1);
    }
    return 0;
}

/* Check the entries of a beam for some ranges of slots. */
static int check_entries(const Call* call, const Blocks* blocks, int64_t b, int64_t beam, const Range ranges[3]) {
    const int64_t block = call->numbers[BLOCK];
    for (int k = 0; k < 3; ++k) {
        if (ranges[k].to <= ranges[k].from) continue;
        for (int64_t column = ranges[k].from / block; column <= (ranges[k].to - 1) / block; ++column) {
            if (check_entry(call, blocks, b, beam, column)) return -1;
        }
    }
    return 0;
}

/* Check the entries of several beams: each needs the slots that it writes, and those of other beams that it reads.
 * Their windows are never shorter than their sequences, so every earlier token is read. */
static int check_beams(const Call* call, const Blocks* blocks, const Ring* ring, int64_t b) {
    const int64_t block = call->numbers[BLOCK], beams = call->numbers[BEAMS], tokens = call->indirection.shape[2];
    const Request r = request_of(call, b);
    Range prompt[3] = {{0, min_of(r.prompt, ring->sinks)}, {0, 0}, {0, 0}};
    find_ring_ranges(ring, 0, r.prompt, prompt + 1);
    if (check_entries(call, blocks, b, 0, prompt)) return -1;
    for (int64_t k = 0; k < beams; ++k) {
        if (check_entry(call, blocks, b, k, slot_of(ring, r.past) / block)) return -1;
        int64_t last_beam = -1, last_column = -1;
        for (int64_t t = r.prompt; t < r.past; ++t) {
            const int64_t beam = at(&call->indirection, (b * beams + k) * tokens + t);
            const int64_t column = slot_of(ring, t) / block;
            if (beam == last_beam && column == last_column) continue;
            if (check_entry(call, blocks, b, beam, column)) return -1;
            last_beam = beam;
            last_column = column;
        }
    }
    return 0;
}

static void add_block(Spans* spans, const Call* call, const Blocks* blocks, int64_t b, int64_t beam, int64_t column) {
    for (int is_value = 0; is_value < 2; ++is_value) {
        const int64_t offset = entry(call, blocks, b, beam, is_value, column);
        add_span(spans, offset, offset + 1, b, beam);
    }
}

/* Add the blocks that request b writes to. Without spans only return an upper bound of their number. */
static int64_t written_blocks(const Call* call, const Blocks* blocks, const Ring* ring, int64_t b, Spans* spans) {
    const int64_t block = call->numbers[BLOCK];
    if (b >= call->contexts) {
        if (call->numbers[IS_CROSS]) return 0;
        const int64_t column = slot_of(ring, request_of(call, b).past) / block;
        for (int64_t k = 0; spans != NULL && k < call->numbers[BEAMS]; ++k)
            add_block(spans, call, blocks, b, k, column);
        return 2 * call->numbers[BEAMS];
    }
    Range needed[3], written[3];
    slots_of(call, ring, b, needed, written);
    int64_t count = 0;
    for (int k = 0; k < 3; ++k) {
        if (written[k].to <= written[k].from) continue;
        for (int64_t column = written[k].from / block; column <= (written[k].to - 1) / block; ++column) {
            int is_duplicate = 0; /* a block that the ring returns to is in two ranges */
            for (int j = 0; j < k; ++j) {
                is_duplicate |= written[j].to > written[j].from && column >= written[j].from / block &&
                          column <= (written[j].to - 1) / block;
            }
            count += 2;
            if (spans != NULL && !is_duplicate) add_block(spans, call, blocks, b, 0, column);
        }
    }
    return count;
}

/* Check that K or V of a block belongs to one request and beam. */
static int check_written(const Call* call, const Blocks* blocks, const Ring* ring) {
    int64_t count = 0;
    for (int64_t b = 0; b < call->requests; ++b) count += written_blocks(call, blocks, ring, b, NULL);
    Spans spans;
    if (!open_spans(&spans, call->node, count)) {
        return reject("run.out_of_memory", call->node,
                      "the memory to check kv_cache_block_offsets is exhausted: free memory, and call again.");
    }
    for (int64_t b = 0; b < call->requests; ++b) written_blocks(call, blocks, ring, b, &spans);
    sort_spans(&spans);
    int failed = 0;
    const Span* duplicate = find_neighbor_overlap(&spans);
    if (duplicate != NULL) {
        failed = reject("gpt_attention.block_written_twice", call->node,
                        "kv_cache_block_offsets has request " N ", beam " N ", and request " N ", beam " N
                        ", write to the block of entry " N
                        ": give each, and K and V, a block of its own; blocks that are only read may be shared.",
                        duplicate[-1].request, duplicate[-1].column, duplicate->request, duplicate->column,
                        duplicate->begin);
    }
    close_spans(&spans);
    return failed;
}

int lowering_tensorrt_llm_slots(const Call* call) {
    const Ring ring = ring_of(call);
    const int64_t block = call->numbers[BLOCK];
    Blocks blocks = {0, 0, 0, 0};
    if (block && find_blocks(call, &blocks)) return -1;
    const int64_t slots = block ? blocks.columns * block : call->numbers[SLOTS];
    Range needed[3], written[3];
    for (int64_t b = 0; b < call->requests; ++b) {
        slots_of(call, &ring, b, needed, written);
        int64_t end = 0;
        for (int k = 0; k < 3; ++k) end = max_of(end, needed[k].to > needed[k].from ? needed[k].to : 0);
        if (end <= slots) continue;
        if (!block) {
            return reject("gpt_attention.cache_too_small", call->node,
                          "past_key_value has " N " slots for tokens, and request " N " needs " N
                          ": give a larger cache.",
                          slots, b, end);
        }
        return reject("gpt_attention.block_table_too_small", call->node,
                      "kv_cache_block_offsets has " N " columns of " N " tokens, and request " N " needs " N
                      ": give at least as many columns.",
                      blocks.columns, block, b, (end - 1) / block + 1);
    }
    if (!block) return 0;
    const int has_beams = call->numbers[BEAMS] > 1 && !call->numbers[IS_CROSS];
    if (has_beams && call->contexts < call->requests && blocks.beams < call->numbers[BEAMS]) {
        return reject("gpt_attention.beam_blocks_missing", call->node,
                      "kv_cache_block_offsets is for " N " beams, and request " N ", in the generation phase, has " N
                      ": give the blocks of each beam.",
                      blocks.beams, call->contexts, call->numbers[BEAMS]);
    }
    for (int64_t b = 0; b < call->requests; ++b) {
        slots_of(call, &ring, b, needed, written);
        const int by_beam = has_beams && b >= call->contexts;
        if (by_beam ? check_beams(call, &blocks, &ring, b) : check_entries(call, &blocks, b, 0, needed)) return -1;
    }
    return check_written(call, &blocks, &ring);
}
