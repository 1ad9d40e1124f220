// Attention sinks: a logit for each row that takes its part of the softmax without a value.

// What O must be multiplied by, and the log-sum-exp.
struct WithSink {
    float inverse, lse;
};

// From a row's sum l of exp2(s - m), its reference m in units of log2, and the sink's logit in natural units.
__device__ __forceinline__ WithSink with_sink(float l, float m, float sink) {
    if (l == 0.0f) m = -FT_INFINITY;
    sink *= kLog2E;
    const float top = fmaxf(m, sink);
    if (top == -FT_INFINITY) return WithSink{0.0f, -FT_INFINITY};
    const float less = exp2_approx(m - top), sum = fmaf(l, less, exp2_approx(sink - top));
    return WithSink{less * reciprocal_approx(sum), kLn2 * add_log2(top, sum)};
}
