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

constexpr int kThreads = (kConsumers + 1) * 128;
static_assert(kThreads == @{ threads }@, "the threads that the host launches");
constexpr int kBlockQ = kConsumers * 64;
constexpr int kChunksQK = div_up(kHeadDimQK, 128);  // 128-byte columns of a row: one TMA box each
constexpr int kChunksV = div_up(kHeadDimV, 128);
constexpr int kColumnsV = round_up(kHeadDimV, 16);
constexpr int kStepsQK = div_up(kHeadDimQK, 32);    // matrix steps of Q K^T
constexpr int kStepsPV = kBlockKV / 32;             // matrix steps of P V
constexpr int kBytes64Rows = 64 * 128;              // one chunk of 64 rows
constexpr int kBytesChunk = kBlockKV * 128;         // one chunk of kBlockKV rows
constexpr int kBytesKeys = kColumnsV * 128;         // transposed V: 128 keys of each column
constexpr int kParts = div_up(kColumnsV, kPart);
__device__ constexpr int columns_of_part(int part) { return min_of(kPart, kColumnsV - part * kPart); }
constexpr int kTransposers = 3;                     // warps of the producer
// Padded rows of V are zeros, so only blocks cut by the mask can hold elements that must not be multiplied.
constexpr bool kMasks = kMaskLeft || kMaskRight || kProgramMask;
// Whether blocks before those in sight of every row may need a mask.
constexpr bool kMaskedFirst = kMaskLeft || (kProgramMask && !kProgramFromFirst);
// A program may make all scores of a row -inf. The row then counts as one that attends to nothing, whatever V holds;
// but not beside a sink, whose sum is not empty.
constexpr bool kMarkEmpty = @{ mark_empty }@;
// Caps come as a polynomial, in units of log2 (program_capped), where one factor is that of all rows.
constexpr bool kCapped = kProgramCapped && !FT_SCALES_OF_QUERIES;
// Who loads is a warp where its lanes bring scales of keys, or find the key blocks of a tile by a program's mask.
constexpr bool kLoadsByWarp = FT_SCALES_OF_KEYS || kProgramMask;

// Probabilities are 2^8 at most, so that those down to 2^-17 of the largest are e4m3 numbers above zero.
constexpr float kProbabilityLog2 = 8.0f;

using Scores = float[kBlockKV / 2];
using Output = float[kColumnsV / 2];
using Probabilities = u32[kBlockKV / 8];
using Pairs = u16[kBlockKV / 4];
template <int kAt> using Part = float[columns_of_part(kAt) / 2];
using ScoreProduct = wgmma<e4m3, kBlockKV>;
template <int kAt> using PartProduct = wgmma<e4m3, columns_of_part(kAt)>;

<% include "lib/cuda/attention/descale.cuh" %>
<% include "lib/cuda/attention/output_fp8.cuh" %>
<% include "forward/sm90_fp8/layout.cuh" %>
<% include "forward/sm90_fp8/scheduler.cuh" %>
<% include "forward/sm90_fp8/producer.cuh" %>
<% include "forward/sm90_fp8/softmax.cuh" %>
<% include "forward/sm90_fp8/consumer.cuh" %>

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
@{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(1024) u8 shared_memory[];
    const u32 smem = smem_address(shared_memory);
    const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32 % 4);
    if (threadIdx.x == 0) {
        for (int c = 0; c < kConsumers; c++) QPipeline::init(smem, c, 1, 4);
        for (int s = 0; s < kStages; s++) {
            KPipeline::init(smem, s, FT_SCALES_OF_KEYS ? 2 : 1, kConsumers * 4);
            VPipeline::init(smem, s, kTransposers, kConsumers * 4);
        }
        for (int s = 0; s < kRawStages; s++) RawPipeline::init(smem, s, 1, kTransposers);
        store_shared_4(Layout::met_nan_at(smem), 0);
        for (int s = 0; s < 2; s++) WorkPipeline::init(smem, s, 1, kTransposers + kConsumers * 4);
        mbarrier_init_fence();
    }
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
