// What O loses when it is rounded to 16 bits (FT_RESIDUAL). A forward pass writes it in bf16, and D = rowsum(dO (O +
// residual)) then has the digits that dP - D of a row needs that attends mostly to one key.

// Zero beside an infinity or NaN, which lose nothing that could be added.
template <typename Element> __device__ __forceinline__ float lost(float x, Element rounded) {
    const float y = to_float(rounded);
    return fabsf(y) < FT_INFINITY ? x - y : 0.0f;
}

// Of two elements, as `pack` rounded them.
template <typename Element> __device__ __forceinline__ u32 pack_lost(float x, float y, u32 rounded) {
    return pack<bf16>(lost(x, Element{u16(rounded)}), lost(y, Element{u16(rounded >> 16)}));
}

// Where a row of it lies.
template <typename Args> __device__ __forceinline__ bf16* residual_row(const Args& a, int batch, int head, i64 row) {
    return (bf16*)a.residual + batch * a.residual_stride[0] + head * a.residual_stride[1] + row * a.residual_stride[2];
}
