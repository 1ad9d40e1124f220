// Follows forward/sm90/scheduler.cuh, whose fixes belong here too. Apart, since the machine code of 20 of 40 dense
// kernels changed when both families shared this text.
//
// Persistent tile scheduler: one thread takes every gridDim.x-th tile (static) or the next one of an atomic counter
// (dynamic), and publishes it to the other roles through a ring of two slots in shared memory.

struct alignas(16) Work {
    WorkTile tile;
    BlockRange own;  // the key blocks that its rows visit; as a consumer reads it with kTrim, those of that one's rows
    BlockRange all;  // those that arrive, for all of its consumers
    int live;        // whether there is a tile: 0, 1, or 2 for a piece of one
    int careful;     // whether non-finite elements leave masked blocks of V before the product
    int last;        // where there is no tile: whether no second pass follows
    // Whole vectors are stored, and to words without a value ptxas gives registers that the warp has given back: R30
    // and R31 of 32, two of which are never a thread's own, an illegal instruction.
    int unused[3] = {};
    __device__ __forceinline__ bool is_piece() const { return kSplits && live > 1; }  // of a tile (pieces.cuh)
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
__device__ __forceinline__ BlockRange visited_blocks(const KernelArgs& args, const WorkTile& tile) {
    const BlockRange window = blocks_of<kBlockKV, kMaskLeft, kMaskRight>(args, tile);
    if (!kProgramMask || kLists || tile.rows == 0) return window;
#if FT_RUNS
    return run_blocks<kBlockKV>(Runs(args).of_tile<kConsumers>(tile), window);
#else
    return program_blocks<kBlockKV>(program_head(args, FT_SIZES(args, tile), tile), tile.row,
                                    tile.row + tile.rows - 1, window);
#endif
}

// Which piece of its tile an item is: its number among all items, the distance to that of the next piece, how many
// pieces there are, and which of them this is.
struct alignas(16) Piece {
    int item, apart, count, nth;
};

__device__ __forceinline__ Work work_at(const KernelArgs& args, u32 smem, u32 index, Piece& piece) {
    Work w;
    ItemPlace place = {Segments(BlockRange{0, 0, 0, 0}, kUncut), 0, 0};
    const u32 item = min_of(index, FT_TILES(args, smem) - 1);
    w.tile = tile_at<kBlockQ, kPackGroup, kMaskRight || kProgramMask>(args, smem, item, place);
    w.own = visited_blocks(args, w.tile);
    w.live = index < FT_TILES(args, smem);
    w.careful = w.last = !kOptimistic;
    piece = Piece{int(item), place.apart, 1, 0};
    if (kSplits && place.segments.count > 1) {
        // A tile without keys is in the first segment, and in segments where it has none there is nothing of it.
        const bool some = w.own.begin < w.own.end;
        const int first = some ? place.segments.of(w.own.begin) : 0, last = some ? place.segments.of(w.own.end - 1) : 0;
        if (place.segment < first || place.segment > last) {
            w.tile.rows = 0;
            w.own = BlockRange{};
        } else if (first < last) {
            const int begin = place.segments.begin + place.segment * place.segments.size;
            w.own.begin = max_of(w.own.begin, begin), w.own.end = min_of(w.own.end, begin + place.segments.size);
            piece.count = last - first + 1, piece.nth = place.segment - first;
            w.live *= 2;
            // No piece is computed twice: it would count twice.
            w.careful = 1;
        }
    }
    w.all = w.own;
    return w;
}

// Of a piece's item, where the tiles are noted that may be computed again: nothing.
constexpr u32 kNoTile = 0xfffffffe;

// Of the blocks of a tile, those that the rows of one consumer visit; one at least, so that each has a part in every
// tile.
__device__ __forceinline__ BlockRange part_of(const KernelArgs& args, const Work& work, int consumer) {
    BlockRange own = work.own;
    if (own.begin == own.end) return own;
    if (consumer * 64 >= work.tile.rows) return BlockRange{own.begin, own.begin, own.begin, own.begin + 1};
    WorkTile part = work.tile;
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
    if (!kTrim) work.all = work.own;  // the same registers
    return work;
}

// What a consumer has of a tile in registers, which are few; the rest lies in a ring of four (recompute.cuh).
struct Turn {
    BlockRange own, all;  // as of Work
    int live;
    int place;            // in the ring
    __device__ __forceinline__ Turn(const Work& work, int place)
        : own(work.own), all(work.all), live(work.live), place(place) {}
    __device__ __forceinline__ bool is_piece() const { return kSplits && live > 1; }
};
__device__ __forceinline__ WorkTile kept_tile(u32 smem, const Turn& turn) {
    union {
        WorkTile tile;
        uint4 words[Layout::kBytesKept / 16 - 1];
    } kept;
#pragma unroll
    for (int i = 0; i < Layout::kBytesKept / 16 - 1; i++) {
        kept.words[i] = load_shared_16(Layout::kept_at(smem, turn.place) + i * 16);
    }
    return kept.tile;
}
__device__ __forceinline__ Piece kept_piece(u32 smem, const Turn& turn) {
    Piece piece;
    *(uint4*)&piece = load_shared_16(Layout::kept_at(smem, turn.place + 1) - 16);
    return piece;
}

// A tile into its slot and, of a piece, what it is a piece of; by one thread.
__device__ __forceinline__ void write_slot(const KernelArgs& args, u32 smem, u32 slot, const Work& work, int place,
                                           const Piece& piece) {
    const uint4* words = (const uint4*)&work;
#pragma unroll
    for (int i = 0; i < Layout::kBytesWork / 16; i++) store_shared_16(slot + i * 16, words[i]);
    const u32 kept = Layout::kept_at(smem, place);
#pragma unroll
    for (int i = 0; i < Layout::kBytesKept / 16 - 1; i++) store_shared_16(kept + i * 16, words[i]);
    store_shared_16(kept + Layout::kBytesKept - 16, *(const uint4*)&piece);
#pragma unroll 1
    for (int c = 0; kTrim && c < kConsumers; c++) {
        // Read again, for want of registers.
        const BlockRange part = part_of(args, read_slot(slot), c);
        store_shared_16(part_in(slot, c), *(const uint4*)&part);
    }
}

// The first tile of the thread block, by one thread in front of the roles.
__device__ __forceinline__ void publish_first(const KernelArgs& args, u32 smem) {
    Piece piece;
    const Work work = work_at(args, smem, blockIdx.x, piece);
    write_slot(args, smem, Layout::first_at(smem), work, 0, piece);
    if (!kOptimistic) return;
#pragma unroll
    for (int place = 0; place < kPlaces; place++) {
        store_shared_4(Layout::placed_at(smem, place), work.is_piece() ? kNoTile : blockIdx.x);
    }
}

// Of the scheduling thread, which has few registers.
struct TileScheduler {
    const u32 smem;
    u32 count = 0;       // tiles so far, beside the first one, which every role computes
    u32 stride = 0;      // items so far, the same, where they are taken by stride
    bool ended = false;  // no tile follows
    __device__ __forceinline__ explicit TileScheduler(u32 smem) : smem(smem) {}

    // Takes the next tile once it is asked for, and publishes it. Returns whether there is one.
    __device__ __forceinline__ bool publish_next(const KernelArgs& args) {
        mbarrier_wait(Layout::ask_work_at(smem), count & 1);
        mbarrier_wait(WorkPipeline::empty_at(smem, count % 2), ~(count >> 1) & 1);
        u32 index;
        Work work;
        Piece piece;
        // Items without rows are nothing.
        do {
            if (found_again(smem) & kSecondPass) {
                do index = take_again(smem);
                while (index == kNoTile);
            } else if (kQueue && args.queue >= 0) {
                u32* queue = tile_queues + args.queue;
                const u32 taken = atomic_add(queue, 1);
                index = gridDim.x + taken;
                // Every thread block makes one fetch that fails; the last of them resets the counter.
                if (taken + 1 == FT_TILES(args, smem)) *queue = 0;
            } else {
                index = blockIdx.x + ++stride * gridDim.x;
            }
            work = work_at(args, smem, index, piece);
        } while (work.live && work.tile.rows == 0);
        const u32 found = found_again(smem);
        work.careful |= found;
        work.last |= found & kSecondPass;
        if (kOptimistic && found == 0 && work.live) {
            store_shared_4(Layout::placed_at(smem, (count + 1) % kPlaces), work.is_piece() ? kNoTile : index);
        }
        const u32 stage = count % 2, slot = WorkPipeline::buffer_at(smem, stage);
        write_slot(args, smem, slot, work, (count + 1) % kPlaces, piece);
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
// Every thread block has a first tile, which lies in a slot of its own. As `next`.
__device__ __forceinline__ Work first_work(u32 smem, int consumer = -1) {
    Work work = read_slot(Layout::first_at(smem));
    if (kTrim && consumer >= 0) *(uint4*)&work.own = load_shared_16(part_in(Layout::first_at(smem), consumer));
    return work;
}
static_assert(sizeof(Work) == Layout::kBytesWork, "a slot");
static_assert(sizeof(Work) == sizeof(WorkTile) + 2 * sizeof(BlockRange) + 6 * sizeof(int),
              "no word of a stored vector is without a value");
