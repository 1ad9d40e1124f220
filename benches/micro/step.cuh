// A step of a backward pass, for a warpgroup of 64 keys out of 128 and kM queries: the pieces that loops put together.

constexpr int kKeys = 128;

// S' = K Q', or dP' = V dO'.
__device__ __forceinline__ void issue_scores(float (&d)[kM / 2], u64 a, u64 b) {
#pragma unroll
    for (int k = 0; k < kD / 16; k++)
        mma_s(d, a + (k / 4 * kKeys * 128 + k % 4 * 32) / 16, b + (k / 4 * kM * 128 + k % 4 * 32) / 16, k > 0);
    wgmma_commit();
}

// dV += P' dO, or dK += dS' Q.
__device__ __forceinline__ void issue_sum(float (&d)[kD / 2], const u32 (&a)[kM / 4], u64 b) {
#pragma unroll
    for (int k = 0; k < kM / 16; k++) mma_dkv(d, a[k * 4], a[k * 4 + 1], a[k * 4 + 2], a[k * 4 + 3], b + k * 2048 / 16);
    wgmma_commit();
}

__device__ __forceinline__ void pack(u32 (&to)[kM / 4], const float (&x)[kM / 2], int j) {
    to[j * 2] = pack_bf16(x[j * 4], x[j * 4 + 1]), to[j * 2 + 1] = pack_bf16(x[j * 4 + 2], x[j * 4 + 3]);
}

// P' = exp2(S' c - L), packed at once where dV is issued early.
__device__ __forceinline__ void take_exponentials(float (&s)[kM / 2], u32 (&p)[kM / 4], const float* statistics,
                                                  u32 lane, float scale) {
#pragma unroll
    for (int j = 0; j < kM / 8; j++) {
        const float2 l = *(const float2*)&statistics[j * 8 + lane % 4 * 2];
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (kMath) s[j * 4 + e] = exp2_free(fmaf(s[j * 4 + e], scale, e % 2 ? -l.y : -l.x));
        if (kEarly) pack(p, s, j);
    }
}

// dS' = P' (dP' - D), packed, and P' where it is not yet.
__device__ __forceinline__ void take_gradients(const float (&s)[kM / 2], float (&dp)[kM / 2], u32 (&p)[kM / 4],
                                               u32 (&ds)[kM / 4], const float* statistics, u32 lane) {
#pragma unroll
    for (int j = 0; j < kM / 8; j++) {
        const float2 l = *(const float2*)&statistics[j * 8 + lane % 4 * 2];
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (kMath) dp[j * 4 + e] = s[j * 4 + e] * (dp[j * 4 + e] - (e % 2 ? l.y : l.x));
        if (!kEarly) pack(p, s, j);
        pack(ds, dp, j);
    }
}

// dS to shared memory, a block of 64 queries after the other; `row`: of the lane's part of a matrix.
__device__ __forceinline__ void store_ds(u32 to, const u32 (&ds)[kM / 4], u32 row, u32 lane) {
#pragma unroll
    for (int k = 0; k < kM / 16; k++) {
        const u32 chunk = k * 2 + lane / 16;
        stmatrix(to + chunk / 8 * kKeys * 128 + row * 128 + ((chunk ^ row) % 8) * 16, ds[k * 4], ds[k * 4 + 1],
                 ds[k * 4 + 2], ds[k * 4 + 3]);
    }
}
