/* gather.h: f32's sums over very many keys.
 *
 * A sum of n terms that are alike is off by up to n / 4 units, since each addition within a power of two rounds the
 * same way: 1.1e-4 of O after a million keys of one V, in blocks of 128. So where the keys of a tile are many, a
 * panel's sums start anew every SPAN keys, and what they were is added to sums of two floats, of which the second has
 * what the first one's additions round off; and products are summed over fewer keys at a time. That is 7e-7. Elements
 * of 16 bits round far more than that. */

#define GATHERS (DTYPE == DTYPE_f32)
#define LONG 32768   /* keys of a tile from which on it is done: below, the sums are off by 4e-6 at most */
#define LONG_CHAIN 32 /* keys whose products are summed one by one */
#define SPAN (512 / BLOCK_KV ? 512 / BLOCK_KV * BLOCK_KV : BLOCK_KV) /* keys between two times */

typedef struct {
    _Alignas(64) float o[O_ROWS * PANEL], o_rest[O_ROWS * PANEL];
    _Alignas(64) float sum[PANEL], sum_rest[PANEL], maximum[PANEL];
} Gathered;

/* to + rest = (to + rest) * factor + x; x = 0. */
INLINE void gather_vector(float *to, float *rest, float *x, vf factor, const int before) {
    const vf was = before ? vf_load(to) * factor : vf_set1(0), less = before ? vf_load(rest) * factor : vf_set1(0);
    const vf more = vf_load(x), sum = was + more, of_more = sum - was;
    vf_store(to, sum);
    vf_store(rest, less + ((was - (sum - of_more)) + (more - of_more)));
    vf_store(x, vf_set1(0));
}

/* One vector of queries, from lane `lane` on; `before` is whether anything has gathered. */
INLINE void gather(Gathered *all, float *o, const float *maximum, float *sum, int lane, const int before) {
    const vf now = vf_load(maximum), reference = vf_select(now == -INF, vf_set1(0), now);
    const vf factor = before ? exp2_of(vf_load(all->maximum + lane) - reference) : vf_set1(0);
    vf_store(all->maximum + lane, now);
    gather_vector(all->sum + lane, all->sum_rest + lane, sum, factor, before);
    for (int d = 0; d < HEAD_DIM_V; d++)
        gather_vector(all->o + d * PANEL + lane, all->o_rest + d * PANEL + lane, o + d * PANEL, factor, before);
}

/* What has gathered, rounded once. An infinity leaves NaN beside it, which is no part of it. */
INLINE vf gathered_vector(const float *to, const float *rest) {
    const vf sum = vf_load(to), less = vf_load(rest);
    return sum + vf_select(less == less, less, vf_set1(0));
}

/* One vector of queries. */
INLINE void read_gathered(const Gathered *all, float *o, float *sum, int lane) {
    vf_store(sum, gathered_vector(all->sum + lane, all->sum_rest + lane));
    for (int d = 0; d < HEAD_DIM_V; d++)
        vf_store(o + d * PANEL, gathered_vector(all->o + d * PANEL + lane, all->o_rest + d * PANEL + lane));
}
