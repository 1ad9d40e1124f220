// Key blocks as lists, for masks that may leave any of them: which blocks a tile visits, those that every row sees
// whole first, those that need the mask behind them. Two small kernels write the lists before the attention kernel is
// launched: the first says of each block what the mask does to it, the second gathers. What a mask reads of tensors is
// bounded by the least and the greatest element that a block reads, if these are few. A block whose kind follows from
// no bound is looked at score by score until both a visible and a masked one have been met, so that none is visited in
// vain or masked without need. Of blocks that are cut, the mask itself is kept as well, a bit for each score: heads and
// sequences that share a list need not evaluate it again, nor does the attention kernel have registers for that.

// A list: how many blocks are whole, how many are mixed, and a place for every block. Whole ones are written from the
// front, mixed ones from the back.
struct List {
    static constexpr int kCounts = @{ list_counts }@;
    i64 index;
    u32* words;
    int places;  // key blocks there are

    // The list of a tile: `tile_of_unit` of `tiles_of_unit`.
    static __device__ __forceinline__ List of(const Sm90Args& args, const Tile& tile) {
        const int places = div_up(args.forward.kv_len, kBlockKV);
        const i64 index = i64(MaskUnits(args.forward).of(tile)) * args.blocks + tile.row / kBlockQ;
        return List{index, (u32*)args.found + index * (kCounts + places), places};
    }
    // The blocks by their places in the list: whole ones come first.
    __device__ __forceinline__ BlockRange blocks() const {
        return BlockRange{0, 0, int(words[0]), int(words[0] + words[1])};
    }
    // The block at a place.
    __device__ __forceinline__ int at(const BlockRange& blocks, int place) const {
        return int(words[kCounts + (place < blocks.full_end ? place : places - 1 - (place - blocks.full_end))]);
    }
};

// Scores that a thread of a consumer has of a row in a block, its share: keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9, ... from
// the block's first on, for one of four threads c. Their mask is as many bits, in words; a row has four shares, a block
// kBlockQ rows.
constexpr int kShare = kBlockKV / 4, kShareWords = div_up(kShare, 32), kMaskWords = @{ mask_words }@;
static_assert(kMaskWords == kBlockQ * 4 * kShareWords, "the masks that the host has room for");
__device__ __forceinline__ int key_of_share(int c, int i) { return i / 2 * 8 + c * 2 + i % 2; }

// The number of a tile's key block, which is its place where there are no lists.
__device__ __forceinline__ int block_at(const Sm90Args& args, const Tile& tile, const BlockRange& blocks, int place) {
    return kLists ? List::of(args, tile).at(blocks, place) : place;
}

// The mask of a tile's block, as the attention kernel finds it.
__device__ __forceinline__ const u32* mask_of(const Sm90Args& args, const Tile& tile, int block) {
    const List list = List::of(args, tile);
    return args.masks + (list.index * list.places + block) * kMaskWords;
}
#if FT_LISTS

// A word of a share, evaluated, where there is no memory for the masks of all blocks.
__device__ __noinline__ u32 share_of_mask(const ProgramHead& head, int q, int first, int c, int word) {
    u32 bits = 0;
#pragma unroll 1
    for (int i = 0; i < 32; i++) {
        const int key = min_of(first + key_of_share(c, word * 32 + i), head.kv_len - 1);
        if (program_visible(head, min_of(q, head.q_len - 1), key)) bits |= 1u << i;
    }
    return bits;
}

<% include "lib/cuda/score/box.cuh" %>

// What becomes of a block, as bytes behind the lists.
enum : u8 { kHidden = 0, kMixed = 1, kWhole = 2 };

// The lists of a launch.
struct Lists {
    MaskUnits units;
    int places;
    i64 count;
    u8* kinds;
    __device__ __forceinline__ explicit Lists(const Sm90Args& args) : units(args.forward) {
        places = div_up(args.forward.kv_len, kBlockKV);
        count = i64(units.count) * args.blocks;
        kinds = (u8*)((u32*)args.found + count * (List::kCounts + places));
    }
    // The first of the tiles that share a list.
    __device__ __forceinline__ Tile tile(const Sm90Args& args, i64 list) const {
        return units.tile(args.forward, int(list / args.blocks), int(list % args.blocks) * kBlockQ, kBlockQ);
    }
};

#if FT_DENSE
<% include "forward/sm90/dense_mask.cuh" %>
#else

// As program_tile(), by the elements of tensors that the block reads. For whole warps.
__device__ __forceinline__ int looked_tile(const ProgramHead& head, int q_first, int q_last, int kv_first,
                                           int kv_last) {
    FT_PROGRAM_HEAD;
    (void)q_first, (void)q_last, (void)kv_first, (void)kv_last;
@{ looked_code }@    return @{ looked_masked }@ ? -1 : @{ looked_visible }@ ? 1 : 0;
}

// What the mask makes of a block, score by score. For whole warps.
__device__ __forceinline__ u8 look_at(const ProgramHead& head, const Tile& tile, int n) {
    constexpr int kRows = 2, kColumns = div_up(kBlockKV, 32);
    const MaskKept kept = mask_kept(head);
    const int first = n * kBlockKV, last_key = min_of(kBlockKV, head.kv_len - first) - 1, lane = threadIdx.x % 32;
    bool seen = false, hidden = false;
#pragma unroll 1
    for (int row = 0; row < tile.rows; row += kRows) {
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            const int q = tile.row + min_of(row + i, tile.rows - 1);
            const MaskRow of_row = mask_row(head, kept, q, first);
#pragma unroll
            for (int j = 0; j < kColumns; j++) {
                const bool visible = mask_element(head, kept, of_row, q, first, min_of(j * 32 + lane, last_key));
                seen |= visible, hidden |= !visible;
            }
        }
        const bool any = __any_sync(0xffffffff, seen), none = __any_sync(0xffffffff, hidden);
        if (any && none) return kMixed;
    }
    return __any_sync(0xffffffff, seen) ? kWhole : kHidden;
}

// The mask of a block, bit by bit. For whole warps: the lanes have a score of a share each, and keep a share of eight
// rows.
__device__ __forceinline__ void write_mask(const ProgramHead& head, const Tile& tile, int n, u32* to) {
    const MaskKept kept = mask_kept(head);
    const int first = n * kBlockKV, last_key = min_of(kBlockKV, head.kv_len - first) - 1, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int row = 0; row < kBlockQ; row += 8) {
#pragma unroll
        for (int word = 0; word < kShareWords; word++) {
            u32 mine = 0;
#pragma unroll 2
            for (int i = 0; i < 8; i++) {
                const int q = tile.row + min_of(row + i, tile.rows - 1);
                const MaskRow of_row = mask_row(head, kept, q, first);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int key = min_of(key_of_share(c, word * 32 + lane), last_key);
                    const u32 bits = __ballot_sync(0xffffffff, mask_element(head, kept, of_row, q, first, key));
                    if (lane == i * 4 + c) mine = bits;
                }
            }
            to[(row * 4 + lane) * kShareWords + word] = mine;
        }
    }
}

// What becomes of a block: by bounds where these tell.
__device__ __forceinline__ int kind_of_block(const ProgramHead& head, const Tile& tile, int n, const KernelArgs&, i64) {
    const int last = min_of(n * kBlockKV + kBlockKV, head.kv_len) - 1;
    const int kind = looked_tile(head, tile.row, tile.row + tile.rows - 1, n * kBlockKV, last);
    return kind < 0 ? kHidden : kind > 0 ? kWhole : look_at(head, tile, n);
}

#endif

// A warp for each block of each list.
extern "C" __global__ void __launch_bounds__(@{ classify_threads }@, FT_DENSE ? 8 : 3)
    @{ entry }@_classify(const __grid_constant__ KernelArgs args) {
    constexpr int kWarps = @{ classify_threads }@ / 32;
    const Lists lists(args);
    const i64 index = i64(blockIdx.x) * kWarps + warp_uniform(threadIdx.x / 32);
    if (index >= lists.count * lists.places) return;
    const Tile tile = lists.tile(args, index / lists.places);
    const int n = int(index % lists.places);
    const BlockRange window = blocks_of<kBlockKV, kMaskLeft, kMaskRight>(args, tile);
    const ProgramHead head = program_head(args, args.forward, tile);
    int kind = -1;
    if (n >= window.begin && n < window.end) {
        kind = kind_of_block(head, tile, n, args, index);
        // Beyond the last key, or cut by the window.
        if (kind == kWhole && (n < window.full_begin || n >= window.full_end)) kind = kMixed;
    }
    if (kind == kMixed && args.masks != nullptr) write_mask(head, tile, n, args.masks + index * kMaskWords);
    if (threadIdx.x % 32 == 0) lists.kinds[index] = u8(max_of(kind, int(kHidden)));
}

// A warp for each list.
extern "C" __global__ void __launch_bounds__(kThreads) @{ entry }@_gather(const __grid_constant__ KernelArgs args) {
    const Lists lists(args);
    const i64 index = i64(blockIdx.x) * (kThreads / 32) + warp_uniform(threadIdx.x / 32);
    if (index >= lists.count) return;
    const int lane = threadIdx.x % 32;
    u32* const list = (u32*)args.found + index * (List::kCounts + lists.places);
    const u8* const kinds = lists.kinds + index * lists.places;
    int whole = 0, mixed = 0;
#pragma unroll 1
    for (int base = 0; base < lists.places; base += 32) {
        const int n = base + lane;
        const u8 kind = n < lists.places ? kinds[n] : u8(kHidden);
        const u32 below = (1u << lane) - 1;
        const u32 wholes = __ballot_sync(0xffffffff, kind == kWhole), mixes = __ballot_sync(0xffffffff, kind == kMixed);
        if (kind == kWhole) list[List::kCounts + whole + __popc(wholes & below)] = u32(n);
        if (kind == kMixed) list[List::kCounts + lists.places - 1 - mixed - __popc(mixes & below)] = u32(n);
        whole += __popc(wholes), mixed += __popc(mixes);
    }
    if (lane == 0) list[0] = u32(whole), list[1] = u32(mixed);
}

#else

__device__ __forceinline__ u32 share_of_mask(const ProgramHead&, int, int, int, int) { return 0; }

#endif
