// Four warps that act as one: registers handed between warpgroups, and barriers of some warps of a block.

__device__ __forceinline__ u32 smem_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

template <int kRegisters> __device__ __forceinline__ void registers_give_back() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Named barrier `id` of `threads` threads in all; 0 is the whole block's.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// barrier_sync() that also tells all of them whether `x` was not zero for any.
__device__ __forceinline__ bool barrier_any(int id, int threads, u32 x) {
    u32 any;
    asm volatile(
        "{\n"
        ".reg .pred mine, any;\n"
        "setp.ne.b32 mine, %3, 0;\n"
        "bar.red.or.pred any, %1, %2, mine;\n"
        "selp.b32 %0, 1, 0, any;\n"
        "}\n" : "=r"(any) : "r"(id), "r"(threads), "r"(x) : "memory");
    return any != 0;
}

// The same value in all lanes, and known to the compiler to be.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// Four 8 x 8 matrices of 16-bit elements to shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(u32 address) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ void store_shared_16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ u32 load_shared_4(u32 address) {
    u32 r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ void store_shared_4(u32 address, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
// A flag, or several, in shared memory that some set while others look.
__device__ __forceinline__ void set_flag(u32 address, u32 bits = 1) {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}
__device__ __forceinline__ u32 read_flag(u32 address) {
    u32 r;
    asm volatile("atom.shared.or.b32 %0, [%1], %2;" : "=r"(r) : "r"(address), "r"(0) : "memory");
    return r;
}
template <typename Element> __device__ __forceinline__ Element load_shared(u32 address) {
    Element r;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r.bits) : "r"(address) : "memory");
    return r;
}
template <typename Element> __device__ __forceinline__ void store_shared(u32 address, Element v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v.bits) : "memory");
}
