// The vector types of vector_types.h: aligned to their size, to 16 bytes at most.
#pragma once

#define EMU_VECTORS(type, name) \
  struct name##1 { type x; }; \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; }; \
  struct name##3 { type x, y, z; }; \
  struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name##4 { type x, y, z, w; }; \
  inline name##1 make_##name##1(type x) { return {x}; } \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMU_VECTORS(signed char, char)
EMU_VECTORS(unsigned char, uchar)
EMU_VECTORS(short, short)
EMU_VECTORS(unsigned short, ushort)
EMU_VECTORS(int, int)
EMU_VECTORS(unsigned, uint)
EMU_VECTORS(long, long)
EMU_VECTORS(unsigned long, ulong)
EMU_VECTORS(long long, longlong)
EMU_VECTORS(unsigned long long, ulonglong)
EMU_VECTORS(float, float)
EMU_VECTORS(double, double)
#undef EMU_VECTORS

inline float2 __half22float2(half2 a) { return {a.x, a.y}; }
inline float2 __bfloat1622float2(nv_bfloat162 a) { return {a.x, a.y}; }
inline half2 __float22half2_rn(float2 a) { return {a.x, a.y}; }
inline nv_bfloat162 __float22bfloat162_rn(float2 a) { return {a.x, a.y}; }
inline float2 __fmul2_rn(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float2 __fadd2_rn(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
