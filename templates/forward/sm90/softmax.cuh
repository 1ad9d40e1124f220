// Online softmax in base 2 for the two query rows whose scores a thread of a warpgroup holds (FlashAttention-2, section
// 3.1), in two halves: the maximum first, the exponentials after, so that the product that still runs on the old
// reference is waited for in between.
//
// Per row a reference maximum m of the unscaled scores and the sum l of exp2((s - m) * c), c = scale * log2(e).

// What is left of two rows at the end of their keys.
struct RowResults {
    float inverse[2];      // 1 / sum, or 0 for a row that attended to nothing
    float log_sum_exp[2];  // natural, of the scaled scores; -inf for a row that attended to nothing
    bool empty[2];         // a row that attended to nothing, sinks aside
};

// Which of a thread's two rows waits for what: the scheduler of the compiler moves the second row's maximum ahead of
// the exponentials, where it costs twice its instructions' time, unless it depends on something that comes later.
enum RowOrder {
    kTogether,            // both maxima, then the exponentials of both
    kAfterMaximum,        // the second maximum after the first
    kAfterProbability,    // the second maximum after the first probability: between the exponentials of the first row
};

// With kBounded the scores have a bound, so that one reference serves all of them: they are taken one by one, in units
// of log2 less kReference, and the two halves have nothing left to do. Where rows may see few keys O is divided by the
// sum of rounded probabilities, so that a row that sees one has its V: dP - D of such a row would be up to 2^-9 of dP,
// where it is 0. With kExact a reference is the maximum itself: the largest probability is 1, which no rounding
// changes.
template <int kTiles, bool kLazyRescale, RowOrder kRowOrder, RowOrder kMaskedRowOrder, int kMultiplyAddEighths,
          bool kShift = false, bool kBounded = false, int kReference = 0, bool kExact = false>
struct RowSoftmax {
    // Reference maximum, unscaled (with kShift, in units of log2); -inf before the first visible score.
    float m[2];
    float l[2];       // this thread's part of the sum
    float rounded[2]; // with kBounded, the sum of rounded probabilities of rows that see few keys, over the quad; or 0
    float factor[2];  // what the last advance() asks to multiply O with
    // With kShift, what is to be added to the scores at hand in units of log2, another for each thread.
    float shift[2];
    bool shift_may_rise = false;  // in the blocks that follow, which are of earlier keys

    // How far the maximum may grow, in units of log2, before sums are brought to the new reference, where rescaling is
    // lazy.
    static constexpr float kSlack = 8.0f;

    // Whether references are zero at least, from where all rows have met a score of kLeast or more: Hopper has a
    // maximum of three integers and of two floats, and integers are in the order of the floats that they are the bits
    // of where the largest is not negative. With kShift it is from the shift on, which must not rise from here to a
    // tile's last block.
    static constexpr bool kFromZero = !kBounded && !kExact;
    static constexpr float kLeast = -8.0f;  // in units of log2: probabilities of such a row are small by as much

    __device__ __forceinline__ bool is_far_below_zero(float c) const {
        if (kShift) return shift_may_rise || m[0] - shift[0] < kLeast || m[1] - shift[1] < kLeast;
        return m[0] * c < kLeast || m[1] * c < kLeast;
    }

    // What takes m to units of log2.
    static __device__ __forceinline__ float unit(float c) { return kShift || kBounded ? 1.0f : c; }

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int h = 0; h < 2; h++) m[h] = kBounded ? float(kReference) : -FT_INFINITY, l[h] = rounded[h] = 0.0f;
    }

    // What is taken from the scores of a row in units of log2. A row that has seen nothing yet: any finite reference
    // gives exp2(-inf) = 0 instead of NaN.
    __device__ __forceinline__ float reference(float maximum, int h, float c) const {
        // A shift of -inf takes scores with it that are finite: 0, too.
        if (kShift) return maximum == -FT_INFINITY ? FT_INFINITY : maximum - shift[h];
        return maximum == -FT_INFINITY || is_far(maximum, c) ? 0.0f : maximum * c;
    }

    // The largest of x and this thread's scores of row h and, with kByBits, zero.
    template <bool kByBits>
    static __device__ __forceinline__ float largest(float x, const float (&s)[kTiles * 4], int h) {
        if (kByBits) {
            int bits = max_of(__float_as_int(x), 0);
#pragma unroll
            for (int j = 0; j < kTiles; j++) {
                bits = max_of(max_of(bits, __float_as_int(s[4 * j + 2 * h])), __float_as_int(s[4 * j + 2 * h + 1]));
            }
            return __int_as_float(bits);
        }
        float y = s[2 * h + 1];
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
            x = fmaxf(x, s[4 * j + 2 * h]);
            if (j > 0) y = fmaxf(y, s[4 * j + 2 * h + 1]);
        }
        return fmaxf(x, y);
    }

    // Moves the references to the maxima of these scores or, `from_zero`, to zero where those are less; without a
    // branch.
    template <typename FromZero>
    __device__ __forceinline__ void advance(const float (&s)[kTiles * 4], float c, FromZero from_zero) {
        if (kBounded) return;
        constexpr bool kByBits = kFromZero && kIsTrue<FromZero>;
        constexpr RowOrder kOrder = kIsFalse<FromZero> ? kMaskedRowOrder : kRowOrder;
        float to[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = kShift ? -FT_INFINITY : kFromZero && !kByBits && from_zero ? fmaxf(m[h], 0.0f) : m[h];
            // Minus infinity (or NaN, which a maximum ignores), which the compiler cannot know.
            if (h == 1 && kOrder == kAfterMaximum) x = fmaxf(x, to[0] - FT_INFINITY);
            if (h == 1 && kOrder == kAfterProbability) {
                x = fmaxf(x, fmaf(exp2_approx(fmaf(s[0], c, -reference(to[0], 0, c))), 0.0f, -FT_INFINITY));
            }
            x = largest<kByBits>(x, s, h);
            to[h] = kShift ? fmaxf(m[h], quad_max(fmaf(x, c, shift[h]))) : quad_max(x);
        }
        // Lazily: all rows of the warp move, or none.
        const bool stay = kLazyRescale && !__any_sync(0xffffffff, (to[0] - m[0]) * unit(c) > kSlack ||
                                                                  (to[1] - m[1]) * unit(c) > kSlack);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (stay) to[h] = m[h];
            factor[h] = to[h] == m[h] ? 1.0f : exp2_approx((m[h] - to[h]) * unit(c));
            m[h] = to[h];
            l[h] *= factor[h];
        }
    }

    // Takes references that are far (far.cuh) from the scores of their rows.
    __device__ __forceinline__ void subtract_far(float (&s)[kTiles * 4], float c) const {
        if (!kProgramFar || !__any_sync(0xffffffff, is_far(m[0], c) || is_far(m[1], c))) return;
        const float less[2] = {is_far(m[0], c) ? m[0] : 0.0f, is_far(m[1], c) ? m[1] : 0.0f};
#pragma unroll
        for (int i = 0; i < kTiles * 4; i++) s[i] -= less[i / 2 % 2];
    }

    // Scores to probabilities relative to m, in place. Where nothing is masked, some eighths of the exponentials may
    // run on the multiply-add units, spread evenly among the others.
    template <bool kUnmasked> __device__ __forceinline__ void exponentiate(float (&s)[kTiles * 4], float c) {
        if (kBounded) return;
        subtract_far(s, c);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float less = reference(m[h], h, c);
#pragma unroll
            for (int j = 0; j < kTiles; j++) {
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    const float x = fmaf(s[4 * j + e], c, -less);
                    const bool multiply_add = kUnmasked && (4 * j + e) * kMultiplyAddEighths % 8 < kMultiplyAddEighths;
                    s[4 * j + e] = multiply_add ? exp2_multiply_add(x) : exp2_approx(x);
                    l[h] += s[4 * j + e];
                }
            }
        }
    }

    // With kBounded, a score of row h to its probability.
    __device__ __forceinline__ void take(float& s, int h) {
        s = exp2_approx(s);
        l[h] += s;
    }

    // What is asked to be rescaled is zero.
    __device__ __forceinline__ void forget() { factor[0] = factor[1] = 1.0f; }

    // Brings O to the moved references. Where that is lazy it is worth to ask first whether any row of the warp has
    // moved.
    template <int kCount> __device__ __forceinline__ void rescale(float (&o)[kCount]) const {
        if (kBounded) return;
        if (kLazyRescale && !__any_sync(0xffffffff, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < kCount; i++) o[i] *= factor[i / 2 % 2];
    }

    // Completes the sums over the quad.
    __device__ __forceinline__ RowResults finish(float c) {
        RowResults r;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            l[h] = quad_sum(l[h]);
            r.empty[h] = l[h] == 0.0f;
            r.inverse[h] = l[h] == 0.0f ? 0.0f : reciprocal_approx(kBounded && rounded[h] > 0.0f ? rounded[h] : l[h]);
            r.log_sum_exp[h] =
                l[h] == 0.0f ? -FT_INFINITY
                             : kLn2 * (kBounded ? add_log2(m[h], l[h]) : m[h] * unit(c) + log2_approx(l[h]));
            if (is_far(m[h], c)) r.log_sum_exp[h] = far_log_sum_exp(m[h], c, l[h]);
        }
        return r;
    }
};
