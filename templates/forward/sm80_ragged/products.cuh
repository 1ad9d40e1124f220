// The two products of a warp, on fragments (mma.cuh). Quantised elements are widened on their way from shared memory:
// four columns of K that lie side by side are a lane's part of one matrix step, in an order that Q has too; of V, a
// word has two columns of two keys.

using Scores = float[kMTiles][kSTiles][4];
using Output = float[kMTiles][kOTiles][4];
using QueryFragments = u32[kStepsQK][kMTiles][4];

__device__ __forceinline__ void clear(Output& o) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int j = 0; j < kOTiles; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][j][e] = 0.0f;
        }
    }
}

// Where this lane reads fragments of K and V in the first stage of its team's ring.
struct LaneAddress {
    u32 k, v;
    __device__ __forceinline__ explicit LaneAddress(u32 ring) {
        const int lane = threadIdx.x % 32;
        k = ring + TileK::lane_base(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        v = ring + Layout::kBytesK + TileV::lane_base(lane % 16, lane / 16);
    }
};

// Where this lane has its part of Q in shared memory.
__device__ __forceinline__ u32 shared_q(u32 base) {
    return base + Layout::kQueries + threadIdx.x / 32 % kRowWarps * Layout::kBytesQ + threadIdx.x % 32 * 16;
}

// Q of one matrix step.
struct QueryStep {
    u32 f[kMTiles][4];
    __device__ __forceinline__ QueryStep(const QueryFragments& q, u32 shared, int step) {
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
            if constexpr (kSharedQ) {
                const uint4 x = load_shared_16(shared + (step * kMTiles + i) * 512);
                f[i][0] = x.x, f[i][1] = x.y, f[i][2] = x.z, f[i][3] = x.w;
            } else {
#pragma unroll
                for (int e = 0; e < 4; e++) f[i][e] = q[step][i][e];
            }
        }
    }
};

// s = Q K^T for one block of keys.
__device__ __forceinline__ void multiply_qk(Scores& s, const QueryFragments& q, u32 shared, u32 lane_k) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int j = 0; j < kSTiles; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[i][j][e] = 0.0f;
        }
    }
    // Two chunks of 16 keys at a time.
#pragma unroll
    for (int step = 0; step < TileK::kChunks / 2; step++) {
        const QueryStep q0(q, shared, kScaled ? 2 * step : step), q1(q, shared, kScaled ? 2 * step + 1 : step);
#pragma unroll
        for (int j = 0; j < kSTiles; j += 2) {
            u32 k[4];
            ldmatrix_x4(k, TileK::at_step(lane_k, step) + j * 8 * TileK::kPitch);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if constexpr (kScaled) {
#pragma unroll
                    for (int chunk = 0; chunk < 2; chunk++) {
                        u32 b0, b1;
                        widen<CacheElement>(k[2 * half + chunk], b0, b1);
#pragma unroll
                        for (int i = 0; i < kMTiles; i++) {
                            mma<MathElement>(s[i][j + half], chunk == 0 ? q0.f[i] : q1.f[i], b0, b1);
                        }
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < kMTiles; i++) {
                        mma<MathElement>(s[i][j + half], q0.f[i], k[2 * half], k[2 * half + 1]);
                    }
                }
            }
        }
    }
}

// o += P V for one block of keys; P is rounded straight from the score registers.
__device__ __forceinline__ void multiply_pv(Output& o, const Scores& p, u32 lane_v) {
#pragma unroll
    for (int step = 0; step < kBlockKV / 16; step++) {
        u32 a[kMTiles][4];
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
            const float(&p0)[4] = p[i][2 * step];
            const float(&p1)[4] = p[i][2 * step + 1];
            a[i][0] = pack<MathElement>(p0[0], p0[1]);
            a[i][1] = pack<MathElement>(p0[2], p0[3]);
            a[i][2] = pack<MathElement>(p1[0], p1[1]);
            a[i][3] = pack<MathElement>(p1[2], p1[3]);
        }
#pragma unroll
        for (int chunk = 0; chunk < TileV::kChunks; chunk += 2) {
            u32 v[4];
            ldmatrix_x4_trans(v, TileV::at_step(lane_v, chunk / 2) + step * 16 * TileV::kPitch);
            if constexpr (kScaled) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    // Even columns of both keys in the lower half, odd ones in the upper.
                    u32 even[2], odd[2];
#pragma unroll
                    for (int keys = 0; keys < 2; keys++) {
                        widen<CacheElement>(__byte_perm(v[2 * half + keys], 0, 0x3120), even[keys], odd[keys]);
                    }
                    const int j = (chunk + half) * 2;
#pragma unroll
                    for (int i = 0; i < kMTiles; i++) {
                        mma<MathElement>(o[i][j], a[i], even[0], even[1]);
                        mma<MathElement>(o[i][j + 1], a[i], odd[0], odd[1]);
                    }
                }
            } else {
#pragma unroll
                for (int i = 0; i < kMTiles; i++) {
                    mma<MathElement>(o[i][chunk], a[i], v[0], v[1]);
                    mma<MathElement>(o[i][chunk + 1], a[i], v[2], v[3]);
                }
            }
        }
    }
}
