/* exp2.h: 2^x and the natural logarithm.
 *
 * vf_exp2 is for the softmax: x is at most a rounding error above 0. It is within 2 ulp, gives exactly 0 for
 * -infinity (and for anything below 2^-126, so that no denormal slows the matmul down), and keeps NaN. */

/* Minimax polynomials for 2^r, 8e-8 off at worst: the sum of the exponentials, and so the LSE, is held to fp32 whatever
 * the element type. */
INLINE vf exp2_polynomial(vf r) {
#if AVX512 /* r in [0, 1) */
    const float c1 = 0x1.62e4bap-1f, c2 = 0x1.ebdb56p-3f, c3 = 0x1.c91ce6p-5f, c4 = 0x1.277856p-7f;
    const float c5 = 0x1.e974fap-10f;
#else /* r in [-1/2, 1/2] */
    const float c1 = 0x1.62e42ap-1f, c2 = 0x1.ebf9bcp-3f, c3 = 0x1.c6b752p-5f, c4 = 0x1.3cea88p-7f;
    const float c5 = 0x1.5bba14p-10f;
#endif
    vf y = vf_fma(vf_set1(c5), r, vf_set1(c4));
    y = vf_fma(y, r, vf_set1(c3));
    y = vf_fma(y, r, vf_set1(c2));
    y = vf_fma(y, r, vf_set1(c1));
    return vf_fma(y, r, vf_set1(1));
}

INLINE vf vf_exp2(vf x) {
#if AVX512
    /* r = x - floor(x), 0 for an infinity; scalef then multiplies by 2^floor(x). */
    vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    return (vf)_mm512_scalef_ps((__m512)exp2_polynomial(r), (__m512)x);
#else
    /* Adding 1.5 * 2^23 leaves round(x) in the last bits; with the exponent's bias added too, those bits are
     * the float 2^round(x) once they are shifted into place. -127 gives the bits of 0. */
    const float shift = 0x1.8p23f + 127;
    x = vf_max(vf_set1(-127), x);
    vf shifted = x + shift;
    vf power = (vf)((vi)shifted << 23);
    return exp2_polynomial(x - (shifted - shift)) * power;
#endif
}

/* ln(x) for a normal x > 0, or infinity or NaN as they are; once per query row, so no need for libm. */
static double natural_log(double x) {
    if (!(x < INF)) return x;
    union {
        double d;
        uint64_t u;
    } bits = {.d = x};
    int exponent = (int)(bits.u >> 52) - 1023;
    bits.u = (bits.u & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    if (bits.d > 1.4142135623730951) bits.d *= 0.5, exponent++;
    /* 2 atanh(s), with |s| < 0.172. */
    double s = (bits.d - 1) / (bits.d + 1), t = s * s;
    double series = 1 + t * (1. / 3 + t * (1. / 5 + t * (1. / 7 + t * (1. / 9 + t * (1. / 11 + t / 13)))));
    return exponent * 0.6931471805599453 + 2 * s * series;
}
