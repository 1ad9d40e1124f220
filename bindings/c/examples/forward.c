/*
 * Causal attention from C, on the CPU: opens an engine, computes, compares with plain loops, and says which kernel ran.
 *
 *     cargo build --release -p flashtune-c
 *     cc -Ibindings/c/include bindings/c/examples/forward.c -o forward -Ltarget/release -lflashtune -lm
 *     LD_LIBRARY_PATH=target/release ./forward
 *
 * On a GPU name "cuda:0" as the device, give addresses of device memory, and the stream to launch on.
 */
#include <flashtune.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 2, HEADS = 4, KV_HEADS = 2, ROWS = 100, DIM = 64 };

static float q[BATCH * HEADS * ROWS * DIM], k[BATCH * KV_HEADS * ROWS * DIM], v[BATCH * KV_HEADS * ROWS * DIM];
static float o[BATCH * HEADS * ROWS * DIM], lse[BATCH * HEADS * ROWS];

/* A contiguous [batch, heads, rows, dim] tensor of floats. */
static flashtune_tensor tensor(float *data, int64_t heads) {
    flashtune_tensor t = {.data = data,
                          .shape = {BATCH, heads, ROWS, DIM},
                          .strides = {heads * ROWS * DIM, ROWS * DIM, DIM, 1},
                          .dtype = FLASHTUNE_DTYPE_F32};
    return t;
}

static void fill(float *data, size_t n) {
    for (size_t i = 0; i < n; i++) data[i] = (float)rand() / (float)RAND_MAX * 2.0f - 1.0f;
}

static void require(flashtune_status status) {
    if (status == FLASHTUNE_STATUS_OK) return;
    fprintf(stderr, "%s: %s\n", flashtune_status_name(status), flashtune_last_error());
    exit(1);
}

/* The largest difference to attention computed with plain loops in double precision. */
static double error_of_o(void) {
    double worst = 0.0;
    for (int row = 0; row < BATCH * HEADS * ROWS; row++) {
        int i = row % ROWS, head = row / ROWS % HEADS, batch = row / ROWS / HEADS;
        size_t kv = ((size_t)batch * KV_HEADS + head / (HEADS / KV_HEADS)) * ROWS * DIM;
        double sum = 0.0, out[DIM] = {0};
        for (int j = 0; j <= i; j++) {
            double score = 0.0;
            for (int d = 0; d < DIM; d++) score += (double)q[(size_t)row * DIM + d] * k[kv + (size_t)j * DIM + d];
            double weight = exp(score / sqrt(DIM));
            sum += weight;
            for (int d = 0; d < DIM; d++) out[d] += weight * v[kv + (size_t)j * DIM + d];
        }
        for (int d = 0; d < DIM; d++) worst = fmax(worst, fabs(out[d] / sum - o[(size_t)row * DIM + d]));
        worst = fmax(worst, fabs(log(sum) - lse[row]));
    }
    return worst;
}

int main(void) {
    if (flashtune_abi_version() != FLASHTUNE_ABI_VERSION) {
        fprintf(stderr, "libflashtune %s has another ABI than its header\n", flashtune_version());
        return 1;
    }
    fill(q, sizeof q / sizeof *q);
    fill(k, sizeof k / sizeof *k);
    fill(v, sizeof v / sizeof *v);

    flashtune_options options = {.struct_size = sizeof options, .device = "cpu"};
    flashtune_engine engine;
    require(flashtune_engine_open(&options, &engine));

    flashtune_forward_args args = {.struct_size = sizeof args,
                                   .q = tensor(q, HEADS),
                                   .k = tensor(k, KV_HEADS),
                                   .v = tensor(v, KV_HEADS),
                                   .o = tensor(o, HEADS),
                                   .lse = lse,
                                   .mask = FLASHTUNE_MASK_CAUSAL};
    require(flashtune_forward(engine, &args));

    char text[8192];
    require(flashtune_explain(engine, FLASHTUNE_FORMAT_TEXT, text, sizeof text, NULL));
    double error = error_of_o();
    printf("%slargest error %.1e\n", text, error);
    require(flashtune_engine_close(engine));
    return error < 1e-5 ? 0 : 1;
}
