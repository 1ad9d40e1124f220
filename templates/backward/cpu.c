/* @{ header }@ */

/* The gradients of fused attention on the CPU: dQ, dK and dV from Q, K, V, O, dO and the log-sum-exp.
 *
 *   P = exp(S - lse)   dP = dO V^T   dS = P (dP - D)   D = rowsum(dO O) - dlse
 *   dV = P^T dO        dK = scale dS^T Q               dQ = scale dS K
 *
 * There are two kinds of tiles. One is a block of keys: it walks over the queries that see them, head after head of
 * its group, and sums dK and dV. The other is a block of queries: it walks over its keys and sums dQ. Both compute the
 * scores of a block of keys and queries anew, one query per lane, so no tile needs what another has computed, sums have
 * one order, and memory is that of the tensors. */

#define DTYPE_f32 0
#define DTYPE_f16 1
#define DTYPE_bf16 2
#define ISA_generic 0
#define ISA_avx2 1
#define ISA_avx512 2

#define DTYPE DTYPE_@{ dtype }@
#define ISA ISA_@{ isa }@
#define HEAD_DIM_QK @{ head_dim_qk }@
#define HEAD_DIM_V @{ head_dim_v }@
#define MASK_LEFT @{ mask_left }@
#define MASK_RIGHT @{ mask_right }@
#define RESIDUAL @{ residual }@  /* O comes with what it lost by rounding, in bf16 */
#define DROPOUT @{ dropout }@    /* scores were dropped behind the softmax */
#define PACKED @{ packed }@                /* sequences of different lengths, one after the other */
#define PROGRAM @{ program }@              /* a score program */
#define PROGRAM_FAR @{ program_far }@      /* scores may be far from zero */
#define PROGRAM_LONG @{ gradient_long }@  /* too long for the optimiser */
#define BLOCK_Q @{ block_q }@    /* queries of a block */
#define BLOCK_KV @{ block_kv }@  /* keys of a block */

#define AVX512 (ISA >= ISA_avx512)

#include <stdint.h>
#if AVX512
#include <immintrin.h>
#endif

@{ backward_args }@
#define EXPORT __attribute__((visibility("default")))

/* As those of a forward kernel: tiles are handed out in ascending order, from any thread, the longest first. */
EXPORT uint64_t ft_tiles(const BackwardArgs *args);
EXPORT uint64_t ft_scratch_bytes(const BackwardArgs *args);
EXPORT void ft_tile(const BackwardArgs *args, uint64_t tile, void *scratch);

<% include "lib/cpu/vec.h" %>
<% include "lib/cpu/convert.h" %>
#if RESIDUAL
<% include "lib/cpu/residual.h" %>
#endif
<% include "lib/cpu/exp2.h" %>

#if DROPOUT
<% include "lib/cpu/dropout.h" %>
#endif

#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))
#define PANEL BLOCK_Q
#define DIM_QK ROUND_UP(HEAD_DIM_QK, LANES)  /* floats of a row in scratch; those beyond the head dim are 0 */
#define DIM_V ROUND_UP(HEAD_DIM_V, LANES)
#define LOG2E 1.44269504088896341f

#if PROGRAM
<% include "lib/cpu/score.h" %>
<% include "lib/cpu/program_gradient.h" %>
#endif

_Static_assert(PANEL % LANES == 0, "a block of queries is whole vectors");

/* What one thread works in. Every row is a whole number of vectors and every field starts a cache line. */
typedef struct {
    /* The block of queries: rows, the same transposed, and what each row has. */
    _Alignas(64) float q[PANEL * DIM_QK];
    _Alignas(64) float dout[PANEL * DIM_V];
    _Alignas(64) float q_columns[DIM_QK * PANEL];
    _Alignas(64) float dout_columns[DIM_V * PANEL];
    _Alignas(64) float lse[PANEL];
    _Alignas(64) float delta[PANEL];
    _Alignas(64) int32_t begin[PANEL];  /* keys that it attends to by the window; none of an empty row */
    _Alignas(64) int32_t end[PANEL];
#if PROGRAM_FAR
    /* Of a far row its maximum is in the place of the log-sum-exp, and here is the logarithm by 2 of its sum;
     * else 0. */
    _Alignas(64) float log_sum[PANEL];
    _Alignas(64) float far_maximum[PANEL];
    _Alignas(64) float far_sum[PANEL];
    _Alignas(64) float far_k[BLOCK_KV * DIM_QK];
#endif
    /* The block of keys. */
    _Alignas(64) float k[BLOCK_KV * DIM_QK];
    _Alignas(64) float v[BLOCK_KV * DIM_V];
    /* Their pairs, [key][query]: S and then P, dP and then dS, and whether the query attends to the key. */
    _Alignas(64) float p[BLOCK_KV * PANEL];
    _Alignas(64) float ds[BLOCK_KV * PANEL];
    _Alignas(64) int32_t seen[BLOCK_KV * PANEL];
#if DROPOUT
    _Alignas(64) int32_t kept[BLOCK_KV * PANEL];  /* and whether its score was */
#endif
#if PROGRAM
    _Alignas(64) float slope[BLOCK_KV * PANEL];
    _Alignas(64) ProgramRows program;
#endif
    /* Sums: dQ of the queries, or dK and dV of the keys. */
    _Alignas(64) float sum_qk[(PANEL > BLOCK_KV ? PANEL : BLOCK_KV) * DIM_QK];
    _Alignas(64) float sum_v[BLOCK_KV * DIM_V];
    _Alignas(64) float row[DIM_QK > DIM_V ? DIM_QK : DIM_V];
} Scratch;

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

#if PACKED
<% include "lib/cpu/lengths.h" %>

/* Where a sequence lies in a pack of `all` rows: its first row, and how many of them are used. Cut to their bounds,
 * whatever the arrays hold: what a host promised is what is touched. */
typedef struct {
    int64_t first, rows;
} PackedRows;

static PackedRows packed_rows(const int *begin, const int *lengths, int64_t b, int words, int64_t all, int64_t most) {
    const int64_t first = min64(max64(read_int(begin, b, words), 0), all);
    const int64_t rows = min64(max64(read_int(begin, b + 1, words) - first, 0), min64(most, all - first));
    return (PackedRows){first, lengths ? min64(max64(read_int(lengths, b, words), 0), rows) : rows};
}

/* A tensor from a sequence's first row on. */
static void *rows_from(const void *tensor, int64_t *stride, PackedRows rows) {
    stride[0] = 0;
    return (element *)tensor + rows.first * stride[2];
}

/* The arguments of a sequence, as if it were alone: lengths are its own, and tensors begin with its first row. */
static BackwardArgs sequence_args(const BackwardArgs *call, int64_t b) {
    const PackedRows q = packed_rows(call->q_begin, call->q_lengths, b, call->q_words, call->q_rows, call->q_len);
    const PackedRows kv = packed_rows(call->kv_begin, call->kv_lengths, b, call->kv_words, call->kv_rows, call->kv_len);
    BackwardArgs s = *call;
    s.q_len = (int32_t)q.rows, s.kv_len = (int32_t)kv.rows;
    s.dout = rows_from(s.dout, s.dout_stride, q), s.o = rows_from(s.o, s.o_stride, q);
#if RESIDUAL
    s.residual = rows_from(s.residual, s.residual_stride, q);
#endif
    s.q = rows_from(s.q, s.q_stride, q), s.dq = rows_from(s.dq, s.dq_stride, q);
    s.k = rows_from(s.k, s.k_stride, kv), s.dk = rows_from(s.dk, s.dk_stride, kv);
    s.v = rows_from(s.v, s.v_stride, kv), s.dv = rows_from(s.dv, s.dv_stride, kv);
    s.lse += q.first;
    if (s.dlse) s.dlse += q.first;
    return s;
}
#else
static BackwardArgs sequence_args(const BackwardArgs *call, int64_t b) { return (void)b, *call; }
#endif

/* The diagonal is aligned to the bottom right: the last query sits on the last key. */
INLINE int64_t diagonal(const BackwardArgs *args) { return (int64_t)args->kv_len - args->q_len; }

/* The keys [key_begin, key_end) of a query, and the queries [query_begin, query_end) that see any of some keys. */
INLINE int64_t key_begin(const BackwardArgs *args, int64_t query) {
    return MASK_LEFT ? max64(0, query + diagonal(args) - args->window_left) : 0;
}
INLINE int64_t key_end(const BackwardArgs *args, int64_t query) {
    return MASK_RIGHT ? max64(0, min64(args->kv_len, query + diagonal(args) + args->window_right + 1)) : args->kv_len;
}
INLINE int64_t query_begin(const BackwardArgs *args, int64_t key) {
    return MASK_RIGHT ? max64(0, key - diagonal(args) - args->window_right) : 0;
}
INLINE int64_t query_end(const BackwardArgs *args, int64_t last_key) {
    return MASK_LEFT ? min64(args->q_len, last_key - diagonal(args) + args->window_left + 1) : args->q_len;
}

/* c[i][n] += sum over k of a[i][k] b[k][n], of `rows` rows and `count` columns, a whole number of vectors. Elements of
 * a are `a_row` and `a_step` apart. Only terms are added up that `seen`, with the strides of a, lets through, where it
 * is given: a weight of 0 times an infinity is no number. The sum of a block starts from zero. */
#if AVX512
#define TILE_ROWS 6
#define TILE_VECTORS 4
#elif ISA == ISA_avx2
#define TILE_ROWS 6
#define TILE_VECTORS 2
#else
#define TILE_ROWS 4
#define TILE_VECTORS 2
#endif

INLINE void product_tile(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step, const int32_t *seen,
                         const float *b, int64_t b_row, int rows, int steps, const int vectors) {
    const float *of[TILE_ROWS];
    vf sum[TILE_ROWS][TILE_VECTORS];
    /* Rows beyond the last repeat it, and are not stored. */
    UNROLL for (int i = 0; i < TILE_ROWS; i++) {
        of[i] = a + (i < rows ? i : rows - 1) * a_row;
        UNROLL for (int x = 0; x < vectors; x++) sum[i][x] = vf_set1(0);
    }
    for (int k = 0; k < steps; k++) {
        vf column[TILE_VECTORS];
        UNROLL for (int x = 0; x < vectors; x++) column[x] = vf_load(b + k * b_row + x * LANES);
        UNROLL for (int i = 0; i < TILE_ROWS; i++) {
            if (seen && !seen[of[i] - a + k * a_step]) continue;
            vf weight = vf_set1(of[i][k * a_step]);
            UNROLL for (int x = 0; x < vectors; x++) sum[i][x] = vf_fma(weight, column[x], sum[i][x]);
        }
    }
    for (int i = 0; i < rows && i < TILE_ROWS; i++)
        UNROLL for (int x = 0; x < vectors; x++) {
            float *to = c + i * c_row + x * LANES;
            vf_store(to, vf_load(to) + sum[i][x]);
        }
}

INLINE void product_rows(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step, const int32_t *seen,
                         const float *b, int64_t b_row, int rows, int count, int steps) {
    for (int i = 0; i < rows; i += TILE_ROWS) {
        const int32_t *seen_row = seen ? seen + i * a_row : 0;
        int n = 0;
        for (; n + TILE_VECTORS * LANES <= count; n += TILE_VECTORS * LANES)
            product_tile(c + i * c_row + n, c_row, a + i * a_row, a_row, a_step, seen_row, b + n, b_row, rows - i,
                         steps, TILE_VECTORS);
        for (; n < count; n += LANES)
            product_tile(c + i * c_row + n, c_row, a + i * a_row, a_row, a_step, seen_row, b + n, b_row, rows - i,
                         steps, 1);
    }
}

static __attribute__((noinline)) void product(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step,
                                              const float *b, int64_t b_row, int rows, int count, int steps) {
    product_rows(c, c_row, a, a_row, a_step, 0, b, b_row, rows, count, steps);
}

static __attribute__((noinline)) void product_seen(float *c, int64_t c_row, const float *a, int64_t a_row,
                                                   int64_t a_step, const int32_t *seen, const float *b, int64_t b_row,
                                                   int rows, int count, int steps) {
    product_rows(c, c_row, a, a_row, a_step, seen, b, b_row, rows, count, steps);
}

/* Whether any of n floats, a whole number of vectors, is an infinity or NaN. */
static int any_special(const float *x, int n) {
    vf sum = vf_set1(0);
    for (int i = 0; i < n; i += LANES) sum += vf_load(x + i) * vf_set1(0);
    int special = 0;
    for (int i = 0; i < LANES; i++) special |= !(sum[i] == 0);
    return special;
}

/* Rows of a tensor as floats, `width` apart; rows from n on, up to `all`, become 0. */
static void load_rows(float *to, const element *from, int64_t stride, int n, int all, const int dim, const int width) {
    for (int i = 0; i < n; i++) {
        widen_row(to + i * width, from + i * stride, dim);
        for (int d = dim; d < width; d++) to[i * width + d] = 0;
    }
    if (n < all) __builtin_memset(to + n * width, 0, sizeof(float) * (all - n) * width);
}

/* PANEL rows of `width` floats to `width` rows of PANEL. */
static void transpose(float *to, const float *from, const int width) {
    for (int i = 0; i < PANEL; i += LANES)
        for (int d = 0; d < width; d += LANES) {
            vf x[LANES];
            UNROLL for (int r = 0; r < LANES; r++) x[r] = vf_load(from + (i + r) * width + d);
            vf_transpose(x);
            UNROLL for (int r = 0; r < LANES; r++) vf_store(to + (d + r) * PANEL + i, x[r]);
        }
}

static void store_rows(element *to, int64_t stride, const float *from, int n, const int dim, const int width,
                       float scale, float *row) {
    for (int i = 0; i < n; i++) {
        for (int d = 0; d < width; d++) row[d] = from[i * width + d] * scale;
        narrow_row(to + i * stride, row, dim);
    }
}

/* One head, as its tensors lie. */
typedef struct {
    const element *dout, *q, *k, *v, *o;
    const float *lse, *dlse;
    int64_t batch, head, kv_head;
#if PROGRAM
    ProgramHead program;
#endif
} Head;

static Head find_head(const BackwardArgs *args, int64_t batch, int64_t head, int64_t kv_head) {
    const int64_t row = PACKED ? head * args->q_rows : (batch * args->heads + head) * args->q_len;
    const int64_t *gs = args->dout_stride, *qs = args->q_stride, *ks = args->k_stride, *vs = args->v_stride;
    const int64_t *os = args->o_stride;
    return (Head){
        .dout = (const element *)args->dout + batch * gs[0] + head * gs[1],
        .q = (const element *)args->q + batch * qs[0] + head * qs[1],
        .k = (const element *)args->k + batch * ks[0] + kv_head * ks[1],
        .v = (const element *)args->v + batch * vs[0] + kv_head * vs[1],
        .o = (const element *)args->o + batch * os[0] + head * os[1],
        .lse = args->lse + row,
        .dlse = args->dlse ? args->dlse + row : 0,
        .batch = batch,
        .head = head,
        .kv_head = kv_head,
#if PROGRAM
        .program = {args->side, (int32_t)batch, (int32_t)head, (int32_t)kv_head, args->q_len, args->kv_len},
#endif
    };
}

#if PROGRAM_FAR
/* From here on weights by a log-sum-exp alone would be off by 2^-12 and more: it does not hold the sum beside the
 * maximum. */
#define FAR 4096.0f

/* Adds the scores of n keys, which the window lets some rows see, to maxima and sums of all rows. */
static void add_far_block(const BackwardArgs *args, const Head *head, Scratch *scratch, int64_t query, int64_t key,
                          int n) {
    load_rows(scratch->far_k, head->k + key * args->k_stride[2], args->k_stride[2], n, n, HEAD_DIM_QK, DIM_QK);
    __builtin_memset(scratch->p, 0, sizeof(float) * n * PANEL);
    product(scratch->p, PANEL, scratch->far_k, DIM_QK, 1, scratch->q_columns, PANEL, n, PANEL, HEAD_DIM_QK);
    program_gradients(scratch->p, scratch->slope, n, &head->program, &scratch->program, query, key, args->scale, 1);
    for (int x = 0; x < PANEL; x += LANES) {
        const vi begin = *(const vi *)(scratch->begin + x), end = *(const vi *)(scratch->end + x);
        const vf before = vf_load(scratch->far_maximum + x);
        vf top = before, sum = vf_set1(0);
        for (int j = 0; j < n; j++) {
            const vi at = vi_set1((int32_t)(key + j));
            float *s = scratch->p + j * PANEL + x;
            vf_store(s, vf_select((at >= begin) & (at < end), vf_load(s), vf_set1(-INF)));
            top = vf_max(vf_load(s), top);
        }
        const vf reference = vf_select(top == -INF, vf_set1(0), top);
        for (int j = 0; j < n; j++) sum += vf_exp2((vf_load(scratch->p + j * PANEL + x) - reference) * vf_set1(LOG2E));
        const vf less = vf_exp2((before - reference) * vf_set1(LOG2E));
        vf_store(scratch->far_maximum + x, top);
        vf_store(scratch->far_sum + x, vf_fma(vf_load(scratch->far_sum + x), less, sum));
    }
}

/* Rows whose log-sum-exp is far from zero, which float masks leave out, attend to all keys alike. Their maxima and sums
 * come from the scores; a row whose output has no gradient adds nothing, and is left out. */
static void part_far_rows(const BackwardArgs *args, const Head *head, Scratch *scratch, int64_t query) {
    uint8_t far[PANEL];
    int64_t begin = args->kv_len, end = 0;
    for (int i = 0; i < PANEL; i++) {
        const float lse = scratch->lse[i], magnitude = lse < 0 ? -lse : lse;
        scratch->log_sum[i] = 0, scratch->far_maximum[i] = -INF, scratch->far_sum[i] = 0;
        far[i] = magnitude >= FAR && magnitude < INF;
        if (!far[i]) continue;
        int adds = scratch->delta[i] != 0;
        for (int d = 0; d < HEAD_DIM_V; d++) adds |= scratch->dout[i * DIM_V + d] != 0;
        if (!adds) scratch->begin[i] = scratch->end[i] = 0, far[i] = 0;
        else begin = min64(begin, scratch->begin[i]), end = max64(end, scratch->end[i]);
    }
    for (int64_t key = begin; key < end; key += BLOCK_KV)
        add_far_block(args, head, scratch, query, key, (int)min64(BLOCK_KV, end - key));
    for (int i = 0; i < PANEL; i++) {
        const float lse = scratch->lse[i], maximum = scratch->far_maximum[i], magnitude = lse < 0 ? -lse : lse;
        /* Of a sink alone, all weights vanish. */
        if (!far[i] || !(scratch->far_sum[i] > 0) || maximum < lse - magnitude / 64) continue;
        scratch->lse[i] = maximum, scratch->log_sum[i] = (float)(natural_log(scratch->far_sum[i]) * LOG2E);
    }
}
#endif

/* The queries [query, query + n) with what belongs to their rows. Gives whether Q or dO has an infinity or NaN. */
static int load_queries(const BackwardArgs *args, const Head *head, Scratch *scratch, int64_t query, int n) {
    load_rows(scratch->q, head->q + query * args->q_stride[2], args->q_stride[2], n, PANEL, HEAD_DIM_QK, DIM_QK);
    load_rows(scratch->dout, head->dout + query * args->dout_stride[2], args->dout_stride[2], n, PANEL, HEAD_DIM_V,
              DIM_V);
    transpose(scratch->q_columns, scratch->q, DIM_QK);
    transpose(scratch->dout_columns, scratch->dout, DIM_V);
    for (int i = 0; i < PANEL; i++) {
        const int64_t at = query + i;
        /* Empty rows, and lanes without a row, attend to nothing: what is computed for them is not seen. */
        const int empty = i >= n || head->lse[at] == -INF;
        scratch->begin[i] = empty ? 0 : (int32_t)key_begin(args, at);
        scratch->end[i] = empty ? 0 : (int32_t)key_end(args, at);
        scratch->lse[i] = empty ? 0 : head->lse[at];
        float sum = 0;
        if (!empty) {
            widen_row(scratch->row, head->o + at * args->o_stride[2], HEAD_DIM_V);
            for (int d = 0; d < HEAD_DIM_V; d++) sum += scratch->row[d] * scratch->dout[i * DIM_V + d];
#if RESIDUAL
            const int64_t *rs = args->residual_stride;
            const uint16_t *lost = (const uint16_t *)args->residual + head->batch * rs[0];
            lost += head->head * rs[1] + at * rs[2];
            sum += lost_product(lost, scratch->dout + i * DIM_V, 1, HEAD_DIM_V);
#endif
            if (head->dlse) sum -= head->dlse[at];
        }
        scratch->delta[i] = sum;
    }
#if PROGRAM
    program_rows(&head->program, query, &scratch->program);
#endif
#if PROGRAM_FAR
    part_far_rows(args, head, scratch, query);
#endif
    return any_special(scratch->q, PANEL * DIM_QK) | any_special(scratch->dout, PANEL * DIM_V);
}

/* The keys [key, key + n). Gives whether K has an infinity or NaN. */
static int load_keys(const BackwardArgs *args, const Head *head, Scratch *scratch, int64_t key, int n) {
    load_rows(scratch->k, head->k + key * args->k_stride[2], args->k_stride[2], n, n, HEAD_DIM_QK, DIM_QK);
    load_rows(scratch->v, head->v + key * args->v_stride[2], args->v_stride[2], n, n, HEAD_DIM_V, DIM_V);
    return any_special(scratch->k, n * DIM_QK);
}

/* P and dS of the loaded queries from `query` on and n loaded keys from `key` on. Gives whether all of them are
 * visible. `masked` is whether the program's mask has to be looked at. */
static int weigh(const BackwardArgs *args, const Head *head, Scratch *scratch, int64_t query, int64_t key, int n,
                 int masked) {
    __builtin_memset(scratch->p, 0, sizeof(float) * n * PANEL);
    __builtin_memset(scratch->ds, 0, sizeof(float) * n * PANEL);
    product(scratch->p, PANEL, scratch->k, DIM_QK, 1, scratch->q_columns, PANEL, n, PANEL, HEAD_DIM_QK);
    product(scratch->ds, PANEL, scratch->v, DIM_V, 1, scratch->dout_columns, PANEL, n, PANEL, HEAD_DIM_V);
#if PROGRAM
    program_gradients(scratch->p, scratch->slope, n, &head->program, &scratch->program, query, key, args->scale,
                      masked);
#endif
#if DROPOUT
    const Dropout dropout = DROPOUT_OF(args);
    for (int x = 0; x < PANEL; x += LANES)
        draw_kept(scratch->kept + x, PANEL, &dropout, key, n, query + x, head->batch * args->heads + head->head);
#endif
    (void)head, (void)query, (void)masked;
    vi all = vi_set1(-1);
    for (int j = 0; j < n; j++) {
        const vi at = vi_set1((int32_t)(key + j));
        for (int x = 0; x < PANEL; x += LANES) {
            float *p = scratch->p + j * PANEL + x, *ds = scratch->ds + j * PANEL + x;
#if PROGRAM
            const vf s = vf_load(p);
#else
            const vf s = vf_load(p) * vf_set1(args->scale);
#endif
            /* A score of -infinity takes no part, whoever made it so. */
            const vi seen = (at >= *(const vi *)(scratch->begin + x)) & (at < *(const vi *)(scratch->end + x)) &
                            (s != vf_set1(-INF));
#if PROGRAM_FAR
            const vf less = vf_load(scratch->log_sum + x);
            const vf weight = vf_exp2((s - vf_load(scratch->lse + x)) * vf_set1(LOG2E) - less);
#else
            const vf weight = vf_exp2((s - vf_load(scratch->lse + x)) * vf_set1(LOG2E));
#endif
#if DROPOUT
            /* dS is by all weights, dV by those that are left, times the scale in the end. */
            const vf kept = vf_select(*(const vi *)(scratch->kept + j * PANEL + x), vf_set1(1), vf_set1(0));
            vf change = weight * (vf_load(ds) * (kept * vf_set1(dropout.scale)) - vf_load(scratch->delta + x));
            const vf left = weight * kept;
#else
            vf change = weight * (vf_load(ds) - vf_load(scratch->delta + x));
            const vf left = weight;
#endif
#if PROGRAM
            change *= vf_load(scratch->slope + j * PANEL + x);
#endif
            vf_store(p, vf_select(seen, left, vf_set1(0)));
            vf_store(ds, vf_select(seen, change, vf_set1(0)));
            *(vi *)(scratch->seen + j * PANEL + x) = seen;
            all &= seen;
        }
    }
    int every = 1;
    for (int i = 0; i < LANES; i++) every &= all[i] != 0;
    return every;
}

/* dK and dV of one block of keys. */
static void key_tile(const BackwardArgs *args, int64_t batch, int64_t kv_head, int64_t key, Scratch *scratch) {
    const int64_t group = args->heads / args->kv_heads;
    const int n = (int)min64(BLOCK_KV, args->kv_len - key);
    __builtin_memset(scratch->sum_qk, 0, sizeof(float) * n * DIM_QK);
    __builtin_memset(scratch->sum_v, 0, sizeof(float) * n * DIM_V);
    const int64_t first = query_begin(args, key), last = query_end(args, key + n - 1);
    for (int64_t g = 0; g < group; g++) {
        const Head head = find_head(args, batch, kv_head * group + g, kv_head);
        if (g == 0 && first < last) load_keys(args, &head, scratch, key, n);
        for (int64_t query = first; query < last; query += PANEL) {
            const int rows = (int)min64(PANEL, last - query);
            int kind = 0;
#if PROGRAM
            kind = program_tile(&head.program, query, query + rows, key, key + n);
            if (kind < 0) continue;
#endif
            const int special = load_queries(args, &head, scratch, query, rows);
            if (weigh(args, &head, scratch, query, key, n, kind == 0) || !special) {
                product(scratch->sum_v, DIM_V, scratch->p, PANEL, 1, scratch->dout, DIM_V, n, DIM_V, PANEL);
                product(scratch->sum_qk, DIM_QK, scratch->ds, PANEL, 1, scratch->q, DIM_QK, n, DIM_QK, PANEL);
            } else {
                product_seen(scratch->sum_v, DIM_V, scratch->p, PANEL, 1, scratch->seen, scratch->dout, DIM_V, n, DIM_V,
                             PANEL);
                product_seen(scratch->sum_qk, DIM_QK, scratch->ds, PANEL, 1, scratch->seen, scratch->q, DIM_QK, n,
                             DIM_QK, PANEL);
            }
        }
    }
    element *dk = (element *)args->dk + batch * args->dk_stride[0] + kv_head * args->dk_stride[1];
    element *dv = (element *)args->dv + batch * args->dv_stride[0] + kv_head * args->dv_stride[1];
    store_rows(dk + key * args->dk_stride[2], args->dk_stride[2], scratch->sum_qk, n, HEAD_DIM_QK, DIM_QK, args->scale,
               scratch->row);
#if DROPOUT
    const float dv_scale = args->dropout_scale;
#else
    const float dv_scale = 1;
#endif
    store_rows(dv + key * args->dv_stride[2], args->dv_stride[2], scratch->sum_v, n, HEAD_DIM_V, DIM_V, dv_scale,
               scratch->row);
}

/* dQ of one block of queries. */
static void query_tile(const BackwardArgs *args, int64_t batch, int64_t head_index, int64_t query, Scratch *scratch) {
    const Head head = find_head(args, batch, head_index, head_index / (args->heads / args->kv_heads));
    const int rows = (int)min64(PANEL, args->q_len - query);
    __builtin_memset(scratch->sum_qk, 0, sizeof(float) * PANEL * DIM_QK);
    load_queries(args, &head, scratch, query, rows);
    const int64_t last = key_end(args, query + rows - 1);
    for (int64_t key = key_begin(args, query); key < last; key += BLOCK_KV) {
        const int n = (int)min64(BLOCK_KV, last - key);
        int kind = 0;
#if PROGRAM
        kind = program_tile(&head.program, query, query + rows, key, key + n);
        if (kind < 0) continue;
#endif
        const int special = load_keys(args, &head, scratch, key, n);
        if (weigh(args, &head, scratch, query, key, n, kind == 0) || !special)
            product(scratch->sum_qk, DIM_QK, scratch->ds, 1, PANEL, scratch->k, DIM_QK, rows, DIM_QK, n);
        else
            product_seen(scratch->sum_qk, DIM_QK, scratch->ds, 1, PANEL, scratch->seen, scratch->k, DIM_QK, rows,
                         DIM_QK, n);
    }
    element *dq = (element *)args->dq + batch * args->dq_stride[0] + head_index * args->dq_stride[1];
    store_rows(dq + query * args->dq_stride[2], args->dq_stride[2], scratch->sum_qk, rows, HEAD_DIM_QK, DIM_QK,
               args->scale, scratch->row);
}

static uint64_t blocks_of(int64_t rows, int64_t block) { return (uint64_t)((rows + block - 1) / block); }

uint64_t ft_tiles(const BackwardArgs *args) {
    return (uint64_t)args->batch *
           (args->kv_heads * blocks_of(args->kv_len, BLOCK_KV) + args->heads * blocks_of(args->q_len, BLOCK_Q));
}

uint64_t ft_scratch_bytes(const BackwardArgs *args) {
    (void)args;
    return sizeof(Scratch);
}

/* Blocks of keys first, which have the queries of a group to walk over; with a bounded right side the first keys are
 * seen most, and the last queries see most. Sequences of a pack may have fewer than there may be at most. */
void ft_tile(const BackwardArgs *call, uint64_t index, void *memory) {
    Scratch *scratch = memory;
    const uint64_t key_heads = (uint64_t)call->batch * call->kv_heads;
    const uint64_t query_heads = (uint64_t)call->batch * call->heads;
    const uint64_t key_tiles = key_heads * blocks_of(call->kv_len, BLOCK_KV);
    if (index < key_tiles) {
        const uint64_t head = index % key_heads, batch = head / call->kv_heads;
        const BackwardArgs args = sequence_args(call, batch);
        const int64_t key = (int64_t)(index / key_heads) * BLOCK_KV;
        if (key < args.kv_len) key_tile(&args, batch, head % args.kv_heads, key, scratch);
    } else {
        index -= key_tiles;
        const uint64_t head = index % query_heads, last = blocks_of(call->q_len, BLOCK_Q) - 1;
        const uint64_t batch = head / call->heads;
        const BackwardArgs args = sequence_args(call, batch);
        const int64_t query = (int64_t)(last - index / query_heads) * BLOCK_Q;
        if (query < args.q_len) query_tile(&args, batch, head % args.heads, query, scratch);
    }
}
