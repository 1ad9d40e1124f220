// dK and dV of a block of keys, and dS.
//
// Two or three warpgroups have 64 keys each: S^T = K Q^T and dP^T = V dO^T have keys as rows, so that P^T and dS^T are at hand in
// registers as the left operands of dV += P^T dO and dK += dS^T Q. A further warpgroup has one thread that brings
// queries and one that takes dS away. The warpgroups never wait for each other: while one computes weights, the
// others' products run.

constexpr int kKeysThreads = 128 * (kWarpgroups + 1);
constexpr int kLoaderRegisters = kWarpgroups == 3 ? 32 : kEarlyValues && kHeadDimQK + kHeadDimV > 128 ? 24 : 40;
constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : kLoaderRegisters == 24 ? 240 : 232;

struct KeysLayout {
    static constexpr int kBytesK = kChunksQK * kKeys * kRowBytes, kBytesV = kChunksV * kKeys * kRowBytes;
    static constexpr int kBytesQ = kChunksQK * kBlockQ * kRowBytes, kBytesO = kChunksV * kBlockQ * kRowBytes;
    static constexpr int kBytesS = kBlockQ / 64 * kBytesTile, kBytesRows = kBlockQ * 8;
    static constexpr int kK = 0, kV = kK + kKeyStages * kBytesK, kQ = kV + kKeyStages * kBytesV, kO = kQ + kStages * kBytesQ;
    static constexpr int kS = kO + kStages * kBytesO, kRows = kS + 2 * kBytesS;
    static constexpr int kBarriers = kRows + kStages * kBytesRows;
    // Of the rings of K, V, Q, dO and dS.
    static constexpr int kKFull = kBarriers, kKEmpty = kKFull + kKeyStages * 8, kVFull = kKEmpty + kKeyStages * 8;
    static constexpr int kVEmpty = kVFull + kKeyStages * 8, kQFull = kVEmpty + kKeyStages * 8, kQEmpty = kQFull + kStages * 8;
    static constexpr int kOFull = kQEmpty + kStages * 8, kOEmpty = kOFull + kStages * 8, kSFull = kOEmpty + kStages * 8, kSEmpty = kSFull + 16;
    static constexpr int kBytes = kSEmpty + 16;
};
// K and V of key blocks: both are emptied when dK and dV, which take their place, are away. The barrier of V counts that.
using KeyRing = Pipeline<kKeyStages, KeysLayout::kKFull, KeysLayout::kKEmpty, KeysLayout::kK, KeysLayout::kBytesK>;
using ValueRing = Pipeline<kKeyStages, KeysLayout::kVFull, KeysLayout::kVEmpty, KeysLayout::kV, KeysLayout::kBytesV>;
using QueryRing = Pipeline<kStages, KeysLayout::kQFull, KeysLayout::kQEmpty, KeysLayout::kQ, KeysLayout::kBytesQ>;
using OutRing = Pipeline<kStages, KeysLayout::kOFull, KeysLayout::kOEmpty, KeysLayout::kO, KeysLayout::kBytesO>;
using SpillRing = Pipeline<2, KeysLayout::kSFull, KeysLayout::kSEmpty, KeysLayout::kS, KeysLayout::kBytesS>;
static_assert(KeysLayout::kBytes + 1024 == @{ keys_smem_bytes }@, "the shared memory that the host asks for");

// Pairs and key blocks, by number: pairs of a section take turns, so that the longest key blocks of all of them come first
// under a causal mask. A thread block has every gridDim.x-th of them.
struct KeyBlock {
    int pair, block, begin, end;  // begin and end: tiles of queries
    __device__ __forceinline__ KeyBlock(const KernelArgs& args, const Visible& visible, int index) {
        const int blocks = div_up(args.backward.kv_len, kKeys), whole = args.section * blocks;
        const int section = index / whole, within = index % whole;
        const int members = min_of(args.section, args.pairs - section * args.section);
        pair = section * args.section + within % members, block = within / members;
        begin = visible.begin(block), end = visible.end(block);
    }
    static __device__ __forceinline__ int count(const KernelArgs& args) { return args.pairs * div_up(args.backward.kv_len, kKeys); }
};

__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier, u64 cache_hint) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(cache_hint) : "memory");
}

__device__ __forceinline__ float2 load_shared_float2(u32 address) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
    return r;
}

// Brings K, V, and of each query tile Q with its statistics, and dO. One thread. It has few registers: V's ring has the
// position of K's, and dO's that of Q's.
__device__ __forceinline__ void load_key_block(const KernelArgs& args, u32 smem, const KeyBlock& at, KeyRing& keys, QueryRing& queries) {
    using L = KeysLayout;
    const BackwardArgs& a = args.backward;
    const int rows = round_up(a.q_len, kBlockQ);
    const Pair pair(a, args.first_pair + at.pair);
    const int key = at.block * kKeys, begin = at.begin, end = at.end;
    mbarrier_wait(ValueRing::empty_at(smem, keys.stage), keys.parity ^ 1);
    keys.expect(smem, L::kBytesK);
#pragma unroll
    for (int chunk = 0; chunk < kChunksQK; chunk++)
        tma_load(keys.buffer(smem) + chunk * kKeys * kRowBytes, args.k, keys.full(smem), kEvictNormal, chunk * 64, key, pair.kv_head, pair.batch);
    bool first = true;
    const auto load_values = [&] {
        const u32 full = ValueRing::full_at(smem, keys.stage);
        mbarrier_arrive_expect(full, L::kBytesV);
#pragma unroll
        for (int chunk = 0; chunk < kChunksV; chunk++)
            tma_load(ValueRing::buffer_at(smem, keys.stage) + chunk * kKeys * kRowBytes, args.v, full, kEvictNormal, chunk * 64, key, pair.kv_head, pair.batch);
        first = false;
    };
#pragma unroll 1
    for (int member = 0; member < pair.group; member++) {
        const int head = pair.head(member);
        const float* statistics = args.statistics + (i64(pair.batch) * a.heads + head) * rows * 2;
#pragma unroll 1
        for (int tile = begin; tile < end; tile++) {
            queries.acquire(smem);
            queries.expect(smem, L::kBytesQ + L::kBytesRows);
#pragma unroll
            for (int chunk = 0; chunk < kChunksQK; chunk++)
                tma_load(queries.buffer(smem) + chunk * kBlockQ * kRowBytes, args.q, queries.full(smem), kEvictLast, chunk * 64,
                         tile * kBlockQ, head, pair.batch);
            bulk_load(smem + L::kRows + queries.stage * L::kBytesRows, statistics + i64(tile) * kBlockQ * 2, L::kBytesRows,
                      queries.full(smem), kEvictNormal);
            if (first) load_values();
            mbarrier_wait(OutRing::empty_at(smem, queries.stage), queries.parity ^ 1);
            const u32 full = OutRing::full_at(smem, queries.stage);
            mbarrier_arrive_expect(full, L::kBytesO);
#pragma unroll
            for (int chunk = 0; chunk < kChunksV; chunk++)
                tma_load(OutRing::buffer_at(smem, queries.stage) + chunk * kBlockQ * kRowBytes, args.dout, full, kEvictLast, chunk * 64,
                         tile * kBlockQ, head, pair.batch);
            queries.advance();
        }
    }
    if (first) load_values();
    keys.advance();
}

// Takes tiles of dS to memory. One thread.
__device__ __forceinline__ void send_ds(const KernelArgs& args, u32 smem, const Visible& visible, const KeyBlock& at, int group,
                                        SpillRing& spills) {
    const int begin = at.begin, end = at.end;
    char* to = (char*)args.ds + (i64(at.pair) * group * visible.slots() + visible.tiles_before(at.block)) * KeysLayout::kBytesS;
#pragma unroll 1
    for (int member = 0; member < group; member++) {
#pragma unroll 1
        for (int tile = begin; tile < end; tile++) {
            spills.wait(smem);
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + i64(tile - begin) * KeysLayout::kBytesS),
                         "r"(spills.buffer(smem)), "r"(KeysLayout::kBytesS) : "memory");
            tma_store_commit();
            tma_store_wait_read();
            spills.release(smem);
            spills.advance();
        }
        to += visible.slots() * KeysLayout::kBytesS;
    }
}

// Of 64 keys by kBlockQ queries.
using Scores = float[kBlockQ / 2];

struct KeysConsumer {
    const KernelArgs& args;
    const u32 smem;
    const int id;   // of the warpgroup

    int key;  // the first of the key block
    float dk[kColumnsQK / 2], dv[kColumnsV / 2];
    u32 p[kBlockQ / 4], ds[kBlockQ / 4];
    KeyRing keys;       // V's ring has the same position
    QueryRing queries;  // dO's ring has the same position
    SpillRing spills;

    // Queries that see the keys of this thread's two rows of a warpgroup's tile, counted from this thread's first column of
    // query tile 0. Found anew for each tile that a mask cuts: they would take registers that others need.
    struct Seen {
        int first[2], last[2];
        __device__ __forceinline__ bool operator()(int row, int i) const {
            const int query = row + i / 4 * 8 + i % 2, h = i % 4 / 2;
            return query >= first[h] && (!kMaskLeft || query <= last[h]);
        }
    };
    __device__ __forceinline__ Seen seen() const {
        const Visible visible(args.backward);
        Seen r;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int mine = key + id * 64 + warp() * 16 + lane() / 4 + h * 8, column = lane() % 4 * 2;
            r.first[h] = mine >= visible.kv_len ? 0x7fffffff : kMaskRight ? mine - visible.shift - visible.right - column : -(1 << 30);
            r.last[h] = kMaskLeft ? mine - visible.shift + visible.left - column : 0x7fffffff;
        }
        return r;
    }

    // S^T = K Q^T of the tile at the ring's position.
    __device__ __forceinline__ void issue_scores(Scores& s) {
        using L = KeysLayout;
        const u64 k_rows = descriptor_of_rows(keys.buffer(smem) + id * 64 * kRowBytes), q_rows = descriptor_of_rows(queries.buffer(smem));
        queries.wait(smem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kColumnsQK / 16; k++)
            wgmma<Element, kBlockQ>::rows(s, k_rows + (k / 4 * kKeys * kRowBytes + k % 4 * 32) / 16,
                                          q_rows + (k / 4 * kBlockQ * kRowBytes + k % 4 * 32) / 16, k > 0);
        wgmma_commit();
    }

    // dP^T = V dO^T.
    __device__ __forceinline__ void issue_slopes(Scores& dp) {
        using L = KeysLayout;
        const u64 v_rows = descriptor_of_rows(ValueRing::buffer_at(smem, keys.stage) + id * 64 * kRowBytes), o_rows = descriptor_of_rows(OutRing::buffer_at(smem, queries.stage));
        mbarrier_wait(OutRing::full_at(smem, queries.stage), queries.parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kColumnsV / 16; k++)
            wgmma<Element, kBlockQ>::rows(dp, v_rows + (k / 4 * kKeys * kRowBytes + k % 4 * 32) / 16,
                                          o_rows + (k / 4 * kBlockQ * kRowBytes + k % 4 * 32) / 16, k > 0);
        wgmma_commit();
    }

    // dV += P^T dO.
    __device__ __forceinline__ void issue_values() {
        const u64 o_depth = descriptor_of_depth(OutRing::buffer_at(smem, queries.stage), kBlockQ * kRowBytes);
        wgmma_touch(dv);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockQ / 16; k++)
            wgmma<Element, kColumnsV>::depth(dv, p[k * 4], p[k * 4 + 1], p[k * 4 + 2], p[k * 4 + 3], o_depth + k * 2048 / 16);
        wgmma_commit();
    }
    // dK += dS^T Q.
    __device__ __forceinline__ void issue_keys() {
        const u64 q_depth = descriptor_of_depth(queries.buffer(smem), kBlockQ * kRowBytes);
        wgmma_touch(dk);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockQ / 16; k++)
            wgmma<Element, kColumnsQK>::depth(dk, ds[k * 4], ds[k * 4 + 1], ds[k * 4 + 2], ds[k * 4 + 3], q_depth + k * 2048 / 16);
        wgmma_commit();
    }

    // P = exp(S - lse), in S's registers and packed.
    __device__ __forceinline__ void weigh(Scores& s, int tile, bool cut, float scale) {
        const u32 rows = smem + KeysLayout::kRows + queries.stage * KeysLayout::kBytesRows + lane() % 4 * 8;
        if (cut) {
            const Seen sees = seen();
#pragma unroll
            for (int i = 0; i < kBlockQ / 2; i++) {
                if (!sees(tile * kBlockQ, i)) s[i] = -FT_INFINITY;
            }
        }
#pragma unroll
        for (int j = 0; j < kBlockQ / 8; j++) {
            const float2 lse = load_shared_float2(rows + j * 32);
#pragma unroll
            for (int e = 0; e < 4; e++) s[j * 4 + e] = exp2_approx(fmaf(s[j * 4 + e], scale, e % 2 ? -lse.y : -lse.x));
        }
    }
    __device__ __forceinline__ void pack_weights(const Scores& s) {
#pragma unroll
        for (int i = 0; i < kBlockQ / 4; i++) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
    }
    // dS = P (dP - D), packed. What is not seen takes no part, whatever V holds there.
    __device__ __forceinline__ void differentiate(const Scores& s, Scores& dp, int tile, bool cut) {
        const u32 rows = smem + KeysLayout::kRows + queries.stage * KeysLayout::kBytesRows + lane() % 4 * 8;
#pragma unroll
        for (int j = 0; j < kBlockQ / 8; j++) {
            const float2 delta = load_shared_float2(rows + kBlockQ * 4 + j * 32);
#pragma unroll
            for (int e = 0; e < 4; e++) dp[j * 4 + e] = s[j * 4 + e] * (dp[j * 4 + e] - (e % 2 ? delta.y : delta.x));
        }
        if (cut) {
            const Seen sees = seen();
#pragma unroll
            for (int i = 0; i < kBlockQ / 2; i++) {
                if (!sees(tile * kBlockQ, i)) dp[i] = 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < kBlockQ / 4; i++) ds[i] = pack<Element>(dp[2 * i], dp[2 * i + 1]);
    }

    // dS of the warpgroup's 64 keys, for the thread that takes it away.
    __device__ __forceinline__ void spill() {
        spills.acquire(smem);
        const int key = id * 64 + warp() * 16 + lane() % 16;
#pragma unroll
        for (int k = 0; k < kBlockQ / 16; k++) {
            const u32 chunk = k * 2 + lane() / 16;
            stmatrix_x4(spills.buffer(smem) + chunk / 8 * kBytesTile + key * kRowBytes + ((chunk ^ key) % 8) * 16, ds[k * 4],
                        ds[k * 4 + 1], ds[k * 4 + 2], ds[k * 4 + 3]);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane() == 0) spills.commit(smem);
        spills.advance();
    }

    // From S and dP, which are issued, to P and dS; dV is issued. With kEarlyValues it is issued before dP is waited for, so
    // that the tensor cores have work while dS is computed.
    __device__ __forceinline__ void weigh_tile(Scores& s, Scores& dp, int tile, bool cut, float scale) {
        wgmma_wait<1>();
        wgmma_touch(s);
        weigh(s, tile, cut, scale);
        if (kEarlyValues) {
            pack_weights(s);
            issue_values();
            wgmma_wait<1>();
            wgmma_touch(dp);
            differentiate(s, dp, tile, cut);
            // What crosses the loop's end in flight would cost more registers than there are.
            if (kScoresAhead) {
                wgmma_wait<0>();
                wgmma_touch(dv);
            }
        } else {
            wgmma_wait<0>();
            wgmma_touch(dp);
            differentiate(s, dp, tile, cut);
            pack_weights(s);
            issue_values();
        }
    }
    __device__ __forceinline__ void release(int stage) {
        if (lane() == 0) mbarrier_arrive(OutRing::empty_at(smem, stage)), mbarrier_arrive(QueryRing::empty_at(smem, stage));
    }

    // With kScoresAhead a turn of the loop begins with dK of a tile and S of the next one.
    __device__ __forceinline__ void walk(const Uncut& uncut, int begin, int end, int steps) {
        const float scale = args.backward.scale * kLog2E;
        int tile = begin;
        if (kScoresAhead) {
            {
                Scores s, dp;
                issue_scores(s);
                issue_slopes(dp);
                weigh_tile(s, dp, tile, uncut.cuts(tile), scale);
            }
#pragma unroll 1
            for (int i = 1; i < steps; i++) {
                if (++tile == end) tile = begin;
                Scores s, dp;
                issue_keys();
                const int freed = queries.stage;
                queries.advance();
                issue_scores(s);
                spill();
                wgmma_wait<1>();
                wgmma_touch(dv);
                wgmma_touch(dk);
                release(freed);
                issue_slopes(dp);
                weigh_tile(s, dp, tile, uncut.cuts(tile), scale);
            }
            issue_keys();
            spill();
            wgmma_wait<0>();
            wgmma_touch(dv);
            wgmma_touch(dk);
            release(queries.stage);
            queries.advance();
        } else {
#pragma unroll 1
            for (int i = 0; i < steps; i++) {
                Scores s, dp;
                issue_scores(s);
                issue_slopes(dp);
                weigh_tile(s, dp, tile, uncut.cuts(tile), scale);
                issue_keys();
                if (++tile == end) tile = begin;
                spill();
                wgmma_wait<1>();
                wgmma_touch(dv);
                if (lane() == 0) mbarrier_arrive(OutRing::empty_at(smem, queries.stage));
                wgmma_wait<0>();
                wgmma_touch(dk);
                if (lane() == 0) queries.release(smem);
                queries.advance();
            }
        }
    }

    // The rows of K and V in shared memory that only this warpgroup reads become those of dK and dV.
    __device__ __forceinline__ void store(const Pair& pair) {
        const u32 to_v = ValueRing::buffer_at(smem, keys.stage) + id * 64 * kRowBytes, to_k = keys.buffer(smem) + id * 64 * kRowBytes;
        stage_rows<kColumnsV>(to_v, kKeys * kRowBytes, dv, 1.0f);
        stage_rows<kColumnsQK>(to_k, kKeys * kRowBytes, dk, args.backward.scale);
        fence_async_proxy();
        barrier_sync(1 + id, 128);
        if (threadIdx.x % 128 == 0) {
            send_rows<kChunksV>(args.dv, to_v, kKeys * kRowBytes, key + id * 64, pair.kv_head, pair.batch);
            send_rows<kChunksQK>(args.dk, to_k, kKeys * kRowBytes, key + id * 64, pair.kv_head, pair.batch);
            tma_store_commit();
            tma_store_wait_read();
            mbarrier_arrive(ValueRing::empty_at(smem, keys.stage));
        }
        __syncwarp();
        keys.advance();
    }
};

extern "C" __global__ void __launch_bounds__(kKeysThreads, 1) keys(const __grid_constant__ KernelArgs args) {
    using L = KeysLayout;
    extern __shared__ u8 dynamic_shared[];
    const u32 smem = round_up(int(smem_address(dynamic_shared)), 1024);
    const Visible visible(args.backward);
    const int group = args.backward.heads / args.backward.kv_heads, count = KeyBlock::count(args);
    const int role = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kKeyStages; i++) KeyRing::init(smem, i, 1, 1), ValueRing::init(smem, i, 1, kWarpgroups);
        for (int i = 0; i < kStages; i++) QueryRing::init(smem, i, 1, 4 * kWarpgroups), OutRing::init(smem, i, 1, 4 * kWarpgroups);
        for (int i = 0; i < 2; i++) SpillRing::init(smem, i, 4 * kWarpgroups, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    launch_next_stage();
    wait_for_last_stage();
    if (role == kWarpgroups) {
        registers_give_back<kLoaderRegisters>();
        if (threadIdx.x == 128 * kWarpgroups) {
            KeyRing keys;
            QueryRing queries;
#pragma unroll 1
            for (int i = blockIdx.x; i < count; i += gridDim.x)
                load_key_block(args, smem, KeyBlock(args, visible, i), keys, queries);
        }
        if (threadIdx.x == 128 * kWarpgroups + 32) {
            SpillRing spills;
#pragma unroll 1
            for (int i = blockIdx.x; i < count; i += gridDim.x) send_ds(args, smem, visible, KeyBlock(args, visible, i), group, spills);
            tma_store_wait();
        }
    } else {
        registers_take<kConsumerRegisters>();
        KeysConsumer me{args, smem, role};
#pragma unroll 1
        for (int i = blockIdx.x; i < count; i += gridDim.x) {
            const KeyBlock at(args, visible, i);
            me.key = at.block * kKeys;
#pragma unroll
            for (int e = 0; e < kColumnsQK / 2; e++) me.dk[e] = 0.0f;
#pragma unroll
            for (int e = 0; e < kColumnsV / 2; e++) me.dv[e] = 0.0f;
            me.keys.wait(smem);
            mbarrier_wait(ValueRing::full_at(smem, me.keys.stage), me.keys.parity);
            const int steps = group * (at.end - at.begin);
            if (steps > 0) me.walk(Uncut(visible, at.block), at.begin, at.end, steps);
            me.store(Pair(args.backward, args.first_pair + at.pair));
        }
        if (threadIdx.x % 128 == 0) tma_store_wait();
    }
}
