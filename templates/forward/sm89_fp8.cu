/* @{ header }@ */

// Exact attention on e4m3 by mma.sync, tiled, in one pass: FlashAttention-2 as forward/sm80 has it, with sums of P V in
// two levels. The tensor cores add with some 13 bits, so that they sum one block of keys at most, from zero, and fp32
// registers sum the blocks: O = O * alpha + P V is one multiply-add where one product was needed anyway.
//
// No operand is transposed in memory. ldmatrix takes two elements for one of 16 bits: as they lie, rows of Q and K are
// fragments of FP8 products; transposed, a word holds two keys of two neighbouring columns of V, and byte permutations
// of two such words give four keys of one column. These are keys 2t, 2t + 1, 8 + 2t and 9 + 2t of each 16, which are
// those whose scores the thread has, so that P becomes an operand without a shuffle.

<% include "lib/cuda/attention/types.cuh" %>
<% include "lib/cuda/attention/abi.cuh" %>
<% include "lib/cuda/attention/kv_elements.cuh" %>

// Problem.
using OutputElement = @{ output }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kMaskLeft = @{ mask_left }@;
constexpr bool kMaskRight = @{ mask_right }@;
#define FT_SCALES_OF_QUERIES @{ scales_of_queries }@    // of rows of Q, or of blocks of them, in place of heads
#define FT_SCALES_OF_KEYS @{ scales_of_keys }@          // the same of K
#define FT_SCALES_OF_CHANNELS @{ scales_of_channels }@  // of columns of V, in place of heads
// Schedule.
constexpr int kWarps = @{ warps }@;
constexpr int kRowsPerWarp = @{ rows_per_warp }@;
constexpr int kBlockKV = @{ block_kv }@;
constexpr int kStages = @{ stages }@;
constexpr bool kQInRegisters = @{ q_in_registers }@;
constexpr bool kPadRows = @{ pad_rows }@;
constexpr int kBlocksPerSM = @{ blocks_per_sm }@;
constexpr bool kInOrder = @{ in_order }@;
constexpr bool kBlockMajor = @{ block_major }@;

<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/cp_async.cuh" %>
<% include "lib/cuda/ptx/ldmatrix.cuh" %>
<% include "lib/cuda/ptx/mma_e4m3.cuh" %>
<% include "lib/cuda/ptx/convert_fp8.cuh" %>
<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/ptx/warp.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
<% include "lib/cuda/attention/row_tile.cuh" %>

using KernelArgs = ForwardArgs;

constexpr int kThreads = kWarps * 32;
static_assert(kThreads == @{ threads }@, "the threads that the host launches");
static_assert(kHeadDimQK % 16 == 0 && kHeadDimV % 16 == 0 && kBlockKV % 32 == 0, "whole vectors and matrix steps");
constexpr int kBlockQ = kWarps * kRowsPerWarp;
// Tiles of pairs: rows of half as many elements of 16 bits, padded with zeros to whole matrix steps of 32 bytes.
using TileQK = RowTile<kHeadDimQK / 2, kPadRows>;
using TileV = RowTile<kHeadDimV / 2, kPadRows>;
constexpr int kMTiles = kRowsPerWarp / 16;   // 16-row tiles of a warp
constexpr int kSTiles = kBlockKV / 8;        // 8-column tiles of its scores
constexpr int kGroupsV = kHeadDimV / 16;     // groups of 16 columns of V: two tiles of O each, of even and of odd ones
constexpr int kStepsQK = TileQK::kDim / 16;  // matrix steps of Q K^T
constexpr int kStepsPV = kBlockKV / 32;      // matrix steps of P V
constexpr int kBytesQ = kBlockQ * TileQK::kPitch;
constexpr int kBytesK = kBlockKV * TileQK::kPitch;
constexpr int kBytesV = kBlockKV * TileV::kPitch;
// Q in registers hands its shared memory to K and V.
constexpr int kOffsetK = kQInRegisters ? 0 : kBytesQ;
constexpr int kOffsetV = kOffsetK + kStages * kBytesK;
#if FT_SCALES_OF_KEYS
// Of each stage of K its scales.
constexpr int kOffsetKeyScales = max_of<int>(kBytesQ, kOffsetV + kStages * kBytesV);
#endif
static_assert(max_of<int>(kBytesQ, kOffsetV + kStages * kBytesV) +
                  (FT_SCALES_OF_KEYS ? kStages * kBlockKV * 4 : 0) == @{ smem_bytes }@,
              "the shared memory that the host asks for");
// Padded rows of V are zeros, so only blocks cut by the mask can hold elements that must not be multiplied.
constexpr bool kMasks = kMaskLeft || kMaskRight;

// Probabilities are 2^8 at most, so that those down to 2^-17 of the largest are e4m3 numbers above zero.
constexpr float kProbabilityLog2 = 8.0f;

<% include "lib/cuda/attention/descale.cuh" %>
<% include "lib/cuda/attention/e4m3_scales.cuh" %>
<% include "lib/cuda/attention/output_fp8.cuh" %>

using Scores = float[kMTiles][kSTiles][4];
using Output = float[kMTiles][2 * kGroupsV][4];
using Probabilities = u32[kMTiles][kStepsPV][4];
using Factors = RowFactors<2 * kMTiles>;
using QueryFragments = u32[kQInRegisters ? kStepsQK : 1][kMTiles][4];

<% include "forward/sm89_fp8/products.cuh" %>
<% include "forward/sm89_fp8/softmax.cuh" %>
<% include "forward/sm89_fp8/rows.cuh" %>

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
@{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(128) u8 smem[];
    const u32 smem_q = smem_address(smem), smem_k = smem_q + kOffsetK, smem_v = smem_q + kOffsetV;
    const int warp = threadIdx.x / 32;
    const LaneAddress at(smem_q);

    const Tile tile = this_tile(args);
    const BlockRange blocks = visit_blocks<kBlockKV, kMaskLeft, kMaskRight>(args, tile);
    const int warp_row = tile.row + warp * kRowsPerWarp;
    float scale = args.scale;
    if (!FT_SCALES_OF_QUERIES) scale *= descale(args.q_descale, args.q_descale_stride, tile);
    if (!FT_SCALES_OF_KEYS) scale *= descale(args.k_descale, args.k_descale_stride, tile);
    const int last_key = (blocks.end - 1) * kBlockKV;
    // K and V are read backwards, block by block: one running pointer each, and strides in pairs.
    const i64 q_stride = args.q_stride[2] / 2, k_stride = args.k_stride[2] / 2, v_stride = args.v_stride[2] / 2;
    const u16* k = TileQK::thread_source<kThreads>(
        (const u16*)row_of(args.k, args.k_stride, tile.batch, tile.kv_head, last_key), k_stride);
    const u16* v = TileV::thread_source<kThreads>(
        (const u16*)row_of(args.v, args.v_stride, tile.batch, tile.kv_head, last_key), v_stride);

#if FT_SCALES_OF_KEYS
    const Descales<1> key_scales = key_descales(args, tile);
#endif
    // Copy block n, which must be the one before the last copied. Only the first one can reach past the last key.
    const auto copy_k = [&](int n, int stage, auto check) {
        TileQK::copy_async<kBlockKV, kThreads, check.value>(smem_k + stage * kBytesK, k, k_stride,
                                                            args.kv_len - n * kBlockKV);
        k -= kBlockKV * k_stride;
#if FT_SCALES_OF_KEYS
        copy_key_scales(smem_q + kOffsetKeyScales + stage * kBlockKV * 4, args, key_scales, n * kBlockKV);
#endif
    };
    const auto copy_v = [&](int n, int stage, auto check) {
        TileV::copy_async<kBlockKV, kThreads, check.value>(smem_v + stage * kBytesV, v, v_stride,
                                                           args.kv_len - n * kBlockKV);
        v -= kBlockKV * v_stride;
    };

    const u16* const q = (const u16*)row_of(args.q, args.q_stride, tile.batch, tile.head, tile.row);
    TileQK::copy_async<kBlockQ, kThreads, true>(smem_q, TileQK::thread_source<kThreads>(q, q_stride), q_stride,
                                                tile.rows);
    cp_async_commit();
    QueryFragments q_registers;
    const bool fold = any_not_positive(args, tile, scale);
    if (kQInRegisters || fold) {
        cp_async_wait<0>();
        if (fold) fold_sign_into_q(args, tile, smem_q, scale);
        __syncthreads();
    }
    if (kQInRegisters) {
#pragma unroll
        for (int step = 0; step < kStepsQK; step++) load_q(q_registers[kQInRegisters ? step : 0], at.q, step);
        __syncthreads();  // everyone has read Q before K and V overwrite it
    }
    const Factors c = factors_of(args, tile, scale);

    Output o;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int j = 0; j < 2 * kGroupsV; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][j][e] = 0.0f;
        }
    }
    RowSoftmax softmax;
    softmax.init();
    bool met_nan = false;

    // Keys are visited from the last block to the first; block n is step (end - 1 - n) and lives in stage step %
    // kStages.
    int stage = 0;
    if (kStages == 1) {
        if (blocks.end > blocks.begin) copy_k(blocks.end - 1, 0, Bool<true>{});
        cp_async_commit();
    } else {
#pragma unroll
        for (int ahead = 0; ahead < kStages - 1; ahead++) {
            const int n = blocks.end - 1 - ahead;
            if (n >= blocks.begin) copy_k(n, ahead, Bool<true>{}), copy_v(n, ahead, Bool<true>{});
            cp_async_commit();
        }
    }

#pragma unroll 1
    for (int n = blocks.end - 1; n >= blocks.begin; n--) {
        const bool masked = n >= blocks.full_end || (kMaskLeft && n < blocks.full_begin);
        Scores s;
        const u32 lane_k = at.k + stage * kBytesK, lane_v = at.v + stage * kBytesV;
        if (kStages == 1) {
            // One buffer each: V of this step arrives during Q K^T, K of the next one during the softmax and P V.
            cp_async_wait<0>();
            __syncthreads();
            if (masked) {
                copy_v(n, 0, Bool<true>{});
            } else {
                copy_v(n, 0, Bool<false>{});
            }
            cp_async_commit();
            multiply_qk(s, q_registers, at.q, lane_k);
#if FT_SCALES_OF_KEYS
            scale_keys(s, smem_q + kOffsetKeyScales + stage * kBlockKV * 4);
#endif
            if (masked) mask_scores(s, args, warp_row, n * kBlockKV);
            cp_async_wait<0>();
            if (kMasks && masked) met_nan |= take_out_nan(smem_v);
            __syncthreads();
            if (n > blocks.begin) copy_k(n - 1, 0, Bool<false>{});
            cp_async_commit();
        } else {
            cp_async_wait<(kStages > 1 ? kStages - 2 : 0)>();
            if (kMasks && masked) met_nan |= take_out_nan(smem_v + stage * kBytesV);
            __syncthreads();  // this step's K and V are here, and everyone is done with the stage that is filled next
            const int ahead = n - (kStages - 1);
            const int ahead_stage = stage == 0 ? kStages - 1 : stage - 1;
            if (ahead >= blocks.begin) {
                copy_k(ahead, ahead_stage, Bool<false>{});
                copy_v(ahead, ahead_stage, Bool<false>{});
            }
            cp_async_commit();
            multiply_qk(s, q_registers, at.q, lane_k);
#if FT_SCALES_OF_KEYS
            scale_keys(s, smem_q + kOffsetKeyScales + stage * kBlockKV * 4);
#endif
            if (masked) mask_scores(s, args, warp_row, n * kBlockKV);
        }
        Probabilities p;
        softmax.step(s, p, c);
        multiply_pv(o, softmax.factor, p, lane_v);
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    cp_async_wait<0>();

    const bool restore = kMasks && __syncthreads_or(met_nan);
    const Tile out_tile = this_tile(args);  // again, so that the main loop need not keep it
    write(args, out_tile, blocks, softmax, o, c, restore);
}
