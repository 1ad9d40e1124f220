// Bulk copies of plain bytes, and a gradient's 64 rows from accumulators through shared memory to where they belong.

__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier, u64 cache_hint) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(cache_hint) : "memory");
}
// In the calling thread's current group.
__device__ __forceinline__ void bulk_store(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// Into chunks of 64 columns that lie `chunk_bytes` apart. For one warpgroup; `to` is where its rows begin.
template <int kColumns>
__device__ __forceinline__ void stage_rows(u32 to, int chunk_bytes, const float (&d)[kColumns / 2], float scale) {
    const int row = warp() * 16 + lane() % 16;
#pragma unroll
    for (int j = 0; j < kColumns / 16; j++) {
        const float* x = d + 8 * j;
        const u32 chunk = u32(j % 4 * 2 + lane() / 16) ^ (row % 8);
        stmatrix_x4(to + j / 4 * chunk_bytes + row * kRowBytes + (chunk << 4),
                    pack<Element>(x[0] * scale, x[1] * scale), pack<Element>(x[2] * scale, x[3] * scale),
                    pack<Element>(x[4] * scale, x[5] * scale), pack<Element>(x[6] * scale, x[7] * scale));
    }
}

// Has the copy engine take them away; what lies past the last row or column is left out. For one thread.
template <int kChunks>
__device__ __forceinline__ void send_rows(const TensorMap& map, u32 from, int chunk_bytes, int row, int head,
                                          int batch) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                     "r"(from + chunk * chunk_bytes), "r"(chunk * 64), "r"(row), "r"(head), "r"(batch) : "memory");
    }
}

// A square of words, of which each of four neighbouring lanes has a row, becomes its transpose.
__device__ __forceinline__ void transpose_in_quad(u32 (&w)[4]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool has_bit = lane() & bit;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j & bit) continue;
            const u32 other = __shfl_xor_sync(0xffffffff, has_bit ? w[j] : w[j + bit], bit);
            w[j] = has_bit ? other : w[j];
            w[j + bit] = has_bit ? w[j + bit] : other;
        }
    }
}

// A warpgroup's 64 rows straight from accumulators, the first `rows` of them: what lies past those is another's. The
// four lanes of a row give each other what makes 16 bytes of it, and nobody waits for shared memory.
template <int kColumns, int kHeadDim>
__device__ __forceinline__ void store_rows(void* tensor, const i64 (&stride)[3], int entry, int head, i64 row, int rows,
                                           const float (&d)[kColumns / 2], float scale) {
    const int t = lane() % 4, first = warp() * 16 + lane() / 4;
    Element* const to = (Element*)tensor + entry * stride[0] + head * stride[1] + (row + first) * stride[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int tile = 0; tile < kColumns / 8; tile += 4) {
            u32 w[4] = {};
#pragma unroll
            for (int j = 0; j < 4 && tile + j < kColumns / 8; j++) {
                const float* x = d + (tile + j) * 4 + h * 2;
                w[j] = pack<Element>(x[0] * scale, x[1] * scale);
            }
            transpose_in_quad(w);
            const int column = (tile + t) * 8;
            if (first + h * 8 < rows && column < kHeadDim)
                *(uint4*)(to + h * 8 * stride[2] + column) = uint4{w[0], w[1], w[2], w[3]};
        }
    }
}

// The first `rows` of 64 that stage_rows() left, by the threads of a warpgroup: what lies past them is another's.
template <int kHeadDim>
__device__ __forceinline__ void copy_rows(void* tensor, const i64 (&stride)[3], u32 from, int chunk_bytes, int head,
                                          i64 row, int rows) {
    Element* to = (Element*)tensor + head * stride[1] + row * stride[2];
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < 64 * (kHeadDim / 8); i += 128) {
        const int r = i / (kHeadDim / 8), piece = i % (kHeadDim / 8);
        if (r < rows)
            *(uint4*)(to + r * stride[2] + piece * 8) =
                load_shared_16(from + piece / 8 * chunk_bytes + r * kRowBytes + ((piece ^ r) % 8 << 4));
    }
}
