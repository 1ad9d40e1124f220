// Both halves of two words added apart, without a carry from one to the other; sm_90 and newer (PTX ISA: add).
__device__ __forceinline__ u32 add_halves(u32 a, u32 b) {
    u32 r;
    asm("add.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
