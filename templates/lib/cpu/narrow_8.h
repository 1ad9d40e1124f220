/* narrow_8.h: floats to 8-bit floats: rounded to nearest even, beyond the largest finite value that value; NaN is all
 * ones behind the sign. */

/* Adding 2^(23 - subnormal) makes the float adder round at the last place of subnormal numbers, 2^-subnormal; others
 * are rounded in their integer. */
INLINE uint8_t narrow_8(float x, float largest, uint32_t bias, uint32_t mantissa, uint32_t subnormal) {
    uint32_t bits = (float_bits){.f = x}.u, magnitude = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
    if (magnitude > 0x7f800000) return (uint8_t)(sign | 0x7f);
    float bounded = (float_bits){.u = magnitude}.f < largest ? (float_bits){.u = magnitude}.f : largest;
    uint32_t u = (float_bits){.f = bounded}.u, rebias = (127 - bias) << 23, dropped = 23 - mantissa;
    uint32_t shift = (127 + 23 - subnormal) << 23;
    if (u < rebias + (1u << 23))
        return (uint8_t)(sign | ((float_bits){.f = bounded + (float_bits){.u = shift}.f}.u - shift));
    return (uint8_t)(sign | ((u - rebias + ((1u << (dropped - 1)) - 1) + (u >> dropped & 1)) >> dropped));
}
