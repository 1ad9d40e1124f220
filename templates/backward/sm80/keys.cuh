// The second stage: dK and dV of a block of keys, by the queries that see them.

// The block of keys of a thread block, and which part of its columns.
struct KeyBlock {
    int batch, kv_head, key, part;
    // With a bounded right side the first keys are seen most, and go first.
    __device__ __forceinline__ explicit KeyBlock(const KernelArgs& args) {
        const u32 number = block_index(), index = number / kParts;
        const u32 pairs = u32(args.batch) * u32(args.kv_heads),
                  blocks = (u32(args.kv_len) + kBlockKeys - 1) / kBlockKeys;
        const u32 pair = kBlockMajor ? index % pairs : index / blocks;
        batch = int(pair / u32(args.kv_heads)), kv_head = int(pair % u32(args.kv_heads));
        key = int(kBlockMajor ? index / pairs : index % blocks) * kBlockKeys;
        part = int(number % kParts);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    @{ entry }@_keys(const __grid_constant__ KernelArgs FT_CALL) {
    extern __shared__ __align__(128) u8 smem[];
    constexpr int kM = kKeyRows / 16, kTiles = kStepQ / 8;
    using Layout = KeysLayout;
    using PartQK = Part<TileQK, kParts>;
    using PartV = Part<TileV, kParts>;
    using P = Places<true, kM, kTiles>;
    const u32 smem_k = smem_address(smem), smem_v = smem_k + Layout::kV, stages = smem_k + Layout::kStages;

    const KeyBlock block(FT_CALL);
    const int batch = block.batch, kv_head = block.kv_head, key = block.key, part = block.part;
    FT_SEQUENCE(args, batch);
    if (kPacked && key >= args.kv_len) return;
    const int keys = min_of(kBlockKeys, args.kv_len - key);
    copy_tile<TileQK, kBlockKeys>(smem_k, rows_of((const u16*)args.k, args.k_stride, batch, kv_head, key),
                                  args.k_stride[2], keys);
    copy_tile<TileV, kBlockKeys>(smem_v, rows_of((const u16*)args.v, args.v_stride, batch, kv_head, key),
                                 args.v_stride[2], keys);

    // Queries of the group that the window lets see any of the keys.
    const auto range = [&]() {
        const i64 diagonal = i64(args.kv_len) - args.q_len;
        const int keys = min_of(kBlockKeys, args.kv_len - key);
        const int first =
            kMaskRight ? int(min_of<i64>(max_of<i64>(0, key - diagonal - args.window_right), args.q_len)) : 0;
        const int last =
            kMaskLeft ? int(max_of<i64>(0, min_of<i64>(args.q_len, key + keys - diagonal + args.window_left)))
                      : args.q_len;
        return Range{first / kStepQ, div_up(last, kStepQ), (kv_head + 1) * (args.heads / args.kv_heads)};
    };
    Walk walk(kv_head * (args.heads / args.kv_heads), range());
    const auto head_of = [&](int h) { return program_head(args, args, Tile{batch, h, kv_head, 0, 0}); };
    const auto kind = [&](int h, int n) {
        return tile_kind(args, head_of(h), n * kStepQ, n * kStepQ + kStepQ - 1, key, key + kBlockKeys - 1);
    };
    const auto copy = [&](int stage) {
        const u32 to = stages + stage * Layout::kStage;
        const int row = walk.tile() * kStepQ, rows = args.q_len - row;
        const auto from = [&](const void* tensor, const i64(&stride)[3]) {
            return rows_of((const u16*)tensor, stride, batch, walk.head, row);
        };
        copy_tile<TileQK, kStepQ>(to, from(args.q, args.q_stride), args.q_stride[2], rows);
        copy_tile<TileV, kStepQ>(to + Layout::kDout, from(args.dout, args.dout_stride), args.dout_stride[2], rows);
        const u16* statistics = from(args.dq, args.dq_stride);
        constexpr int kWords = kBytesStatistics / 4;
#pragma unroll
        for (int i = 0; i < kWords * kStepQ; i += kThreads) {
            const int word = i + threadIdx.x;
            if (kWords * kStepQ % kThreads == 0 || word < kWords * kStepQ)
                cp_async_4(to + Layout::kStatistics + word * 4,
                           statistics + word / kWords * args.dq_stride[2] + word % kWords * 2, word / kWords < rows);
        }
    };
    // The next step's tiles come while this one is computed, or behind it where there is one stage.
    bool more = walk.next(range, kind);
    if (more) copy(0);
    cp_async_commit();

    // Zero times NaN is NaN, so what pairs that take no part meet is looked after where there are such elements.
    cp_async_wait<0>();
    const bool stays_bad = __syncthreads_or(met_non_finite<TileQK, kBlockKeys>(smem_k) |
                                            met_non_finite<TileV, kBlockKeys>(smem_v));

    Accumulator<kM, PartQK::kColumns> dk;
    Accumulator<kM, PartV::kColumns> dv;
    clear(dk), clear(dv);
    int stage = 0;
#pragma unroll 1
    while (more) {
        const Visit visit = walk;
        const u32 smem_q = stages + stage * Layout::kStage, smem_dout = smem_q + Layout::kDout;
        cp_async_wait<0>();
        __syncthreads();  // this step's tiles are here, and everyone is done with the stage that is filled next
        if (kStagesQ > 1) {
            more = walk.next(range, kind);
            if (more) copy(stage ^ 1);
            cp_async_commit();
        }

        Accumulator<kM, kStepQ> s, dp;
        multiply<TileQK>(s, lane_down<TileQK>(smem_k, threadIdx.x / 32 * kKeyRows), lane_across<TileQK>(smem_q));
        multiply<TileV>(dp, lane_down<TileV>(smem_v, threadIdx.x / 32 * kKeyRows), lane_across<TileV>(smem_dout));
        const bool bad = __any_sync(0xffffffff, stays_bad || met_non_finite(s) || met_non_finite(dp));
        if (bad && !kProgramScore) turn_gone(s, args.scale);
#if FT_DROPOUT
        Kept<kM, kTiles> kept;
        find_kept<true, kM, kTiles>(kept, dropout_of(args), dropout_pair(args, batch, visit.head),
                                    visit.tile() * kStepQ + P::across(), key + P::down());
        keep<kM, kTiles>(dp, kept, args.dropout_scale);
#endif
        const u32 statistics = smem_q + Layout::kStatistics + P::across() * kBytesStatistics;
        weigh<true>(s, dp, args, head_of(visit.head), visit.tile() * kStepQ + P::across(), key + P::down(),
                    visit.cut(), [&](int a) {
            const uint4 x = load_shared_16(statistics + 8 * a * kBytesStatistics);
            const auto number = [](u32 bits) { return __uint_as_float(bits); };
            if (kProgramFar) {
                const uint4 y = load_shared_16(statistics + (8 * a + 1) * kBytesStatistics);
                return Statistics{{number(x.x), number(y.x)}, {number(x.y), number(y.y)}, {number(x.z), number(y.z)}};
            }
            return Statistics{{number(x.x), number(x.z)}, {number(x.y), number(x.w)}};
        });
        u32 parts[kM][2];
        if (bad) {
            if (!kProgramScore) drop_gone(s, dp);
            take_parts(parts, s);
        }
        Weights<kM, kTiles> p, ds;
#if FT_DROPOUT
        keep<kM, kTiles>(s, kept, 1.0f);
#endif
        round_weights(p, s);
        round_weights(ds, dp);
        const u32 columns_q = PartQK::at(lane_columns<TileQK>(smem_q), part);
        const u32 columns_dout = PartV::at(lane_columns<TileV>(smem_dout), part);
        if (bad) {
            mark_non_finite<TileV, PartV, kStepQ>(dv, parts, smem_dout, part);
            mark_non_finite<TileQK, PartQK, kStepQ>(dk, parts, smem_q, part);
            add_products<true, TileV, PartV>(dv, p, columns_dout, part);
            add_products<true, TileQK, PartQK>(dk, ds, columns_q, part);
        } else {
            add_products<false, TileQK, PartQK>(dk, ds, columns_q, part);
            add_products<false, TileV, PartV>(dv, p, columns_dout, part);
        }
        if (kStagesQ > 1) {
            stage ^= 1;
        } else {
            __syncthreads();  // everyone is done with the one stage
            more = walk.next(range, kind);
            if (more) copy(0);
            cp_async_commit();
        }
    }
    cp_async_wait<0>();

    const KeyBlock to(FT_CALL);  // again, so that the loop need not keep it
    {
        FT_SEQUENCE(args, to.batch);
        const int row = to.key + threadIdx.x / 32 * kKeyRows, rows = args.kv_len - row;
        u16* to_k = rows_of((u16*)args.dk, args.dk_stride, to.batch, to.kv_head, row);
        u16* to_v = rows_of((u16*)args.dv, args.dv_stride, to.batch, to.kv_head, row);
        store_rows<PartQK, kHeadDimQK>(to_k, args.dk_stride[2], dk, rows, to.part, args.scale);
#if FT_DROPOUT
        store_rows<PartV, kHeadDimV>(to_v, args.dv_stride[2], dv, rows, to.part, args.dropout_scale);
#else
        store_rows<PartV, kHeadDimV>(to_v, args.dv_stride[2], dv, rows, to.part, 1.0f);
#endif
    }
}
