// Row tiles of 16-bit elements in shared memory: how rows are placed there, and how threads copy and change them.

__host__ __device__ constexpr int largest_power_of_two_divisor(int n, int cap) {
    int g = 1;
    while (g < cap && n % (2 * g) == 0) g *= 2;
    return g;
}
__host__ __device__ constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// A tile of rows of 16-bit elements in shared memory, in 16-byte chunks. ldmatrix reads the same chunk of eight
// consecutive rows at once: those must fall on eight different groups of four banks.
//   padded:  a row has an odd number of chunks, which spreads eight rows by itself; addresses are immediates.
//   swizzled: the chunk's low bits are XORed with row bits; no space is lost.
template <int kHeadDim, bool kPadRows> struct RowTile {
    static constexpr int kDim = round_up(kHeadDim, 16);  // the matrix instruction takes 16 elements at a time
    static constexpr int kChunks = kDim / 8;
    static constexpr int kValidChunks = kHeadDim / 8;
    static constexpr int kPitch = (kChunks + (kPadRows ? 1 : 0)) * 16;
    static constexpr int kGroup = largest_power_of_two_divisor(kChunks, 8);
    static constexpr int kShift = log2_of(8 / kGroup);

    static __device__ __forceinline__ u32 xor_of(int row) { return kPadRows ? 0 : (u32(row) >> kShift) & (kGroup - 1); }
    static __device__ __forceinline__ u32 offset(int row, int chunk) {
        return u32(row) * kPitch + ((u32(chunk) ^ xor_of(row)) << 4);
    }

    // The address that a lane gives to ldmatrix for matrix step `step` (chunks 2 * step and 2 * step + 1), from the one
    // that lane_base() gave for step 0 of an aligned tile. Steps only flip bits that rows leave free, so a lane keeps a
    // single address per tile, and each step costs at most one XOR and an immediate.
    static __device__ __forceinline__ u32 lane_base(int row, int half) { return offset(row, half); }
    static __device__ __forceinline__ u32 at_step(u32 base, int step) {
        constexpr int kSteps = kGroup / 2;
        return kPadRows ? base + step * 32 : (base ^ (step % kSteps << 5)) + step / kSteps * kGroup * 16;
    }

    // The same for any single chunk, from the address of chunk 0 of the row.
    static __device__ __forceinline__ u32 at_chunk(u32 base, int chunk) {
        return kPadRows ? base + chunk * 16 : (base ^ (chunk % kGroup << 4)) + chunk / kGroup * kGroup * 16;
    }

    // How the threads of a block share the chunks of a tile: a power of two of them side by side along a row.
    template <int kThreads> struct Share {
        static constexpr int kAcross = largest_power_of_two_divisor(kChunks, kThreads < 32 ? kThreads : 32);
        static constexpr int kDown = kThreads / kAcross;
        static constexpr int kGroups = kChunks / kAcross;
    };

    // Where this thread starts reading a tile whose first row is at `from`.
    template <int kThreads> static __device__ __forceinline__ const u16* thread_source(const u16* from, i64 stride) {
        using S = Share<kThreads>;
        return from + threadIdx.x / S::kAcross * stride + threadIdx.x % S::kAcross * 8;
    }

    // Starts the copy of rows [0, kRows) of which the first `rows` exist; the others become zeros, so that what lies
    // behind a tensor is neither read nor able to reach a result. `source` is the thread's own, from thread_source().
    template <int kRows, int kThreads, bool kCheckRows>
    static __device__ __forceinline__ void copy_async(u32 to, const u16* source, i64 stride, int rows) {
        using S = Share<kThreads>;
        const int chunk0 = threadIdx.x % S::kAcross, row0 = threadIdx.x / S::kAcross;
#pragma unroll
        for (int r = 0; r < kRows; r += S::kDown) {
            const int row = r + row0;
            if (kRows % S::kDown == 0 || row < kRows) {
                const bool exists = !kCheckRows || row < rows;
#pragma unroll
                for (int g = 0; g < S::kGroups; g++) {
                    const int chunk = g * S::kAcross + chunk0;
                    const bool valid = exists && (kValidChunks == kChunks || chunk < kValidChunks);
                    cp_async_16(to + offset(row, chunk), source + r * stride + g * S::kAcross * 8, valid);
                }
            }
        }
    }

    // Calls f(shared-memory address) for every chunk that this very thread copied: between its own wait and the next
    // barrier a thread may change what it copied, and everyone sees the change.
    template <int kRows, int kThreads, typename F>
    static __device__ __forceinline__ void each_own_chunk(u32 tile, F f) {
        using S = Share<kThreads>;
        const int chunk0 = threadIdx.x % S::kAcross, row0 = threadIdx.x / S::kAcross;
#pragma unroll 2
        for (int r = 0; r < kRows; r += S::kDown) {
            const int row = r + row0;
            if (kRows % S::kDown == 0 || row < kRows) {
#pragma unroll
                for (int g = 0; g < S::kGroups; g++) f(tile + offset(row, g * S::kAcross + chunk0));
            }
        }
    }
};
