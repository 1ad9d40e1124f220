// The score program of this kernel: what it masks, what it makes of the scores, and which key blocks it leaves out. Its
// statements are generated; they come by what they change with, so that each is computed no more often than it has to
// be: once for a tile (Kept), for a query row and a block of keys (Rows), for a score. Without a program all of this is
// nothing.

// Between which keys the runs of a tile's rows begin, and between which they end: first and last.
struct Between {
    int first, last;
    __device__ __forceinline__ void join(const Between& other) {
        first = min_of(first, other.first), last = max_of(last, other.last);
    }
};
struct RunEnds {
    Between begin, end;
    static __device__ __forceinline__ RunEnds anywhere(int kv_len) { return {{0, kv_len}, {0, kv_len}}; }
    __device__ __forceinline__ void join(const RunEnds& other) { begin.join(other.begin), end.join(other.end); }
    // Those of all lanes of a warp.
    __device__ __forceinline__ void over_lanes() {
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) {
            const auto of = [&](const Between& x) {
                return Between{__shfl_xor_sync(0xffffffff, x.first, apart), __shfl_xor_sync(0xffffffff, x.last, apart)};
            };
            join({of(begin), of(end)});
        }
    }
};

#define FT_PROGRAM @{ program }@
constexpr bool kProgramFar = @{ program_far }@;  // scores may be far from zero
constexpr bool kProgramMask = @{ program_mask }@;
constexpr bool kProgramScore = @{ program_score }@;
constexpr bool kProgramSink = @{ program_sink }@;
// Whether the score's change is to add what does not depend on it: a multiple of the key and the rest, apart.
constexpr bool kProgramShift = @{ score_shift }@;
// Whether the score becomes cap * tanh(factor * score), with a cap of a magnitude up to kCapBound.
constexpr bool kProgramCapped = @{ score_capped }@;
constexpr float kCapBound = @{ score_cap_bound }@;
struct ScoreCap {
    float cap, factor;
};
// What is added to the scores of two rows from one key of a block to the next, in units of the raw score, counted from
// which of its keys, and whether it is the less the earlier a key is, or the same.
struct ScoreRamps {
    float factor[2], at[2];
    bool falls;
};
// How many reads along the keys may come ahead of their use, 0 if none is of two bytes; and whether threads take any of
// them so. The others are biases, of which each tile of scores reads a tile: how many, and which of the reads they are.
constexpr int kScoreReads = @{ score_reads_ahead }@;
constexpr bool kScoreTakes = @{ score_takes_ahead }@;
constexpr int kScoreBiases = @{ score_biases }@;
constexpr int kBiasPlaces[] = {@{ score_bias_places }@};
// Whether the mask leaves each query one run of keys, and whether ends of runs are searched for.
constexpr bool kProgramRows = @{ program_rows }@;
constexpr bool kProgramSearch = @{ program_search }@;
// Whether neither end of a query's run ever comes before that of the query before.
constexpr bool kProgramSorted = @{ program_sorted }@;
// Whether all runs begin with the first key, and whether their ends are better computed again than kept.
constexpr bool kProgramFromFirst = @{ program_from_first }@;
constexpr bool kProgramRowsCheap = @{ program_rows_cheap }@;

#if FT_PROGRAM

// Whether the score takes a tanh of what changes with score or key.
constexpr bool kScoreTanh = @{ score_tanh }@;
constexpr bool kScoreAlong = @{ score_along }@;  // floats are read along the keys
constexpr bool kTanhOfMultiples = @{ score_tanh_multiples }@;  // of the score

<% include "lib/cuda/score/score.cuh" %>
<% include "lib/cuda/score/search.cuh" %>

// What the program reads, passed by value behind what every kernel takes.
struct Side {
    SideTensor tensors[@{ side_tensors }@];
    SideScalar scalars[@{ side_scalars }@];
};
template <typename Base> struct WithSide : Base {
    Side side;
};

// Where the scores of a tile are.
struct ProgramHead {
    const Side* side;
    int b, h, h_kv, q_len, kv_len;
};

template <typename Base, typename Sizes>
__device__ __forceinline__ ProgramHead program_head(const WithSide<Base>& args, const Sizes& sizes, const Tile& tile) {
    return ProgramHead{&args.side, tile.batch, tile.head, tile.kv_head, sizes.q_len, sizes.kv_len};
}

// In scope of every statement; not every program reads all of them.
#define FT_PROGRAM_HEAD                                                                                          \
    const Side* const side = head.side;                                                                          \
    const int b = head.b, h = head.h, h_kv = head.h_kv, q_len = head.q_len, kv_len = head.kv_len;                \
    (void)side, (void)b, (void)h, (void)h_kv, (void)q_len, (void)kv_len

// Whether no query of a tile attends to any of its keys (-1), every one to all of them (1), or neither is known (0).
// Rows and keys are given by the first and the last.
__device__ __forceinline__ int program_tile(const ProgramHead& head, int q_first, int q_last, int kv_first,
                                            int kv_last) {
    FT_PROGRAM_HEAD;
    (void)q_first, (void)q_last, (void)kv_first, (void)kv_last;
@{ tile_code }@    return @{ tile_masked }@ ? -1 : @{ tile_visible }@ ? 1 : 0;
}

// The keys that query q attends to, of a mask that leaves runs. Ends that are searched for lie within bounds that are
// known. With kHalves each half of a warp searches for the same ones.
template <bool kHalves>
__device__ __forceinline__ KeyRange program_row(const ProgramHead& head, int q, const RunEnds& within) {
    FT_PROGRAM_HEAD;
    (void)q, (void)within;
@{ rows_code }@    i64 begin = @{ rows_begin }@, end = @{ rows_end }@;
@{ rows_searches }@    return KeyRange{int(min_of<i64>(max_of<i64>(begin, 0), kv_len)),
                    int(max_of<i64>(min_of<i64>(end, kv_len), 0)) - 1};
}

// The keys that a run of queries can attend to at most.
__device__ __forceinline__ KeyRange program_keys(const ProgramHead& head, int q_first, int q_last) {
    FT_PROGRAM_HEAD;
    (void)q_first, (void)q_last;
@{ keys_code }@    const i64 begin = @{ keys_begin }@, end = @{ keys_end }@;
    return KeyRange{int(min_of<i64>(max_of<i64>(begin, 0), kv_len)), int(max_of<i64>(min_of<i64>(end, kv_len), 0)) - 1};
}

// What is computed once for a tile.
struct MaskKept {
@{ mask_head_fields }@};
struct ScoreKept {
@{ score_head_fields }@};
struct ProgramKept {
    MaskKept mask;
    ScoreKept score;
};

__device__ __forceinline__ MaskKept mask_kept(const ProgramHead& head) {
    FT_PROGRAM_HEAD;
@{ mask_inputs }@@{ mask_uniform }@    return MaskKept{@{ mask_head_names }@};
}
__device__ __forceinline__ ScoreKept score_kept(const ProgramHead& head) {
    FT_PROGRAM_HEAD;
@{ score_inputs }@@{ score_uniform }@    return ScoreKept{@{ score_head_names }@};
}
__device__ __forceinline__ ProgramKept program_kept(const ProgramHead& head) {
    return ProgramKept{mask_kept(head), score_kept(head)};
}

// What is computed once for a query row and keys at constant distances from a first one.
struct MaskRow {
@{ mask_row_fields }@};
struct ScoreRow {
@{ score_row_fields }@};

__device__ __forceinline__ MaskRow mask_row(const ProgramHead& head, const MaskKept& kept, int q, int kv_first) {
    FT_PROGRAM_HEAD;
    (void)kept, (void)q, (void)kv_first;
@{ mask_inputs }@@{ mask_head_load }@@{ mask_cheap }@@{ mask_row }@    return MaskRow{@{ mask_row_names }@};
}
// `scale` takes scores to natural units.
__device__ __forceinline__ ScoreRow score_row(const ProgramHead& head, const ScoreKept& kept, int q, int kv_first,
                                              float scale) {
    FT_PROGRAM_HEAD;
    (void)kept, (void)q, (void)kv_first, (void)scale;
@{ score_inputs }@@{ score_head_load }@@{ score_cheap }@@{ score_row }@    return ScoreRow{@{ score_row_names }@};
}

// Whether query q attends to the key kv_first + offset.
__device__ __forceinline__ bool mask_element(const ProgramHead& head, const MaskKept& kept, const MaskRow& row, int q,
                                             int kv_first, int offset) {
    FT_PROGRAM_HEAD;
    const int kv = kv_first + offset;
    (void)kept, (void)row, (void)q, (void)kv;
@{ mask_inputs }@@{ mask_head_load }@@{ mask_cheap }@@{ mask_row_load }@@{ mask_column }@@{ mask_element }@
    return @{ mask_result }@;
}
// Whether what is read along the keys lies side by side, so that kPaired holds.
__device__ __forceinline__ bool score_paired(const ProgramHead& head, const ScoreRow& row) {
    FT_PROGRAM_HEAD;
    (void)row;
@{ score_inputs }@@{ score_row_load }@    return @{ score_paired }@;
}
// Reads ahead what the scores of a row take along the keys; `last` is the distance of the last key.
template <bool kPaired, typename Ahead>
__device__ __forceinline__ void score_take_ahead(const ProgramHead& head, const ScoreRow& row, int last, Ahead& ahead) {
    FT_PROGRAM_HEAD;
    (void)row, (void)last, (void)ahead;
@{ score_inputs }@@{ score_row_load }@@{ score_take_ahead }@}
// Where a bias of a head lies: its first element, the distances of rows and keys, and the indices besides those of row
// and key, the last one first.
struct BiasAt {
    const u16* data;
    i64 row, key;
    int index[2];
};
template <int kLeading> __device__ __forceinline__ BiasAt bias_at(const SideTensor& tensor, const i64 (&at)[2]) {
    BiasAt bias = {(const u16*)tensor.data, tensor.stride[kLeading], tensor.stride[kLeading + 1], {0, 0}};
#pragma unroll
    for (int a = 0; a < kLeading; a++) {
        const int index = int(ft_clamp64(at[a], tensor.length[a]));
        bias.index[kLeading - 1 - a] = index;
        bias.data += index * tensor.stride[a];
    }
    return bias;
}
__device__ __forceinline__ BiasAt program_bias(const ProgramHead& head, int nth) {
    FT_PROGRAM_HEAD;
    (void)nth;
@{ bias_code }@    return {};
}
#define FT_ALONG_KEYS                                                               \
    const auto ft_along_bf16 = [&](const u16* p, int at, i64 stride, int nth) {     \
        return along.bf16(p, at, stride, nth);                                      \
    };                                                                              \
    const auto ft_along_f16 = [&](const u16* p, int at, i64 stride, int nth) {      \
        return along.f16(p, at, stride, nth);                                       \
    };                                                                              \
    const auto ft_along_f32 = [&](const float* p, int at, i64 stride, int nth) {    \
        return along.f32(p, at, stride, nth);                                       \
    };                                                                              \
    (void)ft_along_bf16, (void)ft_along_f16, (void)ft_along_f32

// What becomes of the score raw * scale. With kSmall no tanh is taken of more than kSmallTanh. `along` reads along the
// keys.
template <bool kSmall = false, typename Along = AlongKeys<false>>
__device__ __forceinline__ float score_element(const ProgramHead& head, const ScoreKept& kept, const ScoreRow& row,
                                               int q, int kv_first, int offset, float raw, float scale,
                                               const Along& along = {}) {
    FT_PROGRAM_HEAD;
    const int kv = kv_first + offset;
    const float score = raw * scale;
    const auto ft_tanhf = [](float x) { return kSmall ? ft_small_tanhf(x) : ::ft_tanhf(x); };
    const auto ft_capf = [](float x, float cap, float factor, const CapSeries& s) {
        return ft_cap<kSmall>(x, cap, factor, s);
    };
    FT_ALONG_KEYS;
    (void)kept, (void)row, (void)q, (void)kv, (void)score, (void)ft_tanhf, (void)ft_capf;
@{ score_inputs }@@{ score_head_load }@@{ score_cheap }@@{ score_row_load }@@{ score_column }@@{ score_element }@
    return @{ score_result }@;
}
// The largest magnitude that it takes a tanh of.
__device__ __forceinline__ float score_tanh_largest(const ProgramHead& head, const ScoreKept& kept, const ScoreRow& row,
                                                    int q, int kv_first, int offset, float raw, float scale) {
    FT_PROGRAM_HEAD;
    const int kv = kv_first + offset;
    const float score = raw * scale;
    const auto ft_capf = ft_cap<false>;
    const AlongKeys<false> along;
    FT_ALONG_KEYS;
    (void)kept, (void)row, (void)q, (void)kv, (void)score, (void)ft_capf;
@{ score_inputs }@@{ score_head_load }@@{ score_cheap }@@{ score_row_load }@@{ score_column }@@{ score_element }@
    return @{ score_tanh_largest }@;
}
// What is added to the scores of a row: factor * offset + base.
struct ScoreShift {
    float factor, base;
};
__device__ __forceinline__ ScoreShift score_shift(const ScoreRow& row) {
    (void)row;
@{ score_row_load }@    return ScoreShift{@{ score_shift_factor }@, @{ score_shift_base }@};
}

// The cap of a program that caps the score, and what the score is multiplied by before the tanh.
__device__ __forceinline__ ScoreCap score_cap(const ProgramHead& head, const ScoreKept& kept, const ScoreRow& row,
                                              float scale) {
    FT_PROGRAM_HEAD;
    (void)kept, (void)row, (void)scale;
@{ score_inputs }@@{ score_head_load }@@{ score_row_load }@    return ScoreCap{@{ score_cap }@, @{ score_cap_factor }@};
}

// The logit of the key without a value.
__device__ __forceinline__ float program_sink(const ProgramHead& head, int q) {
    FT_PROGRAM_HEAD;
    (void)q;
@{ sink_code }@    return @{ sink_result }@;
}

// One query and one key, on its own: for the slow paths.
__device__ __forceinline__ bool program_visible(const ProgramHead& head, int q, int kv) {
    if (!kProgramMask) return true;
    const MaskKept kept = mask_kept(head);
    return mask_element(head, kept, mask_row(head, kept, q, kv), q, kv, 0);
}

<% include "lib/cuda/score/program_blocks.cuh" %>

// What the scores of a thread's two rows read along the keys, ahead of its use.
template <int kTiles> using ScoresAhead = ReadAhead<kScoreReads, kTiles>[2];
template <int kTiles>
__device__ __forceinline__ void program_read_ahead(ScoresAhead<kTiles>& ahead, const ProgramHead& head,
                                                   const ProgramKept& kept, int q, int kv_first, float scale) {
    const int last = head.kv_len - 1 - kv_first;
    const ScoreRow rows[2] = {score_row(head, kept.score, min_of(q, head.q_len - 1), kv_first, scale),
                              score_row(head, kept.score, min_of(q + 8, head.q_len - 1), kv_first, scale)};
    const bool paired = last >= 8 * kTiles - 7 && score_paired(head, rows[0]) && score_paired(head, rows[1]);
    if (__any_sync(0xffffffff, !paired)) {
#pragma unroll
        for (int i = 0; i < 2; i++) score_take_ahead<false>(head, rows[i], last, ahead[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) score_take_ahead<true>(head, rows[i], last, ahead[i]);
    }
}

// Applies the program to an accumulator of tiles of 8 columns (mma.cuh, wgmma.cuh): at(j, 2 * i + e) is the score of
// row `q + 8 * i` with key `kv_first + 8 * j + e`. Rows and keys beyond the last repeat it: no index leaves a tensor,
// and nobody reads what comes out. `scale` takes scores to natural units. Without kMask the mask is left to the caller.
// With kAhead `ahead` holds what program_read_ahead() has found for these rows and keys.
template <bool kMasked, int kTiles, bool kMask = true, bool kAhead = false, typename At>
__device__ __forceinline__ void program_scores(const At& at, const ProgramHead& head, const ProgramKept& kept, int q,
                                               int kv_first, float scale, const ScoresAhead<kTiles>* ahead = nullptr) {
    constexpr bool kElementMask = kMasked && kProgramMask && kMask;
    if (!kProgramScore && !kElementMask) return;
    const int rows[2] = {min_of(q, head.q_len - 1), min_of(q + 8, head.q_len - 1)}, last = head.kv_len - 1 - kv_first;
    const MaskRow masks[2] = {mask_row(head, kept.mask, rows[0], kv_first),
                              mask_row(head, kept.mask, rows[1], kv_first)};
    const ScoreRow scores[2] = {score_row(head, kept.score, rows[0], kv_first, scale),
                                score_row(head, kept.score, rows[1], kv_first, scale)};
    // each(score, row, offset) for all of them.
    const auto over_all = [&](const auto& each) {
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int offset = kMasked ? min_of(8 * j + e, last) : 8 * j + e;
#pragma unroll
                for (int i = 0; i < 2; i++) each(at(j, 2 * i + e), i, offset, 8 * j + e);
            }
        }
    };
    const auto change = [&](auto small, const auto& along) {
        constexpr bool kSmall = decltype(small)::value;
        over_all([&](float& s, int i, int offset, int place) {
            if (kProgramScore) {
                s = score_element<kSmall>(head, kept.score, scores[i], rows[i], kv_first, offset, s,
                                          scale, along[i].at(place));
            }
            if (kElementMask) s = mask_element(head, kept.mask, masks[i], rows[i], kv_first, offset) ? s : -FT_INFINITY;
        });
    };
    const AlongKeys<false> one_by_one[2];
    if constexpr (kScoreTanh) {
        // The whole warp takes the short way, or none of it.
        float largest = 0.0f, of_row[2] = {0.0f, 0.0f};
        const auto of = [&](float raw, int i, int offset) {
            return score_tanh_largest(head, kept.score, scores[i], rows[i], kv_first, offset, raw, scale);
        };
        over_all([&](float& s, int i, int offset, int) {
            of_row[i] = fmaxf(of_row[i], kTanhOfMultiples ? fabsf(s) : of(s, i, offset));
        });
#pragma unroll
        for (int i = 0; i < 2; i++) largest = fmaxf(largest, kTanhOfMultiples ? of(of_row[i], i, 0) : of_row[i]);
        // No power of a score is beyond a float's range in the polynomial.
        if (kTanhOfMultiples && max_of(of_row[0], of_row[1]) > 1e12f) largest = FT_INFINITY;
        if (__any_sync(0xffffffff, largest > kSmallTanh)) {
            change(Bool<false>{}, one_by_one);
        } else {
            change(Bool<true>{}, one_by_one);
        }
    } else if constexpr (kAhead && kScoreReads > 0) {
        change(Bool<false>{}, *ahead);
    } else if constexpr (kScoreAlong && !kMasked) {
        const bool paired = score_paired(head, scores[0]) && score_paired(head, scores[1]);
        if (__any_sync(0xffffffff, !paired)) {
            change(Bool<false>{}, one_by_one);
        } else {
            const AlongKeys<true> in_pairs[2];
            change(Bool<false>{}, in_pairs);
        }
    } else {
        change(Bool<false>{}, one_by_one);
    }
}

// What a program adds to the scores, before there are any: to the same places, times `unit`, which takes it to units of
// the raw score.
template <bool kMasked, int kTiles, typename At>
__device__ __forceinline__ void program_sums(const At& at, const ProgramHead& head, const ProgramKept& kept, int q,
                                             int kv_first, float unit, const ScoresAhead<kTiles>& ahead) {
    const int last = head.kv_len - 1 - kv_first;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = min_of(q + 8 * i, head.q_len - 1);
        const ScoreRow score = score_row(head, kept.score, row, kv_first, 1.0f);
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int offset = kMasked ? min_of(8 * j + e, last) : 8 * j + e;
                // The neutral element of sums: what is left is what is added.
                float& sum = at(j, 2 * i + e);
                sum = score_element(head, kept.score, score, row, kv_first, offset, -0.0f, 1.0f,
                                    ahead[i].at(8 * j + e));
                // Towards zero: what is finite stays so in other units.
                sum = kProgramFar ? __fmul_rz(sum, unit) : sum * unit;
            }
        }
    }
}

// The same for a program that adds to the score what does not depend on it and is linear along the keys, in two parts.
// First, before there are scores: what is added at one key of the block goes to `shift`, a number for each of the two
// rows, in units of log2. What is added on both sides of that key cancels out with it where their sum nearly vanishes,
// as ALiBi's does at the diagonal, and is rounded as large as it is: so it is the key in the middle, or in blocks that
// rows see a part of the one where the sum vanishes.
template <int kTiles, typename Masked>
__device__ __forceinline__ ScoreRamps program_ramps(const ProgramHead& head, const ProgramKept& kept, int q,
                                                    int kv_first, float scale, Masked masked, float (&shift)[2]) {
    const float c = scale * kLog2E, inverse = reciprocal_approx(c);  // as the softmax takes scores to units of log2
    ScoreRamps ramps;
    ramps.falls = true;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = min_of(q + 8 * i, head.q_len - 1);
        int at = kTiles * 4;
        if (masked) {
            const ScoreShift first = score_shift(score_row(head, kept.score, row, kv_first, scale));
            const float last = float(max_of(0, min_of(8 * kTiles, head.kv_len - kv_first) - 1));
            at = int(fminf(fmaxf(first.base * -reciprocal_approx(first.factor), 0.0f), last));
        }
        ramps.at[i] = float(at);
        const ScoreShift add = score_shift(score_row(head, kept.score, row, kv_first + at, scale));
        // The quotient to its last bit: errors of it add up over the keys of a block.
        const float wanted = add.factor * kLog2E, factor = wanted * inverse;
        ramps.factor[i] = fmaf(fmaf(-factor, c, wanted), inverse, factor);
        ramps.falls = ramps.falls && add.factor >= 0.0f;
        shift[i] = add.base * kLog2E;
        // Here, and not where the scores are.
        asm volatile("" : "+f"(shift[i]), "+f"(ramps.factor[i]));
    }
    return ramps;
}
// Then, in units of the raw score, the rest.
template <bool kMasked, int kTiles, bool kMask = true, typename At>
__device__ __forceinline__ void program_ramped(const At& at, const ProgramHead& head, const ProgramKept& kept,
                                               const ScoreRamps& ramps, int q, int kv_first) {
    constexpr bool kElementMask = kMasked && kProgramMask && kMask;
    const int last = head.kv_len - 1 - kv_first;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = min_of(q + 8 * i, head.q_len - 1);
        const MaskRow mask = mask_row(head, kept.mask, row, kv_first);
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& s = at(j, 2 * i + e);
                s = fmaf(ramps.factor[i], float(8 * j + e) - (kMasked ? ramps.at[i] : float(kTiles * 4)), s);
                const int offset = kMasked ? min_of(8 * j + e, last) : 8 * j + e;
                if (kElementMask) s = mask_element(head, kept.mask, mask, row, kv_first, offset) ? s : -FT_INFINITY;
            }
        }
    }
}

// How a program caps the scores; the same for a whole tile.
__device__ __forceinline__ ScoreCap program_cap(const ProgramHead& head, const ProgramKept& kept, float scale) {
    return score_cap(head, kept.score, score_row(head, kept.score, 0, 0, scale), scale);
}
// Caps scores, in units of log2, less a reference. `take(score, i)` is called for each with its row, within the
// branches, so that what it does runs beside the polynomial.
template <bool kMasked, int kTiles, bool kMask = true, typename At, typename Take>
__device__ __forceinline__ void program_capped(const At& at, const ProgramHead& head, const ProgramKept& kept,
                                               const ScoreCap& by, int q, int kv_first, float reference,
                                               const Take& take) {
    constexpr bool kElementMask = kMasked && kProgramMask && kMask;
    const float cap = by.cap * kLog2E, factor = by.factor;
    const int rows[2] = {min_of(q, head.q_len - 1), min_of(q + 8, head.q_len - 1)}, last = head.kv_len - 1 - kv_first;
    const MaskRow masks[2] = {mask_row(head, kept.mask, rows[0], kv_first),
                              mask_row(head, kept.mask, rows[1], kv_first)};
    const auto change = [&](auto capped) {
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& s = at(j, e);
                s = capped(s);
                const int offset = kMasked ? min_of(8 * j + e % 2, last) : 8 * j + e % 2;
                if (kElementMask)
                    s = mask_element(head, kept.mask, masks[e / 2], rows[e / 2], kv_first, offset) ? s : -FT_INFINITY;
                take(s, e / 2);
            }
        }
    };
    float largest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 4 * kTiles; i++) largest[i % 4] = fmaxf(largest[i % 4], fabsf(at(i / 4, i % 4)));
    const float magnitude = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    const CapSeries series = cap_series(cap, factor);
    // The whole warp takes the short way, or none of it. No power of a score is beyond a float's range in the
    // polynomial.
    if (__any_sync(0xffffffff, magnitude * fabsf(factor) > kSmallTanh || magnitude > 1e12f)) {
        // ft_tanhf() with its factors joined.
        const float twice = factor * kTanhOfTwice, top = cap - reference;
        change([&](float s) { return fmaf(-2.0f * cap, reciprocal_approx(exp2_approx(s * twice) + 1.0f), top); });
    } else {
        change([&](float s) {
            const float square = s * s;
            return fmaf(s, fmaf(fmaf(fmaf(series.d, square, series.c), square, series.b), square, series.a),
                        -reference);
        });
    }
}

#else

template <typename Base> using WithSide = Base;
struct ProgramHead {};
struct ProgramKept {};
template <typename Base, typename Sizes>
__device__ __forceinline__ ProgramHead program_head(const Base&, const Sizes&, const Tile&) { return {}; }
__device__ __forceinline__ ProgramKept program_kept(const ProgramHead&) { return {}; }
__device__ __forceinline__ bool program_visible(const ProgramHead&, int, int) { return true; }
__device__ __forceinline__ float program_sink(const ProgramHead&, int) { return 0.0f; }
__device__ __forceinline__ int program_tile(const ProgramHead&, int, int, int, int) { return 1; }
template <bool kHalves>
__device__ __forceinline__ KeyRange program_row(const ProgramHead&, int, const RunEnds&) { return {}; }
template <int kBlockKV>
__device__ __forceinline__ BlockRange run_blocks(const RunEnds&, const BlockRange& b) { return b; }
template <int kBlockKV>
__device__ __forceinline__ BlockRange program_blocks(const ProgramHead&, int, int, const BlockRange& b) { return b; }
struct BiasAt {
    const u16* data;
    i64 row, key;
    int index[2];
};
__device__ __forceinline__ BiasAt program_bias(const ProgramHead&, int) { return {}; }
struct NothingAhead {
    u32 pairs[1][1];
};
template <int kTiles> using ScoresAhead = NothingAhead[2];
template <int kTiles>
__device__ __forceinline__ void program_read_ahead(ScoresAhead<kTiles>&, const ProgramHead&, const ProgramKept&,
                                                   int, int, float) {}
template <bool kMasked, int kTiles, bool kMask = true, bool kAhead = false, typename At>
__device__ __forceinline__ void program_scores(const At&, const ProgramHead&, const ProgramKept&, int, int, float,
                                               const ScoresAhead<kTiles>* = nullptr) {}
template <bool kMasked, int kTiles, typename At>
__device__ __forceinline__ void program_sums(const At&, const ProgramHead&, const ProgramKept&, int, int, float,
                                             const ScoresAhead<kTiles>&) {}
template <int kTiles, typename Masked>
__device__ __forceinline__ ScoreRamps program_ramps(const ProgramHead&, const ProgramKept&, int, int, float, Masked,
                                                    float (&)[2]) {
    return {};
}
template <bool kMasked, int kTiles, bool kMask = true, typename At>
__device__ __forceinline__ void program_ramped(const At&, const ProgramHead&, const ProgramKept&, const ScoreRamps&,
                                               int, int) {}
__device__ __forceinline__ ScoreCap program_cap(const ProgramHead&, const ProgramKept&, float) { return {}; }
template <bool kMasked, int kTiles, bool kMask = true, typename At, typename Take>
__device__ __forceinline__ void program_capped(const At&, const ProgramHead&, const ProgramKept&, const ScoreCap&,
                                               int, int, float, const Take&) {}

#endif
