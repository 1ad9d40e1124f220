// Which tile a thread block computes and which key blocks it visits.

@{ sm90_args }@
// The tile with an index: sections of units one after the other, behind those of single KV heads; inside of one, the
// same blocks of all of its units, longest first where the mask makes lengths differ.
template <int kBlockQ, bool kPackGroup, bool kLongestLast>
__device__ __forceinline__ Tile tile_at(const Sm90Args& args, u32 index) {
    const u32 blocks = u32(args.blocks), units = u32(args.forward.batch) * u32(args.unit_heads);
    const u32 leading = u32(args.leading) * blocks;
    const bool leads = index < leading;
    const u32 section = leads ? u32(args.unit_heads) / u32(args.forward.kv_heads) : u32(args.section),
              whole = section * blocks;
    const u32 at = index - (leads ? 0 : leading);
    const u32 first = at / whole * section + (leads ? 0 : u32(args.leading)), in_section = at % whole;
    const u32 together = min_of(section, units - first);
    u32 block = in_section / together;
    const u32 unit = first + in_section % together;
    if (kLongestLast) block = blocks - 1 - block;
    Tile t;
    t.batch = int(unit / u32(args.unit_heads));
    t.head = int(unit % u32(args.unit_heads));
    t.kv_head = kPackGroup && args.group_shift > 0 ? t.head : t.head / (args.unit_heads / args.forward.kv_heads);
    t.row = int(block) * kBlockQ;
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

template <bool kMaskLeft> __device__ __forceinline__ bool is_masked(const BlockRange& blocks, int n) {
    return n >= blocks.full_end || (kMaskLeft && n < blocks.full_begin);
}
