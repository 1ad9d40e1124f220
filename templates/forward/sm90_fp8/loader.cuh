// Who loads Q, K and V: the first warp of the producer.

// Who loads is a warp where its lanes bring scales of keys, or find the key blocks of a tile by a program's mask.
constexpr bool kLoadsByWarp = FT_SCALES_OF_KEYS || kProgramMask;

template <int kChunks>
__device__ __forceinline__ void load_keys(u32 to, const TensorMap& map, u32 full, int n, const Tile& tile) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
        tma_load(to + chunk * kBytesChunk, map, full, kEvictLast, chunk * 128, n * kBlockKV, tile.kv_head, tile.batch);
    }
}

#if FT_SCALES_OF_KEYS
// The scales of a block of keys, on their way through the registers of a warp: read a block ahead.
struct KeyScales {
    static constexpr int kOfLane = kBlockKV / 32;
    float ahead[kOfLane];

    __device__ __forceinline__ void read(const KernelArgs& args, const Tile& tile, int n) {
        const Descales<1> scales = key_descales(args.forward, tile);
#pragma unroll
        for (int i = 0; i < kOfLane; i++) {
            const int key = n * kBlockKV + i * 32 + int(threadIdx.x);
            ahead[i] = key < args.forward.kv_len ? scales.at(key) : 0.0f;
        }
    }
    // To a stage. Keys 2t, 2t + 1, 8 + 2t and 9 + 2t of each 16 lie side by side: a thread has their scores.
    __device__ __forceinline__ void write(u32 to) const {
        const int lane = int(threadIdx.x);
        to += (lane / 16 * 16 + lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2) * 4;
#pragma unroll
        for (int i = 0; i < kOfLane; i++) store_shared_4(to + i * 128, __float_as_uint(ahead[i]));
    }
};
#endif

// Takes tiles, and loads what they need: blocks of keys from the last to the first. One thread; or a warp, of which one
// lane does all but scales of keys and what a program's mask asks for.
__device__ __forceinline__ void load(const KernelArgs& args, u32 smem) {
    WorkPipeline slots;
    QPipeline q;
    KPipeline k;
    RawPipeline v;
    u32 index = blockIdx.x;
    const bool leads = !kLoadsByWarp || threadIdx.x == 0;
#if FT_SCALES_OF_KEYS
    KeyScales scales;
#endif
#pragma unroll 1
    for (u32 taken = 1;; taken++) {
        const auto publish = [&](const BlockRange& blocks) {
            if (leads) {
                slots.acquire(smem);
                write_slot(slots.buffer(smem), index, blocks);
                slots.commit(smem);
            }
            slots.advance();
        };
        if (!kProgramMask) publish(BlockRange{});
        Work work = work_at(args, index);
        const Tile& tile = work.tile;
        if constexpr (kProgramMask) {
            const ProgramHead head = program_head(args, args.forward, tile);
            if (work.live)
                work.blocks = program_blocks<kBlockKV>(head, tile.row, tile.row + tile.rows - 1, work.blocks);
            publish(work.blocks);
        }
        if (!work.live) break;
#if FT_SCALES_OF_KEYS
        if (work.blocks.begin < work.blocks.end) scales.read(args, tile, work.blocks.end - 1);
#endif
#pragma unroll 1
        for (int n = work.blocks.end - 1; n >= work.blocks.begin; n--) {
            if (leads) {
                k.acquire(smem);
                k.expect(smem, Layout::kBytesK);
                load_keys<kChunksQK>(k.buffer(smem), args.k, k.full(smem), n, tile);
            }
#if FT_SCALES_OF_KEYS
            __syncwarp();  // the stage is free: other lanes could be late by two phases of its barrier
            scales.write(Layout::key_scales_at(smem, k.stage));
            __syncwarp();
            if (leads) k.commit(smem);
            if (n > work.blocks.begin) scales.read(args, tile, n - 1);
#endif
            k.advance();
            if (leads && n == work.blocks.end - 1) {
#pragma unroll 1
                for (int c = 0; c < kConsumers; c++) {
                    q.acquire(smem, c);
                    q.expect(smem, Layout::kBytesQ, c);
#pragma unroll
                    for (int chunk = 0; chunk < kChunksQK; chunk++) {
                        tma_load(q.buffer(smem, c) + chunk * kBytes64Rows, args.q, q.full(smem, c), kEvictFirst,
                                 chunk * 128, 0, tile.row + c * 64, tile.head, tile.batch);
                    }
                }
                q.advance();
            }
            if (leads) {
                v.acquire(smem);
                v.expect(smem, Layout::kBytesRaw);
                load_keys<kChunksV>(v.buffer(smem), args.v, v.full(smem), n, tile);
            }
            v.advance();
        }
        if (leads) index = next_index(args, taken);
        if (kLoadsByWarp) index = __shfl_sync(0xffffffff, index, 0);
    }
}
