/* program_gradient.h: the score program of a backward kernel: what it masks, what it makes of the scores, and the
 * derivative of that by the score. Its statements are generated; they come by what they change with, so that each is
 * computed no more often than it has to be: once for a head, for a query (kept in ProgramRows), for a key, for a
 * score. */

/* Where the scores of a tile are. */
typedef struct {
    const Side *side;
    int32_t b, h, h_kv, q_len, kv_len;
} ProgramHead;

/* What a program computes for each query of a panel. */
typedef struct {
@{ mask_row_fields }@@{ gradient_row_fields }@    char none;
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

/* C compilers take minutes to optimise some thousand statements: those of a long program stay as they are. */
#if !PROGRAM_LONG
#define PROGRAM_FUNCTION static
#elif defined(__clang__)
#define PROGRAM_FUNCTION static __attribute__((noinline, optnone))
#else
#define PROGRAM_FUNCTION static __attribute__((noinline, optimize("O0")))
#endif

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
    (void)rows;
@{ mask_uniform }@@{ gradient_uniform }@    for (int lane = 0; lane < PANEL; lane++) {
        PROGRAM_QUERY(lane);
@{ mask_row }@@{ gradient_row }@@{ mask_row_save }@@{ gradient_row_save }@    }
}

/* Replaces n rows of scores, of keys from `key` on, by what the program makes of them, and those that it masks by
 * -infinity; `slope` becomes the derivative by the score. `scale` takes scores to natural units. */
PROGRAM_FUNCTION void program_gradients(float *restrict s, float *restrict slope, int n, const ProgramHead *head,
                                        const ProgramRows *restrict rows, int64_t query, int64_t key,
                                        const float scale, const int masked) {
    PROGRAM_HEAD;
    (void)rows;
    const int lane = 0;
    (void)lane;
@{ mask_uniform }@@{ gradient_uniform }@    for (int j = 0; j < n; j++) {
        const int32_t kv = (int32_t)(key + j);
        (void)kv;
@{ mask_column }@@{ gradient_column }@        float *restrict at = s + j * PANEL,
              *restrict slope_at = slope + j * PANEL;
#if defined(__clang__)
#pragma clang loop vectorize(enable)
#else
#pragma GCC ivdep
#endif
        for (int x = 0; x < PANEL; x++) {
            PROGRAM_QUERY(x);
@{ mask_row_load }@@{ gradient_row_load }@            const float score = at[x] * scale;
@{ mask_element }@@{ gradient_element }@            const float changed = @{ gradient_value }@;
            at[x] = masked && !(@{ mask_result }@) ? -INF : changed;
            slope_at[x] = @{ gradient_slope }@;
        }
    }
}
