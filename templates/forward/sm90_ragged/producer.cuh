// Follows forward/sm90/producer.cuh, whose fixes belong here too. Apart, since the machine code of 20 of 40 dense
// kernels changed when both families shared this text.
//
// The producer warpgroup: TMA loads of Q, K and V, and the removal of non-finite elements from masked blocks of V.

// Q and K, by one warp: its first lane loads Q, and each lane a box of K.
__device__ __forceinline__ void load_qk(const KernelArgs& args, u32 smem) {
    const bool first_lane = threadIdx.x % 32 == 0;
    KPipeline k;
    QPipeline q;
    Schedule schedule(smem);
    Work work = first_work(smem);
    const auto ask = [&] {
        if (kPersistent && first_lane) mbarrier_arrive(Layout::ask_work_at(smem));
    };
    for (; has_tile<true>(schedule, work, ask); work = schedule.next<true>()) {
        const WorkTile& tile = work.tile;
        const BlockRange& blocks = work.all;
        const Pages pages(args.forward, tile.batch);
        // After the first block of K, whose buffer is released before that of Q.
        const auto load_q = [&] {
#pragma unroll 1
            for (int c = 0; first_lane && c < kConsumers; c++) {
                const u32 full = q.full(smem, c), to = q.buffer(smem, c);
                if (kPersistent) q.acquire(smem, c);
                q.expect(smem, kChunksQK * kBytes64Rows, c);
#pragma unroll
                for (int chunk = 0; chunk < kChunksQK; chunk++) {
                    load_rows(to + chunk * kBytes64Rows, args, full, chunk, tile, tile.row + c * 64);
                }
            }
            __syncwarp();
            q.advance();
        };
        // At least once, for tiles that visit no block.
        int n = blocks.end - 1;
#pragma unroll 1
        do {
            // As late as the slot can still be read in time: a dynamic scheduler then gives more tiles to the thread
            // blocks that are ahead.
            if (n <= blocks.begin) ask();
            if (n >= blocks.begin) {
                const int block = block_at(args, tile, blocks, n);
                const u32 full = k.full(smem);
                const LaneBox box = lane_box(args, pages, args.forward.k_table, tile, block);
                const u32 none = keys_without_page(args, box);
                k.acquire(smem);
                __syncwarp();  // what one lane sends may free the stage again before another has seen that it is free
                if (first_lane) {
                    store_shared_4(without_page_at(smem, k.stage), none);
                    k.expect(smem, Layout::kBytesK);
                }
                load_keys<kChunksQK>(k.buffer(smem), args, pages, box, args.k, full, block, tile);
                __syncwarp();
                k.advance();
            }
            if (n >= blocks.end - 1) load_q();
        } while (--n >= blocks.begin);
    }
}

// The tile scheduler, in a thread of its own: a decision takes as long as a block of keys, by which K would be late. It
// also prefetches the tensor maps, for which a loading thread would wait at the start.
__device__ __forceinline__ void schedule_tiles(const KernelArgs& args, u32 smem) {
    tma_prefetch_map(args.k);
    tma_prefetch_map(args.q);
    tma_prefetch_map(args.v);
    prefetch_biases(args);
    if (!kPersistent) return;
    TileScheduler scheduler(smem);
    do {
        while (scheduler.publish_next(args)) {
        }
    } while (scheduler.begins_again());
}

// Makes rows of a block of V zeros, from one on: each of kThreads threads those 16 bytes of them that it looks through
// for non-finite elements. Left to that search, unwritten slots of NaN make a tile 90 times slower (32 x 197 from pages
// of 16, 12 heads of 64 on an H200: 3311 us, so 36).
template <int kChunks, int kThreads> __device__ __forceinline__ void clear_rows_from(u32 block, int row, u32 thread) {
    static_assert(kBytesChunk % (kThreads * 16) == 0, "whole rounds");
    const u32 begin = row * 128;
#pragma unroll 1
    for (u32 at = begin / (kThreads * 16) * (kThreads * 16) + thread * 16; at < kBytesChunk; at += kThreads * 16) {
        if (at < begin) continue;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk++) {
            store_shared_16(block + chunk * kBytesChunk + at, uint4{0, 0, 0, 0});
        }
    }
}

// V, by the first of one or two warps, so that a wait for V never holds up K. These warps (helpers) take non-finite
// elements out of masked blocks before any product (non_finite.cuh). Masked blocks arrive on a barrier of their own, so
// that helpers see each phase of it, and nothing of the blocks that they leave alone.
template <bool kLoads, bool kHelps>
__device__ __forceinline__ void load_v(const KernelArgs& args, u32 smem, int helper) {
    constexpr int kThreadsThatHelp = kHelpers * 32;
    const u32 lane = threadIdx.x % 32, thread = helper * 32 + lane;
    VPipeline v;
    Schedule schedule(smem);
    u32 admit_parity = 0, raw_parity = 0;  // of the latter one bit per stage
    Work work = first_work(smem);
    for (; has_tile<true>(schedule, work, [] {}); work = schedule.next<true>()) {
        const BlockRange& blocks = work.all;
        const Pages pages(args.forward, work.tile.batch);
#pragma unroll 1
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            const int block = block_at(args, work.tile, blocks, n);
            // Slots behind a sequence's last key may hold anything, and no row attends to them. In packs the rows of
            // another sequence follow: those are left to the search.
            const int filled = max_of(work.tile.kv_len - block * kBlockKV, 0);
            const bool ends = args.forward.kv_begin == nullptr && filled < kBlockKV;
            const bool raw = kClean && (ends || (work.careful && is_masked<kMaskedFirst>(blocks, n)));
            if (kLoads && helper == 0) {
                const LaneBox box = lane_box(args, pages, args.forward.v_table, work.tile, block);
                if (kOutputInV && n == blocks.end - 1) {
                    mbarrier_wait(Layout::admit_v_at(smem), admit_parity);
                    admit_parity ^= 1;
                }
                const u32 arrived = v.arrived(smem, raw);
                v.acquire(smem);
                __syncwarp();  // as load_qk()
                if (lane == 0) {
                    mbarrier_arrive_expect(arrived, Layout::kBytesV);
                    if (kClean && !raw && kHelpers == 2) mbarrier_arrive(arrived);  // for the other helper
                }
                load_keys<kChunksV>(v.buffer(smem), args, pages, box, args.v, arrived, block, work.tile);
            }
            if (kLoads) __syncwarp();
            if (kHelps && raw) {
                mbarrier_wait_idly(v.arrived(smem, true), (raw_parity >> v.stage) & 1);
                raw_parity ^= 1u << v.stage;
                if (ends) clear_rows_from<kChunksV, kThreadsThatHelp>(v.buffer(smem), filled, thread);
                const bool met =
                    work.careful && take_out_non_finite<Element, Layout::kBytesV, kThreadsThatHelp, kScanTogether>(
                                        v.buffer(smem), thread);
                if (met) set_flag(Layout::met_non_finite_at(smem));
                if (ends || met) fence_async_proxy();
                __syncwarp();
                if (lane == 0) v.commit(smem);
            }
            v.advance();
        }
    }
}
