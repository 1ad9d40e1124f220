// dS kept in memory: bf16 tiles are stored while Q and dO are read from L2, and read again later.
// kStream: what a thread block does in a round with tiles of kTileBytes.

enum Stream { kWrite, kRead, kWriteReading, kRing };

extern "C" __global__ void __launch_bounds__(128, 1)
    streams(u64 target, u64 source, u64 source_mask, Record* records, u32 rounds, u32 ring) {
    extern __shared__ __align__(1024) u8 memory[];  // four slots to load, two to store
    __shared__ __align__(8) u64 barriers[4];
    const u32 room = shared_address(memory), from = room + 4 * 32768, full = shared_address(&barriers[0]);
    fill_word(from, 2 * kTileBytes, 0x3c003c00);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 4; i++) mbarrier_init(full + 8 * i, 1);
        mbarrier_init_fence();
    }
    fence_async_proxy();
    __syncthreads();
    const u64 start = clock_now();
    if (threadIdx.x == 0 && kStream != kRead) {
        // Round r of all thread blocks lies together, as tiles of a wave would.
        for (u32 r = 0; r < rounds; r++) {
            const u32 at = kStream == kRing ? r % ring : r;
            bulk_store(target + (u64(at) * gridDim.x + blockIdx.x) * kTileBytes, from + r % 2 * kTileBytes, kTileBytes);
            bulk_commit();
            bulk_wait_read<1>();
        }
        bulk_wait<0>();
    }
    if (threadIdx.x == 32 && kStream != kWrite) {
        const u32 bytes = kStream == kWriteReading ? 32768 : kTileBytes;
        for (u32 r = 0; r < rounds + 4; r++) {
            const u32 slot = r % 4;
            if (r >= 4) mbarrier_wait(full + slot * 8, (r / 4 - 1) & 1);
            if (r >= rounds) continue;
            u64 at;
            if (kStream == kWriteReading)
                at = source + ((u64(blockIdx.x / 16) * 64 + r % 64) * 32768 & source_mask);
            else if (kStream == kRead)
                at = target + (u64(r) * gridDim.x + blockIdx.x) * kTileBytes;
            // Half a ring behind what is stored, of another multiprocessor.
            else
                at = target + (u64((r + ring / 2) % ring) * gridDim.x + (blockIdx.x + 37) % gridDim.x) * kTileBytes;
            mbarrier_expect(full + slot * 8, bytes);
            bulk_load(room + slot * 32768, at, bytes, full + slot * 8);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) records[blockIdx.x * kRoles] = {start, clock_now(), rounds, 0};
}
