// Rotary embedding of rows in units of kUnit elements, by tables of cosines and sines. For kernels whose arguments have
// `cos`, `sin` and `rotary_*`.

// The cosines or sines of kCount neighbouring pairs.
template <int kCount>
__device__ __forceinline__ void load_angles(const KernelArgs& args, const void* table, i64 at, float (&x)[kCount]) {
    if (args.rotary_f32) {
        const Elements<float, kCount> values = load<float, kCount>((const float*)table + at);
#pragma unroll
        for (int i = 0; i < kCount; i++) x[i] = values.at[i];
    } else {
        const Elements<Element, kCount> values = load<Element, kCount>((const Element*)table + at);
#pragma unroll
        for (int i = 0; i < kCount; i++) x[i] = to_float(values.at[i]);
    }
}
__device__ __forceinline__ float angle(const KernelArgs& args, const void* table, i64 at) {
    return args.rotary_f32 ? ((const float*)table)[at] : to_float(((const Element*)table)[at]);
}

// The unit from `column` on of a row that begins at `from`, rotated by a position. A position that the tables have not
// gives NaN: a row without a rotation must not pass for one with another.
__device__ __forceinline__ void rotate(const KernelArgs& args, const Element* from, int column, i64 position,
                                       float (&x)[kUnit]) {
    const int half = args.rotary_dim / 2;
    if (position < 0 || position >= args.rotary_rows) {
#pragma unroll
        for (int i = 0; i < kUnit; i++) x[i] = column + i < args.rotary_dim ? __int_as_float(0x7fffffff) : x[i];
        return;
    }
    const i64 row = position * args.rotary_stride;
    if (args.rotary_interleaved) {
        if (column + kUnit <= args.rotary_dim) {
            float cosine[kUnit / 2], sine[kUnit / 2];
            load_angles<kUnit / 2>(args, args.cos, row + column / 2, cosine);
            load_angles<kUnit / 2>(args, args.sin, row + column / 2, sine);
#pragma unroll
            for (int i = 0; i < kUnit / 2; i++) {
                const float a = x[2 * i], b = x[2 * i + 1];
                x[2 * i] = fmaf(a, cosine[i], -(b * sine[i]));
                x[2 * i + 1] = fmaf(b, cosine[i], a * sine[i]);
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < kUnit / 2; i++) {
            if (column + 2 * i >= args.rotary_dim) continue;
            const float cosine = angle(args, args.cos, row + column / 2 + i);
            const float sine = angle(args, args.sin, row + column / 2 + i);
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = fmaf(a, cosine, -(b * sine));
            x[2 * i + 1] = fmaf(b, cosine, a * sine);
        }
        return;
    }
    if (half % kUnit == 0) {
        const bool second = column >= half;
        const int pair = second ? column - half : column;
        const Elements<Element, kUnit> other = load<Element, kUnit>(from + (second ? pair : column + half));
        float cosine[kUnit], sine[kUnit];
        load_angles<kUnit>(args, args.cos, row + pair, cosine);
        load_angles<kUnit>(args, args.sin, row + pair, sine);
#pragma unroll
        for (int i = 0; i < kUnit; i++) {
            const float turned = to_float(other.at[i]) * sine[i];
            x[i] = fmaf(x[i], cosine[i], second ? turned : -turned);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kUnit; i++) {
        if (column + i >= args.rotary_dim) continue;
        const bool second = column + i >= half;
        const int pair = column + i - (second ? half : 0);
        const float other = to_float(from[second ? pair : pair + half]);
        const float cosine = angle(args, args.cos, row + pair), sine = angle(args, args.sin, row + pair);
        const float turned = other * sine;
        x[i] = fmaf(x[i], cosine, second ? turned : -turned);
    }
}
