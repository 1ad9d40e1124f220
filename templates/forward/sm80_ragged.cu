/* @{ header }@ */

// Attention over a ragged batch with its keys split (Flash-Decoding, stream-K): a fixed number of thread blocks share
// all (sequence, KV head, row tile, key block) evenly, or tiles that are alike whole or in equal pieces, by ranges that
// follow from the lengths, which are read here. The rows of a tile are the query rows of all heads of one KV head, so
// that keys are read once for all of them.
//
//   thread block = kKeyWarps teams of kRowWarps warps
//     a team   walks every kKeyWarps-th key block of its share, with a ring of kStages buffers of its own (copies.cuh)
//     a warp   owns kRowsPerWarp rows: scores, softmax and O in registers (products.cuh)
//   end of a share: the teams' sums are merged in the order of the teams (merge.cuh); a share that is not all of a tile
//   goes to scratch memory, and whoever comes last of a tile merges its pieces in the order of their keys.
//
// Nothing here depends on who comes when but who does the merging: the same bytes in every run.

<% include "lib/cuda/attention/types.cuh" %>
<% include "lib/cuda/attention/kv_elements.cuh" %>
<% include "lib/cuda/attention/quantise.cuh" %>
<% include "lib/cuda/attention/e4m3_scales.cuh" %>

// Problem.
using Element = @{ dtype }@;  // of Q
using OutputElement = @{ output }@;
using CacheElement = @{ kv_element }@;
constexpr bool kScaled = @{ kv_scaled }@;
constexpr bool kScalePerToken = @{ kv_scale_per_token }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kMaskLeft = @{ mask_left }@;
constexpr bool kMaskRight = @{ mask_right }@;
// Whether the program's mask tells heads apart: a tile's rows are of several.
constexpr bool kMaskOfHeads = @{ mask_of_heads }@;
// Whether Q lies in shared memory: where registers have no room for it beside O.
constexpr bool kSharedQ = @{ shared_q }@;
// Schedule.
constexpr int kRowsPerWarp = @{ rows_per_warp }@;
constexpr int kRowWarps = @{ row_warps }@;
constexpr int kKeyWarps = @{ key_warps }@;
constexpr int kBlockKV = @{ block_kv }@;
constexpr int kStages = @{ stages }@;
constexpr int kBlocksPerSM = @{ blocks_per_sm }@;

<% include "lib/cuda/attention/ragged.cuh" %>
<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/cp_async.cuh" %>
<% include "lib/cuda/ptx/ldmatrix.cuh" %>
<% include "lib/cuda/ptx/mma.cuh" %>
<% include "lib/cuda/ptx/named_barrier.cuh" %>
<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/ptx/warp.cuh" %>
<% include "lib/cuda/ptx/dependent_launch.cuh" %>
<% include "lib/cuda/ptx/global_memory.cuh" %>
<% include "lib/cuda/ptx/global_counter.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
<% include "lib/cuda/attention/divisor.cuh" %>
<% include "lib/cuda/attention/row_tile.cuh" %>
<% include "lib/cuda/score/program.cuh" %>
<% include "lib/cuda/attention/far.cuh" %>
<% include "lib/cuda/attention/softmax.cuh" %>
<% include "lib/cuda/score/sink.cuh" %>

using KernelArgs = WithSide<RaggedArgs>;
constexpr int kTeamThreads = kRowWarps * 32;
constexpr int kThreads = kKeyWarps * kTeamThreads;
static_assert(kThreads == @{ threads }@, "the threads that the host launches");
constexpr int kRows = kRowsPerWarp * kRowWarps;
constexpr int kMTiles = kRowsPerWarp / 16;  // 16-row tiles of a warp
constexpr int kSTiles = kBlockKV / 8;       // 8-column tiles of its scores

<% include "forward/sm80_ragged/elements.cuh" %>
<% include "forward/sm80_ragged/work.cuh" %>
<% include "forward/sm80_ragged/layout.cuh" %>
<% include "forward/sm80_ragged/range.cuh" %>
<% include "forward/sm80_ragged/copies.cuh" %>
<% include "forward/sm80_ragged/products.cuh" %>
<% include "forward/sm80_ragged/rows.cuh" %>
<% include "forward/sm80_ragged/merge.cuh" %>

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
@{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(128) u8 smem[];
    const u32 base = smem_address(smem);
    const int team = threadIdx.x / kTeamThreads;
    const Group group(args.heads / args.kv_heads);
    let_next_launch_begin();
    const Range range = find_range(args, group);
    if (range.begin >= range.end) return;

    // One loop for everything: steps of copies run kStages - 1 ahead of those of products, also across the ends of
    // shares, and all code is there once. A launch of 4096 keys spent half of its time waiting for instructions when
    // the first steps of copies, and the loops over shares and over their steps, had code of their own.
    Copies copies(args, group, base, team, range);
    const LaneAddress at(base + Layout::ring(team));
    OnlineSoftmax<kMTiles, kSTiles, kOTiles, true> softmax;
    Output o;
    QueryFragments q;
    Rows rows;
    float v_reference = 0.0f;
    int stage = 0, slot = 0, ahead = kStages - 1;
    bool first = true, fresh = false;  // a share of which nothing is asked, nothing computed
    i64 left = range.end - range.begin;
#pragma unroll 1
    for (;;) {
        copies.begin_next(args);
        if (first) {
            // Asked for behind the first page and before the first keys: their latencies are one.
            team_sync(team);  // the share is noted
            const Share& share = share_at(team, slot);
            rows.begin(args, group, share);
            if (!kSharedQ) rows.load_q(args, share, q);
            first = false, fresh = true;
        }
        if (ahead == 0) {
            cp_async_wait<kStages - 2>();
            team_sync(team);
            if (fresh) {
                fresh = false;
                if constexpr (kSharedQ) {
                    rows.share_q(args, share_at(team, slot), shared_q(base), team == 0);
                    __syncthreads();
                } else {
                    rows.finish_q(q);
                }
                clear(o);
                softmax.init();
                v_reference = 0.0f;
            }
        }
        copies.next(args);
        if (ahead > 0) {
            ahead--;
            continue;
        }
        const Step now = step_at(team, stage);
        if (now.block >= 0) {
            const u32 buffer = stage * Layout::kStageBytes;
            const u32 scales = base + Layout::scales(team, stage);
            const bool masked = rows.needs_mask(args, now);
            Scores s;
            multiply_qk(s, q, shared_q(base), at.k + buffer);
            rows.change(s, now, masked, scales);
            const u32 tile_v = base + Layout::ring(team) + buffer + Layout::kBytesK;
            if (__builtin_expect(masked, false)) rows.take_out_non_finite(o, tile_v, now, team);
            softmax.step(s, o, rows.factor);
            scale_probabilities(s, o, v_reference, scales + kBlockKV * 4);
            multiply_pv(o, s, at.v + buffer);
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
        first = now.last;
        if (first) {
            const Share& share = share_at(team, slot);
            slot = slot + 1 == kShareSlots ? 0 : slot + 1;
            left -= share.units;
            merge(args, group, team, share, rows, softmax, o, v_reference, left <= 0);
            if (left <= 0) return;
        }
    }
}
