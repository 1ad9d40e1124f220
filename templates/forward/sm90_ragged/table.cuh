// The tile scheduler's table: how many items come before those of each sequence, found by every thread block from the
// lengths in device memory, so that no host and no other kernel need know them. Sequences are walked from the one with
// the most key blocks on; of batches of more than kEntries sequences, an entry is as many consecutive ones, in their
// order.
//
// An item is a tile, or a piece of one: where tiles are too few, or one too long, for the thread blocks of the launch,
// the keys of long sequences are cut into segments of as many key blocks, and each tile of such a sequence into the
// pieces that it has in them. All tiles of a sequence are cut at the same keys, so that those that are computed at the
// same time find them in L2. Which segments there are follows from the lengths and the number of thread blocks alone.
//
//   kTable           before[kEntries + 1]   items of the entries before; the last is the number of all items
//   kTable + kCut    key blocks of a segment
//   kTable + kOrder  order[kEntries]        the sequence, where an entry is one

// What a piece costs beside its keys, in key blocks: on its own, and for each piece of its tile.
constexpr float kPieceCost = float(@{ piece_keys }@) / kBlockKV, kMergeCost = float(@{ merged_keys }@) / kBlockKV;
// Pieces of a launch for each thread block of it, at most.
constexpr int kPiecesPerBlock = @{ pieces_per_block }@;
constexpr int kUncut = 0x7fffffff;

// The key blocks that a sequence's rows visit by its lengths and windows.
__device__ __forceinline__ BlockRange sequence_blocks(const Sequence& s) {
    Tile all;
    all.batch = all.head = all.kv_head = all.row = 0, all.rows = s.q_len;
    BlockRange b = visit_blocks<kBlockKV, kMaskLeft, kMaskRight>(s, all);
    if (s.q_len == 0 || b.end < b.begin) b.end = b.begin;
    return b;
}

// What of a sequence's keys a thread block takes in one item.
struct Segments {
    int begin, size;  // first key block of the first, and key blocks of each
    int count;
    __device__ __forceinline__ Segments(const BlockRange& blocks, int cut)
        : begin(blocks.begin), size(cut), count(max_of(1, (blocks.end - blocks.begin - 1) / cut + 1)) {}
    __device__ __forceinline__ int of(int block) const { return (block - begin) / size; }
};

struct TileTable {
    static constexpr int kCut = kEntries * 4 + 4, kOrder = kEntries * 4 + 16;
    static_assert(kOrder + kEntries * 4 == kBytesTable, "the table's part of shared memory");
    static_assert(kEntries <= kThreads && kEntries == 4 * 32, "a thread for each entry, four of them for each lane");

    static __device__ __forceinline__ u32 before_at(u32 smem, int entry) { return Layout::table_at(smem) + entry * 4; }
    static __device__ __forceinline__ u32 order_at(u32 smem, int entry) {
        return Layout::table_at(smem) + kOrder + entry * 4;
    }
    static __device__ __forceinline__ int cut(u32 smem) { return int(load_shared_4(Layout::table_at(smem) + kCut)); }

    // Sequences of an entry.
    static __device__ __forceinline__ int chunk(const KernelArgs& args) { return div_up(args.forward.batch, kEntries); }
    static __device__ __forceinline__ u32 tiles_of(const KernelArgs& args, const Sequence& s) {
        return (u32(s.q_len << args.group_shift) + kBlockQ - 1) / kBlockQ * u32(args.unit_heads);
    }
    static __device__ __forceinline__ int pieces_of(int blocks, int cut) { return max_of(1, (blocks - 1) / cut + 1); }

    // Key blocks of a segment, by one warp. Entry by entry before_at() holds the key blocks of a sequence, order_at()
    // its tiles. Lane s weighs cutting the longest sequence into s + 1 segments, and others by the same size: every
    // thread block has its part of all keys, but as many whole pieces as the next whole number, and at least one.
    static __device__ __forceinline__ int choose_cut(const KernelArgs& args, u32 smem) {
        const int lane = threadIdx.x % 32, batch = args.forward.batch;
        float tiles = 0.0f, work = 0.0f;
        int longest = 0;
#pragma unroll
        for (int i = 0; i < kEntries / 32; i++) {
            const int entry = i * 32 + lane;
            if (entry >= batch) continue;
            const int blocks = int(load_shared_4(before_at(smem, entry)));
            const float n = float(load_shared_4(order_at(smem, entry)));
            tiles += n, work += n * float(blocks), longest = n > 0.0f ? max_of(longest, blocks) : longest;
        }
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) {
            tiles += __shfl_xor_sync(0xffffffff, tiles, apart), work += __shfl_xor_sync(0xffffffff, work, apart);
            longest = max_of(longest, __shfl_xor_sync(0xffffffff, longest, apart));
        }
        const float grid = float(gridDim.x);
        if (longest < 2 || (tiles >= 2.0f * grid && float(longest) * grid <= work)) return kUncut;
        const int size = (longest + lane) / (lane + 1);
        float items = 0.0f, cut = 0.0f;
#pragma unroll 1
        for (int entry = 0; entry < batch; entry++) {
            const int blocks = int(load_shared_4(before_at(smem, entry))), pieces = pieces_of(blocks, size);
            const float n = float(load_shared_4(order_at(smem, entry)));
            items += n * float(pieces);
            if (pieces > 1) cut += n * float(pieces);
        }
        const float cost = lane == 0 ? 0.0f : kPieceCost + kMergeCost * float(lane + 1);
        const float shares = items / grid, whole = float(int(shares)), rest = shares - whole;
        float time = fmaxf(float(size) + cost, (work + cost * cut) / grid);
        if (whole > 0.0f && rest > 0.0f) time += (1.0f - rest) * fminf(float(size), work / items);
        if (cut > grid * kPiecesPerBlock || (lane > 0 && size == (longest + lane - 1) / lane)) time = FT_INFINITY;
        // Of the same time the fewest.
        float best = time;
        int of = lane;
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) {
            const float other = __shfl_xor_sync(0xffffffff, best, apart);
            const int whose = __shfl_xor_sync(0xffffffff, of, apart);
            if (other < best || (other == best && whose < of)) best = other, of = whose;
        }
        return of == 0 ? kUncut : (longest + of) / (of + 1);
    }

    // By all threads of the block, which meet before its end.
    static __device__ __forceinline__ void build(const KernelArgs& args, u32 smem) {
        const int entry = threadIdx.x, batch = args.forward.batch, many = chunk(args);
        u32 tiles = 0;
        int blocks = 0, rank = entry;
        if (entry < kEntries) {
#pragma unroll 4
            for (int b = entry * many; b < min_of(entry * many + many, batch); b++) {
                const Sequence s = sequence_of(args.forward, b);
                const BlockRange visited = sequence_blocks(s);
                tiles += tiles_of(args, s), blocks = visited.end - visited.begin;
            }
            store_shared_4(before_at(smem, entry), u32(blocks));
            store_shared_4(order_at(smem, entry), tiles);
        }
        __syncthreads();
        if (many == 1 && entry < batch) {
            rank = 0;
#pragma unroll 4
            for (int other = 0; other < batch; other++) {
                const int more = int(load_shared_4(before_at(smem, other)));
                rank += more > blocks || (more == blocks && other < entry);
            }
        }
        if (threadIdx.x < 32) {
            const int cut = kSplits && many == 1 ? choose_cut(args, smem) : kUncut;
            if (threadIdx.x == 0) store_shared_4(Layout::table_at(smem) + kCut, u32(cut));
        }
        __syncthreads();
        if (entry < kEntries) {
            store_shared_4(before_at(smem, rank), tiles * u32(pieces_of(blocks, cut(smem))));
            store_shared_4(order_at(smem, rank), u32(entry));
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            const int lane = threadIdx.x;
            // In words: the table begins at any multiple of 8.
            u32 own[4];
#pragma unroll
            for (int i = 0; i < 4; i++) own[i] = load_shared_4(before_at(smem, lane * 4 + i));
            const u32 sum = own[0] + own[1] + own[2] + own[3];
            u32 until = sum;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const u32 other = __shfl_sync(0xffffffff, until, max_of(lane - distance, 0));
                if (lane >= distance) until += other;
            }
            u32 before = until - sum;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                store_shared_4(before_at(smem, lane * 4 + i), before);
                before += own[i];
            }
            if (lane == 31) store_shared_4(before_at(smem, kEntries), until);
        }
        __syncthreads();
    }
};

// What an item is of its tile: one of the segments of its sequence's keys, and the items of the others.
struct ItemPlace {
    Segments segments;
    int segment;
    int apart;  // items from this one to that of the same tile in the next segment
};

// The tile of an item: sequence by sequence; of one, as many heads together as have their keys in L2 side by side, of
// these the segments one after the other, and of one the same rows, longest first where the mask makes lengths differ.
template <int kBlockQ, bool kPackGroup, bool kLongestLast>
__device__ __forceinline__ WorkTile tile_at(const KernelArgs& args, u32 smem, u32 index, ItemPlace& place) {
    int entry = 0;
#pragma unroll
    for (int step = kEntries / 2; step > 0; step /= 2) {
        if (load_shared_4(TileTable::before_at(smem, entry + step)) <= index) entry += step;
    }
    u32 at = index - load_shared_4(TileTable::before_at(smem, entry));
    const int many = TileTable::chunk(args);
    int b = many == 1 ? int(load_shared_4(TileTable::order_at(smem, entry))) : entry * many;
    Sequence s = sequence_of(args.forward, b);
#pragma unroll 1
    for (u32 tiles; many > 1 && b + 1 < args.forward.batch && at >= (tiles = TileTable::tiles_of(args, s));
         at -= tiles) {
        s = sequence_of(args.forward, ++b);
    }
    const u32 rows = u32(s.q_len << args.group_shift), blocks = max_of((rows + kBlockQ - 1) / kBlockQ, 1u);
    const Segments segments(sequence_blocks(s), TileTable::cut(smem));
    const u32 units = u32(args.unit_heads), sharing = units / u32(args.forward.kv_heads);
    const int keys = segments.count > 1 ? segments.size * kBlockKV : s.kv_len;
    const u32 kept = u32(args.section) / u32(max_of(keys, 1));  // KV heads whose keys stay in L2
    const u32 section = min_of(max_of(kept, 1u) * sharing, units);
    const u32 of_section = section * blocks * u32(segments.count);
    const u32 first = at / of_section * section, in_section = at % of_section;
    const u32 together = min_of(section, units - first);
    u32 block = in_section / together;
    place = ItemPlace{segments, int(block / blocks), int(blocks * together)};
    block %= blocks;
    if (kLongestLast) block = blocks - 1 - block;
    WorkTile t;
    t.batch = b;
    t.head = int(first + in_section % together);
    t.kv_head = kPackGroup && args.group_shift > 0 ? t.head : t.head / int(sharing);
    t.row = int(block) * kBlockQ;
    t.rows = min_of(kBlockQ, int(rows) - t.row);
    t.q_len = s.q_len, t.q_row = int(s.q_row);
    t.first = s.first, t.slot = s.slot;
    // Keys of a slot that does not exist are masked.
    t.kv_len = args.forward.k_table != nullptr || is_page(args.forward, s.slot) ? s.kv_len : 0;
    return t;
}
