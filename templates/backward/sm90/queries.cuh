// dQ of 128 * kRowTiles query rows: the sum of dS K over the key blocks that they see, in ascending order.
//
// Two warpgroups have kRowTiles tiles of 64 queries each; one thread of a third brings K and the tiles of dS, which are
// read once and as they lie: A by depth, as their rows are keys.

constexpr int kQueriesThreads = 384;
constexpr int kQueryTiles = 2 * kRowTiles;  // of 64

struct QueriesLayout {
    static constexpr int kBytesK = kChunksQK * kKeys * kRowBytes, kBytes = kBytesK + kQueryTiles * kBytesTile;
    static constexpr int kBuffers = 0, kFull = kRowStages * kBytes, kEmpty = kFull + kRowStages * 8;
    static constexpr int kAll = kEmpty + kRowStages * 8;
};
using TileRing = Pipeline<kRowStages, QueriesLayout::kFull, QueriesLayout::kEmpty, QueriesLayout::kBuffers, QueriesLayout::kBytes>;
static_assert(QueriesLayout::kAll + 1024 == @{ queries_smem_bytes }@, "the shared memory that the host asks for");
static_assert(kQueryTiles * 64 * kRowBytes * kChunksQK <= kRowStages * QueriesLayout::kBytes, "dQ is staged where tiles were");

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

__device__ __forceinline__ void load_tiles(const KernelArgs& args, u32 smem, const Visible& visible, const Pair& pair,
                                           const char* ds, const Blocks& blocks, int tile) {
    using L = QueriesLayout;
    TileRing ring;
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
    // The last rows see the most keys under a causal mask: they come first, of the heads of a section. dS is read once and
    // K by every row block: few heads at a time keep it in L2.
    const int row_blocks = div_up(visible.q_len, kQueryTiles * 64), whole = args.section * group * row_blocks;
    const int section = int(blockIdx.x) / whole, within = int(blockIdx.x) % whole;
    const int members = min_of(args.section, args.pairs - section * args.section) * group;
    const int head_index = section * args.section * group + within % members;
    const int tile = (row_blocks - 1 - within / members) * kQueryTiles;
    const Pair pair(args.backward, args.first_pair + head_index / group);
    const int head = pair.head(head_index % group);
    const Blocks blocks(visible, tile * 64, kQueryTiles * 64);
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
        const char* ds = (const char*)args.ds + i64(head_index) * visible.slots() * (kBlockQ / 64 * kBytesTile);
        if (threadIdx.x == 256) load_tiles(args, smem, visible, pair, ds, blocks, tile);
    } else {
        registers_take<240>();
        const int mine = tile + role * kRowTiles;
        float dq[kRowTiles][kColumnsQK / 2];
#pragma unroll
        for (int t = 0; t < kRowTiles; t++) {
#pragma unroll
            for (int i = 0; i < kColumnsQK / 2; i++) dq[t][i] = 0.0f;
        }
        TileRing ring;
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
        barrier_sync(1, 256);
        const u32 to = smem + role * kRowTiles * 64 * kRowBytes * kChunksQK;
#pragma unroll
        for (int t = 0; t < kRowTiles; t++)
            stage_rows<kColumnsQK>(to + t * 64 * kRowBytes * kChunksQK, 64 * kRowBytes, dq[t], args.backward.scale);
        fence_async_proxy();
        barrier_sync(2 + role, 128);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int t = 0; t < kRowTiles; t++) {
                if ((mine + t) * 64 < visible.q_len)
                    send_rows<kChunksQK>(args.dq, to + t * 64 * kRowBytes * kChunksQK, 64 * kRowBytes, (mine + t) * 64, head, pair.batch);
            }
            tma_store_commit();
            tma_store_wait();
        }
    }
}
