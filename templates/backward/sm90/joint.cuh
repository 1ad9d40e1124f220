// dK, dV, dS and dQ in one launch.
//
// A thread block takes a ticket. Those with the first ones take key blocks until there are none, and then row blocks,
// as the others do from the start. Both are taken in order, from counters. A row block waits until a counter says that
// all key blocks that it sees have written its dS: these are taken by thread blocks with earlier tickets, which run and
// wait for earlier walks of the same key block at most (walks.cuh), so that any number of thread blocks at a time comes
// to an end. Which one sums what changes no byte.
#if FT_JOINT

// As send_ds(). Copies are asked for their end only when the one behind them is under way.
__device__ __forceinline__ void send_ds_and_say(const KernelArgs& args, u32 smem, const Visible& visible,
                                                const KeyBlock& at, int group, SpillRing& spills) {
    const Members members(args, at, Pair(args.backward, at.pair));
    constexpr int kTiles = kRowBlock / kBlockQ;
    const i64 slots = visible.slots(), head_index = i64(at.pair) * group + members.begin;
    char* to = ds_of(args, head_index, slots) + visible.slots_before(at.block) * kBytesSlot;
    u32* written = written_of(args, head_index, slots);
    u32* whole = nullptr;  // the counter of a row block that has all tiles of the key block, with the last copy
#pragma unroll 1
    for (int member = members.begin; member < members.end; member++) {
#pragma unroll 1
        for (int tile = at.begin; tile < at.end; tile++) {
            send_tile(to + i64(tile - at.begin) * kBytesSlot, smem, spills);
            if (whole != nullptr) {
                tma_store_wait_but_one();
                say_written(whole);
                whole = nullptr;
            }
            if (tile + 1 == at.end || (tile + 1) % kTiles == 0) whole = written + tile / kTiles;
        }
        to += slots * kBytesSlot;
        written += row_blocks(args);
    }
    if (whole != nullptr) {
        tma_store_wait();
        say_written(whole);
    }
}

// Waits for dS of a row block. One thread, which then has it copied.
__device__ __forceinline__ void wait_until_written(const KernelArgs& args, const Visible& visible, const RowBlock& at,
                                                   i64 slots) {
    const Blocks blocks(visible, at.tile * 64, kRowBlock);
    u32 parts = 0;
#pragma unroll 1
    for (int block = blocks.begin; block < blocks.end; block++) {
        const Written written(visible, block);
        if (max_of(at.tile, written.begin) < min_of(at.tile + kQueryTiles, written.end)) parts++;
    }
    const u32* counter = written_of(args, at.head_index, slots) + at.tile / kQueryTiles;
    while (load_acquire(counter) < parts) asm volatile("nanosleep.u32 200;");
    fence_async_proxy_everywhere();
}

// Takes dS of these key blocks away. One thread.
__device__ __forceinline__ void send_key_blocks(const KernelArgs& args, u32 smem, const Visible& visible, int group) {
    SpillRing spills;
    each_key_block(args, smem, visible, [&](const KeyBlock& at) {
        send_ds_and_say(args, smem, visible, at, group, spills);
    });
    tma_store_wait();
}

// Takes row blocks until there are none, the next one while the buffers of one are filled. One thread.
__device__ __forceinline__ void load_row_blocks(const KernelArgs& args, u32 smem, const Visible& visible, int group,
                                                u32* counters) {
    const i64 slots = visible.slots();
    const int count = RowBlock::count(args, group);
    TileRing ring;
    int next = count_up(counters + kRowBlocks);
#pragma unroll 1
    while (next < count) {
        const int i = next;
        next = count_up(counters + kRowBlocks);
        const RowBlock at(args, group, i);
        const Pair pair(args.backward, args.first_pair + at.head_index / group);
        wait_until_written(args, visible, at, slots);
        load_tiles(args, smem, visible, pair, ds_of(args, at.head_index, slots), at.tile, ring, i);
    }
    ring.acquire(smem);
    store_shared_4(smem + QueriesLayout::kWhich + ring.stage * 8, u32(-1));
    ring.commit(smem);
}

// dQ of these rows, of one warpgroup.
__device__ __forceinline__ void sum_row_blocks(const KernelArgs& args, u32 smem, const Visible& visible, int group,
                                               int role) {
    TileRing ring;
#pragma unroll 1
    for (;;) {
        ring.wait(smem);
        const int i = int(load_shared_4(smem + QueriesLayout::kWhich + ring.stage * 8));
        if (i < 0) break;
        const RowBlock at(args, group, i);
        const Pair pair(args.backward, args.first_pair + at.head_index / group);
        sum_row_block(args, smem, visible, pair, ds_of(args, at.head_index, visible.slots()), at.tile,
                      pair.head(at.head_index % group), role, ring);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait();
}

// From key blocks to row blocks: no one uses shared memory any more, and it has the barriers of row blocks.
__device__ __forceinline__ void change_over(u32 smem) {
    __syncwarp();
    fence_async_proxy();
    barrier_sync(4, kKeysThreads);
    if (threadIdx.x == 128 * kLoader) {
        for (int i = 0; i < kRowStages; i++) TileRing::init(smem, i, 1, 8);
        mbarrier_init_fence();
    }
    barrier_sync(4, kKeysThreads);
}

// Thread blocks that begin with key blocks. Where all are equally long, as many as have the same number of them.
__device__ __forceinline__ int thread_blocks_of_keys(const KernelArgs& args) {
    const int all = int(gridDim.x), most = max_of(all - max_of(all * kDqBlocks / 128, 1), 1);
    if (kMaskLeft || kMaskRight) return most;
    const int count = KeyBlock::count(args), rounds = max_of((count + most / 2) / most, 1);
    return min_of(div_up(count, rounds), all);
}

extern "C" __global__ void __launch_bounds__(kKeysThreads, 1)
    @{ entry }@_joint(const __grid_constant__ KernelArgs args) {
    extern __shared__ u8 shared_memory[];
    const u32 smem = round_up(int(smem_address(shared_memory)), 1024);
    const Visible visible(args.backward);
    const int group = args.backward.heads / args.backward.kv_heads;
    u32* counters = counters_of(args, visible.slots());
    const int role = warp_uniform(threadIdx.x / 128);
    wait_for_launch_before();
    if (threadIdx.x == 0) {
        for (int i = 0; i < kKeyStages; i++) {
            KeyRing::init(smem, i, 1, 1);
            ValueRing::init(smem, i, 1, kWarpgroups + 1);  // also the thread that takes dS away
        }
        for (int i = 0; i < kStages; i++) {
            QueryRing::init(smem, i, 1, 4 * kWarpgroups);
            OutRing::init(smem, i, 1, 4 * kWarpgroups);
        }
        for (int i = 0; i < 2; i++) SpillRing::init(smem, i, 4 * kWarpgroups, 1);
        mbarrier_init_fence();
        store_shared_4(smem + KeysLayout::kTicket, u32(count_up(counters + kTickets)));
    }
    __syncthreads();
    let_next_launch_begin();
    const bool begins_with_keys = int(load_shared_4(smem + KeysLayout::kTicket)) < thread_blocks_of_keys(args);
    if (role == kLoader) {
        // Who finds rows and tiles spills with less.
        registers_give_back<56>();
        if (begins_with_keys) {
            if (threadIdx.x % 128 == 0) load_key_blocks(args, smem, visible, counters);
            if (threadIdx.x % 128 == 32) send_key_blocks(args, smem, visible, group);
        }
        change_over(smem);
        if (threadIdx.x % 128 == 0) load_row_blocks(args, smem, visible, group, counters);
    } else {
        registers_take<224>();
        if (begins_with_keys) {
            KeysConsumer<true, true> me{args, smem, role};
#pragma unroll 1
            for (int i = taken_key_block(smem, me.keys); i >= 0; i = taken_key_block(smem, me.keys))
                me.run(visible, i);
            if (threadIdx.x % 128 == 0) tma_store_wait();
        }
        change_over(smem);
        sum_row_blocks(args, smem, visible, group, role);
    }
}

#endif
