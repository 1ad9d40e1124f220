/* rotary.h: rotary embedding of a row by tables of cosines and sines, of kernels whose arguments have `cos`, `sin` and
 * `rotary_*`. */

INLINE float angle(const KernelArgs *args, const void *table, int64_t at) {
    return args->rotary_f32 ? ((const float *)table)[at] : widen(((const element *)table)[at]);
}

/* A row rotated by a position, in place. A position that the tables have not gives NaN: a row without a rotation must
 * not pass for one with another. */
static void rotate(const KernelArgs *args, float *x, int64_t position) {
    const int half = args->rotary_dim / 2;
    if (position < 0 || position >= args->rotary_rows) {
        for (int i = 0; i < 2 * half; i++) x[i] = __builtin_nanf("");
        return;
    }
    const int64_t row = position * args->rotary_stride;
    const int step = args->rotary_interleaved ? 2 : 1, apart = args->rotary_interleaved ? 1 : half;
    for (int i = 0; i < half; i++) {
        float cosine = angle(args, args->cos, row + i), sine = angle(args, args->sin, row + i);
        float a = x[i * step], b = x[i * step + apart];
        x[i * step] = a * cosine - b * sine;
        x[i * step + apart] = b * cosine + a * sine;
    }
}
