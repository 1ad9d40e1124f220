// What follows from problem and schedule.

constexpr int kThreads = (kConsumers + 1) * 128;
static_assert(kThreads == @{ threads }@, "the threads that the host launches");
constexpr int kBlockQ = kConsumers * 64;
constexpr int kChunkColumns = 128;                  // of 128 bytes of a row: one TMA box each
constexpr int kChunksQK = div_up(kHeadDimQK, kChunkColumns);
constexpr int kChunksV = div_up(kHeadDimV, kChunkColumns);
constexpr int kColumnsV = round_up(kHeadDimV, 16);
constexpr int kStepsQK = div_up(kHeadDimQK, 32);    // matrix steps of Q K^T
constexpr int kStepsPV = kBlockKV / 32;             // matrix steps of P V
constexpr int kBytes64Rows = 64 * 128;              // one chunk of 64 rows
constexpr int kBytesChunk = kBlockKV * 128;         // one chunk of kBlockKV rows
constexpr int kBytesKeys = kColumnsV * 128;         // transposed V: 128 keys of each column
constexpr int kParts = div_up(kColumnsV, kPart);
__device__ constexpr int columns_of_part(int part) { return min_of(kPart, kColumnsV - part * kPart); }
constexpr int kTransposers = 3;                     // warps of the producer
// Behind a sequence's last row of V lie zeros, or rows that are not its own: in the first case only blocks cut by the
// mask can hold elements that must not be multiplied.
constexpr bool kMasks = kForeignRows || kMaskLeft || kMaskRight || kProgramMask;
// Whether blocks before those in sight of every row may need a mask.
constexpr bool kMaskedFirst = kMaskLeft || (kProgramMask && !kProgramFromFirst);
// A program may make all scores of a row -inf. The row then counts as one that attends to nothing, whatever V holds;
// but not beside a sink, whose sum is not empty.
constexpr bool kMarkEmpty = @{ mark_empty }@;
// Caps come as a polynomial, in units of log2 (program_capped), where one factor is that of all rows.
constexpr bool kCapped = kProgramCapped && !FT_SCALES_OF_QUERIES;

// Probabilities are 2^8 at most, so that those down to 2^-17 of the largest are e4m3 numbers above zero.
constexpr float kProbabilityLog2 = 8.0f;

using Scores = float[kBlockKV / 2];
using Output = float[kColumnsV / 2];
using Probabilities = u32[kBlockKV / 8];
using Pairs = u16[kBlockKV / 4];
template <int kAt> using Part = float[columns_of_part(kAt) / 2];
using ScoreProduct = wgmma<e4m3, kBlockKV>;
template <int kAt> using PartProduct = wgmma<e4m3, columns_of_part(kAt)>;
