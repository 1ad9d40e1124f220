/*
 * The forward pass over tensors of DLPack: the same bytes as flashtune_forward, and a status and a text for what is
 * hostile.
 */
#include <flashtune.h>
#include <stdio.h>
#include <string.h>

enum { HEADS = 2, KV_HEADS = 1, ROWS = 24, DIM = 16, N = HEADS * ROWS * DIM };

static float q[N], k[N], v[N], o[N], expected[N], lse[HEADS * ROWS];
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

static void same(const char *what) {
    cases++;
    if (!memcmp(o, expected, sizeof o)) return;
    failures++;
    fprintf(stderr, "%s: not the bytes of flashtune_forward\n", what);
}

/* A call on [B, S, H, D] memory, whose shapes and strides a case may change. */
struct call {
    int64_t q_shape[4], kv_shape[4], o_shape[4], lse_shape[3], strides[4];
    flashtune_dl_tensor q, k, v, o, lse;
    flashtune_dl_tensors tensors;
    flashtune_forward_args args;
};

static void good(struct call *c) {
    const struct call zero = {0};
    *c = zero;
    const int64_t shape[4] = {1, ROWS, HEADS, DIM}, of_kv[4] = {1, ROWS, KV_HEADS, DIM}, of_lse[3] = {1, HEADS, ROWS};
    const int64_t dense[4] = {N, HEADS * DIM, DIM, 1};
    memcpy(c->q_shape, shape, sizeof shape), memcpy(c->o_shape, shape, sizeof shape);
    memcpy(c->kv_shape, of_kv, sizeof of_kv), memcpy(c->lse_shape, of_lse, sizeof of_lse);
    memcpy(c->strides, dense, sizeof dense);
    flashtune_dl_tensor t = {.device_type = 1, .ndim = 4, .code = 2, .bits = 32, .lanes = 1};
    c->q = c->k = c->v = c->o = c->lse = t;
    c->q.data = q, c->k.data = k, c->v.data = v, c->o.data = o, c->lse.data = lse;
    c->q.shape = c->q_shape, c->k.shape = c->v.shape = c->kv_shape, c->o.shape = c->o_shape;
    c->lse.shape = c->lse_shape, c->lse.ndim = 3;
    flashtune_dl_tensors tensors = {.struct_size = sizeof tensors, .layout = 1, .q = &c->q, .k = &c->k, .v = &c->v,
                                    .o = &c->o, .lse = &c->lse};
    c->tensors = tensors;
    c->args.struct_size = sizeof c->args, c->args.mask = FLASHTUNE_MASK_CAUSAL;
    memset(o, 0xff, sizeof o);
}

#define CASE(change, status, word)                                                                       \
    do {                                                                                                 \
        struct call c;                                                                                   \
        good(&c);                                                                                        \
        change;                                                                                          \
        expect("forward: " #change, flashtune_forward_dl(engine, &c.tensors, &c.args), status, word);    \
        if ((status) == FLASHTUNE_STATUS_OK) same(#change);                                              \
        expect("prepare: " #change, flashtune_prepare_dl(engine, &c.tensors, &c.args), status, word);    \
    } while (0)

static void computes(void) {
    const flashtune_status ok = FLASHTUNE_STATUS_OK;
    flashtune_tensor t = {.shape = {1, HEADS, ROWS, DIM}, .strides = {N, DIM, HEADS * DIM, 1},
                          .dtype = FLASHTUNE_DTYPE_F32};
    flashtune_tensor one = {.shape = {1, KV_HEADS, ROWS, DIM}, .strides = {N, DIM, KV_HEADS * DIM, 1},
                            .dtype = FLASHTUNE_DTYPE_F32};
    flashtune_forward_args a = {.struct_size = sizeof a, .q = t, .k = one, .v = one, .o = t,
                                .mask = FLASHTUNE_MASK_CAUSAL};
    a.q.data = q, a.k.data = k, a.v.data = v, a.o.data = expected;
    expect("plain", flashtune_forward(engine, &a), ok, "");

    CASE((void)c, ok, "");
    CASE(c.tensors.lse = NULL, ok, "");
    CASE(c.q.strides = c.strides, ok, "");
    CASE(c.q.device_type = 3, ok, "");
    CASE((c.k.data = (void *)((uintptr_t)k - 32), c.k.byte_offset = 32), ok, "");
    /* Strides of axes of length 1 mean nothing. */
    CASE((c.q.strides = c.strides, c.strides[0] = INT64_MIN), ok, "");
    struct call c;
    good(&c);
    c.q_shape[1] = c.o_shape[1] = c.lse_shape[2] = 0, c.q.data = c.o.data = NULL;
    expect("no rows", flashtune_forward_dl(engine, &c.tensors, &c.args), ok, "");
    /* The same memory as [B, H, S, D]. */
    good(&c);
    const int64_t shape[4] = {1, HEADS, ROWS, DIM}, of_kv[4] = {1, KV_HEADS, ROWS, DIM};
    const int64_t strides[4] = {N, DIM, HEADS * DIM, 1};
    memcpy(c.q_shape, shape, sizeof shape), memcpy(c.o_shape, shape, sizeof shape);
    memcpy(c.kv_shape, of_kv, sizeof of_kv);
    memcpy(c.strides, strides, sizeof strides), c.q.strides = c.o.strides = c.strides, c.tensors.layout = 0;
    expect("layout 0", flashtune_forward_dl(engine, &c.tensors, &c.args), ok, "");
    same("layout 0");
}

static void hostile(void) {
    const flashtune_status tensor = FLASHTUNE_STATUS_INVALID_TENSOR, argument = FLASHTUNE_STATUS_INVALID_ARGUMENT;
    expect("no tensors", flashtune_forward_dl(engine, NULL, NULL), argument, "flashtune_dl_tensors is null");
    struct call c;
    good(&c);
    expect("no args", flashtune_forward_dl(engine, &c.tensors, NULL), argument, "flashtune_forward_args is null");
    expect("no engine", flashtune_forward_dl(5, &c.tensors, &c.args), FLASHTUNE_STATUS_INVALID_HANDLE, "engine");
    CASE(c.tensors.struct_size = 8, argument, "struct_size");
    CASE(c.tensors.layout = 2, argument, "layout is 2");
    CASE(c.tensors.v = NULL, argument, "DLTensor v is null");
    CASE(c.args.q.data = q, argument, "q of args");
    CASE(c.args.lse = lse, argument, "lse of args");
    CASE(c.args.stream = &c, argument, "stream");
    CASE(c.q.data = NULL, tensor, "tensor q: address is null");
    CASE(c.q.shape = NULL, tensor, "tensor q: shape is null");
    CASE(c.q.ndim = 100, tensor, "tensor q: ndim is 100");
    CASE(c.o.ndim = -4, tensor, "tensor o: ndim is -4");
    CASE(c.k.ndim = 3, tensor, "tensor k: ndim is 3");
    CASE(c.lse.ndim = 4, tensor, "tensor lse: ndim is 4");
    CASE(c.q.bits = 64, tensor, "tensor q: dtype");
    CASE(c.q.code = 4, tensor, "code 4 of 32 bits");
    CASE(c.k.lanes = 4, tensor, "4 lanes");
    CASE(c.k.bits = 16, tensor, "tensor k: dtype");
    CASE(c.q.device_type = 2, tensor, "tensor q: device is type 2");
    CASE(c.o.device_type = 0, tensor, "tensor o: device is type 0");
    CASE(c.lse.device_type = 10, tensor, "tensor lse: device is type 10");
    CASE(c.q_shape[2] = -1, tensor, "tensor q: shape");
    CASE(c.kv_shape[3] = 17, tensor, "tensor k: shape");
    CASE((c.q_shape[0] = INT64_MAX, c.q_shape[1] = INT64_MAX), tensor, "less than 2^63");
    CASE((c.q.strides = c.strides, c.q_shape[0] = INT64_MAX), tensor, "tensor");
    CASE((c.q.strides = c.strides, c.strides[1] = -HEADS * DIM), tensor, "tensor q: row stride");
    CASE((c.q.strides = c.strides, c.strides[2] = INT64_MAX), tensor, "tensor q: extent");
    CASE((c.o.strides = c.strides, c.strides[1] = 0), tensor, "tensor o: row stride");
    CASE((c.q.strides = c.strides, c.strides[3] = 2), tensor, "stride of the last dim");
    CASE(c.q.byte_offset = UINT64_MAX, tensor, "tensor q: byte_offset");
    CASE(c.q.byte_offset = 2, tensor, "tensor q: address");
    CASE(c.v.data = (void *)(UINTPTR_MAX - 3), tensor, "tensor v: extent");
    CASE(c.lse_shape[2] = ROWS - 1, tensor, "tensor lse: shape");
    CASE((c.lse.strides = c.strides), tensor, "tensor lse: strides");
    CASE((c.lse.bits = 16), tensor, "tensor lse: dtype");
}

/* Memory of the library's as O: taken over and given back as by another library's from_dlpack. */
static void results(void) {
    const flashtune_status argument = FLASHTUNE_STATUS_INVALID_ARGUMENT;
    const int64_t shape[9] = {1, ROWS, HEADS, DIM}, huge[2] = {INT64_MAX, 3}, negative[1] = {-1};
    const int64_t none[2] = {0, 1ll << 40};
    flashtune_dl_managed_tensor *t = (void *)&shape;
    struct call c;
    good(&c);
    expect("empty", flashtune_empty_dl(engine, shape, 4, 2, 32, &t), FLASHTUNE_STATUS_OK, "");
    const int64_t *has = t->dl_tensor.strides;
    if (has[0] != N || has[1] != HEADS * DIM || has[2] != DIM || has[3] != 1) failures++, fprintf(stderr, "strides\n");
    memset(t->dl_tensor.data, 0xff, N * sizeof(float));
    c.tensors.o = &t->dl_tensor;
    expect("into it", flashtune_forward_dl(engine, &c.tensors, &c.args), FLASHTUNE_STATUS_OK, "");
    memcpy(o, t->dl_tensor.data, sizeof o);
    same("into it");
    t->deleter(t);
    expect("nothing", flashtune_empty_dl(engine, none, 2, 0, 8, &t), FLASHTUNE_STATUS_OK, "");
    if (t->dl_tensor.strides[0] != 1ll << 40) failures++, fprintf(stderr, "strides of nothing\n");
    t->deleter(t);
    expect("a number", flashtune_empty_dl(engine, NULL, 0, 2, 64, &t), FLASHTUNE_STATUS_OK, "");
    t->deleter(t);
#define BAD(status, word, ...)                                                                             \
    do {                                                                                                   \
        t = (void *)&shape;                                                                                \
        expect(#__VA_ARGS__, flashtune_empty_dl(__VA_ARGS__), status, word);                               \
        if (t != NULL) failures++, fprintf(stderr, #__VA_ARGS__ ": a stale address\n");                    \
    } while (0)
    BAD(argument, "ndim is 9", engine, shape, 9, 2, 32, &t);
    BAD(argument, "ndim is -1", engine, shape, -1, 2, 32, &t);
    BAD(argument, "shape is null", engine, NULL, 1, 2, 32, &t);
    BAD(argument, "shape[0] is -1", engine, negative, 1, 2, 32, &t);
    BAD(argument, "bits is 4", engine, shape, 4, 2, 4, &t);
    BAD(argument, "more bytes", engine, huge, 2, 2, 32, &t);
    BAD(FLASHTUNE_STATUS_INVALID_HANDLE, "engine", 5, shape, 4, 2, 32, &t);
    expect("no place", flashtune_empty_dl(engine, shape, 4, 2, 32, NULL), argument, "null");
    expect("waits", flashtune_synchronize(engine, NULL), FLASHTUNE_STATUS_OK, "");
    expect("a stream", flashtune_synchronize(engine, &c), argument, "stream");
    expect("no engine", flashtune_synchronize(5, NULL), FLASHTUNE_STATUS_INVALID_HANDLE, "engine");
}

int main(void) {
    flashtune_options p = {.struct_size = sizeof p, .device = "cpu"};
    if (sizeof(flashtune_dl_tensor) != 48 || flashtune_engine_open(&p, &engine)) return 1;
    for (int i = 0; i < N; i++)
        q[i] = (float)(i * 7 % 11) / 8, k[i] = (float)(i * 5 % 13) / 8, v[i] = (float)(i * 3 % 17) / 8;
    computes();
    hostile();
    results();
    computes();
    printf("%d cases, %d failures\n", cases, failures);
    return failures != 0 || cases < 100;
}
