// Conversion to OCP FP8 by the instruction of sm_89 and newer.

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
