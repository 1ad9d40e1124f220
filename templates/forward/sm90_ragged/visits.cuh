// Follows forward/sm90/tiles.cuh, whose fixes belong here too. Apart, since the machine code of 20 of 40 dense kernels
// changed when both families shared this text.
//
// Which key blocks a tile visits.

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

template <bool kMaskLeft> __device__ __forceinline__ bool is_masked(const BlockRange& blocks, int n) {
    return n >= blocks.full_end || (kMaskLeft && n < blocks.full_begin);
}
