// Where dQ goes: tiles of fp32 partial sums into global memory, by the bulk engine from shared memory or from
// registers, with kContenders thread blocks adding to each tile. kSink: what is done per tile.
//
// Thread block b is member b % contenders of head b / contenders; in round r it adds tile (r + member * shift) % tiles.

enum Sink { kBulkStore, kBulkF32, kBulkS32, kBulkU64, kBulkBf16, kRedF32, kRedV2, kRedV4, kRedS32, kRedU64, kNothing };

extern "C" __global__ void __launch_bounds__(288, 1)
    sinks(u64 target, u64 source, u64 source_mask, Record* records, u32 rounds, u32 tiles, u32 contenders, u32 shift,
          u32 reads) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 barriers[2];
    const u32 staging = shared_address(memory);  // two slots of a tile, two of what is read
    const u32 member = blockIdx.x % contenders, head = blockIdx.x / contenders;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 one = kSink == kBulkF32 ? 0x3f800000u : kSink == kBulkBf16 ? 0x3f803f80u : 1u;
    if (kSink != kBulkU64)
        fill_word(staging, 2 * kTileBytes, one);
    else
        for (u32 i = threadIdx.x; i < 2 * kTileBytes / 8; i += blockDim.x) ((u64*)memory)[i] = 1;
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&barriers[0]), 1), mbarrier_init(shared_address(&barriers[1]), 1);
        mbarrier_init_fence();
    }
    fence_async_proxy();
    __syncthreads();
    const u64 start = clock_now();
    const u64 base = target + u64(head) * tiles * kTileBytes;
    u32 tile = member * shift % tiles;
    if (kSink <= kBulkBf16 && warp == 0) {
        if (lane == 0) {
            for (u32 r = 0; r < rounds; r++) {
                const u32 from = staging + r % 2 * kTileBytes;
#pragma unroll
                for (u32 piece = 0; piece < kTileBytes; piece += kPieceBytes) {
                    const u64 to = base + u64(tile) * kTileBytes + piece;
                    if (kSink == kBulkStore) bulk_store(to, from + piece, kPieceBytes);
                    if (kSink == kBulkF32) bulk_add_f32(to, from + piece, kPieceBytes);
                    if (kSink == kBulkS32) bulk_add_s32(to, from + piece, kPieceBytes);
                    if (kSink == kBulkU64) bulk_add_u64(to, from + piece, kPieceBytes);
                    if (kSink == kBulkBf16) bulk_add_bf16(to, from + piece, kPieceBytes);
                }
                bulk_commit();
                bulk_wait_read<1>();
                if (++tile == tiles) tile = 0;
            }
            bulk_wait<0>();
        }
    } else if (kSink > kBulkBf16 && kSink < kNothing && warp < 8) {
        for (u32 r = 0; r < rounds; r++) {
            const u64 to = base + u64(tile) * kTileBytes;
#pragma unroll
            for (u32 i = 0; i < kTileBytes / 4096; i++) {
                const u64 at = to + i * 4096 + warp * 512;
                if (kSink == kRedV4)
                    asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(at + lane * 16), "f"(1.0f)
                                 : "memory");
                if (kSink == kRedV2)
#pragma unroll
                    for (u32 j = 0; j < 2; j++)
                        asm volatile("red.global.add.v2.f32 [%0], {%1, %1};" ::"l"(at + j * 256 + lane * 8), "f"(1.0f)
                                     : "memory");
                if (kSink == kRedF32)
#pragma unroll
                    for (u32 j = 0; j < 4; j++)
                        asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at + j * 128 + lane * 4), "f"(1.0f)
                                     : "memory");
                if (kSink == kRedS32)
#pragma unroll
                    for (u32 j = 0; j < 4; j++)
                        asm volatile("red.global.add.u32 [%0], %1;" ::"l"(at + j * 128 + lane * 4), "r"(1) : "memory");
                if (kSink == kRedU64)
#pragma unroll
                    for (u32 j = 0; j < 2; j++)
                        asm volatile("red.global.add.u64 [%0], %1;" ::"l"(at + j * 256 + lane * 8), "l"(u64(1))
                                     : "memory");
            }
            if (++tile == tiles) tile = 0;
        }
    }
    if (warp == 8 && reads && lane == 0) {
        // What the loop reads beside: Q and dO of the tile, bf16, in rounds of the same number.
        const u32 to = staging + 2 * kTileBytes;
        u64 at = u64(head) * tiles * kTileBytes;
        for (u32 r = 0; r < rounds + 2; r++) {
            const u32 slot = r % 2, barrier = shared_address(&barriers[slot]);
            if (r >= 2) mbarrier_wait(barrier, (r / 2 - 1) & 1);
            if (r < rounds) {
                mbarrier_expect(barrier, kTileBytes);
                bulk_load(to + slot * kTileBytes,
                          source + ((at + u64((r + member * shift) % tiles) * kTileBytes) & source_mask), kTileBytes,
                          barrier);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) records[blockIdx.x * kRoles] = {start, clock_now(), rounds, 0};
}
