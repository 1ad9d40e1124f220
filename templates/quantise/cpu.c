/* @{ header }@ */

/* Rows of Q, K and V as e4m3 with their scales.
 *
 *   x = row, rotated by its position     K: x -= mean of x over the rows of the unit
 *   Q, K: x = H x / sqrt(head dim)       scale = largest |x| of the unit / 448      code = x / scale
 *
 * A unit is the rows of a KV head of a sequence, of Q those of its query heads. A scale is that of a unit, of a whole
 * tensor, of rows that follow each other, or of a column of V in a unit. Four steps, whose tiles are ROWS rows of a
 * head: sums of K's tiles, K's means, the largest magnitudes, and the rows once more to be written. Scales of rows are
 * found where these are written. */

#define DTYPE_f32 0
#define DTYPE_f16 1
#define DTYPE_bf16 2

#define DTYPE DTYPE_@{ dtype }@
#define HEAD_DIM_QK @{ head_dim_qk }@
#define HEAD_DIM_V @{ head_dim_v }@
#define MIXES @{ mixes }@  /* HEAD_DIM_QK is a power of two */
#define ROWS @{ rows }@

#define INLINE static inline __attribute__((always_inline, unused))
#define EXPORT __attribute__((visibility("default")))

#include <stdint.h>
#include <string.h>

@{ quantise_args }@
typedef QuantiseArgs KernelArgs;
EXPORT uint64_t ft_tiles(const QuantiseArgs *args);
EXPORT uint64_t ft_scratch_bytes(const QuantiseArgs *args);
EXPORT void ft_tile(const QuantiseArgs *args, uint64_t tile, void *scratch);

/* Rows are converted one element at a time, or as the compiler sees fit. */
#define ISA_avx2 2
#define ISA 0
#define AVX512 0
#define KV KV_e4m3
<% include "lib/cpu/convert.h" %>
<% include "lib/cpu/quantise.h" %>
<% include "lib/cpu/rotary.h" %>

#define LONGEST (HEAD_DIM_QK > HEAD_DIM_V ? HEAD_DIM_QK : HEAD_DIM_V)

enum { TENSOR_Q, TENSOR_K, TENSOR_V };
enum { OF_UNIT, OF_ROWS, OF_CHANNEL };
enum { STEP_SUMS, STEP_MEANS, STEP_LARGEST, STEP_WRITE };

/* Entry i of an array of 32- or 64-bit integers. */
INLINE int64_t read_int(const int32_t *array, int64_t i, int32_t words) {
    return words == 1 ? array[i] : ((const int64_t *)(const void *)array)[i];
}

INLINE int64_t units_of(const QuantiseArgs *args) { return (int64_t)args->batch * args->kv_heads; }

/* Where the steps leave things for each other: as the host counts it. All is zero before the first. */
INLINE uint32_t *largest_of(const QuantiseArgs *args) { return (uint32_t *)args->scratch + 4; }
INLINE uint32_t *channels_of(const QuantiseArgs *args) { return (uint32_t *)args->scratch + 4 + 8 * units_of(args); }
INLINE float *means_of(const QuantiseArgs *args) {
    return (float *)args->scratch + 4 + (8 + HEAD_DIM_V) * units_of(args);
}
INLINE float *sums_of(const QuantiseArgs *args) { return means_of(args) + units_of(args) * HEAD_DIM_QK; }

INLINE int64_t rows_of(const QuantiseArgs *args, int tensor) { return tensor == TENSOR_Q ? args->q_len : args->kv_len; }
INLINE int64_t heads_of(const QuantiseArgs *args, int tensor) {
    return tensor == TENSOR_Q ? args->heads : args->kv_heads;
}
INLINE int64_t tiles_of_head(const QuantiseArgs *args, int tensor) {
    return args->from[tensor] ? (rows_of(args, tensor) + ROWS - 1) / ROWS : 0;
}
INLINE int64_t tiles_of(const QuantiseArgs *args, int tensor) {
    return tiles_of_head(args, tensor) * heads_of(args, tensor) * args->batch;
}

/* The rows [first, end) of one head. */
typedef struct {
    int tensor, dim;
    int64_t batch, head, unit, first, end;
} Tile;

static Tile tile_of(const QuantiseArgs *args, int tensor, int64_t index) {
    const int64_t of_head = tiles_of_head(args, tensor), heads = heads_of(args, tensor);
    Tile tile = {.tensor = tensor, .dim = tensor == TENSOR_V ? HEAD_DIM_V : HEAD_DIM_QK};
    tile.batch = index / of_head / heads, tile.head = index / of_head % heads;
    tile.unit = tile.batch * args->kv_heads + tile.head / (heads / args->kv_heads);
    tile.first = index % of_head * ROWS;
    tile.end = tile.first + ROWS < rows_of(args, tensor) ? tile.first + ROWS : rows_of(args, tensor);
    return tile;
}

INLINE int is_finite(float x) { return ((float_bits){.f = x}.u & 0x7fffffff) < 0x7f800000; }

/* A row, rotated by its position where its tensor is. */
static void load_row(const QuantiseArgs *args, const Tile *tile, int64_t row, float *x) {
    const int t = tile->tensor;
    const int64_t *stride = args->from_stride + 3 * t;
    widen_row(x, (const element *)args->from[t] + tile->batch * stride[0] + tile->head * stride[1] + row * stride[2],
              tile->dim);
    if (t == TENSOR_V || !args->cos) return;
    const int32_t *positions = args->positions[t];
    rotate(args, x,
           positions ? read_int(positions, tile->batch * args->position_stride[t] + row, args->position_words)
                     : args->first_position[t] + row);
}

#if MIXES
/* Multiplies by the Hadamard matrix (Sylvester's) over the root of its size. */
static void mix(float *x) {
    for (int step = 1; step < HEAD_DIM_QK; step *= 2)
        for (int i = 0; i < HEAD_DIM_QK; i++) {
            if (i & step) continue;
            const float a = x[i], b = x[i + step];
            x[i] = a + b, x[i + step] = a - b;
        }
    float root = 1;
    for (int n = HEAD_DIM_QK; n > 1; n /= 4) root *= n == 2 ? 0.70710678118654752f : 0.5f;
    for (int i = 0; i < HEAD_DIM_QK; i++) x[i] *= root;
}
#else
INLINE void mix(float *x) { (void)x; }
#endif

/* The same row as it is quantised. */
static void final_row(const QuantiseArgs *args, const Tile *tile, int64_t row, float *x) {
    load_row(args, tile, row, x);
    if (tile->tensor == TENSOR_K && args->subtracts_mean) {
        const float *mean = means_of(args) + tile->unit * HEAD_DIM_QK;
        for (int i = 0; i < HEAD_DIM_QK; i++) x[i] -= mean[i];
    }
    if (tile->tensor != TENSOR_V && args->is_mixed) mix(x);
}

/* Sums of the finite elements of a tile of K. */
static void sum_tile(const QuantiseArgs *args, int64_t index) {
    const Tile tile = tile_of(args, TENSOR_K, index);
    float *sums = sums_of(args) + index * HEAD_DIM_QK, x[LONGEST];
    for (int64_t row = tile.first; row < tile.end; row++) {
        load_row(args, &tile, row, x);
        for (int i = 0; i < HEAD_DIM_QK; i++) sums[i] += is_finite(x[i]) ? x[i] : 0;
    }
}

/* The mean of a unit: over the number of all rows, 0 where it is not finite. */
static void find_mean(const QuantiseArgs *args, int64_t unit) {
    const int64_t tiles = tiles_of_head(args, TENSOR_K);
    const float *sums = sums_of(args) + unit * tiles * HEAD_DIM_QK;
    float *mean = means_of(args) + unit * HEAD_DIM_QK;
    for (int64_t tile = 0; tile < tiles; tile++, sums += HEAD_DIM_QK)
        for (int i = 0; i < HEAD_DIM_QK; i++) mean[i] += sums[i];
    for (int i = 0; i < HEAD_DIM_QK; i++) {
        mean[i] /= args->kv_len;
        if (!is_finite(mean[i])) mean[i] = 0;
    }
    if (!args->mean) return;
    const int64_t *stride = args->mean_stride;
    float *to = args->mean + unit / args->kv_heads * stride[0] + unit % args->kv_heads * stride[1];
    memcpy(to, mean, HEAD_DIM_QK * sizeof(float));
}

INLINE uint32_t *largest_at(const QuantiseArgs *args, const Tile *tile) {
    return largest_of(args) + tile->tensor * units_of(args) + (args->is_whole[tile->tensor] ? 0 : tile->unit);
}

/* The bits of a finite magnitude, which compare as it does; 0 of what is none. */
INLINE uint32_t magnitude(float x) {
    const uint32_t bits = (float_bits){.f = x}.u & 0x7fffffff;
    return bits < 0x7f800000 ? bits : 0;
}
INLINE void raise_to(uint32_t *largest, uint32_t most) {
    uint32_t now = __atomic_load_n(largest, __ATOMIC_RELAXED);
    while (now < most && !__atomic_compare_exchange_n(largest, &now, most, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

/* The largest finite magnitude of a tile, or those of its columns, to those of its unit. */
static void find_largest(const QuantiseArgs *args, const Tile *tile) {
    const int kind = args->scale_kind[tile->tensor];
    if (kind == OF_ROWS) return;
    uint32_t most = 0, of_column[LONGEST] = {0};
    float x[LONGEST];
    for (int64_t row = tile->first; row < tile->end; row++) {
        final_row(args, tile, row, x);
        for (int i = 0; i < tile->dim; i++) {
            const uint32_t found = magnitude(x[i]);
            of_column[i] = found > of_column[i] ? found : of_column[i];
        }
    }
    for (int i = 0; i < tile->dim; i++) {
        most = of_column[i] > most ? of_column[i] : most;
        if (kind == OF_CHANNEL) raise_to(channels_of(args) + tile->unit * HEAD_DIM_V + i, of_column[i]);
    }
    if (kind == OF_UNIT) raise_to(largest_at(args, tile), most);
}

/* 1 where all elements are zero, and a normal number. */
INLINE float scale_of(uint32_t largest) {
    const float scale = (float_bits){.u = largest}.f / LARGEST;
    return !largest ? 1 : scale < 0x1p-126f ? 0x1p-126f : scale;
}
/* Heads of a group, and units of a tensor with one scale, write the same number. */
INLINE void write_scale(float *to, float scale) { __atomic_store(to, &scale, __ATOMIC_RELAXED); }

static void write_tile(const QuantiseArgs *args, const Tile *tile) {
    const int t = tile->tensor, kind = args->scale_kind[t];
    const int64_t *stride = args->to_stride + 3 * t, *of_scales = args->scale_stride + 2 * t;
    const int64_t head = kind == OF_ROWS ? tile->head : tile->unit % args->kv_heads;
    const int64_t apart = args->scale_unit_stride[t], together = (int64_t)1 << args->scale_rows_log2[t];
    float *scales = args->scale[t] + tile->batch * of_scales[0] + head * of_scales[1];
    float x[LONGEST], inverse[LONGEST];
    for (int i = 0; i < tile->dim && kind != OF_ROWS; i++) {
        const uint32_t *channels = channels_of(args) + tile->unit * HEAD_DIM_V;
        const float scale = scale_of(kind == OF_CHANNEL ? channels[i] : *largest_at(args, tile));
        inverse[i] = 1 / scale;
        if (tile->first == 0) write_scale(scales + i * apart, scale);
    }
    uint8_t out[LONGEST];
    for (int64_t row = tile->first; row < tile->end; row++) {
        if (kind == OF_ROWS && row % together == 0) {
            uint32_t most = 0;
            for (int64_t of = row; of < row + together && of < rows_of(args, t); of++) {
                final_row(args, tile, of, x);
                for (int i = 0; i < tile->dim; i++) most = magnitude(x[i]) > most ? magnitude(x[i]) : most;
            }
            const float scale = scale_of(most);
            for (int i = 0; i < tile->dim; i++) inverse[i] = 1 / scale;
            write_scale(scales + row / together * apart, scale);
        }
        final_row(args, tile, row, x);
        for (int i = 0; i < tile->dim; i++) out[i] = narrow_kv(x[i] * inverse[i]);
        memcpy((uint8_t *)args->to[t] + tile->batch * stride[0] + tile->head * stride[1] + row * stride[2], out,
               tile->dim);
    }
}

EXPORT uint64_t ft_tiles(const QuantiseArgs *args) {
    const int64_t k = tiles_of(args, TENSOR_K);
    if (args->step == STEP_SUMS) return args->subtracts_mean ? (uint64_t)k : 0;
    if (args->step == STEP_MEANS) return args->subtracts_mean && k > 0 ? (uint64_t)units_of(args) : 0;
    return (uint64_t)(tiles_of(args, TENSOR_Q) + k + tiles_of(args, TENSOR_V));
}

EXPORT uint64_t ft_scratch_bytes(const QuantiseArgs *args) {
    (void)args;
    return 0;
}

EXPORT void ft_tile(const QuantiseArgs *args, uint64_t index, void *scratch) {
    (void)scratch;
    int64_t at = (int64_t)index;
    if (args->step == STEP_SUMS) {
        sum_tile(args, at);
        return;
    }
    if (args->step == STEP_MEANS) {
        find_mean(args, at);
        return;
    }
    int tensor = TENSOR_Q;
    for (; tensor < TENSOR_V && at >= tiles_of(args, tensor); tensor++) at -= tiles_of(args, tensor);
    const Tile tile = tile_of(args, tensor, at);
    if (args->step == STEP_LARGEST)
        find_largest(args, &tile);
    else
        write_tile(args, &tile);
}
