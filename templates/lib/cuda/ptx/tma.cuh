// TMA, the bulk tensor copy engine: boxes of tensors to and from shared memory, described by tensor maps that the host
// encodes. Boxes are 64 elements wide and stored with the 128-byte swizzle: the 16-byte chunk c of row r lies at chunk
// c ^ (r % 8) of that row, rows 128 bytes apart, from a start that is a multiple of 1024. What lies outside of the
// tensor arrives as zeros, and is not written.

struct __align__(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Global to shared, completing on an mbarrier.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 barrier, u64 cache_hint, int column, int row,
                                         int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(to), "l"(&map), "r"(barrier), "l"(cache_hint), "r"(column),
        "r"(row), "r"(head), "r"(batch) : "memory");
}
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 barrier, u64 cache_hint, int column,
                                         int member, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(to), "l"(&map), "r"(barrier), "l"(cache_hint), "r"(column),
        "r"(member), "r"(row), "r"(head), "r"(batch) : "memory");
}

// Shared to global, in the calling thread's current group.
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 from, int column, int member, int row, int head,
                                          int batch) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
                 "r"(from), "r"(column), "r"(member), "r"(row), "r"(head), "r"(batch) : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the groups of the calling thread have read their shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until they have written all of it.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Waits until all groups but the latest one have.
__device__ __forceinline__ void tma_store_wait_but_one() { asm volatile("cp.async.bulk.wait_group 1;" ::: "memory"); }

// Orders this thread's ordinary writes to shared memory before what TMA and the tensor cores read of it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of all memory: of what copies wrote before what this thread tells others, and of what it was told before
// copies that read it.
__device__ __forceinline__ void fence_async_proxy_everywhere() { asm volatile("fence.proxy.async;" ::: "memory"); }

constexpr u64 kEvictNormal = 0x1000000000000000;
constexpr u64 kEvictFirst = 0x12f0000000000000;
constexpr u64 kEvictLast = 0x14f0000000000000;
