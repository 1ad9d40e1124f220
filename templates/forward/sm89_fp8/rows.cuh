// Rows of a tile: where they lie, what the mask and NaN make of them, and how they leave.

__device__ __forceinline__ Tile this_tile(const KernelArgs& args) {
    return decode_tile<kBlockQ, kBlockMajor, kMaskRight>(args, block_index());
}

__device__ __forceinline__ const u8* row_of(const void* tensor, const i64 (&stride)[3], int batch, int head, int row) {
    return (const u8*)tensor + batch * stride[0] + head * stride[1] + row * stride[2];
}

#if FT_SCALES_OF_QUERIES
// The scale of a row of a tile; 1 of one that there is not.
__device__ __forceinline__ float query_descale(const KernelArgs& args, const Tile& tile, int row) {
    return row < tile.rows ? query_descales(args, tile).at(tile.row + row) : 1.0f;
}
#endif

// The rows of a tile that a thread has scores of.
__device__ __forceinline__ int row_of_thread(int i, int h) {
    return int(threadIdx.x) / 32 * kRowsPerWarp + i * 16 + h * 8 + int(threadIdx.x) % 32 / 4;
}

// From scores to units of log2, by row where rows of Q have scales.
__device__ __forceinline__ Factors factors_of(const KernelArgs& args, Tile tile, float scale) {
    Factors c;
#pragma unroll
    for (int row = 0; row < Factors::kCount; row++) {
#if FT_SCALES_OF_QUERIES
        const float of_row = scale * query_descale(args, tile, row_of_thread(row / 2, row % 2));
#else
        const float of_row = scale;
#endif
        c.of[row] = of_row == 0.0f ? kLog2E : fabsf(of_row) * kLog2E;
    }
    return c;
}

// Whether a scale of the tile is zero or below, or NaN. With scales of rows by all threads.
__device__ __forceinline__ bool any_not_positive(const KernelArgs& args, Tile tile, float scale) {
#if FT_SCALES_OF_QUERIES
    bool found = false;
#pragma unroll
    for (int row = 0; row < 2 * kMTiles; row++) {
        found |= !(scale * query_descale(args, tile, row_of_thread(row / 2, row % 2)) > 0.0f);
    }
    return __syncthreads_or(found);
#else
    return !(scale > 0.0f);
#endif
}

// Where a scale is zero or below, or NaN: maxima of the scores would be minima. Its sign moves into Q.
__device__ __forceinline__ void fold_sign_into_q(const KernelArgs& args, Tile tile, u32 smem_q, float scale) {
    TileQK::each_own_chunk<kBlockQ, kThreads>(smem_q, [&](u32 address) {
        uint4 x = load_shared_16(address);
        u32* words = &x.x;
#if FT_SCALES_OF_QUERIES
        const float of_row = scale * query_descale(args, tile, int(address - smem_q) / TileQK::kPitch);
        if (of_row > 0.0f) return;
#else
        const float of_row = scale;
#endif
#pragma unroll
        for (int w = 0; w < 4; w++) words[w] = of_row == 0.0f ? 0 : words[w] ^ 0x80808080;
        store_shared_16(address, x);
    });
}

#if FT_SCALES_OF_KEYS
// The scales of a block of keys to their stage; zeros of keys behind the last.
__device__ __forceinline__ void copy_key_scales(u32 to, const KernelArgs& args, const Descales<1>& scales, int key) {
    for (int i = threadIdx.x; i < kBlockKV; i += kThreads) {
        cp_async_4(to + 4 * i, scales.address(key + i), scales.from != nullptr && key + i < args.kv_len);
    }
}

// Scores times the scales of their keys, which are those of the columns.
__device__ __forceinline__ void scale_keys(Scores& s, u32 scales) {
    const u32 own = scales + threadIdx.x % 4 * 8;
#pragma unroll
    for (int j = 0; j < kSTiles; j++) {
        const float by[2] = {__uint_as_float(load_shared_4(own + 32 * j)),
                             __uint_as_float(load_shared_4(own + 32 * j + 4))};
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[i][j][e] *= by[e % 2];
        }
    }
}
#endif

// Replaces the scores of masked pairs by -inf; `key` is the block's first key.
__device__ __forceinline__ void mask_scores(Scores& s, const KernelArgs& args, int warp_row, int key) {
    const int lane = threadIdx.x % 32;
    const int column = key + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const KeyRange live = live_keys<kMaskLeft, kMaskRight>(args, warp_row + i * 16 + h * 8 + lane / 4);
            const int first = live.first - column, last = live.last - column;
#pragma unroll
            for (int j = 0; j < kSTiles; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int at = j * 8 + e;
                    if (at > last || (kMaskLeft && at < first)) s[i][j][2 * h + e] = -FT_INFINITY;
                }
            }
        }
    }
}

// Zero times NaN is NaN: NaN of a masked block of V become zeros, and restore_nan() gives them to the rows that attend
// to them. Each thread looks at what it copied. Returns whether there were any.
__device__ __forceinline__ bool take_out_nan(u32 smem_v) {
    u32 met = 0;
    TileV::each_own_chunk<kBlockKV, kThreads>(smem_v, [&](u32 address) {
        uint4 x = load_shared_16(address);
        u32* words = &x.x;
        u32 here = 0;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const u32 nan = nan_bytes(words[w]);
            words[w] &= ~((nan >> 7) * 0xff);
            here |= nan;
        }
        if (here != 0) store_shared_16(address, x);
        met |= here;
    });
    return met != 0;
}

// NaN of V in masked blocks, which did not take part, to the rows that attend to them: rare, so plain and slow.
__device__ __forceinline__ void restore_nan(const KernelArgs& args, const Tile& tile, const BlockRange& blocks,
                                            Output& o) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u8* const v = row_of(args.v, args.v_stride, tile.batch, tile.kv_head, 0) + lane % 4 * 4;
#pragma unroll
    for (int half = 0; half < 2 * kMTiles; half++) {
        const int i = half / 2, h = half % 2;
        const KeyRange live = live_keys<kMaskLeft, kMaskRight>(
            args, tile.row + warp * kRowsPerWarp + half * 8 + lane / 4);
#pragma unroll 1
        for (int key = live.first; key <= live.last; key++) {
            const int block = key / kBlockKV;
            if (block < blocks.full_end && !(kMaskLeft && block < blocks.full_begin)) continue;
#pragma unroll
            for (int group = 0; group < kGroupsV; group++) {
                const u32 nan = nan_bytes(*(const u32*)(v + key * args.v_stride[2] + 16 * group));
#pragma unroll
                for (int byte = 0; byte < 4; byte++) {
                    if (nan >> byte * 8 & 0x80)
                        o[i][2 * group + byte % 2][2 * h + byte / 2] = __int_as_float(0x7fffffff);
                }
            }
        }
    }
}

// O of a tile, and the log-sum-exp, to memory. A thread has four neighbouring columns of each 16: 4t and 4t + 2 are in
// the tile of the even ones, 4t + 1 and 4t + 3 in that of the odd ones.
__device__ __forceinline__ void write(const KernelArgs& args, const Tile& tile, const BlockRange& blocks,
                                      RowSoftmax& softmax, Output& o, const Factors& c, bool restore) {
    if (restore) restore_nan(args, tile, blocks, o);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if FT_SCALES_OF_CHANNELS
    const Descales<2> channels = channel_descales(args, tile);
    constexpr float v_scale = 1.0f;
#else
    const float v_scale = descale(args.v_descale, args.v_descale_stride, tile);
#endif
    const float of_o = output_scale<OutputElement>(args);
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float inverse, log_sum_exp;
            softmax.finish(i, h, c, inverse, log_sum_exp);
            const int row = warp * kRowsPerWarp + i * 16 + h * 8 + lane / 4;
            const bool live = row < tile.rows;
            if (!live && !kIsE4m3<OutputElement>) continue;
            const i64 at = tile.row + row;
            if (live && args.lse != nullptr && lane % 4 == 0) {
                args.lse[(i64(tile.batch) * args.heads + tile.head) * args.q_len + at] = log_sum_exp;
            }
            const float by = inverse * v_scale * of_o;
            OutputElement* const to = (OutputElement*)args.o + tile.batch * args.o_stride[0] +
                                      tile.head * args.o_stride[1] + at * args.o_stride[2] + lane % 4 * 4;
            store_columns<kGroupsV>(to, live, [&](int group, float (&columns)[4]) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    columns[n] = o[i][2 * group + n % 2][2 * h + n / 2] * by;
#if FT_SCALES_OF_CHANNELS
                    columns[n] *= channels.at(16 * group + lane % 4 * 4 + n);
#endif
                }
            });
        }
    }
}
