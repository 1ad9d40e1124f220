/* vec.h: the SIMD vector of this ISA. `vf` holds LANES floats, one query per lane everywhere in this family.
 *
 * Arithmetic is written with the compiler's vector operators. What they cannot say is a builtin for AVX2 and an
 * intrinsic for AVX-512: to read immintrin.h is 0.45 s, a third of a compilation. */

#if AVX512
#define LANES 16
#elif ISA == ISA_avx2
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));

#define INLINE static inline __attribute__((always_inline, unused))

/* Complete unrolling of loops over a register tile, so that its arrays become registers. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

#define INF __builtin_inff()

/* Scratch is 64-byte aligned and every row in it is a whole number of vectors. */
INLINE vf vf_load(const float *p) { return *(const vf *)p; }
INLINE void vf_store(float *p, vf x) { *(vf *)p = x; }

INLINE vf vf_set1(float x) {
#if AVX512
    return (vf)_mm512_set1_ps(x);
#elif ISA == ISA_avx2
    return (vf){x, x, x, x, x, x, x, x};
#else
    return (vf){x, x, x, x};
#endif
}

INLINE vf vf_fma(vf a, vf b, vf c) {
#if AVX512
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif ISA == ISA_avx2 && __has_builtin(__builtin_elementwise_fma) /* clang's */
    return __builtin_elementwise_fma(a, b, c);
#elif ISA == ISA_avx2
    return __builtin_ia32_vfmaddps256(a, b, c);
#else
    return a * b + c;
#endif
}

/* max(a, b), and b where either is NaN. The order of the operands is therefore part of the meaning. */
INLINE vf vf_max(vf a, vf b) {
#if AVX512
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif ISA == ISA_avx2
    return __builtin_ia32_maxps256(a, b);
#else
    vi greater = a > b;
    return (vf)(((vi)a & greater) | ((vi)b & ~greater));
#endif
}

/* 0, 1, 2, ... : the number of each lane. */
INLINE vi vi_lane(void) {
#if LANES == 16
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
    return (vi){0, 1, 2, 3, 4, 5, 6, 7};
#else
    return (vi){0, 1, 2, 3};
#endif
}

INLINE vi vi_set1(int32_t x) {
#if AVX512
    return (vi)_mm512_set1_epi32(x);
#elif ISA == ISA_avx2
    return (vi){x, x, x, x, x, x, x, x};
#else
    return (vi){x, x, x, x};
#endif
}

/* a where the mask is all ones, b where it is zero: bits are chosen, never multiplied. */
INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

/* Interleaves of two vectors: a0 b0 a1 b1 ... of the low, then of the high halves. */
#if LANES == 16
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif

/* Transposes LANES vectors in registers. Each round interleaves the two halves of the matrix, which rotates
 * the bits of an element's (row, column) address by one; after log2(LANES) rounds row and column have swapped. */
INLINE void vf_transpose(vf x[LANES]) {
    UNROLL for (int round = 1; round < LANES; round *= 2) {
        vf y[LANES];
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = ZIP_LOW(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = ZIP_HIGH(x[i], x[i + LANES / 2]);
        }
        UNROLL for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}
