/* Plain f32 attention for head dim 16, one tile per row: a kernel that is easy to see to be right, for the tests of
   device and check. Only its test knows the mask: the arguments hold INT32_MAX for sides that are not bounded. */
#include <math.h>
#include <stdint.h>

typedef struct {
    uint64_t q, k, v, o, lse, weights;
    int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];
    int32_t batch, heads, kv_heads, q_len, kv_len, window_left, window_right;
    float scale;
} Args;

#define LEFT ((int64_t)a->window_left)
#define RIGHT ((int64_t)a->window_right)

int ft_init(void) { return 0; }
uint64_t ft_tiles(const Args *a) { return (uint64_t)a->batch * a->heads * a->q_len; }
uint64_t ft_scratch_bytes(const Args *a) { return 4 * (uint64_t)a->kv_len; }

void ft_tile(const Args *a, uint64_t tile, void *scratch) {
    int64_t i = tile % a->q_len, h = tile / a->q_len % a->heads, b = tile / a->q_len / a->heads;
    int64_t g = h / (a->heads / a->kv_heads);
    const float *q = (const float *)a->q + b * a->q_stride[0] + h * a->q_stride[1] + i * a->q_stride[2];
    const float *k = (const float *)a->k + b * a->k_stride[0] + g * a->k_stride[1];
    const float *v = (const float *)a->v + b * a->v_stride[0] + g * a->v_stride[1];
    float *o = (float *)a->o + b * a->o_stride[0] + h * a->o_stride[1] + i * a->o_stride[2];
    float *p = scratch;
    float max = -INFINITY, sum = 0, acc[16] = {0};

    int64_t position = i + a->kv_len - a->q_len;
    int64_t begin = position - LEFT, end = position + RIGHT + 1;
    for (int64_t j = 0; j < a->kv_len; j++) {
        if (j < begin || j >= end) continue;
        float dot = 0;
        for (int d = 0; d < 16; d++) dot += q[d] * k[j * a->k_stride[2] + d];
        p[j] = dot * a->scale;
        if (p[j] > max) max = p[j];
    }
    for (int64_t j = 0; j < a->kv_len; j++) {
        if (j < begin || j >= end) continue;
        p[j] = expf(p[j] - max);
        sum += p[j];
    }
    for (int64_t j = 0; j < a->kv_len; j++) {
        if (j < begin || j >= end) continue; /* masked rows of V */
        for (int d = 0; d < 16; d++) acc[d] += p[j] * v[j * a->v_stride[2] + d];
    }
    if (sum == 0) sum = 1;
    for (int d = 0; d < 16; d++) o[d] = acc[d] / sum;
    if (a->lse) ((float *)a->lse)[tile] = begin < end && end > 0 && begin < a->kv_len ? max + logf(sum) : -INFINITY;
    /* after */
}
