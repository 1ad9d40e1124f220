// Warpgroup matrix instructions of sm_90a (wgmma): 64 rows, kColumns columns, 16 elements deep, fp32 accumulators.
//
// Accumulator of thread t = 128 * warpgroup + 32 * w + lane: d[4j + 2i + c] is row 16w + lane / 4 + 8i, column
// 8j + 2 (lane % 4) + c. Eight accumulators of 16 columns, packed to 16 bits, are one A operand: P needs no shuffle.
//
// The instructions run asynchronously: between the issue and the wait that covers it, neither the accumulators nor the
// shared memory may be touched.

// Descriptors of operands in shared memory, tiles of 128-byte swizzled rows (see tma.cuh). Addresses count 16 bytes.
// Rows are the operand's outer dimension (Q, K, P): 8 rows are 1024 bytes; 16 elements along a row are 32 bytes.
__device__ __forceinline__ u64 descriptor_of_rows(u32 address) {
    return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
// Rows are the depth (V): 8 rows are 1024 bytes, 64 columns further is `column_bytes` away.
__device__ __forceinline__ u64 descriptor_of_depth(u32 address, u32 column_bytes) {
    return u64((address & 0x3ffff) >> 4) | u64(column_bytes >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// Orders register accesses before the next wgmma: first of all before a batch is issued.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the latest groups are unfinished.
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Tells the compiler that an accumulator changes here: no access may move across.
template <int kCount> __device__ __forceinline__ void wgmma_touch(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// wgmma<kColumns>::rows(d, a, b, keep):  d = keep * d + A B^T, A and B in shared memory by rows.
// wgmma<kColumns>::depth(d, p, b):       d += A V, A in four registers, V in shared memory by depth.
// Of quick kernels also, from the fence to the wait:
// wgmma<kColumns>::whole_rows(d, a, b):  d = A B^T over the whole head dim.
// wgmma<kColumns>::whole_depth(d, p, b): d += A V over a whole block of keys, A in registers.
template <typename Element, int kColumns> struct wgmma;
@{ wgmma_instructions }@
