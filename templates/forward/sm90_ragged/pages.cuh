// The pages of a sequence, where its store has tables, and which keys of a block lie in no page of the store: such keys
// are masked, and nothing of their K and V is read. A block of keys arrives in boxes of args.box_keys, of one page
// each.

// Keys that one bit stands for: boxes are multiples of it.
constexpr int kKeysPerBit = 16;
static_assert(kBlockKV % kKeysPerBit == 0 && kBlockKV / kKeysPerBit <= 32, "a word for each block");

struct Pages {
    const RaggedArgs& args;
    i64 first;  // of the sequence, in the tables
    __device__ __forceinline__ Pages(const RaggedArgs& args, int sequence) : args(args) {
        const i64 begin =
            args.pages_begin == nullptr ? 0 : max_of(read_int(args.pages_begin, sequence, args.length_words), 0);
        first = args.pages_begin == nullptr ? i64(sequence) * args.table_stride : begin;
    }
    __device__ __forceinline__ bool exist() const { return args.k_table != nullptr; }

    // The n-th page in one of the tables, or -1 where that or the other's is none of the store.
    __device__ __forceinline__ int at(const int* table, int n) const {
        const int k = read_int(args.k_table, first + n, args.table_words);
        const int v = args.v_table == args.k_table ? k : read_int(args.v_table, first + n, args.table_words);
        return is_page(args, k) && is_page(args, v) ? (table == args.k_table ? k : v) : -1;
    }
};

// A lane's box of a block of keys: lane i of a warp looks up the page of box i, all of them at the same time. By one
// thread, page after page, lookups take longer than the products of a block (512 x 8k from pages of 16, 32/8 heads on
// an H200: 233 us, so 139).
static_assert(kBlockKV <= 32 * kKeysPerBit, "a lane for each box");
struct LaneBox {
    int at;           // first key in the block, if there is such a box
    int page, token;  // where it lies: behind the last key, and of no page, outside of the store, of which zeros come
    bool missing;     // whether keys of the sequence lie in no page
};
__device__ __forceinline__ LaneBox lane_box(const KernelArgs& args, const Pages& pages, const int* table,
                                            const WorkTile& tile, int n) {
    LaneBox box = {int(threadIdx.x % 32) * args.box_keys, -1, 0, false};
    const int key = n * kBlockKV + box.at;
    if (box.at < kBlockKV && key < tile.kv_len && pages.exist()) {
        const PageOf place = page_of(args.forward, key);
        box.page = pages.at(table, place.page), box.token = place.token, box.missing = box.page < 0;
    }
    return box;
}

// A bit for every kKeysPerBit keys of a block that lie in no page. Those behind the last key have none to be asked for.
__device__ __forceinline__ u32 keys_without_page(const KernelArgs& args, const LaneBox& box) {
    u32 none = 0;
    for (u32 lanes = __ballot_sync(0xffffffff, box.missing); lanes != 0; lanes &= lanes - 1) {
        none |= ((2u << (args.box_keys / kKeysPerBit - 1)) - 1) << (__ffs(lanes) - 1) * args.box_keys / kKeysPerBit;
    }
    return none;
}

// Block n of K or V, counted among all key blocks, by a warp: one box of a pack or slot, or boxes of pages.
template <int kChunks>
__device__ __forceinline__ void load_keys(u32 to, const KernelArgs& args, const Pages& pages, const LaneBox& box,
                                          const TensorMap& map, u32 full, int n, const WorkTile& tile) {
    const bool paged = pages.exist();
    const int row = paged ? box.token : tile.first + n * kBlockKV, page = paged ? box.page : tile.slot;
    if (paged ? box.at < kBlockKV : box.at == 0) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk++) {
            const u32 at = to + chunk * kBytesChunk + box.at * 128;
            tma_load(at, map, full, kEvictLast, chunk * kChunkColumns, row, tile.kv_head, page);
        }
    }
}

// Where a key's V lies; null for a key of no page. Rarely asked for.
struct Values {
    const RaggedArgs& args;
    Sequence sequence;
    Pages pages;
    int kv_head;
    __device__ __forceinline__ Values(const RaggedArgs& args, const WorkTile& tile)
        : args(args), sequence(sequence_of(args, tile.batch)), pages(args, tile.batch), kv_head(tile.kv_head) {}
    __device__ __forceinline__ const Element* at(int key) const {
        const PageOf place = pages.exist() ? page_of(args, key) : PageOf{0, sequence.first + key};
        const int page = pages.exist() ? pages.at(args.v_table, place.page) : sequence.slot;
        if (page < 0) return nullptr;
        return (const Element*)args.v + page * args.v_stride[0] + place.token * args.v_stride[1] +
               kv_head * args.v_stride[2];
    }
};
