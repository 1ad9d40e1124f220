/* flashtune 0.1.0: forward-bf16-d256-causal.sm90.c2-kv80-s2-overlap-queue-two-b1-l2x32.sm_90a
 * problem   forward-bf16-d256-causal
 * schedule  c2-kv80-s2-overlap-queue-two-b1-l2x32
 * templates dff09786df55dd19
 * rebuild   nvcc -cubin -arch=sm_90a -std=c++17 -Xptxas -v kernel.cu   (NVRTC options: --gpu-architecture=sm_90a --std=c++17 --device-as-default-execution-space --ptxas-options=-v) */

// Exact attention, tiled, in one pass, for Hopper (FlashAttention-3, section 3): a producer warpgroup brings Q, K and V
// by the copy engine, consumer warpgroups of 64 query rows each keep scores, probabilities and outputs in registers.
// With kOverlap the scores of one key block are computed while the product of the previous one with V still runs.

// Scalar types and conversions. Generated sources include nothing, so the few words that they need are spelled out here.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
typedef float f32;

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
#define FT_INFINITY __int_as_float(0x7f800000)

// Two fp32 values rounded to nearest even into one 32-bit register, `low` in the lower half.
template <typename Element> __device__ __forceinline__ u32 pack(float low, float high);
template <> __device__ __forceinline__ u32 pack<f16>(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <> __device__ __forceinline__ u32 pack<bf16>(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_float(f16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
    return r;
}

template <typename Element> __device__ __forceinline__ Element from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
}
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    // In integer arithmetic, because the instruction needs sm_90: round to nearest even, NaN stays NaN.
    const u32 u = __float_as_uint(x);
    bf16 r;
    r.bits = x != x ? u16((u >> 16) | 0x40) : u16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
    return r;
}

// The exponent bits of both halves of a packed pair: all ones means NaN or infinity.
template <typename Element> constexpr u32 kExponentMask = 0;
template <> constexpr u32 kExponentMask<f16> = 0x7c00;
template <> constexpr u32 kExponentMask<bf16> = 0x7f80;

template <typename A> __device__ __forceinline__ constexpr A min_of(A a, A b) { return a < b ? a : b; }
template <typename A> __device__ __forceinline__ constexpr A max_of(A a, A b) { return a > b ? a : b; }
__host__ __device__ constexpr int div_up(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return div_up(a, b) * b; }

// A compile-time flag as a function argument, and whether a type is the flag `false`.
template <bool kValue> struct Bool {
    static constexpr bool value = kValue;
    __device__ __forceinline__ constexpr operator bool() const { return kValue; }
};
template <typename A> constexpr bool kIsFalse = false;
template <> constexpr bool kIsFalse<Bool<false>> = true;

// The argument struct of every forward kernel. Same layout as codegen/src/abi.rs; ABI_VERSION guards both.

struct ForwardArgs {
    const void* q;      // [batch, heads, q_len, head_dim_qk] by strides
    const void* k;      // [batch, kv_heads, kv_len, head_dim_qk] by strides
    const void* v;      // [batch, kv_heads, kv_len, head_dim_v] by strides
    void* o;            // [batch, heads, q_len, head_dim_v] by strides
    float* lse;         // [batch, heads, q_len] contiguous, or null
    float* weights;     // [batch, heads, q_len, kv_len] contiguous, or null (forward/naive only)
    i64 q_stride[3];    // batch, head, row; in elements
    i64 k_stride[3];
    i64 v_stride[3];
    i64 o_stride[3];
    int batch, heads, kv_heads, q_len, kv_len;
    int window_left, window_right;  // read only where that side of the mask is bounded
    float scale;
    const void* side;   // an address of the host: what a score program reads lies behind the arguments (program.cuh)
};


// Problem.
using Element = bf16;
constexpr int kHeadDimQK = 256;
constexpr int kHeadDimV = 256;
constexpr bool kMaskLeft = 0;
constexpr bool kMaskRight = 1;
// Schedule.
constexpr int kConsumers = 2;
constexpr int kBlockKV = 80;
constexpr int kStages = 2;
constexpr bool kOverlap = true;
constexpr bool kTakeTurns = false;
constexpr bool kPInShared = false;
constexpr bool kMaskedLoop = true;
constexpr bool kLazyRescale = false;
constexpr bool kPackGroup = false;
constexpr bool kPersistent = true;
constexpr bool kQueue = true;
constexpr bool kChain = false;
constexpr int kExp2Eighths = 0;
constexpr int kCluster = 1;
constexpr int kBlocksPerSM = 1;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

// Which tile of O a thread block computes, and which keys its rows attend to.

struct Tile {
    int batch, head, kv_head;
    int row;   // first query row
    int rows;  // query rows that exist
};

// The block index, hidden from the optimiser: a second decode then really decodes again instead of keeping the first
// one's results in registers through the main loop.
__device__ __forceinline__ u32 block_index() {
    u32 r;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(r));
    return r;
}

// Decodes a one-dimensional block index. With a bounded right side the last query rows see the most keys, so they go
// first: the long tiles start early and the short ones fill the tail.
template <int kBlockQ, bool kBlockMajor, bool kLongestLast>
__device__ __forceinline__ Tile decode_tile(const ForwardArgs& args, u32 index) {
    const u32 blocks = (u32(args.q_len) + kBlockQ - 1) / kBlockQ;
    const u32 pairs = u32(args.batch) * u32(args.heads);
    u32 block = kBlockMajor ? index / pairs : index % blocks;
    const u32 pair = kBlockMajor ? index % pairs : index / blocks;
    if (kLongestLast) block = blocks - 1 - block;
    Tile t;
    t.batch = int(pair / u32(args.heads));
    t.head = int(pair % u32(args.heads));
    t.kv_head = t.head / (args.heads / args.kv_heads);
    t.row = int(block) * kBlockQ;
    t.rows = min_of(kBlockQ, args.q_len - t.row);
    return t;
}

// Keys [first, last] that a query row attends to; first > last when there are none. Queries and keys are aligned at
// their ends (bottom right). 64-bit, because a window may reach as far as an int can say.
struct KeyRange {
    int first, last;
};

template <bool kMaskLeft, bool kMaskRight>
__device__ __forceinline__ KeyRange live_keys(const ForwardArgs& args, int row) {
    const i64 position = i64(row) + args.kv_len - args.q_len;
    KeyRange r = {0, args.kv_len - 1};
    if (kMaskLeft) r.first = int(min_of<i64>(max_of<i64>(position - args.window_left, 0), args.kv_len));
    if (kMaskRight) r.last = int(min_of<i64>(max_of<i64>(position + args.window_right, -1), args.kv_len - 1));
    return r;
}

// The key blocks that a tile visits: [begin, end), of which [full_begin, full_end) are visible to every row and need no
// mask. Everything outside [begin, end) is invisible to every row and is never loaded.
struct BlockRange {
    int begin, full_begin, full_end, end;
};

template <int kBlockKV, bool kMaskLeft, bool kMaskRight>
__device__ __forceinline__ BlockRange visit_blocks(const ForwardArgs& args, const Tile& tile) {
    const KeyRange top = live_keys<kMaskLeft, kMaskRight>(args, tile.row);
    const KeyRange bottom = live_keys<kMaskLeft, kMaskRight>(args, tile.row + tile.rows - 1);
    BlockRange b;
    b.begin = top.first / kBlockKV;
    b.end = (bottom.last + kBlockKV) / kBlockKV;
    b.full_begin = div_up(bottom.first, kBlockKV);
    b.full_end = (top.last + 1) / kBlockKV;
    return b;
}

// Barriers in shared memory that count arrivals and bytes (mbarrier), and the ring of buffers that they guard.

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine. Before the block's own barrier.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that the copy engine will write before the phase can end.
__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of the phase of this parity: the phases of a barrier are numbered from 0.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}
// Whether that phase is over, without waiting.
__device__ __forceinline__ bool mbarrier_test(u32 barrier, u32 parity) {
    u32 over;
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.b32 %0, 1, 0, over;\n"
        "}\n" : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    return over != 0;
}

// Adds to a counter in global memory. Returns what it was.
__device__ __forceinline__ u32 atomic_add(u32* counter, u32 n) {
    u32 r;
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(r) : "l"(counter), "r"(n) : "memory");
    return r;
}

// Position in a ring of kStages buffers: which buffer, and the parity of its barriers in this round.
template <int kStages> struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

// The bulk tensor copy engine (TMA): boxes of tensors to and from shared memory, described by tensor maps that the host
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
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 barrier, u64 cache_hint, int column, int member,
                                         int row, int head, int batch) {
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

// Orders this thread's ordinary writes to shared memory before what the copy engine and the tensor cores read of it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

constexpr u64 kEvictFirst = 0x12f0000000000000;
constexpr u64 kEvictLast = 0x14f0000000000000;

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
// Arrives on the barrier at this address in the block of a rank.
__device__ __forceinline__ void mbarrier_arrive_at(u32 barrier, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(rank));
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
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
// A flag in shared memory that some set while others look.
__device__ __forceinline__ void set_flag(u32 address) {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(1) : "memory");
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
// wgmma<kColumns>::depth(d, a, b):       d += A V, A in shared memory by rows, V by depth.
// wgmma<kColumns>::depth(d, p, b):       d += A V, A in four registers.
template <typename Element, int kColumns> struct wgmma;

template <> struct wgmma<bf16, 80> {
    static __device__ __forceinline__ void rows(float (&d)[40], u64 a, u64 b, bool keep) {
        asm volatile("{.reg .pred keep; setp.ne.b32 keep, %42, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, %40, %41, keep, 1, 1, 0, 0;}"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]) : "l"(a), "l"(b), "r"(int(keep)) : "memory");
    }
    static __device__ __forceinline__ void depth(float (&d)[40], u64 a, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, %40, %41, 1, 1, 1, 0, 1;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]) : "l"(a), "l"(b) : "memory");
    }
    static __device__ __forceinline__ void depth(float (&d)[40], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, {%40, %41, %42, %43}, %44, 1, 1, 1, 1;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b) : "memory");
    }
};

template <> struct wgmma<bf16, 256> {
    static __device__ __forceinline__ void rows(float (&d)[128], u64 a, u64 b, bool keep) {
        asm volatile("{.reg .pred keep; setp.ne.b32 keep, %130, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, keep, 1, 1, 0, 0;}"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127]) : "l"(a), "l"(b), "r"(int(keep)) : "memory");
    }
    static __device__ __forceinline__ void depth(float (&d)[128], u64 a, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, 1, 1, 1, 0, 1;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127]) : "l"(a), "l"(b) : "memory");
    }
    static __device__ __forceinline__ void depth(float (&d)[128], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b) : "memory");
    }
};


// Approximate functions of the special-function unit, and reductions over the lanes that share a row.

__device__ __forceinline__ float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float log2_approx(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// max(x, y); NaN when one of them is.
__device__ __forceinline__ float max_nan(float x, float y) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}

// exp2 of a value up to 100 on the multiply-add units, for when the special-function unit is the busier one: the integer
// part goes into the exponent, a polynomial of degree 4 (exact at 0, least relative error elsewhere, 2.8e-6: sums of
// equal terms must stay within the bound of the log-sum-exp) takes the rest. Below -125 it gives
// 2^-125 and not less, so scores that must vanish cannot use it.
__device__ __forceinline__ float exp2_multiply_add(float x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    x = max_nan(x, -125.0f);
    const float rounded = x + kRound;
    const float f = x - (rounded - kRound);
    float p = fmaf(0.009582853f, f, 0.055906425f);
    p = fmaf(p, f, 0.240240986f);
    p = fmaf(p, f, 0.693124193f);
    p = fmaf(p, f, 1.0f);
    // A product, where adding to the exponent's bits would make a number of a NaN.
    return p * __int_as_float((__float_as_int(rounded) << 23) + 0x3f800000);
}

// Reductions over the four lanes that share a row of an accumulator tile.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Online softmax in base 2 for the two query rows whose scores a thread of a warpgroup holds (FlashAttention-2, section
// 3.1), in two halves: the maximum first, the exponentials after, so that the product that still runs on the old
// reference is waited for in between.
//
// Per row a reference maximum m of the unscaled scores and the sum l of exp2((s - m) * c), c = scale * log2(e).

// What is left of two rows at the end of their keys.
struct RowResults {
    float inverse[2];      // 1 / sum, or 0 for a row that attended to nothing
    float log_sum_exp[2];  // natural, of the scaled scores; -inf for a row that attended to nothing
};

template <int kTiles, bool kLazyRescale, bool kRowByRow, int kMultiplyAddEighths, bool kShift = false> struct RowSoftmax {
    float m[2];       // reference maximum, unscaled; -inf before the first visible score
    float l[2];       // this thread's part of the sum
    float factor[2];  // what the last advance() asks to multiply O with
    float shift[2];   // with kShift, what is to be added to the scores at hand, another number for each thread

    // How far the maximum may grow, in units of log2, before sums are brought to the new reference, where rescaling is lazy.
    static constexpr float kSlack = 8.0f;

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int h = 0; h < 2; h++) m[h] = -FT_INFINITY, l[h] = 0.0f;
    }

    // Moves the references to the maxima of these scores. One row after the other and without a branch: the compiler then
    // takes the maximum of the second row between the exponentials of the first.
    __device__ __forceinline__ void advance(const float (&s)[kTiles * 4], float c) {
        float to[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = kShift ? m[h] - shift[h] : m[h];
            if (kRowByRow) {
                float y = s[2 * h + 1];
                // Minus infinity, which the compiler cannot know: the second row follows the first.
                if (h == 1) x = fmaxf(x, to[0] - FT_INFINITY);
#pragma unroll
                for (int j = 0; j < kTiles; j++) {
                    x = fmaxf(x, s[4 * j + 2 * h]);
                    if (j > 0) y = fmaxf(y, s[4 * j + 2 * h + 1]);
                }
                x = fmaxf(x, y);
            } else {
#pragma unroll
                for (int j = 0; j < kTiles; j++) x = fmaxf(fmaxf(x, s[4 * j + 2 * h]), s[4 * j + 2 * h + 1]);
            }
            to[h] = quad_max(kShift ? x + shift[h] : x);
        }
        // Lazily: all rows of the warp move, or none.
        const bool stay = kLazyRescale && !__any_sync(0xffffffff, (to[0] - m[0]) * c > kSlack || (to[1] - m[1]) * c > kSlack);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (stay) to[h] = m[h];
            factor[h] = to[h] == m[h] ? 1.0f : exp2_approx((m[h] - to[h]) * c);
            m[h] = to[h];
            l[h] *= factor[h];
        }
    }

    // Scores to probabilities relative to m, in place. Where nothing is masked, some eighths of the exponentials may run
    // on the multiply-add units, spread evenly among the others.
    template <bool kUnmasked> __device__ __forceinline__ void exponentiate(float (&s)[kTiles * 4], float c) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // A row that has seen nothing yet: any finite reference gives exp2(-inf) = 0 instead of NaN.
            const float reference = m[h] == -FT_INFINITY ? 0.0f : (kShift ? m[h] - shift[h] : m[h]) * c;
#pragma unroll
            for (int j = 0; j < kTiles; j++) {
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    const float x = fmaf(s[4 * j + e], c, -reference);
                    const bool multiply_add = kUnmasked && (4 * j + e) * kMultiplyAddEighths % 8 < kMultiplyAddEighths;
                    s[4 * j + e] = multiply_add ? exp2_multiply_add(x) : exp2_approx(x);
                    l[h] += s[4 * j + e];
                }
            }
        }
    }

    // What is asked to be rescaled is zero.
    __device__ __forceinline__ void forget() { factor[0] = factor[1] = 1.0f; }

    // Brings O to the moved references. Where that is lazy it is worth to ask first whether any row of the warp has moved.
    template <int kCount> __device__ __forceinline__ void rescale(float (&o)[kCount]) const {
        if (kLazyRescale && !__any_sync(0xffffffff, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < kCount; i++) o[i] *= factor[i / 2 % 2];
    }

    // Completes the sums over the quad.
    __device__ __forceinline__ RowResults finish(float c) {
        RowResults r;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            l[h] = quad_sum(l[h]);
            r.inverse[h] = l[h] == 0.0f ? 0.0f : reciprocal_approx(l[h]);
            r.log_sum_exp[h] = l[h] == 0.0f ? -FT_INFINITY : kLn2 * (m[h] * c + log2_approx(l[h]));
        }
        return r;
    }
};

// Which tile a thread block computes and which key blocks it visits, alone or together with the others of its cluster.

// The argument of the kernel: what every kernel takes, tensor maps, and what the host has computed once for all blocks.
struct Sm90Args {
    TensorMap q, k, v, o;  // q and o: column, head of the group, row, unit, batch; k and v: column, row, kv head, batch
    ForwardArgs forward;
    int group_shift;       // packed: log2 of the query heads of a KV head, which lie beside each other in the tile; or 0
    int unit_heads;        // heads or, packed, KV heads: the units of one batch
    int blocks;            // tiles of one unit, a multiple of the cluster's blocks
    int section;           // units that are walked together, so that their K and V stay in L2
    int tiles;             // of the whole problem
    int queue;             // which counter deals them, or -1
};

// The tile with an index: sections of units one after the other; inside of one, the same blocks of all of its units,
// longest first where the mask makes lengths differ. The blocks of a cluster take neighbouring tiles of a unit. The last
// tile may have no row.
template <int kBlockQ, int kCluster, bool kPackGroup, bool kLongestLast>
__device__ __forceinline__ Tile tile_at(const Sm90Args& args, u32 index) {
    const u32 rank = index % kCluster, teams = u32(args.blocks) / kCluster;
    const u32 units = u32(args.forward.batch) * u32(args.unit_heads), whole = u32(args.section) * teams;
    const u32 first = index / kCluster / whole * u32(args.section), in_section = index / kCluster % whole;
    const u32 together = min_of(u32(args.section), units - first);
    u32 team = in_section / together;
    const u32 unit = first + in_section % together;
    if (kLongestLast) team = teams - 1 - team;
    Tile t;
    t.batch = int(unit / u32(args.unit_heads));
    t.head = int(unit % u32(args.unit_heads));
    t.kv_head = kPackGroup && args.group_shift > 0 ? t.head : t.head / (args.unit_heads / args.forward.kv_heads);
    t.row = int(team * kCluster + rank) * kBlockQ;
    t.rows = max_of(0, min_of(kBlockQ, (args.forward.q_len << args.group_shift) - t.row));
    return t;
}

// The key blocks of a tile, whose rows count query heads of a group apart. Without any, begin and end are equal.
template <int kBlockKV, bool kMaskLeft, bool kMaskRight>
__device__ __forceinline__ BlockRange blocks_of(const Sm90Args& args, const Tile& tile) {
    Tile positions = tile;
    positions.row = tile.row >> args.group_shift;
    positions.rows = ((tile.row + tile.rows - 1) >> args.group_shift) - positions.row + 1;
    BlockRange b = visit_blocks<kBlockKV, kMaskLeft, kMaskRight>(args.forward, positions);
    if (tile.rows == 0 || b.end < b.begin) b.end = b.begin;
    return b;
}

// The key blocks that arrive for all tiles of a cluster: what any of them visits, unmasked where no one masks it.
template <int kBlockQ, int kCluster, int kBlockKV, bool kMaskLeft, bool kMaskRight>
__device__ __forceinline__ BlockRange blocks_of_cluster(const Sm90Args& args, const Tile& tile, const BlockRange& own) {
    BlockRange all = own;
    const int first = tile.row - tile.row / kBlockQ % kCluster * kBlockQ;
#pragma unroll
    for (int i = 0; i < (kCluster > 1 ? kCluster : 0); i++) {
        Tile other = tile;
        other.row = first + i * kBlockQ;
        other.rows = max_of(0, min_of(kBlockQ, (args.forward.q_len << args.group_shift) - other.row));
        const BlockRange b = blocks_of<kBlockKV, kMaskLeft, kMaskRight>(args, other);
        if (b.begin == b.end) continue;
        const bool none = all.begin == all.end;
        all.begin = none ? b.begin : min_of(all.begin, b.begin);
        all.end = none ? b.end : max_of(all.end, b.end);
        all.full_begin = none ? b.full_begin : max_of(all.full_begin, b.full_begin);
        all.full_end = none ? b.full_end : min_of(all.full_end, b.full_end);
    }
    return all;
}

template <bool kMaskLeft> __device__ __forceinline__ bool is_masked(const BlockRange& blocks, int n) {
    return n >= blocks.full_end || (kMaskLeft && n < blocks.full_begin);
}

// The score program of this kernel: what it masks, what it makes of the scores, and which key blocks it leaves out. Its
// statements are generated; they come by what they change with, so that each is computed no more often than it has to be:
// once for a tile (Kept), for a query row and a block of keys (Rows), for a score. Without a program all of this is
// nothing.

// Between which keys the runs of a tile's rows begin, and between which they end: first and last.
struct Between {
    int first, last;
};
struct RunEnds {
    Between begin, end;
};
// Kernels that search for nothing have nothing to remember.
template <bool kKept> struct RunEndsKept {
    RunEnds ends;
    __device__ __forceinline__ void keep(const RunEnds& to) { ends = to; }
    __device__ __forceinline__ RunEnds kept() const { return ends; }
};
template <> struct RunEndsKept<false> {
    __device__ __forceinline__ void keep(const RunEnds&) {}
    __device__ __forceinline__ RunEnds kept() const { return {}; }
};

#define FT_PROGRAM 0
constexpr bool kProgramMask = 0;
constexpr bool kProgramScore = 0;
constexpr bool kProgramSink = 0;
// Whether the score's change is to add what does not depend on it: a multiple of the key and the rest, apart.
constexpr bool kProgramShift = 0;
// Whether the mask leaves each query one run of keys, and whether the ends of runs are searched for.
constexpr bool kProgramRows = 0;
constexpr bool kProgramSearch = 0;

#if FT_PROGRAM

// Whether the score takes a tanh of what changes with score or key.
constexpr bool kScoreTanh = 0;
constexpr bool kTanhOfMultiples = 0;  // of the score
// Whether neither end of a query's run ever comes before that of the query before.
constexpr bool kProgramSorted = 0;

// What the statements of a score program call, on CUDA; the same meaning as lib/cpu/score.h, with the hardware's
// approximations of exp2 and log2.

#define FT_INF __int_as_float(0x7f800000)
#define FT_NAN __int_as_float(0x7fffffff)

// A side tensor and a run-time scalar, as the host passes them. The stride is 0 along an axis of length 1.
struct SideTensor {
    const void* data;
    i64 stride[4];  // in elements
    int length[4];
};

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
__device__ __forceinline__ float ft_tanhf(float x) {
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 2.885390082f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(e + 1.0f));
    return fmaf(-2.0f, r, 1.0f);
}
// Up to this magnitude an odd polynomial of least error, 1.3e-7, costs the special-function unit nothing.
constexpr float kSmallTanh = 0.5f;
constexpr float kTanhSeries[4] = {0.99999768f, -0.33320655f, 0.13145146f, -0.043372484f};
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
    return CapSeries{first * kTanhSeries[0], second * kTanhSeries[1], third * kTanhSeries[2], third * square * kTanhSeries[3]};
}
template <bool kSmall> __device__ __forceinline__ float ft_cap(float x, float cap, float factor, const CapSeries& s) {
    if (!kSmall) return cap * ft_tanhf(factor * x);
    const float square = x * x;
    return x * fmaf(fmaf(fmaf(s.d, square, s.c), square, s.b), square, s.a);
}

// Where the elements of a tensor that does not decrease pass a value: the ends of runs of keys.

// The first of the keys from `bounds.first` on whose element is at least `value` or, for kAfter, greater; `bounds.last` if none
// before it is. Element i is at data[min(i, last) * stride].
template <bool kWarp, bool kAfter, typename T>
__device__ __forceinline__ int ft_find(const T* data, i64 stride, int last, i64 value, const Between& bounds) {
    int from = bounds.first, to = bounds.last;
    const auto passed = [&](int i) {
        const i64 x = data[min_of(i, last) * stride];
        return kAfter ? x <= value : x < value;
    };
    if (kWarp) {
        // The lanes look at 128 places at once, so that two rounds do for 16k keys.
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        while (from < to) {
            const int step = div_up(to - from, 128);
            int count = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = from + (i * 32 + lane) * step;
                count += __popc(__ballot_sync(0xffffffff, at < to && passed(min_of(at, to - 1))));
            }
            // Places are passed up to one, and from there on not.
            to = min_of(to, from + count * step);
            if (count > 0) from += (count - 1) * step + 1;
        }
    } else {
#pragma unroll 1
        while (from < to) {
            const int middle = from + (to - from) / 2;
            if (passed(middle)) from = middle + 1; else to = middle;
        }
    }
    return from;
}


// What the program reads, passed by value behind what every kernel takes.
struct Side {
    SideTensor tensors[1];
    SideScalar scalars[1];
};
template <typename Base> struct WithSide : Base {
    Side side;
};

// Where the scores of a tile are.
struct ProgramHead {
    const Side* side;
    int b, h, h_kv, q_len, kv_len;
};

template <typename Base>
__device__ __forceinline__ ProgramHead program_head(const WithSide<Base>& args, const ForwardArgs& sizes, const Tile& tile) {
    return ProgramHead{&args.side, tile.batch, tile.head, tile.kv_head, sizes.q_len, sizes.kv_len};
}

// In scope of every statement; not every program reads all of them.
#define FT_PROGRAM_HEAD                                                                                          \
    const Side* const side = head.side;                                                                          \
    const int b = head.b, h = head.h, h_kv = head.h_kv, q_len = head.q_len, kv_len = head.kv_len;                \
    (void)side, (void)b, (void)h, (void)h_kv, (void)q_len, (void)kv_len

// Whether no query of a tile attends to any of its keys (-1), every one to all of them (1), or neither is known (0).
// Rows and keys are given by the first and the last.
__device__ __forceinline__ int program_tile(const ProgramHead& head, int q_first, int q_last, int kv_first, int kv_last) {
    FT_PROGRAM_HEAD;
    (void)q_first, (void)q_last, (void)kv_first, (void)kv_last;
    return 0 ? -1 : 0 ? 1 : 0;
}

// The keys that query q attends to, of a mask that leaves runs. Ends that are searched for lie within bounds that are known.
// With kWarp a whole warp searches for the same ones.
template <bool kWarp>
__device__ __forceinline__ KeyRange program_row(const ProgramHead& head, int q, const RunEnds& within) {
    FT_PROGRAM_HEAD;
    (void)q, (void)within;
    i64 begin = 0, end = 0;
    return KeyRange{int(min_of<i64>(max_of<i64>(begin, 0), kv_len)), int(max_of<i64>(min_of<i64>(end, kv_len), 0)) - 1};
}

// The keys that a run of queries can attend to at most.
__device__ __forceinline__ KeyRange program_keys(const ProgramHead& head, int q_first, int q_last) {
    FT_PROGRAM_HEAD;
    (void)q_first, (void)q_last;
    const i64 begin = 0, end = 0;
    return KeyRange{int(min_of<i64>(max_of<i64>(begin, 0), kv_len)), int(max_of<i64>(min_of<i64>(end, kv_len), 0)) - 1};
}

// What is computed once for a tile.
struct MaskKept {
};
struct ScoreKept {
};
struct ProgramKept {
    MaskKept mask;
    ScoreKept score;
};

__device__ __forceinline__ MaskKept mask_kept(const ProgramHead& head) {
    FT_PROGRAM_HEAD;
    return MaskKept{};
}
__device__ __forceinline__ ScoreKept score_kept(const ProgramHead& head) {
    FT_PROGRAM_HEAD;
    return ScoreKept{};
}
__device__ __forceinline__ ProgramKept program_kept(const ProgramHead& head) {
    return ProgramKept{mask_kept(head), score_kept(head)};
}

// What is computed once for a query row and keys at constant distances from a first one.
struct MaskRow {
};
struct ScoreRow {
};

__device__ __forceinline__ MaskRow mask_row(const ProgramHead& head, const MaskKept& kept, int q, int kv_first) {
    FT_PROGRAM_HEAD;
    (void)kept, (void)q, (void)kv_first;
    return MaskRow{};
}
// `scale` takes scores to natural units.
__device__ __forceinline__ ScoreRow score_row(const ProgramHead& head, const ScoreKept& kept, int q, int kv_first, float scale) {
    FT_PROGRAM_HEAD;
    (void)kept, (void)q, (void)kv_first, (void)scale;
    return ScoreRow{};
}

// Whether query q attends to the key kv_first + offset.
__device__ __forceinline__ bool mask_element(const ProgramHead& head, const MaskKept& kept, const MaskRow& row, int q,
                                             int kv_first, int offset) {
    FT_PROGRAM_HEAD;
    const int kv = kv_first + offset;
    (void)kept, (void)row, (void)q, (void)kv;
    return true;
}
// What becomes of the score raw * scale. With kSmall no tanh is taken of more than kSmallTanh.
template <bool kSmall = false>
__device__ __forceinline__ float score_element(const ProgramHead& head, const ScoreKept& kept, const ScoreRow& row, int q,
                                               int kv_first, int offset, float raw, float scale) {
    FT_PROGRAM_HEAD;
    const int kv = kv_first + offset;
    const float score = raw * scale;
    const auto ft_tanhf = [](float x) { return kSmall ? ft_small_tanhf(x) : ::ft_tanhf(x); };
    const auto ft_capf = [](float x, float cap, float factor, const CapSeries& s) { return ft_cap<kSmall>(x, cap, factor, s); };
    (void)kept, (void)row, (void)q, (void)kv, (void)score, (void)ft_tanhf, (void)ft_capf;
    return score;
}
// The largest magnitude that it takes a tanh of.
__device__ __forceinline__ float score_tanh_largest(const ProgramHead& head, const ScoreKept& kept, const ScoreRow& row, int q,
                                                    int kv_first, int offset, float raw, float scale) {
    FT_PROGRAM_HEAD;
    const int kv = kv_first + offset;
    const float score = raw * scale;
    const auto ft_capf = ft_cap<false>;
    (void)kept, (void)row, (void)q, (void)kv, (void)score, (void)ft_capf;
    return 0.0f;
}
// What is added to the scores of a row: factor * offset + base.
struct ScoreShift {
    float factor, base;
};
__device__ __forceinline__ ScoreShift score_shift(const ScoreRow& row) {
    (void)row;
    return ScoreShift{0.0f, 0.0f};
}

// The logit of the key without a value.
__device__ __forceinline__ float program_sink(const ProgramHead& head, int q) {
    FT_PROGRAM_HEAD;
    (void)q;
    return 0.0f;
}

// One query and one key, on its own: for the slow paths.
__device__ __forceinline__ bool program_visible(const ProgramHead& head, int q, int kv) {
    if (!kProgramMask) return true;
    const MaskKept kept = mask_kept(head);
    return mask_element(head, kept, mask_row(head, kept, q, kv), q, kv, 0);
}

// The key blocks of a tile, as a program's mask leaves them: those before the first and after the last that any query
// attends to are left out, and those in which every one attends to every key need no mask. For whole warps.

// Between which keys the rows' runs begin and end.
__device__ __forceinline__ RunEnds run_ends(const ProgramHead& head, int q_first, int q_last) {
    const RunEnds anywhere = {{0, head.kv_len}, {0, head.kv_len}};
    if (kProgramSorted) {
        const KeyRange top = program_row<true>(head, q_first, anywhere);
        // Neither end of the last row comes before that of the first.
        const KeyRange bottom = program_row<true>(head, q_last, {{top.first, head.kv_len}, {top.last + 1, head.kv_len}});
        return {{top.first, bottom.first}, {top.last + 1, bottom.last + 1}};
    }
    RunEnds ends = {{head.kv_len, 0}, {head.kv_len, 0}};
#pragma unroll 1
    for (int base = q_first; base <= q_last; base += 32) {
        const KeyRange row = program_row<false>(head, min_of(base + int(threadIdx.x) % 32, q_last), anywhere);
        ends.begin = {min_of(ends.begin.first, row.first), max_of(ends.begin.last, row.first)};
        ends.end = {min_of(ends.end.first, row.last + 1), max_of(ends.end.last, row.last + 1)};
    }
    const auto over_lanes = [](Between& x) {
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) {
            x.first = min_of(x.first, __shfl_xor_sync(0xffffffff, x.first, apart));
            x.last = max_of(x.last, __shfl_xor_sync(0xffffffff, x.last, apart));
        }
    };
    over_lanes(ends.begin);
    over_lanes(ends.end);
    return ends;
}

// The blocks of a mask that leaves runs of keys: exactly those that any run meets, if the runs leave no gap.
template <int kBlockKV> __device__ __forceinline__ BlockRange run_blocks(const RunEnds& ends, BlockRange b) {
    b.begin = max_of(b.begin, ends.begin.first / kBlockKV);
    b.end = min_of(b.end, div_up(ends.end.last, kBlockKV));
    b.full_begin = max_of(b.full_begin, div_up(ends.begin.last, kBlockKV));
    b.full_end = min_of(b.full_end, ends.end.first / kBlockKV);
    if (b.begin >= b.end) return BlockRange{b.begin, b.begin, b.begin, b.begin};
    if (b.full_begin >= b.full_end) b.full_begin = b.full_end = b.begin;
    return b;
}

// Of any other mask: the longest run of whole blocks goes without a mask. The lanes look at a block each.
template <int kBlockKV>
__device__ __forceinline__ BlockRange mixed_blocks(const ProgramHead& head, int q_first, int q_last, BlockRange b) {
    const int lane = threadIdx.x % 32;
    const KeyRange keys = program_keys(head, q_first, q_last);
    b.begin = max_of(b.begin, keys.first / kBlockKV);
    b.end = min_of(b.end, (keys.last + kBlockKV) / kBlockKV);
    int begin = b.end, end = b.end, run_begin = 0, run_end = -1, full_begin = 0, full_end = 0;
#pragma unroll 1
    for (int base = b.begin; base < b.end; base += 32) {
        const int n = base + lane;
        int kind = -1;
        if (n < b.end) {
            kind = program_tile(head, q_first, q_last, n * kBlockKV, min_of(n * kBlockKV + kBlockKV, head.kv_len) - 1);
        }
        const u32 live = __ballot_sync(0xffffffff, kind >= 0);
        u32 whole = __ballot_sync(0xffffffff, kind > 0 && n >= b.full_begin && n < b.full_end);
        if (live != 0) {
            begin = min_of(begin, base + __ffs(int(live)) - 1);
            end = base + 32 - __clz(int(live));
        }
        while (whole != 0) {
            const int from = __ffs(int(whole)) - 1;
            const u32 others = ~(whole >> from);
            const int length = others == 0 ? 32 : __ffs(int(others)) - 1;
            if (base + from != run_end) run_begin = base + from;
            run_end = base + from + length;
            if (run_end - run_begin > full_end - full_begin) full_begin = run_begin, full_end = run_end;
            whole = from + length == 32 ? 0 : whole & (0xffffffff << (from + length));
        }
    }
    if (begin == b.end) return BlockRange{begin, begin, begin, begin};
    if (full_begin == full_end) full_begin = full_end = begin;
    return BlockRange{begin, full_begin, full_end, end};
}

// `ends` is for those who ask for single rows later.
template <int kBlockKV>
__device__ __forceinline__ BlockRange program_blocks(const ProgramHead& head, int q_first, int q_last, const BlockRange& b,
                                                     RunEnds* ends = nullptr) {
    if (!kProgramRows) return mixed_blocks<kBlockKV>(head, q_first, q_last, b);
    const RunEnds found = run_ends(head, q_first, q_last);
    if (ends != nullptr) *ends = found;
    return run_blocks<kBlockKV>(found, b);
}


// Applies the program to an accumulator of tiles of 8 columns (mma.cuh, wgmma.cuh): at(j, 2 * i + e) is the score of row
// `q + 8 * i` with key `kv_first + 8 * j + e`. Rows and keys beyond the last repeat it: no index leaves a tensor, and
// nobody reads what comes out. `scale` takes scores to natural units. Without kMask the mask is left to the caller.
template <bool kMasked, int kTiles, bool kMask = true, typename At>
__device__ __forceinline__ void program_scores(const At& at, const ProgramHead& head, const ProgramKept& kept, int q,
                                               int kv_first, float scale) {
    constexpr bool kElementMask = kMasked && kProgramMask && kMask;
    if (!kProgramScore && !kElementMask) return;
    const int rows[2] = {min_of(q, head.q_len - 1), min_of(q + 8, head.q_len - 1)}, last = head.kv_len - 1 - kv_first;
    const MaskRow masks[2] = {mask_row(head, kept.mask, rows[0], kv_first), mask_row(head, kept.mask, rows[1], kv_first)};
    const ScoreRow scores[2] = {score_row(head, kept.score, rows[0], kv_first, scale),
                                score_row(head, kept.score, rows[1], kv_first, scale)};
    // each(score, row, offset) for all of them.
    const auto over_all = [&](const auto& each) {
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int offset = kMasked ? min_of(8 * j + e, last) : 8 * j + e;
#pragma unroll
                for (int i = 0; i < 2; i++) each(at(j, 2 * i + e), i, offset);
            }
        }
    };
    const auto change = [&](auto small) {
        over_all([&](float& s, int i, int offset) {
            if (kProgramScore) {
                s = score_element<decltype(small)::value>(head, kept.score, scores[i], rows[i], kv_first, offset, s, scale);
            }
            if (kElementMask) s = mask_element(head, kept.mask, masks[i], rows[i], kv_first, offset) ? s : -FT_INFINITY;
        });
    };
    if constexpr (kScoreTanh) {
        // The whole warp takes the short way, or none of it.
        float largest = 0.0f, of_row[2] = {0.0f, 0.0f};
        const auto of = [&](float raw, int i, int offset) {
            return score_tanh_largest(head, kept.score, scores[i], rows[i], kv_first, offset, raw, scale);
        };
        over_all([&](float& s, int i, int offset) {
            of_row[i] = fmaxf(of_row[i], kTanhOfMultiples ? fabsf(s) : of(s, i, offset));
        });
#pragma unroll
        for (int i = 0; i < 2; i++) largest = fmaxf(largest, kTanhOfMultiples ? of(of_row[i], i, 0) : of_row[i]);
        // No power of a score is beyond a float's range in the polynomial.
        if (kTanhOfMultiples && max_of(of_row[0], of_row[1]) > 1e12f) largest = FT_INFINITY;
        if (__any_sync(0xffffffff, largest > kSmallTanh)) {
            change(Bool<false>{});
        } else {
            change(Bool<true>{});
        }
    } else {
        change(Bool<false>{});
    }
}

// The same for a program that adds to the score what does not depend on it, in units of the raw score: what is the same for
// all keys of the block goes to `shift`, a number for each of the two rows.
template <bool kMasked, int kTiles, bool kMask = true, typename At>
__device__ __forceinline__ void program_shifted(const At& at, const ProgramHead& head, const ProgramKept& kept, int q,
                                                int kv_first, float scale, float (&shift)[2]) {
    constexpr bool kElementMask = kMasked && kProgramMask && kMask;
    const float inverse = reciprocal_approx(scale);
    const int last = head.kv_len - 1 - kv_first;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = min_of(q + 8 * i, head.q_len - 1);
        const ScoreShift add = score_shift(score_row(head, kept.score, row, kv_first, scale));
        const MaskRow mask = mask_row(head, kept.mask, row, kv_first);
        const float factor = add.factor * inverse;
        shift[i] = add.base * inverse;
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& s = at(j, 2 * i + e);
                s = fmaf(factor, float(8 * j + e), s);
                const int offset = kMasked ? min_of(8 * j + e, last) : 8 * j + e;
                if (kElementMask) s = mask_element(head, kept.mask, mask, row, kv_first, offset) ? s : -FT_INFINITY;
            }
        }
    }
}

#else

template <typename Base> using WithSide = Base;
struct ProgramHead {};
struct ProgramKept {};
template <typename Base>
__device__ __forceinline__ ProgramHead program_head(const Base&, const ForwardArgs&, const Tile&) { return {}; }
__device__ __forceinline__ ProgramKept program_kept(const ProgramHead&) { return {}; }
__device__ __forceinline__ bool program_visible(const ProgramHead&, int, int) { return true; }
__device__ __forceinline__ float program_sink(const ProgramHead&, int) { return 0.0f; }
__device__ __forceinline__ int program_tile(const ProgramHead&, int, int, int, int) { return 1; }
template <bool kWarp>
__device__ __forceinline__ KeyRange program_row(const ProgramHead&, int, const RunEnds&) { return {}; }
template <int kBlockKV>
__device__ __forceinline__ BlockRange program_blocks(const ProgramHead&, int, int, BlockRange b, RunEnds* = nullptr) { return b; }
template <bool kMasked, int kTiles, bool kMask = true, typename At>
__device__ __forceinline__ void program_scores(const At&, const ProgramHead&, const ProgramKept&, int, int, float) {}
template <bool kMasked, int kTiles, bool kMask = true, typename At>
__device__ __forceinline__ void program_shifted(const At&, const ProgramHead&, const ProgramKept&, int, int, float, float (&)[2]) {}

#endif

// Attention sinks: a logit for each row that takes its part of the softmax without a value.

// What O must be multiplied by, and the log-sum-exp.
struct WithSink {
    float inverse, lse;
};

// From a row's sum l of exp2(s - m), its reference m in units of log2, and the sink's logit in natural units.
__device__ __forceinline__ WithSink with_sink(float l, float m, float sink) {
    if (l == 0.0f) m = -FT_INFINITY;
    sink *= kLog2E;
    const float top = fmaxf(m, sink);
    if (top == -FT_INFINITY) return WithSink{0.0f, -FT_INFINITY};
    const float less = exp2_approx(m - top), sum = fmaf(l, less, exp2_approx(sink - top));
    return WithSink{less * reciprocal_approx(sum), kLn2 * (top + log2_approx(sum))};
}

// Zero times NaN is NaN: a NaN or infinity in a row of V would reach the rows that do not attend to it through their zero
// probabilities. Such elements are taken out of masked blocks before the product, and what they would have given is added
// to the rows that do attend to them.

// x * 0 + sum of packed pairs: what is no zero afterwards has met a NaN or an infinity.
template <typename Element> __device__ __forceinline__ u32 add_zero_times(u32 sum, u32 x);
template <> __device__ __forceinline__ u32 add_zero_times<f16>(u32 sum, u32 x) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0), "r"(sum));
    return r;
}
template <> __device__ __forceinline__ u32 add_zero_times<bf16>(u32 sum, u32 x) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0), "r"(sum));
    return r;
}

// Whether a part of a tile in shared memory, every kThreads-th 16 bytes from `from` on, holds a non-finite element. The
// product with a masked block waits for this: one instruction for two elements.
template <typename Element, int kBytes, int kThreads> __device__ __forceinline__ bool any_non_finite(u32 from) {
    static_assert(kBytes % (kThreads * 16) == 0, "whole rounds");
    u32 sums[4] = {};
#pragma unroll 8
    for (int i = 0; i < kBytes / (kThreads * 16); i++) {
        const uint4 x = load_shared_16(from + i * kThreads * 16);
        sums[0] = add_zero_times<Element>(sums[0], x.x), sums[1] = add_zero_times<Element>(sums[1], x.y);
        sums[2] = add_zero_times<Element>(sums[2], x.z), sums[3] = add_zero_times<Element>(sums[3], x.w);
    }
    return (sums[0] | sums[1] | sums[2] | sums[3]) != 0;
}

// Replaces the non-finite elements of a tile in shared memory by zeros, kThreads threads together. Returns whether this
// one met any.
template <typename Element, int kBytes, int kThreads>
__device__ __forceinline__ bool take_out_non_finite(u32 tile, u32 thread) {
    if (!any_non_finite<Element, kBytes, kThreads>(tile + thread * 16)) return false;
    constexpr u32 kLow = kExponentMask<Element>, kHigh = kLow << 16;
#pragma unroll 1
    for (u32 at = tile + thread * 16; at < tile + kBytes; at += kThreads * 16) {
        uint4 x = load_shared_16(at);
        u32* words = &x.x;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            if ((words[w] & kLow) == kLow) words[w] &= 0xffff0000;
            if ((words[w] & kHigh) == kHigh) words[w] &= 0x0000ffff;
        }
        store_shared_16(at, x);
    }
    return true;
}

// The sum of the non-finite elements of a column of V over the keys that a query attends to by the window and by
// visible(key), without those in blocks
// that are visible to every row: those were left in.
template <int kBlockKV, bool kMaskLeft, bool kMaskRight, typename Element, typename Visible>
__device__ __forceinline__ float sum_of_non_finite(const ForwardArgs& args, const Element* column, int row,
                                                   const BlockRange& blocks, const Visible& visible) {
    const KeyRange live = live_keys<kMaskLeft, kMaskRight>(args, row);
    float sum = 0.0f;
#pragma unroll 1
    for (int j = live.first; j <= live.last; j++) {
        const int block = j / kBlockKV;
        if (block >= blocks.full_begin && block < blocks.full_end) {
            j = blocks.full_end * kBlockKV - 1;
            continue;
        }
        const float x = to_float(column[j * args.v_stride[2]]);
        if (!(fabsf(x) < FT_INFINITY) && visible(j)) sum += x;
    }
    return sum;
}


using KernelArgs = WithSide<Sm90Args>;

constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kBlockQ = kConsumers * 64;
constexpr int kChunksQK = div_up(kHeadDimQK, 64);  // 64-element columns of a row: one box of the copy engine each
constexpr int kChunksV = div_up(kHeadDimV, 64);
constexpr int kColumnsV = round_up(kHeadDimV, 16);
constexpr int kStepsQK = div_up(kHeadDimQK, 16);   // matrix steps of Q K^T
constexpr int kStepsPV = kBlockKV / 16;            // matrix steps of P V
constexpr int kBytes64Rows = 64 * 128;             // one chunk of 64 rows
constexpr int kBytesChunk = kBlockKV * 128;        // one chunk of kBlockKV rows
// Padded rows of V are zeros, so only blocks cut by the mask can hold elements that must not be multiplied.
constexpr bool kClean = kMaskLeft || kMaskRight || kProgramMask;
// Whether blocks before those in sight of every row may need a mask.
constexpr bool kMaskedFirst = kMaskLeft || kProgramMask;
// Whole warps find the blocks that a program's mask leaves; otherwise one thread of a warp is enough. All else is done by
// one thread in any case: others could come to a barrier when the phase that they wait for is long over.
constexpr bool kWholeWarps = kProgramMask;

// Three choices that head dims decide, by timings (docs/hopper-forward.md). With overlap, the factors of O are applied among
// the exponentials or, where O is wide, beside the next scores, for which the warpgroup waits anyway.
constexpr bool kRescaleBeside = kColumnsV > 192;
// The maximum of one row is taken before that of the other, so that its exponentials start early.
constexpr bool kRowByRow = kColumnsV > 64;
// Whether the next K and V have arrived is asked while there is other work.
constexpr bool kLookAhead = kColumnsV <= 192;

using Scores = float[kBlockKV / 2];
using Output = float[kColumnsV / 2];
using Probabilities = u32[kPInShared ? 1 : kBlockKV / 4];
using ScoreProduct = wgmma<Element, kBlockKV>;
using OutputProduct = wgmma<Element, kColumnsV>;

// Shared memory, by byte offset. A consumer's O takes the place of its Q.
struct Layout {
    static constexpr int kQBuffers = kChain ? 2 : 1;
    static constexpr int kQ = 0;
    static constexpr int kBytesQ = max_of(kChunksQK, kChunksV) * kBytes64Rows;  // of one consumer, one buffer
    static constexpr int kK = kQ + kQBuffers * kConsumers * kBytesQ;
    static constexpr int kBytesK = kChunksQK * kBytesChunk;                     // of one stage
    static constexpr int kV = kK + kStages * kBytesK;
    static constexpr int kBytesV = kChunksV * kBytesChunk;
    static constexpr int kP = kV + kStages * kBytesV;
    static constexpr int kBytesP = kPInShared ? div_up(kBlockKV, 64) * kBytes64Rows : 0;  // of one consumer
    static constexpr int kWork = kP + kConsumers * kBytesP;  // two slots: what comes next
    static constexpr int kBytesWork = kProgramSearch ? 80 : 64;
    static constexpr int kBarriers = kWork + (kPersistent ? 2 * kBytesWork : 0);
    static constexpr int kFullWork = kBarriers;              // per slot: it says what comes next
    static constexpr int kEmptyWork = kFullWork + 2 * 8;     // per slot: everyone has read it
    static constexpr int kFullQ = kEmptyWork + 2 * 8;        // per buffer and consumer: its Q has arrived
    static constexpr int kEmptyQ = kFullQ + kQBuffers * kConsumers * 8;  // per buffer and consumer: the space is free
    static constexpr int kFullK = kEmptyQ + kQBuffers * kConsumers * 8;  // per stage, as all that follow
    static constexpr int kEmptyK = kFullK + kStages * 8;
    static constexpr int kFullV = kEmptyK + kStages * 8;
    static constexpr int kEmptyV = kFullV + kStages * 8;
    static constexpr int kRawV = kEmptyV + kStages * 8;      // a masked block has arrived, and must be cleaned to be full
    static constexpr int kMetNonFinite = kRawV + kStages * 8;
    static constexpr int kBytes = kMetNonFinite + 8;
};

// What a thread block does, tile after tile. One thread deals: every gridDim.x-th tile or, from the queue that all thread
// blocks share, the next one that nobody has. It tells the others through two slots of shared memory.

struct alignas(16) Work : RunEndsKept<kProgramSearch> {
    Tile tile;
    BlockRange own;  // the key blocks that its rows visit
    BlockRange all;  // those that arrive for its cluster
    int live;        // whether there is a tile at all
    int unused[2];
};

// Tiles that were taken so far, beside the first one of each thread block: one counter for every stream that launches at
// the same time as others. The host says which; a launch without one takes tiles by stride.
constexpr int kQueues = 256;
__device__ u32 tile_queues[kQueue ? kQueues : 1];

__device__ __forceinline__ Work work_at(const KernelArgs& args, u32 index) {
    Work w;
    w.tile = tile_at<kBlockQ, kCluster, kPackGroup, kMaskRight || kProgramMask>(args, min_of(index, u32(args.tiles) - 1));
    w.own = blocks_of<kBlockKV, kMaskLeft, kMaskRight>(args, w.tile);
    if (kProgramMask && w.tile.rows > 0) {
        const ProgramHead head = program_head(args, args.forward, w.tile);
        RunEnds ends;
        w.own = program_blocks<kBlockKV>(head, w.tile.row, w.tile.row + w.tile.rows - 1, w.own, &ends);
        w.keep(ends);
    }
    w.all = blocks_of_cluster<kBlockQ, kCluster, kBlockKV, kMaskLeft, kMaskRight>(args, w.tile, w.own);
    w.live = index < u32(args.tiles);
    return w;
}
// Every thread block has one.
__device__ __forceinline__ Work first_work(const KernelArgs& args) { return work_at(args, blockIdx.x); }

// One of the two slots.
__device__ __forceinline__ u32 slot_of(u32 smem, int stage) { return smem + Layout::kWork + stage * Layout::kBytesWork; }
__device__ __forceinline__ Work read_slot(u32 slot) {
    Work work;
    uint4* words = (uint4*)&work;
#pragma unroll
    for (int i = 0; i < Layout::kBytesWork / 16; i++) words[i] = load_shared_16(slot + i * 16);
    return work;
}

// The thread that deals. It has few registers.
struct Dealer {
    const u32 smem;
    u32 count = 0;  // tiles so far, beside the first
    __device__ __forceinline__ explicit Dealer(u32 smem) : smem(smem) {}

    // Decides what comes next and tells the others.
    __device__ __forceinline__ void deal(const KernelArgs& args) {
        if (!kPersistent) return;
        const u32 slot = count % 2;
        if (!kWholeWarps || threadIdx.x % 32 == 0) {
            mbarrier_wait(smem + Layout::kEmptyWork + slot * 8, ~(count >> 1) & 1);
        }
        u32 index = blockIdx.x + (count + 1) * gridDim.x;
        if (kQueue && args.queue >= 0) {
            u32* queue = tile_queues + args.queue;
            if (!kWholeWarps || threadIdx.x % 32 == 0) {
                const u32 taken = atomic_add(queue, 1);
                index = gridDim.x + taken;
                // Every thread block draws once in vain. Who draws last leaves the queue as it was found.
                if (taken + 1 == u32(args.tiles)) *queue = 0;
            }
            if (kWholeWarps) index = __shfl_sync(0xffffffff, index, 0);
        }
        const Work work = work_at(args, index);
        if (!kWholeWarps || threadIdx.x % 32 == 0) {
            const uint4* words = (const uint4*)&work;
#pragma unroll
            for (int i = 0; i < Layout::kBytesWork / 16; i++) store_shared_16(slot_of(smem, slot) + i * 16, words[i]);
            mbarrier_arrive(smem + Layout::kFullWork + slot * 8);
        }
        if (kWholeWarps) __syncwarp();  // all lanes of the dealer read the slot again
        count++;
    }
    // What was dealt last, which is still in its slot: the producer has no registers to keep it in.
    __device__ __forceinline__ Work dealt() const {
        if (!kPersistent) return Work{};
        return read_slot(slot_of(smem, (count - 1) % 2));
    }
};

// Those who are dealt to: warps, or single threads.
struct Hand {
    const u32 smem;
    Ring<2> ring;
    __device__ __forceinline__ explicit Hand(u32 smem) : smem(smem) {}

    template <bool kWarp> __device__ __forceinline__ Work next() {
        if (!kPersistent) return Work{};
        mbarrier_wait(smem + Layout::kFullWork + ring.stage * 8, ring.parity);
        const Work work = read_slot(slot_of(smem, ring.stage));
        if (kWarp) __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(smem + Layout::kEmptyWork + ring.stage * 8);
        ring.advance();
        return work;
    }
};
static_assert(sizeof(Work) == Layout::kBytesWork, "a slot");


// The producer: who brings Q, K and V, and who keeps what must not be multiplied out of V.

// Block n of K or V. The blocks of a cluster bring an equal part of its rows each, to all of them.
template <int kChunks>
__device__ __forceinline__ void bring_keys(u32 to, const TensorMap& map, u32 full, int n, const Tile& tile) {
    constexpr int kRows = kBlockKV / kCluster;
    const int first = kCluster > 1 ? int(cluster_rank()) * kRows : 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
        const u32 at = to + chunk * kBytesChunk + first * 128;
        if constexpr (kCluster > 1) {
            tma_load_to_all(at, map, full, (1 << kCluster) - 1, kEvictLast, chunk * 64, n * kBlockKV + first, tile.kv_head,
                            tile.batch);
        } else {
            tma_load(at, map, full, kEvictLast, chunk * 64, n * kBlockKV, tile.kv_head, tile.batch);
        }
    }
}

// One thread brings Q and K, and decides what comes next.
__device__ __forceinline__ void produce_qk(const KernelArgs& args, u32 smem) {
    const bool leads = !kWholeWarps || threadIdx.x % 32 == 0;
    tma_prefetch_map(args.q);
    tma_prefetch_map(args.k);
    Ring<kStages> ring;
    Ring<Layout::kQBuffers> q_ring;
    Dealer dealer(smem);
    Work work = first_work(args);
    do {
        const Tile& tile = work.tile;
        const BlockRange& blocks = work.all;
        // After the first block of K, whose space is free before that of Q.
        const auto bring_q = [&] {
#pragma unroll 1
            for (int c = 0; c < kConsumers; c++) {
                const int at = q_ring.stage * kConsumers + c;
                const u32 full = smem + Layout::kFullQ + at * 8, to = smem + Layout::kQ + at * Layout::kBytesQ;
                if (!leads) continue;
                if (kPersistent) mbarrier_wait(smem + Layout::kEmptyQ + at * 8, q_ring.parity ^ 1);
                mbarrier_arrive_expect(full, kChunksQK * kBytes64Rows);
#pragma unroll
                for (int chunk = 0; chunk < kChunksQK; chunk++) {
                    tma_load(to + chunk * kBytes64Rows, args.q, full, kEvictFirst, chunk * 64, 0,
                             (tile.row + c * 64) >> args.group_shift, tile.head, tile.batch);
                }
            }
            q_ring.advance();
        };
        // As late as the others can be told in time: whoever is ahead by then takes more. To find the blocks that a program
        // leaves takes the time of a block or two.
        const int dealt_at = kProgramMask ? min_of(blocks.end - 1, blocks.begin + 2) : blocks.begin;
        // At least once, for tiles that visit no block.
        int n = blocks.end - 1;
#pragma unroll 1
        do {
            if (kProgramMask ? n == dealt_at : n <= dealt_at) dealer.deal(args);
            if (n >= blocks.begin) {
                if (leads) {
                    const u32 full = smem + Layout::kFullK + ring.stage * 8;
                    mbarrier_wait(smem + Layout::kEmptyK + ring.stage * 8, ring.parity ^ 1);
                    mbarrier_arrive_expect(full, Layout::kBytesK);
                    bring_keys<kChunksQK>(smem + Layout::kK + ring.stage * Layout::kBytesK, args.k, full, n, tile);
                }
                ring.advance();
            }
            if (n >= blocks.end - 1) bring_q();
        } while (--n >= blocks.begin);
        work = dealer.dealt();
    } while (work.live);
}

// Another one brings V, so that a wait for one never holds up the other.
__device__ __forceinline__ void produce_v(const KernelArgs& args, u32 smem) {
    const bool leads = !kWholeWarps || threadIdx.x % 32 == 0;
    tma_prefetch_map(args.v);
    Ring<kStages> ring;
    Hand hand(smem);
    for (Work work = first_work(args); work.live; work = hand.next<kWholeWarps>()) {
        const BlockRange& blocks = work.all;
#pragma unroll 1
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            const bool raw = kClean && is_masked<kMaskedFirst>(blocks, n);
            const u32 full = smem + (raw ? Layout::kRawV : Layout::kFullV) + ring.stage * 8;
            if (leads) {
                mbarrier_wait(smem + Layout::kEmptyV + ring.stage * 8, ring.parity ^ 1);
                mbarrier_arrive_expect(full, Layout::kBytesV);
                if (kClean && !raw) mbarrier_arrive(full);  // for the second of the warps that clean
                bring_keys<kChunksV>(smem + Layout::kV + ring.stage * Layout::kBytesV, args.v, full, n, work.tile);
            }
            ring.advance();
        }
    }
}

// Two warps that have nothing else to do take non-finite elements out of masked blocks of V before anyone multiplies with
// them (see non_finite.cuh). Masked blocks arrive on a barrier of their own, so these warps see each phase of it, and
// nothing of the blocks that they leave alone.
__device__ __forceinline__ void clean_v(const KernelArgs& args, u32 smem) {
    const u32 lane = threadIdx.x % 64;
    Ring<kStages> ring;
    Hand hand(smem);
    u32 raw_parity = 0;  // one bit per stage
    for (Work work = first_work(args); work.live; work = hand.next<true>()) {
        const BlockRange& blocks = work.all;
#pragma unroll 1
        for (int n = blocks.end - 1; n >= blocks.begin; n--) {
            if (is_masked<kMaskedFirst>(blocks, n)) {
                mbarrier_wait(smem + Layout::kRawV + ring.stage * 8, (raw_parity >> ring.stage) & 1);
                raw_parity ^= 1u << ring.stage;
                const u32 v = smem + Layout::kV + ring.stage * Layout::kBytesV;
                if (take_out_non_finite<Element, Layout::kBytesV, 64>(v, lane)) {
                    set_flag(smem + Layout::kMetNonFinite);
                    fence_async_proxy();
                }
                __syncwarp();
                if (lane % 32 == 0) mbarrier_arrive(smem + Layout::kFullV + ring.stage * 8);
            }
            ring.advance();
        }
    }
}

// The consumer: one warpgroup, from scores to outputs.

// One warpgroup of 64 query rows.
struct Consumer {
    const KernelArgs& args;
    const u32 smem;
    const int id;             // of the warpgroup, 0 to kConsumers - 1
    Hand hand;
    Ring<kStages> k_ring, v_ring;
    bool k_seen = false, v_seen = false;  // whether the next K and V are known to have arrived
    Ring<Layout::kQBuffers> q_ring;  // of the Q that is opened next
    int q_at;                        // which Q is at hand
    int leaving = -1;                // which O is being copied out of the space of its Q
    Scores s;
    Output o;
    Probabilities p;
    RowSoftmax<kBlockKV / 8, kLazyRescale, kRowByRow, kExp2Eighths, kProgramShift> softmax;
    ProgramKept kept;  // of the tile whose scores are computed, as are the runs of keys that a program leaves its rows
    KeyRange runs[2];

    __device__ __forceinline__ u32 q_address() const { return smem + Layout::kQ + q_at * Layout::kBytesQ; }
    __device__ __forceinline__ u32 p_address() const { return smem + Layout::kP + id * Layout::kBytesP; }
    __device__ __forceinline__ Consumer(const KernelArgs& args, u32 smem, int id) : args(args), smem(smem), id(id), hand(smem) {}
    static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / 32; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    // A barrier of this warpgroup alone.
    __device__ __forceinline__ void sync() const { barrier_sync(1 + kConsumers + id, 128); }

    // Consumers take turns in issuing matrix work, so that the softmax of one runs beside the products of another
    // (FlashAttention-3, section 3.1). Barrier 1 + i is consumer i's turn.
    __device__ __forceinline__ void wait_turn() const {
        if (kTakeTurns) barrier_sync(1 + id, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (kTakeTurns) barrier_arrive(1 + (id + 1 == kConsumers ? 0 : id + 1), 256);
    }

    // s = Q K^T of the next block of keys, asynchronously.
    __device__ __forceinline__ void issue_qk() {
        const u64 q = descriptor_of_rows(q_address());
        const u64 k = descriptor_of_rows(smem + Layout::kK + k_ring.stage * Layout::kBytesK);
        wgmma_touch(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsQK; step++) {
            const int chunk = step / 4, in_chunk = step % 4 * 32;
            ScoreProduct::rows(s, q + ((chunk * kBytes64Rows + in_chunk) >> 4), k + ((chunk * kBytesChunk + in_chunk) >> 4),
                               step > 0);
        }
        wgmma_commit();
    }

    // o += P V of the block at v_ring, asynchronously.
    __device__ __forceinline__ void issue_pv() {
        const u64 v = descriptor_of_depth(smem + Layout::kV + v_ring.stage * Layout::kBytesV, kBytesChunk);
        const u64 p_rows = descriptor_of_rows(p_address());
        wgmma_touch(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsPV; step++) {
            const u64 v_step = v + (step * 16 * 128 >> 4);
            if constexpr (kPInShared) {
                OutputProduct::depth(o, p_rows + ((step / 4 * kBytes64Rows + step % 4 * 32) >> 4), v_step);
            } else {
                OutputProduct::depth(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], v_step);
            }
        }
        wgmma_commit();
    }

    // The next Q, once it is there.
    __device__ __forceinline__ void open_q() {
        q_at = q_ring.stage * kConsumers + id;
        mbarrier_wait(smem + Layout::kFullQ + q_at * 8, q_ring.parity);
        q_ring.advance();
        if (!(args.forward.scale > 0.0f)) fold_sign_into_q();
    }
    // The space of an O that has left is free for a Q.
    __device__ __forceinline__ void release_q() {
        if (leaving >= 0 && threadIdx.x % 128 == 0) {
            tma_store_wait_read();
            mbarrier_arrive(smem + Layout::kEmptyQ + leaving * 8);
        }
        leaving = -1;
    }
    // Looks for the next K and V while there is other work, so that the answer is at hand when they are wanted.
    __device__ __forceinline__ void look_ahead() {
        k_seen = mbarrier_test(smem + Layout::kFullK + k_ring.stage * 8, k_ring.parity);
        v_seen = mbarrier_test(smem + Layout::kFullV + v_ring.stage * 8, v_ring.parity);
    }
    __device__ __forceinline__ void wait_k() {
        if (!k_seen) mbarrier_wait(smem + Layout::kFullK + k_ring.stage * 8, k_ring.parity);
        k_seen = false;
    }
    // This warp is done with a buffer, which whoever brings a part of the next block into it must know.
    static __device__ __forceinline__ void release(u32 empty) {
        if constexpr (kCluster > 1) {
            if (lane() < kCluster) mbarrier_arrive_at(empty, lane());
        } else {
            if (lane() == 0) mbarrier_arrive(empty);
        }
    }
    __device__ __forceinline__ void release_k() {
        release(smem + Layout::kEmptyK + k_ring.stage * 8);
        k_ring.advance();
    }
    __device__ __forceinline__ void wait_v() {
        if (!v_seen) mbarrier_wait(smem + Layout::kFullV + v_ring.stage * 8, v_ring.parity);
        v_seen = false;
    }
    __device__ __forceinline__ void release_v() {
        release(smem + Layout::kEmptyV + v_ring.stage * 8);
        v_ring.advance();
    }
    // Key blocks that others of the cluster asked for.
    __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
        for (; count > 0; count--) {
            wait_k();
            wait_v();
            __syncwarp();  // no lane may still wait for what is given away
            release_k();
            release_v();
        }
    }

    // Brings O to the references of the last scores. Always, and not only where one has moved: a branch would keep the
    // compiler from filling gaps with it. (The touch: O, but not before what was issued last.)
    __device__ __forceinline__ void rescale() {
        wgmma_touch(o);
        softmax.rescale(o);
    }

    // Replaces the scores of masked pairs by -inf; `key` is the block's first key. A thread's scores of a row are keys 0, 1, 8,
    // 9, 16, ... from its own first one on: bit i of a word says whether the i-th of them is seen, and the compiler moves bits
    // to predicates seven at a time.
    __device__ __forceinline__ void mask(const Tile& tile, int key) {
        constexpr bool kLeft = kMaskLeft || kProgramRows;
        const int column = key + lane() % 4 * 2;
        const int row = tile.row + id * 64 + warp() * 16 + lane() / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            KeyRange live = live_keys<kMaskLeft, kMaskRight>(args.forward, (row + h * 8) >> args.group_shift);
            if (kProgramRows) live = KeyRange{max_of(live.first, runs[h].first), min_of(live.last, runs[h].last)};
            const int end = scores_before(live.last + 1 - column), begin = kLeft ? scores_before(live.first - column) : 0;
#pragma unroll
            for (int word = 0; word < div_up(kBlockKV / 4, 32); word++) {
                u32 seen = low_bits(end - word * 32);
                if (kLeft) seen &= ~low_bits(begin - word * 32);
#pragma unroll
                for (int i = 0; i < min_of(32, kBlockKV / 4 - word * 32); i++) {
                    const int at = word * 32 + i;
                    if (!(seen & 1u << i)) s[at / 2 * 4 + 2 * h + at % 2] = -FT_INFINITY;
                }
            }
        }
    }
    // How many of a thread's scores belong to keys before `key`, counted from its own first one.
    static __device__ __forceinline__ int scores_before(int key) {
        const int clamped = max_of(0, min_of(key, kBlockKV));
        return clamped / 8 * 2 + min_of(clamped % 8, 2);
    }
    // The lowest `count` bits of a word.
    static __device__ __forceinline__ u32 low_bits(int count) {
        return count <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1;
    }

    __device__ __forceinline__ ProgramHead head(const Work& work) const { return program_head(args, args.forward, work.tile); }

    // What the rows of a tile need of its score program.
    __device__ __forceinline__ void keep(const Work& work) {
        kept = program_kept(head(work));
        if constexpr (kProgramRows) {
            const int row = work.tile.row + id * 64 + warp() * 16 + lane() / 4;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                runs[h] = program_row<false>(head(work), min_of(row + h * 8, args.forward.q_len - 1), work.kept());
            }
        }
    }
    // What the score program and the window make of the scores of block n.
    template <typename Masked> __device__ __forceinline__ void change(const Work& work, int n, Masked masked) {
        const auto at = [&](int j, int e) -> float& { return s[4 * j + e]; };
        const int row = work.tile.row + id * 64 + warp() * 16 + lane() / 4, key = n * kBlockKV + lane() % 4 * 2;
        const auto apply = [&](auto cut) {
            constexpr bool kCut = decltype(cut)::value;
            if (kProgramShift) {
                program_shifted<kCut, kBlockKV / 8, !kProgramRows>(at, head(work), kept, row, key, magnitude(), softmax.shift);
            } else {
                program_scores<kCut, kBlockKV / 8, !kProgramRows>(at, head(work), kept, row, key, magnitude());
            }
        };
        if (masked) {
            apply(Bool<true>{});
            mask(work.tile, n * kBlockKV);
        } else {
            apply(Bool<false>{});
        }
    }
    // Of the softmax scale, whose sign is in Q.
    __device__ __forceinline__ float magnitude() const {
        const float scale = args.forward.scale;
        return scale > 0.0f ? scale : scale == 0.0f ? 1.0f : -scale;
    }

    // Rounds probabilities to the element type: into registers, as A operands, or to shared memory.
    __device__ __forceinline__ void round() {
        if constexpr (kPInShared) {
            const int row = warp() * 16 + lane() % 16;
            const u32 to = p_address() + row * 128;
#pragma unroll
            for (int step = 0; step < kStepsPV; step++) {
                const float* x = s + 8 * step;
                const u32 chunk = u32(step % 4 * 2 + lane() / 16) ^ (row % 8);
                stmatrix_x4(to + step / 4 * kBytes64Rows + (chunk << 4), pack<Element>(x[0], x[1]),
                            pack<Element>(x[2], x[3]), pack<Element>(x[4], x[5]), pack<Element>(x[6], x[7]));
            }
            fence_async_proxy();
            sync();
        } else {
#pragma unroll
            for (int i = 0; i < kBlockKV / 4; i++) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
        }
    }

    // A scale of zero or below turns maxima of the scores into minima: move its sign into Q and use its magnitude.
    __device__ __forceinline__ void fold_sign_into_q() const {
        for (u32 at = threadIdx.x % 128 * 16; at < kChunksQK * kBytes64Rows; at += 128 * 16) {
            uint4 x = load_shared_16(q_address() + at);
            u32* words = &x.x;
#pragma unroll
            for (int w = 0; w < 4; w++) words[w] = args.forward.scale == 0.0f ? 0 : words[w] ^ 0x80008000;
            store_shared_16(q_address() + at, x);
        }
        fence_async_proxy();
        sync();
    }

    // step(n, masked) for the key blocks from n down. `masked` is a constant where masked blocks have loops of their own:
    // those cut on the right or past the last key, then those in sight of every row, then those cut on the left.
    template <typename Step>
    static __device__ __forceinline__ void walk(const BlockRange& blocks, int n, const Step& step) {
        if (kMaskedLoop) {
#pragma unroll 1
            for (; n >= max_of(blocks.begin, blocks.full_end); n--) step(n, Bool<true>{});
#pragma unroll 1
            for (; n >= max_of(blocks.begin, blocks.full_begin); n--) step(n, Bool<false>{});
            if (kMaskedFirst) {
#pragma unroll 1
                for (; n >= blocks.begin; n--) step(n, Bool<true>{});
            }
        } else {
#pragma unroll 1
            for (; n >= blocks.begin; n--) step(n, is_masked<kMaskedFirst>(blocks, n));
        }
    }

    // Whether the rows of a tile attend to anything.
    static __device__ __forceinline__ bool attends(const Work& work) { return work.own.begin < work.own.end; }

    // The first probabilities of a tile from its first scores, beside nothing.
    __device__ __forceinline__ void open(const Work& work, float c) {
        softmax.init();
#pragma unroll
        for (int i = 0; i < kColumnsV / 2; i++) o[i] = 0.0f;
        open_q();
        if (kCluster > 1) skip(work.all.end - (attends(work) ? work.own.end : work.all.begin));
        if (!kOverlap) keep(work);
        if (!kOverlap || !attends(work)) return;
        wait_k();
        issue_qk();
        keep(work);
        wgmma_wait<0>();
        first_probabilities(work, c);
        round();
    }
    __device__ __forceinline__ void first_probabilities(const Work& work, float c) {
        wgmma_touch(s);
        release_k();
        const int n = work.own.end - 1;
        change(work, n, is_masked<kMaskedFirst>(work.own, n));
        softmax.advance(s, c);
        softmax.forget();  // O is zero
        softmax.template exponentiate<false>(s, c);
    }

    // The key blocks of an open tile. With kOverlap the scores of one are computed beside the product of the one before,
    // so that the last product remains.
    __device__ __forceinline__ void attend(const Work& work, float c) {
        const auto overlapped = [&](int n, auto masked) {
            wait_k();
            wait_turn();
            issue_qk();
            if (kRescaleBeside) rescale();
            wait_v();
            issue_pv();
            pass_turn();
            if (kChain) release_q();
            wgmma_wait<1>();
            wgmma_touch(s);
            release_k();
            change(work, n, masked);
            softmax.advance(s, c);
            softmax.template exponentiate<kIsFalse<decltype(masked)>>(s, c);
            wgmma_wait<0>();
            wgmma_touch(o);
            release_v();
            if (kLookAhead) look_ahead();
            if (!kRescaleBeside) rescale();
            round();
        };
        const auto serial = [&](int n, auto masked) {
            wait_k();
            wait_turn();
            issue_qk();
            pass_turn();
            if (kChain) release_q();
            wgmma_wait<0>();
            wgmma_touch(s);
            release_k();
            change(work, n, masked);
            softmax.advance(s, c);
            softmax.rescale(o);
            softmax.template exponentiate<kIsFalse<decltype(masked)>>(s, c);
            round();
            wait_v();
            issue_pv();
            wgmma_wait<0>();
            wgmma_touch(o);
            release_v();
        };
        if constexpr (kOverlap) {
            walk(work.own, work.own.end - 2, overlapped);
        } else {
            walk(work.own, work.own.end - 1, serial);
        }
    }

    // The last product of a tile and, at the end of its keys, what its rows are divided by.
    __device__ __forceinline__ RowResults close(const Work& work, float c) {
        const bool some = attends(work);
        if constexpr (kOverlap) {
            if (some) {
                if (kRescaleBeside) rescale();
                wait_v();
                issue_pv();
            }
            // On every path, or the compiler does so where it likes.
            wgmma_wait<0>();
            wgmma_touch(o);
            if (some) release_v();
        }
        if (kCluster > 1 && some) skip(work.own.begin - work.all.begin);
        return finish(work, c);
    }
    __device__ __forceinline__ RowResults finish(const Work& work, float c) {
        RowResults rows = softmax.finish(c);
        if (kProgramSink) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int q = work.tile.row + id * 64 + warp() * 16 + lane() / 4 + h * 8;
                const float sink = program_sink(head(work), min_of(q, args.forward.q_len - 1));
                const WithSink sunk = with_sink(softmax.l[h], softmax.m[h] * c, sink);
                rows.inverse[h] = sunk.inverse, rows.log_sum_exp[h] = sunk.lse;
            }
        }
        return rows;
    }

    // The last product of a tile beside the first scores of the next, whose probabilities are in `p` afterwards: the
    // matrix units do not see where a tile ends.
    __device__ __forceinline__ RowResults close_beside(const Work& work, const Work& next, float c) {
        release_q();
        open_q();
        wait_k();
        wait_turn();
        issue_qk();
        if (kRescaleBeside) rescale();
        wait_v();
        issue_pv();
        pass_turn();
        const RowResults rows = finish(work, c);
        softmax.init();
        keep(next);
        wgmma_wait<1>();
        first_probabilities(next, c);
        wgmma_wait<0>();
        wgmma_touch(o);
        release_v();
        round();
        return rows;
    }

    // Normalises O into shared memory, in the copy engine's layout, and writes the log-sum-exp.
    __device__ __forceinline__ void stage_output(const Tile& tile, const RowResults& rows, u32 to) {
        const int row = warp() * 16 + lane() / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int packed = id * 64 + row + h * 8, at = tile.row + packed;
            if (args.forward.lse != nullptr && lane() % 4 == 0 && packed < tile.rows) {
                const int member = at & ((1 << args.group_shift) - 1);
                const i64 head = (i64(tile.batch) * args.unit_heads + tile.head << args.group_shift) + member;
                args.forward.lse[head * args.forward.q_len + (at >> args.group_shift)] = rows.log_sum_exp[h];
            }
#pragma unroll
            for (int j = 0; j < kColumnsV / 8; j++) o[4 * j + 2 * h] *= rows.inverse[h], o[4 * j + 2 * h + 1] *= rows.inverse[h];
        }
        const int to_row = warp() * 16 + lane() % 16;
#pragma unroll
        for (int j = 0; j < kColumnsV / 16; j++) {
            const float* x = o + 8 * j;
            const u32 chunk = u32(j % 4 * 2 + lane() / 16) ^ (to_row % 8);
            stmatrix_x4(to + j / 4 * kBytes64Rows + to_row * 128 + (chunk << 4), pack<Element>(x[0], x[1]),
                        pack<Element>(x[2], x[3]), pack<Element>(x[4], x[5]), pack<Element>(x[6], x[7]));
        }
    }

    // Adds the non-finite elements of V in masked blocks to the outputs that attend to them, in the staged O: rare, so
    // plain and slow.
    __device__ __forceinline__ void restore_non_finite(const Work& work, u32 to) const {
        const Tile& tile = work.tile;
        const Element* v = (const Element*)args.forward.v + tile.batch * args.forward.v_stride[0] +
                           tile.kv_head * args.forward.v_stride[1];
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < 64 * kHeadDimV; i += 128) {
            const int row = i / kHeadDimV, column = i % kHeadDimV;
            if (id * 64 + row >= tile.rows) break;
            const int position = (tile.row + id * 64 + row) >> args.group_shift;
            const auto visible = [&](int key) { return program_visible(head(work), position, key); };
            const float add = sum_of_non_finite<kBlockKV, kMaskLeft, kMaskRight>(args.forward, v + column, position, work.all,
                                                                                 visible);
            if (add != 0.0f) {
                const u32 chunk = u32(column % 64 / 8) ^ (row % 8);
                const u32 at = to + column / 64 * kBytes64Rows + row * 128 + (chunk << 4) + column % 8 * 2;
                store_shared(at, from_float<Element>(to_float(load_shared<Element>(at)) + add));
            }
        }
    }

    // O of a tile, whose Q was `q`, out to memory.
    __device__ __forceinline__ void write(const Work& work, const RowResults& rows, int q) {
        const u32 to = smem + Layout::kQ + q * Layout::kBytesQ;
        // O overwrites rows that other warps have read as Q: all must be done. They must also agree about non-finite
        // elements, which may be met for the next tile while they look.
        bool met = false;
        if (kClean) {
            met = barrier_any(1 + kConsumers + id, 128, lane() == 0 ? read_flag(smem + Layout::kMetNonFinite) : 0);
        } else {
            sync();
        }
        stage_output(work.tile, rows, to);
        if (met) {
            sync();
            restore_non_finite(work, to);
        }
        fence_async_proxy();
        sync();
        release_q();
        if (threadIdx.x % 128 == 0) {
            if (id * 64 < work.tile.rows) {
#pragma unroll
                for (int chunk = 0; chunk < kChunksV; chunk++) {
                    tma_store(args.o, to + chunk * kBytes64Rows, chunk * 64, 0, (work.tile.row + id * 64) >> args.group_shift,
                              work.tile.head, work.tile.batch);
                }
            }
            tma_store_commit();
        }
        leaving = q;
        // Another Q waits for this space alone.
        if (!kChain) release_q();
    }

    __device__ __forceinline__ void run() {
        const float scale = args.forward.scale;
        // A score program gives scores in natural units, unless all it does is to add.
        const float c = kProgramScore && !kProgramShift ? kLog2E : (scale > 0.0f ? scale : scale == 0.0f ? 1.0f : -scale) * kLog2E;
        if (kTakeTurns && id + 1 == kConsumers) pass_turn();
        Work work = first_work(args);
        open(work, c);
        while (true) {
            attend(work, c);
            const int q = q_at;
            RowResults rows;
            // Before what comes next is known: in a cluster that may depend on the blocks that are skipped here.
            if (!kChain) rows = close(work, c);
            const Work next = hand.next<true>();
            const bool chained = kChain && kOverlap && next.live && attends(work) && attends(next);
            if (kChain) rows = chained ? close_beside(work, next, c) : close(work, c);
            write(work, rows, q);
            if (!next.live) break;
            if (chained) {
#pragma unroll
                for (int i = 0; i < kColumnsV / 2; i++) o[i] = 0.0f;
            } else {
                open(next, c);
            }
            work = next;
        }
        // Shared memory must outlast what reads it.
        release_q();
    }
};


extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM) 
ft_forward_bf16_d256_causal_sm90_c2_kv80_s2_overlap_queue_two_b1_l2x32_sm_90a(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(1024) u8 shared_memory[];
    const u32 smem = smem_address(shared_memory);
    const int warpgroup = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32 % 4);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Layout::kQBuffers * kConsumers; i++) {
            mbarrier_init(smem + Layout::kFullQ + i * 8, 1);
            mbarrier_init(smem + Layout::kEmptyQ + i * 8, 1);
        }
        for (int i = 0; i < 2; i++) {
            mbarrier_init(smem + Layout::kFullWork + i * 8, 1);
            mbarrier_init(smem + Layout::kEmptyWork + i * 8, 1 + (kClean ? 2 : 0) + kConsumers * 4);
        }
        for (int s = 0; s < kStages; s++) {
            mbarrier_init(smem + Layout::kFullK + s * 8, 1);
            mbarrier_init(smem + Layout::kEmptyK + s * 8, kCluster * kConsumers * 4);
            mbarrier_init(smem + Layout::kFullV + s * 8, kClean ? 2 : 1);
            mbarrier_init(smem + Layout::kEmptyV + s * 8, kCluster * kConsumers * 4);
            mbarrier_init(smem + Layout::kRawV + s * 8, 1);
        }
        store_shared_4(smem + Layout::kMetNonFinite, 0);
        mbarrier_init_fence();
    }
    if constexpr (kCluster > 1) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    if (warpgroup == 0) {
        registers_give_back<kProducerRegisters>();
        if (warp == 0) {
            if (kWholeWarps || threadIdx.x % 32 == 0) produce_qk(args, smem);
        } else if (warp == 1) {
            if (kWholeWarps || threadIdx.x % 32 == 0) produce_v(args, smem);
        } else if (kClean) {
            clean_v(args, smem);
        }
    } else {
        registers_take<kConsumerRegisters>();
        Consumer(args, smem, warpgroup - 1).run();
    }
    // Others of the cluster may still arrive on barriers of this block.
    if constexpr (kCluster > 1) cluster_sync();
}
