// Scores far from zero (codegen: score/analysis/far.rs), which float masks are made of: by log2(e) they overflow, or
// are rounded by more than exponents are. Of a row whose reference is that far, it is subtracted before the
// multiplication.

// From here on, in units of log2: below, the product of a reference is rounded by 2^-8 at most.
constexpr float kFar = 131072.0f;
constexpr float kLargest = 3.402823466e38f;

// Of a reference in units that c takes to log2.
__device__ __forceinline__ bool is_far(float m, float c) {
    return kProgramFar && fabsf(m) < FT_INFINITY && fabsf(m) * c >= kFar;
}

// A reference in units of log2, where others may be compared with it; as far as floats reach.
__device__ __forceinline__ float as_log2(float m, float c) {
    return kProgramFar ? fminf(fmaxf(m * c, -kLargest), kLargest) : m * c;
}

// The log-sum-exp of a row that is far, in natural units. Seeded products stop at the largest number, whose multiple is
// not what the scores were.
__device__ __forceinline__ float far_log_sum_exp(float m, float c, float l) {
    return fabsf(m) == kLargest ? m : fmaf(m, c * kLn2, kLn2 * log2_approx(l));
}
