// From floats to the elements of a KV store that are narrower than those of the queries: rounded to nearest even,
// beyond the largest finite value that value, NaN stays NaN where the type has one. In arithmetic that every GPU has.

// A magnitude in the 7 lower bits of an 8-bit float. Adding 2^(23 - kSubnormal) makes the float adder round at the
// last place of subnormal numbers, 2^-kSubnormal; others are rounded in their integer.
template <int kBias, int kMantissa, int kSubnormal>
__device__ __forceinline__ u32 narrow_magnitude(float x, float largest) {
    const u32 bits = __float_as_uint(x) & 0x7fffffff;
    if (bits > 0x7f800000) return 0x7f;
    const float magnitude = min_of(__uint_as_float(bits), largest);
    const u32 u = __float_as_uint(magnitude);
    constexpr u32 kDropped = 23 - kMantissa, kRebias = u32(127 - kBias) << 23;
    constexpr u32 kShift = u32(127 + 23 - kSubnormal) << 23;
    if (u < kRebias + (1u << 23)) return __float_as_uint(magnitude + __uint_as_float(kShift)) - kShift;
    return (u - kRebias + ((1u << (kDropped - 1)) - 1) + (u >> kDropped & 1)) >> kDropped;
}
__device__ __forceinline__ u8 sign_bit(float x) { return u8(__float_as_uint(x) >> 24 & 0x80); }

template <> __device__ __forceinline__ e4m3 from_float<e4m3>(float x) {
    return e4m3{u8(narrow_magnitude<7, 3, 9>(x, 448.0f) | sign_bit(x))};
}
template <> __device__ __forceinline__ e5m2 from_float<e5m2>(float x) {
    return e5m2{u8(narrow_magnitude<15, 2, 16>(x, 57344.0f) | sign_bit(x))};
}
// No number is 0. Adding 1.5 * 2^23 rounds to the next integer, which then is the low byte.
template <> __device__ __forceinline__ int8 from_float<int8>(float x) {
    const float bounded = x != x ? 0.0f : min_of(max_of(x, -128.0f), 127.0f);
    return int8{(signed char)(__float_as_uint(bounded + 12582912.0f) & 0xff)};
}

// The largest value of an element, by which the scale of a row is found.
template <typename E> constexpr float kLargestValue = 1.0f;
template <> constexpr float kLargestValue<e4m3> = 448.0f;
template <> constexpr float kLargestValue<e5m2> = 57344.0f;
template <> constexpr float kLargestValue<int8> = 127.0f;

// An element that is x when it is multiplied by the scale. A scale of 0 makes every number 0: so does the element.
template <typename E> __device__ __forceinline__ E quantised(float x, float scale) {
    return from_float<E>(scale == 0.0f && x == x ? 0.0f : x / scale);
}
