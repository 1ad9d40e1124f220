// The matrix instruction of a warp of sm_89 and newer on e4m3: mma.sync.m16n8k32.
//
// Fragment layout (lane = 4 * g + t), in words of four elements: of A words 0 and 1 are elements 4t to 4t + 3 of rows g
// and g + 8, words 2 and 3 those 16 further; of B the same elements of column g. Accumulators are as those of
// m16n8k16 (mma.cuh).

// d += a * b, 16 x 8 x 32. Of the sum some 13 bits are kept.
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
