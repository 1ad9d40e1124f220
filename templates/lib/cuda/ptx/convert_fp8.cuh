// OCP FP8 in packs of four bytes: conversion by the instruction of sm_89 and newer, and NaN.

// Four fp32 values rounded to e4m3, to nearest even, the first in the lowest byte. What is larger than 448 becomes 448;
// NaN stays NaN.
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
    u32 r;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}" : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
    return r;
}

// Of four e4m3, the highest bit of each byte that is NaN.
__device__ __forceinline__ u32 nan_bytes(u32 x) { return ((x & 0x7f7f7f7f) + 0x01010101) & 0x80808080; }
