// What a warp of sm_75 has in place of sm_80's: mma.sync.m16n8k8 on f16, two of which are one m16n8k16 (mma.cuh), since
// the first two registers of A and the first of B are the first 8 elements of the depth; and no conversion of pairs.

// d += a * b, 16 x 8 x 16, fp32 accumulation.
__device__ __forceinline__ void mma_of_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
}

// Two fp32 values rounded to f16, one after the other, `low` in the lower half.
__device__ __forceinline__ u32 pack_one_by_one(float low, float high) {
    return u32(from_float<f16>(low).bits) | u32(from_float<f16>(high).bits) << 16;
}
