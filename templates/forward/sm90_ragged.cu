/* @{ header }@ */

// forward/sm90 for ragged batches: sequences of lengths that the device alone knows, their queries packed or in a
// batch, their keys packed or in slots of a dense cache. Roles, pipelines and steps are those of forward/sm90; what
// differs is how a thread block finds its tiles (table.cuh), and where rows and keys lie (operands.cuh).

<% include "lib/cuda/attention/types.cuh" %>
<% include "lib/cuda/attention/abi.cuh" %>
<% include "lib/cuda/attention/ragged.cuh" %>

// Problem.
using Element = @{ dtype }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kMaskLeft = @{ mask_left }@;
constexpr bool kMaskRight = @{ mask_right }@;
#define FT_DROPOUT @{ dropout }@  // scores are dropped behind the softmax
// No mask metadata: the family refuses programs whose masks need stages before the main one.
#define FT_LISTS 0
#define FT_RUNS 0
constexpr bool kLists = FT_LISTS, kRuns = FT_RUNS;
// Schedule.
constexpr int kConsumers = @{ consumers }@;
constexpr int kBlockKV = @{ block_kv }@;
constexpr int kStages = @{ stages }@;
constexpr bool kOverlap = @{ overlap }@;
constexpr bool kTakeTurns = @{ take_turns }@;
constexpr bool kMaskedLoop = @{ masked_loop }@;
constexpr bool kLazyRescale = @{ lazy_rescale }@;
constexpr bool kQuick = @{ quick }@;  // to compile
constexpr bool kPackGroup = @{ pack_group }@;
constexpr bool kTrim = @{ trim }@;
constexpr bool kPersistent = @{ persistent }@;
constexpr bool kQueue = @{ queue }@;
constexpr bool kChain = @{ chain }@;
constexpr bool kOutputApart = @{ output_apart }@;
constexpr int kBiasStages = @{ bias_stages }@;
// The scores' product starts from what a program adds to them, instead of from zero.
constexpr bool kSeeded = @{ seeded }@;
constexpr int kExp2Eighths = @{ exp2_eighths }@;
#define FT_DRAWERS @{ drawers }@  // warpgroups that draw which scores are dropped
constexpr int kDrawers = FT_DRAWERS;
constexpr int kBitStages = @{ bit_stages }@;
constexpr int kBlocksPerSM = @{ blocks_per_sm }@;
constexpr int kProducerRegisters = @{ producer_registers }@;
constexpr int kDrawerRegisters = @{ drawer_registers }@;
constexpr int kConsumerRegisters = @{ consumer_registers }@;

// What depends on how sequences lie in memory.
constexpr bool kForeignRows = true;    // whether rows of K and V behind a sequence's last are those of another
constexpr int kEntries = @{ table_entries }@;  // of the tile table
constexpr int kBytesTable = @{ table_bytes }@;

<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/mbarrier.cuh" %>
<% include "lib/cuda/ptx/pipeline.cuh" %>
<% include "lib/cuda/ptx/named_barrier.cuh" %>
<% include "lib/cuda/ptx/registers.cuh" %>
<% include "lib/cuda/ptx/tma.cuh" %>
<% include "lib/cuda/ptx/dependent_launch.cuh" %>
<% include "lib/cuda/ptx/ldmatrix.cuh" %>
<% include "lib/cuda/ptx/wgmma.cuh" %>
<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/ptx/warp.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
<% include "lib/cuda/attention/non_finite.cuh" %>
#if FT_DROPOUT
<% include "lib/cuda/attention/dropout.cuh" %>
#endif
<% include "lib/cuda/score/program.cuh" %>
<% include "lib/cuda/score/sink.cuh" %>
<% include "lib/cuda/attention/far.cuh" %>
<% include "forward/sm90/softmax.cuh" %>
<% include "forward/sm90_ragged/tiles.cuh" %>
<% include "forward/sm90_ragged/visits.cuh" %>

<% include "forward/sm90_ragged/constants.cuh" %>

<% include "forward/sm90_ragged/layout.cuh" %>

<% include "forward/sm90_ragged/shares.cuh" %>
<% include "forward/sm90/recompute.cuh" %>
<% include "forward/sm90_ragged/table.cuh" %>
<% include "forward/sm90_ragged/scheduler.cuh" %>

<% include "forward/sm90_ragged/no_biases.cuh" %>
<% include "forward/sm90_ragged/operands.cuh" %>
<% include "forward/sm90_ragged/pages.cuh" %>
<% include "forward/sm90_ragged/producer.cuh" %>
#if FT_DRAWERS
<% include "forward/sm90/drawer.cuh" %>
#endif
<% include "forward/sm90_ragged/masks.cuh" %>
<% include "forward/sm90_ragged/epilogue.cuh" %>
<% include "forward/sm90_ragged/pieces.cuh" %>
<% include "forward/sm90/steps.cuh" %>
<% include "forward/sm90/arrivals.cuh" %>
<% include "forward/sm90_ragged/consumer.cuh" %>

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
@{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(1024) u8 shared_memory[];
    const u32 smem = smem_address(shared_memory);
<% include "forward/sm90_ragged/barriers.cuh" %>
    wait_for_launch_before();
    let_next_launch_begin();
    TileTable::build(args, smem);
    // The host starts as many thread blocks as there may be tiles.
    if (blockIdx.x >= FT_TILES(args, smem)) return;
    if (threadIdx.x == 0) publish_first(args, smem);
    __syncthreads();
<% include "forward/sm90_ragged/roles.cuh" %>
}
