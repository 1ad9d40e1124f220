// Blocks of keys, and what the stage of dK and dV has in shared memory for them.

constexpr int kKeysThreads = 128 * (kWarpgroups + 1);
constexpr int kLoader = kWarpgroups;  // the warpgroup's number

// To begin at a multiple of 1024. Dynamic shared memory does, where there is no static one: with 1024 more there would
// be no room for dQ of 128 queries in two buffers.
constexpr int kAlignment = kTurns ? 512 : 1024;

// Buffers of dS. In turns one, with a barrier, makes room for a second one of K and V up to head dim 64: those of the
// next key block are there when it begins.
constexpr int kSlopes = kTurns && kKeyStages == 2 ? 1 : 2;

struct KeysLayout {
    static constexpr int kBytesK = kChunksQK * kKeys * kRowBytes, kBytesV = kChunksV * kKeys * kRowBytes;
    static constexpr int kBytesQ = kChunksQK * kBlockQ * kRowBytes, kBytesO = kChunksV * kBlockQ * kRowBytes;
    static constexpr int kBytesRows = kBlockQ * 8;
    static constexpr int kK = 0, kV = kK + kKeyStages * kBytesK;
    static constexpr int kQ = kV + kKeyStages * kBytesV, kO = kQ + kStages * kBytesQ;
    static constexpr int kS = kO + kStages * kBytesO;
    // Where dQ is reduced: what has been formed of it, in two buffers.
    static constexpr int kSums = kS + kSlopes * kBytesSlot, kBytesSums = kTurns ? kBlockQ * kColumnsQK * 4 : 0;
    static constexpr int kRows = kSums + 2 * kBytesSums;
    // Weights that the warpgroup with dV leaves to that with dK, and what the buffers of Q and dS hold.
    static constexpr int kHand = kRows + kStages * kBytesRows, kBytesHand = kByGradient ? 64 * kBlockQ * 4 : 0;
    static constexpr int kListedQ = kHand + kBytesHand, kListedS = kListedQ + (kListed ? kStages * kBytesListed : 0);
    // Barriers of the rings of K, V, Q, dO and dS, a full one and an empty one for each buffer.
    static constexpr int kKFull = kListedS + (kListed ? 2 * kBytesListed : 0), kKEmpty = kKFull + kKeyStages * 8;
    static constexpr int kVFull = kKEmpty + kKeyStages * 8, kVEmpty = kVFull + kKeyStages * 8;
    static constexpr int kQFull = kVEmpty + kKeyStages * 8, kQEmpty = kQFull + kStages * 8;
    static constexpr int kOFull = kQEmpty + kStages * 8, kOEmpty = kOFull + kStages * 8;
    static constexpr int kSFull = kOEmpty + kStages * 8, kSEmpty = kSFull + 16;
    static constexpr int kHandFull = kSEmpty + 16, kHandEmpty = kHandFull + 8;
    // Which key block a buffer of K and V holds, and the thread block's ticket, where they are taken by tickets.
    static constexpr int kTaken = kSEmpty + 16 + (kByGradient ? 16 : 0), kTicket = kTaken + 4 * kKeyStages;
    static constexpr int kSlopesRead = kTaken + 16;  // dQ is formed from dS
    static constexpr int kEnd = kTaken + (kJoint || kTurns || kWalks ? 16 : 0) + (kSlopes == 1 ? 8 : 0);
    static constexpr int kItem = round_up(kEnd, 16);  // of packed sequences
    static constexpr int kBytes = kPacked ? kItem + kBytesItems : kEnd;
};
// K and V of key blocks: both are emptied when dK and dV, which take their place, are away; in turns, when all products
// have read them. V's barrier counts that.
using KeyRing = Pipeline<kKeyStages, KeysLayout::kKFull, KeysLayout::kKEmpty, KeysLayout::kK, KeysLayout::kBytesK>;
using ValueRing = Pipeline<kKeyStages, KeysLayout::kVFull, KeysLayout::kVEmpty, KeysLayout::kV, KeysLayout::kBytesV>;
using QueryRing = Pipeline<kStages, KeysLayout::kQFull, KeysLayout::kQEmpty, KeysLayout::kQ, KeysLayout::kBytesQ>;
using OutRing = Pipeline<kStages, KeysLayout::kOFull, KeysLayout::kOEmpty, KeysLayout::kO, KeysLayout::kBytesO>;
using SpillRing = Pipeline<2, KeysLayout::kSFull, KeysLayout::kSEmpty, KeysLayout::kS, kBytesSlot>;
using HandRing = Pipeline<1, KeysLayout::kHandFull, KeysLayout::kHandEmpty, KeysLayout::kHand, KeysLayout::kBytesHand>;
// Of tiles of dQ on their way to their sums, with the barriers that dS on its way would have.
using SumRing = Pipeline<2, KeysLayout::kSFull, KeysLayout::kSEmpty, KeysLayout::kSums, KeysLayout::kBytesSums>;
// Of dS that is one buffer, by the barrier that says that it is read.
using SlopeRing = Pipeline<1, 0, KeysLayout::kSlopesRead, KeysLayout::kS, kBytesSlot>;
static_assert(KeysLayout::kBytes + kAlignment == @{ keys_smem_bytes }@, "the shared memory that the host asks for");

#if @{ packed }@
using KeyItems = ItemRing<KeysLayout::kItem>;

// A block of keys of a sequence, and where the sequence's statistics and the pair's dS begin.
struct KeyBlock {
    int block, begin, end;  // begin and end: tiles of queries
    i64 tile, slot;
    __device__ __forceinline__ KeyBlock(const Item& item, const Visible& visible)
        : block(item.block), begin(visible.begin(item.block)), end(visible.end(item.block)), tile(item.tile),
          slot(item.slot) {}
};
__device__ __forceinline__ const float* statistics_of(const KernelArgs& args, const KeyBlock& at, const Pair& pair,
                                                      int member) {
    return Table(args).statistics(pair.head(member), at.tile);
}
#else
// Walks of a pair, each of some heads of its group.
__device__ __forceinline__ int walks_of_pair(const KernelArgs& args) {
    int walks = 1;
    if (kWalks) {
        walks = int(args.walks);
        asm volatile("" : "+r"(walks));
    }
    return walks;
}
// Walks and key blocks, by number: walks of a section take turns, so that the longest key blocks of all of them come
// first under a causal mask. A thread block has every gridDim.x-th of them.
struct KeyBlock {
    int pair, walk, block, begin, end;  // pair: of the wave; begin and end: tiles of queries
    __device__ __forceinline__ KeyBlock(const KernelArgs& args, const Visible& visible, int index) {
        const int section = args.keys_section;
        const int blocks = div_up(args.backward.kv_len, kKeys), whole = section * blocks;
        const int first = index / whole * section, within = index % whole, walks = walks_of_pair(args);
        const int members = min_of(section, args.pairs * walks - first);
        pair = first + within % members, walk = 0, block = within / members;
        if (kWalks) walk = pair / args.pairs, pair %= args.pairs;
        // By turns a key block waits for those behind it, which are to come before it.
        if (kTurns) block = blocks - 1 - block;
        begin = visible.begin(block), end = visible.end(block);
    }
    static __device__ __forceinline__ int count(const KernelArgs& args) {
        return args.pairs * walks_of_pair(args) * div_up(args.backward.kv_len, kKeys);
    }
};
__device__ __forceinline__ const float* statistics_of(const KernelArgs& args, const KeyBlock& at, const Pair& pair,
                                                      int member) {
    return statistics_of(args, at.pair * pair.group + member);
}
#endif

// Heads of a pair's group that are walked, from one to the one behind the last.
struct Members {
    int begin, end;
    __device__ __forceinline__ explicit Members(int group) : begin(0), end(group) {}
    __device__ __forceinline__ Members(const KernelArgs& args, const KeyBlock& at, const Pair& pair)
        : begin(0), end(pair.group) {
#if FT_WALKS
        end /= walks_of_pair(args);
        begin = at.walk * end, end += begin;
#endif
    }
};
