// Follows forward/sm90/epilogue.cuh, whose fixes belong here too. Apart, since the machine code of 20 of 40 dense
// kernels changed when both families shared this text.
//
// O of a consumer's rows on its way out: normalised, staged in shared memory, and with what must not have been
// multiplied.

// As `sum_of_non_finite` of dense tensors, with the lengths of the tile's sequence.
template <int kBlockKV, bool kMaskLeft, bool kMaskRight, typename Column, typename Visible>
__device__ __forceinline__ float sum_of_non_finite(const Lengths& lengths, const Column& column, int row,
                                                   const BlockRange& blocks, const Visible& visible) {
    const KeyRange live = live_keys<kMaskLeft, kMaskRight>(lengths, row);
    float sum = 0.0f;
#pragma unroll 1
    for (int j = live.first; j <= live.last; j++) {
        const int block = j / kBlockKV;
        if (block >= blocks.full_begin && block < blocks.full_end) {
            j = blocks.full_end * kBlockKV - 1;
            continue;
        }
        const float x = column(j);
        if (!(fabsf(x) < FT_INFINITY) && visible(j)) sum += x;
    }
    return sum;
}

struct OutputRows {
    const KernelArgs& args;
    const u32 smem;
    const int id;     // of the consumer
    const int place;  // of the tile (recompute.cuh); -1 of one that is not computed again

    static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / 32; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

    // Normalises O into shared memory, in the copy engine's layout, and writes the log-sum-exp.
    __device__ __forceinline__ void stage(Output& o, const WorkTile& tile, const RowResults& rows, u32 to) const {
        const int row = warp() * 16 + lane() / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int packed = id * 64 + row + h * 8, at = tile.row + packed;
            if (args.forward.lse != nullptr && lane() % 4 == 0 && packed < tile.rows) {
                store_lse(args, tile, at, rows.log_sum_exp[h]);
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
                if (kOptimistic && place >= 0 && sum != 0.0f) mark_again(smem, place);
            }
        }
        const int to_row = warp() * 16 + lane() % 16;
#pragma unroll
        for (int j = 0; j < kColumnsV / 16; j++) {
            const float* x = o + 8 * j;
            const u32 chunk = u32(j % 4 * 2 + lane() / 16) ^ (to_row % 8);
            stmatrix_x4(to + j / 4 * kBytes64Rows + to_row * 128 + (chunk << 4), pack<Element>(x[0], x[1]),
                        pack<Element>(x[2], x[3]), pack<Element>(x[4], x[5]), pack<Element>(x[6], x[7]));
        }
    }

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
    __device__ __forceinline__ void restore_non_finite(const WorkTile& tile, const BlockRange& blocks, u32 to) const {
        const Values values(args.forward, tile);
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
                const bool seen = program_visible(program_head(args, FT_SIZES(args, tile), tile), position, key);
                is_dropped |= seen && !keeps_score(dropout, pair, position, key);
                return seen;
            };
#else
            const auto visible = [&](int key) {
                return program_visible(program_head(args, FT_SIZES(args, tile), tile), position, key);
            };
#endif
            float add = 0.0f;
            const auto element = [&](int key) {
                const Element* const v = values.at(key);
                return v == nullptr ? 0.0f : to_float(v[column]);
            };
            add = sum_of_non_finite<kBlockKV, kMaskLeft, kMaskRight>(FT_SIZES(args, tile), element, position, blocks,
                                                                     visible);
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
};

// O of a consumer to memory, by all of its threads: 64 rows by TMA, which the first thread has issued; fewer by plain
// stores, since the box would overwrite rows of the next sequence.
__device__ __forceinline__ void send_rows(const KernelArgs& args, const WorkTile& tile, int consumer, u32 from) {
    const int first = tile.row + consumer * 64, rows = warp_uniform(min_of(tile.rows - consumer * 64, 64));
    const int place = place_in_batch(args, tile);
    if (rows == 64) {
        if (threadIdx.x % 128 != 0) return;
#pragma unroll
        for (int chunk = 0; chunk < kChunksV; chunk++) {
            tma_store(args.o, from + chunk * kBytes64Rows, chunk * 64, 0, tile.q_row + (first >> args.group_shift),
                      tile.head, place);
        }
        tma_store_commit();
        return;
    }
    constexpr int kPieces = kHeadDimV / 8;  // of 16 bytes
    const i64* const stride = args.forward.o_stride;
    Element* const o = (Element*)args.forward.o + place * stride[0];
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < rows * kPieces; i += 128) {
        const int row = i / kPieces, piece = i % kPieces, at = first + row;
        const int head = (tile.head << args.group_shift) + (at & ((1 << args.group_shift) - 1));
        Element* const row_of_o = o + head * stride[1] + i64(tile.q_row + (at >> args.group_shift)) * stride[2];
        uint4* const to = (uint4*)(row_of_o + piece * 8);
        *to = load_shared_16(from + piece / 8 * kBytes64Rows + row * 128 + ((piece ^ row) % 8 << 4));
    }
    barrier_sync(kWarpgroup + consumer, 128);  // all have read it before another tile takes its place
}
