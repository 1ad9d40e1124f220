// Pieces of tiles (table.cuh): what a consumer leaves of one in scratch memory, and how whoever is last of a tile's
// puts them together, in the order of their keys: the same bytes in every run. Each consumer has its own rows, and its
// own counter of them.
//
// Scratch memory: counters, and behind them a place for every piece, of the item's number, for each consumer. Threads
// leave what they hold in registers, which those with the same rows and columns take from there:
//   float4[kColumnsV / 8][128]   O, as it is in registers
//   float4[128]                  references and sums of a thread's two rows

constexpr int kCounterBytes = @{ counter_bytes }@;
constexpr int kPieceVectors = (kColumnsV / 8 + 1) * 128;
static_assert(kPieceVectors * 16 == @{ piece_bytes }@, "the scratch memory of a consumer's piece");
// Beside a counter's arrivals: some piece has met non-finite elements of V, which the tile must be looked through for.
constexpr u32 kMetInPiece = 1u << 16;

struct Pieces {
    const RaggedArgs& args;
    const int consumer;
    Piece own;
    __device__ __forceinline__ Pieces(const RaggedArgs& args, int consumer, const Piece& own)
        : args(args), consumer(consumer), own(own) {}

    // The n-th piece of the tile, as this thread has its part of it.
    __device__ __forceinline__ float4* at(int n) const {
        const i64 item = own.item + (n - own.nth) * own.apart;
        return (float4*)((u8*)args.scratch + kCounterBytes) + (item * kConsumers + consumer) * kPieceVectors + threadIdx.x % 128;
    }
    __device__ __forceinline__ u32* counter() const {
        return (u32*)args.scratch + (own.item - own.nth * own.apart) * kConsumers + consumer;
    }

    // By all threads of a consumer, whose reference maxima are m, scores' unit in log2 is `unit`, and sums are complete
    // in l: leaves this piece, and returns whether it is the last. Then all are in o, m and l.
    __device__ __forceinline__ bool merge(Output& o, float (&m)[2], float (&l)[2], float unit, u32 smem, bool& met) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // Scores that all are NaN have no maximum; their sum, of reference 0, must not be lost. A row that has seen
            // nothing has no reference, whatever zero was given for one.
            if (l[h] == 0.0f) m[h] = -FT_INFINITY;
            else if (m[h] == -FT_INFINITY) m[h] = 0.0f;
        }
        float4* const to_own = at(own.nth);
#pragma unroll
        for (int i = 0; i < kColumnsV / 8; i++) to_own[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
        to_own[kColumnsV / 8 * 128] = make_float4(m[0], m[1], l[0], l[1]);
        __threadfence();
        barrier_sync(kWarpgroup + consumer, 128);
        bool last = false, some = false;
        if (threadIdx.x % 128 == 0) {
            const u32 flag = read_flag(smem + Layout::kMetNonFinite) ? kMetInPiece : 0;
            const u32 before = atomicAdd(counter(), 1u | flag);
            last = before % kMetInPiece == u32(own.count - 1), some = before >= kMetInPiece || flag != 0;
            if (last) *counter() = 0;
        }
        last = barrier_any(kWarpgroup + consumer, 128, last);
        met = barrier_any(kWarpgroup + consumer, 128, some);
        if (!last) return false;
        __threadfence();
        float to[2] = {-FT_INFINITY, -FT_INFINITY};
#pragma unroll 4
        for (int n = 0; n < own.count; n++) {
            const float4 sums = __ldcg(at(n) + kColumnsV / 8 * 128);
            to[0] = fmaxf(to[0], sums.x), to[1] = fmaxf(to[1], sums.y);
        }
#pragma unroll
        for (int i = 0; i < kColumnsV / 2; i++) o[i] = 0.0f;
        l[0] = l[1] = 0.0f;
#pragma unroll 1
        for (int n = 0; n < own.count; n++) {
            const float4* const piece = at(n);
            const float4 sums = __ldcg(piece + kColumnsV / 8 * 128);
            const float w[2] = {weight(sums.x, to[0], unit), weight(sums.y, to[1], unit)};
            if (sums.z != 0.0f) l[0] += w[0] * sums.z;
            if (sums.w != 0.0f) l[1] += w[1] * sums.w;
#pragma unroll
            for (int i = 0; i < kColumnsV / 8; i++) {
                const float4 x = __ldcg(piece + i * 128);
                o[4 * i] += weighted(w[0], x.x), o[4 * i + 1] += weighted(w[0], x.y);
                o[4 * i + 2] += weighted(w[1], x.z), o[4 * i + 3] += weighted(w[1], x.w);
            }
        }
        m[0] = to[0], m[1] = to[1];
        return true;
    }

    // 2^(m - to) in units of log2, of a reference that may be none at all.
    static __device__ __forceinline__ float weight(float m, float to, float unit) {
        return m == -FT_INFINITY ? 0.0f : exp2_approx((m - to) * unit);
    }
    // A part of O by its weight, which may be too small for a float: what is no number remains.
    static __device__ __forceinline__ float weighted(float w, float x) { return fabsf(x) < FT_INFINITY ? w * x : x; }
};
