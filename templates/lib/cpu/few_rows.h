/* few_rows.h: attention of a few rows, which has to run as fast as K and V come from memory.
 *
 * Where the rows of several heads lie side by side, a tile has the rows of these heads, and each block of keys is
 * multiplied head by head: memory is then read in its order, whatever the order of the products. */

#define FEW_TILE_ROWS (FEW_ROWS > 64 ? FEW_ROWS + WIDEST : 64)  /* rows of all heads of a tile */
#define FEW_GROUPS (FEW_TILE_ROWS)                              /* runs of up to WIDEST rows of a head */

/* What a thread knows of the rows of a tile, those of each head side by side. */
typedef struct {
    _Alignas(64) few_element q[FEW_TILE_ROWS * FEW_Q];
    _Alignas(64) float o[FEW_TILE_ROWS * FEW_O];
    _Alignas(64) float s[FEW_BLOCK * WIDEST];
    float maximum[FEW_TILE_ROWS], sum[FEW_TILE_ROWS];
    /* The same lane by lane, of each group of rows. A sum is of its lane's keys alone until the end. */
    _Alignas(64) float lane_maximum[FEW_GROUPS * LANES], lane_sum[FEW_GROUPS * LANES];
    /* Keys that each row of a head attends to, and each lane of its groups. */
    int32_t begin[FEW_ROWS + WIDEST], end[FEW_ROWS + WIDEST];
    _Alignas(64) int32_t lane_begin[(FEW_ROWS / WIDEST + 1) * LANES], lane_end[(FEW_ROWS / WIDEST + 1) * LANES];
} Few;

/* Rows of a head that are stored: a whole number of those that are multiplied together. */
INLINE int few_stored(int rows) { return rows / WIDEST * WIDEST + (rows % WIDEST ? width_of(rows % WIDEST) : 0); }

/* Rows of a group, of a head of so many rows. */
INLINE int few_width(int rows, int group) {
    const int rest = rows - group * WIDEST;
    return width_of(rest < WIDEST ? rest : WIDEST);
}

/* Keys of a block. The next one is on its way for as long as this is multiplied: of many heads that is long enough for
 * fewer keys, and the shorter the products of one head are, the more even is what memory is asked for (16 keys of 8
 * heads: 18 GB/s of a core, 32: 16, 64: 12). */
INLINE int few_block_of(int heads) {
    const int keys = heads == 1 ? FEW_BLOCK : ROUND_UP(FEW_BLOCK / (2 * heads), LANES);
    return keys < LANES ? LANES : keys < FEW_BLOCK ? keys : FEW_BLOCK;
}

/* Groups of a head of so many rows. */
INLINE int few_groups(int rows) { return (rows + WIDEST - 1) / WIDEST; }

/* A row of Q as it is multiplied. */
INLINE void few_query(few_element *to, const element *q) {
#if PAIRS
    __builtin_memset(to, 0, sizeof(few_element) * FEW_Q);
    __builtin_memcpy(to, q, sizeof(element) * HEAD_DIM_QK);
#elif SPLIT_BF16
    const int rest = HEAD_DIM_QK % STEP;
    for (int d = 0; d < HEAD_DIM_QK - rest; d += LANES)
        vf_store(to + d, few_vector(q + d / STEP * STEP, d / LANES % 2, STEP));
    for (int d = HEAD_DIM_QK - rest; d < HEAD_DIM_QK; d += LANES)
        vf_store(to + d, few_vector(q + d, 0, HEAD_DIM_QK - d < LANES ? HEAD_DIM_QK - d : LANES));
#else
    __builtin_memset(to + FEW_Q - LANES, 0, sizeof(float) * LANES);
    widen_row(to, q, HEAD_DIM_QK);
#endif
}

/* The key of each lane, from the first of a vector. */
INLINE vi lane_key(const int width) {
    vi key;
    UNROLL for (int x = 0; x < LANES; x++) key[x] = x % (LANES / width);
    return key;
}

#if LANES == 16
#define EXCHANGED(x, n) \
    __builtin_shufflevector(x, x, 0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n, 8 ^ n, 9 ^ n, 10 ^ n, \
                            11 ^ n, 12 ^ n, 13 ^ n, 14 ^ n, 15 ^ n)
#elif LANES == 8
#define EXCHANGED(x, n) __builtin_shufflevector(x, x, 0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n)
#else
#define EXCHANGED(x, n) __builtin_shufflevector(x, x, 0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n)
#endif

/* Lane by lane the largest of its row. */
INLINE vf row_maximum(vf x, const int width) {
    const int some = LANES / width;
    if (some > 1) x = vf_max(x, EXCHANGED(x, 1));
    if (some > 2) x = vf_max(x, EXCHANGED(x, 2));
#if LANES > 4
    if (some > 4) x = vf_max(x, EXCHANGED(x, 4));
#endif
#if LANES > 8
    if (some > 8) x = vf_max(x, EXCHANGED(x, 8));
#endif
    return x;
}

/* Turns scores into weights; from `key` on, some masked where `masked`. What was accumulated is scaled to the new
 * maximum. `o` are the rows of a group, whose lanes begin at `lane`; its bounds at `bounds`. */
INLINE void few_softmax(Few *few, const Keys *keys, float *o, int lane, int bounds, int64_t key, int n,
                        float score_scale, const int masked, const int width) {
    const int some = LANES / width;
    float *const s = few->s;
    const vi begin = *(const vi *)(few->lane_begin + bounds), end = *(const vi *)(few->lane_end + bounds);
    const vi last = vi_set1((int32_t)(key + n));
    const vf before = vf_load(few->lane_maximum + lane);
    vf top = before;
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
    const vf now = row_maximum(top, width);
    vf_store(few->lane_maximum + lane, now);
    const vf reference = vf_select(now == -INF, vf_set1(0), now), alpha = vf_exp2(before - reference);
    vf total = vf_set1(0);
    for (int j = 0; j < n; j += some) {
        vf weight = vf_exp2(vf_load(s + j * width) - reference);
        total += weight;
#if KV_PER_TOKEN
        UNROLL for (int i = 0; i < LANES; i++) weight[i] *= keys->v_scale[j + i % some];
#endif
#if PAIRS /* of two keys: they lie in lanes side by side */
        _mm256_store_si256((__m256i *)(s + j * width / 2), (__m256i)_mm512_cvtneps_pbh((__m512)weight));
#else
        vf_store(s + j * width, weight);
#endif
    }
    float *sum = few->lane_sum + lane;
    vf_store(sum, vf_fma(vf_load(sum), alpha, total));
    UNROLL for (int r = 0; r < width; r++, o += FEW_O) {
        const float factor = alpha[r * some];
        if (factor != 1)
            for (int d = 0; d < FEW_O; d += LANES) vf_store(o + d, vf_load(o + d) * factor);
    }
    (void)keys, (void)end, (void)begin, (void)last;
}

/* few_values where a key that some row does not attend to has an infinity or NaN in V. */
static void few_values_exact(const Few *few, float *o, const Keys *keys, int64_t offset, int first, int64_t key, int n,
                             int width) {
    const int some = LANES / width;
    for (int r = 0; r < width; r++, o += FEW_O)
        for (int j = 0; j < n; j++) {
            if (key + j < few->begin[first + r] || key + j >= few->end[first + r] || keys->missing[j]) continue;
            const int at = j / some * LANES + r * some + j % some;
#if PAIRS
            const float weight = widen(((const weight_element *)few->s)[at]);
#else
            const float weight = few->s[at];
#endif
            float value[ROUND_UP(HEAD_DIM_V, LANES)];
            stored_widen(value, keys->v[j] + offset, HEAD_DIM_V, 1);
            for (int d = 0; d < HEAD_DIM_V; d++) o[column_of(d)] += weight * value[d];
        }
}

/* One group of rows of a head against one block of keys; rows of what comes next are asked for if `ahead` is not 0. */
INLINE void few_attend(Few *few, const Keys *keys, int64_t k_offset, int64_t v_offset, int stored_rows, int head,
                       int group, int64_t key, int n, float score_scale, Ahead *ahead, const int width) {
    const int first = group * WIDEST, last = first + width - 1, row = head * stored_rows + first;
    const int lane = (head * few_groups(stored_rows) + group) * LANES;
    const int64_t full_begin = few->begin[last], full_end = few->end[first];
    const int masked = n % (LANES / width) || keys->any_missing || full_begin > key || full_end < key + n;
    if (few->begin[first] >= key + n || few->end[last] <= key) return;
    float *const o = few->o + row * FEW_O;
    few_scores(few->s, few->q + row * FEW_Q, keys, k_offset, n, ahead, width);
    int special = 0;
    if (masked) {
        few_softmax(few, keys, o, lane, group * LANES, key, n, score_scale, 1, width);
        const int left = (int)min64(max64(full_begin - key, 0), n), right = (int)max64(min64(full_end - key, n), left);
        special = any_special(keys, v_offset, 0, left) || any_special(keys, v_offset, right, n);
    } else
        few_softmax(few, keys, o, lane, group * LANES, key, n, score_scale, 0, width);
    if (special) few_values_exact(few, o, keys, v_offset, first, key, n, width);
    else few_values(o, few->s, keys, v_offset, n, ahead ? ahead + 1 : 0, width);
}
