/* @{ header }@ */

// Exact attention, tiled, in one pass, for Hopper (FlashAttention-3, section 3): a producer warpgroup brings Q, K and V
// by the copy engine, consumer warpgroups of 64 query rows each keep scores, probabilities and outputs in registers.
// With kOverlap the scores of one key block are computed while the product of the previous one with V still runs.

<% include "lib/cuda/types.cuh" %>
<% include "lib/cuda/abi.cuh" %>

// Problem.
using Element = @{ dtype }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kMaskLeft = @{ mask_left }@;
constexpr bool kMaskRight = @{ mask_right }@;
// Schedule.
constexpr int kConsumers = @{ consumers }@;
constexpr int kBlockKV = @{ block_kv }@;
constexpr int kStages = @{ stages }@;
constexpr bool kOverlap = @{ overlap }@;
constexpr bool kTakeTurns = @{ take_turns }@;
constexpr bool kPInShared = @{ p_in_shared }@;
constexpr bool kMaskedLoop = @{ masked_loop }@;
constexpr bool kLazyRescale = @{ lazy_rescale }@;
constexpr bool kPackGroup = @{ pack_group }@;
constexpr bool kPersistent = @{ persistent }@;
constexpr bool kQueue = @{ queue }@;
constexpr bool kChain = @{ chain }@;
constexpr int kExp2Eighths = @{ exp2_eighths }@;
constexpr int kCluster = @{ cluster }@;
constexpr int kBlocksPerSM = @{ blocks_per_sm }@;
constexpr int kProducerRegisters = @{ producer_registers }@;
constexpr int kConsumerRegisters = @{ consumer_registers }@;

<% include "lib/cuda/tile.cuh" %>
<% include "lib/cuda/mbarrier.cuh" %>
<% include "lib/cuda/tma.cuh" %>
<% include "lib/cuda/cluster.cuh" %>
<% include "lib/cuda/warpgroup.cuh" %>
<% include "lib/cuda/wgmma.cuh" %>
<% include "lib/cuda/approx.cuh" %>
<% include "lib/cuda/row_softmax.cuh" %>
<% include "lib/cuda/walk.cuh" %>
<% include "lib/cuda/program.cuh" %>
<% include "lib/cuda/sink.cuh" %>
<% include "lib/cuda/non_finite.cuh" %>

using KernelArgs = WithSide<Sm90Args>;

constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kBlockQ = kConsumers * 64;
constexpr int kChunksQK = div_up(kHeadDimQK, 64);  // 64-element columns of a row: one box of the copy engine each
constexpr int kChunksV = div_up(kHeadDimV, 64);
constexpr int kColumnsV = round_up(kHeadDimV, 16);
constexpr int kStepsQK = div_up(kHeadDimQK, 16);   // matrix steps of Q K^T
constexpr int kStepsPV = kBlockKV / 16;            // matrix steps of P V
constexpr int kBytes64Rows = 64 * 128;             // one chunk of 64 rows
constexpr int kBytesChunk = kBlockKV * 128;        // one chunk of kBlockKV rows
// Padded rows of V are zeros, so only blocks cut by the mask can hold elements that must not be multiplied.
constexpr bool kClean = kMaskLeft || kMaskRight || kProgramMask;
// Whether blocks before those in sight of every row may need a mask.
constexpr bool kMaskedFirst = kMaskLeft || kProgramMask;
// Whole warps find the blocks that a program's mask leaves; otherwise one thread of a warp is enough. All else is done by
// one thread in any case: others could come to a barrier when the phase that they wait for is long over.
constexpr bool kWholeWarps = kProgramMask;

using Scores = float[kBlockKV / 2];
using Output = float[kColumnsV / 2];
using Probabilities = u32[kPInShared ? 1 : kBlockKV / 4];
using ScoreProduct = wgmma<Element, kBlockKV>;
using OutputProduct = wgmma<Element, kColumnsV>;

// Shared memory, by byte offset. A consumer's O takes the place of its Q.
struct Layout {
    static constexpr int kQBuffers = kChain ? 2 : 1;
    static constexpr int kQ = 0;
    static constexpr int kBytesQ = max_of(kChunksQK, kChunksV) * kBytes64Rows;  // of one consumer, one buffer
    static constexpr int kK = kQ + kQBuffers * kConsumers * kBytesQ;
    static constexpr int kBytesK = kChunksQK * kBytesChunk;                     // of one stage
    static constexpr int kV = kK + kStages * kBytesK;
    static constexpr int kBytesV = kChunksV * kBytesChunk;
    static constexpr int kP = kV + kStages * kBytesV;
    static constexpr int kBytesP = kPInShared ? div_up(kBlockKV, 64) * kBytes64Rows : 0;  // of one consumer
    static constexpr int kWork = kP + kConsumers * kBytesP;  // two slots: what comes next
    static constexpr int kBarriers = kWork + (kPersistent ? 2 * 64 : 0);
    static constexpr int kFullWork = kBarriers;              // per slot: it says what comes next
    static constexpr int kEmptyWork = kFullWork + 2 * 8;     // per slot: everyone has read it
    static constexpr int kFullQ = kEmptyWork + 2 * 8;        // per buffer and consumer: its Q has arrived
    static constexpr int kEmptyQ = kFullQ + kQBuffers * kConsumers * 8;  // per buffer and consumer: the space is free
    static constexpr int kFullK = kEmptyQ + kQBuffers * kConsumers * 8;  // per stage, as all that follow
    static constexpr int kEmptyK = kFullK + kStages * 8;
    static constexpr int kFullV = kEmptyK + kStages * 8;
    static constexpr int kEmptyV = kFullV + kStages * 8;
    static constexpr int kRawV = kEmptyV + kStages * 8;      // a masked block has arrived, and must be cleaned to be full
    static constexpr int kMetNonFinite = kRawV + kStages * 8;
    static constexpr int kBytes = kMetNonFinite + 8;
};

<% include "lib/cuda/work.cuh" %>

// ---------------------------------------------------------------------------------------------------------- producer

// Block n of K or V. The blocks of a cluster bring an equal part of its rows each, to all of them.
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

// One thread brings Q and K, and decides what comes next.
__device__ __forceinline__ void produce_qk(const KernelArgs& args, u32 smem) {
    const bool leads = !kWholeWarps || threadIdx.x % 32 == 0;
    tma_prefetch_map(args.q);
    tma_prefetch_map(args.k);
    Ring<kStages> ring;
    Ring<Layout::kQBuffers> q_ring;
    Dealer dealer(smem);
    Work work = first_work(args);
    do {
        const Tile& tile = work.tile;
        const BlockRange& blocks = work.all;
        // After the first block of K, whose space is free before that of Q.
        const auto bring_q = [&] {
#pragma unroll 1
            for (int c = 0; c < kConsumers; c++) {
                const int at = q_ring.stage * kConsumers + c;
                const u32 full = smem + Layout::kFullQ + at * 8, to = smem + Layout::kQ + at * Layout::kBytesQ;
                if (!leads) continue;
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
            if (n <= blocks.begin) dealer.deal(args);
            if (n >= blocks.begin) {
                if (leads) {
                    const u32 full = smem + Layout::kFullK + ring.stage * 8;
                    mbarrier_wait(smem + Layout::kEmptyK + ring.stage * 8, ring.parity ^ 1);
                    mbarrier_arrive_expect(full, Layout::kBytesK);
                    bring_keys<kChunksQK>(smem + Layout::kK + ring.stage * Layout::kBytesK, args.k, full, n, tile);
                }
                ring.advance();
            }
            if (n >= blocks.end - 1) bring_q();
        } while (--n >= blocks.begin);
        work = dealer.dealt();
    } while (work.live);
}

// Another one brings V, so that a wait for one never holds up the other.
__device__ __forceinline__ void produce_v(const KernelArgs& args, u32 smem) {
    const bool leads = !kWholeWarps || threadIdx.x % 32 == 0;
    tma_prefetch_map(args.v);
    Ring<kStages> ring;
    Hand hand(smem);
    for (Work work = first_work(args); work.live; work = hand.next<kWholeWarps>()) {
        const BlockRange& blocks = work.all;
#pragma unroll 1
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            const bool raw = kClean && is_masked<kMaskedFirst>(blocks, n);
            const u32 full = smem + (raw ? Layout::kRawV : Layout::kFullV) + ring.stage * 8;
            if (leads) {
                mbarrier_wait(smem + Layout::kEmptyV + ring.stage * 8, ring.parity ^ 1);
                mbarrier_arrive_expect(full, Layout::kBytesV);
                if (kClean && !raw) mbarrier_arrive(full);  // for the second of the warps that clean
                bring_keys<kChunksV>(smem + Layout::kV + ring.stage * Layout::kBytesV, args.v, full, n, work.tile);
            }
            ring.advance();
        }
    }
}

// Two warps that have nothing else to do take non-finite elements out of masked blocks of V before anyone multiplies with
// them (see non_finite.cuh). Masked blocks arrive on a barrier of their own, so these warps see each phase of it, and
// nothing of the blocks that they leave alone.
__device__ __forceinline__ void clean_v(const KernelArgs& args, u32 smem) {
    const u32 lane = threadIdx.x % 64;
    Ring<kStages> ring;
    Hand hand(smem);
    u32 raw_parity = 0;  // one bit per stage
    for (Work work = first_work(args); work.live; work = hand.next<true>()) {
        const BlockRange& blocks = work.all;
#pragma unroll 1
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            if (is_masked<kMaskedFirst>(blocks, n)) {
                mbarrier_wait(smem + Layout::kRawV + ring.stage * 8, (raw_parity >> ring.stage) & 1);
                raw_parity ^= 1u << ring.stage;
                const u32 v = smem + Layout::kV + ring.stage * Layout::kBytesV;
                if (take_out_non_finite<Element, Layout::kBytesV, 64>(v, lane)) {
                    set_flag(smem + Layout::kMetNonFinite);
                    fence_async_proxy();
                }
                __syncwarp();
                if (lane % 32 == 0) mbarrier_arrive(smem + Layout::kFullV + ring.stage * 8);
            }
            ring.advance();
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- consumer

// One warpgroup of 64 query rows.
struct Consumer {
    const KernelArgs& args;
    const u32 smem;
    const int id;             // of the warpgroup, 0 to kConsumers - 1
    Hand hand;
    Ring<kStages> k_ring, v_ring;
    Ring<Layout::kQBuffers> q_ring;  // of the Q that is opened next
    int q_at;                        // which Q is at hand
    int leaving = -1;                // which O is being copied out of the space of its Q
    Scores s;
    Output o;
    Probabilities p;
    RowSoftmax<kBlockKV / 8, kLazyRescale, kExp2Eighths> softmax;
    ProgramKept kept;  // of the tile whose scores are computed

    __device__ __forceinline__ u32 q_address() const { return smem + Layout::kQ + q_at * Layout::kBytesQ; }
    __device__ __forceinline__ u32 p_address() const { return smem + Layout::kP + id * Layout::kBytesP; }
    __device__ __forceinline__ Consumer(const KernelArgs& args, u32 smem, int id) : args(args), smem(smem), id(id), hand(smem) {}
    static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / 32; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    // A barrier of this warpgroup alone.
    __device__ __forceinline__ void sync() const { barrier_sync(1 + kConsumers + id, 128); }

    // Consumers take turns in issuing matrix work, so that the softmax of one runs beside the products of another
    // (FlashAttention-3, section 3.1). Barrier 1 + i is consumer i's turn.
    __device__ __forceinline__ void wait_turn() const {
        if (kTakeTurns) barrier_sync(1 + id, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (kTakeTurns) barrier_arrive(1 + (id + 1 == kConsumers ? 0 : id + 1), 256);
    }

    // s = Q K^T of the next block of keys, asynchronously.
    __device__ __forceinline__ void issue_qk() {
        const u64 q = descriptor_of_rows(q_address());
        const u64 k = descriptor_of_rows(smem + Layout::kK + k_ring.stage * Layout::kBytesK);
        wgmma_touch(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsQK; step++) {
            const int chunk = step / 4, in_chunk = step % 4 * 32;
            ScoreProduct::rows(s, q + ((chunk * kBytes64Rows + in_chunk) >> 4), k + ((chunk * kBytesChunk + in_chunk) >> 4),
                               step > 0);
        }
        wgmma_commit();
    }

    // o += P V of the block at v_ring, asynchronously.
    __device__ __forceinline__ void issue_pv() {
        const u64 v = descriptor_of_depth(smem + Layout::kV + v_ring.stage * Layout::kBytesV, kBytesChunk);
        const u64 p_rows = descriptor_of_rows(p_address());
        wgmma_touch(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsPV; step++) {
            const u64 v_step = v + (step * 16 * 128 >> 4);
            if constexpr (kPInShared) {
                OutputProduct::depth(o, p_rows + ((step / 4 * kBytes64Rows + step % 4 * 32) >> 4), v_step);
            } else {
                OutputProduct::depth(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], v_step);
            }
        }
        wgmma_commit();
    }

    // The next Q, once it is there.
    __device__ __forceinline__ void open_q() {
        q_at = q_ring.stage * kConsumers + id;
        mbarrier_wait(smem + Layout::kFullQ + q_at * 8, q_ring.parity);
        q_ring.advance();
        if (!(args.forward.scale > 0.0f)) fold_sign_into_q();
    }
    // The space of an O that has left is free for a Q.
    __device__ __forceinline__ void release_q() {
        if (leaving >= 0 && threadIdx.x % 128 == 0) {
            tma_store_wait_read();
            mbarrier_arrive(smem + Layout::kEmptyQ + leaving * 8);
        }
        leaving = -1;
    }
    __device__ __forceinline__ void wait_k() const { mbarrier_wait(smem + Layout::kFullK + k_ring.stage * 8, k_ring.parity); }
    // This warp is done with a buffer, which whoever brings a part of the next block into it must know.
    static __device__ __forceinline__ void release(u32 empty) {
        if constexpr (kCluster > 1) {
            if (lane() < kCluster) mbarrier_arrive_at(empty, lane());
        } else {
            if (lane() == 0) mbarrier_arrive(empty);
        }
    }
    __device__ __forceinline__ void release_k() {
        release(smem + Layout::kEmptyK + k_ring.stage * 8);
        k_ring.advance();
    }
    __device__ __forceinline__ void wait_v() const { mbarrier_wait(smem + Layout::kFullV + v_ring.stage * 8, v_ring.parity); }
    __device__ __forceinline__ void release_v() {
        release(smem + Layout::kEmptyV + v_ring.stage * 8);
        v_ring.advance();
    }
    // Key blocks that others of the cluster asked for.
    __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
        for (; count > 0; count--) {
            wait_k();
            wait_v();
            __syncwarp();  // no lane may still wait for what is given away
            release_k();
            release_v();
        }
    }

    // Replaces the scores of masked pairs by -inf; `key` is the block's first key. A thread's scores of a row are keys 0, 1, 8,
    // 9, 16, ... from its own first one on: bit i of a word says whether the i-th of them is seen, and the compiler moves bits
    // to predicates seven at a time.
    __device__ __forceinline__ void mask(const Tile& tile, int key) {
        const int column = key + lane() % 4 * 2;
        const int row = tile.row + id * 64 + warp() * 16 + lane() / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const KeyRange live = live_keys<kMaskLeft, kMaskRight>(args.forward, (row + h * 8) >> args.group_shift);
            const int end = scores_before(live.last + 1 - column), begin = kMaskLeft ? scores_before(live.first - column) : 0;
#pragma unroll
            for (int word = 0; word < div_up(kBlockKV / 4, 32); word++) {
                u32 seen = low_bits(end - word * 32);
                if (kMaskLeft) seen &= ~low_bits(begin - word * 32);
#pragma unroll
                for (int i = 0; i < min_of(32, kBlockKV / 4 - word * 32); i++) {
                    const int at = word * 32 + i;
                    if (!(seen & 1u << i)) s[at / 2 * 4 + 2 * h + at % 2] = -FT_INFINITY;
                }
            }
        }
    }
    // How many of a thread's scores belong to keys before `key`, counted from its own first one.
    static __device__ __forceinline__ int scores_before(int key) {
        const int clamped = max_of(0, min_of(key, kBlockKV));
        return clamped / 8 * 2 + min_of(clamped % 8, 2);
    }
    // The lowest `count` bits of a word.
    static __device__ __forceinline__ u32 low_bits(int count) {
        return count <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1;
    }

    __device__ __forceinline__ ProgramHead head(const Work& work) const { return program_head(args, args.forward, work.tile); }

    // What the score program and the window make of the scores of block n.
    template <typename Masked> __device__ __forceinline__ void change(const Work& work, int n, Masked masked) {
        const auto at = [&](int j, int e) -> float& { return s[4 * j + e]; };
        const int row = work.tile.row + id * 64 + warp() * 16 + lane() / 4, key = n * kBlockKV + lane() % 4 * 2;
        if (masked) {
            program_scores<true, kBlockKV / 8>(at, head(work), kept, row, key, magnitude());
            mask(work.tile, n * kBlockKV);
        } else {
            program_scores<false, kBlockKV / 8>(at, head(work), kept, row, key, magnitude());
        }
    }
    // Of the softmax scale, whose sign is in Q.
    __device__ __forceinline__ float magnitude() const {
        const float scale = args.forward.scale;
        return scale > 0.0f ? scale : scale == 0.0f ? 1.0f : -scale;
    }

    // Rounds probabilities to the element type: into registers, as A operands, or to shared memory.
    __device__ __forceinline__ void round() {
        if constexpr (kPInShared) {
            const int row = warp() * 16 + lane() % 16;
            const u32 to = p_address() + row * 128;
#pragma unroll
            for (int step = 0; step < kStepsPV; step++) {
                const float* x = s + 8 * step;
                const u32 chunk = u32(step % 4 * 2 + lane() / 16) ^ (row % 8);
                stmatrix_x4(to + step / 4 * kBytes64Rows + (chunk << 4), pack<Element>(x[0], x[1]),
                            pack<Element>(x[2], x[3]), pack<Element>(x[4], x[5]), pack<Element>(x[6], x[7]));
            }
            fence_async_proxy();
            sync();
        } else {
#pragma unroll
            for (int i = 0; i < kBlockKV / 4; i++) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
        }
    }

    // A scale of zero or below turns maxima of the scores into minima: move its sign into Q and use its magnitude.
    __device__ __forceinline__ void fold_sign_into_q() const {
        for (u32 at = threadIdx.x % 128 * 16; at < kChunksQK * kBytes64Rows; at += 128 * 16) {
            uint4 x = load_shared_16(q_address() + at);
            u32* words = &x.x;
#pragma unroll
            for (int w = 0; w < 4; w++) words[w] = args.forward.scale == 0.0f ? 0 : words[w] ^ 0x80008000;
            store_shared_16(q_address() + at, x);
        }
        fence_async_proxy();
        sync();
    }

    // step(n, masked) for the key blocks from n down. `masked` is a constant where masked blocks have loops of their own:
    // those cut on the right or past the last key, then those in sight of every row, then those cut on the left.
    template <typename Step>
    static __device__ __forceinline__ void walk(const BlockRange& blocks, int n, const Step& step) {
        if (kMaskedLoop) {
#pragma unroll 1
            for (; n >= max_of(blocks.begin, blocks.full_end); n--) step(n, Bool<true>{});
#pragma unroll 1
            for (; n >= max_of(blocks.begin, blocks.full_begin); n--) step(n, Bool<false>{});
            if (kMaskedFirst) {
#pragma unroll 1
                for (; n >= blocks.begin; n--) step(n, Bool<true>{});
            }
        } else {
#pragma unroll 1
            for (; n >= blocks.begin; n--) step(n, is_masked<kMaskedFirst>(blocks, n));
        }
    }

    // Whether the rows of a tile attend to anything.
    static __device__ __forceinline__ bool attends(const Work& work) { return work.own.begin < work.own.end; }

    // The first probabilities of a tile from its first scores, beside nothing.
    __device__ __forceinline__ void open(const Work& work, float c) {
        softmax.init();
#pragma unroll
        for (int i = 0; i < kColumnsV / 2; i++) o[i] = 0.0f;
        open_q();
        if (kCluster > 1) skip(work.all.end - (attends(work) ? work.own.end : work.all.begin));
        if (!kOverlap) kept = program_kept(head(work));
        if (!kOverlap || !attends(work)) return;
        wait_k();
        issue_qk();
        wgmma_wait<0>();
        first_probabilities(work, c);
        round();
    }
    __device__ __forceinline__ void first_probabilities(const Work& work, float c) {
        wgmma_touch(s);
        release_k();
        const int n = work.own.end - 1;
        kept = program_kept(head(work));
        change(work, n, is_masked<kMaskedFirst>(work.own, n));
        softmax.advance(s, c);
        softmax.template exponentiate<false>(s, c);
    }

    // The key blocks of an open tile. With kOverlap the scores of one are computed beside the product of the one before,
    // so that the last product remains.
    __device__ __forceinline__ void attend(const Work& work, float c) {
        const auto overlapped = [&](int n, auto masked) {
            wait_k();
            wait_turn();
            issue_qk();
            wait_v();
            issue_pv();
            pass_turn();
            if (kChain) release_q();
            wgmma_wait<1>();
            wgmma_touch(s);
            release_k();
            change(work, n, masked);
            softmax.advance(s, c);
            softmax.template exponentiate<kIsFalse<decltype(masked)>>(s, c);
            wgmma_wait<0>();
            wgmma_touch(o);
            release_v();
            // Always: a branch would keep the compiler from filling the gaps between exponentials with what follows.
            softmax.rescale(o);
            round();
        };
        const auto serial = [&](int n, auto masked) {
            wait_k();
            wait_turn();
            issue_qk();
            pass_turn();
            if (kChain) release_q();
            wgmma_wait<0>();
            wgmma_touch(s);
            release_k();
            change(work, n, masked);
            softmax.advance(s, c);
            softmax.rescale(o);
            softmax.template exponentiate<kIsFalse<decltype(masked)>>(s, c);
            round();
            wait_v();
            issue_pv();
            wgmma_wait<0>();
            wgmma_touch(o);
            release_v();
        };
        if constexpr (kOverlap) {
            walk(work.own, work.own.end - 2, overlapped);
        } else {
            walk(work.own, work.own.end - 1, serial);
        }
    }

    // The last product of a tile and, at the end of its keys, what its rows are divided by.
    __device__ __forceinline__ RowResults close(const Work& work, float c) {
        const bool some = attends(work);
        if constexpr (kOverlap) {
            if (some) {
                wait_v();
                issue_pv();
            }
            // On every path, or the compiler does so where it likes.
            wgmma_wait<0>();
            wgmma_touch(o);
            if (some) release_v();
        }
        if (kCluster > 1 && some) skip(work.own.begin - work.all.begin);
        return finish(work, c);
    }
    __device__ __forceinline__ RowResults finish(const Work& work, float c) {
        RowResults rows = softmax.finish(c);
        if (kProgramSink) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int q = work.tile.row + id * 64 + warp() * 16 + lane() / 4 + h * 8;
                const float sink = program_sink(head(work), min_of(q, args.forward.q_len - 1));
                const WithSink sunk = with_sink(softmax.l[h], softmax.m[h] * c, sink);
                rows.inverse[h] = sunk.inverse, rows.log_sum_exp[h] = sunk.lse;
            }
        }
        return rows;
    }

    // The last product of a tile beside the first scores of the next, whose probabilities are in `p` afterwards: the
    // matrix units do not see where a tile ends.
    __device__ __forceinline__ RowResults close_beside(const Work& work, const Work& next, float c) {
        release_q();
        open_q();
        wait_k();
        wait_turn();
        issue_qk();
        wait_v();
        issue_pv();
        pass_turn();
        const RowResults rows = finish(work, c);
        softmax.init();
        wgmma_wait<1>();
        first_probabilities(next, c);
        wgmma_wait<0>();
        wgmma_touch(o);
        release_v();
        round();
        return rows;
    }

    // Normalises O into shared memory, in the copy engine's layout, and writes the log-sum-exp.
    __device__ __forceinline__ void stage_output(const Tile& tile, const RowResults& rows, u32 to) {
        const int row = warp() * 16 + lane() / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int packed = id * 64 + row + h * 8, at = tile.row + packed;
            if (args.forward.lse != nullptr && lane() % 4 == 0 && packed < tile.rows) {
                const int member = at & ((1 << args.group_shift) - 1);
                const i64 head = (i64(tile.batch) * args.unit_heads + tile.head << args.group_shift) + member;
                args.forward.lse[head * args.forward.q_len + (at >> args.group_shift)] = rows.log_sum_exp[h];
            }
#pragma unroll
            for (int j = 0; j < kColumnsV / 8; j++) o[4 * j + 2 * h] *= rows.inverse[h], o[4 * j + 2 * h + 1] *= rows.inverse[h];
        }
        const int to_row = warp() * 16 + lane() % 16;
#pragma unroll
        for (int j = 0; j < kColumnsV / 16; j++) {
            const float* x = o + 8 * j;
            const u32 chunk = u32(j % 4 * 2 + lane() / 16) ^ (to_row % 8);
            stmatrix_x4(to + j / 4 * kBytes64Rows + to_row * 128 + (chunk << 4), pack<Element>(x[0], x[1]),
                        pack<Element>(x[2], x[3]), pack<Element>(x[4], x[5]), pack<Element>(x[6], x[7]));
        }
    }

    // Adds the non-finite elements of V in masked blocks to the outputs that attend to them, in the staged O: rare, so
    // plain and slow.
    __device__ __forceinline__ void restore_non_finite(const Work& work, u32 to) const {
        const Tile& tile = work.tile;
        const Element* v = (const Element*)args.forward.v + tile.batch * args.forward.v_stride[0] +
                           tile.kv_head * args.forward.v_stride[1];
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < 64 * kHeadDimV; i += 128) {
            const int row = i / kHeadDimV, column = i % kHeadDimV;
            if (id * 64 + row >= tile.rows) break;
            const int position = (tile.row + id * 64 + row) >> args.group_shift;
            const auto visible = [&](int key) { return program_visible(head(work), position, key); };
            const float add = sum_of_non_finite<kBlockKV, kMaskLeft, kMaskRight>(args.forward, v + column, position, work.all,
                                                                                 visible);
            if (add != 0.0f) {
                const u32 chunk = u32(column % 64 / 8) ^ (row % 8);
                const u32 at = to + column / 64 * kBytes64Rows + row * 128 + (chunk << 4) + column % 8 * 2;
                store_shared(at, from_float<Element>(to_float(load_shared<Element>(at)) + add));
            }
        }
    }

    // O of a tile, whose Q was `q`, out to memory.
    __device__ __forceinline__ void write(const Work& work, const RowResults& rows, int q) {
        const u32 to = smem + Layout::kQ + q * Layout::kBytesQ;
        // O overwrites rows that other warps have read as Q: all must be done. They must also agree about non-finite
        // elements, which may be met for the next tile while they look.
        bool met = false;
        if (kClean) {
            met = barrier_any(1 + kConsumers + id, 128, lane() == 0 ? read_flag(smem + Layout::kMetNonFinite) : 0);
        } else {
            sync();
        }
        stage_output(work.tile, rows, to);
        if (met) {
            sync();
            restore_non_finite(work, to);
        }
        fence_async_proxy();
        sync();
        release_q();
        if (threadIdx.x % 128 == 0) {
            if (id * 64 < work.tile.rows) {
#pragma unroll
                for (int chunk = 0; chunk < kChunksV; chunk++) {
                    tma_store(args.o, to + chunk * kBytes64Rows, chunk * 64, 0, (work.tile.row + id * 64) >> args.group_shift,
                              work.tile.head, work.tile.batch);
                }
            }
            tma_store_commit();
        }
        leaving = q;
        // Another Q waits for this space alone.
        if (!kChain) release_q();
    }

    __device__ __forceinline__ void run() {
        const float scale = args.forward.scale;
        // A score program gives scores in natural units.
        const float c = kProgramScore ? kLog2E : (scale > 0.0f ? scale : scale == 0.0f ? 1.0f : -scale) * kLog2E;
        if (kTakeTurns && id + 1 == kConsumers) pass_turn();
        Work work = first_work(args);
        open(work, c);
        while (true) {
            attend(work, c);
            const int q = q_at;
            RowResults rows;
            // Before what comes next is known: in a cluster that may depend on the blocks that are skipped here.
            if (!kChain) rows = close(work, c);
            const Work next = hand.next<true>();
            const bool chained = kChain && kOverlap && next.live && attends(work) && attends(next);
            if (kChain) rows = chained ? close_beside(work, next, c) : close(work, c);
            write(work, rows, q);
            if (!next.live) break;
            if (chained) {
#pragma unroll
                for (int i = 0; i < kColumnsV / 2; i++) o[i] = 0.0f;
            } else {
                open(next, c);
            }
            work = next;
        }
        // Shared memory must outlast what reads it.
        release_q();
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM) @{ cluster_attribute }@
@{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(1024) u8 shared_memory[];
    const u32 smem = smem_address(shared_memory);
    const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32 % 4);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Layout::kQBuffers * kConsumers; i++) {
            mbarrier_init(smem + Layout::kFullQ + i * 8, 1);
            mbarrier_init(smem + Layout::kEmptyQ + i * 8, 1);
        }
        for (int i = 0; i < 2; i++) {
            mbarrier_init(smem + Layout::kFullWork + i * 8, 1);
            mbarrier_init(smem + Layout::kEmptyWork + i * 8, 1 + (kClean ? 2 : 0) + kConsumers * 4);
        }
        for (int s = 0; s < kStages; s++) {
            mbarrier_init(smem + Layout::kFullK + s * 8, 1);
            mbarrier_init(smem + Layout::kEmptyK + s * 8, kCluster * kConsumers * 4);
            mbarrier_init(smem + Layout::kFullV + s * 8, kClean ? 2 : 1);
            mbarrier_init(smem + Layout::kEmptyV + s * 8, kCluster * kConsumers * 4);
            mbarrier_init(smem + Layout::kRawV + s * 8, 1);
        }
        store_shared_4(smem + Layout::kMetNonFinite, 0);
        mbarrier_init_fence();
    }
    if constexpr (kCluster > 1) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    if (warpgroup == 0) {
        registers_give_back<kProducerRegisters>();
        if (warp == 0) {
            if (kWholeWarps || threadIdx.x % 32 == 0) produce_qk(args, smem);
        } else if (warp == 1) {
            if (kWholeWarps || threadIdx.x % 32 == 0) produce_v(args, smem);
        } else if (kClean) {
            clean_v(args, smem);
        }
    } else {
        registers_take<kConsumerRegisters>();
        Consumer(args, smem, warpgroup - 1).run();
    }
    // Others of the cluster may still arrive on barriers of this block.
    if constexpr (kCluster > 1) cluster_sync();
}
