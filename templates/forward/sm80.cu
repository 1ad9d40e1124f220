/* @{ header }@ */

// Exact attention, tiled, in one pass (FlashAttention-2): a thread block owns block_q query rows and walks over the
// keys; every warp owns rows_per_warp of the rows and keeps their scores, probabilities and outputs in registers.

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
constexpr int kWarps = @{ warps }@;
constexpr int kRowsPerWarp = @{ rows_per_warp }@;
constexpr int kBlockKV = @{ block_kv }@;
constexpr int kStages = @{ stages }@;
constexpr bool kQInRegisters = @{ q_in_registers }@;
constexpr bool kPadRows = @{ pad_rows }@;
constexpr int kBlocksPerSM = @{ blocks_per_sm }@;
constexpr bool kLazyRescale = @{ lazy_rescale }@;
constexpr bool kMaskedLoop = @{ masked_loop }@;
constexpr bool kBlockMajor = @{ block_major }@;
constexpr bool kHalfProducts = @{ half_products }@;  // of sm_75, by 8 elements of the depth
constexpr bool kAsyncCopies = @{ async_copies }@;    // cp.async

<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/cp_async.cuh" %>
<% include "lib/cuda/ptx/ldmatrix.cuh" %>
<% include "lib/cuda/ptx/mma.cuh" %>
<% include "lib/cuda/ptx/mma_k8.cuh" %>
<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/ptx/warp.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
<% include "lib/cuda/attention/row_tile.cuh" %>
#if FT_RESIDUAL
<% include "lib/cuda/attention/residual.cuh" %>
#endif
#if FT_DROPOUT
<% include "lib/cuda/attention/dropout.cuh" %>
#endif
<% include "lib/cuda/score/program.cuh" %>
<% include "lib/cuda/attention/far.cuh" %>
<% include "lib/cuda/attention/softmax.cuh" %>
<% include "lib/cuda/attention/non_finite.cuh" %>
<% include "lib/cuda/score/sink.cuh" %>
<% include "forward/sm80/instructions.cuh" %>

constexpr int kThreads = kWarps * 32;
static_assert(kThreads == @{ threads }@, "the threads that the host launches");
constexpr int kBlockQ = kWarps * kRowsPerWarp;
using KernelArgs = WithSide<ForwardArgs>;
// Whether blocks before those in sight of every row may need a mask.
constexpr bool kMaskedFirst = kMaskLeft || kProgramMask;
using TileQK = RowTile<kHeadDimQK, kPadRows>;
using TileV = RowTile<kHeadDimV, kPadRows>;
constexpr int kMTiles = kRowsPerWarp / 16;     // 16-row tiles of a warp
constexpr int kSTiles = kBlockKV / 8;          // 8-column tiles of its scores
constexpr int kOTiles = TileV::kDim / 8;       // 8-column tiles of its output
constexpr int kStepsQK = TileQK::kDim / 16;    // matrix steps of Q K^T
constexpr int kStepsPV = kBlockKV / 16;        // matrix steps of P V
constexpr int kBytesQ = kBlockQ * TileQK::kPitch;
constexpr int kBytesK = kBlockKV * TileQK::kPitch;
constexpr int kBytesV = kBlockKV * TileV::kPitch;
// Q in registers hands its shared memory to K and V.
constexpr int kOffsetK = kQInRegisters ? 0 : kBytesQ;
constexpr int kOffsetV = kOffsetK + kStages * kBytesK;

using Scores = float[kMTiles][kSTiles][4];
using Output = float[kMTiles][kOTiles][4];
using QueryFragments = u32[kQInRegisters ? kStepsQK : 1][kMTiles][4];

__device__ __forceinline__ Tile this_tile(const ForwardArgs& args) {
    return decode_tile<kBlockQ, kBlockMajor, kMaskRight>(args, block_index());
}

__device__ __forceinline__ BlockRange blocks_of(const KernelArgs& args, const Tile& tile) {
    return program_blocks<kBlockKV>(program_head(args, args, tile), tile.row, tile.row + tile.rows - 1,
                                    visit_blocks<kBlockKV, kMaskLeft, kMaskRight>(args, tile));
}

// The addresses at which this lane reads fragments of Q, K and V from their tiles, matrix step 0.
struct LaneAddress {
    u32 q, k, v;
    __device__ __forceinline__ explicit LaneAddress(u32 smem_q) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        q = smem_q + TileQK::lane_base(warp * kRowsPerWarp + lane % 16, lane / 16);
        k = smem_q + kOffsetK + TileQK::lane_base(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        v = smem_q + kOffsetV + TileV::lane_base(lane % 16, lane / 16);
    }
};

// Q fragments of one matrix step.
__device__ __forceinline__ void load_q(u32 (&q)[kMTiles][4], u32 lane_q, int step) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) ldmatrix_x4(q[i], TileQK::at_step(lane_q, step) + i * 16 * TileQK::kPitch);
}

// s = Q K^T for one block of keys.
__device__ __forceinline__ void multiply_qk(Scores& s, const QueryFragments& q_registers, u32 lane_q, u32 lane_k) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int j = 0; j < kSTiles; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[i][j][e] = 0.0f;
        }
    }
#pragma unroll
    for (int step = 0; step < kStepsQK; step++) {
        u32 q[kMTiles][4];
        if constexpr (!kQInRegisters) load_q(q, lane_q, step);
#pragma unroll
        for (int j = 0; j < kSTiles; j += 2) {
            u32 k[4];
            ldmatrix_x4(k, TileQK::at_step(lane_k, step) + j * 8 * TileQK::kPitch);
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
                if constexpr (kQInRegisters) {
                    multiply_add(s[i][j], q_registers[step][i], k[0], k[1]);
                    multiply_add(s[i][j + 1], q_registers[step][i], k[2], k[3]);
                } else {
                    multiply_add(s[i][j], q[i], k[0], k[1]);
                    multiply_add(s[i][j + 1], q[i], k[2], k[3]);
                }
            }
        }
    }
}

// o += P V for one block of keys; P is rounded to the element type straight from the score registers.
__device__ __forceinline__ void multiply_pv(Output& o, const Scores& p, u32 lane_v) {
#pragma unroll
    for (int step = 0; step < kStepsPV; step++) {
        u32 a[kMTiles][4];
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
            const float(&p0)[4] = p[i][2 * step];
            const float(&p1)[4] = p[i][2 * step + 1];
            a[i][0] = pack_operand(p0[0], p0[1]);
            a[i][1] = pack_operand(p0[2], p0[3]);
            a[i][2] = pack_operand(p1[0], p1[1]);
            a[i][3] = pack_operand(p1[2], p1[3]);
        }
#pragma unroll
        for (int j = 0; j < kOTiles; j += 2) {
            u32 v[4];
            ldmatrix_x4_trans(v, TileV::at_step(lane_v, j / 2) + step * 16 * TileV::kPitch);
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
                multiply_add(o[i][j], a[i], v[0], v[1]);
                multiply_add(o[i][j + 1], a[i], v[2], v[3]);
            }
        }
    }
}

// Replaces the scores of masked pairs by -inf; `key` is the block's first key.
__device__ __forceinline__ void mask_scores(Scores& s, const ForwardArgs& args, int warp_row, int key) {
    const int lane = threadIdx.x % 32;
    const int column = key + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const KeyRange live = live_keys<kMaskLeft, kMaskRight>(args, warp_row + i * 16 + h * 8 + lane / 4);
            const int first = live.first - column, last = live.last - column;
#pragma unroll
            for (int j = 0; j < kSTiles; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int at = j * 8 + e;
                    if (at > last || (kMaskLeft && at < first)) s[i][j][2 * h + e] = -FT_INFINITY;
                }
            }
        }
    }
}

#if FT_DROPOUT
// Zeros in the place of dropped probabilities of a block of keys, behind their sum.
__device__ __forceinline__ void drop_weights(Scores& p, const Dropout& dropout, u32 pair, int warp_row, int key) {
    const u32 pairs[2] = {pair, pair};
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
        const u32 row = warp_row + i * 16 + threadIdx.x % 32 / 4, rows[2] = {row, row + 8};
        each_dropout_across<kSTiles>(dropout, u32(key) / 8, rows, pairs, [&](int j, int h, u32 word) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (!keeps_half(dropout, word, e)) p[i][j][2 * h + e] = 0.0f;
            }
        });
    }
}
#endif

// Takes the non-finite elements out of a masked block of V (non_finite.cuh); restore_non_finite() puts them back into
// the outputs of the rows that attend to them. Returns whether any was met.
__device__ __forceinline__ bool take_out_non_finite(u32 smem_v) {
    constexpr u32 kLow = kExponentMask<Element>, kHigh = kLow << 16;
    bool met = false;
    TileV::each_own_chunk<kBlockKV, kThreads>(smem_v, [&](u32 address) {
        uint4 v = load_shared_16(address);
        u32* words = &v.x;
        bool bad = false;
#pragma unroll
        for (int w = 0; w < 4; w++) bad |= (words[w] & kLow) == kLow || (words[w] & kHigh) == kHigh;
        if (bad) {
            clear_non_finite<Element>(v);
            store_shared_16(address, v);
            met = true;
        }
    });
    return met;
}

// The 16-byte chunks of O that one lane moves: its warp's rows, as many chunks side by side as divide a row.
struct WarpChunks {
    static constexpr int kAcross = largest_power_of_two_divisor(TileV::kChunks, 32);
    static constexpr int kDown = 32 / kAcross;
    template <typename F> static __device__ __forceinline__ void each(F f) {
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kRowsPerWarp;
#pragma unroll 2
        for (int r = lane / kAcross; r < kRowsPerWarp; r += kDown) {
#pragma unroll
            for (int chunk = lane % kAcross; chunk < TileV::kChunks; chunk += kAcross) f(first + r, chunk);
        }
    }
};

// Which rows attend to nothing, since a program made all of their scores -inf: one of four bits for each, behind the
// staged O. Not beside a sink, whose sum is not empty.
constexpr bool kMarkEmpty = @{ mark_empty }@;
// A word for every eight rows.
enum : int { kBytesO = kBlockQ * TileV::kPitch, kBytesEmptyRows = kMarkEmpty ? kBlockQ / 2 : 0 };
static_assert(max_of<int>(max_of(kBytesQ, kOffsetV + kStages * kBytesV), kBytesO + kBytesEmptyRows) == @{ smem_bytes }@,
              "the shared memory that the host asks for");
__device__ __forceinline__ u32 empty_rows(u32 smem_o, int row) { return smem_o + kBytesO + row / 8 * 4; }
__device__ __forceinline__ bool is_empty(u32 smem_o, int row) {
    return load_shared_4(empty_rows(smem_o, row)) >> row % 8 * 4 & 1;
}

// Adds the non-finite elements of V in masked blocks to the outputs that attend to them, in the staged O: rare, so
// plain and slow.
__device__ __noinline__ void restore_non_finite(const KernelArgs& args, u32 smem_o) {
    const Tile tile = this_tile(args);
    const BlockRange blocks = blocks_of(args, tile);
    const ProgramHead head = program_head(args, args, tile);
    const Element* v = (const Element*)args.v + tile.batch * args.v_stride[0] + tile.kv_head * args.v_stride[1];
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kRowsPerWarp;
#if FT_DROPOUT
    const Dropout dropout = dropout_of(args);
#endif
#pragma unroll 1
    for (int i = lane; i < kRowsPerWarp * kHeadDimV; i += 32) {
        const int row = first + i / kHeadDimV, column = i % kHeadDimV;
        if (row >= tile.rows) break;  // and not return: every lane must reach the barrier below
        if (kMarkEmpty && is_empty(smem_o, row)) continue;
#if FT_DROPOUT
        // What is not finite is asked for alone; times a weight of zero it is NaN.
        bool is_dropped = false;
        const auto visible = [&](int key) {
            const bool seen = program_visible(head, tile.row + row, key);
            is_dropped |= seen && !keeps_score(dropout, dropout_pair(args, tile.batch, tile.head), tile.row + row, key);
            return seen;
        };
#else
        const auto visible = [&](int key) { return program_visible(head, tile.row + row, key); };
#endif
        const auto element = [&](int key) { return to_float(v[key * args.v_stride[2] + column]); };
#if FT_DROPOUT
        float add =
            sum_of_non_finite<kBlockKV, kMaskLeft, kMaskRight>(args, element, tile.row + row, blocks, visible);
        if (is_dropped) add = __int_as_float(0x7fc00000);
#else
        const float add =
            sum_of_non_finite<kBlockKV, kMaskLeft, kMaskRight>(args, element, tile.row + row, blocks, visible);
#endif
        if (add != 0.0f) {
            const u32 at = smem_o + TileV::offset(row, column / 8) + column % 8 * 2;
            store_shared(at, from_float<Element>(to_float(load_shared<Element>(at)) + add));
        }
    }
    __syncwarp();
}

// A scale of zero or below turns maxima of the scores into minima: move its sign into Q and use its magnitude.
__device__ __forceinline__ void fold_sign_into_q(u32 smem_q, float scale) {
    TileQK::each_own_chunk<kBlockQ, kThreads>(smem_q, [&](u32 address) {
        uint4 v = load_shared_16(address);
        u32* words = &v.x;
#pragma unroll
        for (int w = 0; w < 4; w++) words[w] = scale == 0.0f ? 0 : words[w] ^ 0x80008000;
        store_shared_16(address, v);
    });
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    @{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(128) u8 smem[];
    const u32 smem_q = smem_address(smem), smem_k = smem_q + kOffsetK, smem_v = smem_q + kOffsetV;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const LaneAddress at(smem_q);

    const Tile tile = this_tile(args);
    const BlockRange blocks = blocks_of(args, tile);
    const ProgramHead head = program_head(args, args, tile);
    const ProgramKept kept = program_kept(head);
    const int warp_row = tile.row + warp * kRowsPerWarp;
    const u16* q = (const u16*)args.q + tile.batch * args.q_stride[0] + tile.head * args.q_stride[1] +
                   tile.row * args.q_stride[2];
    const int last_key = (blocks.end - 1) * kBlockKV;
    // K and V are read backwards, block by block: one running pointer each.
    const u16* k = TileQK::thread_source<kThreads>((const u16*)args.k + tile.batch * args.k_stride[0] +
                       tile.kv_head * args.k_stride[1] + last_key * args.k_stride[2], args.k_stride[2]);
    const u16* v = TileV::thread_source<kThreads>((const u16*)args.v + tile.batch * args.v_stride[0] +
                       tile.kv_head * args.v_stride[1] + last_key * args.v_stride[2], args.v_stride[2]);

    // Copy block n, which must be the one before the last copied. Only the first one can reach past the last key.
    RowCopy<TileQK, kBlockKV, kThreads> next_k;
    RowCopy<TileV, kBlockKV, kThreads> next_v;
    const auto copy_k = [&](int n, int stage, auto check) {
        next_k.template begin<check.value>(smem_k + stage * kBytesK, k, args.k_stride[2], args.kv_len - n * kBlockKV);
        k -= kBlockKV * args.k_stride[2];
    };
    const auto copy_v = [&](int n, int stage, auto check) {
        next_v.template begin<check.value>(smem_v + stage * kBytesV, v, args.v_stride[2], args.kv_len - n * kBlockKV);
        v -= kBlockKV * args.v_stride[2];
    };

    // Q first. A scale that is not positive is rare, so its branch costs one comparison.
    RowCopy<TileQK, kBlockQ, kThreads> all_q;
    all_q.template begin<true>(smem_q, TileQK::thread_source<kThreads>(q, args.q_stride[2]), args.q_stride[2],
                               tile.rows);
    all_q.finish(smem_q);
    commit_copies();
    QueryFragments q_registers;
    const bool fold = !(args.scale > 0.0f);
    if (kQInRegisters || fold) {
        wait_for_copies<0>();
        if (fold) fold_sign_into_q(smem_q, args.scale);
        __syncthreads();
    }
    if (kQInRegisters) {
#pragma unroll
        for (int step = 0; step < kStepsQK; step++) load_q(q_registers[kQInRegisters ? step : 0], at.q, step);
        __syncthreads();  // everyone has read Q before K and V overwrite it
    }
    const float magnitude = fold ? (args.scale == 0.0f ? 1.0f : -args.scale) : args.scale;
    const float c = kProgramScore ? kLog2E : magnitude * kLog2E;  // a program gives scores in natural units

    Output o;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int j = 0; j < kOTiles; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][j][e] = 0.0f;
        }
    }
    OnlineSoftmax<kMTiles, kSTiles, kOTiles, kLazyRescale> softmax;
    softmax.init();
    bool met_non_finite = false;
#if FT_DROPOUT
    const Dropout dropout = dropout_of(args);
#endif

    // Keys are visited from the last block to the first; block n is step (end - 1 - n) and lives in stage step %
    // kStages.
    int stage = 0;
    if (kStages == 1) {
        if (blocks.end > blocks.begin) {
            copy_k(blocks.end - 1, 0, Bool<true>{});
            next_k.finish(smem_k);
        }
        commit_copies();
    } else {
#pragma unroll
        for (int ahead = 0; ahead < kStages - 1; ahead++) {
            const int n = blocks.end - 1 - ahead;
            if (n >= blocks.begin) copy_k(n, ahead, Bool<true>{}), copy_v(n, ahead, Bool<true>{});
            commit_copies();
        }
    }

    // What the program and the window make of the scores of block n.
    const auto change = [&](Scores& s, int n, auto masked) {
        const int key = n * kBlockKV + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
            const auto at = [&](int j, int e) -> float& { return s[i][j][e]; };
            const int row = warp_row + i * 16 + lane / 4;
            if (masked) {
                program_scores<true, kSTiles>(at, head, kept, row, key, magnitude);
            } else {
                program_scores<false, kSTiles>(at, head, kept, row, key, magnitude);
            }
        }
        if (masked) mask_scores(s, args, warp_row, n * kBlockKV);
    };

    // `masked` is a bool, or a constant where masked blocks have a loop of their own.
    const auto step = [&](int n, auto masked) {
        Scores s;
        const u32 lane_k = at.k + stage * kBytesK, lane_v = at.v + stage * kBytesV;
        if (kStages == 1) {
            // One buffer each: V of this step arrives during Q K^T, K of the next one during the softmax and P V.
            wait_for_copies<0>();
            __syncthreads();
            if (masked) {
                copy_v(n, 0, Bool<true>{});
            } else {
                copy_v(n, 0, Bool<false>{});
            }
            commit_copies();
            multiply_qk(s, q_registers, at.q, lane_k);
            change(s, n, masked);
            next_v.finish(smem_v);
            wait_for_copies<0>();
            if (masked) met_non_finite |= take_out_non_finite(smem_v + stage * kBytesV);
            __syncthreads();
            if (n > blocks.begin) copy_k(n - 1, 0, Bool<false>{});
            commit_copies();
        } else {
            wait_for_copies<(kStages > 1 ? kStages - 2 : 0)>();
            if (masked) met_non_finite |= take_out_non_finite(smem_v + stage * kBytesV);
            __syncthreads();  // this step's K and V are here, and everyone is done with the stage that is filled next
            const int ahead = n - (kStages - 1);
            const int ahead_stage = stage == 0 ? kStages - 1 : stage - 1;
            if (ahead >= blocks.begin) {
                copy_k(ahead, ahead_stage, Bool<false>{});
                copy_v(ahead, ahead_stage, Bool<false>{});
            }
            commit_copies();
            multiply_qk(s, q_registers, at.q, lane_k);
            change(s, n, masked);
        }
        softmax.step(s, o, c);
#if FT_DROPOUT
        drop_weights(s, dropout, dropout_pair(args, tile.batch, tile.head), warp_row, n * kBlockKV);
#endif
        multiply_pv(o, s, lane_v);
        if (n > blocks.begin) next_k.finish(smem_k);
        stage = stage + 1 == kStages ? 0 : stage + 1;
    };

    // A block needs a mask when it is cut on the right (or reaches past the last key), or cut on the left.
    int n = blocks.end - 1;
    if (kMaskedLoop) {
        for (; n >= max_of(blocks.begin, blocks.full_end); n--) step(n, Bool<true>{});
        for (; n >= max_of(blocks.begin, blocks.full_begin); n--) step(n, Bool<false>{});
        if (kMaskedFirst) {
            for (; n >= blocks.begin; n--) step(n, Bool<true>{});
        }
    } else {
        for (; n >= blocks.begin; n--) step(n, n >= blocks.full_end || (kMaskedFirst && n < blocks.full_begin));
    }

    // O goes through shared memory, so that whole 16-byte chunks are written.
    wait_for_copies<0>();
    const bool restore = __syncthreads_or(met_non_finite);
    const Tile out_tile = this_tile(args);  // again, so that the main loop need not keep it
    const int o_row = warp * kRowsPerWarp + lane / 4;
    const u32 lane_o = smem_q + TileV::offset(o_row, 0) + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float inverse = softmax.finish(i, h);
            const int row = o_row + i * 16 + h * 8;
            const bool empty = kMarkEmpty && softmax.l[i][h] == 0.0f;
            if (kMarkEmpty) {
                const u32 bits = __ballot_sync(0xffffffff, empty);
                if (lane == 0) store_shared_4(empty_rows(smem_q, row), bits);
            }
            WithSink sunk;
            if (kProgramSink) {
                const float sink = program_sink(head, min_of(out_tile.row + row, args.q_len - 1));
                sunk = with_sink(softmax.l[i][h], as_log2(softmax.m[i][h], c), sink);
                inverse = sunk.inverse;
            }
            if (args.lse != nullptr && lane % 4 == 0 && row < out_tile.rows) {
                args.lse[(i64(out_tile.batch) * args.heads + out_tile.head) * args.q_len + out_tile.row + row] =
                    kProgramSink ? sunk.lse : softmax.log_sum_exp(i, h, c);
            }
#if FT_DROPOUT
            inverse *= args.dropout_scale;
#endif
#pragma unroll
            for (int j = 0; j < kOTiles; j++) {
                float x = o[i][j][2 * h] * inverse, y = o[i][j][2 * h + 1] * inverse;
                if (empty) x = y = 0.0f;  // a NaN of V has no part in it
                const u32 to = TileV::at_chunk(lane_o, j) + (i * 16 + h * 8) * TileV::kPitch;
                store_shared_4(to, pack_operand(x, y));
#if FT_RESIDUAL
                if (row < out_tile.rows && j * 8 < kHeadDimV) {
                    bf16* const lies = residual_row(args, out_tile.batch, out_tile.head, out_tile.row + row);
                    *(u32*)(lies + j * 8 + lane % 4 * 2) = pack_lost<Element>(x, y, pack<Element>(x, y));
                }
#endif
            }
        }
    }
    __syncwarp();  // a warp reads back only the rows that it wrote
    if (restore) restore_non_finite(args, smem_q);
    u16* out = (u16*)args.o + out_tile.batch * args.o_stride[0] + out_tile.head * args.o_stride[1] +
               out_tile.row * args.o_stride[2];
    WarpChunks::each([&](int row, int chunk) {
        if (row < out_tile.rows && chunk < TileV::kValidChunks) {
            *(uint4*)(out + row * args.o_stride[2] + chunk * 8) = load_shared_16(smem_q + TileV::offset(row, chunk));
        }
    });
}
