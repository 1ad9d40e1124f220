// Zero times NaN is NaN: a NaN or infinity in a row of V would reach the rows that do not attend to it through their
// zero probabilities. Such elements are taken out of masked blocks before the product, and what they would have given
// is added to the rows that do attend to them.

<% include "lib/cuda/attention/non_finite_elements.cuh" %>

// The sum of the non-finite ones of column(key), an element of V, over the keys that a query attends to by the window
// and by visible(key), without those in blocks that are visible to every row: those were left in.
template <int kBlockKV, bool kMaskLeft, bool kMaskRight, typename Column, typename Visible>
__device__ __forceinline__ float sum_of_non_finite(const ForwardArgs& args, const Column& column, int row,
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
        const float x = column(j);
        if (!(fabsf(x) < FT_INFINITY) && visible(j)) sum += x;
    }
    return sum;
}

// The same of one block, of a column of V.
template <int kBlockKV, bool kMaskLeft, bool kMaskRight, typename Element, typename Visible>
__device__ __forceinline__ float sum_of_block(const ForwardArgs& args, const Element* column, int row, int block,
                                              const Visible& visible) {
    const KeyRange live = live_keys<kMaskLeft, kMaskRight>(args, row);
    float sum = 0.0f;
#pragma unroll 1
    for (int j = max_of(live.first, block * kBlockKV); j <= min_of(live.last, block * kBlockKV + kBlockKV - 1); j++) {
        const float x = to_float(column[j * args.v_stride[2]]);
        if (!(fabsf(x) < FT_INFINITY) && visible(j)) sum += x;
    }
    return sum;
}
