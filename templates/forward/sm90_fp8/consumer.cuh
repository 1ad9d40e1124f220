// The consumer: one warpgroup of 64 query rows, from scores to outputs.

// A number as a function argument.
template <int kValue> struct Int {
    static constexpr int value = kValue;
};

struct Consumer {
    const KernelArgs& args;
    const u32 smem;
    const int id;  // of the warpgroup, 0 to kConsumers - 1
    Schedule schedule;
    QPipeline q;
    KPipeline k;
    VPipeline v;
    Scores s;
    Probabilities p;
    Output o;
    RowSoftmax softmax;
    KeysWithoutPage without_page;  // of the block whose scores are at hand
    Merged merged;                 // of the tile at hand
    ProgramKept kept;     // of the tile at hand
    RowFactors<2> unit;   // where a program changes the scores, what takes them to natural units
    ScoreCap cap;         // where it caps them

    __device__ __forceinline__ Consumer(const KernelArgs& args, u32 smem, int id)
        : args(args), smem(smem), id(id), schedule(smem) {}

    static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / 32; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

    // Consumers take turns in issuing products, so that the softmax of one runs beside the products of another
    // (FlashAttention-3, section 3.1: ping-pong).
    __device__ __forceinline__ void wait_turn() const {
        if (kTakeTurns) barrier_sync(kTurn + id, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (kTakeTurns) barrier_arrive(kTurn + (id + 1 == kConsumers ? 0 : id + 1), 256);
    }

    // s = Q K^T of the next block of keys, asynchronously.
    __device__ __forceinline__ void issue_qk() {
        const u64 q_rows = descriptor_of_rows(q.buffer(smem, id));
        const u64 k_rows = descriptor_of_rows(k.buffer(smem));
        if constexpr (kScoresByStep) return sum_qk<32>(q_rows, k_rows);
        wgmma_touch(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsQK; step++) {
            const int chunk = step / 4, within = step % 4 * 32;
            ScoreProduct::rows(s, q_rows + ((chunk * kBytes64Rows + within) >> 4),
                               k_rows + ((chunk * kBytesChunk + within) >> 4), step > 0);
        }
        wgmma_commit();
    }
    // The same with each matrix step added in fp32, by kKeys at a time; not asynchronously. Tensor cores align what
    // they add to the largest and keep 13 bits: large scores of e5m2 keys were off by more than rounding the weights
    // allows (1.04 of the check's bound; 0.40 so). A step ends before the next begins: with two under way D128 spills
    // 472 bytes and takes 12 % longer, and at D64 ptxas 13.0 and 13.5 leave two of a loop out.
    template <int kKeys> __device__ __forceinline__ void sum_qk(u64 q_rows, u64 k_rows) {
#pragma unroll
        for (int i = 0; i < kBlockKV / kKeys * kStepsQK; i++) {
            const int keys = i / kStepsQK, step = i % kStepsQK, chunk = step / 4, within = step % 4 * 32;
            float product[kKeys / 2];
            wgmma_touch(product);
            wgmma_fence();
            wgmma<e4m3, kKeys>::rows(product, q_rows + ((chunk * kBytes64Rows + within) >> 4),
                                     k_rows + ((chunk * kBytesChunk + keys * kKeys * 128 + within) >> 4), false);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_touch(product);
#pragma unroll
            for (int e = 0; e < kKeys / 2; e++) {
                float& sum = s[keys * kKeys / 2 + e];
                sum = step > 0 ? sum + product[e] : product[e];
            }
        }
    }
    // t = P V of the next block, columns of a part as they lie in shared memory, asynchronously.
    template <int kAt> __device__ __forceinline__ void issue_part(Part<kAt>& t) {
        const u64 columns = descriptor_of_rows(v.buffer(smem) + kAt * kPart * 128);
        wgmma_touch(t);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsPV; step++) {
            PartProduct<kAt>::rows(t, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                   columns + ((step / 4 * kBytesKeys + step % 4 * 32) >> 4), step > 0);
        }
        wgmma_commit();
    }
    // The second level: o = factor * o + t of a part.
    template <int kAt> __device__ __forceinline__ void add_part(Part<kAt>& t, const float (&factor)[2]) {
        wgmma_touch(t);
#pragma unroll
        for (int i = 0; i < columns_of_part(kAt) / 2; i++) {
            float& sum = o[kAt * kPart / 2 + i];
            sum = fmaf(sum, factor[i / 2 % 2], t[i]);
        }
    }
#if FT_SCALES_OF_KEYS
    // Scores times the scales of their keys, which are those of the columns.
    __device__ __forceinline__ void scale_keys() {
        const u32 scales = Layout::key_scales_at(smem, k.stage) + lane() % 4 * 16;
#pragma unroll
        for (int i = 0; i < kBlockKV / 16; i++) {
            const uint4 words = load_shared_16(scales + i * 64);
            const float by[4] = {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                                 __uint_as_float(words.w)};
#pragma unroll
            for (int e = 0; e < 8; e++) s[8 * i + e] *= by[e / 4 * 2 + e % 2];
        }
        __syncwarp();  // all lanes have read them: one gives the stage back
    }
#endif
    __device__ __forceinline__ void take_scores(const Work& work, int n) {
        wgmma_touch(s);
#if FT_SCALES_OF_KEYS
        scale_keys();
#endif
        without_page.read(smem, k.stage);
        if (lane() == 0) {
            k.release(smem);
            if (n == work.blocks.begin) q.release(smem, id);
        }
        k.advance();
    }
    __device__ __forceinline__ void release_v() {
        if (lane() == 0) v.release(smem);
        v.advance();
    }

    __device__ __forceinline__ int first_row(const Work& work) const {
        return work.tile.row + id * 64 + warp() * 16 + lane() / 4;
    }
    __device__ __forceinline__ ProgramHead head(const Work& work) const {
        return program_head(args, FT_SIZES(args, work.tile), work.tile);
    }

    // What the score program makes of the scores of block n.
    template <bool kMasked> __device__ __forceinline__ void change(const Work& work, int n) {
#if FT_SCALES_OF_QUERIES
        if constexpr (kProgramScore) {
#pragma unroll
            for (int i = 0; i < kBlockKV / 2; i++) s[i] *= unit[i / 2 % 2];
        }
        const float scale = 1.0f;
#else
        const float scale = unit[0];
#endif
        const auto at = [&](int tile, int e) -> float& { return s[4 * tile + e]; };
        const int row = first_row(work), key = n * kBlockKV + lane() % 4 * 2;
        if constexpr (kCapped) {
            program_capped<kMasked, kBlockKV / 8>(at, head(work), kept, cap, row, key, 0.0f, [](float, int) {});
        } else {
            program_scores<kMasked, kBlockKV / 8>(at, head(work), kept, row, key, scale);
        }
    }
    // Replaces the scores of pairs that the mask leaves out by -inf.
    __device__ __forceinline__ void mask(const Work& work, int n) {
        const int row = first_row(work), key = n * kBlockKV + lane() % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const KeyRange live =
                live_keys<kMaskLeft, kMaskRight>(FT_SIZES(args, work.tile), position_of(args, row + h * 8));
            const int last = live.last - key, first = live.first - key;
#pragma unroll
            for (int i = 0; i < kBlockKV / 4; i++) {
                const int column = i / 2 * 8 + i % 2;
                if (column > last || (kMaskLeft && column < first)) s[i / 2 * 4 + 2 * h + i % 2] = -FT_INFINITY;
            }
        }
    }
    // Scores of steps kBegin to kEnd of the next product to probabilities, rounded: conversions run beside
    // exponentials.
    template <int kBegin, int kEnd> __device__ __forceinline__ void exponentiate(Pairs& to, const RowFactors<2>& c) {
#pragma unroll
        for (int step = kBegin; step < kEnd; step++) {
            float* const x = s + 16 * step;
            softmax.exponentiate(x, c);
#pragma unroll
            for (int i = 0; i < 8; i++) to[8 * step + i] = pack_e4m3(x[2 * i], x[2 * i + 1]);
        }
    }
    // Pairs as A operands: of 32 keys, word 0 is elements 4t to 4t + 3 of row r (r and t as of accumulators,
    // wgmma.cuh), word 1 those of row r + 8, words 2 and 3 the same 16 elements further. A thread has the scores of
    // keys 2t, 2t + 1, 8 + 2t and 9 + 2t of each 16, so that these are what the elements of transposed V are. What an
    // operand is made of must not be an operand of a product that is under way, so that this is left to do when it has
    // ended.
    __device__ __forceinline__ void take(const Pairs& from) {
#pragma unroll
        for (int i = 0; i < kBlockKV / 8; i++) {
            const int at = i / 4 * 8 + i % 4 / 2 * 4 + i % 2;
            p[i] = u32(from[at]) | u32(from[at + 2]) << 16;
        }
    }
    // Where a scale is zero or below, or NaN: maxima of the scores would be minima. Its sign moves into Q.
    __device__ __forceinline__ void fold_sign_into_q(const Work& work, float scale) const {
        for (u32 at = threadIdx.x % 128 * 16; at < Layout::kBytesQ; at += 128 * 16) {
            uint4 x = load_shared_16(q.buffer(smem, id) + at);
            u32* words = &x.x;
#if FT_SCALES_OF_QUERIES
            const float of_row = scale * query_descale(work, id * 64 + at % kBytes64Rows / 128);
            if (of_row > 0.0f) continue;
#else
            const float of_row = scale;
#endif
#pragma unroll
            for (int w = 0; w < 4; w++) words[w] = of_row == 0.0f ? 0 : words[w] ^ 0x80808080;
            store_shared_16(q.buffer(smem, id) + at, x);
        }
        fence_async_proxy();
        barrier_sync(kWarpgroup + id, 128);
    }

    // Scores of a block to probabilities.
    template <bool kMasked, bool kByBits>
    __device__ __forceinline__ void advance(const Work& work, int n, const RowFactors<2>& c) {
        if constexpr (kProgramScore || (kMasked && kProgramMask)) change<kMasked>(work, n);
        if (kMasked) mask(work, n);
        without_page.hide(s);
        softmax.advance<kByBits>(s, c);
    }

    // The product of the block of V at hand with p, in parts, and beside(Int<part>) beside each.
    template <int kAt = 0, typename Beside>
    __device__ __forceinline__ void multiply(const float (&factor)[2], const Beside& beside) {
        Part<kAt> t;
        issue_part<kAt>(t);
        beside(Int<kAt>{});
        wgmma_wait<0>();
        add_part<kAt>(t, factor);
        if constexpr (kAt + 1 < kParts) multiply<kAt + 1>(factor, beside);
    }
    // The same beside nothing: two parts at once.
    __device__ __forceinline__ void multiply_alone(const float (&factor)[2]) {
        if constexpr (kColumnsV % kPart == 0) {
            Part<0> t[2];
            issue_part<0>(t[0]);
            multiply_rest<0>(t, factor);
        } else {
            Part<0> t;
            issue_part<0>(t);
            multiply_uneven<0>(t, factor);
        }
        release_v();
    }
    // Parts of which the last is narrower, from kAt on, whose product is under way: each has a place of its own.
    template <int kAt> __device__ __forceinline__ void multiply_uneven(Part<kAt>& t, const float (&factor)[2]) {
        if constexpr (kAt + 1 < kParts) {
            Part<kAt + 1> next;
            issue_part<kAt + 1>(next);
            wgmma_wait<1>();
            add_part<kAt>(t, factor);
            multiply_uneven<kAt + 1>(next, factor);
        } else {
            wgmma_wait<0>();
            add_part<kAt>(t, factor);
        }
    }
    // Parts of one width. They take turns in two places: with a place for each, D128 took 2 % longer.
    template <int kAt> __device__ __forceinline__ void multiply_rest(Part<0> (&t)[2], const float (&factor)[2]) {
        if constexpr (kAt + 1 < kParts) {
            issue_part<kAt + 1>(t[(kAt + 1) % 2]);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        add_part<kAt>(t[kAt % 2], factor);
        if constexpr (kAt + 1 < kParts) multiply_rest<kAt + 1>(t, factor);
    }

    template <bool kMasked, bool kByBits>
    __device__ __forceinline__ void step(const Work& work, int n, const RowFactors<2>& c) {
        if constexpr (kOverlap) {
            const float before[2] = {softmax.factor[0], softmax.factor[1]};
            Pairs next;
            k.wait(smem);
            wait_turn();
            issue_qk();
            v.wait(smem);
            multiply(before, [&](auto part) {
                constexpr int kAt = decltype(part)::value, kShare = div_up(kStepsPV, kParts);
                if constexpr (kAt == 0) {
                    pass_turn();
                    wgmma_wait<1>();
                    take_scores(work, n);
                    advance<kMasked, kByBits>(work, n, c);
                }
                exponentiate<min_of(kAt * kShare, kStepsPV), min_of((kAt + 1) * kShare, kStepsPV)>(next, c);
            });
            release_v();
            take(next);
        } else {
            k.wait(smem);
            wait_turn();
            issue_qk();
            pass_turn();
            wgmma_wait<0>();
            take_scores(work, n);
            advance<kMasked, kByBits>(work, n, c);
            Pairs next;
            exponentiate<0, kStepsPV>(next, c);
            take(next);
            v.wait(smem);
            multiply_alone(softmax.factor);
        }
    }

    // What is no number of V in masked blocks, and did not take part, to the rows that attend to it: rare, so plain and
    // slow.
    __device__ __forceinline__ void restore_special(const Work& work, const float (&inverse)[2]) {
        const Values values(args.forward, work.tile);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (kMarkEmpty && inverse[h] == 0.0f) continue;
            const int row = first_row(work) + h * 8;
            const KeyRange live =
                live_keys<kMaskLeft, kMaskRight>(FT_SIZES(args, work.tile), position_of(args, row));
#pragma unroll 1
            for (int key = live.first; key <= live.last; key++) {
                if (!is_masked<kMaskedFirst>(work.blocks, key / kBlockKV)) continue;
                const bool exists = row < FT_SIZES(args, work.tile).q_len;
                if (kProgramMask && !(exists && program_visible(head(work), row, key))) continue;
                const u8* const values_of_key = (const u8*)values.at(key);
                if (kPages && values_of_key == nullptr) continue;
                const u8* const at = values_of_key + lane() % 4 * 4;
#pragma unroll
                for (int j = 0; j < kColumnsV / 16; j++) {
                    const u32 word = *(const u32*)(at + 16 * j), none = special_bytes(word);
#pragma unroll
                    for (int byte = 0; byte < 4; byte++) {
                        if (none >> byte * 8 & 0x80)
                            o[8 * j + 2 * h + byte % 2 * 4 + byte / 2] += special_value(u8(word >> byte * 8));
                    }
                }
            }
        }
    }

    // O of a tile times o_scale, and the log-sum-exp, to memory. A thread has four neighbouring columns of each 16.
    __device__ __forceinline__ void write(const Work& work, const RowFactors<2>& c, float o_scale) {
        float inverse[2], log_sum_exp[2], sinks[2] = {0.0f, 0.0f};
#pragma unroll
        for (int h = 0; kProgramSink && h < 2; h++) {
            sinks[h] = program_sink(head(work), min_of(first_row(work) + h * 8, FT_SIZES(args, work.tile).q_len - 1));
        }
        softmax.finish(c, sinks, inverse, log_sum_exp);
        if (kMasks && (merged.met || read_flag(Layout::met_non_finite_at(smem)) != 0)) restore_special(work, inverse);
        const int first = id * 64 + warp() * 16 + lane() / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first + h * 8;
            const bool live = row < work.tile.rows;
            const i64 at = work.tile.row + row;
            // A branch, and so behind the columns (output_fp8.cuh); but not where these have scales: there D256 spills
            // 312 bytes so, and 292.
            constexpr bool kLseFirst = FT_SCALES_OF_CHANNELS && !kIsE4m3<OutputElement>;
            const auto write_lse = [&] {
                if (live && args.forward.lse != nullptr && lane() % 4 == 0) {
                    store_lse(args, work.tile, at, log_sum_exp[h]);
                }
            };
            if (!live && !kIsE4m3<OutputElement>) continue;
            if (kLseFirst) write_lse();
            const float by = inverse[h] * o_scale;
#pragma unroll
            for (int i = 0; kMarkEmpty && i < kColumnsV / 4; i++) {
                float& x = o[i / 2 * 4 + 2 * h + i % 2];
                x = inverse[h] == 0.0f ? 0.0f : x;
            }
#if FT_SCALES_OF_CHANNELS
            const Descales<2> channels = channel_descales(args.forward, work.tile);
#endif
            OutputElement* const to = output_row(args, work.tile, at) + lane() % 4 * 4;
            store_columns<kColumnsV / 16>(to, live, [&](int j, float (&columns)[4]) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    columns[i] = o[8 * j + 2 * h + i % 2 * 4 + i / 2] * by;
#if FT_SCALES_OF_CHANNELS
                    columns[i] *= channels.at(16 * j + lane() % 4 * 4 + i);
#endif
                }
            });
            if (!kLseFirst) write_lse();
        }
    }

#if FT_SCALES_OF_QUERIES
    // The scale of a row of a tile; 1 of one that there is not.
    __device__ __forceinline__ float query_descale(const Work& work, int row) const {
        return row < work.tile.rows ? query_descales(args.forward, work.tile).at(work.tile.row + row) : 1.0f;
    }
#endif

    __device__ __forceinline__ void run() {
        if (kTakeTurns && id + 1 == kConsumers) pass_turn();
#pragma unroll 1
        while (true) {
            const Work work = schedule.next<true>(args);
            if (!work.live) break;
            const float scale = score_scale(args, work.tile);
            RowFactors<2> c;
#pragma unroll
            for (int h = 0; h < RowFactors<2>::kCount; h++) {
#if FT_SCALES_OF_QUERIES
                const float of_row = scale * query_descale(work, id * 64 + warp() * 16 + lane() / 4 + h * 8);
#else
                const float of_row = scale;
#endif
                c.of[h] = kCapped ? 1.0f : kProgramScore || of_row == 0.0f ? kLog2E : fabsf(of_row) * kLog2E;
                if (kProgramScore) unit.of[h] = of_row == 0.0f ? 1.0f : fabsf(of_row);
            }
            if (kProgramScore || kProgramMask) kept = program_kept(head(work));
            if constexpr (kCapped) cap = program_cap(head(work), kept, unit[0]);
            softmax.init();
#pragma unroll
            for (int i = 0; i < kColumnsV / 2; i++) o[i] = 0.0f;
            if (work.blocks.begin < work.blocks.end) attend(work, scale, c);
            const Work done = schedule.again(work);
            merged.merge(args, done, id, o, softmax, c[0], smem);
            if (!merged.writes) continue;
            write(done, c, value_scale(args, done.tile) * output_scale<OutputElement>(args.forward));
        }
    }
    __device__ __forceinline__ void attend(const Work& work, float scale, const RowFactors<2>& c) {
        const BlockRange& b = work.blocks;
        q.wait(smem, id);
#if FT_SCALES_OF_QUERIES
        // A row of this warpgroup: two threads have one each.
        const bool positive = scale * query_descale(work, id * 64 + int(threadIdx.x) % 64) > 0.0f;
        if (barrier_any(kWarpgroup + id, 128, !positive)) fold_sign_into_q(work, scale);
#else
        if (!(scale > 0.0f)) fold_sign_into_q(work, scale);
#endif
        int n = b.end - 1;
        if constexpr (kOverlap) {
            k.wait(smem);
            issue_qk();
            wgmma_wait<0>();
            take_scores(work, n);
            advance<true, false>(work, n, c);
            Pairs first;
            exponentiate<0, kStepsPV>(first, c);
            take(first);
            softmax.factor[0] = softmax.factor[1] = 1.0f;  // O is zero
            n--;
        }
        // First blocks that the mask cuts, and as many others as it takes until all references are zero at least.
        const int full_end = max_of(b.begin, b.full_end);
        const int full_begin = kMaskedFirst ? max_of(b.begin, b.full_begin) : b.begin;
        bool below = any_below_zero();
#pragma unroll 1
        for (; n >= (below ? b.begin : full_end); n--) {
            step<true, false>(work, n, c);
            below = any_below_zero();
        }
#pragma unroll 1
        for (; n >= full_begin; n--) step<false, true>(work, n, c);
        if (kMaskedFirst) {
#pragma unroll 1
            for (; n >= b.begin; n--) step<true, false>(work, n, c);
        }
        if constexpr (kOverlap) {
            v.wait(smem);
            multiply_alone(softmax.factor);
        }
        q.advance();
    }
    // Whether a row of this warpgroup has a reference below zero. By vote, or the compiler takes it for different in
    // the threads of a warp.
    __device__ __forceinline__ bool any_below_zero() const {
        return __any_sync(0xffffffff, barrier_any(kWarpgroup + id, 128, softmax.is_below_zero()));
    }
};
