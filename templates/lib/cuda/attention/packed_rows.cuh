// Where the rows of a packed sequence lie.

<% include "lib/cuda/attention/lengths.cuh" %>

// Where a sequence lies in a pack of `all` rows.
struct PackedRows {
    i64 first;
    int rows;
};

// Cut to their bounds, whatever the arrays hold: what a host promised is what is touched.
__device__ __forceinline__ PackedRows packed_rows(const int* begin, const int* lengths, int b, int words, i64 all,
                                                  int most) {
    const Entry from = read_entry(begin, b, words), to = read_entry(begin, b + 1, words);
    const Entry used = read_entry(lengths, b, words);
    PackedRows r;
    r.first = min_of<i64>(max_of(from.value(words), 0), all);
    r.rows = int(min_of<i64>(max_of<i64>(to.value(words) - r.first, 0), min_of<i64>(most, all - r.first)));
    if (lengths != nullptr) r.rows = min_of(max_of(used.value(words), 0), r.rows);
    return r;
}
