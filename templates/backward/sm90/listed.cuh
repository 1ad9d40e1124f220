// Which tiles the mask of a score program leaves, and how a loader tells the other threads.

__device__ __forceinline__ ProgramHead head_of_program(const KernelArgs& args, const Pair& pair, int head) {
    return program_head(args, pair.sizes(args.backward), Tile{pair.batch, head, pair.kv_head, 0, 0});
}

// Whether the program's mask leaves no pair of a query tile and a key block (-1), every one (1), or neither is known.
__device__ __forceinline__ int program_kind(const KernelArgs& args, const Pair& pair, const ProgramHead& head, int tile,
                                            int block) {
    if (!kProgramMask) return 1;
    const auto& sizes = pair.sizes(args.backward);
    const int row = tile * kBlockQ, key = block * kKeys;
    return program_tile(head, row, min_of(row + kBlockQ, sizes.q_len) - 1, key, min_of(key + kKeys, sizes.kv_len) - 1);
}

// What a buffer holds: a query tile of a head, or nothing, behind the last of a block.
struct Listed {
    int tile, head;  // tile: -1 behind the last; with kCut where some pairs take no part. head: of the group
    static constexpr int kCut = 1 << 30;
    static __device__ __forceinline__ Listed read(u32 address) {
        return {int(load_shared_4(address)), int(load_shared_4(address + 4))};
    }
    __device__ __forceinline__ void write(u32 address) const {
        store_shared_4(address, u32(tile));
        store_shared_4(address + 4, u32(head));
    }
};
constexpr int kBytesListed = 8;
