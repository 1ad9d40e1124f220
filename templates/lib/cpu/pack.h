/* pack.h: Q and O between memory (a query per row) and scratch (a query per lane), and blocks of K and V into
 * compact rows of the words that the matmul broadcasts.
 *
 * A `word` is what one multiply-accumulate takes from one operand: a float, or with PAIRS two bf16 that follow
 * each other along the summed dimension. Scratch holds words in float-sized places whatever they are. */

#if PAIRS
#define WORDS(elements) (((elements) + 1) / 2)
#else
#define WORDS(elements) (elements)
#endif

#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))

/* Rows of Q as the matmul wants them, transposed: to[word][lane], PANEL lanes to a row. Queries from `rows` on
 * do not exist and become 0. Only the sign of the scale is folded in, because that is exact. `temp` is LANES x
 * Q_WORDS. */
INLINE void pack_queries(float *to, const element *q, int64_t stride, int rows, float score_scale, float *temp) {
    const float sign = score_scale > 0 ? 1 : score_scale < 0 ? -1 : 0;
    __builtin_memset(temp, 0, sizeof(float) * LANES * Q_WORDS);
    for (int i = 0; i < (rows < LANES ? rows : LANES); i++) {
        const element *from = q + i * stride;
        float *row = temp + i * Q_WORDS;
#if PAIRS
        element *pair = (element *)row;
        for (int d = 0; d < HEAD_DIM_QK; d++) pair[d] = narrow(widen(from[d]) * sign);
#else
        widen_row(row, from, HEAD_DIM_QK);
        for (int d = 0; d < HEAD_DIM_QK; d++) row[d] *= sign;
#endif
    }
    for (int w = 0; w < Q_WORDS; w += LANES) {
        vf x[LANES];
        UNROLL for (int i = 0; i < LANES; i++) x[i] = vf_load(temp + i * Q_WORDS + w);
        vf_transpose(x);
        UNROLL for (int i = 0; i < LANES; i++) vf_store(to + (w + i) * PANEL, x[i]);
    }
}

/* The reverse for O: from[column][lane], each query scaled by `inverse`, to `rows` rows in memory. */
INLINE void unpack_output(element *o, int64_t stride, int rows, const float *from, vf inverse, float *temp) {
    for (int d = 0; d < O_ROWS; d += LANES) {
        vf x[LANES];
        UNROLL for (int i = 0; i < LANES; i++) x[i] = vf_load(from + (d + i) * PANEL) * inverse;
        vf_transpose(x);
        UNROLL for (int i = 0; i < LANES; i++) vf_store(temp + i * O_ROWS + d, x[i]);
    }
    for (int i = 0; i < (rows < LANES ? rows : LANES); i++) narrow_row(o + i * stride, temp + i * O_ROWS, HEAD_DIM_V);
}

#if !AMX
/* A block of K as float rows. */
INLINE void pack_keys(float *to, const element *k, int64_t stride, int n) {
    for (int j = 0; j < n; j++) widen_row(to + (int64_t)j * HEAD_DIM_QK, k + j * stride, HEAD_DIM_QK);
}
#endif

#if PAIRS && !AMX
/* Elements from a row of K to the next where rows are copied: whole words, the last of which may be half of 0. */
#define K_PITCH (2 * WORDS(HEAD_DIM_QK))
INLINE void copy_key(element *to, const element *k) {
    if (K_PITCH > HEAD_DIM_QK) to[HEAD_DIM_QK] = 0;
    __builtin_memcpy(to, k, sizeof(element) * HEAD_DIM_QK);
}
#endif

#if PAIRS
/* Two rows of V as one row of words. The second may be missing: then it is 0. */
INLINE void join_rows(uint32_t *to, const element *even, const element *odd) {
    if (odd)
        for (int d = 0; d < HEAD_DIM_V; d++) to[d] = even[d] | (uint32_t)odd[d] << 16;
    else
        for (int d = 0; d < HEAD_DIM_V; d++) to[d] = even[d];
}
#endif

#if !AMX
/* A block of V: float rows, or with PAIRS rows of words that join keys j and j + 1. */
INLINE void pack_values(float *to, const element *v, int64_t stride, int n) {
#if PAIRS
    for (int j = 0; j < n; j += 2, v += 2 * stride, to += HEAD_DIM_V)
        join_rows((uint32_t *)to, v, j + 1 < n ? v + stride : 0);
#else
    for (int j = 0; j < n; j++) widen_row(to + (int64_t)j * HEAD_DIM_V, v + j * stride, HEAD_DIM_V);
#endif
}
#endif
