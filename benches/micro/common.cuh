// What the microbenchmarks share: types, the record of a warp, and wrapped instructions of sm_90a.
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// One record of a role of a thread block: clock at its start and end, and what it counted.
struct Record {
    u64 start, end, count, spare;
};
constexpr int kRoles = 8;

__device__ __forceinline__ u64 clock_now() {
    u64 x;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(x)::"memory");
    return x;
}
__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ u32 hashed(u32 x) {
    x ^= x >> 16, x *= 0x7feb352d, x ^= x >> 15, x *= 0x846ca68b;
    return x ^ x >> 16;
}
// Two bf16 of random sign and digits, between 2^-4 and 2^-1: products of zeros would draw less power.
__device__ __forceinline__ u32 random_pair(u32 x) {
    const u32 h = hashed(x);
    return (h & 0x807f807f) | 0x3d803d80 | (h >> 8 & 0x01000100);
}
__device__ __forceinline__ void fill_random(u32 address, u32 bytes) {
    for (u32 i = threadIdx.x * 4; i < bytes; i += blockDim.x * 4)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address + i), "r"(random_pair(address + i + blockIdx.x * 77))
                     : "memory");
}
__device__ __forceinline__ void fill_word(u32 address, u32 bytes, u32 word) {
    for (u32 i = threadIdx.x * 4; i < bytes; i += blockDim.x * 4)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address + i), "r"(word) : "memory");
}

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// A wait that a fault would make endless ends the kernel after seconds.
template <bool kCluster>
__device__ __forceinline__ void mbarrier_wait_in(u32 barrier, u32 parity) {
    for (u32 tries = 0; tries < 300; tries++) {
        u32 over;
        if constexpr (kCluster)
            asm volatile(
                "{\n"
                ".reg .pred over;\n"
                "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%1], %2, 0x989680;\n"
                "selp.b32 %0, 1, 0, over;\n"
                "}\n"
                : "=r"(over)
                : "r"(barrier), "r"(parity)
                : "memory");
        else
            asm volatile(
                "{\n"
                ".reg .pred over;\n"
                "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2, 0x989680;\n"
                "selp.b32 %0, 1, 0, over;\n"
                "}\n"
                : "=r"(over)
                : "r"(barrier), "r"(parity)
                : "memory");
        if (over) return;
    }
    asm volatile("trap;");
}
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) { mbarrier_wait_in<false>(barrier, parity); }
__device__ __forceinline__ void mbarrier_wait_cluster(u32 barrier, u32 parity) {
    mbarrier_wait_in<true>(barrier, parity);
}
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
    u32 x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(address), "r"(rank));
    return x;
}
__device__ __forceinline__ void mbarrier_arrive_in(u32 cluster_address) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 x;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
    return x;
}

__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void bulk_load(u32 to, u64 from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void bulk_store(u64 to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_add_f32(u64 to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_add_s32(u64 to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_add_u64(u64 to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u64 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_add_bf16(u64 to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Tiles of 128-byte swizzled rows: 16-byte chunk c of row r lies at chunk c ^ (r % 8).
__device__ __forceinline__ u64 descriptor_of_rows(u32 address) {
    return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
__device__ __forceinline__ u64 descriptor_of_depth(u32 address, u32 column_bytes) {
    return u64((address & 0x3ffff) >> 4) | u64(column_bytes >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_touch(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void store_v4(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void stmatrix(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
__device__ __forceinline__ void stmatrix_trans(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// In order, but free to be scheduled: for code whose time is the point, not a single instruction's rate.
__device__ __forceinline__ float exp2_free(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
