/* dropout.h: which scores are dropped (DROPOUT), by their places alone. One call of Philox 4x32-10 (Salmon et al., SC
 * 2011, section 4) decides about the eight keys of a query from 8 * group on, by sixteen bits for each, the low half of
 * a word for the even key (codegen/src/dropout.rs has the definition). */

typedef struct {
    uint32_t key[2], offset, threshold;
    float scale;  /* what kept weights are multiplied by */
} Dropout;

#define DROPOUT_OF(args)                                                                                              \
    dropout_of((args)->dropout_seed, (const uint64_t *)(args)->dropout_seed_at, (args)->dropout_offset,               \
               (const uint64_t *)(args)->dropout_offset_at, (args)->dropout_threshold, (args)->dropout_scale)

static Dropout dropout_of(uint64_t seed, const uint64_t *seed_at, uint64_t offset, const uint64_t *offset_at,
                          uint32_t threshold, float scale) {
    if (seed_at) seed += *seed_at;
    if (offset_at) offset += *offset_at;
    return (Dropout){{(uint32_t)seed, (uint32_t)(seed >> 32) + (uint32_t)(offset >> 32)}, (uint32_t)offset, threshold,
                     scale};
}

/* Of LANES rows, each of a query and of a pair, sequence * heads + head, and the eight keys of a group: all ones where
 * the score is kept, [key][row]. */
static void draw_group(int32_t kept[8][LANES], const Dropout *d, uint32_t group, const uint32_t query[LANES],
                       const uint32_t pair[LANES]) {
    uint32_t a[LANES], b[LANES], c[LANES], e[LANES];
    for (int i = 0; i < LANES; i++) a[i] = group, b[i] = query[i], c[i] = pair[i], e[i] = d->offset;
    uint32_t low = d->key[0], high = d->key[1];
    for (int round = 0; round < 10; round++, low += 0x9e3779b9u, high += 0xbb67ae85u)
        for (int i = 0; i < LANES; i++) {
            const uint64_t x = (uint64_t)a[i] * 0xd2511f53u, y = (uint64_t)c[i] * 0xcd9e8d57u;
            a[i] = (uint32_t)(y >> 32) ^ b[i] ^ low, b[i] = (uint32_t)y;
            c[i] = (uint32_t)(x >> 32) ^ e[i] ^ high, e[i] = (uint32_t)x;
        }
    const uint32_t *words[4] = {a, b, c, e};
    for (int k = 0; k < 8; k++)
        for (int i = 0; i < LANES; i++)
            kept[k][i] = (words[k / 2][i] >> k % 2 * 16 & 0xffff) < d->threshold ? -1 : 0;
}

/* The same of n keys from `key` on: [key][row], `pitch` apart. */
static __attribute__((noinline)) void draw_rows(int32_t *to, int64_t pitch, const Dropout *d, int64_t key, int n,
                                                const uint32_t query[LANES], const uint32_t pair[LANES]) {
    int32_t kept[8][LANES];
    for (int j = 0; j < n; j++) {
        const int64_t at = key + j;
        if (j == 0 || at % 8 == 0) draw_group(kept, d, (uint32_t)(at / 8), query, pair);
        __builtin_memcpy(to + j * pitch, kept[at % 8], sizeof kept[0]);
    }
}

/* Of the queries of one head from `query` on. */
INLINE void draw_kept(int32_t *to, int64_t pitch, const Dropout *d, int64_t key, int n, int64_t query, int64_t pair) {
    uint32_t queries[LANES], pairs[LANES];
    for (int i = 0; i < LANES; i++) queries[i] = (uint32_t)query + i, pairs[i] = (uint32_t)pair;
    draw_rows(to, pitch, d, key, n, queries, pairs);
}
