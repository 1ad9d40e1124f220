/* @{ header }@ */

/* Fused attention of a ragged batch on the CPU: sequences of different lengths, whose K and V lie in a store that is
 * indexed at run time.
 *
 * The rows of all query heads of a KV head meet its keys together. Few of them are multiplied with rows of keys where
 * these lie; many are packed into panels, one row per lane, as in forward/cpu, and the keys are gathered block by
 * block. Keys are split into ranges, whose results the last one to be done merges. */

#define DTYPE_f32 0
#define DTYPE_f16 1
#define DTYPE_bf16 2
#define DTYPE_e4m3 3
#define KV_f32 0
#define KV_f16 1
#define KV_bf16 2
#define KV_e4m3 3
#define KV_e5m2 4
#define KV_int8 5
#define ISA_generic 0
#define ISA_avx2 1
#define ISA_avx512 2
#define ISA_avx512bf16 3
#define ISA_amx 4

#define OUTPUT DTYPE_@{ output }@
#define Q_CODES (DTYPE_@{ dtype }@ == DTYPE_e4m3)  /* Q is made of codes, which every dtype of convert.h holds */
#define DTYPE (OUTPUT == DTYPE_e4m3 ? DTYPE_f32 : OUTPUT)
#define KV KV_@{ kv_element }@       /* elements of the store */
#define KV_SCALED @{ kv_scaled }@    /* they are quantised */
#define KV_PER_TOKEN @{ kv_scale_per_token }@
#define V_COLUMNS @{ v_columns }@    /* the tokens of V lie side by side */
#define ISA ISA_@{ isa }@
#define HEAD_DIM_QK @{ head_dim_qk }@
#define HEAD_DIM_V @{ head_dim_v }@
#define MASK_LEFT @{ mask_left }@
#define MASK_RIGHT @{ mask_right }@
#define DROPOUT @{ dropout }@    /* scores are dropped behind the softmax */
#define PROGRAM @{ program }@        /* a score program, and what it has */
#define PROGRAM_MASK @{ program_mask }@
#define PROGRAM_ANYWHERE @{ program_lists }@  /* the mask may leave out any block, not only those at the ends */
#define PROGRAM_SCORE @{ program_score }@
#define PROGRAM_SINK @{ program_sink }@
#define PROGRAM_FAR @{ program_far }@    /* scores may be far from zero, and maxima are in natural units */
#define PROGRAM_LONG @{ program_long }@  /* too long for the optimiser */
#define BLOCK_Q @{ block_q }@    /* rows of a tile */
#define BLOCK_KV @{ block_kv }@  /* keys of a block */
#define UNROLL_Q @{ unroll_q }@    /* register tile: vectors of rows ... */
#define UNROLL_KV @{ unroll_kv }@  /* ... by keys, or by columns of V */
#define FEW_ROWS @{ few_rows }@    /* rows of a tile that are multiplied one by one */
#define FEW_BLOCK @{ few_block }@  /* keys of a block of such a tile */
#define SPLIT_KV @{ split_kv }@    /* keys of a range at least */
#define SPLIT_TILES @{ split_tiles }@  /* ranges of a call, about, where its keys are split */

#define AVX512 (ISA >= ISA_avx512)
/* Quantised elements are multiplied as floats: weights as bf16 would cost more precision than they did. */
#define AMX (ISA == ISA_amx && DTYPE == DTYPE_bf16 && !KV_SCALED)
#define PAIRS (ISA >= ISA_avx512bf16 && DTYPE == DTYPE_bf16 && !KV_SCALED)  /* multiply pairs of bf16, not floats */

#include <stdint.h>
#if AVX512
#include <immintrin.h>
#endif
#if AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define KEYS (BLOCK_KV > FEW_BLOCK ? BLOCK_KV : FEW_BLOCK)
#define PANEL (UNROLL_Q * LANES)  /* rows of a panel */
#define PANELS ((BLOCK_Q + PANEL - 1) / PANEL)
#define Q_WORDS ROUND_UP(WORDS(HEAD_DIM_QK), LANES)
#define O_ROWS ROUND_UP(HEAD_DIM_V, LANES)
#define S_ROWS ROUND_UP(BLOCK_KV, UNROLL_KV)
#define LOG2E 1.44269504088896341f
#define KV_ALIGN (AMX ? 32 : PAIRS ? 2 : 1)  /* a panel's keys start and end at a multiple of this within the block */

<% include "lib/cpu/vec.h" %>
<% include "lib/cpu/convert.h" %>
#if OUTPUT == DTYPE_e4m3
<% include "lib/cpu/narrow_8.h" %>
#endif
<% include "lib/cpu/codes.h" %>
<% include "lib/cpu/store.h" %>
<% include "lib/cpu/exp2.h" %>
<% include "lib/cpu/ragged.h" %>
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
<% include "lib/cpu/row_keys.h" %>
<% include "lib/cpu/softmax.h" %>
#if PROGRAM
<% include "lib/cpu/score.h" %>
<% include "lib/cpu/ragged_program.h" %>
#endif
#if FEW_ROWS
<% include "lib/cpu/few_products.h" %>
<% include "lib/cpu/few_rows.h" %>
#endif
<% include "lib/cpu/ranges.h" %>
<% include "lib/cpu/panels.h" %>

_Static_assert(BLOCK_KV % KV_ALIGN == 0, "block_kv must be a multiple of the key alignment");
_Static_assert(!AMX || (UNROLL_Q == 2 && UNROLL_KV == 2), "AMX keeps 2 x 2 tiles");
_Static_assert(FEW_ROWS <= BLOCK_Q && FEW_BLOCK % LANES == 0, "few rows are rows of a tile, their keys whole vectors");
_Static_assert(FEW_ROWS == 0 || !(PROGRAM_MASK || PROGRAM_SCORE), "programs change the scores of panels");
_Static_assert(FEW_ROWS == 0 || !DROPOUT, "weights are dropped in panels");

/* What one thread works in. */
typedef struct scratch {
    _Alignas(64) Keys keys[3];
    _Alignas(64) Panels panels;
#if FEW_ROWS
    _Alignas(64) Few few;
#endif
#if PROGRAM
    _Alignas(64) ProgramRows program[PANELS];
#endif
} Scratch;

/* A tile, where its sequence lies, and what its scores are multiplied by. */
typedef struct {
    const RaggedArgs *args;
    const Tile *tile;
    Sequence s;
    int32_t group, kv_head;
    float score_scale;  /* from Q K^T to units of log2 */
    float v_scale;
#if PROGRAM
    ProgramHead head;
#endif
} Work;

/* Row i of a tile: the row of its sequence, and the query head. */
INLINE int64_t query_of(const Work *w, int64_t i) { return (w->tile->row + i) / w->group; }
INLINE int64_t head_of(const Work *w, int64_t i) {
    return w->kv_head * (int64_t)w->group + (w->tile->row + i) % w->group;
}

INLINE const query_element *q_row(const Work *w, int64_t i) {
    const int64_t *stride = w->args->q_stride;
    return (const query_element *)w->args->q + w->s.q + query_of(w, i) * stride[2] + head_of(w, i) * stride[1];
}

INLINE output_element *o_row(const Work *w, int64_t i) {
    const int64_t *stride = w->args->o_stride;
    return (output_element *)w->args->o + w->s.o + query_of(w, i) * stride[2] + head_of(w, i) * stride[1];
}

/* From Q K^T to units of log2, but for scales of tokens. */
INLINE float score_scale_of(const RaggedArgs *args, int64_t b, int64_t kv_head) {
    const float scale = args->scale * LOG2E * Q_SCALE(args, b, kv_head);
    return scale * head_scale(args->k_scale, args->k_scale_stride, b, kv_head);
}

/* What O of a row is multiplied by, from the maximum of its scores as softmax.h has it and the sum of its weights;
 * writes the log-sum-exp. `sink` is a logit in natural units. */
static float finish_row(const Work *w, int64_t i, float maximum, float sum, float sink) {
    const RaggedArgs *args = w->args;
    const int64_t query = query_of(w, i);
    /* A row with nothing to attend to gives 0; one whose scores are all -infinity gives 0/0, as it should. A program's
     * masks and pages that are not there show in the sum alone. */
    int empty = row_begin(args, &w->s, query) >= row_end(args, &w->s, query);
    if (PROGRAM || args->k_table || args->slots || w->s.slot >= args->pages) empty |= sum == 0;
    float inverse = empty ? 0 : w->v_scale / sum;
#if PROGRAM_SINK
    /* One more key, without a value: O shrinks, the log-sum-exp grows. A sum of NaN stays what it is. */
    sink *= LOG2E / MAXIMUM_LOG2;
    if (empty) sum = 0, maximum = -INF;
    const float top = sink > maximum ? sink : maximum;
    const float less = top == -INF ? 0 : ft_exp2f((maximum - top) * MAXIMUM_LOG2);
    sum = sum * less + (top == -INF ? 0 : ft_exp2f((sink - top) * MAXIMUM_LOG2));
    inverse = empty ? 0 : less * w->v_scale / sum;
    maximum = top, empty = sum == 0;
#else
    (void)sink;
#endif
#if DROPOUT
    inverse *= args->dropout_scale;
#endif
    inverse *= O_SCALE(args);
    if (args->lse) {
        const int64_t at = w->s.lse + query * args->lse_stride[2] + head_of(w, i) * args->lse_stride[1];
        const int none = empty || sum == 0;
        args->lse[at] = none ? args->lse_empty : (float)((maximum * MAXIMUM_LN + natural_log(sum)) * args->lse_unit);
    }
    return inverse;
}

#if PROGRAM_MASK
/* Whether any row of a tile attends to the keys [begin, end): before they are read. */
static int any_attends(const Work *w, const Scratch *scratch, int64_t begin, int64_t end) {
    for (int row = 0; row < w->tile->rows; row += PANEL) {
        const int count = (int)min64(w->tile->rows - row, PANEL);
        if (attends(&w->head, scratch->program + row / PANEL, 0, count, begin, end)) return 1;
    }
    return 0;
}
#endif

/* weighted_values where V has an infinity or NaN that some row does not attend to. */
static void exact_rows(const Work *w, Scratch *scratch, int64_t row, int count, const float *s, float *o,
                       const float *alpha, const Keys *keys, int64_t begin, int skip, int n) {
    uint8_t seen[BLOCK_KV];
    for (int x = 0; x < count; x++) {
        const RowKeys *rows = &scratch->panels.row_keys;
        for (int j = 0; j < n; j++) {
            const int64_t key = begin + j;
            seen[j] = key >= rows->begin[row + x] && key < rows->end[row + x] && !keys->missing[skip + j];
#if PROGRAM_MASK
            seen[j] = seen[j] && program_visible(&w->head, scratch->program + row / PANEL, (int)(row % PANEL) + x, key);
#endif
        }
        weighted_values_exact(o + x, s + x, keys, skip, n, alpha[x], seen);
    }
    (void)w;
}

/* One panel (or one vector of it, from lane `lane` on) against one block of keys. */
INLINE void attend(const Work *w, Scratch *scratch, const Keys *keys, const Block *block, int panel, int lane,
                   const int vectors) {
    Panels *p = &scratch->panels;
    const int64_t row = panel * PANEL + lane, last = min64(row + vectors * LANES, w->tile->rows) - 1;
    int64_t begin = max64(p->row_keys.begin[row], block->begin), end = min64(p->row_keys.end[last], block->end);
    if (begin >= end) return;
#if PROGRAM_MASK
    const int kind = program_tile(&w->head, query_of(w, row), query_of(w, last) + 1, begin, end);
    const int rows = (int)(last - row) + 1;
    if (kind < 0 || (kind == 0 && !attends(&w->head, scratch->program + panel, lane, rows, begin, end))) return;
#else
    const int kind = 1;
    (void)kind;
#endif
    begin -= (begin - block->begin) % KV_ALIGN;
    end = min64(end + (KV_ALIGN - 1) - (end - block->begin + KV_ALIGN - 1) % KV_ALIGN, block->end);

    const int n = (int)(end - begin), skip = (int)(begin - block->begin);
    float *s = p->s + lane, *o = p->o[panel] + lane, *alpha = p->alpha + lane;
    const word *const k = (const word *)((const char *)block->k + skip * block->k_stride);
    scores(s, k, block->k_stride, n, p->q[panel] + lane, vectors);

    int special = 0;
    const float magnitude = scale_magnitude(w->score_scale);
#if PROGRAM_MASK
    /* Keys that were taken in for the alignment are masked below, by the window. */
    if (kind == 0) {
        program_scores(s, n, &w->head, scratch->program + panel, lane, begin, magnitude / LOG2E, 1, vectors);
        special = any_special(keys, 0, skip, skip + n);
    }
#endif
#if PROGRAM_SCORE
    if (kind > 0) program_scores(s, n, &w->head, scratch->program + panel, lane, begin, magnitude / LOG2E, 0, vectors);
#endif
    /* Keys before `left` and from `right` on are masked for some of the rows. */
    const int64_t full_begin = p->row_keys.begin[last], full_end = p->row_keys.end[row];
    const int64_t left = min64(max64(full_begin, begin), end), right = max64(min64(full_end, end), left);
    mask_scores(s, 0, (int)(left - begin), &p->row_keys, row, begin, vectors);
    mask_scores(s, (int)(right - begin), n, &p->row_keys, row, begin, vectors);
    special = special || any_special(keys, 0, skip, skip + (int)(left - begin)) ||
              any_special(keys, 0, skip + (int)(right - begin), skip + n);
    if (keys->any_missing)
        for (int j = 0; j < n; j++) {
            if (!keys->missing[skip + j]) continue;
            for (int x = 0; x < vectors * LANES; x += LANES) vf_store(s + j * PANEL + x, vf_set1(-INF));
        }

#if DROPOUT
    const Dropout dropout = DROPOUT_OF(w->args);
    for (int x = 0; x < vectors * LANES; x += LANES) {
        uint32_t query[LANES], pair[LANES];
        for (int i = 0; i < LANES; i++) {
            query[i] = (uint32_t)query_of(w, row + x + i);
            pair[i] = (uint32_t)(w->tile->b * (int64_t)w->args->heads + head_of(w, row + x + i));
        }
        draw_rows(KEPT(s) + x, PANEL, &dropout, begin, n, query, pair);
    }
#endif
    softmax_block(s, n, p->maximum + row, p->sum + row, alpha, PROGRAM_SCORE ? LOG2E : magnitude, vectors);
    if (special)
        exact_rows(w, scratch, row, (int)(last - row) + 1, s, o, alpha, keys, begin, skip, n);
    else
        weighted_values(o, s, (const word *)((const char *)block->v + skip / KV_ALIGN * block->v_stride),
                        block->v_stride, (n + KV_ALIGN - 1) / KV_ALIGN, alpha, vectors);
}

/* One range of a tile of many rows. */
static void attend_panels(const Work *w, Scratch *scratch, int64_t begin, int64_t end) {
    Panels *p = &scratch->panels;
    const int rows = w->tile->rows;
    for (int i = 0; i < ROUND_UP(rows, PANEL); i++) {
        const int64_t query = query_of(w, min64(i, rows - 1));
        p->row_keys.begin[i] = row_begin(w->args, &w->s, query), p->row_keys.end[i] = row_end(w->args, &w->s, query);
    }
    for (int i = 0; i < ROUND_UP(rows, PANEL); i += LANES) {
        for (int x = 0; x < LANES && i + x < rows; x++)
            read_query(p->elements + x * HEAD_DIM_QK, q_row(w, i + x), HEAD_DIM_QK);
        pack_queries(p->q[i / PANEL] + i % PANEL, p->elements, HEAD_DIM_QK, rows - i, w->score_scale, p->rows);
    }
    for (int i = 0; i < ROUND_UP(rows, PANEL); i++) p->maximum[i] = -INF, p->sum[i] = 0;
    for (int i = 0; i < rows; i += PANEL) __builtin_memset(p->o[i / PANEL], 0, sizeof p->o[0]);
    for (int64_t key = begin; key < end; key += BLOCK_KV) {
        const int64_t key_end = min64(key + BLOCK_KV, end);
#if PROGRAM_MASK
        const int kind = program_tile(&w->head, query_of(w, 0), query_of(w, rows - 1) + 1, key, key_end);
        if (kind < 0 || (kind == 0 && !any_attends(w, scratch, key, key_end))) continue;
#endif
        Keys *keys = scratch->keys;
        find_keys(keys, w->args, &w->s, w->kv_head, key, (int)(key_end - key));
        const Block block = gather_block(keys, p, key, key_end);
        for (int panel = 0; panel * PANEL < rows; panel++) {
            const int rest = rows - panel * PANEL;
            if (AMX || rest > PANEL - LANES)
                attend(w, scratch, keys, &block, panel, 0, UNROLL_Q);
            else
                for (int lane = 0; lane < rest; lane += LANES) attend(w, scratch, keys, &block, panel, lane, 1);
        }
    }
}

static void save_panels(const Tile *tile, const Scratch *scratch, float *state) {
    const Panels *p = &scratch->panels;
    for (int i = 0; i < tile->rows; i += PANEL, state += (O_ROWS + 2) * PANEL) {
        __builtin_memcpy(state, p->o[i / PANEL], sizeof p->o[0]);
        __builtin_memcpy(state + O_ROWS * PANEL, p->maximum + i, sizeof(float) * PANEL);
        __builtin_memcpy(state + (O_ROWS + 1) * PANEL, p->sum + i, sizeof(float) * PANEL);
    }
}

/* Adds the state of a range whose keys come before those of what is there, or after. */
static void merge_panels(const Tile *tile, Scratch *scratch, const float *state, int before) {
    Panels *p = &scratch->panels;
    for (int i = 0; i < tile->rows; i += PANEL, state += (O_ROWS + 2) * PANEL)
        for (int x = 0; x < PANEL; x += LANES) {
            const vf own = vf_load(p->maximum + i + x), other = vf_load(state + O_ROWS * PANEL + x);
            const Merge m = before ? merge_maxima(other, own) : merge_maxima(own, other);
            float *sum = p->sum + i + x, *o = p->o[i / PANEL] + x;
            vf_store(p->maximum + i + x, m.maximum);
            vf_store(sum, merged(vf_load(sum), vf_load(state + (O_ROWS + 1) * PANEL + x), m, before));
            for (int d = 0; d < O_ROWS; d++)
                vf_store(o + d * PANEL, merged(vf_load(o + d * PANEL), vf_load(state + d * PANEL + x), m, before));
        }
}

static void finish_panels(const Work *w, Scratch *scratch) {
    Panels *p = &scratch->panels;
    for (int i = 0; i < w->tile->rows; i += LANES) {
        _Alignas(64) float inverse[LANES] = {0};
        const int count = (int)min64(LANES, w->tile->rows - i);
        for (int x = 0; x < count; x++) {
#if PROGRAM
            const float sink = scratch->program[i / PANEL].sink[i % PANEL + x];
#else
            const float sink = 0;
#endif
            inverse[x] = finish_row(w, i + x, p->maximum[i + x], p->sum[i + x], sink);
        }
        unpack_output(p->elements, HEAD_DIM_V, count, p->o[i / PANEL] + i % PANEL, vf_load(inverse), p->rows);
        for (int x = 0; x < count; x++)
            write_output(o_row(w, i + x), p->elements + x * HEAD_DIM_V, HEAD_DIM_V);
    }
}

#if FEW_ROWS
static void start_few(const Work *w, Few *few, const int heads, const int stored_rows) {
    const int rows = w->tile->rows;
    __builtin_memset(few->o, 0, sizeof(float) * heads * stored_rows * FEW_O);
    for (int i = 0; i < stored_rows; i++) {
        const int64_t query = query_of(w, min64(i, rows - 1));
        few->begin[i] = row_begin(w->args, &w->s, query), few->end[i] = row_end(w->args, &w->s, query);
    }
    for (int group = 0; group * WIDEST < rows; group++)
        for (int x = 0; x < LANES; x++) {
            const int row = group * WIDEST + x / (LANES / few_width(rows, group)), at = group * LANES + x;
            few->lane_begin[at] = few->begin[row], few->lane_end[at] = few->end[row];
        }
    for (int i = 0; i < heads * few_groups(rows) * LANES; i++) few->lane_maximum[i] = -INF, few->lane_sum[i] = 0;
    Work head = *w;
    for (int i = 0; i < heads * stored_rows; i++) {
        head.kv_head = w->tile->kv_head + i / stored_rows;
        if (i % stored_rows < rows) {
#if Q_CODES
            element q[HEAD_DIM_QK];
            read_query(q, q_row(&head, i % stored_rows), HEAD_DIM_QK);
            few_query(few->q + i * FEW_Q, q);
#else
            few_query(few->q + i * FEW_Q, q_row(&head, i % stored_rows));
#endif
        } else __builtin_memset(few->q + i * FEW_Q, 0, sizeof(few_element) * FEW_Q);
    }
}

/* One block of keys, as they are found for the first head of a tile, against the rows of all of them. */
static void few_block(const Work *w, Scratch *scratch, const Keys *found, int64_t key, int n, Ahead *ahead) {
    const RaggedArgs *args = w->args;
    const int rows = w->tile->rows, stored_rows = few_stored(rows);
    for (int head = 0; head < w->tile->heads; head++) {
        const Keys *keys = found;
        int64_t k_offset = head * args->k_stride[2], v_offset = head * args->v_stride[2];
        /* Rows of zeros lie in the store of no head, and scales of tokens where a head has its own. */
        if (head && (KV_PER_TOKEN || found->any_missing || n % LANES)) {
            find_keys(scratch->keys + 2, args, &w->s, w->tile->kv_head + head, key, n);
            keys = scratch->keys + 2, k_offset = v_offset = 0;
        }
        const int32_t kv_head = w->tile->kv_head + head;
        const float scale = score_scale_of(args, w->tile->b, kv_head);
        for (int group = 0; group * WIDEST < rows; group++) {
            Ahead *const next = group == 0 ? ahead : 0;
            switch (few_width(rows, group)) {
#define ATTEND(width) \
    few_attend(&scratch->few, keys, k_offset, v_offset, stored_rows, head, group, key, n, scale, next, width)
            case 1: ATTEND(1); break;
            case 2: ATTEND(2); break;
            case 4: ATTEND(4); break;
#if WIDEST == 8
            default: ATTEND(8); break;
#endif
            }
        }
    }
}

/* One range of a tile of few rows. */
static void attend_few(const Work *w, Scratch *scratch, int64_t begin, int64_t end) {
    Few *few = &scratch->few;
    const RaggedArgs *args = w->args;
    const int heads = w->tile->heads, rows = w->tile->rows, stored_rows = few_stored(rows), block = few_block_of(heads);
    Keys *keys = scratch->keys;
    int n = (int)min64(block, end - begin);
    if (n > 0) {
        find_keys(keys, args, &w->s, w->tile->kv_head, begin, n);
        Ahead k = look_ahead(keys->k, n, args->k_stride, heads, HEAD_DIM_QK);
        Ahead v = look_ahead(keys->v, n, args->v_stride, heads, HEAD_DIM_V);
        while (!is_last_run(&k)) ask(&k, 1);
        while (!is_last_run(&v)) ask(&v, 1);
    }
    start_few(w, few, heads, stored_rows);
    for (int64_t key = begin; key < end;) {
        const int64_t next_key = key + n;
        const int next = (int)min64(block, end - next_key);
        Keys *found = scratch->keys + (keys == scratch->keys);
        if (next > 0) find_keys(found, args, &w->s, w->tile->kv_head, next_key, next);
        Ahead ahead[2] = {look_ahead(found->k, next, args->k_stride, heads, HEAD_DIM_QK),
                          look_ahead(found->v, next, args->v_stride, heads, HEAD_DIM_V)};
        few_block(w, scratch, keys, key, n, next > 0 ? ahead : 0);
        keys = found, key = next_key, n = next;
    }
    for (int i = 0; i < heads * rows; i++) {
        const int head = i / rows, row = i % rows, group = row / WIDEST, some = LANES / few_width(rows, group);
        const int lane = (head * few_groups(rows) + group) * LANES + row % WIDEST * some;
        float sum = 0;
        for (int m = 0; m < some; m++) sum += few->lane_sum[lane + m];
        few->sum[head * stored_rows + row] = sum, few->maximum[head * stored_rows + row] = few->lane_maximum[lane];
    }
}

static void save_few(const Tile *tile, const Scratch *scratch, float *state) {
    const Few *few = &scratch->few;
    const int rows = tile->heads * few_stored(tile->rows);
    __builtin_memcpy(state, few->o, sizeof(float) * rows * FEW_O);
    __builtin_memcpy(state + rows * FEW_O, few->maximum, sizeof(float) * rows);
    __builtin_memcpy(state + rows * (FEW_O + 1), few->sum, sizeof(float) * rows);
}

/* Adds the state of a range whose keys come before those of what is there, or after. */
static void merge_few(const Tile *tile, Scratch *scratch, const float *state, int before) {
    Few *few = &scratch->few;
    const int rows = tile->heads * few_stored(tile->rows);
    const float *maximum = state + rows * FEW_O, *sum = maximum + rows;
    for (int i = 0; i < rows; i++, state += FEW_O) {
        const vf own = vf_set1(few->maximum[i]), other = vf_set1(maximum[i]);
        const Merge m = before ? merge_maxima(other, own) : merge_maxima(own, other);
        few->maximum[i] = m.maximum[0];
        few->sum[i] = merged(vf_set1(few->sum[i]), vf_set1(sum[i]), m, before)[0];
        float *o = few->o + i * FEW_O;
        for (int d = 0; d < FEW_O; d += LANES) vf_store(o + d, merged(vf_load(o + d), vf_load(state + d), m, before));
    }
}

static void finish_few(Work *w, Scratch *scratch) {
    Few *few = &scratch->few;
    const Tile *tile = w->tile;
    for (int i = 0; i < tile->heads * tile->rows; i++) {
        const int head = i / tile->rows, row = i % tile->rows, at = head * few_stored(tile->rows) + row;
        w->kv_head = tile->kv_head + head;
        w->v_scale = head_scale(w->args->v_scale, w->args->v_scale_stride, tile->b, w->kv_head);
#if PROGRAM
        w->head.h_kv = w->kv_head;
        if (row % PANEL == 0) program_rows(&w->head, tile->row + row, tile->row + tile->rows - 1, scratch->program);
        const float sink = scratch->program[0].sink[row % PANEL];
#else
        const float sink = 0;
#endif
        _Alignas(64) float result[FEW_O];
        few_ordered(result, few->o + at * FEW_O, finish_row(w, row, few->maximum[at], few->sum[at], sink));
        narrow_output(o_row(w, row), result, HEAD_DIM_V);
    }
}
#endif

INLINE uint64_t state_floats(const Tile *tile) {
#if FEW_ROWS
    if (IS_FEW(tile->rows)) return (uint64_t)tile->heads * few_stored(tile->rows) * (FEW_O + 2);
#endif
    return (uint64_t)ROUND_UP(tile->rows, PANEL) * (O_ROWS + 2);
}

uint64_t ft_scratch_bytes(const RaggedArgs *args) {
    (void)args;
    return sizeof(Scratch);
}

void ft_tile(const RaggedArgs *args, uint64_t range, void *memory) {
    Scratch *scratch = memory;
    Tile *tile = tile_of(args, range);
    const int64_t chunk = (int64_t)(range - tile->first), begin = tile->begin + chunk * tile->chunk;
    const int64_t end = min64(begin + tile->chunk, tile->end);
    Work w = {.args = args, .tile = tile, .s = sequence_of(args, tile->b), .group = args->heads / args->kv_heads};
    w.kv_head = tile->kv_head;
#if PROGRAM
    w.head = program_head(args, &w.s, tile->b, tile->kv_head);
#endif
#if FEW_ROWS
    if (IS_FEW(tile->rows)) {
        attend_few(&w, scratch, begin, end);
        if (join_ranges(args, tile, scratch, chunk, save_few, merge_few)) finish_few(&w, scratch);
        return;
    }
#endif
    w.score_scale = score_scale_of(args, tile->b, tile->kv_head);
    w.v_scale = head_scale(args->v_scale, args->v_scale_stride, tile->b, tile->kv_head);
#if PROGRAM
    for (int row = 0; row < tile->rows; row += PANEL)
        program_rows(&w.head, tile->row + row, tile->row + tile->rows - 1, scratch->program + row / PANEL);
#endif
#if AMX
    configure_tiles();
#endif
    attend_panels(&w, scratch, begin, end);
#if AMX
    _tile_release();
#endif
    if (join_ranges(args, tile, scratch, chunk, save_panels, merge_panels)) finish_panels(&w, scratch);
}
