/* Check that the tables of a served decoder fit each other, its rows and its cache. */
#include "requests.h"

/* Sizes, in the order of lowering/ops/served/packed_requests.py: rows of the ragged batch, the most tokens of a
 * request, blocks of the cache, tokens of a block, slots of states. And in the order of packed_sources.py: blocks of
 * the cache, rows of a block, and 1 if they are written. */
enum { ROWS, CONTEXT, BLOCKS, TOKENS, SLOTS, SIZES };
enum { SOURCE_BLOCKS, SOURCE_ROWS, SOURCE_WRITTEN, SOURCE_SIZES };

typedef struct {
    const Node* node;
    const int64_t* sizes;
    Table row_starts, past_lengths, block_table, state_slots;
    int64_t requests, columns;
} Call;

/* The blocks of a cache that requests own. The names of table, cache and unit are for errors; tokens is the number of
 * units of a block. */
typedef struct {
    const char *table_name, *cache_name, *unit;
    const Table* table;
    int64_t columns, blocks, tokens;
} Pages;

static int64_t rows_of(const Call* call, int64_t r) { return at(&call->row_starts, r + 1) - at(&call->row_starts, r); }

static int check_starts(const Call* call) {
    const int64_t rows = at(&call->row_starts, call->requests);
    if (at(&call->row_starts, 0) != 0) {
        return reject("requests.starts_not_zero", call->node,
                      "row_starts of request 0 is " N ": make it 0, its first row.", at(&call->row_starts, 0));
    }
    for (int64_t r = 0; r < call->requests; ++r) {
        if (at(&call->row_starts, r + 1) < at(&call->row_starts, r)) {
            return reject("requests.starts_decreasing", call->node,
                          "row_starts decreases at request " N ", from " N " to " N
                          ": give the cumulative numbers of tokens.",
                          r, at(&call->row_starts, r), at(&call->row_starts, r + 1));
        }
    }
    if (rows == 0 && call->requests > 0) {
        return reject("requests.tokens_missing", call->node,
                      "row_starts gives none of " N " requests a token: call only with requests that have tokens.",
                      call->requests);
    }
    if (rows == call->sizes[ROWS]) return 0;
    return reject("requests.row_count_mismatch", call->node,
                  "row_starts of " N " requests ends with " N ", and there are " N
                  " token ids: give as many as all requests have.",
                  call->requests, rows, call->sizes[ROWS]);
}

static int check_lengths(const Call* call) {
    for (int64_t r = 0; r < call->requests; ++r) {
        const int64_t past = at(&call->past_lengths, r), rows = rows_of(call, r);
        if (past >= 0 && past <= call->sizes[CONTEXT] - rows) continue;
        return reject("requests.past_length_out_of_range", call->node,
                      "past_lengths of request " N " is " N ", and its " N
                      " new tokens follow: keep their sum from 0 to " N ".",
                      r, past, rows, call->sizes[CONTEXT]);
    }
    return 0;
}

/* Check that every block that a request of that length needs is in its table, and in the cache. */
static int check_pages(const Node* node, const Pages* pages, int64_t r, int64_t length) {
    const int64_t columns = length / pages->tokens + (length % pages->tokens != 0);
    if (columns > pages->columns) {
        return reject("requests.table_too_small", node,
                      "%s has " N " blocks of " N " %s for each request, and request " N " has " N
                      " %s: give it " N " blocks.",
                      pages->table_name, pages->columns, pages->tokens, pages->unit, r, length, pages->unit, columns);
    }
    for (int64_t c = 0; c < columns; ++c) {
        const int64_t block = at(pages->table, r * pages->columns + c);
        if (block >= 0 && block < pages->blocks) continue;
        return reject("requests.block_out_of_range", node,
                      "%s of request " N ", column " N " is " N ", and %s has " N
                      " blocks: give a block from 0 to " N ".",
                      pages->table_name, r, c, block, pages->cache_name, pages->blocks, pages->blocks - 1);
    }
    return 0;
}

/* Check the blocks of all requests. written is the number of columns that the call writes to. */
static int check_blocks(const Call* call, int64_t* written) {
    const int64_t tokens = call->sizes[TOKENS];
    const Pages pages = {"block_table", "kv_cache", "tokens", &call->block_table, call->columns, call->sizes[BLOCKS],
                         tokens};
    for (int64_t r = 0; r < call->requests; ++r) {
        const int64_t past = at(&call->past_lengths, r), rows = rows_of(call, r);
        if (check_pages(call->node, &pages, r, past + rows)) return -1;
        if (rows > 0) *written += (past + rows + tokens - 1) / tokens - past / tokens;
    }
    return 0;
}

/* Check that a block that the call writes belongs to one request, once in its table, and is not read by others. */
static int check_shared(const Call* call, Spans* spans) {
    const int64_t tokens = call->sizes[TOKENS];
    for (int64_t r = 0; r < call->requests; ++r) {
        const int64_t past = at(&call->past_lengths, r), rows = rows_of(call, r);
        for (int64_t c = past / tokens; rows > 0 && c <= (past + rows - 1) / tokens; ++c) {
            const int64_t block = at(&call->block_table, r * call->columns + c);
            add_span(spans, block, block + 1, r, c);
        }
    }
    if (spans->count == 0) return 0;
    sort_spans(spans);
    const Span* duplicate = find_neighbor_overlap(spans);
    if (duplicate != NULL) {
        return reject("requests.block_written_twice", call->node,
                      "block_table has request " N " and request " N " write to block " N
                      ": give each, and each column, a block of its own.",
                      (duplicate - 1)->request, duplicate->request, duplicate->begin);
    }
    Filter written;
    open_filter(&written, 1);
    for (int64_t i = 0; i < spans->count; ++i) mark(&written, spans->items[i]);
    for (int64_t r = 0; r < call->requests; ++r) {
        const int64_t columns = (at(&call->past_lengths, r) + rows_of(call, r) + tokens - 1) / tokens;
        for (int64_t c = 0; c < columns; ++c) {
            const int64_t block = at(&call->block_table, r * call->columns + c);
            const Span read = {block, block + 1, r, c};
            const Span* writer = is_marked(&written, read) ? find_overlap(spans, read) : NULL;
            if (writer == NULL) continue;
            return reject("requests.block_shared", call->node,
                          "block_table has request " N " write to block " N ", which request " N
                          " reads in column " N ": share only blocks that no request writes.",
                          writer->request, block, r, c);
        }
    }
    return 0;
}

/* Check that blocks exist, and that requests do not conflict. */
static int check_cache(const Call* call) {
    int64_t written = 0;
    if (check_blocks(call, &written)) return -1;
    Spans spans;
    if (!open_spans(&spans, call->node, written)) {
        return reject("run.out_of_memory", call->node,
                      "the memory to check block_table is exhausted: free memory, and call again.");
    }
    const int failed = check_shared(call, &spans);
    close_spans(&spans);
    return failed;
}

/* Check that every request with rows has a valid slot of states, and that no other request has it. */
static int check_slots(const Call* call) {
    Spans spans;
    if (!open_spans(&spans, call->node, call->requests)) {
        return reject("run.out_of_memory", call->node,
                      "the memory to check state_slots is exhausted: free memory, and call again.");
    }
    int failed = 0;
    for (int64_t r = 0; r < call->requests && !failed; ++r) {
        const int64_t slot = at(&call->state_slots, r);
        if (rows_of(call, r) == 0) continue;
        if (slot < 0 || slot >= call->sizes[SLOTS]) {
            failed = reject("requests.state_slot_out_of_range", call->node,
                            "state_slots of request " N " is " N ", and states have " N
                            " slots: give a slot from 0 to " N ".",
                            r, slot, call->sizes[SLOTS], call->sizes[SLOTS] - 1);
        } else {
            add_span(&spans, slot, slot + 1, r, 0);
        }
    }
    sort_spans(&spans);
    const Span* duplicate = failed ? NULL : find_neighbor_overlap(&spans);
    if (duplicate != NULL) {
        failed = reject("requests.state_slot_shared", call->node,
                        "state_slots has request " N " and request " N " share slot " N
                        ": give each a slot of its own.",
                        (duplicate - 1)->request, duplicate->request, duplicate->begin);
    }
    close_spans(&spans);
    return failed;
}

/* lowering_check_served(row_starts, sizes, node, past_lengths, block_table, state_slots) -> row_starts
 *
 * int64 [R + 1], [R], [R, M] and [R]; the last two exist if there are caches, and states. The cost is a lookup of each
 * used block, and a sort of the written blocks, and of the slots. */
CHECK_REQUESTS(served) {
    const Table* tables = requests->tables;
    Call call = {requests->node, requests->sizes, tables[0], tables[1], tables[2], tables[3], 0, 0};
    call.requests = call.past_lengths.ndim == 1 ? call.past_lengths.shape[0] : -1;
    const int has_cache = is_given(&call.block_table), has_states = is_given(&call.state_slots);
    int fits = requests->size_count == SIZES && call.requests >= 0 && has_size(&call.row_starts, call.requests + 1);
    fits = fits && has_size(&call.state_slots, call.requests);
    fits = fits && (!has_cache || (call.block_table.ndim == 2 && call.block_table.shape[0] == call.requests));
    if (!fits) return 0;
    call.columns = has_cache ? call.block_table.shape[1] : 0;
    int failed = check_starts(&call) || check_lengths(&call);
    failed = failed || (has_cache && check_cache(&call)) || (has_states && check_slots(&call));
    return failed ? -1 : 0;
}

/* Check that blocks of sources that a call writes are distinct. All requests have as many as their lengths need. */
static int check_written(const Node* node, const Pages* pages, const Table* lengths) {
    int64_t blocks = 0;
    for (int64_t r = 0; r < lengths->shape[0]; ++r) blocks += (at(lengths, r) + pages->tokens - 1) / pages->tokens;
    Spans spans;
    if (!open_spans(&spans, node, blocks)) {
        return reject("run.out_of_memory", node,
                      "the memory to check %s is exhausted: free memory, and call again.", pages->table_name);
    }
    for (int64_t r = 0; r < lengths->shape[0]; ++r) {
        for (int64_t c = 0; c * pages->tokens < at(lengths, r); ++c) {
            const int64_t block = at(pages->table, r * pages->columns + c);
            add_span(&spans, block, block + 1, r, c);
        }
    }
    sort_spans(&spans);
    const Span* duplicate = find_neighbor_overlap(&spans);
    const int failed = duplicate == NULL
                           ? 0
                           : reject("requests.block_written_twice", node,
                                    "%s has request " N " and request " N " write to block " N
                                    ": give each, and each column, a block of its own.",
                                    pages->table_name, (duplicate - 1)->request, duplicate->request, duplicate->begin);
    close_spans(&spans);
    return failed;
}

/* lowering_check_sources(source_lengths, sizes, node, source_table) -> source_lengths
 *
 * int64 [R] and [R, M]. The cost is a lookup of each used block, and a sort of the written blocks. */
CHECK_REQUESTS(sources) {
    const int64_t* sizes = requests->sizes;
    const Table lengths = requests->tables[0], table = requests->tables[1];
    const int fits = requests->size_count == SOURCE_SIZES && lengths.ndim == 1 && table.ndim == 2;
    if (!fits || table.shape[0] != lengths.shape[0]) return 0;
    const Pages pages = {"source_table", "source_cache", "rows", &table, table.shape[1], sizes[SOURCE_BLOCKS],
                         sizes[SOURCE_ROWS]};
    for (int64_t r = 0; r < lengths.shape[0]; ++r) {
        const int64_t length = at(&lengths, r);
        if (length < 0) {
            return reject("requests.source_length_negative", requests->node,
                          "source_lengths of request " N " is " N ": make it the number of its source's rows.", r,
                          length);
        }
        if (check_pages(requests->node, &pages, r, length)) return -1;
    }
    if (sizes[SOURCE_WRITTEN] && check_written(requests->node, &pages, &lengths)) return -1;
    return 0;
}
