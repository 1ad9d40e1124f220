/*
 * Bad input through the C ABI: every case must give its status and a text, and the engine must still compute
 * afterwards.
 */
#include <flashtune.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HEADS = 2, ROWS = 8, DIM = 16, N = HEADS * ROWS * DIM };

static float q[N + 1], k[N + 1], v[N + 1], o[N + 1], lse[HEADS * ROWS];
static flashtune_engine engine;
static int cases, failures;

static flashtune_forward_args good(void) {
    flashtune_tensor t = {.shape = {1, HEADS, ROWS, DIM}, .strides = {N, ROWS * DIM, DIM, 1},
                          .dtype = FLASHTUNE_DTYPE_F32};
    flashtune_forward_args a = {.struct_size = sizeof a, .q = t, .k = t, .v = t, .o = t, .lse = lse};
    a.q.data = q, a.k.data = k, a.v.data = v, a.o.data = o;
    return a;
}

static void expect(const char *what, flashtune_status found, flashtune_status wanted, const char *word) {
    cases++;
    const char *text = flashtune_last_error();
    if (found == wanted && (wanted == FLASHTUNE_STATUS_OK || strstr(text, word))) return;
    failures++;
    fprintf(stderr, "%s: %s (%s), not %s with `%s`\n", what, flashtune_status_name(found), text,
            flashtune_status_name(wanted), word);
}

#define BAD_ARGS(change, status, word)                                                    \
    do {                                                                                  \
        flashtune_forward_args a = good();                                                \
        change;                                                                           \
        expect("forward: " #change, flashtune_forward(engine, &a), status, word);         \
        expect("prepare: " #change, flashtune_prepare(engine, &a), status, word);         \
    } while (0)

#define BAD_OPTIONS(change, status, word)                                                 \
    do {                                                                                  \
        flashtune_options p = {.struct_size = sizeof p, .device = "cpu"};                 \
        flashtune_engine opened = 77;                                                     \
        change;                                                                           \
        expect("open: " #change, flashtune_engine_open(&p, &opened), status, word);       \
        if (opened != 0) failures++, fprintf(stderr, "open: " #change ": a stale handle\n"); \
    } while (0)

static void options(void) {
    static const char *const null_bundle[] = {NULL}, *const gone[] = {"/nonexistent/b.ftb"};
    BAD_OPTIONS(p.struct_size = 0, FLASHTUNE_STATUS_INVALID_ARGUMENT, "struct_size");
    BAD_OPTIONS(p.struct_size = 1 << 20, FLASHTUNE_STATUS_INVALID_ARGUMENT, "struct_size");
    BAD_OPTIONS(p.device = "gpu", FLASHTUNE_STATUS_INVALID_ARGUMENT, "cuda:N");
    BAD_OPTIONS(p.device = "", FLASHTUNE_STATUS_INVALID_ARGUMENT, "cuda:N");
    BAD_OPTIONS(p.device = "\xff", FLASHTUNE_STATUS_INVALID_ARGUMENT, "UTF-8");
    BAD_OPTIONS(p.policy = 3, FLASHTUNE_STATUS_INVALID_ARGUMENT, "policy");
    BAD_OPTIONS(p.quick_first = 3, FLASHTUNE_STATUS_INVALID_ARGUMENT, "quick_first");
    BAD_OPTIONS(p.allow_paths = "forward/sm80:f16-m9", FLASHTUNE_STATUS_INVALID_ARGUMENT, "FAMILY:DTYPE");
    BAD_OPTIONS(p.allow_paths = "forward/sm81:f16", FLASHTUNE_STATUS_INVALID_ARGUMENT, "forward/sm81");
    BAD_OPTIONS(p.checked = 2, FLASHTUNE_STATUS_INVALID_ARGUMENT, "checked");
    BAD_OPTIONS(setenv("FLASHTUNE_QUICK_FIRST", "perhaps", 1), FLASHTUNE_STATUS_INVALID_ARGUMENT, "1 or 0");
    unsetenv("FLASHTUNE_QUICK_FIRST");
    BAD_OPTIONS(p.cuda_context = &p, FLASHTUNE_STATUS_INVALID_ARGUMENT, "both");
    BAD_OPTIONS(p.cache_dir = "", FLASHTUNE_STATUS_INVALID_ARGUMENT, "cache_dir");
    BAD_OPTIONS(p.templates_dir = "/nonexistent", FLASHTUNE_STATUS_STORAGE, "/nonexistent");
    BAD_OPTIONS(p.bundles_len = 1, FLASHTUNE_STATUS_INVALID_ARGUMENT, "bundles");
    BAD_OPTIONS(p.bundles_len = UINT64_MAX, FLASHTUNE_STATUS_INVALID_ARGUMENT, "bundles_len");
    BAD_OPTIONS((p.bundles = null_bundle, p.bundles_len = 1), FLASHTUNE_STATUS_INVALID_ARGUMENT, "bundles[0]");
    BAD_OPTIONS((p.bundles = gone, p.bundles_len = 1), FLASHTUNE_STATUS_STORAGE, "/nonexistent/b.ftb");
    BAD_OPTIONS(p.device = "cuda:99999", getenv("HAS_GPU") ? FLASHTUNE_STATUS_DEVICE : FLASHTUNE_STATUS_MISSING, "");
    expect("no place for the handle", flashtune_engine_open(NULL, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "null");
}

#define BAD_BLOCK_MASK(change, status, word)                                              \
    do {                                                                                  \
        flashtune_block_mask_args m = {.struct_size = sizeof m, .mask_program = "kv <= q + n", .inputs = &n, \
                                       .inputs_len = 1, .input_size = sizeof n, .q_len = ROWS, .kv_len = ROWS}; \
        flashtune_block_mask made = 77;                                                   \
        change;                                                                           \
        expect("block mask: " #change, flashtune_block_mask_create(engine, &m, &made), status, word); \
        if (made != 0) failures++, fprintf(stderr, "block mask: " #change ": a stale handle\n"); \
    } while (0)

static void block_masks(void) {
    const flashtune_status argument = FLASHTUNE_STATUS_INVALID_ARGUMENT, handle = FLASHTUNE_STATUS_INVALID_HANDLE;
    flashtune_input n = {.name = "n", .storage = FLASHTUNE_STORAGE_I64, .int_value = 3}, other = n;
    other.int_value = 4;
    BAD_BLOCK_MASK(m.struct_size = 8, argument, "struct_size");
    BAD_BLOCK_MASK(m.reserved = 1, argument, "reserved");
    BAD_BLOCK_MASK(m.mask_program = NULL, argument, "mask_program is null");
    BAD_BLOCK_MASK(m.mask_program = "kv <= x", argument, "`x`");
    BAD_BLOCK_MASK(m.mask_program = "alibi", argument, "a block mask is of a mask alone");
    BAD_BLOCK_MASK(m.mask_program = "kv <= b", argument, "name their number");
    BAD_BLOCK_MASK(m.inputs_len = 0, argument, "`n`");
    BAD_BLOCK_MASK(m.q_len = -1, argument, "q_len is -1");
    BAD_BLOCK_MASK(m.batch = (int64_t)1 << 40, argument, "batch is 1099511627776");
    BAD_BLOCK_MASK(m.kv_len = INT32_MAX, FLASHTUNE_STATUS_UNSUPPORTED, "kv_len");
    flashtune_block_mask_args m = {.struct_size = sizeof m, .mask_program = "kv <= q + n", .inputs = &n,
                                   .inputs_len = 1, .input_size = sizeof n, .heads = HEADS, .q_len = ROWS,
                                   .kv_len = ROWS};
    flashtune_block_mask made;
    expect("no place for the block mask", flashtune_block_mask_create(engine, &m, NULL), argument, "null");
    expect("no engine", flashtune_block_mask_create(5, &m, &made), handle, "engine");
    expect("a block mask", flashtune_block_mask_create(engine, &m, &made), FLASHTUNE_STATUS_OK, "");
    BAD_ARGS((a.block_mask = made, a.k.shape[2] = a.v.shape[2] = 5), argument, "kv_len is 5, but it was made for 8");
    BAD_ARGS((a.block_mask = made, a.mask_program = "kv < 3"), argument, "the call's mask is another");
    BAD_ARGS((a.block_mask = made, a.score_program = "score * n", a.inputs = &other, a.inputs_len = 1,
              a.input_size = sizeof other), argument, "the scalar `n` is Int(4)");
    BAD_ARGS(a.block_mask = made + 1, handle, "no block mask");
    expect("no place for bytes", flashtune_block_mask_bytes(made, NULL), argument, "null");
    expect("destroy", flashtune_block_mask_destroy(made), FLASHTUNE_STATUS_OK, "");
    expect("destroy again", flashtune_block_mask_destroy(made), handle, "no block mask");
    BAD_ARGS(a.block_mask = made, handle, "no block mask");
}

static void programs(void) {
    static const float slopes[HEADS] = {0.5f, 0.25f};
    flashtune_input x = {.name = "slope", .data = slopes, .shape = {HEADS}, .strides = {1}, .rank = 1,
                         .storage = FLASHTUNE_STORAGE_F32};
    const flashtune_status argument = FLASHTUNE_STATUS_INVALID_ARGUMENT;
#define WITH(change, status, word) \
    BAD_ARGS((a.score_program = "score + slope[h] * (kv - q)", a.inputs = &x, a.inputs_len = 1, \
              a.input_size = sizeof x, change), status, word)
    WITH(a.flags = 0, FLASHTUNE_STATUS_OK, "");
    WITH(a.mask_program = "kv <= qq", argument, "did you mean `q`?");
    WITH(a.mask_program = "score > 0.0", argument, "reads `score`");
    WITH(a.mask_program = "\xff", argument, "UTF-8");
    WITH(a.sink_program = "slope[kv]", argument, "`kv`");
    WITH(a.inputs_len = 0, argument, "slope");
    WITH(a.inputs = NULL, argument, "inputs is null");
    WITH(a.inputs_len = UINT64_MAX, argument, "inputs_len");
    WITH(a.input_size = 8, argument, "sizeof(flashtune_input)");
    WITH(x.name = NULL, argument, "inputs[0]");
    x.name = "slope";
    const flashtune_input twice[] = {x, x};
    WITH((a.inputs = twice, a.inputs_len = 2), argument, "inputs[1] is named `slope`");
    WITH(x.rank = 5, argument, "rank");
    x.rank = 1;
    WITH(x.storage = 9, argument, "flashtune_storage");
    WITH(x.storage = FLASHTUNE_STORAGE_BOOL, argument, "float");
    x.storage = FLASHTUNE_STORAGE_F32;
    WITH(x.shape[0] = 3, argument, "axis 0 of the tensor `slope`");
    WITH(x.shape[0] = -1, argument, "`slope` is [-1], but sizes are not negative");
    x.shape[0] = HEADS;
    WITH(x.strides[0] = -1, argument, "stride");
    x.strides[0] = 1;
    WITH(x.data = NULL, argument, "address");
    x.data = slopes;
    WITH(a.flags = 0, FLASHTUNE_STATUS_OK, "");
}

static void structs(void) {
    expect("no arguments", flashtune_forward(engine, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "null");
    BAD_ARGS(a.struct_size = 0, FLASHTUNE_STATUS_INVALID_ARGUMENT, "sizeof(flashtune_forward_args)");
    BAD_ARGS(a.struct_size = 367, FLASHTUNE_STATUS_INVALID_ARGUMENT, "struct_size");
    BAD_ARGS(a.struct_size = UINT32_MAX, FLASHTUNE_STATUS_INVALID_ARGUMENT, "struct_size");
    BAD_ARGS(a.flags = 6, FLASHTUNE_STATUS_INVALID_ARGUMENT, "flags");
    BAD_ARGS(a.softmax_scale = 0.5f, FLASHTUNE_STATUS_INVALID_ARGUMENT, "FLASHTUNE_FORWARD_SCALE");
    BAD_ARGS((a.flags = 1, a.softmax_scale = 1.0f / 0.0f), FLASHTUNE_STATUS_UNSUPPORTED, "scale");
    BAD_ARGS(a.mask = 3, FLASHTUNE_STATUS_INVALID_ARGUMENT, "mask");
    BAD_ARGS(a.window_left = 5, FLASHTUNE_STATUS_INVALID_ARGUMENT, "FLASHTUNE_MASK_WINDOW");
    BAD_ARGS((a.mask = FLASHTUNE_MASK_WINDOW, a.window_left = -2), FLASHTUNE_STATUS_INVALID_ARGUMENT, "window_left");
    BAD_ARGS(a.stream = &a, FLASHTUNE_STATUS_INVALID_ARGUMENT, "stream");

    /* A struct of a newer header: what this library does not know must be 0. */
    struct { flashtune_forward_args known; uint64_t later; } newer = {.known = good()};
    newer.known.struct_size = sizeof newer;
    expect("newer, unused", flashtune_forward(engine, &newer.known), FLASHTUNE_STATUS_OK, "");
    newer.later = 1;
    expect("newer, used", flashtune_forward(engine, &newer.known), FLASHTUNE_STATUS_INVALID_ARGUMENT, "newer");

    /* A struct at an odd address is copied before it is looked at. */
    char bytes[sizeof(flashtune_forward_args) + 1];
    flashtune_forward_args a = good();
    memcpy(bytes + 1, &a, sizeof a);
    expect("odd", flashtune_forward(engine, (flashtune_forward_args *)(void *)(bytes + 1)), FLASHTUNE_STATUS_OK, "");
}

static void tensors(void) {
    const flashtune_status tensor = FLASHTUNE_STATUS_INVALID_TENSOR;
    BAD_ARGS(a.q.data = NULL, tensor, "tensor q: address is null");
    BAD_ARGS(a.o.data = NULL, tensor, "tensor o");
    BAD_ARGS(a.v.data = (char *)v + 1, tensor, "tensor v: address");
    BAD_ARGS(a.k.data = (void *)(UINTPTR_MAX - 3), tensor, "tensor k: extent");
    BAD_ARGS(a.q.dtype = 0, tensor, "tensor q: dtype is 0");
    BAD_ARGS(a.q.dtype = -1, tensor, "tensor q: dtype");
    BAD_ARGS(a.k.dtype = FLASHTUNE_DTYPE_F16, tensor, "tensor k: dtype is f16");
    BAD_ARGS(a.o.reserved = 1, tensor, "reserved");
    BAD_ARGS(a.q.shape[2] = -1, tensor, "-1");
    BAD_ARGS((a.k.shape[1] = a.v.shape[1] = 3), FLASHTUNE_STATUS_UNSUPPORTED, "check the heads axis of Q");
    BAD_ARGS(a.q.shape[0] = INT64_MAX, tensor, "batch");
    BAD_ARGS(a.k.shape[0] = 2, tensor, "tensor k: shape");
    BAD_ARGS(a.v.shape[2] = 9, tensor, "tensor v: shape");
    BAD_ARGS(a.o.shape[3] = 24, tensor, "tensor o: shape");
    BAD_ARGS(a.q.strides[3] = 2, tensor, "tensor q: stride of the last dim");
    BAD_ARGS(a.k.strides[2] = -DIM, tensor, "tensor k: row stride");
    BAD_ARGS(a.k.strides[1] = INT64_MAX, tensor, "tensor k: extent");
    BAD_ARGS(a.o.strides[1] = 0, tensor, "tensor o: head stride");
    BAD_ARGS(a.lse = (float *)(void *)((char *)lse + 1), tensor, "tensor lse");
    BAD_ARGS((a.q.shape[3] = a.k.shape[3] = 264), FLASHTUNE_STATUS_UNSUPPORTED, "256");
    BAD_ARGS((a.k.shape[1] = a.v.shape[1] = 3), FLASHTUNE_STATUS_UNSUPPORTED, "multiple");
    BAD_ARGS((a.k.shape[1] = a.v.shape[1] = 0), FLASHTUNE_STATUS_UNSUPPORTED, "heads");

    /* Nothing to compute is no error, whatever the addresses are. */
    flashtune_forward_args a = good();
    a.q.shape[2] = a.o.shape[2] = 0;
    a.q.data = a.k.data = a.v.data = a.o.data = (void *)(uintptr_t)0xdead0000;
    expect("no rows", flashtune_forward(engine, &a), FLASHTUNE_STATUS_OK, "");
}

static void handles(void) {
    flashtune_forward_args a = good();
    flashtune_options p = {.struct_size = sizeof p, .device = "cpu"};
    flashtune_engine second, strangers[] = {0, 1, UINT64_MAX, engine + 1, (flashtune_engine)(uintptr_t)&a};
    expect("open", flashtune_engine_open(&p, &second), FLASHTUNE_STATUS_OK, "");
    expect("close", flashtune_engine_close(second), FLASHTUNE_STATUS_OK, "");
    expect("close again", flashtune_engine_close(second), FLASHTUNE_STATUS_INVALID_HANDLE, "closed");
    expect("use after close", flashtune_forward(second, &a), FLASHTUNE_STATUS_INVALID_HANDLE, "closed");
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++) {
        expect("stranger", flashtune_forward(strangers[i], &a), FLASHTUNE_STATUS_INVALID_HANDLE, "engine");
        expect("stranger", flashtune_engine_close(strangers[i]), FLASHTUNE_STATUS_INVALID_HANDLE, "engine");
        expect("stranger", flashtune_explain(strangers[i], 0, NULL, 0, NULL), FLASHTUNE_STATUS_INVALID_HANDLE,
               "engine");
    }
}

static void explanations(void) {
    char text[8192];
    size_t length = 0;
    memset(text, 'x', sizeof text);
    expect("before the first", flashtune_explain(engine, 0, text, sizeof text, &length),
           FLASHTUNE_STATUS_INVALID_ARGUMENT, "call forward first");
    flashtune_forward_args a = good();
    expect("forward", flashtune_forward(engine, &a), FLASHTUNE_STATUS_OK, "");
    expect("length", flashtune_explain(engine, 0, NULL, 0, &length), FLASHTUNE_STATUS_BUFFER_TOO_SMALL, "bytes");
    expect("one short", flashtune_explain(engine, 0, text, length, NULL), FLASHTUNE_STATUS_BUFFER_TOO_SMALL, "bytes");
    if (length < 100 || text[0] != 'x') failures++, fprintf(stderr, "a short buffer was written to\n");
    expect("exact", flashtune_explain(engine, 0, text, length + 1, NULL), FLASHTUNE_STATUS_OK, "");
    if (strlen(text) != length || !strstr(text, "forward-f32-d16-full") || text[length + 1] != 'x')
        failures++, fprintf(stderr, "not the text: %s\n", text);
    expect("json", flashtune_explain(engine, FLASHTUNE_FORMAT_JSON, text, sizeof text, &length), FLASHTUNE_STATUS_OK,
           "");
    if (text[0] != '{' || text[length - 1] != '}' || !strstr(text, "\"shape\":\"b1 h2/2 8x8 full\""))
        failures++, fprintf(stderr, "not the JSON: %s\n", text);
    expect("format", flashtune_explain(engine, 2, text, sizeof text, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT,
           "format");
    expect("no buffer", flashtune_explain(engine, 0, NULL, 9, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "null");
}

/* A sealed engine serves what it has, and says what it lacks. */
static void serving(void) {
    flashtune_options p = {.struct_size = sizeof p, .device = "cpu"};
    flashtune_engine open = engine;
    char text[8192], digest[65], again[65];
    size_t length = 0;
    expect("open", flashtune_engine_open(&p, &engine), FLASHTUNE_STATUS_OK, "");
    flashtune_forward_args a = good();
    expect("forward", flashtune_forward(engine, &a), FLASHTUNE_STATUS_OK, "");
    expect("no manifest", flashtune_preload(engine, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "manifest");
    expect("gone manifest", flashtune_preload(engine, "/nonexistent/m"), FLASHTUNE_STATUS_STORAGE, "/nonexistent/m");
    expect("on_miss", flashtune_seal(engine, 2, digest), FLASHTUNE_STATUS_INVALID_ARGUMENT, "on_miss");
    expect("seal", flashtune_seal(engine, FLASHTUNE_ON_MISS_REFUSE, digest), FLASHTUNE_STATUS_OK, "");
    expect("seal again", flashtune_seal(engine, FLASHTUNE_ON_MISS_NEAREST, again), FLASHTUNE_STATUS_OK, "");
    expect("seal, no digest", flashtune_seal(engine, 0, NULL), FLASHTUNE_STATUS_OK, "");
    if (strlen(digest) != 64 || strcmp(digest, again)) failures++, fprintf(stderr, "digests: %s %s\n", digest, again);
    expect("a hit", flashtune_forward(engine, &a), FLASHTUNE_STATUS_OK, "");
    a.mask = FLASHTUNE_MASK_CAUSAL;
    expect("a miss", flashtune_forward(engine, &a), FLASHTUNE_STATUS_SEALED, "sealed in");
    expect("length", flashtune_counters(engine, 0, NULL, 0, &length), FLASHTUNE_STATUS_BUFFER_TOO_SMALL, "bytes");
    expect("format", flashtune_counters(engine, 9, text, sizeof text, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT,
           "format");
    expect("text", flashtune_counters(engine, FLASHTUNE_FORMAT_TEXT, text, sizeof text, NULL), FLASHTUNE_STATUS_OK, "");
    if (strlen(text) != length || !strstr(text, "# TYPE flashtune_refused_total counter"))
        failures++, fprintf(stderr, "not what Prometheus reads: %s\n", text);
    expect("json", flashtune_counters(engine, FLASHTUNE_FORMAT_JSON, text, sizeof text, NULL), FLASHTUNE_STATUS_OK, "");
    if (!strstr(text, "\"refused\":1")) failures++, fprintf(stderr, "not the numbers: %s\n", text);
    uint64_t classes = 77;
    expect("no file", flashtune_write_untuned(engine, NULL, &classes), FLASHTUNE_STATUS_INVALID_ARGUMENT, "file");
    expect("bad file", flashtune_write_untuned(engine, "/dev/null/u", NULL), FLASHTUNE_STATUS_STORAGE, "/dev/null/u");
    expect("to nowhere", flashtune_write_untuned(engine, "/dev/null", &classes), FLASHTUNE_STATUS_OK, "");
    expect("no metrics", flashtune_write_metrics(engine, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "file");
    expect("metrics", flashtune_write_metrics(engine, "/dev/null/m"), FLASHTUNE_STATUS_STORAGE, "/dev/null/m");
    if (classes != 1) failures++, fprintf(stderr, "%d classes\n", (int)classes);
    expect("close", flashtune_engine_close(engine), FLASHTUNE_STATUS_OK, "");
    expect("closed", flashtune_seal(engine, 0, NULL), FLASHTUNE_STATUS_INVALID_HANDLE, "closed");
    engine = open;
}

/* An engine that was opened to look refuses outputs that overlap other tensors, and takes rows between theirs. */
static void overlaps(void) {
    flashtune_options p = {.struct_size = sizeof p, .device = "cpu", .checked = 1};
    flashtune_engine open = engine;
    expect("open", flashtune_engine_open(&p, &engine), FLASHTUNE_STATUS_OK, "");
    BAD_ARGS(a.o.data = q, FLASHTUNE_STATUS_INVALID_TENSOR, "q lies");
    BAD_ARGS(a.o.data = k + 1, FLASHTUNE_STATUS_INVALID_TENSOR, "k lies");
    BAD_ARGS(a.v.data = o + N / 2, FLASHTUNE_STATUS_INVALID_TENSOR, "tensor o: address");
    BAD_ARGS(a.lse = o + N - 1, FLASHTUNE_STATUS_INVALID_TENSOR, "tensor lse: address");
    BAD_ARGS(a.lse = v, FLASHTUNE_STATUS_INVALID_TENSOR, "v lies");
    flashtune_forward_args a = good();
    expect("apart", flashtune_forward(engine, &a), FLASHTUNE_STATUS_OK, "");
    /* Rows of Q and of O in turn: one range, and no element in common. */
    static float both[2 * N];
    a.q.data = both, a.o.data = both + DIM;
    flashtune_tensor *of_both[] = {&a.q, &a.o};
    for (int i = 0; i < 2; i++) {
        of_both[i]->strides[0] = 2 * N, of_both[i]->strides[1] = 2 * ROWS * DIM, of_both[i]->strides[2] = 2 * DIM;
    }
    expect("in turn", flashtune_forward(engine, &a), FLASHTUNE_STATUS_OK, "");
    expect("close", flashtune_engine_close(engine), FLASHTUNE_STATUS_OK, "");
    engine = open;
    a = good(), a.k.data = a.v.data;
    expect("K and V in one", flashtune_forward(engine, &a), FLASHTUNE_STATUS_OK, "");
}

/* An engine on a GPU knows addresses of the host. */
static void gpu(void) {
    flashtune_options p = {.struct_size = sizeof p, .device = "cuda:0"};
    flashtune_engine cpu = engine;
    if (flashtune_engine_open(&p, &engine) == FLASHTUNE_STATUS_OK) {
        BAD_ARGS((void)a, FLASHTUNE_STATUS_INVALID_TENSOR, "tensor q: address");
        expect("close", flashtune_engine_close(engine), FLASHTUNE_STATUS_OK, "");
    } else {
        printf("no GPU: %s\n", flashtune_last_error());
    }
    engine = cpu;
}

/* A child that was forked is told so, and does not hang on threads that it has not. */
static void forks(void) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        flashtune_forward_args a = good();
        flashtune_engine opened;
        bool told = flashtune_forward(engine, &a) == FLASHTUNE_STATUS_FORKED &&
                    strstr(flashtune_last_error(), "fork") &&
                    flashtune_engine_open(NULL, &opened) == FLASHTUNE_STATUS_FORKED &&
                    flashtune_engine_close(engine) == FLASHTUNE_STATUS_FORKED;
        _exit(told ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    expect("fork", WIFEXITED(status) && WEXITSTATUS(status) == 0 ? FLASHTUNE_STATUS_OK : FLASHTUNE_STATUS_INTERNAL,
           FLASHTUNE_STATUS_OK, "");
}

int main(void) {
    if (flashtune_last_error()[0] != 0) failures++;
    if (flashtune_status_name(-1) || flashtune_status_name(FLASHTUNE_STATUS_INTERNAL + 1)) failures++;
    options();
    flashtune_options p = {.struct_size = sizeof p, .device = "cpu"};
    expect("open", flashtune_engine_open(&p, &engine), FLASHTUNE_STATUS_OK, "");
    explanations();
    serving();
    programs();
    block_masks();
    structs();
    tensors();
    handles();
    overlaps();
    gpu();
    forks();
    for (int i = 0; i < N; i++) v[i] = 2.0f;
    flashtune_forward_args a = good();
    expect("still works", flashtune_forward(engine, &a), FLASHTUNE_STATUS_OK, "");
    if (o[0] != 2.0f || o[N - 1] != 2.0f) failures++, fprintf(stderr, "it does not compute any more: %f\n", o[0]);
    printf("%d cases, %d failures\n", cases, failures);
    return failures != 0 || cases < 100;
}
