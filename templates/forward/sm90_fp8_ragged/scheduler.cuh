// Persistent thread blocks: each takes the next tile by an atomic counter in global memory, or every gridDim.x-th one.
// Who loads finds its tile in the table and reads the sequence's lengths, and passes both on.

// Tiles taken so far, beside the first one of each thread block: a counter for each stream that launches at the same
// time as others. The host says which; a launch without one takes tiles by stride.
constexpr int kQueues = @{ tile_queues }@;
__device__ u32 tile_queues[kQueues];

struct alignas(16) Work {
    WorkTile tile;
    BlockRange blocks;
    int live;  // whether there is a tile
};
static_assert(sizeof(Work) == Layout::kBytesWork, "a slot");

// A tile by its index, with the blocks that sizes and a program's mask leave of it. By whole warps.
__device__ __forceinline__ Work work_at(const KernelArgs& args, u32 smem, u32 index) {
    Work w;
    ItemPlace place = {Segments(BlockRange{0, 0, 0, 0}, kUncut), 0, 0};
    const u32 tiles = FT_TILES(args, smem);
    w.live = index < tiles;
    w.tile = tile_at<kBlockQ, kPackGroup, kMaskRight || kProgramMask>(args, smem, min_of(index, tiles - 1), place);
    w.blocks = blocks_of<kBlockKV, kMaskLeft, kMaskRight>(args, w.tile);
    if constexpr (kProgramMask) {
        const ProgramHead head = program_head(args, FT_SIZES(args, w.tile), w.tile);
        if (w.live) w.blocks = program_blocks<kBlockKV>(head, w.tile.row, w.tile.row + w.tile.rows - 1, w.blocks);
    }
    return w;
}

// The tile after the one with this index. `taken` counts the tiles of this thread block.
__device__ __forceinline__ u32 next_index(const KernelArgs& args, u32 smem, u32 taken) {
    if (args.queue < 0) return blockIdx.x + taken * gridDim.x;
    u32* const queue = tile_queues + args.queue;
    u32 before;
    asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(queue) : "memory");
    // Every thread block that has a tile makes one fetch that fails; the last of them resets the counter.
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

    __device__ __forceinline__ Work next(const KernelArgs&) {
        slots.wait(smem);
        Work work;
        uint4* const words = (uint4*)&work;
#pragma unroll
        for (int i = 0; i < Layout::kBytesWork / 16; i++) words[i] = load_shared_16(slots.buffer(smem) + i * 16);
        __syncwarp();
        if (threadIdx.x % 32 == 0) slots.release(smem);
        slots.advance();
        return work;
    }
};
