/* few_products.h: the two matrix products of a few rows, on rows of keys where they lie in the store.
 *
 * The columns of K and V lie along the lanes, as they do in the store. LANES sums of products make one vector of
 * scores: `width` rows by LANES / width keys, row by row. Two bf16 share a lane, and none is moved for that: they are
 * multiplied in pairs (of columns, in V of keys), or odd columns lie apart from even ones, in Q and O as well. */

#define SPLIT_BF16 (KV == KV_bf16 && !PAIRS && ISA != ISA_generic)
#if PAIRS
#define STEP (2 * LANES)  /* columns of V that are multiplied together */
#define UNIT (2 * LANES)  /* columns of K and V that are loaded together */
typedef element few_element;
/* Weights of two keys, or of one, where scores were. */
typedef int32_t weight_pair __attribute__((may_alias));
typedef element weight_element __attribute__((may_alias));
#else
#define STEP (SPLIT_BF16 ? 2 * LANES : LANES)
#define UNIT LANES
typedef float few_element;
#endif
#define UNIT_VECTORS (UNIT / LANES)
#define FEW_Q ROUND_UP(HEAD_DIM_QK, UNIT)
#define FEW_O ROUND_UP(HEAD_DIM_V, UNIT)
#define WIDEST (LANES == 16 ? 8 : 4)    /* rows that are multiplied together */
#define ACCUMULATORS (AVX512 ? 16 : 8)  /* vectors of O that stay in registers */

/* Rows that are multiplied together where there are so many. */
INLINE int width_of(int rows) { return rows == 1 ? 1 : rows == 2 ? 2 : rows <= 4 || WIDEST == 4 ? 4 : 8; }

/* Where column d lies in a row of O. */
INLINE int column_of(int d) {
#if PAIRS
    return d / UNIT * UNIT + d % 8 / 4 * LANES + d % UNIT / 8 * 4 + d % 4;
#elif SPLIT_BF16
    return d < HEAD_DIM_V / STEP * STEP ? d / STEP * STEP + d % 2 * LANES + d % STEP / 2 : d;
#else
    return d;
#endif
}

#if PAIRS
#define FIRST_OF_TWO(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23)
#define SECOND_OF_TWO(a, b) __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)
#else
#define FIRST_OF_TWO ZIP_LOW
#define SECOND_OF_TWO ZIP_HIGH
#endif

/* A row of O with its columns in order, each times `factor`. */
INLINE void few_ordered(float *to, const float *o, float factor) {
    const int twos = STEP > LANES ? (PAIRS ? FEW_O : HEAD_DIM_V / STEP * STEP) : 0;
    for (int d = 0; d < twos; d += 2 * LANES) {
        const vf a = vf_load(o + d) * factor, b = vf_load(o + d + LANES) * factor;
        vf_store(to + d, FIRST_OF_TWO(a, b));
        vf_store(to + d + LANES, SECOND_OF_TWO(a, b));
    }
    for (int d = twos; d < FEW_O; d += LANES) vf_store(to + d, vf_load(o + d) * factor);
}

/* The rows of the block after this one, asked for in the order of memory while this one is multiplied: a head's rows
 * alone would be short pieces at strides of a few KiB, where processors do not guess what comes next. */
typedef struct {
    const char *at, *end;        /* of a run of bytes that follow each other */
    const stored *const *rows;   /* of the first head */
    int64_t head_step, bytes;    /* from a row to that of the next head, and of a run */
    int32_t heads, tokens;       /* runs of a token, and tokens */
    int32_t head, token;         /* of the next run */
    int32_t by_heads;            /* tokens of a head follow each other, and not heads of a token */
} Ahead;

static __attribute__((noinline)) void next_run(Ahead *ahead) {
    const int more = ahead->head < ahead->heads && ahead->token < ahead->tokens;
    const uintptr_t row = (uintptr_t)(more ? ahead->rows[ahead->token] + ahead->head * ahead->head_step : zero_row);
    ahead->at = (const char *)(row & ~(uintptr_t)63), ahead->end = (const char *)row + (more ? ahead->bytes : 1);
    if (!more) return;
    if (ahead->by_heads) {
        if (++ahead->token == ahead->tokens) ahead->token = 0, ahead->head++;
    } else {
        if (++ahead->head == ahead->heads) ahead->head = 0, ahead->token++;
    }
}

/* The rows of n elements of so many heads. */
INLINE Ahead look_ahead(const stored *const *rows, int tokens, const int64_t *stride, int heads, const int n) {
    const int together = stride[2] == n, count = together ? heads : 1;
    Ahead ahead = {.rows = rows, .head_step = stride[2], .heads = heads / count, .tokens = tokens};
    ahead.by_heads = stride[2] > stride[1];
    ahead.bytes = (int64_t)count * n * (int)sizeof(stored);
    next_run(&ahead);
    return ahead;
}

/* Whether no run comes after the present one. */
INLINE int is_last_run(const Ahead *ahead) { return ahead->head == ahead->heads || ahead->token == ahead->tokens; }

/* Asks for the next lines, into the second-level cache: 27 GB/s of a core and not 13 into the first (Zen 4). Processors
 * forget what they are asked for faster than memory gives it: it must not come in bursts. */
INLINE void ask(Ahead *ahead, const int lines) {
    const char *at = ahead->at;
    UNROLL for (int i = 0; i < lines; i++) __builtin_prefetch(at + 64 * i, 0, 2);
    ahead->at = at += 64 * lines;
    if (at >= ahead->end) next_run(ahead);
}

/* Lines of one of `parts` equal parts of `count` rows of n elements. */
#define LINES(count, n, parts) (((count) * (n) * (int)sizeof(stored) + 64 * (parts) - 1) / (64 * (parts)))

#define PAIR_SUM(x, y, shuffle_low, shuffle_high) (shuffle_low(x, y) + shuffle_high(x, y))
#if LANES == 16
#define LOW_2(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH_2(a, b) __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW_4(a, b) __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH_4(a, b) __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN_FOURS(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD_FOURS(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#elif LANES == 8
#define LOW_2(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH_2(a, b) __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW_4(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH_4(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define EVEN_FOURS(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define ODD_FOURS(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#else
#define LOW_2(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define HIGH_2(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#define LOW_4(a, b) __builtin_shufflevector(a, b, 0, 1, 4, 5)
#define HIGH_4(a, b) __builtin_shufflevector(a, b, 2, 3, 6, 7)
#endif

/* The sums of LANES vectors, in their order. Shuffles within 128 bits first: those that cross them take longer. */
INLINE vf lane_sums(const vf x[LANES]) {
    vf four[LANES / 4];
    UNROLL for (int i = 0; i < LANES / 4; i++) {
        const vf a = PAIR_SUM(x[4 * i], x[4 * i + 1], LOW_2, HIGH_2);
        const vf b = PAIR_SUM(x[4 * i + 2], x[4 * i + 3], LOW_2, HIGH_2);
        four[i] = PAIR_SUM(a, b, LOW_4, HIGH_4);
    }
#if LANES == 16
    const vf a = PAIR_SUM(four[0], four[1], EVEN_FOURS, ODD_FOURS);
    const vf b = PAIR_SUM(four[2], four[3], EVEN_FOURS, ODD_FOURS);
    return PAIR_SUM(a, b, EVEN_FOURS, ODD_FOURS);
#elif LANES == 8
    return PAIR_SUM(four[0], four[1], EVEN_FOURS, ODD_FOURS);
#else
    return four[0];
#endif
}

#if PAIRS
/* UNIT columns of a row of which there are `n`. */
INLINE __m512i load_pairs(const element *from, const int n) {
    return n >= UNIT ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << n % UNIT) - 1, from);
}

INLINE vf dot_pairs(vf sum, __m512i a, __m512i b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
/* Vector x of the STEP columns of a row, of which there are `n`. */
INLINE vf few_vector(const stored *from, const int x, const int n) {
#if SPLIT_BF16
    if (n >= STEP) {
        const vi both = stored_pairs(from);
        return (vf)(x ? both & vi_set1(-65536) : both << 16);
    }
#endif
    return stored_load(from + x * LANES, n < (x + 1) * LANES ? n - x * LANES : LANES);
}
#endif

/* STEP columns of each key and row, of which there are `n`. */
INLINE void few_step(vf *sum, const few_element *q, const stored *const *k, const int n, const int width) {
    const int some = LANES / width;
    UNROLL for (int m = 0; m < some; m++) {
#if PAIRS
        const __m512i key = load_pairs(k[m], n);
        UNROLL for (int r = 0; r < width; r++)
            sum[r * some + m] = dot_pairs(sum[r * some + m], _mm512_load_si512(q + r * FEW_Q), key);
#else
        UNROLL for (int x = 0; x < (n + LANES - 1) / LANES; x++) {
            const vf key = few_vector(k[m], x, n);
            UNROLL for (int r = 0; r < width; r++)
                sum[r * some + m] = vf_fma(key, vf_load(q + r * FEW_Q + x * LANES), sum[r * some + m]);
        }
#endif
    }
}

/* Scores of n keys of the head that lies `offset` elements behind the keys' own, vector by vector. */
INLINE void few_scores(float *s, const few_element *q, const Keys *keys, int64_t offset, int n, Ahead *ahead,
                       const int width) {
    const int some = LANES / width, rest = HEAD_DIM_QK % STEP;
    for (int j = 0; j < n; j += some) {
        vf sum[LANES];
        const stored *k[LANES];
        UNROLL for (int i = 0; i < LANES; i++) sum[i] = vf_set1(0);
        UNROLL for (int m = 0; m < some; m++) k[m] = keys->k[j + m] + offset;
        for (int d = 0; d + STEP <= HEAD_DIM_QK; d += STEP) {
            few_step(sum, q + d, k, STEP, width);
            UNROLL for (int m = 0; m < some; m++) k[m] += STEP;
        }
        if (rest) few_step(sum, q + HEAD_DIM_QK - rest, k, rest, width);
        if (ahead) ask(ahead, LINES(some, HEAD_DIM_QK, 1));
        vf_store(s + j * width, lane_sums(sum));
    }
}

/* o += weights times V for some units of columns from `unit` on: `whole` of them, and `rest` behind the last step. */
INLINE void few_columns(float *o, const float *s, const Keys *keys, int64_t offset, int n, int unit, const int whole,
                        const int rest, Ahead *ahead, const int passes, const int width) {
    const int some = LANES / width, vectors = (whole + rest) * UNIT_VECTORS;
    vf sum[ACCUMULATORS];
    UNROLL for (int i = 0; i < width * vectors; i++) sum[i] = vf_set1(0);
    for (int j = 0; j < n; j += some) {
#if PAIRS
        const weight_pair *weights = (const weight_pair *)s + j / some * (LANES / 2);
        UNROLL for (int m = 0; m < some; m += 2) {
            const stored *even = keys->v[j + m] + offset + unit * UNIT;
            const stored *odd = keys->v[j + m + 1] + offset + unit * UNIT;
            UNROLL for (int c = 0; c < whole + rest; c++) {
                const int columns = c < whole ? UNIT : HEAD_DIM_V % UNIT;
                const __m512i a = load_pairs(even + c * UNIT, columns), b = load_pairs(odd + c * UNIT, columns);
                const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
                UNROLL for (int r = 0; r < width; r++) {
                    const __m512i weight = _mm512_set1_epi32(weights[(r * some + m) / 2]);
                    vf *to = sum + r * vectors + c * 2;
                    to[0] = dot_pairs(to[0], low, weight), to[1] = dot_pairs(to[1], high, weight);
                }
            }
        }
#else
        UNROLL for (int m = 0; m < some; m++) {
            const stored *v = keys->v[j + m] + offset + unit * UNIT;
            UNROLL for (int c = 0; c < whole + rest; c++) {
                const int step = STEP / UNIT, first = c < whole ? c / step * step : whole;
                const vf value = few_vector(v + first * UNIT, c - first, c < whole ? STEP : HEAD_DIM_V % STEP);
                UNROLL for (int r = 0; r < width; r++)
                    sum[r * vectors + c] = vf_fma(value, vf_set1(s[j * width + r * some + m]), sum[r * vectors + c]);
            }
        }
#endif
        if (ahead) ask(ahead, LINES(some, HEAD_DIM_V, passes));
    }
    UNROLL for (int r = 0; r < width; r++)
        UNROLL for (int c = 0; c < vectors; c++) {
            float *to = o + r * FEW_O + unit * UNIT + c * LANES;
            vf_store(to, vf_load(to) + sum[r * vectors + c]);
        }
}

INLINE void few_values(float *o, const float *s, const Keys *keys, int64_t offset, int n, Ahead *ahead,
                       const int width) {
    const int units = ACCUMULATORS / (width * UNIT_VECTORS), whole = HEAD_DIM_V / STEP * STEP / UNIT;
    const int rest = FEW_O / UNIT - whole, full = whole / units, passes = (whole + rest + units - 1) / units;
    for (int i = 0; i < full; i++) few_columns(o, s, keys, offset, n, i * units, units, 0, ahead, passes, width);
    if (full < passes) few_columns(o, s, keys, offset, n, full * units, whole % units, rest, ahead, passes, width);
}
