/* few_rows.h: attention of a few rows, which has to run as fast as K and V come from memory.
 *
 * The columns of K and V lie along the lanes, as they do in the store, so no element is moved; a row of keys is multiplied
 * where it lies. LANES sums of products make one vector of scores: `width` rows by LANES / width keys, row by row. Rows of
 * V are asked for while those of K are multiplied, and those of the next block's K while V is: at strides of a few KiB
 * processors do not guess what comes next. */

#define FEW_Q ROUND_UP(HEAD_DIM_QK, LANES)
#define FEW_O ROUND_UP(HEAD_DIM_V, LANES)
#define WIDEST (LANES == 16 ? 8 : 4)                         /* rows that are multiplied together */
#define FEW_STORED ROUND_UP(FEW_ROWS, WIDEST)
#define FEW_GROUPS (FEW_STORED / WIDEST)
#define ACCUMULATORS (AVX512 ? 16 : 8)                       /* vectors of O that stay in registers */

typedef struct {
    _Alignas(64) float q[FEW_STORED * FEW_Q];
    _Alignas(64) float o[FEW_STORED * FEW_O];
    _Alignas(64) float s[FEW_BLOCK * WIDEST];
    _Alignas(64) int32_t begin[FEW_STORED], end[FEW_STORED];  /* keys that each row attends to */
    _Alignas(64) float maximum[FEW_STORED], sum[FEW_STORED];
    /* The same lane by lane, of each group of rows. A sum is of its lane's keys alone until the end. */
    _Alignas(64) float lane_maximum[FEW_GROUPS * LANES], lane_sum[FEW_GROUPS * LANES];
    _Alignas(64) int32_t lane_begin[FEW_GROUPS * LANES], lane_end[FEW_GROUPS * LANES];
} Few;

/* Rows that are multiplied together where there are so many. */
INLINE int width_of(int rows) { return rows == 1 ? 1 : rows == 2 ? 2 : rows <= 4 || WIDEST == 4 ? 4 : 8; }

/* n vectors become half as many, of sums of two lanes each. */
INLINE void add_halves(vf *x, const int n) {
    UNROLL for (int i = 0; i < n / 2; i++) x[i] = ZIP_LOW(x[i], x[i + n / 2]) + ZIP_HIGH(x[i], x[i + n / 2]);
}

/* The sums of LANES vectors, in their order. Round by round: compilers leave an array in memory that a loop of loops goes over. */
INLINE vf lane_sums(vf x[LANES]) {
#if LANES == 16
    add_halves(x, 16);
#endif
#if LANES >= 8
    add_halves(x, 8);
#endif
    add_halves(x, 4);
    add_halves(x, 2);
    return x[0];
}

/* Into the second-level cache, which has more misses under way than the first: 8.2 GB/s of a core and not 6.0 where heads lie
 * side by side (Zen 4, bf16, 32k keys). */
INLINE void prefetch_row(const stored *row, const int n) {
    UNROLL for (int i = 0; i < n * (int)sizeof(stored); i += 64) __builtin_prefetch((const char *)row + i, 0, 2);
}

/* One vector of the columns, of LANES or half as many, of each key and row. */
INLINE void few_products(vf *sum, const float *q, const stored *const *k, const int columns, const int width) {
    const int some = LANES / width;
    UNROLL for (int m = 0; m < some; m++) {
        vf key = stored_load(k[m], columns);
        UNROLL for (int r = 0; r < width; r++) sum[r * some + m] = vf_fma(key, vf_load(q + r * FEW_Q), sum[r * some + m]);
    }
}

/* Scores of n keys, vector by vector. */
INLINE void few_scores(float *s, const float *q, const Keys *keys, int n, const int prefetch, const int width) {
    const int some = LANES / width;
    for (int j = 0; j < n; j += some) {
        vf sum[LANES];
        const stored *k[LANES];
        UNROLL for (int i = 0; i < LANES; i++) sum[i] = vf_set1(0);
        UNROLL for (int m = 0; m < some; m++) k[m] = keys->k[j + m];
        for (int d = 0; d + LANES <= HEAD_DIM_QK; d += LANES) {
            few_products(sum, q + d, k, LANES, width);
            UNROLL for (int m = 0; m < some; m++) k[m] += LANES;
        }
        if (HEAD_DIM_QK % LANES) few_products(sum, q + FEW_Q - LANES, k, LANES / 2, width);
        if (prefetch)
            UNROLL for (int m = 0; m < some; m++) prefetch_row(keys->v[j + m], HEAD_DIM_V);
        vf_store(s + j * width, lane_sums(sum));
    }
}

/* The key of each lane, from the first of a vector. */
INLINE vi lane_key(const int width) {
    vi key;
    UNROLL for (int x = 0; x < LANES; x++) key[x] = x % (LANES / width);
    return key;
}

/* Turns scores into weights; from `key` on, some masked where `masked`. What was accumulated is scaled to the new maximum. */
INLINE void few_softmax(Few *few, const Keys *keys, int group, int64_t key, int n, float score_scale, const int masked,
                        const int width) {
    const int some = LANES / width;
    float *s = few->s;
    const vi begin = *(const vi *)(few->lane_begin + group * LANES), end = *(const vi *)(few->lane_end + group * LANES);
    const vi last = vi_set1((int32_t)(key + n));
    vf top = vf_set1(-INF);
    for (int j = 0; j < n; j += some) {
        vf x = vf_load(s + j * width) * score_scale;
#if KV_PER_TOKEN
        UNROLL for (int i = 0; i < LANES; i++) x[i] *= keys->k_scale[j + i % some];
#endif
        if (masked) {
            const vi at = vi_set1((int32_t)(key + j)) + lane_key(width);
            vi seen = (at >= begin) & (at < end) & (at < last);
            if (keys->any_missing)
                for (int i = 0; i < LANES; i++) seen[i] &= keys->missing[j + i % some] ? 0 : -1;
            x = vf_select(seen, x, vf_set1(-INF));
        }
        vf_store(s + j * width, x);
        top = vf_max(x, top);
    }
    /* One maximum for each row. */
    float *const row_maximum = few->maximum + group * WIDEST;
    vf now, before = vf_load(few->lane_maximum + group * LANES);
    UNROLL for (int r = 0; r < width; r++) {
        float largest = row_maximum[r];
        UNROLL for (int m = 0; m < some; m++) largest = top[r * some + m] > largest ? top[r * some + m] : largest;
        row_maximum[r] = largest;
        UNROLL for (int m = 0; m < some; m++) now[r * some + m] = largest;
    }
    vf_store(few->lane_maximum + group * LANES, now);
    const vf reference = vf_select(now == -INF, vf_set1(0), now), alpha = vf_exp2(before - reference);
    vf total = vf_set1(0);
    for (int j = 0; j < n; j += some) {
        vf weight = vf_exp2(vf_load(s + j * width) - reference);
        total += weight;
#if KV_PER_TOKEN
        UNROLL for (int i = 0; i < LANES; i++) weight[i] *= keys->v_scale[j + i % some];
#endif
        vf_store(s + j * width, weight);
    }
    float *sum = few->lane_sum + group * LANES;
    vf_store(sum, vf_fma(vf_load(sum), alpha, total));
    UNROLL for (int r = 0; r < width; r++) {
        const float factor = alpha[r * some];
        float *o = few->o + (group * WIDEST + r) * FEW_O;
        if (factor != 1)
            for (int d = 0; d < FEW_O; d += LANES) vf_store(o + d, vf_load(o + d) * factor);
    }
    (void)keys, (void)end, (void)begin, (void)last;
}

/* o += weights times V for `vectors` vectors of columns from `d` on, of which the last may be half of one. */
INLINE void few_columns(float *o, const float *s, const Keys *keys, const Keys *next, int n, int ahead, int d, const int vectors,
                        const int half, const int width) {
    const int some = LANES / width;
    vf sum[ACCUMULATORS];
    UNROLL for (int i = 0; i < width * vectors; i++) sum[i] = vf_set1(0);
    for (int j = 0; j < n; j += some) {
        if (next && j < ahead)
            UNROLL for (int m = 0; m < some; m++) prefetch_row(next->k[j + m], HEAD_DIM_QK);
        UNROLL for (int m = 0; m < some; m++) {
            const stored *v = keys->v[j + m] + d;
            UNROLL for (int c = 0; c < vectors; c++) {
                vf value = stored_load(v + c * LANES, half && c == vectors - 1 ? LANES / 2 : LANES);
                UNROLL for (int r = 0; r < width; r++)
                    sum[r * vectors + c] = vf_fma(value, vf_set1(s[j * width + r * some + m]), sum[r * vectors + c]);
            }
        }
    }
    UNROLL for (int r = 0; r < width; r++)
        UNROLL for (int c = 0; c < vectors; c++) {
            float *to = o + r * FEW_O + d + c * LANES;
            vf_store(to, vf_load(to) + sum[r * vectors + c]);
        }
}

INLINE void few_values(float *o, const float *s, const Keys *keys, const Keys *next, int n, int ahead, const int width) {
    const int vectors = ACCUMULATORS / width, all = FEW_O / LANES, whole = all / vectors * vectors, half = HEAD_DIM_V % LANES != 0;
    /* Only the first columns ask for the rows of the next block. */
    for (int c = 0; c + vectors < all; c += vectors)
        few_columns(o, s, keys, c == 0 ? next : 0, n, ahead, c * LANES, vectors, 0, width);
    const int rest = all - whole;
    if (rest) few_columns(o, s, keys, whole == 0 ? next : 0, n, ahead, whole * LANES, rest, half, width);
    else few_columns(o, s, keys, whole == vectors ? next : 0, n, ahead, (whole - vectors) * LANES, vectors, half, width);
}

/* The same where a key that some row does not attend to has an infinity or NaN in V. */
static void few_values_exact(Few *few, const Keys *keys, int group, int64_t key, int n, int width) {
    const int some = LANES / width;
    for (int r = 0; r < width; r++) {
        const int row = group * WIDEST + r;
        for (int j = 0; j < n; j++) {
            if (key + j < few->begin[row] || key + j >= few->end[row] || keys->missing[j]) continue;
            const vf weight = vf_set1(few->s[j / some * LANES + r * some + j % some]);
            float value[FEW_O] = {0};
            stored_widen(value, keys->v[j], HEAD_DIM_V, 1);
            float *o = few->o + row * FEW_O;
            for (int d = 0; d < FEW_O; d++) o[d] += weight[0] * value[d];
        }
    }
}

/* One group of rows against one block of keys; `next` are those that come after it. */
INLINE void few_attend(Few *few, const Keys *keys, const Keys *next, int group, int64_t key, int n, int ahead, float score_scale,
                       const int width) {
    const int first = group * WIDEST, last = first + width - 1;
    const int64_t full_begin = few->begin[last], full_end = few->end[first];
    const int masked = n % (LANES / width) || keys->any_missing || full_begin > key || full_end < key + n;
    if (few->begin[first] >= key + n || few->end[last] <= key) return;
    few_scores(few->s, few->q + first * FEW_Q, keys, n, group == 0, width);
    int special = 0;
    if (masked) {
        few_softmax(few, keys, group, key, n, score_scale, 1, width);
        const int left = (int)min64(max64(full_begin - key, 0), n), right = (int)max64(min64(full_end - key, n), left);
        special = any_special(keys, 0, left) || any_special(keys, right, n);
    } else
        few_softmax(few, keys, group, key, n, score_scale, 0, width);
    if (special) few_values_exact(few, keys, group, key, n, width);
    else few_values(few->o + first * FEW_O, few->s, keys, group == 0 ? next : 0, n, ahead, width);
}
