// Which query tiles see which key blocks, and where their dS lies.

// Heads of Q and of K, by a pair of a sequence and a KV head.
struct Pair {
    int batch, kv_head, group;
    __device__ __forceinline__ Pair(const BackwardArgs& args, int pair) {
        batch = pair / args.kv_heads, kv_head = pair % args.kv_heads, group = args.heads / args.kv_heads;
    }
    __device__ __forceinline__ int head(int member) const { return kv_head * group + member; }
};

__host__ __device__ constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// Query tiles that see a key block, and the first key and the last that a query sees. Queries and keys are aligned at
// their ends (bottom right): query i is at position i + kv_len - q_len. Lengths are 2^30 at most and windows less.
struct Visible {
    int q_len, kv_len, left, right, tiles, shift;  // shift: position of query 0

    __device__ __forceinline__ explicit Visible(const BackwardArgs& args)
        : q_len(args.q_len), kv_len(args.kv_len), left(args.window_left), right(args.window_right),
          tiles(div_up(args.q_len, kBlockQ)), shift(args.kv_len - args.q_len) {}

    // The first tile with a query that sees a key of the block, if it were not for the number of tiles.
    __device__ __forceinline__ int unclamped(int block) const { return floor_div(block * kKeys - shift - right, kBlockQ); }
    __device__ __forceinline__ int begin(int block) const { return kMaskRight ? min_of(max_of(unclamped(block), 0), tiles) : 0; }
    __device__ __forceinline__ int end(int block) const {
        if (!kMaskLeft) return tiles;
        return max_of(begin(block), min_of(floor_div(block * kKeys + kKeys - 1 - shift + left, kBlockQ) + 1, tiles));
    }
    // Tiles of kBlockQ queries of dS before those of a block. Where both sides are bounded every block has room for as
    // many as one can have; where the right one is, the tiles that are not there are left out.
    __device__ __forceinline__ i64 tiles_before(int block) const {
        if (kMaskLeft && kMaskRight) return i64(block) * min_of(tiles, (kKeys + kBlockQ - 2 + left + right) / kBlockQ + 1);
        i64 n = i64(block) * tiles;
        if (kMaskRight) {
            // Block b leaves out kStep b - c tiles where that is positive.
            constexpr int kStep = kKeys / kBlockQ;
            const int c = -floor_div(-shift - right, kBlockQ), first = c < 0 ? 0 : c / kStep + 1;
            if (block > first) n -= i64(kStep) * (block - first) * (block + first - 1) / 2 - i64(c) * (block - first);
        }
        return n;
    }
    __device__ __forceinline__ i64 slot(int block, int tile) const { return tiles_before(block) + tile - begin(block); }
    // Slots of a head.
    __device__ __forceinline__ i64 slots() const { return tiles_before(div_up(kv_len, kKeys)); }
};

// Tiles [begin, end) of which every query sees every key of a block.
struct Uncut {
    int begin, end;
    __device__ __forceinline__ Uncut(const Visible& v, int block) {
        const int key = block * kKeys;
        begin = kMaskRight ? div_up(max_of(key + kKeys - 1 - v.shift - v.right, 0), kBlockQ) : 0;
        end = kMaskLeft ? floor_div(key - v.shift + v.left + 1, kBlockQ) : v.tiles;
        if (key + kKeys > v.kv_len) end = begin;  // keys past the last
    }
    __device__ __forceinline__ bool cuts(int tile) const { return tile < begin || tile >= end; }
};
