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
__device__ __forceinline__ Sum* merged_sums() {
    extern __shared__ __align__(128) u8 smem[];
    return (Sum*)(smem + Layout::kMerged);
}

__device__ __forceinline__ float* piece_at(const KernelArgs& args, int block, int which) {
    return (float*)((u8*)args.scratch + kCounterBytes) + (i64(block) * 2 + which) * kPieceFloats;
}

// 2^(m - to) of a reference that may be none at all.
__device__ __forceinline__ float weight(float m, float to) { return m == -FT_INFINITY ? 0.0f : exp2_approx(m - to); }

// A part of O by its weight, which may be too small for a float: what is no number remains.
__device__ __forceinline__ float weighted(float w, float x) { return fabsf(x) < FT_INFINITY ? w * x : x; }

// Writes four columns of a row of O, and with the first of them its log-sum-exp.
__device__ __forceinline__ void write_row(const KernelArgs& args, const Share& share, int row, int column, float4 x,
                                          Sum sum) {
    if (column >= kHeadDimV) return;
    const int group = group_of(args), packed = share.tile * kRows + row;
    const int q = packed / group, head = share.kv_head * group + packed % group;
    float inverse = sum.l == 0.0f ? 0.0f : 1.0f / sum.l;
    float lse = sum.l == 0.0f ? -FT_INFINITY : kLn2 * add_log2(sum.m, sum.l);
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
    if (kEmptyIsZero && sum.l == 0.0f) x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const i64 at = share.q_row + q;
    const bool packs = args.q_begin != nullptr;
    const i64 o_batch = packs ? 0 : share.sequence * args.o_stride[0];
    u16* o = (u16*)args.o + o_batch + head * args.o_stride[1] + at * args.o_stride[2] + column;
    *(uint2*)o = make_uint2(pack<Element>(x.x * inverse, x.y * inverse), pack<Element>(x.z * inverse, x.w * inverse));
    if (column == 0 && args.lse != nullptr) {
        const i64 lse_batch = packs ? 0 : share.sequence * args.lse_stride[0];
        float* to = args.lse + lse_batch + head * args.lse_stride[1] + at * args.lse_stride[2];
        *to = lse == -FT_INFINITY ? args.lse_empty : lse * args.lse_unit;
    }
}

// Merges the pieces of a tile, all threads together.
__device__ __forceinline__ void merge_pieces(const KernelArgs& args, const Share& share) {
    constexpr int kWidth = kPieceColumns / 4;  // of a row, in steps of four columns
    float* const weights = merge_floats();
    float4* const parts = (float4*)(weights + kMergeFloats - 4 * kThreads);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto piece = [&](int p) { return piece_at(args, share.first + p, p == 0); };
    // As many rows at once as have room for their weights.
    const int most = min_of(max_of((kMergeFloats - 4 * kThreads) / share.pieces, 1), share.rows);
    for (int from = 0; from < share.rows; from += most) {
        const int rows = min_of(most, share.rows - from);
        for (int r = warp; r < rows; r += kThreads / 32) {
            float m = -FT_INFINITY, l = 0.0f;
            for (int p = lane; p < share.pieces; p += 32) {
                const Sum* at = (const Sum*)(piece(p) + kRows * kPieceColumns) + from + r;
                if (__ldcg(&at->l) != 0.0f) m = fmaxf(m, __ldcg(&at->m));
            }
#pragma unroll
            for (int apart = 16; apart > 0; apart /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, apart));
            for (int p = lane; p < share.pieces; p += 32) {
                const Sum* at = (const Sum*)(piece(p) + kRows * kPieceColumns) + from + r;
                const float part = __ldcg(&at->l), w = weight(__ldcg(&at->m), m);
                weights[p * rows + r] = w;
                l += part == 0.0f ? 0.0f : w * part;
            }
#pragma unroll
            for (int apart = 16; apart > 0; apart /= 2) l += __shfl_xor_sync(0xffffffff, l, apart);
            if (lane == 0) merged_sums()[r] = Sum{m, l};
        }
        __syncthreads();
        // Few columns are shared by several threads, each with pieces that follow each other.
        const int columns = rows * kWidth, teams = min_of(max_of(kThreads / columns, 1), share.pieces);
        const int team = int(threadIdx.x) / columns;
        const int first = teams > 1 ? threadIdx.x % columns : threadIdx.x, apart = teams > 1 ? columns : kThreads;
        for (int i = first; i < columns && (teams == 1 || team < teams); i += apart) {
            const int r = i / kWidth, column = i % kWidth * 4;
            const int begin = teams > 1 ? share.pieces * team / teams : 0;
            const int end = teams > 1 ? share.pieces * (team + 1) / teams : share.pieces;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
            for (int p = begin; p < end; p++) {
                const float4 x = __ldcg((const float4*)(piece(p) + (from + r) * kPieceColumns + column));
                const float w = weights[p * rows + r];
                sum.x += weighted(w, x.x), sum.y += weighted(w, x.y);
                sum.z += weighted(w, x.z), sum.w += weighted(w, x.w);
            }
            if (teams > 1) {
                parts[team * columns + i] = sum;
            } else {
                write_row(args, share, from + r, column, sum, merged_sums()[r]);
            }
        }
        __syncthreads();
        if (teams > 1) {
            for (int i = threadIdx.x; i < columns; i += kThreads) {
                float4 sum = parts[i];
                for (int n = 1; n < teams; n++) {
                    const float4 x = parts[n * columns + i];
                    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
                }
                write_row(args, share, from + i / kWidth, i % kWidth * 4, sum, merged_sums()[i / kWidth]);
            }
            __syncthreads();
        }
    }
}

template <typename Softmax>
__device__ __forceinline__ void merge(const KernelArgs& args, int team, const Share& share, const Rows& rows,
                                      Softmax& softmax, Output& o, float v_reference) {
    const int lane = threadIdx.x % 32;
    float own[kMTiles][2];  // weights of this team's sums
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            softmax.finish(i, h);
            // Scores that all are NaN have no maximum; their sum, of reference 0, must not be lost.
            const float l = softmax.l[i][h];
            const float reference = softmax.m[i][h] == -FT_INFINITY ? 0.0f : softmax.m[i][h] * rows.factor;
            const float m = l == 0.0f ? -FT_INFINITY : reference;
            own[i][h] = m;
            if (lane % 4 == 0) merge_sums()[team * kRows + rows.first_row + i * 16 + h * 8 + lane / 4] = Sum{m, l};
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = rows.first_row + i * 16 + h * 8 + lane / 4;
            float m = -FT_INFINITY, l = 0.0f;
#pragma unroll
            for (int n = 0; n < kKeyWarps; n++) m = fmaxf(m, merge_sums()[n * kRows + row].m);
#pragma unroll
            for (int n = 0; n < kKeyWarps; n++) {
                const Sum part = merge_sums()[n * kRows + row];
                l += weight(part.m, m) * part.l;
            }
            own[i][h] = weight(own[i][h], m) * (kScalePerToken ? v_reference : 1.0f);
            if (team == 0 && lane % 4 == 0) merged_sums()[row] = Sum{m, l};
        }
    }
    const bool whole = share.pieces == 1;
    float* const piece = whole ? nullptr : piece_at(args, blockIdx.x, share.nth == 0);
    constexpr int kWidth = kPieceColumns / 4;  // of a row, in steps of four columns
    for (int from = 0; from < share.rows; from += kMergeRows) {
        const int some = min_of(kMergeRows, share.rows - from);
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = rows.first_row + i * 16 + h * 8 + lane / 4 - from;
                if (row < 0 || row >= some) continue;
                float* const to = merge_floats() + (team * kMergeRows + row) * kMergePitch;
#pragma unroll
                for (int j = 0; j < kOTiles; j++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        if (kOTiles * 8 == kPieceColumns || column_of(j, e) < kPieceColumns) {
                            to[column_of(j, e)] = weighted(own[i][h], o[i][j][2 * h + e]);
                        }
                    }
                }
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < some * kWidth; i += kThreads) {
            const int r = i / kWidth, column = i % kWidth * 4;
            const float* at = merge_floats() + r * kMergePitch + column;
            float4 sum = *(const float4*)at;
#pragma unroll
            for (int n = 1; n < kKeyWarps; n++) {
                const float4 x = *(const float4*)(at + n * kMergeRows * kMergePitch);
                sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
            }
            if (whole) {
                write_row(args, share, from + r, column, sum, merged_sums()[from + r]);
            } else {
                *(float4*)(piece + (from + r) * kPieceColumns + column) = sum;
            }
        }
        __syncthreads();
    }
    if (whole) return;
    for (int r = threadIdx.x; r < share.rows; r += kThreads) {
        *((Sum*)(piece + kRows * kPieceColumns) + r) = merged_sums()[r];
    }
    __threadfence();
    __syncthreads();
    u32* const counter = (u32*)args.scratch + share.first;
    u32* const arrived = (u32*)(merged_sums() + kRows);
    if (threadIdx.x == 0) *arrived = atomicAdd(counter, 1u);
    __syncthreads();
    const bool last = *arrived == u32(share.pieces - 1);
    __syncthreads();
    if (!last) return;
    if (threadIdx.x == 0) *counter = 0;
    __threadfence();
    merge_pieces(args, share);
}
