// Follows forward/sm90/consumer.cuh, whose fixes belong here too. Apart, since the machine code of 20 of 40 dense
// kernels changed when both families shared this text.
//
// The consumer: one warpgroup, from scores to outputs.

// One warpgroup of 64 query rows.
struct Consumer : Arrivals {
    BiasPipeline biases;
    QPipeline q;  // at the Q that is opened next
    int q_at;     // of the tile at hand
    int leaving = -1;                // the Q whose O is being copied out of shared memory
    Scores s;
    Output o;
    Probabilities p;
    RowSoftmax<kBlockKV / 8, kLazyRescale, kRowOrder, kMaskedRowOrder, kExp2Eighths, kProgramShift> softmax;
    ProgramKept kept;  // of the tile whose scores are computed
    ScoreRamps ramps;  // where it adds to them
    float seed_unit;   // where they are seeded, what takes natural units to those of the raw score
    RowMasks masks;
#if FT_DRAWERS
    u32 drawn[2][div_up(kBlockKV, 32)];  // of the block at hand, for two rows: which scores are kept
#endif
#if FT_DROPOUT && !FT_DRAWERS
    Dropout dropout;
#endif
    ScoresAhead<kBlockKV / 8> ahead;  // of the block whose scores are next
    u32 without_page;  // of its keys: a bit for each kKeysPerBit of them
    bool writes = true, met_in_pieces = false;  // whether the tile's O is here, and what its pieces have met

    __device__ __forceinline__ u32 q_address() const { return QPipeline::buffer_at(smem, q_at); }
    __device__ __forceinline__ Consumer(const KernelArgs& args, u32 smem, int id)
        : Arrivals(args, smem, id), masks(args, id) {}

    // s = Q K^T of the next block of keys or, where they are seeded, s += Q K^T, asynchronously.
    template <typename Product = ScoreProduct> __device__ __forceinline__ void issue_qk() {
        const u64 q_rows = descriptor_of_rows(q_address());
        const u64 k_rows = descriptor_of_rows(k.buffer(smem));
        if constexpr (kQuick) {
            Product::whole_rows(s, q_rows, k_rows);
            return;
        }
        wgmma_touch(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsQK; step++) {
            const int chunk = step / 4, in_chunk = step % 4 * 32;
            ScoreProduct::rows(s, q_rows + ((chunk * kBytes64Rows + in_chunk) >> 4),
                               k_rows + ((chunk * kBytesChunk + in_chunk) >> 4), kSeeded || step > 0);
        }
        wgmma_commit();
    }

    // o += P V of the next block of V, asynchronously.
    template <typename Product = OutputProduct> __device__ __forceinline__ void issue_pv() {
        const u64 v_depth = descriptor_of_depth(v.buffer(smem), kBytesChunk);
        if constexpr (kWholeOutput) {
            Product::whole_depth(o, p, v_depth);
            return;
        }
        wgmma_touch(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsPV; step++) {
            const u64 v_step = v_depth + (step * 16 * 128 >> 4);
            OutputProduct::depth(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], v_step);
        }
        wgmma_commit();
    }

    // The next Q, once it is there.
    __device__ __forceinline__ void open_q() {
        q_at = q.at(id);
        q.wait(smem, id);
        q.advance();
        if (!(args.forward.scale > 0.0f)) fold_sign_into_q();
    }
    // Which keys of the block that is multiplied lie in no page: asked for beside the products.
    __device__ __forceinline__ void look_up_pages() {
        without_page = warp_uniform(load_shared_4(without_page_at(smem, k.stage)));
    }
    // Where O of a tile leaves from, whose Q was `q`.
    __device__ __forceinline__ u32 o_address(int q) const {
        return kOutputApart ? Layout::o_at(smem, id)
               : kOutputInV ? Layout::o_in_v_at(smem, id)
                            : QPipeline::buffer_at(smem, q);
    }
    // The buffer of an O that has left is free, for a Q where it was that of one.
    __device__ __forceinline__ void release_o() {
        if (leaving >= 0 && threadIdx.x % 128 == 0) {
            tma_store_wait_read();
            if (!kQLeavesEarly) mbarrier_arrive(QPipeline::empty_at(smem, leaving));
        }
        leaving = -1;
    }
    // V of an open tile may be loaded: O has left its buffers.
    __device__ __forceinline__ void admit_v() {
        release_o();
        if (threadIdx.x % 128 == 0) mbarrier_arrive(Layout::admit_v_at(smem));
    }
    // The last scores of this Q are there.
    __device__ __forceinline__ void release_q() {
        if (kQLeavesEarly && lane() == 0) mbarrier_arrive(QPipeline::empty_at(smem, q_at));
    }
    // The scores of block n are there: releases what they came from.
    __device__ __forceinline__ void take_scores(const Turn& work, int n) {
        if (!kQuick) wgmma_touch(s);
        release_k();
        if (!kSeeded) release_biases(args, smem, biases, id);
        if (n == work.own.begin) release_q();
    }
    // How many of a tile's blocks arrive before its own, and after them.
    static __device__ __forceinline__ int before(const Turn& work) {
        return work.all.end - (attends(work) ? work.own.end : work.all.begin);
    }
    static __device__ __forceinline__ int after(const Turn& work) {
        return attends(work) ? work.own.begin - work.all.begin : 0;
    }

    // Brings O to the references of the last scores. Always, and not only where one has moved: a branch would keep the
    // compiler from filling gaps with it. The touch keeps it behind the products that were issued before.
    __device__ __forceinline__ void rescale() {
        wgmma_touch(o);
        softmax.rescale(o);
    }

    // The first key of block n of a tile's.
    __device__ __forceinline__ int first_key(const Turn& work, int n) const {
        return n * kBlockKV;
    }
    // Of this thread's scores: the first of its two rows, the other one being 8 rows further, and the first key of
    // block n.
    __device__ __forceinline__ WorkTile tile(const Turn& work) const { return kept_tile(smem, work); }
    __device__ __forceinline__ int first_row(const Turn& work) const {
        return tile(work).row + id * 64 + warp() * 16 + lane() / 4;
    }
    __device__ __forceinline__ int own_key(const Turn& work, int n) const {
        return first_key(work, n) + lane() % 4 * 2;
    }

    __device__ __forceinline__ ProgramHead head(const Turn& work) const {
        const WorkTile of = tile(work);
        return program_head(args, FT_SIZES(args, of), of);
    }

    // What the rows of a tile need of its score program.
    __device__ __forceinline__ void keep(const Turn& work) {
        kept = program_kept(head(work));
        masks.keep(tile(work));
        if (kOverlap && attends(work)) {
            read_ahead(work, work.own.end - 1, is_masked<kMaskedFirst>(work.own, work.own.end - 1));
            read_biases();
            precompute(work, work.own.end - 1, is_masked<kMaskedFirst>(work.own, work.own.end - 1));
        }
    }
    // The mask of block n, and what the program reads along its keys: before the scores are waited for, so that memory
    // answers meanwhile.
    template <typename Masked> __device__ __forceinline__ void read_ahead(const Turn& work, int n, Masked masked) {
        if (!kScoreTakes) return;
        program_read_ahead<kBlockKV / 8>(ahead, head(work), kept, first_row(work), own_key(work, n), magnitude());
    }
    // Mask bits and ALiBi terms of the next block, computed while its Q K^T is in flight: chains of instructions that
    // wait for each other.
    template <typename Masked> __device__ __forceinline__ void precompute(const Turn& work, int n, Masked masked) {
        if (kProgramShift) {
            const int row = first_row(work), key = own_key(work, n);
            ramps = program_ramps<kBlockKV / 8>(head(work), kept, row, key, magnitude(), masked, softmax.shift);
            softmax.shift_may_rise = !ramps.falls;
        }
        if (kClean && masked) masks.see(tile(work), first_key(work, n));
    }
    // The biases of the next block: as late as can be hidden beside the products that give its scores.
    __device__ __forceinline__ void read_biases() {
        if (!kSeeded) ::read_biases(args, smem, biases, id, ahead);
    }
    // What the program adds to the scores of block n, from which their product then starts: before the turn, and not
    // behind the product.
    template <typename Masked> __device__ __forceinline__ void seed(const Turn& work, int n, Masked masked) {
        if constexpr (kSeeded) {
            ::read_biases(args, smem, biases, id, ahead);
            const auto at = [&](int j, int e) -> float& { return s[4 * j + e]; };
            const int row = first_row(work), key = own_key(work, n);
            if (masked) {
                program_sums<true, kBlockKV / 8>(at, head(work), kept, row, key, seed_unit, ahead);
            } else {
                program_sums<false, kBlockKV / 8>(at, head(work), kept, row, key, seed_unit, ahead);
            }
            wgmma_touch(s);
            release_biases(args, smem, biases, id);
        }
    }
    // ... of the first block of a tile.
    __device__ __forceinline__ void seed_first(const Turn& work) {
        if (!kSeeded) return;
        kept = program_kept(head(work));
        seed(work, work.own.end - 1, is_masked<kMaskedFirst>(work.own, work.own.end - 1));
    }
    // What the score program and the window make of the scores of block n.
    template <typename Masked> __device__ __forceinline__ void change(const Turn& work, int n, Masked masked) {
        const auto at = [&](int j, int e) -> float& { return s[4 * j + e]; };
        const int row = first_row(work), key = own_key(work, n);
        const auto apply = [&](auto cut) {
            constexpr bool kCut = decltype(cut)::value;
            if (kSeeded) return;
            if (kProgramShift) {
                program_ramped<kCut, kBlockKV / 8, kMaskScores>(at, head(work), kept, ramps, row, key);
            } else {
                program_scores<kCut, kBlockKV / 8, kMaskScores, kReadAhead>(at, head(work), kept, row, key,
                                                                            magnitude(), &ahead);
            }
        };
        if (masked) {
            apply(Bool<true>{});
            if (!kClean) masks.see(tile(work), first_key(work, n));  // past the last key alone, once in a tile
            masks.apply(s);
        } else {
            apply(Bool<false>{});
        }
        if (without_page != 0) {
#pragma unroll
            for (int i = 0; i < kBlockKV / 2; i++) {
                if (without_page >> i / 4 * 8 / kKeysPerBit & 1) s[i] = -FT_INFINITY;
            }
        }
    }
    // Of the softmax scale, whose sign is in Q.
    __device__ __forceinline__ float magnitude() const {
        const float scale = args.forward.scale;
        return scale > 0.0f ? scale : scale == 0.0f ? 1.0f : -scale;
    }

#if FT_DROPOUT && !FT_DRAWERS
    // Zeros in the place of dropped probabilities of block n, behind their sum; with drawers, when they are rounded.
    __device__ __forceinline__ void drop(const Turn& work, int n) {
        u32 queries[2], pairs[2];
        const WorkTile of = tile(work);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = first_row(work) + h * 8, member = at & ((1 << args.group_shift) - 1);
            queries[h] = u32(at >> args.group_shift);
            pairs[h] = dropout_pair(args.forward, of.batch, (of.head << args.group_shift) + member);
        }
        const u32 group = u32(first_key(work, n)) / 8;
        each_dropout_across<kBlockKV / 8>(dropout, group, queries, pairs, [&](int j, int h, u32 word) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (!keeps_half(dropout, word, e)) s[4 * j + 2 * h + e] = 0.0f;
            }
        });
    }
#endif

    // Which scores of the block at hand are kept, at one of three places.
    template <ReadBits kHere> __device__ __forceinline__ void read_bits() {
#if FT_DRAWERS
        if (kHere != kReadBits) return;
        bits.wait(smem);
        const u32 at = bits.buffer(smem) + (id * 64 + warp() * 16 + lane() / 4) * 4;
#pragma unroll
        for (int i = 0; i < 2 * div_up(kBlockKV, 32); i++) {
            drawn[i % 2][i / 2] = load_shared_4(at + (i / 2 * kBlockQ + i % 2 * 8) * 4);
        }
        release_bits();
#endif
    }

    // Rounds probabilities to the element type: into registers, as A operands, or to shared memory.
    __device__ __forceinline__ void round() {
        read_bits<kWithP>();
        // Word i holds the thread's scores of row i % 2 in tile i / 2 of 8 keys.
        const auto packed = [&](int i) {
            const u32 pair = pack<Element>(s[2 * i], s[2 * i + 1]);
#if FT_DRAWERS
            return kept_pair(pair, drawn[i % 2][i / 8], i / 2 % 4);
#else
            return pair;
#endif
        };
#pragma unroll
        for (int i = 0; i < kBlockKV / 4; i++) p[i] = packed(i);
    }

    // A scale of zero or below turns maxima of the scores into minima: move its sign into Q and use its magnitude.
    __device__ __forceinline__ void fold_sign_into_q() const {
        for (u32 at = threadIdx.x % 128 * 16; at < kChunksQK * kBytes64Rows; at += 128 * 16) {
            uint4 x = load_shared_16(q_address() + at);
            u32* words = &x.x;
#pragma unroll
            for (int w = 0; w < 4; w++) words[w] = args.forward.scale == 0.0f ? 0 : words[w] ^ 0x80008000;
            store_shared_16(q_address() + at, x);
        }
        fence_async_proxy();
        sync();
    }

    // Whether no row of this warpgroup is far below zero, where that counts.
    __device__ __forceinline__ bool is_near_zero(float c) const {
        // By vote, or the compiler takes it for different in the threads of a warp.
        return !softmax.kFromZero || !__any_sync(0xffffffff,
                                                 barrier_any(kWarpgroup + id, 128, softmax.is_far_below_zero(c)));
    }

    // Whether the rows of a tile attend to anything.
    static __device__ __forceinline__ bool attends(const Turn& work) { return work.own.begin < work.own.end; }

    // The first probabilities of a tile from its first scores, beside nothing.
    __device__ __forceinline__ void open(const Turn& work, float c) {
        softmax.init();
#pragma unroll
        for (int i = 0; i < kColumnsV / 2; i++) o[i] = 0.0f;
        // As soon as O has left, but Q must not wait for that. Keys that are skipped take turns, for which others may
        // need V.
        const bool admitted = !kOverlap || leaving < 0 || (kTrim && before(work) > 0);
        if (kOutputInV && attends(work) && admitted) admit_v();
        open_q();
        // V comes later than K, and its first block is wanted later.
        const bool later = kSkips && kOverlap && attends(work) && before(work) > 0;
        skip(before(work), later);
        if (!kOverlap) keep(work);
        if (!kOverlap || !attends(work)) return;
        seed_first(work);
        wait_k();
        // Another consumer may have a turn for it, beside the last product of its tile before.
        if (kTrim && kChain) wait_turn();
        issue_qk();
        if (kTrim && kChain) pass_turn();
        look_up_pages();
        if (kOutputInV && !admitted) admit_v();
        keep(work);
        read_bits<kBesideScores>();
        wgmma_wait<0>();
        first_probabilities(work, c);
        read_bits<kBesideOutput>();
        round();
        if (later) skip_v();
    }
    __device__ __forceinline__ void first_probabilities(const Turn& work, float c) {
        const int n = work.own.end - 1;
        take_scores(work, n);
        change(work, n, is_masked<kMaskedFirst>(work.own, n));
        softmax.advance(s, c, Bool<false>{});
        softmax.forget();  // O is zero
        softmax.template exponentiate<false>(s, c);
#if FT_DROPOUT && !FT_DRAWERS
        drop(work, n);
#endif
    }

    // The key blocks of an open tile. With kOverlap the scores of one are computed beside the product of the one
    // before, so that the last product remains.
    __device__ __forceinline__ void attend(const Turn& work, float c) {
        const auto overlapped = [&](int n, auto masked, auto from_zero) {
            read_ahead(work, n, masked);
            seed(work, n, masked);
            wait_k();
            wait_turn();
            issue_qk();
            if (kRescaleBeside) rescale();
            precompute(work, n, masked);
            wait_v();
            issue_pv();
            pass_turn();
            look_up_pages();
            if (kChain) release_o();
            read_biases();
            read_bits<kBesideScores>();
            wgmma_wait<1>();
            take_scores(work, n);
            change(work, n, masked);
            softmax.advance(s, c, from_zero);
            softmax.template exponentiate<kIsFalse<decltype(masked)>>(s, c);
#if FT_DROPOUT && !FT_DRAWERS
            drop(work, n);
#endif
            read_bits<kBesideOutput>();
            wgmma_wait<0>();
            wgmma_touch(o);
            release_v();
            if (kLookAhead) look_ahead();
            if (!kRescaleBeside) rescale();
            round();
        };
        const auto serial = [&](int n, auto masked, auto from_zero) {
            read_ahead(work, n, masked);
            seed(work, n, masked);
            wait_k();
            wait_turn();
            issue_qk();
            precompute(work, n, masked);
            pass_turn();
            look_up_pages();
            if (kChain) release_o();
            read_biases();
            read_bits<kBesideScores>();
            wgmma_wait<0>();
            take_scores(work, n);
            change(work, n, masked);
            softmax.advance(s, c, from_zero);
            softmax.rescale(o);
            softmax.template exponentiate<kIsFalse<decltype(masked)>>(s, c);
#if FT_DROPOUT && !FT_DRAWERS
            drop(work, n);
#endif
            read_bits<kBesideOutput>();
            round();
            wait_v();
            issue_pv();
            wgmma_wait<0>();
            if (!kWholeOutput) wgmma_touch(o);
            release_v();
        };
        const auto near_zero = [&] { return is_near_zero(c); };
        if constexpr (kOverlap) {
            walk_steps(work.own, work.own.end - 2, near_zero, overlapped);
        } else {
            walk_steps(work.own, work.own.end - 1, near_zero, serial);
        }
    }

    // The last product of a tile.
    __device__ __forceinline__ void close(const Turn& work) {
        const bool some = attends(work);
        if constexpr (kOverlap) {
            if (some) {
                if (kRescaleBeside) rescale();
                wait_v();
                issue_pv();
            }
            // On every path, or the compiler does so where it likes.
            wgmma_wait<0>();
            wgmma_touch(o);
            if (some) release_v();
        }
        if (!some) {
            __syncwarp();  // no lane may still wait for a Q that is given away
            release_q();
        }
        skip(after(work));
        writes = true, met_in_pieces = false;
    }
    // Of a piece of a tile: leaves its sums and, last of all, takes those of the others.
    __device__ __forceinline__ void merge(const Turn& work, float c) {
        float m[2] = {softmax.m[0], softmax.m[1]}, l[2] = {quad_sum(softmax.l[0]), quad_sum(softmax.l[1])};
        const Pieces pieces(args.forward, id, kept_piece(smem, work));
        const int rows = min_of(max_of(tile(work).rows - id * 64, 0), 64);
        writes = pieces.merge(o, m, l, softmax.unit(c), smem, rows, met_in_pieces);
        // One thread of a row has its sum.
#pragma unroll
        for (int h = 0; h < 2; h++) softmax.m[h] = m[h], softmax.l[h] = lane() % 4 == 0 ? l[h] : 0.0f;
    }
    // At the end of its keys, what the rows of a tile are divided by.
    __device__ __forceinline__ RowResults finish(const Turn& work, float c) {
        RowResults rows = softmax.finish(c);
        if (kProgramSink) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int q = first_row(work) + h * 8;
                const float sink = program_sink(head(work), min_of(q, tile(work).q_len - 1));
                const WithSink sunk = with_sink(softmax.l[h], as_log2(softmax.m[h], softmax.unit(c)), sink);
                rows.inverse[h] = sunk.inverse, rows.log_sum_exp[h] = sunk.lse;
            }
        }
#if FT_DROPOUT
        rows.inverse[0] *= args.forward.dropout_scale, rows.inverse[1] *= args.forward.dropout_scale;
#endif
        return rows;
    }

    // The last product of a tile beside the first scores of the next, whose probabilities are in `p` afterwards: the
    // matrix units do not see where a tile ends.
    __device__ __forceinline__ RowResults close_beside(const Turn& work, const Turn& next, float c) {
        release_o();
        open_q();
        seed_first(next);
        wait_k();
        wait_turn();
        issue_qk();
        if (kRescaleBeside) rescale();
        wait_v();
        issue_pv();
        pass_turn();
        look_up_pages();
        writes = true, met_in_pieces = false;
        const RowResults rows = finish(work, c);
        softmax.init();
        keep(next);
        read_bits<kBesideScores>();
        wgmma_wait<1>();
        first_probabilities(next, c);
        read_bits<kBesideOutput>();
        wgmma_wait<0>();
        wgmma_touch(o);
        release_v();
        round();
        return rows;
    }

    // O of a tile, whose Q was `q`, out to memory.
    __device__ __forceinline__ void write(const Turn& work, const RowResults& rows, int q) {
        const u32 to = o_address(q);
        if (kOutputApart) release_o();
        if (kOutputInV) {
            release_o();  // if this tile attended to nothing
            barrier_sync(kAllConsumers, kConsumers * 128);  // other consumers may still multiply with V
        }
        // O overwrites rows that other warps have read as Q: all must be done. They must also agree about non-finite
        // elements, which may be met for the next tile while they look.
        bool met = false;
        if (kClean) {
            met = barrier_any(kWarpgroup + id, 128, lane() == 0 ? read_flag(Layout::met_non_finite_at(smem)) : 0);
        } else {
            sync();
        }
        const bool whole = !work.is_piece();
        const OutputRows output{args, smem, id, whole ? work.place : -1};
        if (writes) output.stage(o, tile(work), rows, to);
        if (writes && (met || met_in_pieces)) {
            if (kMarkEmpty) output.mark_empty(rows);
            sync();
            output.restore_non_finite(tile(work), work.all, to);
        }
        fence_async_proxy();
        sync();
        release_o();
        if (writes) send_rows(args, tile(work), id, to);
        leaving = q;
        if (kOptimistic && whole) look_at_output(smem, to, work.place);
        // Another Q waits for this space alone.
        if (!kChain && !kQLeavesEarly) release_o();
    }

    __device__ __forceinline__ Turn next_turn() {
        const Work next = schedule.next<true>(id);
        return Turn(next, schedule.place(0));
    }

    // Whether tiles must be computed again, and the first of them: when all consumers are done, and what left has
    // arrived.
    __device__ __forceinline__ bool begin_again(Turn& next) {
        // The second pass begins when all consumers have arrived here. By vote, or the compiler takes all that happens
        // in tiles for different in the threads of a warp.
        if (!kOptimistic || __any_sync(0xffffffff, found_again(smem) & kSecondPass)) return false;
        release_o();
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(Layout::tiles_done_at(smem));
        if (!__any_sync(0xffffffff, any_again(smem))) return false;
        if (threadIdx.x % 128 == 0) tma_store_wait();
        next = next_turn();
        return true;
    }

    __device__ __forceinline__ void run() {
        // A score program gives scores in natural units, unless all it does is to add.
        const float c = kProgramScore && !kProgramShift && !kSeeded ? kLog2E : magnitude() * kLog2E;
        if (kSeeded) seed_unit = 1.0f / magnitude();
        if (kTakeTurns && id + 1 == kConsumers) pass_turn();
#if FT_DROPOUT && !FT_DRAWERS
        dropout = dropout_of(args.forward);
#endif
        Turn work(first_work(smem, id), 0);
        open(work, c);
        while (true) {
            attend(work, c);
            const int q = q_at;
            RowResults rows;
            // Before what comes next is known where others wait for the space of blocks that are skipped here.
            const bool early = !kChain || (kTrim && after(work) > 0) || work.is_piece();
            if (early) {
                close(work);
                if (work.is_piece()) merge(work, c);
                rows = finish(work, c);
            }
            if (kWriteFirst) write(work, rows, q);
            Turn next = next_turn();
            const bool chained = kChain && kOverlap && !early && next.live && attends(work) && attends(next) &&
                                 (!kTrim || before(next) == 0);
            if (!early && chained) rows = close_beside(work, next, c);
            if (!early && !chained) {
                close(work);
                rows = finish(work, c);
            }
            if (!kWriteFirst) write(work, rows, q);
            if (!next.live && !begin_again(next)) break;
            if (chained) {
#pragma unroll
                for (int i = 0; i < kColumnsV / 2; i++) o[i] = 0.0f;
            } else {
                open(next, c);
            }
            work = next;
        }
        // Shared memory must outlast what reads it.
        release_o();
    }
};
