// The loop of a backward pass by two thread blocks as a cluster, 128 keys each: dQ = dS K is summed over the keys of
// both before it leaves, so that each reduces half as much. Data are random and results unused: only the time counts.
//
// Two warpgroups of 64 keys compute, per step, what they do in loop.cu. The third sends to the other thread block what
// that needs of dS, sums its own share of dQ, reduces it, and loads Q and dO. Shares are 64 rows where a step has 128
// (kM), else half of the columns. kSink: what becomes of dQ. kOrder: clusters of a head take turns at a tile, two
// steps apart. kMulticast: each thread block loads half of Q and dO for both.

enum Sink { kNoDq, kDqOnly, kDqF32, kDqRed };

constexpr int kThreads = 384, kBlocks = kM / 64, kParts = 64 / kDqColumns;
constexpr u32 kKBytes = kKeys * kD * 2, kQBytes = kM * kD * 2, kBlockBytes = 64 * kKeys * 2,
              kSlotBytes = (kBlocks + 1) * kBlockBytes, kPeerBytes = kKeys * 64 * 2, kDqBytes = 64 * 64 * 4;
static_assert(kBlocks == 2 ? kD == 64 : kD == 128, "shares of dQ are 64 rows by 64 columns");

__device__ __forceinline__ void mbarrier_arrive_default_in(u32 cluster_address) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
}
__device__ __forceinline__ void wait_turn(u64 flag, u32 turn) {
    u32 x;
    for (u32 tries = 0;; tries++) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
        if (x == turn) return;
        if (tries >> 23) asm volatile("trap;");
    }
}
__device__ __forceinline__ void end_turn(u64 flag) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ void bulk_load_both(u32 to, u64 from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1], %2, [%3], 3;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    pair(u64 source, u64 source_mask, u64 target, u64 flags, Record* records, u32 steps, u32 tiles, u32 members,
         float scale) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 barriers[14];
    __shared__ u64 sums[8];
    if (threadIdx.x < 8) sums[threadIdx.x] = 0;
    __shared__ __align__(16) float statistics[2][2][kM];
    const u32 k_tile = shared_address(memory), v_tile = k_tile + kKBytes, q_tiles = v_tile + kKBytes;
    const u32 o_tiles = q_tiles + 2 * kQBytes, peer_k = o_tiles + 2 * kQBytes, slots = peer_k + kPeerBytes;
    const u32 staging = slots + 2 * kSlotBytes;
    const u32 q_full = shared_address(&barriers[0]), o_full = shared_address(&barriers[2]),
              q_empty = shared_address(&barriers[4]), o_empty = shared_address(&barriers[6]),
              s_full = shared_address(&barriers[8]), s_empty = shared_address(&barriers[10]),
              received = shared_address(&barriers[12]);
    const u32 group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 rank = cluster_rank(), other = rank ^ 1;
    const u32 member = blockIdx.x / 2 % members, head = blockIdx.x / 2 / members;
    constexpr u32 kFree = 8;
    fill_random(k_tile, 2 * kKBytes + 4 * kQBytes + kPeerBytes);
    for (u32 i = threadIdx.x; i < 4 * kM; i += blockDim.x) (&statistics[0][0][0])[i] = (i % 7) * 0.01f;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 2; i++) {
            mbarrier_init(q_full + 8 * i, 1), mbarrier_init(o_full + 8 * i, 1), mbarrier_init(s_empty + 8 * i, 8);
            mbarrier_init(q_empty + 8 * i, kFree), mbarrier_init(o_empty + 8 * i, kFree);
            mbarrier_init(s_full + 8 * i, 8), mbarrier_init(received + 8 * i, 1);
        }
        mbarrier_init_fence();
    }
    fence_async_proxy();
    __syncwarp();
    cluster_sync();
    const u64 start = clock_now();
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kDqRegisters));
        // Chores of the loop are spread over the warps, which share nothing but their products: a chain of them in one
        // thread, with barriers around it, would take longer than the products of the others.
        auto load = [&](u32 i) {
            if (lane || warp == 0 || warp == 3 || i >= steps) return;
            const u32 slot = i % 2, full = (warp == 1 ? q_full : o_full) + slot * 8;
            const u32 empty = (warp == 1 ? q_empty : o_empty) + slot * 8;
            const u32 to = (warp == 1 ? q_tiles : o_tiles) + slot * kQBytes;
            const u64 from = source + ((((u64(head) * tiles + i % tiles) * 2 + warp - 1) * kQBytes) & source_mask);
            if (i >= 2) mbarrier_wait(empty, (i / 2 - 1) & 1);
            mbarrier_expect(full, kQBytes);
            bulk_load(to, from, kQBytes, full);
        };
        const u32 mine = kBlocks == 2 ? rank : 0;
        const u64 own_k = descriptor_of_depth(k_tile + (kD == 128 ? rank * kPeerBytes : 0), kKeys * 128);
        const u64 their_k = descriptor_of_depth(peer_k, kKeys * 128);
        constexpr u32 kWarpBytes = kDqBytes / kParts / 4;
        u64 flag = 0;
        load(0), load(1);
        if (warp == 0 && lane == 0)
            mbarrier_expect(received, kBlockBytes), mbarrier_expect(received + 8, kBlockBytes);
        __syncwarp();
        for (u32 i = 0; i < steps; i++) {
            const u32 slot = i % 2, at = slots + slot * kSlotBytes;
            const u32 tile = (i + kShift * member) % tiles, last = min(tile / 2, members - 1);
            const u64 to = target + ((u64(head) * tiles + tile) * 2 + rank) * kDqBytes;
            const u64 a = descriptor_of_depth(at + mine * kBlockBytes, kKeys * 128),
                      b = descriptor_of_depth(at + kBlocks * kBlockBytes, kKeys * 128);
            mbarrier_wait(s_full + slot * 8, i / 2 & 1);
            mbarrier_wait(received + slot * 8, i / 2 & 1);
#pragma unroll
            for (int part = 0; part < (kSink == kNoDq ? 0 : kParts); part++) {
                float d[kDqColumns / 2];
                const u32 column = part * kDqColumns * 2 / 16;
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < kKeys / 16; k++)
                    mma_dq(d, a + k * 2048 / 16, own_k + column + k * 2048 / 16, k > 0);
#pragma unroll
                for (int k = 0; k < kKeys / 16; k++)
                    mma_dq(d, b + k * 2048 / 16, their_k + column + k * 2048 / 16, 1);
                wgmma_commit();
                wgmma_wait<0>();
                wgmma_touch(d);
                if (part == kParts - 1 && lane == 0) {
                    mbarrier_arrive(s_empty + slot * 8);
                    mbarrier_arrive_default_in(address_in(s_empty + slot * 8, other));
                }
                const u32 offset = (part * 4 + warp) * kWarpBytes;
                if constexpr (kSink == kDqF32) {
                    if (lane == 0) {
                        if (!kOrder) {
                            bulk_wait_read<kParts - 1>();
                        } else if (part == 0) {
                            bulk_wait<0>();
                            asm volatile("fence.proxy.async;" ::: "memory");
                            if (flag) end_turn(flag);
                        }
                    }
                    __syncwarp();
#pragma unroll
                    for (int j = 0; j < kDqColumns / 8; j++)
                        store_v4(staging + offset + j * 512 + lane * 16, __float_as_uint(d[j * 4]),
                                 __float_as_uint(d[j * 4 + 1]), __float_as_uint(d[j * 4 + 2]),
                                 __float_as_uint(d[j * 4 + 3]));
                    fence_async_proxy();
                    __syncwarp();
                    if (lane == 0) {
                        if (kOrder && part == 0) {
                            flag = flags + (((u64(head) * tiles + tile) * 2 + rank) * 4 + warp) * 4;
                            const u32 turn = member <= last ? last - member : last + 1 + (members - 1 - member);
                            wait_turn(flag, turn + i / tiles * members);
                            asm volatile("fence.proxy.async;" ::: "memory");
                        }
                        bulk_add_f32(to + offset, staging + offset, kWarpBytes);
                        bulk_commit();
                    }
                }
                if constexpr (kSink == kDqRed) {
#pragma unroll
                    for (int j = 0; j < kDqColumns / 8; j++)
                        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + offset + j * 512 +
                                                                                            lane * 16),
                                     "f"(d[j * 4]), "f"(d[j * 4 + 1]), "f"(d[j * 4 + 2]), "f"(d[j * 4 + 3])
                                     : "memory");
                }
            }
            if (kSink == kNoDq && lane == 0) {
                mbarrier_arrive(s_empty + slot * 8);
                mbarrier_arrive_default_in(address_in(s_empty + slot * 8, other));
            }
            load(i + 2);
            if (warp == 0 && lane == 0 && i + 2 < steps) mbarrier_expect(received + slot * 8, kBlockBytes);
            __syncwarp();
        }
        if (lane == 0) {
            bulk_wait<0>();
            if (flag) end_turn(flag);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
        float dk[kD / 2], dv[kD / 2];
#pragma unroll
        for (int i = 0; i < kD / 2; i++) dk[i] = dv[i] = 0;
        const u64 k_rows = descriptor_of_rows(k_tile + group * 8192),
                  v_rows = descriptor_of_rows(v_tile + group * 8192);
        const u32 theirs = kBlocks == 2 ? other : 0;
        const u32 matrix_row = warp * 16 + lane % 8 + (lane / 8 & 1) * 8, row = group * 64 + matrix_row;
        for (u32 i = 0; i < steps; i++) {
            const u32 slot = i % 2, q_tile = q_tiles + slot * kQBytes, o_tile = o_tiles + slot * kQBytes;
            const u64 q_rows = descriptor_of_rows(q_tile), o_rows = descriptor_of_rows(o_tile);
            const u64 q_depth = descriptor_of_depth(q_tile, kM * 128), o_depth = descriptor_of_depth(o_tile, kM * 128);
            float s[kM / 2], dp[kM / 2];
            u32 p[kM / 4];
            mbarrier_wait(q_full + slot * 8, i / 2 & 1);
            wgmma_fence();
            issue_scores(s, k_rows, q_rows);
            mbarrier_wait(o_full + slot * 8, i / 2 & 1);
            issue_scores(dp, v_rows, o_rows);
            wgmma_wait<1>();
            wgmma_touch(s);
            take_exponentials(s, p, statistics[slot][0], lane, scale);
            wgmma_wait<0>();
            wgmma_touch(dp);
            u32 ds[kM / 4];
            take_gradients(s, dp, p, ds, statistics[slot][1], lane);
            wgmma_touch(dv);
            wgmma_touch(dk);
            wgmma_fence();
            issue_sum(dv, p, o_depth);
            issue_sum(dk, ds, q_depth);
            if (i >= 2) mbarrier_wait(s_empty + slot * 8, (i / 2 - 1) & 1);
            store_ds(slots + slot * kSlotBytes, ds, row, lane);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive(s_full + slot * 8);
                const u32 at = slots + slot * kSlotBytes, rows = (group * 4 + warp) * 2048;
                asm volatile(
                    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                    " [%0], [%1], %2, [%3];" ::"r"(address_in(at + kBlocks * kBlockBytes + rows, kSelf ? rank : other)),
                    "r"(at + theirs * kBlockBytes + rows), "r"(2048),
                    "r"(address_in(received + slot * 8, kSelf ? rank : other))
                    : "memory");
            }
            auto release = [&](u32 barrier) {
                if (lane == 0) mbarrier_arrive(barrier + slot * 8);
            };
            wgmma_wait<1>();
            wgmma_touch(dv);
            release(o_empty);
            wgmma_wait<0>();
            wgmma_touch(dk);
            release(q_empty);
        }
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kD / 2; i++) sum += dk[i] * dv[i];
        if (sum == 12345.678f) records[0].spare = 1;
        if (threadIdx.x % 128 == 0) records[blockIdx.x * kRoles + group] = {start, clock_now(), steps, 0};
    }
    __syncwarp();
    cluster_sync();
    if (kTimed && threadIdx.x < 4)
        records[blockIdx.x * kRoles + 3 + threadIdx.x] = {sums[threadIdx.x * 2], sums[threadIdx.x * 2 + 1], steps, 0};
    if (threadIdx.x == 0) records[blockIdx.x * kRoles + 2] = {start, clock_now(), steps, 0};
}
