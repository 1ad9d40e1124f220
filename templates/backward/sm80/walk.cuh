// Which tiles of the other side a thread block visits, and in which order: head after head, from the first tile to the
// last.

// Whether no query of a tile attends to any of its keys (-1), every one to all of them (1), or neither is known (0).
// Rows and keys are given by the first and the last, which may lie behind the last that exists.
__device__ __forceinline__ int tile_kind(const Args& args, const ProgramHead& head, int q_first, int q_last,
                                         int kv_first, int kv_last) {
    const int row = min_of(q_last, args.q_len - 1), key = min_of(kv_last, args.kv_len - 1);
    const KeyRange top = live_keys<kMaskLeft, kMaskRight>(args, q_first);
    const KeyRange bottom = live_keys<kMaskLeft, kMaskRight>(args, row);
    if (kv_first > bottom.last || key < top.first) return -1;
    const bool whole = row == q_last && key == kv_last && kv_first >= bottom.first && key <= top.last;
    const int kind = kProgramMask ? program_tile(head, q_first, row, kv_first, key) : 1;
    return kind < 0 ? -1 : whole && kind > 0 ? 1 : 0;
}

// A tile of the other side, of a head; cut where some query does not attend to some key.
struct Visit {
    int head, place;
    __device__ __forceinline__ int tile() const { return place >> 1; }
    __device__ __forceinline__ bool cut() const { return (place & 1) != 0; }
};
// Which tiles there are: heads up to `heads`, of each those from `first` up to `last`.
struct Range {
    int first, last, heads;
};

// The lanes of a warp look at 32 tiles at once; all warps of a thread block find the same. Little is kept, as registers
// are short: `range()` says anew what there is.
struct Walk : Visit {
    int base;
    u32 live, whole;

    // Before the first tile of a head.
    __device__ __forceinline__ Walk(int head, const Range& range)
        : Visit{head, 0}, base(range.first - 32), live(0), whole(0) {}

    // Goes to the next tile that is not dead; kind(head, tile) says what one is. Whether there was one.
    template <typename Ranges, typename Kind>
    __device__ __forceinline__ bool next(const Ranges& range, const Kind& kind) {
#pragma unroll 1
        while (live == 0) {
            const Range r = range();
            base += 32;
            if (base >= r.last) base = r.first, head++;
            if (head >= r.heads || r.first >= r.last) return false;
            const int n = base + int(threadIdx.x) % 32;
            const int is = n < r.last ? kind(head, n) : -1;
            live = __ballot_sync(0xffffffff, is >= 0);
            whole = __ballot_sync(0xffffffff, is > 0);
        }
        const int nth = __ffs(int(live)) - 1;
        live &= live - 1;
        place = 2 * (base + nth) + ((whole >> nth & 1) == 0);
        return true;
    }
};
