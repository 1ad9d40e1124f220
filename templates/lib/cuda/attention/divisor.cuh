// Division of numbers from 0 on by what is known once the kernel runs. A launch fetches the code of its kernel anew, so
// it is short: a division of 64 bits, of 150 instructions, is a loop that nobody is known to have entered.

__device__ __forceinline__ i64 long_quotient(u64 x, u64 by) {
    u64 q = 0, rest = 0;
#pragma unroll 1
    for (int bit = 63; bit >= 0; bit--) {
        rest = rest << 1 | (x >> bit & 1);
        q <<= 1;
        if (rest >= by) rest -= by, q |= 1;
    }
    return i64(q);
}

__device__ __forceinline__ i64 quotient(i64 x, i64 by) {
    return __builtin_expect((x | by) >> 32 != 0, false) ? long_quotient(x, by) : i64(u32(x) / u32(by));
}

// A divisor that is used often.
struct Divisor {
    u32 by, factor;
    __device__ __forceinline__ explicit Divisor(int n) : by(n), factor(0xffffffffu / u32(n)) {}

    // Of a number below 2^31.
    __device__ __forceinline__ int short_quotient(u32 x) const {
        const u32 q = u32(u64(x) * factor >> 32);  // exact, or one too small
        return int(q + (x - q * by >= by));
    }
    __device__ __forceinline__ i64 quotient(i64 x) const {
        return __builtin_expect(x >> 31 != 0, false) ? long_quotient(x, by) : short_quotient(u32(x));
    }
};
