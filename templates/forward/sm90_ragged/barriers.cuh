// Follows the body of forward/sm90.cu, whose fixes belong here too. Apart, since the machine code of 20 of 40 dense
// kernels changed when both families shared this text.
//
// Part of the kernel's body: the barriers of a thread block (layout.cuh).

    const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32 % 4);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Layout::kQBuffers * kConsumers; i++) QPipeline::init(smem, i, 1, kQLeavesEarly ? 4 : 1);
        for (int i = 0; i < 2; i++) {
            const int warps = 3 + (kConsumers + kDrawers) * 4;
            WorkPipeline::init(smem, i, 1, warps * (kOptimistic ? 32 : 1));
        }
        for (int s = 0; s < kStages; s++) {
            KPipeline::init(smem, s, 1, kConsumers * 4);
            VPipeline::init(smem, s, kClean ? kHelpers : 1, kConsumers * 4);
            mbarrier_init(VPipeline::raw_at(smem, s), 1);
        }
#if FT_DRAWERS
        for (int s = 0; s < kBitStages; s++) BitPipeline::init(smem, s, 4 * kDrawers, 4 * kConsumers);
#endif
        mbarrier_init(Layout::admit_v_at(smem), kConsumers);
        mbarrier_init(Layout::ask_work_at(smem), 1);
        store_shared_4(Layout::met_non_finite_at(smem), 0);
        if (kOptimistic) {
            store_shared_4(Layout::found_at(smem), 0);
            mbarrier_init(Layout::tiles_done_at(smem), kConsumers * 4);
        }
        for (int i = 0; i < (kBiases > 0 ? kBiasStages * kConsumers : 0); i++) {
            BiasPipeline::init(smem, i, copies_biases(args) ? 1 + 32 : 1, copies_biases(args) ? 128 : 4);
        }
        mbarrier_init_fence();
    }
