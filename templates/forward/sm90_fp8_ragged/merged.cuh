// What a consumer has of a tile after its pieces were put together (pieces.cuh): only whoever is last of them writes.

struct Merged {
    bool writes, met;  // whether O of the tile is here, and whether any piece has met what is no number of V

    __device__ __forceinline__ void merge(const KernelArgs& args, const Work& work, int consumer, Output& o,
                                          RowSoftmax& softmax, float unit, u32 smem) {
        writes = true, met = false;
        if (!work.is_piece()) return;
        const Pieces pieces(args.forward, consumer, work.piece);
#pragma unroll
        for (int h = 0; h < 2; h++) softmax.l[h] = quad_sum(softmax.l[h]);
        writes = pieces.merge(o, softmax.m, softmax.l, unit, smem, work.tile.rows - consumer * 64, met);
        // Of a complete sum, as `finish` adds it up again.
#pragma unroll
        for (int h = 0; h < 2; h++) softmax.l[h] = threadIdx.x % 4 == 0 ? softmax.l[h] : 0.0f;
    }
};
