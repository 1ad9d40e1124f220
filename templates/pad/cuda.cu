/* @{ header }@ */

// Rows of 16-bit elements into rows of another length and place: into longer ones with zeros behind them, which copy
// engine and vector loads take, and out of those again. Up to five tensors in one launch, one after the other.
//
// A warp has kRows rows and moves 32 elements of each at a time: neighbours in memory by neighbouring threads, wherever
// a row begins, so that both sides are whole sectors. All loads of a step come before its stores.

<% include "lib/cuda/attention/types.cuh" %>
<% include "lib/cuda/ptx/dependent_launch.cuh" %>
@{ pad_args }@

// Schedule.
constexpr int kThreads = @{ threads }@;

using KernelArgs = PadArgs;

constexpr int kTensors = 5;
constexpr int kRows = 8;
static_assert(kThreads / 32 * kRows == @{ pad_rows }@, "the rows of a thread block that the host counts with");

extern "C" __global__ void __launch_bounds__(kThreads) @{ entry }@(const __grid_constant__ KernelArgs args) {
    int nth = 0;
    while (nth + 1 < kTensors && int(blockIdx.x) >= args.blocks_end[nth]) nth++;
    const int block = int(blockIdx.x) - (nth == 0 ? 0 : args.blocks_end[nth - 1]);
    const u32 first = (u32(block) * (kThreads / 32) + threadIdx.x / 32) * kRows, count = u32(args.count[nth]);
    if (first >= count) return;
    const u32 live = min_of(count - first, u32(kRows));
    const u32 rows = u32(args.rows[nth]), heads = u32(args.heads[nth]);
    const int from_dim = args.from_dim[nth], to_dim = args.to_dim[nth];

    const u16* from[kRows];
    u16* to[kRows];
    u32 row = first % rows, head = first / rows % heads, batch = first / rows / heads;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const auto at = [&](const i64* stride) { return batch * stride[0] + head * stride[1] + row * stride[2]; };
        from[r] = (const u16*)args.from[nth] + at(args.from_stride + 3 * nth);
        to[r] = (u16*)args.to[nth] + at(args.to_stride + 3 * nth);
        if (++row == rows) {
            row = 0;
            if (++head == heads) head = 0, batch++;
        }
    }
    wait_for_launch_before();
    let_next_launch_begin();

    for (int column = threadIdx.x % 32; column < to_dim; column += 32) {
        u16 x[kRows];
#pragma unroll
        for (int r = 0; r < kRows; r++) x[r] = u32(r) < live && column < from_dim ? from[r][column] : u16(0);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            if (u32(r) < live) to[r][column] = x[r];
        }
    }
}
