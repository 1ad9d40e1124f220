// Zero times NaN is NaN: a NaN or infinity in a row of V would reach the rows that do not attend to it through their zero
// probabilities. Such elements are taken out of masked blocks before the product, and what they would have given is added
// to the rows that do attend to them.

// Replaces the non-finite elements of a tile in shared memory by zeros, kThreads threads together. Returns whether this
// one met any.
template <typename Element, int kBytes, int kThreads>
__device__ __forceinline__ bool take_out_non_finite(u32 tile, u32 thread) {
    constexpr u32 kLow = kExponentMask<Element>, kHigh = kLow << 16;
    bool met = false;
#pragma unroll 4
    for (u32 at = tile + thread * 16; at < tile + kBytes; at += kThreads * 16) {
        uint4 x = load_shared_16(at);
        u32* words = &x.x;
        bool bad = false;
#pragma unroll
        for (int w = 0; w < 4; w++) bad |= (words[w] & kLow) == kLow || (words[w] & kHigh) == kHigh;
        if (bad) {
#pragma unroll
            for (int w = 0; w < 4; w++) {
                if ((words[w] & kLow) == kLow) words[w] &= 0xffff0000;
                if ((words[w] & kHigh) == kHigh) words[w] &= 0x0000ffff;
            }
            store_shared_16(at, x);
            met = true;
        }
    }
    return met;
}

// The sum of the non-finite elements of a column of V over the keys that a query attends to by the window and by
// visible(key), without those in blocks that
// are visible to every row: those were left in.
template <int kBlockKV, bool kMaskLeft, bool kMaskRight, typename Element, typename Visible>
__device__ __forceinline__ float sum_of_non_finite(const ForwardArgs& args, const Element* column, int row,
                                                   const BlockRange& blocks, const Visible& visible) {
    const KeyRange live = live_keys<kMaskLeft, kMaskRight>(args, row);
    float sum = 0.0f;
#pragma unroll 1
    for (int j = live.first; j <= live.last; j++) {
        const int block = j / kBlockKV;
        if (block >= blocks.full_begin && block < blocks.full_end) {
            j = blocks.full_end * kBlockKV - 1;
            continue;
        }
        const float x = to_float(column[j * args.v_stride[2]]);
        if (!(fabsf(x) < FT_INFINITY) && visible(j)) sum += x;
    }
    return sum;
}
