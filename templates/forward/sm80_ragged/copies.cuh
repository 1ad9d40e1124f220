// The loads of a team: a cursor over the key blocks of its shares that runs kStages - 1 steps ahead of the products,
// across the ends of shares, and asks for a block's tokens wherever the store has them.

struct Copies {
    int team, stage, slot;
    i64 unit, end, total;     // of the whole batch: the next share's first, and the range's end
    int blocks, tile_units;   // as in Range
    int sequence, kv_head, tile, first_unit;
    Sequence s;
    int tiles;
    // Of the share under way: the team's next block, and the one behind the last.
    int next_block, end_block;
    bool within;
    const u8 *k, *v;          // this KV head

    __device__ __forceinline__ Copies(const KernelArgs& args, u32, int of_team, const Range& range) {
        team = of_team, stage = 0, slot = 0;
        unit = range.begin, end = range.end, total = range.total, blocks = range.blocks, tile_units = range.tile_units;
        sequence = range.sequence, kv_head = range.kv_head, tile = range.tile, first_unit = range.unit;
        within = false;
        s = sequence_of(args, sequence);
        tiles = tiles_of(args, s);
    }

    // Begins the next share: the rest of a tile, or as much of it as the range has.
    __device__ __forceinline__ void begin_share(const KernelArgs& args) {
        const TileBlocks all = tile_blocks(args, s, sequence, tile);
        const int units = all.units() + tile_units;
        const int share = int(min_of<i64>(end - unit, units - first_unit));
        const int from = max_of(first_unit - tile_units, 0), to = max_of(first_unit + share - tile_units, 0);
        next_block = all.begin + from * kKeyWarps + team;
        end_block = min_of(all.begin + to * kKeyWarps, all.end);
        k = (const u8*)args.k + kv_head * args.k_stride[2] * kCacheBytes;
        v = (const u8*)args.v + kv_head * args.v_stride[2] * kCacheBytes;
        if (threadIdx.x % kTeamThreads == 0) {
            const i64 tile_unit = unit - first_unit;
            Share& to = share_at(team, slot);
            to.sequence = sequence, to.kv_head = kv_head, to.tile = tile;
            to.rows = int(min_of<i64>(kRows, i64(s.q_len) * group_of(args) - i64(tile) * kRows));
            to.q_len = s.q_len, to.kv_len = s.kv_len, to.q_row = s.q_row;
            to.window_left = s.window_left, to.window_right = s.window_right;
            to.units = share;
            // Two divisions of 64 bits, for the two tiles at most that others have a part in.
            const bool whole = share == units;
            to.first = whole ? int(blockIdx.x) : owner_of(tile_unit, total, blocks);
            to.pieces = whole ? 1 : owner_of(tile_unit + units - 1, total, blocks) - to.first + 1;
            to.nth = int(blockIdx.x) - to.first;
        }
        slot = slot + 1 == kShareSlots ? 0 : slot + 1;
        unit += share;
        first_unit = 0;
        within = true;
    }

    // Goes on to the next tile that has rows.
    __device__ __forceinline__ void end_share(const KernelArgs& args) {
        within = false;
        if (unit >= end || ++tile < tiles) return;
        tile = 0;
        if (++kv_head < args.kv_heads) return;
        kv_head = 0;
        do {
            s = sequence_of(args, ++sequence);
            tiles = tiles_of(args, s);
        } while (tiles == 0);
    }

    // Asks for the next block, into the next stage.
    __device__ __forceinline__ void next(const KernelArgs& args) {
        if (!within && unit < end) begin_share(args);
        if (within) {
            const int block = next_block < end_block ? next_block : -1;
            next_block += kKeyWarps;
            const bool last = next_block >= end_block;
            u32 bad[2] = {0, 0};
            if (block >= 0) load(args, block, bad);
            if (threadIdx.x % kTeamThreads == 0) step_at(team, stage) = Step{block, {bad[0], bad[1]}, last};
            if (last) end_share(args);
        }
        cp_async_commit();
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    static constexpr int kLookups = (kBlockKV + 31) / 32;

    // Where the keys of a block are, each lane's: every 32nd.
    struct Places {
        i64 offset[kLookups];  // bytes from the head's first
        i64 scale[kLookups];   // elements from the head's first scale
    };
    __device__ __forceinline__ static Places places(const int (&id)[kLookups], const int (&token)[kLookups], const i64 (&stride)[4],
                                                    const i64 (&scale_stride)[3]) {
        Places p;
#pragma unroll
        for (int i = 0; i < kLookups; i++) {
            p.offset[i] = (id[i] * stride[0] + token[i] * stride[1]) * kCacheBytes;
            if (kScalePerToken) p.scale[i] = id[i] * scale_stride[0] + token[i] * scale_stride[2];
        }
        return p;
    }

    template <typename Tile>
    __device__ __forceinline__ void copy(u32 to, const u8* from, i64 chunk_stride, const Places& p, const u32 (&there)[kLookups]) const {
        using S = typename Tile::template Share<kTeamThreads>;
        const int thread = threadIdx.x % kTeamThreads;
        const int chunk0 = thread % S::kAcross, row0 = thread / S::kAcross;
#pragma unroll
        for (int r = 0; r < kBlockKV; r += S::kDown) {
            const int row = r + row0;
            i64 offset = __shfl_sync(0xffffffff, p.offset[0], row % 32);
            u32 exist = there[0];
            if constexpr (kLookups > 1) {
                const i64 upper = __shfl_sync(0xffffffff, p.offset[1], row % 32);
                if (row >= 32) offset = upper, exist = there[1];
            }
            const bool exists = exist >> row % 32 & 1;
            if (kBlockKV % S::kDown == 0 || row < kBlockKV) {
#pragma unroll
                for (int g = 0; g < S::kGroups; g++) {
                    const int chunk = g * S::kAcross + chunk0;
                    const bool valid = exists && (Tile::kValidChunks == Tile::kChunks || chunk < Tile::kValidChunks);
                    cp_async_16(to + Tile::offset(row, chunk), from + (valid ? offset + chunk * chunk_stride : 0), valid);
                }
            }
        }
    }

    // Scales of tokens, 4 bytes each.
    __device__ __forceinline__ void copy_scales(u32 to, const float* from, const Places& p, const u32 (&there)[kLookups]) const {
#pragma unroll
        for (int i = 0; i < kLookups; i++) {
            const int key = i * 32 + int(threadIdx.x) % 32;
            if (key < kBlockKV && threadIdx.x % kTeamThreads < 32) {
                cp_async_4(to + key * 4, from + p.scale[i], there[i] >> threadIdx.x % 32 & 1);
            }
        }
    }

    __device__ __forceinline__ void load(const KernelArgs& args, int block, u32 (&bad)[2]) const {
        const u32 base = smem_address(&step_at(0, 0)) - Layout::kSteps;
        const u32 to = base + Layout::ring(team) + stage * Layout::kStageBytes;
        const u32 scales = base + Layout::scales(team, stage);
        int k_id[kLookups], v_id[kLookups], token[kLookups];
        u32 there[kLookups];  // bits of the keys that are there, K and V
#pragma unroll
        for (int i = 0; i < kLookups; i++) {
            const int key = block * kBlockKV + i * 32 + int(threadIdx.x) % 32;
            const bool within = key < s.kv_len && (kBlockKV >= 32 || threadIdx.x % 32 < kBlockKV);
            k_id[i] = v_id[i] = -1, token[i] = 0;
            if (within) {
                const PageOf at = page_of(args, s.first + key);
                k_id[i] = page_id(args, args.k_table, s, at.page), token[i] = at.token;
                v_id[i] = args.v_table == args.k_table ? k_id[i] : page_id(args, args.v_table, s, at.page);
            }
            there[i] = __ballot_sync(0xffffffff, k_id[i] >= 0 && v_id[i] >= 0);
            bad[i] = __ballot_sync(0xffffffff, within) & ~there[i];
        }
        Places p = places(k_id, token, args.k_stride, args.k_scale_stride);
        copy<TileK>(to, k, args.k_stride[3] * kCacheBytes, p, there);
        if (kScalePerToken) copy_scales(scales, args.k_scale + kv_head * args.k_scale_stride[1], p, there);
        p = places(v_id, token, args.v_stride, args.v_scale_stride);
        copy<TileV>(to + Layout::kBytesK, v, 16, p, there);
        if (kScalePerToken) copy_scales(scales + kBlockKV * 4, args.v_scale + kv_head * args.v_scale_stride[1], p, there);
    }
};
