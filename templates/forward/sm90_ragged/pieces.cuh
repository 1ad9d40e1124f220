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
// Tiles of one warpgroup, of which most rows may lie behind the last. Elsewhere the code for that costs 2 us of 44 (128
// rows beside 8k keys): each launch fetches its code anew.
constexpr bool kFewRows = kConsumers == 1;

struct Pieces {
    const RaggedArgs& args;
    const int consumer;
    Piece own;
    __device__ __forceinline__ Pieces(const RaggedArgs& args, int consumer, const Piece& own)
        : args(args), consumer(consumer), own(own) {}

    // The n-th piece of the tile, as a thread has its part of it.
    __device__ __forceinline__ float4* at(int n, int thread) const {
        const i64 item = own.item + (n - own.nth) * own.apart;
        return (float4*)((u8*)args.scratch + kCounterBytes) + (item * kConsumers + consumer) * kPieceVectors + thread;
    }
    __device__ __forceinline__ u32* counter() const {
        return (u32*)args.scratch + (own.item - own.nth * own.apart) * kConsumers + consumer;
    }
    static __device__ __forceinline__ void put(float4* to, const Output& o, const float (&m)[2], const float (&l)[2]) {
#pragma unroll
        for (int i = 0; i < kColumnsV / 8; i++) {
            to[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
        }
        to[kColumnsV / 8 * 128] = make_float4(m[0], m[1], l[0], l[1]);
    }
    // Adds a part of the rows, whose references are not above `to`.
    static __device__ __forceinline__ void add(const float4* part, const float (&to)[2], float unit, Output& o,
                                               float (&l)[2]) {
        const float4 sums = __ldcg(part + kColumnsV / 8 * 128);
        const float w[2] = {weight(sums.x, to[0], unit), weight(sums.y, to[1], unit)};
        if (sums.z != 0.0f) l[0] += w[0] * sums.z;
        if (sums.w != 0.0f) l[1] += w[1] * sums.w;
#pragma unroll
        for (int i = 0; i < kColumnsV / 8; i++) {
            const float4 x = __ldcg(part + i * 128);
            o[4 * i] += weighted(w[0], x.x), o[4 * i + 1] += weighted(w[0], x.y);
            o[4 * i + 2] += weighted(w[1], x.z), o[4 * i + 3] += weighted(w[1], x.w);
        }
    }
    static __device__ __forceinline__ void reference(const float4* part, float (&to)[2]) {
        const float4 sums = __ldcg(part + kColumnsV / 8 * 128);
        to[0] = fmaxf(to[0], sums.x), to[1] = fmaxf(to[1], sums.y);
    }

    // Arrives on the tile's counter, behind a piece that all threads of the consumer have left. Whether it is the last,
    // and whether any of them has met non-finite elements.
    __device__ __forceinline__ bool arrive(u32 smem, bool& met) const {
        __threadfence();
        barrier_sync(kWarpgroup + consumer, 128);
        bool last = false, some = false;
        if (threadIdx.x % 128 == 0) {
            some = read_flag(Layout::met_non_finite_at(smem));
            const u32 before = atomicAdd(counter(), some ? 1u | kMetInPiece : 1u);
            last = before % kMetInPiece == u32(own.count - 1), some |= before >= kMetInPiece;
            if (last) *counter() = 0;
        }
        last = barrier_any(kWarpgroup + consumer, 128, last);
        met = barrier_any(kWarpgroup + consumer, 128, some);
        if (last) __threadfence();
        return last;
    }

    // All pieces of the tile, in the order of their keys.
    //
    // Where rows are few, warps that have none take a run of the pieces of those that have: whoever is last waits for
    // memory piece after piece.
    __device__ __forceinline__ void collect(int rows, float unit, Output& o, float (&m)[2], float (&l)[2]) const {
        const int self = threadIdx.x % 128, warp = self / 32;
        // Of the four warps, `warps` have rows: as many to each team, which has a run of the pieces.
        const int warps = !kFewRows || rows > 32 ? 4 : rows > 16 ? 2 : 1, teams = 4 / warps, team = warp / warps;
        const auto begin_of = [&](int team) { return own.count * team / teams; };
        const int thread = warp % warps * 32 + self % 32, begin = begin_of(team), end = begin_of(team + 1);
        const bool is_row = !kFewRows || warp % warps * 16 + self % 32 / 4 < rows;
#pragma unroll
        for (int i = 0; i < kColumnsV / 2; i++) o[i] = 0.0f;
        m[0] = m[1] = -FT_INFINITY, l[0] = l[1] = 0.0f;
        if (is_row) {
#pragma unroll 4
            for (int n = begin; n < end; n++) reference(at(n, thread), m);
#pragma unroll 1
            for (int n = begin; n < end; n++) add(at(n, thread), m, unit, o, l);
        }
        if (!kFewRows || teams == 1) return;
        // Beside the rows of the first piece of the run, in the place of those that there are not.
        if (team > 0 && is_row && begin < end) put(at(begin, self), o, m, l);
        barrier_sync(kWarpgroup + consumer, 128);
        if (team > 0 || !is_row) return;
        const auto part = [&](int team) { return at(begin_of(team), team * warps * 32 + self); };
        const float own_m[2] = {m[0], m[1]};
#pragma unroll
        for (int t = 1; t < 4; t++) {
            if (t < teams && begin_of(t) < begin_of(t + 1)) reference(part(t), m);
        }
        const float w[2] = {weight(own_m[0], m[0], unit), weight(own_m[1], m[1], unit)};
#pragma unroll
        for (int i = 0; i < kColumnsV / 8; i++) {
            o[4 * i] = weighted(w[0], o[4 * i]), o[4 * i + 1] = weighted(w[0], o[4 * i + 1]);
            o[4 * i + 2] = weighted(w[1], o[4 * i + 2]), o[4 * i + 3] = weighted(w[1], o[4 * i + 3]);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) l[h] = l[h] != 0.0f ? w[h] * l[h] : 0.0f;
#pragma unroll 1
        for (int t = 1; t < teams; t++) {
            if (begin_of(t) < begin_of(t + 1)) add(part(t), m, unit, o, l);
        }
    }

    // By all threads of a consumer of `rows` rows. Their reference maxima are m, the unit of scores in log2 is `unit`,
    // and sums are complete in l. Leaves this piece, and returns whether it is the last: then all are in o, m, l. Rows
    // behind the tile's last are neither left nor read.
    __device__ __forceinline__ bool merge(Output& o, float (&m)[2], float (&l)[2], float unit, u32 smem, int rows,
                                          bool& met) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // Scores that all are NaN have no maximum; their sum, of reference 0, must not be lost. A row that has seen
            // nothing has no reference, whatever zero was given for one.
            if (l[h] == 0.0f) m[h] = -FT_INFINITY;
            else if (m[h] == -FT_INFINITY) m[h] = 0.0f;
        }
        const int self = threadIdx.x % 128;
        const bool is_row = !kFewRows || self / 32 * 16 + self % 32 / 4 < rows;
        if (is_row) put(at(own.nth, self), o, m, l);
        if (!arrive(smem, met)) return false;
        collect(rows, unit, o, m, l);
        return true;
    }

    // 2^(m - to) in units of log2, of a reference that may be none at all.
    static __device__ __forceinline__ float weight(float m, float to, float unit) {
        return m == -FT_INFINITY ? 0.0f : exp2_approx((m - to) * unit);
    }
    // A part of O by its weight, which may be too small for a float: what is no number remains.
    static __device__ __forceinline__ float weighted(float w, float x) { return fabsf(x) < FT_INFINITY ? w * x : x; }
};
