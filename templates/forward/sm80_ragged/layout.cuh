// Shared memory of a thread block.
//
//   rings     kKeyWarps x kStages x (K, V)   key blocks of the teams, filled by cp.async
//   scales    kKeyWarps x kStages x 2        of tokens: what elements of K, of V are multiplied by
//   steps     kKeyWarps x kStages            what of which share lies in a stage
//   shares    kKeyWarps x kShareSlots        the shares that copies have begun and products have not
//   queries   kRowWarps x Q                  where it is not in registers, by lanes of fragments
//   merge     sums of rows, and O by columns, on their way from team to team and from piece to piece

// As many as stages hold steps of different shares, and the one that is being computed.
constexpr int kShareSlots = kStages + 1;

// What lies in a stage.
struct Step {
    int block;     // the key block; -1 where a share has none for this team
    u32 bad[2];    // keys of the block that lie in no page of the store
    int last;      // whether it is the team's last of a share
};

// Rows of O that are merged at once: as many as have room with those of all teams. Eight rows of a warp lie on
// different banks. Thread blocks of which more than two are to fit beside each other have less room.
constexpr int kPieceColumns = round_up(kHeadDimV, 16);
constexpr int kMergePitch = kPieceColumns + 8;
constexpr int kMergeFloats = max_of(kBlocksPerSM > 2 ? 768 * kRowWarps * kKeyWarps : 6144, kKeyWarps * kMergePitch);
constexpr int kMergeRows = kMergeFloats / (kKeyWarps * kMergePitch);

struct Layout {
    static constexpr u32 kBytesK = kBlockKV * TileK::kPitch, kBytesV = kBlockKV * TileV::kPitch;
    static constexpr u32 kStageBytes = kBytesK + kBytesV;
    static constexpr u32 kRing = kStages * kStageBytes;
    static constexpr u32 kScaleBytes = kScalePerToken ? 2 * kBlockKV * 4 : 0;
    static constexpr u32 kScales = kKeyWarps * kRing;
    static constexpr u32 kSteps = kScales + kKeyWarps * kStages * kScaleBytes;
    static constexpr u32 kShares = kSteps + kKeyWarps * kStages * sizeof(Step);
    static constexpr u32 kSums = kShares + kKeyWarps * kShareSlots * sizeof(Share);
    static constexpr u32 kArrived = kSums + kKeyWarps * kRows * 8;
    static constexpr u32 kQueries = (kArrived + 16 + 15) / 16 * 16;
    static constexpr u32 kBytesQ = kSharedQ ? kStepsQK * kMTiles * 512 : 0;
    static constexpr u32 kMerge = kQueries + kRowWarps * kBytesQ;
    static constexpr u32 kBytes = kMerge + kMergeFloats * 4;

    static __device__ __forceinline__ u32 ring(int team) { return team * kRing; }
    static __device__ __forceinline__ u32 scales(int team, int stage) {
        return kScales + (team * kStages + stage) * kScaleBytes;
    }
};
static_assert(Layout::kBytes == @{ smem_bytes }@, "the shared memory that the host asks for");
static_assert(sizeof(Share) % 8 == 0 && sizeof(Step) == 16 && Layout::kShares % 8 == 0, "aligned");

__device__ __forceinline__ Step& step_at(int team, int stage) {
    extern __shared__ __align__(128) u8 smem[];
    return *(Step*)(smem + Layout::kSteps + (team * kStages + stage) * sizeof(Step));
}
__device__ __forceinline__ Share& share_at(int team, int slot) {
    extern __shared__ __align__(128) u8 smem[];
    return *(Share*)(smem + Layout::kShares + (team * kShareSlots + slot) * sizeof(Share));
}

// All warps of a team: what any of them has copied or written is there for all.
__device__ __forceinline__ void team_sync(int team) {
    if (kRowWarps == 1) {
        __syncwarp();
    } else {
        barrier_sync(1 + team, kTeamThreads);
    }
}
