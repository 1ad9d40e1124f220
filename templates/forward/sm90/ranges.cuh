// Runs of keys in memory, for masks whose runs are searched for, or whose ends come in no order. A small kernel writes
// them before the attention kernel is launched, once for all heads and sequences that the mask does not tell apart:
// which keys each query row attends to, the window taken in, and of every 64 rows, which are a consumer's, where their
// runs begin and end.

enum : int { kRowsOfEnds = @{ rows_of_ends }@ };  // rows whose runs are summed up together: those of a consumer
static_assert(sizeof(RunEnds) == @{ ends_bytes }@ && sizeof(u64) == @{ run_bytes }@,
              "the memory that the host has for them");

// Where both lie.
struct Runs {
    MaskUnits units;
    int q_len, parts;  // of one unit: kRowsOfEnds rows each
    RunEnds* ends;     // of each part
    u64* rows;         // of each row: the first key, and the last in the upper half
    __device__ __forceinline__ explicit Runs(const Sm90Args& args) : units(args.forward), q_len(args.forward.q_len) {
        parts = div_up(q_len, kRowsOfEnds);
        ends = (RunEnds*)args.found;
        rows = (u64*)(ends + i64(units.count) * parts);
    }
    __device__ __forceinline__ KeyRange row(const Tile& tile, int q) const {
        const u64 run = rows[i64(units.of(tile)) * q_len + q];
        return KeyRange{int(u32(run)), int(run >> 32)};
    }
    // Of all rows of a tile, which has at most kParts parts. All are asked for at once.
    template <int kParts> __device__ __forceinline__ RunEnds of_tile(const Tile& tile) const {
        const RunEnds* const first = ends + i64(units.of(tile)) * parts + tile.row / kRowsOfEnds;
        RunEnds found[kParts];
#pragma unroll
        for (int i = 0; i < kParts; i++)
            *(uint4*)&found[i] = *(const uint4*)(first + min_of(i, (tile.rows - 1) / kRowsOfEnds));
#pragma unroll
        for (int i = 1; i < kParts; i++) found[0].join(found[i]);
        return found[0];
    }
};
#if FT_RUNS

// A warp for every 64 rows.
extern "C" __global__ void __launch_bounds__(kThreads) @{ entry }@_runs(const __grid_constant__ KernelArgs args) {
    const Runs runs(args);
    const i64 part = i64(blockIdx.x) * (kThreads / 32) + warp_uniform(threadIdx.x / 32);
    if (part >= i64(runs.units.count) * runs.parts) return;
    const int unit = int(part / runs.parts), lane = threadIdx.x % 32;
    const Tile tile = runs.units.tile(args.forward, unit, int(part % runs.parts) * kRowsOfEnds, kRowsOfEnds);
    const ProgramHead head = program_head(args, args.forward, tile);
    const int last = tile.row + tile.rows - 1;
    // Every row's ends lie between those of the first and the last.
    const RunEnds within = kProgramSorted ? run_ends(head, tile.row, last) : RunEnds::anywhere(head.kv_len);
    RunEnds ends = {{head.kv_len, 0}, {head.kv_len, 0}};
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        const int q = min_of(tile.row + i * 32 + lane, last);
        const KeyRange run = program_row<false>(head, q, within),
                       window = live_keys<kMaskLeft, kMaskRight>(args.forward, q);
        const int first_key = max_of(run.first, window.first), end = min_of(run.last, window.last) + 1;
        runs.rows[i64(unit) * runs.q_len + q] = u64(u32(end - 1)) << 32 | u32(first_key);
        // A row that attends to nothing asks for no block, but has every one masked.
        const bool none = first_key >= end;
        const RunEnds own = {{none ? head.kv_len : first_key, none ? 0 : first_key}, {none ? 0 : end, none ? 0 : end}};
        ends.join(own);
    }
    ends.over_lanes();
    if (lane == 0) runs.ends[part] = ends;
}

#endif
