// What the statements of a score program call, on CUDA; the same meaning as lib/cpu/score.h, with the hardware's
// approximations of exp2 and log2.

#define FT_INF __int_as_float(0x7f800000)
#define FT_NAN __int_as_float(0x7fffffff)

// What the host passes of a side tensor, and a run-time scalar.
@{ side_tensor }@
union SideScalar {
    i64 i;
    float f;
};

__device__ __forceinline__ int ft_clamp32(int i, int length) { return min(max(i, 0), length - 1); }
__device__ __forceinline__ i64 ft_clamp64(i64 i, int length) {
    return i < 0 ? 0 : i < length ? i : length - 1;
}

__device__ __forceinline__ i64 ft_floor_div64(i64 a, i64 b) {
    if (b == 0) return 0;
    if (b == -1) return i64(0 - u64(a));
    return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
}
__device__ __forceinline__ i64 ft_floor_mod64(i64 a, i64 b) {
    if (b == 0) return a;
    if (b == -1) return 0;
    i64 rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
// The smallest number divided by -1 does not fit in 32 bits: the wider one is called then.
__device__ __forceinline__ int ft_floor_div32(int a, int b) {
    const int by = b == 0 || b == -1 ? 1 : b, quotient = a / by, rest = a % by;
    const int down = quotient - (rest != 0 && (rest < 0) != (by < 0));
    return b == 0 ? 0 : b == -1 ? int(0 - u32(a)) : down;
}
__device__ __forceinline__ int ft_floor_mod32(int a, int b) {
    const int by = b == 0 || b == -1 ? 1 : b, rest = a % by;
    return b == 0 ? a : rest != 0 && (rest < 0) != (by < 0) ? rest + by : rest;
}

__device__ __forceinline__ float ft_minf(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ float ft_maxf(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float ft_absf(float x) { return fabsf(x); }

__device__ __forceinline__ float ft_from_bf16(u16 x) { return __uint_as_float(u32(x) << 16); }
__device__ __forceinline__ float ft_from_f16(u16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}

// Elements along the keys: element `offset` from a thread's first one, one by one or, where they lie side by side, in
// pairs, whose second read the compiler finds to be the first. `nth` counts the reads of a program.
typedef const u16* Halves;
typedef const float* Floats;
template <bool kPaired> struct AlongKeys {
    __device__ __forceinline__ AlongKeys at(int) const { return *this; }
    __device__ __forceinline__ u16 half(const u16* data, int offset, i64 stride) const {
        if (!kPaired) return data[offset * stride];
        const u32 pair = *(const u32*)(data + (offset & ~1));
        return u16(offset & 1 ? pair >> 16 : pair);
    }
    __device__ __forceinline__ float bf16(const u16* data, int offset, i64 stride, int) const {
        if (!kPaired) return ft_from_bf16(data[offset * stride]);
        const u32 pair = *(const u32*)(data + (offset & ~1));
        return __uint_as_float(offset & 1 ? pair & 0xffff0000 : pair << 16);
    }
    __device__ __forceinline__ float f16(const u16* data, int offset, i64 stride, int) const {
        return ft_from_f16(half(data, offset, stride));
    }
    __device__ __forceinline__ float f32(const float* data, int offset, i64 stride, int) const {
        return kPaired ? data[offset] : data[offset * stride];
    }
};
// Elements of two bytes that are read ahead of their use, for tiles of 8 columns: memory answers while products run. A
// thread has two columns of each tile.
template <int kReads, int kTiles> struct ReadAhead {
    u32 pairs[kReads > 0 ? kReads : 1][kTiles];
    // All elements from `first` on, as pairs or, with care not to pass the last, one by one.
    template <bool kPaired> __device__ __forceinline__ void take(int nth, const u16* first, i64 stride, int last) {
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
            if (kPaired) {
                pairs[nth][j] = *(const u32*)(first + 8 * j);
            } else {
                pairs[nth][j] = first[min_of(8 * j, last) * stride] |
                                u32(first[min_of(8 * j + 1, last) * stride]) << 16;
            }
        }
    }
    // One of them, at a place that is a constant wherever the last key is.
    struct At {
        const ReadAhead& from;
        int place;
        __device__ __forceinline__ float bf16(const u16*, int, i64, int nth) const {
            const u32 pair = from.pairs[nth][place / 8];
            return __uint_as_float(place & 1 ? pair & 0xffff0000 : pair << 16);
        }
        __device__ __forceinline__ float f16(const u16*, int, i64, int nth) const {
            const u32 pair = from.pairs[nth][place / 8];
            return ft_from_f16(u16(place & 1 ? pair >> 16 : pair));
        }
        __device__ __forceinline__ float f32(const float* data, int offset, i64 stride, int) const {
            return data[offset * stride];
        }
    };
    __device__ __forceinline__ At at(int place) const { return At{*this, place}; }
};

__device__ __forceinline__ float ft_exp2f(float x) {
    float r;
    asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float ft_log2f(float x) {
    float r;
    asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// From an exponential and a reciprocal, within 2e-7: tanh.approx, within 5e-4 of the value, would show in a log-sum-exp
// of capped scores, which is fp32.
//
// That is absolute, and a cap takes it times a large number: a row of one key under a cap of 60 was 7e-6 off. Kernels
// on tensor cores have the series below for small scores; those in plain fp32 (FT_EXACT) take the library's, within 2
// ulp.
constexpr float kTanhOfTwice = 2.885390082f;  // 2 log2(e)
__device__ __forceinline__ float ft_tanhf(float x) {
#ifdef FT_EXACT
    return tanhf(x);
#endif
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * kTanhOfTwice));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(e + 1.0f));
    return fmaf(-2.0f, r, 1.0f);
}
// As CUDA's library has them: within 2 and 1 ulp, denormal numbers included, and square roots as IEEE 754 rounds them.
__device__ __forceinline__ float ft_expf(float x) { return expf(x); }
__device__ __forceinline__ float ft_logf(float x) { return logf(x); }
__device__ __forceinline__ float ft_sqrtf(float x) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// Within 4 ulp; 0 below -87.3, where the sum is beyond 2^126.
__device__ __forceinline__ float ft_sigmoidf(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + expf(-x)));
    return r;
}

// Floats as ints: the conversion keeps within 64 bits by itself, but makes the least int of NaN.
__device__ __forceinline__ i64 ft_int_floor(float x) {
    i64 r;
    asm("cvt.rmi.s64.f32 %0, %1;" : "=l"(r) : "f"(x));
    return x != x ? 0 : r;
}
__device__ __forceinline__ i64 ft_int_ceil(float x) {
    i64 r;
    asm("cvt.rpi.s64.f32 %0, %1;" : "=l"(r) : "f"(x));
    return x != x ? 0 : r;
}
__device__ __forceinline__ i64 ft_int_trunc(float x) {
    i64 r;
    asm("cvt.rzi.s64.f32 %0, %1;" : "=l"(r) : "f"(x));
    return x != x ? 0 : r;
}
__device__ __forceinline__ i64 ft_int_round(float x) {
    i64 r;
    asm("cvt.rni.s64.f32 %0, %1;" : "=l"(r) : "f"(x));
    return x != x ? 0 : r;
}

// Up to this magnitude an odd polynomial costs the special-function unit nothing. It has the least error as a part of
// the value, 2.1e-7 in fp32: a cap takes what is wrong with small scores times a large number.
constexpr float kSmallTanh = 0.4f;
constexpr float kTanhSeries[4] = {0.9999999f, -0.3333139f, 0.13271438f, -0.04757281f};
__device__ __forceinline__ float ft_small_tanhf(float x) {
    const float square = x * x;
    float p = fmaf(kTanhSeries[3], square, kTanhSeries[2]);
    p = fmaf(p, square, kTanhSeries[1]);
    return x * fmaf(p, square, kTanhSeries[0]);
}
// cap * tanh(factor * x) as a polynomial of x, whose coefficients are the same for many.
struct CapSeries {
    float a, b, c, d;
};
__device__ __forceinline__ CapSeries cap_series(float cap, float factor) {
    const float square = factor * factor, first = cap * factor, second = first * square, third = second * square;
    return CapSeries{first * kTanhSeries[0], second * kTanhSeries[1], third * kTanhSeries[2],
                     third * square * kTanhSeries[3]};
}
template <bool kSmall> __device__ __forceinline__ float ft_cap(float x, float cap, float factor, const CapSeries& s) {
    if (!kSmall) return cap * ft_tanhf(factor * x);
    const float square = x * x;
    return x * fmaf(fmaf(fmaf(s.d, square, s.c), square, s.b), square, s.a);
}
