// dK and dV of a block of keys, and dS.
//
// Two warpgroups have 64 keys each: S^T = K Q^T and dP^T = V dO^T have keys as rows, so that P^T and dS^T are at hand
// in registers as the left operands of dV += P^T dO and dK += dS^T Q. A further warpgroup has one thread that brings
// queries and one that takes dS away. The warpgroups never wait for each other: while one computes weights, the
// other's products run.

#if !FT_JOINT && !FT_TURNS
// All key blocks of a thread block: who loads for them, and who takes their dS away.
#if @{ packed }@
__device__ __forceinline__ void load_key_blocks(const KernelArgs& args, u32 smem, KeyRing& keys, QueryRing& queries) {
    const Table table(args);
    const uint2* const starts = table.starts() + args.first_pair;
    const int end = int(starts[1].x);
    KeyItems items;
#pragma unroll 1
    for (int i = int(starts[0].x) + blockIdx.x; i < end; i += gridDim.x) {
        const Item item = Item::of_keys(table, i);
        item.tell(smem, items);
        const Visible visible(args.backward, Lengths{item.q_len, item.kv_len});
        load_key_block(args, smem, KeyBlock(item, visible), item.pair_of_keys(args.backward), keys, queries);
    }
    Item::tell_end(smem, items);
}
__device__ __forceinline__ void send_all_ds(const KernelArgs& args, u32 smem) {
    KeyItems items;
    SpillRing spills;
#pragma unroll 1
    for (;; items.advance()) {
        items.wait(smem);
        if (int(load_shared_4(items.buffer(smem) + Item::kBlock)) < 0) break;
        const Item item = Item::read(items.buffer(smem));
        items.release(smem);
        const Visible visible(args.backward, Lengths{item.q_len, item.kv_len});
        const int group = args.backward.heads / args.backward.kv_heads;
        send_ds(args, smem, visible, KeyBlock(item, visible), group, Members(group), spills);
    }
}
#elif FT_WALKS
__device__ __forceinline__ void send_all_ds(const KernelArgs& args, u32 smem) {
    const Visible visible(args.backward);
    SpillRing spills;
    each_key_block(args, smem, visible, [&](const KeyBlock& at) {
        const Pair pair(args.backward, at.pair);
        send_ds(args, smem, visible, at, pair.group, Members(args, at, pair), spills);
    });
}
#else
__device__ __forceinline__ void load_key_blocks(const KernelArgs& args, u32 smem, KeyRing& keys, QueryRing& queries) {
    const Visible visible(args.backward);
    const int count = KeyBlock::count(args);
#pragma unroll 1
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
        const KeyBlock at(args, visible, i);
        load_key_block(args, smem, at, Pair(args.backward, args.first_pair + at.pair), keys, queries);
    }
}
__device__ __forceinline__ void send_all_ds(const KernelArgs& args, u32 smem) {
    const Visible visible(args.backward);
    const int group = args.backward.heads / args.backward.kv_heads, count = KeyBlock::count(args);
    SpillRing spills;
#pragma unroll 1
    for (int i = blockIdx.x; i < count; i += gridDim.x)
        send_ds(args, smem, visible, KeyBlock(args, visible, i), group, Members(group), spills);
}
#endif

extern "C" __global__ void __launch_bounds__(kKeysThreads, 1)
    @{ entry }@_keys(const __grid_constant__ KernelArgs args) {
    extern __shared__ u8 shared_memory[];
    const u32 smem = round_up(int(smem_address(shared_memory)), 1024);
    const int role = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kKeyStages; i++) {
            KeyRing::init(smem, i, 1, 1);
            ValueRing::init(smem, i, 1, kWarpgroups + kWalks);  // by tickets also the thread that takes dS away
        }
        for (int i = 0; i < kStages; i++) {
            QueryRing::init(smem, i, 1, 4 * kWarpgroups);
            OutRing::init(smem, i, 1, 4 * kWarpgroups);
        }
        for (int i = 0; i < 2; i++) SpillRing::init(smem, i, kByGradient ? 4 : 4 * kWarpgroups, 1);
        if (kByGradient) HandRing::init(smem, 0, 4, 4);
#if @{ packed }@
        for (int i = 0; i < kItems; i++) KeyItems::init(smem, i, 1, 4 * kWarpgroups + 1);
#endif
        mbarrier_init_fence();
    }
    __syncthreads();
    let_next_launch_begin();
    wait_for_launch_before();
    if (role == kLoader) {
        registers_give_back<40>();
        if (kListed ? threadIdx.x % 128 < 32 : threadIdx.x % 128 == 0) {
#if FT_WALKS
            const Visible visible(args.backward);
            load_key_blocks(args, smem, visible, counters_of(args, visible.slots()));
#else
            KeyRing keys;
            QueryRing queries;
            load_key_blocks(args, smem, keys, queries);
#endif
        }
        if (threadIdx.x % 128 == 32) {
            send_all_ds(args, smem);
            tma_store_wait();
        }
    } else {
        registers_take<232>();
        if constexpr (!kByGradient) {
            KeysConsumer<true, true> me{args, smem, role};
            me.run_all();
        } else if (role == 0) {
            KeysConsumer<false, true> me{args, smem, role};
            me.run_all();
        } else {
            KeysConsumer<true, false> me{args, smem, role};
            me.run_all();
        }
        if (threadIdx.x % 128 == 0) tma_store_wait();
    }
}
#endif
