// Drawers, where scores are dropped: warpgroups that draw which scores of each key block are kept, while consumers
// compute them. A call of Philox is a chain of ten rounds; consumers have no registers to run several side by side.

// A word for each row and 32 keys of a block: [kBlockKV / 32][kBlockQ]. Each drawer has every kDrawers-th word.
struct RowWords {
    const KernelArgs& args;
    const Dropout dropout;
    const int drawer;

    // Those of kRows rows from `first` on, of a block whose first key is 8 * group.
    template <int kRows, typename OfTile>
    __device__ __forceinline__ void draw(const OfTile& tile, u32 group, int first, u32 to) const {
        const int thread = threadIdx.x % 128, row = first + thread % kRows, at = tile.row + row;
        int head = tile.head;
        if (kPackGroup) head = (head << args.group_shift) + (at & ((1 << args.group_shift) - 1));
        u32 pair = dropout_pair(args.forward, tile.batch, head);
        if (!kPackGroup) pair = warp_uniform(pair);
        constexpr int kEach = 128 / kRows;  // words at a time
        // Where no other drawer fills the gaps two words of a thread are 1 to 2 % faster.
#pragma unroll(kDrawers == 1 ? 2 : 1)
        for (int word = warp_uniform(drawer * kEach + thread / kRows); word < div_up(kBlockKV, 32);
             word += kDrawers * kEach) {
            const u32 kept = draw_kept_across(dropout, group + 4 * word, u32(at >> args.group_shift), pair);
            store_shared_4(to + (word * kBlockQ + row) * 4, kept);
        }
    }
};

// What all threads of a warp have in common is uniform to the compiler, too, and computed once for the warp: of the
// first three rounds all but five products.
__device__ __forceinline__ void draw_bits(const KernelArgs& args, u32 smem, Work work, int drawer) {
    BitPipeline bits;
    Schedule schedule(smem);
    Dropout dropout = dropout_of(args.forward);
    dropout.key[0] = warp_uniform(dropout.key[0]), dropout.key[1] = warp_uniform(dropout.key[1]);
    dropout.offset = warp_uniform(dropout.offset), dropout.last = warp_uniform(dropout.last);
    const RowWords words{args, dropout, drawer};
    for (; has_tile<true>(schedule, work, [] {}); work = schedule.next<true>()) {
        const BlockRange& blocks = work.all;
#pragma unroll 1
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            const u32 group = warp_uniform(block_at(args, work.tile, blocks, n)) * (kBlockKV / 8);
            bits.acquire(smem);
            constexpr int kWhole = kBlockQ / 128 * 128;
            const u32 to = bits.buffer(smem);
            if (kWhole > 0) words.template draw<128>(work.tile, group, 0, to);
            if (kWhole < kBlockQ) words.template draw<64>(work.tile, group, kWhole, to);
            __syncwarp();
            if (threadIdx.x % 32 == 0) bits.commit(smem);
            bits.advance();
        }
    }
}
