/* @{ header }@ */

// Exact attention in plain fp32: no tensor cores, no asynchronous copies, one obvious loop. It is the oracle for shapes
// that are too large for the host, the path for f32 (which stays f32 throughout), and the only kernel that can return
// the attention weights.

<% include "lib/cuda/attention/types.cuh" %>
<% include "lib/cuda/attention/abi.cuh" %>

// Problem.
using Element = @{ dtype }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kMaskLeft = @{ mask_left }@;
constexpr bool kMaskRight = @{ mask_right }@;
#define FT_RESIDUAL @{ residual }@  // what O lost by rounding, in memory
#define FT_DROPOUT @{ dropout }@   // scores are dropped behind the softmax
// Schedule.
constexpr int kBlockQ = @{ block_q }@;
constexpr int kBlockKV = @{ block_kv }@;
constexpr int kThreads = @{ threads }@;

<% include "lib/cuda/attention/tile.cuh" %>
#if FT_RESIDUAL
<% include "lib/cuda/attention/residual.cuh" %>
#endif
#if FT_DROPOUT
<% include "lib/cuda/attention/dropout.cuh" %>
#endif
#define FT_EXACT  // no approximation that only 16-bit elements hide
<% include "lib/cuda/score/program.cuh" %>

using KernelArgs = WithSide<ForwardArgs>;

// Threads form a grid of kDown x 16; a thread computes the scores of rows y + kDown * i and columns x + 16 * j.
constexpr int kAcross = 16;
constexpr int kDown = kThreads / kAcross;
constexpr int kRows = kBlockQ / kDown;
constexpr int kColumns = kBlockKV / kAcross;
constexpr int kOutColumns = div_up(kHeadDimV, kAcross);
// An odd pitch spreads equal columns of different rows over all banks.
constexpr int kPitchQK = kHeadDimQK | 1;
constexpr int kPitchKV = (kHeadDimQK > kHeadDimV ? kHeadDimQK : kHeadDimV) | 1;
constexpr int kPitchP = kBlockKV | 1;
static_assert(4 * (kBlockQ * kPitchQK + kBlockKV * kPitchKV + kBlockQ * kPitchP) == @{ smem_bytes }@,
              "the shared memory that the host asks for");

// Reductions over the 16 threads that share a row.
__device__ __forceinline__ float row_max(float x) {
    for (int i = 1; i < kAcross; i *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, i));
    return x;
}
__device__ __forceinline__ float row_sum(float x) {
    for (int i = 1; i < kAcross; i *= 2) x += __shfl_xor_sync(0xffffffff, x, i);
    return x;
}

// Rows [0, kTileRows) of a tile into shared memory as fp32; rows from `rows` on become zeros.
template <int kTileRows, int kDim>
__device__ __forceinline__ void load_rows(float* to, int pitch, const Element* from, i64 stride, int rows) {
    for (int i = threadIdx.x; i < kTileRows * kDim; i += kThreads) {
        const int row = i / kDim, column = i % kDim;
        to[row * pitch + column] = row < rows ? to_float(from[row * stride + column]) : 0.0f;
    }
}

// One block per multiprocessor is asked for because ptxas otherwise spills a few registers to fit one block more.
extern "C" __global__ void __launch_bounds__(kThreads, 1) @{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ float smem[];
    float* q_tile = smem;
    float* kv_tile = q_tile + kBlockQ * kPitchQK;
    float* p_tile = kv_tile + kBlockKV * kPitchKV;
    const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;

    const Tile tile = decode_tile<kBlockQ, false, kMaskRight>(args, blockIdx.x);
    const ProgramHead head = program_head(args, args, tile);
    const ProgramKept kept = program_kept(head);
    const int last_row = tile.row + tile.rows - 1;
    const BlockRange blocks = program_blocks<kBlockKV>(
        head, tile.row, last_row, visit_blocks<kBlockKV, kMaskLeft, kMaskRight>(args, tile));
    const Element* q = (const Element*)args.q + tile.batch * args.q_stride[0] + tile.head * args.q_stride[1] +
                       tile.row * args.q_stride[2];
    const Element* k = (const Element*)args.k + tile.batch * args.k_stride[0] + tile.kv_head * args.k_stride[1];
    const Element* v = (const Element*)args.v + tile.batch * args.v_stride[0] + tile.kv_head * args.v_stride[1];
    const i64 out_row = (i64(tile.batch) * args.heads + tile.head) * args.q_len + tile.row;

    load_rows<kBlockQ, kHeadDimQK>(q_tile, kPitchQK, q, args.q_stride[2], tile.rows);

#if FT_DROPOUT
    const Dropout dropout = dropout_of(args);
    const u32 pair = dropout_pair(args, tile.batch, tile.head);
#endif
    KeyRange live[kRows];
    float m[kRows], l[kRows], o[kRows][kOutColumns], s[kRows][kColumns];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        live[i] = live_keys<kMaskLeft, kMaskRight>(args, tile.row + y + kDown * i);
        m[i] = -FT_INFINITY;
        l[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < kOutColumns; j++) o[i][j] = 0.0f;
    }

    // Scaled scores of one block of keys in s; -inf where masked. Begins and ends with kv_tile free for others.
    const auto scores = [&](int n) {
        __syncthreads();
        load_rows<kBlockKV, kHeadDimQK>(kv_tile, kPitchKV, k + n * kBlockKV * args.k_stride[2], args.k_stride[2],
                                        args.kv_len - n * kBlockKV);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kRows; i++) {
#pragma unroll
            for (int j = 0; j < kColumns; j++) s[i][j] = 0.0f;
        }
#pragma unroll 4
        for (int d = 0; d < kHeadDimQK; d++) {
            float a[kRows], b[kColumns];
#pragma unroll
            for (int i = 0; i < kRows; i++) a[i] = q_tile[(y + kDown * i) * kPitchQK + d];
#pragma unroll
            for (int j = 0; j < kColumns; j++) b[j] = kv_tile[(x + kAcross * j) * kPitchKV + d];
#pragma unroll
            for (int i = 0; i < kRows; i++) {
#pragma unroll
                for (int j = 0; j < kColumns; j++) s[i][j] = fmaf(a[i], b[j], s[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < kRows; i++) {
#pragma unroll
            for (int j = 0; j < kColumns; j++) {
                const int key = n * kBlockKV + x + kAcross * j;
                const bool masked = key < live[i].first || key > live[i].last;
#if FT_PROGRAM
                // Rows and keys beyond the last repeat it, so that no index leaves a tensor.
                const int q = min_of(tile.row + y + kDown * i, args.q_len - 1), first = n * kBlockKV + x;
                const int offset = min_of(kAcross * j, args.kv_len - 1 - first);
                const ScoreRow score = score_row(head, kept.score, q, first, args.scale);
                const MaskRow mask = mask_row(head, kept.mask, q, first);
                s[i][j] = score_element(head, kept.score, score, q, first, offset, s[i][j], args.scale);
                if (masked || !mask_element(head, kept.mask, mask, q, first, offset)) s[i][j] = -FT_INFINITY;
#else
                s[i][j] = masked ? -FT_INFINITY : s[i][j] * args.scale;
#endif
            }
        }
        __syncthreads();
    };

    for (int n = blocks.begin; n < blocks.end; n++) {
        const int last_key = min_of(n * kBlockKV + kBlockKV, args.kv_len) - 1;
        if (kProgramMask && program_tile(head, tile.row, last_row, n * kBlockKV, last_key) < 0) continue;
        scores(n);
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            float block_max = s[i][0];
#pragma unroll
            for (int j = 1; j < kColumns; j++) block_max = fmaxf(block_max, s[i][j]);
            const float to = fmaxf(m[i], row_max(block_max));
            // A row that has seen nothing yet: any finite reference gives exp(-inf) = 0 instead of NaN.
            const float reference = to == -FT_INFINITY ? 0.0f : to;
            const float factor = expf(m[i] - reference);
            m[i] = to;
            l[i] *= factor;
#pragma unroll
            for (int j = 0; j < kOutColumns; j++) o[i][j] *= factor;
#pragma unroll
            for (int j = 0; j < kColumns; j++) {
                float p = expf(s[i][j] - reference);
                l[i] += p;
#if FT_DROPOUT
                if (!keeps_score(dropout, pair, tile.row + y + kDown * i, n * kBlockKV + x + kAcross * j)) p = 0.0f;
#endif
                p_tile[(y + kDown * i) * kPitchP + x + kAcross * j] = p;
            }
        }
        load_rows<kBlockKV, kHeadDimV>(kv_tile, kPitchKV, v + n * kBlockKV * args.v_stride[2], args.v_stride[2],
                                       args.kv_len - n * kBlockKV);
        __syncthreads();
        const bool masked = n < blocks.full_begin || n >= blocks.full_end;
        for (int t = 0; t < kBlockKV; t++) {
            const int key = n * kBlockKV + t;
            float b[kOutColumns];
#pragma unroll
            for (int j = 0; j < kOutColumns; j++) {
                const int column = x + kAcross * j;
                b[j] = kHeadDimV % kAcross == 0 || column < kHeadDimV ? kv_tile[t * kPitchKV + column] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < kRows; i++) {
                // Not multiplied by a zero probability: zero times NaN is NaN.
                if (masked && (key < live[i].first || key > live[i].last)) continue;
                if (kProgramMask && masked) {
                    const int q = min_of(tile.row + y + kDown * i, args.q_len - 1);
                    if (!program_visible(head, q, key)) continue;
                }
                const float p = p_tile[(y + kDown * i) * kPitchP + t];
#pragma unroll
                for (int j = 0; j < kOutColumns; j++) o[i][j] = fmaf(p, b[j], o[i][j]);
            }
        }
    }

    Element* out = (Element*)args.o + tile.batch * args.o_stride[0] + tile.head * args.o_stride[1] +
                   tile.row * args.o_stride[2];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        const int row = y + kDown * i;
        l[i] = row_sum(l[i]);
        if (kProgramSink) {
            // One more key, without a value: O shrinks, the log-sum-exp grows.
            const float sink = program_sink(head, min_of(tile.row + row, args.q_len - 1));
            const float seen = l[i] == 0.0f ? -FT_INFINITY : m[i], top = fmaxf(seen, sink);
            const float less = top == -FT_INFINITY ? 0.0f : expf(seen - top);
            l[i] = l[i] * less + (top == -FT_INFINITY ? 0.0f : expf(sink - top));
            m[i] = top;
#pragma unroll
            for (int j = 0; j < kOutColumns; j++) o[i][j] *= less;
        }
#if FT_DROPOUT
#pragma unroll
        for (int j = 0; j < kOutColumns; j++) o[i][j] *= args.dropout_scale;
#endif
        const bool empty = l[i] == 0.0f;
        const float lse = empty ? -FT_INFINITY : m[i] + logf(l[i]);
        if (row < tile.rows) {
#pragma unroll
            for (int j = 0; j < kOutColumns; j++) {
                const int column = x + kAcross * j;
                if (column < kHeadDimV)
                    out[row * args.o_stride[2] + column] = from_float<Element>(empty ? 0.0f : o[i][j] / l[i]);
#if FT_RESIDUAL
                if (column < kHeadDimV) {
                    const float x = empty ? 0.0f : o[i][j] / l[i];
                    bf16* const to = residual_row(args, tile.batch, tile.head, tile.row + row);
                    to[column] = from_float<bf16>(lost(x, from_float<Element>(x)));
                }
#endif
            }
            if (args.lse != nullptr && x == 0) args.lse[out_row + row] = lse;
        }
        if (!kProgramFar) m[i] = lse, l[i] = 1.0f;
    }

    // The weights need the final sums, so the scores are computed a second time.
    if (args.weights == nullptr) return;
    for (int n = 0; n * kBlockKV < args.kv_len; n++) {
        scores(n);
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            const int row = y + kDown * i;
#pragma unroll
            for (int j = 0; j < kColumns; j++) {
                const int key = n * kBlockKV + x + kAcross * j;
                if (row < tile.rows && key < args.kv_len) {
                    args.weights[(out_row + row) * args.kv_len + key] =
                        s[i][j] == -FT_INFINITY ? 0.0f
                        : kProgramFar           ? expf(s[i][j] - m[i]) / l[i]
                                                : expf(s[i][j] - m[i]);
                }
            }
        }
    }
}
