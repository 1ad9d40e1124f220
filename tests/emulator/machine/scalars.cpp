// Conversions and the special-function unit. Its approximations are replaced by exactly rounded results, except for the
// flush of subnormal numbers.

#include "machine.h"
#include <cfenv>
#include <cmath>
#include <cstring>

namespace ptx {
namespace {

template <typename To, typename From> To bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

u16 to_f16(float x) {
    const u16 sign = bits<u32>(x) >> 16 & 0x8000;
    const float a = std::fabs(x);
    if (x != x) return 0x7fff;
    if (a >= 65520.0f) return sign | 0x7c00;
    if (a < 0x1p-14f) return sign | u16(std::nearbyintf(a * 0x1p24f));  // may carry into the first normal number
    const u32 u = bits<u32>(a);
    return sign | u16((u - (112u << 23) + 0xfff + (u >> 13 & 1)) >> 13);
}
u16 to_bf16(float x) {
    const u32 u = bits<u32>(x);
    return x != x ? 0x7fff : u16((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
float from_f16(u16 x) {
    const u32 sign = u32(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
    if (exponent == 31) return bits<float>(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return bits<float>(sign | bits<u32>(float(fraction) * 0x1p-24f));
    return bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

}  // namespace

float widen(Format format, u16 x) {
    if (format == Format::bf16) return bits<float>(u32(x) << 16);
    static const std::vector<float> table = [] {
        std::vector<float> t(65536);
        for (u32 i = 0; i < 65536; i++) t[i] = from_f16(u16(i));
        return t;
    }();
    return table[x];
}

void cvt_rn_f16x2_f32(u32& d, float high, float low) { d = u32(to_f16(high)) << 16 | to_f16(low); }
void cvt_rn_bf16x2_f32(u32& d, float high, float low) { d = u32(to_bf16(high)) << 16 | to_bf16(low); }
void cvt_rn_f16_f32(u16& d, float x) { d = to_f16(x); }
void cvt_f32_f16(float& d, u16 x) { d = from_f16(x); }
// Of packed pairs, in double: its products of 16-bit elements are exact.
void fma_rn_f16x2(u32& d, u32 x, u32 y, u32 z) {
    const auto half = [](u32 a, u32 b, u32 c) {
        return to_f16(float(double(from_f16(u16(a))) * from_f16(u16(b)) + from_f16(u16(c))));
    };
    d = u32(half(x >> 16, y >> 16, z >> 16)) << 16 | half(x, y, z);
}
void fma_rn_bf16x2(u32& d, u32 x, u32 y, u32 z) {
    const auto half = [](u32 a, u32 b, u32 c) {
        return to_bf16(float(double(bits<float>(a << 16)) * bits<float>(b << 16) + bits<float>(c << 16)));
    };
    d = u32(half(x >> 16, y >> 16, z >> 16)) << 16 | half(x, y, z);
}
namespace {
template <typename Of> u32 of_halves(u32 x, u32 y, Of of) {
    const auto half = [&](u32 a, u32 b) {
        return to_f16(float(of(double(from_f16(u16(a))), double(from_f16(u16(b))))));
    };
    return u32(half(x >> 16, y >> 16)) << 16 | half(x, y);
}
}  // namespace
void mul_rn_f16x2(u32& d, u32 x, u32 y) { d = of_halves(x, y, [](double a, double b) { return a * b; }); }
void add_rn_f16x2(u32& d, u32 x, u32 y) { d = of_halves(x, y, [](double a, double b) { return a + b; }); }
void sub_rn_f16x2(u32& d, u32 x, u32 y) { d = of_halves(x, y, [](double a, double b) { return a - b; }); }
// OCP FP8: 4 bits of exponent and 3 of mantissa with NaN as all ones; the upper byte of an f16.
float from_e4m3(u32 byte) {
    static const std::vector<float> table = [] {
        std::vector<float> t(256);
        for (u32 i = 0; i < 256; i++) {
            const float magnitude = (i & 0x78) ? std::ldexp(1.0f + float(i & 7) / 8.0f, int(i >> 3 & 15) - 7)
                                               : std::ldexp(float(i & 7), -9);
            t[i] = (i & 0x7f) == 0x7f ? bits<float>(0x7fc00000) : i & 0x80 ? -magnitude : magnitude;
        }
        return t;
    }();
    return table[byte & 255];
}
float from_e5m2(u32 byte) { return widen(Format::f16, u16(byte << 8)); }
float cut_fp8_sum(float x) {
    u32 u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7f800000) != 0x7f800000) u &= ~0x3ffu;
    std::memcpy(&x, &u, 4);
    return x;
}
namespace {
// The next one, of two the even one; what is larger than the largest becomes that.
u32 to_e4m3(float x) {
    const u32 sign = bits<u32>(x) >> 24 & 0x80;
    const float a = std::fabs(x);
    if (x != x) return 0x7f;
    if (a >= 448.0f) return sign | 0x7e;
    u32 low = 0;
    for (u32 step = 64; step > 0; step /= 2)
        if (low + step < 0x7f && from_e4m3(low + step) <= a) low += step;
    const float below = a - from_e4m3(low), above = from_e4m3(low + 1) - a;
    return sign | (below < above || (below == above && low % 2 == 0) ? low : low + 1);
}
}  // namespace
void cvt_rn_satfinite_e4m3x2_f32(u16& d, float high, float low) { d = u16(to_e4m3(high) << 8 | to_e4m3(low)); }
void cvt_rn_f16x2_e4m3x2(u32& d, u16 x) {
    const auto one = [](u32 byte) -> u32 {
        return (byte & 0x7f) == 0x7f ? 0x7fff : (byte & 0x80) << 8 | to_f16(std::fabs(from_e4m3(byte)));
    };
    d = one(x >> 8) << 16 | one(x & 255);
}
void cvt_rn_f16x2_e5m2x2(u32& d, u16 x) { d = u32(x & 0xff00) << 16 | u32(x & 255) << 8; }
void prmt_b32(u32& d, u32 x, u32 y, u32 selector) {
    const u64 all = u64(y) << 32 | x;
    u32 result = 0;
    for (int n = 0; n < 4; n++) {
        const u32 digit = selector >> (4 * n) & 15, byte = u32(all >> (digit & 7) * 8) & 255;
        result |= (digit & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * n);
    }
    d = result;
}
void ex2_approx_ftz_f32(float& d, float x) { d = flush(std::exp2f(flush(x))); }
void lg2_approx_ftz_f32(float& d, float x) { d = flush(std::log2f(flush(x))); }
void rcp_approx_ftz_f32(float& d, float x) { d = flush(1.0f / flush(x)); }
void ex2_approx_f32(float& d, float x) { d = std::exp2f(x); }
void lg2_approx_f32(float& d, float x) { d = std::log2f(x); }
void sqrt_rn_f32(float& d, float x) { d = std::sqrt(x); }
// Within 64 bits; NaN gives the least of them.
namespace {
long long to_s64(float whole) {
    if (whole != whole || whole < -0x1p63f) return -0x7fffffffffffffffll - 1;
    return whole >= 0x1p63f ? 0x7fffffffffffffffll : (long long)whole;
}
}  // namespace
void cvt_rmi_s64_f32(long long& d, float x) { d = to_s64(std::floor(x)); }
void cvt_rpi_s64_f32(long long& d, float x) { d = to_s64(std::ceil(x)); }
void cvt_rzi_s64_f32(long long& d, float x) { d = to_s64(std::trunc(x)); }
void cvt_rni_s64_f32(long long& d, float x) { d = to_s64(std::nearbyint(x)); }
// NaN is the canonical one, whose bits some kernels compute with.
void max_NaN_f32(float& d, float x, float y) { d = x != x || y != y ? bits<float>(0x7fffffffu) : x > y ? x : y; }

// Thread blocks do not run at the same time here.
void atom_global_add_u32(u32& old, u32* counter, u32 n) {
    old = *counter;
    *counter += n;
}
void atom_add_acq_rel_gpu_global_u32(u32& old, u32* counter, u32 n) { atom_global_add_u32(old, counter, n); }
void atom_inc_acq_rel_gpu_global_u32(u32& old, u32* counter, u32 last) {
    old = *counter;
    *counter = old >= last ? 0 : old + 1;
}

}  // namespace ptx

double __fma_rz(double x, double y, double z) {
    const int was = std::fegetround();
    std::fesetround(FE_TOWARDZERO);
    volatile double factor = x, sum = std::fma(factor, y, z);
    std::fesetround(was);
    return sum;
}
