/*
 * e4m3 operands through the C ABI on the CPU: codes and scales are those of plain loops, attention takes both as they
 * are, K's mean makes its log-sum-exp whole again; bad arguments give their status and a text, and write nothing.
 */
#include <flashtune.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 2, HEADS = 4, KV_HEADS = 2, Q = 9, KV = 21, DIM = 32 };

static float q[BATCH][HEADS][Q][DIM], k[BATCH][KV_HEADS][KV][DIM], v[BATCH][KV_HEADS][KV][DIM];
static uint8_t q8[BATCH][HEADS][Q][DIM], k8[BATCH][KV_HEADS][KV][DIM], v8[BATCH][KV_HEADS][KV][DIM];
static float q_scale[BATCH][KV_HEADS], k_scale[BATCH][KV_HEADS], v_scale[BATCH][KV_HEADS];
static float mean[BATCH][KV_HEADS][DIM], o[BATCH][HEADS][Q][DIM], lse[BATCH][HEADS][Q];
static flashtune_engine engine;
static int cases, failures;

static void expect(const char *what, flashtune_status found, flashtune_status wanted, const char *word) {
    cases++;
    const char *text = flashtune_last_error();
    if (found == wanted && (wanted == FLASHTUNE_STATUS_OK || strstr(text, word))) return;
    failures++;
    fprintf(stderr, "%s: %s (%s), not %s with `%s`\n", what, flashtune_status_name(found), text,
            flashtune_status_name(wanted), word);
}

static void near(const char *what, double found, double wanted, double bound) {
    cases++;
    if (fabs(found - wanted) <= bound) return;
    failures++;
    fprintf(stderr, "%s: %g, not %g within %g\n", what, found, wanted, bound);
}

/* What a code means. */
static double value(uint8_t code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double x = exponent ? ldexp(1 + mantissa / 8.0, exponent - 7) : ldexp(mantissa / 8.0, -6);
    if (exponent == 15 && mantissa == 7) x = NAN;
    return code & 0x80 ? -x : x;
}

static flashtune_tensor tensor(void *data, int64_t heads, int64_t rows, int32_t dtype) {
    flashtune_tensor t = {.data = data, .dtype = dtype};
    const int64_t shape[4] = {BATCH, heads, rows, DIM}, strides[4] = {heads * rows * DIM, rows * DIM, DIM, 1};
    memcpy(t.shape, shape, sizeof shape), memcpy(t.strides, strides, sizeof strides);
    return t;
}

static flashtune_quantise_args good(void) {
    const int32_t f32 = FLASHTUNE_DTYPE_F32, e4m3 = FLASHTUNE_DTYPE_E4M3;
    return (flashtune_quantise_args){
        .struct_size = sizeof(flashtune_quantise_args),
        .q = tensor(q, HEADS, Q, f32), .k = tensor(k, KV_HEADS, KV, f32), .v = tensor(v, KV_HEADS, KV, f32),
        .q_out = tensor(q8, HEADS, Q, e4m3), .k_out = tensor(k8, KV_HEADS, KV, e4m3),
        .v_out = tensor(v8, KV_HEADS, KV, e4m3),
        .q_descale = q_scale[0], .k_descale = k_scale[0], .v_descale = v_scale[0],
        .q_descale_stride = {KV_HEADS, 1}, .k_descale_stride = {KV_HEADS, 1}, .v_descale_stride = {KV_HEADS, 1},
        .k_mean = mean[0][0], .k_mean_stride = {KV_HEADS * DIM, DIM},
    };
}

/* Codes of V are the nearest to its elements over a scale that makes the largest 448. */
static void compare_v(const char *what) {
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < KV_HEADS; h++) {
            const float *elements = &v[b][h][0][0];
            const uint8_t *codes = &v8[b][h][0][0];
            double largest = 0, worst = 0;
            for (int i = 0; i < KV * DIM; i++) largest = fmax(largest, fabs(elements[i]));
            near(what, v_scale[b][h], largest / 448, 1e-6 * largest / 448);
            for (int i = 0; i < KV * DIM; i++) {
                double x = elements[i], scale = v_scale[b][h], error = fabs(value(codes[i]) * scale - x);
                worst = fmax(worst, error / (fmax(fabs(x) / 16, scale * 0x1p-10) * (1 + 1e-5)));
            }
            near(what, worst, 0.5, 0.5);
        }
}

/* Scales of rows of Q and K and of channels of V, in either struct. */
static float q_rows[BATCH][HEADS][Q], k_rows[BATCH][KV_HEADS][KV], v_channels[BATCH][KV_HEADS][DIM];
#define FINER(a)                                                                                               \
    do {                                                                                                       \
        (a).q_descale = q_rows[0][0], (a).k_descale = k_rows[0][0], (a).v_descale = v_channels[0][0];          \
        (a).q_descale_stride[0] = HEADS * Q, (a).q_descale_stride[1] = Q;                                      \
        (a).k_descale_stride[0] = KV_HEADS * KV, (a).k_descale_stride[1] = KV;                                 \
        (a).v_descale_stride[0] = KV_HEADS * DIM, (a).v_descale_stride[1] = DIM;                               \
        (a).q_descale_by = (flashtune_descale){FLASHTUNE_DESCALE_KIND_TOKEN, 0, 1};                            \
        (a).k_descale_by = (flashtune_descale){FLASHTUNE_DESCALE_KIND_TOKEN, 0, 1};                            \
        (a).v_descale_by = (flashtune_descale){FLASHTUNE_DESCALE_KIND_CHANNEL, 0, 1};                          \
    } while (0)

/* O and LSE against plain loops over the elements of before, beside what codes round. */
static void attend(const char *what, int has_mean, int finer) {
    flashtune_forward_args a = {
        .struct_size = sizeof a,
        .q = tensor(q8, HEADS, Q, FLASHTUNE_DTYPE_E4M3), .k = tensor(k8, KV_HEADS, KV, FLASHTUNE_DTYPE_E4M3),
        .v = tensor(v8, KV_HEADS, KV, FLASHTUNE_DTYPE_E4M3), .o = tensor(o, HEADS, Q, FLASHTUNE_DTYPE_F32),
        .lse = lse[0][0], .q_descale = q_scale[0], .k_descale = k_scale[0], .v_descale = v_scale[0],
        .q_descale_stride = {KV_HEADS, 1}, .k_descale_stride = {KV_HEADS, 1}, .v_descale_stride = {KV_HEADS, 1},
    };
    if (finer) FINER(a);
    memset(o, 0xff, sizeof o);
    expect(what, flashtune_forward(engine, &a), FLASHTUNE_STATUS_OK, "");
    double squares = 0, errors = 0, worst = 0;
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < Q; i++) {
                const int kv_head = h / (HEADS / KV_HEADS);
                double sum = 0, out[DIM] = {0}, by_mean = 0;
                for (int j = 0; j < KV; j++) {
                    double score = 0;
                    for (int d = 0; d < DIM; d++) score += (double)q[b][h][i][d] * k[b][kv_head][j][d];
                    const double weight = exp(score / sqrt(DIM));
                    sum += weight;
                    for (int d = 0; d < DIM; d++) out[d] += weight * v[b][kv_head][j][d];
                }
                for (int d = 0; d < DIM && has_mean; d++) by_mean += (double)q[b][h][i][d] * mean[b][kv_head][d];
                worst = fmax(worst, fabs(lse[b][h][i] + by_mean / sqrt(DIM) - log(sum)));
                for (int d = 0; d < DIM; d++) {
                    squares += out[d] / sum * out[d] / sum;
                    errors += pow(o[b][h][i][d] - out[d] / sum, 2);
                }
            }
    near(what, sqrt(errors / squares), 0, 0.08);
    near(what, worst, 0, 0.15);
}

#define BAD(change, status, word)  \
    do {                                                                                               \
        flashtune_quantise_args a = good();                                                            \
        (void)(change);                                                                                \
        expect("quantise: " #change, flashtune_quantise(engine, &a, NULL), status, word);              \
        expect("prepare: " #change, flashtune_prepare_quantise(engine, &a), status, word);             \
    } while (0)

/* Rotates rows by a table of one position. */
static int rotate(flashtune_quantise_args *a, const float *angles, int64_t dim) {
    a->cos = a->sin = angles, a->rotary_rows = 1, a->rotary_dim = dim, a->rotary_dtype = FLASHTUNE_DTYPE_F32;
    return 0;
}

static void bad(void) {
    const flashtune_status argument = FLASHTUNE_STATUS_INVALID_ARGUMENT, in = FLASHTUNE_STATUS_INVALID_TENSOR,
                           unsupported = FLASHTUNE_STATUS_UNSUPPORTED;
    static float angles[64];
    flashtune_quantise_args a = good();
    expect("no arguments", flashtune_quantise(engine, NULL, NULL), argument, "null");
    expect("a stream", flashtune_quantise(engine, &a, &a), argument, "stream");
    expect("no engine", flashtune_quantise(77, &a, NULL), FLASHTUNE_STATUS_INVALID_HANDLE, "engine");
    BAD(a.struct_size = 8, argument, "struct_size");
    BAD(a.flags = 64, argument, "flags");
    BAD((rotate(&a, angles, 4), a.q_first = -1), argument, "q_first is -1");
    BAD(a.q.dtype = FLASHTUNE_DTYPE_E4M3, in, "tensor q: dtype");
    BAD(a.k_out.dtype = FLASHTUNE_DTYPE_F32, in, "tensor k_out: dtype");
    BAD(a.v_out.data = NULL, in, "tensor v_out: address is null");
    BAD(a.k_descale = NULL, in, "tensor k_descale: address is null");
    BAD(a.v_descale_stride[1] = 0, in, "tensor v_descale");
    BAD((a.flags = FLASHTUNE_QUANTISE_MEAN, a.k_mean_stride[1] = 3), in, "tensor k_mean: head stride");
    BAD(a.k_descale_by.kind = 4, argument, "k_descale_by.kind is 4");
    BAD(a.k_descale_by.rows = 8, argument, "k_descale_by.rows is 8");
    BAD((a.v_descale_by.kind = FLASHTUNE_DESCALE_KIND_TOKEN), in, "tensor v_descale: rows of a scale");
    BAD((a.k_descale_by = (flashtune_descale){FLASHTUNE_DESCALE_KIND_BLOCK, 96, 1}), in, "tensor k_descale");
    BAD((a.flags = FLASHTUNE_QUANTISE_Q_WHOLE, a.q_descale_by.kind = 1), argument, "one scale for all");
    BAD(rotate(&a, angles, 5), unsupported, "rotary_dim = 5");
    BAD((a.flags = FLASHTUNE_QUANTISE_MEAN, a.k = (flashtune_tensor){0}), unsupported, "there is no K");
}

int main(void) {
    flashtune_options p = {.struct_size = sizeof p, .device = "cpu"};
    expect("open", flashtune_engine_open(&p, &engine), FLASHTUNE_STATUS_OK, "");
    float *all[] = {(float *)q, (float *)k, (float *)v};
    const size_t counts[] = {sizeof q / 4, sizeof k / 4, sizeof v / 4};
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < counts[t]; i++)
            all[t][i] = (float)rand() / (float)RAND_MAX * 2.0f - 1.0f + (t == 1 && i % DIM == 3 ? 2.0f : 0.0f);
    flashtune_quantise_args a = good();
    expect("prepare", flashtune_prepare_quantise(engine, &a), FLASHTUNE_STATUS_OK, "");
    for (uint32_t flags = 0; flags <= 6; flags += 2) {
        a.flags = flags; /* the Hadamard matrix, K's mean, and both */
        memset(k8, 0xff, sizeof k8);
        expect("quantise", flashtune_quantise(engine, &a, NULL), FLASHTUNE_STATUS_OK, "");
        compare_v("v");
        attend("attention", flags & FLASHTUNE_QUANTISE_MEAN, 0);
    }
    FINER(a);
    expect("quantise by rows", flashtune_quantise(engine, &a, NULL), FLASHTUNE_STATUS_OK, "");
    attend("attention by rows", 1, 1);
    a = good();
    a.flags = FLASHTUNE_QUANTISE_V_WHOLE, a.q = a.k = (flashtune_tensor){0};
    expect("V alone", flashtune_quantise(engine, &a, NULL), FLASHTUNE_STATUS_OK, "");
    near("one scale", v_scale[0][0], v_scale[1][1], 0);
    memset(v8, 0xa5, sizeof v8);
    bad();
    const uint8_t *bytes = (const uint8_t *)v8;
    for (size_t i = 0; i < sizeof v8; i++)
        if (bytes[i] != 0xa5) failures++, fprintf(stderr, "a refused call wrote byte %zu\n", i);
    a = (flashtune_quantise_args){.struct_size = sizeof a};
    expect("nothing", flashtune_quantise(engine, &a, NULL), FLASHTUNE_STATUS_UNSUPPORTED, "q, k and v");
    expect("close", flashtune_engine_close(engine), FLASHTUNE_STATUS_OK, "");
    printf("%d cases, %d failures\n", cases, failures);
    return failures != 0;
}
