// Approximate functions of the special-function unit.

__device__ __forceinline__ float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float log2_approx(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// x + log2(y) where they nearly cancel: y's exponent and a whole x meet without rounding.
__device__ __forceinline__ float add_log2(float x, float y) {
    if (!(y < FT_INFINITY)) return x + y;  // infinity, or NaN
    const int bits = __float_as_int(y);
    return x + float((bits >> 23) - 127) + log2_approx(__int_as_float((bits & 0x7fffff) | 0x3f800000));
}
__device__ __forceinline__ float reciprocal_approx(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// max(x, y); NaN when one of them is.
__device__ __forceinline__ float max_nan(float x, float y) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}

// exp2 of a value up to 100 on the multiply-add units, for when the special-function unit is the busier one: the
// integer part goes into the exponent, a polynomial of degree 4 (exact at 0, least relative error elsewhere, 2.8e-6:
// sums of equal terms must stay within the bound of the log-sum-exp) takes the rest. Below -125 it gives 2^-125 and not
// less, so scores that must vanish cannot use it.
__device__ __forceinline__ float exp2_multiply_add(float x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    x = max_nan(x, -125.0f);
    const float rounded = x + kRound;
    const float f = x - (rounded - kRound);
    float p = fmaf(0.009582853f, f, 0.055906425f);
    p = fmaf(p, f, 0.240240986f);
    p = fmaf(p, f, 0.693124193f);
    p = fmaf(p, f, 1.0f);
    // A product, where adding to the exponent's bits would make a number of a NaN.
    return p * __int_as_float((__float_as_int(rounded) << 23) + 0x3f800000);
}
