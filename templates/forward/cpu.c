/* @{ header }@ */

/* Fused attention on the CPU: O = softmax(scale * Q K^T + mask) V, and the log-sum-exp of each row.
 *
 * A tile is a block of queries of one head. Its queries are packed into panels of UNROLL_Q vectors, one query per
 * lane; keys and values stream past in blocks, and each panel in turn multiplies, takes the online softmax and
 * accumulates, all in scratch that stays in the caches. */

#define DTYPE_f32 0
#define DTYPE_f16 1
#define DTYPE_bf16 2
#define ISA_generic 0
#define ISA_avx2 1
#define ISA_avx512 2
#define ISA_avx512bf16 3
#define ISA_amx 4

#define DTYPE DTYPE_@{ dtype }@
#define ISA ISA_@{ isa }@
#define HEAD_DIM_QK @{ head_dim_qk }@
#define HEAD_DIM_V @{ head_dim_v }@
#define MASK_LEFT @{ mask_left }@
#define MASK_RIGHT @{ mask_right }@
#define RESIDUAL @{ residual }@  /* what O loses by rounding goes to memory, in bf16 */
#define DROPOUT @{ dropout }@    /* scores are dropped behind the softmax */
#define PROGRAM @{ program }@        /* a score program, and what it has */
#define PROGRAM_MASK @{ program_mask }@
#define PROGRAM_ANYWHERE @{ program_lists }@  /* the mask may leave out any block, not only those at the ends */
#define PROGRAM_SCORE @{ program_score }@
#define PROGRAM_SINK @{ program_sink }@
#define PROGRAM_FAR @{ program_far }@    /* scores may be far from zero, and maxima are in natural units */
#define PROGRAM_LONG @{ program_long }@  /* too long for the optimiser */
#define BLOCK_Q @{ block_q }@    /* queries of a tile */
#define BLOCK_KV @{ block_kv }@  /* keys of a block */
#define UNROLL_Q @{ unroll_q }@    /* register tile: vectors of queries ... */
#define UNROLL_KV @{ unroll_kv }@  /* ... by keys, or by columns of V */

#define AVX512 (ISA >= ISA_avx512)
#define AMX (ISA == ISA_amx && DTYPE == DTYPE_bf16)
#define PAIRS (ISA >= ISA_avx512bf16 && DTYPE == DTYPE_bf16)  /* multiply pairs of bf16, not floats */

#include <stdint.h>
#if AVX512
#include <immintrin.h>
#endif
#if AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

<% include "lib/cpu/abi.h" %>
<% include "lib/cpu/vec.h" %>
<% include "lib/cpu/convert.h" %>
#if RESIDUAL
<% include "lib/cpu/residual.h" %>
#endif
<% include "lib/cpu/exp2.h" %>
<% include "lib/cpu/mask.h" %>

#define PANEL (UNROLL_Q * LANES)  /* queries of a panel */
#define PANELS ((BLOCK_Q + PANEL - 1) / PANEL)
#define Q_WORDS ROUND_UP(WORDS(HEAD_DIM_QK), LANES)
#define O_ROWS ROUND_UP(HEAD_DIM_V, LANES)
#define S_ROWS ROUND_UP(BLOCK_KV, UNROLL_KV)
#define LOG2E 1.44269504088896341f
#define KV_ALIGN (AMX ? 32 : PAIRS ? 2 : 1)  /* a panel's keys start and end at a multiple of this within the block */

<% include "lib/cpu/pack.h" %>
#if DROPOUT
<% include "lib/cpu/dropout.h" %>
/* Behind the scores of a panel, in their places, all ones where one is kept. */
#define KEPT(scores) ((int32_t *)(scores) + S_ROWS * PANEL)
#endif
#if AMX
<% include "lib/cpu/amx.h" %>
#else
<% include "lib/cpu/matmul.h" %>
#endif
<% include "lib/cpu/softmax.h" %>
#if PROGRAM
<% include "lib/cpu/score.h" %>
<% include "lib/cpu/program.h" %>
#endif
<% include "lib/cpu/exact.h" %>

_Static_assert(BLOCK_KV % KV_ALIGN == 0, "block_kv must be a multiple of the key alignment");
_Static_assert(!AMX || (UNROLL_Q == 2 && UNROLL_KV == 2), "AMX keeps 2 x 2 tiles");

<% include "lib/cpu/gather.h" %>

/* What one thread works in. Every row is a whole number of vectors and every field starts a cache line. */
typedef struct {
    _Alignas(64) float q[PANELS][Q_WORDS * PANEL];
    _Alignas(64) float o[PANELS][O_ROWS * PANEL];
    _Alignas(64) float maximum[PANELS * PANEL];
    _Alignas(64) float sum[PANELS * PANEL];
    Gathered gathered[GATHERS ? PANELS : 0];
    _Alignas(64) float alpha[PANEL];
    _Alignas(64) float s[(DROPOUT ? 2 : 1) * S_ROWS * PANEL];
#if PROGRAM
    _Alignas(64) ProgramRows program[PANELS];
#endif
#if AMX
    _Alignas(64) float v[BLOCK_KV / 2 * O_ROWS];
    _Alignas(64) element k[BLOCK_KV * 2 * Q_WORDS];
#elif PAIRS
    _Alignas(64) float v[BLOCK_KV / 2 * HEAD_DIM_V];
#if HEAD_DIM_QK % 2
    _Alignas(64) element k[BLOCK_KV * K_PITCH];
#endif
#else
    _Alignas(64) float v[BLOCK_KV * HEAD_DIM_V];
    _Alignas(64) float k[BLOCK_KV * HEAD_DIM_QK];
#endif
    _Alignas(64) float rows[LANES * (Q_WORDS > O_ROWS ? Q_WORDS : O_ROWS)];
} Scratch;

/* One tile: its place in the tensors. */
typedef struct {
    const element *q, *k, *v;
    element *o;
#if RESIDUAL
    uint16_t *residual;
#endif
    float *lse, *weights;  /* the weights from the tile's first query on */
    int64_t query, query_end;
    float score_scale;  /* from Q K^T to units of log2 */
#if DROPOUT
    Dropout dropout;
    int64_t pair;  /* sequence * heads + head */
#endif
#if PROGRAM
    ProgramHead head;
#endif
} Tile;

static Tile find_tile(const ForwardArgs *args, uint64_t index) {
    uint64_t heads = (uint64_t)args->batch * args->heads;
    uint64_t blocks = ((uint64_t)args->q_len + BLOCK_Q - 1) / BLOCK_Q;
#if MASK_RIGHT
    /* Later queries have more keys: they go first, so that the short tiles fill the gaps at the end. */
    uint64_t block = blocks - 1 - index / heads, head_index = index % heads;
#else
    /* Neighbouring tiles share K and V. */
    uint64_t block = index % blocks, head_index = index / blocks;
    (void)heads;
#endif
    int64_t batch = head_index / args->heads, head = head_index % args->heads;
    int64_t kv_head = head / (args->heads / args->kv_heads);
    int64_t query = (int64_t)block * BLOCK_Q;
    const int64_t *qs = args->q_stride, *ks = args->k_stride, *vs = args->v_stride, *os = args->o_stride;
    return (Tile){
        .q = (const element *)args->q + batch * qs[0] + head * qs[1],
        .k = (const element *)args->k + batch * ks[0] + kv_head * ks[1],
        .v = (const element *)args->v + batch * vs[0] + kv_head * vs[1],
        .o = (element *)args->o + batch * os[0] + head * os[1],
#if RESIDUAL
        .residual = (uint16_t *)args->residual + batch * args->residual_stride[0] + head * args->residual_stride[1],
#endif
        .lse = args->lse ? args->lse + head_index * args->q_len : 0,
        .weights = args->weights ? args->weights + ((int64_t)head_index * args->q_len + query) * args->kv_len : 0,
        .query = query,
        .query_end = min64(query + BLOCK_Q, args->q_len),
        .score_scale = args->scale * LOG2E,
#if DROPOUT
        .dropout = DROPOUT_OF(args),
        .pair = head_index,
#endif
#if PROGRAM
        .head = {args->side, (int32_t)batch, (int32_t)head, (int32_t)kv_head, args->q_len, args->kv_len},
#endif
    };
}

/* The keys [begin, end) of one block, as words for the matmul. */
typedef struct {
    int64_t begin, end;
    const word *k, *v;
    int64_t k_stride, v_stride;  /* bytes from key to key in k, and from KV_ALIGN keys to the next in v */
} Block;

static Block load_block(const ForwardArgs *args, const Tile *tile, Scratch *scratch, int64_t begin, int64_t end) {
    const element *k = tile->k + begin * args->k_stride[2], *v = tile->v + begin * args->v_stride[2];
    int64_t k_stride = args->k_stride[2], v_stride = args->v_stride[2];
    int n = (int)(end - begin);
    (void)scratch, (void)n;
#if AMX
    pack_values(scratch->v, v, v_stride, n, scratch->rows);
    k = pack_keys(scratch->k, k, &k_stride, n, args->kv_len - begin);
    return (Block){begin, end, (const word *)k, scratch->v, k_stride * 2, TILE * O_ROWS * 4};
#elif PAIRS
    pack_values(scratch->v, v, v_stride, n);
#if HEAD_DIM_QK % 2 /* else rows are whole words where they lie */
    for (int j = 0; j < n; j++) copy_key(scratch->k + j * K_PITCH, k + j * k_stride);
    k = scratch->k, k_stride = K_PITCH;
#endif
    return (Block){begin, end, (const word *)k, (const word *)scratch->v, k_stride * 2, HEAD_DIM_V * 4};
#else
    /* Floats are used where they lie if the rows follow each other; rows far apart would share few cache sets. */
    if (DTYPE != DTYPE_f32 || k_stride != HEAD_DIM_QK) {
        pack_keys(scratch->k, k, k_stride, n);
        k = (const element *)scratch->k;
    }
    if (DTYPE != DTYPE_f32 || v_stride != HEAD_DIM_V) {
        pack_values(scratch->v, v, v_stride, n);
        v = (const element *)scratch->v;
    }
    return (Block){begin, end, (const word *)k, (const word *)v, HEAD_DIM_QK * 4, HEAD_DIM_V * 4};
#endif
}

#if PROGRAM_MASK
/* Whether any query of a tile attends to the keys [begin, end): before they are read. */
static int any_attends(const Tile *tile, const Scratch *scratch, int64_t begin, int64_t end) {
    int64_t query = tile->query;
    for (const ProgramRows *rows = scratch->program; query < tile->query_end; rows++, query += PANEL)
        if (attends(&tile->head, rows, query, 0, begin, end, UNROLL_Q)) return 1;
    return 0;
}
#endif

/* The scores of one panel (or of one vector of it, from lane `lane` on) with one block of keys: of `count` keys from
 * `first` on, -infinity where masked. Gives -1 where there is none, else whether V has infinities or NaN where one
 * is. */
INLINE int panel_scores(const ForwardArgs *args, const Tile *tile, Scratch *scratch, const Block *block, int panel,
                        int lane, const int vectors, int64_t *first, int *count) {
    int64_t query = tile->query + panel * PANEL + lane;
    int64_t query_end = min64(query + vectors * LANES, tile->query_end);
    KeyRange range = key_range(args, query, query_end);
    int64_t begin = max64(range.begin, block->begin), end = min64(range.end, block->end);
    if (begin >= end) return -1;
#if PROGRAM_MASK
    const int kind = program_tile(&tile->head, query, query_end, begin, end);
    if (kind < 0 || (kind == 0 && !attends(&tile->head, scratch->program + panel, query, lane, begin, end, vectors)))
        return -1;
#else
    const int kind = 1;
    (void)kind;
#endif
    begin -= (begin - block->begin) % KV_ALIGN;
    end = min64(end + (KV_ALIGN - 1) - (end - block->begin + KV_ALIGN - 1) % KV_ALIGN, block->end);

    int n = (int)(end - begin);
    int64_t skip = begin - block->begin;
    float *s = scratch->s + lane;
    scores(s, (const word *)((const char *)block->k + skip * block->k_stride), block->k_stride, n,
           scratch->q[panel] + lane, vectors);

    int special = 0;
    const float magnitude = scale_magnitude(tile->score_scale);
    (void)magnitude;
#if PROGRAM_MASK
    /* Keys that were taken in for the alignment are masked below, by the window. */
    if (kind == 0) {
        program_scores(s, n, &tile->head, scratch->program + panel, query, lane, begin, magnitude / LOG2E, 1, vectors);
        special = any_special(tile->v, args->v_stride[2], begin, end);
    }
#endif
#if PROGRAM_SCORE
    if (kind > 0)
        program_scores(s, n, &tile->head, scratch->program + panel, query, lane, begin, magnitude / LOG2E, 0, vectors);
#endif
#if MASK_LEFT || MASK_RIGHT
    /* Keys before `left` and from `right` on are masked for some of the queries. */
    int64_t left = min64(max64(range.full_begin, begin), end), right = max64(min64(range.full_end, end), left);
    mask_scores(s, 0, (int)(left - begin), args, query, begin, vectors);
    mask_scores(s, (int)(right - begin), n, args, query, begin, vectors);
    special = special || any_special(tile->v, args->v_stride[2], begin, left) ||
              any_special(tile->v, args->v_stride[2], right, end);
#endif
    *first = begin, *count = n;
    return special;
}

/* The panel, or one vector of it, against one block of keys. */
INLINE void attend(const ForwardArgs *args, const Tile *tile, Scratch *scratch, const Block *block, int panel,
                   int lane, const int vectors, const int is_long) {
    int64_t begin = 0, query = tile->query + panel * PANEL + lane;
    int n = 0;
    const int special = panel_scores(args, tile, scratch, block, panel, lane, vectors, &begin, &n);
    if (special < 0) return;
    const int64_t skip = begin - block->begin;
    const float magnitude = scale_magnitude(tile->score_scale);
    float *s = scratch->s + lane, *o = scratch->o[panel] + lane, *alpha = scratch->alpha + lane;
#if DROPOUT
    for (int x = 0; x < vectors * LANES; x += LANES)
        draw_kept(KEPT(s) + x, PANEL, &tile->dropout, begin, n, query + x, tile->pair);
#endif
    softmax_block(s, n, scratch->maximum + panel * PANEL + lane, scratch->sum + panel * PANEL + lane, alpha,
                  PROGRAM_SCORE ? LOG2E : magnitude, vectors);
#if PROGRAM
    const Visibility *also = &tile->head;
#else
    const Visibility *also = 0;
#endif
    if (special)
        for (int x = 0; x < vectors * LANES; x += LANES)
            weighted_values_exact(o + x, s + x, tile->v + begin * args->v_stride[2], args->v_stride[2], n, alpha + x,
                                  args, also, query + x, begin);
    else {
        const char *v = (const char *)block->v + skip / KV_ALIGN * block->v_stride;
        const int rows = (n + KV_ALIGN - 1) / KV_ALIGN, some = is_long ? LONG_CHAIN : rows;
        for (int j = 0; j < rows; j += some) {
            weighted_values(o, s + j * PANEL, (const word *)(v + j * block->v_stride), block->v_stride,
                            rows - j < some ? rows - j : some, alpha, vectors);
            if (is_long)
                UNROLL for (int x = 0; x < vectors; x++) vf_store(alpha + x * LANES, vf_set1(1));
        }
    }
}

/* Divides by the sum and writes O and the log-sum-exp of one vector of queries. */
static void finish(const ForwardArgs *args, const Tile *tile, Scratch *scratch, int panel, int lane) {
    int64_t query = tile->query + panel * PANEL + lane;
    int rows = (int)min64(LANES, tile->query_end - query);
    _Alignas(64) float inverse[LANES] = {0};
    for (int i = 0; i < rows; i++) {
        /* A row with nothing to attend to gives 0; one whose scores are all -infinity gives 0/0, as it should. */
        int empty = key_begin(args, query + i) >= key_end(args, query + i);
        float sum = scratch->sum[panel * PANEL + lane + i], maximum = scratch->maximum[panel * PANEL + lane + i];
#if PROGRAM
        /* Only its scores tell what a program masks: one that makes all of them -infinity masks the row. */
        empty |= sum == 0;
#endif
#if PROGRAM_SINK
        /* One more key, without a value: O shrinks, the log-sum-exp grows. A sum of NaN stays what it is. */
        const float sink = scratch->program[panel].sink[lane + i] * (LOG2E / MAXIMUM_LOG2);
        if (empty) sum = 0, maximum = -INF;
        const float top = sink > maximum ? sink : maximum;
        const float less = top == -INF ? 0 : ft_exp2f((maximum - top) * MAXIMUM_LOG2);
        sum = sum * less + (top == -INF ? 0 : ft_exp2f((sink - top) * MAXIMUM_LOG2));
        inverse[i] = empty ? 0 : less / sum;
        if (tile->lse) tile->lse[query + i] = sum == 0 ? -INF : (float)(top * MAXIMUM_LN + natural_log(sum));
        continue;
#endif
        inverse[i] = empty ? 0 : 1 / sum;
        if (tile->lse)
            tile->lse[query + i] = empty || sum == 0 ? -INF : (float)(maximum * MAXIMUM_LN + natural_log(sum));
    }
#if DROPOUT
    vf_store(inverse, vf_load(inverse) * vf_set1(tile->dropout.scale));
#endif
    vf_store(scratch->sum + panel * PANEL + lane, vf_load(inverse));  /* what the weights are multiplied by */
    unpack_output(tile->o + query * args->o_stride[2], args->o_stride[2], rows, scratch->o[panel] + lane,
                  vf_load(inverse), scratch->rows);
#if RESIDUAL
    for (int i = 0; i < rows; i++)
        store_lost(tile->residual + (query + i) * args->residual_stride[2], tile->o + (query + i) * args->o_stride[2],
                   scratch->rows + i * O_ROWS, HEAD_DIM_V);
#endif
}

/* The weights of a tile's queries: its scores once more, now that maxima and sums are known. */
static __attribute__((noinline)) void write_weights(const ForwardArgs *args, const Tile *tile, Scratch *scratch) {
    const int queries = (int)(tile->query_end - tile->query);
    const float scale = PROGRAM_SCORE ? LOG2E : scale_magnitude(tile->score_scale);
    KeyRange range = key_range(args, tile->query, tile->query_end);
#if PROGRAM_MASK
    program_keys(&tile->head, tile->query, tile->query_end, &range);
#endif
    __builtin_memset(tile->weights, 0, sizeof(float) * (uint64_t)queries * (uint64_t)args->kv_len);
    for (int64_t key = range.begin; key < range.end; key += BLOCK_KV) {
        const Block block = load_block(args, tile, scratch, key, min64(key + BLOCK_KV, range.end));
        for (int at = 0; at < queries; at += PANEL) {
            int64_t begin = 0;
            int n = 0;
            if (panel_scores(args, tile, scratch, &block, at / PANEL, 0, UNROLL_Q, &begin, &n) < 0) continue;
            for (int j = 0; j < n; j++)
                for (int x = at; x < at + PANEL && x < queries; x += LANES) {
                    const vf inverse = vf_load(scratch->sum + x), score = vf_load(scratch->s + j * PANEL + x - at);
                    const vf of_maximum = PROGRAM_FAR ? score : score * scale;
                    const vf weight = exp2_of(of_maximum - vf_load(scratch->maximum + x)) * inverse;
                    /* A row that attends to nothing has no maximum. */
                    vf_store(scratch->alpha, vf_select(inverse == 0, vf_set1(0), weight));
                    for (int i = 0; i < LANES && x + i < queries; i++)
                        tile->weights[(int64_t)(x + i) * args->kv_len + begin + j] = scratch->alpha[i];
                }
        }
    }
}

/* Brings what the panels have summed since the last time together with what came before. */
static __attribute__((noinline)) void gather_panels(Scratch *scratch, int queries, int before) {
    for (int i = 0; i < queries; i += LANES) {
        const int panel = i / PANEL, lane = i % PANEL;
        gather(scratch->gathered + panel, scratch->o[panel] + lane, scratch->maximum + i, scratch->sum + i, lane,
               before);
    }
}

uint64_t ft_tiles(const ForwardArgs *args) {
    return (uint64_t)args->batch * args->heads * (((uint64_t)args->q_len + BLOCK_Q - 1) / BLOCK_Q);
}

uint64_t ft_scratch_bytes(const ForwardArgs *args) {
    (void)args;
    return sizeof(Scratch);
}

void ft_tile(const ForwardArgs *args, uint64_t index, void *memory) {
    Scratch *scratch = memory;
    const Tile tile = find_tile(args, index);
    const int queries = (int)(tile.query_end - tile.query);

#if AMX
    configure_tiles();
#endif
    for (int i = 0; i < ROUND_UP(queries, PANEL); i += LANES)
        pack_queries(scratch->q[i / PANEL] + i % PANEL, tile.q + (tile.query + i) * args->q_stride[2],
                     args->q_stride[2], queries - i, tile.score_scale, scratch->rows);
    __builtin_memset(scratch->o, 0, sizeof scratch->o);
    for (int i = 0; i < PANELS * PANEL; i++) scratch->maximum[i] = -INF, scratch->sum[i] = 0;

#if PROGRAM
    for (int panel = 0; panel * PANEL < queries; panel++)
        program_rows(&tile.head, tile.query + panel * PANEL, scratch->program + panel);
#endif

    KeyRange range = key_range(args, tile.query, tile.query_end);
#if PROGRAM_MASK
    program_keys(&tile.head, tile.query, tile.query_end, &range);
#endif
    const int is_long = GATHERS && range.end - range.begin > LONG;
    int has_gathered = 0;
    for (int64_t key = range.begin; key < range.end; key += BLOCK_KV) {
        int64_t key_end = min64(key + BLOCK_KV, range.end);
        if (is_long && key > range.begin && (key - range.begin) % SPAN == 0) {
            gather_panels(scratch, queries, has_gathered);
            has_gathered = 1;
        }
#if PROGRAM_MASK
        const int kind = program_tile(&tile.head, tile.query, tile.query_end, key, key_end);
        if (kind < 0 || (kind == 0 && !any_attends(&tile, scratch, key, key_end))) continue;
#endif
        Block block = load_block(args, &tile, scratch, key, key_end);
        for (int panel = 0; panel * PANEL < queries; panel++) {
            int rest = queries - panel * PANEL;
            if (AMX || rest > PANEL - LANES)
                attend(args, &tile, scratch, &block, panel, 0, UNROLL_Q, is_long);
            else
                for (int lane = 0; lane < rest; lane += LANES)
                    attend(args, &tile, scratch, &block, panel, lane, 1, is_long);
        }
    }

    if (has_gathered) {
        gather_panels(scratch, queries, 1);
        for (int i = 0; i < queries; i += LANES) {
            const int panel = i / PANEL, lane = i % PANEL;
            read_gathered(scratch->gathered + panel, scratch->o[panel] + lane, scratch->sum + i, lane);
        }
    }
    for (int i = 0; i < queries; i += LANES) finish(args, &tile, scratch, i / PANEL, i % PANEL);
    if (tile.weights) write_weights(args, &tile, scratch);
#if AMX
    _tile_release();
#endif
}
