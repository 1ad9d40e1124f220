// Follows forward/sm90/tiles.cuh, whose fixes belong here too. Apart, since the machine code of 20 of 40 dense kernels
// changed when both families shared this text.
//
// Which key blocks a tile visits, alone or together with the others of its cluster.

// The key blocks of a tile, whose rows count query heads of a group apart. Without any, begin and end are equal.
template <int kBlockKV, bool kMaskLeft, bool kMaskRight>
__device__ __forceinline__ BlockRange blocks_of(const Sm90Args& args, const WorkTile& tile) {
    WorkTile positions = tile;
    positions.row = tile.row >> args.group_shift;
    positions.rows = ((tile.row + tile.rows - 1) >> args.group_shift) - positions.row + 1;
    BlockRange b = visit_blocks<kBlockKV, kMaskLeft, kMaskRight>(FT_SIZES(args, tile), positions);
    if (tile.rows == 0 || b.end < b.begin) b.end = b.begin;
    return b;
}

// The key blocks that arrive for all tiles of a cluster: what any of them visits, unmasked where no one masks it.
template <int kBlockQ, int kCluster, int kBlockKV, bool kMaskLeft, bool kMaskRight>
__device__ __forceinline__ BlockRange blocks_of_cluster(const Sm90Args& args, const WorkTile& tile, const BlockRange& own) {
    BlockRange all = own;
    const int first = tile.row - tile.row / kBlockQ % kCluster * kBlockQ;
#pragma unroll
    for (int i = 0; i < (kCluster > 1 ? kCluster : 0); i++) {
        WorkTile other = tile;
        other.row = first + i * kBlockQ;
        other.rows = max_of(0, min_of(kBlockQ, (FT_SIZES(args, tile).q_len << args.group_shift) - other.row));
        const BlockRange b = blocks_of<kBlockKV, kMaskLeft, kMaskRight>(args, other);
        if (b.begin == b.end) continue;
        const bool none = all.begin == all.end;
        all.begin = none ? b.begin : min_of(all.begin, b.begin);
        all.end = none ? b.end : max_of(all.end, b.end);
        all.full_begin = none ? b.full_begin : max_of(all.full_begin, b.full_begin);
        all.full_end = none ? b.full_end : min_of(all.full_end, b.full_end);
    }
    return all;
}

template <bool kMaskLeft> __device__ __forceinline__ bool is_masked(const BlockRange& blocks, int n) {
    return n >= blocks.full_end || (kMaskLeft && n < blocks.full_begin);
}
