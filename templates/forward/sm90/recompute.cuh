// The recompute pass. Zero times NaN is NaN, so a non-finite element of V in a masked block reaches rows that must not
// see it. Taking such elements out before the product (non_finite.cuh) costs what hardly any input needs: persistent
// thread blocks multiply with V as it comes, look at O on its way out, and compute the tiles again, carefully, whose O
// is not finite. From the first such tile on all scheduled tiles are careful.
//
// Tiles live in a ring of four slots, which keep their indices. Four suffice: tile t + 3 is published only after all
// consumers have read tile t + 1, and so have looked at tile t - 1; if that one is to be computed again, t + 3 is
// careful and takes no slot. A careful tile whose O is rightly not finite may name the slot of a tile that was right,
// which is then computed twice.

constexpr int kPlaces = 4;
// Beside a bit for each slot that was found and, above those, one for each scheduled again.
constexpr u32 kSecondPass = 1u << 31;

__device__ __forceinline__ u32 found_again(u32 smem) { return kOptimistic ? read_flag(Layout::found_at(smem)) : 0; }

__device__ __forceinline__ void mark_again(u32 smem, int place) { set_flag(Layout::found_at(smem), 1u << place); }

// Of a consumer: whether its O is finite, as it leaves from shared memory. An element of V that is not finite is in no
// row that was multiplied with it, so that the first row tells, which one warp reads: that which also gives the place
// away.
__device__ __forceinline__ void look_at_output(u32 smem, u32 from, int place) {
    const u32 piece = threadIdx.x % 128;
    uint4 words = {};
    if (piece * 8 < kHeadDimV) words = load_shared_16(from + piece / 8 * kBytes64Rows + piece % 8 * 16);
    const u32 sums[2] = {add_zero_times<Element>(add_zero_times<Element>(0, words.x), words.y),
                         add_zero_times<Element>(add_zero_times<Element>(0, words.z), words.w)};
    if ((sums[0] | sums[1]) != 0) mark_again(smem, place);
    __syncwarp();
}

// For every role, at the end of the thread block's tiles: whether some are to be computed again.
__device__ __forceinline__ bool any_again(u32 smem) {
    if (!kOptimistic) return false;
    mbarrier_wait(Layout::tiles_done_at(smem), 0);
    return load_shared_4(Layout::found_at(smem)) != 0;
}

// For the tile scheduler, in the second pass: the index of the next of them, or one that no tile has.
__device__ __forceinline__ u32 take_again(u32 smem) {
    const u32 found = found_again(smem);
#pragma unroll 1
    for (int place = 0; place < kPlaces; place++) {
        if ((found >> place & ~(found >> (place + kPlaces)) & 1) == 0) continue;
        set_flag(Layout::found_at(smem), 1u << (place + kPlaces));
        return load_shared_4(Layout::placed_at(smem, place));
    }
    return ~0u;
}
