// Elements of a KV store that are narrower than those of the queries, and what each is as a float: exact, in arithmetic
// that every GPU has.

// OCP FP8, sign, 4 bits of exponent and 3 of mantissa. All ones is NaN, there are no infinities.
struct e4m3 { u8 bits; };
// OCP FP8, the upper byte of an f16.
struct e5m2 { u8 bits; };
// Two's complement.
struct int8 { signed char bits; };

__device__ __forceinline__ float to_float(e4m3 x) {
    // Exponent and mantissa lie as a float's do, but for a bias that is less by 120; so do subnormal numbers.
    const u32 magnitude = x.bits & 0x7f;
    const float value = __uint_as_float(magnitude << 20) * 0x1p120f;
    const u32 bits = magnitude == 0x7f ? 0x7fffffff : __float_as_uint(value);
    return __uint_as_float(bits | u32(x.bits & 0x80) << 24);
}
__device__ __forceinline__ float to_float(e5m2 x) { return to_float(f16{u16(x.bits << 8)}); }
__device__ __forceinline__ float to_float(int8 x) { return float(x.bits); }
