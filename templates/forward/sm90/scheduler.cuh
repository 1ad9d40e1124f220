// Persistent tile scheduler: one thread takes every gridDim.x-th tile (static) or the next one of an atomic counter
// (dynamic), and publishes it to the other roles through a ring of two slots in shared memory.

struct alignas(16) Work {
    Tile tile;
    BlockRange own;  // the key blocks that its rows visit; as a consumer reads it with kTrim, those of that one's rows
    BlockRange all;  // those that arrive, for all of its consumers
    int live;        // whether there is a tile
    int careful;     // whether non-finite elements leave masked blocks of V before the product
    int last;        // where there is no tile: whether no second pass follows
};

// Adds to a counter in global memory. Returns what it was.
__device__ __forceinline__ u32 atomic_add(u32* counter, u32 n) {
    u32 r;
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(r) : "l"(counter), "r"(n) : "memory");
    return r;
}

// Tiles taken so far, beside the first one of each thread block: a counter for each stream that launches at the same
// time as others. The host says which; a launch without one takes tiles by stride.
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
    w.tile = tile_at<kBlockQ, kPackGroup, kMaskRight || kProgramMask>(args, min_of(index, u32(args.tiles) - 1));
    if (kLists) {
        w.own = w.tile.rows > 0 ? List::of(args, w.tile).blocks() : BlockRange{};
    } else {
        w.own = visited_blocks(args, w.tile);
    }
    w.all = w.own;
    w.live = index < u32(args.tiles);
    w.careful = w.last = !kOptimistic;
    return w;
}

// Of the blocks of a tile, those that the rows of one consumer visit; one at least, so that each has a part in every
// tile.
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
__device__ __forceinline__ u32 part_in(u32 slot, int consumer) { return slot + Layout::kBytesWork + consumer * 16; }
__device__ __forceinline__ Work read_slot(u32 slot) {
    Work work;
    uint4* words = (uint4*)&work;
#pragma unroll
    for (int i = 0; i < Layout::kBytesWork / 16; i++) words[i] = load_shared_16(slot + i * 16);
    return work;
}

// Of the scheduling thread, which has few registers.
struct TileScheduler {
    const u32 smem;
    u32 count = 0;       // tiles so far, beside the first one, which every role computes
    bool ended = false;  // no tile follows
    __device__ __forceinline__ explicit TileScheduler(u32 smem) : smem(smem) {}

    // Takes the next tile once it is asked for, and publishes it. Returns whether there is one.
    __device__ __forceinline__ bool publish_next(const KernelArgs& args) {
        mbarrier_wait(Layout::ask_work_at(smem), count & 1);
        mbarrier_wait(WorkPipeline::empty_at(smem, count % 2), ~(count >> 1) & 1);
        u32 index = blockIdx.x + (count + 1) * gridDim.x;
        if (found_again(smem) & kSecondPass) {
            index = take_again(smem);
        } else if (kQueue && args.queue >= 0) {
            u32* queue = tile_queues + args.queue;
            const u32 taken = atomic_add(queue, 1);
            index = gridDim.x + taken;
            // Every thread block makes one fetch that fails; the last of them resets the counter.
            if (taken + 1 == u32(args.tiles)) *queue = 0;
        }
        Work work = work_at(args, index);
        const u32 found = found_again(smem);
        work.careful |= found;
        work.last |= found & kSecondPass;
        if (kOptimistic && found == 0 && work.live) {
            store_shared_4(Layout::placed_at(smem, (count + 1) % kPlaces), index);
        }
        const u32 stage = count % 2, slot = WorkPipeline::buffer_at(smem, stage);
        const uint4* words = (const uint4*)&work;
#pragma unroll
        for (int i = 0; i < Layout::kBytesWork / 16; i++) store_shared_16(slot + i * 16, words[i]);
#pragma unroll 1
        for (int c = 0; kTrim && c < kConsumers; c++) {
            // Read again, for want of registers.
            const BlockRange part = part_of(args, read_slot(slot), c);
            store_shared_16(part_in(slot, c), *(const uint4*)&part);
        }
        mbarrier_arrive(WorkPipeline::full_at(smem, stage));
        count++;
        ended = !work.live && work.last;
        return work.live;
    }
    // At the end of the tiles: whether there is a second pass (recompute.cuh).
    __device__ __forceinline__ bool begins_again() const {
        if (ended || !any_again(smem)) return false;
        set_flag(Layout::found_at(smem), kSecondPass);
        return true;
    }
};

// The published tiles, of a reading warp or thread. With a second pass every lane arrives, because racecheck cannot see
// that a one-lane arrival covers its warp.
struct Schedule {
    const u32 smem;
    WorkPipeline slots;
    __device__ __forceinline__ explicit Schedule(u32 smem) : smem(smem) {}

    // The ring slot (recompute.cuh) of the tile that was read last, or of the one `before` it.
    __device__ __forceinline__ int place(int before) const {
        return (slots.stage + 2 * slots.parity + kPlaces - before) % kPlaces;
    }

    // For a consumer, or for others.
    template <bool kWarp> __device__ __forceinline__ Work next(int consumer = -1) {
        if (!kPersistent) return Work{};
        slots.wait(smem);
        Work work = read_slot(slots.buffer(smem));
        if (kTrim && consumer >= 0) *(uint4*)&work.own = load_shared_16(part_in(slots.buffer(smem), consumer));
        if (kWarp) __syncwarp();
        if (kOptimistic || threadIdx.x % 32 == 0) slots.release(smem);
        slots.advance();
        return work;
    }
};
// Whether there is a tile. Where there is none, the first pass may have ended: the first tile of the second then takes
// its place, for which the role that asks for tiles asks again.
template <bool kWarp, typename Ask>
__device__ __forceinline__ bool has_tile(Schedule& schedule, Work& work, const Ask& ask) {
    if (work.live) return true;
    if (work.last || !any_again(schedule.smem)) return false;
    ask();
    work = schedule.next<kWarp>();
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
static_assert(sizeof(Work) == sizeof(Tile) + 2 * sizeof(BlockRange) + 3 * sizeof(int),
              "no word of a stored vector is without a value");
