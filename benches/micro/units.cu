// Rates of single instructions on one multiprocessor: warps repeat kUnit; independent results, 16 in a row.

enum Unit {
    kExp2,
    kF2I,
    kF2L,
    kPack,
    kFma,
    kFixed,
    kStoreV4,
    kStMatrix,
    kStMatrixTrans,
    kLdMatrix,
    kLdMatrixTrans,
    kLoadV4,
    kSharedAdd,
    kStep
};

extern "C" __global__ void __launch_bounds__(512, 1) units(Record* records, u32 iterations, float scale) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 mine = shared_address(memory) + warp * 8192;
    const u32 row = lane % 8, matrix = lane / 8;
    fill_word(shared_address(memory), 131072, 0);
    float x[16];
    u32 n[16];
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = (threadIdx.x + i) * 0.001f * scale, n[i] = i;
    __syncthreads();
    const u64 start = clock_now();
    for (u32 it = 0; it < iterations; it++) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (kUnit == kExp2) x[i] = exp2_approx(x[i]);
            if (kUnit == kF2I) asm volatile("cvt.rni.s32.f32 %0, %1;" : "=r"(n[i]) : "f"(__uint_as_float(n[i])));
            if (kUnit == kF2L) {
                u64 wide;
                asm volatile("cvt.rni.s64.f32 %0, %1;" : "=l"(wide) : "f"(__uint_as_float(n[i])));
                n[i] = u32(wide) ^ u32(wide >> 32);
            }
            if (kUnit == kPack)
                asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(n[i]) : "f"(__uint_as_float(n[i])), "f"(x[i]));
            if (kUnit == kFma) asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(x[i]) : "f"(scale));
            // Fixed point without a conversion: two additions leave 22 high and then 22 low bits of the value in
            // mantissas.
            if (kUnit == kFixed) {
                float high, rest;
                asm volatile("fma.rn.f32 %0, %1, %2, 0f4B400000;" : "=f"(high) : "f"(x[i]), "f"(scale));
                asm volatile("sub.f32 %0, 0f4B400000, %1;" : "=f"(rest) : "f"(high));
                asm volatile("fma.rn.f32 %0, %1, %2, %3;" : "=f"(rest) : "f"(x[i]), "f"(scale), "f"(rest));
                asm volatile("fma.rn.f32 %0, %1, 0f43800000, 0f4B400000;" : "=f"(rest) : "f"(rest));
                n[i] += __float_as_uint(high) * 256 + __float_as_uint(rest);
            }
            if (kUnit == kStoreV4) store_v4(mine + i * 512 + lane * 16, n[i], n[i], n[i], n[i]);
            if (kUnit == kLoadV4)
                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(n[i]), "=r"(n[(i + 4) % 16]), "=r"(n[(i + 8) % 16]), "=r"(n[(i + 12) % 16])
                             : "r"(mine + i * 512 + lane * 16)
                             : "memory");
            const u32 at = mine + i / 2 * 1024 + row * 128 + ((matrix + i % 2 * 4) ^ row) * 16;
            if (kUnit == kStMatrix) stmatrix(at, n[i], n[i], n[i], n[i]);
            if (kUnit == kStMatrixTrans) stmatrix_trans(at, n[i], n[i], n[i], n[i]);
            if (kUnit == kLdMatrix)
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(n[i]), "=r"(n[(i + 4) % 16]), "=r"(n[(i + 8) % 16]), "=r"(n[(i + 12) % 16])
                             : "r"(at)
                             : "memory");
            if (kUnit == kLdMatrixTrans)
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(n[i]), "=r"(n[(i + 4) % 16]), "=r"(n[(i + 8) % 16]), "=r"(n[(i + 12) % 16])
                             : "r"(at)
                             : "memory");
            if (kUnit == kSharedAdd)
                asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(mine + i * 128 + lane * 4), "r"(n[i]) : "memory");
        }
        if (kUnit == kStep) {  // P = exp2(s c - l), dS = P (dP - D), both packed: what a pair of scores costs
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
                const float p = exp2_free(fmaf(x[i], scale, x[i + 1])), q = exp2_free(fmaf(x[i + 2], scale, x[i + 3]));
                n[i] ^= pack_bf16(p, q);
                n[i + 1] ^= pack_bf16(p * (x[i + 1] - x[i + 2]), q * (x[i + 3] - x[i]));
                x[i] += 1e-3f, x[i + 2] -= 1e-3f;
            }
        }
    }
    const u64 end = clock_now();
    float sum = 0;
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) sum += x[i], all ^= n[i];
    if (lane == 0 && warp < kRoles)
        records[blockIdx.x * kRoles + warp] = {start, end, iterations * 16, u64(sum == 1.25f) + (all == 77)};
}
