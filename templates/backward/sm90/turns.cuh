// dK, dV and dQ in one launch, and five products: dQ of a tile is reduced to fp32 sums in memory by the key blocks that
// see it, in one order, so that they have the same bytes in every run.
//
// The order of a tile is that of descending key blocks, which are also taken in this order: a key block waits for those
// with earlier tickets alone, and any number of thread blocks at a time comes to an end. Under a causal mask each
// begins at its diagonal, a tile or two before the one that it follows, and finds its turn come. Without one they start
// behind each other once and stay so. Neither of the warpgroups that multiply waits for a turn: they leave dQ in one of
// two buffers to two warps that add one each, step about. With few pairs at a time the turns cost 1 to 2 % (H100, 4096
// queries, 4 pairs: head dim 128 577 TFLOP/s, 586 without an order; causal 509, 511; head dim 64 486, 507; causal 442,
// 447). At head dim 128 reductions run at 2.0 TB/s then, which is what bounds a step.
//
// A tile lies in memory as products leave it: warpgroup by warpgroup, for every 8 columns 16 bytes of each thread.
//
// Query heads that share a head of K may be split among walks of several thread blocks: dK and dV of a key block are
// then sums in memory too, walk by walk (walks.cuh).
#if FT_TURNS

static_assert(!kByGradient && !kListed && !kPacked && !kJoint);
static_assert(kBlockQ == 128 ? kChunksQK == 1 : kChunksQK == 2, "each warpgroup has half of dQ");

__device__ __forceinline__ void bulk_add(float* to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes) : "memory");
}

// Adds dQ of every other step of the key blocks that the thread block takes. One thread.
__device__ __forceinline__ void add_sums(const KernelArgs& args, u32 smem, const Visible& visible, int mine) {
    using L = KeysLayout;
    int step = 0;
    u32 parity = 0;
    each_key_block(args, smem, visible, [&](const KeyBlock& at) {
        const Pair pair(args.backward, at.pair);
        const Members members(args, at, pair);
#pragma unroll 1
        for (int member = members.begin; member < members.end; member++) {
            float* const of_head = dq_sums_of(args, i64(at.pair) * pair.group + member);
            u32* const turns = turns_of(args, i64(at.pair) * pair.group + member);
#pragma unroll 1
            for (int tile = at.begin; tile < at.end; tile++, step ^= 1) {
                if (step != mine) continue;
                const u32 turn = u32(visible.last_block(tile) - at.block);
                float* const to = of_head + i64(tile) * kBlockQ * kColumnsQK;
                mbarrier_wait(SumRing::full_at(smem, mine), parity);
                if (turn == 0) {
                    bulk_store(to, SumRing::buffer_at(smem, mine), L::kBytesSums);
                } else {
                    wait_for_turn(turns + tile, turn);
                    fence_async_proxy_everywhere();
                    bulk_add(to, SumRing::buffer_at(smem, mine), L::kBytesSums);
                }
                tma_store_commit();
                tma_store_wait_read();
                mbarrier_arrive(SumRing::empty_at(smem, mine));
                parity ^= 1;
                tma_store_wait();
                say_written(turns + tile);
            }
        }
    });
}

extern "C" __global__ void __launch_bounds__(kKeysThreads, 1)
    @{ entry }@_turns(const __grid_constant__ KernelArgs args) {
    extern __shared__ u8 shared_memory[];
    const u32 smem = round_up(int(smem_address(shared_memory)), 1024);
    const Visible visible(args.backward);
    const int role = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kKeyStages; i++) {
            KeyRing::init(smem, i, 1, 1);
            ValueRing::init(smem, i, 1, 4 * kWarpgroups + 2);  // also the threads that add dQ
        }
        for (int i = 0; i < kStages; i++) {
            QueryRing::init(smem, i, 1, 4 * kWarpgroups);
            OutRing::init(smem, i, 1, 4 * kWarpgroups);
        }
        for (int i = 0; i < 2; i++) SumRing::init(smem, i, 4 * kWarpgroups, 1);
        if (kSlopes == 1) mbarrier_init(smem + KeysLayout::kSlopesRead, 4 * kWarpgroups);
        mbarrier_init_fence();
    }
    __syncthreads();
    let_next_launch_begin();
    wait_for_launch_before();
    if (role == kLoader) {
        registers_give_back<40>();
        const int thread = threadIdx.x % 128;
        if (thread == 0) load_key_blocks(args, smem, visible, counters_of(args, 0));
        if (thread == 32 || thread == 64) add_sums(args, smem, visible, thread / 32 - 1);
    } else {
        registers_take<232>();
        KeysConsumer<true, true> me{args, smem, role};
#pragma unroll 1
        for (int i = taken_key_block(smem, me.keys); i >= 0; i = taken_key_block(smem, me.keys)) me.run(visible, i);
    }
}

#endif
