// Follows the constants of forward/sm90.cu, whose fixes belong here too. Apart, since the machine code of 20 of 40
// dense kernels changed when both families shared this text.
//
// What follows from problem and schedule.

using KernelArgs = WithSide<Sm90Args>;

constexpr int kThreads = (kConsumers + 1 + kDrawers) * 128;
static_assert(kThreads == @{ threads }@, "the threads that the host launches");
constexpr int kBlockQ = kConsumers * 64;
constexpr bool kRegistersMove = kProducerRegisters != kConsumerRegisters;
constexpr int kChunkColumns = 64;                  // of 128 bytes of a row: one TMA box each
constexpr int kChunksQK = div_up(kHeadDimQK, kChunkColumns);
constexpr int kChunksV = div_up(kHeadDimV, kChunkColumns);
constexpr int kColumnsV = round_up(kHeadDimV, 16);
constexpr int kStepsQK = div_up(kHeadDimQK, 16);   // matrix steps of Q K^T
constexpr int kStepsPV = kBlockKV / 16;            // matrix steps of P V
constexpr int kBytes64Rows = 64 * 128;             // one chunk of 64 rows
constexpr int kBytesChunk = kBlockKV * 128;        // one chunk of kBlockKV rows
// Rows of V behind a sequence's last are zeros, or those of another sequence. In the first case only blocks cut by the
// mask can hold elements that must not be multiplied.
constexpr bool kClean = kForeignRows || kMaskLeft || kMaskRight || kProgramMask;
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

// Whether tiles are cut into pieces (table.cuh): not with a chain, beside whose two tiles the merge of pieces spills.
constexpr bool kSplits = !kChain;

// Whether O of a tile is written before the next one is known: without a chain nothing of it is wanted, and beside the
// bounds of windows two tiles take more registers than wide heads leave.
constexpr bool kWriteFirst = kOptimistic && kMaskLeft;
