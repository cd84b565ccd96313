/* Reads `count` vectors of 64 bytes as fast as one core can: what no kernel that reads them once can beat.
 *
 * How many streams the prefetchers like best differs between machines and sizes, hence the choice of 1 to 16;
 * one stream is also asked for ahead of time. At least eight accumulators hide the additions.
 */
#include <stddef.h>

typedef float vector __attribute__((vector_size(64)));

#define AHEAD 64 /* vectors */

#define READ(STREAMS, UNROLL, PREFETCH)                                                     \
    float read_##STREAMS(const vector *data, size_t count) {                                \
        vector lanes[STREAMS * UNROLL] = {{0}}, total = {0};                                \
        size_t length = count / STREAMS / UNROLL * UNROLL;                                  \
        for (size_t i = 0; i < length; i += UNROLL)                                         \
            for (int s = 0; s < STREAMS; s++)                                               \
                for (int u = 0; u < UNROLL; u++) {                                          \
                    if (PREFETCH) __builtin_prefetch(data + s * length + i + u + AHEAD, 0); \
                    lanes[s * UNROLL + u] += data[s * length + i + u];                      \
                }                                                                           \
        for (int k = 0; k < STREAMS * UNROLL; k++) total += lanes[k];                       \
        return total[0];                                                                    \
    }

READ(1, 8, 1)
READ(2, 4, 0)
READ(4, 2, 0)
READ(8, 1, 0)
READ(16, 1, 0)

/* The same of `count` blocks of so many vectors each, in this order; the next block is asked for ahead of time. */
float read_blocks(const vector *data, const size_t *order, size_t count, size_t vectors) {
    vector lanes[8] = {{0}}, total = {0};
    for (size_t n = 0; n < count; n++) {
        const vector *block = data + order[n] * vectors;
        const vector *next = data + order[n + 1 < count ? n + 1 : n] * vectors;
        for (size_t i = 0; i < vectors; i += 8)
            for (int u = 0; u < 8; u++) {
                __builtin_prefetch(count > 1 ? next + i + u : block + i + u + AHEAD, 0);
                lanes[u] += block[i + u];
            }
    }
    for (int k = 0; k < 8; k++) total += lanes[k];
    return total[0];
}
