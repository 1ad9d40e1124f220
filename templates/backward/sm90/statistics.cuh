// Of each query of the wave's heads the log-sum-exp in units of log2, and D = rowsum(dO O) - dlse.
//
// Queries that attend to nothing, and those that fill the last tile, get an infinite log-sum-exp: their weights are 0.
// Rows far from zero (far_rows.cuh) get a mark, and what their scores are held against waits in the row of dQ, which is
// written last.

constexpr int kRowThreads = kHeadDimV <= 64 ? 8 : kHeadDimV <= 128 ? 16 : 32;
constexpr int kStatisticsThreads = 256;
static_assert(kStatisticsThreads / kRowThreads == @{ statistics_rows }@, "the rows of a thread block");

__device__ __forceinline__ float dot_of_pairs(u32 a, u32 b, float sum) {
    const Element a0 = {u16(a)}, a1 = {u16(a >> 16)}, b0 = {u16(b)}, b1 = {u16(b >> 16)};
    return fmaf(to_float(a1), to_float(b1), fmaf(to_float(a0), to_float(b0), sum));
}

#if FT_RESIDUAL
// Of its part of what O lost with that of dO.
__device__ __forceinline__ float sum_of_residual(const BackwardArgs& a, int entry, int head, i64 row, int part,
                                                 const uint4& dout) {
    const uint4 lost = *(const uint4*)(residual_row(a, entry, head, row) + part * 8);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 x = (&lost.x)[i], y = (&dout.x)[i];
        sum = fmaf(to_float(bf16{u16(x)}), to_float(Element{u16(y)}), sum);
        sum = fmaf(to_float(bf16{u16(x >> 16)}), to_float(Element{u16(y >> 16)}), sum);
    }
    return sum;
}
#endif

// The sum of products of a thread's part of a row.
__device__ __forceinline__ float sum_of_part(const BackwardArgs& a, int entry, int head, i64 row, int part) {
    const uint4 x = *(const uint4*)(row_of(a.o, a.o_stride, entry, head, row) + part * 8);
    const uint4 y = *(const uint4*)(row_of(a.dout, a.dout_stride, entry, head, row) + part * 8);
    const float sum = dot_of_pairs(x.y, y.y, dot_of_pairs(x.x, y.x, 0.0f));
#if FT_RESIDUAL
    return dot_of_pairs(x.w, y.w, dot_of_pairs(x.z, y.z, sum)) + sum_of_residual(a, entry, head, row, part, y);
#else
    return dot_of_pairs(x.w, y.w, dot_of_pairs(x.z, y.z, sum));
#endif
}
// Of a row that exists, or of none.
__device__ __forceinline__ void leave_statistics(const BackwardArgs& a, float* to, bool exists, i64 at, float sum) {
    float lse = FT_INFINITY, delta = 0.0f;
    if (exists) {
        const float natural = a.lse[at];
        lse = natural == -FT_INFINITY ? FT_INFINITY : natural * kLog2E;
        delta = a.dlse != nullptr ? sum - a.dlse[at] : sum;
    }
    to[0] = lse, to[kBlockQ] = delta;
}

#if @{ packed }@
// Of all packed sequences, in the first wave: row blocks of all heads.
extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
    @{ entry }@_statistics(const __grid_constant__ KernelArgs args) {
    const BackwardArgs& a = args.backward;
    constexpr int kRows = kStatisticsThreads / kRowThreads, kAtOnce = kRows < 64 ? 64 : kRows;
    const int part = threadIdx.x % kRowThreads;
    let_next_launch_begin();
    wait_for_launch_before();
    if (args.first_pair > 0) return;
    const Table table(args);
    const int end = int(table.starts()[table.most_waves()].y) * (kRowBlock / kAtOnce);
#pragma unroll 1
    for (int i = blockIdx.x; i < end; i += gridDim.x) {
        const int block = i / (kRowBlock / kAtOnce), head = block % a.heads, entry = block / a.heads;
        const SequenceRecord& s = table.sequences()[table.row_owners()[entry]];
        const int first = (entry - s.row_entry) * kRowBlock + i % (kRowBlock / kAtOnce) * kAtOnce, q_len = s.q_len;
        const int until = min_of(first + kAtOnce, round_up(q_len, kBlockQ));
        const i64 q_row = s.q_row;
        float* const to = table.statistics(head, first_tile(s));
#pragma unroll 4
        for (int row = first + threadIdx.x / kRowThreads; row - threadIdx.x / kRowThreads < until; row += kRows) {
            float sum = 0.0f;
            if (row < q_len && part * 8 < kHeadDimV) sum = sum_of_part(a, 0, head, q_row + row, part);
#pragma unroll
            for (int apart = 1; apart < kRowThreads; apart *= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
            if (part == 0 && row < until)
                leave_statistics(a, to + row / kBlockQ * kBlockQ * 2 + row % kBlockQ, row < q_len,
                                 head * a.q_rows + q_row + row, sum);
        }
    }
}
#else
// Those of the next launch. There may be thread blocks without rows, so that they are cleared in any case.
__device__ __forceinline__ void clear_counters(const KernelArgs& args, int rows, i64 index, int part) {
    constexpr int kRows = kTurns ? kBlockQ : 128 * kRowTiles;
    if (part != 0 || (index != 0 && index % max_of(rows, 1) % kRows != 0)) return;
    const i64 slots = Visible(args.backward).slots();
    if (index == 0) {
        for (int i = 0; i < kCounters; i++) counters_of(args, slots)[i] = 0;
    }
    if (rows == 0) return;
    if constexpr (kWalks) {
        const int group = args.backward.heads / args.backward.kv_heads;
        if (index / rows % group == 0) {
            const int blocks = div_up(args.backward.kv_len, kKeys);
            u32* const added = walks_added(args, index / rows / group * blocks, slots);
#pragma unroll 1
            for (int i = int(index % rows) / kRows; i < blocks * kWarpsOfKeys; i += div_up(rows, kRows)) added[i] = 0;
        }
    }
    if (!kTurns && !kJoint) return;
    u32* const counters = kTurns ? turns_of(args, index / rows) : written_of(args, index / rows, slots);
    counters[index % rows / kRows] = 0;
}

extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
    @{ entry }@_statistics(const __grid_constant__ KernelArgs args) {
    const BackwardArgs& a = args.backward;
    const int rows = round_up(a.q_len, kBlockQ), group = a.heads / a.kv_heads;
    const i64 index = i64(blockIdx.x) * (kStatisticsThreads / kRowThreads) + threadIdx.x / kRowThreads;
    const i64 head_index = index / max_of(rows, 1);  // of the wave
    const int row = int(index % max_of(rows, 1)), part = threadIdx.x % kRowThreads;
    let_next_launch_begin();
    wait_for_launch_before();
    if (kJoint || kTurns || kWalks) clear_counters(args, rows, index, part);
    if (rows == 0) return;
    const i64 all_heads = i64(args.first_pair) * group + head_index;
    const int batch = int(all_heads / a.heads), head = int(all_heads % a.heads);
    float sum = 0.0f;
    if (row < a.q_len && part * 8 < kHeadDimV) sum = sum_of_part(a, batch, head, row, part);
#pragma unroll
    for (int i = 1; i < kRowThreads; i *= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
    FarRow far = {0.0f, 0.0f};
    if constexpr (kProgramFar) {
        const Tile tile = {batch, head, head / group, row, a.q_len - row};
        const ProgramHead of = program_head(args, a, tile);
        const i64 at = all_heads * a.q_len + row;
        far = far_row<kRowThreads>(a, of, tile, 0, at, [&](int q, int key, float score) {
            return score_gradient(of, q, key, score).value;
        });
    }
    if (part == 0) {
        float lse = FT_INFINITY, delta = 0.0f;
        if (row < a.q_len) {
            const i64 at = all_heads * a.q_len + row;
            const float natural = kProgramFar ? far.maximum : a.lse[at];
            lse = natural == -FT_INFINITY ? FT_INFINITY : natural * kLog2E;
            if (kProgramFar && fabsf(natural) >= kFarNatural && fabsf(natural) < FT_INFINITY) {
                lse = kFarMark;
                *(float2*)row_of((Element*)a.dq, a.dq_stride, batch, head, row) =
                    make_float2(natural, far.log_sum * kLog2E);
            }
            delta = a.dlse != nullptr ? sum - a.dlse[at] : sum;
        }
        float* to = statistics_of(args, head_index) + row / kBlockQ * kBlockQ * 2 + row % kBlockQ;
        to[0] = lse, to[kBlockQ] = delta;
    }
}
#endif
