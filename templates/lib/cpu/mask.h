/* mask.h: which keys a query attends to.
 *
 * Query i attends to the keys [key_begin(i), key_end(i)). Both ends only grow with i, so for a run of queries
 * the keys fall into: outside (no query attends: never read), full (every query attends: no mask code) and
 * mixed (the score is replaced, lane by lane). */

typedef struct {
    int64_t begin, end;            /* keys that some query attends to */
    int64_t full_begin, full_end;  /* keys that every query attends to */
} KeyRange;

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* The diagonal is aligned to the bottom right: the last query sits on the last key. */
INLINE int64_t diagonal(const ForwardArgs *args) { return (int64_t)args->kv_len - args->q_len; }

INLINE int64_t key_begin(const ForwardArgs *args, int64_t query) {
#if MASK_LEFT
    return max64(0, query + diagonal(args) - args->window_left);
#else
    (void)args, (void)query;
    return 0;
#endif
}

INLINE int64_t key_end(const ForwardArgs *args, int64_t query) {
#if MASK_RIGHT
    return max64(0, min64(args->kv_len, query + diagonal(args) + args->window_right + 1));
#else
    (void)query;
    return args->kv_len;
#endif
}

INLINE KeyRange key_range(const ForwardArgs *args, int64_t query, int64_t query_end) {
    return (KeyRange){
        .begin = key_begin(args, query),
        .end = key_end(args, query_end - 1),
        .full_begin = key_begin(args, query_end - 1),
        .full_end = key_end(args, query),
    };
}

/* Lanes of the vector that starts at `query` which attend to `key`, as all ones. */
INLINE vi visible(const ForwardArgs *args, int64_t query, int64_t key) {
    vi lane = vi_lane(), yes = vi_set1(-1);
#if MASK_RIGHT
    int64_t first = key - diagonal(args) - args->window_right - query;
    yes &= lane >= vi_set1((int32_t)max64(0, min64(first, LANES)));
#endif
#if MASK_LEFT
    int64_t last = key - diagonal(args) + args->window_left - query;
    yes &= lane <= vi_set1((int32_t)max64(-1, min64(last, LANES)));
#endif
    (void)args, (void)query, (void)key, (void)lane;
    return yes;
}
