/*
 * Score programs through the C ABI, against plain loops: a window whose length is a run-time scalar, ALiBi with a
 * tensor of slopes, a bias of bf16 that is broadcast, and a sink; the same by a mask that was prepared before.
 */
#include <flashtune.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 3, ROWS = 70, DIM = 16, N = HEADS * ROWS * DIM };

static float q[N], k[N], v[N], o[N], lse[HEADS * ROWS];
static const float slopes[HEADS] = {0.5f, 0.125f, 0.0f}, sinks[HEADS] = {0.0f, -INFINITY, 2.5f};
static uint16_t bias[ROWS];

static double bias_of(int j) { return j % 8 * 0.25; }

static void require(flashtune_status status) {
    if (status == FLASHTUNE_STATUS_OK) return;
    fprintf(stderr, "%s: %s\n", flashtune_status_name(status), flashtune_last_error());
    exit(1);
}

static double error(int left) {
    double worst = 0.0;
    for (int row = 0; row < HEADS * ROWS; row++) {
        int i = row % ROWS, h = row / ROWS;
        double sum = exp((double)sinks[h]), out[DIM] = {0};
        for (int j = i - left < 0 ? 0 : i - left; j <= i; j++) {
            double score = 0.0;
            for (int d = 0; d < DIM; d++) score += (double)q[row * DIM + d] * k[(h * ROWS + j) * DIM + d];
            double weight = exp(score / sqrt(DIM) + slopes[h] * (j - i) + bias_of(j));
            sum += weight;
            for (int d = 0; d < DIM; d++) out[d] += weight * v[(h * ROWS + j) * DIM + d];
        }
        for (int d = 0; d < DIM; d++) worst = fmax(worst, fabs(out[d] / sum - o[row * DIM + d]));
        worst = fmax(worst, fabs(log(sum) - lse[row]));
    }
    return worst;
}

int main(void) {
    flashtune_options options = {.struct_size = sizeof options, .device = "cpu"};
    flashtune_engine engine;
    require(flashtune_engine_open(&options, &engine));
    for (int i = 0; i < N; i++) {
        q[i] = (float)rand() / (float)RAND_MAX * 2.0f - 1.0f;
        k[i] = (float)rand() / (float)RAND_MAX * 2.0f - 1.0f;
        v[i] = (float)rand() / (float)RAND_MAX * 2.0f - 1.0f;
    }
    for (int j = 0; j < ROWS; j++) {
        float x = (float)bias_of(j);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        bias[j] = (uint16_t)(bits >> 16);
    }
    flashtune_tensor t = {.shape = {1, HEADS, ROWS, DIM}, .strides = {N, ROWS * DIM, DIM, 1},
                          .dtype = FLASHTUNE_DTYPE_F32};
    flashtune_input inputs[] = {
        {.name = "slope", .data = slopes, .shape = {HEADS}, .strides = {1}, .rank = 1,
         .storage = FLASHTUNE_STORAGE_F32},
        {.name = "sinks", .data = sinks, .shape = {HEADS}, .strides = {1}, .rank = 1, .storage = FLASHTUNE_STORAGE_F32},
        {.name = "bias", .data = bias, .shape = {1, ROWS}, .strides = {7, 1}, .rank = 2,
         .storage = FLASHTUNE_STORAGE_BF16},
        {.name = "left", .storage = FLASHTUNE_STORAGE_I64},
    };
    flashtune_forward_args a = {
        .struct_size = sizeof a, .q = t, .k = t, .v = t, .o = t, .lse = lse,
        .mask_program = "kv <= q and q - kv <= left",
        .score_program = "score + slope[h] * (kv - q) + bias[q, kv]",
        .sink_program = "sinks[h]",
        .inputs = inputs, .inputs_len = 4, .input_size = sizeof inputs[0],
    };
    a.q.data = q, a.k.data = k, a.v.data = v, a.o.data = o;
    int failures = 0;
    for (int left = 0; left <= 100; left += 25) {
        inputs[3].int_value = left;
        require(flashtune_forward(engine, &a));
        if (!(error(left) < 1e-5)) failures++, fprintf(stderr, "left %d: %g\n", left, error(left));
    }
    flashtune_input left = inputs[3];
    flashtune_block_mask_args m = {
        .struct_size = sizeof m, .mask_program = a.mask_program, .inputs = &left, .inputs_len = 1,
        .input_size = sizeof left, .q_len = ROWS, .kv_len = ROWS,
    };
    flashtune_block_mask block_mask;
    uint64_t bytes = 1;
    left.int_value = 20;
    require(flashtune_block_mask_create(engine, &m, &block_mask));
    a.mask_program = NULL, a.block_mask = block_mask, a.inputs_len = 3;
    memset(o, 0, sizeof o);
    require(flashtune_forward(engine, &a));
    require(flashtune_block_mask_bytes(block_mask, &bytes));
    if (!(error(20) < 1e-5) || bytes != 0)
        failures++, fprintf(stderr, "block mask: %g, %d bytes\n", error(20), (int)bytes);
    require(flashtune_block_mask_destroy(block_mask));
    require(flashtune_engine_close(engine));
    return failures;
}
