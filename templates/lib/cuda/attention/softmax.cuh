// Online softmax in base 2 on accumulator fragments (FlashAttention-2, section 3.1).
//
// Per query row the kernel keeps a reference maximum m of the unscaled scores and the sum l of exp2((s - m) * c) with
// c = scale * log2(e). One fused multiply-add and one exp2 per score; the sum stays a per-thread partial until the end.

template <int kMTiles, int kSTiles, int kOTiles, bool kLazyRescale> struct OnlineSoftmax {
    float m[kMTiles][2];  // reference maximum, unscaled; -inf before the first visible score
    float l[kMTiles][2];  // this thread's part of the sum

    // How far the maximum may grow, in units of log2, before sums are brought to the new reference. P then stays below
    // 2^8, far inside fp32 and fp16, and almost every step leaves O untouched.
    static constexpr float kSlack = kLazyRescale ? 8.0f : 0.0f;

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) m[i][h] = -FT_INFINITY, l[i][h] = 0.0f;
        }
    }

    // Takes references that are far (far.cuh) from the scores of their rows.
    __device__ __forceinline__ void subtract_far(float (&s)[kMTiles][kSTiles][4], float c) const {
        if (!kProgramFar) return;
        bool far = false;
#pragma unroll
        for (int i = 0; i < 2 * kMTiles; i++) far |= is_far(m[i / 2][i % 2], c);
        if (!__any_sync(0xffffffff, far)) return;
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float less = is_far(m[i][e / 2], c) ? m[i][e / 2] : 0.0f;
#pragma unroll
                for (int j = 0; j < kSTiles; j++) s[i][j][e] -= less;
            }
        }
    }

    // Turns scores into probabilities relative to m, in place; brings o and l to a new m where it had to move.
    __device__ __forceinline__ void step(float (&s)[kMTiles][kSTiles][4], float (&o)[kMTiles][kOTiles][4], float c) {
        float block_max[kMTiles][2];
        bool moved = false;
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
                for (int j = 1; j < kSTiles; j++) x = fmaxf(x, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
                block_max[i][h] = quad_max(x);
                moved |= (block_max[i][h] - m[i][h]) * c > kSlack;
            }
        }
        // One vote per warp: a branch that is the same for all lanes.
        if (__any_sync(0xffffffff, moved)) {
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float to = fmaxf(m[i][h], block_max[i][h]);
                    const float factor = to == m[i][h] ? 1.0f : exp2_approx((m[i][h] - to) * c);
                    m[i][h] = to;
                    l[i][h] *= factor;
#pragma unroll
                    for (int j = 0; j < kOTiles; j++) o[i][j][2 * h] *= factor, o[i][j][2 * h + 1] *= factor;
                }
            }
        }
        subtract_far(s, c);
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // A row that has seen nothing yet: any finite reference gives exp2(-inf) = 0 instead of NaN.
                const float reference = m[i][h] == -FT_INFINITY || is_far(m[i][h], c) ? 0.0f : m[i][h] * c;
#pragma unroll
                for (int j = 0; j < kSTiles; j++) {
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; e++) {
                        s[i][j][e] = exp2_approx(fmaf(s[i][j][e], c, -reference));
                        l[i][h] += s[i][j][e];
                    }
                }
            }
        }
    }

    // Completes the sums over the quad. Returns 1 / l, or 0 for a row that attended to nothing.
    __device__ __forceinline__ float finish(int i, int h) {
        l[i][h] = quad_sum(l[i][h]);
        return l[i][h] == 0.0f ? 0.0f : reciprocal_approx(l[i][h]);
    }

    // Natural-log log-sum-exp of the scaled scores; -inf for a row that attended to nothing. After finish().
    __device__ __forceinline__ float log_sum_exp(int i, int h, float c) const {
        if (is_far(m[i][h], c)) return far_log_sum_exp(m[i][h], c, l[i][h]);
        return l[i][h] == 0.0f ? -FT_INFINITY : kLn2 * (m[i][h] * c + log2_approx(l[i][h]));
    }
};
