// Scalar types and conversions. Generated sources include nothing, so the few words that they need are spelled out
// here.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
typedef float f32;

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
#define FT_INFINITY __int_as_float(0x7f800000)

// Two fp32 values rounded to nearest even into one 32-bit register, `low` in the lower half.
template <typename Element> __device__ __forceinline__ u32 pack(float low, float high);
template <> __device__ __forceinline__ u32 pack<f16>(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <> __device__ __forceinline__ u32 pack<bf16>(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_float(f16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
    return r;
}

template <typename Element> __device__ __forceinline__ Element from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
}
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    // In integer arithmetic, because the instruction needs sm_90: round to nearest even, NaN stays NaN.
    const u32 u = __float_as_uint(x);
    bf16 r;
    r.bits = x != x ? u16((u >> 16) | 0x40) : u16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
    return r;
}

// The exponent bits of both halves of a packed pair: all ones means NaN or infinity.
template <typename Element> constexpr u32 kExponentMask = 0;
template <> constexpr u32 kExponentMask<f16> = 0x7c00;
template <> constexpr u32 kExponentMask<bf16> = 0x7f80;

template <typename A> __device__ __forceinline__ constexpr A min_of(A a, A b) { return a < b ? a : b; }
template <typename A> __device__ __forceinline__ constexpr A max_of(A a, A b) { return a > b ? a : b; }

// x << count, which is 0 from a count of 32 on, as the hardware has it.
__device__ __forceinline__ u32 shift_left(u32 x, u32 count) {
    u32 r;
    asm("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(count));
    return r;
}

__host__ __device__ constexpr int div_up(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return div_up(a, b) * b; }

// A compile-time flag as a function argument, and whether a type is the flag `false`.
template <bool kValue> struct Bool {
    static constexpr bool value = kValue;
    __device__ __forceinline__ constexpr operator bool() const { return kValue; }
};
template <typename A> constexpr bool kIsFalse = false;
template <> constexpr bool kIsFalse<Bool<false>> = true;
template <typename A> constexpr bool kIsTrue = false;
template <> constexpr bool kIsTrue<Bool<true>> = true;
