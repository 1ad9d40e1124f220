// The end of a share: the sums of the teams become one, in the order of the teams; a whole tile is written, the piece
// of one goes to scratch memory. Whoever is last of a tile's pieces, by a counter, merges them in the order of their
// keys.
//
// Scratch memory: a counter for each thread block, of the tile that begins in it; behind them two pieces for each, of
// the tile that began before it (0), and of the one that ends behind it (1).

constexpr int kCounterBytes = @{ counter_bytes }@;
constexpr int kPieceFloats = kRows * (kPieceColumns + 2);
static_assert(2 * kPieceFloats * 4 == @{ piece_bytes }@, "the scratch memory of a thread block");

struct Sum {
    float m, l;
};

// Whether a row whose keys have no weight is zero whatever O holds. Beside a sink it is not empty: keys that a
// program's scores of -inf leave without weight are a part of it, and a NaN of V among them remains. So it does in a
// piece or a team's part of a row that is not empty.
constexpr bool kEmptyIsZero = !(kProgramSink && kProgramScore);
__device__ __forceinline__ float* merge_floats() {
    extern __shared__ __align__(128) u8 smem[];
    return (float*)(smem + Layout::kMerge);
}
__device__ __forceinline__ Sum* merge_sums() {
    extern __shared__ __align__(128) u8 smem[];
    return (Sum*)(smem + Layout::kSums);
}
__device__ __forceinline__ u32& arrived() {
    extern __shared__ __align__(128) u8 smem[];
    return *(u32*)(smem + Layout::kArrived);
}

__device__ __forceinline__ float* piece_at(const KernelArgs& args, int block, int which) {
    return (float*)((u8*)args.scratch + kCounterBytes) + (i64(block) * 2 + which) * kPieceFloats;
}

// 2^(m - to) of a reference that may be none at all. References are in units of log2; those that may be far (far.cuh)
// stay in units of the scores, natural ones.
__device__ __forceinline__ float weight(float m, float to) {
    return m == -FT_INFINITY ? 0.0f : exp2_approx(kProgramFar ? (m - to) * kLog2E : m - to);
}

// A part of O by its weight, which may be too small for a float: what is no number remains.
__device__ __forceinline__ float weighted(float w, float x) { return fabsf(x) < FT_INFINITY ? w * x : x; }

// Four columns of a row by its sum.
struct Part {
    float4 x;
    Sum sum;
};
__device__ __forceinline__ float4 weighted(float w, float4 x) {
    return make_float4(weighted(w, x.x), weighted(w, x.y), weighted(w, x.z), weighted(w, x.w));
}
__device__ __forceinline__ void add(float4& a, float4 b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }

// Adds the part of keys that come behind.
__device__ __forceinline__ void join(Part& a, const Part& b) {
    const float m = fmaxf(a.sum.m, b.sum.m), of_a = weight(a.sum.m, m), of_b = weight(b.sum.m, m);
    a.x = weighted(of_a, a.x);
    add(a.x, weighted(of_b, b.x));
    // A reference of none is a sum of zero.
    a.sum = Sum{m, of_a * a.sum.l + of_b * b.sum.l};
}

// A row of a warp's O on its way to the other teams.
__device__ __forceinline__ void put_row(const float (&o)[kOTiles][4], int h, int row, float by) {
    const int t = threadIdx.x % 4;
    float* const to = merge_floats() + row * kMergePitch;
    const auto x = [&](int j, int e) { return kScalePerToken ? weighted(by, o[j][2 * h + e]) : o[j][2 * h + e]; };
#pragma unroll
    for (int j = 0; j < kOTiles; j += 2) {
        if (j * 8 >= kPieceColumns) continue;
        if constexpr (kScaled) {
            *(float4*)(to + j * 8 + 4 * t) = make_float4(x(j, 0), x(j + 1, 0), x(j, 1), x(j + 1, 1));
        } else {
            *(float2*)(to + j * 8 + 2 * t) = make_float2(x(j, 0), x(j, 1));
            *(float2*)(to + j * 8 + 8 + 2 * t) = make_float2(x(j + 1, 0), x(j + 1, 1));
        }
    }
}

// Writes four columns of a row of O, and with the first of them its log-sum-exp.
__device__ __forceinline__ void write_row(const KernelArgs& args, Group group, const Share& share, int row, int column,
                                          Part part) {
    if (column >= kHeadDimV) return;
    Sum sum = part.sum;
    const float m = sum.m;
    if constexpr (kProgramFar) sum.m = as_log2(m, kLog2E);
    float4 x = part.x;
    const i64 packed = i64(share.tile) * kRows + row;
    const int q = int(group.quotient(packed));
    const int head = share.kv_head * int(group.by) + int(packed - i64(q) * group.by);
    float inverse = sum.l == 0.0f ? 0.0f : 1.0f / sum.l;
    float lse = sum.l == 0.0f ? -FT_INFINITY : kLn2 * add_log2(sum.m, sum.l);
    if (is_far(m, kLog2E)) lse = far_log_sum_exp(m, kLog2E, sum.l);
#if FT_PROGRAM
    if (kProgramSink) {
        const ProgramHead at = {&args.side, share.sequence, head, share.kv_head, share.q_len, share.kv_len};
        const WithSink sunk = with_sink(sum.l, sum.m, program_sink(at, q));
        inverse = sunk.inverse, lse = sunk.lse;
    }
#endif
    if (kScaled && !kScalePerToken && args.v_scale != nullptr) {
        inverse *= args.v_scale[share.sequence * args.v_scale_stride[0] + share.kv_head * args.v_scale_stride[1]];
    }
    inverse *= output_scale<OutputElement>(args);
    if (kEmptyIsZero && sum.l == 0.0f) x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const i64 at = share.q_row + q;
    const bool packs = args.q_begin != nullptr;
    const i64 o_batch = packs ? 0 : share.sequence * args.o_stride[0];
    OutputElement* const o = (OutputElement*)args.o + o_batch + head * args.o_stride[1] + at * args.o_stride[2];
    write_four(o + column, make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse));
    if (column == 0 && args.lse != nullptr) {
        const i64 lse_batch = packs ? 0 : share.sequence * args.lse_stride[0];
        float* to = args.lse + lse_batch + head * args.lse_stride[1] + at * args.lse_stride[2];
        *to = lse == -FT_INFINITY ? args.lse_empty : lse * args.lse_unit;
    }
}

// Merges the pieces of a tile, all threads together: each has four columns of a row, and where rows are few a run of
// the pieces that follow each other.
__device__ __forceinline__ void merge_pieces(const KernelArgs& args, Group group, const Share& share) {
    constexpr int kWidth = kPieceColumns / 4;  // of a row, in steps of four columns
    Part* const parts = (Part*)merge_floats();
    static_assert(kThreads * sizeof(Part) <= kMergeFloats * 4, "room for a part of each thread");
    const int columns = share.rows * kWidth;
    const int teams = min_of(max_of(int(u32(kThreads) / u32(columns)), 1), share.pieces);
    const int team = teams == 1 ? 0 : int(threadIdx.x / u32(columns)), lane = int(threadIdx.x) - team * columns;
    const auto before = [&](int n) { return int(u32(share.pieces * n) / u32(teams)); };
    const int begin = before(team), end = before(team + 1);
#pragma unroll 1
    for (int from = 0; from < columns; from += kThreads) {
        const int i = from + lane, row = i / kWidth, column = i % kWidth * 4;
        const bool some = i < columns && team < teams;
        const auto piece = [&](int p) {
            const float* const at = piece_at(args, share.first + p, p == 0);
            const float2 sum = __ldcg((const float2*)(at + kRows * kPieceColumns) + row);
            return Part{__ldcg((const float4*)(at + row * kPieceColumns + column)), Sum{sum.x, sum.y}};
        };
        Part all = {};
        if (some) {
            all = piece(begin);
#pragma unroll 4
            for (int p = begin + 1; p < end; p++) join(all, piece(p));
        }
        if (teams > 1) {  // and columns are no more than threads
            if (some) parts[threadIdx.x] = all;
            __syncthreads();
            if (threadIdx.x < columns) {
#pragma unroll 1
                for (int n = 1; n < teams; n++) join(all, parts[n * columns + i]);
            }
        }
        if (some && team == 0) write_row(args, group, share, row, column, all);
    }
}

template <typename Softmax>
__device__ __forceinline__ void merge(const KernelArgs& args, Group group, int team, const Share& share,
                                      const Rows& rows, Softmax& softmax, Output& o, float v_reference) {
    constexpr int kWidth = kPieceColumns / 4;  // of a row, in steps of four columns
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            softmax.finish(i, h);
            // Scores that all are NaN have no maximum; their sum, of reference 0, must not be lost.
            const float l = softmax.l[i][h];
            const float reference =
                softmax.m[i][h] == -FT_INFINITY ? 0.0f : softmax.m[i][h] * (kProgramFar ? 1.0f : rows.factor);
            const float m = l == 0.0f ? -FT_INFINITY : reference;
            if (lane % 4 == 0) merge_sums()[team * kRows + rows.first_row + i * 16 + h * 8 + lane / 4] = Sum{m, l};
        }
    }
    const bool whole = share.pieces == 1;
    float* const piece = piece_at(args, blockIdx.x, share.nth == 0);
#pragma unroll 1
    for (int from = 0; from < share.rows; from += kMergeRows) {
        const int some = min_of(kMergeRows, share.rows - from);
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = rows.first_row + i * 16 + h * 8 + lane / 4 - from;
                if (row >= 0 && row < some) put_row(o[i], h, team * kMergeRows + row, v_reference);
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < some * kWidth; i += kThreads) {
            const int row = i / kWidth, column = i % kWidth * 4;
            const auto part = [&](int n) {
                const float* const at = merge_floats() + (n * kMergeRows + row) * kMergePitch + column;
                return Part{*(const float4*)at, merge_sums()[n * kRows + from + row]};
            };
            Part all = part(0);
#pragma unroll 2
            for (int n = 1; n < kKeyWarps; n++) join(all, part(n));
            if (whole) {
                write_row(args, group, share, from + row, column, all);
            } else {
                *(float4*)(piece + (from + row) * kPieceColumns + column) = all.x;
                if (column == 0) *((Sum*)(piece + kRows * kPieceColumns) + from + row) = all.sum;
            }
        }
        __syncthreads();
    }
    if (whole) return;
    __threadfence();
    __syncthreads();
    u32* const counter = (u32*)args.scratch + share.first;
    if (threadIdx.x == 0) arrived() = atomicAdd(counter, 1u);
    __syncthreads();
    const bool last = arrived() == u32(share.pieces - 1);
    __syncthreads();
    if (!last) return;
    if (threadIdx.x == 0) *counter = 0;
    __threadfence();
    merge_pieces(args, group, share);
    __syncthreads();  // before its parts are overwritten
}
