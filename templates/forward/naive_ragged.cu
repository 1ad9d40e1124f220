/* @{ header }@ */

// Exact attention of a ragged batch in plain fp32: sequences of different lengths, whose K and V lie in a store that is
// indexed at run time. No tensor cores, no asynchronous copies, one obvious loop, elements read one by one wherever
// they lie. It is the oracle for batches that are too large for the host, and the path for f32.

<% include "lib/cuda/attention/types.cuh" %>
<% include "lib/cuda/attention/kv_elements.cuh" %>
<% include "lib/cuda/attention/quantise.cuh" %>
<% include "lib/cuda/attention/e4m3_scales.cuh" %>
<% include "lib/cuda/attention/ragged.cuh" %>

// Problem.
using Element = @{ dtype }@;  // of Q
using OutputElement = @{ output }@;
using KvElement = @{ kv_element }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kMaskLeft = @{ mask_left }@;
constexpr bool kMaskRight = @{ mask_right }@;
#define FT_DROPOUT @{ dropout }@  // scores are dropped behind the softmax
constexpr bool kScaled = @{ kv_scaled }@;                 // elements of the store have a scale
constexpr bool kScalePerToken = @{ kv_scale_per_token }@;  // of their token's own
constexpr bool kVColumns = @{ v_columns }@;               // tokens of V lie side by side
// Schedule.
constexpr int kBlockQ = @{ block_q }@;
constexpr int kBlockKV = @{ block_kv }@;
constexpr int kThreads = @{ threads }@;

<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
#if FT_DROPOUT
<% include "lib/cuda/attention/dropout.cuh" %>
#endif
#define FT_EXACT  // no approximation that only 16-bit elements hide
<% include "lib/cuda/score/program.cuh" %>

using KernelArgs = WithSide<RaggedArgs>;

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
// Elements of the store in 16 bytes.
constexpr int kChunk = 16 / sizeof(KvElement);

// Where the row of a key begins, and what its elements are multiplied by.
struct KeyAt {
    i64 k, v;  // elements from the start of the store; k is -1 for a key that is not there
    float k_scale, v_scale;
};
constexpr int kTileFloats = kBlockQ * kPitchQK + kBlockKV * kPitchKV + kBlockQ * kPitchP;
static_assert(kBlockKV * sizeof(KeyAt) + kTileFloats * 4 == @{ smem_bytes }@,
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

// The scale of a token's elements: its own, or that of a head of a sequence.
__device__ __forceinline__ float scale_of(const float* scales, const i64 (&stride)[3], int b, int head, int page,
                                          int token) {
    if (!kScaled || scales == nullptr) return 1.0f;
    const float* const of_head = scales + head * stride[1];
    return of_head[kScalePerToken ? page * stride[0] + token * stride[2] : b * stride[0]];
}

// A key behind the last one, or in a page that the store has not, is not there.
__device__ __forceinline__ KeyAt key_at(const RaggedArgs& args, const Sequence& s, int b, int head, int key) {
    KeyAt at = {-1, -1, 0.0f, 0.0f};
    if (key >= s.kv_len) return at;
    const PageOf place = page_of(args, s.first + key);
    const int k_page = page_id(args, args.k_table, s, place.page), v_page = page_id(args, args.v_table, s, place.page);
    if (k_page < 0 || v_page < 0) return at;
    at.k = k_page * args.k_stride[0] + place.token * args.k_stride[1] + head * args.k_stride[2];
    at.v = v_page * args.v_stride[0] + place.token * args.v_stride[1] + head * args.v_stride[2];
    at.k_scale = scale_of(args.k_scale, args.k_scale_stride, b, head, k_page, place.token);
    at.v_scale = scale_of(args.v_scale, args.v_scale_stride, b, head, v_page, place.token);
    return at;
}

// One block per multiprocessor is asked for because ptxas otherwise spills a few registers to fit one block more.
extern "C" __global__ void __launch_bounds__(kThreads, 1) @{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(16) u8 smem[];
    KeyAt* keys = (KeyAt*)smem;
    float* q_tile = (float*)(keys + kBlockKV);
    float* kv_tile = q_tile + kBlockQ * kPitchQK;
    float* p_tile = kv_tile + kBlockKV * kPitchKV;
    const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;

    Tile tile = decode_tile<kBlockQ, false, false>(args, blockIdx.x);
    const Sequence sequence = sequence_of(args, tile.batch);
    tile.rows = min_of(kBlockQ, sequence.q_len - tile.row);
    // Rows behind the sequence's last are not written.
    if (tile.rows <= 0) return;
    const ProgramHead head = program_head(args, sequence, tile);
    const ProgramKept kept = program_kept(head);
    const int last_row = tile.row + tile.rows - 1;
    const BlockRange blocks = program_blocks<kBlockKV>(
        head, tile.row, last_row, visit_blocks<kBlockKV, kMaskLeft, kMaskRight>(sequence, tile));
    // The tile's first row in a tensor of these strides.
    const auto first_row = [&](const i64 (&stride)[3]) {
        const i64 batch = args.q_begin == nullptr ? tile.batch * stride[0] : 0;
        return batch + tile.head * stride[1] + (sequence.q_row + tile.row) * stride[2];
    };
    const Element* q = (const Element*)args.q + first_row(args.q_stride);
    for (int i = threadIdx.x; i < kBlockQ * kHeadDimQK; i += kThreads) {
        const int row = i / kHeadDimQK, column = i % kHeadDimQK;
        q_tile[row * kPitchQK + column] = row < tile.rows ? to_float(q[row * args.q_stride[2] + column]) : 0.0f;
    }

#if FT_DROPOUT
    const Dropout dropout = dropout_of(args);
    const u32 pair = dropout_pair(args, tile.batch, tile.head);
#endif
    const float scale = args.scale * query_scale<Element>(args, tile.batch, tile.kv_head);
    KeyRange live[kRows];
    float m[kRows], l[kRows], o[kRows][kOutColumns], s[kRows][kColumns];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        live[i] = live_keys<kMaskLeft, kMaskRight>(sequence, tile.row + y + kDown * i);
        m[i] = -FT_INFINITY;
        l[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < kOutColumns; j++) o[i][j] = 0.0f;
    }

    for (int n = blocks.begin; n < blocks.end; n++) {
        const int last_key = min_of(n * kBlockKV + kBlockKV, sequence.kv_len) - 1;
        if (kProgramMask && program_tile(head, tile.row, last_row, n * kBlockKV, last_key) < 0) continue;
        __syncthreads();
        for (int t = threadIdx.x; t < kBlockKV; t += kThreads) {
            keys[t] = key_at(args, sequence, tile.batch, tile.kv_head, n * kBlockKV + t);
        }
        __syncthreads();
        // What is not there becomes zeros.
        for (int i = threadIdx.x; i < kBlockKV * kHeadDimQK; i += kThreads) {
            const int t = i / kHeadDimQK, column = i % kHeadDimQK;
            const KeyAt at = keys[t];
            float value = 0.0f;
            if (at.k >= 0) {
                value = to_float(
                    ((const KvElement*)args.k)[at.k + column / kChunk * args.k_stride[3] + column % kChunk]);
            }
            kv_tile[t * kPitchKV + column] = kScaled && at.k >= 0 ? value * at.k_scale : value;
        }
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
        // Scaled scores; -inf where masked.
#pragma unroll
        for (int i = 0; i < kRows; i++) {
#pragma unroll
            for (int j = 0; j < kColumns; j++) {
                const int key = n * kBlockKV + x + kAcross * j;
                const bool masked = key < live[i].first || key > live[i].last || keys[x + kAcross * j].k < 0;
#if FT_PROGRAM
                // Rows and keys beyond the last repeat it, so that no index leaves a tensor.
                const int row = min_of(tile.row + y + kDown * i, sequence.q_len - 1), first = n * kBlockKV + x;
                const int offset = min_of(kAcross * j, sequence.kv_len - 1 - first);
                const ScoreRow score = score_row(head, kept.score, row, first, scale);
                const MaskRow mask = mask_row(head, kept.mask, row, first);
                s[i][j] = score_element(head, kept.score, score, row, first, offset, s[i][j], scale);
                if (masked || !mask_element(head, kept.mask, mask, row, first, offset)) s[i][j] = -FT_INFINITY;
#else
                s[i][j] = masked ? -FT_INFINITY : s[i][j] * scale;
#endif
            }
        }
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
        __syncthreads();
        const i64 v_column = kVColumns ? args.v_stride[3] : 1;
        for (int i = threadIdx.x; i < kBlockKV * kHeadDimV; i += kThreads) {
            // Neighbours in memory to neighbouring threads.
            const int t = kVColumns ? i % kBlockKV : i / kHeadDimV, column = kVColumns ? i / kBlockKV : i % kHeadDimV;
            const KeyAt at = keys[t];
            const float value = at.k >= 0 ? to_float(((const KvElement*)args.v)[at.v + column * v_column]) : 0.0f;
            kv_tile[t * kPitchKV + column] = kScaled && at.k >= 0 ? value * at.v_scale : value;
        }
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
                    const int row = min_of(tile.row + y + kDown * i, sequence.q_len - 1);
                    if (!program_visible(head, row, key)) continue;
                }
                const float p = p_tile[(y + kDown * i) * kPitchP + t];
#pragma unroll
                for (int j = 0; j < kOutColumns; j++) o[i][j] = fmaf(p, b[j], o[i][j]);
            }
        }
    }

    OutputElement* out = (OutputElement*)args.o + first_row(args.o_stride);
    const float o_scale = output_scale<OutputElement>(args);
    float* lse = args.lse + (args.lse == nullptr ? 0 : first_row(args.lse_stride));
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        const int row = y + kDown * i;
        l[i] = row_sum(l[i]);
        if (kProgramSink) {
            // One more key, without a value: O shrinks, the log-sum-exp grows.
            const float sink = program_sink(head, min_of(tile.row + row, sequence.q_len - 1));
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
        if (row < tile.rows) {
#pragma unroll
            for (int j = 0; j < kOutColumns; j++) {
                const int column = x + kAcross * j;
                if (column < kHeadDimV) {
                    const float x = empty ? 0.0f : o[i][j] / l[i] * o_scale;
                    out[row * args.o_stride[2] + column] = from_float<OutputElement>(x);
                }
            }
            if (args.lse != nullptr && x == 0) {
                lse[row * args.lse_stride[2]] = empty ? args.lse_empty : (m[i] + logf(l[i])) * args.lse_unit;
            }
        }
    }
}
