// What the stages agree about: tiles, and how the scratch memory of a wave is laid out.

using KernelArgs = WithSide<Sm90BackwardArgs>;

constexpr int kWarpgroups = 2;  // that multiply
constexpr int kWarpsOfKeys = 4 * kWarpgroups;
// Whether both have the same 64 keys, one dV and the other dK: those of more do not fit a thread's registers.
constexpr bool kByGradient = kKeys == 64;
static_assert(kByGradient || kKeys == 64 * kWarpgroups, "64 keys of each, or the same");
// Whether there is a score program: the loaders find which tiles there are, and tell the others.
constexpr bool kListed = FT_PROGRAM;
constexpr bool kJoint = FT_JOINT, kTurns = FT_TURNS, kWalks = FT_WALKS;
constexpr int kRowBytes = 128;
constexpr int kChunksQK = div_up(kHeadDimQK, 64), kChunksV = div_up(kHeadDimV, 64);
// Columns of products: the head dim that instructions are made for.
constexpr int kColumnsQK = round_up(kHeadDimQK, 16), kColumnsV = round_up(kHeadDimV, 16);
// Queries of a thread block where dQ is summed: so many tiles of 64.
constexpr int kQueryTiles = kWarpgroups * kRowTiles, kRowBlock = 64 * kQueryTiles;
// Of what a loader finds of packed sequences, with its barriers (Item).
constexpr int kBytesItem = 48, kItems = 2;
constexpr int kBytesItems = kItems * (kBytesItem + 16);
// 64 queries by kKeys of dS: rows are keys.
constexpr int kBytesTile = kKeys * kRowBytes;
// kBlockQ queries by kKeys of dS, which lie together.
constexpr int kBytesSlot = kBlockQ / 64 * kBytesTile;

__device__ __forceinline__ int warp() { return warp_uniform(threadIdx.x / 32 % 4); }
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

// Rows and keys of a sequence.
struct Lengths {
    int q_len, kv_len;
};

// Heads of Q and of K, by a pair of a sequence and a KV head, and where the sequence's rows lie in the tensors.
#if @{ packed }@
struct Pair {
    int batch, kv_head, group;
    int q_row, kv_row;
    Lengths lengths;
    static constexpr int entry = 0;  // of the tensors' batch
    __device__ __forceinline__ int head(int member) const { return kv_head * group + member; }
    __device__ __forceinline__ const Lengths& sizes(const BackwardArgs&) const { return lengths; }
};
#else
struct Pair {
    int batch, kv_head, group;
    static constexpr int q_row = 0, kv_row = 0;
    int entry;
    __device__ __forceinline__ Pair(const BackwardArgs& args, int pair) {
        batch = entry = pair / args.kv_heads, kv_head = pair % args.kv_heads, group = args.heads / args.kv_heads;
    }
    __device__ __forceinline__ int head(int member) const { return kv_head * group + member; }
    __device__ __forceinline__ const BackwardArgs& sizes(const BackwardArgs& args) const { return args; }
};
#endif

// Statistics of a head of the wave: tile by tile of kBlockQ queries, log-sum-exps in units of log2 and behind them D.
__device__ __forceinline__ float* statistics_of(const KernelArgs& args, i64 head_index) {
    return (float*)args.backward.scratch + head_index * round_up(args.backward.q_len, kBlockQ) * 2;
}
// In the place of a log-sum-exp: the row is far from zero.
constexpr float kFarMark = -3e38f;
// What is taken from the scores of a row before they are multiplied by log2(e), and after.
struct Reference {
    float first, then;
};
__device__ __forceinline__ Reference reference_of(const BackwardArgs& args, int batch, int head, int row, float lse) {
    if (!kProgramFar || lse != kFarMark) return Reference{0.0f, lse};
    const i64* stride = args.dq_stride;
    const float2 far =
        *(const float2*)((const Element*)args.dq + batch * stride[0] + head * stride[1] + row * stride[2]);
    return Reference{far.x, far.y};
}
// The exponent of a weight.
__device__ __forceinline__ float exponent_of(float score, const Reference& by) {
    return fmaf(kProgramFar ? score - by.first : score, kLog2E, -by.then);
}

// Tiles of dS of a head of the wave, which has so many slots of them: behind the statistics of all its heads.
__device__ __forceinline__ char* ds_of(const KernelArgs& args, i64 head_index, i64 slots) {
    const int heads = args.pairs * (args.backward.heads / args.backward.kv_heads);
    return (char*)statistics_of(args, heads) + head_index * slots * kBytesSlot;
}

// Where dQ is reduced: fp32 sums of a head of the wave, in the place of dS. A tile of kBlockQ queries is as many floats
// for each column of a product, in the order of turns.cuh.
__device__ __forceinline__ float* dq_sums_of(const KernelArgs& args, i64 head_index) {
    const int heads = args.pairs * (args.backward.heads / args.backward.kv_heads);
    return statistics_of(args, heads) + head_index * round_up(args.backward.q_len, kBlockQ) * kColumnsQK;
}

// Behind dS or these sums, where heads are walked apart: fp32 sums of dK and dV of the key blocks of the wave.
__device__ __forceinline__ float* walk_sums_of(const KernelArgs& args, i64 key_block, i64 slots) {
    const int heads = args.pairs * (args.backward.heads / args.backward.kv_heads);
    const i64 floats = args.walks > 1 ? kKeys * (kColumnsQK + kColumnsV) : 0;
    return (kTurns ? dq_sums_of(args, heads) : (float*)ds_of(args, heads, slots)) + key_block * floats;
}

// Behind all of them, where thread blocks take key blocks by tickets, counters.
enum Counter { kTickets, kKeyBlocks, kRowBlocks, kCounters = 4 };  // of thread blocks, and of what they have taken
__device__ __forceinline__ u32* counters_of(const KernelArgs& args, i64 slots) {
    if (kWalks) return (u32*)walk_sums_of(args, i64(args.pairs) * div_up(args.backward.kv_len, kKeys), slots);
    const int heads = args.pairs * (args.backward.heads / args.backward.kv_heads);
    return kTurns ? (u32*)dq_sums_of(args, heads) : (u32*)ds_of(args, heads, slots);
}
__device__ __forceinline__ int row_blocks(const KernelArgs& args) {
    return div_up(args.backward.q_len, 128 * kRowTiles);
}
// Of each row block of a head of the wave how many key blocks have left their dS of it.
__device__ __forceinline__ u32* written_of(const KernelArgs& args, i64 head_index, i64 slots) {
    return counters_of(args, slots) + kCounters + head_index * row_blocks(args);
}
// Of each tile of queries of a head of the wave how many key blocks have added their dQ.
__device__ __forceinline__ u32* turns_of(const KernelArgs& args, i64 head_index) {
    return counters_of(args, 0) + kCounters + head_index * div_up(args.backward.q_len, kBlockQ);
}
// Of each warp's keys of a key block of the wave how many walks have added their dK and dV.
__device__ __forceinline__ u32* walks_added(const KernelArgs& args, i64 key_block, i64 slots) {
    const int heads = args.pairs * (args.backward.heads / args.backward.kv_heads);
    u32* const first = kTurns   ? turns_of(args, heads)
                       : kJoint ? written_of(args, heads, slots)
                                : counters_of(args, slots) + kCounters;
    return first + key_block * kWarpsOfKeys;
}
