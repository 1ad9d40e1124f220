    if (threadIdx.x == 0) {
        for (int c = 0; c < kConsumers; c++) QPipeline::init(smem, c, 1, 4);
        for (int s = 0; s < kStages; s++) {
            KPipeline::init(smem, s, FT_SCALES_OF_KEYS ? 2 : 1, kConsumers * 4);
            VPipeline::init(smem, s, kTransposers, kConsumers * 4);
        }
        for (int s = 0; s < kRawStages; s++) RawPipeline::init(smem, s, 1, kTransposers);
        store_shared_4(Layout::met_non_finite_at(smem), 0);
        for (int s = 0; s < 2; s++) WorkPipeline::init(smem, s, 1, kTransposers + kConsumers * 4);
        mbarrier_init_fence();
    }
