// Elements of the store, and the 16-bit elements that products take. Quantised ones become f16, of which every one of
// them is a value, and so do queries of e4m3; queries of bf16 are brought into its range row by row.

template <bool kA, typename A, typename B> struct Choose { using Type = A; };
template <typename A, typename B> struct Choose<false, A, B> { using Type = B; };
using MathElement = Choose<kScaled, f16, Element>::Type;
constexpr int kCacheBytes = kScaled ? 1 : 2;
// Whether rows of Q are brought into the range of f16 by a power of two each.
template <typename A> constexpr bool kIsBf16 = false;
template <> constexpr bool kIsBf16<bf16> = true;
constexpr bool kNarrowsQ = kScaled && kIsBf16<Element>;

// Tiles of 16-byte chunks, by pairs of bytes.
using TileK = RowTile<kHeadDimQK * kCacheBytes / 2, false>;
using TileV = RowTile<kHeadDimV * kCacheBytes / 2, false>;
constexpr int kStepsQK = kScaled ? TileK::kChunks : TileK::kChunks / 2;  // matrix steps of Q K^T
constexpr int kOTiles = kScaled ? TileV::kChunks * 2 : TileV::kChunks;   // 8-column tiles of O

// Two elements in each half of a word, as pairs of f16: {low byte, next byte} of the lower half, and of the upper.
template <typename Quantised> __device__ __forceinline__ void widen(u32 x, u32& low, u32& high);
template <> __device__ __forceinline__ void widen<e4m3>(u32 x, u32& low, u32& high) {
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(low), "=r"(high) : "r"(x));
#else
    // The bits of e4m3 at the place of f16's are a value of 2^-8 times it; NaN is an exponent that has to be filled.
    const auto of = [](u32 spread) {
        u32 r = (spread & 0x80008000) | (spread & 0x7f007f00) >> 1, scaled;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(scaled) : "r"(r), "r"(0x5c005c00));
        if ((r & 0x7fff) == 0x3f80) scaled |= 0x7e00;
        if ((r & 0x7fff0000) == 0x3f800000) scaled |= 0x7e000000;
        return scaled;
    };
    low = of(__byte_perm(x, 0, 0x1404)), high = of(__byte_perm(x, 0, 0x3424));
#endif
}
template <> __device__ __forceinline__ void widen<e5m2>(u32 x, u32& low, u32& high) {
    low = __byte_perm(x, 0, 0x1404), high = __byte_perm(x, 0, 0x3424);  // the upper byte of an f16
}
template <> __device__ __forceinline__ void widen<int8>(u32 x, u32& low, u32& high) {
    // 1024 + n is 0x6400 + n in f16, for n below 1024.
    x ^= 0x80808080;
    const auto of = [](u32 r) {
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(r), "r"(0x64806480));
        return r;
    };
    low = of(__byte_perm(x, 0x64646464, 0x4140)), high = of(__byte_perm(x, 0x64646464, 0x4342));
}
template <> __device__ __forceinline__ void widen<f16>(u32, u32&, u32&) {}
template <> __device__ __forceinline__ void widen<bf16>(u32, u32&, u32&) {}

// Two elements of a row of Q, as products take them.
__device__ __forceinline__ u32 query_pair(const u16* from) { return __ldg((const u32*)from); }
__device__ __forceinline__ u32 query_pair(const u8* from) {
    u32 pair, none;
    widen<e4m3>(__ldg((const u16*)from), pair, none);
    return pair;
}
using QueryBits = Choose<kIsE4m3<Element>, u8, u16>::Type;

// Four columns of a row of O, side by side.
template <typename Of> __device__ __forceinline__ void write_four(Of* to, float4 x) {
    *(uint2*)to = make_uint2(pack<Of>(x.x, x.y), pack<Of>(x.z, x.w));
}
template <> __device__ __forceinline__ void write_four(float* to, float4 x) { *(float4*)to = x; }
template <> __device__ __forceinline__ void write_four(e4m3* to, float4 x) {
    const auto bits = [](float value) { return u32(from_float<e4m3>(value).bits); };
    *(u32*)to = bits(x.x) | bits(x.y) << 8 | bits(x.z) << 16 | bits(x.w) << 24;
}

// Whether an element's bits are those of a NaN or an infinity.
template <typename Any> __device__ __forceinline__ bool is_non_finite(u32 bits);
template <> __device__ __forceinline__ bool is_non_finite<f16>(u32 bits) { return (bits & 0x7c00) == 0x7c00; }
template <> __device__ __forceinline__ bool is_non_finite<bf16>(u32 bits) { return (bits & 0x7f80) == 0x7f80; }
template <> __device__ __forceinline__ bool is_non_finite<e4m3>(u32 bits) { return (bits & 0x7f) == 0x7f; }
template <> __device__ __forceinline__ bool is_non_finite<e5m2>(u32 bits) { return (bits & 0x7c) == 0x7c; }
template <> __device__ __forceinline__ bool is_non_finite<int8>(u32) { return false; }
template <typename Any> __device__ __forceinline__ float value_of(u32 bits);
template <> __device__ __forceinline__ float value_of<f16>(u32 bits) { return to_float(f16{u16(bits)}); }
template <> __device__ __forceinline__ float value_of<bf16>(u32 bits) { return to_float(bf16{u16(bits)}); }
// Of non-finite ones alone: that is who asks.
template <> __device__ __forceinline__ float value_of<e4m3>(u32) { return __int_as_float(0x7fffffff); }
template <> __device__ __forceinline__ float value_of<e5m2>(u32 bits) { return to_float(f16{u16(bits << 8)}); }
template <> __device__ __forceinline__ float value_of<int8>(u32) { return 0.0f; }

template <typename Any> constexpr bool kOnlyNumbers = false;
template <> constexpr bool kOnlyNumbers<int8> = true;

// The column of O that element e of a lane's accumulator tile j is. Quantised columns come in pairs of tiles, one of
// the even columns of 16 and one of the odd.
__device__ __forceinline__ int column_of(int j, int e) {
    const int t = threadIdx.x % 4;
    return kScaled ? j / 2 * 16 + 4 * t + 2 * e + j % 2 : j * 8 + 2 * t + e;
}
