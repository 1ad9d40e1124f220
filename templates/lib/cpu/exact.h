/* exact.h: what keeps an infinity or NaN in a masked row of V from leaking.
 *
 * Masked weights are 0, but 0 * NaN is NaN. Rows masked for all queries of a panel are not multiplied at all; where
 * a row masked for only some of them has such an element, the block takes this slow path. */

/* What else decides whether a query attends to a key. */
#if PROGRAM
typedef ProgramHead Visibility;
INLINE vi also_visible(const Visibility *head, int64_t query, int64_t key) {
    return program_visible(head, query, key);
}
#else
typedef void Visibility;
INLINE vi also_visible(const Visibility *none, int64_t query, int64_t key) {
    (void)none, (void)query, (void)key;
    return vi_set1(-1);
}
#endif

/* Whether V has an infinity or NaN in these rows. */
INLINE int any_special(const element *v, int64_t stride, int64_t from, int64_t to) {
    int found = 0;
    for (int64_t j = from; j < to && !found; j++)
        for (int d = 0; d < HEAD_DIM_V; d++) found |= is_special(v + j * stride + d);
    return found;
}

/* The weight of key j (counted from the panel's first) in one vector of queries, as the softmax left it. */
INLINE vf weight_of(const float *p, int j) {
#if PAIRS
    vi pair = (vi)vf_load(p + j / 2 * PANEL);
    return (vf)(j % 2 ? pair & vi_set1(-65536) : pair << 16);
#else
    return vf_load(p + j * PANEL);
#endif
}

/* weighted_values for one vector of queries, leaving out what is masked by choice of bits. */
static void weighted_values_exact(float *o, const float *p, const element *v, int64_t stride, int n,
                                  const float *alpha, const ForwardArgs *args, const Visibility *also,
                                  int64_t query, int64_t key) {
    vi seen[BLOCK_KV];
    for (int j = 0; j < n; j++) seen[j] = visible(args, query, key + j) & also_visible(also, query, key + j);
    for (int d = 0; d < HEAD_DIM_V; d++) {
        vf sum = vf_set1(0);
        for (int j = 0; j < n; j++)
            sum = vf_select(seen[j], vf_fma(weight_of(p, j), vf_set1(widen(v[j * stride + d])), sum), sum);
        float *to = o + d * PANEL;
        vf_store(to, vf_fma(vf_load(to), vf_load(alpha), sum));
    }
}
