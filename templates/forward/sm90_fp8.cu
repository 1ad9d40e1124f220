/* @{ header }@ */

// Exact attention on e4m3 for Hopper, tiled, in one pass: FlashAttention-3's FP8 (section 3.3) with sums of P V in two
// levels. The tensor cores add with some 13 bits, so that they sum one block of keys at most, from zero, and fp32
// registers sum the blocks: O = O * alpha + P V is one multiply-add where one product was needed anyway.
//
// FP8 products want both operands by rows. Three warps of the producer write V transposed, its keys in the order in
// which the accumulators of the scores lie, so that P becomes an operand without a shuffle.

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
constexpr bool kForeignRows = false;   // whether rows of K and V behind a sequence's last are those of another
constexpr bool kScoresByStep = false;  // whether matrix steps of Q K^T are added in fp32
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

<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/mbarrier.cuh" %>
<% include "lib/cuda/ptx/pipeline.cuh" %>
<% include "lib/cuda/ptx/named_barrier.cuh" %>
<% include "lib/cuda/ptx/registers.cuh" %>
<% include "lib/cuda/ptx/tma.cuh" %>
<% include "lib/cuda/ptx/ldmatrix.cuh" %>
<% include "lib/cuda/ptx/wgmma.cuh" %>
<% include "lib/cuda/ptx/convert_fp8.cuh" %>
<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/ptx/warp.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
<% include "lib/cuda/score/program.cuh" %>
<% include "lib/cuda/score/sink.cuh" %>
<% include "lib/cuda/attention/far.cuh" %>
<% include "forward/sm90/tiles.cuh" %>

using KernelArgs = WithSide<Sm90Args>;

<% include "forward/sm90_fp8/constants.cuh" %>

<% include "lib/cuda/attention/descale.cuh" %>
<% include "lib/cuda/attention/e4m3_scales.cuh" %>
<% include "lib/cuda/attention/output_fp8.cuh" %>
constexpr int kBytesSlot = kProgramMask ? 32 : 16;
constexpr int kBytesBehind = FT_SCALES_OF_KEYS ? kStages * kBlockKV * 4 : 0;
<% include "forward/sm90_fp8/layout.cuh" %>
<% include "forward/sm90_fp8/scheduler.cuh" %>
<% include "forward/sm90_fp8/operands.cuh" %>
<% include "forward/sm90_fp8/loader.cuh" %>
<% include "forward/sm90_fp8/transpose.cuh" %>
<% include "forward/sm90_fp8/softmax.cuh" %>
<% include "forward/sm90_fp8/consumer.cuh" %>

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
@{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(1024) u8 shared_memory[];
    const u32 smem = smem_address(shared_memory);
    const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32 % 4);
<% include "forward/sm90_fp8/barriers.cuh" %>
    __syncthreads();
    if (warpgroup == 0) {
        registers_give_back<kProducerRegisters>();
        if (warp > 0) {
            transpose_v(args, smem, warp - 1);
        } else if (kLoadsByWarp || threadIdx.x == 0) {
            load(args, smem);
        }
    } else {
        registers_take<kConsumerRegisters>();
        Consumer(args, smem, warpgroup - 1).run();
    }
}
