// What a score program's mask changes with besides rows and keys: what is found of it before the attention kernel
// starts is found once for all sequences and heads that it does not tell apart.
constexpr bool kMaskByBatch = @{ mask_by_batch }@;
constexpr bool kMaskByHead = @{ mask_by_head }@;      // of Q
constexpr bool kMaskByKVHead = @{ mask_by_kv_head }@;

// Units are sequences and heads that share what is found.
struct MaskUnits {
    int heads, count;
    __device__ __forceinline__ explicit MaskUnits(const ForwardArgs& args)
        : heads(kMaskByHead ? args.heads : kMaskByKVHead ? args.kv_heads : 1),
          count((kMaskByBatch ? args.batch : 1) * heads) {}
    // That of a tile.
    __device__ __forceinline__ int of(const Tile& tile) const {
        return (kMaskByBatch ? tile.batch * heads : 0) + (kMaskByHead ? tile.head : kMaskByKVHead ? tile.kv_head : 0);
    }
    // Rows of the first head and sequence of a unit.
    __device__ __forceinline__ Tile tile(const ForwardArgs& args, int unit, int row, int rows) const {
        const int group = args.heads / args.kv_heads;
        Tile t;
        t.batch = unit / heads;
        t.head = kMaskByHead ? unit % heads : kMaskByKVHead ? unit % heads * group : 0;
        t.kv_head = t.head / group;
        t.row = row;
        t.rows = min_of(rows, args.q_len - row);
        return t;
    }
};
