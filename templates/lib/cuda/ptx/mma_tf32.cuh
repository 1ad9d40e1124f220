// The matrix instruction of a warp of sm_80 for TF32: mma.sync.m16n8k8. Its operands are fp32 registers of which it
// takes sign, exponent and ten bits of the mantissa, and cuts off the rest; sums are fp32, and what an addition pushes
// out is cut off, too.
//
// Fragment layout (lane = 4 * g + t): A holds rows g and g + 8, columns t and t + 4, as {(g, t), (g+8, t), (g, t+4),
// (g+8, t+4)}; B column g, rows t and t + 4. Accumulators are those of m16n8k16: rows g and g + 8, columns 2t and 2t +
// 1.

// d += a * b, 16 x 8 x 8, fp32 accumulation.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The bits of an fp32 number that the instruction takes.
constexpr u32 kTf32Bits = 0xffffe000;

// x as a number of TF32 and what that leaves: rounded to the nearest, so that what is left has at most twelve bits and
// either sign, and the instruction loses the last of them at most. An infinity, and what rounds to one (from 2^128 -
// 2^116 on), leaves no number.
__device__ __forceinline__ void split_tf32(u32 x, u32& big, u32& small) {
    big = x + 0x1000;
    small = __float_as_uint(__uint_as_float(x) - __uint_as_float(big & kTf32Bits));
}
// x so that what the instruction cuts off leaves it rounded: between a third and two thirds of a unit are added, half
// of one in the mean. NaN stays NaN and an infinity one, which adding to the bits would not give.
__device__ __forceinline__ u32 rounded_tf32(u32 x) {
    return __float_as_uint(fmaf(__uint_as_float(x), 0x1p-10f / 3, __uint_as_float(x)));
}
