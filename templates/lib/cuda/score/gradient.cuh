// What a score program makes of a score, with the derivative by the score.

// What is computed of a score, and its derivative by the score.
struct Gradient {
    float value, slope;
};
#if FT_PROGRAM
__device__ __forceinline__ Gradient score_gradient(const ProgramHead& head, int q, int kv, float score) {
    FT_PROGRAM_HEAD;
    (void)q, (void)kv;
@{ gradient_code }@    return Gradient{@{ gradient_value }@, @{ gradient_slope }@};
}
#else
__device__ __forceinline__ Gradient score_gradient(const ProgramHead&, int, int, float score) { return {score, 1.0f}; }
#endif
