// Online softmax in base 2 for the two query rows whose scores a thread of a warpgroup holds, for probabilities of few
// exponents: references are the maxima themselves, and probabilities relative to them are 2^kProbabilityLog2 at most.
//
// Per row a reference maximum m of the scores, without what all of the row is multiplied by, and the sum l of the
// unrounded probabilities.

struct RowSoftmax {
    float m[2];      // -inf before the first visible score
    float l[2];      // this thread's part of the sum
    float factor[2]; // what brings sums to the references of the last advance()

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int h = 0; h < 2; h++) m[h] = -FT_INFINITY, l[h] = 0.0f, factor[h] = 1.0f;
    }

    // The largest of x and of the scores of row h. With kByBits all of it is zero at least, or the result is: integers
    // are in the order of the floats that they are the bits of, and Hopper has a maximum of three of them.
    template <bool kByBits> static __device__ __forceinline__ float largest(float x, const Scores& s, int h) {
        if (kByBits) {
            int bits = __float_as_int(x);
#pragma unroll
            for (int j = 0; j < kBlockKV / 8; j++) {
                bits = max_of(max_of(bits, __float_as_int(s[4 * j + 2 * h])), __float_as_int(s[4 * j + 2 * h + 1]));
            }
            return __int_as_float(bits);
        }
        float y = s[2 * h + 1];
#pragma unroll
        for (int j = 0; j < kBlockKV / 8; j++) {
            x = fmaxf(x, s[4 * j + 2 * h]);
            if (j > 0) y = fmaxf(y, s[4 * j + 2 * h + 1]);
        }
        return fmaxf(x, y);
    }

    // Moves the references to the maxima of these scores. With kByBits they are zero at least.
    template <bool kByBits> __device__ __forceinline__ void advance(const Scores& s, const RowFactors<2>& c) {
        float to[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = m[h];
            // Minus infinity (or NaN, which a maximum ignores), which the compiler cannot know: the second row's
            // maximum after the first.
            if (h == 1 && !kByBits) x = fmaxf(x, to[0] - FT_INFINITY);
            to[h] = quad_max(largest<kByBits>(x, s, h));
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            factor[h] = to[h] == m[h] ? 1.0f : exp2_approx((m[h] - to[h]) * c[h]);
            m[h] = to[h];
            l[h] *= factor[h];
        }
    }
    __device__ __forceinline__ bool is_below_zero() const { return !(m[0] >= 0.0f && m[1] >= 0.0f); }

    // 16 of a thread's scores, of 32 keys, to probabilities relative to m, in place.
    __device__ __forceinline__ void exponentiate(float* s, const RowFactors<2>& c) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // A row that has seen nothing yet: any finite reference gives exp2(-inf) = 0 instead of NaN.
            const float reference = m[h] == -FT_INFINITY ? 0.0f : m[h];
            const float less = m[h] == -FT_INFINITY ? 0.0f : fmaf(m[h], c[h], -kProbabilityLog2);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float& x = s[i / 2 * 4 + 2 * h + i % 2];
                // Of scores far from zero, which are masked by large numbers, products with c would lose the rest.
                x = exp2_approx(kProgramFar ? fmaf(x - reference, c[h], kProbabilityLog2) : fmaf(x, c[h], -less));
                l[h] += x;
            }
        }
    }

    // Completes the sums over the quad, and adds the sinks of rows where a program has them. The scale of the
    // probabilities is in O and in l; it leaves the log-sum-exp.
    __device__ __forceinline__ void finish(const RowFactors<2>& c, const float (&sinks)[2], float (&inverse)[2],
                                           float (&log_sum_exp)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            l[h] = quad_sum(l[h]);
            if constexpr (kProgramSink) {
                const WithSink sunk = with_sink(l[h], as_log2(m[h], c[h]) - kProbabilityLog2, sinks[h]);
                inverse[h] = sunk.inverse, log_sum_exp[h] = sunk.lse;
                continue;
            }
            inverse[h] = l[h] == 0.0f ? 0.0f : reciprocal_approx(l[h]);
            // A reference far from zero is not multiplied by log2(e) first.
            const float lse = kProgramFar ? m[h] + kLn2 * (log2_approx(l[h]) - kProbabilityLog2)
                                          : kLn2 * (fmaf(m[h], c[h], -kProbabilityLog2) + log2_approx(l[h]));
            log_sum_exp[h] = l[h] == 0.0f ? -FT_INFINITY : lse;
        }
    }
};
