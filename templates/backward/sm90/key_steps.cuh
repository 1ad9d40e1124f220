// The steps of a block of keys: S, P, dP, dS, and the sums dK and dV in registers.

__device__ __forceinline__ float2 load_shared_float2(u32 address) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
    return r;
}

// Of 64 keys by kBlockQ queries.
using Scores = float[kBlockQ / 2];

// What warpgroups take one after the other: a query tile of a head.
struct Step {
    int tile, head;  // head: of the group, where there is a program or dropout
    bool cut;        // whether some pairs take no part
};
// The steps of a key block that are still to come, where they are not listed.
struct Steps {
    Uncut uncut;
    int begin, end, next, left;
#if FT_DROPOUT
    int head;
#endif
};

// A warpgroup that sums dK, dV or both.
template <bool kHasK, bool kHasV> struct KeysConsumer {
    const KernelArgs& args;
    const u32 smem;
    const int id;  // of the warpgroup

    int key;  // the first of the key block
    float dk[kHasK ? kColumnsQK / 2 : 1], dv[kHasV ? kColumnsV / 2 : 1];
    u32 p[kBlockQ / 4], ds[kBlockQ / 4];
    KeyRing keys;        // V's ring has the same position
    QueryRing queries;   // dO's ring has the same position, where the warpgroup has both gradients
    Ring<kStages> outs;  // else that of dO
    SpillRing spills;
    HandRing hands;
    SumRing sums;
    SlopeRing slopes;
#if @{ packed }@
    KeyItems items;
    // Read where it is needed: kept, it would take registers through the steps.
    __device__ __forceinline__ Lengths lengths() const { return Item::lengths(items.buffer(smem)); }
#else
    __device__ __forceinline__ const BackwardArgs& lengths() const { return args.backward; }
#endif

    // The first row of K and V that is this warpgroup's own.
    __device__ __forceinline__ int first_row() const { return kByGradient ? 0 : id * 64; }
    // The first of a thread's two keys; the other is 8 further.
    __device__ __forceinline__ int my_key() const { return key + first_row() + warp() * 16 + lane() / 4; }
    __device__ __forceinline__ int out_stage() const { return kByGradient ? outs.stage : queries.stage; }
    __device__ __forceinline__ u32 out_parity() const { return kByGradient ? outs.parity : queries.parity; }
    __device__ __forceinline__ void release_out() const {
        if (lane() == 0) mbarrier_arrive(OutRing::empty_at(smem, out_stage()));
    }
    // Queries [first, last] that see one of them.
    __device__ __forceinline__ KeyRange seen_by(const Visible& visible, int mine) const {
        KeyRange r;
        r.first = mine >= visible.kv_len ? 0x7fffffff : kMaskRight ? mine - visible.shift - visible.right : -(1 << 30);
        r.last = kMaskLeft ? mine - visible.shift + visible.left : 0x7fffffff;
        return r;
    }
    // Puts zeros in the place of what queries and keys give that do not see each other. By arithmetic that is done anew
    // for each tile that a mask cuts: what it finds would take registers that others need.
    __device__ __forceinline__ void clear_unseen(Scores& s, int tile) const {
        const Visible visible(args.backward, lengths());
        const KeyRange range[2] = {seen_by(visible, my_key()), seen_by(visible, my_key() + 8)};
        const int column = tile * kBlockQ + lane() % 4 * 2;
#pragma unroll
        for (int i = 0; i < kBlockQ / 2; i++) {
            const int query = column + i / 4 * 8 + i % 2, h = i % 4 / 2;
            if (query < range[h].first || (kMaskLeft && query > range[h].last)) s[i] = 0.0f;
        }
    }

    // S^T = K Q^T of the tile at the ring's position.
    __device__ __forceinline__ void issue_scores(Scores& s) {
        const u64 k_rows = descriptor_of_rows(keys.buffer(smem) + first_row() * kRowBytes);
        const u64 q_rows = descriptor_of_rows(queries.buffer(smem));
        queries.wait(smem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kColumnsQK / 16; k++)
            wgmma<Element, kBlockQ>::rows(s, k_rows + (k / 4 * kKeys * kRowBytes + k % 4 * 32) / 16,
                                          q_rows + (k / 4 * kBlockQ * kRowBytes + k % 4 * 32) / 16, k > 0);
        wgmma_commit();
    }

    // dP^T = V dO^T.
    __device__ __forceinline__ void issue_slopes(Scores& dp) {
        const u64 v_rows = descriptor_of_rows(ValueRing::buffer_at(smem, keys.stage) + first_row() * kRowBytes);
        const u64 o_rows = descriptor_of_rows(OutRing::buffer_at(smem, out_stage()));
        mbarrier_wait(OutRing::full_at(smem, out_stage()), out_parity());
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kColumnsV / 16; k++)
            wgmma<Element, kBlockQ>::rows(dp, v_rows + (k / 4 * kKeys * kRowBytes + k % 4 * 32) / 16,
                                          o_rows + (k / 4 * kBlockQ * kRowBytes + k % 4 * 32) / 16, k > 0);
        wgmma_commit();
    }

    // dV += P^T dO.
    __device__ __forceinline__ void issue_values() {
        const u64 o_depth = descriptor_of_depth(OutRing::buffer_at(smem, out_stage()), kBlockQ * kRowBytes);
        wgmma_touch(dv);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockQ / 16; k++)
            wgmma<Element, kColumnsV>::depth(dv, p[k * 4], p[k * 4 + 1], p[k * 4 + 2], p[k * 4 + 3],
                                             o_depth + k * 2048 / 16);
        wgmma_commit();
    }
    // dK += dS^T Q.
    __device__ __forceinline__ void issue_keys() {
        const u64 q_depth = descriptor_of_depth(queries.buffer(smem), kBlockQ * kRowBytes);
        wgmma_touch(dk);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockQ / 16; k++)
            wgmma<Element, kColumnsQK>::depth(dk, ds[k * 4], ds[k * 4 + 1], ds[k * 4 + 2], ds[k * 4 + 3],
                                              q_depth + k * 2048 / 16);
        wgmma_commit();
    }

#if FT_DROPOUT
    // Which scores of a step are kept: while products run. Held multipliers are 5 % at head dim 64 causal and 1 % full;
    // at 128 and 256 causal they cost 1 to 2 %.
    using Kept = KeptDown<kBlockQ, kDoubleCalls, kColumnsQK <= 64>;
    __device__ __forceinline__ Kept find_kept(const Pair& pair, int tile, int member) const {
        Kept kept;
        const u32 group = u32(key + first_row() + warp() * 16) / 8;
        const u32 of_pair = dropout_pair(args.backward, pair.batch, pair.head(member));
        kept.draw(dropout_of(args.backward), group, tile * kBlockQ, of_pair);
        return kept;
    }
    // Multiplies by a factor where a score is kept and by 0 elsewhere.
    static __device__ __forceinline__ void keep(Scores& x, const Kept& kept, float factor) {
#pragma unroll
        for (int j = 0; j < kBlockQ / 8; j++) {
            const u32 signs = kept.signs(j);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[j * 4 + e] *= __uint_as_float(__float_as_uint(factor) & Kept::mask(signs, e / 2, e % 2));
            }
        }
    }
    // dS = P (kept(dP) / (1 - p) - D), packed, and P, which dropped scores are missing from.
    __device__ __forceinline__ void differentiate(Scores& s, Scores& dp, int tile, bool cut, const Kept& kept) {
        const u32 rows = smem + KeysLayout::kRows + queries.stage * KeysLayout::kBytesRows + lane() % 4 * 8;
#pragma unroll
        for (int j = 0; j < kBlockQ / 8; j++) {
            const float2 delta = load_shared_float2(rows + kBlockQ * 4 + j * 32);
            const u32 signs = kept.signs(j);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &x = s[j * 4 + e], &y = dp[j * 4 + e];
                const float left = __uint_as_float(__float_as_uint(x) & Kept::mask(signs, e / 2, e % 2));
                y = fmaf(left * args.backward.dropout_scale, y, -x * (e % 2 ? delta.y : delta.x));
                x = left;
            }
        }
        if (cut) clear_unseen(dp, tile);
        pack_slopes(dp);
    }
#endif

    // P = exp(S - lse), in S's registers.
    __device__ __forceinline__ void weigh(Scores& s, int tile, bool cut, float scale) {
        const u32 rows = smem + KeysLayout::kRows + queries.stage * KeysLayout::kBytesRows + lane() % 4 * 8;
#pragma unroll
        for (int j = 0; j < kBlockQ / 8; j++) {
            const float2 lse = load_shared_float2(rows + j * 32);
#pragma unroll
            for (int e = 0; e < 4; e++) s[j * 4 + e] = exp2_approx(fmaf(s[j * 4 + e], scale, e % 2 ? -lse.y : -lse.x));
        }
        if (cut) clear_unseen(s, tile);
    }
    // dS = P (dP - D), packed. What is not seen takes no part, whatever V holds there.
    __device__ __forceinline__ void differentiate(const Scores& s, Scores& dp, int tile, bool cut) {
        const u32 rows = smem + KeysLayout::kRows + queries.stage * KeysLayout::kBytesRows + lane() % 4 * 8;
#pragma unroll
        for (int j = 0; j < kBlockQ / 8; j++) {
            const float2 delta = load_shared_float2(rows + kBlockQ * 4 + j * 32);
#pragma unroll
            for (int e = 0; e < 4; e++) dp[j * 4 + e] = s[j * 4 + e] * (dp[j * 4 + e] - (e % 2 ? delta.y : delta.x));
        }
        if (cut) clear_unseen(dp, tile);
        pack_slopes(dp);
    }
    // The same of eight queries. Weights times the slopes of a program's scores are minus zero where a pair takes no
    // part.
    __device__ __forceinline__ void differentiate(int j, const float (&w)[4], Scores& dp) const {
        const u32 rows = smem + KeysLayout::kRows + queries.stage * KeysLayout::kBytesRows + lane() % 4 * 8;
        const float2 delta = load_shared_float2(rows + kBlockQ * 4 + j * 32);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float& y = dp[j * 4 + e];
            y = kListed && __float_as_uint(w[e]) == 0x80000000 ? 0.0f : w[e] * (y - (e % 2 ? delta.y : delta.x));
        }
    }
    __device__ __forceinline__ void pack_slopes(const Scores& dp) {
#pragma unroll
        for (int i = 0; i < kBlockQ / 4; i++) ds[i] = pack<Element>(dp[2 * i], dp[2 * i + 1]);
    }
    __device__ __forceinline__ void pack_weights(const Scores& s) {
#pragma unroll
        for (int i = 0; i < kBlockQ / 4; i++) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
    }

    // dS of the warpgroup's 64 keys, to shared memory.
    __device__ __forceinline__ void store_slopes() const {
        const int row = first_row() + warp() * 16 + lane() % 16;
#pragma unroll
        for (int k = 0; k < kBlockQ / 16; k++) {
            const u32 chunk = k * 2 + lane() / 16;
            stmatrix_x4(spills.buffer(smem) + chunk / 8 * kBytesTile + row * kRowBytes + ((chunk ^ row) % 8) * 16,
                        ds[k * 4], ds[k * 4 + 1], ds[k * 4 + 2], ds[k * 4 + 3]);
        }
        fence_async_proxy();
    }
    // The same for the thread that takes it away.
    __device__ __forceinline__ void spill() {
        spills.acquire(smem);
        store_slopes();
        __syncwarp();
        if (lane() == 0) spills.commit(smem);
        spills.advance();
    }

    // Says which tile of dS spill() leaves next, or that there is none. Of one warp.
    __device__ __forceinline__ void list_spill(const Listed& of) {
        if (!kListed) return;
        spills.acquire(smem);
        if ((kByGradient || id == 0) && warp() == 0 && lane() == 0)
            of.write(smem + KeysLayout::kListedS + spills.stage * kBytesListed);
    }
    __device__ __forceinline__ void end_spills() {
        list_spill(Listed{-1, 0});
        __syncwarp();
        if (lane() == 0) spills.commit(smem);
        spills.advance();
    }

    // Finds the step at the ring's position, if there is one. Where steps are listed, Q is there then.
    __device__ __forceinline__ bool take(Step& step, Steps& steps) const {
        if constexpr (kListed) {
            queries.wait(smem);
            const Listed of = Listed::read(smem + KeysLayout::kListedQ + queries.stage * kBytesListed);
            step.tile = of.tile & ~Listed::kCut, step.head = of.head;
            step.cut = (of.tile & Listed::kCut) != 0 || steps.uncut.cuts(step.tile);
            return of.tile >= 0;
        } else {
            step.tile = steps.next, step.cut = steps.uncut.cuts(step.tile);
#if FT_DROPOUT
            step.head = steps.head;
            if (steps.next + 1 == steps.end) steps.head++;
#endif
            if (++steps.next == steps.end) steps.next = steps.begin;
            return steps.left-- > 0;
        }
    }
    // Behind the last of listed steps.
    __device__ __forceinline__ void pass_end() {
        if (!kListed) return;
        // Not before the loader has it: it would miss a phase.
        mbarrier_wait(OutRing::full_at(smem, out_stage()), out_parity());
        __syncwarp();  // and all lanes have read that there is none
        release_out();
        if (kByGradient) outs.advance();
        if (lane() == 0) queries.release(smem);
        queries.advance();
    }

    // Marks products of pairs that the window or the program's mask leaves out. No product has these bits.
    static constexpr u32 kLeftOut = 0x7fc00001;
    __device__ __forceinline__ void mark_unseen(Scores& s, const Step& step, const ProgramHead& head) const {
        const auto& a = lengths();
        const Visible visible(args.backward, a);
        const int query = step.tile * kBlockQ + lane() % 4 * 2, mine = my_key();
        const KeyRange range[2] = {seen_by(visible, mine), seen_by(visible, mine + 8)};
#if FT_PROGRAM
        const MaskKept kept = mask_kept(head);
        const int first = min_of(mine, a.kv_len - 1), offset[2] = {0, min_of(mine + 8, a.kv_len - 1) - first};
#endif
#pragma unroll
        for (int i = 0; i < kBlockQ / 4; i++) {
            const int wanted = query + i / 2 * 8 + i % 2, row = min_of(wanted, a.q_len - 1);
            (void)row;
#if FT_PROGRAM
            const MaskRow mask = mask_row(head, kept, row, first);
#endif
#pragma unroll
            for (int h = 0; h < 2; h++) {
                bool out = wanted < range[h].first || (kMaskLeft && wanted > range[h].last);
#if FT_PROGRAM
                if (kProgramMask) out = out || !mask_element(head, kept, mask, row, first, offset[h]);
#endif
                if (out) s[i / 2 * 4 + h * 2 + i % 2] = __uint_as_float(kLeftOut);
            }
        }
    }
    // P in the place of the products s of Q and K, by the score program. each(j, slopes) is called with what dP is
    // to be multiplied by, which is minus zero where a pair takes no part, and so no product's value.
    template <typename Each>
    __device__ __forceinline__ void weigh_by_program(Scores& s, const Step& step, const Pair& pair, const Each& each) {
        const auto& a = lengths();
        const float scale = args.backward.scale;
        const ProgramHead head = head_of_program(args, pair, pair.head(step.head));
        if (step.cut) mark_unseen(s, step, head);
        const u32 rows = smem + KeysLayout::kRows + queries.stage * KeysLayout::kBytesRows + lane() % 4 * 8;
        const int query = step.tile * kBlockQ + lane() % 4 * 2, mine = my_key();
#pragma unroll
        for (int j = 0; j < kBlockQ / 8; j++) {
            const float2 lse = load_shared_float2(rows + j * 32);
            float slope[4];
            const auto row_at = [&](int e) { return min_of(query + j * 8 + e, a.q_len - 1); };
            const int of_head = pair.head(step.head);
            const Reference by[2] = {reference_of(args.backward, pair.batch, of_head, row_at(0), lse.x),
                                     reference_of(args.backward, pair.batch, of_head, row_at(1), lse.y)};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = row_at(e % 2);
                const int column = min_of(mine + e / 2 * 8, a.kv_len - 1);
                float& x = s[j * 4 + e];
                const Gradient g = score_gradient(head, row, column, x * scale);
                // A score of -infinity takes no part, whoever made it so.
                const bool none = __float_as_uint(x) == kLeftOut || g.value == -FT_INFINITY;
                x = none ? 0.0f : exp2_approx(exponent_of(g.value, by[e % 2]));
                slope[e] = none ? -0.0f : fmaf(x, g.slope, 0.0f);
            }
            each(j, slope);
        }
    }

    // All steps of a key block, with a score program.
    __device__ __forceinline__ void walk_listed(Steps steps, const Pair& pair) {
        Step step;
#pragma unroll 1
        while (take(step, steps)) {
            Scores s, dp;
            issue_scores(s);
            issue_slopes(dp);
#if FT_DROPOUT
            const Kept kept = find_kept(pair, step.tile, step.head);
#endif
            wgmma_wait<0>();
            wgmma_touch(s);
            wgmma_touch(dp);
#if FT_DROPOUT
            keep(dp, kept, args.backward.dropout_scale);
#endif
            weigh_by_program(s, step, pair, [&](int j, const float(&w)[4]) { differentiate(j, w, dp); });
            pack_slopes(dp);
#if FT_DROPOUT
            keep(s, kept, 1.0f);
#endif
            pack_weights(s);
            issue_values();
            issue_keys();
            list_spill(Listed{step.tile, step.head});
            spill();
            wgmma_wait<1>();
            wgmma_touch(dv);
            release_out();
            wgmma_wait<0>();
            wgmma_touch(dk);
            if (lane() == 0) queries.release(smem);
            queries.advance();
        }
        pass_end();
        end_spills();
    }

    // The same of the warpgroup that has dV: its weights go to the other one. Without a program the scores of the next
    // step are computed behind dV; a program's mask takes too many registers for that.
    __device__ __forceinline__ void walk_values(Steps steps, const Pair& pair) {
        const float scale = args.backward.scale * kLog2E;
        Step step;
        Scores s;
        if (!take(step, steps)) return pass_end();
        if (!kListed) issue_scores(s);
#pragma unroll 1
        for (;;) {
            if (kListed) issue_scores(s);
#if FT_DROPOUT
            const Kept kept = find_kept(pair, step.tile, step.head);
#endif
            wgmma_wait<0>();
            wgmma_touch(s);
            hands.acquire(smem);
            if constexpr (kListed) {
                weigh_by_program(s, step, pair, [&](int j, const float(&w)[4]) { hand_over(j, w); });
            } else {
                weigh(s, step.tile, step.cut, scale);
#pragma unroll
                for (int j = 0; j < kBlockQ / 8; j++) {
                    const float w[4] = {s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]};
                    hand_over(j, w);
                }
            }
            __syncwarp();
            if (lane() == 0) hands.commit(smem);
            hands.advance();
            if (lane() == 0) queries.release(smem);
            queries.advance();
#if FT_DROPOUT
            keep(s, kept, 1.0f);
#endif
            pack_weights(s);
            mbarrier_wait(OutRing::full_at(smem, outs.stage), outs.parity);
            issue_values();
            if (kListed) {
                values_are_done();
                if (!take(step, steps)) return pass_end();
            } else {
                if (!take(step, steps)) break;
                issue_scores(s);
                wgmma_wait<1>();
                wgmma_touch(dv);
                release_out();
                outs.advance();
            }
        }
        values_are_done();
    }
    __device__ __forceinline__ void values_are_done() {
        wgmma_wait<0>();
        wgmma_touch(dv);
        release_out();
        outs.advance();
    }

    // And of the one that has dK, with the weights of the other. dP of the next step is computed behind dK.
    __device__ __forceinline__ void walk_keys(Steps steps, const Pair& pair) {
        Step step;
        Scores dp;
        if (!take(step, steps)) return end_keys();
        issue_slopes(dp);
        u32 empty;  // the barrier of Q that dK is computed from
#pragma unroll 1
        for (;;) {
#if FT_DROPOUT
            const Kept kept = find_kept(pair, step.tile, step.head);
#endif
            wgmma_wait<0>();
            wgmma_touch(dp);
            release_out();
            outs.advance();
            queries.wait(smem);
#if FT_DROPOUT
            keep(dp, kept, args.backward.dropout_scale);
#endif
            take_over(dp, step);
            issue_keys();
            list_spill(Listed{step.tile, step.head});
            spill();
            empty = queries.empty(smem);
            queries.advance();
            if (!take(step, steps)) break;
            issue_slopes(dp);
            wgmma_wait<1>();
            wgmma_touch(dk);
            if (lane() == 0) mbarrier_arrive(empty);
        }
        wgmma_wait<0>();
        wgmma_touch(dk);
        if (lane() == 0) mbarrier_arrive(empty);
        end_keys();
    }
    __device__ __forceinline__ void end_keys() {
        pass_end();
        if (kListed) end_spills();
    }

    // Weights from one warpgroup to the other, in whose threads they have the same places.
    __device__ __forceinline__ u32 hand(int i) const {
        return smem + KeysLayout::kHand + (i * 128 + threadIdx.x % 128) * 16;
    }
    __device__ __forceinline__ void hand_over(int j, const float (&w)[4]) const {
        store_shared_16(hand(j), uint4{__float_as_uint(w[0]), __float_as_uint(w[1]), __float_as_uint(w[2]),
                                       __float_as_uint(w[3])});
    }
    // dS of them in the place of dP.
    __device__ __forceinline__ void take_over(Scores& dp, const Step& step) {
        hands.wait(smem);
#pragma unroll
        for (int j = 0; j < kBlockQ / 8; j++) {
            const uint4 x = load_shared_16(hand(j));
            const float w[4] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
            differentiate(j, w, dp);
        }
        __syncwarp();
        if (lane() == 0) hands.release(smem);
        hands.advance();
        if (!kListed && step.cut) clear_unseen(dp, step.tile);
        pack_slopes(dp);
    }

    // All query tiles that see the key block, head after head.
    __device__ __forceinline__ void walk(const Uncut& uncut, const Pair& pair, int first_member, int begin, int end,
                                         int steps) {
        const float scale = args.backward.scale * kLog2E;
        int tile = begin;
#if FT_DROPOUT
        // Of the next step behind the last products, where S and dP take no registers.
        int member = first_member;
        Kept kept = find_kept(pair, tile, member);
#endif
#pragma unroll 1
        for (int i = 0; i < steps; i++) {
            Scores s, dp;
            const bool cut = uncut.cuts(tile);
            issue_scores(s);
            issue_slopes(dp);
            wgmma_wait<1>();
            wgmma_touch(s);
            weigh(s, tile, cut, scale);
            wgmma_wait<0>();
            wgmma_touch(dp);
#if FT_DROPOUT
            differentiate(s, dp, tile, cut, kept);
#else
            differentiate(s, dp, tile, cut);
#endif
            pack_weights(s);
            issue_values();
            issue_keys();
#if FT_DROPOUT
            if (++tile == end) tile = begin, member++;
            kept = find_kept(pair, tile, member);
#else
            if (++tile == end) tile = begin;
#endif
            spill();
            wgmma_wait<1>();
            wgmma_touch(dv);
            if (lane() == 0) mbarrier_arrive(OutRing::empty_at(smem, queries.stage));
            wgmma_wait<0>();
            wgmma_touch(dk);
            if (lane() == 0) queries.release(smem);
            queries.advance();
        }
    }

    // Half of dQ = dS K over the keys of both warpgroups: 64 queries of 128, or 64 columns of 128.
    static constexpr int kColumnsSums = kBlockQ == 128 ? kColumnsQK : 64;
    __device__ __forceinline__ void issue_sums(float (&dq)[kColumnsSums / 2]) const {
        const u32 slopes = spills.buffer(smem) + (kBlockQ == 128 ? id * kBytesTile : 0);
        const u32 rows = keys.buffer(smem) + (kBlockQ == 128 ? 0 : id * kKeys * kRowBytes);
        const u64 ds_depth = descriptor_of_depth(slopes, kBytesTile);
        const u64 k_depth = descriptor_of_depth(rows, kKeys * kRowBytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys / 16; k++)
            wgmma<Element, kColumnsSums>::depths(dq, ds_depth + k * 2048 / 16, k_depth + k * 2048 / 16, k > 0);
        wgmma_commit();
    }
    // Leaves it to the thread that adds it: 16 bytes of each thread for every 8 columns, as a product has them.
    __device__ __forceinline__ void leave_sums(const float (&dq)[kColumnsSums / 2]) {
        constexpr int kParts = kColumnsSums / 8;
        const u32 to = sums.buffer(smem) + id * kParts * 2048 + threadIdx.x % 128 * 16;
        sums.acquire(smem);
#pragma unroll
        for (int j = 0; j < kParts; j++) {
            if (kBlockQ == 64 && kColumnsQK < 128 && id * kParts + j >= kColumnsQK / 8) break;
            store_shared_16(to + j * 2048, uint4{__float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]),
                                                 __float_as_uint(dq[4 * j + 2]), __float_as_uint(dq[4 * j + 3])});
        }
        fence_async_proxy();
        __syncwarp();
        if (lane() == 0) sums.commit(smem);
        sums.advance();
    }

    // A step of walk_in_turns(): dS goes to shared memory only, and both warpgroups meet to form dQ from it. Of dS two
    // buffers need no barrier, as who meets the other again has read the one before. behind() runs beside the last
    // products.
    template <typename Slopes, typename Each>
    __device__ __forceinline__ void take_turn(int tile, bool cut, float scale, const Slopes& find_slopes,
                                              const Each& behind) {
        Scores s, dp;
        float dq[kColumnsSums / 2];
        issue_scores(s);
        issue_slopes(dp);
        wgmma_wait<1>();
        wgmma_touch(s);
        weigh(s, tile, cut, scale);
        wgmma_wait<0>();
        wgmma_touch(dp);
        find_slopes(s, dp, tile, cut);
        pack_weights(s);
        issue_values();
        if (kSlopes == 1) slopes.acquire(smem);
        store_slopes();
        barrier_sync(5, 128 * kWarpgroups);
        issue_sums(dq);
        issue_keys();
        behind();
        if (kSlopes > 1) spills.advance();
        wgmma_wait<2>();
        wgmma_touch(dv);
        release_out();
        wgmma_wait<1>();
        wgmma_touch(dq);
        if (kSlopes == 1) {
            if (lane() == 0) slopes.release(smem);
            slopes.advance();
        }
        leave_sums(dq);
        wgmma_wait<0>();
        wgmma_touch(dk);
        if (lane() == 0) queries.release(smem);
        queries.advance();
    }

    // As walk(), where dQ is reduced.
    __device__ __forceinline__ void walk_in_turns(const Uncut& uncut, const Pair& pair, int first_member, int begin,
                                                  int end, int steps) {
        const float scale = args.backward.scale * kLog2E;
        int tile = begin;
#if FT_DROPOUT
        // Of the next step behind the last products, where S and dP take no registers.
        int member = first_member;
        Kept kept = find_kept(pair, tile, member);
        const auto find_slopes = [&](Scores& s, Scores& dp, int of, bool cut) { differentiate(s, dp, of, cut, kept); };
        const auto behind = [&] {
            if (++tile == end) tile = begin, member++;
            kept = find_kept(pair, tile, member);
        };
#else
        const auto find_slopes = [&](Scores& s, Scores& dp, int of, bool cut) { differentiate(s, dp, of, cut); };
        const auto behind = [&] {
            if (++tile == end) tile = begin;
        };
        // Tiles that no mask cuts have a loop of their own: the branches around what a cut clears cost 5 to 7 % (head
        // dim 64, 4096 and 16,384 queries). Two loops spill with steps of 64 queries, and where dropout draws.
        if constexpr (kBlockQ == 128) {
#pragma unroll 1
            for (int left = steps; left > 0;) {
                if (uncut.cuts(tile)) {
                    take_turn(tile, true, scale, find_slopes, behind);
                    left--;
                    continue;
                }
#pragma unroll 1
                do {
                    take_turn(tile, false, scale, find_slopes, behind);
                } while (--left > 0 && !uncut.cuts(tile));
            }
            return;
        }
#endif
#pragma unroll 1
        for (int i = 0; i < steps; i++) take_turn(tile, uncut.cuts(tile), scale, find_slopes, behind);
    }

    // dK and dV of a warp's 16 keys once more, in fp32 and from the queries that see them alone.
    __device__ __forceinline__ void sum_what_is_seen(const Visible& visible, const KeyBlock& at, const Pair& pair) {
        const BackwardArgs& a = args.backward;
        const int column = lane() % 4 * 2;
#if FT_DROPOUT
        const Dropout dropout = dropout_of(a);
#endif
        KeyRange range[2];
        const Element *k[2], *v[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int mine = my_key() + h * 8, row = min_of(mine, visible.kv_len - 1);
            range[h] = seen_by(visible, mine);
            k[h] = row_of(a.k, a.k_stride, pair.entry, pair.kv_head, pair.kv_row + row);
            v[h] = row_of(a.v, a.v_stride, pair.entry, pair.kv_head, pair.kv_row + row);
        }
        const Members members(args, at, pair);
        clear();
#pragma unroll 1
        for (int member = members.begin; member < members.end; member++) {
            const int head = pair.head(member);
            const float* statistics = statistics_of(args, at, pair, member);
            const ProgramHead of_program = head_of_program(args, pair, head);
#pragma unroll 1
            for (int query = at.begin * kBlockQ; query < min_of(at.end * kBlockQ, visible.q_len); query++) {
                bool sees[2];
#pragma unroll
                for (int h = 0; h < 2; h++) sees[h] = query >= range[h].first && (!kMaskLeft || query <= range[h].last);
                if (!__any_sync(0xffffffff, sees[0] || sees[1])) continue;
                const Element* q = row_of(a.q, a.q_stride, pair.entry, head, pair.q_row + query);
                const Element* dout = row_of(a.dout, a.dout_stride, pair.entry, head, pair.q_row + query);
                float s[2] = {}, dp[2] = {};
#pragma unroll 2
                for (int c = column; c < kHeadDimQK; c += 8) {
                    const float2 x = load_pair(q, c), y[2] = {load_pair(k[0], c), load_pair(k[1], c)};
#pragma unroll
                    for (int h = 0; h < 2; h++) s[h] = fmaf(x.y, y[h].y, fmaf(x.x, y[h].x, s[h]));
                }
#pragma unroll 2
                for (int c = column; c < kHeadDimV; c += 8) {
                    const float2 x = load_pair(dout, c), y[2] = {load_pair(v[0], c), load_pair(v[1], c)};
#pragma unroll
                    for (int h = 0; h < 2; h++) dp[h] = fmaf(x.y, y[h].y, fmaf(x.x, y[h].x, dp[h]));
                }
                const float* of_query = statistics + query / kBlockQ * kBlockQ * 2 + query % kBlockQ;
#if FT_DROPOUT
                const u32 of_pair = dropout_pair(a, pair.batch, head);
                float factor[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    factor[h] = keeps_score(dropout, of_pair, query, my_key() + h * 8) ? 1.0f : 0.0f;
                }
#endif
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    s[h] = quad_sum(s[h]);
                    if constexpr (kListed) {
                        const int column = min_of(my_key() + h * 8, visible.kv_len - 1);
                        const Gradient g = score_gradient(of_program, query, column, s[h] * a.scale);
                        if (g.value == -FT_INFINITY || !program_visible(of_program, query, column)) sees[h] = false;
                        const Reference by = reference_of(a, pair.batch, head, query, of_query[0]);
                        s[h] = exp2_approx(exponent_of(g.value, by));
#if FT_DROPOUT
                        dp[h] *= factor[h] * a.dropout_scale;
#endif
                        dp[h] = s[h] * (quad_sum(dp[h]) - of_query[kBlockQ]) * g.slope;
                    } else {
                        if (takes_no_part(s[h], a.scale)) sees[h] = false;
                        s[h] = exp2_approx(fmaf(s[h], a.scale * kLog2E, -of_query[0]));
#if FT_DROPOUT
                        dp[h] *= factor[h] * a.dropout_scale;
#endif
                        dp[h] = s[h] * (quad_sum(dp[h]) - of_query[kBlockQ]);
                    }
#if FT_DROPOUT
                    s[h] *= factor[h];
#endif
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    if (!sees[h]) continue;
#pragma unroll
                    for (int j = 0; j < (kHasK ? kHeadDimQK / 8 : 0); j++) {
                        const float2 x = load_pair(q, column + j * 8);
                        dk[j * 4 + h * 2] = fmaf(dp[h], x.x, dk[j * 4 + h * 2]);
                        dk[j * 4 + h * 2 + 1] = fmaf(dp[h], x.y, dk[j * 4 + h * 2 + 1]);
                    }
#pragma unroll
                    for (int j = 0; j < (kHasV ? kHeadDimV / 8 : 0); j++) {
                        const float2 x = load_pair(dout, column + j * 8);
                        dv[j * 4 + h * 2] = fmaf(s[h], x.x, dv[j * 4 + h * 2]);
                        dv[j * 4 + h * 2 + 1] = fmaf(s[h], x.y, dv[j * 4 + h * 2 + 1]);
                    }
                }
            }
        }
    }

#if FT_DROPOUT
    __device__ __forceinline__ float scale_of_values() const { return args.backward.dropout_scale; }
#else
    __device__ __forceinline__ float scale_of_values() const { return 1.0f; }
#endif
    // The rows of K and V in shared memory that only this warpgroup reads become those of dK and dV. In turns both read
    // all of K, and gradients go straight to memory, so that the next K and V need not wait for a copy. Elsewhere that
    // is 2 % slower (512 queries).
    __device__ __forceinline__ void store(const Visible& visible, const Pair& pair) {
        const BackwardArgs& a = args.backward;
        const int row = key + first_row(), rows = visible.kv_len - row;
        if constexpr (kTurns) {
            store_rows<kColumnsV, kHeadDimV>(a.dv, a.dv_stride, pair.entry, pair.kv_head, row, rows, dv,
                                             scale_of_values());
            store_rows<kColumnsQK, kHeadDimQK>(a.dk, a.dk_stride, pair.entry, pair.kv_head, row, rows, dk, a.scale);
            return;
        }
        const u32 to_v = ValueRing::buffer_at(smem, keys.stage) + first_row() * kRowBytes;
        const u32 to_k = keys.buffer(smem) + first_row() * kRowBytes;
        if (kByGradient) barrier_sync(3, 128 * kWarpgroups);
        if constexpr (kHasV) stage_rows<kColumnsV>(to_v, kKeys * kRowBytes, dv, scale_of_values());
        if constexpr (kHasK) stage_rows<kColumnsQK>(to_k, kKeys * kRowBytes, dk, a.scale);
        fence_async_proxy();
        barrier_sync(1 + id, 128);
        // Behind the last key of a packed sequence are those of another.
        const bool whole = !kPacked || rows >= 64;
        if (!whole) {
            if (kHasV)
                copy_rows<kHeadDimV>(a.dv, a.dv_stride, to_v, kKeys * kRowBytes, pair.kv_head, pair.kv_row + row, rows);
            if (kHasK)
                copy_rows<kHeadDimQK>(a.dk, a.dk_stride, to_k, kKeys * kRowBytes, pair.kv_head, pair.kv_row + row,
                                      rows);
            barrier_sync(1 + id, 128);
        }
        if (threadIdx.x % 128 == 0) {
            if (kHasV && whole)
                send_rows<kChunksV>(args.dv, to_v, kKeys * kRowBytes, pair.kv_row + row, pair.kv_head, pair.entry);
            if (kHasK && whole)
                send_rows<kChunksQK>(args.dk, to_k, kKeys * kRowBytes, pair.kv_row + row, pair.kv_head, pair.entry);
            tma_store_commit();
            tma_store_wait_read();
            mbarrier_arrive(ValueRing::empty_at(smem, keys.stage));
        }
        __syncwarp();
        keys.advance();
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int e = 0; e < (kHasK ? kColumnsQK / 2 : 1); e++) dk[e] = 0.0f;
#pragma unroll
        for (int e = 0; e < (kHasV ? kColumnsV / 2 : 1); e++) dv[e] = 0.0f;
    }

    // The steps of a key block. Whether its sums have met what is not finite.
    __device__ __forceinline__ bool multiply(const Visible& visible, const KeyBlock& at, const Pair& pair) {
        key = at.block * kKeys;
        clear();
        keys.wait(smem);
        mbarrier_wait(ValueRing::full_at(smem, keys.stage), keys.parity);
        const Members members(args, at, pair);
        const int steps = (members.end - members.begin) * (at.end - at.begin);
        if (steps > 0 || kListed) {
            const Uncut uncut(visible, at.block);
#if FT_DROPOUT
            const Steps listed{uncut, at.begin, at.end, at.begin, steps, members.begin};
#else
            const Steps listed{uncut, at.begin, at.end, at.begin, steps};
#endif
            if constexpr (!kHasK) {
                walk_values(listed, pair);
            } else if constexpr (!kHasV) {
                walk_keys(listed, pair);
            } else if constexpr (kListed) {
                walk_listed(listed, pair);
            } else if constexpr (kTurns) {
                walk_in_turns(uncut, pair, members.begin, at.begin, at.end, steps);
            } else {
                walk(uncut, pair, members.begin, at.begin, at.end, steps);
            }
            release_keys();
            return any_non_finite(dk) | any_non_finite(dv);
        }
        release_keys();
        return false;
    }
    // In turns, when K and V are read; else they stay until dK and dV have left their place.
    __device__ __forceinline__ void release_keys() {
        if (!kTurns) return;
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(ValueRing::empty_at(smem, keys.stage));
        keys.advance();
    }
    // Where another walk has dK and dV: K and V are read.
    __device__ __forceinline__ void leave_keys() {
        if (kTurns) return;
        barrier_sync(1 + id, 128);
        if (threadIdx.x % 128 == 0) mbarrier_arrive(ValueRing::empty_at(smem, keys.stage));
        __syncwarp();
        keys.advance();
    }
    __device__ __forceinline__ void finish(const Visible& visible, const KeyBlock& at, const Pair& pair, bool met) {
        if (met) sum_what_is_seen(visible, at, pair);
#if FT_WALKS
        if (!add_to_walks<kHasK, kHasV>(args, visible, at, id, dk, dv)) return leave_keys();
#endif
        store(visible, pair);
    }

#if @{ packed }@
    // All key blocks that the loader finds, of which the last says that there are no more.
    __device__ __forceinline__ void run_all() {
#pragma unroll 1
        for (;;) {
            items.wait(smem);
            if (int(load_shared_4(items.buffer(smem) + Item::kBlock)) < 0) break;
            bool met;
            {
                const Item item = Item::read(items.buffer(smem));
                const Visible visible(args.backward, Lengths{item.q_len, item.kv_len});
                met = multiply(visible, KeyBlock(item, visible), item.pair_of_keys(args.backward));
            }
            const Item item = Item::read(items.buffer(smem));  // again, so that the steps need not keep it
            const Visible visible(args.backward, Lengths{item.q_len, item.kv_len});
            finish(visible, KeyBlock(item, visible), item.pair_of_keys(args.backward), met);
            __syncwarp();
            if (lane() == 0) items.release(smem);
            items.advance();
        }
    }
#else
    // The key block with a number. It is found again behind the steps, which need not keep it then, but where they cut
    // tiles of 128 queries: 208 TFLOP/s for 217 (head dim 64, 512 causal queries).
    static constexpr bool kFindsAgain = kWalks || !(kMaskRight && kBlockQ == 128);
    __device__ __forceinline__ void run(const Visible& visible, int number) {
        if constexpr (kFindsAgain) {
            bool met;
            {
                const KeyBlock at(args, visible, number);
                met = multiply(visible, at, Pair(args.backward, args.first_pair + at.pair));
            }
            // 492 bytes would spill for 212 (head dim 64).
            if (kWalks) asm volatile("" : "+r"(number));
            const KeyBlock at(args, visible, number);
            finish(visible, at, Pair(args.backward, args.first_pair + at.pair), met);
        } else {
            const KeyBlock at(args, visible, number);
            const Pair pair(args.backward, args.first_pair + at.pair);
            finish(visible, at, pair, multiply(visible, at, pair));
        }
    }
#if FT_WALKS
    // Those that a thread block takes.
    __device__ __forceinline__ void run_all() {
        const Visible visible(args.backward);
#pragma unroll 1
        for (int i = taken_key_block(smem, keys); i >= 0; i = taken_key_block(smem, keys)) run(visible, i);
    }
#else
    __device__ __forceinline__ void run_all() {
        const Visible visible(args.backward);
        const int count = KeyBlock::count(args);
#pragma unroll 1
        for (int i = blockIdx.x; i < count; i += gridDim.x) run(visible, i);
    }
#endif
#endif
};
