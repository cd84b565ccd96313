/* Tables of integers, errors, and spans of slots for the checks of serving operators.
 *
 * A check reads integer tables by request, and never caches: its cost grows with the table entries that a call uses.
 * Tables whose shapes do not match are left to the shape assertions. */
#ifndef LOWERING_REQUESTS_H
#define LOWERING_REQUESTS_H

#ifdef LOWERING_C_CODE
#include "requests_model.h"
#else
#include "requests_packed.h"
#endif

/* -- tables ------------------------------------------------------------------------------------------------------- */

static inline int is_given(const Table* table) { return table->shape != NULL || table->data != NULL; }

static inline int64_t at(const Table* table, int64_t i) {
    return table->narrow ? (int64_t)((const int32_t*)table->data)[i] : ((const int64_t*)table->data)[i];
}

static inline int64_t volume(const Table* table) {
    int64_t count = 1;
    for (int axis = 0; axis < table->ndim; ++axis) count *= table->shape[axis];
    return count;
}

/* Return whether the table has one axis of that size, or is not given. */
static inline int has_size(const Table* table, int64_t size) {
    return !is_given(table) || (table->ndim == 1 && table->shape[0] == size);
}

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* -- spans of slots ----------------------------------------------------------------------------------------------- */

/* Slots `begin` to `end` - 1 of a request. column distinguishes its spans: a column of its table, or a beam. */
typedef struct {
    int64_t begin, end, request, column;
} Span;

/* emission/runtime_checks.py provides so much memory. */
_Static_assert(sizeof(Span) == 32, "bytes of a span");

enum { SPANS_INSIDE = 128 };

/* A list of spans. It needs memory if there are more spans than a typical generation step has. */
typedef struct {
    Span* items;
    int64_t count;
    Span inside[SPANS_INSIDE];
} Spans;

/* Allocate room for `capacity` spans. Return 0 if memory is exhausted. */
static inline int open_spans(Spans* spans, const Node* node, int64_t capacity) {
    spans->count = 0;
    spans->items = capacity <= SPANS_INSIDE ? spans->inside : allocate_memory(node, capacity * (int64_t)sizeof(Span));
    return spans->items != NULL;
}

static inline void close_spans(Spans* spans) {
    if (spans->items != spans->inside) release_memory(spans->items);
}

static inline void add_span(Spans* spans, int64_t begin, int64_t end, int64_t request, int64_t column) {
    spans->items[spans->count++] = (Span){begin, end, request, column};
}

/* Sort n spans by `begin`, in place, in at most n^1.3 steps, or n if they are already sorted. */
static inline void sort_spans(Spans* spans) {
    int64_t gap = 1;
    while (gap < spans->count / 3) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3) {
        for (int64_t i = gap; i < spans->count; ++i) {
            const Span span = spans->items[i];
            int64_t j = i;
            for (; j >= gap && spans->items[j - gap].begin > span.begin; j -= gap) {
                spans->items[j] = spans->items[j - gap];
            }
            spans->items[j] = span;
        }
    }
}

/* Return the second of two neighbors that overlap, among sorted spans; NULL if none do. If any two spans overlap, two
 * neighbors do. */
static inline const Span* find_neighbor_overlap(const Spans* spans) {
    for (int64_t i = 1; i < spans->count; ++i) {
        if (spans->items[i].begin < spans->items[i - 1].end) return &spans->items[i];
    }
    return NULL;
}

/* Return the first of the sorted, disjoint spans that overlaps this one and has another column or request, or NULL. It
 * takes log n steps. */
static inline const Span* find_overlap(const Spans* spans, Span span) {
    int64_t low = 0, high = spans->count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (spans->items[middle].end <= span.begin) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    for (; low < spans->count && spans->items[low].begin < span.end; ++low) {
        const Span* other = &spans->items[low];
        if (other->request != span.request || other->column != span.column) return other;
    }
    return NULL;
}

/* -- a filter of slots -------------------------------------------------------------------------------------------- */

/* Cells of 2^shift slots that contain a marked slot, by cell number modulo CELLS. The filter separates most pages that
 * are read from those that are written, without a search. */
enum { CELLS = 4096 };

typedef struct {
    uint64_t bits[CELLS / 64];
    int shift;
} Filter;

/* Clear the filter, for pages of that size: each page has slots in at most three cells. */
static inline void open_filter(Filter* filter, int64_t page) {
    for (int k = 0; k < CELLS / 64; ++k) filter->bits[k] = 0;
    filter->shift = 63 - __builtin_clzll((uint64_t)page);
}

static inline void mark(Filter* filter, Span span) {
    for (int64_t cell = span.begin >> filter->shift; cell <= (span.end - 1) >> filter->shift; ++cell) {
        filter->bits[cell / 64 % (CELLS / 64)] |= UINT64_C(1) << (cell % 64);
    }
}

static inline int is_marked(const Filter* filter, Span span) {
    uint64_t bits = 0;
    for (int64_t cell = span.begin >> filter->shift; cell <= (span.end - 1) >> filter->shift; ++cell) {
        bits |= filter->bits[cell / 64 % (CELLS / 64)] >> (cell % 64) & 1;
    }
    return bits != 0;
}

#endif
