// Online softmax in base 2 for the two query rows whose scores a thread of a warpgroup holds (FlashAttention-2, section
// 3.1), in two halves: the maximum first, the exponentials after, so that the product that still runs on the old
// reference is waited for in between.
//
// Per row a reference maximum m of the unscaled scores and the sum l of exp2((s - m) * c), c = scale * log2(e).

template <int kTiles, bool kLazyRescale, int kMultiplyAddEighths> struct RowSoftmax {
    float m[2];       // reference maximum, unscaled; -inf before the first visible score
    float l[2];       // this thread's part of the sum
    float factor[2];  // what the last advance() asks to multiply O with

    // How far the maximum may grow, in units of log2, before sums are brought to the new reference. Without slack O is
    // left alone only when no row of the warp has met a new maximum, which is exact.
    static constexpr float kSlack = kLazyRescale ? 8.0f : 0.0f;

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int h = 0; h < 2; h++) m[h] = -FT_INFINITY, l[h] = 0.0f;
    }

    // Moves the references to the maxima of these scores. Returns whether O must be rescaled: the same for all lanes.
    __device__ __forceinline__ bool advance(const float (&s)[kTiles * 4], float c) {
        float block_max[2];
        bool moved = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
            for (int j = 1; j < kTiles; j++) x = fmaxf(x, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
            block_max[h] = quad_max(x);
            moved |= (block_max[h] - m[h]) * c > kSlack;
        }
        moved = __any_sync(0xffffffff, moved);
        if (moved) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float to = fmaxf(m[h], block_max[h]);
                factor[h] = to == m[h] ? 1.0f : exp2_approx((m[h] - to) * c);
                m[h] = to;
                l[h] *= factor[h];
            }
        }
        return moved;
    }

    // Scores to probabilities relative to m, in place. Where nothing is masked, some eighths of the exponentials may run
    // on the multiply-add units, spread evenly among the others.
    template <bool kUnmasked> __device__ __forceinline__ void exponentiate(float (&s)[kTiles * 4], float c) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // A row that has seen nothing yet: any finite reference gives exp2(-inf) = 0 instead of NaN.
            const float reference = m[h] == -FT_INFINITY ? 0.0f : m[h] * c;
#pragma unroll
            for (int j = 0; j < kTiles; j++) {
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    const float x = fmaf(s[4 * j + e], c, -reference);
                    const bool multiply_add = kUnmasked && (4 * j + e) * kMultiplyAddEighths % 8 < kMultiplyAddEighths;
                    s[4 * j + e] = multiply_add ? exp2_multiply_add(x) : exp2_approx(x);
                    l[h] += s[4 * j + e];
                }
            }
        }
    }

    template <int kCount> __device__ __forceinline__ void rescale(float (&o)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kCount; i++) o[i] *= factor[i / 2 % 2];
    }

    // Completes the sum of a row over the quad. Returns 1 / l, or 0 for a row that attended to nothing.
    __device__ __forceinline__ float finish(int h) {
        l[h] = quad_sum(l[h]);
        return l[h] == 0.0f ? 0.0f : reciprocal_approx(l[h]);
    }

    // Natural-log log-sum-exp of the scaled scores; -inf for a row that attended to nothing. After finish().
    __device__ __forceinline__ float log_sum_exp(int h, float c) const {
        return l[h] == 0.0f ? -FT_INFINITY : kLn2 * (m[h] * c + log2_approx(l[h]));
    }
};
