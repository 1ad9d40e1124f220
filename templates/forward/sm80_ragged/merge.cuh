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

// Where rows of O lie on their way from team to team. Behind a thread block's last keys a team's ring has room for all
// of its rows, which take a barrier and a sum instead of one for each kMergeRows of them.
struct MergeRoom {
    static constexpr bool kRingHasAll = Layout::kRing >= kRows * kMergePitch * 4;
    float* floats;
    int of_team, rows;
    __device__ __forceinline__ explicit MergeRoom(bool ring_is_free) {
        extern __shared__ __align__(128) u8 smem[];
        const bool in_ring = kRingHasAll && ring_is_free;
        floats = in_ring ? (float*)smem : merge_floats();
        rows = in_ring ? kRows : kMergeRows;
        of_team = in_ring ? int(Layout::kRing / 4) : kMergeRows * kMergePitch;
    }
    __device__ __forceinline__ float* row(int team, int row) const {
        return floats + team * of_team + row * kMergePitch;
    }
};

// A row of a warp's O on its way to the other teams.
__device__ __forceinline__ void put_row(const float (&o)[kOTiles][4], int h, float* to, float by) {
    const int t = threadIdx.x % 4;
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

// The sum of parts in the order of their keys, by one reference for all of them: no part waits for the one before it.
// With parts that are joined one by one, pieces asked for in turn and fences of all threads around the counter 1 x 4096
// keys take 13.3 us where they take 11.9, and 1 x 32768 in e4m3 28.9 and 27.6 (H200, 32/8 heads of 128).
template <int kParts> __device__ __forceinline__ Part sum_of(const Part (&parts)[kParts]) {
    float m = -FT_INFINITY;
#pragma unroll
    for (int n = 0; n < kParts; n++) m = fmaxf(m, parts[n].sum.m);
    Part all = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), Sum{m, 0.0f}};
#pragma unroll
    for (int n = 0; n < kParts; n++) {
        const float w = weight(parts[n].sum.m, m);
        add(all.x, weighted(w, parts[n].x));
        all.sum.l += w * parts[n].sum.l;
    }
    return all;
}

// Pieces of a tile that a thread asks for at once.
constexpr int kPiecesAtOnce = 8;

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
        Part all = {};
        if (some) {
            const float* const x = piece_at(args, share.first, 0) + row * kPieceColumns + column;
            const float* const sums = piece_at(args, share.first, 0) + kRows * kPieceColumns + row * 2;
#pragma unroll 1
            for (int p = begin; p < end; p += kPiecesAtOnce) {
                Part next[kPiecesAtOnce];
#pragma unroll
                for (int n = 0; n < kPiecesAtOnce; n++) {
                    const int at = min_of(p + n, end - 1), offset = (2 * at + (at == 0)) * kPieceFloats;
                    const float2 sum = __ldcg((const float2*)(sums + offset));
                    next[n] = Part{__ldcg((const float4*)(x + offset)), Sum{sum.x, sum.y}};
                }
#pragma unroll
                for (int n = 1; n < kPiecesAtOnce; n++) {
                    if (p + n >= end) next[n].sum = Sum{-FT_INFINITY, 0.0f};  // the last one again
                }
                const Part sum = sum_of(next);
                if (p == begin) {
                    all = sum;
                } else {
                    join(all, sum);
                }
            }
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
                                      const Rows& rows, Softmax& softmax, Output& o, float v_reference,
                                      bool ring_is_free) {
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
    const MergeRoom room(ring_is_free);
    if (kRowWarps > 1) team_sync(team);  // no warp of the team reads keys there
    const bool whole = share.pieces == 1;
    float* const piece = piece_at(args, blockIdx.x, share.nth == 0);
#pragma unroll 1
    for (int from = 0; from < share.rows; from += room.rows) {
        const int some = min_of(room.rows, share.rows - from);
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = rows.first_row + i * 16 + h * 8 + lane / 4 - from;
                if (row >= 0 && row < some) put_row(o[i], h, room.row(team, row), v_reference);
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < some * kWidth; i += kThreads) {
            const int row = i / kWidth, column = i % kWidth * 4;
            Part parts[kKeyWarps];
#pragma unroll
            for (int n = 0; n < kKeyWarps; n++) {
                const float* const at = room.row(n, row) + column;
                parts[n] = Part{*(const float4*)at, merge_sums()[n * kRows + from + row]};
            }
            const Part all = sum_of(parts);
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
    u32* const counter = (u32*)args.scratch + share.first;
    if (threadIdx.x == 0) arrived() = count_up(counter);  // behind what all have written
    __syncthreads();
    if (arrived() != u32(share.pieces - 1)) return;
    if (threadIdx.x == 0) *counter = 0;
    merge_pieces(args, group, share);
    __syncthreads();  // before its parts are overwritten
}
