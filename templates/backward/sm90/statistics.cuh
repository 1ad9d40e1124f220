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

extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
    @{ entry }@_statistics(const __grid_constant__ KernelArgs args) {
    const BackwardArgs& a = args.backward;
    const int rows = round_up(a.q_len, kBlockQ), group = a.heads / a.kv_heads;
    const i64 index = i64(blockIdx.x) * (kStatisticsThreads / kRowThreads) + threadIdx.x / kRowThreads;
    const i64 head_index = index / rows;  // of the wave
    const int row = int(index % rows), part = threadIdx.x % kRowThreads;
    const i64 all_heads = i64(args.first_pair) * group + head_index;
    const int batch = int(all_heads / a.heads), head = int(all_heads % a.heads);
    let_next_launch_begin();
    wait_for_launch_before();
    float sum = 0.0f;
    if (row < a.q_len && part * 8 < kHeadDimV) {
        const uint4 x = *(const uint4*)(row_of(a.o, a.o_stride, batch, head, row) + part * 8);
        const uint4 y = *(const uint4*)(row_of(a.dout, a.dout_stride, batch, head, row) + part * 8);
        sum = dot_of_pairs(x.x, y.x, sum), sum = dot_of_pairs(x.y, y.y, sum);
        sum = dot_of_pairs(x.z, y.z, sum), sum = dot_of_pairs(x.w, y.w, sum);
    }
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
                *(float2*)row_of((Element*)a.dq, a.dq_stride, batch, head, row) = make_float2(natural, far.log_sum * kLog2E);
            }
            delta = a.dlse != nullptr ? sum - a.dlse[at] : sum;
        }
        float* to = statistics_of(args, head_index) + row / kBlockQ * kBlockQ * 2 + row % kBlockQ;
        to[0] = lse, to[kBlockQ] = delta;
    }
}
