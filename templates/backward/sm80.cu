/* @{ header }@ */

// Gradients of attention by mma.sync and cp.async.
//
//   P = exp(S - lse)   dP = dO V^T   dS = P (dP - D)   D = rowsum(dO O) - dlse
//   dV = P^T dO        dK = scale dS^T Q               dQ = scale dS K
//
// Three stages, one behind the other:
//   statistics   log-sum-exp (by log2) and D of every query, left in the first eight bytes of its row of dQ
//   keys         a thread block has block_keys keys of a KV head and walks over the queries of its group that see them:
//                dK and dV stay in registers
//   (main)       a thread block has block_queries queries of a head and walks over their keys: dQ stays in registers,
//                and takes the place of the statistics when nobody reads them any more
//
// Seven products where five would do if dQ were summed by all key blocks: no thread block adds to what another has, so
// every sum has one order, and no memory is needed beside the gradients. The side that stays (keys, or queries) lies
// down in all of the score tiles, so that P and dS are A operands of the next products straight from the accumulators.

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
constexpr int kWarps = @{ warps }@;
constexpr int kKeyRows = @{ key_rows }@;
constexpr int kStepQ = @{ step_q }@;
constexpr int kStagesQ = @{ stages_q }@;
constexpr int kParts = @{ parts }@;
constexpr int kQueryRows = @{ query_rows }@;
constexpr int kStepKV = @{ step_kv }@;
constexpr int kStagesKV = @{ stages_kv }@;
constexpr int kBlocksPerSM = @{ blocks_per_sm }@;
constexpr bool kBlockMajor = @{ block_major }@;

<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/cp_async.cuh" %>
<% include "lib/cuda/ptx/ldmatrix.cuh" %>
<% include "lib/cuda/ptx/mma.cuh" %>
<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
#if FT_RESIDUAL
<% include "lib/cuda/attention/residual.cuh" %>
#endif
#if FT_DROPOUT
<% include "lib/cuda/attention/dropout.cuh" %>
#endif
<% include "lib/cuda/attention/row_tile.cuh" %>
<% include "lib/cuda/attention/non_finite_elements.cuh" %>
<% include "lib/cuda/score/program.cuh" %>
<% include "lib/cuda/score/gradient.cuh" %>
<% include "lib/cuda/attention/far_rows.cuh" %>

using KernelArgs = WithSide<BackwardArgs>;
<% include "lib/cuda/attention/packed.cuh" %>
constexpr int kThreads = kWarps * 32;
static_assert(kThreads == @{ threads }@, "the threads that the host launches");

<% include "backward/sm80/layout.cuh" %>
<% include "backward/sm80/walk.cuh" %>
<% include "backward/sm80/products.cuh" %>
<% include "backward/sm80/weights.cuh" %>
<% include "backward/sm80/statistics.cuh" %>
<% include "backward/sm80/keys.cuh" %>
<% include "backward/sm80/queries.cuh" %>
