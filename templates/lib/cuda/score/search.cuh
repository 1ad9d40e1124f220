// Where the elements of a tensor that does not decrease pass a value: the ends of runs of keys.

// The first of the keys from `bounds.first` on whose element is at least `value` or, for kAfter, greater; `bounds.last`
// if none before it is. Element i is at data[min(i, last) * stride]. Each thread searches by itself or, with kHalves,
// the 16 lanes of each half of a warp together, for the same.
template <bool kHalves, bool kAfter, typename T>
__device__ __forceinline__ int ft_find(const T* data, i64 stride, int last, i64 value, const Between& bounds) {
    int from = bounds.first, to = bounds.last;
    const auto passed = [&](int i) {
        const i64 x = data[min_of(i, last) * stride];
        return kAfter ? x <= value : x < value;
    };
    if (kHalves) {
        // Each half looks at 128 places at once, so that two rounds do for 16k keys.
        const int half = threadIdx.x % 32 / 16, lane = threadIdx.x % 16;
#pragma unroll 1
        while (__any_sync(0xffffffff, from < to)) {
            const int step = div_up(to - from, 128);
            bool is[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int at = from + (i * 16 + lane) * step;
                is[i] = at < to && passed(at);
            }
            int count = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) count += __popc(__ballot_sync(0xffffffff, is[i]) >> (half * 16) & 0xffff);
            // Places are passed up to one, and from there on not.
            to = min_of(to, from + count * step);
            if (count > 0) from += (count - 1) * step + 1;
        }
    } else {
        // Rows of few runs find them at the bounds, which takes one look instead of a round for every bit.
        const bool at_first = from == to || !passed(from), at_last = from < to && passed(to - 1);
        if (at_first || at_last) return at_first ? from : to;
#pragma unroll 1
        for (int n = to - from; n > 0;) {
            const int half = (n + 1) / 2;
            if (passed(from + half - 1)) from += half;
            n -= half;
        }
    }
    return from;
}
