// Ordered sums: members of a head add to each tile in a fixed order, by a counter per tile. Also the bare hop of a
// flag.

__device__ __forceinline__ u32 load_acquire(u64 p) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ void add_release(u64 p) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}

__device__ __forceinline__ void wait_turn(u64 flag, u32 turn) {
    for (u32 tries = 0; load_acquire(flag) != turn; tries++)
        if (tries >> 23) asm volatile("trap;");
}

// A token goes round `members` thread blocks; hops = rounds * members. With bytes, each turn adds a tile and waits for
// it.
extern "C" __global__ void __launch_bounds__(128, 1)
    hops(u64 flag, u64 target, Record* records, u32 rounds, u32 bytes) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 staging = shared_address(memory);
    if (bytes) fill_word(staging, bytes, 1);
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x) return;
    const u64 start = clock_now();
    for (u32 r = 0; r < rounds; r++) {
        const u32 turn = r * gridDim.x + blockIdx.x;
        wait_turn(flag, turn);
        if (bytes) {
            asm volatile("fence.proxy.async;" ::: "memory");
            bulk_add_s32(target, staging, bytes);
            bulk_commit();
            bulk_wait<0>();
            asm volatile("fence.proxy.async;" ::: "memory");
        }
        add_release(flag);
    }
    records[blockIdx.x * kRoles] = {start, clock_now(), rounds, 0};
}

// kOrder 0: no order; 1: members in turn, all from tile 0; 2: members start one tile apart, and their turns are as they
// come. One warp "computes" for `compute` clocks a tile, hands the tile to the warp that adds it, two slots.
extern "C" __global__ void __launch_bounds__(64, 1)
    turns(u64 flags, u64 target, Record* records, u32 rounds, u32 tiles, u32 members, u32 compute) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 barriers[4];
    const u32 staging = shared_address(memory), full = shared_address(&barriers[0]),
              empty = shared_address(&barriers[2]);
    const u32 member = blockIdx.x % members, head = blockIdx.x / members;
    fill_word(staging, 2 * kTileBytes, 0x3f800000u);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 4; i++) mbarrier_init(full + 8 * i, 1);
        mbarrier_init_fence();
    }
    fence_async_proxy();
    __syncthreads();
    const u64 start = clock_now();
    if (threadIdx.x == 0) {
        for (u32 r = 0; r < rounds; r++) {
            const u64 from = clock_now();
            while (clock_now() - from < compute) {
            }
            if (r >= 2) mbarrier_wait(empty + r % 2 * 8, (r / 2 - 1) & 1);
            mbarrier_arrive(full + r % 2 * 8);
        }
    } else if (threadIdx.x == 32) {
        for (u32 r = 0; r < rounds; r++) {
            const u32 tile = kOrder == 2 ? (r + member) % tiles : r % tiles;
            const u64 flag = flags + (u64(head) * tiles + tile) * 4;
            u32 turn = member;
            if (kOrder == 2) {
                const u32 last = min(tile, members - 1);
                turn = member <= last ? last - member : tile + 1 + (members - 1 - member);
            }
            mbarrier_wait(full + r % 2 * 8, r / 2 & 1);
            if (kOrder) {
                turn += r / tiles * members;
                wait_turn(flag, turn);
                asm volatile("fence.proxy.async;" ::: "memory");
            }
            bulk_add_f32(target + (u64(head) * tiles + tile) * kTileBytes, staging + r % 2 * kTileBytes, kTileBytes);
            bulk_commit();
            if (kOrder) {
                bulk_wait<0>();
                asm volatile("fence.proxy.async;" ::: "memory");
                add_release(flag);
            } else {
                bulk_wait_read<0>();
            }
            mbarrier_arrive(empty + r % 2 * 8);
        }
        bulk_wait<0>();
    }
    __syncthreads();
    if (threadIdx.x == 0) records[blockIdx.x * kRoles] = {start, clock_now(), rounds, 0};
}
