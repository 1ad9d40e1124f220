// Brings what a block of keys needs, and takes dS away.

// Chunks of 64 columns of so many rows of a tensor.
template <int kChunks, int kRows>
__device__ __forceinline__ void load_rows(u32 to, const TensorMap& map, u32 full, u64 hint, int row, int head,
                                          int batch) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++)
        tma_load(to + chunk * kRows * kRowBytes, map, full, hint, chunk * 64, row, head, batch);
}

// The query tiles of a head that see a key block, in ascending order, and whether the program's mask cuts them. For the
// lanes of a warp where there is a program, of which the first does what there is to do.
template <typename Each>
__device__ __forceinline__ void each_tile(const KernelArgs& args, const Pair& pair, const KeyBlock& at, int head,
                                          const Each& each) {
    if constexpr (kListed) {
        const ProgramHead of = head_of_program(args, pair, head);
#pragma unroll 1
        for (int base = at.begin; base < at.end; base += 32) {
            const int mine = base + lane(), kind = mine < at.end ? program_kind(args, pair, of, mine, at.block) : -1;
            u32 live = __ballot_sync(0xffffffff, kind >= 0);
            const u32 cut = __ballot_sync(0xffffffff, kind == 0);
            if (lane() == 0) {
#pragma unroll 1
                for (; live != 0; live &= live - 1) {
                    const int nth = __ffs(int(live)) - 1;
                    each(base + nth, (cut >> nth & 1) != 0);
                }
            }
            __syncwarp();
        }
    } else {
#pragma unroll 1
        for (int tile = at.begin; tile < at.end; tile++) each(tile, false);
    }
}

// Brings K, V, and of each query tile Q with its statistics, and dO. One thread, or a warp where there is a program. It
// has few registers: V's ring has the position of K's, and dO's that of Q's.
__device__ __forceinline__ void load_key_block(const KernelArgs& args, u32 smem, const KeyBlock& at, const Pair& pair,
                                               KeyRing& keys, QueryRing& queries, int index = 0) {
    using L = KeysLayout;
    const bool leads = !kListed || lane() == 0;
    const Members members(args, at, pair);
    const auto load_values = [&] {
        const u32 full = ValueRing::full_at(smem, keys.stage);
        mbarrier_arrive_expect(full, L::kBytesV);
        load_rows<kChunksV, kKeys>(ValueRing::buffer_at(smem, keys.stage), args.v, full, kEvictNormal,
                                   pair.kv_row + at.block * kKeys, pair.kv_head, pair.entry);
    };
    if (leads) {
        mbarrier_wait(ValueRing::empty_at(smem, keys.stage), keys.parity ^ 1);
        if (kJoint || kTurns || kWalks) store_shared_4(smem + L::kTaken + keys.stage * 4, u32(index));
        keys.expect(smem, L::kBytesK);
        load_rows<kChunksQK, kKeys>(keys.buffer(smem), args.k, keys.full(smem), kEvictNormal,
                                    pair.kv_row + at.block * kKeys, pair.kv_head, pair.entry);
    }
    bool first = true;
#pragma unroll 1
    for (int member = members.begin; member < members.end; member++) {
        const int head = pair.head(member);
        const float* statistics = statistics_of(args, at, pair, member);
        each_tile(args, pair, at, head, [&](int tile, bool cut) {
            queries.acquire(smem);
            const Listed of{tile | (cut ? Listed::kCut : 0), member};
            if (kListed) of.write(smem + L::kListedQ + queries.stage * kBytesListed);
            queries.expect(smem, L::kBytesQ + L::kBytesRows);
            load_rows<kChunksQK, kBlockQ>(queries.buffer(smem), args.q, queries.full(smem), kEvictLast,
                                          pair.q_row + tile * kBlockQ, head, pair.entry);
            bulk_load(smem + L::kRows + queries.stage * L::kBytesRows, statistics + i64(tile) * kBlockQ * 2,
                      L::kBytesRows, queries.full(smem), kEvictNormal);
            // The first scores need Q alone.
            if (first) load_values();
            first = false;
            mbarrier_wait(OutRing::empty_at(smem, queries.stage), queries.parity ^ 1);
            const u32 full = OutRing::full_at(smem, queries.stage);
            mbarrier_arrive_expect(full, L::kBytesO);
            load_rows<kChunksV, kBlockQ>(OutRing::buffer_at(smem, queries.stage), args.dout, full, kEvictLast,
                                         pair.q_row + tile * kBlockQ, head, pair.entry);
            queries.advance();
        });
    }
    if (leads && first) load_values();
    if (kListed && leads) {
        queries.acquire(smem);
        Listed{-1, 0}.write(smem + L::kListedQ + queries.stage * kBytesListed);
        queries.commit(smem);
        mbarrier_wait(OutRing::empty_at(smem, queries.stage), queries.parity ^ 1);
        mbarrier_arrive(OutRing::full_at(smem, queries.stage));
        queries.advance();
    }
    keys.advance();
}

// Takes the next tile of dS to memory.
__device__ __forceinline__ void send_tile(char* to, u32 smem, SpillRing& spills) {
    spills.wait(smem);
    bulk_store(to, spills.buffer(smem), kBytesSlot);
    tma_store_commit();
    tma_store_wait_read();
    spills.release(smem);
    spills.advance();
}

// Takes tiles of dS to memory. One thread.
__device__ __forceinline__ void send_ds(const KernelArgs& args, u32 smem, const Visible& visible, const KeyBlock& at,
                                        int group, const Members& members, SpillRing& spills) {
    const i64 slots = visible.slots();
#if @{ packed }@
    char* to = Table(args).ds() + (at.slot + visible.slots_before(at.block)) * kBytesSlot;
#else
    char* to = ds_of(args, i64(at.pair) * group + members.begin, slots) + visible.slots_before(at.block) * kBytesSlot;
#endif
    if constexpr (kListed) {
#pragma unroll 1
        for (;; spills.advance()) {
            spills.wait(smem);
            const Listed of = Listed::read(smem + KeysLayout::kListedS + spills.stage * kBytesListed);
            if (of.tile >= 0) {
                const i64 slot = (of.head - members.begin) * slots + of.tile - at.begin;
                bulk_store(to + slot * kBytesSlot, spills.buffer(smem), kBytesSlot);
                tma_store_commit();
                tma_store_wait_read();
            }
            spills.release(smem);
            if (of.tile < 0) break;
        }
        spills.advance();
        return;
    }
#pragma unroll 1
    for (int member = members.begin; member < members.end; member++) {
#pragma unroll 1
        for (int tile = at.begin; tile < at.end; tile++) {
            send_tile(to + i64(tile - at.begin) * kBytesSlot, smem, spills);
        }
        to += slots * kBytesSlot;
    }
}
