// What elements of e4m3 operands are multiplied by. Without a tensor of scales it is 1.

// One of a KV head.
__device__ __forceinline__ float descale(const float* scales, const i64 (&stride)[2], const Tile& tile) {
    return scales == nullptr ? 1.0f : scales[tile.batch * stride[0] + tile.kv_head * stride[1]];
}

#if FT_SCALES_OF_QUERIES || FT_SCALES_OF_KEYS || FT_SCALES_OF_CHANNELS
// Those of a head: of the rows, or the columns, of operand kOf (Q, K, V).
template <int kOf> struct Descales {
    const float* from;
    i64 stride;
    int shift;

    __device__ __forceinline__ Descales(const ForwardArgs& f, const float* scales, const i64 (&of)[2], int batch,
                                        int head)
        : from(scales == nullptr ? nullptr : scales + batch * of[0] + head * of[1]),
          stride(f.scale_stride[kOf]),
          shift(kOf < 2 ? f.scale_rows_log2[min_of(kOf, 1)] : 0) {}
    __device__ __forceinline__ const float* address(int i) const { return from + i64(i >> shift) * stride; }
    __device__ __forceinline__ float at(int i) const { return from == nullptr ? 1.0f : __ldg(address(i)); }
};
__device__ __forceinline__ Descales<0> query_descales(const ForwardArgs& f, const Tile& tile) {
    return {f, f.q_descale, f.q_descale_stride, tile.batch, tile.head};
}
__device__ __forceinline__ Descales<1> key_descales(const ForwardArgs& f, const Tile& tile) {
    return {f, f.k_descale, f.k_descale_stride, tile.batch, tile.kv_head};
}
__device__ __forceinline__ Descales<2> channel_descales(const ForwardArgs& f, const Tile& tile) {
    return {f, f.v_descale, f.v_descale_stride, tile.batch, tile.kv_head};
}
#endif

// Factors of the rows that a thread has: one for all where rows of Q have no scales.
template <int kRows> struct RowFactors {
    enum { kCount = FT_SCALES_OF_QUERIES ? kRows : 1 };
    float of[kCount];
    __device__ __forceinline__ float operator[](int row) const { return of[FT_SCALES_OF_QUERIES ? row : 0]; }
};
