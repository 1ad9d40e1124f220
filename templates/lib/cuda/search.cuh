// Where the elements of a tensor that does not decrease pass a value: the ends of runs of keys.

// The first of the keys from `bounds.first` on whose element is at least `value` or, for kAfter, greater; `bounds.last` if none
// before it is. Element i is at data[min(i, last) * stride].
template <bool kWarp, bool kAfter, typename T>
__device__ __forceinline__ int ft_find(const T* data, i64 stride, int last, i64 value, const Between& bounds) {
    int from = bounds.first, to = bounds.last;
    const auto passed = [&](int i) {
        const i64 x = data[min_of(i, last) * stride];
        return kAfter ? x <= value : x < value;
    };
    if (kWarp) {
        // The lanes look at 128 places at once, so that two rounds do for 16k keys.
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        while (from < to) {
            const int step = div_up(to - from, 128);
            int count = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = from + (i * 32 + lane) * step;
                count += __popc(__ballot_sync(0xffffffff, at < to && passed(min_of(at, to - 1))));
            }
            // Places are passed up to one, and from there on not.
            to = min_of(to, from + count * step);
            if (count > 0) from += (count - 1) * step + 1;
        }
    } else {
        // Rows of few runs find them at the bounds, which takes one look instead of a round for every bit. Then all rows of the
        // warp do, or all search: bounds are the same for all lanes, so rounds are, and no lane leaves the loop before others, which
        // matrix instructions under way would not stand.
        const bool at_first = from == to || !passed(from), at_last = from < to && passed(to - 1);
        if (!__any_sync(0xffffffff, !at_first && !at_last)) return at_first ? from : to;
#pragma unroll 1
        for (int n = to - from; n > 0;) {
            const int half = (n + 1) / 2;
            if (passed(from + half - 1)) from += half;
            n -= half;
        }
    }
    return from;
}
