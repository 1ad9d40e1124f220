// Follows forward/sm90/masks.cuh, whose fixes belong here too. Apart, since the machine code of 20 of 40 dense kernels
// changed when both families shared this text.
//
// What a consumer knows of the mask of its rows: of the two that a thread has scores of, the keys that each attends to,
// as runs or, where a mask may leave any keys, as bits.

struct RowMasks {
    const KernelArgs& args;
    const int consumer;
    KeyRange runs[2];             // of the tile whose scores are computed
    u32 visible[2][kShareWords];  // of the block whose scores are next
    u32 seen[2][kShareWords];     // what is left of it

    __device__ __forceinline__ RowMasks(const KernelArgs& args, int consumer) : args(args), consumer(consumer) {}

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    // The first of this thread's two rows, in a tile; the other one is 8 rows further.
    __device__ __forceinline__ int first_row() const {
        return consumer * 64 + threadIdx.x % 128 / 32 * 16 + lane() / 4;
    }

    // Whether runs are computed where they are wanted.
    static constexpr bool kComputedAgain = kProgramRowsCheap && !kRuns;

    // The keys that a program leaves a row.
    __device__ __forceinline__ KeyRange run_of(const WorkTile& tile, int row) const {
        const int q = min_of(row, FT_SIZES(args, tile).q_len - 1);
#if FT_RUNS
        return Runs(args).row(tile, q);
#else
        return program_row<false>(program_head(args, FT_SIZES(args, tile), tile), q, RunEnds{});
#endif
    }

    // What the rows of a tile are asked for in each of its blocks.
    __device__ __forceinline__ void keep(const WorkTile& tile) {
        if constexpr (kProgramRows && !kComputedAgain) {
#pragma unroll
            for (int h = 0; h < 2; h++) runs[h] = run_of(tile, tile.row + first_row() + h * 8);
        }
    }

    // What a mask leaves of this thread's scores of a block, `key` being its first key: asked for while the products
    // that give them are under way. A thread's scores of a row are keys 0, 1, 8, 9, 16, ... from its own first one on:
    // bit i of a word is the i-th of them.
    __device__ __forceinline__ void see(const WorkTile& tile, int key) {
        constexpr bool kLeft = kMaskLeft || (kProgramRows && !kProgramFromFirst);
        const int column = key + lane() % 4 * 2, row = tile.row + first_row();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // What lies in memory has the window taken in.
            KeyRange live = runs[h];
            if (!kRuns)
                live = live_keys<kMaskLeft, kMaskRight>(FT_SIZES(args, tile), (row + h * 8) >> args.group_shift);
            if (kProgramRows && !kRuns) {
                const KeyRange run = kComputedAgain ? run_of(tile, row + h * 8) : runs[h];
                live = KeyRange{max_of(live.first, run.first), min_of(live.last, run.last)};
            }
            const int end = scores_before(live.last + 1 - column),
                      begin = kLeft ? scores_before(live.first - column) : 0;
#pragma unroll
            for (int word = 0; word < kShareWords; word++) {
                seen[h][word] = low_bits(end - word * 32);
                if (kLeft) seen[h][word] &= ~low_bits(begin - word * 32);
                if (kLists) seen[h][word] &= visible[h][word];
                // Optimisation barrier: keeps this computation before the wait for the scores.
                asm volatile("" : "+r"(seen[h][word]));
            }
        }
    }

    // Replaces the scores of masked pairs by -inf. The compiler moves bits to predicates seven at a time.
    __device__ __forceinline__ void apply(Scores& s) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < kBlockKV / 4; i++) {
                if (!(seen[h][i / 32] & 1u << i % 32)) s[i / 2 * 4 + 2 * h + i % 2] = -FT_INFINITY;
            }
        }
    }

    // How many of a thread's scores belong to keys before `key`, counted from its own first one.
    static __device__ __forceinline__ int scores_before(int key) {
        const int clamped = max_of(0, min_of(key, kBlockKV));
        return clamped / 8 * 2 + min_of(clamped % 8, 2);
    }
    // The lowest `count` bits of a word: all of them from 32 on, which a shift in C++ does not say.
    static __device__ __forceinline__ u32 low_bits(int count) { return ~shift_left(~0u, max_of(count, 0)); }
};
