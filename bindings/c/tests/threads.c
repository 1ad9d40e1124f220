/*
 * One engine under many threads, while other engines are opened and closed beside it, and closed in the midst of use.
 */
#include <flashtune.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { THREADS = 8, CALLS = 200, HEADS = 2, ROWS = 24, DIM = 16, N = HEADS * ROWS * DIM };

static flashtune_engine shared, doomed;
static atomic_int failures;
static atomic_bool closed;

static void fail(const char *what, flashtune_status status) {
    failures++;
    fprintf(stderr, "%s: %s: %s\n", what, flashtune_status_name(status), flashtune_last_error());
}

/* V holds one number, so every O must be that number, whatever Q and K are. */
static flashtune_status compute(flashtune_engine engine, int rows, float number, float *o) {
    float q[N], v[N];
    for (int i = 0; i < N; i++) q[i] = (float)(i % 7), v[i] = number, o[i] = -1.0f;
    flashtune_tensor t = {.data = q,
                          .shape = {1, HEADS, rows, DIM},
                          .strides = {N, ROWS * DIM, DIM, 1},
                          .dtype = FLASHTUNE_DTYPE_F32};
    flashtune_forward_args a = {.struct_size = sizeof a, .q = t, .k = t, .v = t, .o = t, .mask = FLASHTUNE_MASK_CAUSAL};
    a.v.data = v, a.o.data = o;
    return flashtune_forward(engine, &a);
}

/* A parallel loop of the host, of threads that live as long as it. */
typedef struct {
    void (*member)(void *);
    void *of;
} host_member;
static atomic_int host_loops;

static void *run_member(void *argument) {
    host_member *m = argument;
    m->member(m->of);
    return NULL;
}
static void host_parallel(void *context, uint64_t members, void (*member)(void *), void *of) {
    host_member m = {member, of};
    pthread_t threads[4];
    int n = 0;
    if (context != &host_loops) failures++;
    host_loops++;
    while (n < 4 && n + 1 < (int)members && !pthread_create(&threads[n], NULL, run_member, &m)) n++;
    while (n > 0) pthread_join(threads[--n], NULL);
}

/* More than one thread is worth, and every O is the number of V. */
static void compute_on_host_threads(void) {
    enum { LONG = 700, M = HEADS * LONG * DIM };
    static float q[M], v[M], o[M];
    flashtune_options p = {.struct_size = sizeof p, .device = "cpu", .parallel = host_parallel,
                           .parallel_context = &host_loops, .parallel_threads = 3};
    flashtune_engine engine;
    flashtune_status status = flashtune_engine_open(&p, &engine);
    if (status != FLASHTUNE_STATUS_OK) {
        fail("open on host threads", status);
        return;
    }
    for (int i = 0; i < M; i++) q[i] = (float)(i % 7), v[i] = 3.0f, o[i] = -1.0f;
    flashtune_tensor t = {.data = q,
                          .shape = {1, HEADS, LONG, DIM},
                          .strides = {M, LONG * DIM, DIM, 1},
                          .dtype = FLASHTUNE_DTYPE_F32};
    flashtune_forward_args a = {.struct_size = sizeof a, .q = t, .k = t, .v = t, .o = t};
    a.v.data = v, a.o.data = o;
    if ((status = flashtune_forward(engine, &a)) != FLASHTUNE_STATUS_OK) fail("host threads", status);
    for (int i = 0; i < M; i++) failures += o[i] < 2.999f || o[i] > 3.001f;
    if (host_loops == 0) fail("a call that used none of the host's threads", status);
    flashtune_engine_close(engine);
    p.threads = FLASHTUNE_THREADS_OPEN_MP;
    if (flashtune_engine_open(&p, &engine) != FLASHTUNE_STATUS_INVALID_ARGUMENT ||
        !strstr(flashtune_last_error(), "parallel"))
        failures++;
    flashtune_options none = {.struct_size = sizeof none, .device = "cpu", .parallel_threads = 3};
    if (flashtune_engine_open(&none, &engine) != FLASHTUNE_STATUS_INVALID_ARGUMENT ||
        !strstr(flashtune_last_error(), "parallel is NULL"))
        failures++;
    none.parallel_threads = 0, none.threads = 3;
    if (flashtune_engine_open(&none, &engine) != FLASHTUNE_STATUS_INVALID_ARGUMENT ||
        !strstr(flashtune_last_error(), "threads is 3"))
        failures++;
    none.threads = FLASHTUNE_THREADS_OPEN_MP;
    if (flashtune_engine_open(&none, &engine) != FLASHTUNE_STATUS_MISSING ||
        !strstr(flashtune_last_error(), "OpenMP"))
        failures++;
    /* A caller of the first version knows none of these fields. */
    none = (flashtune_options){.struct_size = 56, .device = "cpu", .threads = 3};
    if (flashtune_engine_open(&none, &engine) != FLASHTUNE_STATUS_OK) failures++;
    flashtune_engine_close(engine);
}

static void *work(void *argument) {
    int id = (int)(intptr_t)argument;
    float o[N];
    for (int n = 0; n < CALLS; n++) {
        int rows = 1 + (id * 5 + n) % ROWS;
        float number = (float)(id + 1);
        flashtune_status status = compute(shared, rows, number, o);
        if (status != FLASHTUNE_STATUS_OK) fail("shared", status);
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < rows * DIM; i++)
                if (o[h * ROWS * DIM + i] < number * 0.999f || o[h * ROWS * DIM + i] > number * 1.001f) failures++;

        char text[8192];
        status = flashtune_explain(shared, n % 2, text, sizeof text, NULL);
        if (status != FLASHTUNE_STATUS_OK || !strstr(text, "causal")) fail("explain", status);

        /* Another thread closes this one: each call either computes or says that it is closed. */
        bool was_closed = closed;
        status = compute(doomed, rows, number, o);
        if (was_closed ? status != FLASHTUNE_STATUS_INVALID_HANDLE
                       : status != FLASHTUNE_STATUS_OK && status != FLASHTUNE_STATUS_INVALID_HANDLE)
            fail("doomed", status);

        if (n % 50 == 0) {
            flashtune_options p = {.struct_size = sizeof p, .device = "cpu"};
            flashtune_engine own;
            if ((status = flashtune_engine_open(&p, &own)) != FLASHTUNE_STATUS_OK) fail("open", status);
            if ((status = compute(own, rows, number, o)) != FLASHTUNE_STATUS_OK) fail("own", status);
            if ((status = flashtune_engine_close(own)) != FLASHTUNE_STATUS_OK) fail("close", status);
        }
        if (id == 0 && n == CALLS / 2) {
            if ((status = flashtune_engine_close(doomed)) != FLASHTUNE_STATUS_OK) fail("close doomed", status);
            closed = true;
        }
    }
    /* The last error is this thread's own. */
    flashtune_engine_close((flashtune_engine)id + 1);
    char expected[32];
    snprintf(expected, sizeof expected, "%#x is no open engine", (unsigned)id + 1);
    if (!strstr(flashtune_last_error(), expected)) fail("last error", FLASHTUNE_STATUS_INTERNAL);
    return NULL;
}

int main(void) {
    flashtune_options p = {.struct_size = sizeof p, .device = "cpu"};
    pthread_t threads[THREADS];
    if (flashtune_engine_open(&p, &shared) || flashtune_engine_open(&p, &doomed)) return 1;
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i)) return 1;
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    compute_on_host_threads();
    printf("%d failures\n", failures);
    return failures != 0;
}
