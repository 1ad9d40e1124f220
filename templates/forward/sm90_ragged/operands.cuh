// Where the rows and keys of a tile lie in a ragged batch. Boxes that reach past a sequence's end bring rows of the
// next one: their scores are masked, their V is looked through, and rows of O that are not the sequence's are not
// written.

// Queries of all sequences are one pack, or each has its place in a batch.
__device__ __forceinline__ int place_in_batch(const KernelArgs& args, const WorkTile& tile) {
    return args.forward.q_begin != nullptr ? 0 : tile.batch;
}

// 64 rows of Q from `row` on, one chunk of columns.
__device__ __forceinline__ void load_rows(u32 to, const KernelArgs& args, u32 full, int chunk, const WorkTile& tile,
                                          int row) {
    tma_load(to, args.q, full, kEvictFirst, chunk * kChunkColumns, 0, tile.q_row + (row >> args.group_shift), tile.head,
             place_in_batch(args, tile));
}

// The log-sum-exp of a row, in the unit of the call.
__device__ __forceinline__ void store_lse(const KernelArgs& args, const WorkTile& tile, int row, float lse) {
    const i64* const stride = args.forward.lse_stride;
    const int head = (tile.head << args.group_shift) + (row & ((1 << args.group_shift) - 1));
    const i64 at = place_in_batch(args, tile) * stride[0] + head * stride[1] +
                   (tile.q_row + (row >> args.group_shift)) * stride[2];
    args.forward.lse[at] = lse == -FT_INFINITY ? args.forward.lse_empty : lse * args.forward.lse_unit;
}
