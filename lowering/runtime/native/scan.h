/* Integers of any type: elements, and scans for those outside of bounds. */
#ifndef LOWERING_SCAN_H
#define LOWERING_SCAN_H

#include <stddef.h>
#include <stdint.h>

/* Return whether an element is less than `low` or greater than `last`: then one of the differences has its sign bit
 * set, and the loop needs no branch. Differences wrap around: if an element is so far outside that one difference does,
 * the other one has its sign bit set. */
#define SCAN(type)                                                                                   \
    static inline int outside_##type(const type* data, int64_t count, uint64_t low, uint64_t last) {         \
        uint64_t signs = 0;                                                                            \
        for (int64_t i = 0; i < count; ++i) {                                                          \
            uint64_t value = (uint64_t)(int64_t)data[i];                                               \
            signs |= (value - low) | (last - value);                                                   \
        }                                                                                              \
        return signs >> 63 != 0;                                                                       \
    }
SCAN(int8_t)
SCAN(int16_t)
SCAN(int32_t)
SCAN(int64_t)
SCAN(uint8_t)
SCAN(uint16_t)
SCAN(uint32_t)

static inline int any_outside(const void* data, int bits, int is_signed, int64_t count, int64_t low, int64_t last) {
    uint64_t from = (uint64_t)low, to = (uint64_t)last;
    switch (bits) {
        case 8: return is_signed ? outside_int8_t(data, count, from, to) : outside_uint8_t(data, count, from, to);
        case 16: return is_signed ? outside_int16_t(data, count, from, to) : outside_uint16_t(data, count, from, to);
        case 32: return is_signed ? outside_int32_t(data, count, from, to) : outside_uint32_t(data, count, from, to);
        default: return outside_int64_t(data, count, from, to);
    }
}

/* Return element i. uint64 from 2^63 on comes out negative: it is refused as well. */
static inline int64_t integer_at(const void* data, int bits, int is_signed, int64_t i) {
    switch (bits) {
        case 8: return is_signed ? ((const int8_t*)data)[i] : ((const uint8_t*)data)[i];
        case 16: return is_signed ? ((const int16_t*)data)[i] : ((const uint16_t*)data)[i];
        case 32: return is_signed ? (int64_t)((const int32_t*)data)[i] : (int64_t)((const uint32_t*)data)[i];
        default: return ((const int64_t*)data)[i];
    }
}

#endif
