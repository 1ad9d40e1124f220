// Counters in global memory by which thread blocks tell each other what is done.

// Counts up and gives what was there. What this thread has seen to be written is there for whoever sees the count.
__device__ __forceinline__ u32 count_up(u32* counter) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(1) : "memory");
    return before;
}
// Counts up and gives what was there, which says nothing about memory.
__device__ __forceinline__ u32 take_number(u32* counter) {
    u32 before;
    asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
// Waits until as many have counted. One thread.
__device__ __forceinline__ void wait_for_count(const u32* counter, u32 count) {
    u32 now;
    for (;;) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        if (now >= count) return;
        asm volatile("nanosleep.u32 100;");
    }
}
