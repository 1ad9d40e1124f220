/* ranges.h: the work of a call: row tiles, the ranges that their keys are split into, and who merges what these gave.
 *
 * The rows of a KV head are those of all its query heads, the heads of one row side by side: row r is row r / group of
 * the sequence in head r % group. A tile is a run of them. Its keys are split where the call has too few tiles to keep
 * many cores busy. How, depends on the lengths, the bounds and the schedule alone, so that the same bytes come out of
 * any number of threads. Ranges side by side are merged in pairs, and pairs of these: by whoever is last of two, in the
 * order of their keys. */

typedef struct {
    int32_t b, kv_head, heads;  /* sequence, first KV head, and how many of them */
    int32_t row, rows;          /* its run of rows of each */
    int32_t begin, end;         /* keys that some of them attend to */
    int32_t chunk, chunks;      /* keys of a range, and ranges */
    uint64_t first;             /* number of the first range among those of the call */
    uint64_t partial;           /* where the ranges' counters and states lie in shared memory, in bytes */
} Tile;

/* At the start of the shared memory; tiles and states follow. */
typedef struct {
    uint64_t tiles, ranges;
} Plan;

#define TILES_AT 64

INLINE Tile *tiles_of(const RaggedArgs *args) { return (Tile *)((char *)args->scratch + TILES_AT); }

/* Floats of the state of a tile between its ranges. */
INLINE uint64_t state_floats(const Tile *tile);

#define IS_FEW(rows) ((rows) <= FEW_ROWS)

/* What a tile costs for each key, about: below 16 rows it is memory that counts. */
INLINE int64_t cost_of(int rows) { return IS_FEW(rows) ? 16 : 16 + rows; }

/* Keys that some row of a tile attends to. */
static void clip_keys(const RaggedArgs *args, const Sequence *s, Tile *tile) {
    const int32_t group = args->heads / args->kv_heads;
    const int32_t first = tile->row / group, last = (tile->row + tile->rows - 1) / group;
    int64_t begin = row_begin(args, s, first), end = row_end(args, s, last);
#if PROGRAM_MASK
    const ProgramHead head = program_head(args, s, tile->b, tile->kv_head);
    const ProgramKeys keys = program_keys(&head, first, last + 1);
    begin = max64(begin, keys.begin), end = min64(end, keys.end);
#endif
    tile->begin = (int32_t)begin, tile->end = (int32_t)max64(begin, end);
}

typedef struct {
    const RaggedArgs *args;
    int64_t cost, tiles;              /* of all tiles, or so far */
    uint64_t ranges, at, capacity;    /* so far; memory that is there */
    int write;
} Planning;

INLINE void count_tile(Planning *p, Tile *tile) {
    p->cost += cost_of(tile->rows) * tile->heads * (tile->end - tile->begin);
    p->tiles++;
}

/* Whether what lies side by side in the store is of several heads: of a token, or of a page that is not large. */
INLINE int side_by_side(const RaggedArgs *args) {
    const int64_t *k = args->k_stride, *v = args->v_stride;
    return (k[2] < k[1] && v[2] < v[1]) || (args->k_table && args->page_tokens <= 32);
}

/* KV heads whose rows are those of one tile: several where they lie side by side, so that memory is read in its order,
 * and as long as each range has keys enough. */
INLINE int32_t heads_together(const Planning *p, int rows) {
#if FEW_ROWS && !V_COLUMNS
    const RaggedArgs *args = p->args;
    if (!IS_FEW(rows) || !side_by_side(args) || args->k_stride[3] != K_CHUNK) return 1;
    const int64_t fair = p->cost / (SPLIT_TILES * cost_of(rows));
    const int64_t most = max64(min64(min64(fair / SPLIT_KV, FEW_TILE_ROWS / few_stored(rows)), args->kv_heads), 1);
    const int64_t parts = (args->kv_heads + most - 1) / most;
    return (int32_t)((args->kv_heads + parts - 1) / parts);
#else
    (void)p, (void)rows;
    return 1;
#endif
}

/* Keys of a block of a tile. */
INLINE int block_of(const Tile *tile) {
#if FEW_ROWS
    if (IS_FEW(tile->rows)) return few_block_of(tile->heads);
#endif
    (void)tile;
    return BLOCK_KV;
}

/* What the ranges of a tile leave: who of two came first, and the state of each. */
INLINE uint64_t counters_bytes(const Tile *tile) { return ROUND_UP(tile->chunks * sizeof(int32_t), 64); }
INLINE uint64_t state_bytes(const Tile *tile) { return ROUND_UP(state_floats(tile) * sizeof(float), 64); }

/* Splits the keys of a tile into ranges of whole blocks, as equal as these can be. */
INLINE void place_tile(Planning *p, Tile *tile) {
    const int64_t keys = tile->end - tile->begin, block = block_of(tile);
    const int64_t fair = max64(p->cost / (SPLIT_TILES * cost_of(tile->rows) * tile->heads), SPLIT_KV);
    const int64_t wanted = max64((keys + fair / 2) / fair, 1);
    const int64_t chunk = max64(ROUND_UP((keys + wanted - 1) / wanted, block), block);
    tile->chunk = (int32_t)min64(chunk, INT32_MAX / 2), tile->chunks = (int32_t)max64((keys + chunk - 1) / chunk, 1);
    tile->first = p->ranges, tile->partial = p->at;
    if (tile->chunks > 1) {
        const uint64_t counters = counters_bytes(tile);
        p->at += counters + tile->chunks * state_bytes(tile);
        if (p->at <= p->capacity) __builtin_memset((char *)p->args->scratch + tile->partial, 0, counters);
    }
    if (p->write) tiles_of(p->args)[p->tiles] = *tile;
    p->ranges += tile->chunks, p->tiles++;
}

/* Calls `use` with every tile of a call: those of many rows first, and of a sequence the last rows, which have most
 * keys. */
static void walk_tiles(Planning *p, void (*use)(Planning *, Tile *)) {
    const RaggedArgs *args = p->args;
    const int32_t group = args->heads / args->kv_heads;
    for (int few = 0; few < 2; few++)
        for (int32_t b = 0; b < args->batch; b++) {
            const Sequence s = sequence_of(args, b);
            const int64_t rows = (int64_t)s.q_len * group;
            for (int64_t row = ROUND_UP(rows, BLOCK_Q) - BLOCK_Q; row >= 0; row -= BLOCK_Q) {
                Tile tile = {.b = b, .row = (int32_t)row, .rows = (int32_t)min64(rows - row, BLOCK_Q)};
                if (IS_FEW(tile.rows) != few) continue;
                const int32_t together = heads_together(p, tile.rows);
                for (tile.kv_head = 0; tile.kv_head < args->kv_heads; tile.kv_head += together) {
                    tile.heads = (int32_t)min64(together, args->kv_heads - tile.kv_head);
                    clip_keys(args, &s, &tile);
                    use(p, &tile);
                }
            }
        }
}

uint64_t ft_prepare(const RaggedArgs *args, uint64_t bytes) {
    Planning p = {.args = args, .capacity = bytes};
    walk_tiles(&p, count_tile);
    /* There are no more tiles than now, where each has one head. */
    const uint64_t table = ROUND_UP(TILES_AT + p.tiles * sizeof(Tile), 64);
    /* The table is written where it fits, and is of use where all that follows does, too. */
    p.tiles = 0, p.at = table, p.write = table <= bytes;
    walk_tiles(&p, place_tile);
    if (p.write) *(Plan *)args->scratch = (Plan){p.tiles, p.ranges};
    return p.at;
}

uint64_t ft_tiles(const RaggedArgs *args) { return ((const Plan *)args->scratch)->ranges; }

/* The tile that a range belongs to. */
INLINE Tile *tile_of(const RaggedArgs *args, uint64_t range) {
    Tile *tiles = tiles_of(args);
    uint64_t low = 0, high = ((const Plan *)args->scratch)->tiles;
    while (high - low > 1) {
        const uint64_t middle = (low + high) / 2;
        if (tiles[middle].first <= range) low = middle;
        else high = middle;
    }
    return tiles + low;
}

INLINE float *state_of(const RaggedArgs *args, const Tile *tile, int64_t chunk) {
    return (float *)((char *)args->scratch + tile->partial + counters_bytes(tile) + chunk * state_bytes(tile));
}

/* What two parts of a row are multiplied by when they become one, and its maximum. */
typedef struct {
    vf maximum, first, second;
} Merge;

INLINE Merge merge_maxima(vf first, vf second) {
    const vf maximum = vf_max(first, second), reference = vf_select(maximum == -INF, vf_set1(0), maximum);
    return (Merge){maximum, exp2_of(first - reference), exp2_of(second - reference)};
}

/* One number of two parts, whose other one comes `before` the own. */
INLINE vf merged(vf own, vf other, Merge m, int before) {
    const vf first = before ? other : own, second = before ? own : other;
    return vf_fma(first, m.first, second * m.second);
}

struct scratch;
typedef void (*Save)(const Tile *, const struct scratch *, float *);
typedef void (*Join)(const Tile *, struct scratch *, const float *, int);

/* Merges a range of a tile, whose state is in scratch, with those beside it that are done. Returns whether these are
 * all of the tile: then the result is in scratch. Of two runs of ranges the one that is done first leaves its state in
 * the place of its first range; the counter of two is that of the second one's first range. */
static int join_ranges(const RaggedArgs *args, const Tile *tile, struct scratch *scratch, int64_t chunk, Save save,
                       Join join) {
    int32_t *const counters = (int32_t *)((char *)args->scratch + tile->partial);
    for (int64_t size = 1; size < tile->chunks; size *= 2) {
        const int64_t begin = chunk / size * size, other = begin ^ size, second = max64(begin, other);
        if (other >= tile->chunks) continue;
        if (!__atomic_load_n(counters + second, __ATOMIC_ACQUIRE)) {
            save(tile, scratch, state_of(args, tile, begin));
            if (!__atomic_fetch_add(counters + second, 1, __ATOMIC_ACQ_REL)) return 0;
        }
        join(tile, scratch, state_of(args, tile, other), other < begin);
    }
    return 1;
}
