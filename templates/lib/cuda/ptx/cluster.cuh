// Thread blocks that run side by side and reach each other's shared memory (clusters).

__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// All threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Arrives on the barrier at this address in the block of a rank. Without .release.cluster, which lowers to a fence of
// the whole GPU: the reads before it are those of matrix instructions that have been waited for.
__device__ __forceinline__ void mbarrier_arrive_at(u32 barrier, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(rank));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
// Global to the shared memory of every block of the cluster in `ranks`, at the same address in each, completing on the
// barrier at the same address in each.
__device__ __forceinline__ void tma_load_to_all(u32 to, const TensorMap& map, u32 barrier, u16 ranks, u64 cache_hint,
                                                int column, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%5, %6, %7, %8}], [%2], %3, %4;" ::"r"(to), "l"(&map), "r"(barrier), "h"(ranks), "l"(cache_hint),
        "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
