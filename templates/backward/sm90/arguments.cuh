// What the stages are given, beside the operation's arguments.

struct __align__(64) KernelArgs {
    // Q and dO by boxes of kBlockQ rows, K and V by boxes of kKeys, the gradients by boxes of 64.
    TensorMap q, dout, k, v, dq, dk, dv;
    BackwardArgs backward;
    // For each head, tile by tile of kBlockQ rows, log-sum-exps in units of log2 and behind them D.
    float* statistics;
    // Tiles of dS of the heads of this launch.
    Element* ds;
    // Pairs of a sequence and a KV head: the first of this launch, and how many.
    int first_pair, pairs;
    // Pairs whose blocks take turns: more keep thread blocks of equal length together, fewer keep Q and dO, or K, in L2.
    int section;
};

constexpr int kKeys = 64 * kWarpgroups;  // of a key block
constexpr int kRowBytes = 128;
constexpr int kChunksQK = div_up(kHeadDimQK, 64), kChunksV = div_up(kHeadDimV, 64);
// Columns of products: the head dim that instructions are made for.
constexpr int kColumnsQK = round_up(kHeadDimQK, 16), kColumnsV = round_up(kHeadDimV, 16);
// 64 queries by kKeys of dS: rows are keys.
constexpr int kBytesTile = kKeys * kRowBytes;

// Programmatic launches: a stage may start while the one before it ends, and waits here before it reads what that wrote.
__device__ __forceinline__ void launch_next_stage() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_last_stage() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ int warp() { return warp_uniform(threadIdx.x / 32 % 4); }
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
