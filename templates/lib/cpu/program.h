/* program.h: the score program of this kernel: what it masks, what it makes of the scores, and which blocks it leaves
 * out. Its statements are generated; they come by what they change with, so that each is computed no more often than it
 * has to be: once for a head, for a query (kept in ProgramRows), for a key, for a score. */

/* Where the scores of a tile are. */
typedef struct {
    const Side *side;
    int32_t b, h, h_kv, q_len, kv_len;
} ProgramHead;

/* What a program computes for each query of a panel. */
typedef struct {
@{ mask_row_fields }@@{ score_row_fields }@    float sink[PANEL];
} ProgramRows;

/* In scope of every statement; not every program reads all of them. */
#define PROGRAM_HEAD \
    const Side *const side = head->side; \
    const int32_t b = head->b, h = head->h, h_kv = head->h_kv, q_len = head->q_len, kv_len = head->kv_len; \
    (void)side, (void)b, (void)h, (void)h_kv, (void)q_len, (void)kv_len

/* Lanes beyond the last query repeat it: no index leaves a tensor, and nobody reads what comes out. */
#define PROGRAM_QUERY(lane) \
    const int32_t q = (int32_t)query + (lane) < q_len ? (int32_t)query + (lane) : q_len - 1; \
    (void)q

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

/* What blocks a run of queries meets at most. */
PROGRAM_FUNCTION void program_keys(const ProgramHead *head, int64_t query, int64_t query_end, KeyRange *range) {
    PROGRAM_HEAD;
    const int32_t q_first = (int32_t)query, q_last = (int32_t)query_end - 1;
    (void)q_first, (void)q_last;
@{ keys_code }@    range->begin = max64(range->begin, @{ keys_begin }@);
    range->end = min64(range->end, @{ keys_end }@);
}

/* Whether no query of a tile attends to any of its keys (-1), every one to all of them (1), or neither is known (0). */
PROGRAM_FUNCTION int program_tile(const ProgramHead *head, int64_t query, int64_t query_end, int64_t begin,
                                  int64_t end) {
    PROGRAM_HEAD;
    const int32_t q_first = (int32_t)query, q_last = (int32_t)query_end - 1;
    const int32_t kv_first = (int32_t)begin, kv_last = (int32_t)end - 1;
    (void)q_first, (void)q_last, (void)kv_first, (void)kv_last;
@{ tile_code }@    return @{ tile_masked }@ ? -1 : @{ tile_visible }@ ? 1 : 0;
}

/* What depends on the query alone, for every query of a panel. */
PROGRAM_FUNCTION void program_rows(const ProgramHead *head, int64_t query, ProgramRows *rows) {
    PROGRAM_HEAD;
@{ mask_uniform }@@{ score_uniform }@@{ sink_uniform }@    for (int lane = 0; lane < PANEL; lane++) {
        PROGRAM_QUERY(lane);
@{ mask_row }@@{ score_row }@@{ sink_row }@@{ mask_row_save }@@{ score_row_save }@
        rows->sink[lane] = @{ sink_result }@;
    }
}

/* Whether any query of a panel (`vectors` vectors from `lane` on) attends to any of the keys [begin, end), looked at
 * score by score until one does. Only for masks that may leave out any block: of others a tile of neither kind has such
 * a query. */
PROGRAM_FUNCTION int attends(const ProgramHead *head, const ProgramRows *restrict rows, int64_t query, int lane,
                             int64_t begin, int64_t end, const int vectors) {
    PROGRAM_HEAD;
    (void)rows, (void)lane;
    if (!PROGRAM_ANYWHERE) return 1;
@{ mask_uniform }@    for (int64_t key = begin; key < end; key++) {
        const int32_t kv = (int32_t)key;
        int32_t any = 0;
        (void)kv;
@{ mask_column }@        for (int x = 0; x < vectors * LANES; x++) {
            PROGRAM_QUERY(x);
@{ mask_row_load }@@{ mask_element }@            any |= @{ mask_result }@;
        }
        if (any) return 1;
    }
    return 0;
}

/* Replaces n rows of scores (of keys from `key` on, `vectors` vectors of queries from `lane` of the panel on) by what
 * the program makes of them, and those that it masks by -infinity. `scale` takes them to natural units. */
PROGRAM_INLINE void program_scores(float *restrict s, int n, const ProgramHead *head, const ProgramRows *restrict rows,
                           int64_t query, int lane, int64_t key, const float scale, const int masked,
                           const int vectors) {
    PROGRAM_HEAD;
@{ mask_uniform }@@{ score_uniform }@    for (int j = 0; j < n; j++) {
        const int32_t kv = (int32_t)(key + j);
        (void)kv;
@{ mask_column }@@{ score_column }@        float *restrict at = s + j * PANEL;
#if defined(__clang__)
#pragma clang loop vectorize(enable)
#else
#pragma GCC ivdep
#endif
        for (int x = 0; x < vectors * LANES; x++) {
            PROGRAM_QUERY(x);
@{ mask_row_load }@@{ score_row_load }@            const float score = PROGRAM_SCORE ? at[x] * scale : at[x];
@{ mask_element }@@{ score_element }@            const float changed = @{ score_result }@;
            at[x] = masked && !(@{ mask_result }@) ? -INF : changed;
        }
    }
}

/* Lanes of the vector that starts at `query` which the program lets attend to `key`, as all ones: for the slow path. */
PROGRAM_FUNCTION vi program_visible(const ProgramHead *head, int64_t query, int64_t key) {
    PROGRAM_HEAD;
    const int32_t kv = (int32_t)key;
    (void)kv;
    vi yes;
    for (int lane = 0; lane < LANES; lane++) {
        PROGRAM_QUERY(lane);
@{ mask_uniform }@@{ mask_row }@@{ mask_column }@@{ mask_element }@        yes[lane] = @{ mask_result }@ ? -1 : 0;
    }
    return yes;
}
