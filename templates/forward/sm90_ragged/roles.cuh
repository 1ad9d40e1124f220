// Follows the body of forward/sm90.cu, whose fixes belong here too. Apart, since the machine code of 20 of 40 dense
// kernels changed when both families shared this text.
//
// Part of the kernel's body: who does what, from the first tile on.

    if (warpgroup == 0) {
        if constexpr (kRegistersMove) registers_give_back<kProducerRegisters>();
        if (warp == 0) {
            load_qk(args, smem);
        } else if (warp == 1) {
            if (threadIdx.x % 32 == 0) schedule_tiles(args, smem);
        } else if (kBiases > 0 && warp == 2) {
            if (copies_biases(args)) {
                load_biases<true>(args, smem);
            } else if (threadIdx.x % 32 == 0) {
                load_biases<false>(args, smem);
            }
        } else if (kHelpsApart && warp == 2) {
            load_v<true, false>(args, smem, 0);
        } else if (kHelpsApart) {
            load_v<false, true>(args, smem, 0);
        } else {
            load_v<true, true>(args, smem, warp - 4 + kHelpers);
        }
#if FT_DRAWERS
    } else if (warpgroup > kConsumers) {
        if constexpr (kRegistersMove) registers_give_back<kDrawerRegisters>();
        draw_bits(args, smem, first_work(smem), warpgroup - kConsumers - 1);
#endif
    } else {
        if constexpr (kRegistersMove) registers_take<kConsumerRegisters>();
        Consumer(args, smem, warpgroup - 1).run();
    }
