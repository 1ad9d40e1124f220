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
constexpr int kTileUnits = @{ tile_units }@;

struct Range {
    i64 begin, end;
    i64 each;        // units of a thread block; the first `more` have one more
    int more, blocks;
    int tile_units;  // what a tile costs beside its keys
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

// Units of one KV head of a sequence.
__device__ __forceinline__ i64 head_units(const KernelArgs& args, Group group, const Sequence& s, int b,
                                          int tile_units) {
    const int tiles = tiles_of(group, s);
    i64 units = i64(tiles) * tile_units;
#pragma unroll 1
    for (int t = 0; t < tiles; t++) units += tile_blocks(args, group, s, b, t).units();
    return units;
}

// The thread block that has a unit.
__device__ __forceinline__ int owner_of(i64 unit, i64 each, int more) {
    const i64 longer = more * (each + 1);
    return int(unit < longer ? quotient(unit, each + 1) : more + quotient(unit - longer, each));
}

// The sum of a number of each thread over those before it, and over all of them in `total`. Twice in turn it needs two
// pieces of memory: nobody waits at its end.
__device__ __forceinline__ i64 sum_before(i64 own, i64* sums, i64& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 before = own;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const i64 x = __shfl_up_sync(0xffffffff, before, apart);
        if (lane >= apart) before += x;
    }
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) {
        if (w == warp) before += total;
        total += sums[w];
    }
    return before - own;
}

// The range of this thread block. Every thread sums up the units of some sequences that follow each other; a scan over
// the threads tells whose hold the range's first unit. Uses the first 512 bytes of shared memory.
__device__ __forceinline__ Range find_range(const KernelArgs& args, Group group) {
    extern __shared__ __align__(128) u8 smem[];
    i64* const sums = (i64*)smem;
    Range& found = *(Range*)(smem + 256);
    const int each = int(u32(args.batch + kThreads - 1) / kThreads);
    const int begin = min_of(int(threadIdx.x) * each, args.batch), end = min_of(begin + each, args.batch);
    i64 own = 0, own_tiles = 0;
    Sequence s;      // the first of this thread's
    i64 units = 0;   // of one of its heads
#pragma unroll 1
    for (int b = end - 1; b >= begin; b--) {
        s = sequence_of(args, b);
        units = head_units(args, group, s, b, 0);
        own += units * args.kv_heads;
        own_tiles += i64(tiles_of(group, s)) * args.kv_heads;
    }
    Range range;
    i64 total, tiles;
    sum_before(own_tiles, sums, tiles);
    range.tile_units = tiles >= 2 * gridDim.x ? kTileUnits : 0;
    own += own_tiles * range.tile_units;
    const i64 before = sum_before(own, sums + 16, total);
    range.blocks = int(min_of<i64>(gridDim.x, total));
    const int c = blockIdx.x;
    if (c >= range.blocks) {
        range.begin = range.end = 0;
        return range;
    }
    range.each = quotient(total, range.blocks), range.more = int(total - range.each * range.blocks);
    range.begin = c * range.each + min_of(c, range.more);
    range.end = range.begin + range.each + (c < range.more);
    if (before <= range.begin && range.begin < before + own) {
        i64 at = range.begin - before;
        int b = begin;
        units += i64(tiles_of(group, s)) * range.tile_units;
        while (at >= units * args.kv_heads) {
            at -= units * args.kv_heads;
            s = sequence_of(args, ++b);
            units = head_units(args, group, s, b, range.tile_units);
        }
        const int head = int(quotient(at, units));
        at -= head * units;
        int t = 0;
        for (;; t++) {
            const int n = tile_blocks(args, group, s, b, t).units() + range.tile_units;
            if (at < n) break;
            at -= n;
        }
        found.kv_head = head, found.tile = t, found.unit = int(at), found.sequence = b, found.s = s;
    }
    __syncthreads();
    range.kv_head = found.kv_head, range.tile = found.tile, range.unit = found.unit, range.sequence = found.sequence;
    range.s = found.s;
    __syncthreads();  // it is read before a ring lies there
    return range;
}
