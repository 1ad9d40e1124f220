// Shared memory of the two stages with products, and where a lane reads fragments.
//
//   keys      K V | stages of: Q dO statistics
//   queries   Q dO | stages of: K V

using TileQK = RowTile<kHeadDimQK, false>;
using TileV = RowTile<kHeadDimV, false>;

constexpr int kBlockKeys = kWarps * kKeyRows;
constexpr int kBlockQueries = kWarps * kQueryRows;

// Two numbers of a query; four where rows may be far from zero (far_rows.cuh).
constexpr int kBytesStatistics = kProgramFar ? 16 : 8;

struct KeysLayout {
    static constexpr int kV = kBlockKeys * TileQK::kPitch;
    static constexpr int kStages = kV + kBlockKeys * TileV::kPitch;
    static constexpr int kDout = kStepQ * TileQK::kPitch;  // from the stage's first byte on, which is Q's
    static constexpr int kStatistics = kDout + kStepQ * TileV::kPitch;
    static constexpr int kStage = kStatistics + kStepQ * kBytesStatistics;
    static constexpr int kBytes = kStages + kStagesQ * kStage;
};
struct QueriesLayout {
    static constexpr int kDout = kBlockQueries * TileQK::kPitch;
    static constexpr int kStages = kDout + kBlockQueries * TileV::kPitch;
    static constexpr int kV = kStepKV * TileQK::kPitch;
    static constexpr int kStage = kV + kStepKV * TileV::kPitch;
    static constexpr int kBytes = kStages + kStagesKV * kStage;
};
static_assert(max_of<int>(KeysLayout::kBytes, QueriesLayout::kBytes) == @{ smem_bytes }@,
              "the shared memory that the host asks for");

// The address in a tile at which this lane reads fragments, matrix step 0: of the rows that stay (an A operand, from
// row `first` on), of those that are walked over (B), and of the same by columns (B of a product that sums over rows).
template <typename Tile> __device__ __forceinline__ u32 lane_down(u32 tile, int first) {
    const int lane = threadIdx.x % 32;
    return tile + Tile::lane_base(first + lane % 16, lane / 16);
}
template <typename Tile> __device__ __forceinline__ u32 lane_across(u32 tile) {
    const int lane = threadIdx.x % 32;
    return tile + Tile::lane_base(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <typename Tile> __device__ __forceinline__ u32 lane_columns(u32 tile) { return lane_down<Tile>(tile, 0); }

// Rows of a tensor from one row of a head on.
template <typename A>
__device__ __forceinline__ A* rows_of(A* tensor, const i64 (&stride)[3], int batch, int head, int row) {
    return tensor + batch * stride[0] + head * stride[1] + row * stride[2];
}

// Starts the copy of a tile of which `rows` exist.
template <typename Tile, int kRows>
__device__ __forceinline__ void copy_tile(u32 to, const u16* from, i64 stride, int rows) {
    Tile::template copy_async<kRows, kThreads, true>(to, Tile::template thread_source<kThreads>(from, stride),
                                                     stride, rows);
}

// Whether a chunk that this thread copied holds a non-finite element; between its own wait and the next barrier.
template <typename Tile, int kRows> __device__ __forceinline__ bool met_non_finite(u32 tile) {
    u32 sum = 0;
    Tile::template each_own_chunk<kRows, kThreads>(tile, [&](u32 address) {
        const uint4 x = load_shared_16(address);
        sum = add_zero_times<Element>(add_zero_times<Element>(sum, x.x), x.y);
        sum = add_zero_times<Element>(add_zero_times<Element>(sum, x.z), x.w);
    });
    return sum != 0;
}
