// The last stage: dQ of a block of queries, by the keys that they see.

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    @{ entry }@(const __grid_constant__ KernelArgs FT_CALL) {
    extern __shared__ __align__(128) u8 smem[];
    constexpr int kM = kQueryRows / 16, kTiles = kStepKV / 8;
    using Layout = QueriesLayout;
    using Whole = Part<TileQK, 1>;
    using P = Places<false, kM, kTiles>;
    const u32 smem_q = smem_address(smem), smem_dout = smem_q + Layout::kDout, stages = smem_q + Layout::kStages;
    const int warp = threadIdx.x / 32;
    Tile tile = decode_tile<kBlockQueries, kBlockMajor, kMaskRight>(FT_CALL, block_index());
    FT_SEQUENCE(args, tile.batch);
    if (kPacked && !has_rows(args, tile, kBlockQueries)) return;
    const ProgramHead head = program_head(args, args, tile);

    const auto rows = [&](const void* tensor, const i64(&stride)[3]) {
        return rows_of((const u16*)tensor, stride, tile.batch, tile.head, tile.row);
    };
    copy_tile<TileQK, kBlockQueries>(smem_q, rows(args.q, args.q_stride), args.q_stride[2], tile.rows);
    copy_tile<TileV, kBlockQueries>(smem_dout, rows(args.dout, args.dout_stride), args.dout_stride[2], tile.rows);

    // dQ has what the first stage left there, until this block writes it.
    Statistics statistics[kM];
#pragma unroll
    for (int i = 0; i < kM; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = P::down() + P::query(i, h);
            const float* from = (const float*)(rows(args.dq, args.dq_stride) + row * args.dq_stride[2]);
            statistics[i].lse[h] = row < tile.rows ? from[0] : kEmpty;
            statistics[i].delta[h] = row < tile.rows ? from[1] : 0.0f;
            if (kProgramFar) statistics[i].first[h] = row < tile.rows ? from[2] : 0.0f;
        }
    }

    const auto range = [&]() {
        const BlockRange blocks = visit_blocks<kStepKV, kMaskLeft, kMaskRight>(args, tile);
        return Range{blocks.begin, blocks.end, tile.head + 1};
    };
    Walk walk(tile.head, range());
    const auto kind = [&](int, int n) {
        return tile_kind(args, head, tile.row, tile.row + tile.rows - 1, n * kStepKV, n * kStepKV + kStepKV - 1);
    };
    const auto copy = [&](int stage) {
        const u32 to = stages + stage * Layout::kStage;
        const int key = walk.tile() * kStepKV, keys = args.kv_len - key;
        const auto from = [&](const void* tensor, const i64(&stride)[3]) {
            return rows_of((const u16*)tensor, stride, tile.batch, tile.kv_head, key);
        };
        copy_tile<TileQK, kStepKV>(to, from(args.k, args.k_stride), args.k_stride[2], keys);
        copy_tile<TileV, kStepKV>(to + Layout::kV, from(args.v, args.v_stride), args.v_stride[2], keys);
    };
    // The next step's tiles come while this one is computed, or behind it where there is one stage.
    bool more = walk.next(range, kind);
    if (more) copy(0);
    cp_async_commit();

    // As for keys.
    cp_async_wait<0>();
    const bool stays_bad = __syncthreads_or(met_non_finite<TileQK, kBlockQueries>(smem_q) |
                                            met_non_finite<TileV, kBlockQueries>(smem_dout));

    Accumulator<kM, Whole::kColumns> dq;
    clear(dq);
    const u32 down_q = lane_down<TileQK>(smem_q, warp * kQueryRows),
              down_dout = lane_down<TileV>(smem_dout, warp * kQueryRows);
    int stage = 0;
#pragma unroll 1
    while (more) {
        const Visit visit = walk;
        const u32 smem_k = stages + stage * Layout::kStage, smem_v = smem_k + Layout::kV;
        cp_async_wait<0>();
        __syncthreads();  // this step's tiles are here, and everyone is done with the stage that is filled next
        if (kStagesKV > 1) {
            more = walk.next(range, kind);
            if (more) copy(stage ^ 1);
            cp_async_commit();
        }

        Accumulator<kM, kStepKV> s, dp;
        multiply<TileQK>(s, down_q, lane_across<TileQK>(smem_k));
        multiply<TileV>(dp, down_dout, lane_across<TileV>(smem_v));
        const bool bad = __any_sync(0xffffffff, stays_bad || met_non_finite(s));
        if (bad && !kProgramScore) turn_gone(s, args.scale);
#if FT_DROPOUT
        Kept<kM, kTiles> kept;
        find_kept<false, kM, kTiles>(kept, dropout_of(args), dropout_pair(args, tile.batch, tile.head),
                                     tile.row + P::down(), visit.tile() * kStepKV + P::across());
        keep<kM, kTiles>(dp, kept, args.dropout_scale);
#endif
        weigh<false>(s, dp, args, head, tile.row + P::down(), visit.tile() * kStepKV + P::across(), visit.cut(),
                     [&](int i) { return statistics[i]; });
        u32 parts[kM][2];
        if (bad) {
            if (!kProgramScore) drop_gone(s, dp);
            take_parts(parts, s);
        }
        Weights<kM, kTiles> ds;
        round_weights(ds, dp);
        const u32 columns = lane_columns<TileQK>(smem_k);
        if (bad) {
            mark_non_finite<TileQK, Whole, kStepKV>(dq, parts, smem_k, 0);
            add_products<true, TileQK, Whole>(dq, ds, columns, 0);
        } else {
            add_products<false, TileQK, Whole>(dq, ds, columns, 0);
        }
        if (kStagesKV > 1) {
            stage ^= 1;
        } else {
            __syncthreads();  // everyone is done with the one stage
            more = walk.next(range, kind);
            if (more) copy(0);
            cp_async_commit();
        }
    }
    cp_async_wait<0>();

    // Statistics of a row lie with the first of its columns: its warp's lanes read them before any of them writes.
    __syncwarp();
    Tile to = decode_tile<kBlockQueries, kBlockMajor, kMaskRight>(FT_CALL, block_index());  // again
    {
        FT_SEQUENCE(args, to.batch);
        if (kPacked) has_rows(args, to, kBlockQueries);
        const int row = threadIdx.x / 32 * kQueryRows;
        u16* rows_to = rows_of((u16*)args.dq, args.dq_stride, to.batch, to.head, to.row + row);
        store_rows<Whole, kHeadDimQK>(rows_to, args.dq_stride[2], dq, to.rows - row, 0, args.scale);
    }
}
