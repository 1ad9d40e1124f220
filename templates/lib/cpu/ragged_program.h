/* ragged_program.h: the score program of a ragged batch. As program.h, but the rows of a panel are of several heads:
 * what a program computes for a head is computed for each row. */

/* Where the scores of a tile are. */
typedef struct {
    const Side *side;
    int32_t b, h_kv, group, q_len, kv_len;
} ProgramHead;

INLINE ProgramHead program_head(const RaggedArgs *args, const Sequence *s, int32_t b, int32_t kv_head) {
    return (ProgramHead){args->side, b, kv_head, args->heads / args->kv_heads, s->q_len, s->kv_len};
}

/* What a program computes for each row of a panel. */
typedef struct {
@{ mask_row_fields }@@{ score_row_fields }@    int32_t query[PANEL], head[PANEL];
    float sink[PANEL];
} ProgramRows;

/* In scope of every statement; not every program reads all of them. */
#define PROGRAM_HEAD \
    const Side *const side = head->side; \
    const int32_t b = head->b, h_kv = head->h_kv, q_len = head->q_len, kv_len = head->kv_len; \
    (void)side, (void)b, (void)h_kv, (void)q_len, (void)kv_len
#define PROGRAM_ROW(lane) \
    const int32_t q = rows->query[lane], h = rows->head[lane]; \
    (void)q, (void)h

/* The functions that a program's statements make. C compilers take minutes to optimise some thousand statements: those
 * of a long program stay as they are. */
#if !PROGRAM_LONG
#define PROGRAM_FUNCTION static
#define PROGRAM_INLINE INLINE
#else
#if defined(__clang__)
#define PROGRAM_FUNCTION static __attribute__((noinline, optnone))
#else
#define PROGRAM_FUNCTION static __attribute__((noinline, optimize("O0")))
#endif
#define PROGRAM_INLINE PROGRAM_FUNCTION
#endif

#if PROGRAM_MASK
typedef struct {
    int64_t begin, end;
} ProgramKeys;

/* What keys a run of queries meets at most, in any head of the group. */
PROGRAM_FUNCTION ProgramKeys program_keys(const ProgramHead *head, int64_t query, int64_t query_end) {
    PROGRAM_HEAD;
    const int32_t q_first = (int32_t)query, q_last = (int32_t)query_end - 1;
    (void)q_first, (void)q_last;
    ProgramKeys all = {INT32_MAX, 0};
    for (int32_t h = h_kv * head->group; h < (h_kv + 1) * head->group; h++) {
@{ keys_code }@        all.begin = min64(all.begin, max64(@{ keys_begin }@, 0));
        all.end = max64(all.end, @{ keys_end }@);
    }
    return all;
}

/* Whether no row of a tile attends to any of its keys (-1), every one to all of them (1), or neither is known (0),
 * whatever its head. */
PROGRAM_FUNCTION int program_tile(const ProgramHead *head, int64_t query, int64_t query_end, int64_t begin,
                                  int64_t end) {
    PROGRAM_HEAD;
    const int32_t q_first = (int32_t)query, q_last = (int32_t)query_end - 1;
    const int32_t kv_first = (int32_t)begin, kv_last = (int32_t)end - 1;
    (void)q_first, (void)q_last, (void)kv_first, (void)kv_last;
    int none = 1, all = 1;
    for (int32_t h = h_kv * head->group; h < (h_kv + 1) * head->group && (none || all); h++) {
@{ tile_code }@        none &= (@{ tile_masked }@) != 0;
        all &= (@{ tile_visible }@) != 0;
    }
    return none ? -1 : all;
}

/* Whether any of `count` rows of a panel, from `lane` on, attends to any of the keys [begin, end), looked at score by
 * score until one does. Only for masks that may leave out any block: of others a tile of neither kind has such a row.
 * */
PROGRAM_FUNCTION int attends(const ProgramHead *head, const ProgramRows *restrict rows, int lane, int count,
                             int64_t begin, int64_t end) {
    PROGRAM_HEAD;
    if (!PROGRAM_ANYWHERE) return 1;
    for (int64_t key = begin; key < end; key++) {
        const int32_t kv = (int32_t)key;
        int32_t any = 0;
        (void)kv;
        for (int x = 0; x < count; x++) {
            PROGRAM_ROW(lane + x);
@{ mask_uniform }@@{ mask_column }@@{ mask_row_load }@@{ mask_element }@            any |= @{ mask_result }@;
        }
        if (any) return 1;
    }
    return 0;
}
#endif

/* What depends on the row alone, for every row of a panel. Lanes beyond the last row repeat it: no index leaves a
 * tensor, and nobody reads what comes out. */
PROGRAM_FUNCTION void program_rows(const ProgramHead *head, int64_t row, int64_t last, ProgramRows *rows) {
    PROGRAM_HEAD;
    for (int lane = 0; lane < PANEL; lane++) {
        const int64_t at = min64(row + lane, last);
        rows->query[lane] = (int32_t)(at / head->group);
        rows->head[lane] = (int32_t)(h_kv * head->group + at % head->group);
        PROGRAM_ROW(lane);
@{ mask_uniform }@@{ score_uniform }@@{ sink_uniform }@
@{ mask_row }@@{ score_row }@@{ sink_row }@@{ mask_row_save }@@{ score_row_save }@
        rows->sink[lane] = @{ sink_result }@;
    }
}

/* Replaces n rows of scores (of keys from `key` on, `vectors` vectors of rows from `lane` of the panel on) by what the
 * program makes of them, and those that it masks by -infinity. `scale` takes them to natural units. */
PROGRAM_INLINE void program_scores(float *restrict s, int n, const ProgramHead *head, const ProgramRows *restrict rows,
                                   int lane, int64_t key, const float scale, const int masked, const int vectors) {
    PROGRAM_HEAD;
    for (int j = 0; j < n; j++) {
        const int32_t kv = (int32_t)(key + j);
        (void)kv;
        float *restrict at = s + j * PANEL;
#if defined(__clang__)
#pragma clang loop vectorize(enable)
#else
#pragma GCC ivdep
#endif
        for (int x = 0; x < vectors * LANES; x++) {
            PROGRAM_ROW(lane + x);
@{ mask_uniform }@@{ score_uniform }@@{ mask_column }@@{ score_column }@@{ mask_row_load }@@{ score_row_load }@
            const float score = PROGRAM_SCORE ? at[x] * scale : at[x];
@{ mask_element }@@{ score_element }@            const float changed = @{ score_result }@;
            at[x] = masked && !(@{ mask_result }@) ? -INF : changed;
        }
    }
}

/* Whether the program lets a row attend to a key: for the slow path. */
PROGRAM_FUNCTION int program_visible(const ProgramHead *head, const ProgramRows *rows, int lane, int64_t key) {
    PROGRAM_HEAD;
    const int32_t kv = (int32_t)key;
    (void)kv;
    PROGRAM_ROW(lane);
@{ mask_uniform }@@{ mask_row }@@{ mask_column }@@{ mask_element }@    return @{ mask_result }@;
}
