// What the statements of a score program call, on CUDA; the same meaning as lib/cpu/score.h, with the hardware's
// approximations of exp2, log2 and tanh.

typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;

#define FT_INF __int_as_float(0x7f800000)
#define FT_NAN __int_as_float(0x7fffffff)

// A side tensor and a run-time scalar, as the host passes them. The stride is 0 along an axis of length 1.
struct SideTensor {
    const void *data;
    int64_t stride[4];  // in elements
    int32_t length[4];
};

union SideScalar {
    int64_t i;
    float f;
};

__device__ __forceinline__ int32_t ft_clamp32(int32_t i, int32_t length) { return min(max(i, 0), length - 1); }
__device__ __forceinline__ int64_t ft_clamp64(int64_t i, int32_t length) {
    return i < 0 ? 0 : i < length ? i : length - 1;
}

__device__ __forceinline__ int64_t ft_floor_div64(int64_t a, int64_t b) {
    if (b == 0) return 0;
    if (b == -1) return int64_t(0 - uint64_t(a));
    return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
}
__device__ __forceinline__ int64_t ft_floor_mod64(int64_t a, int64_t b) {
    if (b == 0) return a;
    if (b == -1) return 0;
    int64_t rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ __forceinline__ int32_t ft_floor_div32(int32_t a, int32_t b) { return int32_t(ft_floor_div64(a, b)); }
__device__ __forceinline__ int32_t ft_floor_mod32(int32_t a, int32_t b) { return int32_t(ft_floor_mod64(a, b)); }

__device__ __forceinline__ float ft_minf(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ float ft_maxf(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float ft_absf(float x) { return fabsf(x); }

__device__ __forceinline__ float ft_from_bf16(uint16_t x) { return __uint_as_float(uint32_t(x) << 16); }
__device__ __forceinline__ float ft_from_f16(uint16_t x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}

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
// tanh.approx is within 2^-11 of the value: less than the rounding of a score that was bent to f16 or bf16.
__device__ __forceinline__ float ft_tanhf(float x) {
    float r;
    asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
