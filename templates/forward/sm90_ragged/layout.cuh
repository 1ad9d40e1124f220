// Follows forward/sm90/layout.cuh, whose fixes belong here too. Apart, since the machine code of 20 of 40 dense kernels
// changed when both families shared this text.
//
// Shared memory of a thread block, the rings of buffers in it, and the barriers that order those who use them.
//
// Roles: warpgroup 0 is the producer, the others are consumers of 64 query rows each.
//   producer, warp 0          loads Q and K (TMA)
//             warp 1          one thread is the tile scheduler
//             warps 2 and 3   load V, take non-finite elements out of masked blocks, load biases (sm90.cu)
//   consumer c                scores, softmax, output
//
// Barrier        per             arrives                           arrivals            waits
// kFullWork      slot            tile scheduler                    1                   everyone but the scheduler
// kEmptyWork     slot            readers of the slot, by warps     warps (x 32)        tile scheduler
// kAskWork       -               loader of Q and K                 1                   tile scheduler
// kFullQ         buffer, c       TMA                               1 + bytes           consumer c
// kEmptyQ        buffer, c       consumer c: its scores are there  4 (O apart, in V)   loader of Q
//                                or, with O in Q's place, O left   1
// kFullK         stage           TMA                               1 + bytes           consumers
// kEmptyK        stage           warps of all consumers            4 x kConsumers      loader of K
// kFullV         stage           TMA or, of a raw block, helpers   1 or kHelpers       consumers
// kRawV          stage           TMA: a masked block               1 + bytes           helpers
// kEmptyV        stage           warps of all consumers            4 x kConsumers      loader of V
// kAdmitV        -               consumers: O left V's place       kConsumers          loader of V, once per tile
// kFullBias      stage, c        TMA; threads that copy            1 + bytes (+ 32)    consumer c
// kEmptyBias     stage, c        warps or, beside copies, threads  4 or 128            loader of biases
// kFullBits      stage           warps of the drawers              4 x kDrawers        consumers
// kEmptyBits     stage           warps of all consumers            4 x kConsumers      drawers
// kTilesDone     -               warps of all consumers            4 x kConsumers      everyone, before a second pass
// kTurn          c, named        consumer c and the one before     256                 consumer c
// kWarpgroup     c, named        consumer c                        128                 consumer c
// kAllConsumers  named           consumers                         128 x kConsumers    all consumers
//
// One tile of three key blocks, two stages, with kOverlap; time goes to the right, n counts blocks down:
//
//   load Q, K       K2 Q  K1   ask   K0 .                 next tile's K, Q
//   scheduler                   |--> next tile --> slot full
//   load V          V2    V1        . V0                  next tile's V
//   consumer 0      QK2 . softmax2 | QK1 PV2 | softmax1 | QK0 PV1 | softmax0 | PV0 . O
//   consumer 1           . QK2 . softmax2    | QK1 PV2  | softmax1 | QK0 PV1 | softmax0 | PV0 . O
//                                  turn: 0 -> 1 -> 0 -> 1 ...: one's products run beside the other's softmax
//   released                 K2          K1, V2           K0, V1          V0 (Q: after QK0 or O)
//
// A dot is a wait: K0 for the release of K2, V0 for that of V2, O's TMA store for all four warps. With kChain PV0 runs
// beside QK2 of the next tile.

// By byte offset.
struct Layout {
    static constexpr int kQBuffers = kChain ? 2 : 1;
    static constexpr int kQ = 0;
    static constexpr int kBytesQ = max_of(kChunksQK, kChunksV) * kBytes64Rows;  // of one consumer, one buffer
    static constexpr int kK = kQ + kQBuffers * kConsumers * kBytesQ;
    static constexpr int kBytesK = kChunksQK * kBytesChunk;                     // of one stage
    static constexpr int kV = kK + kStages * kBytesK;
    static constexpr int kBytesV = kChunksV * kBytesChunk;
    static constexpr int kBias = kV + kStages * kBytesV;
    static constexpr int kBytesBiases = kBiases * kBytesBias;                   // of one stage, one consumer
    static constexpr int kO = kBias + (kBiases > 0 ? kBiasStages * kConsumers : 0) * kBytesBiases;
    static constexpr int kBytesO = kChunksV * kBytes64Rows;  // of one consumer
    static constexpr int kBits = kO + (kOutputApart ? kConsumers * kBytesO : 0);
    static constexpr int kBytesBits = kDrawers > 0 ? kBlockQ * div_up(kBlockKV, 32) * 4 : 0;  // of one stage
    static constexpr int kGroups = kBits + kBitStages * kBytesBits;  // of Philox, per warp of the drawers
    static constexpr int kBytesGroups = kDrawers * 4 * div_up(kBlockKV, 32) * 4 * 16;
    static constexpr int kWork = kGroups + kBytesGroups;  // two slots: the next tile
    static constexpr int kBytesWork = round_up(int(sizeof(WorkTile)) + 44, 16);  // of Work
    static constexpr int kBytesSlot = kBytesWork + (kTrim ? kConsumers * 16 : 0);
    static constexpr int kFirst = kWork + 2 * kBytesSlot;    // a slot of the first tile
    // Per ring slot (recompute.cuh): its tile, and which piece it is.
    static constexpr int kKept = kFirst + kBytesSlot;
    static constexpr int kBytesKept = round_up(int(sizeof(WorkTile)), 16) + 16;
    static constexpr int kBarriers = kKept + 4 * kBytesKept;
    static constexpr int kFullWork = kBarriers;              // per slot: it holds the next tile
    static constexpr int kEmptyWork = kFullWork + 2 * 8;     // per slot: every role has read it
    static constexpr int kFullQ = kEmptyWork + 2 * 8;        // per buffer and consumer: its Q has arrived
    static constexpr int kEmptyQ = kFullQ + kQBuffers * kConsumers * 8;  // per buffer and consumer: the space is free
    static constexpr int kFullK = kEmptyQ + kQBuffers * kConsumers * 8;  // per stage, as all that follow
    static constexpr int kEmptyK = kFullK + kStages * 8;
    static constexpr int kFullV = kEmptyK + kStages * 8;
    static constexpr int kEmptyV = kFullV + kStages * 8;
    static constexpr int kRawV = kEmptyV + kStages * 8;      // a masked block has arrived, not looked through yet
    static constexpr int kMetNonFinite = kRawV + kStages * 8;
    static constexpr int kFound = kMetNonFinite + 4;         // which tiles must be computed again
    static constexpr int kAdmitV = kMetNonFinite + 8;        // O has left the buffers of V
    static constexpr int kAskWork = kAdmitV + 8;             // the next tile is wanted
    static constexpr int kFullBias = kAskWork + 8;           // per stage and consumer, as is the next
    static constexpr int kEmptyBias = kFullBias + (kBiases > 0 ? kBiasStages * kConsumers * 8 : 0);
    static constexpr int kFullBits = kEmptyBias + (kBiases > 0 ? kBiasStages * kConsumers * 8 : 0);
    static constexpr int kEmptyBits = kFullBits + (kDrawers > 0 ? kBitStages * 8 : 0);
    static constexpr int kEmptyRows = kEmptyBits + (kDrawers > 0 ? kBitStages * 8 : 0);  // per consumer
    static constexpr int kBytesEmptyRows = kMarkEmpty ? 32 : 0;
    static constexpr int kTilesDone = kEmptyRows + kConsumers * kBytesEmptyRows;  // all scheduled tiles are done
    static constexpr int kPlaced = kTilesDone + 8;           // per ring slot (recompute.cuh): index of its tile
    static constexpr int kTable = kTilesDone + (kOptimistic ? 8 + 4 * 4 : 0);  // of the tiles of each sequence
    static constexpr int kWithoutPage = kTable + kBytesTable;  // per stage of K: keys of no page, a bit for several
    static constexpr int kBytes = kWithoutPage + kStages * 4;

<% include "forward/sm90/addresses.cuh" %>
    static __device__ __forceinline__ u32 first_at(u32 smem) { return smem + kFirst; }
    static __device__ __forceinline__ u32 kept_at(u32 smem, int place) { return smem + kKept + place * kBytesKept; }
    static __device__ __forceinline__ u32 table_at(u32 smem) { return smem + kTable; }
};
static_assert(Layout::kBytes == @{ smem_bytes }@, "the shared memory that the host asks for");

<% include "forward/sm90/rings.cuh" %>

__device__ __forceinline__ u32 without_page_at(u32 smem, int stage) { return smem + Layout::kWithoutPage + stage * 4; }
