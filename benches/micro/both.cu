// The loop of a backward pass whose two warpgroups of 64 keys both form dQ, and leave it to other warps to sum.
//
// Data are random and results unused: only the time counts. Per step each warpgroup computes S', dP', dV and dK for its
// keys, stores dS, and forms half of dQ over the keys of both: 64 rows where a step has 128 (kM), else half of the
// columns. It is staged in one of two places. The third warpgroup loads Q and dO (warp 0) and adds what is staged to
// the sum in global memory (warps 2 and 3: step about, or with two kPieces a half each). kOrder: thread blocks of a
// head take turns at a tile, kShift steps apart.

enum Sink { kNoDq, kDqOnly, kDqF32 };

constexpr int kThreads = 384, kDqColumns = kM == 128 ? 64 : kD / 2;
constexpr u32 kKBytes = kKeys * kD * 2, kQBytes = kM * kD * 2, kSBytes = kM * kKeys * 2, kDqBytes = kM * kD * 4;

__device__ __forceinline__ void wait_turn(u64 flag, u32 turn) {
    u32 x;
    for (u32 tries = 0;; tries++) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
        if (x == turn) break;
        if (tries >> 23) asm volatile("trap;");
    }
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
__device__ __forceinline__ void end_turn(u64 flag) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(flag) : "memory");
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    both(u64 source, u64 source_mask, u64 target, u64 flags, Record* records, u32 steps, u32 tiles, u32 members,
         float scale) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 barriers[4 * kStages + 8];
    __shared__ __align__(16) float statistics[2][2][kM];
    const u32 k_tile = shared_address(memory), v_tile = k_tile + kKBytes, q_tiles = v_tile + kKBytes;
    const u32 o_tiles = q_tiles + kStages * kQBytes, s_tiles = o_tiles + kStages * kQBytes;
    const u32 staging = s_tiles + 2 * kSBytes;
    const u32 q_full = shared_address(&barriers[0]), o_full = q_full + 8 * kStages, q_empty = o_full + 8 * kStages,
              o_empty = q_empty + 8 * kStages, staged = o_empty + 8 * kStages, taken = staged + 32;
    const u32 group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 member = blockIdx.x % members, head = blockIdx.x / members;
    fill_random(k_tile, 2 * kKBytes + 2 * kStages * kQBytes);
    for (u32 i = threadIdx.x; i < 4 * kM; i += blockDim.x) (&statistics[0][0][0])[i] = (i % 7) * 0.01f;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; i++) {
            mbarrier_init(q_full + 8 * i, 1), mbarrier_init(o_full + 8 * i, 1);
            mbarrier_init(q_empty + 8 * i, 8), mbarrier_init(o_empty + 8 * i, 8);
        }
        for (u32 i = 0; i < 4; i++) mbarrier_init(staged + 8 * i, 8 / kPieces), mbarrier_init(taken + 8 * i, 1);
        mbarrier_init_fence();
    }
    fence_async_proxy();
    __syncthreads();
    const u64 start = clock_now();
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == 0 && lane == 0) {
            for (u32 i = 0; i < steps; i++) {
                const u32 slot = i % kStages;
                const u64 at = source + (((u64(head) * tiles + i % tiles) * 2 * kQBytes) & source_mask);
                if (i >= kStages) mbarrier_wait(q_empty + slot * 8, (i / kStages - 1) & 1);
                mbarrier_expect(q_full + slot * 8, kQBytes);
                bulk_load(q_tiles + slot * kQBytes, at, kQBytes, q_full + slot * 8);
                if (i >= kStages) mbarrier_wait(o_empty + slot * 8, (i / kStages - 1) & 1);
                mbarrier_expect(o_full + slot * 8, kQBytes);
                bulk_load(o_tiles + slot * kQBytes, at + kQBytes, kQBytes, o_full + slot * 8);
            }
        }
        if (warp >= 2 && lane == 0 && kSink == kDqF32) {
            const u32 piece = warp - 2;
            constexpr u32 kBytes = kDqBytes / kPieces;
            for (u32 i = kPieces == 1 ? piece : 0; i < steps; i += kPieces == 1 ? 2 : 1) {
                const u32 slot = i % 2, tile = (i + kShift * member) % tiles, last = min(tile / kShift, members - 1);
                const u32 half = kPieces == 1 ? 0 : piece;
                const u64 flag = flags + ((u64(head) * tiles + tile) * 2 + half) * 4;
                mbarrier_wait(staged + (slot * 2 + half) * 8, i / 2 & 1);
                if (kOrder) {
                    const u32 turn = member <= last ? last - member : last + 1 + (members - 1 - member);
                    wait_turn(flag, turn + i / tiles * members);
                    asm volatile("fence.proxy.async.global;" ::: "memory");
                }
                bulk_add_f32(target + (u64(head) * tiles + tile) * kDqBytes + half * kBytes,
                             staging + slot * kDqBytes + half * kBytes, kBytes);
                bulk_commit();
                bulk_wait_read<0>();
                mbarrier_arrive(taken + (slot * 2 + half) * 8);
                if (kOrder) {
                    bulk_wait<0>();
                    asm volatile("fence.proxy.async.global;" ::: "memory");
                    end_turn(flag);
                }
            }
            bulk_wait<0>();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        float dk[kD / 2], dv[kD / 2];
#pragma unroll
        for (int i = 0; i < kD / 2; i++) dk[i] = dv[i] = 0;
        const u64 k_rows = descriptor_of_rows(k_tile + group * 8192),
                  v_rows = descriptor_of_rows(v_tile + group * 8192);
        const u32 row = group * 64 + warp * 16 + lane % 8 + (lane / 8 & 1) * 8;
        for (u32 i = 0; i < steps; i++) {
            const u32 slot = i % kStages, phase = i / kStages & 1;
            const u32 q_tile = q_tiles + slot * kQBytes, o_tile = o_tiles + slot * kQBytes;
            const u32 s_tile = s_tiles + i % 2 * kSBytes;
            const u64 q_rows = descriptor_of_rows(q_tile), o_rows = descriptor_of_rows(o_tile);
            const u64 q_depth = descriptor_of_depth(q_tile, kM * 128), o_depth = descriptor_of_depth(o_tile, kM * 128);
            float s[kM / 2], dp[kM / 2], dq[kDqColumns / 2];
            u32 p[kM / 4], ds[kM / 4];
            mbarrier_wait(q_full + slot * 8, phase);
            wgmma_fence();
            issue_scores(s, k_rows, q_rows);
            mbarrier_wait(o_full + slot * 8, phase);
            issue_scores(dp, v_rows, o_rows);
            auto release = [&](u32 barrier) {
                if (lane == 0) mbarrier_arrive(barrier + slot * 8);
            };
            auto form_dq = [&]() {
                const u64 a = descriptor_of_depth(s_tile + (kM == 128 ? group * kKeys * 128 : 0), kKeys * 128);
                const u64 b = descriptor_of_depth(k_tile + (kD == 128 ? group * kKeys * 128 : 0), kKeys * 128);
                barrier_sync(5, 256);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < kKeys / 16; k++) mma_dq(dq, a + k * 2048 / 16, b + k * 2048 / 16, k > 0);
                wgmma_commit();
            };
            auto sink = [&]() {
                if constexpr (kSink == kDqF32) {
                    const u32 at = staging + i % 2 * kDqBytes + (group * 4 + warp) * (kDqBytes / 8) + lane * 16;
                    const u32 half = kPieces == 1 ? 0 : group;
                    if (i >= 2) mbarrier_wait(taken + (i % 2 * 2 + half) * 8, (i / 2 - 1) & 1);
#pragma unroll
                    for (int j = 0; j < kDqColumns / 8; j++)
                        store_v4(at + j * 512, __float_as_uint(dq[j * 4]), __float_as_uint(dq[j * 4 + 1]),
                                 __float_as_uint(dq[j * 4 + 2]), __float_as_uint(dq[j * 4 + 3]));
                    fence_async_proxy();
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(staged + (i % 2 * 2 + half) * 8);
                }
            };
            wgmma_wait<1>();
            wgmma_touch(s);
            take_exponentials(s, p, statistics[i % 2][0], lane, scale);
            wgmma_wait<0>();
            wgmma_touch(dp);
            take_gradients(s, dp, p, ds, statistics[i % 2][1], lane);
            wgmma_touch(dv);
            wgmma_fence();
            issue_sum(dv, p, o_depth);
            if (kSink != kNoDq) {
                store_ds(s_tile, ds, row, lane);
                fence_async_proxy();
                form_dq();
            }
            wgmma_touch(dk);
            wgmma_fence();
            issue_sum(dk, ds, q_depth);
            wgmma_wait<2 - (kSink == kNoDq)>();
            wgmma_touch(dv);
            release(o_empty);
            if (kSink != kNoDq) {
                wgmma_wait<1>();
                wgmma_touch(dq);
                sink();
            }
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
    __syncthreads();
    if (threadIdx.x == 0) records[blockIdx.x * kRoles + 2] = {start, clock_now(), steps, 0};
}
