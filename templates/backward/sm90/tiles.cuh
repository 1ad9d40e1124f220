// Which query tiles see which key blocks, and where their dS lies.

__host__ __device__ constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// Query tiles that see a key block. Queries and keys are aligned at their ends (bottom right): query i is at position
// i + kv_len - q_len. Lengths are 2^30 at most and windows less.
struct Visible {
    int q_len, kv_len, left, right, tiles, shift;  // shift: position of query 0

    template <typename Sizes>
    __device__ __forceinline__ Visible(const BackwardArgs& args, const Sizes& sizes)
        : q_len(sizes.q_len), kv_len(sizes.kv_len), left(args.window_left), right(args.window_right),
          tiles(div_up(sizes.q_len, kBlockQ)), shift(sizes.kv_len - sizes.q_len) {}
    __device__ __forceinline__ explicit Visible(const BackwardArgs& args) : Visible(args, args) {}

    __device__ __forceinline__ int begin(int block) const {
        return kMaskRight ? min_of(max_of(floor_div(block * kKeys - shift - right, kBlockQ), 0), tiles) : 0;
    }
    __device__ __forceinline__ int end(int block) const {
        if (!kMaskLeft) return tiles;
        return max_of(begin(block), min_of(floor_div(block * kKeys + kKeys - 1 - shift + left, kBlockQ) + 1, tiles));
    }
    // The first and the last key block that see a tile, if any does: begin() and end() never descend from one block to
    // the next.
    __device__ __forceinline__ int first_block(int tile) const {
        if (!kMaskLeft) return 0;
        const i64 reach = i64(tile) * kBlockQ + shift - left;
        return reach < 0 ? 0 : int(reach / kKeys);
    }
    __device__ __forceinline__ int last_block(int tile) const {
        const int last = div_up(kv_len, kKeys) - 1;
        if (!kMaskRight) return last;
        const i64 reach = i64(tile + 1) * kBlockQ - 1 + shift + right;
        return reach < 0 ? -1 : reach / kKeys < last ? int(reach / kKeys) : last;
    }
    // Slots of dS before those of a block. Where both sides are bounded every block has room for as many tiles as one
    // can have; where the right one is, tiles that are not there have none.
    __device__ __forceinline__ i64 slots_before(int block) const {
        if (kMaskLeft && kMaskRight) {
            const i64 most = (i64(kKeys + kBlockQ - 2) + left + right) / kBlockQ + 1;
            return block * (most < tiles ? most : i64(tiles));
        }
        i64 n = i64(block) * tiles;
        if (kMaskRight) {
            // Block b leaves out kStep b - c tiles where that is positive.
            constexpr int kStep = kKeys / kBlockQ;
            static_assert(kKeys % kBlockQ == 0, "key blocks of whole tiles of queries");
            const int c = -floor_div(-shift - right, kBlockQ), first = c < 0 ? 0 : c / kStep + 1;
            if (block > first) n -= i64(kStep) * (block - first) * (block + first - 1) / 2 - i64(c) * (block - first);
        }
        return n;
    }
    // Slots of a head.
    __device__ __forceinline__ i64 slots() const { return slots_before(div_up(kv_len, kKeys)); }
};

// The same by the names that live_keys() reads.
struct LiveSizes {
    int q_len, kv_len, window_left, window_right;
    __device__ __forceinline__ explicit LiveSizes(const Visible& v)
        : q_len(v.q_len), kv_len(v.kv_len), window_left(v.left), window_right(v.right) {}
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

// Whether sums have met a NaN or an infinity, in any lane of the warp. A key that a query does not see, or whose score
// is -inf, has the weight 0 there, and zero times NaN is NaN: such sums are computed once more, without these keys.
// That costs nothing where all elements are finite, as they nearly always are.
template <int kCount> __device__ __forceinline__ bool any_non_finite(const float (&sums)[kCount]) {
    float met = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; i++) met = fmaf(sums[i], 0.0f, met);
    return __any_sync(0xffffffff, met != 0.0f);
}

// Whether a score is -inf: by a product that is not finite, as a mask's would be.
__device__ __forceinline__ bool takes_no_part(float product, float scale) { return product * scale == -FT_INFINITY; }

// Row of a head of a tensor.
__device__ __forceinline__ const Element* row_of(const void* tensor, const i64 (&stride)[3], int batch, int head,
                                                 i64 row) {
    return (const Element*)tensor + batch * stride[0] + head * stride[1] + row * stride[2];
}
// A pair of elements of a row.
__device__ __forceinline__ float2 load_pair(const Element* row, int column) {
    const u32 x = __ldg((const u32*)(row + column));
    const Element low = {u16(x)}, high = {u16(x >> 16)};
    return float2{to_float(low), to_float(high)};
}
