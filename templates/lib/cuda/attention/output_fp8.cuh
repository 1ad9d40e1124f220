// O of kernels whose products are of e4m3: a thread has four neighbouring columns at a time, to which V's order in
// shared memory leads.

template <typename Element>
__device__ __forceinline__ void store_four(Element* to, float a, float b, float c, float d) {
    const u32 low = pack<Element>(a, b), high = pack<Element>(c, d);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
}
__device__ __forceinline__ void store_four(float* to, float a, float b, float c, float d) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// A row's columns: of each of kGroups groups of 16 four, 4t to 4t + 3 in thread t of four, which `columns` writes. `to`
// is where those of group 0 go.
template <int kGroups, typename Element, typename Columns>
__device__ __forceinline__ void store_columns(Element* to, bool live, const Columns& columns) {
    if (!live) return;
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
        float x[4];
        columns(group, x);
        store_four(to + 16 * group, x[0], x[1], x[2], x[3]);
    }
}
__device__ __forceinline__ u32 four_e4m3(const float (&x)[4]) {
    return u32(pack_e4m3(x[0], x[1])) | u32(pack_e4m3(x[2], x[3])) << 16;
}
// Of e4m3 neighbouring threads exchange columns, so that four of them write 32 bytes side by side. By whole warps,
// whose stores have predicates and no branches: behind a branch NVRTC 13.0 keeps descriptors of products in vector
// registers, from which 47 R2UR a step bring them (D128, causal, 16k on an H200: 1255 us, 1172 without).
template <int kGroups, typename Columns>
__device__ __forceinline__ void store_columns(e4m3* to, bool live, const Columns& columns) {
    const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
    for (int group = 0; group < kGroups; group += 2) {
        float x[4];
        columns(group, x);
        const u32 first = four_e4m3(x);
        if (group + 1 == kGroups) {
            asm volatile("{.reg .pred live; setp.ne.b32 live, %2, 0;\n@live st.global.u32 [%0], %1;}" ::"l"(
                             to + 16 * group),
                         "r"(first), "r"(int(live))
                         : "memory");
            break;
        }
        columns(group + 1, x);
        const u32 second = four_e4m3(x);
        const u32 other = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
        const u32 low = odd ? other : first, high = odd ? second : other;
        asm volatile("{.reg .pred live; setp.ne.b32 live, %3, 0;\n@live st.global.v2.u32 [%0], {%1, %2};}" ::"l"(
                         to + 16 * group + (odd ? 12 : 0)),
                     "r"(low), "r"(high), "r"(int(live))
                     : "memory");
    }
}
