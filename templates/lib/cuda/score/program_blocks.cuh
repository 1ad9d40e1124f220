// The key blocks of a tile, as a program's mask leaves them: those before the first and after the last that any query
// attends to are left out, and those in which every one attends to every key need no mask. For whole warps, or for
// single threads where ends of runs come in order and nothing is searched for.

// Between which keys the rows' runs begin and end.
__device__ __forceinline__ RunEnds run_ends(const ProgramHead& head, int q_first, int q_last) {
    const RunEnds anywhere = RunEnds::anywhere(head.kv_len);
    if (kProgramSorted && kProgramSearch) {
        // One half of the warp looks for the first row's, the other for the last's.
        const KeyRange row = program_row<true>(head, threadIdx.x % 32 < 16 ? q_first : q_last, anywhere);
        const auto of = [](int x) { return Between{__shfl_sync(0xffffffff, x, 0), __shfl_sync(0xffffffff, x, 16)}; };
        return {of(row.first), of(row.last + 1)};
    }
    if (kProgramSorted) {
        const KeyRange top = program_row<false>(head, q_first, anywhere),
                       bottom = program_row<false>(head, q_last, anywhere);
        return {{top.first, bottom.first}, {top.last + 1, bottom.last + 1}};
    }
    RunEnds ends = {{head.kv_len, 0}, {head.kv_len, 0}};
#pragma unroll 1
    for (int base = q_first; base <= q_last; base += 32) {
        const KeyRange row = program_row<false>(head, min_of(base + int(threadIdx.x) % 32, q_last), anywhere);
        ends.join({{row.first, row.first}, {row.last + 1, row.last + 1}});
    }
    ends.over_lanes();
    return ends;
}

// The blocks of a mask that leaves runs of keys: exactly those that any run meets, if the runs leave no gap.
template <int kBlockKV> __device__ __forceinline__ BlockRange run_blocks(const RunEnds& ends, BlockRange b) {
    b.begin = max_of(b.begin, ends.begin.first / kBlockKV);
    b.end = min_of(b.end, div_up(ends.end.last, kBlockKV));
    b.full_begin = max_of(b.full_begin, div_up(ends.begin.last, kBlockKV));
    b.full_end = min_of(b.full_end, ends.end.first / kBlockKV);
    if (b.begin >= b.end) return BlockRange{};
    if (b.full_begin >= b.full_end) b.full_begin = b.full_end = b.begin;
    return b;
}

// Of any other mask: the longest run of whole blocks goes without a mask. The lanes look at a block each.
template <int kBlockKV>
__device__ __forceinline__ BlockRange mixed_blocks(const ProgramHead& head, int q_first, int q_last, BlockRange b) {
    const int lane = threadIdx.x % 32;
    const KeyRange keys = program_keys(head, q_first, q_last);
    b.begin = max_of(b.begin, keys.first / kBlockKV);
    b.end = min_of(b.end, (keys.last + kBlockKV) / kBlockKV);
    int begin = b.end, end = b.end, run_begin = 0, run_end = -1, full_begin = 0, full_end = 0;
#pragma unroll 1
    for (int base = b.begin; base < b.end; base += 32) {
        const int n = base + lane;
        int kind = -1;
        if (n < b.end) {
            kind = program_tile(head, q_first, q_last, n * kBlockKV, min_of(n * kBlockKV + kBlockKV, head.kv_len) - 1);
        }
        const u32 live = __ballot_sync(0xffffffff, kind >= 0);
        u32 whole = __ballot_sync(0xffffffff, kind > 0 && n >= b.full_begin && n < b.full_end);
        if (live != 0) {
            begin = min_of(begin, base + __ffs(int(live)) - 1);
            end = base + 32 - __clz(int(live));
        }
        while (whole != 0) {
            const int from = __ffs(int(whole)) - 1;
            const u32 others = ~(whole >> from);
            const int length = others == 0 ? 32 : __ffs(int(others)) - 1;
            if (base + from != run_end) run_begin = base + from;
            run_end = base + from + length;
            if (run_end - run_begin > full_end - full_begin) full_begin = run_begin, full_end = run_end;
            whole = from + length == 32 ? 0 : whole & (0xffffffff << (from + length));
        }
    }
    if (begin == b.end) return BlockRange{begin, begin, begin, begin};
    if (full_begin == full_end) full_begin = full_end = begin;
    return BlockRange{begin, full_begin, full_end, end};
}

template <int kBlockKV>
__device__ __forceinline__ BlockRange program_blocks(const ProgramHead& head, int q_first, int q_last,
                                                     const BlockRange& b) {
    if (!kProgramRows) return mixed_blocks<kBlockKV>(head, q_first, q_last, b);
    return run_blocks<kBlockKV>(run_ends(head, q_first, q_last), b);
}
