/* store.h: the elements of a KV store, and what each is as a float. Widening is exact.
 *
 * The last vector of a row may be a part of one. */

#if KV == KV_f32
typedef float stored;
#elif KV == KV_f16 || KV == KV_bf16
typedef uint16_t stored;
#elif KV == KV_int8
typedef int8_t stored;
#else
typedef uint8_t stored;
#endif

#if ISA == ISA_generic || KV == KV_f32 || defined(__clang__)
typedef stored stored_vector __attribute__((vector_size(LANES * sizeof(stored))));
#else
typedef char bytes16 __attribute__((vector_size(16)));
typedef int64_t words2 __attribute__((vector_size(16)));
#endif

/* The bits of `n` elements as ints; compilers widen the halves of a vector apart. */
#if KV != KV_f32
INLINE vi stored_bits(const stored *from, const int n) {
#if ISA == ISA_generic
    stored_vector raw;
    __builtin_memcpy(&raw, from, sizeof(stored) * n);
    return __builtin_convertvector(raw, vi);
#elif AVX512 && (KV == KV_f16 || KV == KV_bf16)
    return (vi)_mm512_cvtepu16_epi32(n == LANES ? _mm256_loadu_si256((const __m256i *)from)
                                                : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)from)));
#elif AVX512
    const __m128i raw = n == LANES ? _mm_loadu_si128((const __m128i *)from) : _mm_loadl_epi64((const __m128i *)from);
    return (vi)(KV == KV_int8 ? _mm512_cvtepi8_epi32(raw) : _mm512_cvtepu8_epi32(raw));
#elif defined(__clang__) /* which has no builtins for these, and widens whole vectors */
    (void)n;
    stored_vector raw;
    __builtin_memcpy(&raw, from, sizeof raw);
    return __builtin_convertvector(raw, vi);
#elif KV == KV_f16 || KV == KV_bf16
    (void)n;
    halves8 raw;
    __builtin_memcpy(&raw, from, sizeof raw);
    return __builtin_ia32_pmovzxwd256(raw);
#else
    (void)n;
    int64_t word;
    __builtin_memcpy(&word, from, sizeof word);
    const bytes16 raw = (bytes16)(words2){word, 0};
    return KV == KV_int8 ? __builtin_ia32_pmovsxbd256(raw) : __builtin_ia32_pmovzxbd256(raw);
#endif
}
#endif

#if KV == KV_bf16 && ISA != ISA_generic
/* Twice as many elements as there are lanes, two to a lane. */
INLINE vi stored_pairs(const stored *from) {
    vi pairs;
    __builtin_memcpy(&pairs, from, sizeof pairs);
    return pairs;
}
#endif

/* Floats of `n` elements, LANES or half of them: a constant in every call. Lanes beyond are 0. */
INLINE vf stored_load_even(const stored *from, const int n) {
#if KV == KV_f32 && AVX512
    return (vf)(n == LANES ? _mm512_loadu_ps(from) : _mm512_zextps256_ps512(_mm256_loadu_ps(from)));
#elif KV == KV_f32
    stored_vector raw;
    __builtin_memcpy(&raw, from, sizeof(stored) * n);
    return (vf)raw;
#elif KV == KV_f16 && AVX512
    return (vf)_mm512_cvtph_ps(n == LANES ? _mm256_loadu_si256((const __m256i *)from)
                                          : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)from)));
#elif KV == KV_f16 && ISA == ISA_avx2
    (void)n;
    return widen_halves(from);
#else
    const vi x = stored_bits(from, n);
#if KV == KV_bf16
    return (vf)(x << 16);
#elif KV == KV_int8
    return __builtin_convertvector(x, vf);
#elif KV == KV_e4m3
    /* A subnormal float would cost a hundred cycles: numbers below 2^-6 are made of their 3 bits. Only 0x7f is NaN. */
    vi magnitude = x & 0x7f, sign = (x & 0x80) << 24;
    vf normal = (vf)((magnitude << 20) + (120 << 23)), tiny = __builtin_convertvector(magnitude, vf) * 0x1p-9f;
    vf finite = vf_select(magnitude >= 8, normal, tiny);
    return (vf)(sign | (vi)vf_select(magnitude == 0x7f, (vf)vi_set1(0x7fc00000), finite));
#elif KV == KV_e5m2
    vi magnitude = x & 0x7f, sign = (x & 0x80) << 24;
    vf normal = (vf)((magnitude << 21) + (112 << 23)), tiny = __builtin_convertvector(magnitude, vf) * 0x1p-16f;
    vf finite = vf_select(magnitude >= 4, normal, tiny);
    return (vf)(sign | (vi)vf_select(magnitude >= 0x7c, (vf)((magnitude << 21) | 0x7f800000), finite));
#else /* f16 */
    vi sign = (x & 0x8000) << 16, rest = (x & 0x7fff) << 13;
    vf finite = (vf)rest * 0x1p112f;
    return (vf)(sign | (vi)vf_select(rest >= 0x0f800000, (vf)(rest | 0x7f800000), finite));
#endif
#endif
}

/* The same of any number up to LANES: what is no half of a vector is copied first, for nothing lies behind a row. */
INLINE vf stored_load(const stored *from, const int n) {
    if (n == LANES || n == LANES / 2) return stored_load_even(from, n);
    stored some[LANES] = {0};
    __builtin_memcpy(some, from, sizeof(stored) * n);
    return stored_load_even(some, LANES);
}

/* A row of floats, each times `scale`. */
INLINE void stored_widen(float *to, const stored *from, const int n, float scale) {
    int d = 0;
    for (; d + LANES <= n; d += LANES) {
        vf x = stored_load(from + d, LANES) * scale;
        __builtin_memcpy(to + d, &x, sizeof x);
    }
    if (n % LANES) {
        vf x = stored_load(from + d, n % LANES) * scale;
        __builtin_memcpy(to + d, &x, sizeof(float) * (n % LANES));
    }
}

/* Whether any element of a row is an infinity or NaN, from its bits. */
INLINE int stored_special(const stored *row, int n) {
    int found = 0;
    for (int d = 0; d < n; d++) {
#if KV == KV_f32
        uint32_t u;
        __builtin_memcpy(&u, row + d, 4);
        found |= (u & 0x7f800000) == 0x7f800000;
#elif KV == KV_f16
        found |= (row[d] & 0x7c00) == 0x7c00;
#elif KV == KV_bf16
        found |= (row[d] & 0x7f80) == 0x7f80;
#elif KV == KV_e4m3
        found |= (row[d] & 0x7f) == 0x7f;
#elif KV == KV_e5m2
        found |= (row[d] & 0x7c) == 0x7c;
#endif
    }
    return found;
}
