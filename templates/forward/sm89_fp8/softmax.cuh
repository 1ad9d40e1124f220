// Online softmax in base 2 on accumulator fragments, for probabilities of few exponents: references are the maxima
// themselves, and probabilities relative to them are 2^kProbabilityLog2 at most.
//
// Per row a reference maximum m of the scores, without what all of the row is multiplied by, and the sum l of the
// unrounded probabilities.

struct RowSoftmax {
    float m[kMTiles][2];       // -inf before the first visible score
    float l[kMTiles][2];       // this thread's part of the sum
    float factor[kMTiles][2];  // what brings sums to the references of the last step

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) m[i][h] = -FT_INFINITY, l[i][h] = 0.0f, factor[i][h] = 1.0f;
        }
    }

    // Moves the references to the maxima of these scores, and makes of them probabilities as operands: a word is keys
    // 2t, 2t + 1, 8 + 2t and 9 + 2t of 16, which is how V comes (products.cuh).
    __device__ __forceinline__ void step(Scores& s, Probabilities& p, const Factors& c) {
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
                for (int j = 1; j < kSTiles; j++) x = fmaxf(x, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
                const float to = fmaxf(m[i][h], quad_max(x));
                factor[i][h] = to == m[i][h] ? 1.0f : exp2_approx((m[i][h] - to) * c[2 * i + h]);
                m[i][h] = to;
                l[i][h] *= factor[i][h];
                // A row that has seen nothing yet: any finite reference gives exp2(-inf) = 0 instead of NaN.
                const float less = to == -FT_INFINITY ? 0.0f : fmaf(to, c[2 * i + h], -kProbabilityLog2);
#pragma unroll
                for (int j = 0; j < kSTiles; j++) {
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; e++) {
                        s[i][j][e] = exp2_approx(fmaf(s[i][j][e], c[2 * i + h], -less));
                        l[i][h] += s[i][j][e];
                    }
                }
#pragma unroll
                for (int j = 0; j < kSTiles; j += 2) {
                    const u32 low = pack_e4m3(s[i][j][2 * h], s[i][j][2 * h + 1]);
                    const u32 high = pack_e4m3(s[i][j + 1][2 * h], s[i][j + 1][2 * h + 1]);
                    p[i][j / 4][j % 4 + h] = low | high << 16;
                }
            }
        }
    }

    // Completes the sums over the quad. The scale of the probabilities is in O and in l; it leaves the log-sum-exp.
    __device__ __forceinline__ void finish(int i, int h, const Factors& c, float& inverse, float& log_sum_exp) {
        const float sum = quad_sum(l[i][h]);
        inverse = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
        log_sum_exp = sum == 0.0f
                          ? -FT_INFINITY
                          : kLn2 * (fmaf(m[i][h], c[2 * i + h], -kProbabilityLog2) + log2_approx(sum));
    }
};
