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
#define __cluster_dims__(...)

#define threadIdx (ptx::thread_index())
#define blockIdx (ptx::block_index())
#define gridDim (ptx::grid_dim())

struct uint4 {
    unsigned x, y, z, w;
};

constexpr float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
constexpr float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
constexpr unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
constexpr int __float_as_int(float x) { return __builtin_bit_cast(int, x); }

template <typename T> T __shfl_sync(unsigned lanes, T x, int from) {
    static_assert(sizeof(T) == 4);
    return __builtin_bit_cast(T, ptx::exchange("__shfl_sync", lanes, __builtin_bit_cast(unsigned, x))[from & 31]);
}
template <typename T> T __shfl_xor_sync(unsigned lanes, T x, int mask) {
    static_assert(sizeof(T) == 4);
    const unsigned* all = ptx::exchange("__shfl_xor_sync", lanes, __builtin_bit_cast(unsigned, x));
    return __builtin_bit_cast(T, all[ptx::thread_index().x % 32 ^ mask]);
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
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x > y ? x : y; }
inline void __syncwarp(unsigned lanes = 0xffffffff) { ptx::exchange("__syncwarp", lanes, 0); }
inline void __syncthreads() { ptx::synchronize_block(); }
inline int __syncthreads_or(int x) {
    bool any;
    ptx::bar_red_or_pred(any, 0, unsigned(ptx::kernel.threads), x != 0);
    return any;
}
inline unsigned __cvta_generic_to_shared(const void* p) { return ptx::shared_address(p); }

// Dynamic shared memory: kernels declare it as an array of unknown size, and use its address alone.
extern "C" unsigned char shared_memory[];

// Tells the machine about the kernel of this source.
#define EMULATED_CALL(entry, arguments) [](const void* args) { entry(*static_cast<const arguments*>(args)); }
#define EMULATED_KERNEL(entry, arguments, shared_bytes, cluster)                                              \
    ptx::Kernel ptx::kernel = {kThreads, shared_bytes, kBlocksPerSM, cluster, sizeof(arguments),              \
                               EMULATED_CALL(entry, arguments), {EMULATED_BEFORE(arguments)}};
