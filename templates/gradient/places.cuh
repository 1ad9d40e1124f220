// Which places a thread block walks over, what it adds to partial sums, and what becomes of those.
//
// A place is a sequence, a KV head, one of its query heads, a tile of queries and a block of keys; behind the last
// block of keys comes the sink, where the program has one that reads the tensor. A group is the places of one value of
// every coordinate that is kept, so that no other group has its elements. A unit is a part of a group. A unit's places
// are walked in ascending order by one thread block, each element of its sums is added to by one thread alone, and the
// sums of the parts of a group are added up in their order: the same bytes in every run.

struct Place {
    int batch, kv_head, member, query, key;
};

// How many values each coordinate has, in the order of the bits of `keeps`.
struct Counts {
    int of[5];
    // Blocks of keys, without the sink.
    int keys;
};

template <int kBlockQ, int kBlockKV> __device__ __forceinline__ Counts count_places(const GradientArgs& args) {
    const BackwardArgs& sizes = args.backward;
    Counts c;
    c.keys = kTerms > 0 ? div_up(sizes.kv_len, kBlockKV) : 0;
    c.of[0] = sizes.batch;
    c.of[1] = sizes.kv_heads;
    c.of[2] = sizes.kv_heads > 0 ? sizes.heads / sizes.kv_heads : 0;
    c.of[3] = div_up(sizes.q_len, kBlockQ);
    c.of[4] = c.keys + (kSinkTerms > 0 ? 1 : 0);
    return c;
}

// The number of groups, or of the places of one.
__device__ __forceinline__ i64 count_of(const GradientArgs& args, const Counts& counts, bool groups) {
    i64 n = 1;
#pragma unroll
    for (int c = 0; c < 5; c++) {
        if (((args.keeps >> c & 1) != 0) == groups) n *= counts.of[c];
    }
    return n;
}

__device__ __forceinline__ Place place_of(const GradientArgs& args, const Counts& counts, i64 group, i64 nth) {
    int at[5];
#pragma unroll
    for (int c = 4; c >= 0; c--) {
        i64& from = (args.keeps >> c & 1) != 0 ? group : nth;
        at[c] = int(from % counts.of[c]);
        from /= counts.of[c];
    }
    return {at[0], at[1], at[2], at[3], at[4]};
}

// Adds n values to the partial sums of their places. Each thread has the places of its own remainder, in all tiles of
// its unit, and takes the values in their order; those of one place that follow each other are added up first.
template <int kThreads>
__device__ __forceinline__ void add_in_order(float* sums, const float* values, const int* places, int n) {
    int at = -1;
    float sum = 0.0f;
    for (int e = 0; e < n; e++) {
        const int place = places[e];
        if (u32(place) % kThreads != threadIdx.x) continue;
        if (place != at) {
            if (at >= 0) sums[at] += sum;
            at = place, sum = 0.0f;
        }
        sum += values[e];
    }
    if (at >= 0) sums[at] += sum;
}

__device__ __forceinline__ void store_gradient(const GradientArgs& args, i64 at, float x) {
    if (args.out_type == 0) {
        ((float*)args.out)[at] = x;
    } else if (args.out_type == 1) {
        ((f16*)args.out)[at] = from_float<f16>(x);
    } else {
        ((bf16*)args.out)[at] = from_float<bf16>(x);
    }
}

// Zeros in all partial sums: not every element is read at all.
template <int kThreads> __device__ __forceinline__ void clear_sums(const GradientArgs& args) {
    if (args.direct != 0) return;
    float* const sums = (float*)args.backward.scratch;
    for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < args.splits * args.elements;
         i += i64(gridDim.x) * kThreads)
        sums[i] = 0.0f;
}

// The gradient, from the partial sums.
template <int kThreads> __device__ __forceinline__ void merge_sums(const GradientArgs& args) {
    if (args.direct != 0) return;
    const float* const sums = (const float*)args.backward.scratch;
    for (i64 e = i64(blockIdx.x) * kThreads + threadIdx.x; e < args.elements; e += i64(gridDim.x) * kThreads) {
        float sum = 0.0f;
        for (i64 part = 0; part < args.splits; part++) sum += sums[part * args.elements + e];
        i64 rest = e, at = 0;
#pragma unroll
        for (int axis = 3; axis >= 0; axis--) {
            at += rest % args.length[axis] * args.out_stride[axis];
            rest /= args.length[axis];
        }
        store_gradient(args, at, sum);
    }
}
