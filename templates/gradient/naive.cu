/* @{ header }@ */

// The gradient of a tensor or scalar that a score program reads, in plain fp32: no tensor cores, obvious loops.
//
//   P = exp(S' - lse)   dP = dO V^T   dS' = P (dP - D)   D = rowsum(dO O) - dlse
//   dT[place] = sum over all scores that read it of dS' * (dS' / dT[place]),
//               and of a sink s of -exp(s - lse) D * (ds / dT)
//
// S' is the changed score. Three stages: zeros in the partial sums, the sums of the units of places.cuh, and their
// sums.

<% include "lib/cuda/attention/types.cuh" %>
@{ backward_args }@@{ sums_args }@
// Problem.
using Element = @{ dtype }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kMaskLeft = @{ mask_left }@;
constexpr bool kMaskRight = @{ mask_right }@;
#define FT_RESIDUAL @{ residual }@  // O comes with what it lost by rounding
// Schedule.
constexpr int kBlockQ = @{ block_q }@;
constexpr int kBlockKV = @{ block_kv }@;
constexpr int kThreads = @{ threads }@;

<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
#if FT_RESIDUAL
<% include "lib/cuda/attention/residual.cuh" %>
#endif
#define FT_EXACT  // no approximation that only 16-bit elements hide
<% include "lib/cuda/score/program.cuh" %>
<% include "lib/cuda/score/terms.cuh" %>
<% include "lib/cuda/attention/far_rows.cuh" %>
<% include "gradient/places.cuh" %>

using KernelArgs = WithSide<GradientArgs>;

// Threads form a grid of kDown x 16; a thread has rows y + kDown * i and columns x + 16 * j of a tile.
constexpr int kAcross = 16;
constexpr int kDown = kThreads / kAcross;
constexpr int kRows = kBlockQ / kDown;
constexpr int kColumns = kBlockKV / kAcross;
// An odd pitch spreads equal columns of different rows over all banks.
constexpr int kPitch = (kHeadDimQK > kHeadDimV ? kHeadDimQK : kHeadDimV) | 1;
constexpr int kEntries = kBlockQ * kBlockKV;
static_assert(kBlockQ == kBlockKV, "queries and keys lie in the same tiles");
static_assert(kDown * kBlockKV <= kBlockKV * kPitch, "sums of columns lie where the keys were");
static_assert(4 * (2 * kBlockQ * kPitch + 2 * kEntries + (kProgramFar ? 3 : 2) * kBlockQ) == @{ smem_bytes }@,
              "the shared memory that the host asks for");

// Shared memory: a tile of queries and one of keys, what is added with its places, and two numbers of each query.
struct Memory {
    float *queries, *keys, *values;
    int* places;
    float *lse, *delta, *log_sum;
};

// Sum over the 16 threads that share a row.
__device__ __forceinline__ float row_sum(float x) {
    for (int i = 1; i < kAcross; i *= 2) x += __shfl_xor_sync(0xffffffff, x, i);
    return x;
}

// Rows of a tile into shared memory as fp32; rows from `rows` on become zeros.
template <int kDim>
__device__ __forceinline__ void load_rows(float* to, const Element* from, i64 stride, int rows) {
    for (int i = threadIdx.x; i < kBlockQ * kDim; i += kThreads) {
        const int row = i / kDim, column = i % kDim;
        to[row * kPitch + column] = row < rows ? to_float(from[row * stride + column]) : 0.0f;
    }
}

// Products of the rows of two tiles: queries down, keys across.
template <int kDim> __device__ __forceinline__ void products(float (&s)[kRows][kColumns], const Memory& m) {
    const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;
#pragma unroll
    for (int i = 0; i < kRows; i++) {
#pragma unroll
        for (int j = 0; j < kColumns; j++) s[i][j] = 0.0f;
    }
#pragma unroll 4
    for (int d = 0; d < kDim; d++) {
#pragma unroll
        for (int i = 0; i < kRows; i++) {
#pragma unroll
            for (int j = 0; j < kColumns; j++)
                s[i][j] = fmaf(m.queries[(y + kDown * i) * kPitch + d],
                               m.keys[(x + kAcross * j) * kPitch + d], s[i][j]);
        }
    }
}

// Of each query of a tile the log-sum-exp and D.
__device__ __forceinline__ void load_statistics(const KernelArgs& call, const ProgramHead& head, const Tile& tile,
                                                const Memory& m) {
    const BackwardArgs& args = call.backward;
    const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;
    const i64 out_row = (i64(tile.batch) * args.heads + tile.head) * args.q_len + tile.row;
    const Element* o = (const Element*)args.o + tile.batch * args.o_stride[0] +
                       tile.head * args.o_stride[1] + tile.row * args.o_stride[2];
    const Element* dout = (const Element*)args.dout + tile.batch * args.dout_stride[0] +
                          tile.head * args.dout_stride[1] + tile.row * args.dout_stride[2];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        const int row = y + kDown * i;
        float sum = 0.0f;
#if FT_RESIDUAL
        float lost_sum = 0.0f;
#endif
        if (row < tile.rows) {
            for (int d = x; d < kHeadDimV; d += kAcross) {
                // A row without a key but with a sink has an O of zero, whatever its dO is.
                const float of = to_float(o[row * args.o_stride[2] + d]);
                if (of != 0.0f) sum = fmaf(of, to_float(dout[row * args.dout_stride[2] + d]), sum);
#if FT_RESIDUAL
                const float less = to_float(residual_row(args, tile.batch, tile.head, tile.row + row)[d]);
                if (of != 0.0f) lost_sum = fmaf(less, to_float(dout[row * args.dout_stride[2] + d]), lost_sum);
#endif
            }
        }
#if FT_RESIDUAL
        sum += lost_sum;
#endif
        sum = row_sum(sum);
        if (x == 0) {
            const bool exists = row < tile.rows;
            m.lse[row] = exists ? args.lse[out_row + row] : -FT_INFINITY;
            m.delta[row] = exists && args.dlse != nullptr ? sum - args.dlse[out_row + row] : sum;
        }
        if constexpr (kProgramFar) {
            const FarRow of = far_row<kAcross>(args, head, tile, row, out_row + row, [&](int q, int key, float score) {
                return score_terms(call, head, q, key, score).value;
            });
            if (x == 0) m.lse[row] = of.maximum, m.log_sum[row] = of.log_sum;
        }
    }
}

// Whether no query of a tile attends to any of the keys from `key` on.
__device__ __forceinline__ bool is_masked(const BackwardArgs& args, const ProgramHead& head, const Tile& tile,
                                          int key) {
    const int last_key = min_of(key + kBlockKV, args.kv_len) - 1, last_row = tile.row + tile.rows - 1;
    if (key > live_keys<kMaskLeft, kMaskRight>(args, last_row).last) return true;
    if (last_key < live_keys<kMaskLeft, kMaskRight>(args, tile.row).first) return true;
    return kProgramMask && program_tile(head, tile.row, last_row, key, last_key) < 0;
}

// S and dP of a tile.
__device__ __forceinline__ void multiply(const BackwardArgs& args, const Memory& m, const Tile& tile, int key,
                                         float (&s)[kRows][kColumns], float (&dp)[kRows][kColumns]) {
    const int keys = min_of(kBlockKV, args.kv_len - key);
    const Element* q = (const Element*)args.q + tile.batch * args.q_stride[0] +
                       tile.head * args.q_stride[1] + tile.row * args.q_stride[2];
    const Element* dout = (const Element*)args.dout + tile.batch * args.dout_stride[0] +
                          tile.head * args.dout_stride[1] + tile.row * args.dout_stride[2];
    const Element* k = (const Element*)args.k + tile.batch * args.k_stride[0] + tile.kv_head * args.k_stride[1] +
                       key * args.k_stride[2];
    const Element* v = (const Element*)args.v + tile.batch * args.v_stride[0] + tile.kv_head * args.v_stride[1] +
                       key * args.v_stride[2];
    load_rows<kHeadDimQK>(m.queries, q, args.q_stride[2], tile.rows);
    load_rows<kHeadDimQK>(m.keys, k, args.k_stride[2], keys);
    __syncthreads();
    products<kHeadDimQK>(s, m);
    __syncthreads();
    load_rows<kHeadDimV>(m.queries, dout, args.dout_stride[2], tile.rows);
    load_rows<kHeadDimV>(m.keys, v, args.v_stride[2], keys);
    __syncthreads();
    products<kHeadDimV>(dp, m);
}

// What a tile of scores adds: in registers where every pair has an element of its own, else to the partial sums.
__device__ __forceinline__ void add_tile(const KernelArgs& args, const Memory& m, const ProgramHead& head,
                                         const Tile& tile, int key, float* sums, float (&direct)[kRows][kColumns]) {
    const BackwardArgs& of = args.backward;
    const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;
    float s[kRows][kColumns], dp[kRows][kColumns];
    multiply(of, m, tile, key, s, dp);
    float factor[kTerms > 0 ? kTerms : 1][kRows][kColumns];
    int place[kTerms > 0 ? kTerms : 1][kRows][kColumns];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        const int row = y + kDown * i, q = min_of(tile.row + row, of.q_len - 1);
        const KeyRange live = live_keys<kMaskLeft, kMaskRight>(of, q);
        // An empty row attends to nothing, whatever its scores are; nor does one that does not exist.
        const bool empty = m.lse[row] == -FT_INFINITY;
#pragma unroll
        for (int j = 0; j < kColumns; j++) {
            const int kv = key + x + kAcross * j, inside = min_of(kv, of.kv_len - 1);
            const Terms<kTerms> terms = score_terms(args, head, q, inside, s[i][j] * of.scale);
            bool masked = empty || kv < live.first || kv > live.last;
            if (kProgramMask) masked = masked || !program_visible(head, q, inside);
            // A score of -infinity takes no part, whoever made it so.
            masked = masked || terms.value == -FT_INFINITY;
            const float of_maximum = terms.value - m.lse[row];
            const float ds = expf(kProgramFar ? of_maximum - m.log_sum[row] : of_maximum) * (dp[i][j] - m.delta[row]);
#pragma unroll
            for (int t = 0; t < kTerms; t++) {
                factor[t][i][j] = masked ? 0.0f : ds * terms.factor[t];
                place[t][i][j] = int(terms.place[t]);
            }
        }
    }
    if (args.direct != 0) {
#pragma unroll
        for (int i = 0; i < kRows; i++) {
#pragma unroll
            for (int j = 0; j < kColumns; j++) direct[i][j] += factor[0][i][j];
        }
        return;
    }
#pragma unroll
    for (int t = 0; t < kTerms; t++) {
        __syncthreads();  // what the term before, or the products, read
        if (kPlaceByQuery && kPlaceByKey) {
#pragma unroll
            for (int i = 0; i < kRows; i++) {
#pragma unroll
                for (int j = 0; j < kColumns; j++) {
                    const int at = (y + kDown * i) * kBlockKV + x + kAcross * j;
                    m.values[at] = factor[t][i][j], m.places[at] = place[t][i][j];
                }
            }
            __syncthreads();
            add_in_order<kThreads>(sums, m.values, m.places, kEntries);
        } else if (kPlaceByKey) {
            // Sums of columns: of a thread's rows, then of the threads that share the column.
#pragma unroll
            for (int j = 0; j < kColumns; j++) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < kRows; i++) sum += factor[t][i][j];
                m.keys[y * kBlockKV + x + kAcross * j] = sum;
                if (y == 0) m.places[x + kAcross * j] = place[t][0][j];
            }
            __syncthreads();
            for (int column = threadIdx.x; column < kBlockKV; column += kThreads) {
                float sum = 0.0f;
                for (int row = 0; row < kDown; row++) sum += m.keys[row * kBlockKV + column];
                m.values[column] = sum;
            }
            __syncthreads();
            add_in_order<kThreads>(sums, m.values, m.places, kBlockKV);
        } else {
            // Sums of rows; without a place of their own these are added up one by one.
#pragma unroll
            for (int i = 0; i < kRows; i++) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < kColumns; j++) sum += factor[t][i][j];
                sum = row_sum(sum);
                if (x == 0) m.values[y + kDown * i] = sum, m.places[y + kDown * i] = place[t][i][0];
            }
            __syncthreads();
            add_in_order<kThreads>(sums, m.values, m.places, kBlockQ);
        }
    }
}

// What the sinks of a tile of queries add: the weight of a key whose value is zero.
__device__ __forceinline__ void add_sinks(const KernelArgs& args, const Memory& m, const ProgramHead& head,
                                          const Tile& tile, float* sums) {
    const int row = threadIdx.x;
#pragma unroll
    for (int t = 0; t < kSinkTerms; t++) {
        __syncthreads();
        if (row < kBlockQ) {
            const Terms<kSinkTerms> terms = sink_terms(args, head, min_of(tile.row + row, args.backward.q_len - 1));
            const float ds = expf(terms.value - m.lse[row]) * -m.delta[row];
            m.values[row] = m.lse[row] == -FT_INFINITY ? 0.0f : ds * terms.factor[t];
            m.places[row] = int(terms.place[t]);
        }
        __syncthreads();
        add_in_order<kThreads>(sums, m.values, m.places, kBlockQ);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) @{ entry }@_clear(const __grid_constant__ KernelArgs args) {
    clear_sums<kThreads>(args);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) @{ entry }@_places(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(16) u8 smem[];
    Memory m;
    m.queries = (float*)smem;
    m.keys = m.queries + kBlockQ * kPitch;
    m.values = m.keys + kBlockQ * kPitch;
    m.places = (int*)(m.values + kEntries);
    m.lse = (float*)(m.places + kEntries);
    m.delta = m.lse + kBlockQ;
    m.log_sum = m.delta + kBlockQ;  // of far rows, in programs that have some
    const Counts counts = count_places<kBlockQ, kBlockKV>(args);
    const i64 groups = count_of(args, counts, true), places = count_of(args, counts, false);
    const BackwardArgs& of = args.backward;
    for (i64 unit = blockIdx.x; unit < groups * args.splits; unit += gridDim.x) {
        const i64 group = unit / args.splits, part = unit % args.splits;
        float* const sums = (float*)of.scratch + part * args.elements;
        float direct[kRows][kColumns];
#pragma unroll
        for (int i = 0; i < kRows; i++) {
#pragma unroll
            for (int j = 0; j < kColumns; j++) direct[i][j] = 0.0f;
        }
        for (i64 nth = places * part / args.splits; nth < places * (part + 1) / args.splits; nth++) {
            const Place p = place_of(args, counts, group, nth);
            const int row = p.query * kBlockQ, key = p.key * kBlockKV;
            const Tile tile = {p.batch, p.kv_head * counts.of[2] + p.member, p.kv_head, row,
                               min_of(kBlockQ, of.q_len - row)};
            const ProgramHead head = program_head(args, of, tile);
            const bool is_sink = p.key == counts.keys;
            if (!is_sink && is_masked(of, head, tile, key)) continue;
            __syncthreads();  // what the place before read
            load_statistics(args, head, tile, m);
            if (is_sink) {
                add_sinks(args, m, head, tile, sums);
            } else {
                add_tile(args, m, head, tile, key, sums, direct);
            }
        }
        if (args.direct == 0) continue;
        // Of the first place, as the others have the same elements.
        const Place p = place_of(args, counts, group, 0);
        const Tile tile = {p.batch, p.kv_head * counts.of[2] + p.member, p.kv_head, p.query * kBlockQ, kBlockQ};
        const ProgramHead head = program_head(args, of, tile);
        const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;
#pragma unroll
        for (int i = 0; i < kRows; i++) {
#pragma unroll
            for (int j = 0; j < kColumns; j++) {
                const int q = tile.row + y + kDown * i, kv = p.key * kBlockKV + x + kAcross * j;
                if (q < of.q_len && kv < of.kv_len)
                    store_gradient(args, score_terms(args, head, q, kv, 0.0f).place[0], direct[i][j]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) @{ entry }@(const __grid_constant__ KernelArgs args) {
    merge_sums<kThreads>(args);
}
