// Finds the range of a thread block from the lengths of all sequences.

// The most that the fullest thread block may have of whole tiles or equal pieces, in percent of an even range.
constexpr int kFullest = @{ fullest }@;

// The pieces of every tile where all have `units`, 1 of whole tiles; 0 where the fullest thread block had too much by
// them. All units are fewer than 2^31.
__device__ __forceinline__ int pieces_of_each(u32 tiles, int units, int blocks) {
    if (tiles > u32(blocks)) return ((tiles - 1) / u32(blocks) + 1) * u64(blocks) * 100 <= u64(tiles) * kFullest;
    const u32 pieces = min_of(u32(blocks) / tiles, u32(units)), all = tiles * u32(units);
    const u64 fullest = u64((u32(units) - 1) / pieces + 1) * u32(blocks);
    return fullest < u64(all) + u32(blocks) || fullest * 100 <= u64(all) * kFullest ? int(pieces) : 0;
}

// Whether thread blocks may start before the launch before has ended: on other devices the wait is none.
#if __CUDA_ARCH__ >= 900
constexpr bool kStartsEarly = true;
#else
constexpr bool kStartsEarly = false;
#endif

// Shared memory before the first copies: sums of warps, and behind them what is found.
constexpr u32 kFoundAt = 512;
static_assert(kFoundAt + sizeof(Range) <= Layout::kBytes, "what is found");

// Of some threads: the units of their keys and their tiles, which Q has no room for 2^32 of.
struct Sums {
    i64 units;
    u32 tiles;
    __device__ __forceinline__ void add(const Sums& x) { units += x.units, tiles += x.tiles; }
};

// The sums of the threads before this one, and of all in `total`. `sums` is one for each warp.
__device__ __forceinline__ Sums sum_before(const Sums& own, Sums* sums, Sums& total) {
    static_assert(kThreads / 32 * sizeof(Sums) <= kFoundAt, "sums of warps");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Sums to = own;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const Sums x = {__shfl_up_sync(0xffffffff, to.units, apart), __shfl_up_sync(0xffffffff, to.tiles, apart)};
        if (lane >= apart) to.add(x);
    }
    if (lane == 31) sums[warp] = to;
    __syncthreads();
    total = Sums{0, 0};
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) {
        if (w == warp) to.add(total);
        total.add(sums[w]);
    }
    return Sums{to.units - own.units, to.tiles - own.tiles};
}

// What the arrays of lengths hold of one sequence, in the order of sequence_by().
struct Lengths {
    Entry entries[13];
};

// As it is now, where others may write it.
__device__ __forceinline__ Lengths read_lengths(const KernelArgs& args, int b) {
    Lengths lengths;
    Entry* to = lengths.entries;
    sequence_by(args, b, [&](const int* array, int i, int words) {
        const int* const at = array + i64(i) * words;
        if (!kStartsEarly) return *to++ = read_entry(array, i, words);
        return *to++ = Entry{load_if(at, array != nullptr), load_if(at + 1, array != nullptr && words == 2)};
    });
    return lengths;
}
__device__ __forceinline__ Sequence sequence_of(const KernelArgs& args, int b, const Lengths& lengths) {
    const Entry* from = lengths.entries;
    return sequence_by(args, b, [&](const int*, int, int) { return *from++; });
}
__device__ __forceinline__ bool differ(const Lengths& a, const Lengths& b) {
    int bits = 0;
#pragma unroll
    for (int i = 0; i < 13; i++) {
        const Entry &x = a.entries[i], &y = b.entries[i];
        bits |= (x.low ^ y.low) | (x.high ^ y.high);
    }
    return bits != 0;
}

// The range of this thread block, once the launch before has ended. Every thread sums up the units of some sequences
// that follow each other; a scan over the threads tells whose hold the range's first unit.
//
// That takes 1.3 us of latencies and of code that is fetched, and is done before the launch before has ended. Who
// writes lengths is not known here: they are read again behind the wait, by code that is there by then, and the range
// is kept where none has changed. us of calls behind each other with the range found behind the wait and so (H200, 32/8
// heads of 128): 1 x 4096 15.7 and 13.8, 16 x 8192 131.6 and 129.5, 128 of 200 to 3000 keys 214.5 and 213.7. Compared
// beside the first lookup in a table, whose latency is as long, by code of its own, lengths cost 0.6 to 3 us more.
//
// Those wait first who have more sequences than threads, which are not kept to compare, or several tiles of one, which
// lengths of before may make many, or a program's mask, which may read any tensor.
__device__ __forceinline__ Range find_range(const KernelArgs& args, Group group) {
    extern __shared__ __align__(128) u8 smem[];
    Range& found = *(Range*)(smem + kFoundAt);
    const int each = int(u32(args.batch + kThreads - 1) / kThreads), c = blockIdx.x, blocks = gridDim.x;
    const int begin = min_of(int(threadIdx.x) * each, args.batch), end = min_of(begin + each, args.batch);
    const bool early = kStartsEarly && !kProgramMask && each == 1 && i64(args.q_len) * group.by <= kRows;
    if (!early) wait_for_launch_before();
    Range range;
    Lengths lengths = {};  // of the first of this thread's
#pragma unroll 1
    for (bool waited = !early;; waited = true) {
        Lengths now = {};
        if (begin < end) now = read_lengths(args, begin);
        if (early && waited && !__syncthreads_or(differ(now, lengths))) return range;
        lengths = now;
        Sums own = {0, 0};
        Sequence s;
        HeadUnits units = {};  // of one of its heads
        int fewest = 0x7fffffff, most = 0;
#pragma unroll 1
        for (int b = end - 1; b >= begin; b--) {
            now = b == begin ? lengths : read_lengths(args, b);
            s = sequence_of(args, b, now);
            units = head_units(args, group, s, b, 0);
            own.add(Sums{units.sum * args.kv_heads, u32(tiles_of(group, s)) * args.kv_heads});
            fewest = min_of(fewest, units.fewest), most = max_of(most, units.most);
        }
        Sums total;
        const Sums before = sum_before(own, (Sums*)smem, total);
        const u32 tiles = total.tiles;
        range.tile_units = tiles >= (kBlocksPerSM > 2 ? 1 : 2) * u32(blocks) ? kTileUnits : 0;
        const auto units_of = [&](const Sums& x) { return x.units + i64(x.tiles) * range.tile_units; };

        // What each tile has, if it is the same.
        const int mean = u64(total.units) >> 31 == 0 && tiles != 0 ? int(u32(total.units) / tiles) : 0;
        const bool unlike = __syncthreads_or(most != 0 && (fewest != mean || most != mean));
        range.pieces = unlike || tiles == 0 ? 0 : pieces_of_each(tiles, mean, blocks);

        // This thread block has part `nth` of `parts` of what lies behind unit `from`, dealt out by `lot` units.
        const int of_tile = mean + range.tile_units;
        i64 from = 0, lots = units_of(total);
        int lot = 1, nth = c, parts = int(min_of<i64>(blocks, lots));
        range.blocks = parts;
        if (range.pieces != 0 && tiles <= u32(blocks)) {  // a piece of a tile
            const int tile = int(u32(c) / u32(range.pieces));
            parts = range.pieces, nth -= tile * parts;
            from = i64(tile) * of_tile, lots = of_tile;
            range.blocks = parts * int(tiles);
        } else if (range.pieces != 0) {  // whole tiles
            lots = tiles, lot = of_tile;
        }
        range.begin = range.end = 0;
        if (c < range.blocks) {
            range.each = quotient(lots, parts), range.more = int(lots - range.each * parts);
            range.begin = from + (nth * range.each + min_of(nth, range.more)) * lot;
            range.end = range.begin + (range.each + (nth < range.more)) * lot;
            i64 at = range.begin - units_of(before);
            if (at >= 0 && at < units_of(own)) {
                int b = begin;
                units.sum += i64(tiles_of(group, s)) * range.tile_units;
                while (at >= units.sum * args.kv_heads) {
                    at -= units.sum * args.kv_heads;
                    s = sequence_of(args, ++b);
                    units = head_units(args, group, s, b, range.tile_units);
                }
                const int head = int(quotient(at, units.sum));
                at -= head * units.sum;
                int t = 0;
                for (;; t++) {
                    const int n = tile_blocks(args, group, s, b, t).units() + range.tile_units;
                    if (at < n) break;
                    at -= n;
                }
                found.kv_head = head, found.tile = t, found.unit = int(at), found.sequence = b, found.s = s;
            }
            __syncthreads();
            range.kv_head = found.kv_head, range.tile = found.tile, range.unit = found.unit;
            range.sequence = found.sequence, range.s = found.s;
        }
        __syncthreads();  // it is read before a ring lies there
        if (waited) return range;
        wait_for_launch_before();
    }
}
