/* ranges.h: the work of a call: row tiles, the ranges that their keys are split into, and who merges what these gave.
 *
 * The rows of a KV head are those of all its query heads, the heads of one row side by side: row r is row r / group of the
 * sequence in head r % group. A tile is a run of them. Its keys are split where the call has too few tiles to keep many cores
 * busy. How, depends on the lengths, the bounds and the schedule alone, so that the same bytes come out of any number of threads.
 * The last thread to be done with a range of a tile merges all of them in the order of their keys. */

typedef struct {
    int32_t b, kv_head;
    int32_t row, rows;      /* its run of rows */
    int32_t begin, end;     /* keys that some of them attend to */
    int32_t chunk, chunks;  /* keys of a range, and ranges */
    int32_t done;           /* ranges that are computed */
    uint64_t first;         /* number of the first range among those of the call */
    uint64_t partial;       /* where the first one's state goes, in bytes from the start of the shared memory */
} Tile;

/* At the start of the shared memory; tiles and states follow. */
typedef struct {
    uint64_t tiles, ranges;
} Plan;

#define TILES_AT 64

INLINE Tile *tiles_of(const RaggedArgs *args) { return (Tile *)((char *)args->scratch + TILES_AT); }

/* Floats of the state of a tile between its ranges. */
INLINE uint64_t state_floats(int rows);

#define IS_FEW(rows) ((rows) <= FEW_ROWS)

/* What a tile costs for each key, about: below 16 rows it is memory that counts. */
INLINE int64_t cost_of(int rows) { return IS_FEW(rows) ? 16 : 16 + rows; }

/* Keys that some row of a tile attends to. */
static void clip_keys(const RaggedArgs *args, const Sequence *s, Tile *tile) {
    const int32_t group = args->heads / args->kv_heads, first = tile->row / group, last = (tile->row + tile->rows - 1) / group;
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
    int64_t cost, tiles;              /* of all tiles */
    uint64_t ranges, at, capacity;    /* so far; memory that is there */
    int write;
} Planning;

INLINE void count_tile(Planning *p, Tile *tile) {
    p->cost += cost_of(tile->rows) * (tile->end - tile->begin);
    p->tiles++;
}

/* Splits the keys of a tile into ranges of whole blocks, as equal as these can be. */
INLINE void place_tile(Planning *p, Tile *tile) {
    const int64_t keys = tile->end - tile->begin, block = IS_FEW(tile->rows) ? FEW_BLOCK : BLOCK_KV;
    const int64_t fair = max64(p->cost / (SPLIT_TILES * cost_of(tile->rows)), SPLIT_KV);
    const int64_t wanted = max64((keys + fair / 2) / fair, 1), chunk = max64(ROUND_UP((keys + wanted - 1) / wanted, block), block);
    tile->chunk = (int32_t)min64(chunk, INT32_MAX / 2), tile->chunks = (int32_t)max64((keys + chunk - 1) / chunk, 1);
    tile->done = 0, tile->first = p->ranges, tile->partial = p->at;
    if (tile->chunks > 1) p->at += tile->chunks * ROUND_UP(state_floats(tile->rows) * sizeof(float), 64);
    if (p->write) tiles_of(p->args)[p->tiles] = *tile;
    p->ranges += tile->chunks, p->tiles++;
}

/* Calls `use` with every tile of a call: those of many rows first, and of a sequence the last rows, which have most keys. */
static void walk_tiles(Planning *p, void (*use)(Planning *, Tile *)) {
    const RaggedArgs *args = p->args;
    const int32_t group = args->heads / args->kv_heads;
    for (int few = 0; few < 2; few++)
        for (int32_t b = 0; b < args->batch; b++) {
            const Sequence s = sequence_of(args, b);
            const int64_t rows = (int64_t)s.q_len * group;
            for (int32_t kv_head = 0; kv_head < args->kv_heads; kv_head++)
                for (int64_t row = ROUND_UP(rows, BLOCK_Q) - BLOCK_Q; row >= 0; row -= BLOCK_Q) {
                    Tile tile = {.b = b, .kv_head = kv_head, .row = (int32_t)row, .rows = (int32_t)min64(rows - row, BLOCK_Q)};
                    if (IS_FEW(tile.rows) != few) continue;
                    clip_keys(args, &s, &tile);
                    use(p, &tile);
                }
        }
}

uint64_t ft_prepare(const RaggedArgs *args, uint64_t bytes) {
    Planning p = {.args = args};
    walk_tiles(&p, count_tile);
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
    return (float *)((char *)args->scratch + tile->partial + chunk * ROUND_UP(state_floats(tile->rows) * sizeof(float), 64));
}

/* Whether this was the last range of its tile: what the others left is visible then. */
INLINE int is_last(Tile *tile) { return __atomic_add_fetch(&tile->done, 1, __ATOMIC_ACQ_REL) == tile->chunks; }

/* What two parts of a row are multiplied by when they become one, and its maximum. */
typedef struct {
    vf maximum, first, second;
} Merge;

INLINE Merge merge_maxima(vf first, vf second) {
    const vf maximum = vf_max(first, second), reference = vf_select(maximum == -INF, vf_set1(0), maximum);
    return (Merge){maximum, vf_exp2(first - reference), vf_exp2(second - reference)};
}
