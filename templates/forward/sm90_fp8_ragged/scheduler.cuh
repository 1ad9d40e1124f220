// Persistent thread blocks: each takes the next tile by an atomic counter in global memory, or every gridDim.x-th one.
// Who loads finds its tile in the table and reads the sequence's lengths, and passes both on.

// Tiles taken so far, beside the first one of each thread block: a counter for each stream that launches at the same
// time as others. The host says which; a launch without one takes tiles by stride.
constexpr int kQueues = @{ tile_queues }@;
__device__ u32 tile_queues[kQueues];

// Which piece of its tile an item is: its number among all items, the distance to that of the next piece, how many
// pieces there are, and which of them this is.
struct Piece {
    int item, apart, count, nth;
};

struct alignas(16) Work {
    WorkTile tile;
    BlockRange blocks;
    int live;  // whether there is a tile
    Piece piece;
    int unused = 0;  // as of forward/sm90_ragged
    __device__ __forceinline__ bool is_piece() const { return piece.count > 1; }
};
static_assert(sizeof(Work) == Layout::kBytesWork, "a slot");
static_assert(sizeof(Work) == sizeof(WorkTile) + sizeof(BlockRange) + sizeof(Piece) + 2 * sizeof(int),
              "no word of a stored vector is without a value");

// The tile, or piece of one, of an item, with the blocks that sizes and a program's mask leave of it. By whole warps.
__device__ __forceinline__ Work work_at(const KernelArgs& args, u32 smem, u32 index) {
    Work w;
    ItemPlace place = {Segments(BlockRange{0, 0, 0, 0}, kUncut), 0, 0};
    const u32 items = FT_TILES(args, smem), item = min_of(index, items - 1);
    w.live = index < items;
    w.tile = tile_at<kBlockQ, kPackGroup, kMaskRight || kProgramMask>(args, smem, item, place);
    w.blocks = blocks_of<kBlockKV, kMaskLeft, kMaskRight>(args, w.tile);
    if constexpr (kProgramMask) {
        const ProgramHead head = program_head(args, FT_SIZES(args, w.tile), w.tile);
        if (w.live) w.blocks = program_blocks<kBlockKV>(head, w.tile.row, w.tile.row + w.tile.rows - 1, w.blocks);
    }
    w.piece = Piece{int(item), place.apart, 1, 0};
    if (place.segments.count > 1) {
        // A tile without keys is in the first segment, and in segments where it has none there is nothing of it.
        const bool some = w.blocks.begin < w.blocks.end;
        const int first = some ? place.segments.of(w.blocks.begin) : 0;
        const int last = some ? place.segments.of(w.blocks.end - 1) : 0;
        if (place.segment < first || place.segment > last) {
            w.tile.rows = 0;
        } else if (first < last) {
            const int begin = place.segments.begin + place.segment * place.segments.size;
            w.blocks.begin = max_of(w.blocks.begin, begin);
            w.blocks.end = min_of(w.blocks.end, begin + place.segments.size);
            w.piece.count = last - first + 1, w.piece.nth = place.segment - first;
        }
    }
    return w;
}

// The tile after the one with this index. `taken` counts the tiles of this thread block.
__device__ __forceinline__ u32 next_index(const KernelArgs& args, u32 smem, u32 taken) {
    if (args.queue < 0) return blockIdx.x + taken * gridDim.x;
    u32* const queue = tile_queues + args.queue;
    u32 before;
    asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(queue) : "memory");
    // Every thread block that has an item makes one fetch that fails; the last of them resets the counter.
    if (before + 1 == FT_TILES(args, smem)) *queue = 0;
    return gridDim.x + before;
}

__device__ __forceinline__ void write_slot(u32 slot, const Work& work) {
    const uint4* const words = (const uint4*)&work;
#pragma unroll
    for (int i = 0; i < Layout::kBytesWork / 16; i++) store_shared_16(slot + i * 16, words[i]);
}

// The tiles of a role that reads them from the loader's slots, by whole warps.
struct Schedule {
    const u32 smem;
    WorkPipeline slots;
    __device__ __forceinline__ explicit Schedule(u32 smem) : smem(smem) {}

    __device__ __forceinline__ Work read() const {
        Work work;
        uint4* const words = (uint4*)&work;
#pragma unroll
        for (int i = 0; i < Layout::kBytesWork / 16; i++) words[i] = load_shared_16(slots.buffer(smem) + i * 16);
        return work;
    }
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) slots.release(smem);
        slots.advance();
    }
    // The next tile; with kKeeps its slot is kept until it was read `again`.
    template <bool kKeeps> __device__ __forceinline__ Work next(const KernelArgs&) {
        slots.wait(smem);
        const Work work = read();
        if (!kKeeps) release();
        return work;
    }
    // The same, which beside the products would be in registers: with pieces 316 bytes of them were spilled.
    __device__ __forceinline__ Work again(const Work&) {
        const Work work = read();
        release();
        return work;
    }
};
