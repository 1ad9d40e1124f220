// The producer: who brings Q, K and V, and who helps with what the copy engine does not do.

// Block n of K or V, counted among all key blocks. The blocks of a cluster bring an equal part of its rows each, to all of them.
template <int kChunks>
__device__ __forceinline__ void bring_keys(u32 to, const TensorMap& map, u32 full, int n, const Tile& tile) {
    constexpr int kRows = kBlockKV / kCluster;
    const int first = kCluster > 1 ? int(cluster_rank()) * kRows : 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
        const u32 at = to + chunk * kBytesChunk + first * 128;
        if constexpr (kCluster > 1) {
            tma_load_to_all(at, map, full, (1 << kCluster) - 1, kEvictLast, chunk * 64, n * kBlockKV + first, tile.kv_head,
                            tile.batch);
        } else {
            tma_load(at, map, full, kEvictLast, chunk * 64, n * kBlockKV, tile.kv_head, tile.batch);
        }
    }
}

// One thread brings Q and K.
__device__ __forceinline__ void bring_qk(const KernelArgs& args, u32 smem, const Work& only) {
    Ring<kStages> ring;
    Ring<Layout::kQBuffers> q_ring;
    Hand hand(smem);
    Work work = first_work(args, only);
    const auto ask = [&] {
        if (kPersistent) mbarrier_arrive(smem + Layout::kAskWork);
    };
    for (; is_dealt<false>(hand, work, ask); work = hand.next<false>()) {
        const Tile& tile = work.tile;
        const BlockRange& blocks = work.all;
        // After the first block of K, whose space is free before that of Q.
        const auto bring_q = [&] {
#pragma unroll 1
            for (int c = 0; c < kConsumers; c++) {
                const int at = q_ring.stage * kConsumers + c;
                const u32 full = smem + Layout::kFullQ + at * 8, to = smem + Layout::kQ + at * Layout::kBytesQ;
                if (kPersistent) mbarrier_wait(smem + Layout::kEmptyQ + at * 8, q_ring.parity ^ 1);
                mbarrier_arrive_expect(full, kChunksQK * kBytes64Rows);
#pragma unroll
                for (int chunk = 0; chunk < kChunksQK; chunk++) {
                    tma_load(to + chunk * kBytes64Rows, args.q, full, kEvictFirst, chunk * 64, 0,
                             (tile.row + c * 64) >> args.group_shift, tile.head, tile.batch);
                }
            }
            q_ring.advance();
        };
        // At least once, for tiles that visit no block.
        int n = blocks.end - 1;
#pragma unroll 1
        do {
            // As late as the others can be told in time: whoever is ahead by then takes more.
            if (n <= blocks.begin) ask();
            if (n >= blocks.begin) {
                const int block = block_at(args, tile, blocks, n);
                const u32 full = smem + Layout::kFullK + ring.stage * 8;
                mbarrier_wait(smem + Layout::kEmptyK + ring.stage * 8, ring.parity ^ 1);
                mbarrier_arrive_expect(full, Layout::kBytesK);
                bring_keys<kChunksQK>(smem + Layout::kK + ring.stage * Layout::kBytesK, args.k, full, block, tile);
                ring.advance();
            }
            if (n >= blocks.end - 1) bring_q();
        } while (--n >= blocks.begin);
    }
}

// Another one decides what comes next: that takes as long as a block of keys, by which who brings those would be late. It also has the
// descriptors of the tensors fetched, for which a thread that copies would wait at the start.
__device__ __forceinline__ void deal_tiles(const KernelArgs& args, u32 smem) {
    tma_prefetch_map(args.k);
    tma_prefetch_map(args.q);
    tma_prefetch_map(args.v);
#pragma unroll
    for (int nth = 0; nth < kBiases; nth++) {
        if (args.biases_mapped >> nth & 1) tma_prefetch_map(args.biases[nth]);
    }
    if (!kPersistent) return;
    Dealer dealer(smem);
    do {
        while (dealer.deal(args)) {
        }
    } while (dealer.begins_again());
}

// One or two warps, of which one thread brings V, so that a wait for V never holds up K. They take non-finite elements out of masked blocks of
// it before anyone multiplies with them (see non_finite.cuh), and copy biases that the copy engine cannot address. Masked blocks arrive on a
// barrier of their own, so that these warps see each phase of it, and nothing of the blocks that they leave alone.
template <bool kBrings, bool kHelps>
__device__ __forceinline__ void serve_v(const KernelArgs& args, u32 smem, const Work& only, int helper) {
    constexpr int kThreadsThatHelp = kHelpers * 32;
    const u32 lane = threadIdx.x % 32, thread = kHelps ? helper * 32 + lane : 0;
    Ring<kStages> ring;
    Hand hand(smem);
    u32 admit_parity = 0, raw_parity = 0;  // of the latter one bit per stage
    Work work = first_work(args, only);
    for (; is_dealt<kHelps>(hand, work, [] {}); work = hand.next<kHelps>()) {
        const BlockRange& blocks = work.all;
#pragma unroll 1
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            const int block = block_at(args, work.tile, blocks, n);
            const bool raw = kClean && work.careful && is_masked<kMaskedFirst>(blocks, n);
            if (kBrings && thread == 0) {
                if (kOutputInV && n == blocks.end - 1) {
                    mbarrier_wait(smem + Layout::kAdmitV, admit_parity);
                    admit_parity ^= 1;
                }
                const u32 full = smem + (raw ? Layout::kRawV : Layout::kFullV) + ring.stage * 8;
                mbarrier_wait(smem + Layout::kEmptyV + ring.stage * 8, ring.parity ^ 1);
                mbarrier_arrive_expect(full, Layout::kBytesV);
                if (kClean && !raw && kHelpers == 2) mbarrier_arrive(full);  // for the second of the warps that clean
                bring_keys<kChunksV>(smem + Layout::kV + ring.stage * Layout::kBytesV, args.v, full, block, work.tile);
            }
            if (kBrings && kHelps) __syncwarp();
            if (kHelps && raw) {
                mbarrier_wait_idly(smem + Layout::kRawV + ring.stage * 8, (raw_parity >> ring.stage) & 1);
                raw_parity ^= 1u << ring.stage;
                const u32 v = smem + Layout::kV + ring.stage * Layout::kBytesV;
                if (take_out_non_finite<Element, Layout::kBytesV, kThreadsThatHelp, kScanTogether>(v, thread)) {
                    set_flag(smem + Layout::kMetNonFinite);
                    fence_async_proxy();
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(smem + Layout::kFullV + ring.stage * 8);
            }
            ring.advance();
        }
    }
}
