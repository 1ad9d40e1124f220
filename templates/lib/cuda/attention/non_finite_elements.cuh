// Finding non-finite 16-bit elements in shared memory, and taking them out.

// x * 0 + sum of packed pairs: what is no zero afterwards has met a NaN or an infinity.
template <typename Element> __device__ __forceinline__ u32 add_zero_times(u32 sum, u32 x);
template <> __device__ __forceinline__ u32 add_zero_times<f16>(u32 sum, u32 x) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0), "r"(sum));
    return r;
}
template <> __device__ __forceinline__ u32 add_zero_times<bf16>(u32 sum, u32 x) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0), "r"(sum));
    return r;
}

// Whether a part of a tile in shared memory, every kThreads-th 16 bytes from `from` on, holds a non-finite element. The
// product with a masked block waits for this: one instruction for two elements.
template <typename Element, int kBytes, int kThreads, int kUnroll>
__device__ __forceinline__ bool any_non_finite(u32 from) {
    static_assert(kBytes % (kThreads * 16) == 0, "whole rounds");
    u32 sums[4] = {};
#pragma unroll kUnroll
    for (int i = 0; i < kBytes / (kThreads * 16); i++) {
        const uint4 x = load_shared_16(from + i * kThreads * 16);
        sums[0] = add_zero_times<Element>(sums[0], x.x), sums[1] = add_zero_times<Element>(sums[1], x.y);
        sums[2] = add_zero_times<Element>(sums[2], x.z), sums[3] = add_zero_times<Element>(sums[3], x.w);
    }
    return (sums[0] | sums[1] | sums[2] | sums[3]) != 0;
}

// Replaces the non-finite ones of eight elements by zeros.
template <typename Element> __device__ __forceinline__ void clear_non_finite(uint4& x) {
    constexpr u32 kLow = kExponentMask<Element>, kHigh = kLow << 16;
    u32* words = &x.x;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        if ((words[w] & kLow) == kLow) words[w] &= 0xffff0000;
        if ((words[w] & kHigh) == kHigh) words[w] &= 0x0000ffff;
    }
}

// Replaces the non-finite elements of a tile in shared memory by zeros, kThreads threads together. Returns whether this
// one met any.
template <typename Element, int kBytes, int kThreads, int kUnroll>
__device__ __forceinline__ bool take_out_non_finite(u32 tile, u32 thread) {
    if (!any_non_finite<Element, kBytes, kThreads, kUnroll>(tile + thread * 16)) return false;
#pragma unroll 1
    for (u32 at = tile + thread * 16; at < tile + kBytes; at += kThreads * 16) {
        uint4 x = load_shared_16(at);
        clear_non_finite<Element>(x);
        store_shared_16(at, x);
    }
    return true;
}
