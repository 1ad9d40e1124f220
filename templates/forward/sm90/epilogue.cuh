// O of a consumer's rows on its way out: normalised, staged in shared memory, and with what must not have been
// multiplied.

struct OutputRows {
    const KernelArgs& args;
    const u32 smem;
    const int id;     // of the consumer
    const int place;  // of the tile (recompute.cuh)

    static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / 32; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

    // Normalises O into shared memory, in the copy engine's layout, and writes the log-sum-exp.
    __device__ __forceinline__ void stage(Output& o, const Tile& tile, const RowResults& rows, u32 to) const {
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
            for (int j = 0; j < kColumnsV / 8; j++)
                o[4 * j + 2 * h] *= rows.inverse[h], o[4 * j + 2 * h + 1] *= rows.inverse[h];
            // Scores that a program makes -inf have no part in O, and a NaN of V would have.
            if (kMarkEmpty && rows.empty[h]) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < kColumnsV / 8; j++) {
                    sum += o[4 * j + 2 * h] * 0.0f + o[4 * j + 2 * h + 1] * 0.0f;
                    o[4 * j + 2 * h] = o[4 * j + 2 * h + 1] = 0.0f;
                }
                if (kOptimistic && sum != 0.0f) mark_again(smem, place);
            }
        }
#if FT_RESIDUAL
        write_residual(o, tile);
#endif
        const int to_row = warp() * 16 + lane() % 16;
#pragma unroll
        for (int j = 0; j < kColumnsV / 16; j++) {
            const float* x = o + 8 * j;
            const u32 chunk = u32(j % 4 * 2 + lane() / 16) ^ (to_row % 8);
            stmatrix_x4(to + j / 4 * kBytes64Rows + to_row * 128 + (chunk << 4), pack<Element>(x[0], x[1]),
                        pack<Element>(x[2], x[3]), pack<Element>(x[4], x[5]), pack<Element>(x[6], x[7]));
        }
    }

#if FT_RESIDUAL
    // What O loses by rounding, straight to memory: 16 bytes of a row from four threads.
    __device__ __forceinline__ void write_residual(const Output& o, const Tile& tile) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int packed = id * 64 + warp() * 16 + lane() / 4 + h * 8, at = tile.row + packed;
            if (packed >= tile.rows) continue;
            const int head = (tile.head << args.group_shift) + (at & ((1 << args.group_shift) - 1));
            bf16* const to = residual_row(args.forward, tile.batch, head, at >> args.group_shift) + lane() % 4 * 2;
#pragma unroll
            for (int j = 0; j < kHeadDimV / 8; j++) {
                const float x = o[4 * j + 2 * h], y = o[4 * j + 2 * h + 1];
                *(u32*)(to + j * 8) = pack_lost<Element>(x, y, pack<Element>(x, y));
            }
        }
    }
#endif

    // Which rows attend to nothing, one of four bits for each.
    __device__ __forceinline__ u32 empty_rows() const { return Layout::empty_rows_at(smem, id); }
    __device__ __forceinline__ void mark_empty(const RowResults& rows) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 empty = __ballot_sync(0xffffffff, rows.empty[h]);
            if (lane() == 0) store_shared_4(empty_rows() + (warp() * 2 + h) * 4, empty);
        }
    }
    __device__ __forceinline__ bool is_empty(int row) const {
        return load_shared_4(empty_rows() + row / 8 * 4) >> row % 8 * 4 & 1;
    }

    // Adds the non-finite elements of V in masked blocks to the outputs that attend to them, in the staged O: rare, so
    // plain and slow.
    __device__ __forceinline__ void restore_non_finite(const Work& work, u32 to) const {
        const Tile& tile = work.tile;
        const Element* v = (const Element*)args.forward.v + tile.batch * args.forward.v_stride[0] +
                           tile.kv_head * args.forward.v_stride[1];
#if FT_DROPOUT
        const Dropout dropout = dropout_of(args.forward);
#endif
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < 64 * kHeadDimV; i += 128) {
            const int row = i / kHeadDimV, column = i % kHeadDimV;
            if (id * 64 + row >= tile.rows) break;
            if (kMarkEmpty && is_empty(row)) continue;
            const int position = (tile.row + id * 64 + row) >> args.group_shift;
#if FT_DROPOUT
            // What is not finite is asked for alone; times a weight of zero it is NaN.
            bool is_dropped = false;
            const int member = (tile.row + id * 64 + row) & ((1 << args.group_shift) - 1);
            const u32 pair = dropout_pair(args.forward, tile.batch, (tile.head << args.group_shift) + member);
            const auto visible = [&](int key) {
                const bool seen = program_visible(program_head(args, args.forward, tile), position, key);
                is_dropped |= seen && !keeps_score(dropout, pair, position, key);
                return seen;
            };
#else
            const auto visible = [&](int key) {
                return program_visible(program_head(args, args.forward, tile), position, key);
            };
#endif
            float add = 0.0f;
            if constexpr (kLists) {
#pragma unroll 1
                for (int place = work.all.full_end; place < work.all.end; place++) {
                    add += sum_of_block<kBlockKV, kMaskLeft, kMaskRight>(args.forward, v + column, position,
                                                                         block_at(args, tile, work.all, place),
                                                                         visible);
                }
            } else {
                const Element* const first = v + column;
                const auto element = [&](int key) { return to_float(first[key * args.forward.v_stride[2]]); };
                add = sum_of_non_finite<kBlockKV, kMaskLeft, kMaskRight>(args.forward, element, position, work.all,
                                                                         visible);
            }
#if FT_DROPOUT
            if (is_dropped) add = __int_as_float(0x7fc00000);
#endif
            if (add != 0.0f) {
                const u32 chunk = u32(column % 64 / 8) ^ (row % 8);
                const u32 at = to + column / 64 * kBytes64Rows + row * 128 + (chunk << 4) + column % 8 * 2;
                store_shared(at, from_float<Element>(to_float(load_shared<Element>(at)) + add));
            }
        }
    }

    // Has the copy engine take it to memory. For one thread.
    __device__ __forceinline__ void send(const Tile& tile, u32 from) const {
        if (id * 64 < tile.rows) {
#pragma unroll
            for (int chunk = 0; chunk < kChunksV; chunk++) {
                tma_store(args.o, from + chunk * kBytes64Rows, chunk * 64, 0, (tile.row + id * 64) >> args.group_shift,
                          tile.head, tile.batch);
            }
        }
        tma_store_commit();
    }
};
