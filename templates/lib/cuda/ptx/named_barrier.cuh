// Barriers of some warps of a thread block, by number (bar).

// Named barrier `id` of `threads` threads in all; 0 is the whole block's.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// barrier_sync() that also tells all of them whether `x` was not zero for any.
__device__ __forceinline__ bool barrier_any(int id, int threads, u32 x) {
    u32 any;
    asm volatile(
        "{\n"
        ".reg .pred mine, any;\n"
        "setp.ne.b32 mine, %3, 0;\n"
        "bar.red.or.pred any, %1, %2, mine;\n"
        "selp.b32 %0, 1, 0, any;\n"
        "}\n" : "=r"(any) : "r"(id), "r"(threads), "r"(x) : "memory");
    return any != 0;
}
