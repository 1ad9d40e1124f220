// The first stage: what is known of every query (Statistics), into the first bytes of its row of dQ.

constexpr int kLanesOfRow = 8;

__device__ __forceinline__ float sum_of_products(u32 x, u32 y, float sum) {
    sum = fmaf(to_float(Element{u16(x)}), to_float(Element{u16(y)}), sum);
    return fmaf(to_float(Element{u16(x >> 16)}), to_float(Element{u16(y >> 16)}), sum);
}

#if FT_RESIDUAL
// The same of what O lost, and dO.
__device__ __forceinline__ float sum_of_lost(u32 x, u32 y, float sum) {
    sum = fmaf(to_float(bf16{u16(x)}), to_float(Element{u16(y)}), sum);
    return fmaf(to_float(bf16{u16(x >> 16)}), to_float(Element{u16(y >> 16)}), sum);
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads)
    @{ entry }@_statistics(const __grid_constant__ KernelArgs FT_CALL) {
    Tile tile = decode_tile<kThreads / kLanesOfRow, false, false>(FT_CALL, block_index());
    FT_SEQUENCE(args, tile.batch);
    if (kPacked && !has_rows(args, tile, kThreads / kLanesOfRow)) return;
    const int lane = threadIdx.x % kLanesOfRow, row = threadIdx.x / kLanesOfRow;
    const bool exists = row < tile.rows;
    float sum = 0.0f;
#if FT_RESIDUAL
    float lost = 0.0f;
#endif
    if (exists) {
        const u16* o = rows_of((const u16*)args.o, args.o_stride, tile.batch, tile.head, tile.row + row);
        const u16* dout = rows_of((const u16*)args.dout, args.dout_stride, tile.batch, tile.head, tile.row + row);
#pragma unroll
        for (int chunk = lane; chunk < TileV::kValidChunks; chunk += kLanesOfRow) {
            const uint4 x = *(const uint4*)(o + chunk * 8), y = *(const uint4*)(dout + chunk * 8);
            sum = sum_of_products(x.y, y.y, sum_of_products(x.x, y.x, sum));
            sum = sum_of_products(x.w, y.w, sum_of_products(x.z, y.z, sum));
#if FT_RESIDUAL
            const uint4 z = *(const uint4*)(residual_row(args, tile.batch, tile.head, tile.row + row) + chunk * 8);
            lost = sum_of_lost(z.y, y.y, sum_of_lost(z.x, y.x, lost));
            lost = sum_of_lost(z.w, y.w, sum_of_lost(z.z, y.z, lost));
#endif
        }
    }
#if FT_RESIDUAL
    sum += lost;
#endif
#pragma unroll
    for (int apart = 1; apart < kLanesOfRow; apart *= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
    const i64 at = lse_row(args, tile.batch, tile.head, tile.row) + row;
    FarRow far = {0.0f, 0.0f};
    if constexpr (kProgramFar) {
        const ProgramHead head = program_head(args, args, tile);
        far = far_row<kLanesOfRow>(args, head, tile, row, at, [&](int q, int key, float score) {
            return score_gradient(head, q, key, score).value;
        });
    }
    if (!exists || lane != 0) return;
    const float lse = kProgramFar ? far.maximum : args.lse[at];
    const bool empty = lse == -FT_INFINITY;
    float* to = (float*)rows_of((u16*)args.dq, args.dq_stride, tile.batch, tile.head, tile.row + row);
    // A sum that overflowed says nothing of a row's weights.
    to[0] = empty ? kEmpty : lse == FT_INFINITY ? __int_as_float(0x7fffffff) : lse * kLog2E;
    if (kProgramFar) {
        const bool first = fabsf(lse) >= kFarNatural && fabsf(lse) < FT_INFINITY;
        if (first) to[0] = far.log_sum * kLog2E;
        to[2] = first ? lse : 0.0f, to[3] = 0.0f;
    }
    to[1] = empty ? 0.0f : args.dlse != nullptr ? sum - args.dlse[at] : sum;
}
