/* @{ header }@ */

// Exact attention, tiled, in one pass, for Hopper (FlashAttention-3, section 3): a producer warpgroup loads Q, K and V
// by TMA, consumer warpgroups of 64 query rows each keep scores, probabilities and outputs in registers. With kOverlap
// the scores of one key block are computed while the product of the previous one with V still runs.

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
#define FT_LISTS @{ program_lists }@
constexpr bool kLists = FT_LISTS;  // tiles visit key blocks by lists, as a score program's mask may leave any of them
#define FT_DENSE @{ program_dense }@  // of which a tensor of bools by query and key is a part
#define FT_RUNS @{ program_runs }@
constexpr bool kRuns = FT_RUNS;    // the runs of keys that it leaves the rows lie in memory
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

<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/mbarrier.cuh" %>
<% include "lib/cuda/ptx/pipeline.cuh" %>
<% include "lib/cuda/ptx/named_barrier.cuh" %>
<% include "lib/cuda/ptx/registers.cuh" %>
<% include "lib/cuda/ptx/tma.cuh" %>
<% include "lib/cuda/ptx/ldmatrix.cuh" %>
<% include "lib/cuda/ptx/mma.cuh" %>
<% include "lib/cuda/ptx/wgmma.cuh" %>
<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/ptx/warp.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
<% include "lib/cuda/attention/non_finite.cuh" %>
#if FT_RESIDUAL
<% include "lib/cuda/attention/residual.cuh" %>
#endif
#if FT_DROPOUT
<% include "lib/cuda/attention/dropout.cuh" %>
#endif
<% include "lib/cuda/score/program.cuh" %>
<% include "lib/cuda/score/sink.cuh" %>
<% include "lib/cuda/attention/far.cuh" %>
<% include "forward/sm90/softmax.cuh" %>
<% include "forward/sm90/tiles.cuh" %>

using KernelArgs = WithSide<Sm90Args>;

constexpr int kThreads = (kConsumers + 1 + kDrawers) * 128;
static_assert(kThreads == @{ threads }@, "the threads that the host launches");
constexpr int kBlockQ = kConsumers * 64;
constexpr bool kRegistersMove = kProducerRegisters != kConsumerRegisters;
constexpr int kChunksQK = div_up(kHeadDimQK, 64);  // 64-element columns of a row: one TMA box each
constexpr int kChunksV = div_up(kHeadDimV, 64);
constexpr int kColumnsV = round_up(kHeadDimV, 16);
constexpr int kStepsQK = div_up(kHeadDimQK, 16);   // matrix steps of Q K^T
constexpr int kStepsPV = kBlockKV / 16;            // matrix steps of P V
constexpr int kBytes64Rows = 64 * 128;             // one chunk of 64 rows
constexpr int kBytesChunk = kBlockKV * 128;        // one chunk of kBlockKV rows
// Padded rows of V are zeros, so only blocks cut by the mask can hold elements that must not be multiplied.
constexpr bool kClean = kMaskLeft || kMaskRight || kProgramMask;
// Whether blocks before those in sight of every row may need a mask.
constexpr bool kMaskedFirst = (kMaskLeft || (kProgramMask && !kProgramFromFirst)) && !kLists;
// Helpers: warps of the producer that look through masked blocks of V. One of two also loads V, but not where quick
// compilation counts; where another warp loads biases, one does all.
constexpr bool kHelpsApart = kQuick && kBiasStages == 0;
constexpr int kHelpers = kQuick || kBiasStages > 0 ? 1 : 2;

// What of a step is done where (codegen: family/forward_sm90/softmax.rs). With overlap, the factors of O are applied
// beside the next scores instead of among the exponentials.
constexpr bool kRescaleBeside = @{ rescale_beside }@;
// The order of a thread's two rows, and that in steps of masked blocks.
constexpr RowOrder kRowOrder = @{ row_order }@;
constexpr RowOrder kMaskedRowOrder = @{ masked_row_order }@;
// Whether the next K and V have arrived is asked while there is other work.
constexpr bool kLookAhead = @{ look_ahead }@;
// When a consumer reads which scores are kept: while it waits for the scores, or for P V of the block before, or as P
// is rounded.
enum ReadBits { kBesideScores, kBesideOutput, kWithP };
constexpr ReadBits kReadBits = @{ read_bits }@;
// Of the four calls of Philox that a lane has under way, how many multiply on the FP64 unit.
constexpr int kDoubleCalls = @{ double_calls }@;
// Of a masked V that is looked through, how many reads of a thread are in flight.
constexpr int kScanTogether = @{ scan_together }@;

// Where a program caps the scores at a number of which it says how large it may be, no maximum is needed and nothing is
// ever rescaled: probabilities are relative to a reference from which both the largest and the least that a row can
// have stay within the exponents of fp32 and bf16, with room for sums of many keys and for V on one side, and for V on
// the other. (f16 has too few exponents.)
constexpr float kCapLog2 = kCapBound * kLog2E;
constexpr int kReference = kCapLog2 > 40.0f ? int(kCapLog2) - 39 : 0;
constexpr bool kBounded = !FT_RESIDUAL && kProgramCapped && kExponentMask<Element> == kExponentMask<bf16> &&
                          kCapLog2 + kReference <= 106.0f;

// Whether the mask is evaluated with the scores; else it comes as bits, or by the ends of runs.
constexpr bool kMaskScores = !kProgramRows && !kLists;

// Whether key blocks arrive that a consumer does not visit.
constexpr bool kSkips = kTrim;

// What a program reads along the keys is asked for before the scores are waited for.
constexpr bool kReadAhead = kScoreReads > 0;

// Biases that TMA loads, a tile of each for the rows of a consumer and a block of keys.
constexpr int kBiases = kBiasStages > 0 ? kScoreBiases : 0;
constexpr int kChunksBias = kBlockKV / 64;
constexpr int kBytesBias = kChunksBias * kBytes64Rows;

// A program may make all scores of a row -inf. The row then counts as one that attends to nothing, whatever V holds;
// but not beside a sink, whose sum is not empty.
constexpr bool kMarkEmpty = @{ mark_empty }@;

// Of a quick kernel a product is one statement, waited for at its end.
constexpr bool kWholeOutput = kQuick;

using Scores = float[kBlockKV / 2];
using Output = float[kColumnsV / 2];
using Probabilities = u32[kBlockKV / 4];
using ScoreProduct = wgmma<Element, kBlockKV>;
using OutputProduct = wgmma<Element, kColumnsV>;

// Where a tile's O leaves from: a place of its own, that of its Q or, of thread blocks that stay and have one buffer of
// Q, that of V, so that the next Q need not wait for it.
constexpr bool kOutputInV = kPersistent && !kChain && !kOutputApart &&
                            kConsumers * kChunksV * kBytes64Rows <= kStages * kChunksV * kBytesChunk;
// The place of Q is free as soon as its last scores are there.
constexpr bool kQLeavesEarly = kOutputInV || kOutputApart;

// Whether masked blocks of V are multiplied as they come, until it shows in a tile's O, which is then computed again
// (recompute.cuh): where V comes last of all, behind O, and would be waited for while it is looked through.
constexpr bool kOptimistic = kClean && kOutputInV && kHelpers == 2;

// Whether O of a tile is written before the next one is known: without a chain nothing of it is wanted, and beside the
// bounds of windows two tiles take more registers than wide heads leave.
constexpr bool kWriteFirst = kOptimistic && kMaskLeft;

<% include "forward/sm90/layout.cuh" %>

<% include "forward/sm90/mask_units.cuh" %>
<% include "forward/sm90/lists.cuh" %>
<% include "forward/sm90/ranges.cuh" %>
<% include "forward/sm90/recompute.cuh" %>
<% include "forward/sm90/scheduler.cuh" %>

<% include "forward/sm90/bias.cuh" %>
<% include "forward/sm90/producer.cuh" %>
#if FT_DRAWERS
<% include "forward/sm90/drawer.cuh" %>
#endif
<% include "forward/sm90/masks.cuh" %>
<% include "forward/sm90/epilogue.cuh" %>
<% include "forward/sm90/steps.cuh" %>
<% include "forward/sm90/arrivals.cuh" %>
<% include "forward/sm90/consumer.cuh" %>

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
@{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(1024) u8 shared_memory[];
    const u32 smem = smem_address(shared_memory);
    const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32 % 4);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Layout::kQBuffers * kConsumers; i++) QPipeline::init(smem, i, 1, kQLeavesEarly ? 4 : 1);
        for (int i = 0; i < 2; i++) {
            const int warps = (kClean || kBiases > 0 ? 2 : 1) + (kConsumers + kDrawers) * 4;
            WorkPipeline::init(smem, i, 1, 1 + warps * (kOptimistic ? 32 : 1));
        }
        for (int s = 0; s < kStages; s++) {
            KPipeline::init(smem, s, 1, kConsumers * 4);
            VPipeline::init(smem, s, kClean ? kHelpers : 1, kConsumers * 4);
            mbarrier_init(VPipeline::raw_at(smem, s), 1);
        }
#if FT_DRAWERS
        for (int s = 0; s < kBitStages; s++) BitPipeline::init(smem, s, 4 * kDrawers, 4 * kConsumers);
#endif
        mbarrier_init(Layout::admit_v_at(smem), kConsumers);
        mbarrier_init(Layout::ask_work_at(smem), 1);
        store_shared_4(Layout::met_non_finite_at(smem), 0);
        if (kOptimistic) {
            store_shared_4(Layout::found_at(smem), 0);
            mbarrier_init(Layout::tiles_done_at(smem), kConsumers * 4);
            for (int place = 0; place < kPlaces; place++) store_shared_4(Layout::placed_at(smem, place), blockIdx.x);
        }
        for (int i = 0; i < (kBiases > 0 ? kBiasStages * kConsumers : 0); i++) {
            BiasPipeline::init(smem, i, copies_biases(args) ? 1 + 32 : 1, copies_biases(args) ? 128 : 4);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    // Of a quick kernel all roles have the same tile, computed in one place.
    Work only = {};
    if constexpr (kQuick) only = work_at(args, blockIdx.x);
    if (warpgroup == 0) {
        if constexpr (kRegistersMove) registers_give_back<kProducerRegisters>();
        if (warp == 0) {
            if (threadIdx.x % 32 == 0) load_qk(args, smem, only);
        } else if (warp == 1) {
            if (threadIdx.x % 32 == 0) schedule_tiles(args, smem);
        } else if (kBiases > 0 && warp == 2) {
            if (copies_biases(args)) {
                load_biases<true>(args, smem, only);
            } else if (threadIdx.x % 32 == 0) {
                load_biases<false>(args, smem, only);
            }
        } else if (kHelpsApart && warp == 2) {
            if (threadIdx.x % 32 == 0) load_v<true, false>(args, smem, only, 0);
        } else if (kHelpsApart) {
            if (kClean) load_v<false, true>(args, smem, only, 0);
        } else if (kClean || threadIdx.x % 128 == 128 - kHelpers * 32) {
            load_v<true, kClean>(args, smem, only, warp - 4 + kHelpers);
        }
#if FT_DRAWERS
    } else if (warpgroup > kConsumers) {
        if constexpr (kRegistersMove) registers_give_back<kDrawerRegisters>();
        draw_bits(args, smem, first_work(args, only), warpgroup - kConsumers - 1);
#endif
    } else {
        if constexpr (kRegistersMove) registers_take<kConsumerRegisters>();
        Consumer(args, smem, warpgroup - 1).run(only);
    }
}
