// Which tile a thread block computes and which key blocks it visits, alone or together with the others of its cluster.

@{ sm90_args }@
// The tile with an index: sections of units one after the other, behind those of single KV heads; inside of one, the
// same blocks of all of its units, longest first where the mask makes lengths differ. The blocks of a cluster take
// neighbouring tiles of a unit. The last tile may have no row.
template <int kBlockQ, int kCluster, bool kPackGroup, bool kLongestLast>
__device__ __forceinline__ Tile tile_at(const Sm90Args& args, u32 index) {
    const u32 rank = index % kCluster, teams = u32(args.blocks) / kCluster;
    const u32 units = u32(args.forward.batch) * u32(args.unit_heads), leading = u32(args.leading) * teams;
    const bool leads = index / kCluster < leading;
    const u32 section = leads ? u32(args.unit_heads) / u32(args.forward.kv_heads) : u32(args.section), whole = section * teams;
    const u32 at = index / kCluster - (leads ? 0 : leading);
    const u32 first = at / whole * section + (leads ? 0 : u32(args.leading)), in_section = at % whole;
    const u32 together = min_of(section, units - first);
    u32 team = in_section / together;
    const u32 unit = first + in_section % together;
    if (kLongestLast) team = teams - 1 - team;
    Tile t;
    t.batch = int(unit / u32(args.unit_heads));
    t.head = int(unit % u32(args.unit_heads));
    t.kv_head = kPackGroup && args.group_shift > 0 ? t.head : t.head / (args.unit_heads / args.forward.kv_heads);
    t.row = int(team * kCluster + rank) * kBlockQ;
    t.rows = max_of(0, min_of(kBlockQ, (args.forward.q_len << args.group_shift) - t.row));
    return t;
}

// The key blocks of a tile, whose rows count query heads of a group apart. Without any, begin and end are equal.
template <int kBlockKV, bool kMaskLeft, bool kMaskRight>
__device__ __forceinline__ BlockRange blocks_of(const Sm90Args& args, const Tile& tile) {
    Tile positions = tile;
    positions.row = tile.row >> args.group_shift;
    positions.rows = ((tile.row + tile.rows - 1) >> args.group_shift) - positions.row + 1;
    BlockRange b = visit_blocks<kBlockKV, kMaskLeft, kMaskRight>(args.forward, positions);
    if (tile.rows == 0 || b.end < b.begin) b.end = b.begin;
    return b;
}

// The key blocks that arrive for all tiles of a cluster: what any of them visits, unmasked where no one masks it.
template <int kBlockQ, int kCluster, int kBlockKV, bool kMaskLeft, bool kMaskRight>
__device__ __forceinline__ BlockRange blocks_of_cluster(const Sm90Args& args, const Tile& tile, const BlockRange& own) {
    BlockRange all = own;
    const int first = tile.row - tile.row / kBlockQ % kCluster * kBlockQ;
#pragma unroll
    for (int i = 0; i < (kCluster > 1 ? kCluster : 0); i++) {
        Tile other = tile;
        other.row = first + i * kBlockQ;
        other.rows = max_of(0, min_of(kBlockQ, (args.forward.q_len << args.group_shift) - other.row));
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
