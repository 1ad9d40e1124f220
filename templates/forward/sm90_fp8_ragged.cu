/* @{ header }@ */

// forward/sm90_fp8 for ragged batches: sequences of lengths that the device alone knows, their queries packed or in a
// batch, their keys packed, in slots of a dense cache or in pages. Softmax, products and the transposition of V are
// those of forward/sm90_fp8; how a thread block finds its tiles (table.cuh), where rows and keys lie (pages.cuh),
// and what becomes of pieces of tiles (pieces.cuh), are those of forward/sm90_ragged.

<% include "lib/cuda/attention/types.cuh" %>
<% include "lib/cuda/attention/abi.cuh" %>
<% include "lib/cuda/attention/kv_elements.cuh" %>
<% include "lib/cuda/attention/ragged.cuh" %>

// Problem.
using Element = @{ kv_element }@;  // of K and V
using OutputElement = @{ output }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kMaskLeft = @{ mask_left }@;
constexpr bool kMaskRight = @{ mask_right }@;
// Scales are those of heads.
#define FT_SCALES_OF_QUERIES 0
#define FT_SCALES_OF_KEYS 0
#define FT_SCALES_OF_CHANNELS 0
constexpr bool kForeignRows = true;  // whether rows of K and V behind a sequence's last are those of another
// Schedule.
constexpr int kConsumers = @{ consumers }@;
constexpr int kBlockKV = @{ block_kv }@;
constexpr int kStages = @{ stages }@;
constexpr int kRawStages = @{ raw_stages }@;
constexpr bool kOverlap = @{ overlap }@;
constexpr bool kTakeTurns = @{ take_turns }@;
constexpr int kPart = @{ part }@;  // columns of V whose product is in registers at once
constexpr int kBlocksPerSM = @{ blocks_per_sm }@;
constexpr int kProducerRegisters = @{ producer_registers }@;
constexpr int kConsumerRegisters = @{ consumer_registers }@;
constexpr bool kPackGroup = @{ pack_group }@;  // heads of a KV head share tiles, where they are a power of two
// What depends on how sequences lie in memory.
constexpr int kEntries = @{ table_entries }@;  // of the tile table
constexpr int kBytesTable = @{ table_bytes }@;
constexpr bool kSplits = true;                 // whether tiles are cut into pieces (table.cuh)

<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/mbarrier.cuh" %>
<% include "lib/cuda/ptx/pipeline.cuh" %>
<% include "lib/cuda/ptx/named_barrier.cuh" %>
<% include "lib/cuda/ptx/registers.cuh" %>
<% include "lib/cuda/ptx/tma.cuh" %>
<% include "lib/cuda/ptx/dependent_launch.cuh" %>
<% include "lib/cuda/ptx/ldmatrix.cuh" %>
<% include "lib/cuda/ptx/wgmma.cuh" %>
<% include "lib/cuda/ptx/convert_fp8.cuh" %>
<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/ptx/warp.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
<% include "lib/cuda/score/program.cuh" %>
<% include "lib/cuda/score/sink.cuh" %>
<% include "lib/cuda/attention/far.cuh" %>
<% include "forward/sm90_ragged/tiles.cuh" %>
<% include "forward/sm90_ragged/visits.cuh" %>

using KernelArgs = WithSide<Sm90Args>;

<% include "forward/sm90_fp8/constants.cuh" %>

<% include "lib/cuda/attention/e4m3_scales.cuh" %>
<% include "lib/cuda/attention/output_fp8.cuh" %>
constexpr bool kScoresByStep = !kIsE4m3<Element>;  // whether matrix steps of Q K^T are added in fp32
constexpr int kBytesSlot = round_up(int(sizeof(WorkTile)) + 36, 16);
constexpr int kBytesBehind = kBytesTable + round_up(kStages * 4, 16);  // and of each stage of K its keys of no page
<% include "forward/sm90_fp8/layout.cuh" %>
<% include "forward/sm90_ragged/table.cuh" %>
<% include "forward/sm90_fp8_ragged/scheduler.cuh" %>
<% include "forward/sm90_ragged/operands.cuh" %>
<% include "forward/sm90_ragged/pages.cuh" %>
<% include "forward/sm90_fp8_ragged/operands.cuh" %>
<% include "forward/sm90_fp8_ragged/loader.cuh" %>
<% include "forward/sm90_fp8/transpose.cuh" %>
<% include "forward/sm90_fp8/softmax.cuh" %>
<% include "forward/sm90_ragged/pieces.cuh" %>
<% include "forward/sm90_fp8_ragged/merged.cuh" %>
<% include "forward/sm90_fp8/consumer.cuh" %>

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
@{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(1024) u8 shared_memory[];
    const u32 smem = smem_address(shared_memory);
    const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32 % 4);
<% include "forward/sm90_fp8/barriers.cuh" %>
    wait_for_launch_before();
    let_next_launch_begin();
    TileTable::build(args, smem);
    // The host starts as many thread blocks as there may be tiles.
    if (blockIdx.x >= FT_TILES(args, smem)) return;
    if (warpgroup == 0) {
        registers_give_back<kProducerRegisters>();
        if (warp > 0) {
            transpose_v(args, smem, warp - 1);
        } else {
            load(args, smem);
        }
    } else {
        registers_take<kConsumerRegisters>();
        Consumer(args, smem, warpgroup - 1).run();
    }
}
