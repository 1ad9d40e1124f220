// The key blocks of a tile, as a program's mask leaves them: those before the first and after the last that any query
// attends to are left out, and those in which every one attends to every key need no mask. For whole warps.

// Between which keys the rows' runs begin and end.
__device__ __forceinline__ RunEnds run_ends(const ProgramHead& head, int q_first, int q_last) {
    const RunEnds anywhere = {{0, head.kv_len}, {0, head.kv_len}};
    if (kProgramSorted) {
        const KeyRange top = program_row<true>(head, q_first, anywhere);
        // Neither end of the last row comes before that of the first.
        const KeyRange bottom = program_row<true>(head, q_last, {{top.first, head.kv_len}, {top.last + 1, head.kv_len}});
        return {{top.first, bottom.first}, {top.last + 1, bottom.last + 1}};
    }
    RunEnds ends = {{head.kv_len, 0}, {head.kv_len, 0}};
#pragma unroll 1
    for (int base = q_first; base <= q_last; base += 32) {
        const KeyRange row = program_row<false>(head, min_of(base + int(threadIdx.x) % 32, q_last), anywhere);
        ends.begin = {min_of(ends.begin.first, row.first), max_of(ends.begin.last, row.first)};
        ends.end = {min_of(ends.end.first, row.last + 1), max_of(ends.end.last, row.last + 1)};
    }
    const auto over_lanes = [](Between& x) {
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) {
            x.first = min_of(x.first, __shfl_xor_sync(0xffffffff, x.first, apart));
            x.last = max_of(x.last, __shfl_xor_sync(0xffffffff, x.last, apart));
        }
    };
    over_lanes(ends.begin);
    over_lanes(ends.end);
    return ends;
}

// The blocks of a mask that leaves runs of keys: exactly those that any run meets, if the runs leave no gap.
template <int kBlockKV> __device__ __forceinline__ BlockRange run_blocks(const RunEnds& ends, BlockRange b) {
    b.begin = max_of(b.begin, ends.begin.first / kBlockKV);
    b.end = min_of(b.end, div_up(ends.end.last, kBlockKV));
    b.full_begin = max_of(b.full_begin, div_up(ends.begin.last, kBlockKV));
    b.full_end = min_of(b.full_end, ends.end.first / kBlockKV);
    if (b.begin >= b.end) return BlockRange{b.begin, b.begin, b.begin, b.begin};
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

// `ends` is for those who ask for single rows later.
template <int kBlockKV>
__device__ __forceinline__ BlockRange program_blocks(const ProgramHead& head, int q_first, int q_last, const BlockRange& b,
                                                     RunEnds* ends = nullptr) {
    if (!kProgramRows) return mixed_blocks<kBlockKV>(head, q_first, q_last, b);
    const RunEnds found = run_ends(head, q_first, q_last);
    if (ends != nullptr) *ends = found;
    return run_blocks<kBlockKV>(found, b);
}
