/* Whether packed requests of OpenPPL's operators fit their rows and their cache; linked into every model.so. */
#define _GNU_SOURCE
#include "requests.h"

/* Sizes, in the order of lowering/ops/openppl/table_checks.py. -1: there is no such thing. */
enum { ROWS, KEYS, SLOTS, PAGE, MASK_COLUMNS, SIZES };

typedef struct {
    const TVMFFIAny* node;
    const int64_t* sizes;
    Table seqstarts, kvstarts, cachestarts, start_pos, decoding_batches;
    int64_t batch;
} Call;

static int64_t step(const Table* starts, int64_t b) { return at(starts, b + 1) - at(starts, b); }

/* They begin with 0 and never decrease: then no difference of two overflows. */
static int check_starts(const Call* call, const char* name, const Table* starts, const char* what) {
    if (at(starts, 0) != 0) {
        return refuse(call->node, "%s of request 0 is " N ": make it 0, the number of %s before it.", name,
                      at(starts, 0), what);
    }
    for (int64_t b = 0; b < call->batch; ++b) {
        if (at(starts, b + 1) < at(starts, b)) {
            return refuse(call->node,
                          "%s decreases at request " N ", from " N " to " N
                          ": make them the numbers of %s of all requests before.",
                          name, b, at(starts, b), at(starts, b + 1), what);
        }
    }
    return 0;
}

static int check_totals(const Call* call) {
    const int64_t* sizes = call->sizes;
    const int64_t rows = at(&call->seqstarts, call->batch), keys = at(&call->kvstarts, call->batch);
    if (sizes[ROWS] >= 0 && rows != sizes[ROWS]) {
        return refuse(call->node,
                      "seqstarts of " N " requests ends with " N ", and %s has " N
                      " rows: give as many rows as all requests have.",
                      call->batch, rows, given(&call->decoding_batches) ? "query" : "current_key", sizes[ROWS]);
    }
    if (sizes[KEYS] >= 0 && keys != sizes[KEYS]) {
        return refuse(call->node,
                      "kvstarts of " N " requests ends with " N ", and key has " N
                      " rows: give as many keys as all requests have.",
                      call->batch, keys, sizes[KEYS]);
    }
    if (given(&call->decoding_batches)) {
        const int64_t first = at(&call->decoding_batches, 0);
        if (first < 0 || first > call->batch) {
            return refuse(call->node,
                          "decoding_batches is " N ", and there are " N " requests: count those in front that decode.",
                          first, call->batch);
        }
    }
    return 0;
}

/* The mask, if it has elements, has a column for each key. */
static int check_mask(const Call* call) {
    const int64_t keys = at(&call->kvstarts, call->batch), columns = call->sizes[MASK_COLUMNS];
    if (columns <= 0 || keys <= columns) return 0;
    return refuse(call->node,
                  "attn_mask has " N " columns, and kvstarts of " N " requests ends with " N
                  ": give a column for each key.",
                  columns, call->batch, keys);
}

static int check_lengths(const Call* call) {
    for (int64_t b = 0; b < call->batch; ++b) {
        const int64_t rows = step(&call->seqstarts, b), keys = step(&call->kvstarts, b), past = at(&call->start_pos, b);
        if (past < 0) {
            return refuse(call->node,
                          "start_pos of request " N " is " N ": give the number of its tokens in the cache.", b, past);
        }
        if (keys - rows != past) {
            return refuse(call->node,
                          "kvstarts has " N " keys for request " N ", and start_pos " N " and " N
                          " rows by seqstarts make them " N ": make them equal.",
                          keys, b, past, rows, (int64_t)((uint64_t)past + (uint64_t)rows));
        }
    }
    return 0;
}

/* A request without pages has one, for all of its keys. */
static int64_t page_of(const Call* call) { return call->sizes[PAGE] > 0 ? call->sizes[PAGE] : INT64_MAX; }

/* The first slots of the pages of request b. */
static const int64_t* pages_of(const Call* call, int64_t b) {
    const int64_t columns = call->cachestarts.ndim == 2 ? call->cachestarts.shape[1] : 1;
    return (const int64_t*)call->cachestarts.data + b * columns;
}

static int refuse_slots(const Call* call, int64_t b, int64_t c, int64_t keys) {
    const int64_t slots = call->sizes[SLOTS], first = pages_of(call, b)[c];
    char column[32] = "";
    if (call->sizes[PAGE] > 0) snprintf(column, sizeof column, ", page " N ",", c);
    if (keys > slots) {
        return refuse(call->node,
                      "kvstarts has " N " keys for request " N ", and cache " N " slots: use a larger cache.",
                      step(&call->kvstarts, b), b, slots);
    }
    return refuse(call->node,
                  "cachestarts of request " N "%s is " N ", and its " N " keys there need slots of cache, which has " N
                  ": give a slot from 0 to " N ".",
                  b, column, first, keys, slots, slots - keys);
}

/* Every slot that a request needs is in the cache; counts the spans of slots that are written. */
static int check_slots(const Call* call, int64_t* written) {
    const int64_t page = page_of(call), slots = call->sizes[SLOTS];
    for (int64_t b = 0; b < call->batch; ++b) {
        const int64_t keys = step(&call->kvstarts, b), past = at(&call->start_pos, b);
        if (keys == 0) continue;
        const int64_t columns = (keys - 1) / page + 1;
        if (call->sizes[PAGE] > 0 && columns > call->cachestarts.shape[1]) {
            return refuse(call->node,
                          "cachestarts has " N " pages of " N " tokens for each request, and kvstarts " N
                          " keys for request " N ": give it " N " pages.",
                          call->cachestarts.shape[1], page, keys, b, columns);
        }
        const int64_t *pages = pages_of(call, b), last = keys - (columns - 1) * page;
        uint64_t signs = 0; /* set by what is negative, or too large; the loop needs no branch */
        for (int64_t c = 0; c + 1 < columns; ++c)
            signs |= (uint64_t)pages[c] | ((uint64_t)(slots - page) - (uint64_t)pages[c]);
        for (int64_t c = 0; signs >> 63 && c + 1 < columns; ++c) {
            if (pages[c] < 0 || pages[c] > slots - page) return refuse_slots(call, b, c, page);
        }
        if (pages[columns - 1] < 0 || pages[columns - 1] > slots - last)
            return refuse_slots(call, b, columns - 1, last);
        if (past < keys) *written += columns - past / page;
    }
    return 0;
}

static int refuse_shared(const Call* call, const Span* one, const Span* other, int writes) {
    const int64_t slot = most(one->begin, other->begin);
    if (one->request == other->request) {
        return refuse(call->node,
                      "cachestarts has two tokens of request " N " in slot " N ": give each slot to one token.",
                      one->request, slot);
    }
    return refuse(call->node,
                  "cachestarts has request " N " write to slot " N ", which request " N
                  " %s: give requests slots of their own; only what nobody writes may be shared.",
                  one->request, slot, other->request, writes ? "writes as well" : "reads");
}

/* A slot that the call writes is that of one token, which nobody else writes or reads. */
static int check_shared(const Call* call, Spans* spans) {
    const int64_t page = page_of(call);
    for (int64_t b = 0; b < call->batch; ++b) {
        const int64_t keys = step(&call->kvstarts, b), past = at(&call->start_pos, b);
        const int64_t* pages = pages_of(call, b);
        if (past >= keys) continue;
        for (int64_t c = past / page; c <= (keys - 1) / page; ++c) {
            add_span(spans, pages[c] + most(past - c * page, 0), pages[c] + least(keys - c * page, page), b, c);
        }
    }
    if (spans->count == 0) return 0;
    sort_spans(spans);
    const Span* twice = overlapping(spans);
    if (twice != NULL) return refuse_shared(call, twice - 1, twice, 1);
    Filter written;
    open_filter(&written, page);
    for (int64_t i = 0; i < spans->count; ++i) mark(&written, spans->items[i]);
    for (int64_t b = 0; b < call->batch; ++b) {
        const int64_t keys = step(&call->kvstarts, b), *pages = pages_of(call, b);
        const int64_t columns = keys > 0 ? (keys - 1) / page + 1 : 0;
        for (int64_t c = 0; c < columns; ++c) {
            const Span read = {pages[c], pages[c] + least(keys - c * page, page), b, c};
            const Span* writer = marked(&written, read) ? meeting(spans, read) : NULL;
            if (writer != NULL) return refuse_shared(call, writer, &read, 0);
        }
    }
    return 0;
}

static int check_call(const Call* call) {
    if (check_starts(call, "seqstarts", &call->seqstarts, "rows")) return -1;
    if (check_starts(call, "kvstarts", &call->kvstarts, "keys")) return -1;
    if (check_totals(call)) return -1;
    if (!given(&call->cachestarts)) return check_mask(call);
    int64_t written = 0;
    if (check_lengths(call) || check_slots(call, &written) || check_mask(call)) return -1;
    Spans spans;
    if (!open_spans(&spans, written)) return refuse(call->node, "there is no memory to check cachestarts in.");
    const int failed = check_shared(call, &spans);
    close_spans(&spans);
    return failed;
}

/* lowering_check_openppl(seqstarts, sizes, node, kvstarts, cachestarts, start_pos, decoding_batches) -> seqstarts
 *
 * int64 tables as the operators have them, the last three or a number in their place. That nobody reads or writes what
 * another one writes costs a sort of the n pages that are written, n^1.3 steps at most, and for each page that is read
 * a look into a filter, where that is filled a search among the n. */
CHECK(check_openppl) {
    (void)self, (void)count;
    const TVMFFIShapeCell* sizes = shape_of(&args[1]);
    Call call = {&args[2],           sizes->data,        table_of(&args[0]), table_of(&args[3]),
                 table_of(&args[4]), table_of(&args[5]), table_of(&args[6]), 0};
    call.batch = call.seqstarts.ndim == 1 ? call.seqstarts.shape[0] - 1 : -1;
    int fits = sizes->size == SIZES && call.batch >= 0 && has(&call.kvstarts, call.batch + 1);
    fits = fits && has(&call.start_pos, call.batch) && (!given(&call.cachestarts) || given(&call.start_pos));
    fits = fits && (!given(&call.cachestarts) || call.cachestarts.shape[0] == call.batch);
    fits = fits && (!given(&call.decoding_batches) || volume(&call.decoding_batches) == 1);
    if (fits && check_call(&call)) return -1;
    return pass(&args[0], result);
}
