// Barriers in shared memory that count arrivals and bytes (mbarrier).

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to TMA. Before the block's own barrier.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that TMA will write before the phase can end.
__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of the phase of this parity: the phases of a barrier are numbered from 0.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}
// Whether that phase is over, without waiting.
__device__ __forceinline__ bool mbarrier_test(u32 barrier, u32 parity) {
    u32 over;
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.b32 %0, 1, 0, over;\n"
        "}\n" : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    return over != 0;
}

// mbarrier_wait() for threads that may be late by a fraction of a microsecond: it leaves the issue slots to others.
__device__ __forceinline__ void mbarrier_wait_idly(u32 barrier, u32 parity) {
    while (true) {
        u32 over;
        asm volatile(
            "{\n"
            ".reg .pred over;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2, 0x989680;\n"
            "selp.b32 %0, 1, 0, over;\n"
            "}\n" : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
        if (over) break;
        asm volatile("nanosleep.u32 200;");
    }
}
