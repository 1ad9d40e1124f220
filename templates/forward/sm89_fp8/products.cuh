// Products on fragments that lie in shared memory as the tensors do.

// The addresses at which this lane reads fragments of Q, K and V from their tiles, matrix step 0.
struct LaneAddress {
    u32 q, k, v;
    __device__ __forceinline__ explicit LaneAddress(u32 smem_q) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        q = smem_q + TileQK::lane_base(warp * kRowsPerWarp + lane % 16, lane / 16);
        k = smem_q + kOffsetK + TileQK::lane_base(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        v = smem_q + kOffsetV + TileV::offset(lane, 0);  // a key each
    }
};

// Q fragments of one matrix step.
__device__ __forceinline__ void load_q(u32 (&q)[kMTiles][4], u32 lane_q, int step) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) ldmatrix_x4(q[i], TileQK::at_step(lane_q, step) + i * 16 * TileQK::kPitch);
}

// s = Q K^T for one block of keys.
__device__ __forceinline__ void multiply_qk(Scores& s, const QueryFragments& q_registers, u32 lane_q, u32 lane_k) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int j = 0; j < kSTiles; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[i][j][e] = 0.0f;
        }
    }
#pragma unroll
    for (int step = 0; step < kStepsQK; step++) {
        u32 q[kMTiles][4];
        if constexpr (!kQInRegisters) load_q(q, lane_q, step);
#pragma unroll
        for (int j = 0; j < kSTiles; j += 2) {
            u32 k[4];
            ldmatrix_x4(k, TileQK::at_step(lane_k, step) + j * 8 * TileQK::kPitch);
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
                if constexpr (kQInRegisters) {
                    mma_e4m3(s[i][j], q_registers[step][i], k[0], k[1]);
                    mma_e4m3(s[i][j + 1], q_registers[step][i], k[2], k[3]);
                } else {
                    mma_e4m3(s[i][j], q[i], k[0], k[1]);
                    mma_e4m3(s[i][j + 1], q[i], k[2], k[3]);
                }
            }
        }
    }
}

// o = factor * o + P V for one block of keys, 16 columns of V at a time: the first level sums the block from zero, the
// second adds it in fp32.
__device__ __forceinline__ void multiply_pv(Output& o, const float (&factor)[kMTiles][2], const Probabilities& p,
                                            u32 lane_v) {
#pragma unroll
    for (int group = 0; group < kGroupsV; group++) {
        if (kInOrder) __syncwarp();  // loads do not move across it
        float sums[kMTiles][2][4] = {};
#pragma unroll
        for (int step = 0; step < kStepsPV; step++) {
            u32 v[4];
            ldmatrix_x4_trans(v, TileV::at_chunk(lane_v, group) + step * 32 * TileV::kPitch);
            const u32 even0 = __byte_perm(v[0], v[1], 0x6420), even1 = __byte_perm(v[2], v[3], 0x6420);
            const u32 odd0 = __byte_perm(v[0], v[1], 0x7531), odd1 = __byte_perm(v[2], v[3], 0x7531);
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
                mma_e4m3(sums[i][0], p[i][step], even0, even1);
                mma_e4m3(sums[i][1], p[i][step], odd0, odd1);
            }
        }
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int e = 0; e < 8; e++) {
                float& sum = o[i][2 * group + e / 4][e % 4];
                sum = fmaf(sum, factor[i][e % 4 / 2], sums[i][e / 4][e % 4]);
            }
        }
    }
}
