// Persistent thread blocks: each takes the next tile by an atomic counter in global memory, or every gridDim.x-th one.

// Tiles taken so far, beside the first one of each thread block: a counter for each stream that launches at the same
// time as others. The host says which; a launch without one takes tiles by stride.
constexpr int kQueues = @{ tile_queues }@;
__device__ u32 tile_queues[kQueues];

struct Work {
    Tile tile;
    BlockRange blocks;
    bool live;  // whether there is a tile
};

__device__ __forceinline__ Work work_at(const KernelArgs& args, u32 index) {
    Work w;
    w.live = index < u32(args.tiles);
    w.tile = tile_at<kBlockQ, false, kMaskRight || kProgramMask>(args, min_of(index, u32(args.tiles) - 1));
    w.blocks = blocks_of<kBlockKV, kMaskLeft, kMaskRight>(args, w.tile);
    if constexpr (kProgramMask) {
        const ProgramHead head = program_head(args, args.forward, w.tile);
        w.blocks = program_blocks<kBlockKV>(head, w.tile.row, w.tile.row + w.tile.rows - 1, w.blocks);
    }
    return w;
}

// The tile after the one with this index. `taken` counts the tiles of this thread block.
__device__ __forceinline__ u32 next_index(const KernelArgs& args, u32 taken) {
    if (args.queue < 0) return blockIdx.x + taken * gridDim.x;
    u32* const queue = tile_queues + args.queue;
    u32 before;
    asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(queue) : "memory");
    // Every thread block makes one fetch that fails; the last of them resets the counter.
    if (before + 1 == u32(args.tiles)) *queue = 0;
    return gridDim.x + before;
}

// The tiles of a role that reads them from the loader's slots, by whole warps.
struct Schedule {
    const u32 smem;
    WorkPipeline slots;
    __device__ __forceinline__ explicit Schedule(u32 smem) : smem(smem) {}

    __device__ __forceinline__ Work next(const KernelArgs& args) {
        slots.wait(smem);
        const u32 index = load_shared_4(slots.buffer(smem));
        __syncwarp();
        if (threadIdx.x % 32 == 0) slots.release(smem);
        slots.advance();
        return work_at(args, index);
    }
};
