/* @{ header }@ */

// Gradients of attention for Hopper: TMA, wgmma, warp specialisation; the same bytes in every run.
//
//   P = exp(S - lse)   dP = dO V^T   dS = P (dP - D)   D = rowsum(dO O) - dlse
//   dV = P^T dO        dK = scale dS^T Q               dQ = scale dS K
//
// Three stages. `statistics` computes D. `keys`: a thread block owns 128 keys of a KV head, 64 a warpgroup, and walks
// over the query tiles that see them, head after head of its group, so that dK and dV are sums in one order in
// registers; each tile of dS is written once, in 16 bits. Above head dim 128 it owns 64 keys, and one warpgroup has dV,
// the other dK. `queries`: a thread block owns query rows and sums dQ over the tiles of dS that its rows have. Each
// product is computed once. No sum is shared between thread blocks, but where query heads of a group are split among
// walks over a key block, which add dK and dV in one order (walks.cuh): a reduction of dQ to memory, which is the
// alternative, costs 1200 to 2400 clocks of a step's 2700.
//
// dS of all heads may exceed the scratch memory: the stages run in waves, for some KV heads of the batch at a time. Of
// packed sequences a stage in front finds from the lengths what each wave has (sequences.cuh).
//
// The last two may be one launch of dense calls, `joint`: while most thread blocks walk over key blocks, some sum dQ of
// rows whose dS is there, and all do in the end. What a stage leaves idle, as it waits for memory or for its last
// thread blocks, the other uses. Or dQ is reduced after all, `turns`: where steps are long beside 32 KB at the rate of
// reductions, or dS of all heads too large for one wave, that is faster (turns.cuh).

<% include "lib/cuda/attention/types.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/ptx/dependent_launch.cuh" %>
<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/ldmatrix.cuh" %>
<% include "lib/cuda/ptx/mbarrier.cuh" %>
<% include "lib/cuda/ptx/named_barrier.cuh" %>
<% include "lib/cuda/ptx/registers.cuh" %>
<% include "lib/cuda/ptx/tma.cuh" %>
<% include "lib/cuda/ptx/wgmma.cuh" %>
<% include "lib/cuda/ptx/pipeline.cuh" %>
<% include "lib/cuda/ptx/warp.cuh" %>
<% include "lib/cuda/score/program.cuh" %>
<% include "lib/cuda/score/gradient.cuh" %>
@{ backward_args }@
@{ sm90_backward_args }@
// Problem.
using Element = @{ dtype }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kMaskLeft = @{ mask_left }@;
constexpr bool kMaskRight = @{ mask_right }@;
#define FT_RESIDUAL @{ residual }@  // O comes with what it lost by rounding
#define FT_DROPOUT @{ dropout }@   // scores were dropped behind the softmax
constexpr bool kPacked = @{ packed }@;
#if FT_RESIDUAL
<% include "lib/cuda/attention/residual.cuh" %>
#endif
#if FT_DROPOUT
<% include "lib/cuda/attention/dropout.cuh" %>
#endif
// Schedule.
constexpr int kBlockQ = @{ block_q }@;
constexpr int kKeys = @{ block_kv }@;  // of a key block
constexpr int kStages = @{ stages }@;
constexpr int kKeyStages = @{ key_stages }@;
constexpr int kRowTiles = @{ row_tiles }@;
constexpr int kRowStages = @{ row_stages }@;
constexpr int kDqBlocks = @{ dq_blocks }@;
// Of the four calls of Philox that a lane has under way, how many multiply on the FP64 unit.
constexpr int kDoubleCalls = @{ double_calls }@;
#define FT_JOINT @{ joint }@  // dQ beside dK and dV
#define FT_TURNS @{ turns }@  // dQ reduced by key blocks in turns
#define FT_WALKS @{ walks }@  // heads of a group walked by several thread blocks

<% include "lib/cuda/attention/far_rows.cuh" %>
<% include "backward/sm90/layout.cuh" %>
<% include "backward/sm90/tiles.cuh" %>
<% include "backward/sm90/listed.cuh" %>
#if @{ packed }@
<% include "lib/cuda/attention/packed_rows.cuh" %>
<% include "backward/sm90/sequences.cuh" %>
#endif
<% include "backward/sm90/statistics.cuh" %>
<% include "backward/sm90/store.cuh" %>
<% include "backward/sm90/key_blocks.cuh" %>
<% include "backward/sm90/key_loader.cuh" %>
<% include "backward/sm90/tickets.cuh" %>
<% include "backward/sm90/walks.cuh" %>
<% include "backward/sm90/key_steps.cuh" %>
<% include "backward/sm90/keys.cuh" %>
<% include "backward/sm90/queries.cuh" %>
<% include "backward/sm90/joint.cuh" %>
<% include "backward/sm90/turns.cuh" %>
<% include "backward/sm90/sums.cuh" %>
