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

// A tile by its index, with the blocks that sizes leave of it.
__device__ __forceinline__ Work work_at(const KernelArgs& args, u32 index) {
    Work w;
    w.live = index < u32(args.tiles);
    w.tile = tile_at<kBlockQ, false, kMaskRight || kProgramMask>(args, min_of(index, u32(args.tiles) - 1));
    w.blocks = blocks_of<kBlockKV, kMaskLeft, kMaskRight>(args, w.tile);
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

// A slot of the loader's: the index of a tile and, 16 bytes further, the blocks that a program's mask leaves of it.
// Ends of documents are a binary search in memory: by every role it was 8 to 14 % of the time of 4096 rows.
__device__ __forceinline__ void write_slot(u32 slot, u32 index, const BlockRange& blocks) {
    store_shared_4(slot, index);
    if constexpr (kProgramMask) {
        store_shared_16(slot + 16, *(const uint4*)&blocks);
    }
}
__device__ __forceinline__ BlockRange blocks_in(u32 slot) {
    const uint4 words = load_shared_16(slot + 16);
    return *(const BlockRange*)&words;
}

// The tiles of a role that reads them from the loader's slots, by whole warps.
struct Schedule {
    const u32 smem;
    WorkPipeline slots;
    __device__ __forceinline__ explicit Schedule(u32 smem) : smem(smem) {}

    template <bool kKeeps> __device__ __forceinline__ Work next(const KernelArgs& args) {
        slots.wait(smem);
        const u32 index = load_shared_4(slots.buffer(smem));
        BlockRange by_program{};
        if (kProgramMask) by_program = blocks_in(slots.buffer(smem));
        __syncwarp();
        if (threadIdx.x % 32 == 0) slots.release(smem);
        slots.advance();
        Work work = work_at(args, index);
        if (kProgramMask) work.blocks = by_program;
        return work;
    }
    // The tile that was read last, which is kept in registers.
    __device__ __forceinline__ const Work& again(const Work& work) const { return work; }
};
