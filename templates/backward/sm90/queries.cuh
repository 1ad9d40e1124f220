// dQ of 128 * kRowTiles query rows: the sum of dS K over the key blocks that they see, in ascending order.
//
// Two warpgroups have kRowTiles tiles of 64 queries each; one thread of a third brings K and the tiles of dS, which are
// read once and as they lie: A by depth, as their rows are keys.

constexpr int kQueriesThreads = 384;
constexpr int kQueryTiles = 2 * kRowTiles;  // of 64

struct QueriesLayout {
    static constexpr int kBytesK = kChunksQK * kKeys * kRowBytes, kBytes = kBytesK + kQueryTiles * kBytesTile;
    // dQ is staged 64 rows of a warpgroup at a time, apart from the ring, which runs on.
    static constexpr int kBytesRows = kChunksQK * 64 * kRowBytes;
    static constexpr int kBuffers = 0, kRows = kRowStages * kBytes, kFull = kRows + 2 * kBytesRows, kEmpty = kFull + kRowStages * 8;
    static constexpr int kAll = kEmpty + kRowStages * 8;
};
using TileRing = Pipeline<kRowStages, QueriesLayout::kFull, QueriesLayout::kEmpty, QueriesLayout::kBuffers, QueriesLayout::kBytes>;
static_assert(QueriesLayout::kAll + 1024 == @{ queries_smem_bytes }@, "the shared memory that the host asks for");

// Key blocks that queries [row, row + count) see.
struct Blocks {
    int begin, end;
    __device__ __forceinline__ Blocks(const Visible& v, int row, int count) {
        const int last = min_of(row + count, v.q_len) - 1 + v.shift;
        begin = kMaskLeft ? max_of(row + v.shift - v.left, 0) / kKeys : 0;
        end = div_up(kMaskRight ? max_of(min_of(last + v.right + 1, v.kv_len), 0) : v.kv_len, kKeys);
    }
};

// Whether `keys` wrote dS of a tile of 64 queries.
__device__ __forceinline__ bool is_written(const Visible& v, int block, int tile) {
    const int wide = tile / (kBlockQ / 64);
    return wide >= v.begin(block) && wide < v.end(block);
}

// Rows of a head, by number. The last rows see the most keys under a causal mask: they come first, of the heads of a section.
// dS is read once and K by every row block: few heads at a time keep it in L2. A thread block has every gridDim.x-th of them.
struct RowBlock {
    int head_index, tile;  // of the launch; the first of kQueryTiles tiles of 64 rows
    __device__ __forceinline__ RowBlock(const KernelArgs& args, int group, int index) {
        const int blocks = div_up(args.backward.q_len, kQueryTiles * 64), whole = args.section * group * blocks;
        const int section = index / whole, within = index % whole;
        const int members = min_of(args.section, args.pairs - section * args.section) * group;
        head_index = section * args.section * group + within % members, tile = (blocks - 1 - within / members) * kQueryTiles;
    }
    static __device__ __forceinline__ int count(const KernelArgs& args, int group) {
        return args.pairs * group * div_up(args.backward.q_len, kQueryTiles * 64);
    }
};

__device__ __forceinline__ void load_tiles(const KernelArgs& args, u32 smem, const Visible& visible, const Pair& pair,
                                           const char* ds, const Blocks& blocks, int tile, TileRing& ring) {
    using L = QueriesLayout;
#pragma unroll 1
    for (int block = blocks.begin; block < blocks.end; block++) {
        const int begin = visible.begin(block) * (kBlockQ / 64), end = visible.end(block) * (kBlockQ / 64);
        const int from = max_of(tile, begin), to = min_of(tile + kQueryTiles, end), bytes = max_of(to - from, 0) * kBytesTile;
        ring.acquire(smem);
        ring.expect(smem, L::kBytesK + bytes);
        // The tiles of a key block lie one behind the other.
        if (bytes > 0)
            bulk_load(ring.buffer(smem) + L::kBytesK + (from - tile) * kBytesTile,
                      ds + visible.tiles_before(block) * (kBlockQ / 64 * kBytesTile) + i64(from - begin) * kBytesTile, bytes,
                      ring.full(smem), kEvictFirst);
#pragma unroll
        for (int chunk = 0; chunk < kChunksQK; chunk++)
            tma_load(ring.buffer(smem) + chunk * kKeys * kRowBytes, args.k, ring.full(smem), kEvictLast, chunk * 64, block * kKeys,
                     pair.kv_head, pair.batch);
        ring.advance();
    }
}

extern "C" __global__ void __launch_bounds__(kQueriesThreads, 1) queries(const __grid_constant__ KernelArgs args) {
    using L = QueriesLayout;
    extern __shared__ u8 dynamic_shared[];
    const u32 smem = round_up(int(smem_address(dynamic_shared)), 1024);
    const Visible visible(args.backward);
    const int group = args.backward.heads / args.backward.kv_heads;
    const int count = RowBlock::count(args, group);
    const int role = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRowStages; i++) TileRing::init(smem, i, 1, 8);
        mbarrier_init_fence();
    }
    __syncthreads();
    launch_next_stage();
    wait_for_last_stage();
    if (role == 2) {
        registers_give_back<24>();
        if (threadIdx.x == 256) {
            TileRing ring;
#pragma unroll 1
            for (int i = blockIdx.x; i < count; i += gridDim.x) {
                const RowBlock at(args, group, i);
                const char* ds = (const char*)args.ds + i64(at.head_index) * visible.slots() * (kBlockQ / 64 * kBytesTile);
                load_tiles(args, smem, visible, Pair(args.backward, args.first_pair + at.head_index / group), ds,
                           Blocks(visible, at.tile * 64, kQueryTiles * 64), at.tile, ring);
            }
        }
    } else {
        registers_take<240>();
        TileRing ring;
        const u32 to = smem + L::kRows + role * L::kBytesRows;
#pragma unroll 1
        for (int i = blockIdx.x; i < count; i += gridDim.x) {
            const RowBlock at(args, group, i);
            const Pair pair(args.backward, args.first_pair + at.head_index / group);
            const Blocks blocks(visible, at.tile * 64, kQueryTiles * 64);
            const int mine = at.tile + role * kRowTiles;
            float dq[kRowTiles][kColumnsQK / 2];
#pragma unroll
            for (int t = 0; t < kRowTiles; t++) {
#pragma unroll
                for (int e = 0; e < kColumnsQK / 2; e++) dq[t][e] = 0.0f;
            }
#pragma unroll 1
            for (int block = blocks.begin; block < blocks.end; block++) {
                ring.wait(smem);
                const u64 k_depth = descriptor_of_depth(ring.buffer(smem), kKeys * kRowBytes);
#pragma unroll
                for (int t = 0; t < kRowTiles; t++) {
                    if (!is_written(visible, block, mine + t)) continue;
                    const u64 ds_depth = descriptor_of_depth(ring.buffer(smem) + L::kBytesK + (role * kRowTiles + t) * kBytesTile, kBytesTile);
                    wgmma_touch(dq[t]);
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < kKeys / 16; k++)
                        wgmma<Element, kColumnsQK>::depths(dq[t], ds_depth + k * 2048 / 16, k_depth + k * 2048 / 16);
                    wgmma_commit();
                    wgmma_wait<0>();
                    wgmma_touch(dq[t]);
                }
                // A warp whose rows have no tile here has no product that keeps its lanes together.
                __syncwarp();
                if (lane() == 0) ring.release(smem);
                ring.advance();
            }
#pragma unroll
            for (int t = 0; t < kRowTiles; t++) {
                if (threadIdx.x % 128 == 0) tma_store_wait_read();
                barrier_sync(1 + role, 128);
                stage_rows<kColumnsQK>(to, 64 * kRowBytes, dq[t], args.backward.scale);
                fence_async_proxy();
                barrier_sync(1 + role, 128);
                if (threadIdx.x % 128 == 0 && (mine + t) * 64 < visible.q_len) {
                    send_rows<kChunksQK>(args.dq, to, 64 * kRowBytes, (mine + t) * 64, pair.head(at.head_index % group), pair.batch);
                    tma_store_commit();
                }
            }
            __syncwarp();
        }
        if (threadIdx.x % 128 == 0) tma_store_wait();
    }
}
