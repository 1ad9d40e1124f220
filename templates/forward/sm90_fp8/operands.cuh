// Where rows, keys and scales of a tile lie in dense tensors.

// The call's lengths and windows, which are those of every tile.
#define FT_SIZES(args, tile) ((args).forward)

// The position in its sequence of a tile's row: heads of a group have tiles of their own.
__device__ __forceinline__ int position_of(const KernelArgs&, int row) { return row; }

// No key lies in a page that is not there.
constexpr bool kPages = false;
struct KeysWithoutPage {
    __device__ __forceinline__ void read(u32, int) {}
    __device__ __forceinline__ void hide(Scores&) const {}
};

// Of four elements of V, the highest bit of each byte that is no number; and what such a byte is.
__device__ __forceinline__ u32 special_bytes(u32 x) { return nan_bytes(x); }
__device__ __forceinline__ float special_value(u8) { return __int_as_float(0x7fffffff); }

// TMA brings zeros for keys behind the last.
__device__ __forceinline__ void clear_behind_last(const Work&, int, u32, int) {}

// What scores are multiplied by, but for scales of rows; and what O is.
__device__ __forceinline__ float score_scale(const KernelArgs& args, const Tile& tile) {
    const ForwardArgs& f = args.forward;
    float scale = f.scale;
    if (!FT_SCALES_OF_QUERIES) scale *= descale(f.q_descale, f.q_descale_stride, tile);
    if (!FT_SCALES_OF_KEYS) scale *= descale(f.k_descale, f.k_descale_stride, tile);
    return scale;
}
__device__ __forceinline__ float value_scale(const KernelArgs& args, const Tile& tile) {
    const ForwardArgs& f = args.forward;
    return FT_SCALES_OF_CHANNELS ? 1.0f : descale(f.v_descale, f.v_descale_stride, tile);
}

// The V of a tile's keys.
struct Values {
    const u8* rows;
    i64 stride;
    __device__ __forceinline__ Values(const ForwardArgs& f, const Tile& tile)
        : rows((const u8*)f.v + tile.batch * f.v_stride[0] + tile.kv_head * f.v_stride[1]), stride(f.v_stride[2]) {}
    __device__ __forceinline__ const u8* at(int key) const { return rows + key * stride; }
};

__device__ __forceinline__ void store_lse(const KernelArgs& args, const Tile& tile, i64 row, float lse) {
    const ForwardArgs& f = args.forward;
    f.lse[(i64(tile.batch) * f.heads + tile.head) * f.q_len + row] = lse;
}
// Row of O, counted as those of Q.
__device__ __forceinline__ OutputElement* output_row(const KernelArgs& args, const Tile& tile, i64 row) {
    const ForwardArgs& f = args.forward;
    return (OutputElement*)f.o + tile.batch * f.o_stride[0] + tile.head * f.o_stride[1] + row * f.o_stride[2];
}

// A tile is one piece: what comes of the others' is nothing.
struct Merged {
    bool writes = true, met = false;
    template <typename... Any> __device__ __forceinline__ void merge(const Any&...) {}
};
