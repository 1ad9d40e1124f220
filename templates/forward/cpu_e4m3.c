/* @{ header }@ */

/* Attention over e4m3 on the CPU, for tests and not for speed: codes become floats when they are read, products are of
 * floats, P is not rounded, and sums of P V are in double.
 *
 * A tile is BLOCK_Q queries of one head, which go through the keys together: all scores first, then the maxima and the
 * weights, then the values. */

#define DTYPE_f32 0
#define DTYPE_f16 1
#define DTYPE_bf16 2
#define ISA_generic 0
#define ISA_avx2 1
#define ISA ISA_generic
#define AVX512 0
#define AMX 0

#define DTYPE_e4m3 3
#define OUTPUT DTYPE_@{ output }@
#define DTYPE (OUTPUT == DTYPE_e4m3 ? DTYPE_f32 : OUTPUT)  /* of convert.h, which knows no e4m3 */
#define Q_CODES 1
#define HEAD_DIM_QK @{ head_dim_qk }@
#define HEAD_DIM_V @{ head_dim_v }@
#define MASK_LEFT @{ mask_left }@
#define MASK_RIGHT @{ mask_right }@
#define BLOCK_Q @{ block_q }@
/* Scales of blocks of rows of Q and of K, and of channels of V, in place of those of heads. */
#define SCALES_OF_QUERIES @{ scales_of_queries }@
#define SCALES_OF_KEYS @{ scales_of_keys }@
#define SCALES_OF_CHANNELS @{ scales_of_channels }@
#define SCALES_OF_ROWS (SCALES_OF_QUERIES || SCALES_OF_KEYS)
#define PROGRAM @{ program }@ /* a score program, and what it has */
#define PROGRAM_MASK @{ program_mask }@
#define PROGRAM_SCORE @{ program_score }@ /* scores are in natural units then, else in those of log2 */
#define PROGRAM_SINK @{ program_sink }@
#define PROGRAM_LONG @{ program_long }@
#define PROGRAM_ANYWHERE 0 /* no block is left out */

#include <stdint.h>

<% include "lib/cpu/abi.h" %>
<% include "lib/cpu/vec.h" %>
<% include "lib/cpu/convert.h" %>
<% include "lib/cpu/narrow_8.h" %>
<% include "lib/cpu/codes.h" %>
<% include "lib/cpu/exp2.h" %>
<% include "lib/cpu/mask.h" %>

#define LOG2E 1.44269504088896341f
#define LN2 0.69314718055994531
#define PANEL ((BLOCK_Q + LANES - 1) / LANES * LANES)
/* From Q K^T to units of the scores, and from these to those of log2 and of the natural logarithm. */
#define SCORE_UNIT (PROGRAM_SCORE ? 1 : LOG2E)
#define SCORE_LOG2 (PROGRAM_SCORE ? LOG2E : 1)
#define SCORE_LN (PROGRAM_SCORE ? 1 : LN2)
#if PROGRAM
<% include "lib/cpu/score.h" %>
<% include "lib/cpu/program.h" %>
#endif
#define LONGEST (HEAD_DIM_QK > HEAD_DIM_V ? HEAD_DIM_QK : HEAD_DIM_V)

/* What one thread works in; behind it the scores, a row of the tile's keys for each query, and behind those whether it
 * attends to them. */
typedef struct {
    _Alignas(64) float q[BLOCK_Q][HEAD_DIM_QK];
    _Alignas(64) double o[BLOCK_Q][HEAD_DIM_V];
    _Alignas(64) float row[LONGEST];
    double sum[BLOCK_Q];
    float maximum[BLOCK_Q];
#if SCALES_OF_ROWS
    float scale[BLOCK_Q]; /* from Q K^T to units of the scores, without that of the key */
#endif
#if PROGRAM
    ProgramRows program;
#endif
    _Alignas(64) float at[PANEL]; /* the scores of one key */
    _Alignas(64) float scores[];
} Scratch;

INLINE int64_t pitch(const ForwardArgs *args) { return ((int64_t)args->kv_len + LANES - 1) / LANES * LANES; }

INLINE void of_codes(float *to, const uint8_t *from, int n) {
    for (int i = 0; i < n; i++) to[i] = of_code(from[i]);
}

/* The scale of a head. */
INLINE float scale_of(const float *scales, const int64_t *stride, int64_t batch, int64_t head) {
    return scales ? scales[batch * stride[0] + head * stride[1]] : 1;
}

#if SCALES_OF_ROWS || SCALES_OF_CHANNELS
/* One behind that of a head: of rows, or of a channel. */
INLINE float finer_scale_of(const float *scales, const int64_t *stride, int64_t batch, int64_t head, int64_t behind) {
    return scales ? scales[batch * stride[0] + head * stride[1] + behind] : 1;
}
#endif

uint64_t ft_tiles(const ForwardArgs *args) {
    return (uint64_t)args->batch * args->heads * (((uint64_t)args->q_len + BLOCK_Q - 1) / BLOCK_Q);
}

uint64_t ft_scratch_bytes(const ForwardArgs *args) {
    return sizeof(Scratch) + (sizeof(float) + 1) * BLOCK_Q * (uint64_t)pitch(args);
}

void ft_tile(const ForwardArgs *args, uint64_t index, void *memory) {
    Scratch *scratch = memory;
    const uint64_t blocks = ((uint64_t)args->q_len + BLOCK_Q - 1) / BLOCK_Q;
    const int64_t head_index = (int64_t)(index / blocks), first = (int64_t)(index % blocks) * BLOCK_Q;
    const int64_t batch = head_index / args->heads, head = head_index % args->heads;
    const int64_t kv_head = head / (args->heads / args->kv_heads);
    const int queries = (int)min64(BLOCK_Q, args->q_len - first);
    const uint8_t *q = (const uint8_t *)args->q + batch * args->q_stride[0] + head * args->q_stride[1];
    const uint8_t *k = (const uint8_t *)args->k + batch * args->k_stride[0] + kv_head * args->k_stride[1];
    const uint8_t *v = (const uint8_t *)args->v + batch * args->v_stride[0] + kv_head * args->v_stride[1];
    output_element *o = (output_element *)args->o + batch * args->o_stride[0] + head * args->o_stride[1];
#if OUTPUT == DTYPE_e4m3
    const float o_scale = args->o_scale ? *args->o_scale : 1;
#else
    const float o_scale = 1;
#endif
#if SCALES_OF_ROWS
#define SCALE(i) (scratch->scale[i] * k_scale)
#else
    const float scale = args->scale * SCORE_UNIT * scale_of(args->q_descale, args->q_descale_stride, batch, kv_head) *
                        scale_of(args->k_descale, args->k_descale_stride, batch, kv_head);
#define SCALE(i) scale
#endif
#if SCALES_OF_CHANNELS
#define V_SCALE(d) \
    finer_scale_of(args->v_descale, args->v_descale_stride, batch, kv_head, (d) * args->scale_stride[2])
#else
    const float v_scale = scale_of(args->v_descale, args->v_descale_stride, batch, kv_head);
#define V_SCALE(d) v_scale
#endif
    KeyRange range = key_range(args, first, first + queries);
#if PROGRAM
    const ProgramHead program = {args->side,       (int32_t)batch, (int32_t)head,
                                 (int32_t)kv_head, args->q_len,    args->kv_len};
    program_rows(&program, first, &scratch->program);
#endif
#if PROGRAM_MASK
    program_keys(&program, first, first + queries, &range);
#endif
    uint8_t *const live = (uint8_t *)(scratch->scores + BLOCK_Q * pitch(args));

    for (int i = 0; i < queries; i++) of_codes(scratch->q[i], q + (first + i) * args->q_stride[2], HEAD_DIM_QK);
#if SCALES_OF_ROWS
    for (int i = 0; i < queries; i++) {
#if SCALES_OF_QUERIES
        const int64_t of_row = ((first + i) >> args->scale_rows_log2[0]) * args->scale_stride[0];
        const float q_scale = finer_scale_of(args->q_descale, args->q_descale_stride, batch, head, of_row);
#else
        const float q_scale = scale_of(args->q_descale, args->q_descale_stride, batch, kv_head);
#endif
        scratch->scale[i] = args->scale * SCORE_UNIT * q_scale;
    }
#endif
    for (int64_t key = range.begin; key < range.end; key++) {
        of_codes(scratch->row, k + key * args->k_stride[2], HEAD_DIM_QK);
#if SCALES_OF_KEYS
        const int64_t of_row = (key >> args->scale_rows_log2[1]) * args->scale_stride[1];
        const float k_scale = finer_scale_of(args->k_descale, args->k_descale_stride, batch, kv_head, of_row);
#elif SCALES_OF_ROWS
        const float k_scale = scale_of(args->k_descale, args->k_descale_stride, batch, kv_head);
#endif
        for (int i = 0; i < queries; i++) {
            float parts[LANES] = {0};
            for (int d = 0; d < HEAD_DIM_QK; d++) parts[d % LANES] += scratch->q[i][d] * scratch->row[d];
            float sum = 0;
            for (int x = 0; x < LANES; x++) sum += parts[x];
            scratch->at[i] = sum * SCALE(i);
        }
#if PROGRAM_SCORE
        program_scores(scratch->at, 1, &program, &scratch->program, first, 0, key, 1, 0, PANEL / LANES);
#endif
        for (int i = 0; i < queries; i++) {
            int attends = key >= key_begin(args, first + i) && key < key_end(args, first + i);
#if PROGRAM_MASK
            attends = attends && program_visible(&program, first + i, key)[0];
#endif
            live[i * pitch(args) + key - range.begin] = (uint8_t)attends;
            scratch->scores[i * pitch(args) + key - range.begin] = attends ? scratch->at[i] : -INF;
        }
    }
    const int64_t keys = max64(range.end - range.begin, 0);
    for (int i = 0; i < queries; i++) {
        float *p = scratch->scores + i * pitch(args), maximum = -INF;
        for (int64_t j = 0; j < keys; j++) maximum = p[j] > maximum ? p[j] : maximum;
        /* Of a row whose scores are all -infinity no difference of two of them is taken. */
        const float reference = PROGRAM_SCORE && maximum == -INF ? 0 : maximum;
        double sum = 0;
        for (int64_t j = 0; j < keys; j += LANES) {
            for (int64_t x = j; x < j + LANES; x++) p[x] = x < keys ? p[x] : -INF;
            vf_store(p + j, vf_exp2((vf_load(p + j) - reference) * SCORE_LOG2));
            for (int64_t x = j; x < j + LANES && x < keys; x++) {
                /* No key but masked ones: the difference of two infinities is no weight. */
                if (!live[i * pitch(args) + x]) p[x] = 0;
                sum += p[x];
            }
        }
        scratch->maximum[i] = maximum, scratch->sum[i] = sum;
        for (int d = 0; d < HEAD_DIM_V; d++) scratch->o[i][d] = 0;
    }
    for (int64_t key = range.begin; key < range.end; key++) {
        of_codes(scratch->row, v + key * args->v_stride[2], HEAD_DIM_V);
        for (int i = 0; i < queries; i++) {
            /* Zero times the NaN of a masked key is NaN. */
            if (!live[i * pitch(args) + key - range.begin]) continue;
            const float p = scratch->scores[i * pitch(args) + key - range.begin];
            for (int d = 0; d < HEAD_DIM_V; d++) scratch->o[i][d] += (double)p * scratch->row[d];
        }
    }
    for (int i = 0; i < queries; i++) {
        const int64_t query = first + i;
        int empty = key_begin(args, query) >= key_end(args, query);
        double sum = scratch->sum[i], top = scratch->maximum[i] * SCORE_LN, less = 1; /* in natural units */
#if PROGRAM
        /* Only its scores tell what a program masks: one that makes all of them -infinity masks the row. */
        empty |= sum == 0;
#endif
        if (empty) sum = 0, top = -INF;
#if PROGRAM_SINK
        /* One more key, without a value: O shrinks, the log-sum-exp grows. */
        const double sink = scratch->program.sink[i], reference = top;
        top = sink > top ? sink : top;
        less = empty ? 0 : ft_expf((float)(reference - top));
        sum = sum * less + (top == -INF ? 0 : ft_expf((float)(sink - top)));
#endif
        const double inverse = empty ? 0 : less / sum;
        for (int d = 0; d < HEAD_DIM_V; d++)
            scratch->row[d] = empty ? 0 : (float)(scratch->o[i][d] * inverse * V_SCALE(d) * o_scale);
        narrow_output(o + query * args->o_stride[2], scratch->row, HEAD_DIM_V);
        if (args->lse)
            args->lse[head_index * args->q_len + query] =
                sum == 0 ? -INF : (float)(top + natural_log(sum));
        if (!args->weights) continue;
        float *weights = args->weights + (head_index * args->q_len + query) * args->kv_len;
        for (int64_t key = 0; key < args->kv_len; key++) {
            const int64_t at = i * pitch(args) + key - range.begin;
            const int inside = key >= range.begin && key < range.end;
            weights[key] = inside && live[at] ? (float)(scratch->scores[at] * inverse) : 0;
        }
    }
}
