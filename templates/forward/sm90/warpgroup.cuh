// One warpgroup of 64 query rows: what it holds, how its scores are masked, and how its O leaves. The order of its work is in
// consumer.cuh.

struct Warpgroup {
    const KernelArgs& args;
    const u32 smem;
    const int id;      // among the consumers, from 0
    Scores s;
    Output o;
    KeyRange runs[2];  // of keys that a program leaves its rows

    __device__ __forceinline__ Warpgroup(const KernelArgs& args, u32 smem, int id) : args(args), smem(smem), id(id) {}
    static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / 32; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    // A barrier of this warpgroup alone.
    __device__ __forceinline__ void sync() const { barrier_sync(1 + kConsumers + id, 128); }
    __device__ __forceinline__ ProgramHead head(const Work& work) const { return program_head(args, args.forward, work.tile); }

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

    // A scale of zero or below turns maxima of the scores into minima: move its sign into Q and use its magnitude.
    __device__ __forceinline__ void fold_sign_into_q(u32 q_address) const {
        for (u32 at = threadIdx.x % 128 * 16; at < kChunksQK * kBytes64Rows; at += 128 * 16) {
            uint4 x = load_shared_16(q_address + at);
            u32* words = &x.x;
#pragma unroll
            for (int w = 0; w < 4; w++) words[w] = args.forward.scale == 0.0f ? 0 : words[w] ^ 0x80008000;
            store_shared_16(q_address + at, x);
        }
        fence_async_proxy();
        sync();
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
            // Scores that a program makes -inf have no part in O, and a NaN of V would have.
            if (kMarkEmpty && rows.empty[h]) {
#pragma unroll
                for (int j = 0; j < kColumnsV / 8; j++) o[4 * j + 2 * h] = o[4 * j + 2 * h + 1] = 0.0f;
            }
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

    // Which rows attend to nothing, one of four bits for each.
    __device__ __forceinline__ u32 empty_rows() const { return smem + Layout::kEmptyRows + id * Layout::kBytesEmptyRows; }
    __device__ __forceinline__ void mark_empty(const RowResults& rows) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 empty = __ballot_sync(0xffffffff, rows.empty[h]);
            if (lane() == 0) store_shared_4(empty_rows() + (warp() * 2 + h) * 4, empty);
        }
    }
    __device__ __forceinline__ bool is_empty(int row) const {
        return load_shared_4(empty_rows() + row / 8 * 4) >> row % 8 * 4 & 1;
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
            if (kMarkEmpty && is_empty(row)) continue;
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
};
