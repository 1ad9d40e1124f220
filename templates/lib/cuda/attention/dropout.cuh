// Which scores are dropped (FT_DROPOUT). By their places alone, so that no schedule changes which: one call of Philox
// 4x32-10 (Salmon et al., SC 2011, section 4) for the eight keys of a query from 8 * group on, sixteen bits of its
// words for each, the low half of a word for the even key (codegen/src/dropout.rs has the definition).
//
// A call is some 60 instructions, so that each is computed by one thread. Of an accumulator tile the pairs of a call
// lie in several: four calls of a quad where rows are queries, and eight of the lanes that share columns where rows are
// keys, are turned by shuffles, so that every thread has the bits of its own scores.

<% include "lib/cuda/ptx/add_halves.cuh" %>
<% include "lib/cuda/ptx/permute.cuh" %>

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

// The first three rounds are of what a query and a group of keys have apart: two products of a group's three, which the
// queries of a tile share, and one of a query's, which all groups share.
struct QueryRounds {
    u32 high, low;  // of its product in the second round
};
// x is XORed with a word of the second round; y, z and w are the third round's words but for the product of both.
using GroupRounds = uint4;

__device__ __forceinline__ QueryRounds dropout_query(const Dropout& d, u32 query, u32 pair) {
    const u64 b = u64(pair) * 0xcd9e8d57u, a = u64(u32(b >> 32) ^ query ^ d.key[0]) * 0xd2511f53u;
    return {u32(a >> 32), u32(a)};
}

__device__ __forceinline__ GroupRounds dropout_group(const Dropout& d, u32 group, u32 pair) {
    const u64 a = u64(group) * 0xd2511f53u, b = u64(u32(a >> 32) ^ d.offset ^ d.key[1]) * 0xcd9e8d57u;
    const u64 x = u64(u32(b >> 32) ^ pair * 0xcd9e8d57u ^ (d.key[0] + 0x9e3779b9u)) * 0xd2511f53u;
    const u32 low = d.key[0] + 2 * 0x9e3779b9u, high = d.key[1] + 2 * 0xbb67ae85u;
    return {u32(a) ^ (d.key[1] + 0xbb67ae85u), u32(b) ^ low, u32(x >> 32) ^ high, u32(x)};
}

// A multiplier of Philox as doubles. A word x lies in the lower half of a double whose upper half is kUpper, which is
// 2^84 + x 2^32. That times `scale`, plus `rest`, is 2^84 and the product of x and the multiplier: towards zero its
// upper word, again in the lower half of such a double.
struct DoubleMultiplier {
    static constexpr u32 kUpper = 0x45300000;
    double scale, rest;
    constexpr explicit DoubleMultiplier(u32 multiplier)
        : scale(multiplier * (1.0 / 4294967296.0)), rest((4294967296.0 - multiplier) * 4503599627370496.0) {}
    __device__ __forceinline__ double operator()(double word) const { return __fma_rz(word, scale, rest); }
};
struct DoubleMultipliers {
    DoubleMultiplier of_x{0xd2511f53}, of_z{0xcd9e8d57};
    // Loaded once: as constants they take 7 of 233 instructions in every loop over calls. What is added is 0, which the
    // compiler does not know. `rest` may differ between lanes as far as it can tell: an instruction reads one uniform
    // register, which is `scale`.
    __device__ __forceinline__ void hold(const Dropout& d, u32 of_lane) {
        const auto with = [](double x, u32 zero) {
            return __hiloint2double(__double2hiint(x) + zero, __double2loint(x) + zero);
        };
        of_x.scale = with(of_x.scale, d.zero), of_z.scale = with(of_z.scale, d.zero);
        of_x.rest = with(of_x.rest, d.zero & of_lane), of_z.rest = with(of_z.rest, d.zero & of_lane);
    }
};

// The words of a call. By doubles the upper word of a product is made by the FP64 unit, which nothing else uses, and
// the lower one by a multiplication of 32 bits: 4 clocks of the integer multiplier become 2, and 2 instructions 3. FP64
// and logical instructions share a port.
__device__ __forceinline__ uint4 dropout_words(const Dropout& d, const GroupRounds& g, const QueryRounds& q,
                                               bool by_doubles = false, const DoubleMultipliers& doubles = {}) {
    const u64 b = u64(q.high ^ g.x) * 0xcd9e8d57u;
    uint4 c = {u32(b >> 32) ^ g.y, u32(b), g.z ^ q.low, g.w};
    u32 low = d.key[0] + 3 * 0x9e3779b9u, high = d.key[1] + 3 * 0xbb67ae85u;
    u32 upper_x = DoubleMultiplier::kUpper, upper_z = DoubleMultiplier::kUpper;
#pragma unroll
    for (int round = 3; round < 10; round++) {
        if (by_doubles) {
            const double a = doubles.of_x(__hiloint2double(upper_x, c.x));
            const double b = doubles.of_z(__hiloint2double(upper_z, c.z));
            const u32 low_a = c.x * 0xd2511f53u, low_b = c.z * 0xcd9e8d57u;
            c = uint4{__double2loint(b) ^ c.y ^ low, low_b, __double2loint(a) ^ c.w ^ high, low_a};
            // They are kUpper, as the compiler does not know: it writes no move for them.
            upper_x = __double2hiint(b), upper_z = __double2hiint(a);
        } else {
            const u64 a = u64(c.x) * 0xd2511f53u, b = u64(c.z) * 0xcd9e8d57u;
            c = uint4{u32(b >> 32) ^ c.y ^ low, u32(b), u32(a >> 32) ^ c.w ^ high, u32(a)};
        }
        low += 0x9e3779b9u, high += 0xbb67ae85u;
    }
    return c;
}

__device__ __forceinline__ uint4 dropout_words(const Dropout& d, u32 group, u32 query, u32 pair) {
    return dropout_words(d, dropout_group(d, group, pair), dropout_query(d, query, pair));
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
    // Calls that ptxas finds independent it runs side by side: 336 bytes of spills on Hopper at head dim 128, and
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

// A bit for each score of 32 keys of a query, or of 16 keys of two queries, in one word, of four calls of Philox that a
// lane has under way at a time: a chain of ten rounds alone waits for itself most of the time. Four calls take 663
// clocks of a scheduler with one warp and 382 with four, bits and all, none by doubles; rounds alone are 490 and 294.

// Whether the halves of a word of Philox are at most those of `last`, twice the upper half of Dropout::last: in the
// signs of the halves. A half that is not carries when the rest to 2^16 is added. Other bits are anything. ptxas makes
// two instructions of the complement of what carries.
__device__ __forceinline__ u32 kept_signs(u32 word, u32 last) {
    const u32 sum = add_halves(word, ~last);
    return (~word | last) & ((~word & last) | sum);
}
// The bits of `a` in the mask, those of `b` elsewhere.
__device__ __forceinline__ u32 merge_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

// Of word w of two calls, which scores are kept: the sign of a byte spread over it, the first call's in the upper byte
// of each half. Bit 3 - w of the bytes is word w's, bits 7 to 4 are 0. By bytes and then by bits takes 16 instructions
// for four calls beside the comparisons, by shifts and masks for each call 31.
__device__ __forceinline__ u32 kept_of_calls(const uint4& first, const uint4& second, u32 last) {
    const auto spread = [&](u32 a, u32 b) { return permute_bytes(kept_signs(b, last), kept_signs(a, last), 0xfbd9); };
    const u32 upper = merge_bits(0x08080808, spread(first.x, second.x), spread(first.y, second.y));
    const u32 lower = merge_bits(0x02020202, spread(first.z, second.z), spread(first.w, second.w));
    return merge_bits(0x0c0c0c0c, upper, lower) & 0x0f0f0f0f;
}

// The lower four bits of the bytes of two words side by side. The multiplier has time that logical instructions lack.
__device__ __forceinline__ u32 pair_nibbles(u32 upper, u32 lower) { return upper * 16 + lower; }

// Whether a call of the four that a lane has under way is by doubles, if so many of them are.
constexpr bool is_by_doubles(int call, int calls) { return call % 2 * 2 + call / 2 < calls; }

// Of call c of four, from that of `group` on, the keys 8 c + 2 w and one more have a bit in each half, at 15 - w of it
// less 8 where c is odd and 4 where c is above 1: a shift to the left by w, and by 4 for the calls above 1, makes it
// the sign of a byte.
template <typename OfCall> __device__ __forceinline__ u32 draw_kept_across(const Dropout& d, const OfCall& of_call) {
    const u32 last = (d.last >> 16) * 0x10001;
    const u32 upper = kept_of_calls(of_call(0), of_call(1), last), lower = kept_of_calls(of_call(2), of_call(3), last);
    return pair_nibbles(upper, lower);
}

// Of 16 keys from 8 * group on and two neighbouring queries, the second in the upper half. Of a half the upper byte has
// eight keys, the lower one the next eight: those with even numbers in the upper four bits, those with odd ones in the
// lower four, so that a shift by half of a key's number, and by 4 for odd ones, makes its bit the sign of the byte.
template <int kDoubleCalls, bool kHold>
__device__ __forceinline__ u32 draw_kept_down(const Dropout& d, const GroupRounds (&groups)[2], u32 query, u32 pair) {
    const u32 last = (d.last >> 16) * 0x10001;
    DoubleMultipliers doubles;
    if (kHold) doubles.hold(d, query);
    u32 bytes[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const QueryRounds rounds = dropout_query(d, query + e, pair);
        const auto words = [&](int g) {
            return dropout_words(d, groups[g], rounds, is_by_doubles(2 * e + g, kDoubleCalls), doubles);
        };
        bytes[e] = kept_of_calls(words(0), words(1), last);
    }
    const u32 even = permute_bytes(bytes[0], bytes[1], 0x5410), odd = permute_bytes(bytes[0], bytes[1], 0x7632);
    return pair_nibbles(even, odd);
}

// What is left of a thread's pair of rounded scores in tile c of those of a word's 32 keys.
__device__ __forceinline__ u32 kept_pair(u32 pair, u32 kept, int c) {
    // A power of two that the compiler does not know as one: a product takes the multiplier, and a shift would take the
    // unit that logical instructions and maxima wait for.
    const u32 times = 0x8421 >> 4 * (threadIdx.x % 4) & 15;
    const u32 signs = kept * (c < 2 ? times : 16 * times);
    return pair & permute_bytes(signs, 0, c % 2 == 0 ? 0xbb99 : 0xaa88);
}

// Which scores of a warp's accumulators are kept, whose 16 rows are keys: a word for every two of kQueries queries, of
// each four calls kDoubleCalls by doubles, whose multipliers are held or constants.
template <int kQueries, int kDoubleCalls, bool kHold> struct KeptDown {
    u32 words[(kQueries + 63) / 64];
    // `group` is that of the first of 16 keys, `query` the first one.
    __device__ __forceinline__ void draw(const Dropout& d, u32 group, u32 query, u32 pair) {
        const GroupRounds groups[2] = {dropout_group(d, group, pair), dropout_group(d, group + 1, pair)};
        u32 behind = 0;
#pragma unroll
        for (int i = 0; i < (kQueries + 63) / 64; i++) {
            const u32 first = query + i * 64 + threadIdx.x % 32 * 2 + (behind & d.zero);
            words[i] = draw_kept_down<kDoubleCalls, kHold>(d, groups, first, pair);
            behind = words[i];
        }
    }
    // The signs of a thread's row in tile j of 8 queries.
    __device__ __forceinline__ u32 signs(int j) const {
        const u32 row = threadIdx.x % 32 / 4;
        return __shfl_sync(0xffffffff, words[j / 8], j % 8 * 4 + threadIdx.x % 4) << (row / 2 + row % 2 * 4);
    }
    // Of them, all ones where the score of the row h * 8 further and of query e is kept.
    static __device__ __forceinline__ u32 mask(u32 signs, int h, int e) {
        return permute_bytes(signs, 0, (e ? 0xbbbb : 0x9999) - (h ? 0x1111 : 0));
    }
};

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
