// What CUDA C++ gives to a kernel, for a host compiler: put before a generated source.

#pragma once
#include "ptx.h"
#include <cmath>

#define __device__
#define __host__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

#define threadIdx (ptx::thread_index())
#define blockIdx (ptx::block_index())
#define gridDim (ptx::grid_dim())

struct uint4 {
    unsigned x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
constexpr float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
constexpr unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
constexpr double __hiloint2double(int high, int low) {
    return __builtin_bit_cast(double, (unsigned long long)unsigned(high) << 32 | unsigned(low));
}
constexpr int __double2hiint(double x) { return int(__builtin_bit_cast(unsigned long long, x) >> 32); }
constexpr int __double2loint(double x) { return int(__builtin_bit_cast(unsigned long long, x)); }
double __fma_rz(double x, double y, double z);
constexpr int __float_as_int(float x) { return __builtin_bit_cast(int, x); }

// What another lane has; 64 bits go in halves.
template <typename T> T emulated_shuffle(const char* what, unsigned lanes, T x, int from) {
    if constexpr (sizeof(T) == 8) {
        const unsigned long long bits = __builtin_bit_cast(unsigned long long, x);
        const unsigned low = emulated_shuffle(what, lanes, unsigned(bits), from);
        const unsigned high = emulated_shuffle(what, lanes, unsigned(bits >> 32), from);
        return __builtin_bit_cast(T, (unsigned long long)high << 32 | low);
    } else {
        static_assert(sizeof(T) == 4);
        return __builtin_bit_cast(T, ptx::exchange(what, lanes, __builtin_bit_cast(unsigned, x))[from & 31]);
    }
}
template <typename T> T __shfl_sync(unsigned lanes, T x, int from) {
    return emulated_shuffle("__shfl_sync", lanes, x, from);
}
template <typename T> T __shfl_xor_sync(unsigned lanes, T x, int mask) {
    return emulated_shuffle("__shfl_xor_sync", lanes, x, int(ptx::thread_index().x % 32) ^ mask);
}
// Lanes that have no such neighbour keep their own.
template <typename T> T __shfl_up_sync(unsigned lanes, T x, unsigned apart) {
    const unsigned lane = ptx::thread_index().x % 32;
    return emulated_shuffle("__shfl_up_sync", lanes, x, int(lane < apart ? lane : lane - apart));
}
template <typename T> T __shfl_down_sync(unsigned lanes, T x, unsigned apart) {
    const unsigned lane = ptx::thread_index().x % 32;
    return emulated_shuffle("__shfl_down_sync", lanes, x, int(lane + apart > 31 ? lane : lane + apart));
}
inline int __all_sync(unsigned lanes, int x) {
    const unsigned* all = ptx::exchange("__all_sync", lanes, x != 0);
    for (int i = 0; i < 32; i++)
        if (!all[i]) return 0;
    return 1;
}
inline int __any_sync(unsigned lanes, int x) {
    const unsigned* all = ptx::exchange("__any_sync", lanes, x != 0);
    for (int i = 0; i < 32; i++)
        if (all[i]) return 1;
    return 0;
}
inline unsigned __ballot_sync(unsigned lanes, int x) {
    const unsigned* all = ptx::exchange("__ballot_sync", lanes, x != 0);
    unsigned ballot = 0;
    for (int i = 0; i < 32; i++) ballot |= all[i] << i;
    return ballot;
}
// Memory: thread blocks come one after the other, so that what one has written is there for the next.
template <typename T> T __ldg(const T* p) { return *p; }
template <typename T> T __ldcg(const T* p) { return *p; }
template <typename T> T __ldcs(const T* p) { return *p; }
template <typename T> void __stcg(T* p, T x) { *p = x; }
inline void __threadfence() {}
template <typename T> T atomicAdd(T* p, T x) {
    ptx::maybe_let_others();
    const T old = *p;
    *p = old + x;
    return old;
}
inline int atomicAdd(int* p, unsigned x) { return atomicAdd(p, int(x)); }
inline unsigned atomicAdd(unsigned* p, int x) { return atomicAdd(p, unsigned(x)); }
template <typename T> T atomicExch(T* p, T x) {
    ptx::maybe_let_others();
    const T old = *p;
    *p = x;
    return old;
}
template <typename T> T atomicMax(T* p, T x) {
    ptx::maybe_let_others();
    const T old = *p;
    *p = old > x ? old : x;
    return old;
}
// Counts up to a last number, and then from 0.
inline unsigned atomicInc(unsigned* p, unsigned last) {
    ptx::maybe_let_others();
    const unsigned old = *p;
    *p = old >= last ? 0 : old + 1;
    return old;
}

// Byte n of the result is the one that digit n of the selector names, of the eight of {y, x}; its sign with the digit's
// upper bit.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long all = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int n = 0; n < 4; n++) {
        const unsigned digit = selector >> (4 * n) & 15, byte = unsigned(all >> (digit & 7) * 8) & 255;
        result |= (digit & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * n);
    }
    return result;
}
// The lower 32 bits of {high, low} after a shift to the right, by less than 32.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned(((unsigned long long)high << 32 | low) >> (by & 31));
}
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmul_rz(float x, float y) {
    const float z = x * y;
    const double exact = double(x) * double(y);  // of two floats without rounding
    if (z == z && __builtin_fabs(double(z)) > __builtin_fabs(exact)) return __builtin_nextafterf(z, 0.0f);
    return z;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x > y ? x : y; }
inline void __syncwarp(unsigned lanes = 0xffffffff) { ptx::exchange("__syncwarp", lanes, 0); }
inline void __syncthreads() { ptx::synchronize_block(); }
inline int __syncthreads_count(int x) {
    unsigned counted;
    ptx::bar_red_popc_u32(counted, 0, unsigned(ptx::kernel.threads), x != 0);
    return int(counted);
}
inline int __syncthreads_or(int x) { return __syncthreads_count(x) != 0; }
inline unsigned __cvta_generic_to_shared(const void* p) { return ptx::shared_address(p); }

// Dynamic shared memory: kernels declare it as an array of unknown size. What they do with it by pointers is not
// watched.
extern "C" unsigned char shared_memory[];

// Tells the machine about the kernel of this source.
#define EMULATED_CALL(entry, arguments) [](const void* args) { entry(*static_cast<const arguments*>(args)); }
#define EMULATED_KERNEL(entry, arguments, shared_bytes, blocks_per_sm)                                       \
    ptx::Kernel ptx::kernels[] = {{kThreads, shared_bytes, blocks_per_sm, sizeof(arguments),                 \
                                   EMULATED_CALL(entry, arguments), {EMULATED_BEFORE(arguments)}}};
// One that comes before it.
#define EMULATED_FIRST(entry, arguments, threads) {EMULATED_CALL(entry, arguments), threads}
// One of several that a launch runs one after the other.
#define EMULATED_STAGE(entry, arguments, threads, shared_bytes) \
    {threads, shared_bytes, 1, sizeof(arguments), EMULATED_CALL(entry, arguments), {}},
