/* convert.h: the elements of Q, K, V and O, and their conversion from and to float, a row at a time.
 * Widening is exact; narrowing rounds to nearest even. */

#if DTYPE == DTYPE_f32
typedef float element;
#else
typedef uint16_t element;
#endif

typedef union {
    float f;
    uint32_t u;
} float_bits;

#if DTYPE == DTYPE_bf16
INLINE float widen(element x) { return (float_bits){.u = (uint32_t)x << 16}.f; }

INLINE element narrow(float x) {
    uint32_t u = (float_bits){.f = x}.u;
    uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    uint32_t quiet_nan = u >> 16 | 0x40;  /* rounding could carry a NaN into infinity or zero */
    return (element)((u & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}
#elif DTYPE == DTYPE_f16
/* The bits moved into a float's places, then multiplied by 2^112 to correct the exponent's bias: exact for
 * normal and denormal numbers alike. */
INLINE float widen(element x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = (uint32_t)(x & 0x7fff) << 13;
    float_bits finite = {.f = (float_bits){.u = rest}.f * 0x1p112f};
    uint32_t special = rest | 0x7f800000;
    return (float_bits){.u = sign | (rest >= 0x0f800000 ? special : finite.u)}.f;
}

INLINE element narrow(float x) {
    uint32_t u = (float_bits){.f = x}.u, sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
    /* Denormal halves: adding 0.5 makes the float adder round at their last place, 2^-24. */
    uint32_t tiny = (float_bits){.f = (float_bits){.u = magnitude}.f + 0.5f}.u - 0x3f000000;
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t finite = magnitude < 0x38800000 ? tiny : normal;
    return (element)(sign | (magnitude >= 0x477ff000 ? special : finite));
}
#else
INLINE float widen(element x) { return x; }
INLINE element narrow(float x) { return x; }
#endif

#if AVX512 || ISA == ISA_avx2
/* Eight at once, by what F16C has (vec.h says why these are no intrinsics). */
typedef float floats8 __attribute__((vector_size(32)));
typedef int16_t halves8 __attribute__((vector_size(16)));

INLINE floats8 widen_halves(const uint16_t *from) {
#if defined(__clang__) /* which has no builtin for it from version 22 on */
    typedef _Float16 f16x8 __attribute__((vector_size(16)));
    f16x8 half;
    __builtin_memcpy(&half, from, sizeof half);
    return __builtin_convertvector(half, floats8);
#else
    halves8 half;
    __builtin_memcpy(&half, from, sizeof half);
    return __builtin_ia32_vcvtph2ps256(half);
#endif
}
#endif

INLINE void widen_row(float *to, const element *from, int n) {
#if DTYPE == DTYPE_f16 && (AVX512 || ISA == ISA_avx2)
    const int whole = n & ~7;
    for (int i = 0; i < whole; i += 8) {
        const floats8 x = widen_halves(from + i);
        __builtin_memcpy(to + i, &x, sizeof x);
    }
#else
    const int whole = 0;
#endif
    for (int i = whole; i < n; i++) to[i] = widen(from[i]);
}

INLINE void narrow_row(element *to, const float *from, int n) {
#if DTYPE == DTYPE_f16 && (AVX512 || ISA == ISA_avx2)
    const int whole = n & ~7;
    for (int i = 0; i < whole; i += 8) {
        floats8 x;
        __builtin_memcpy(&x, from + i, sizeof x);
        const halves8 half = __builtin_ia32_vcvtps2ph256(x, 0 /* to nearest even */);
        __builtin_memcpy(to + i, &half, sizeof half);
    }
#else
    const int whole = 0;
#endif
    for (int i = whole; i < n; i++) to[i] = narrow(from[i]);
}

/* Whether an element is an infinity or NaN, from its bits. */
INLINE int is_special(const element *x) {
#if DTYPE == DTYPE_f32
    uint32_t u;
    __builtin_memcpy(&u, x, 4);
    return (u & 0x7f800000) == 0x7f800000;
#elif DTYPE == DTYPE_f16
    return (*x & 0x7c00) == 0x7c00;
#else
    return (*x & 0x7f80) == 0x7f80;
#endif
}
