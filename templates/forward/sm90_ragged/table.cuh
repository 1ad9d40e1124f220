// The tile scheduler's table: how many tiles come before those of each sequence, found by every thread block from the
// lengths in device memory, so that no host and no other kernel need know them. Sequences are walked from the one with
// the most keys on; of batches of more than kEntries sequences, an entry is as many consecutive ones, in their order.
//
//   kTable           before[kEntries + 1]   tiles of the entries before; the last is the number of all tiles
//   kTable + kOrder  order[kEntries]        the sequence, where an entry is one

struct TileTable {
    static constexpr int kOrder = kEntries * 4 + 16;
    static_assert(kOrder + kEntries * 4 == kBytesTable, "the table's part of shared memory");
    static_assert(kEntries <= kThreads && kEntries == 4 * 32, "a thread for each entry, four of them for each lane");

    static __device__ __forceinline__ u32 before_at(u32 smem, int entry) { return smem + Layout::kTable + entry * 4; }
    static __device__ __forceinline__ u32 order_at(u32 smem, int entry) { return smem + Layout::kTable + kOrder + entry * 4; }

    // Sequences of an entry.
    static __device__ __forceinline__ int chunk(const KernelArgs& args) { return div_up(args.forward.batch, kEntries); }
    static __device__ __forceinline__ u32 tiles_of(const KernelArgs& args, const Sequence& s) {
        return (u32(s.q_len << args.group_shift) + kBlockQ - 1) / kBlockQ * u32(args.unit_heads);
    }

    // By all threads of the block, which meet before its end.
    static __device__ __forceinline__ void build(const KernelArgs& args, u32 smem) {
        const int entry = threadIdx.x, batch = args.forward.batch, many = chunk(args);
        u32 tiles = 0;
        int keys = 0, rank = entry;
        if (entry < kEntries) {
#pragma unroll 4
            for (int b = entry * many; b < min_of(entry * many + many, batch); b++) {
                const Sequence s = sequence_of(args.forward, b);
                tiles += tiles_of(args, s), keys = s.kv_len;
            }
            store_shared_4(before_at(smem, entry), u32(keys));
        }
        __syncthreads();
        if (many == 1 && entry < batch) {
            rank = 0;
#pragma unroll 4
            for (int other = 0; other < batch; other++) {
                const int more = int(load_shared_4(before_at(smem, other)));
                rank += more > keys || (more == keys && other < entry);
            }
        }
        __syncthreads();
        if (entry < kEntries) {
            store_shared_4(before_at(smem, rank), tiles);
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

// The tile with an index: sequence by sequence; of one, as many heads together as have their keys in L2 side by side,
// and of these the same rows, longest first where the mask makes lengths differ.
template <int kBlockQ, int kCluster, bool kPackGroup, bool kLongestLast>
__device__ __forceinline__ WorkTile tile_at(const KernelArgs& args, u32 smem, u32 index) {
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
    for (u32 tiles; many > 1 && b + 1 < args.forward.batch && at >= (tiles = TileTable::tiles_of(args, s)); at -= tiles) {
        s = sequence_of(args.forward, ++b);
    }
    const u32 rows = u32(s.q_len << args.group_shift), blocks = max_of((rows + kBlockQ - 1) / kBlockQ, 1u);
    const u32 units = u32(args.unit_heads), sharing = units / u32(args.forward.kv_heads);
    const u32 kept = u32(args.section) / u32(max_of(s.kv_len, 1));  // KV heads whose keys stay in L2
    const u32 section = min_of(max_of(kept, 1u) * sharing, units);
    const u32 first = at / (section * blocks) * section, in_section = at % (section * blocks);
    const u32 together = min_of(section, units - first);
    u32 block = in_section / together;
    if (kLongestLast) block = blocks - 1 - block;
    WorkTile t;
    t.batch = b;
    t.head = int(first + in_section % together);
    t.kv_head = kPackGroup && args.group_shift > 0 ? t.head : t.head / int(sharing);
    t.row = int(block) * kBlockQ;
    t.rows = min_of(kBlockQ, int(rows) - t.row);
    t.q_len = s.q_len, t.q_row = int(s.q_row);
    t.first = s.first, t.slot = s.slot;
    // Keys of a page that does not exist are masked.
    t.kv_len = u32(s.slot) < u64(args.forward.pages) ? s.kv_len : 0;
    return t;
}
