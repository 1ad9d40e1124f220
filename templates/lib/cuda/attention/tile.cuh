// Which tile of O a thread block computes, and which keys its rows attend to.

struct Tile {
    int batch, head, kv_head;
    int row;   // first query row
    int rows;  // query rows that exist
};

// The block index, hidden from the optimiser: a second decode then really decodes again instead of keeping the first
// one's results in registers through the main loop.
__device__ __forceinline__ u32 block_index() {
    u32 r;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(r));
    return r;
}

// Decodes a one-dimensional block index. With a bounded right side the last query rows see the most keys, so they go
// first: the long tiles start early and the short ones fill the tail.
template <int kBlockQ, bool kBlockMajor, bool kLongestLast, typename Args>
__device__ __forceinline__ Tile decode_tile(const Args& args, u32 index) {
    const u32 blocks = (u32(args.q_len) + kBlockQ - 1) / kBlockQ;
    const u32 pairs = u32(args.batch) * u32(args.heads);
    u32 block = kBlockMajor ? index / pairs : index % blocks;
    const u32 pair = kBlockMajor ? index % pairs : index / blocks;
    if (kLongestLast) block = blocks - 1 - block;
    Tile t;
    t.batch = int(pair / u32(args.heads));
    t.head = int(pair % u32(args.heads));
    t.kv_head = t.head / (args.heads / args.kv_heads);
    t.row = int(block) * kBlockQ;
    t.rows = min_of(kBlockQ, args.q_len - t.row);
    return t;
}

// Keys [first, last] that a query row attends to, by a call's lengths and windows; first > last when there are none.
// Queries and keys are aligned at their ends (bottom right). Lengths are 2^30 at most and windows less, so that 32 bits
// hold what is below; rows may lie past the last.
struct KeyRange {
    int first, last;
};

template <bool kMaskLeft, bool kMaskRight, typename Sizes>
__device__ __forceinline__ KeyRange live_keys(const Sizes& args, int row) {
    const int last = args.kv_len - 1, position = min_of(row + (args.kv_len - args.q_len), last);
    KeyRange r = {0, last};
    if (kMaskLeft) r.first = max_of(position - args.window_left, 0);
    if (kMaskRight) r.last = min_of(max_of(position + args.window_right, -1), last);
    return r;
}

// The key blocks that a tile visits: [begin, end), of which [full_begin, full_end) are visible to every row and need no
// mask. Everything outside [begin, end) is invisible to every row and is never loaded.
struct BlockRange {
    int begin, full_begin, full_end, end;
};

template <int kBlockKV, bool kMaskLeft, bool kMaskRight, typename Sizes>
__device__ __forceinline__ BlockRange visit_blocks(const Sizes& args, const Tile& tile) {
    const KeyRange top = live_keys<kMaskLeft, kMaskRight>(args, tile.row);
    const KeyRange bottom = live_keys<kMaskLeft, kMaskRight>(args, tile.row + tile.rows - 1);
    BlockRange b;
    b.begin = top.first / kBlockKV;
    b.end = (bottom.last + kBlockKV) / kBlockKV;
    b.full_begin = div_up(bottom.first, kBlockKV);
    b.full_end = (top.last + 1) / kBlockKV;
    return b;
}
