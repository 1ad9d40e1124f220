/* amx.h: the two matrix products of attention on one panel of queries, in AMX tiles.
 *
 * The same products and the same layout as in matmul.h: a result tile is 16 keys (or columns of V) by 16 queries.
 * tdpbf16ps takes its left operand as 16 rows of 32 bf16, which rows of K are as they lie in memory, and its right
 * one as 16 rows of words, which the packed Q and the softmax's pairs of weights are. Only V has to be transposed.
 * 2 x 2 result tiles are kept, so that each operand tile is used twice. */

#define TILE 16                  /* rows of a tile, and words in a row */
#define TILE_KEYS (2 * TILE)     /* bf16 in a row */
#define V_TILES (O_ROWS / TILE)  /* tiles across the columns of V */

typedef float word;

/* The compilers' tile loads do not say what memory they read: what was written before them has to be there. */
#define MEMORY_IS_WRITTEN() __asm__ volatile("" ::: "memory")

int ft_init(void) {
    /* The kernel gives the tile registers only to processes that ask: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA. */
    return (int)syscall(SYS_arch_prctl, 0x1023, 18);
}

/* All eight tiles are 16 rows of 64 bytes. */
static void configure_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = TILE;
    __asm__ volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
}

/* A block of K is used where it lies if it is made of whole tiles of readable rows; else it is copied into a
 * block that is. */
INLINE const element *pack_keys(element *to, const element *k, int64_t *stride, int n, int64_t readable) {
    int padded = ROUND_UP(n, TILE_KEYS);
    if (HEAD_DIM_QK % TILE_KEYS == 0 && padded <= readable) return k;
    for (int j = 0; j < padded; j++) {
        element *row = to + j * 2 * Q_WORDS;
        __builtin_memset(row, 0, sizeof(element) * 2 * Q_WORDS);
        if (j < n) __builtin_memcpy(row, k + j * *stride, sizeof(element) * HEAD_DIM_QK);
    }
    *stride = 2 * Q_WORDS;
    return to;
}

/* A block of V as tiles of V^T: [32 keys][tile of 16 columns][column][pair of keys], 0 beyond the block. */
INLINE void pack_values(float *to, const element *v, int64_t stride, int n, float *temp) {
    if (O_ROWS > HEAD_DIM_V) __builtin_memset(temp, 0, sizeof(float) * TILE * O_ROWS);
    for (int j = 0; j < n; j += TILE_KEYS) {
        for (int i = 0; i < TILE; i++) {
            int key = j + 2 * i;
            float *row = temp + i * O_ROWS;
            if (key < n)
                join_rows((uint32_t *)row, v + key * stride, key + 1 < n ? v + (key + 1) * stride : 0);
            else
                __builtin_memset(row, 0, sizeof(float) * HEAD_DIM_V);
        }
        for (int d = 0; d < V_TILES; d++, to += TILE * TILE) {
            vf x[TILE];
            UNROLL for (int i = 0; i < TILE; i++) x[i] = vf_load(temp + i * O_ROWS + d * TILE);
            vf_transpose(x);
            UNROLL for (int i = 0; i < TILE; i++) vf_store(to + i * TILE, x[i]);
        }
    }
}

/* s[key][query] for n keys, rounded up to TILE_KEYS. Tiles 0-3 are the results, 4-5 keys, 6-7 queries. */
INLINE void scores(float *s, const word *k, int64_t stride, int n, const float *q, const int vectors) {
    (void)vectors;
    MEMORY_IS_WRITTEN();
    for (int j = 0; j < n; j += TILE_KEYS) {
        const char *keys = (const char *)k + j * stride;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int w = 0; w < Q_WORDS; w += TILE) {
            _tile_loadd(6, q + w * PANEL, PANEL * 4);
            _tile_loadd(4, keys + w * 4, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, q + w * PANEL + TILE, PANEL * 4);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, keys + TILE * stride + w * 4, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        float *to = s + j * PANEL;
        _tile_stored(0, to, PANEL * 4);
        _tile_stored(1, to + TILE, PANEL * 4);
        _tile_stored(2, to + TILE * PANEL, PANEL * 4);
        _tile_stored(3, to + TILE * PANEL + TILE, PANEL * 4);
    }
}

/* Rescales what was accumulated. Most blocks leave the maximum of every query where it was. */
INLINE void rescale(float *o, const float *alpha) {
    vf a = vf_load(alpha), b = vf_load(alpha + LANES);
    uint16_t same = _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(1), _CMP_EQ_OQ) &
                    _mm512_cmp_ps_mask((__m512)b, _mm512_set1_ps(1), _CMP_EQ_OQ);
    if (same == 0xffff) return;
    for (int d = 0; d < O_ROWS; d++, o += PANEL) {
        vf_store(o, vf_load(o) * a);
        vf_store(o + LANES, vf_load(o + LANES) * b);
    }
}

/* o[column][query] = o * alpha + sum over n times 32 keys of V^T P^T; `stride` bytes hold 32 keys of V. */
INLINE void weighted_values(float *o, const float *p, const word *v, int64_t stride, int n, const float *alpha,
                            const int vectors) {
    (void)vectors;
    rescale(o, alpha);
    MEMORY_IS_WRITTEN();
    int d = 0;
    for (; d + 1 < V_TILES; d += 2) {
        float *to = o + d * TILE * PANEL;
        _tile_loadd(0, to, PANEL * 4);
        _tile_loadd(1, to + TILE, PANEL * 4);
        _tile_loadd(2, to + TILE * PANEL, PANEL * 4);
        _tile_loadd(3, to + TILE * PANEL + TILE, PANEL * 4);
        for (int j = 0; j < n; j++) {
            const float *weights = p + j * TILE * PANEL;
            const char *values = (const char *)v + j * stride + d * TILE * TILE * 4;
            _tile_loadd(6, weights, PANEL * 4);
            _tile_loadd(4, values, TILE * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + TILE, PANEL * 4);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, values + TILE * TILE * 4, TILE * 4);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, to, PANEL * 4);
        _tile_stored(1, to + TILE, PANEL * 4);
        _tile_stored(2, to + TILE * PANEL, PANEL * 4);
        _tile_stored(3, to + TILE * PANEL + TILE, PANEL * 4);
    }
    if (d < V_TILES) {
        float *to = o + d * TILE * PANEL;
        _tile_loadd(0, to, PANEL * 4);
        _tile_loadd(1, to + TILE, PANEL * 4);
        for (int j = 0; j < n; j++) {
            const float *weights = p + j * TILE * PANEL;
            _tile_loadd(4, (const char *)v + j * stride + d * TILE * TILE * 4, TILE * 4);
            _tile_loadd(6, weights, PANEL * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + TILE, PANEL * 4);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, to, PANEL * 4);
        _tile_stored(1, to + TILE, PANEL * 4);
    }
}
