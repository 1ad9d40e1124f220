/* matmul.h: the two matrix products of attention on one panel of queries, in SIMD registers.
 *
 * Queries lie along the lanes in both: S^T = K Q^T and O^T += V^T P^T. So the operand that comes from memory is
 * always read one word at a time and broadcast, rows of K and of V need no transposing, and every row-wise
 * quantity of the softmax is lane-wise. A register tile holds UNROLL_KV keys (or columns of V) by `vectors`
 * vectors of queries. `vectors` is UNROLL_Q, or 1 for what is left in the last panel; it is a constant in every
 * call. */

#if PAIRS
/* Rows of bf16 are only 2-byte aligned. */
typedef int32_t word __attribute__((aligned(2), may_alias));
INLINE vf broadcast(const word *x) { return (vf)_mm512_set1_epi32(*x); }
INLINE vf multiply_add(vf a, vf b, vf sum) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#else
typedef float word;
INLINE vf broadcast(const word *x) { return vf_set1(*x); }
INLINE vf multiply_add(vf a, vf b, vf sum) { return vf_fma(a, b, sum); }
#endif

/* s[key][query] for n keys. The last register tile repeats the last key rather than read beyond it. */
INLINE void scores(float *s, const word *k, int64_t stride, int n, const float *q, const int vectors) {
    for (int j = 0; j < n; j += UNROLL_KV) {
        const word *row[UNROLL_KV];
        vf sum[UNROLL_KV][UNROLL_Q];
        UNROLL for (int m = 0; m < UNROLL_KV; m++) {
            row[m] = (const word *)((const char *)k + (j + m < n ? j + m : n - 1) * stride);
            UNROLL for (int x = 0; x < vectors; x++) sum[m][x] = vf_set1(0);
        }
        for (int w = 0; w < WORDS(HEAD_DIM_QK); w++) {
            vf query[UNROLL_Q];
            UNROLL for (int x = 0; x < vectors; x++) query[x] = vf_load(q + w * PANEL + x * LANES);
            UNROLL for (int m = 0; m < UNROLL_KV; m++) {
                vf key = broadcast(row[m] + w);
                UNROLL for (int x = 0; x < vectors; x++) sum[m][x] = multiply_add(key, query[x], sum[m][x]);
            }
        }
        UNROLL for (int m = 0; m < UNROLL_KV; m++)
            UNROLL for (int x = 0; x < vectors; x++) vf_store(s + (j + m) * PANEL + x * LANES, sum[m][x]);
    }
}

/* o[column][query] = o * alpha + sum over n keys (rows of words) of V^T P^T, for `columns` columns of V. The
 * sum of a block starts from zero: adding it as a whole rounds less than a running sum over all keys. */
INLINE void weighted_columns(float *o, const float *p, const word *v, int64_t stride, int n, const float *alpha,
                             const int columns, const int vectors) {
    vf sum[UNROLL_KV][UNROLL_Q];
    UNROLL for (int m = 0; m < columns; m++)
        UNROLL for (int x = 0; x < vectors; x++) sum[m][x] = vf_set1(0);
    for (int j = 0; j < n; j++) {
        const word *row = (const word *)((const char *)v + j * stride);
        vf weight[UNROLL_Q];
        UNROLL for (int x = 0; x < vectors; x++) weight[x] = vf_load(p + j * PANEL + x * LANES);
        UNROLL for (int m = 0; m < columns; m++) {
            vf value = broadcast(row + m);
            UNROLL for (int x = 0; x < vectors; x++) sum[m][x] = multiply_add(value, weight[x], sum[m][x]);
        }
    }
    UNROLL for (int m = 0; m < columns; m++)
        UNROLL for (int x = 0; x < vectors; x++) {
            float *to = o + m * PANEL + x * LANES;
            vf_store(to, vf_fma(vf_load(to), vf_load(alpha + x * LANES), sum[m][x]));
        }
}

INLINE void weighted_values(float *o, const float *p, const word *v, int64_t stride, int n, const float *alpha,
                            const int vectors) {
    const int rest = HEAD_DIM_V % UNROLL_KV;
    int d = 0;
    for (; d < HEAD_DIM_V - rest; d += UNROLL_KV)
        weighted_columns(o + d * PANEL, p, v + d, stride, n, alpha, UNROLL_KV, vectors);
    if (rest) weighted_columns(o + d * PANEL, p, v + d, stride, n, alpha, rest, vectors);
}
