// dK and dV of a key block that several thread blocks walk over, each for some query heads of its group: fp32 sums in
// memory, to which the walks add in their order, so that they have the same bytes in every run. The last one has them
// all. A walk waits for those with earlier tickets alone, and of equal length, which end a little before it.
//
// Under a causal mask, 16,384 queries and keys and 4 query heads for each of K, the first key block has 1024 steps of
// some 4000 of a thread block, and comes last.
#if FT_WALKS

// Accumulators of a warpgroup as they lie in memory: four of each thread side by side, thread by thread, and then the
// next four.
template <int kCount>
__device__ __forceinline__ void leave_accumulators(float4* to, const float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount / 4; i++)
        __stcg(to + i * 128, float4{x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]});
}
template <int kCount>
__device__ __forceinline__ void add_accumulators(const float4* from, float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount / 4; i++) {
        const float4 y = __ldcg(from + i * 128);
        x[4 * i] += y.x, x[4 * i + 1] += y.y, x[4 * i + 2] += y.z, x[4 * i + 3] += y.w;
    }
}

// By a warpgroup, of whose warps none waits for another: each has keys of its own. Whether dK and dV, or one of them,
// are those of all walks.
template <bool kHasK, bool kHasV, int kCountK, int kCountV>
__device__ __forceinline__ bool add_to_walks(const KernelArgs& args, const Visible& visible, const KeyBlock& at,
                                             int warpgroup, float (&dk)[kCountK], float (&dv)[kCountV]) {
    const int walks = walks_of_pair(args);
    const i64 key_block = i64(at.pair) * div_up(args.backward.kv_len, kKeys) + at.block, slots = visible.slots();
    u32* const added = walks_added(args, key_block, slots) + warpgroup * 4 + warp();
    float* const sums = walk_sums_of(args, key_block, slots);
    float4* const sums_k = (float4*)(sums + (kByGradient ? 0 : warpgroup * 64 * kColumnsQK)) + threadIdx.x % 128;
    float4* const sums_v = (float4*)(sums + kKeys * kColumnsQK + (kByGradient ? 0 : warpgroup * 64 * kColumnsV)) +
                           threadIdx.x % 128;
    if (at.walk > 0) {
        if (lane() == 0) wait_for_turn(added, u32(at.walk));
        __syncwarp();
        // Beside 64 queries a barrier of the warpgroup spills nothing, for 264 bytes without (head dim 128); beside 128
        // none does best: 308 bytes for 500 (head dim 64).
        if (kBlockQ == 64) barrier_sync(1 + warpgroup, 128);
        if constexpr (kHasK) add_accumulators(sums_k, dk);
        if constexpr (kHasV) add_accumulators(sums_v, dv);
    }
    if (at.walk == walks - 1) return true;
    if constexpr (kHasK) leave_accumulators(sums_k, dk);
    if constexpr (kHasV) leave_accumulators(sums_v, dv);
    __syncwarp();
    if (lane() == 0) (void)count_up(added);
    return false;
}

#endif
