// dQ of tiles that have had all their turns, from their sums: scaled, rounded, where it belongs. A launch of its own:
// 50 us of 2400 on an H200 for 16,384 rows of 2048 columns. A warp in each thread block of the launch before that takes
// tiles as they are done is one of 132 and takes 1000 us for them, which is more than all of 512 queries and keys take.
#if FT_TURNS

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) x += __shfl_xor_sync(0xffffffff, x, apart);
    return x;
}
// Four elements of a row from the lane's columns on, and their products with others, summed over the warp.
struct Four {
    u32 pairs[2];
    __device__ __forceinline__ Four(const Element* row, int columns) {
        const int column = lane() * 4;
#pragma unroll
        for (int i = 0; i < 2; i++) pairs[i] = column < columns ? __ldg((const u32*)(row + column) + i) : 0;
    }
    __device__ __forceinline__ float at(int i) const {
        const Element x = {u16(pairs[i / 2] >> i % 2 * 16)};
        return to_float(x);
    }
    __device__ __forceinline__ float dot(const Four& y) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) sum = fmaf(at(i), y.at(i), sum);
        return warp_sum(sum);
    }
};

// dQ of a row once more, in fp32 and from the keys that it sees alone. Each lane has four columns.
__device__ __forceinline__ void sum_row_again(const KernelArgs& args, const Visible& visible, const Pair& pair,
                                              int head_index, int head, int row) {
    const BackwardArgs& a = args.backward;
    const float* const statistics = statistics_of(args, head_index) + row / kBlockQ * kBlockQ * 2 + row % kBlockQ;
    const float lse = statistics[0], delta = statistics[kBlockQ];
    const Four q(row_of(a.q, a.q_stride, pair.entry, head, row), kHeadDimQK);
    const Four dout(row_of(a.dout, a.dout_stride, pair.entry, head, row), kHeadDimV);
#if FT_DROPOUT
    const Dropout dropout = dropout_of(a);
    const u32 of_pair = dropout_pair(a, pair.batch, head);
#endif
    float dq[4] = {};
    const KeyRange live = live_keys<kMaskLeft, kMaskRight>(LiveSizes{visible}, row);
#pragma unroll 1
    for (int key = live.first; key <= live.last; key++) {
#if FT_DROPOUT
        const float kept = keeps_score(dropout, of_pair, row, key) ? a.dropout_scale : 0.0f;
        const float dp = kept * dout.dot(Four(row_of(a.v, a.v_stride, pair.entry, pair.kv_head, key), kHeadDimV));
#else
        const float dp = dout.dot(Four(row_of(a.v, a.v_stride, pair.entry, pair.kv_head, key), kHeadDimV));
#endif
        const Four k(row_of(a.k, a.k_stride, pair.entry, pair.kv_head, key), kHeadDimQK);
        const float s = q.dot(k);
        if (takes_no_part(s, a.scale)) continue;
        const float slope = exp2_approx(fmaf(s, a.scale * kLog2E, -lse)) * (dp - delta);
#pragma unroll
        for (int i = 0; i < 4; i++) dq[i] = fmaf(slope, k.at(i), dq[i]);
    }
    if (lane() * 4 >= kHeadDimQK) return;
    Element* const to = (Element*)a.dq + pair.entry * a.dq_stride[0] + head * a.dq_stride[1] + row * a.dq_stride[2];
    *(uint2*)(to + lane() * 4) = uint2{pack<Element>(dq[0] * a.scale, dq[1] * a.scale),
                                       pack<Element>(dq[2] * a.scale, dq[3] * a.scale)};
}

// 64 rows a thread block, 16 a warp. Sums lie as products leave them: for every 8 columns 16 bytes of each thread.
constexpr int kRowsThreads = @{ rows_threads }@;
extern "C" __global__ void __launch_bounds__(kRowsThreads) @{ entry }@_rows(const __grid_constant__ KernelArgs args) {
    constexpr int kParts = kColumnsQK / 8;
    static_assert(kRowsThreads == 128, "as many as have the sums of 64 rows");
    const BackwardArgs& a = args.backward;
    const Visible visible(a);
    const int group = a.heads / a.kv_heads, parts = div_up(visible.q_len, 64);
    const int head_index = blockIdx.x / parts, first = blockIdx.x % parts * 64, tile = first / kBlockQ;
    const Pair pair(a, args.first_pair + head_index / group);
    const int head = pair.head(head_index % group), row = first + warp() * 16 + lane() / 4;
    const bool seen = visible.first_block(tile) <= visible.last_block(tile);
    const float* const sums = dq_sums_of(args, head_index) + i64(tile) * kBlockQ * kColumnsQK +
                              first % kBlockQ * kColumnsQK + threadIdx.x * 4;
    Element* const to = (Element*)a.dq + pair.entry * a.dq_stride[0] + head * a.dq_stride[1] + row * a.dq_stride[2] +
                        lane() % 4 * 2;
    let_next_launch_begin();
    wait_for_launch_before();
    float met = 0.0f;
    float4 x[kParts];
#pragma unroll
    for (int j = 0; j < kParts; j++)
        x[j] = seen ? __ldcg((const float4*)(sums + j * 512)) : float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kHeadDimQK / 8; j++) {
        met = fmaf(x[j].x, 0.0f, fmaf(x[j].y, 0.0f, fmaf(x[j].z, 0.0f, fmaf(x[j].w, 0.0f, met))));
        if (row < visible.q_len) *(u32*)(to + j * 8) = pack<Element>(x[j].x * a.scale, x[j].y * a.scale);
        if (row + 8 < visible.q_len)
            *(u32*)(to + 8 * a.dq_stride[2] + j * 8) = pack<Element>(x[j].z * a.scale, x[j].w * a.scale);
    }
    if (!__any_sync(0xffffffff, met != 0.0f)) return;
    __syncwarp();
    const int begin = first + warp() * 16, end = min_of(begin + 16, visible.q_len);
#pragma unroll 1
    for (int r = begin; r < end; r++) sum_row_again(args, visible, pair, head_index, head, r);
}

#endif
