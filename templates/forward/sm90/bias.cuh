// Bias tensors, indexed by query and key (program.cuh): a tile for the rows of each consumer and a block of keys,
// loaded by TMA ahead of K and kept in its swizzled layout.

// Of a consumer's warp: the first of its 16 rows of a bias.
__device__ __forceinline__ u32 bias_rows(u32 smem, const BiasPipeline& biases, int consumer, int nth) {
    const int warp = threadIdx.x % 128 / 32;
    return biases.buffer(smem, consumer) + nth * kBytesBias + warp * 16 * 128;
}

// Eight elements from anywhere on, `at` bytes behind a multiple of 16: of the 32 bytes that hold them.
__device__ __forceinline__ uint4 from_both(uint4 low, uint4 high, u32 at) {
    u32 w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; i++) w[i] = at & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; i++) w[i] = at & 4 ? w[i + 1] : w[i];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = at & 2 ? w[i] >> 16 | w[i + 1] << 16 : w[i];
    return uint4{w[0], w[1], w[2], w[3]};
}

// Whether threads copy biases of this call: those that TMA cannot address.
__device__ __forceinline__ bool copies_biases(const KernelArgs& args) {
    return kBiases > 0 && args.biases_mapped != (1u << kBiases) - 1;
}

// The rows of a bias for one consumer, to `to`, by a warp. Where keys lie side by side, sixteen bytes at once, but for
// the tensor's ends, since nothing outside of it is read. Keys behind the last are masked, whatever arrives for them.
__device__ __forceinline__ void copy_bias(const KernelArgs& args, u32 to, const BiasAt& bias, int tile_row,
                                          int first_key) {
    constexpr int kPieces = kBlockKV / 8, kRounds = kPieces * 64 / 32;  // pieces of a row; for a lane
    const int lane = threadIdx.x % 32, last_row = args.forward.q_len - 1, last_key = args.forward.kv_len - 1;
    const u64 begin = (u64)bias.data, end = (u64)(bias.data + last_row * bias.row + last_key + 1),
              inside = begin + 15 & ~u64(15);
    const bool dense = bias.key == 1 && inside + 32 <= end;
    const auto row_of = [&](int round) { return (round * 32 + lane) / kPieces; };
    const auto piece_of = [&](int round) { return (round * 32 + lane) % kPieces; };
    const auto from = [&](int round) { return bias.data + min_of(tile_row + row_of(round), last_row) * bias.row; };
    const auto address = [&](int round) { return (u64)(from(round) + first_key + piece_of(round) * 8); };
    const auto is_inside = [&](u64 at) { return at >= inside && (at & ~u64(15)) + 32 <= end; };
    const auto put = [&](int round, uint4 words) {
        const int row = row_of(round), piece = piece_of(round);
        store_shared_16(to + piece / 8 * kBytes64Rows + row * 128 + ((piece ^ row) % 8 << 4), words);
    };
#pragma unroll 1
    for (int round = 0; round < kRounds; round++) {
        const u64 at = address(round);
        if (dense && is_inside(at)) {
            const uint4* const words = (const uint4*)(at & ~u64(15));
            put(round, from_both(words[0], words[1], u32(at) & 15));
            continue;
        }
        uint4 words;
        u32* const w = &words.x;
        const auto element = [&](int e) {
            return u32(from(round)[min_of(first_key + piece_of(round) * 8 + e, last_key) * bias.key]);
        };
#pragma unroll
        for (int e = 0; e < 4; e++) w[e] = element(2 * e) | element(2 * e + 1) << 16;
        put(round, words);
    }
}

// One thread loads the biases of each block as soon as there is room, without waiting for K: they come from memory and
// not from L2. With kCopies its warp copies those that TMA cannot address. Every lane arrives then, here and where
// biases are read: racecheck cannot see that a one-lane arrival behind __syncwarp() covers its warp.
template <bool kCopies>
__device__ __forceinline__ void load_biases(const KernelArgs& args, u32 smem, const Work& only) {
    BiasPipeline biases;
    Schedule schedule(smem);
    Work work = first_work(args, only);
    for (; has_tile<kCopies>(schedule, work, [] {}); work = schedule.next<kCopies>()) {
        const Tile& tile = work.tile;
        const BlockRange& blocks = work.all;
#pragma unroll 1
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            const int first_key = block_at(args, tile, blocks, n) * kBlockKV;
#pragma unroll 1
            for (int c = 0; c < kConsumers; c++) {
                const int row = tile.row + c * 64;
                const u32 full = biases.full(smem, c), to = biases.buffer(smem, c);
                biases.acquire(smem, c);
                // Of the tensors that TMA cannot address nothing is announced.
                if (threadIdx.x % 32 == 0) biases.expect(smem, __popc(args.biases_mapped) * kBytesBias, c);
#pragma unroll
                for (int nth = 0; nth < kBiases; nth++) {
                    const BiasAt bias = program_bias(program_head(args, args.forward, tile), nth);
                    const u32 there = to + nth * kBytesBias;
                    if (args.biases_mapped >> nth & 1) {
#pragma unroll
                        for (int chunk = 0; chunk < kChunksBias; chunk++) {
                            if (threadIdx.x % 32 != 0) continue;
                            tma_load(there + chunk * kBytes64Rows, args.biases[nth], full, kEvictNormal,
                                     first_key + chunk * 64, row, bias.index[0], bias.index[1]);
                        }
                    } else if (kCopies) {
                        copy_bias(args, there, bias, row, first_key);
                    }
                }
                if (kCopies) biases.commit(smem, c);
            }
            biases.advance();
        }
    }
}

// The biases of a block, laid out as its scores.
__device__ __forceinline__ void read_biases(const KernelArgs& args, u32 smem, const BiasPipeline& biases, int consumer,
                                            ScoresAhead<kBlockKV / 8>& ahead) {
    if constexpr (kBiases > 0) {
        const int lane = threadIdx.x % 32, row = lane % 16;
        biases.wait(smem, consumer);
#pragma unroll
        for (int nth = 0; nth < kBiases; nth++) {
#pragma unroll
            for (int j = 0; j < kBlockKV / 16; j++) {
                // Its chunk of 16 bytes is j % 4 * 2 + lane / 16, swizzled: of the first one's address two bits change.
                const u32 first = bias_rows(smem, biases, consumer, nth) + row * 128 + ((lane / 16 ^ row % 8) << 4);
                u32 r[4];
                ldmatrix_x4(r, (first ^ j % 4 << 5) + j / 4 * kBytes64Rows);
#pragma unroll
                for (int i = 0; i < 4; i++) ahead[i % 2].pairs[kBiasPlaces[nth]][2 * j + i / 2] = r[i];
            }
        }
    }
}

// Releases them. The arrival may take effect before ldmatrix has read, and the next TMA load then overwrites what it
// reads: hence the fence, which costs 1 % of the step where products have not been waited for in between.
__device__ __forceinline__ void release_biases(const KernelArgs& args, u32 smem, BiasPipeline& biases, int consumer) {
    if constexpr (kBiases > 0) {
        fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % 32 == 0 || copies_biases(args)) biases.release(smem, consumer);
        biases.advance();
    }
}
