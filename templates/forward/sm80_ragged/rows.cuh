// The rows of a warp in a share: which query and head each is, which keys it sees, its part of Q, and what becomes of
// its scores.

// The scores' units: with a program natural ones, else those of the product.
struct Rows {
    int first_row, used;             // of the warp in the tile, and how many rows the tile has
    int q[kMTiles][2];               // query of each of this lane's
    int head_of[kMTiles][2];         // its head among those of the KV head
    KeyRange live[kMTiles][2];
    KeyRange full;                   // keys that every row of the tile sees by the window
    int q_first, q_last, q_len, kv_len;
    float magnitude, factor;         // to natural units, and from the scores' units to those of log2
    float up[kNarrowsQ ? kMTiles : 1][2];  // what a row of Q was divided by
    int sequence, kv_head, group;
#if FT_PROGRAM
    ProgramHead head[kMTiles][2];
    ProgramKept kept[kMTiles][2];
#endif
    bool flipped, zero;

    __device__ __forceinline__ void begin(const KernelArgs& args, Group of, const Share& share) {
        const int lane = threadIdx.x % 32;
        first_row = threadIdx.x / 32 % kRowWarps * kRowsPerWarp, used = share.rows;
        sequence = share.sequence, kv_head = share.kv_head, group = int(of.by);
        q_len = share.q_len, kv_len = share.kv_len;
        const i64 tile_row = i64(share.tile) * kRows;
        q_first = int(of.quotient(tile_row)), q_last = int(of.quotient(tile_row + share.rows - 1));
        full.first = live_keys<kMaskLeft, kMaskRight>(share, q_last).first;
        full.last = live_keys<kMaskLeft, kMaskRight>(share, q_first).last;
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // Rows behind the last repeat it: nobody reads what comes out.
                const int r = min_of(first_row + i * 16 + h * 8 + lane / 4, share.rows - 1);
                q[i][h] = int(of.quotient(tile_row + r));
                head_of[i][h] = int(tile_row + r - i64(q[i][h]) * group);
                live[i][h] = live_keys<kMaskLeft, kMaskRight>(share, q[i][h]);
#if FT_PROGRAM
                const int of_q = kv_head * group + head_of[i][h];
                head[i][h] = ProgramHead{&args.side, sequence, of_q, kv_head, q_len, kv_len};
                kept[i][h] = program_kept(head[i][h]);
#endif
            }
        }
        float scale = args.scale * query_scale<Element>(args, sequence, kv_head);
        if (kScaled && !kScalePerToken && args.k_scale != nullptr) {
            scale *= args.k_scale[sequence * args.k_scale_stride[0] + kv_head * args.k_scale_stride[1]];
        }
        // A scale of zero or below turns maxima of the scores into minima: its sign goes into Q.
        flipped = scale < 0.0f, zero = scale == 0.0f;
        magnitude = zero ? 1.0f : fabsf(scale);
        factor = kProgramScore ? kLog2E : magnitude * kLog2E;
    }

    // Where this lane's columns of its row h of tile i begin in Q. A quantised step has a lane's four columns side by
    // side.
    __device__ __forceinline__ const QueryBits* q_row(const KernelArgs& args, const Share& share, int i, int h) const {
        const i64 batch = args.q_begin == nullptr ? sequence * args.q_stride[0] : 0;
        return (const QueryBits*)args.q + batch + (kv_head * group + head_of[i][h]) * args.q_stride[1] +
               (share.q_row + q[i][h]) * args.q_stride[2] + threadIdx.x % 4 * (kScaled ? 4 : 2);
    }

    // Two elements of a row of Q for half a matrix step. Zeros behind the row's end, which only a last step has.
    static __device__ __forceinline__ u32 q_pair(const QueryBits* from, int step, int half) {
        const int column = step * 16 + half * (kScaled ? 2 : 8);
        const int first = threadIdx.x % 4 * (kScaled ? 4 : 2);
        const bool there = (kHeadDimQK % 16 == 0 && kStepsQK * 16 == kHeadDimQK) || first + column < kHeadDimQK;
        return there ? query_pair(from + column) : 0;
    }

    // Asks for Q. Nothing waits for it before finish_q().
    __device__ __forceinline__ void load_q(const KernelArgs& args, const Share& share, QueryFragments& f) const {
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const QueryBits* const from = q_row(args, share, i, h);
#pragma unroll
                for (int step = 0; step < kStepsQK; step++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) f[step][i][2 * half + h] = q_pair(from, step, half);
                }
            }
        }
    }

    // Q with the sign of the scale, and narrowed.
    __device__ __forceinline__ void finish_q(QueryFragments& f) {
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float largest = 0.0f;
                if (kNarrowsQ) {
#pragma unroll
                    for (int step = 0; step < kStepsQK; step++) {
                        largest = largest_of(largest_of(largest, f[step][i][h]), f[step][i][2 + h]);
                    }
                }
                const float down = begin_row(i, h, largest);
#pragma unroll
                for (int step = 0; step < kStepsQK; step++) {
                    f[step][i][h] = changed_pair(f[step][i][h], down);
                    f[step][i][2 + h] = changed_pair(f[step][i][2 + h], down);
                }
            }
        }
    }

    // The same through shared memory, a few registers at a time: from global memory twice where rows are narrowed. By
    // one team, for all; the others take note of what rows are divided by.
    __device__ __forceinline__ void share_q(const KernelArgs& args, const Share& share, u32 to, bool stores) {
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
            const QueryBits* const from[2] = {q_row(args, share, i, 0), q_row(args, share, i, 1)};
            float largest[2] = {0.0f, 0.0f}, down[2];
            if (kNarrowsQ) {
#pragma unroll 4
                for (int step = 0; step < kStepsQK; step++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        largest[e % 2] = largest_of(largest[e % 2], q_pair(from[e % 2], step, e / 2));
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) down[h] = begin_row(i, h, largest[h]);
            if (!stores) continue;
#pragma unroll 4
            for (int step = 0; step < kStepsQK; step++) {
                u32 f[4];
#pragma unroll
                for (int e = 0; e < 4; e++) f[e] = changed_pair(q_pair(from[e % 2], step, e / 2), down[e % 2]);
                store_shared_16(to + (step * kMTiles + i) * 512, make_uint4(f[0], f[1], f[2], f[3]));
            }
        }
    }

    // The larger of a magnitude and those of two bf16; not of what is no number, which stays what it is.
    static __device__ __forceinline__ float largest_of(float largest, u32 pair) {
        const float low = fabsf(__uint_as_float(pair << 16)), high = fabsf(__uint_as_float(pair & 0xffff0000));
        if (low < FT_INFINITY) largest = fmaxf(largest, low);
        return high < FT_INFINITY ? fmaxf(largest, high) : largest;
    }

    // What a row whose largest element is `largest` is multiplied by, to be f16: less the exponent of that.
    __device__ __forceinline__ float begin_row(int i, int h, float largest) {
        if constexpr (!kNarrowsQ) return 1.0f;
        largest = quad_max(largest);
        // From 2^-126 to 2^126: both powers are normal numbers.
        const int exponent = min_of(max_of(int(__float_as_uint(largest) >> 23), 1), 253);
        up[kNarrowsQ ? i : 0][h] = __uint_as_float(u32(exponent) << 23);
        return __uint_as_float(u32(254 - exponent) << 23);
    }
    __device__ __forceinline__ u32 changed_pair(u32 pair, float down) const {
        pair = zero ? 0 : pair ^ (flipped ? 0x80008000 : 0);
        if constexpr (!kNarrowsQ) return pair;
        return pack<f16>(__uint_as_float(pair << 16) * down, __uint_as_float(pair & 0xffff0000) * down);
    }

    // Whether some row of the tile does not see some key of the block. The same for all warps of a team.
    __device__ __forceinline__ bool needs_mask(const KernelArgs& args, const Step& now) const {
        const int first = now.block * kBlockKV, last = first + kBlockKV - 1;
        bool masked = first < full.first || last > full.last || (now.bad[0] | now.bad[1]) != 0;
#if FT_PROGRAM
        if (kProgramMask && !masked) {
            const ProgramHead of_tile = {&args.side, sequence, kv_head * group, kv_head, q_len, kv_len};
            masked = kMaskOfHeads || program_tile(of_tile, q_first, q_last, first, last) <= 0;
        }
#endif
        return masked;
    }

    __device__ __forceinline__ bool sees(int i, int h, int key, const Step& now) const {
        const int offset = key - now.block * kBlockKV;
        if (key < live[i][h].first || key > live[i][h].last || (now.bad[offset / 32] >> offset % 32 & 1)) return false;
#if FT_PROGRAM
        return program_visible(head[i][h], q[i][h], key);
#else
        return true;
#endif
    }

    // From products to scores: scales of tokens and of narrowed rows, the program, masks.
    __device__ __forceinline__ void change(Scores& s, const Step& now, bool masked, u32 scales) {
        const int t = threadIdx.x % 4, key = now.block * kBlockKV + 2 * t;
        if constexpr (kScalePerToken || kNarrowsQ) {
#pragma unroll
            for (int j = 0; j < kSTiles; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const u32 at = scales + (j * 8 + 2 * t + e) * 4;
                    const float token = kScalePerToken ? __uint_as_float(load_shared_4(at)) : 1.0f;
#pragma unroll
                    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            s[i][j][2 * h + e] *= kNarrowsQ ? token * up[kNarrowsQ ? i : 0][h] : token;
                        }
                    }
                }
            }
        }
#if FT_PROGRAM
        if (kProgramScore || (masked && kProgramMask)) {
            const int last = kv_len - 1 - key;
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const ProgramHead& at = head[i][h];
                    const ScoreRow score = score_row(at, kept[i][h].score, q[i][h], key, magnitude);
                    const MaskRow mask = mask_row(at, kept[i][h].mask, q[i][h], key);
#pragma unroll
                    for (int j = 0; j < kSTiles; j++) {
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            // Keys behind the last repeat it: no index leaves a tensor.
                            const int offset = min_of(8 * j + e, last);
                            float& x = s[i][j][2 * h + e];
                            if (kProgramScore) {
                                x = score_element(at, kept[i][h].score, score, q[i][h], key, offset, x, magnitude);
                            }
                            if (kProgramMask && masked) {
                                const bool sees = mask_element(at, kept[i][h].mask, mask, q[i][h], key, offset);
                                if (!sees) x = -FT_INFINITY;
                            }
                        }
                    }
                }
            }
        }
#endif
        if (masked) {
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int first = live[i][h].first - key, last = live[i][h].last - key;
#pragma unroll
                    for (int j = 0; j < kSTiles; j++) {
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int offset = 8 * j + 2 * t + e;
                            const bool bad = now.bad[offset / 32 % 2] >> offset % 32 & 1;
                            if (8 * j + e > last || 8 * j + e < first || bad) s[i][j][2 * h + e] = -FT_INFINITY;
                        }
                    }
                }
            }
        }
    }

    // Zero times NaN is NaN: a NaN or infinity of V in a masked block would reach rows that do not see it. Such
    // elements are added to the rows that do, and become zeros. Rare, so plain and slow.
    __device__ __forceinline__ void take_out_non_finite(Output& o, u32 tile_v, const Step& now, int team) const {
        if constexpr (kOnlyNumbers<CacheElement>) return;
        constexpr int kTileChunks = kBlockKV * TileV::kChunks;
        bool any = false;
        for (int i = threadIdx.x % 32; i < kTileChunks; i += 32) {
            const uint4 x = load_shared_16(tile_v + i * 16);
            any |= chunk_has_non_finite(x);
        }
        if (!__any_sync(0xffffffff, any)) return;
        add_non_finite(o, tile_v, now);
        team_sync(team);  // everyone has seen them
        for (int i = threadIdx.x % kTeamThreads; i < kTileChunks; i += kTeamThreads) {
            uint4 x = load_shared_16(tile_v + i * 16);
            u32* words = &x.x;
#pragma unroll
            for (int w = 0; w < 4; w++) {
#pragma unroll
                for (int n = 0; n < 4 / kCacheBytes; n++) {
                    constexpr u32 kBits = kCacheBytes == 1 ? 0xff : 0xffff;
                    const int shift = n * 8 * kCacheBytes;
                    if (is_non_finite<CacheElement>(words[w] >> shift & kBits)) words[w] &= ~(kBits << shift);
                }
            }
            store_shared_16(tile_v + i * 16, x);
        }
        team_sync(team);
    }

    static __device__ __forceinline__ bool chunk_has_non_finite(uint4 x) {
        const u32* words = &x.x;
        bool any = false;
#pragma unroll
        for (int w = 0; w < 4; w++) {
#pragma unroll
            for (int n = 0; n < 4 / kCacheBytes; n++) {
                constexpr u32 kBits = kCacheBytes == 1 ? 0xff : 0xffff;
                any |= is_non_finite<CacheElement>(words[w] >> n * 8 * kCacheBytes & kBits);
            }
        }
        return any;
    }

    __device__ __forceinline__ void add_non_finite(Output& o, u32 tile_v, const Step& now) const {
#pragma unroll 1
        for (int n = 0; n < kBlockKV; n++) {
            const int key = now.block * kBlockKV + n;
#pragma unroll
            for (int j = 0; j < kOTiles; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int byte = column_of(j, e) * kCacheBytes;
                    const u32 word = load_shared_4(tile_v + TileV::offset(n, byte / 16) + byte % 16 / 4 * 4);
                    const u32 bits = word >> byte % 4 * 8 & (kCacheBytes == 1 ? 0xff : 0xffff);
                    if (!is_non_finite<CacheElement>(bits)) continue;
#pragma unroll
                    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            if (sees(i, h, key, now)) o[i][j][2 * h + e] += value_of<CacheElement>(bits);
                        }
                    }
                }
            }
        }
    }
};

// Probabilities times the scales of their tokens of V, in units of a power of two that is no less than any scale so
// far: what f16 has room for. O goes along when it grows.
__device__ __forceinline__ void scale_probabilities(Scores& p, Output& o, float& reference, u32 scales) {
    if constexpr (kScalePerToken) {
        const int t = threadIdx.x % 4;
        float token[kSTiles][2], largest = 0.0f;
#pragma unroll
        for (int j = 0; j < kSTiles; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                token[j][e] = __uint_as_float(load_shared_4(scales + (j * 8 + 2 * t + e) * 4));
                largest = fmaxf(largest, fabsf(token[j][e]));
            }
        }
        largest = quad_max(largest);
        if (largest > reference) {
            const int exponent = min_of(int(__float_as_uint(largest) >> 23) + 1, 253);
            const float to = __uint_as_float(u32(max_of(exponent, 1)) << 23), less = reference / to;
            reference = to;
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
#pragma unroll
                for (int j = 0; j < kOTiles; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) o[i][j][e] *= less;
                }
            }
        }
        const float inverse = reference == 0.0f ? 0.0f : 1.0f / reference;
#pragma unroll
        for (int j = 0; j < kSTiles; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
#pragma unroll
                for (int i = 0; i < kMTiles; i++) {
                    p[i][j][e] *= token[j][e] * inverse, p[i][j][2 + e] *= token[j][e] * inverse;
                }
            }
        }
    }
}
