/* ragged.h: ragged batches: what the host passes, where a sequence's queries and keys lie, and how many there are. What
 * a call leaves out is a null pointer. */

@{ ragged_args }@
#define EXPORT __attribute__((visibility("default")))

/* The memory at args->scratch, of `bytes` bytes, is shared by the tiles of one call. ft_prepare says what it needs, and
 * where that is there writes down which tiles the call has; it is called before all others, once more where there was
 * too little. */
EXPORT uint64_t ft_prepare(const RaggedArgs *args, uint64_t bytes);
EXPORT uint64_t ft_tiles(const RaggedArgs *args);
EXPORT uint64_t ft_scratch_bytes(const RaggedArgs *args);
EXPORT void ft_tile(const RaggedArgs *args, uint64_t tile, void *scratch);
#if AMX
EXPORT int ft_init(void);  /* once, after loading; 0 on success */
#endif

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

<% include "lib/cpu/lengths.h" %>

/* One sequence: its sizes, and where its rows begin. */
typedef struct {
    int32_t q_len, kv_len;  /* rows that are used, and keys */
    int64_t q, o, lse;      /* first row in Q, O and LSE, in elements */
    int64_t first;          /* place of the first key in the sequence's row of the store */
    int64_t pages;          /* first entry of its pages in the tables */
    int32_t slot;           /* the page that is all of its row, where there is no table */
} Sequence;

/* Lengths are clamped to their bounds, whatever the arrays hold: what a host promised is what is read. */
static Sequence sequence_of(const RaggedArgs *args, int32_t b) {
    const int words = args->length_words;
    Sequence s = {.q_len = args->q_len, .kv_len = args->kv_len, .slot = b, .pages = b * args->table_stride};
    int64_t row = 0, batch = b;
    if (args->q_begin) {
        const int64_t begin = max64(read_int(args->q_begin, b, words), 0), end = read_int(args->q_begin, b + 1, words);
        row = begin, batch = 0, s.q_len = (int32_t)min64(max64(end - begin, 0), args->q_len);
    }
    if (args->q_lengths) s.q_len = (int32_t)min64(max64(read_int(args->q_lengths, b, words), 0), s.q_len);
    s.q = batch * args->q_stride[0] + row * args->q_stride[2];
    s.o = batch * args->o_stride[0] + row * args->o_stride[2];
    s.lse = batch * args->lse_stride[0] + row * args->lse_stride[2];

    if (args->pages_begin) {
        const int64_t begin = max64(read_int(args->pages_begin, b, words), 0);
        const int64_t end = read_int(args->pages_begin, b + 1, words);
        const int64_t pages = max64(end - begin, 0), before = pages > 0 ? (pages - 1) * args->page_tokens : 0;
        const int64_t last = pages == 0 ? 0 : args->last_page ? read_int(args->last_page, b, words) : args->page_tokens;
        s.pages = begin, s.kv_len = (int32_t)min64(max64(before + last, 0), args->kv_len);
    }
    if (args->kv_begin) {
        const int64_t begin = max64(read_int(args->kv_begin, b, words), 0);
        const int64_t end = read_int(args->kv_begin, b + 1, words);
        s.first = begin, s.slot = 0, s.kv_len = (int32_t)min64(max64(end - begin, 0), args->kv_len);
    }
    if (args->slots) s.slot = read_int(args->slots, b, args->table_words);
    /* Without lengths of before, the rows that a sequence gained are all of its keys. */
    if (args->kv_lengths || args->kv_added_begin) {
        int64_t length = (args->kv_lengths ? max64(read_int(args->kv_lengths, b, words), 0) : 0) + args->kv_added;
        if (args->kv_added_begin)
            length += (int64_t)read_int(args->kv_added_begin, b + 1, words) - read_int(args->kv_added_begin, b, words);
        s.kv_len = (int32_t)min64(max64(length, 0), args->kv_len);
    }
    if (args->left_pad) {
        const int32_t pad = (int32_t)min64(max64(read_int(args->left_pad, b, words), 0), s.kv_len);
        s.first += pad, s.kv_len -= pad;
    }
    return s;
}

/* The store's page that holds the n-th page of a sequence's row; -1 for an identifier of no page. */
INLINE int64_t page_id(const RaggedArgs *args, const int32_t *table, const Sequence *s, int64_t n) {
    const int64_t id = table ? read_int(table, s->pages + n, args->table_words) : s->slot;
    return id >= 0 && id < args->pages ? id : -1;
}

/* Keys that a row of a sequence attends to. The diagonal is aligned to the bottom right: the last row sits on the last
 * key. */
INLINE int32_t row_begin(const RaggedArgs *args, const Sequence *s, int64_t row) {
#if MASK_LEFT
    return (int32_t)min64(max64(0, row + s->kv_len - s->q_len - args->window_left), s->kv_len);
#else
    (void)args, (void)s, (void)row;
    return 0;
#endif
}

INLINE int32_t row_end(const RaggedArgs *args, const Sequence *s, int64_t row) {
#if MASK_RIGHT
    return (int32_t)max64(0, min64(s->kv_len, row + s->kv_len - s->q_len + args->window_right + 1));
#else
    (void)args, (void)row;
    return s->kv_len;
#endif
}

#define KEYS_AHEAD LANES  /* micro-kernels read as many rows of keys beyond the last at most: those are zeros */

/* Some keys of one head, as rows of elements that follow each other, wherever the store has them. */
typedef struct {
    const stored *k[KEYS + KEYS_AHEAD], *v[KEYS + KEYS_AHEAD];
#if KV_PER_TOKEN
    float k_scale[KEYS + KEYS_AHEAD], v_scale[KEYS + KEYS_AHEAD];
#endif
    uint8_t missing[KEYS + KEYS_AHEAD];  /* whose page there is not: masked for all rows */
    int any_missing;
    stored k_copy[KEYS * HEAD_DIM_QK];   /* of rows whose elements lie apart */
#if V_COLUMNS
    stored v_copy[KEYS * HEAD_DIM_V];
#endif
} Keys;

static const stored zero_row[HEAD_DIM_QK > HEAD_DIM_V ? HEAD_DIM_QK : HEAD_DIM_V];

/* Elements of K that follow each other, 16 bytes of them where the store is packed by so many. */
#define K_CHUNK (16 / (int)sizeof(stored))

INLINE float scale_at(const float *scale, int64_t at) { return scale ? scale[at] : 1; }

/* The keys [begin, begin + n) of a sequence. No entry of a table behind its last key is read. */
static void find_keys(Keys *keys, const RaggedArgs *args, const Sequence *s, int32_t kv_head, int64_t begin, int n) {
    const int64_t *ks = args->k_stride, *vs = args->v_stride;
    const int64_t tokens = max64(args->page_tokens, 1), place = s->first + begin;
    const int apart = ks[3] != K_CHUNK;
    int64_t page = place / tokens, token = place % tokens;
    keys->any_missing = 0;
    for (int j = 0; j < n; page++, token = 0) {
        const int run = (int)min64(n - j, tokens - token);
        const int64_t k_page = page_id(args, args->k_table, s, page), v_page = page_id(args, args->v_table, s, page);
        const int missing = k_page < 0 || v_page < 0;
        const stored *k = (const stored *)args->k + k_page * ks[0] + token * ks[1] + kv_head * ks[2];
        const stored *v = (const stored *)args->v + v_page * vs[0] + token * vs[1] + kv_head * vs[2];
        keys->any_missing |= missing;
        for (int i = 0; i < run; i++) {
            keys->k[j + i] = missing ? zero_row : k + i * ks[1];
            keys->v[j + i] = missing ? zero_row : v + i * vs[1];
            keys->missing[j + i] = (uint8_t)missing;
#if KV_PER_TOKEN
            const int64_t *kt = args->k_scale_stride, *vt = args->v_scale_stride;
            const int64_t k_at = k_page * kt[0] + kv_head * kt[1] + (token + i) * kt[2];
            const int64_t v_at = v_page * vt[0] + kv_head * vt[1] + (token + i) * vt[2];
            keys->k_scale[j + i] = missing ? 0 : scale_at(args->k_scale, k_at);
            keys->v_scale[j + i] = missing ? 0 : scale_at(args->v_scale, v_at);
#endif
        }
        if (apart && !missing)
            for (int i = 0; i < run; i++) {
                stored *to = keys->k_copy + (j + i) * HEAD_DIM_QK;
                for (int d = 0; d < HEAD_DIM_QK; d += K_CHUNK)
                    __builtin_memcpy(to + d, k + i * ks[1] + d / K_CHUNK * ks[3],
                                     sizeof(stored) * (HEAD_DIM_QK - d < K_CHUNK ? HEAD_DIM_QK - d : K_CHUNK));
                keys->k[j + i] = to;
            }
#if V_COLUMNS
        if (!missing)
            for (int i = 0; i < run; i++) keys->v[j + i] = keys->v_copy + (j + i) * HEAD_DIM_V;
        for (int d = 0; d < HEAD_DIM_V && !missing; d++)
            for (int i = 0; i < run; i++) keys->v_copy[(j + i) * HEAD_DIM_V + d] = v[i * vs[1] + d * vs[3]];
#endif
        j += run;
    }
    for (int j = n; j < n + KEYS_AHEAD; j++) {
        keys->k[j] = keys->v[j] = zero_row, keys->missing[j] = 0;
#if KV_PER_TOKEN
        keys->k_scale[j] = keys->v_scale[j] = 0;
#endif
    }
}

/* Whether V, or its scale, has an infinity or NaN in these rows, of the head that lies `offset` elements behind the
 * keys' own: 0 times such an element would be NaN. */
static int any_special(const Keys *keys, int64_t offset, int from, int to) {
    for (int j = from; j < to; j++) {
        if (stored_special(keys->v[j] + offset, HEAD_DIM_V)) return 1;
#if KV_PER_TOKEN
        if (keys->v_scale[j] - keys->v_scale[j] != 0) return 1;
#endif
    }
    return 0;
}

/* What the scores of a head are multiplied by, and its O, beside the scales of tokens. */
INLINE float head_scale(const float *scale, const int64_t *stride, int32_t b, int32_t kv_head) {
#if KV_SCALED && !KV_PER_TOKEN
    return scale_at(scale, b * stride[0] + kv_head * stride[1]);
#else
    (void)scale, (void)stride, (void)b, (void)kv_head;
    return 1;
#endif
}
