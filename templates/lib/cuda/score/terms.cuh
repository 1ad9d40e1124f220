// What the gradient of a tensor or scalar gains by a score, and by the sink of a row: for each place where the program
// reads it the derivative, and which element that is.

constexpr int kTerms = @{ term_count }@;
constexpr int kSinkTerms = @{ term_sink_count }@;
// Whether the element changes with the query, and with the key.
constexpr bool kPlaceByQuery = @{ term_place_by_query }@;
constexpr bool kPlaceByKey = @{ term_place_by_key }@;

template <int kCount> struct Terms {
    // What the derivatives are those of: the changed score, or the sink.
    float value;
    float factor[kCount > 0 ? kCount : 1];
    i64 place[kCount > 0 ? kCount : 1];
};

// An index beyond an axis is that of the nearest element, as where it is read.
__device__ __forceinline__ i64 term_place(const GradientArgs& args, int axis, i64 index) {
    return ft_clamp64(index, args.length[axis]) * args.place_stride[axis];
}

__device__ __forceinline__ Terms<kTerms> score_terms(const GradientArgs& args, const ProgramHead& head, int q, int kv,
                                                     float score) {
    FT_PROGRAM_HEAD;
    (void)args, (void)q, (void)kv, (void)score;
@{ term_code }@    return Terms<kTerms>{@{ term_value }@, {@{ term_factors }@}, {@{ term_places }@}};
}

__device__ __forceinline__ Terms<kSinkTerms> sink_terms(const GradientArgs& args, const ProgramHead& head, int q) {
    FT_PROGRAM_HEAD;
    (void)args, (void)q;
@{ term_sink_code }@    return Terms<kSinkTerms>{@{ term_sink_value }@, {@{ term_sink_factors }@},
                             {@{ term_sink_places }@}};
}
