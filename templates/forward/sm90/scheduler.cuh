// What a thread block does, tile after tile. One thread deals: every gridDim.x-th tile or, from the queue that all thread
// blocks share, the next one that nobody has. It tells the others through two slots of shared memory.

struct alignas(16) Work {
    Tile tile;
    BlockRange own;  // the key blocks that its rows visit; as a consumer reads it with kTrim, those of that one's rows
    BlockRange all;  // those that arrive for its cluster
    int live;        // whether there is a tile at all
    int careful;     // whether masked blocks of V are cleaned before anyone multiplies with them
    int last;        // whether nothing is dealt after this, where there is no tile
};

// Adds to a counter in global memory. Returns what it was.
__device__ __forceinline__ u32 atomic_add(u32* counter, u32 n) {
    u32 r;
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(r) : "l"(counter), "r"(n) : "memory");
    return r;
}

// Tiles that were taken so far, beside the first one of each thread block: one counter for every stream that launches at
// the same time as others. The host says which; a launch without one takes tiles by stride.
constexpr int kQueues = @{ tile_queues }@;
__device__ u32 tile_queues[kQueue ? kQueues : 1];

// The key blocks that a tile's rows visit, or those of a part of it.
__device__ __forceinline__ BlockRange visited_blocks(const KernelArgs& args, const Tile& tile) {
    const BlockRange window = blocks_of<kBlockKV, kMaskLeft, kMaskRight>(args, tile);
    if (!kProgramMask || kLists || tile.rows == 0) return window;
    if constexpr (kRuns) return run_blocks<kBlockKV>(Runs(args).of_tile<kConsumers>(tile), window);
    return program_blocks<kBlockKV>(program_head(args, args.forward, tile), tile.row, tile.row + tile.rows - 1, window);
}

__device__ __forceinline__ Work work_at(const KernelArgs& args, u32 index) {
    Work w;
    w.tile = tile_at<kBlockQ, kCluster, kPackGroup, kMaskRight || kProgramMask>(args, min_of(index, u32(args.tiles) - 1));
    if (kLists) {
        w.own = w.tile.rows > 0 ? List::of(args, w.tile).blocks() : BlockRange{};
    } else {
        w.own = visited_blocks(args, w.tile);
    }
    w.all = blocks_of_cluster<kBlockQ, kCluster, kBlockKV, kMaskLeft, kMaskRight>(args, w.tile, w.own);
    w.live = index < u32(args.tiles);
    w.careful = w.last = !kOptimistic;
    return w;
}

// Of the blocks of a tile, those that the rows of one consumer visit; one at least, so that each has a part in every tile.
__device__ __forceinline__ BlockRange part_of(const KernelArgs& args, const Work& work, int consumer) {
    BlockRange own = work.own;
    if (own.begin == own.end) return own;
    if (consumer * 64 >= work.tile.rows) return BlockRange{own.begin, own.begin, own.begin, own.begin + 1};
    Tile part = work.tile;
    part.row += consumer * 64;
    part.rows = min_of(64, work.tile.rows - consumer * 64);
    const BlockRange b = visited_blocks(args, part);
    own.begin = min_of(max_of(own.begin, b.begin), own.end - 1);
    own.end = max_of(min_of(own.end, b.end), own.begin + 1);
    own.full_begin = b.full_begin, own.full_end = b.full_end;
    return own;
}

// One of the two slots: the tile and, with kTrim, the blocks of each consumer.
__device__ __forceinline__ u32 slot_of(u32 smem, int stage) { return smem + Layout::kWork + stage * Layout::kBytesSlot; }
__device__ __forceinline__ u32 part_in(u32 slot, int consumer) { return slot + Layout::kBytesWork + consumer * 16; }
__device__ __forceinline__ Work read_slot(u32 slot) {
    Work work;
    uint4* words = (uint4*)&work;
#pragma unroll
    for (int i = 0; i < Layout::kBytesWork / 16; i++) words[i] = load_shared_16(slot + i * 16);
    return work;
}

// Who deals: a thread that has few registers.
struct Dealer {
    const u32 smem;
    u32 count = 0;       // tiles so far, beside the first one, which everyone finds
    bool ended = false;  // nothing is dealt any more
    __device__ __forceinline__ explicit Dealer(u32 smem) : smem(smem) {}

    // Decides what comes next, once that is asked for, and tells the others. Returns whether there is a tile.
    __device__ __forceinline__ bool deal(const KernelArgs& args) {
        mbarrier_wait(smem + Layout::kAskWork, count & 1);
        mbarrier_wait(smem + Layout::kEmptyWork + count % 2 * 8, ~(count >> 1) & 1);
        u32 index = blockIdx.x + (count + 1) * gridDim.x;
        if (found_again(smem) & kSecondPass) {
            index = take_again(smem);
        } else if (kQueue && args.queue >= 0) {
            u32* queue = tile_queues + args.queue;
            const u32 taken = atomic_add(queue, 1);
            index = gridDim.x + taken;
            // Every thread block draws once in vain. Who draws last leaves the queue as it was found.
            if (taken + 1 == u32(args.tiles)) *queue = 0;
        }
        Work work = work_at(args, index);
        const u32 found = found_again(smem);
        work.careful |= found;
        work.last |= found & kSecondPass;
        if (kOptimistic && found == 0 && work.live) {
            store_shared_4(smem + Layout::kPlaced + (count + 1) % kPlaces * 4, index);
        }
        const u32 stage = count % 2, slot = slot_of(smem, stage);
        const uint4* words = (const uint4*)&work;
#pragma unroll
        for (int i = 0; i < Layout::kBytesWork / 16; i++) store_shared_16(slot + i * 16, words[i]);
#pragma unroll 1
        for (int c = 0; kTrim && c < kConsumers; c++) {
            // Read again, for want of registers.
            const BlockRange part = part_of(args, read_slot(slot), c);
            store_shared_16(part_in(slot, c), *(const uint4*)&part);
        }
        mbarrier_arrive(smem + Layout::kFullWork + stage * 8);
        count++;
        ended = !work.live && work.last;
        return work.live;
    }
    // At the end of the tiles: whether there is a second pass.
    __device__ __forceinline__ bool begins_again() const {
        if (ended || !any_again(smem)) return false;
        set_flag(smem + Layout::kFound, kSecondPass);
        return true;
    }
};

// Those who are dealt to: warps, or single threads. With a second pass every lane says for itself that it has read: a tool that looks for
// races does not see it there from one that speaks for its warp.
struct Hand {
    const u32 smem;
    Ring<2> ring;
    __device__ __forceinline__ explicit Hand(u32 smem) : smem(smem) {}

    // The place of the tile that was taken last, or of that before.
    __device__ __forceinline__ int place(int before) const { return (ring.stage + 2 * ring.parity + kPlaces - before) % kPlaces; }

    // For a consumer, or for others.
    template <bool kWarp> __device__ __forceinline__ Work next(int consumer = -1) {
        if (!kPersistent) return Work{};
        const u32 full = smem + Layout::kFullWork + ring.stage * 8;
        mbarrier_wait(full, ring.parity);
        Work work = read_slot(slot_of(smem, ring.stage));
        if (kTrim && consumer >= 0) *(uint4*)&work.own = load_shared_16(part_in(slot_of(smem, ring.stage), consumer));
        if (kWarp) __syncwarp();
        if (kOptimistic || threadIdx.x % 32 == 0) mbarrier_arrive(smem + Layout::kEmptyWork + ring.stage * 8);
        ring.advance();
        return work;
    }
};
// Whether there is a tile. Where there is none, that may be the end of the first pass: the first tile of the second then takes its place.
// Who asks for work does so again.
template <bool kWarp, typename Ask> __device__ __forceinline__ bool is_dealt(Hand& hand, Work& work, const Ask& ask) {
    if (work.live) return true;
    if (work.last || !any_again(hand.smem)) return false;
    ask();
    work = hand.next<kWarp>();
    return work.live;
}
// Every thread block has a first tile; that of a quick kernel is its only one, and known. As `next`.
__device__ __forceinline__ Work first_work(const KernelArgs& args, const Work& only, int consumer = -1) {
    if constexpr (kQuick) {
        return only;
    } else {
        Work work = work_at(args, blockIdx.x);
        if (kTrim && consumer >= 0) work.own = part_of(args, work, consumer);
        return work;
    }
}
static_assert(sizeof(Work) == Layout::kBytesWork, "a slot");
