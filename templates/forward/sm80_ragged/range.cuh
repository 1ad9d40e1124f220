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

// Shared memory before the first copies: what the first sequence is like or sums of warps, and behind them what is
// found.
constexpr u32 kFoundAt = 512;
static_assert(kFoundAt + sizeof(Range) <= Layout::kBytes, "what is found");
__device__ __forceinline__ u8* range_room(u32 offset) {
    extern __shared__ __align__(128) u8 smem[];
    return smem + offset;
}

// Of some threads: the units of their keys and their tiles, which Q has no room for 2^32 of.
struct Sums {
    i64 units;
    u32 tiles;
    __device__ __forceinline__ void add(const Sums& x) { units += x.units, tiles += x.tiles; }
};

// The sums of the threads before this one, and of all in `total`.
__device__ __forceinline__ Sums sum_before(const Sums& own, Sums& total) {
    static_assert(kThreads / 32 * sizeof(Sums) <= kFoundAt, "sums of warps");
    Sums* const sums = (Sums*)range_room(0);
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
constexpr int kLengths = 13;
struct Lengths {
    Entry entries[kLengths];
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
    for (int i = 0; i < kLengths; i++) {
        const Entry &x = a.entries[i], &y = b.entries[i];
        bits |= (x.low ^ y.low) | (x.high ^ y.high);
    }
    return bits != 0;
}

// What every KV head has in tiles, and every tile in units; units of -1 where they differ.
struct Alike {
    int tiles, units;
};

// The sequences of a thread, which follow each other.
__device__ __forceinline__ int sequences_each(const KernelArgs& args) {
    return int(u32(args.batch + kThreads - 1) / kThreads);
}
struct Own {
    int begin, end;
    Sums sums;
    Alike alike;
    // The first of them, and one of its heads.
    Sequence s;
    i64 head_units;
};

__device__ __forceinline__ Own own_sequences(const KernelArgs& args, Group group, int begin, int end,
                                             const Lengths& first) {
    Own own = {begin, end, {0, 0}, {0, 0}};
#pragma unroll 1
    for (int b = end - 1; b >= begin; b--) {
        own.s = sequence_of(args, b, b == begin ? first : read_lengths(args, b));
        const HeadUnits units = head_units(args, group, own.s, b, 0);
        const int tiles = tiles_of(group, own.s);
        own.head_units = units.sum;
        own.sums.add(Sums{units.sum * args.kv_heads, u32(tiles) * args.kv_heads});
        const bool alike = b == end - 1 || (tiles == own.alike.tiles && units.most == own.alike.units);
        own.alike = Alike{tiles, alike && units.fewest == units.most ? units.most : -1};
    }
    return own;
}

// What a tile costs beside its keys.
__device__ __forceinline__ int cost_of_tile(u32 tiles) {
    return tiles >= (kBlocksPerSM > 2 ? 1 : 2) * gridDim.x ? kTileUnits : 0;
}

// Deals out whole tiles or equal pieces of them, where all sequences have as many tiles and all tiles as many units.
// Sequences without rows may follow, as where a captured graph has more of them than a step needs. False where the
// batch is not so, or the fullest thread block had too much. Where the range begins follows from the first sequence:
// no scan, whose shuffles and sums took 1.2 us of the 3.4 from the start of a launch until its range was known.
__device__ __forceinline__ bool deal_alike(const KernelArgs& args, const Own& own, Range& range) {
    Alike& of_first = *(Alike*)range_room(0);
    if (threadIdx.x == 0) of_first = own.alike;
    const bool rows = own.sums.tiles != 0;
    const int threads = __syncthreads_count(rows);  // with rows
    const int each = of_first.tiles, units = of_first.units;
    const bool unlike = own.alike.tiles != each || own.alike.units != units || int(threadIdx.x) >= threads;
    if (__syncthreads_or(rows && unlike) || threads == 0 || units < 0) return false;
    const int sequences = min_of(threads * sequences_each(args), args.batch);
    const i64 tiles = i64(sequences) * args.kv_heads * each;
    if (tiles * units >> 31 != 0) return false;
    const u32 blocks = gridDim.x, c = blockIdx.x;
    const u32 pieces = pieces_of_each(u32(tiles), units, int(blocks));
    if (pieces == 0) return false;

    range.pieces = int(pieces), range.tile_units = cost_of_tile(u32(tiles));
    const u32 of_tile = u32(units + range.tile_units);
    const bool cut = u32(tiles) <= blocks;  // into pieces, which may be one
    const u32 parts = cut ? pieces : blocks, all = cut ? of_tile : u32(tiles);
    u32 tile = cut ? c / pieces : 0;
    const u32 nth = c - tile * pieces;
    range.each = all / parts, range.more = int(all - u32(range.each) * parts);
    range.blocks = int(cut ? pieces * u32(tiles) : blocks);
    const u32 first = nth * u32(range.each) + min_of(nth, u32(range.more));
    const u32 some = u32(range.each) + (nth < u32(range.more));
    if (!cut) tile = first;
    range.unit = cut ? int(first) : 0;
    range.begin = i64(tile) * of_tile + range.unit, range.end = range.begin + i64(some) * (cut ? 1 : of_tile);
    const u32 head = each == 1 ? tile : tile / u32(each);
    range.tile = int(tile - head * u32(each));
    range.sequence = int(head / u32(args.kv_heads)), range.kv_head = int(head - range.sequence * args.kv_heads);
    if (c >= u32(range.blocks)) range.begin = range.end = 0, range.sequence = 0;
    if (range.sequence >= own.begin && range.sequence < own.end) {
        ((Range*)range_room(kFoundAt))->s = range.sequence == own.begin ? own.s : sequence_of(args, range.sequence);
    }
    __syncthreads();
    range.s = ((Range*)range_room(kFoundAt))->s;
    return true;
}

// Deals out all units evenly. A scan over the threads tells whose sequences hold the range's first unit.
__device__ __forceinline__ void deal_evenly(const KernelArgs& args, Group group, const Own& own, Range& range) {
    Range& found = *(Range*)range_room(kFoundAt);
    Sums total;
    const Sums before = sum_before(own.sums, total);
    range.pieces = 0, range.tile_units = cost_of_tile(total.tiles);
    const auto units_of = [&](const Sums& x) { return x.units + i64(x.tiles) * range.tile_units; };
    const i64 units = units_of(total);
    const int c = blockIdx.x;
    range.blocks = int(min_of<i64>(gridDim.x, units));
    range.begin = range.end = 0;
    if (c >= range.blocks) return;
    range.each = quotient(units, range.blocks), range.more = int(units - range.each * range.blocks);
    range.begin = c * range.each + min_of(c, range.more), range.end = range.begin + range.each + (c < range.more);
    i64 at = range.begin - units_of(before);
    if (at >= 0 && at < units_of(own.sums)) {
        int b = own.begin;
        Sequence s = own.s;
        i64 of_head = own.head_units + i64(tiles_of(group, s)) * range.tile_units;
        while (at >= of_head * args.kv_heads) {
            at -= of_head * args.kv_heads;
            s = sequence_of(args, ++b);
            of_head = head_units(args, group, s, b, range.tile_units).sum;
        }
        const int head = int(quotient(at, of_head));
        at -= head * of_head;
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

// The range of this thread block, once the launch before has ended. Every thread looks at some sequences that follow
// each other.
//
// That takes latencies and code that is fetched, and is done before the launch before has ended. Who writes lengths is
// not known here: they are read again behind the wait, by code that is there by then, and the range is kept where none
// has changed. us of calls behind each other with the range found behind the wait and so, of a kernel whose ranges a
// scan found (H200, 32/8 heads of 128): 1 x 4096 15.7 and 13.8, 16 x 8192 131.6 and 129.5, 128 of 200 to 3000 keys
// 214.5 and 213.7.
//
// More is not read early. With the first pages looked up before the wait too, and both read again before the first keys
// are asked for, 1 x 4096 takes 12.7 us where it takes 11.9, and 16 x 8192 130.3 and 129.7; read again behind the first
// keys they wait in line for 1.5 us, 12.5 and 130.4.
//
// Those wait first who have more sequences than threads, which are not kept to compare, or several tiles of one, which
// lengths of before may make many, or a program's mask, which may read any tensor.
__device__ __forceinline__ Range find_range(const KernelArgs& args, Group group) {
    const int each = sequences_each(args);
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
        const Own own = own_sequences(args, group, begin, end, lengths);
        if (!deal_alike(args, own, range)) deal_evenly(args, group, own, range);
        if (waited) break;
        wait_for_launch_before();
    }
    __syncthreads();  // what is found is read before a ring lies there
    return range;
}
