// OCP FP8 in packs of four bytes: conversion by the instruction of sm_89 and newer, and NaN.

// Two fp32 values rounded to e4m3, to nearest even, `low` in the lower byte. What is larger than 448 becomes 448; NaN
// stays NaN.
__device__ __forceinline__ u16 pack_e4m3(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}

// Of four e4m3, the highest bit of each byte that is NaN.
__device__ __forceinline__ u32 nan_bytes(u32 x) { return ((x & 0x7f7f7f7f) + 0x01010101) & 0x80808080; }
// The same of four e5m2 that are infinite or NaN.
__device__ __forceinline__ u32 non_finite_bytes_e5m2(u32 x) { return ((x & 0x7c7c7c7c) + 0x04040404) & 0x80808080; }
