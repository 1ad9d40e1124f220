// The producer warpgroup: TMA loads of Q, K and V, and the removal of non-finite elements from masked blocks of V.

// Block n of K or V, counted among all key blocks.
template <int kChunks>
__device__ __forceinline__ void load_keys(u32 to, const TensorMap& map, u32 full, int n, const Tile& tile) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
        tma_load(to + chunk * kBytesChunk, map, full, kEvictLast, chunk * 64, n * kBlockKV, tile.kv_head, tile.batch);
    }
}

// Q and K, by one thread.
__device__ __forceinline__ void load_qk(const KernelArgs& args, u32 smem, const Work& only) {
    KPipeline k;
    QPipeline q;
    Schedule schedule(smem);
    Work work = first_work(args, only);
    const auto ask = [&] {
        if (kPersistent) mbarrier_arrive(Layout::ask_work_at(smem));
    };
    for (; has_tile<false>(schedule, work, ask); work = schedule.next<false>()) {
        const Tile& tile = work.tile;
        const BlockRange& blocks = work.all;
        // After the first block of K, whose buffer is released before that of Q.
        const auto load_q = [&] {
#pragma unroll 1
            for (int c = 0; c < kConsumers; c++) {
                const u32 full = q.full(smem, c), to = q.buffer(smem, c);
                if (kPersistent) q.acquire(smem, c);
                q.expect(smem, kChunksQK * kBytes64Rows, c);
#pragma unroll
                for (int chunk = 0; chunk < kChunksQK; chunk++) {
                    tma_load(to + chunk * kBytes64Rows, args.q, full, kEvictFirst, chunk * 64, 0,
                             (tile.row + c * 64) >> args.group_shift, tile.head, tile.batch);
                }
            }
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
                k.acquire(smem);
                k.expect(smem, Layout::kBytesK);
                load_keys<kChunksQK>(k.buffer(smem), args.k, full, block, tile);
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
#pragma unroll
    for (int nth = 0; nth < kBiases; nth++) {
        if (args.biases_mapped >> nth & 1) tma_prefetch_map(args.biases[nth]);
    }
    if (!kPersistent) return;
    TileScheduler scheduler(smem);
    do {
        while (scheduler.publish_next(args)) {
        }
    } while (scheduler.begins_again());
}

// V, by one thread of one or two warps, so that a wait for V never holds up K. These warps (helpers) take non-finite
// elements out of masked blocks before any product (non_finite.cuh). Masked blocks arrive on a barrier of their own, so
// that helpers see each phase of it, and nothing of the blocks that they leave alone.
template <bool kLoads, bool kHelps>
__device__ __forceinline__ void load_v(const KernelArgs& args, u32 smem, const Work& only, int helper) {
    constexpr int kThreadsThatHelp = kHelpers * 32;
    const u32 lane = threadIdx.x % 32, thread = kHelps ? helper * 32 + lane : 0;
    VPipeline v;
    Schedule schedule(smem);
    u32 admit_parity = 0, raw_parity = 0;  // of the latter one bit per stage
    Work work = first_work(args, only);
    for (; has_tile<kHelps>(schedule, work, [] {}); work = schedule.next<kHelps>()) {
        const BlockRange& blocks = work.all;
#pragma unroll 1
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            const int block = block_at(args, work.tile, blocks, n);
            const bool raw = kClean && work.careful && is_masked<kMaskedFirst>(blocks, n);
            if (kLoads && thread == 0) {
                if (kOutputInV && n == blocks.end - 1) {
                    mbarrier_wait(Layout::admit_v_at(smem), admit_parity);
                    admit_parity ^= 1;
                }
                const u32 arrived = v.arrived(smem, raw);
                v.acquire(smem);
                mbarrier_arrive_expect(arrived, Layout::kBytesV);
                if (kClean && !raw && kHelpers == 2) mbarrier_arrive(arrived);  // for the other helper
                load_keys<kChunksV>(v.buffer(smem), args.v, arrived, block, work.tile);
            }
            if (kLoads && kHelps) __syncwarp();
            if (kHelps && raw) {
                mbarrier_wait_idly(v.arrived(smem, true), (raw_parity >> v.stage) & 1);
                raw_parity ^= 1u << v.stage;
                if (take_out_non_finite<Element, Layout::kBytesV, kThreadsThatHelp, kScanTogether>(v.buffer(smem),
                                                                                                   thread)) {
                    set_flag(Layout::met_non_finite_at(smem));
                    fence_async_proxy();
                }
                __syncwarp();
                if (lane == 0) v.commit(smem);
            }
            v.advance();
        }
    }
}
