// Four bytes of two words, chosen by the nibbles of a selector; a nibble with its upper bit spreads the byte's sign
// instead (PTX ISA: prmt), which __byte_perm does not.
__device__ __forceinline__ u32 permute_bytes(u32 low, u32 high, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
    return r;
}
