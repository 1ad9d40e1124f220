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
        const i64 begin = args.pages_begin == nullptr ? 0 : max_of(read_int(args.pages_begin, sequence, args.length_words), 0);
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

// A bit for every kKeysPerBit keys of block n that lie in no page. Those behind the last key have none to be asked for.
// Asked before a buffer is waited for, it has the entries of the tables in the L1 cache when the block's boxes are
// sent.
__device__ __forceinline__ u32 keys_without_page(const KernelArgs& args, const Pages& pages, const WorkTile& tile, int n) {
    if (!pages.exist()) return 0;
    u32 none = 0;
    PageOf place = page_of(args.forward, n * kBlockKV);
#pragma unroll 1
    for (int at = 0; at < kBlockKV && n * kBlockKV + at < tile.kv_len; at += args.box_keys) {
        if (pages.at(args.forward.k_table, place.page) < 0) none |= ((2u << (args.box_keys / kKeysPerBit - 1)) - 1) << at / kKeysPerBit;
        place.token += args.box_keys;
        if (place.token == args.forward.page_tokens) place.token = 0, place.page++;
    }
    return none;
}

// Block n of K or V, counted among all key blocks: one box of a pack or slot, or boxes of pages.
template <int kChunks>
__device__ __forceinline__ void load_keys(u32 to, const KernelArgs& args, const Pages& pages, const int* table, const TensorMap& map,
                                          u32 full, int n, const WorkTile& tile) {
    if (!pages.exist()) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk++) {
            tma_load(to + chunk * kBytesChunk, map, full, kEvictLast, chunk * 64, tile.first + n * kBlockKV, tile.kv_head, tile.slot);
        }
        return;
    }
    PageOf place = page_of(args.forward, n * kBlockKV);
#pragma unroll 1
    for (int at = 0; at < kBlockKV; at += args.box_keys) {
        // Behind the last key, and of no page: a box outside of the store, of zeros.
        const int page = n * kBlockKV + at < tile.kv_len ? pages.at(table, place.page) : -1;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk++) {
            tma_load(to + chunk * kBytesChunk + at * 128, map, full, kEvictLast, chunk * 64, place.token, tile.kv_head, page);
        }
        place.token += args.box_keys;
        if (place.token == args.forward.page_tokens) place.token = 0, place.page++;
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
        return (const Element*)args.v + page * args.v_stride[0] + place.token * args.v_stride[1] + kv_head * args.v_stride[2];
    }
};
