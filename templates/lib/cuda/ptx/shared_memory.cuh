// Shared memory by address: loads, stores, and flags that some threads set while others look.

__device__ __forceinline__ u32 smem_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

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
