// What the kernel is made of on its arch: products, conversions to operands, and copies of rows to shared memory. With
// cp.async a copy begins with begin() and is waited for in groups. Without, begin() loads into registers and finish()
// stores, so that what lies between hides the latency of the loads; a copy has its registers alone, so that there is
// one stage.
static_assert(kAsyncCopies || kStages == 1, "copies through registers have one stage");

__device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (kHalfProducts) {
        mma_of_halves(d, a, b0, b1);
    } else {
        mma<Element>(d, a, b0, b1);
    }
}

__device__ __forceinline__ u32 pack_operand(float low, float high) {
    if constexpr (kHalfProducts) {
        return pack_one_by_one(low, high);
    } else {
        return pack<Element>(low, high);
    }
}

__device__ __forceinline__ void commit_copies() {
    if constexpr (kAsyncCopies) cp_async_commit();
}
template <int kPending> __device__ __forceinline__ void wait_for_copies() {
    if constexpr (kAsyncCopies) cp_async_wait<kPending>();
}

// One copy of kRows rows of a tile, by all threads of the block.
template <typename RowsTile, int kRows, int kThreads> struct RowCopy {
    using Share = typename RowsTile::template Share<kThreads>;
    static constexpr int kDown = div_up(kRows, Share::kDown);
    uint4 loaded[kAsyncCopies ? 1 : kDown][kAsyncCopies ? 1 : Share::kGroups];

    // As RowTile::copy_async().
    template <bool kCheckRows>
    __device__ __forceinline__ void begin(u32 to, const u16* source, i64 stride, int rows) {
        if constexpr (kAsyncCopies) {
            RowsTile::template copy_async<kRows, kThreads, kCheckRows>(to, source, stride, rows);
        } else {
#pragma unroll
            for (int r = 0; r < kDown; r++) {
                const int row = r * Share::kDown + int(threadIdx.x) / Share::kAcross;
                const bool exists = row < kRows && (!kCheckRows || row < rows);
#pragma unroll
                for (int g = 0; g < Share::kGroups; g++) {
                    const int chunk = g * Share::kAcross + int(threadIdx.x) % Share::kAcross;
                    const bool valid = exists && chunk < RowsTile::kValidChunks;
                    const u16* const from = source + r * Share::kDown * stride + g * Share::kAcross * 8;
                    loaded[r][g] = uint4{0, 0, 0, 0};
                    if (valid) loaded[r][g] = *(const uint4*)from;
                }
            }
        }
    }

    __device__ __forceinline__ void finish(u32 to) const {
        if constexpr (!kAsyncCopies) {
#pragma unroll
            for (int r = 0; r < kDown; r++) {
                const int row = r * Share::kDown + int(threadIdx.x) / Share::kAcross;
                if (row >= kRows) continue;
#pragma unroll
                for (int g = 0; g < Share::kGroups; g++) {
                    const int chunk = g * Share::kAcross + int(threadIdx.x) % Share::kAcross;
                    store_shared_16(to + RowsTile::offset(row, chunk), loaded[r][g]);
                }
            }
        }
    }
};
