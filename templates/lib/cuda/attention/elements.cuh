// Rows of elements in units, wherever they begin and end.

// Elements as they lie in memory, kBytes of them: whole where the address allows it, else one after the other.
template <typename E, int kCount> struct Elements { E at[kCount]; };
template <typename E, int kCount> __device__ __forceinline__ Elements<E, kCount> load(const E* from) {
    constexpr int kBytes = kCount * sizeof(E), kWhole = kBytes < 16 ? kBytes : 16;
    Elements<E, kCount> x;
    if (u64(from) % kWhole == 0) {
        if constexpr (kBytes >= 16) {
#pragma unroll
            for (int i = 0; i < kBytes / 16; i++) ((uint4*)x.at)[i] = ((const uint4*)from)[i];
        } else if constexpr (kBytes == 8) {
            *(u64*)x.at = *(const u64*)from;
        } else {
            *(u32*)x.at = *(const u32*)from;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i++) x.at[i] = from[i];
    }
    return x;
}
template <typename E, int kCount> __device__ __forceinline__ void store(E* to, const Elements<E, kCount>& x) {
    constexpr int kBytes = kCount * sizeof(E);
    static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4, "a store of one instruction");
    if (u64(to) % kBytes == 0) {
        if constexpr (kBytes == 16) {
            *(uint4*)to = *(const uint4*)x.at;
        } else if constexpr (kBytes == 8) {
            *(u64*)to = *(const u64*)x.at;
        } else {
            *(u32*)to = *(const u32*)x.at;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i++) to[i] = x.at[i];
    }
}

// The first elements of a unit, where a row ends within it; the others are zeros.
template <int kCount, typename E> __device__ __forceinline__ Elements<E, kCount> load_tail(const E* from, int count) {
    Elements<E, kCount> x;
#pragma unroll
    for (int i = 0; i < kCount; i++) x.at[i] = i < count ? from[i] : E();
    return x;
}
template <typename E, int kCount>
__device__ __forceinline__ void store_tail(E* to, const Elements<E, kCount>& x, int count) {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        if (i < count) to[i] = x.at[i];
    }
}
