/* @{ header }@ */

/* The gradient of a tensor or scalar that a score program reads, on the CPU.
 *
 *   P = exp(S' - lse)   dP = dO V^T   dS' = P (dP - D)   D = rowsum(dO O) - dlse
 *   dT[place] = sum over all scores that read it of dS' * (dS' / dT[place]), and of a sink s of
 *               -exp(s - lse) D * (ds / dT)
 *
 * S' is the changed score. A place is a sequence, a KV head, one of its query heads, a block of queries and a block of
 * keys; behind the last block of keys comes the sink, where the program has one that reads the tensor. A group is the
 * places of one value of every coordinate that is kept, so that no other group has its elements; a unit is a part of a
 * group, with partial sums of its own, and a tile here. In a second step the parts of groups are added up in their
 * order. */

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
#define PROGRAM_FAR @{ program_far }@    /* scores may be far from zero */
#define PROGRAM_LONG @{ program_long }@  /* too long for the optimiser */
#define TERMS @{ term_count }@           /* places where the score reads the tensor */
#define SINK_TERMS @{ term_sink_count }@
#define PLACE_BY_QUERY @{ term_place_by_query }@  /* whether the element changes with the query, and with the key */
#define PLACE_BY_KEY @{ term_place_by_key }@
#define BLOCK_Q @{ block_q }@    /* queries of a block */
#define BLOCK_KV @{ block_kv }@  /* keys of a block */

#define AVX512 (ISA >= ISA_avx512)

#include <stdint.h>
#if AVX512
#include <immintrin.h>
#endif

@{ backward_args }@@{ sums_args }@
#define EXPORT __attribute__((visibility("default")))

/* As those of a forward kernel: tiles are handed out in ascending order, from any thread. */
EXPORT uint64_t ft_tiles(const GradientArgs *args);
EXPORT uint64_t ft_scratch_bytes(const GradientArgs *args);
EXPORT void ft_tile(const GradientArgs *args, uint64_t tile, void *scratch);

<% include "lib/cpu/vec.h" %>
<% include "lib/cpu/convert.h" %>
#if RESIDUAL
<% include "lib/cpu/residual.h" %>
#endif
<% include "lib/cpu/exp2.h" %>
<% include "lib/cpu/score.h" %>

#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))
#define PANEL BLOCK_Q
#define LOG2E 1.44269504088896341f
/* Elements that a tile of the second step writes. */
#define MERGED 4096

_Static_assert(PANEL % LANES == 0, "a block of queries is whole vectors");

/* What one thread works in. */
typedef struct {
    /* The block of queries, transposed, and what each row has. */
    _Alignas(64) float q[HEAD_DIM_QK * PANEL];
    _Alignas(64) float dout[HEAD_DIM_V * PANEL];
    _Alignas(64) float lse[PANEL];
    _Alignas(64) float delta[PANEL];
#if PROGRAM_FAR
    _Alignas(64) float log_sum[PANEL]; /* of far rows the logarithm by 2 of the sum beside the maximum, else 0 */
#endif
    /* The block of keys. */
    _Alignas(64) float k[BLOCK_KV * HEAD_DIM_QK];
    _Alignas(64) float v[BLOCK_KV * HEAD_DIM_V];
    /* Their pairs, [key][query]: S and then S', dP and then dS', and where every pair has an element, its sums. */
    _Alignas(64) float s[BLOCK_KV * PANEL];
    _Alignas(64) float ds[BLOCK_KV * PANEL];
    _Alignas(64) float direct[BLOCK_KV * PANEL];
    /* Of each pair and each place where the program reads the tensor the derivative, and the element. */
    float factor[TERMS ? TERMS : 1][BLOCK_KV * PANEL];
    int64_t place[TERMS ? TERMS : 1][BLOCK_KV * PANEL];
    float row[HEAD_DIM_QK > HEAD_DIM_V ? HEAD_DIM_QK : HEAD_DIM_V];
} Scratch;

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The keys [key_begin, key_end) of a query. The diagonal is aligned to the bottom right. */
INLINE int64_t key_begin(const BackwardArgs *args, int64_t query) {
    return MASK_LEFT ? max64(0, query + args->kv_len - args->q_len - args->window_left) : 0;
}
INLINE int64_t key_end(const BackwardArgs *args, int64_t query) {
    const int64_t last = query + args->kv_len - args->q_len + args->window_right;
    return MASK_RIGHT ? max64(0, min64(args->kv_len, last + 1)) : args->kv_len;
}

/* A block of queries of one head. */
typedef struct {
    const Side *side;
    int32_t b, h, h_kv, q_len, kv_len;
    int64_t query;
    int rows;
} Rows;

/* In scope of every statement of the program; not every program reads all of them. */
#define PROGRAM_HEAD \
    const Side *const side = at->side; \
    const int32_t b = at->b, h = at->h, h_kv = at->h_kv, q_len = at->q_len, kv_len = at->kv_len; \
    (void)side, (void)b, (void)h, (void)h_kv, (void)q_len, (void)kv_len

/* C compilers take minutes to optimise some thousand statements: those of a long program stay as they are. */
#if !PROGRAM_LONG
#define PROGRAM_FUNCTION static
#elif defined(__clang__)
#define PROGRAM_FUNCTION static __attribute__((noinline, optnone))
#else
#define PROGRAM_FUNCTION static __attribute__((noinline, optimize("O0")))
#endif

/* Whether no query of a tile attends to any of its keys (-1), every one to all of them (1), or neither is known (0). */
PROGRAM_FUNCTION int program_tile(const Rows *at, int64_t begin, int64_t end) {
    PROGRAM_HEAD;
    const int32_t q_first = (int32_t)at->query, q_last = (int32_t)at->query + at->rows - 1;
    const int32_t kv_first = (int32_t)begin, kv_last = (int32_t)end - 1;
    (void)q_first, (void)q_last, (void)kv_first, (void)kv_last;
@{ tile_code }@    return @{ tile_masked }@ ? -1 : @{ tile_visible }@ ? 1 : 0;
}

PROGRAM_FUNCTION int program_visible(const Rows *at, int32_t q, int32_t kv) {
    PROGRAM_HEAD;
    const int lane = 0;
    (void)q, (void)kv, (void)lane;
@{ mask_uniform }@@{ mask_row }@@{ mask_column }@@{ mask_element }@    return @{ mask_result }@;
}

/* An index beyond an axis is that of the nearest element, as where it is read. */
INLINE int64_t term_place(const GradientArgs *args, int axis, int64_t index) {
    return ft_clamp64(index, args->length[axis]) * args->place_stride[axis];
}

/* The changed score, and of each place where it reads the tensor the derivative and the element. */
PROGRAM_FUNCTION float score_terms(const GradientArgs *args, const Rows *at, int32_t q, int32_t kv, float score,
                                   float factor[TERMS + 1], int64_t place[TERMS + 1]) {
    PROGRAM_HEAD;
    (void)args, (void)q, (void)kv, (void)score;
@{ term_code }@    const float factors[] = {@{ term_factors }@};
    const int64_t places[] = {@{ term_places }@};
    for (int t = 0; t < TERMS; t++) factor[t] = factors[t], place[t] = places[t];
    return @{ term_value }@;
}

/* The same of the sink. */
PROGRAM_FUNCTION float sink_terms(const GradientArgs *args, const Rows *at, int32_t q, float factor[SINK_TERMS + 1],
                                  int64_t place[SINK_TERMS + 1]) {
    PROGRAM_HEAD;
    (void)args, (void)q;
@{ term_sink_code }@    const float factors[] = {@{ term_sink_factors }@};
    const int64_t places[] = {@{ term_sink_places }@};
    for (int t = 0; t < SINK_TERMS; t++) factor[t] = factors[t], place[t] = places[t];
    return @{ term_sink_value }@;
}

/* c[j][x] = sum over d of a[j][d] b[d][x], of n rows of `dim` columns and a panel of columns. */
INLINE void product_rows(float *c, const float *a, const float *b, const int dim, const int rows) {
    for (int x = 0; x < PANEL; x += 2 * LANES) {
        vf sum[4][2];
        UNROLL for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = vf_set1(0);
        const int wide = x + LANES < PANEL;
        for (int d = 0; d < dim; d++) {
            const vf first = vf_load(b + d * PANEL + x), second = wide ? vf_load(b + d * PANEL + x + LANES) : first;
            UNROLL for (int i = 0; i < rows; i++) {
                const vf weight = vf_set1(a[i * dim + d]);
                sum[i][0] = vf_fma(weight, first, sum[i][0]), sum[i][1] = vf_fma(weight, second, sum[i][1]);
            }
        }
        UNROLL for (int i = 0; i < rows; i++) {
            vf_store(c + i * PANEL + x, sum[i][0]);
            if (wide) vf_store(c + i * PANEL + x + LANES, sum[i][1]);
        }
    }
}
static void product(float *c, const float *a, const float *b, int n, const int dim) {
    int j = 0;
    for (; j + 4 <= n; j += 4) product_rows(c + j * PANEL, a + j * dim, b, dim, 4);
    for (; j < n; j++) product_rows(c + j * PANEL, a + j * dim, b, dim, 1);
}

/* Rows of a tensor as the columns of a panel; columns from n on become 0. */
static void load_columns(float *to, const element *from, int64_t stride, int n, const int dim, float *row) {
    __builtin_memset(to, 0, sizeof(float) * dim * PANEL);
    for (int i = 0; i < n; i++) {
        widen_row(row, from + i * stride, dim);
        for (int d = 0; d < dim; d++) to[d * PANEL + i] = row[d];
    }
}

/* The weight of a score beside a log-sum-exp: one lane of what scores have. */
static float weight_of(float score, float lse) { return vf_exp2(vf_set1((score - lse) * LOG2E))[0]; }

#if PROGRAM_FAR
/* From here on weights by a log-sum-exp alone would be off by 2^-12 and more: it does not hold the sum beside the
 * maximum. */
#define FAR 4096.0f

/* A row whose log-sum-exp is far from zero, which a float mask leaves out, attends to all keys alike. Its maximum takes
 * the place of the log-sum-exp, and the logarithm by 2 of the sum lies beside it; both come from the scores. */
static void part_far_row(const GradientArgs *args, const Rows *at, Scratch *scratch, int i) {
    const BackwardArgs *of = &args->backward;
    const float lse = scratch->lse[i], magnitude = lse < 0 ? -lse : lse;
    const element *k = (const element *)of->k + at->b * of->k_stride[0] + at->h_kv * of->k_stride[1];
    const int64_t end = key_end(of, at->query + i);
    float maximum = -INF, factor[TERMS + 1];
    double sum = 0;
    int64_t place[TERMS + 1];
    for (int64_t key = key_begin(of, at->query + i); key < end; key++) {
        if (!program_visible(at, (int32_t)at->query + i, (int32_t)key)) continue;
        float dot = 0;
        widen_row(scratch->row, k + key * of->k_stride[2], HEAD_DIM_QK);
        for (int d = 0; d < HEAD_DIM_QK; d++) dot += scratch->row[d] * scratch->q[d * PANEL + i];
        const float score = score_terms(args, at, (int32_t)at->query + i, (int32_t)key, dot * of->scale, factor, place);
        if (score == -INF) continue;
        const float top = score > maximum ? score : maximum;
        sum = sum * weight_of(maximum, top) + weight_of(score, top), maximum = top;
    }
    /* Of a sink alone, all weights vanish. */
    if (!(sum > 0) || maximum < lse - magnitude / 64) return;
    scratch->lse[i] = maximum, scratch->log_sum[i] = (float)(natural_log(sum) * LOG2E);
}
#endif

/* The queries of a place, with what belongs to their rows. */
static void load_queries(const GradientArgs *call, const Rows *at, Scratch *scratch) {
    const BackwardArgs *args = &call->backward;
    const int64_t *gs = args->dout_stride, *qs = args->q_stride, *os = args->o_stride;
    const element *q = (const element *)args->q + at->b * qs[0] + at->h * qs[1] + at->query * qs[2];
    const element *dout = (const element *)args->dout + at->b * gs[0] + at->h * gs[1] + at->query * gs[2];
    const element *o = (const element *)args->o + at->b * os[0] + at->h * os[1] + at->query * os[2];
    const int64_t row = ((int64_t)at->b * args->heads + at->h) * args->q_len + at->query;
    load_columns(scratch->q, q, qs[2], at->rows, HEAD_DIM_QK, scratch->row);
    load_columns(scratch->dout, dout, gs[2], at->rows, HEAD_DIM_V, scratch->row);
    for (int i = 0; i < PANEL; i++) {
        float sum = 0;
        /* Rows that do not exist attend to nothing. */
        scratch->lse[i] = i < at->rows ? args->lse[row + i] : -INF;
        if (scratch->lse[i] != -INF) {
            widen_row(scratch->row, o + i * os[2], HEAD_DIM_V);
            /* A row without a key but with a sink has an O of zero, whatever its dO is. */
            for (int d = 0; d < HEAD_DIM_V; d++)
                sum += scratch->row[d] != 0 ? scratch->row[d] * scratch->dout[d * PANEL + i] : 0;
#if RESIDUAL
            const int64_t *rs = args->residual_stride;
            const uint16_t *lost = (const uint16_t *)args->residual + at->b * rs[0] + at->h * rs[1];
            if (sum != 0)
                sum += lost_product(lost + (at->query + i) * rs[2], scratch->dout + i, PANEL, HEAD_DIM_V);
#endif
            if (args->dlse) sum -= args->dlse[row + i];
        }
        scratch->delta[i] = sum;
    }
#if PROGRAM_FAR
    for (int i = 0; i < PANEL; i++) {
        const float lse = scratch->lse[i], magnitude = lse < 0 ? -lse : lse;
        scratch->log_sum[i] = 0;
        if (!(magnitude >= FAR && magnitude < INF)) continue;
        /* Without a gradient of its output it adds nothing. */
        int adds = scratch->delta[i] != 0;
        for (int d = 0; d < HEAD_DIM_V; d++) adds |= scratch->dout[d * PANEL + i] != 0;
        if (adds) part_far_row(call, at, scratch, i);
        else scratch->lse[i] = -INF, scratch->delta[i] = 0;
    }
#endif
}

/* Adds one value after another to the partial sums of their places; those of one place that follow each other are added
 * up first. */
typedef struct {
    float *sums, sum;
    int64_t place;
} Adder;
INLINE void add(Adder *to, int64_t place, float x) {
    if (place != to->place) {
        if (to->place >= 0) to->sums[to->place] += to->sum;
        to->place = place, to->sum = 0;
    }
    to->sum += x;
}
INLINE void added(Adder *to) {
    if (to->place >= 0) to->sums[to->place] += to->sum;
}

/* dS' of the loaded queries and n keys from `key` on, and the derivatives by what is read. */
static void weigh(const GradientArgs *args, const Rows *at, Scratch *scratch, int64_t key, int n, int kind) {
    const BackwardArgs *of = &args->backward;
    product(scratch->s, scratch->k, scratch->q, n, HEAD_DIM_QK);
    product(scratch->ds, scratch->v, scratch->dout, n, HEAD_DIM_V);
    for (int i = 0; i < PANEL; i++) {
        const int empty = scratch->lse[i] == -INF;
        const int64_t begin = key_begin(of, at->query + i), end = key_end(of, at->query + i);
        for (int j = 0; j < n; j++) {
            const int pair = j * PANEL + i;
            float factor[TERMS + 1];
            int64_t place[TERMS + 1];
            if (empty || key + j < begin || key + j >= end ||
                (kind == 0 && !program_visible(at, (int32_t)at->query + i, (int32_t)key + j))) {
                scratch->s[pair] = -INF;
                continue;
            }
            const float score = scratch->s[pair] * of->scale;
            scratch->s[pair] = score_terms(args, at, (int32_t)at->query + i, (int32_t)key + j, score, factor, place);
            for (int t = 0; t < TERMS; t++) scratch->factor[t][pair] = factor[t], scratch->place[t][pair] = place[t];
        }
    }
    for (int j = 0; j < n; j++)
        for (int x = 0; x < PANEL; x += LANES) {
            const vf s = vf_load(scratch->s + j * PANEL + x);
            float *ds = scratch->ds + j * PANEL + x;
#if PROGRAM_FAR
            const vf log_sum = vf_load(scratch->log_sum + x);
#else
            const vf log_sum = vf_set1(0);
#endif
            const vf weight = vf_exp2((s - vf_load(scratch->lse + x)) * vf_set1(LOG2E) - log_sum);
            vf_store(ds, weight * (vf_load(ds) - vf_load(scratch->delta + x)));
        }
}

/* What a tile of scores adds. */
static void add_tile(const GradientArgs *args, const Rows *at, Scratch *scratch, int64_t key, float *sums) {
    const BackwardArgs *of = &args->backward;
    const int n = (int)min64(BLOCK_KV, of->kv_len - key);
    if (key >= key_end(of, at->query + at->rows - 1) || key + n <= key_begin(of, at->query)) return;
    const int kind = program_tile(at, key, key + n);
    if (kind < 0) return;
    const element *k = (const element *)of->k + at->b * of->k_stride[0] + at->h_kv * of->k_stride[1] +
                       key * of->k_stride[2];
    const element *v = (const element *)of->v + at->b * of->v_stride[0] + at->h_kv * of->v_stride[1] +
                       key * of->v_stride[2];
    for (int j = 0; j < n; j++) {
        widen_row(scratch->k + j * HEAD_DIM_QK, k + j * of->k_stride[2], HEAD_DIM_QK);
        widen_row(scratch->v + j * HEAD_DIM_V, v + j * of->v_stride[2], HEAD_DIM_V);
    }
    load_queries(args, at, scratch);
    weigh(args, at, scratch, key, n, kind);
    for (int t = 0; t < TERMS; t++) {
        Adder to = {sums, 0, -1};
        /* Along what the place does not change with, so that values of one place follow each other. */
        for (int outer = 0; outer < (PLACE_BY_QUERY ? at->rows : n); outer++)
            for (int inner = 0; inner < (PLACE_BY_QUERY ? n : at->rows); inner++) {
                const int pair = PLACE_BY_QUERY ? inner * PANEL + outer : outer * PANEL + inner;
                /* A score of -infinity takes no part, whoever made it so. */
                if (scratch->s[pair] == -INF) continue;
                const float x = scratch->ds[pair] * scratch->factor[t][pair];
                if (args->direct)
                    scratch->direct[pair] += x;
                else
                    add(&to, scratch->place[t][pair], x);
            }
        if (!args->direct) added(&to);
    }
}

/* What the sinks of a block of queries add: the weight of a key whose value is zero. */
static void add_sinks(const GradientArgs *args, const Rows *at, Scratch *scratch, float *sums) {
    load_queries(args, at, scratch);
    for (int t = 0; t < SINK_TERMS; t++) {
        Adder to = {sums, 0, -1};
        for (int i = 0; i < at->rows; i++) {
            float factor[SINK_TERMS + 1];
            int64_t place[SINK_TERMS + 1];
            if (scratch->lse[i] == -INF) continue;
            const float sink = sink_terms(args, at, (int32_t)at->query + i, factor, place);
            add(&to, place[t], weight_of(sink, scratch->lse[i]) * -scratch->delta[i] * factor[t]);
        }
        added(&to);
    }
}

/* How many values each coordinate has, in the order of the bits of `keeps`; the sink comes behind the last keys. */
typedef struct {
    int64_t of[5], keys;
} Counts;

static Counts count_places(const GradientArgs *args) {
    const BackwardArgs *sizes = &args->backward;
    const int64_t keys = TERMS ? div_up(sizes->kv_len, BLOCK_KV) : 0;
    const int64_t members = sizes->kv_heads ? sizes->heads / sizes->kv_heads : 0;
    return (Counts){
        .of = {sizes->batch, sizes->kv_heads, members, div_up(sizes->q_len, BLOCK_Q), keys + (SINK_TERMS ? 1 : 0)},
        .keys = keys,
    };
}

static int64_t count_of(const GradientArgs *args, const Counts *counts, int groups) {
    int64_t n = 1;
    for (int c = 0; c < 5; c++)
        if ((args->keeps >> c & 1) == groups) n *= counts->of[c];
    return n;
}

static Rows place_of(const GradientArgs *args, const Counts *counts, int64_t group, int64_t nth, int64_t *key) {
    const BackwardArgs *sizes = &args->backward;
    int64_t at[5];
    for (int c = 4; c >= 0; c--) {
        int64_t *from = args->keeps >> c & 1 ? &group : &nth;
        at[c] = *from % counts->of[c];
        *from /= counts->of[c];
    }
    *key = at[4];
    return (Rows){
        .side = sizes->side,
        .b = (int32_t)at[0],
        .h = (int32_t)(at[1] * counts->of[2] + at[2]),
        .h_kv = (int32_t)at[1],
        .q_len = sizes->q_len,
        .kv_len = sizes->kv_len,
        .query = at[3] * BLOCK_Q,
        .rows = (int)min64(BLOCK_Q, sizes->q_len - at[3] * BLOCK_Q),
    };
}

static void store(const GradientArgs *args, int64_t at, float x) {
    if (args->out_type == 0) {
        ((float *)args->out)[at] = x;
    } else {
        const uint32_t u = (ft_bits){.f = x}.u, magnitude = u & 0x7fffffff, sign = u >> 16 & 0x8000;
        /* Round to nearest even; NaN stays NaN. Denormal halves round at their last place by an addition of 0.5. */
        const uint32_t bf16 = magnitude > 0x7f800000 ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
        const uint32_t tiny = (ft_bits){.f = (ft_bits){.u = magnitude}.f + 0.5f}.u - 0x3f000000;
        const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
        const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
        const uint32_t f16 = sign | (magnitude >= 0x477ff000 ? special : magnitude < 0x38800000 ? tiny : normal);
        ((uint16_t *)args->out)[at] = (uint16_t)(args->out_type == 1 ? f16 : bf16);
    }
}

uint64_t ft_tiles(const GradientArgs *args) {
    if (args->step) return args->direct ? 0 : (uint64_t)div_up(args->elements, MERGED);
    const Counts counts = count_places(args);
    return (uint64_t)(count_of(args, &counts, 1) * args->splits);
}

uint64_t ft_scratch_bytes(const GradientArgs *args) {
    (void)args;
    return sizeof(Scratch);
}

static void merge_tile(const GradientArgs *args, int64_t first) {
    const float *sums = args->backward.scratch;
    for (int64_t e = first; e < min64(first + MERGED, args->elements); e++) {
        float sum = 0;
        for (int64_t part = 0; part < args->splits; part++) sum += sums[part * args->elements + e];
        int64_t rest = e, at = 0;
        for (int axis = 3; axis >= 0; axis--) {
            at += rest % args->length[axis] * args->out_stride[axis];
            rest /= args->length[axis];
        }
        store(args, at, sum);
    }
}

void ft_tile(const GradientArgs *args, uint64_t index, void *memory) {
    Scratch *scratch = memory;
    if (args->step) return merge_tile(args, (int64_t)index * MERGED);
    const Counts counts = count_places(args);
    const int64_t places = count_of(args, &counts, 0), group = (int64_t)index / args->splits;
    const int64_t part = (int64_t)index % args->splits;
    float *sums = (float *)args->backward.scratch + part * args->elements;
    int64_t key;
    __builtin_memset(scratch->direct, 0, sizeof(scratch->direct));
    for (int64_t nth = places * part / args->splits; nth < places * (part + 1) / args->splits; nth++) {
        const Rows at = place_of(args, &counts, group, nth, &key);
        if (key == counts.keys)
            add_sinks(args, &at, scratch, sums);
        else
            add_tile(args, &at, scratch, key * BLOCK_KV, sums);
    }
    if (!args->direct) return;
    /* Of the first place, as the others have the same elements. */
    const Rows at = place_of(args, &counts, group, 0, &key);
    for (int j = 0; j < min64(BLOCK_KV, at.kv_len - key * BLOCK_KV); j++)
        for (int i = 0; i < at.rows; i++) {
            float factor[TERMS + 1];
            int64_t place[TERMS + 1] = {0};
            score_terms(args, &at, (int32_t)at.query + i, (int32_t)(key * BLOCK_KV + j), 0, factor, place);
            store(args, place[0], scratch->direct[j * PANEL + i]);
        }
}
