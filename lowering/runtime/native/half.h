/* Conversions between float16 and float32 for RISC-V without Zfh.
 *
 * LLVM calls these functions by the ABI lp64d, where a float16 is in the low bits of a floating-point register, whose
 * other bits are set. TVM's weak definitions have it in an integer register. C without _Float16 declares it as float. */
#ifndef LOWERING_HALF_H
#define LOWERING_HALF_H

#include <stdint.h>

static inline float float_of_bits(uint32_t bits) {
    union { uint32_t bits; float value; } both = {bits};
    return both.value;
}

static inline uint32_t bits_of_float(float value) {
    union { float value; uint32_t bits; } both = {value};
    return both.bits;
}

__attribute__((visibility("hidden"))) float __extendhfsf2(float boxed) {
    const uint32_t half = bits_of_float(boxed) & 0xFFFF, sign = (half & 0x8000) << 16, magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) return float_of_bits(sign | 0x7F800000 | magnitude << 13);
    const float scaled = float_of_bits(magnitude << 13) * 0x1p112f; /* rebiases the exponent, also of subnormals */
    return float_of_bits(sign | bits_of_float(scaled));
}

/* Round to nearest, ties to even. */
__attribute__((visibility("hidden"))) float __truncsfhf2(float value) {
    const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    uint32_t half;
    if (magnitude > 0x7F800000) half = 0x7E00 | (magnitude >> 13 & 0x3FF);
    else if (magnitude >= 0x47800000) half = 0x7C00; /* 2^16 */
    else if (magnitude < 0x38800000) half = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3F000000; /* subnormal */
    else half = (magnitude + (magnitude >> 13 & 1) + 0xFFF - (112u << 23)) >> 13;
    return float_of_bits(0xFFFF0000 | sign | half);
}

#endif
