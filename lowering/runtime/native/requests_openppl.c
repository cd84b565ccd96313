/* Check that ragged batches of OpenPPL's operators fit their rows and their cache. */
#include "requests.h"

/* Sizes, in the order of lowering/ops/openppl/table_checks.py. -1 marks an absent one. */
enum { ROWS, KEYS, SLOTS, PAGE, MASK_COLUMNS, SIZES };

typedef struct {
    const Node* node;
    const int64_t* sizes;
    Table seqstarts, kvstarts, cachestarts, start_pos, decoding_batches;
    int64_t batch;
} Call;

static int64_t step(const Table* starts, int64_t b) { return at(starts, b + 1) - at(starts, b); }

/* Check that the starts begin with 0 and never decrease, so that differences do not overflow. */
static int check_starts(const Call* call, const char* name, const Table* starts, const char* unit) {
    if (at(starts, 0) != 0) {
        return reject("requests.starts_not_zero", call->node,
                      "%s of request 0 is " N ": make it 0, the number of %s before it.", name, at(starts, 0), unit);
    }
    for (int64_t b = 0; b < call->batch; ++b) {
        if (at(starts, b + 1) < at(starts, b)) {
            return reject("requests.starts_decreasing", call->node,
                          "%s decreases at request " N ", from " N " to " N
                          ": give the cumulative numbers of %s.",
                          name, b, at(starts, b), at(starts, b + 1), unit);
        }
    }
    return 0;
}

static int check_totals(const Call* call) {
    const int64_t* sizes = call->sizes;
    const int64_t rows = at(&call->seqstarts, call->batch), keys = at(&call->kvstarts, call->batch);
    if (sizes[ROWS] >= 0 && rows != sizes[ROWS]) {
        return reject("requests.row_count_mismatch", call->node,
                      "seqstarts of " N " requests ends with " N ", and %s has " N
                      " rows: give as many rows as all requests have.",
                      call->batch, rows, is_given(&call->decoding_batches) ? "query" : "current_key", sizes[ROWS]);
    }
    if (sizes[KEYS] >= 0 && keys != sizes[KEYS]) {
        return reject("requests.key_count_mismatch", call->node,
                      "kvstarts of " N " requests ends with " N ", and key has " N
                      " rows: give as many keys as all requests have.",
                      call->batch, keys, sizes[KEYS]);
    }
    if (is_given(&call->decoding_batches)) {
        const int64_t first = at(&call->decoding_batches, 0);
        if (first < 0 || first > call->batch) {
            return reject("requests.decoding_count_out_of_range", call->node,
                          "decoding_batches is " N ", and there are " N
                          " requests: give the number of leading requests that decode.",
                          first, call->batch);
        }
    }
    return 0;
}

/* A mask with elements must have a column for each key. */
static int check_mask(const Call* call) {
    const int64_t keys = at(&call->kvstarts, call->batch), columns = call->sizes[MASK_COLUMNS];
    if (columns <= 0 || keys <= columns) return 0;
    return reject("requests.mask_too_small", call->node,
                  "attn_mask has " N " columns, and kvstarts of " N " requests ends with " N
                  ": give a column for each key.",
                  columns, call->batch, keys);
}

static int check_lengths(const Call* call) {
    for (int64_t b = 0; b < call->batch; ++b) {
        const int64_t rows = step(&call->seqstarts, b), keys = step(&call->kvstarts, b), past = at(&call->start_pos, b);
        if (past < 0) {
            return reject("requests.past_length_negative", call->node,
                          "start_pos of request " N " is " N ": give the number of its tokens in the cache.", b, past);
        }
        if (keys - rows != past) {
            return reject("requests.past_length_mismatch", call->node,
                          "kvstarts has " N " keys for request " N ", and start_pos " N " and " N
                          " rows by seqstarts require " N ": make them equal.",
                          keys, b, past, rows, (int64_t)((uint64_t)past + (uint64_t)rows));
        }
    }
    return 0;
}

/* Return the page size. A request without pages has a single page for all of its keys. */
static int64_t page_of(const Call* call) { return call->sizes[PAGE] > 0 ? call->sizes[PAGE] : INT64_MAX; }

/* Return the first slots of the pages of request b. */
static const int64_t* pages_of(const Call* call, int64_t b) {
    const int64_t columns = call->cachestarts.ndim == 2 ? call->cachestarts.shape[1] : 1;
    return (const int64_t*)call->cachestarts.data + b * columns;
}

static int reject_slots(const Call* call, int64_t b, int64_t c, int64_t keys) {
    const int64_t slots = call->sizes[SLOTS], first = pages_of(call, b)[c];
    if (keys > slots) {
        return reject("requests.cache_too_small", call->node,
                      "kvstarts has " N " keys for request " N ", and cache " N " slots: use a larger cache.",
                      step(&call->kvstarts, b), b, slots);
    }
    if (call->sizes[PAGE] > 0) {
        return reject("requests.slot_out_of_range", call->node,
                      "cachestarts of request " N ", page " N ", is " N ", and its " N
                      " keys need consecutive slots of cache, which has " N ": give a slot from 0 to " N ".",
                      b, c, first, keys, slots, slots - keys);
    }
    return reject("requests.slot_out_of_range", call->node,
                  "cachestarts of request " N " is " N ", and its " N
                  " keys need consecutive slots of cache, which has " N ": give a slot from 0 to " N ".",
                  b, first, keys, slots, slots - keys);
}

/* Check that every slot that a request needs is in the cache, and count the spans of written slots. */
static int check_slots(const Call* call, int64_t* written) {
    const int64_t page = page_of(call), slots = call->sizes[SLOTS];
    for (int64_t b = 0; b < call->batch; ++b) {
        const int64_t keys = step(&call->kvstarts, b), past = at(&call->start_pos, b);
        if (keys == 0) continue;
        const int64_t columns = (keys - 1) / page + 1;
        if (call->sizes[PAGE] > 0 && columns > call->cachestarts.shape[1]) {
            return reject("requests.table_too_small", call->node,
                          "cachestarts has " N " pages of " N " tokens for each request, and kvstarts " N
                          " keys for request " N ": give it " N " pages.",
                          call->cachestarts.shape[1], page, keys, b, columns);
        }
        const int64_t *pages = pages_of(call, b), last = keys - (columns - 1) * page;
        uint64_t signs = 0; /* set by a negative or too large slot; the loop needs no branch */
        for (int64_t c = 0; c + 1 < columns; ++c)
            signs |= (uint64_t)pages[c] | ((uint64_t)(slots - page) - (uint64_t)pages[c]);
        for (int64_t c = 0; signs >> 63 && c + 1 < columns; ++c) {
            if (pages[c] < 0 || pages[c] > slots - page) return reject_slots(call, b, c, page);
        }
        if (pages[columns - 1] < 0 || pages[columns - 1] > slots - last)
            return reject_slots(call, b, columns - 1, last);
        if (past < keys) *written += columns - past / page;
    }
    return 0;
}

static int reject_shared(const Call* call, const Span* first_span, const Span* second_span, int writes) {
    const int64_t slot = max_of(first_span->begin, second_span->begin);
    if (first_span->request == second_span->request) {
        return reject("requests.slot_written_twice", call->node,
                      "cachestarts has two tokens of request " N " in slot " N ": give each slot to one token.",
                      first_span->request, slot);
    }
    return reject("requests.slot_shared", call->node,
                  "cachestarts has request " N " write to slot " N ", which request " N
                  " %s: give requests slots of their own; only slots that no request writes may be shared.",
                  first_span->request, slot, second_span->request, writes ? "writes as well" : "reads");
}

/* Check that a slot that the call writes belongs to one token, and is not written or read by another. */
static int check_shared(const Call* call, Spans* spans) {
    const int64_t page = page_of(call);
    for (int64_t b = 0; b < call->batch; ++b) {
        const int64_t keys = step(&call->kvstarts, b), past = at(&call->start_pos, b);
        const int64_t* pages = pages_of(call, b);
        if (past >= keys) continue;
        for (int64_t c = past / page; c <= (keys - 1) / page; ++c) {
            add_span(spans, pages[c] + max_of(past - c * page, 0), pages[c] + min_of(keys - c * page, page), b, c);
        }
    }
    if (spans->count == 0) return 0;
    sort_spans(spans);
    const Span* duplicate = find_neighbor_overlap(spans);
    if (duplicate != NULL) return reject_shared(call, duplicate - 1, duplicate, 1);
    Filter written;
    open_filter(&written, page);
    for (int64_t i = 0; i < spans->count; ++i) mark(&written, spans->items[i]);
    for (int64_t b = 0; b < call->batch; ++b) {
        const int64_t keys = step(&call->kvstarts, b), *pages = pages_of(call, b);
        const int64_t columns = keys > 0 ? (keys - 1) / page + 1 : 0;
        for (int64_t c = 0; c < columns; ++c) {
            const Span read = {pages[c], pages[c] + min_of(keys - c * page, page), b, c};
            const Span* writer = is_marked(&written, read) ? find_overlap(spans, read) : NULL;
            if (writer != NULL) return reject_shared(call, writer, &read, 0);
        }
    }
    return 0;
}

static int check_call(const Call* call) {
    if (check_starts(call, "seqstarts", &call->seqstarts, "rows")) return -1;
    if (check_starts(call, "kvstarts", &call->kvstarts, "keys")) return -1;
    if (check_totals(call)) return -1;
    if (!is_given(&call->cachestarts)) return check_mask(call);
    int64_t written = 0;
    if (check_lengths(call) || check_slots(call, &written) || check_mask(call)) return -1;
    Spans spans;
    if (!open_spans(&spans, call->node, written)) {
        return reject("run.out_of_memory", call->node,
                      "the memory to check cachestarts is exhausted: free memory, and call again.");
    }
    const int failed = check_shared(call, &spans);
    close_spans(&spans);
    return failed;
}

/* lowering_check_openppl(seqstarts, sizes, node, kvstarts, cachestarts, start_pos, decoding_batches) -> seqstarts
 *
 * int64 tables as the operators have them; each of the last three may be a number instead. The check for shared slots
 * sorts the n written pages, in at most n^1.3 steps. Each page that is read costs a filter lookup, and a search among
 * the n if that finds a mark. */
CHECK_REQUESTS(openppl) {
    const Table* tables = requests->tables;
    Call call = {requests->node, requests->sizes, tables[0], tables[1], tables[2], tables[3], tables[4], 0};
    call.batch = call.seqstarts.ndim == 1 ? call.seqstarts.shape[0] - 1 : -1;
    int fits = requests->size_count == SIZES && call.batch >= 0 && has_size(&call.kvstarts, call.batch + 1);
    fits = fits && has_size(&call.start_pos, call.batch) && (!is_given(&call.cachestarts) || is_given(&call.start_pos));
    fits = fits && (!is_given(&call.cachestarts) || call.cachestarts.shape[0] == call.batch);
    fits = fits && (!is_given(&call.decoding_batches) || volume(&call.decoding_batches) == 1);
    return fits && check_call(&call) ? -1 : 0;
}
