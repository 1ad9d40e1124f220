// Of each query of this launch's heads the log-sum-exp in units of log2, and D = rowsum(dO O) - dlse.
//
// Queries that attend to nothing, and those that fill the last tile, get an infinite log-sum-exp: their weights are 0.

constexpr int kRowThreads = kHeadDimV <= 64 ? 8 : kHeadDimV <= 128 ? 16 : 32;
constexpr int kStatisticsThreads = 256;

__device__ __forceinline__ float dot_of_pairs(u32 a, u32 b, float sum) {
    const Element a0 = {u16(a)}, a1 = {u16(a >> 16)}, b0 = {u16(b)}, b1 = {u16(b >> 16)};
    return fmaf(to_float(a1), to_float(b1), fmaf(to_float(a0), to_float(b0), sum));
}

extern "C" __global__ void __launch_bounds__(kStatisticsThreads) statistics(const __grid_constant__ KernelArgs args) {
    const BackwardArgs& a = args.backward;
    const int rows = round_up(a.q_len, kBlockQ);
    const i64 index = i64(blockIdx.x) * (kStatisticsThreads / kRowThreads) + threadIdx.x / kRowThreads;
    const int group = a.heads / a.kv_heads;
    const i64 head_index = i64(args.first_pair) * group + index / rows, heads = i64(args.first_pair + args.pairs) * group;
    launch_next_stage();
    wait_for_last_stage();
    const int row = int(index % rows), part = threadIdx.x % kRowThreads;
    const bool exists = head_index < heads && row < a.q_len;
    const int batch = int(head_index / a.heads), head = int(head_index % a.heads);
    float sum = 0.0f;
    if (exists && part * 8 < kHeadDimV) {
        const Element* o = (const Element*)a.o + batch * a.o_stride[0] + head * a.o_stride[1] + row * a.o_stride[2];
        const Element* d = (const Element*)a.dout + batch * a.dout_stride[0] + head * a.dout_stride[1] + row * a.dout_stride[2];
        const uint4 x = *(const uint4*)(o + part * 8), y = *(const uint4*)(d + part * 8);
        sum = dot_of_pairs(x.x, y.x, sum), sum = dot_of_pairs(x.y, y.y, sum);
        sum = dot_of_pairs(x.z, y.z, sum), sum = dot_of_pairs(x.w, y.w, sum);
    }
#pragma unroll
    for (int i = 1; i < kRowThreads; i *= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
    if (part == 0 && head_index < heads) {
        float lse = FT_INFINITY, delta = 0.0f;
        if (exists) {
            const i64 at = head_index * a.q_len + row;
            const float natural = a.lse[at];
            lse = natural == -FT_INFINITY ? FT_INFINITY : natural * kLog2E;
            delta = a.dlse != nullptr ? sum - a.dlse[at] : sum;
        }
        float* to = args.statistics + (head_index * rows + row / kBlockQ * kBlockQ) * 2 + row % kBlockQ;
        to[0] = lse, to[kBlockQ] = delta;
    }
}
