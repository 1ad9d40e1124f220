// dQ of 128 * kRowTiles query rows: the sum of dS K over the key blocks that they see, in ascending order.
//
// Two warpgroups have kRowTiles tiles of 64 queries each; one thread of a third brings K and the tiles of dS, which are
// read once and as they lie: A by depth, as their rows are keys.

constexpr int kQueriesThreads = 384;

struct QueriesLayout {
    static constexpr int kBytesK = kChunksQK * kKeys * kRowBytes, kBytesStage = kBytesK + kQueryTiles * kBytesTile;
    // dQ is staged 64 rows of a warpgroup at a time, apart from the ring, which runs on.
    static constexpr int kBytesRows = kChunksQK * 64 * kRowBytes;
    static constexpr int kRows = kRowStages * kBytesStage;
    static constexpr int kWhich = kRows + 2 * kBytesRows;  // of what is listed, or the row block
    static constexpr int kFull = kWhich + (kListed || kJoint ? kRowStages * 8 : 0), kEmpty = kFull + kRowStages * 8;
    static constexpr int kEnd = kEmpty + kRowStages * 8, kItem = round_up(kEnd, 16);  // of packed sequences
    static constexpr int kBytes = kPacked ? kItem + kBytesItems : kEnd;
};
using TileRing = Pipeline<kRowStages, QueriesLayout::kFull, QueriesLayout::kEmpty, 0, QueriesLayout::kBytesStage>;
static_assert(QueriesLayout::kBytes + 1024 == @{ queries_smem_bytes }@, "the shared memory that the host asks for");

// Key blocks that queries [row, row + count) see.
struct Blocks {
    int begin, end;
    __device__ __forceinline__ Blocks(const Visible& v, int row, int count) {
        const int last = min_of(row + count, v.q_len) - 1 + v.shift;
        begin = kMaskLeft ? max_of(row + v.shift - v.left, 0) / kKeys : 0;
        end = div_up(kMaskRight ? max_of(min_of(last + v.right + 1, v.kv_len), 0) : v.kv_len, kKeys);
    }
};

// Of a key block the tiles of 64 queries whose dS `keys` wrote, [begin, end).
struct Written {
    int begin, end;
    __device__ __forceinline__ Written(const Visible& v, int block)
        : begin(v.begin(block) * (kBlockQ / 64)), end(v.end(block) * (kBlockQ / 64)) {}
    __device__ __forceinline__ bool has(int tile) const { return tile >= begin && tile < end; }
};

#if @{ packed }@
using RowItems = ItemRing<QueriesLayout::kItem>;
#else
// Rows of a head, by number. The last rows see the most keys under a causal mask: they come first, of the heads of a
// section. dS is read once and K by every row block: few heads at a time keep it in L2. A thread block has every
// gridDim.x-th of them. Beside dK and dV rows come in the order in which their dS does.
struct RowBlock {
    int head_index, tile;  // of the wave; the first of kQueryTiles tiles of 64 rows
    __device__ __forceinline__ RowBlock(const KernelArgs& args, int group, int index) {
        const int blocks = div_up(args.backward.q_len, kRowBlock), whole = args.queries_section * group * blocks;
        const int first = index / whole * args.queries_section, within = index % whole;
        const int members = min_of(args.queries_section, args.pairs - first) * group;
        const int nth = within / members;
        head_index = first * group + within % members, tile = (kJoint ? nth : blocks - 1 - nth) * kQueryTiles;
    }
    static __device__ __forceinline__ int count(const KernelArgs& args, int group) {
        return args.pairs * group * div_up(args.backward.q_len, kRowBlock);
    }
};
#endif

// The same where there is a program, by a warp: key blocks and slots of which its mask leaves something, whose bits and
// key block go with the buffer.
__device__ __forceinline__ void load_listed(const KernelArgs& args, u32 smem, const Visible& visible, const Pair& pair,
                                            const char* ds, int head, int tile, TileRing& ring) {
    using L = QueriesLayout;
    constexpr int kSlots = kRowBlock / kBlockQ, kBlocks = 32 / kSlots;
    const Blocks blocks(visible, tile * 64, kRowBlock);
    const ProgramHead of = head_of_program(args, pair, head);
    const int slot = tile / (kBlockQ / 64);
#pragma unroll 1
    for (int base = blocks.begin; base < blocks.end; base += kBlocks) {
        const int block = base + lane() / kSlots, mine = slot + lane() % kSlots;
        const bool exists = block < blocks.end && mine >= visible.begin(block) && mine < visible.end(block);
        const u32 live = __ballot_sync(0xffffffff, exists && program_kind(args, pair, of, mine, block) >= 0);
        if (lane() == 0) {
#pragma unroll 1
            for (int i = 0; i < kBlocks; i++) {
                const u32 bits = live >> (i * kSlots) & ((1u << kSlots) - 1);
                if (bits == 0) continue;
                const int at = base + i;
                ring.acquire(smem);
                Listed{at, int(bits)}.write(smem + L::kWhich + ring.stage * kBytesListed);
                ring.expect(smem, L::kBytesK + __popc(bits) * kBytesSlot);
                const char* from = ds + (visible.slots_before(at) + slot - visible.begin(at)) * kBytesSlot;
#pragma unroll 1
                for (int t = 0; t < kSlots; t++) {
                    if ((bits >> t & 1) == 0) continue;
                    bulk_load(ring.buffer(smem) + L::kBytesK + t * kBytesSlot, from + i64(t) * kBytesSlot, kBytesSlot,
                              ring.full(smem), kEvictFirst);
                }
                load_rows<kChunksQK, kKeys>(ring.buffer(smem), args.k, ring.full(smem), kEvictLast,
                                            pair.kv_row + at * kKeys, pair.kv_head, pair.entry);
                ring.advance();
            }
        }
        __syncwarp();
    }
    if (lane() == 0) {
        ring.acquire(smem);
        Listed{-1, 0}.write(smem + L::kWhich + ring.stage * kBytesListed);
        ring.commit(smem);
        ring.advance();
    }
    __syncwarp();
}

// Brings K and dS. One thread. Beside dK and dV it says which row block this is, in an empty buffer where the rows see
// nothing.
__device__ __forceinline__ void load_tiles(const KernelArgs& args, u32 smem, const Visible& visible, const Pair& pair,
                                           const char* ds, int tile, TileRing& ring, int index = 0) {
    using L = QueriesLayout;
    const Blocks blocks(visible, tile * 64, kRowBlock);
    if (kJoint && blocks.begin >= blocks.end) {
        ring.acquire(smem);
        store_shared_4(smem + L::kWhich + ring.stage * 8, u32(index));
        ring.commit(smem);
        ring.advance();
    }
#pragma unroll 1
    for (int block = blocks.begin; block < blocks.end; block++) {
        const Written written(visible, block);
        const int from = max_of(tile, written.begin), to = min_of(tile + kQueryTiles, written.end);
        const int bytes = max_of(to - from, 0) * kBytesTile;
        ring.acquire(smem);
        if (kJoint) store_shared_4(smem + L::kWhich + ring.stage * 8, u32(index));
        ring.expect(smem, L::kBytesK + bytes);
        // The tiles of a key block lie one behind the other.
        if (bytes > 0)
            bulk_load(ring.buffer(smem) + L::kBytesK + (from - tile) * kBytesTile,
                      ds + visible.slots_before(block) * kBytesSlot + i64(from - written.begin) * kBytesTile, bytes,
                      ring.full(smem), kEvictFirst);
        load_rows<kChunksQK, kKeys>(ring.buffer(smem), args.k, ring.full(smem), kEvictLast,
                                    pair.kv_row + block * kKeys, pair.kv_head, pair.entry);
        ring.advance();
    }
}

// dQ of a warp's 16 rows of a tile once more, from the keys that they see alone. `dq`: of a thread's two rows.
__device__ __forceinline__ void sum_what_is_seen(const KernelArgs& args, const Visible& visible, const Pair& pair,
                                                 const char* ds, int head, int tile, float (&dq)[kColumnsQK / 2]) {
    const BackwardArgs& a = args.backward;
    const int within = warp() * 16 + lane() / 4, column = lane() % 4 * 2;
    const Blocks blocks(visible, tile * 64, 64);
    const ProgramHead of_program = head_of_program(args, pair, head);
    KeyRange live[2];
    const Element* q[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = min_of(tile * 64 + within + h * 8, visible.q_len - 1);
        live[h] = live_keys<kMaskLeft, kMaskRight>(LiveSizes{visible}, row);
        q[h] = row_of(a.q, a.q_stride, pair.entry, head, pair.q_row + row);
    }
#pragma unroll
    for (int e = 0; e < kColumnsQK / 2; e++) dq[e] = 0.0f;
#pragma unroll 1
    for (int key = blocks.begin * kKeys; key < min_of(blocks.end * kKeys, visible.kv_len); key++) {
        const Written written(visible, key / kKeys);
        if (!written.has(tile)) continue;
        const char* rows = ds + visible.slots_before(key / kKeys) * kBytesSlot +
                           i64(tile - written.begin) * kBytesTile + key % kKeys * kRowBytes;
        const Element* of_key = row_of(a.k, a.k_stride, pair.entry, pair.kv_head, pair.kv_row + key);
        float s[2] = {};
#pragma unroll 2
        for (int c = column; c < kHeadDimQK; c += 8) {
            const float2 x = load_pair(of_key, c), y[2] = {load_pair(q[0], c), load_pair(q[1], c)};
#pragma unroll
            for (int h = 0; h < 2; h++) s[h] = fmaf(x.y, y[h].y, fmaf(x.x, y[h].x, s[h]));
        }
#pragma unroll
        for (int h = 0; h < 2; h++) s[h] = quad_sum(s[h]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (key < live[h].first || key > live[h].last) continue;
            if constexpr (kListed) {
                const int row = min_of(tile * 64 + within + h * 8, visible.q_len - 1);
                if (!program_visible(of_program, row, key)) continue;
                if (score_gradient(of_program, row, key, s[h] * a.scale).value == -FT_INFINITY) continue;
            } else if (takes_no_part(s[h], a.scale)) {
                continue;
            }
            const int query = within + h * 8;
            const float slope = to_float(*(const Element*)(rows + ((query / 8 ^ key) % 8) * 16 + query % 8 * 2));
#pragma unroll
            for (int j = 0; j < kHeadDimQK / 8; j++) {
                const float2 x = load_pair(of_key, column + j * 8);
                dq[j * 4 + h * 2] = fmaf(slope, x.x, dq[j * 4 + h * 2]);
                dq[j * 4 + h * 2 + 1] = fmaf(slope, x.y, dq[j * 4 + h * 2 + 1]);
            }
        }
    }
}

// dQ of the rows of one warpgroup.
__device__ __forceinline__ void sum_row_block(const KernelArgs& args, u32 smem, const Visible& visible,
                                              const Pair& pair, const char* ds, int tile, int head, int role,
                                              TileRing& ring) {
    using L = QueriesLayout;
    const Blocks blocks(visible, tile * 64, kRowBlock);
    const int mine = tile + role * kRowTiles;
    float dq[kRowTiles][kColumnsQK / 2];
#pragma unroll
    for (int t = 0; t < kRowTiles; t++) {
#pragma unroll
        for (int e = 0; e < kColumnsQK / 2; e++) dq[t][e] = 0.0f;
    }
#pragma unroll 1
    for (int block = blocks.begin; kListed || block < blocks.end; block++) {
        const Written written(visible, block);
        ring.wait(smem);
        Listed which{0, 0};
        if (kListed) {
            which = Listed::read(smem + L::kWhich + ring.stage * kBytesListed);
            if (which.tile < 0) break;
        }
        const u64 k_depth = descriptor_of_depth(ring.buffer(smem), kKeys * kRowBytes);
#pragma unroll
        for (int t = 0; t < kRowTiles; t++) {
            if (kListed ? (which.head >> ((role * kRowTiles + t) / (kBlockQ / 64)) & 1) == 0 : !written.has(mine + t))
                continue;
            const u64 ds_depth =
                descriptor_of_depth(ring.buffer(smem) + L::kBytesK + (role * kRowTiles + t) * kBytesTile, kBytesTile);
            wgmma_touch(dq[t]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kKeys / 16; k++)
                wgmma<Element, kColumnsQK>::depths(dq[t], ds_depth + k * 2048 / 16, k_depth + k * 2048 / 16, true);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_touch(dq[t]);
        }
        // A warp whose rows have no tile here has no product that keeps its lanes together.
        __syncwarp();
        if (lane() == 0) ring.release(smem);
        ring.advance();
    }
    if (kListed || (kJoint && blocks.begin >= blocks.end)) {
        __syncwarp();
        if (lane() == 0) ring.release(smem);
        ring.advance();
    }
    const u32 to = smem + L::kRows + role * L::kBytesRows;
#pragma unroll
    for (int t = 0; t < kRowTiles; t++) {
        if (any_non_finite(dq[t])) sum_what_is_seen(args, visible, pair, ds, head, mine + t, dq[t]);
        __syncwarp();
        if (threadIdx.x % 128 == 0) tma_store_wait_read();
        barrier_sync(1 + role, 128);
        stage_rows<kColumnsQK>(to, 64 * kRowBytes, dq[t], args.backward.scale);
        fence_async_proxy();
        barrier_sync(1 + role, 128);
        // Behind the last query of a packed sequence are those of another.
        const int row = (mine + t) * 64;
        if (kPacked && row + 64 > visible.q_len) {
            const BackwardArgs& a = args.backward;
            copy_rows<kHeadDimQK>(a.dq, a.dq_stride, to, 64 * kRowBytes, head, pair.q_row + row, visible.q_len - row);
        } else if (threadIdx.x % 128 == 0 && row < visible.q_len) {
            send_rows<kChunksQK>(args.dq, to, 64 * kRowBytes, pair.q_row + row, head, pair.entry);
            tma_store_commit();
        }
    }
    __syncwarp();
}

#if !FT_JOINT && !FT_TURNS
// All row blocks of a thread block: who loads for them, and who sums.
#if @{ packed }@
__device__ __forceinline__ void load_row_blocks(const KernelArgs& args, u32 smem, TileRing& ring) {
    const Table table(args);
    const uint2* const starts = table.starts() + args.first_pair;
    const int end = int(starts[1].y);
    RowItems items;
#pragma unroll 1
    for (int i = int(starts[0].y) + blockIdx.x; i < end; i += gridDim.x) {
        const Item item = Item::of_rows(table, i);
        item.tell(smem, items);
        const Visible visible(args.backward, Lengths{item.q_len, item.kv_len});
        const Pair pair = item.pair_of_rows(args.backward);
        const char* ds = table.ds() + item.slot * kBytesSlot;
        if constexpr (kListed) {
            load_listed(args, smem, visible, pair, ds, item.head, item.block * kQueryTiles, ring);
        } else {
            load_tiles(args, smem, visible, pair, ds, item.block * kQueryTiles, ring);
        }
    }
    Item::tell_end(smem, items);
}
__device__ __forceinline__ void sum_row_blocks(const KernelArgs& args, u32 smem, int role, TileRing& ring) {
    RowItems items;
#pragma unroll 1
    for (;; items.advance()) {
        items.wait(smem);
        const Item item = Item::read(items.buffer(smem));
        __syncwarp();
        if (lane() == 0) items.release(smem);
        if (item.block < 0) break;
        const Visible visible(args.backward, Lengths{item.q_len, item.kv_len});
        sum_row_block(args, smem, visible, item.pair_of_rows(args.backward), Table(args).ds() + item.slot * kBytesSlot,
                      item.block * kQueryTiles, item.head, role, ring);
    }
}
#else
__device__ __forceinline__ void load_row_blocks(const KernelArgs& args, u32 smem, TileRing& ring) {
    const Visible visible(args.backward);
    const int group = args.backward.heads / args.backward.kv_heads, count = RowBlock::count(args, group);
    const i64 slots = visible.slots();
#pragma unroll 1
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
        const RowBlock at(args, group, i);
        const Pair pair(args.backward, args.first_pair + at.head_index / group);
        const char* ds = ds_of(args, at.head_index, slots);
        if constexpr (kListed) {
            load_listed(args, smem, visible, pair, ds, pair.head(at.head_index % group), at.tile, ring);
        } else {
            load_tiles(args, smem, visible, pair, ds, at.tile, ring);
        }
    }
}
__device__ __forceinline__ void sum_row_blocks(const KernelArgs& args, u32 smem, int role, TileRing& ring) {
    const Visible visible(args.backward);
    const int group = args.backward.heads / args.backward.kv_heads, count = RowBlock::count(args, group);
#pragma unroll 1
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
        const RowBlock at(args, group, i);
        const Pair pair(args.backward, args.first_pair + at.head_index / group);
        sum_row_block(args, smem, visible, pair, ds_of(args, at.head_index, visible.slots()), at.tile,
                      pair.head(at.head_index % group), role, ring);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(kQueriesThreads, 1)
    @{ entry }@_queries(const __grid_constant__ KernelArgs args) {
    extern __shared__ u8 shared_memory[];
    const u32 smem = round_up(int(smem_address(shared_memory)), 1024);
    const int role = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRowStages; i++) TileRing::init(smem, i, 1, 8);
#if @{ packed }@
        for (int i = 0; i < kItems; i++) RowItems::init(smem, i, 1, 8);
#endif
        mbarrier_init_fence();
    }
    __syncthreads();
    let_next_launch_begin();
    wait_for_launch_before();
    if (role == 2) {
        registers_give_back<kListed || kPacked ? 56 : 24>();
        if (kListed ? threadIdx.x / 32 == 8 : threadIdx.x == 256) {
            TileRing ring;
            load_row_blocks(args, smem, ring);
        }
    } else {
        registers_take<kListed || kPacked ? 224 : 240>();
        TileRing ring;
        sum_row_blocks(args, smem, role, ring);
        if (threadIdx.x % 128 == 0) tma_store_wait();
    }
}
#endif
