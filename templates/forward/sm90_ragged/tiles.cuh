// What is known of a tile of a ragged batch: the lengths of its sequence and where its rows lie, beside its own rows.

@{ sm90_ragged_args }@
struct WorkTile : Tile {
    int q_len, kv_len;
    int q_row;  // the sequence's first row in a pack of queries
    int first;  // place of its first key in its page
    int slot;   // the page that holds its keys
};

struct Lengths {
    int q_len, kv_len, window_left, window_right;
};
#define FT_SIZES(args, tile) \
    (Lengths{(tile).q_len, (tile).kv_len, (args).forward.window_left, (args).forward.window_right})

// Tiles of the launch: as many as the lengths say.
#define FT_TILES(args, smem) load_shared_4((smem) + Layout::kTable + kEntries * 4)

// The number of a tile's key block, which is its place: ragged batches have no block lists.
template <typename Blocks>
__device__ __forceinline__ int block_at(const Sm90Args&, const WorkTile&, const Blocks&, int place) { return place; }
