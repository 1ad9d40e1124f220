// What a thread block computes: a range of units, each of kKeyWarps key blocks of one tile. A tile is up to kRows rows
// of one KV head of one sequence; rows of the heads that share it lie side by side, head by head within a query.
//
//   units in order: sequence, KV head, row tile, what a tile costs beside its keys, key blocks
//   thread block c of G takes U / G of all U units, the first U % G of them one more: at most one tile that began
//   before, whole tiles, and one that ends behind.
//
// Where thread blocks have several tiles each, one costs as much as kTileUnits units of keys before its first one (Q,
// and the merge at its end): without them those with many short sequences took twice as long as others. Where tiles are
// few, every thread block has one share or two, and the units of keys alone are even: 16 x 8192 took 141 us so, and 150
// us with units for tiles.
//
// Where all sequences have as many tiles and these as many units, as in a batch of one length, a thread block has
// whole tiles or one of the equal pieces of a tile instead, unless that leaves too many of them idle: no tile is cut
// where the ranges of two meet. us, even ranges and so (H200, 32/8 heads of 128): 8 x 8192 with 4 rows 81.3 and 76.4,
// 32 x 8192 of 8/1 heads 45.7 and 43.5, 16 x 8192 133.8 and 131.6, in e4m3 8 x 8192 with 4 rows 57.9 and 50.9.
constexpr int kTileUnits = @{ tile_units }@;

struct Range {
    i64 begin, end;
    i64 each;        // units of a thread block, or tiles or units of a piece; the first `more` have one more
    int more, blocks;
    int tile_units;  // what a tile costs beside its keys
    int pieces;      // of every tile, where all are alike and dealt out so; else 0
    // Where the first unit is.
    int kv_head, tile, unit, sequence;
    Sequence s;
};

// What of a tile a thread block computes.
struct Share {
    int sequence, kv_head, tile;
    int rows;                // of the tile
    int q_len, kv_len;
    i64 q_row;
    int window_left, window_right;
    int units;               // of this share
    int pieces;              // thread blocks that share the tile
    int first;               // the first of them
    int nth;                 // which of them this is
};

// Query heads of a KV head.
using Group = Divisor;
__device__ __forceinline__ int tiles_of(Group group, const Sequence& s) {
    return int((u64(s.q_len) * group.by + kRows - 1) / kRows);
}

// The key blocks that a tile visits: those before and behind are seen by none of its rows.
struct TileBlocks {
    int begin, end;
    __device__ __forceinline__ int units() const { return max_of(1, (end - begin + kKeyWarps - 1) / kKeyWarps); }
};
__device__ __forceinline__ TileBlocks tile_blocks(const KernelArgs& args, Group group, const Sequence& s, int b,
                                                  int tile) {
    // Rows see what the first and the last of them see, without a mask everything.
    int first = 0, last = 0;
    if (kMaskLeft || kMaskRight || kProgramMask) {
        first = int(group.quotient(i64(tile) * kRows));
        last = int(group.quotient(min_of<i64>(i64(tile) * kRows + kRows, i64(s.q_len) * group.by) - 1));
    }
    KeyRange keys = {live_keys<kMaskLeft, kMaskRight>(s, first).first, live_keys<kMaskLeft, kMaskRight>(s, last).last};
#if FT_PROGRAM
    if (kProgramMask && !kMaskOfHeads) {
        const KeyRange seen = program_keys(ProgramHead{&args.side, b, 0, 0, s.q_len, s.kv_len}, first, last);
        keys.first = max_of(keys.first, seen.first), keys.last = min_of(keys.last, seen.last);
    }
#endif
    if (keys.last < keys.first) return TileBlocks{0, 0};
    return TileBlocks{int(u32(keys.first) / kBlockKV), int(u32(keys.last) / kBlockKV) + 1};
}

// Units of one KV head of a sequence, and the fewest and the most of a tile without what it costs beside its keys.
struct HeadUnits {
    i64 sum;
    int fewest, most;
};
__device__ __forceinline__ HeadUnits head_units(const KernelArgs& args, Group group, const Sequence& s, int b,
                                                int tile_units) {
    const int tiles = tiles_of(group, s);
    HeadUnits units = {i64(tiles) * tile_units, 0x7fffffff, 0};
#pragma unroll 1
    for (int t = 0; t < tiles; t++) {
        const int n = tile_blocks(args, group, s, b, t).units();
        units.sum += n, units.fewest = min_of(units.fewest, n), units.most = max_of(units.most, n);
    }
    return units;
}

// The thread block that has a unit.
__device__ __forceinline__ int owner_of(i64 unit, i64 each, int more) {
    const i64 longer = more * (each + 1);
    return int(unit < longer ? quotient(unit, each + 1) : more + quotient(unit - longer, each));
}
