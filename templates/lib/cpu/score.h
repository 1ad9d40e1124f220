/* score.h: what the statements of a score program call. One score at a time and without branches, so that the compiler
 * can turn the loop over the lanes into vectors.
 *
 * Ints round down when divided, and what has no value has one all the same: x / 0 is 0, x % 0 is x. An index beyond an
 * axis reads the nearest element. */

#if PROGRAM_LONG
#define FT_INLINE static __attribute__((unused))
#else
#define FT_INLINE static inline __attribute__((always_inline, unused))
#endif
#define FT_INF __builtin_inff()
#define FT_NAN __builtin_nanf("")

/* What the host passes of a side tensor, a run-time scalar, and the tables of both. */
@{ side_tensor }@
typedef union {
    int64_t i;
    float f;
} SideScalar;

@{ side_args }@
typedef union {
    float f;
    uint32_t u;
} ft_bits;

FT_INLINE int32_t ft_clamp32(int32_t i, int32_t length) { return i < 0 ? 0 : i < length ? i : length - 1; }
FT_INLINE int64_t ft_clamp64(int64_t i, int32_t length) { return i < 0 ? 0 : i < length ? i : length - 1; }

FT_INLINE int64_t ft_floor_div64(int64_t a, int64_t b) {
    if (b == 0) return 0;
    if (b == -1) return (int64_t)(0 - (uint64_t)a);
    return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
}
FT_INLINE int64_t ft_floor_mod64(int64_t a, int64_t b) {
    if (b == 0) return a;
    if (b == -1) return 0;
    int64_t rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
/* The smallest number divided by -1 does not fit in 32 bits: the wider one is called then. */
FT_INLINE int32_t ft_floor_div32(int32_t a, int32_t b) {
    int32_t by = b == 0 || b == -1 ? 1 : b, quotient = a / by, rest = a % by;
    quotient -= rest != 0 && (rest < 0) != (by < 0);
    return b == 0 ? 0 : b == -1 ? (int32_t)(0 - (uint32_t)a) : quotient;
}
FT_INLINE int32_t ft_floor_mod32(int32_t a, int32_t b) {
    int32_t by = b == 0 || b == -1 ? 1 : b, rest = a % by;
    rest += rest != 0 && (rest < 0) != (by < 0) ? by : 0;
    return b == 0 ? a : rest;
}

FT_INLINE float ft_minf(float a, float b) { return (b < a) | (a != a) ? b : a; }
FT_INLINE float ft_maxf(float a, float b) { return (b > a) | (a != a) ? b : a; }
FT_INLINE float ft_absf(float x) { return (ft_bits){.u = (ft_bits){.f = x}.u & 0x7fffffff}.f; }

FT_INLINE float ft_from_bf16(uint16_t x) { return (ft_bits){.u = (uint32_t)x << 16}.f; }
FT_INLINE float ft_from_f16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = (uint32_t)(x & 0x7fff) << 13;
    ft_bits finite = {.f = (ft_bits){.u = rest}.f * 0x1p112f};
    return (ft_bits){.u = sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : finite.u)}.f;
}

/* 2^x within 3 ulp, denormal results, infinities and NaN included. */
FT_INLINE float ft_exp2f(float x) {
    float y = x < 150 ? x : 150;
    y = y > -160 ? y : -160;
    float whole = (y + 0x1.8p23f) - 0x1.8p23f, r = y - whole;
    float p = 0x1.5bba14p-10f;
    p = p * r + 0x1.3cea88p-7f;
    p = p * r + 0x1.c6b752p-5f;
    p = p * r + 0x1.ebf9bcp-3f;
    p = p * r + 0x1.62e42ap-1f;
    p = p * r + 1;
    /* In two steps, since 2^whole alone may not be a number. */
    int32_t n = (int32_t)whole, half = n >> 1;
    float a = (ft_bits){.u = (uint32_t)(half + 127) << 23}.f, b = (ft_bits){.u = (uint32_t)(n - half + 127) << 23}.f;
    float result = p * a * b;
    return x != x ? x : result;
}

/* The logarithm in base 2 within 3 ulp or 2^-24, whichever is more: -infinity for 0, NaN below. */
FT_INLINE float ft_log2f(float x) {
    int32_t tiny = x < 0x1p-126f;
    uint32_t u = (ft_bits){.f = tiny ? x * 0x1p24f : x}.u;
    int32_t above = (u & 0x7fffff) > 0x3504f3;
    int32_t exponent = (int32_t)(u >> 23 & 0xff) - 127 + above - (tiny ? 24 : 0);
    float m = (ft_bits){.u = (u & 0x7fffff) | (above ? 0x3f000000u : 0x3f800000u)}.f;
    /* 2 atanh(s) / ln 2, |s| < 0.172. */
    float s = (m - 1) / (m + 1), t = s * s;
    float series = 2.885390082f + t * (0.961796694f + t * (0.577078016f + t * (0.412198583f + t * 0.320598898f)));
    float result = (float)exponent + s * series;
    result = x == 0 ? -FT_INF : result;
    result = x < 0 ? FT_NAN : result;
    return x == FT_INF || x != x ? x : result;
}

/* Within 4 ulp: a series near 0, where 1 - 2 / (e^2x + 1) would lose digits. */
FT_INLINE float ft_tanhf(float x) {
    float t = x * x;
    float series = 0.00359212803657f;
    series = series * t - 0.00886323552990f;
    series = series * t + 0.0218694885361f;
    series = series * t - 0.0539682539683f;
    series = series * t + 0.133333333333f;
    series = series * t - 0.333333333333f;
    float small = x + x * (t * series), a = ft_absf(x);
    float large = 1 - 2 / (ft_exp2f(a * 2.885390082f) + 1);
    large = x < 0 ? -large : large;
    float result = a < 0.4f ? small : large;
    return x != x ? x : result;
}

/* e^x within 3 ulp, denormal results, infinities and NaN included: what is left of x beside a multiple of ln 2, taken
 * off in two steps, as a power of 2. */
FT_INLINE float ft_expf(float x) {
    float y = x < 104 ? x : 104;
    y = y > -110 ? y : -110;
    float whole = (y * 1.442695041f + 0x1.8p23f) - 0x1.8p23f;
    float r = ((y - whole * 0x1.62e4p-1f) - whole * 1.428606820e-6f) * 1.442695041f;
    float p = 0x1.5bba14p-10f;
    p = p * r + 0x1.3cea88p-7f;
    p = p * r + 0x1.c6b752p-5f;
    p = p * r + 0x1.ebf9bcp-3f;
    p = p * r + 0x1.62e42ap-1f;
    p = p * r + 1;
    int32_t n = (int32_t)whole, half = n >> 1;
    float a = (ft_bits){.u = (uint32_t)(half + 127) << 23}.f, b = (ft_bits){.u = (uint32_t)(n - half + 127) << 23}.f;
    float result = p * a * b;
    return x != x ? x : result;
}

/* The natural logarithm within 4 ulp or 2^-24, whichever is more: -infinity for 0, NaN below. */
FT_INLINE float ft_logf(float x) { return ft_log2f(x) * 0.693147181f; }

/* As IEEE 754 rounds it. */
FT_INLINE float ft_sqrtf(float x) { return __builtin_sqrtf(x); }

/* Within 5 ulp; 0 below -88.7, where e^-x is infinite. */
FT_INLINE float ft_sigmoidf(float x) { return 1 / (1 + ft_expf(-x)); }

/* Floats as ints: beyond 64 bits the nearest that there is, 0 for NaN. What is left when the fraction is cut off is a
 * float, too, so comparing it with x says which way that was. */
FT_INLINE int64_t ft_int_trunc(float x) {
    float y = x >= -0x1p63f ? x : x != x ? 0 : -0x1p63f;
    int64_t i = (int64_t)(y < 0x1p63f ? y : 0);
    return y < 0x1p63f ? i : INT64_MAX;
}
FT_INLINE int64_t ft_int_floor(float x) {
    int64_t i = ft_int_trunc(x);
    return i - (((float)i > x) & (x > -0x1p62f));
}
FT_INLINE int64_t ft_int_ceil(float x) {
    int64_t i = ft_int_trunc(x);
    return i + (((float)i < x) & (x < 0x1p62f));
}
FT_INLINE int64_t ft_int_round(float x) {
    /* Adding 2^23 leaves no room for a fraction; larger numbers have none. */
    float a = ft_absf(x), near = (a + 0x1p23f) - 0x1p23f;
    near = a < 0x1p23f ? near : a;
    return ft_int_trunc(x < 0 ? -near : x != x ? 0 : near);
}
