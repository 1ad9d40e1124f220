/* panels.h: attention of many rows: they are packed into panels, a row to a lane, and the keys are gathered block by
 * block into compact rows, which each panel in turn multiplies. */

#if PAIRS && !AMX
#define RAW_K K_PITCH
#define COPY_KEY copy_key
#else
#define RAW_K HEAD_DIM_QK
#define COPY_KEY(to, k) __builtin_memcpy(to, k, sizeof(element) * HEAD_DIM_QK)
#endif

typedef struct {
    _Alignas(64) float q[PANELS][Q_WORDS * PANEL];
    _Alignas(64) float o[PANELS][O_ROWS * PANEL];
    _Alignas(64) float maximum[PANELS * PANEL];
    _Alignas(64) float sum[PANELS * PANEL];
    _Alignas(64) float alpha[PANEL];
    _Alignas(64) float s[(DROPOUT ? 2 : 1) * S_ROWS * PANEL];
    RowKeys row_keys;
#if PAIRS
    _Alignas(64) element raw_k[BLOCK_KV * RAW_K];
    _Alignas(64) element raw_v[BLOCK_KV * HEAD_DIM_V];
#endif
#if AMX
    _Alignas(64) float v[BLOCK_KV / 2 * O_ROWS];
    _Alignas(64) element k[BLOCK_KV * 2 * Q_WORDS];
#elif PAIRS
    _Alignas(64) float v[BLOCK_KV / 2 * HEAD_DIM_V];
#else
    _Alignas(64) float v[BLOCK_KV * HEAD_DIM_V];
    _Alignas(64) float k[BLOCK_KV * HEAD_DIM_QK];
#endif
    _Alignas(64) float rows[LANES * (Q_WORDS > O_ROWS ? Q_WORDS : O_ROWS)];
    _Alignas(64) element elements[LANES * (HEAD_DIM_QK > HEAD_DIM_V ? HEAD_DIM_QK : HEAD_DIM_V)];
} Panels;

/* The keys [begin, end) of one block, as words for the matmul. */
typedef struct {
    int64_t begin, end;
    const word *k, *v;
    int64_t k_stride, v_stride;  /* bytes from key to key in k, and from KV_ALIGN keys to the next in v */
} Block;

static Block gather_block(const Keys *keys, Panels *panels, int64_t begin, int64_t end) {
    const int n = (int)(end - begin);
#if PAIRS
    for (int j = 0; j < n; j++) {
        COPY_KEY(panels->raw_k + j * RAW_K, keys->k[j]);
        __builtin_memcpy(panels->raw_v + j * HEAD_DIM_V, keys->v[j], sizeof(element) * HEAD_DIM_V);
    }
#endif
#if AMX
    int64_t k_stride = HEAD_DIM_QK;
    pack_values(panels->v, panels->raw_v, HEAD_DIM_V, n, panels->rows);
    const element *k = pack_keys(panels->k, panels->raw_k, &k_stride, n, BLOCK_KV);
    return (Block){begin, end, (const word *)k, panels->v, k_stride * 2, TILE * O_ROWS * 4};
#elif PAIRS
    pack_values(panels->v, panels->raw_v, HEAD_DIM_V, n);
    return (Block){begin, end, (const word *)panels->raw_k, (const word *)panels->v, RAW_K * 2, HEAD_DIM_V * 4};
#else
    for (int j = 0; j < n; j++) {
        float k_scale = 1, v_scale = 1;
#if KV_PER_TOKEN
        k_scale = keys->k_scale[j], v_scale = keys->v_scale[j];
#endif
        stored_widen(panels->k + j * HEAD_DIM_QK, keys->k[j], HEAD_DIM_QK, k_scale);
        stored_widen(panels->v + j * HEAD_DIM_V, keys->v[j], HEAD_DIM_V, v_scale);
    }
    return (Block){begin, end, panels->k, panels->v, HEAD_DIM_QK * 4, HEAD_DIM_V * 4};
#endif
}

/* The weight of key j (counted from the panel's first) in one row, as the softmax left it. */
INLINE float weight_of(const float *p, int j) {
#if PAIRS
    float_bits pair = {.f = p[j / 2 * PANEL]};
    return (float_bits){.u = j % 2 ? pair.u & 0xffff0000 : pair.u << 16}.f;
#else
    return p[j * PANEL];
#endif
}

/* weighted_values for one row, leaving out what is masked. */
static void weighted_values_exact(float *o, const float *p, const Keys *keys, int skip, int n, float alpha,
                                  const uint8_t *seen) {
    for (int d = 0; d < HEAD_DIM_V; d++) o[d * PANEL] *= alpha;
    for (int j = 0; j < n; j++) {
        if (!seen[j]) continue;
        float value[O_ROWS], scale = 1;
#if KV_PER_TOKEN
        scale = keys->v_scale[skip + j];
#endif
        stored_widen(value, keys->v[skip + j], HEAD_DIM_V, scale);
        for (int d = 0; d < HEAD_DIM_V; d++) o[d * PANEL] += weight_of(p, j) * value[d];
    }
}
