/* @{ header }@ */

/* New rows of K and V into a KV store, and rows of Q beside them: rotated, quantised, each to the place that a slot
 * mapping or the length of its sequence gives. A tile is TOKENS new rows of all heads, and as many rows of Q. */

#define DTYPE_f32 0
#define DTYPE_f16 1
#define DTYPE_bf16 2

#define DTYPE DTYPE_@{ dtype }@
#define KV KV_@{ kv_element }@
#define KV_SCALED @{ kv_scaled }@
#define KV_SCALE_PER_TOKEN @{ kv_scale_per_token }@
#define V_COLUMNS @{ v_columns }@
#define HEAD_DIM_QK @{ head_dim_qk }@
#define HEAD_DIM_V @{ head_dim_v }@
#define TOKENS @{ tokens }@

#define INLINE static inline __attribute__((always_inline, unused))
#define EXPORT __attribute__((visibility("default")))

#include <stdint.h>
#include <string.h>

@{ append_args }@
typedef AppendArgs KernelArgs;
EXPORT uint64_t ft_tiles(const AppendArgs *args);
EXPORT uint64_t ft_scratch_bytes(const AppendArgs *args);
EXPORT void ft_tile(const AppendArgs *args, uint64_t tile, void *scratch);

/* Rows are converted one element at a time, or as the compiler sees fit. */
#define ISA_avx2 2
#define ISA 0
#define AVX512 0
<% include "lib/cpu/convert.h" %>
<% include "lib/cpu/quantise.h" %>

#if KV_SCALED
typedef uint8_t kv_element;
#else
typedef element kv_element;
#endif
#define PACK (16 / (int)sizeof(kv_element)) /* elements of a row of K that lie side by side */
#define LONGEST (HEAD_DIM_QK > HEAD_DIM_V ? HEAD_DIM_QK : HEAD_DIM_V)

/* Entry i of an array of 32- or 64-bit integers. */
INLINE int64_t read_int(const int32_t *array, int64_t i, int32_t words) {
    return words == 1 ? array[i] : ((const int64_t *)(const void *)array)[i];
}

/* Which sequence a row is of, -1 for none: sequences are packed from `begin` on, or have `rows` rows each. */
typedef struct {
    int64_t sequence, row;
} Member;

static Member member_of(const AppendArgs *args, const int32_t *begin, int32_t rows, int64_t index) {
    if (!begin) return (Member){index / rows, index % rows};
    int64_t low = 0, high = args->batch;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (read_int(begin, middle + 1, args->length_words) <= index)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == args->batch) return (Member){-1, 0};
    int64_t first = read_int(begin, low, args->length_words);
    return index < first ? (Member){-1, 0} : (Member){low, index - first};
}

/* Tokens of a sequence before its new rows. */
static int64_t length_before(const AppendArgs *args, int64_t b) {
    int32_t words = args->length_words;
    int64_t length = 0;
    if (args->lengths) {
        length = read_int(args->lengths, b, words);
    } else if (args->length_sums) {
        length = read_int(args->length_sums, b + 1, words) - read_int(args->length_sums, b, words);
    } else if (args->pages_begin) {
        int64_t pages = read_int(args->pages_begin, b + 1, words) - read_int(args->pages_begin, b, words);
        int64_t last = args->last_page ? read_int(args->last_page, b, words) : args->page_tokens;
        length = pages > 0 ? (pages - 1) * args->page_tokens + last : 0;
    }
    if (!args->lengths_after) return length;
    if (!args->new_begin) return length - args->new_len;
    return length - (read_int(args->new_begin, b + 1, words) - read_int(args->new_begin, b, words));
}

/* A token of the store; page -1 for none. */
typedef struct {
    int64_t page, token;
} Place;

static Place place_of(const AppendArgs *args, const int32_t *table, int64_t index, Member member) {
    const Place nowhere = {-1, 0};
    const int64_t tokens = args->page_tokens;
    if (args->slot_mapping) {
        int64_t slot = read_int(args->slot_mapping, index, args->slot_words);
        return slot < 0 || slot / tokens >= args->pages ? nowhere : (Place){slot / tokens, slot % tokens};
    }
    if (member.sequence < 0) return nowhere;
    const int64_t b = member.sequence, place = length_before(args, b) + member.row, nth = place / tokens;
    if (place < 0 || place >= args->kv_len) return nowhere;
    int64_t page = b;
    if (table) {
        int64_t entry = b * args->table_stride;
        if (args->pages_begin) {
            entry = read_int(args->pages_begin, b, args->length_words);
            if (entry < 0 || entry + nth >= read_int(args->pages_begin, b + 1, args->length_words)) return nowhere;
        }
        page = read_int(table, entry + nth, args->table_words);
    } else {
        if (nth > 0) return nowhere;
        if (args->slots) page = read_int(args->slots, b, args->table_words);
    }
    return page >= 0 && page < args->pages ? (Place){page, place % tokens} : nowhere;
}

static int64_t position_of(const AppendArgs *args, const int32_t *positions, int64_t index, Member member,
                           int32_t advance) {
    if (positions) return read_int(positions, index, args->position_words);
    if (member.sequence < 0) return -1;
    int64_t first = args->first_position ? read_int(args->first_position, member.sequence, args->length_words)
                                         : length_before(args, member.sequence);
    return first + member.row * advance;
}

<% include "lib/cpu/rotary.h" %>

/* Elements of a row, rotated where it is: those behind the rotation as they are. */
static void rotate_elements(const AppendArgs *args, element *to, const float *x) {
    for (int i = 0; i < args->rotary_dim; i++) to[i] = narrow(x[i]);
}

/* The scale of a row: the one that is given, or one by which its finite elements fill the range of the store's. */
INLINE float scale_of(const AppendArgs *args, float *scale, const float *x, int n) {
#if KV_SCALED
    if (KV_SCALE_PER_TOKEN && args->finds_scales && scale) {
        uint32_t most = 0;
        for (int i = 0; i < n; i++) {
            uint32_t magnitude = (float_bits){.f = x[i]}.u & 0x7fffffff;
            most = magnitude < 0x7f800000 && magnitude > most ? magnitude : most;
        }
        *scale = (float_bits){.u = most}.f / LARGEST;
    }
#endif
    (void)args, (void)x, (void)n;
    return scale ? *scale : 1.0f;
}

/* One new row of one head. */
static void append_row(const AppendArgs *args, int is_k, int64_t nth, int64_t head, Member member, Place place) {
    const int n = is_k ? HEAD_DIM_QK : HEAD_DIM_V;
    const int64_t *from_stride = is_k ? args->k_new_stride : args->v_new_stride;
    const int64_t *stride = is_k ? args->k_stride : args->v_stride;
    const int64_t batch = args->new_begin ? 0 : member.sequence, row = args->new_begin ? nth : member.row;
    const element *from = (const element *)(is_k ? args->k_new : args->v_new) + batch * from_stride[0] +
                          head * from_stride[1] + row * from_stride[2];
    kv_element *to = (kv_element *)(is_k ? args->k : args->v) + place.page * stride[0] + place.token * stride[1] +
                     head * stride[2];
    element elements[LONGEST];
    memcpy(elements, from, n * sizeof(element));
    float x[LONGEST];
    const int rotates = is_k && args->cos;
    if (KV_SCALED || rotates) widen_row(x, elements, n);
    if (rotates) {
        rotate(args, x, position_of(args, args->k_positions, nth, member, 1));
        if (!KV_SCALED) rotate_elements(args, elements, x);
    }
    kv_element out[LONGEST];
#if KV_SCALED
    float *scales = is_k ? args->k_scale : args->v_scale;
    const int64_t *at = is_k ? args->k_scale_stride : args->v_scale_stride;
    if (scales && KV_SCALE_PER_TOKEN) scales += place.page * at[0] + head * at[1] + place.token * at[2];
    if (scales && !KV_SCALE_PER_TOKEN) scales += member.sequence * at[0] + head * at[1];
    const float scale = scale_of(args, scales, x, n);
    for (int i = 0; i < n; i++) out[i] = quantised(x[i], scale);
#else
    memcpy(out, elements, n * sizeof(element));
#endif
    if (is_k) {
        for (int i = 0; i < n; i += PACK) {
            const int count = n - i < PACK ? n - i : PACK;
            memcpy(to + i / PACK * stride[3], out + i, count * sizeof(kv_element));
        }
    } else if (V_COLUMNS) {
        for (int i = 0; i < n; i++) to[i * stride[3]] = out[i];
    } else {
        memcpy(to, out, n * sizeof(kv_element));
    }
}

/* One row of Q of one head. */
static void rotate_q(const AppendArgs *args, int64_t nth, int64_t head, Member member) {
    const int64_t batch = args->q_begin ? 0 : member.sequence, row = args->q_begin ? nth : member.row;
    const element *from = (const element *)args->q + batch * args->q_stride[0] + head * args->q_stride[1] +
                          row * args->q_stride[2];
    element *to = (element *)args->q_out + batch * args->q_out_stride[0] + head * args->q_out_stride[1] +
                  row * args->q_out_stride[2];
    element elements[HEAD_DIM_QK];
    memcpy(elements, from, sizeof elements);
    if (args->cos) {
        float x[HEAD_DIM_QK];
        widen_row(x, elements, HEAD_DIM_QK);
        rotate(args, x, position_of(args, args->q_positions, nth, member, args->q_advance));
        rotate_elements(args, elements, x);
    }
    memcpy(to, elements, sizeof elements);
}

EXPORT uint64_t ft_tiles(const AppendArgs *args) {
    const int64_t q_rows = args->heads > 0 ? args->q_rows : 0;
    const int64_t rows = args->new_rows > q_rows ? args->new_rows : q_rows;
    return (uint64_t)(rows + TOKENS - 1) / TOKENS;
}

EXPORT uint64_t ft_scratch_bytes(const AppendArgs *args) {
    (void)args;
    return 0;
}

EXPORT void ft_tile(const AppendArgs *args, uint64_t tile, void *scratch) {
    (void)scratch;
    for (int64_t nth = (int64_t)tile * TOKENS; nth < (int64_t)(tile + 1) * TOKENS; nth++) {
        if (nth < args->new_rows) {
            const Member member = member_of(args, args->new_begin, args->new_len, nth);
            const Place k = place_of(args, args->k_table, nth, member), v = place_of(args, args->v_table, nth, member);
            for (int64_t head = 0; head < args->kv_heads; head++) {
                if (k.page >= 0) append_row(args, 1, nth, head, member, k);
                if (v.page >= 0) append_row(args, 0, nth, head, member, v);
            }
        }
        if (nth < args->q_rows && args->heads > 0) {
            const Member member = member_of(args, args->q_begin, args->q_len, nth);
            if (member.sequence < 0) continue;
            for (int64_t head = 0; head < args->heads; head++) rotate_q(args, nth, head, member);
        }
    }
}
