// What a thread block computes: a range of units, each of kKeyWarps key blocks of one tile. A tile is up to kRows rows
// of one KV head of one sequence; rows of the heads that share it lie side by side, head by head within a query.
//
//   units in order: sequence, KV head, row tile, what a tile costs beside its keys, key blocks
//   thread block c of G takes units [U c / G, U (c + 1) / G) of all U: at most one tile that began before, whole tiles,
//   and one that ends behind.
//
// Where thread blocks have several tiles each, one costs as much as kTileUnits units of keys before its first one (Q,
// and the merge at its end): without them those with many short sequences took twice as long as others. Where tiles are
// few, every thread block has one share or two, and the units of keys alone are even: 16 x 8192 took 141 us so, and 150
// us with units for tiles.
constexpr int kTileUnits = @{ tile_units }@;

struct Range {
    i64 begin, end, total;
    // Where the first unit is.
    int sequence, kv_head, tile, unit;
    int blocks;      // thread blocks that have units
    int tile_units;  // what a tile costs beside its keys
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

__device__ __forceinline__ int group_of(const RaggedArgs& args) { return args.heads / args.kv_heads; }
__device__ __forceinline__ int tiles_of(const RaggedArgs& args, const Sequence& s) {
    return int((i64(s.q_len) * group_of(args) + kRows - 1) / kRows);
}

// The key blocks that a tile visits: those before and behind are seen by none of its rows.
struct TileBlocks {
    int begin, end;
    __device__ __forceinline__ int units() const { return max_of(1, (end - begin + kKeyWarps - 1) / kKeyWarps); }
};
__device__ __forceinline__ TileBlocks tile_blocks(const KernelArgs& args, const Sequence& s, int b, int tile) {
    const int group = group_of(args);
    const int first = int(i64(tile) * kRows / group);
    const int last = int(min_of<i64>(i64(tile) * kRows + kRows, i64(s.q_len) * group) - 1) / group;
    KeyRange keys = {live_keys<kMaskLeft, kMaskRight>(s, first).first, live_keys<kMaskLeft, kMaskRight>(s, last).last};
#if FT_PROGRAM
    if (kProgramMask && !kMaskOfHeads) {
        const KeyRange seen = program_keys(ProgramHead{&args.side, b, 0, 0, s.q_len, s.kv_len}, first, last);
        keys.first = max_of(keys.first, seen.first), keys.last = min_of(keys.last, seen.last);
    }
#endif
    if (keys.last < keys.first) return TileBlocks{0, 0};
    return TileBlocks{keys.first / kBlockKV, keys.last / kBlockKV + 1};
}

// Units of one KV head of a sequence, those of keys alone.
__device__ __forceinline__ i64 head_units(const KernelArgs& args, const Sequence& s, int b) {
    const int tiles = tiles_of(args, s);
    i64 units = 0;
    for (int t = 0; t < tiles; t++) units += tile_blocks(args, s, b, t).units();
    return units;
}

// The thread block that has a unit.
__device__ __forceinline__ int owner_of(i64 unit, i64 total, int blocks) {
    return int(((unit + 1) * blocks + total - 1) / total) - 1;
}

// The range of this thread block. Every thread sums up the units of some sequences that follow each other; a scan over
// the threads tells whose hold the range's first unit. Uses the first kThreads * 8 + 64 bytes of shared memory.
__device__ __forceinline__ Range find_range(const KernelArgs& args) {
    extern __shared__ __align__(128) u8 smem[];
    i64* const sums = (i64*)smem;
    int* const found = (int*)(smem + kThreads * 8);
    const int each = (args.batch + kThreads - 1) / kThreads;
    const int begin = min_of(int(threadIdx.x) * each, args.batch), end = min_of(begin + each, args.batch);
    i64 own = 0, own_tiles = 0;
    for (int b = begin; b < end; b++) {
        const Sequence s = sequence_of(args, b);
        own += head_units(args, s, b) * args.kv_heads;
        own_tiles += i64(tiles_of(args, s)) * args.kv_heads;
    }
    Range range;
    {
        i64 tiles = own_tiles;
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) tiles += __shfl_xor_sync(0xffffffff, tiles, apart);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = tiles;
        __syncthreads();
        tiles = 0;
#pragma unroll
        for (int w = 0; w < kThreads / 32; w++) tiles += sums[w];
        range.tile_units = tiles >= 2 * gridDim.x ? kTileUnits : 0;
        own += own_tiles * range.tile_units;
        __syncthreads();
    }
    // Within warps by shuffles, and over the warps by their last lanes' sums.
    i64 before = own;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const i64 x = __shfl_up_sync(0xffffffff, before, apart);
        if (lane >= apart) before += x;
    }
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    i64 total = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) {
        if (w == warp) before += total;
        total += sums[w];
    }
    before -= own;
    range.total = total;
    range.blocks = int(min_of<i64>(gridDim.x, total));
    const i64 c = blockIdx.x;
    range.begin = range.end = 0;
    if (c < range.blocks) range.begin = total * c / range.blocks, range.end = total * (c + 1) / range.blocks;
    if (range.begin < range.end && before <= range.begin && range.begin < before + own) {
        i64 at = range.begin - before;
        int b = begin;
        Sequence s;
        i64 units;
        for (;; b++) {
            s = sequence_of(args, b);
            units = head_units(args, s, b) + i64(tiles_of(args, s)) * range.tile_units;
            if (at < units * args.kv_heads) break;
            at -= units * args.kv_heads;
        }
        const int head = int(at / units);
        at -= head * units;
        int t = 0;
        for (;; t++) {
            const int n = tile_blocks(args, s, b, t).units() + range.tile_units;
            if (at < n) break;
            at -= n;
        }
        found[0] = b, found[1] = head, found[2] = t, found[3] = int(at);
    }
    __syncthreads();
    range.sequence = found[0], range.kv_head = found[1], range.tile = found[2], range.unit = found[3];
    __syncthreads();  // it is read before a ring lies there
    return range;
}
