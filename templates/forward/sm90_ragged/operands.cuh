// Where the rows and keys of a tile lie in a ragged batch. Boxes that reach past a sequence's end bring rows of the
// next one: their scores are masked, their V is looked through, and rows of O that are not the sequence's are not
// written.

// Queries of all sequences are one pack, or each has its place in a batch.
__device__ __forceinline__ int place_in_batch(const KernelArgs& args, const WorkTile& tile) {
    return args.forward.q_begin != nullptr ? 0 : tile.batch;
}

// 64 rows of Q from `row` on, one chunk of columns.
__device__ __forceinline__ void load_rows(u32 to, const KernelArgs& args, u32 full, int chunk, const WorkTile& tile, int row) {
    tma_load(to, args.q, full, kEvictFirst, chunk * 64, 0, tile.q_row + (row >> args.group_shift), tile.head,
             place_in_batch(args, tile));
}

// The log-sum-exp of a row, in the unit of the call.
__device__ __forceinline__ void store_lse(const KernelArgs& args, const WorkTile& tile, int row, float lse) {
    const i64* const stride = args.forward.lse_stride;
    const int head = (tile.head << args.group_shift) + (row & ((1 << args.group_shift) - 1));
    const i64 at = place_in_batch(args, tile) * stride[0] + head * stride[1] + (tile.q_row + (row >> args.group_shift)) * stride[2];
    args.forward.lse[at] = lse == -FT_INFINITY ? args.forward.lse_empty : lse * args.forward.lse_unit;
}

// O of a consumer to memory, by all of its threads: 64 rows by TMA, which the first thread has issued; fewer by plain
// stores, since the box would overwrite rows of the next sequence.
__device__ __forceinline__ void send_rows(const KernelArgs& args, const WorkTile& tile, int consumer, u32 from) {
    const int first = tile.row + consumer * 64, rows = warp_uniform(min_of(tile.rows - consumer * 64, 64));
    const int place = place_in_batch(args, tile);
    if (rows == 64) {
        if (threadIdx.x % 128 != 0) return;
#pragma unroll
        for (int chunk = 0; chunk < kChunksV; chunk++) {
            tma_store(args.o, from + chunk * kBytes64Rows, chunk * 64, 0, tile.q_row + (first >> args.group_shift), tile.head, place);
        }
        tma_store_commit();
        return;
    }
    constexpr int kPieces = kHeadDimV / 8;  // of 16 bytes
    const i64* const stride = args.forward.o_stride;
    Element* const o = (Element*)args.forward.o + place * stride[0];
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < rows * kPieces; i += 128) {
        const int row = i / kPieces, piece = i % kPieces, at = first + row;
        const int head = (tile.head << args.group_shift) + (at & ((1 << args.group_shift) - 1));
        uint4* const to = (uint4*)(o + head * stride[1] + i64(tile.q_row + (at >> args.group_shift)) * stride[2] + piece * 8);
        *to = load_shared_16(from + piece / 8 * kBytes64Rows + row * 128 + ((piece ^ row) % 8 << 4));
    }
    barrier_sync(kWarpgroup + consumer, 128);  // all have read it before another tile takes its place
}
