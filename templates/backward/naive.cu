/* @{ header }@ */

// Gradients of attention in plain fp32: no tensor cores, no asynchronous copies, obvious loops.
//
//   P = exp(S - lse)   dP = dO V^T   dS = P (dP - D)   D = rowsum(dO O) - dlse
//   dV = P^T dO        dK = scale dS^T Q               dQ = scale dS K
//
// It is the oracle for shapes that are too large for the host, and the path for f32 (which stays f32 throughout). One
// grid has two kinds of thread blocks: a block of keys walks over the queries that see them, head after head of its
// group, and sums dK and dV; a block of queries walks over its keys and sums dQ. Both compute the scores anew, so no
// thread block needs what another has computed, and sums have one order.

<% include "lib/cuda/attention/types.cuh" %>
@{ backward_args }@
// Problem.
using Element = @{ dtype }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kMaskLeft = @{ mask_left }@;
constexpr bool kMaskRight = @{ mask_right }@;
#define FT_RESIDUAL @{ residual }@  // O comes with what it lost by rounding
#define FT_DROPOUT @{ dropout }@   // scores were dropped behind the softmax
constexpr bool kPacked = @{ packed }@;
// Schedule.
constexpr int kBlockQ = @{ block_q }@;
constexpr int kBlockKV = @{ block_kv }@;
constexpr int kThreads = @{ threads }@;

<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
#if FT_RESIDUAL
<% include "lib/cuda/attention/residual.cuh" %>
#endif
#if FT_DROPOUT
<% include "lib/cuda/attention/dropout.cuh" %>
#endif
#define FT_EXACT  // no approximation that only 16-bit elements hide
<% include "lib/cuda/score/program.cuh" %>

using KernelArgs = WithSide<BackwardArgs>;
<% include "lib/cuda/attention/packed.cuh" %>

// Threads form a grid of kDown x 16; a thread has rows y + kDown * i and columns x + 16 * j of whatever is computed.
constexpr int kAcross = 16;
constexpr int kDown = kThreads / kAcross;
constexpr int kRows = kBlockQ / kDown;
constexpr int kColumns = kBlockKV / kAcross;
constexpr int kKeyRows = kBlockKV / kDown;
constexpr int kOutQK = div_up(kHeadDimQK, kAcross);
constexpr int kOutV = div_up(kHeadDimV, kAcross);
// An odd pitch spreads equal columns of different rows over all banks.
constexpr int kPitch = (kHeadDimQK > kHeadDimV ? kHeadDimQK : kHeadDimV) | 1;
constexpr int kPitchP = kBlockKV | 1;
static_assert(kBlockQ == kBlockKV, "queries and keys lie in the same tiles");
static_assert(4 * (3 * kBlockQ * kPitch + 2 * kBlockQ * kPitchP + (kProgramFar ? 3 : 2) * kBlockQ) == @{ smem_bytes }@,
              "the shared memory that the host asks for");

// In the place of a weight, which is not negative: the query does not attend to the key.
constexpr float kMasked = -1.0f;

<% include "lib/cuda/score/gradient.cuh" %>
<% include "lib/cuda/attention/far_rows.cuh" %>

// Sum over the 16 threads that share a row.
__device__ __forceinline__ float row_sum(float x) {
    for (int i = 1; i < kAcross; i *= 2) x += __shfl_xor_sync(0xffffffff, x, i);
    return x;
}

// Rows [0, kTileRows) of a tile into shared memory as fp32; rows from `rows` on become zeros.
template <int kTileRows, int kDim>
__device__ __forceinline__ void load_rows(float* to, const Element* from, i64 stride, int rows) {
    for (int i = threadIdx.x; i < kTileRows * kDim; i += kThreads) {
        const int row = i / kDim, column = i % kDim;
        to[row * kPitch + column] = row < rows ? to_float(from[row * stride + column]) : 0.0f;
    }
}

// Products of the rows of two tiles: queries down, keys across.
template <int kDim>
__device__ __forceinline__ void products(float (&s)[kRows][kColumns], const float* queries, const float* keys) {
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
                s[i][j] = fmaf(queries[(y + kDown * i) * kPitch + d], keys[(x + kAcross * j) * kPitch + d], s[i][j]);
        }
    }
}

// Of each query of a tile the log-sum-exp and D.
__device__ __forceinline__ void load_statistics(const Args& args, const ProgramHead& head, const Tile& tile, float* lse,
                                                float* delta, float* log_sum) {
    const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;
    const i64 out_row = lse_row(args, tile.batch, tile.head, tile.row);
    const Element* o = (const Element*)args.o + tile.batch * args.o_stride[0] +
                       tile.head * args.o_stride[1] + tile.row * args.o_stride[2];
    const Element* dout = (const Element*)args.dout + tile.batch * args.dout_stride[0] +
                          tile.head * args.dout_stride[1] + tile.row * args.dout_stride[2];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        const int row = y + kDown * i;
        float sum = 0.0f;
        if (row < tile.rows) {
            for (int d = x; d < kHeadDimV; d += kAcross)
                sum = fmaf(to_float(o[row * args.o_stride[2] + d]), to_float(dout[row * args.dout_stride[2] + d]), sum);
#if FT_RESIDUAL
            const bf16* const lost = residual_row(args, tile.batch, tile.head, tile.row + row);
            float less = 0.0f;
            for (int d = x; d < kHeadDimV; d += kAcross)
                less = fmaf(to_float(lost[d]), to_float(dout[row * args.dout_stride[2] + d]), less);
            sum += less;
#endif
        }
        sum = row_sum(sum);
        if (x == 0) {
            const bool exists = row < tile.rows;
            lse[row] = exists ? args.lse[out_row + row] : -FT_INFINITY;
            delta[row] = exists && args.dlse != nullptr ? sum - args.dlse[out_row + row] : sum;
        }
        if constexpr (kProgramFar) {
            const FarRow of = far_row<kAcross>(args, head, tile, row, out_row + row, [&](int q, int key, float score) {
                return score_gradient(head, q, key, score).value;
            });
            if (x == 0) lse[row] = of.maximum, log_sum[row] = of.log_sum;
        }
    }
}

// P and dS of a tile of queries and the keys from `key` on, by the products s of Q and K and dp of dO and V.
__device__ __forceinline__ void weigh(const Args& args, const ProgramHead& head, const Tile& tile, int key,
                                      const float (&s)[kRows][kColumns], const float (&dp)[kRows][kColumns],
                                      const float* lse, const float* delta, const float* log_sum, float* p_tile,
                                      float* ds_tile) {
    const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;
#if FT_DROPOUT
    const Dropout dropout = dropout_of(args);
    const u32 pair = dropout_pair(args, tile.batch, tile.head);
#endif
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        const int row = y + kDown * i, q = min_of(tile.row + row, args.q_len - 1);
        const KeyRange live = live_keys<kMaskLeft, kMaskRight>(args, q);
        // An empty row attends to nothing, whatever its scores are; nor does one that does not exist.
        const bool empty = lse[row] == -FT_INFINITY;
#pragma unroll
        for (int j = 0; j < kColumns; j++) {
            const int kv = key + x + kAcross * j, inside = min_of(kv, args.kv_len - 1);
            const Gradient g = score_gradient(head, q, inside, s[i][j] * args.scale);
            bool masked = empty || kv < live.first || kv > live.last;
            if (kProgramMask) masked = masked || !program_visible(head, q, inside);
            // A score of -infinity takes no part, whoever made it so.
            masked = masked || g.value == -FT_INFINITY;
            const float p = kProgramFar ? expf(g.value - lse[row] - log_sum[row]) : expf(g.value - lse[row]);
#if FT_DROPOUT
            // D is by the O that dropped scores are missing from, and so is P of dV, whose scale comes in the end.
            const float kept = keeps_score(dropout, pair, tile.row + row, kv) ? 1.0f : 0.0f;
            p_tile[row * kPitchP + x + kAcross * j] = masked ? kMasked : p * kept;
            ds_tile[row * kPitchP + x + kAcross * j] =
                p * (dp[i][j] * (kept * args.dropout_scale) - delta[row]) * g.slope;
#else
            p_tile[row * kPitchP + x + kAcross * j] = masked ? kMasked : p;
            ds_tile[row * kPitchP + x + kAcross * j] = p * (dp[i][j] - delta[row]) * g.slope;
#endif
        }
    }
}

// sums[i][j] += sum over the rows t of weight(i, t) * tile[t][x + 16 j], but for pairs that are masked: zero times NaN
// is NaN. `place(i, t)` is where a pair lies among P and dS.
template <int kSumRows, int kOut, int kDim, typename Place>
__device__ __forceinline__ void add_products(float (&sums)[kSumRows][kOut], const float* p_tile, const float* weights,
                                             const float* tile, int rows, const Place& place) {
    const int x = threadIdx.x % kAcross;
    for (int t = 0; t < rows; t++) {
        float b[kOut];
#pragma unroll
        for (int j = 0; j < kOut; j++) {
            const int column = x + kAcross * j;
            b[j] = kDim % kAcross == 0 || column < kDim ? tile[t * kPitch + column] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kSumRows; i++) {
            const int at = place(i, t);
            if (p_tile[at] < 0.0f) continue;
#pragma unroll
            for (int j = 0; j < kOut; j++) sums[i][j] = fmaf(weights[at], b[j], sums[i][j]);
        }
    }
}

template <int kSumRows, int kOut, int kDim>
__device__ __forceinline__ void store_rows(Element* to, i64 stride, const float (&sums)[kSumRows][kOut], int rows,
                                           float scale) {
    const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;
#pragma unroll
    for (int i = 0; i < kSumRows; i++) {
        const int row = y + kDown * i;
#pragma unroll
        for (int j = 0; j < kOut; j++) {
            const int column = x + kAcross * j;
            if (row < rows && column < kDim) to[row * stride + column] = from_float<Element>(sums[i][j] * scale);
        }
    }
}

// Shared memory: two tiles that stay, one that changes, the pairs, and what queries have.
struct Memory {
    float *first, *second, *third, *p, *ds, *lse, *delta, *log_sum;
};

// Whether a program's mask leaves out a tile of queries and keys.
__device__ __forceinline__ bool is_masked(const Args& args, const ProgramHead& head, const Tile& tile, int key) {
    const int last_key = min_of(key + kBlockKV, args.kv_len) - 1;
    return kProgramMask && program_tile(head, tile.row, tile.row + tile.rows - 1, key, last_key) < 0;
}

// dK and dV of a block of keys.
__device__ __forceinline__ void key_tile(const Args& args, const Memory& m, int batch, int kv_head, int key) {
    const int y = threadIdx.x / kAcross;
    const int keys = min_of(kBlockKV, args.kv_len - key), group = args.heads / args.kv_heads;
    const i64 diagonal = args.kv_len - args.q_len;
    // Queries that see any of the keys.
    const int first = kMaskRight ? int(max_of<i64>(0, key - diagonal - args.window_right)) : 0;
    const int last = kMaskLeft ? int(min_of<i64>(args.q_len, key + keys - diagonal + args.window_left)) : args.q_len;
    float dk[kKeyRows][kOutQK], dv[kKeyRows][kOutV];
#pragma unroll
    for (int i = 0; i < kKeyRows; i++) {
#pragma unroll
        for (int j = 0; j < kOutQK; j++) dk[i][j] = 0.0f;
#pragma unroll
        for (int j = 0; j < kOutV; j++) dv[i][j] = 0.0f;
    }
    const Element* k = (const Element*)args.k + batch * args.k_stride[0] + kv_head * args.k_stride[1] +
                       key * args.k_stride[2];
    const Element* v = (const Element*)args.v + batch * args.v_stride[0] + kv_head * args.v_stride[1] +
                       key * args.v_stride[2];
    load_rows<kBlockKV, kHeadDimQK>(m.first, k, args.k_stride[2], keys);
    load_rows<kBlockKV, kHeadDimV>(m.second, v, args.v_stride[2], keys);
    for (int h = kv_head * group; h < (kv_head + 1) * group; h++) {
        for (int row = first; row < last; row += kBlockQ) {
            const Tile tile = {batch, h, kv_head, row, min_of(kBlockQ, last - row)};
            const ProgramHead head = program_head(args, args, tile);
            if (is_masked(args, head, tile, key)) continue;
            const Element* q = (const Element*)args.q + batch * args.q_stride[0] + h * args.q_stride[1] +
                               row * args.q_stride[2];
            const Element* dout = (const Element*)args.dout + batch * args.dout_stride[0] + h * args.dout_stride[1] +
                                  row * args.dout_stride[2];
            float s[kRows][kColumns], dp[kRows][kColumns];
            __syncthreads();
            load_rows<kBlockQ, kHeadDimQK>(m.third, q, args.q_stride[2], tile.rows);
            load_statistics(args, head, tile, m.lse, m.delta, m.log_sum);
            __syncthreads();
            products<kHeadDimQK>(s, m.third, m.first);
            __syncthreads();
            load_rows<kBlockQ, kHeadDimV>(m.third, dout, args.dout_stride[2], tile.rows);
            __syncthreads();
            products<kHeadDimV>(dp, m.third, m.second);
            weigh(args, head, tile, key, s, dp, m.lse, m.delta, m.log_sum, m.p, m.ds);
            __syncthreads();
            const auto place = [&](int i, int t) { return t * kPitchP + y + kDown * i; };
            add_products<kKeyRows, kOutV, kHeadDimV>(dv, m.p, m.p, m.third, tile.rows, place);
            __syncthreads();
            load_rows<kBlockQ, kHeadDimQK>(m.third, q, args.q_stride[2], tile.rows);
            __syncthreads();
            add_products<kKeyRows, kOutQK, kHeadDimQK>(dk, m.p, m.ds, m.third, tile.rows, place);
        }
    }
    Element* to_k = (Element*)args.dk + batch * args.dk_stride[0] + kv_head * args.dk_stride[1] +
                    key * args.dk_stride[2];
    Element* to_v = (Element*)args.dv + batch * args.dv_stride[0] + kv_head * args.dv_stride[1] +
                    key * args.dv_stride[2];
    store_rows<kKeyRows, kOutQK, kHeadDimQK>(to_k, args.dk_stride[2], dk, keys, args.scale);
#if FT_DROPOUT
    store_rows<kKeyRows, kOutV, kHeadDimV>(to_v, args.dv_stride[2], dv, keys, args.dropout_scale);
#else
    store_rows<kKeyRows, kOutV, kHeadDimV>(to_v, args.dv_stride[2], dv, keys, 1.0f);
#endif
}

// dQ of a block of queries.
__device__ __forceinline__ void query_tile(const Args& args, const Memory& m, const Tile& tile) {
    const int y = threadIdx.x / kAcross;
    const ProgramHead head = program_head(args, args, tile);
    float dq[kRows][kOutQK];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
#pragma unroll
        for (int j = 0; j < kOutQK; j++) dq[i][j] = 0.0f;
    }
    const Element* q = (const Element*)args.q + tile.batch * args.q_stride[0] +
                       tile.head * args.q_stride[1] + tile.row * args.q_stride[2];
    const Element* dout = (const Element*)args.dout + tile.batch * args.dout_stride[0] +
                          tile.head * args.dout_stride[1] + tile.row * args.dout_stride[2];
    const Element* k = (const Element*)args.k + tile.batch * args.k_stride[0] + tile.kv_head * args.k_stride[1];
    const Element* v = (const Element*)args.v + tile.batch * args.v_stride[0] + tile.kv_head * args.v_stride[1];
    load_rows<kBlockQ, kHeadDimQK>(m.first, q, args.q_stride[2], tile.rows);
    load_rows<kBlockQ, kHeadDimV>(m.second, dout, args.dout_stride[2], tile.rows);
    load_statistics(args, head, tile, m.lse, m.delta, m.log_sum);
    const BlockRange blocks = visit_blocks<kBlockKV, kMaskLeft, kMaskRight>(args, tile);
    for (int n = blocks.begin; n < blocks.end; n++) {
        const int key = n * kBlockKV, keys = min_of(kBlockKV, args.kv_len - key);
        if (is_masked(args, head, tile, key)) continue;
        float s[kRows][kColumns], dp[kRows][kColumns];
        __syncthreads();
        load_rows<kBlockKV, kHeadDimQK>(m.third, k + key * args.k_stride[2], args.k_stride[2], keys);
        __syncthreads();
        products<kHeadDimQK>(s, m.first, m.third);
        __syncthreads();
        load_rows<kBlockKV, kHeadDimV>(m.third, v + key * args.v_stride[2], args.v_stride[2], keys);
        __syncthreads();
        products<kHeadDimV>(dp, m.second, m.third);
        weigh(args, head, tile, key, s, dp, m.lse, m.delta, m.log_sum, m.p, m.ds);
        __syncthreads();
        load_rows<kBlockKV, kHeadDimQK>(m.third, k + key * args.k_stride[2], args.k_stride[2], keys);
        __syncthreads();
        const auto place = [&](int i, int t) { return (y + kDown * i) * kPitchP + t; };
        add_products<kRows, kOutQK, kHeadDimQK>(dq, m.p, m.ds, m.third, keys, place);
    }
    Element* to = (Element*)args.dq + tile.batch * args.dq_stride[0] +
                  tile.head * args.dq_stride[1] + tile.row * args.dq_stride[2];
    store_rows<kRows, kOutQK, kHeadDimQK>(to, args.dq_stride[2], dq, tile.rows, args.scale);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) @{ entry }@(const __grid_constant__ KernelArgs FT_CALL) {
    extern __shared__ __align__(16) u8 smem[];
    Memory m;
    m.first = (float*)smem;
    m.second = m.first + kBlockQ * kPitch;
    m.third = m.second + kBlockQ * kPitch;
    m.p = m.third + kBlockQ * kPitch;
    m.ds = m.p + kBlockQ * kPitchP;
    m.lse = m.ds + kBlockQ * kPitchP;
    m.delta = m.lse + kBlockQ;
    m.log_sum = m.delta + kBlockQ;  // of far rows, in programs that have some
    // Blocks of keys first, which have the queries of a group to walk over; with a bounded right side the first keys
    // are seen most.
    const u32 heads = u32(FT_CALL.batch) * u32(FT_CALL.kv_heads);
    const u32 key_tiles = heads * ((u32(FT_CALL.kv_len) + kBlockKV - 1) / kBlockKV);
    if (blockIdx.x < key_tiles) {
        const u32 head = blockIdx.x % heads;
        const int batch = int(head / u32(FT_CALL.kv_heads)), key = int(blockIdx.x / heads) * kBlockKV;
        FT_SEQUENCE(args, batch);
        if (kPacked && key >= args.kv_len) return;
        key_tile(args, m, batch, int(head % u32(args.kv_heads)), key);
    } else {
        Tile tile = decode_tile<kBlockQ, false, kMaskRight>(FT_CALL, blockIdx.x - key_tiles);
        FT_SEQUENCE(args, tile.batch);
        if (kPacked && !has_rows(args, tile, kBlockQ)) return;
        query_tile(args, m, tile);
    }
}
