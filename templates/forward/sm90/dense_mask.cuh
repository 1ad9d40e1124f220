// Key blocks of a mask that is a tensor of bools by query and key, maybe beside other conditions. A lane takes sixteen
// bools of a row at once, and what it has read gives both what becomes of the block and its bits: the tensor is read
// once, at the memory's speed. Bool by bool the classification of 8 x 2048 x 2048 took 174 us, where its 33 MB take 8.

constexpr bool kDenseNegated = @{ dense_negated }@;  // true for keys that are left out
constexpr bool kDenseAlone = @{ dense_alone }@;      // nothing is asked beside the tensor

// Where the bools of a head lie.
struct DenseMask {
    const u8* data;  // of the first query and key
    i64 row, key;    // distances
    u64 begin, end;  // between these addresses all is the tensor's, if keys lie side by side: nothing else is read
};
template <int kLeading> __device__ __forceinline__ DenseMask dense_at(const SideTensor& tensor, const i64* at) {
    const u8* data = (const u8*)tensor.data;
#pragma unroll
    for (int a = 0; a < kLeading; a++) data += ft_clamp64(at[a], tensor.length[a]) * tensor.stride[a];
    const i64 row = tensor.stride[kLeading], key = tensor.stride[kLeading + 1];
    const i64 last = (tensor.length[kLeading] - 1) * row + (tensor.length[kLeading + 1] - 1) * key;
    return DenseMask{data, row, key, (u64)data, (u64)data + last + 1};
}
__device__ __forceinline__ DenseMask dense_mask(const ProgramHead& head) {
    FT_PROGRAM_HEAD;
@{ dense_code }@}

// What is asked beside the tensor: of a score, and of a block as program_tile(). The latter for whole warps.
__device__ __forceinline__ bool rest_visible(const ProgramHead& head, int q, int kv) {
    FT_PROGRAM_HEAD;
    (void)q, (void)kv;
@{ rest_code }@    return @{ rest_result }@;
}
__device__ __forceinline__ int rest_tile(const ProgramHead& head, int q_first, int q_last, int kv_first, int kv_last) {
    if (kDenseAlone) return 1;
    FT_PROGRAM_HEAD;
    (void)q_first, (void)q_last, (void)kv_first, (void)kv_last;
@{ rest_tile_code }@    return @{ rest_tile_masked }@ ? -1 : @{ rest_tile_visible }@ ? 1 : 0;
}

// Sixteen keys of a row, as bits by the shares of the threads that have their scores (key_of_share() in lists.cuh):
// four bits for each, low and upper half of `even` for the first and the second share, of `odd` for the others.
struct KeyBits {
    u32 even, odd;
};
// Of four bools, any byte but zero being true: bit 7 of each byte.
__device__ __forceinline__ u32 true_bytes(u32 w) { return (((w & 0x7f7f7f7f) + 0x7f7f7f7f) | w) & 0x80808080; }
// Of four keys, and the four that are eight keys further: those of the first two of each, and those of the last two.
__device__ __forceinline__ u32 bits_of_both(u32 first, u32 second) {
    const u32 apart = true_bytes(first) >> 7 | true_bytes(second) >> 5;
    return (apart | apart >> 7) & 0x000f000f;
}
__device__ __forceinline__ KeyBits bits_of(uint4 bools) {
    return KeyBits{bits_of_both(bools.x, bools.z), bits_of_both(bools.y, bools.w)};
}
// Of keys of which a function tells.
template <typename Visible> __device__ __forceinline__ KeyBits bits_where(const Visible& visible) {
    KeyBits bits = {0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const u32 bit = visible(i) ? 1u << (i / 8 * 2 + i % 2 + (i & 2) * 8) : 0;
        (i & 4 ? bits.odd : bits.even) |= bit;
    }
    return bits;
}

// How sixteen bools are read: at once; as five words, where rows begin anywhere; one by one, where keys do not lie side
// by side, and at the ends of the tensor.
enum class Bools { kWide, kWords, kSingle };
template <Bools kHow> __device__ __forceinline__ uint4 load_bools(const u8* at, i64 key, int last) {
    uint4 bools;
    u32* const words = &bools.x;
    if constexpr (kHow == Bools::kWide) {
        bools = *(const uint4*)at;
    } else if constexpr (kHow == Bools::kWords) {
        const u32 before = u32((u64)at & 3), off = before * 8;
        const u32* const from = (const u32*)(at - before);
        u32 w[5];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = from[i];
        w[4] = from[off == 0 ? 3 : 4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = __funnelshift_r(w[i], w[i + 1], off);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i] = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) words[i] |= u32(at[min_of(4 * i + j, last) * key]) << (8 * j);
        }
    }
    return bools;
}

constexpr int kLanesOfRow = 8, kRowsOfWarp = 32 / kLanesOfRow;  // a row's 128 keys are a word of each of its shares

// The bits of eight lanes that have 128 keys of a row, joined: of one share each, twice.
__device__ __forceinline__ int share_of_lane(int chunk) { return chunk % 2 * 2 + chunk / 4; }
__device__ __forceinline__ u32 join_shares(KeyBits bits, int chunk) {
    const int shift = chunk % 4 * 4;
    const bool odd = chunk & 1;
    u32 mine = (odd ? bits.odd : bits.even) << shift;
    mine |= __shfl_xor_sync(0xffffffff, (odd ? bits.even : bits.odd) << shift, 1);
    mine |= __shfl_xor_sync(0xffffffff, mine, 2);
    const u32 other = __shfl_xor_sync(0xffffffff, mine, 4);
    return chunk < 4 ? (mine & 0xffff) | other << 16 : other >> 16 | (mine & 0xffff0000);
}

// Rows of a block: reads its bools, writes the bits if there is a place for them, and notes what was met. With kRest
// the other conditions are asked for each score.
template <bool kRest> struct DenseBlock {
    const ProgramHead& head;
    const DenseMask& mask;
    const Tile& tile;
    const int first_key;  // of this lane; of one that has none the block's, which is read in vain
    const int keys;       // of its sixteen that exist; less than one if none does
    const int chunk;      // its place in a row of 128 keys
    u32* const to;        // the word of its share in the tile's first row
    const KeyBits exist;
    u32 seen = 0, hidden = 0;

    __device__ __forceinline__ int row_of(int step) const {
        return tile.row + min_of(step * kRowsOfWarp + int(threadIdx.x) % 32 / kLanesOfRow, tile.rows - 1);
    }
    __device__ __forceinline__ const u8* first_of(int q) const {
        return mask.data + q * mask.row + first_key * mask.key;
    }

    // Of kTogether steps all loads are made before the first result is wanted.
    template <Bools kHow, int kTogether> __device__ __forceinline__ void look(int first_step) {
        uint4 bools[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; i++) {
            bools[i] = load_bools<kHow>(first_of(row_of(first_step + i)), mask.key, max_of(keys - 1, 0));
        }
#pragma unroll
        for (int i = 0; i < kTogether; i++) {
            const int step = first_step + i;
            KeyBits bits = bits_of(bools[i]);
            if (kDenseNegated) bits = KeyBits{~bits.even, ~bits.odd};
            bits = KeyBits{bits.even & exist.even, bits.odd & exist.odd};
            if constexpr (kRest) {
                const int q = row_of(step);
                const KeyBits rest = bits_where([&](int k) {
                    return rest_visible(head, q, first_key + max_of(0, min_of(k, keys - 1)));
                });
                bits = KeyBits{bits.even & rest.even, bits.odd & rest.odd};
            }
            seen |= bits.even | bits.odd;
            hidden |= (bits.even ^ exist.even) | (bits.odd ^ exist.odd);
            if (to == nullptr) continue;
            const u32 word = join_shares(bits, chunk);
            const int row = step * kRowsOfWarp + int(threadIdx.x) % 32 / kLanesOfRow;
            if (!(chunk & 2)) to[row * 4 * kShareWords] = word;
        }
    }

    // All rows: of each few, all lanes read as the least convenient row of them demands.
    __device__ __forceinline__ void look_at_all() {
        constexpr int kTogether = kRest ? 1 : 4, kRows = kTogether * kRowsOfWarp;
        static_assert(kBlockQ % kRows == 0);
        const bool aligned = (u64(mask.data + first_key) | u64(mask.row)) % 16 == 0;
#pragma unroll 1
        for (int row = 0; row < kBlockQ; row += kRows) {
            const int first_step = row / kRowsOfWarp;
            const u64 low = u64(first_of(row_of(first_step)));
            const u64 high = u64(first_of(row_of(first_step + kTogether - 1))) + 16;
            const u64 align = aligned ? 0 : 3;  // words begin before a row
            const bool inside = mask.key == 1 && (low & ~align) >= mask.begin && ((high + align) & ~align) <= mask.end;
            if (!__all_sync(0xffffffff, inside)) {
#pragma unroll 1
                for (int i = 0; i < kTogether; i++) look<Bools::kSingle, 1>(first_step + i);
            } else if (aligned) {
                look<Bools::kWide, kTogether>(first_step);
            } else {
                look<Bools::kWords, kTogether>(first_step);
            }
        }
    }
};

// What the mask makes of a block, and its bits. For whole warps.
template <bool kRest>
__device__ __forceinline__ u8 look_at_dense(const ProgramHead& head, const Tile& tile, int n, u32* to) {
    const DenseMask mask = dense_mask(head);
    const int lane = threadIdx.x % 32, chunk = lane % kLanesOfRow;
    bool seen = false, hidden = false;
#pragma unroll 1
    for (int word = 0; word < kShareWords; word++) {
        const int offset = word * 128 + chunk * 16, first = n * kBlockKV + offset;
        const int keys = min_of(16, min_of(kBlockKV - offset, head.kv_len - first));
        u32* const place = to == nullptr ? nullptr : to + share_of_lane(chunk) * kShareWords + word;
        const KeyBits exist = bits_where([&](int k) { return k < keys; });
        DenseBlock<kRest> block = {head, mask, tile, keys > 0 ? first : n * kBlockKV, keys, chunk, place, exist};
        block.look_at_all();
        seen |= block.seen != 0, hidden |= block.hidden != 0;
    }
    const bool any = __any_sync(0xffffffff, seen), none = __any_sync(0xffffffff, hidden);
    return any && none ? kMixed : any ? kWhole : kHidden;
}

// The same of a block that the other conditions may decide, by its place among those of all lists.
__device__ __forceinline__ int kind_of_block(const ProgramHead& head, const Tile& tile, int n, const KernelArgs& args,
                                             i64 index) {
    u32* const to = args.masks != nullptr ? args.masks + index * kMaskWords : nullptr;
    const int last = min_of(n * kBlockKV + kBlockKV, head.kv_len) - 1;
    const int rest = rest_tile(head, tile.row, tile.row + tile.rows - 1, n * kBlockKV, last);
    if (rest < 0) return kHidden;
    if (kDenseAlone || rest > 0) return look_at_dense<false>(head, tile, n, to);
    return look_at_dense<!kDenseAlone>(head, tile, n, to);
}
__device__ __forceinline__ void write_mask(const ProgramHead&, const Tile&, int, u32*) {}  // that is done
