// In which order a consumer visits the key blocks of a tile, and by which copy of a step.

// step(n, masked, from_zero) for the key blocks from n down. Both are constants where masked blocks have loops of their
// own: those cut on the right or past the last key, then those in sight of every row, then those cut on the left.
// References of the second ones start from zero (softmax.cuh): the first loop goes on until `is_near_zero` says so,
// which the threads of a warpgroup agree about.
template <typename NearZero, typename Step>
__device__ __forceinline__ void walk_steps(const BlockRange& blocks, int n, const NearZero& is_near_zero,
                                           const Step& step) {
    if (kMaskedLoop) {
        const int full = max_of(blocks.begin, blocks.full_begin);
        const int cut = max_of(blocks.begin, blocks.full_end);
        // Asked after every step, and not in the condition of the loop, which would keep products from running beside
        // each other.
        bool near_zero = is_near_zero();
#pragma unroll 1
        for (; n >= (near_zero ? cut : blocks.begin); n--) {
            step(n, Bool<true>{}, Bool<false>{});
            near_zero = is_near_zero();
        }
#pragma unroll 1
        for (; n >= full; n--) step(n, Bool<false>{}, Bool<true>{});
        if (kMaskedFirst) {
#pragma unroll 1
            for (; n >= blocks.begin; n--) step(n, Bool<true>{}, Bool<false>{});
        }
    } else {
        bool near_zero = false;
#pragma unroll 1
        for (; n >= blocks.begin; n--) {
            const bool masked = is_masked<kMaskedFirst>(blocks, n);
            if (!masked && !near_zero) near_zero = is_near_zero();
            step(n, masked, !masked && near_zero);
        }
    }
}
