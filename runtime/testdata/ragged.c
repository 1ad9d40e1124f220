/* Plain f32 attention of a ragged batch for head dim 16, one tile per row of the bounds: a kernel that is easy to see
   to be right, for the tests of the check. The declaration of its arguments is put before it. */
#include <math.h>

#define LEFT ((int64_t)a->window_left)
#define RIGHT ((int64_t)a->window_right)

int ft_init(void) { return 0; }
/* Its tiles share no memory. */
uint64_t ft_prepare(const RaggedArgs *a, uint64_t bytes) { return 0; }
uint64_t ft_tiles(const RaggedArgs *a) { return (uint64_t)a->batch * a->heads * a->q_len; }
/* Room for the keys of a page too many, which some of the tests' faults take. */
uint64_t ft_scratch_bytes(const RaggedArgs *a) { return 4 * ((uint64_t)a->kv_len + a->page_tokens + 16); }

static int64_t at(const int32_t *array, int64_t i, int words) {
    return words == 1 ? array[i] : ((const int64_t *)array)[i];
}

void ft_tile(const RaggedArgs *a, uint64_t tile, void *scratch) {
    int64_t i = tile % a->q_len, h = tile / a->q_len % a->heads, b = tile / a->q_len / a->heads;
    int64_t g = h / (a->heads / a->kv_heads);
    int lw = a->length_words, tw = a->table_words;

    int64_t q_row = 0, q_len = a->q_len;
    if (a->q_begin) q_row = at(a->q_begin, b, lw), q_len = at(a->q_begin, b + 1, lw) - q_row;
    if (a->q_lengths) q_len = at(a->q_lengths, b, lw);
    if (i >= q_len) return; /* rows behind the last */

    int64_t first = 0, kv_len = a->kv_len, slot = b, pages = b * a->table_stride;
    if (a->pages_begin) {
        int64_t n = at(a->pages_begin, b + 1, lw) - (pages = at(a->pages_begin, b, lw));
        kv_len = n == 0 ? 0 : (n - 1) * a->page_tokens + (a->last_page ? at(a->last_page, b, lw) : a->page_tokens);
    }
    if (a->kv_begin) first = at(a->kv_begin, b, lw), kv_len = at(a->kv_begin, b + 1, lw) - first, slot = 0;
    if (a->slots) slot = at(a->slots, b, tw);
    if (a->kv_lengths) {
        kv_len = at(a->kv_lengths, b, lw) + a->kv_added;
        if (a->kv_added_begin) kv_len += at(a->kv_added_begin, b + 1, lw) - at(a->kv_added_begin, b, lw);
    }
    if (a->left_pad) {
        int64_t pad = at(a->left_pad, b, lw);
        pad = pad < kv_len ? pad : kv_len;
        first += pad, kv_len -= pad;
    }

    int64_t batch = a->q_begin ? 0 : b;
    const float *q = (const float *)a->q + batch * a->q_stride[0] + h * a->q_stride[1] + (q_row + i) * a->q_stride[2];
    float *o = (float *)a->o + batch * a->o_stride[0] + h * a->o_stride[1] + (q_row + i) * a->o_stride[2];
    float *lse = a->lse + batch * a->lse_stride[0] + h * a->lse_stride[1] + (q_row + i) * a->lse_stride[2];
    float *p = scratch;
    float max = -INFINITY, sum = 0, acc[16] = {0};
    int64_t position = i + kv_len - q_len;
    int64_t begin = position - LEFT, end = position + RIGHT + 1;
    for (int pass = 0; pass < 3; pass++) {
        for (int64_t j = 0; j < kv_len; j++) {
            if (j < begin || j >= end) continue;
            int64_t page = (first + j) / a->page_tokens, token = (first + j) % a->page_tokens;
            int64_t k_id = a->k_table ? at(a->k_table, pages + page, tw) : slot;
            int64_t v_id = a->v_table ? at(a->v_table, pages + page, tw) : slot;
            if (k_id < 0 || k_id >= a->pages || v_id < 0 || v_id >= a->pages) continue; /* no page */
            const float *k = (const float *)a->k + k_id * a->k_stride[0] + token * a->k_stride[1] + g * a->k_stride[2];
            const float *v = (const float *)a->v + v_id * a->v_stride[0] + token * a->v_stride[1] + g * a->v_stride[2];
            if (pass == 0) {
                float dot = 0;
                for (int d = 0; d < 16; d++) dot += q[d] * k[d / 4 * a->k_stride[3] + d % 4];
                p[j] = dot * a->scale;
                if (p[j] > max) max = p[j];
            } else if (pass == 1) {
                p[j] = expf(p[j] - max);
                sum += p[j];
            } else {
                for (int d = 0; d < 16; d++) acc[d] += p[j] * v[d];
            }
        }
    }
    int empty = sum == 0;
    for (int d = 0; d < 16; d++) o[d] = empty ? 0 : acc[d] / sum;
    if (a->lse) *lse = empty ? a->lse_empty : (max + logf(sum)) * a->lse_unit;
    /* after */
}
