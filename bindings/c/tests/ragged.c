/*
 * Appends and ragged batches through the C ABI on the CPU: new rows go to a paged cache by slots and by lengths, and
 * attention over its pages, and over the same keys packed, is that of plain loops; other lengths and tables through the
 * same structs; bad arguments give their status and a text, and write nothing.
 */
#include <flashtune.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { BATCH = 3, HEADS = 4, KV_HEADS = 2, DIM = 16, PAGE = 5, WIDTH = 4, PAGES = 14, MOST_Q = 4 };
enum { MOST_K = WIDTH * PAGE };
enum { ROW = KV_HEADS * DIM, TOTAL_K = BATCH * MOST_K, TOTAL_Q = BATCH * MOST_Q };

/* What is expected: K and V of each sequence, one token after the other. */
static float keys[BATCH][MOST_K][ROW], values[BATCH][MOST_K][ROW];
static float q[TOTAL_Q][HEADS][DIM], o[TOTAL_Q][HEADS][DIM], lse[TOTAL_Q][HEADS];
static float k_cache[PAGES][PAGE][ROW], v_cache[PAGES][PAGE][ROW];
static float packed_k[TOTAL_K][ROW], packed_v[TOTAL_K][ROW], new_k[TOTAL_K][ROW], new_v[TOTAL_K][ROW];
static int32_t table[BATCH][WIDTH], lengths[BATCH], q_begin[BATCH + 1], kv_begin[BATCH + 1], new_begin[BATCH + 1];
static int64_t slots[TOTAL_K];
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

static float random_float(void) { return (float)rand() / (float)RAND_MAX * 2.0f - 1.0f; }

/* O and LSE of every row against plain loops, causal from the end of each sequence on. */
static void compare(const char *what) {
    double worst = 0.0;
    for (int b = 0; b < BATCH; b++) {
        for (int i = q_begin[b]; i < q_begin[b + 1]; i++) {
            for (int h = 0; h < HEADS; h++) {
                int last = i - q_begin[b] + lengths[b] - (q_begin[b + 1] - q_begin[b]);
                int at = h / (HEADS / KV_HEADS) * DIM;
                double sum = 0.0, out[DIM] = {0};
                for (int j = 0; j <= last; j++) {
                    double score = 0.0;
                    for (int d = 0; d < DIM; d++) score += (double)q[i][h][d] * keys[b][j][at + d];
                    double weight = exp(score / sqrt(DIM));
                    sum += weight;
                    for (int d = 0; d < DIM; d++) out[d] += weight * values[b][j][at + d];
                }
                for (int d = 0; d < DIM; d++) worst = fmax(worst, fabs((sum > 0 ? out[d] / sum : 0) - o[i][h][d]));
                if (sum > 0) worst = fmax(worst, fabs(log(sum) - lse[i][h]));
                else if (!(isinf(lse[i][h]) && lse[i][h] < 0)) worst = INFINITY;
            }
        }
    }
    cases++;
    /* A row of no sequence is not written; fmax hides NaN, so rows of sequences are looked at once more. */
    for (int i = 0; i < q_begin[BATCH]; i++) {
        for (int h = 0; h < HEADS; h++) {
            for (int d = 0; d < DIM; d++) if (isnan(o[i][h][d])) worst = INFINITY;
            if (isnan(lse[i][h])) worst = INFINITY;
        }
    }
    for (int i = q_begin[BATCH]; i < TOTAL_Q; i++) if (!isnan(o[i][0][0]) || !isnan(lse[i][0])) worst = INFINITY;
    if (!(worst < 1e-5)) failures++, fprintf(stderr, "%s: off by %g\n", what, worst);
}

static flashtune_append_args append_good(void) {
    flashtune_append_args a = {
        .struct_size = sizeof a, .k_new = new_k, .v_new = new_v, .k_new_stride = {0, DIM, ROW},
        .v_new_stride = {0, DIM, ROW},
        .dtype = FLASHTUNE_DTYPE_F32, .batch = BATCH, .kv_heads = KV_HEADS, .head_dim_qk = DIM, .head_dim_v = DIM,
        .k = k_cache, .v = v_cache, .k_stride = {PAGE * ROW, ROW, DIM, 0}, .v_stride = {PAGE * ROW, ROW, DIM, 0},
        .pages = PAGES, .page_tokens = PAGE, .index = FLASHTUNE_INDEX_TABLE, .k_table = table, .table_stride = WIDTH,
        .table_capacity = WIDTH, .new_begin = new_begin, .lengths = lengths, .max_kv = MOST_K,
    };
    return a;
}

static flashtune_ragged paged_good(void) {
    flashtune_ragged a = {
        .struct_size = sizeof a, .q = q, .q_stride = {0, DIM, HEADS * DIM}, .q_dtype = FLASHTUNE_DTYPE_F32,
        .heads = HEADS, .head_dim_qk = DIM, .head_dim_v = DIM, .q_begin = q_begin, .k = k_cache, .v = v_cache,
        .index = FLASHTUNE_INDEX_TABLE, .kv_heads = KV_HEADS, .pages = PAGES, .page_tokens = PAGE,
        .k_stride = {PAGE * ROW, ROW, DIM, 0}, .v_stride = {PAGE * ROW, ROW, DIM, 0}, .k_table = table,
        .table_stride = WIDTH, .table_capacity = WIDTH, .kv_lengths = lengths, .o = o,
        .o_stride = {0, DIM, HEADS * DIM}, .lse = lse[0], .lse_stride = {0, 1, HEADS}, .mask = FLASHTUNE_MASK_CAUSAL,
        .batch = BATCH, .total_q = TOTAL_Q,
        .max_q = MOST_Q, .max_kv = MOST_K,
    };
    return a;
}

/* The same keys one sequence after the other. */
static flashtune_ragged packed_good(void) {
    flashtune_ragged a = paged_good();
    a.index = FLASHTUNE_INDEX_PACKED, a.k = packed_k, a.v = packed_v, a.pages = 1, a.page_tokens = TOTAL_K;
    a.k_table = NULL, a.table_stride = a.table_capacity = 0, a.kv_lengths = NULL, a.kv_begin = kv_begin;
    return a;
}

static void attend(const char *what, const flashtune_ragged *a) {
    memset(o, 0xff, sizeof o), memset(lse, 0xff, sizeof lse);
    expect(what, flashtune_forward_ragged(engine, a, NULL), FLASHTUNE_STATUS_OK, "");
    compare(what);
}

/* Sequences in pages of their own in another order, what is behind them in the table names no page; caches are NaN
   where nothing was written. */
static void fill(const int kv[BATCH], const int rows[BATCH], int turn) {
    memset(k_cache, 0xff, sizeof k_cache), memset(v_cache, 0xff, sizeof v_cache);
    memset(packed_k, 0xff, sizeof packed_k), memset(packed_v, 0xff, sizeof packed_v);
    for (int b = 0; b < BATCH; b++) {
        for (int i = 0; i < WIDTH; i++) {
            int page = (7 * (b * WIDTH + i) + 5 * turn) % (BATCH * WIDTH + 1);
            table[b][i] = i < (kv[b] + PAGE - 1) / PAGE ? page : INT32_MIN;
        }
        q_begin[b + 1] = q_begin[b] + rows[b], kv_begin[b + 1] = kv_begin[b] + kv[b];
        for (int t = 0; t < kv[b]; t++) {
            for (int d = 0; d < ROW; d++) {
                packed_k[kv_begin[b] + t][d] = keys[b][t][d] = random_float();
                packed_v[kv_begin[b] + t][d] = values[b][t][d] = random_float();
            }
        }
    }
    for (int i = 0; i < TOTAL_Q; i++)
        for (int h = 0; h < HEADS; h++)
            for (int d = 0; d < DIM; d++) q[i][h][d] = random_float();
}

/* A step as vLLM makes it: new rows by slots, then attention over pages; and as flash-attention does, by lengths. */
static void steps(void) {
    static const int kv[][BATCH] = {{17, 0, 6}, {1, 20, 13}, {0, 0, 20}};
    static const int rows[][BATCH] = {{1, 2, 4}, {1, 0, 3}, {0, 4, 4}};
    for (int turn = 0; turn < 3; turn++) {
        fill(kv[turn], rows[turn], turn);
        for (int by_slots = 0; by_slots < 2; by_slots++) {
            memset(k_cache, 0xff, sizeof k_cache), memset(v_cache, 0xff, sizeof v_cache);
            int n = 0;
            for (int b = 0; b < BATCH; b++) {
                lengths[b] = 0, new_begin[b] = n;
                for (int t = 0; t < kv[turn][b]; t++, n++) {
                    memcpy(new_k[n], keys[b][t], sizeof new_k[n]), memcpy(new_v[n], values[b][t], sizeof new_v[n]);
                    slots[n] = table[b][t / PAGE] * PAGE + t % PAGE;
                }
            }
            new_begin[BATCH] = n;
            flashtune_append_args more = append_good();
            more.new_rows = n;
            if (by_slots) more.slot_mapping = slots, more.slot_type = FLASHTUNE_INT_TYPE_I64, more.new_begin = NULL;
            expect("prepare append", flashtune_prepare_append(engine, &more), FLASHTUNE_STATUS_OK, "");
            expect("append", flashtune_append(engine, &more, NULL), FLASHTUNE_STATUS_OK, "");
            for (int b = 0; b < BATCH; b++) lengths[b] = kv[turn][b];
            int wrong = 0;
            for (int i = 0; i < n; i++) {
                const float *k = k_cache[slots[i] / PAGE][slots[i] % PAGE];
                const float *v = v_cache[slots[i] / PAGE][slots[i] % PAGE];
                wrong += memcmp(k, new_k[i], sizeof new_k[i]) != 0 || memcmp(v, new_v[i], sizeof new_v[i]) != 0;
            }
            int written = 0;
            for (int i = 0; i < PAGES * PAGE; i++) written += !isnan(k_cache[i / PAGE][i % PAGE][0]);
            if (wrong || written != n)
                failures++, fprintf(stderr, "turn %d: %d rows of %d wrong, %d written\n", turn, wrong, n, written);
            flashtune_ragged a = paged_good();
            attend(by_slots ? "paged, by slots" : "paged, by lengths", &a);
        }
        flashtune_ragged a = packed_good();
        expect("prepare ragged", flashtune_prepare_ragged(engine, &a), FLASHTUNE_STATUS_OK, "");
        attend("packed", &a);
        memset(o, 0xff, sizeof o);
    }
}

/* Pages, and rows of Q and O, more than 2^31 elements (2^33 bytes) apart in memory of which little is there. */
static void far_apart(void) {
    static const int kv[BATCH] = {17, 3, 20}, rows[BATCH] = {1, 4, 4};
    enum { Q_ROW = 1 << 28, PAGE_STRIDE = 1 << 28 };
    const size_t bytes = (size_t)PAGES * PAGE_STRIDE * sizeof(float);
    float *far[4];
    for (int i = 0; i < 4; i++) {
        far[i] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (far[i] == MAP_FAILED) {
            failures++, perror("memory that is not there");
            return;
        }
    }
    fill(kv, rows, 1);
    flashtune_append_args more = append_good();
    flashtune_ragged a = paged_good();
    int n = 0;
    for (int b = 0; b < BATCH; b++) {
        lengths[b] = 0, new_begin[b] = n;
        for (int t = 0; t < kv[b]; t++, n++)
            memcpy(new_k[n], keys[b][t], sizeof new_k[n]), memcpy(new_v[n], values[b][t], sizeof new_v[n]);
    }
    new_begin[BATCH] = n;
    more.new_rows = n, more.k = far[0], more.v = far[1], more.k_stride[0] = more.v_stride[0] = PAGE_STRIDE;
    expect("append far apart", flashtune_append(engine, &more, NULL), FLASHTUNE_STATUS_OK, "");
    for (int b = 0; b < BATCH; b++) lengths[b] = kv[b];
    for (int i = 0; i < q_begin[BATCH]; i++) memcpy(far[2] + (size_t)i * Q_ROW, q[i], sizeof q[i]);
    a.k = far[0], a.v = far[1], a.k_stride[0] = a.v_stride[0] = PAGE_STRIDE;
    a.q = far[2], a.o = far[3], a.q_stride[2] = a.o_stride[2] = Q_ROW;
    memset(o, 0xff, sizeof o), memset(lse, 0xff, sizeof lse);
    expect("far apart", flashtune_forward_ragged(engine, &a, NULL), FLASHTUNE_STATUS_OK, "");
    for (int i = 0; i < q_begin[BATCH]; i++) memcpy(o[i], far[3] + (size_t)i * Q_ROW, sizeof o[i]);
    compare("far apart");
    for (int i = 0; i < 4; i++) munmap(far[i], bytes);
}

#define BAD(of, change, status, word)                                                                                \
    do {                                                                                                              \
        flashtune_ragged a = of();                                                                               \
        change;                                                                                                       \
        expect("forward: " #change, flashtune_forward_ragged(engine, &a, NULL), status, word);                        \
        expect("prepare: " #change, flashtune_prepare_ragged(engine, &a), status, word);                              \
    } while (0)

#define BAD_APPEND(change, status, word)                                                                              \
    do {                                                                                                              \
        flashtune_append_args a = append_good();                                                                      \
        a.new_rows = 4;                                                                                               \
        change;                                                                                                       \
        expect("append: " #change, flashtune_append(engine, &a, NULL), status, word);                                 \
        expect("prepare append: " #change, flashtune_prepare_append(engine, &a), status, word);                       \
    } while (0)

static void bad_attention(void) {
    const flashtune_status argument = FLASHTUNE_STATUS_INVALID_ARGUMENT, tensor = FLASHTUNE_STATUS_INVALID_TENSOR,
                           unsupported = FLASHTUNE_STATUS_UNSUPPORTED;
    static float scale;
    flashtune_ragged good = paged_good();
    expect("no arguments", flashtune_forward_ragged(engine, NULL, NULL), argument, "null");
    expect("a stream", flashtune_forward_ragged(engine, &good, &good), argument, "stream");
    expect("no engine", flashtune_forward_ragged(77, &good, NULL), FLASHTUNE_STATUS_INVALID_HANDLE, "engine");
    BAD(paged_good, a.struct_size = 8, argument, "struct_size");
    BAD(paged_good, a.flags = 64, argument, "flags");
    BAD(paged_good, a.softmax_scale = 0.5f, argument, "FLASHTUNE_RAGGED_SCALE");
    BAD(paged_good, a.index = 0, argument, "index is 0");
    BAD(paged_good, a.index = 5, argument, "index is 5");
    BAD(paged_good, a.kv_type = 7, argument, "kv_type is 7");
    BAD(paged_good, a.length_type = 3, argument, "length_type is 3");
    BAD(paged_good, a.table_type = -1, argument, "table_type is -1");
    BAD(paged_good, a.mask = 3, argument, "mask");
    BAD(paged_good, a.window_left = 5, argument, "FLASHTUNE_MASK_WINDOW");
    BAD(paged_good, a.heads = -1, argument, "heads is -1");
    BAD(paged_good, a.kv_begin = kv_begin, argument, "kv_begin is given");
    BAD(paged_good, a.kv_sums = kv_begin, argument, "give one of them");
    BAD(paged_good, (a.kv_added = 1, a.kv_added_begin = q_begin), argument, "give one");
    BAD(paged_good, (a.kv_lengths = NULL, a.kv_added = 1), argument, "kv_lengths");
    BAD(paged_good, a.k_scale = &scale, argument, "FLASHTUNE_SCALES_ONE");
    BAD(paged_good, (a.k_scale = &scale, a.k_scales = 3), argument, "k_scales is 3");
    BAD(paged_good, (a.k_scale = &scale, a.k_scales = FLASHTUNE_SCALES_HEAD), tensor, "tensor k_scale");
    BAD(paged_good, a.mask_program = "kv <= qq", argument, "did you mean `q`?");
    BAD(paged_good, a.q = NULL, tensor, "tensor q: address is null");
    BAD(paged_good, a.k_table = NULL, tensor, "tensor k_table: address is null");
    BAD(paged_good, a.q_dtype = 0, tensor, "tensor q: dtype");
    BAD(paged_good, a.o_dtype = FLASHTUNE_DTYPE_F16, tensor, "tensor o: dtype");
    BAD(paged_good, a.kv_type = FLASHTUNE_STORE_TYPE_F16, tensor, "tensor k: dtype");
    BAD(paged_good, a.kv_type = FLASHTUNE_STORE_TYPE_E4M3, tensor, "tensor q: dtype is f32");
    BAD(paged_good, a.k_stride[1] = -1, tensor, "tensor k: token stride is -1");
    BAD(paged_good, a.o_stride[1] = 0, tensor, "tensor o: head stride");
    BAD(paged_good, a.v = (char *)v_cache + 1, tensor, "tensor v: address");
    BAD(paged_good, a.table_capacity = 3, unsupported, "max_kv = 20");
    BAD(paged_good, a.max_kv = (int64_t)1 << 40, unsupported, "max_kv");
    BAD(paged_good, a.page_tokens = 0, unsupported, "page_tokens");
    BAD(paged_good, a.heads = 3, unsupported, "multiple");
    BAD(paged_good, (a.head_dim_qk = 576, a.head_dim_v = 512), unsupported, "head_dim_qk = 576");
    BAD(paged_good, a.tree = q, unsupported, "tree");
    BAD(packed_good, a.pages = 2, unsupported, "pages = 2");
    BAD(packed_good, a.k_table = table, argument, "k_table is given");
    BAD(packed_good, a.last_page = lengths, unsupported, "last_page");
    /* Nothing to compute is no error, whatever the addresses are. */
    flashtune_ragged a = paged_good();
    a.batch = 0, a.q = a.k = NULL;
    expect("no sequence", flashtune_forward_ragged(engine, &a, NULL), FLASHTUNE_STATUS_OK, "");
    a = paged_good();
    a.total_q = 0, a.o = NULL;
    expect("no row", flashtune_forward_ragged(engine, &a, NULL), FLASHTUNE_STATUS_OK, "");
}

static void bad_appends(void) {
    const flashtune_status argument = FLASHTUNE_STATUS_INVALID_ARGUMENT, tensor = FLASHTUNE_STATUS_INVALID_TENSOR,
                           unsupported = FLASHTUNE_STATUS_UNSUPPORTED;
    static float scale, angles[64];
    flashtune_append_args good = append_good();
    expect("no arguments", flashtune_append(engine, NULL, NULL), argument, "null");
    expect("a stream", flashtune_append(engine, &good, &good), argument, "stream");
    expect("no engine", flashtune_append(77, &good, NULL), FLASHTUNE_STATUS_INVALID_HANDLE, "engine");
    BAD_APPEND(a.struct_size = 8, argument, "struct_size");
    BAD_APPEND(a.flags = 64, argument, "flags");
    BAD_APPEND(a.index = FLASHTUNE_INDEX_PACKED, argument, "index is 2");
    BAD_APPEND(a.kv_type = 9, argument, "kv_type is 9");
    BAD_APPEND(a.slot_type = 9, argument, "slot_type is 9");
    BAD_APPEND(a.position_type = 9, argument, "position_type is 9");
    BAD_APPEND(a.new_rows = -4, argument, "new_rows is -4");
    BAD_APPEND(a.k_table = NULL, argument, "k_table is null");
    BAD_APPEND((a.k_positions = slots, a.first_position = lengths), argument, "both given");
    BAD_APPEND(a.k_scale = &scale, argument, "k_scales");
    BAD_APPEND(a.dtype = 9, tensor, "tensor k_new: dtype");
    BAD_APPEND(a.kv_type = FLASHTUNE_STORE_TYPE_F16, tensor, "tensor k: dtype");
    BAD_APPEND((a.k_scale = &scale, a.k_scales = FLASHTUNE_SCALES_HEAD), tensor, "tensor k_scale");
    BAD_APPEND(a.k_new = NULL, tensor, "tensor k_new: address is null");
    BAD_APPEND(a.v_stride[0] = -1, tensor, "tensor v: page stride is -1");
    BAD_APPEND((a.cos = a.sin = angles, a.rotary_rows = 1, a.rotary_dim = 4, a.rotary_dtype = 0), tensor, "tensor cos");
    BAD_APPEND((a.cos = a.sin = angles, a.rotary_rows = 1, a.rotary_dim = 5, a.rotary_dtype = FLASHTUNE_DTYPE_F32),
               unsupported, "rotary_dim = 5");
    BAD_APPEND((a.q = q, a.q_out = o, a.heads = HEADS, a.q_rows = 1), unsupported, "rotary");
    BAD_APPEND(a.lengths = NULL, unsupported, "lengths");
    BAD_APPEND(a.table_capacity = 3, unsupported, "max_kv = 20");
    BAD_APPEND(a.head_dim_v = 512, unsupported, "head_dim_v = 512");
}

int main(void) {
    flashtune_options p = {.struct_size = sizeof p, .device = "cpu"};
    expect("open", flashtune_engine_open(&p, &engine), FLASHTUNE_STATUS_OK, "");
    far_apart();
    steps();
    memset(o, 0xff, sizeof o);
    static float k_before[PAGES][PAGE][ROW];
    memcpy(k_before, k_cache, sizeof k_before);
    bad_attention();
    bad_appends();
    for (int i = 0; i < TOTAL_Q; i++)
        if (!isnan(o[i][0][0])) failures++, fprintf(stderr, "a refused call wrote row %d\n", i);
    if (memcmp(k_before, k_cache, sizeof k_before)) failures++, fprintf(stderr, "a refused append wrote\n");
    flashtune_ragged a = paged_good();
    attend("still works", &a);
    expect("close", flashtune_engine_close(engine), FLASHTUNE_STATUS_OK, "");
    printf("%d cases, %d failures\n", cases, failures);
    return failures != 0;
}
