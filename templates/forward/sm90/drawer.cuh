// Drawers, where scores are dropped: warpgroups that draw which scores of each key block are kept, while consumers
// compute them. A call of Philox is a chain of ten rounds; consumers have no registers to run several side by side.

// What the calls of a key block have in common, four words for each eight keys, is computed by a lane for each and read
// by all lanes of the warp. By the uniform datapath it takes 13 instructions for each call.
constexpr int kDrawnGroups = div_up(kBlockKV, 32) * 4;
static_assert(kDrawnGroups <= 32, "a lane for each");

// Two drawers have two words each of 128 keys, which are drawn at a time, and compute what the calls of two blocks have
// in common at once: 1 to 3 % at head dims up to 64. One drawer loses 1 to 8 % by it from 96 to 128.
constexpr int kWordsAtOnce = kDrawers > 1 ? 2 : 1;
constexpr int kBlocksAtOnce = kDrawers > 1 ? 32 / kDrawnGroups : 1;

// A word for each row and 32 keys of a block: [kBlockKV / 32][kBlockQ]. Each drawer has every kDrawers-th word.
template <int kFirst, int kRows> struct RowWords {
    int row;
    u32 pair;
    QueryRounds rounds;
    DoubleMultipliers doubles;

    template <typename OfTile>
    __device__ __forceinline__ void begin(const KernelArgs& args, const Dropout& d, const OfTile& tile) {
        row = kFirst + threadIdx.x % 128 % kRows;
        const int at = tile.row + row;
        int head = tile.head;
        if (kPackGroup) head = (head << args.group_shift) + (at & ((1 << args.group_shift) - 1));
        pair = dropout_pair(args.forward, tile.batch, head);
        rounds = dropout_query(d, u32(at >> args.group_shift), pair);
        doubles.hold(d, rounds.low);
    }

    // Of a block whose first key is 8 * group; `groups` is where the warp has what its calls have in common.
    __device__ __forceinline__ void draw(const Dropout& d, u32 group, u32 groups, u32 to, int drawer) const {
        constexpr int kEach = 128 / kRows;  // words at a time
#pragma unroll kWordsAtOnce
        for (int word = warp_uniform(drawer * kEach + threadIdx.x % 128 / kRows); word < div_up(kBlockKV, 32);
             word += kDrawers * kEach) {
            const u32 kept = draw_kept_across(d, [&](int c) {
                // Heads of a group's rows differ, and with them what is common else.
                const GroupRounds common = kPackGroup ? dropout_group(d, group + 4 * word + c, pair)
                                                      : load_shared_16(groups + (4 * word + c) * 16);
                return dropout_words(d, common, rounds, is_by_doubles(c, kDoubleCalls), doubles);
            });
            store_shared_4(to + (word * kBlockQ + row) * 4, kept);
        }
    }
};

__device__ __forceinline__ void draw_bits(const KernelArgs& args, u32 smem, Work work, int drawer) {
    BitPipeline bits;
    Schedule schedule(smem);
    Dropout dropout = dropout_of(args.forward);
    dropout.key[0] = warp_uniform(dropout.key[0]), dropout.key[1] = warp_uniform(dropout.key[1]);
    dropout.offset = warp_uniform(dropout.offset), dropout.last = warp_uniform(dropout.last);
    const u32 groups = smem + Layout::kGroups + warp_uniform(drawer * 4 + threadIdx.x % 128 / 32) * (kDrawnGroups * 16);
    constexpr int kWhole = kBlockQ / 128 * 128;
    RowWords<0, 128> whole;
    RowWords<kWhole, 64> rest;
    for (; has_tile<true>(schedule, work, [] {}); work = schedule.next<true>()) {
        const BlockRange& blocks = work.all;
        if (kWhole > 0) whole.begin(args, dropout, work.tile);
        if (kWhole < kBlockQ) rest.begin(args, dropout, work.tile);
        const u32 pair = dropout_pair(args.forward, work.tile.batch, work.tile.head);
        GroupRounds common = {};
#pragma unroll 1
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            const u32 group = warp_uniform(block_at(args, work.tile, blocks, n)) * (kBlockKV / 8);
            if (!kPackGroup) {
                const int lane = threadIdx.x % 32, step = (blocks.end - 1 - n) % kBlocksAtOnce;
                const int of = kBlocksAtOnce > 1 ? lane / kDrawnGroups : 0, at = lane - of * kDrawnGroups;
                if (step == 0) {
                    const int block = block_at(args, work.tile, blocks, max(n - of, blocks.begin));
                    common = dropout_group(dropout, u32(block) * (kBlockKV / 8) + at, pair);
                }
                if (of == step && at < kDrawnGroups) store_shared_16(groups + at * 16, common);
                __syncwarp();
            }
            bits.acquire(smem);
            const u32 to = bits.buffer(smem);
            if (kWhole > 0) whole.draw(dropout, group, groups, to, drawer);
            if (kWhole < kBlockQ) rest.draw(dropout, group, groups, to, drawer);
            __syncwarp();
            if (threadIdx.x % 32 == 0) bits.commit(smem);
            bits.advance();
        }
    }
}
