// The matrix instruction of a warp of sm_80: mma.sync.m16n8k16.
//
// Fragment layout (lane = 4 * g + t): an accumulator tile holds rows g and g + 8, columns 2t and 2t + 1, as
// {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)}. Two neighbouring accumulator tiles, packed to 16 bits, are exactly one
// A operand of 16 columns: that is why P never leaves the registers.

struct FragmentA { u32 r[4]; };
struct FragmentB { u32 r[2]; };

// d += a * b, 16 x 8 x 16, fp32 accumulation.
template <typename Element> __device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> __device__ __forceinline__ void mma<f16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
