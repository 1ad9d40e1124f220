// Shared memory of a thread block, the rings of buffers in it, and the barriers that order those who use them.
//
// Roles: warpgroup 0 is the producer, the others are consumers of 64 query rows each.
//   producer, warp 0        one thread takes tiles, and loads Q, K and V as it lies in memory (TMA); where keys have
//                           scales, all lanes bring those of a block beside K, and where a program masks, they find
//                           which blocks a tile visits; of ragged batches each lane loads a box of K and V
//             warps 1 to 3  write V transposed
//   consumer c              scores, softmax, output
//
// Barrier     per     arrives                               arrivals         waits
// kFullWork   slot    loader: the slot holds the next tile  1                transposers, consumers
// kEmptyWork  slot    warps that have read it               3 + 4 consumers  loader
// kFullQ      c       TMA                                   1 + bytes        consumer c
// kEmptyQ     c       warps of consumer c: last scores      4                loader
// kFullK      stage   TMA, and with scales of keys warp 0   1 + bytes, 1     consumers
// kEmptyK     stage   warps of all consumers                4 consumers      loader
// kFullRaw    stage   TMA: V as it lies in memory           1 + bytes        transposers
// kEmptyRaw   stage   transposers: they have read it        3                loader
// kFullV      stage   transposers: V by columns             3                consumers
// kEmptyV     stage   warps of all consumers                4 consumers      transposers
// kTurn       c       consumer c and the one before, named  256              consumer c

// By byte offset.
struct Layout {
    static constexpr int kQ = 0;
    static constexpr int kBytesQ = kChunksQK * kBytes64Rows;  // of one consumer
    static constexpr int kK = kQ + kConsumers * kBytesQ;
    static constexpr int kBytesK = kChunksQK * kBytesChunk;   // of one stage, as what follows
    static constexpr int kRaw = kK + kStages * kBytesK;
    static constexpr int kBytesRaw = kChunksV * kBytesChunk;
    static constexpr int kV = kRaw + kRawStages * kBytesRaw;
    static constexpr int kBytesV = div_up(kBlockKV, 128) * kBytesKeys;
    static constexpr int kWork = kV + kStages * kBytesV;      // two slots (scheduler.cuh)
    static constexpr int kBytesWork = kBytesSlot;
    static constexpr int kFullWork = kWork + 2 * kBytesWork;
    static constexpr int kEmptyWork = kFullWork + 2 * 8;
    static constexpr int kFullQ = kEmptyWork + 2 * 8;
    static constexpr int kEmptyQ = kFullQ + kConsumers * 8;
    static constexpr int kFullK = kEmptyQ + kConsumers * 8;
    static constexpr int kEmptyK = kFullK + kStages * 8;
    static constexpr int kFullRaw = kEmptyK + kStages * 8;
    static constexpr int kEmptyRaw = kFullRaw + kRawStages * 8;
    static constexpr int kFullV = kEmptyRaw + kRawStages * 8;
    static constexpr int kEmptyV = kFullV + kStages * 8;
    static constexpr int kMetNonFinite = kEmptyV + kStages * 8;     // whether masked blocks of V had any
    // Behind all of that: of dense tensors scales of keys, those of each stage of K; of ragged batches the tile table.
    static constexpr int kBehind = round_up(kMetNonFinite + 8, 16);
    static constexpr int kTable = kBehind;
    static constexpr int kBytes = kBytesBehind > 0 ? kBehind + kBytesBehind : kMetNonFinite + 8;
    // Those that a thread of a product needs lie side by side (consumer.cuh).
    static __device__ __forceinline__ u32 key_scales_at(u32 smem, int stage) {
        return smem + kBehind + stage * kBlockKV * 4;
    }
    static __device__ __forceinline__ u32 table_at(u32 smem) { return smem + kTable; }
    static __device__ __forceinline__ u32 met_non_finite_at(u32 smem) { return smem + kMetNonFinite; }
};
static_assert(Layout::kBytes == @{ smem_bytes }@, "the shared memory that the host asks for");

// The rings in it.
using QPipeline = Pipeline<1, Layout::kFullQ, Layout::kEmptyQ, Layout::kQ, Layout::kBytesQ, kConsumers>;
using KPipeline = Pipeline<kStages, Layout::kFullK, Layout::kEmptyK, Layout::kK, Layout::kBytesK>;
using RawPipeline = Pipeline<kRawStages, Layout::kFullRaw, Layout::kEmptyRaw, Layout::kRaw, Layout::kBytesRaw>;
using VPipeline = Pipeline<kStages, Layout::kFullV, Layout::kEmptyV, Layout::kV, Layout::kBytesV>;
using WorkPipeline = Pipeline<2, Layout::kFullWork, Layout::kEmptyWork, Layout::kWork, Layout::kBytesWork>;

// Named barriers. 0 is that of the whole block, __syncthreads().
enum NamedBarrier : int {
    kTurn = 1,                        // + consumer: its turn to issue products
    kWarpgroup = kTurn + kConsumers,  // + consumer: its four warps
};
