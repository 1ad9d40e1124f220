// The loop of a backward pass with its parts switched on and off. Data are random and results unused: only the time
// counts.
//
// Two warpgroups of 64 keys each compute, per step: S' = K Q', dP' = V dO', P' = exp2(S' c - L), dV += P' dO, dS' = P'
// (dP' - D), dK += dS' Q. dQ = dS K is the work of a third (kOwner 0), or of both, half each (kOwner 1). A warp of a
// further warpgroup loads Q and dO; with kOwner 2 there is none: the third, which forms dQ, also loads. kSink: what
// becomes of dS and dQ. kLoads: Q and dO are loaded each step. kMath: exponentials and dS are computed. kEarly: dV is
// issued before dS is computed, with P packed beside its fp32; else behind.

enum Sink { kNoDq, kDqOnly, kDqF32, kDqS32, kDqRed, kSpill };

constexpr int kThreads = kOwner ? 384 : 512, kParts = kOwner == 1 ? 1 : kM / 64 * kD / kDqColumns;
constexpr u32 kKBytes = kKeys * kD * 2, kQBytes = kM * kD * 2, kSBytes = kM * kKeys * 2,
              kPartBytes = 64 * kDqColumns * 4;
constexpr bool kStaged = kSink == kDqF32 || kSink == kDqS32, kProducts = kSink != kNoDq && kSink != kSpill;

// What becomes of 64 rows and kDqColumns columns of dQ: `part` of the tile at `to`; barrier `id` is the warpgroup's
// own.
__device__ __forceinline__ void sink_dq(const float (&d)[kDqColumns / 2], u32 staging, u64 to, u32 part, int id,
                                        bool first, float scale) {
    const u32 thread = threadIdx.x % 128;
    if constexpr (kStaged) {
        if (first) {
            if (thread == 0) bulk_wait_read<0>();
            barrier_sync(id, 128);
        }
        const u32 mine = staging + part * kPartBytes + thread * 16;
#pragma unroll
        for (int j = 0; j < kDqColumns / 8; j++) {
            u32 x[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[e] = kSink == kDqF32 ? __float_as_uint(d[j * 4 + e]) : u32(__float2int_rn(d[j * 4 + e] * scale));
            store_v4(mine + j * 2048, x[0], x[1], x[2], x[3]);
        }
        fence_async_proxy();
        barrier_sync(id, 128);
        if (thread == 0) {
            if (kSink == kDqF32)
                bulk_add_f32(to + part * kPartBytes, staging + part * kPartBytes, kPartBytes);
            else
                bulk_add_s32(to + part * kPartBytes, staging + part * kPartBytes, kPartBytes);
            bulk_commit();
        }
    }
    if constexpr (kSink == kDqRed) {
#pragma unroll
        for (int j = 0; j < kDqColumns / 8; j++)
            asm volatile(
                "red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + part * kPartBytes + j * 2048 + thread * 16),
                "f"(d[j * 4]), "f"(d[j * 4 + 1]), "f"(d[j * 4 + 2]), "f"(d[j * 4 + 3])
                : "memory");
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    loop(u64 source, u64 source_mask, u64 target, Record* records, u32 steps, u32 tiles, u32 members, float scale) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 barriers[12];
    __shared__ __align__(16) float statistics[2][2][kM];
    const u32 k_tile = shared_address(memory), v_tile = k_tile + kKBytes, q_tiles = v_tile + kKBytes;
    const u32 o_tiles = q_tiles + 2 * kQBytes, s_tiles = o_tiles + 2 * kQBytes, staging = s_tiles + 2 * kSBytes;
    const u32 q_full = shared_address(&barriers[0]), o_full = shared_address(&barriers[2]),
              q_empty = shared_address(&barriers[4]);
    const u32 o_empty = shared_address(&barriers[6]), s_full = shared_address(&barriers[8]),
              s_empty = shared_address(&barriers[10]);
    const u32 group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 member = blockIdx.x % members, head = blockIdx.x / members;
    fill_random(k_tile, 2 * kKBytes + 4 * kQBytes);
    for (u32 i = threadIdx.x; i < 4 * kM; i += blockDim.x) (&statistics[0][0][0])[i] = (i % 7) * 0.01f;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 2; i++) {
            mbarrier_init(q_full + 8 * i, 1), mbarrier_init(o_full + 8 * i, 1), mbarrier_init(s_empty + 8 * i, 1);
            mbarrier_init(q_empty + 8 * i, 2), mbarrier_init(o_empty + 8 * i, 2), mbarrier_init(s_full + 8 * i, 8);
        }
        mbarrier_init_fence();
    }
    fence_async_proxy();
    __syncthreads();
    const u64 start = clock_now();
    auto load_step = [&](u32 i) {
        const u32 slot = i % 2;
        const u64 at = source + (((u64(head) * tiles + i % tiles) * 2 * kQBytes) & source_mask);
        if (i >= 2) mbarrier_wait(q_empty + slot * 8, (i / 2 - 1) & 1);
        mbarrier_expect(q_full + slot * 8, kQBytes);
        bulk_load(q_tiles + slot * kQBytes, at, kQBytes, q_full + slot * 8);
        if (i >= 2) mbarrier_wait(o_empty + slot * 8, (i / 2 - 1) & 1);
        mbarrier_expect(o_full + slot * 8, kQBytes);
        bulk_load(o_tiles + slot * kQBytes, at + kQBytes, kQBytes, o_full + slot * 8);
    };
    if (kOwner != 2 && group == kThreads / 128 - 1) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == 0 && lane == 0 && kLoads)
            for (u32 i = 0; i < steps; i++) load_step(i);
        if (warp == 1 && lane == 0 && kSink == kSpill) {
            for (u32 i = 0; i < steps; i++) {
                const u32 slot = i % 2;
                mbarrier_wait(s_full + slot * 8, i / 2 & 1);
                bulk_store(target + (u64(i % tiles) * gridDim.x + blockIdx.x) * kSBytes, s_tiles + slot * kSBytes,
                           kSBytes);
                bulk_commit();
                bulk_wait_read<0>();
                mbarrier_arrive(s_empty + slot * 8);
            }
            bulk_wait<0>();
        }
    } else if (kOwner != 1 && group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kDqRegisters));
        if constexpr (kProducts && kOwner != 1) {
            auto load = [&](u32 i) {
                if (kOwner == 2 && kLoads && threadIdx.x % 128 == 0 && i < steps) load_step(i);
            };
            load(0), load(1);
            for (u32 i = 0; i < steps; i++) {
                const u32 slot = i % 2;
                const u64 to = target + (u64(head) * tiles + (i + member) % tiles) * kM * kD * 4;
                mbarrier_wait(s_full + slot * 8, i / 2 & 1);
#pragma unroll
                for (int part = 0; part < kParts; part++) {
                    const int rows = part % (kM / 64), columns = part / (kM / 64) * kDqColumns;
                    float d[kDqColumns / 2];
                    const u64 a = descriptor_of_depth(s_tiles + slot * kSBytes + rows * kKeys * 128, kKeys * 128);
                    const u64 b =
                        descriptor_of_depth(k_tile + columns / 64 * kKeys * 128 + columns % 64 * 2, kKeys * 128);
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < kKeys / 16; k++) mma_dq(d, a + k * 2048 / 16, b + k * 2048 / 16, k > 0);
                    wgmma_commit();
                    wgmma_wait<0>();
                    wgmma_touch(d);
                    if (part == kParts - 1) {
                        barrier_sync(4, 128);
                        if (threadIdx.x % 128 == 0) mbarrier_arrive(s_empty + slot * 8);
                    }
                    sink_dq(d, staging, to, part, 1, part == 0, scale);
                }
                load(i + 2);
                __syncwarp();
            }
            if (threadIdx.x % 128 == 0) bulk_wait<0>();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
        float dk[kD / 2], dv[kD / 2];
#pragma unroll
        for (int i = 0; i < kD / 2; i++) dk[i] = dv[i] = 0;
        const u64 k_rows = descriptor_of_rows(k_tile + group * 8192),
                  v_rows = descriptor_of_rows(v_tile + group * 8192);
        const u32 matrix_row = warp * 16 + lane % 8 + (lane / 8 & 1) * 8, row = group * 64 + matrix_row;
        for (u32 i = 0; i < steps; i++) {
            const u32 slot = i % 2, q_tile = q_tiles + slot * kQBytes, o_tile = o_tiles + slot * kQBytes;
            const u64 q_rows = descriptor_of_rows(q_tile), o_rows = descriptor_of_rows(o_tile);
            const u64 q_depth = descriptor_of_depth(q_tile, kM * 128), o_depth = descriptor_of_depth(o_tile, kM * 128);
            float s[kM / 2], dp[kM / 2];
            u32 p[kM / 4];
            if (kLoads) mbarrier_wait(q_full + slot * 8, i / 2 & 1);
            wgmma_fence();
            issue_scores(s, k_rows, q_rows);
            if (kLoads) mbarrier_wait(o_full + slot * 8, i / 2 & 1);
            issue_scores(dp, v_rows, o_rows);
            wgmma_wait<1>();
            wgmma_touch(s);
            take_exponentials(s, p, statistics[slot][0], lane, scale);
            auto issue_dv = [&]() {
                wgmma_touch(dv);
                wgmma_fence();
                issue_sum(dv, p, o_depth);
            };
            if (kEarly) {
                issue_dv();
                wgmma_wait<1>();
            } else {
                wgmma_wait<0>();
            }
            wgmma_touch(dp);
            u32 ds[kM / 4];
            take_gradients(s, dp, p, ds, statistics[slot][1], lane);
            if (!kEarly) issue_dv();
            auto issue_dk = [&]() {
                wgmma_touch(dk);
                wgmma_fence();
                issue_sum(dk, ds, q_depth);
            };
            constexpr bool kShared = kOwner == 1 && kProducts;  // both warpgroups form dQ, and meet before it
            if (!kShared) issue_dk();
            if (kSink != kNoDq) {
                if (!kShared && i >= 2) mbarrier_wait(s_empty + slot * 8, (i / 2 - 1) & 1);
                store_ds(s_tiles + slot * kSBytes, ds, row, lane);
                fence_async_proxy();
                if (!kShared) {
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(s_full + slot * 8);
                }
            }
            auto release = [&](u32 barrier) {
                if (kLoads) {
                    barrier_sync(2 + group, 128);
                    if (threadIdx.x % 128 == 0) mbarrier_arrive(barrier + slot * 8);
                }
            };
            if constexpr (kShared) {
                float dq[kDqColumns / 2];
                const u32 rows = kM == 128 ? group : 0, columns = kM == 128 ? 0 : group * kDqColumns;
                const u64 a = descriptor_of_depth(s_tiles + slot * kSBytes + rows * kKeys * 128, kKeys * 128);
                const u64 b =
                    descriptor_of_depth(k_tile, kKeys * 128) + (columns / 64 * kKeys * 128 + columns % 64 * 2) / 16;
                barrier_sync(5, 256);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < kKeys / 16; k++) mma_dq(dq, a + k * 2048 / 16, b + k * 2048 / 16, k > 0);
                wgmma_commit();
                wgmma_wait<1>();
                wgmma_touch(dv);
                release(o_empty);
                issue_dk();
                wgmma_wait<1>();
                wgmma_touch(dq);
                sink_dq(dq, staging, target + (u64(head) * tiles + (i + member) % tiles) * kM * kD * 4, group,
                        6 + group, true, scale);
            } else {
                wgmma_wait<1>();
                wgmma_touch(dv);
                release(o_empty);
            }
            wgmma_wait<0>();
            wgmma_touch(dk);
            release(q_empty);
        }
        if (threadIdx.x % 128 == 0) bulk_wait<0>();
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kD / 2; i++) sum += dk[i] * dv[i];
        if (sum == 12345.678f) records[0].spare = 1;
        if (threadIdx.x % 128 == 0) records[blockIdx.x * kRoles + group] = {start, clock_now(), steps, 0};
    }
    __syncthreads();
    if (threadIdx.x == 0) records[blockIdx.x * kRoles + 2] = {start, clock_now(), steps, 0};
}
