// What the consumer of forward/sm90_fp8 asks of a tile's operands, of a ragged batch.

// A bit for each kKeysPerBit keys of a stage of K that lie in no page.
__device__ __forceinline__ u32 without_page_at(u32 smem, int stage) {
    return smem + Layout::kBehind + kBytesTable + stage * 4;
}

// The position in its sequence of a tile's row, whose heads of a group lie side by side.
__device__ __forceinline__ int position_of(const KernelArgs& args, int row) { return row >> args.group_shift; }
__device__ __forceinline__ int head_of(const KernelArgs& args, const WorkTile& tile, int row) {
    return (tile.head << args.group_shift) + (row & ((1 << args.group_shift) - 1));
}

// Keys of a block that lie in no page are keys of nobody.
constexpr bool kPages = true;
struct KeysWithoutPage {
    u32 bits;  // one for each kKeysPerBit keys

    __device__ __forceinline__ void read(u32 smem, int stage) {
        bits = warp_uniform(load_shared_4(without_page_at(smem, stage)));
        __syncwarp();  // all lanes have read it: one gives the stage back
    }
    __device__ __forceinline__ void hide(Scores& s) const {
        if (bits == 0) return;
#pragma unroll
        for (int i = 0; i < kBlockKV / 2; i++) {
            if (bits >> i / 4 * 8 / kKeysPerBit & 1) s[i] = -FT_INFINITY;
        }
    }
};

// Of four elements of V, the highest bit of each byte that is no number; and what such a byte is.
__device__ __forceinline__ u32 special_bytes(u32 x) {
    return kIsE4m3<Element> ? nan_bytes(x) : non_finite_bytes_e5m2(x);
}
__device__ __forceinline__ float special_value(u8 x) { return to_float(Element{x}); }

// Makes keys of V behind a sequence's last zeros, of the columns that this warp transposes. Slots behind it may hold
// anything, and no row attends to them; left to the search for NaN, every tile that meets one would search all of V.
__device__ __forceinline__ void clear_behind_last(const Work& work, int n, u32 block, int warp) {
    const int filled = work.tile.kv_len - n * kBlockKV;
    if (filled >= kBlockKV) return;
#pragma unroll 1
    for (int group = warp; group < kColumnsV / 16; group += kTransposers) {
#pragma unroll 1
        for (int row = filled + int(threadIdx.x) % 32; row < kBlockKV; row += 32) {
            store_shared_16(block + group / 8 * kBytesChunk + row * 128 + (u32(group % 8 ^ row % 8) << 4),
                            uint4{0, 0, 0, 0});
        }
    }
    __syncwarp();
}

// What all rows and keys of a tile have as a scale, of scores and of O.
template <int kRows> struct RowFactors {
    enum { kCount = 1 };
    float of[kCount];
    __device__ __forceinline__ float operator[](int) const { return of[0]; }
};
__device__ __forceinline__ float head_scale(const float* scales, const i64 (&stride)[3], const WorkTile& tile) {
    return scales == nullptr ? 1.0f : scales[tile.batch * stride[0] + tile.kv_head * stride[1]];
}
__device__ __forceinline__ float score_scale(const KernelArgs& args, const WorkTile& tile) {
    const RaggedArgs& f = args.forward;
    return f.scale * query_scale<e4m3>(f, tile.batch, tile.kv_head) * head_scale(f.k_scale, f.k_scale_stride, tile);
}
__device__ __forceinline__ float value_scale(const KernelArgs& args, const WorkTile& tile) {
    return head_scale(args.forward.v_scale, args.forward.v_scale_stride, tile);
}

// Row of O, counted as those of Q.
__device__ __forceinline__ OutputElement* output_row(const KernelArgs& args, const WorkTile& tile, int row) {
    const i64* const stride = args.forward.o_stride;
    const i64 of_head = place_in_batch(args, tile) * stride[0] + head_of(args, tile, row) * stride[1];
    return (OutputElement*)args.forward.o + of_head + i64(tile.q_row + position_of(args, row)) * stride[2];
}
