// Key blocks that thread blocks take one after the other, in order, from a counter: whatever a key block waits for was
// taken before, by a thread block that runs.
#if FT_JOINT || FT_TURNS || FT_WALKS

__device__ __forceinline__ int count_up(u32* counter) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(1) : "memory");
    return int(before);
}
__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 r;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(from) : "memory");
    return r;
}

__device__ __forceinline__ void wait_for_turn(const u32* counter, u32 turn) {
    while (load_acquire(counter) != turn) asm volatile("nanosleep.u32 20;");
}

// Says that what this thread's copies wrote is there: they have ended.
__device__ __forceinline__ void say_written(u32* counter) {
    fence_async_proxy_everywhere();
    (void)count_up(counter);
}

// Takes key blocks until there are none, and brings what they need. One thread, or a warp where there is a program.
__device__ __forceinline__ void load_key_blocks(const KernelArgs& args, u32 smem, const Visible& visible,
                                                u32* counters) {
    const int count = KeyBlock::count(args);
    KeyRing keys;
    QueryRing queries;
    const auto next = [&] {
        int i = 0;
        if (!kListed || lane() == 0) i = count_up(counters + kKeyBlocks);
        return kListed ? __shfl_sync(0xffffffff, i, 0) : i;
    };
#pragma unroll 1
    for (int i = next(); i < count; i = next()) {
        const KeyBlock at(args, visible, i);
        load_key_block(args, smem, at, Pair(args.backward, args.first_pair + at.pair), keys, queries, i);
    }
    if (kListed && lane() != 0) return;
    mbarrier_wait(ValueRing::empty_at(smem, keys.stage), keys.parity ^ 1);
    store_shared_4(smem + KeysLayout::kTaken + keys.stage * 4, u32(-1));
    keys.commit(smem);
}

// The key block in the buffer at the ring's position; -1: there is none any more.
__device__ __forceinline__ int taken_key_block(u32 smem, const KeyRing& keys) {
    keys.wait(smem);
    return int(load_shared_4(smem + KeysLayout::kTaken + keys.stage * 4));
}
// Calls `f` with each key block that the thread block takes. One thread, which reads neither K nor V.
template <typename F>
__device__ __forceinline__ void each_key_block(const KernelArgs& args, u32 smem, const Visible& visible, F f) {
    KeyRing keys;
#pragma unroll 1
    for (int i = taken_key_block(smem, keys); i >= 0; i = taken_key_block(smem, keys)) {
        mbarrier_arrive(ValueRing::empty_at(smem, keys.stage));
        keys.advance();
        f(KeyBlock(args, visible, i));
    }
}

#endif
