// From scores and dP to P and dS, in place.

// What is known of two neighbouring queries of a lane: log-sum-exp by log2, and D; in programs with rows far from zero
// what is taken from their scores first, beside which the log-sum-exp is (far_rows.cuh).
struct Statistics {
    float lse[2], delta[2];
    float first[2] = {0.0f, 0.0f};
};
// The log-sum-exp of a row without a key, as the first stage leaves it: its weights vanish by themselves, and an
// infinite score stays infinite.
constexpr float kEmpty = 3e38f;

// Where the accumulators of a warp lie among queries and keys. Of kTiles tiles of 8 columns and kM of 16 rows a lane
// has two columns and two rows of each; with kKeysDown rows are keys and columns queries, else the other way round. A
// lane counts its queries as (a, b) and its keys as (c, d).
template <bool kKeysDown, int kM, int kTiles> struct Places {
    static constexpr int kQueries = kKeysDown ? kTiles : kM, kKeys = kKeysDown ? kM : kTiles;
    static __device__ __forceinline__ constexpr int query(int a, int b) {
        return kKeysDown ? 8 * a + b : 16 * a + 8 * b;
    }
    static __device__ __forceinline__ constexpr int key(int c, int d) { return kKeysDown ? 16 * c + 8 * d : 8 * c + d; }
    // The first of its columns and of its rows.
    static __device__ __forceinline__ int across() { return threadIdx.x % 4 * 2; }
    static __device__ __forceinline__ int down() { return threadIdx.x / 32 * (kM * 16) + threadIdx.x % 32 / 4; }
    static __device__ __forceinline__ float& at(float (&x)[kM][kTiles][4], int a, int b, int c, int d) {
        return kKeysDown ? x[c][a][2 * d + b] : x[a][c][2 * b + d];
    }
};

// Pairs whose scores are -infinity take no part, which shows where dP is not finite. Before weights are computed such
// scores turn to infinity, which no other has: a query with one would have NaN for its log-sum-exp.
template <int kM, int kTiles> __device__ __forceinline__ void turn_gone(float (&s)[kM][kTiles][4], float scale) {
#pragma unroll
    for (int n = 0; n < 4 * kM * kTiles; n++) {
        float& x = s[n / (4 * kTiles)][n / 4 % kTiles][n % 4];
        if (x * scale == -FT_INFINITY) x = -x;
    }
}
// And afterwards such weights go.
template <int kM, int kTiles>
__device__ __forceinline__ void drop_gone(float (&p)[kM][kTiles][4], float (&ds)[kM][kTiles][4]) {
#pragma unroll
    for (int n = 0; n < 4 * kM * kTiles; n++) {
        const int i = n / (4 * kTiles), j = n / 4 % kTiles, e = n % 4;
        if (p[i][j][e] == FT_INFINITY) p[i][j][e] = __uint_as_float(kNoPart), ds[i][j][e] = 0.0f;
    }
}

// P in the place of the products s of Q and K, dS in that of the products dp of dO and V. `q` and `kv` are the lane's
// first query and key; statistics(a) gives those of two queries. With `cut` pairs that a mask leaves out take no part.
template <bool kKeysDown, int kM, int kTiles, typename Of>
__device__ __forceinline__ void weigh(float (&s)[kM][kTiles][4], float (&dp)[kM][kTiles][4], const Args& args,
                                      const ProgramHead& head, int q, int kv, bool cut, const Of& statistics) {
    using P = Places<kKeysDown, kM, kTiles>;
    const float c = args.scale * kLog2E;
#pragma unroll
    for (int a = 0; a < P::kQueries; a++) {
        const Statistics of = statistics(a);
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const int row = min_of(q + P::query(a, b), args.q_len - 1);
            (void)row;
#pragma unroll
            for (int e = 0; e < 2 * P::kKeys; e++) {
                float& x = P::at(s, a, b, e / 2, e % 2);
                float& y = P::at(dp, a, b, e / 2, e % 2);
                if (kProgramScore) {
                    const int key = min_of(kv + P::key(e / 2, e % 2), args.kv_len - 1);
                    const Gradient g = score_gradient(head, row, key, x * args.scale);
                    // A score of -infinity takes no part, whoever made it so.
                    const bool none = g.value == -FT_INFINITY;
                    const float value = kProgramFar ? g.value - of.first[b] : g.value;
                    const float p = exp2_approx(fmaf(value, kLog2E, -of.lse[b]));
                    y = none ? 0.0f : p * (y - of.delta[b]) * g.slope;
                    x = none ? __uint_as_float(kNoPart) : p;
                } else {
                    x = exp2_approx(fmaf(x, c, -of.lse[b]));
                    y = x * (y - of.delta[b]);
                }
            }
        }
    }
    if (!cut) return;
#if FT_PROGRAM
    const ProgramKept kept = program_kept(head);
#endif
#pragma unroll
    for (int a = 0; a < P::kQueries; a++) {
        const Statistics of = statistics(a);
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const int wanted = q + P::query(a, b), row = min_of(wanted, args.q_len - 1);
            const KeyRange live = live_keys<kMaskLeft, kMaskRight>(args, row);
            // Nor does an empty row attend to anything, nor one that does not exist.
            const bool none = wanted != row || of.lse[b] == kEmpty;
            const int first = live.first - kv, last = none ? -1 - kv : live.last - kv;
#if FT_PROGRAM
            const MaskRow mask = mask_row(head, kept.mask, row, kv);
#endif
#pragma unroll
            for (int e = 0; e < 2 * P::kKeys; e++) {
                const int at = P::key(e / 2, e % 2);
                bool out = at > last || (kMaskLeft && at < first);
#if FT_PROGRAM
                if (kProgramMask) out = out || !mask_element(head, kept.mask, mask, row, kv,
                                                             min_of(at, args.kv_len - 1 - kv));
#endif
                if (out) P::at(s, a, b, e / 2, e % 2) = __uint_as_float(kNoPart), P::at(dp, a, b, e / 2, e % 2) = 0.0f;
            }
        }
    }
}

#if FT_DROPOUT
// Which scores of a lane are kept, for P, which dropped ones are missing from behind dS. `q` and `kv` as for weigh(),
// `pair` that of the head.
template <int kM, int kTiles> using Kept = KeptBits<4 * kM * kTiles>;
template <bool kKeysDown, int kM, int kTiles>
__device__ __forceinline__ void find_kept(Kept<kM, kTiles>& kept, const Dropout& dropout, u32 pair, int q, int kv) {
    kept.clear();
#pragma unroll
    for (int i = 0; i < kM; i++) {
        const auto set = [&](int j, int h, u32 word) {
#pragma unroll
            for (int e = 0; e < 2; e++) kept.set((i * kTiles + j) * 4 + 2 * h + e, keeps_half(dropout, word, e));
        };
        if (kKeysDown) {
            each_dropout_down<kTiles>(dropout, u32(kv + 16 * i) / 8, u32(q), pair, set);
        } else {
            const u32 rows[2] = {u32(q + 16 * i), u32(q + 16 * i + 8)}, pairs[2] = {pair, pair};
            each_dropout_across<kTiles>(dropout, u32(kv) / 8, rows, pairs, set);
        }
    }
}
// Multiplies by a factor where a score is kept and by 0 elsewhere, which leaves the sign of zeros.
template <int kM, int kTiles>
__device__ __forceinline__ void keep(float (&x)[kM][kTiles][4], const Kept<kM, kTiles>& kept, float factor) {
#pragma unroll
    for (int n = 0; n < 4 * kM * kTiles; n++) x[n / (4 * kTiles)][n / 4 % kTiles][n % 4] *= kept.has(n) ? factor : 0.0f;
}
#endif
