// Products of tiles in shared memory with accumulators and weights in registers.

template <int kM, int kColumns> using Accumulator = float[kM][kColumns / 8][4];

template <int kM, int kTiles> __device__ __forceinline__ void clear(float (&x)[kM][kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kM; i++) {
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) x[i][j][e] = 0.0f;
        }
    }
}

// s = A B^T: rows that stay down, rows that are walked over across.
template <typename Tile, int kM, int kTiles>
__device__ __forceinline__ void multiply(float (&s)[kM][kTiles][4], u32 down, u32 across) {
    clear(s);
#pragma unroll
    for (int step = 0; step < Tile::kDim / 16; step++) {
        u32 a[kM][4];
#pragma unroll
        for (int i = 0; i < kM; i++) ldmatrix_x4(a[i], Tile::at_step(down, step) + i * 16 * Tile::kPitch);
#pragma unroll
        for (int j = 0; j < kTiles; j += 2) {
            u32 b[4];
            ldmatrix_x4(b, Tile::at_step(across, step) + j * 8 * Tile::kPitch);
#pragma unroll
            for (int i = 0; i < kM; i++) {
                mma<Element>(s[i][j], a[i], b[0], b[1]);
                mma<Element>(s[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// The columns of a gradient that a thread block sums, where these are shared by several (kParts): all blocks but the
// last have kColumns, a multiple of what ldmatrix's swizzle repeats after.
template <typename Tile, int kOf> struct Part {
    static constexpr int kSteps = Tile::kDim / 16;
    static constexpr int kRepeat = max_of(Tile::kGroup / 2, 1);
    static constexpr int kPartSteps = kOf == 1 ? kSteps : round_up(div_up(kSteps, kOf), kRepeat);
    static constexpr int kColumns = 16 * kPartSteps;
    static constexpr bool kEven = kPartSteps * kOf == kSteps;
    static __device__ __forceinline__ u32 at(u32 columns, int part) {
        return kOf == 1 ? columns : columns + part * (kPartSteps / kRepeat * Tile::kGroup * 16);
    }
    // Whether the part has a matrix step.
    static __device__ __forceinline__ bool has(int part, int step) {
        return kEven || part * kPartSteps + step < kSteps;
    }
};

// Zeros in the place of non-finite elements.
__device__ __forceinline__ u32 finite_of(u32 x) {
    constexpr u32 kLow = kExponentMask<Element>, kHigh = kLow << 16;
    return ((x & kLow) == kLow ? 0 : x & 0xffff) | ((x & kHigh) == kHigh ? 0 : x & 0xffff0000);
}

// Weights rounded to the element type: as A operands, a matrix step of 16 columns each, straight from accumulators.
template <int kM, int kTiles> using Weights = u32[kTiles / 2][kM][4];
template <int kM, int kTiles>
__device__ __forceinline__ void round_weights(Weights<kM, kTiles>& a, const float (&w)[kM][kTiles][4]) {
#pragma unroll
    for (int step = 0; step < kTiles / 2; step++) {
#pragma unroll
        for (int i = 0; i < kM; i++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float(&x)[4] = w[i][2 * step + n / 2];
                a[step][i][n] = pack<Element>(x[n % 2 * 2], x[n % 2 * 2 + 1]);
            }
        }
    }
}

// sum += W B. With kFinite B's non-finite elements are left out.
template <bool kFinite, typename Tile, typename Columns, int kSteps, int kM, int kSums>
__device__ __forceinline__ void add_products(float (&sum)[kM][kSums][4], const u32 (&w)[kSteps][kM][4], u32 columns,
                                             int part) {
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
#pragma unroll
        for (int j = 0; j < kSums; j += 2) {
            if (!Columns::has(part, j / 2)) continue;
            u32 b[4];
            ldmatrix_x4_trans(b, Tile::at_step(columns, j / 2) + step * 16 * Tile::kPitch);
            if (kFinite) {
#pragma unroll
                for (int n = 0; n < 4; n++) b[n] = finite_of(b[n]);
            }
#pragma unroll
            for (int i = 0; i < kM; i++) {
                mma<Element>(sum[i][j], w[step][i], b[0], b[1]);
                mma<Element>(sum[i][j + 1], w[step][i], b[2], b[3]);
            }
        }
    }
}

// What a pair that takes no part has in the place of its weight: zero times NaN is NaN, so these are told from weights
// that vanish, which are never negative.
constexpr u32 kNoPart = 0x80000000;

// Whether a row of what is walked over may have a non-finite element: all of its products are non-finite then, so that
// one row of accumulators tells.
template <int kM, int kTiles> __device__ __forceinline__ bool met_non_finite(const float (&x)[kM][kTiles][4]) {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kTiles; j++) sum[0] += x[0][j][0], sum[1] += x[0][j][1];
    return !(fabsf(sum[0] + sum[1]) < FT_INFINITY);
}

// Whether pairs take part: of each of a lane's rows a bit for each of its columns.
template <int kM, int kTiles>
__device__ __forceinline__ void take_parts(u32 (&parts)[kM][2], const float (&p)[kM][kTiles][4]) {
    static_assert(2 * kTiles <= 32, "a bit for each column");
#pragma unroll
    for (int i = 0; i < kM; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            parts[i][h] = 0;
#pragma unroll
            for (int n = 0; n < 2 * kTiles; n++)
                parts[i][h] |= __float_as_uint(p[i][n / 2][2 * h + n % 2]) == kNoPart ? 0 : 1u << n;
        }
    }
}

// NaN into the sums that a non-finite element of a tile reaches by a pair that takes part, for add_products<true>.
// Rare, so one row of the tile after the other.
template <typename Tile, typename Columns, int kRows, int kM, int kSums>
__device__ __forceinline__ void mark_non_finite(float (&sum)[kM][kSums][4], const u32 (&parts)[kM][2], u32 tile,
                                                int part) {
    constexpr u32 kLow = kExponentMask<Element>, kHigh = kLow << 16;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int t = 0; t < kRows; t++) {
        bool takes[kM][2];
#pragma unroll
        for (int i = 0; i < kM; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 bits = __shfl_sync(0xffffffff, parts[i][h], lane / 4 * 4 + t % 8 / 2);
                takes[i][h] = (bits >> (t / 8 * 2 + t % 2) & 1) != 0;
            }
        }
        const u32 row = Columns::at(tile + Tile::offset(t, 0), part) + lane % 4 * 4;
#pragma unroll
        for (int j = 0; j < kSums; j++) {
            if (!Columns::has(part, j / 2)) continue;
            const u32 x = load_shared_4(Tile::at_chunk(row, j));
            const bool bad[2] = {(x & kLow) == kLow, (x & kHigh) == kHigh};
#pragma unroll
            for (int i = 0; i < kM; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (bad[e % 2] && takes[i][e / 2]) sum[i][j][e] = __int_as_float(0x7fffffff);
                }
            }
        }
    }
}

// Writes rows [0, rows) of a warp's sums, times a factor, to the columns of a part.
template <typename Columns, int kHeadDim, int kM, int kSums>
__device__ __forceinline__ void store_rows(u16* to, i64 stride, const float (&sum)[kM][kSums][4],
                                           int rows, int part, float factor) {
    const int lane = threadIdx.x % 32, first = part * Columns::kColumns;
#pragma unroll
    for (int i = 0; i < kM; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = i * 16 + h * 8 + lane / 4;
            u16* const at = to + row * stride + first + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < kSums; j++) {
                if (row < rows && first + 8 * j < kHeadDim)
                    *(u32*)(at + 8 * j) = pack<Element>(sum[i][j][2 * h] * factor, sum[i][j][2 * h + 1] * factor);
            }
        }
    }
}
