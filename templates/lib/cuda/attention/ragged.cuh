// Ragged batches: where a sequence's queries and keys lie, and how many there are, read on the device. Everything that
// a call leaves out is a null pointer, which is the same for all threads.

// As hosts spell it.
typedef int int32_t;

@{ ragged_args }@

<% include "lib/cuda/attention/lengths.cuh" %>

// One sequence: its sizes, and where its rows begin.
struct Sequence {
    int q_len, kv_len;     // rows that are used, and keys
    i64 q_row;             // first row in Q, O and LSE, where sequences are packed
    int first;             // place of the first key in the sequence's row of the store
    i64 pages;             // first entry of its pages in the tables
    int slot;              // the page that is all of its row, where there is no table
    int window_left, window_right;
};

// Lengths are clamped to their bounds, whatever the arrays hold: what a host promised is what is read. By `read`, which
// takes an array, an index and the words of an entry.
template <typename Read>
__device__ __forceinline__ Sequence sequence_by(const RaggedArgs& args, int b, Read read) {
    const int words = args.length_words;
    const auto entry = [&](const int* array, int i) { return read(array, i, words); };
    const Entry q_begin = entry(args.q_begin, b), q_end = entry(args.q_begin, b + 1);
    const Entry q_length = entry(args.q_lengths, b), kv_length = entry(args.kv_lengths, b);
    const Entry pages_begin = entry(args.pages_begin, b), pages_end = entry(args.pages_begin, b + 1);
    const Entry last_page = entry(args.last_page, b), left_pad = entry(args.left_pad, b);
    const Entry kv_begin = entry(args.kv_begin, b), kv_end = entry(args.kv_begin, b + 1);
    const Entry added_begin = entry(args.kv_added_begin, b), added_end = entry(args.kv_added_begin, b + 1);
    const Entry slot = read(args.slots, b, args.table_words);

    Sequence s;
    s.q_row = 0, s.q_len = args.q_len;
    if (args.q_begin != nullptr) {
        const int begin = max_of(q_begin.value(words), 0);
        s.q_row = begin, s.q_len = min_of(max_of(q_end.value(words) - begin, 0), args.q_len);
    }
    if (args.q_lengths != nullptr) s.q_len = min_of(max_of(q_length.value(words), 0), s.q_len);

    s.first = 0, s.kv_len = args.kv_len, s.slot = b, s.pages = i64(b) * args.table_stride;
    if (args.pages_begin != nullptr) {
        s.pages = max_of(pages_begin.value(words), 0);
        const int pages = max_of(pages_end.value(words) - int(s.pages), 0);
        const i64 before = pages > 0 ? i64(pages - 1) * args.page_tokens : 0;
        const int last = pages == 0 ? 0 : args.last_page == nullptr ? args.page_tokens : last_page.value(words);
        s.kv_len = int(min_of<i64>(max_of<i64>(before + last, 0), args.kv_len));
    }
    if (args.kv_begin != nullptr) {
        s.first = max_of(kv_begin.value(words), 0), s.slot = 0;
        s.kv_len = min_of(max_of(kv_end.value(words) - s.first, 0), args.kv_len);
    }
    if (args.slots != nullptr) s.slot = slot.value(args.table_words);
    if (args.kv_lengths != nullptr || args.kv_added_begin != nullptr) {
        i64 length = max_of(kv_length.value(words), 0);
        length += args.kv_added;
        length += added_end.value(words) - added_begin.value(words);
        s.kv_len = int(min_of<i64>(max_of<i64>(length, 0), args.kv_len));
    }
    if (args.left_pad != nullptr) {
        const int pad = min_of(max_of(left_pad.value(words), 0), s.kv_len);
        s.first += pad, s.kv_len -= pad;
    }
    s.window_left = args.window_left, s.window_right = args.window_right;
    return s;
}
__device__ __forceinline__ Sequence sequence_of(const RaggedArgs& args, int b) {
    return sequence_by(args, b, [](const int* array, int i, int words) { return read_entry(array, i, words); });
}

// Division of places by the tokens of a page.
struct PageOf {
    int page, token;
};
__device__ __forceinline__ PageOf page_of(const RaggedArgs& args, int place) {
    const u32 page = u32(place) / u32(args.page_tokens);
    return PageOf{int(page), int(u32(place) - page * u32(args.page_tokens))};
}

// What stands for the n-th page of a sequence's row, by read_entry(), and whether that is a page of the store.
__device__ __forceinline__ int listed_page(const RaggedArgs& args, const int* table, const Sequence& s, Entry read) {
    return table == nullptr ? s.slot : read.value(args.table_words);
}
__device__ __forceinline__ bool is_page(const RaggedArgs& args, int id) { return u32(id) < u64(args.pages); }

// The store's page that holds the n-th page of a sequence's row; -1 for an identifier of no page.
__device__ __forceinline__ int page_id(const RaggedArgs& args, const int* table, const Sequence& s, int n) {
    const int id = listed_page(args, table, s, read_entry(table, s.pages + n, args.table_words));
    return is_page(args, id) ? id : -1;
}
