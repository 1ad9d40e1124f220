// Which scores are dropped (FT_DROPOUT). By their places alone, so that no schedule changes which: one call of Philox
// 4x32-10 (Salmon et al., SC 2011, section 4) for the eight keys of a query from 8 * group on, sixteen bits of its
// words for each, the low half of a word for the even key (codegen/src/dropout.rs has the definition).
//
// A call is some 60 instructions, so that each is computed by one thread. Of an accumulator tile the pairs of a call
// lie in several: four calls of a quad where rows are queries, and eight of the lanes that share columns where rows are
// keys, are turned by shuffles, so that every thread has the bits of its own scores.

struct Dropout {
    u32 key[2], offset;
    u32 last;  // the largest word whose upper half keeps its score
    u32 zero;  // which the compiler does not know to be so
};

template <typename Args> __device__ __forceinline__ Dropout dropout_of(const Args& a) {
    u64 seed = a.dropout_seed, offset = a.dropout_offset;
    if (a.dropout_seed_at != nullptr) seed += *(const u64*)a.dropout_seed_at;
    if (a.dropout_offset_at != nullptr) offset += *(const u64*)a.dropout_offset_at;
    const u32 high = u32(seed >> 32) + u32(offset >> 32);
    return Dropout{{u32(seed), high}, u32(offset), (a.dropout_threshold << 16) - 1, a.dropout_threshold >> 17};
}

// Heads of all sequences by one number.
template <typename Args> __device__ __forceinline__ u32 dropout_pair(const Args& a, int batch, int head) {
    return u32(batch) * u32(a.heads) + u32(head);
}

__device__ __forceinline__ uint4 dropout_words(const Dropout& d, u32 group, u32 query, u32 pair) {
    uint4 c = {group, query, pair, d.offset};
    u32 low = d.key[0], high = d.key[1];
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 a = u64(c.x) * 0xd2511f53u, b = u64(c.z) * 0xcd9e8d57u;
        c = uint4{u32(b >> 32) ^ c.y ^ low, u32(b), u32(a >> 32) ^ c.w ^ high, u32(a)};
        low += 0x9e3779b9u, high += 0xbb67ae85u;
    }
    return c;
}

// Whether half `e` of a word keeps its score.
__device__ __forceinline__ bool keeps_half(const Dropout& d, u32 word, int e) {
    return (e == 0 ? word << 16 : word) <= d.last;
}

// Whether one score is kept: where few are asked for.
__device__ __forceinline__ bool keeps_score(const Dropout& d, u32 pair, int query, int key) {
    const uint4 words = dropout_words(d, u32(key) / 8, u32(query), pair);
    const u32 low = key & 2 ? words.y : words.x, high = key & 2 ? words.w : words.z;
    return keeps_half(d, key & 4 ? high : low, key & 1);
}

// Halves of a square of two by two words, or of those with one more bit in their indices, change places between lanes:
// whoever has the bit keeps the second of each pair, the others the first.
__device__ __forceinline__ void exchange_words(u32& first, u32& second, bool has_bit, int apart) {
    const u32 other = __shfl_xor_sync(0xffffffff, has_bit ? first : second, apart);
    if (has_bit) {
        first = other;
    } else {
        second = other;
    }
}

// Of a tile whose rows are queries, for a thread's two columns of each of kTiles tiles of 8 keys and its two rows:
// each(tile, row, word), the first column's bits in the word's low half. `group` is that of the first tile, `query` and
// `pair` those of both rows.
template <int kTiles, typename Each>
__device__ __forceinline__ void each_dropout_across(const Dropout& d, u32 group, const u32 (&query)[2],
                                                    const u32 (&pair)[2], const Each& each) {
    static_assert(kTiles % 2 == 0, "four calls of a quad: two tiles by two rows");
    // Calls that ptxas finds independent it runs side by side: 336 bytes of spills of forward/sm90 at head dim 128, and
    // none where each waits for the one before.
    u32 behind = 0;
    const u32 t = threadIdx.x % 4;
    const u32 own_query = t & 1 ? query[1] : query[0], own_pair = t & 1 ? pair[1] : pair[0];
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
        uint4 w = dropout_words(d, group + j + t / 2 + (behind & d.zero), own_query, own_pair);
        behind = w.x;
        exchange_words(w.x, w.z, t & 2, 2);
        exchange_words(w.y, w.w, t & 2, 2);
        exchange_words(w.x, w.y, t & 1, 1);
        exchange_words(w.z, w.w, t & 1, 1);
        each(j, 0, w.x), each(j, 1, w.y), each(j + 1, 0, w.z), each(j + 1, 1, w.w);
    }
}

// The same of a tile whose rows are keys, for two neighbouring queries of each of kTiles tiles and a thread's rows, of
// which the second is eight keys further: the first query's bits in the word's low half. `group` is that of the first
// row, `query` the first of the thread's own.
template <int kTiles, typename Each>
__device__ __forceinline__ void each_dropout_down(const Dropout& d, u32 group, u32 query, u32 pair, const Each& each) {
    static_assert(kTiles % 2 == 0, "eight calls: two tiles by two rows by two queries");
    const u32 r = threadIdx.x % 32 / 4;
    const bool odd = r & 1;
    u32 behind = 0;  // as above
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
        const u32 keys = group + (r >> 1 & 1) + (behind & d.zero);
        uint4 w = dropout_words(d, keys, query + 8 * (j + (r >> 2)) + (r & 1), pair);
        behind = w.x;
        exchange_words(w.x, w.z, r & 4, 16);
        exchange_words(w.y, w.w, r & 4, 16);
        exchange_words(w.x, w.y, r & 2, 8);
        exchange_words(w.z, w.w, r & 2, 8);
        const auto exchange_halves = [&](u32& x, u32& y) {
            const u32 mine = odd ? (x & 0xffff) | y << 16 : x >> 16 | (y & 0xffff0000);
            const u32 other = __shfl_xor_sync(0xffffffff, mine, 4);
            x = odd ? (x & 0xffff0000) | (other & 0xffff) : (x & 0xffff) | other << 16;
            y = odd ? (y & 0xffff0000) | other >> 16 : (y & 0xffff) | (other & 0xffff0000);
        };
        exchange_halves(w.x, w.y);
        exchange_halves(w.z, w.w);
        each(j, 0, w.x), each(j, 1, w.y), each(j + 1, 0, w.z), each(j + 1, 1, w.w);
    }
}

// A bit for each of kCount scores of a thread: whether it is kept. For where more than one product asks.
template <int kCount> struct KeptBits {
    u32 words[(kCount + 31) / 32];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < (kCount + 31) / 32; i++) words[i] = 0;
    }
    __device__ __forceinline__ void set(int i, bool kept) {
        if (kept) words[i / 32] |= 1u << i % 32;
    }
    __device__ __forceinline__ bool has(int i) const { return words[i / 32] >> i % 32 & 1; }
};
