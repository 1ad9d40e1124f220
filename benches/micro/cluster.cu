// Between the shared memories of a cluster: every thread block sends to its next one. Latency of an arrival there and
// back.

enum Way { kBulkCopy, kBulkS32, kStoreV4, kLoadV4, kRedF32, kRedS32, kRoundTrip, kSync };

extern "C" __global__ void __launch_bounds__(256, 1) between(Record* records, u32 rounds, u32 size) {
    extern __shared__ __align__(1024) u8 memory[];  // four slots to receive, one to send from
    __shared__ __align__(8) u64 barriers[9];
    const u32 room = shared_address(memory), from = room + 4 * kTileBytes;
    const u32 full = shared_address(&barriers[0]), empty = shared_address(&barriers[4]),
              token = shared_address(&barriers[8]);
    const u32 rank = cluster_rank(), next = (rank + 1) % size, previous = (rank + size - 1) % size;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    fill_word(room, 5 * kTileBytes, 1);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 9; i++) mbarrier_init(full + 8 * i, 1);
        mbarrier_init_fence();
    }
    fence_async_proxy();
    cluster_sync();
    const u64 start = clock_now();
    if (kWay == kBulkCopy || kWay == kBulkS32) {
        if (threadIdx.x == 0) {
            const u32 to = address_in(room, next), barrier = address_in(full, next);
            for (u32 r = 0; r < rounds; r++) {
                const u32 slot = r % 4;
                if (r >= 4) mbarrier_wait_cluster(empty + slot * 8, (r / 4 - 1) & 1);
                if (kWay == kBulkCopy)
                    asm volatile(
                        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                        " [%0], [%1], %2, [%3];" ::
                            "r"(to + slot * kTileBytes),
                        "r"(from), "r"(kTileBytes), "r"(barrier + slot * 8)
                        : "memory");
                else
                    asm volatile(
                        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.s32"
                        " [%0], [%1], %2, [%3];" ::
                            "r"(to + slot * kTileBytes),
                        "r"(from), "r"(kTileBytes), "r"(barrier + slot * 8)
                        : "memory");
            }
        } else if (threadIdx.x == 32) {
            const u32 back = address_in(empty, previous);
            for (u32 r = 0; r < rounds; r++) {
                mbarrier_expect(full + r % 4 * 8, kTileBytes);
                mbarrier_wait_cluster(full + r % 4 * 8, r / 4 & 1);
                mbarrier_arrive_in(back + r % 4 * 8);
            }
        }
    } else if (kWay == kRoundTrip) {
        // Ranks 0 and 1: an arrival there, an arrival back.
        if (threadIdx.x == 0 && rank < 2) {
            const u32 other = address_in(token, rank ^ 1);
            for (u32 r = 0; r < rounds; r++) {
                if (rank == 0) mbarrier_arrive_in(other);
                mbarrier_wait_cluster(token, r & 1);
                if (rank == 1) mbarrier_arrive_in(other);
            }
        }
    } else if (kWay == kSync) {
        for (u32 r = 0; r < rounds; r++) cluster_sync();
    } else {
        const u32 to = address_in(room, next) + warp * (kTileBytes / 8);
        u32 sum = 0;
        for (u32 r = 0; r < rounds; r++) {
#pragma unroll
            for (u32 i = 0; i < kTileBytes / 8; i += 512) {
                if (kWay == kStoreV4)
                    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + i + lane * 16), "r"(r)
                                 : "memory");
                if (kWay == kLoadV4) {
                    u32 a, b, c, d;
                    asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                                 : "r"(to + i + lane * 16)
                                 : "memory");
                    sum ^= a ^ b ^ c ^ d;
                }
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    if (kWay == kRedF32)
                        asm volatile("red.shared::cluster.add.f32 [%0], %1;" ::"r"(to + i + j * 128 + lane * 4),
                                     "f"(1.0f)
                                     : "memory");
                    if (kWay == kRedS32)
                        asm volatile("red.shared::cluster.add.u32 [%0], %1;" ::"r"(to + i + j * 128 + lane * 4), "r"(1)
                                     : "memory");
                }
            }
        }
        if (sum == 12345) records[blockIdx.x * kRoles + 7].spare = sum;
    }
    cluster_sync();
    if (threadIdx.x == 0) records[blockIdx.x * kRoles] = {start, clock_now(), rounds, *(u32*)memory};
}
