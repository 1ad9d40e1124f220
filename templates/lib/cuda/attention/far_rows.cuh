// Rows far from zero in gradients (far.cuh): the log-sum-exp of one that a float mask leaves out does not hold the
// logarithm of the sum beside the maximum. Both come from the scores again: rare, so plain and slow.

// From here on, in natural units, weights by a log-sum-exp alone would be off by 2^-12.
constexpr float kFarNatural = 4096.0f;

// What takes the place of a log-sum-exp: P = exp(S - maximum - log_sum).
struct FarRow {
    float maximum, log_sum;
};

// Maximum and sum of the scores of a row that kLanes neighbouring lanes share: score(key) of the keys [first, last],
// -inf where they are masked. Of rows that are not `far` the log-sum-exp, as it is.
template <int kLanes, typename Score>
__device__ __noinline__ FarRow sum_far_row(bool far, float log_sum_exp, int first, int last, const Score& score) {
    float m = -FT_INFINITY, l = 0.0f;
    for (int key = first + int(threadIdx.x) % kLanes; far && key <= last; key += kLanes) {
        const float s = score(key);
        if (s == -FT_INFINITY) continue;
        const float top = fmaxf(m, s);
        l = l * expf(m - top) + expf(s - top), m = top;
    }
    for (int apart = 1; apart < kLanes; apart *= 2) {
        const float other_m = __shfl_xor_sync(0xffffffff, m, apart), other_l = __shfl_xor_sync(0xffffffff, l, apart);
        const float top = fmaxf(m, other_m), reference = top == -FT_INFINITY ? 0.0f : top;
        l = l * expf(m - reference) + other_l * expf(other_m - reference), m = top;
    }
    // Of a sink alone all weights vanish.
    if (!far || !(l > 0.0f) || m < log_sum_exp - fabsf(log_sum_exp) / 64.0f) return FarRow{log_sum_exp, 0.0f};
    return FarRow{m, logf(l)};
}

// The same of row `row` of a tile, whose log-sum-exp is element `at`; every lane of a warp must come. change(q, key,
// score) is what a program makes of a score. A far row whose output has no gradient adds nothing: it counts as empty.
template <int kLanes, typename Args, typename Change>
__device__ __forceinline__ FarRow far_row(const Args& args, const ProgramHead& head, const Tile& tile, int row, i64 at,
                                          const Change& change) {
    const bool exists = row < tile.rows;
    const float natural = exists ? args.lse[at] : -FT_INFINITY;
    const bool far = fabsf(natural) >= kFarNatural && fabsf(natural) < FT_INFINITY;
    if (!__any_sync(0xffffffff, far)) return FarRow{natural, 0.0f};
    const int q = min_of(tile.row + row, args.q_len - 1);
    const Element* dout = (const Element*)args.dout + tile.batch * args.dout_stride[0] +
                          tile.head * args.dout_stride[1] + q * args.dout_stride[2];
    int adds = far && args.dlse != nullptr && args.dlse[at] != 0.0f;
    for (int d = int(threadIdx.x) % kLanes; far && d < kHeadDimV; d += kLanes) adds |= to_float(dout[d]) != 0.0f;
    for (int apart = 1; apart < kLanes; apart *= 2) adds |= __shfl_xor_sync(0xffffffff, adds, apart);
    const KeyRange live = live_keys<kMaskLeft, kMaskRight>(args, q);
    const Element* query = (const Element*)args.q + tile.batch * args.q_stride[0] + tile.head * args.q_stride[1] +
                           q * args.q_stride[2];
    const Element* keys = (const Element*)args.k + tile.batch * args.k_stride[0] + tile.kv_head * args.k_stride[1];
    const auto score = [&](int key) {
        if (kProgramMask && !program_visible(head, q, key)) return -FT_INFINITY;
        float dot = 0.0f;
        for (int d = 0; d < kHeadDimQK; d++)
            dot = fmaf(to_float(query[d]), to_float(keys[key * args.k_stride[2] + d]), dot);
        return change(q, key, dot * args.scale);
    };
    const float before = far && adds == 0 ? -FT_INFINITY : natural;
    return sum_far_row<kLanes>(far && adds != 0, before, max_of(live.first, 0), min_of(live.last, args.kv_len - 1),
                               score);
}
