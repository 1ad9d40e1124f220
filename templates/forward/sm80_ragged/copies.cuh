// The loads of a team: a cursor over the key blocks of its shares that runs kStages - 1 steps ahead of the products,
// across the ends of shares, and asks for a block's tokens wherever the store has them.
//
// Where each 16 keys of a block lie side by side in a page, as they do but in the last block of a sequence and in pages
// of fewer, their addresses are one address and a stride: 135 instructions for 16 keys of 128 columns, where each row
// by itself takes 420. The page that a block lies in is looked up a step ahead, behind the products.

// How a team's threads share the rows of a tile: 128 bytes of a row side by side, which is a line of the cache.
template <typename Tile> struct Lanes {
    static constexpr int kAcross = Tile::kGroup;
    static constexpr int kDown = kTeamThreads / kAcross;
    static constexpr int kGroups = Tile::kChunks / kAcross;
    static __device__ __forceinline__ int row() { return threadIdx.x % kTeamThreads / kAcross; }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % kAcross; }
    // The first chunk that this thread copies of a tile, and the one of a row that is `row` rows further down, a
    // multiple of kDown: rows flip bits of the chunk that columns of groups leave alone.
    static __device__ __forceinline__ u32 first() { return Tile::offset(row(), chunk()); }
    static __device__ __forceinline__ u32 at(u32 first, int row, int group) {
        return (first ^ Tile::xor_of(row) << 4) + row * Tile::kPitch + group * kAcross * 16;
    }
};

constexpr int kRunKeys = 16, kRuns = kBlockKV / kRunKeys;

// Where 16 keys lie that follow each other.
struct Run {
    Entry k, v;      // what the tables say of the page
    int token;       // of the first key in its page; -1 where not all of them are keys of one page
};

struct Copies {
    int team, stage, slot;
    i64 unit, end;            // of the whole batch: the next share's first, and the range's end
    i64 each;                 // as in Range
    int more, tile_units, pieces;
    Group group;
    int sequence, kv_head, tile, first_unit;
    Sequence s;
    int tiles;
    // Of the share under way: the team's next block, and the one behind the last.
    int next_block, end_block;
    bool within;
    const u8 *k, *v;          // this KV head, from the chunk on that this thread copies first
    Divisor page_tokens;
    Run runs[kRuns];          // of the next block
    u32 to_k, to_v;           // where this thread's first chunks go in the first stage

    __device__ __forceinline__ Copies(const KernelArgs& args, Group group, u32 base, int of_team, const Range& range)
        : group(group), page_tokens(args.page_tokens) {
        team = of_team, stage = 0, slot = 0;
        unit = range.begin, end = range.end, each = range.each, more = range.more, tile_units = range.tile_units;
        pieces = range.pieces;
        sequence = range.sequence, kv_head = range.kv_head, tile = range.tile, first_unit = range.unit;
        within = false;
        to_k = base + Layout::ring(team) + Lanes<TileK>::first();
        to_v = base + Layout::ring(team) + Layout::kBytesK + Lanes<TileV>::first();
        s = range.s;
        tiles = tiles_of(group, s);
    }

    // Begins the next share: the rest of a tile, or as much of it as the range has.
    __device__ __forceinline__ void begin_share(const KernelArgs& args) {
        const TileBlocks all = tile_blocks(args, group, s, sequence, tile);
        const int units = all.units() + tile_units;
        const int share = int(min_of<i64>(end - unit, units - first_unit));
        const int from = max_of(first_unit - tile_units, 0), to = max_of(first_unit + share - tile_units, 0);
        next_block = all.begin + from * kKeyWarps + team;
        end_block = min_of(all.begin + to * kKeyWarps, all.end);
        k = (const u8*)args.k + (kv_head * args.k_stride[2] + Lanes<TileK>::chunk() * args.k_stride[3]) * kCacheBytes;
        v = (const u8*)args.v + kv_head * args.v_stride[2] * kCacheBytes + Lanes<TileV>::chunk() * 16;
        if (threadIdx.x % kTeamThreads == 0) {
            const i64 tile_unit = unit - first_unit;
            Share& to = share_at(team, slot);
            to.sequence = sequence, to.kv_head = kv_head, to.tile = tile;
            to.rows = int(min_of<i64>(kRows, i64(s.q_len) * group.by - i64(tile) * kRows));
            to.q_len = s.q_len, to.kv_len = s.kv_len, to.q_row = s.q_row;
            to.window_left = s.window_left, to.window_right = s.window_right;
            to.units = share;
            // Divisions for the two tiles at most that others have a part in.
            int begins = blockIdx.x, ends = blockIdx.x;
            if (pieces > 1) {
                begins = int(blockIdx.x / u32(pieces)) * pieces, ends = begins + pieces - 1;
            } else if (share != units) {
                begins = owner_of(tile_unit, each, more), ends = owner_of(tile_unit + units - 1, each, more);
            }
            to.first = begins, to.pieces = ends - begins + 1, to.nth = int(blockIdx.x) - begins;
        }
        slot = slot + 1 == kShareSlots ? 0 : slot + 1;
        unit += share;
        first_unit = 0;
        within = true;
        find_runs(args);
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
            tiles = tiles_of(group, s);
        } while (tiles == 0);
    }

    // Begins the next share where one has ended.
    __device__ __forceinline__ void begin_next(const KernelArgs& args) {
        if (!within && unit < end) begin_share(args);
    }

    // Asks for the next block, into the next stage.
    __device__ __forceinline__ void next(const KernelArgs& args) {
        if (within) {
            const int block = next_block < end_block ? next_block : -1;
            next_block += kKeyWarps;
            const bool last = next_block >= end_block;
            u32 bad[2] = {0, 0};
            if (block >= 0 && __builtin_expect(!load_runs(args), false)) load(args, block, bad);
            if (threadIdx.x % kTeamThreads == 0) step_at(team, stage) = Step{block, {bad[0], bad[1]}, last};
            if (last) {
                end_share(args);
            } else {
                find_runs(args);
            }
        }
        cp_async_commit();
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    // Looks up where the next block lies. Pages behind the last key are not asked for.
    __device__ __forceinline__ void find_runs(const KernelArgs& args) {
        if (next_block >= end_block) return;
#pragma unroll
        for (int n = 0; n < kRuns; n++) {
            const int key = next_block * kBlockKV + n * kRunKeys;
            const u32 place = u32(s.first + key);
            const int page = page_tokens.short_quotient(place), token = int(place - u32(page) * page_tokens.by);
            runs[n].token = key + kRunKeys <= s.kv_len && token + kRunKeys <= args.page_tokens ? token : -1;
            if (runs[n].token >= 0) {
                runs[n].k = read_entry(args.k_table, s.pages + page, args.table_words);
                if (args.v_table != args.k_table) {
                    runs[n].v = read_entry(args.v_table, s.pages + page, args.table_words);
                }
            }
        }
    }

    // `to` is where the thread's first chunk goes, `across` the bytes from a chunk to the next.
    template <typename Tile>
    __device__ __forceinline__ void copy_runs(u32 to, const u8* from, const i64 (&stride)[4], i64 across,
                                              const int (&id)[kRuns]) const {
        using L = Lanes<Tile>;
        const int row0 = L::row(), chunk0 = L::chunk();
        // Of the first row of each run that this thread copies.
        const u8* at[kRuns];
#pragma unroll
        for (int n = 0; n < kRuns; n++) {
            at[n] = from + (id[n] * stride[0] + (runs[n].token + row0 % kRunKeys) * stride[1]) * kCacheBytes;
        }
        const i64 down = L::kDown * kCacheBytes * stride[1];
        const u8* source = at[0];
#pragma unroll
        for (int r = 0; r < kBlockKV; r += L::kDown) {
            if constexpr (L::kDown > kRunKeys) {
                // The threads' rows lie in several runs.
                source = at[min_of(r / kRunKeys, kRuns - 1)];
#pragma unroll
                for (int n = 1; n < L::kDown / kRunKeys; n++) {
                    const int run = r / kRunKeys + n;
                    if (run < kRuns && row0 / kRunKeys == n) source = at[min_of(run, kRuns - 1)];
                }
            } else if (r % kRunKeys == 0) {
                source = at[r / kRunKeys];
            } else {
                source += down;
            }
            if (kBlockKV % L::kDown == 0 || r + row0 < kBlockKV) {
#pragma unroll
                for (int g = 0; g < L::kGroups; g++) {
                    const int chunk = g * L::kAcross + chunk0;
                    const bool valid = Tile::kValidChunks == Tile::kChunks || chunk < Tile::kValidChunks;
                    cp_async_16(L::at(to, r, g), source + g * L::kAcross * across, valid);
                }
            }
        }
    }

    // Scales of the tokens of runs, 4 bytes each.
    __device__ __forceinline__ void copy_run_scales(u32 to, const float* from, const i64 (&stride)[3],
                                                    const int (&id)[kRuns]) const {
        const int key = threadIdx.x % kRunKeys;
#pragma unroll
        for (int n = 0; n < kRuns; n++) {
            if (threadIdx.x % kTeamThreads / kRunKeys == n % 2) {
                const float* const source = from + id[n] * stride[0] + (runs[n].token + key) * stride[2];
                cp_async_4(to + (n * kRunKeys + key) * 4, source, true);
            }
        }
    }

    // Asks for the next block by its runs. False where it has to be asked for key by key.
    __device__ __forceinline__ bool load_runs(const KernelArgs& args) const {
        int k_id[kRuns], v_id[kRuns];
        bool whole = true;
#pragma unroll
        for (int n = 0; n < kRuns; n++) {
            k_id[n] = v_id[n] = listed_page(args, args.k_table, s, runs[n].k);
            if (args.v_table != args.k_table) v_id[n] = listed_page(args, args.v_table, s, runs[n].v);
            whole = whole && runs[n].token >= 0 && is_page(args, k_id[n]) && is_page(args, v_id[n]);
        }
        if (!whole) return false;
        const u32 buffer = stage * Layout::kStageBytes;
        copy_runs<TileK>(to_k + buffer, k, args.k_stride, args.k_stride[3] * kCacheBytes, k_id);
        copy_runs<TileV>(to_v + buffer, v, args.v_stride, 16, v_id);
        if (kScalePerToken) {
            const u32 scales = smem_address(&step_at(0, 0)) - Layout::kSteps + Layout::scales(team, stage);
            const float* const k_scale = args.k_scale + kv_head * args.k_scale_stride[1];
            const float* const v_scale = args.v_scale + kv_head * args.v_scale_stride[1];
            copy_run_scales(scales, k_scale, args.k_scale_stride, k_id);
            copy_run_scales(scales + kBlockKV * 4, v_scale, args.v_scale_stride, v_id);
        }
        return true;
    }

    static constexpr int kLookups = (kBlockKV + 31) / 32;

    // Where the keys of a block are, each lane's: every 32nd.
    struct Places {
        i64 offset[kLookups];  // bytes from the head's first
        i64 scale[kLookups];   // elements from the head's first scale
    };
    __device__ __forceinline__ static Places places(const int (&id)[kLookups], const int (&token)[kLookups],
                                                    const i64 (&stride)[4], const i64 (&scale_stride)[3]) {
        Places p;
#pragma unroll
        for (int i = 0; i < kLookups; i++) {
            p.offset[i] = (id[i] * stride[0] + token[i] * stride[1]) * kCacheBytes;
            if (kScalePerToken) p.scale[i] = id[i] * scale_stride[0] + token[i] * scale_stride[2];
        }
        return p;
    }

    // `across` is the bytes from a chunk to the next.
    template <typename Tile>
    __device__ __forceinline__ void copy(u32 to, const u8* from, i64 across, const Places& p,
                                         const u32 (&there)[kLookups]) const {
        using L = Lanes<Tile>;
        const int chunk0 = L::chunk(), row0 = L::row();
#pragma unroll 1
        for (int r = 0; r < kBlockKV; r += L::kDown) {
            const int row = r + row0;
            i64 offset = __shfl_sync(0xffffffff, p.offset[0], row % 32);
            u32 exist = there[0];
            if constexpr (kLookups > 1) {
                const i64 upper = __shfl_sync(0xffffffff, p.offset[1], row % 32);
                if (row >= 32) offset = upper, exist = there[1];
            }
            const bool exists = exist >> row % 32 & 1;
            if (kBlockKV % L::kDown == 0 || row < kBlockKV) {
#pragma unroll
                for (int g = 0; g < L::kGroups; g++) {
                    const int chunk = g * L::kAcross + chunk0;
                    const bool valid = exists && (Tile::kValidChunks == Tile::kChunks || chunk < Tile::kValidChunks);
                    const i64 at = valid ? offset + g * L::kAcross * across : 0;
                    cp_async_16(L::at(to, r, g), from + at, valid);
                }
            }
        }
    }

    // Scales of tokens, 4 bytes each.
    __device__ __forceinline__ void copy_scales(u32 to, const float* from, const Places& p,
                                                const u32 (&there)[kLookups]) const {
#pragma unroll
        for (int i = 0; i < kLookups; i++) {
            const int key = i * 32 + int(threadIdx.x) % 32;
            if (key < kBlockKV && threadIdx.x % kTeamThreads < 32) {
                cp_async_4(to + key * 4, from + p.scale[i], there[i] >> threadIdx.x % 32 & 1);
            }
        }
    }

    __device__ __forceinline__ void load(const KernelArgs& args, int block, u32 (&bad)[2]) const {
        const u32 buffer = stage * Layout::kStageBytes;
        const u32 scales = smem_address(&step_at(0, 0)) - Layout::kSteps + Layout::scales(team, stage);
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
        copy<TileK>(to_k + buffer, k, args.k_stride[3] * kCacheBytes, p, there);
        if (kScalePerToken) copy_scales(scales, args.k_scale + kv_head * args.k_scale_stride[1], p, there);
        p = places(v_id, token, args.v_stride, args.v_scale_stride);
        copy<TileV>(to_v + buffer, v, 16, p, there);
        const float* const v_scale = args.v_scale + kv_head * args.v_scale_stride[1];
        if (kScalePerToken) copy_scales(scales + kBlockKV * 4, v_scale, p, there);
    }
};
