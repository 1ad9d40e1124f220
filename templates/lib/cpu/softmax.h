/* softmax.h: the online softmax of one panel: every lane is a query, so nothing crosses lanes.
 *
 * P = 2^(S * scale - max), in units of log2. The running maximum never takes a NaN, which instead reaches the
 * row's sum through 2^NaN. A row that has met no key yet has maximum -infinity and must not subtract it.
 *
 * Scores that may be far from zero (PROGRAM_FAR) come in natural units, in which maxima stay: by log2(e) the least
 * number of a dtype overflows. */

/* Two rows of weights as one row of bf16 pairs. */
#if PAIRS
INLINE vf pair_weights(vf even, vf odd) {
    const __m512i interleave = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
        16, 0);
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return (vf)_mm512_permutexvar_epi16(interleave, (__m512i)both);
}
#endif

/* What is left of the scale when its sign is folded into Q (which is 0 if the scale is). */
INLINE float scale_magnitude(float score_scale) {
    return score_scale > 0 ? score_scale : score_scale < 0 ? -score_scale : 1;
}

/* Replaces the scores of masked pairs in the rows [from, to) of s, whose first row is `key`. */
INLINE void mask_scores(float *s, int from, int to, const ForwardArgs *args, int64_t query, int64_t key,
                        const int vectors) {
    for (int j = from; j < to; j++)
        UNROLL for (int x = 0; x < vectors; x++) {
            float *at = s + j * PANEL + x * LANES;
            vf_store(at, vf_select(visible(args, query + x * LANES, key + j), vf_load(at), vf_set1(-INF)));
        }
}

/* What takes maxima to units of log2, and to natural ones. */
#define MAXIMUM_LOG2 (PROGRAM_FAR ? LOG2E : 1)
#define MAXIMUM_LN (PROGRAM_FAR ? 1 : 0.6931471805599453)

/* 2^x of a difference of maxima, or of a score and a maximum. */
INLINE vf exp2_of(vf difference) { return vf_exp2(PROGRAM_FAR ? difference * vf_set1(LOG2E) : difference); }

/* A score less its row's maximum, in the units of maxima. The product is rounded before the subtraction, as the maximum
 * was: no difference can exceed 0. */
INLINE vf less_maximum(vf score, vf scale, vf maximum) {
    return PROGRAM_FAR ? score - maximum : vf_fma(score, scale, vf_set1(0)) - maximum;
}

/* A weight behind the sum, 0 where its score, which lies at `at`, is dropped. */
#if DROPOUT
#define KEPT_WEIGHT(weight, at) vf_select(*(const vi *)KEPT(at), weight, vf_set1(0))
#else
#define KEPT_WEIGHT(weight, at) (weight)
#endif

/* Turns n rows of scores into weights in place, updates the maximum and the sum of each query, and sets alpha to
 * the factor for what was accumulated before. The scale (> 0) is applied here and not to Q: sums of unscaled
 * products are often exact, and then so is the maximum. */
INLINE void softmax_block(float *s, int n, float *maximum, float *sum, float *alpha, float score_scale,
                          const int vectors) {
    vf top[UNROLL_Q], other[UNROLL_Q], total[UNROLL_Q];
    UNROLL for (int x = 0; x < vectors; x++) top[x] = other[x] = vf_set1(-INF), total[x] = vf_set1(0);
    int j = 0;
    for (; j + 1 < n; j += 2)  /* two chains, for the latency */
        UNROLL for (int x = 0; x < vectors; x++) {
            top[x] = vf_max(vf_load(s + j * PANEL + x * LANES), top[x]);
            other[x] = vf_max(vf_load(s + (j + 1) * PANEL + x * LANES), other[x]);
        }
    UNROLL for (int x = 0; x < vectors; x++) {
        if (j < n) top[x] = vf_max(vf_load(s + j * PANEL + x * LANES), top[x]);
        top[x] = vf_max(top[x], other[x]);
    }
    UNROLL for (int x = 0; x < vectors; x++) {
        vf before = vf_load(maximum + x * LANES);
        if (!PROGRAM_FAR) top[x] *= score_scale;
        vf now = vf_max(top[x], before);
        vf_store(maximum + x * LANES, now);
        top[x] = vf_select(now == -INF, vf_set1(0), now);
        vf_store(alpha + x * LANES, exp2_of(before - top[x]));
    }
    const vf scale = vf_set1(score_scale), zero = vf_set1(0);
#if PAIRS
    for (j = 0; j + 1 < n; j += 2)
        UNROLL for (int x = 0; x < vectors; x++) {
            float *at = s + j * PANEL + x * LANES;
            vf even = exp2_of(less_maximum(vf_load(at), scale, top[x]));
            vf odd = exp2_of(less_maximum(vf_load(at + PANEL), scale, top[x]));
            total[x] += even + odd;
            vf_store(s + j / 2 * PANEL + x * LANES, pair_weights(KEPT_WEIGHT(even, at), KEPT_WEIGHT(odd, at + PANEL)));
        }
    if (j < n)
        UNROLL for (int x = 0; x < vectors; x++) {
            vf even = exp2_of(less_maximum(vf_load(s + j * PANEL + x * LANES), scale, top[x]));
            total[x] += even;
            even = KEPT_WEIGHT(even, s + j * PANEL + x * LANES);
            vf_store(s + j / 2 * PANEL + x * LANES, pair_weights(even, zero));
        }
    /* AMX multiplies whole tiles of keys. */
    for (j = ROUND_UP(n, 2); j < ROUND_UP(n, KV_ALIGN); j += 2)
        UNROLL for (int x = 0; x < vectors; x++) vf_store(s + j / 2 * PANEL + x * LANES, zero);
#else
    /* Weights that are alike round alike, so few are added at a time. */
    for (int first = 0; first < n; first += 32) {
        vf some[UNROLL_Q];
        UNROLL for (int x = 0; x < vectors; x++) some[x] = zero;
        const int end = first + 32 < n ? first + 32 : n;
        for (j = first; j < end; j++)
            UNROLL for (int x = 0; x < vectors; x++) {
                float *at = s + j * PANEL + x * LANES;
                vf weight = exp2_of(less_maximum(vf_load(at), scale, top[x]));
                some[x] += weight;
                vf_store(at, KEPT_WEIGHT(weight, at));
            }
        UNROLL for (int x = 0; x < vectors; x++) total[x] += some[x];
    }
#endif
    UNROLL for (int x = 0; x < vectors; x++) {
        float *at = sum + x * LANES;
        vf_store(at, vf_fma(vf_load(at), vf_load(alpha + x * LANES), total[x]));
    }
}
