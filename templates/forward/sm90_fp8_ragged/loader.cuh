// Who takes tiles, and loads Q, K and V: the first warp of the producer. Blocks of keys from the last to the first,
// each lane a box of them, whose page it looks up before the stage is free.

__device__ __forceinline__ void load(const KernelArgs& args, u32 smem) {
    WorkPipeline slots;
    QPipeline q;
    KPipeline k;
    RawPipeline v;
    u32 index = blockIdx.x;
    const bool leads = threadIdx.x == 0;
    const RaggedArgs& f = args.forward;
#pragma unroll 1
    for (u32 taken = 1;; taken++) {
        const Work work = work_at(args, smem, index);
        // Items without rows are nothing.
        const bool empty = work.live && work.tile.rows == 0;
        if (leads && !empty) {
            slots.acquire(smem);
            write_slot(slots.buffer(smem), work);
            slots.commit(smem);
        }
        if (!empty) slots.advance();
        if (!work.live) break;
        const WorkTile& tile = work.tile;
        const Pages pages(f, tile.batch);
#pragma unroll 1
        for (int n = work.blocks.end - 1; !empty && n >= work.blocks.begin; n--) {
            const LaneBox k_box = lane_box(args, pages, f.k_table, tile, n);
            const LaneBox v_box = f.v_table == f.k_table ? k_box : lane_box(args, pages, f.v_table, tile, n);
            const u32 none = keys_without_page(args, k_box);
            k.acquire(smem);
            __syncwarp();  // what one lane sends may free the stage again before another has seen that it is free
            if (leads) {
                store_shared_4(without_page_at(smem, k.stage), none);
                k.expect(smem, Layout::kBytesK);
            }
            load_keys<kChunksQK>(k.buffer(smem), args, pages, k_box, args.k, k.full(smem), n, tile);
            k.advance();
            if (n == work.blocks.end - 1) {
#pragma unroll 1
                for (int c = 0; leads && c < kConsumers; c++) {
                    q.acquire(smem, c);
                    q.expect(smem, Layout::kBytesQ, c);
#pragma unroll
                    for (int chunk = 0; chunk < kChunksQK; chunk++) {
                        load_rows(q.buffer(smem, c) + chunk * kBytes64Rows, args, q.full(smem, c), chunk, tile,
                                  tile.row + c * 64);
                    }
                }
                q.advance();
            }
            v.acquire(smem);
            __syncwarp();
            if (leads) v.expect(smem, Layout::kBytesRaw);
            load_keys<kChunksV>(v.buffer(smem), args, pages, v_box, args.v, v.full(smem), n, tile);
            __syncwarp();
            v.advance();
        }
        if (leads) index = next_index(args, smem, taken);
        index = __shfl_sync(0xffffffff, index, 0);
    }
}
