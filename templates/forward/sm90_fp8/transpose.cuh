// The other three warps of the producer: they write V transposed.

// One block of V, by columns: 32 keys of 16 columns at a time. Keys 2t, 2t + 1, 8 + 2t, 9 + 2t of each 16 come to bytes
// 4t to 4t + 3 (consumer.cuh). Of 16 columns the even ones come first, so that the rows of a store lie in different
// banks; a thread of the product then has four neighbouring columns of O.
//
// With kClean elements that are no numbers become zeros, which a mask may leave out. Returns whether there were any.
template <bool kClean> __device__ __forceinline__ bool transpose_block(u32 from, u32 to, int warp) {
    constexpr int kAtOnce = 4;  // of 32 keys: reads under way
    const int lane = threadIdx.x % 32, row = lane % 8, half = lane / 8 % 2, odd = lane / 16;
    u32 met = 0;
#pragma unroll 1
    for (int group = warp; group < kColumnsV / 16; group += kTransposers) {
        const u32 read = from + group / 8 * kBytesChunk + lane * 128 + (u32(group % 8 ^ row) << 4);
        const u32 column = to + (group * 16 + odd * 8 + row) * 128;
#pragma unroll
        for (int first = 0; first < kStepsPV; first += kAtOnce) {
            u32 r[kAtOnce][4];
#pragma unroll
            for (int i = 0; i < kAtOnce && first + i < kStepsPV; i++)
                ldmatrix_x4_trans(r[i], read + (first + i) * 32 * 128);
#pragma unroll
            for (int i = 0; i < kAtOnce && first + i < kStepsPV; i++) {
                u32(&x)[4] = r[i];
#pragma unroll
                for (int word = 0; kClean && word < 4; word++) {
                    const u32 none = special_bytes(x[word]);
                    x[word] &= ~((none >> 7) * 0xff);
                    met |= none;
                }
                const int keys = first + i;
                stmatrix_x4(column + keys / 4 * kBytesKeys + (u32((keys % 4 * 2 + half) ^ row) << 4),
                            __byte_perm(x[0], x[1], 0x6420), __byte_perm(x[2], x[3], 0x6420),
                            __byte_perm(x[0], x[1], 0x7531), __byte_perm(x[2], x[3], 0x7531));
            }
        }
    }
    return met != 0;
}

__device__ __forceinline__ void transpose_v(const KernelArgs& args, u32 smem, int warp) {
    Schedule schedule(smem);
    RawPipeline raw;
    VPipeline v;
#pragma unroll 1
    while (true) {
        const Work work = schedule.next<false>(args);
        if (!work.live) break;
#pragma unroll 1
        for (int n = work.blocks.end - 1; n >= work.blocks.begin; n--) {
            raw.wait(smem);
            clear_behind_last(work, n, raw.buffer(smem), warp);
            v.acquire(smem);
            if (kMasks && is_masked<kMaskedFirst>(work.blocks, n)) {
                const bool met = transpose_block<true>(raw.buffer(smem), v.buffer(smem), warp);
                if (met) set_flag(Layout::met_non_finite_at(smem));
            } else {
                transpose_block<false>(raw.buffer(smem), v.buffer(smem), warp);
            }
            fence_async_proxy();
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                v.commit(smem);
                raw.release(smem);
            }
            raw.advance();
            v.advance();
        }
    }
}
