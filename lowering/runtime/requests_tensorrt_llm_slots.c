/* The slots of a cache that a GptAttention reads and writes: whether they are there, and written by one alone. Entries
 * of kv_cache_block_offsets that no request needs may hold anything. */
#define _GNU_SOURCE
#include "requests_tensorrt_llm.h"

/* Slots by token: sinks first, then, from `start` on, `length` slots that are used over and over. */
typedef struct {
    int64_t sinks, start, length;
} Ring;

static const int64_t ENDLESS = INT64_C(1) << 61;

static Ring ring_of(const Call* call) {
    const int64_t block = call->numbers[BLOCK];
    Ring ring = {call->sinks, call->sinks, ENDLESS};
    if (block) ring.start = (call->sinks + block - 1) / block * block;
    if (call->window >= 0) ring.length = call->window - call->sinks + (call->numbers[ONE_MORE_BLOCK] ? block : 0);
    return ring;
}

/* From, and to (not included). */
typedef struct {
    int64_t from, to;
} Range;

/* The slots of tokens behind the sinks from `from` to `to` - 1: one range, or two where the ring turns over. */
static void turned(const Ring* ring, int64_t from, int64_t to, Range found[2]) {
    const int64_t behind = most(from, ring->sinks) - ring->sinks,
                  count = least(to - ring->sinks - behind, ring->length);
    const int64_t begin = behind % ring->length, end = begin + count;
    found[0] = (Range){ring->start + begin, ring->start + least(end, ring->length)};
    found[1] = (Range){ring->start, ring->start + (count > 0 ? end - ring->length : 0)};
}

/* What a request reads or writes, and what it writes in the context phase: sinks, then the rest. */
static void slots_of(const Call* call, const Ring* ring, int64_t b, Range needed[3], Range written[3]) {
    const Request r = request_of(call, b);
    if (call->numbers[CROSS]) { /* the first call of a request brings the keys of its encoder, later ones read them */
        const int64_t keys = at(&call->encoder, b);
        needed[0] = needed[1] = written[0] = written[1] = (Range){0, 0};
        needed[2] = (Range){0, keys};
        written[2] = (Range){0, r.past == 0 ? keys : 0};
        return;
    }
    needed[0] = (Range){0, least(r.total, ring->sinks)};
    written[0] = (Range){r.past, least(r.total, ring->sinks)};
    turned(ring, oldest_of(call, &r), r.total, needed + 1);
    turned(ring, r.past, r.total, written + 1);
}

static int64_t slot_of(const Ring* ring, int64_t token) {
    return token < ring->sinks ? token : ring->start + (token - ring->sinks) % ring->length;
}

/* Where the layer is in the table of blocks: entries below `entries` are its own. */
typedef struct {
    int64_t first, beams, columns, entries;
} Blocks;

static int64_t entry(const Call* call, const Blocks* blocks, int64_t b, int64_t beam, int part, int64_t column) {
    return at(&call->offsets, blocks->first + ((b * blocks->beams + beam) * 2 + part) * blocks->columns + column);
}

static int find_blocks(const Call* call, Blocks* blocks) {
    const int64_t layers = most(call->numbers[POOL_LAYERS], 1);
    const int several = call->offsets.ndim == 5;
    const int64_t pools = several ? call->offsets.shape[0] : 1, *shape = call->offsets.shape + several;
    int64_t which = 0, layer = call->numbers[POOL_LAYERS] ? call->numbers[LAYER] : 0;
    if (given(&call->mapping)) {
        which = at(&call->mapping, 2 * call->numbers[LAYER]);
        layer = at(&call->mapping, 2 * call->numbers[LAYER] + 1);
    }
    if ((several && (which < 0 || which >= pools)) || layer < 0 || layer >= layers) {
        return refuse(call->node,
                      "host_kv_cache_pool_mapping says that layer_idx " N " is layer " N " of pool " N
                      ", and there are " N " pools, of " N " layers: count both from 0.",
                      call->numbers[LAYER], layer, which, pools, layers);
    }
    *blocks = (Blocks){0, shape[1], shape[3], (call->numbers[POOL_BLOCKS] * layers - layer) * 2};
    if (several) blocks->first = which * shape[0] * shape[1] * 2 * shape[3];
    return 0;
}

static int check_entry(const Call* call, const Blocks* blocks, int64_t b, int64_t beam, int64_t column) {
    for (int part = 0; part < 2; ++part) {
        const int64_t found = entry(call, blocks, b, beam, part, column);
        if (found >= 0 && found < blocks->entries) continue;
        return refuse(call->node,
                      "the entry of kv_cache_block_offsets for request " N ", beam " N ", %s, column " N ", is " N
                      ", and entries of this layer in its pool are 0 to " N ": give a block that is in the pool.",
                      b, beam, part ? "V" : "K", column, found, blocks->entries - 1);
    }
    return 0;
}

/* The entries of a beam for some ranges of slots. */
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

/* Of several beams each needs what it writes, and what some of them reads of it. They have no window that is shorter
 * than their sequences, so that every earlier token is read. */
static int check_beams(const Call* call, const Blocks* blocks, const Ring* ring, int64_t b) {
    const int64_t block = call->numbers[BLOCK], beams = call->numbers[BEAMS], tokens = call->indirection.shape[2];
    const Request r = request_of(call, b);
    Range prompt[3] = {{0, least(r.prompt, ring->sinks)}, {0, 0}, {0, 0}};
    turned(ring, 0, r.prompt, prompt + 1);
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
    for (int part = 0; part < 2; ++part) {
        const int64_t found = entry(call, blocks, b, beam, part, column);
        add_span(spans, found, found + 1, b, beam);
    }
}

/* The blocks that request b writes to, or with no spans their number at most. */
static int64_t written_blocks(const Call* call, const Blocks* blocks, const Ring* ring, int64_t b, Spans* spans) {
    const int64_t block = call->numbers[BLOCK];
    if (b >= call->contexts) {
        if (call->numbers[CROSS]) return 0;
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
            int before = 0; /* a block that a ring comes back to is in two ranges */
            for (int j = 0; j < k; ++j) {
                before |= written[j].to > written[j].from && column >= written[j].from / block &&
                          column <= (written[j].to - 1) / block;
            }
            count += 2;
            if (spans != NULL && !before) add_block(spans, call, blocks, b, 0, column);
        }
    }
    return count;
}

/* K or V of one block belongs to one request and beam. */
static int check_written(const Call* call, const Blocks* blocks, const Ring* ring) {
    int64_t count = 0;
    for (int64_t b = 0; b < call->requests; ++b) count += written_blocks(call, blocks, ring, b, NULL);
    Spans spans;
    if (!open_spans(&spans, count)) return refuse(call->node, "there is no memory to check kv_cache_block_offsets in.");
    for (int64_t b = 0; b < call->requests; ++b) written_blocks(call, blocks, ring, b, &spans);
    sort_spans(&spans);
    int failed = 0;
    const Span* twice = overlapping(&spans);
    if (twice != NULL) {
        failed = refuse(call->node,
                        "kv_cache_block_offsets has request " N ", beam " N ", and request " N ", beam " N
                        ", write to the block of entry " N
                        ": give each, and K and V, a block of its own; only what nobody writes may be shared.",
                        twice[-1].request, twice[-1].part, twice->request, twice->part, twice->begin);
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
        for (int k = 0; k < 3; ++k) end = most(end, needed[k].to > needed[k].from ? needed[k].to : 0);
        if (end <= slots) continue;
        if (!block) {
            return refuse(call->node,
                          "past_key_value has " N " slots for tokens, and request " N " needs " N
                          ": give a larger cache.",
                          slots, b, end);
        }
        return refuse(call->node,
                      "kv_cache_block_offsets has " N " columns of " N " tokens, and request " N " needs " N
                      ": give as many.",
                      blocks.columns, block, b, (end - 1) / block + 1);
    }
    if (!block) return 0;
    const int several = call->numbers[BEAMS] > 1 && !call->numbers[CROSS];
    if (several && call->contexts < call->requests && blocks.beams < call->numbers[BEAMS]) {
        return refuse(call->node,
                      "kv_cache_block_offsets is for " N " beams, and request " N ", in the generation phase, has " N
                      ": give the blocks of each beam.",
                      blocks.beams, call->contexts, call->numbers[BEAMS]);
    }
    for (int64_t b = 0; b < call->requests; ++b) {
        slots_of(call, &ring, b, needed, written);
        const int by_beam = several && b >= call->contexts;
        if (by_beam ? check_beams(call, &blocks, &ring, b) : check_entries(call, &blocks, b, 0, needed)) return -1;
    }
    return check_written(call, &blocks, &ring);
}
