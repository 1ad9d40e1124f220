/* @{ header }@ */

// Rows of Q, K and V as e4m3 with their scales, in one launch behind one that clears its counters.
//
//   x = row, rotated by its position     K: x -= mean of x over the rows of the unit
//   Q, K: x = H x / sqrt(head dim)       scale = largest |x| of the unit / 448      code = x / scale
//
// A unit is the rows of a KV head of a sequence, of Q those of its query heads. A scale is that of a unit, of a whole
// tensor, of a row, of rows that follow each other, or of a column of V in a unit. Those of rows are known when a tile
// was read, and it is written at once. The others are known when all of the unit was read, so that memory is read once
// and L2 twice: work is a list of items, which thread blocks take in its order from a counter, and in which a tile is
// written a few tiles of the next tensor after it was read. Slot s of the list has, tile by tile,
//
//   sums of K(s), largest of Q(s), write V(s-1), largest of K(s), write Q(s), largest of V(s), write K(s)
//
// for unit s, of tensors with scales of rows nothing but what is written. Where these are so few that thread blocks
// would wait for each other, what waits for sums, and what is written, is that of some slots before; of tensors with
// one scale for all units it comes behind all.
//
// An item waits for the count of what it needs, all of which stands before it in the list: whoever has that runs
// already and waits for earlier items alone, so that any number of thread blocks at a time comes to an end. Largest
// elements have no order and sums of K are added up tile by tile, so that it does not show who did what.
//
// A row has kLanes threads, with 8 elements side by side in each of kUnits units, kLanes * 8 elements apart. Of rows on
// the 16-byte grid, neither rotated nor mixed, a thread has as many at once under way as make 64 bytes.

<% include "lib/cuda/attention/types.cuh" %>
<% include "lib/cuda/attention/kv_elements.cuh" %>
<% include "lib/cuda/attention/quantise.cuh" %>
<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/dependent_launch.cuh" %>
<% include "lib/cuda/ptx/global_counter.cuh" %>
#if __CUDA_ARCH__ >= 890
<% include "lib/cuda/ptx/convert_fp8.cuh" %>
#endif
typedef int int32_t;  // NVRTC has none
@{ quantise_args }@

// Problem.
using Element = @{ dtype }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
// Schedule.
constexpr int kThreads = @{ threads }@;
constexpr int kSteps = @{ steps }@;
constexpr int kAhead = @{ ahead }@;
constexpr int kBlocksPerSM = @{ blocks_per_sm }@;

using KernelArgs = QuantiseArgs;

constexpr int kUnit = 8;           // elements side by side that a thread has
constexpr int kLanes = @{ lanes }@;  // threads of a row
constexpr int kStepRows = kThreads / kLanes;
constexpr int kRows = kSteps * kStepRows;
constexpr int kWarps = kThreads / 32;
static_assert(kRows == @{ tile_rows }@, "the rows of a tile that the host counts with");
template <int kDim> constexpr int kUnits = div_up(kDim, kLanes* kUnit);
constexpr int kPadded = kUnits<max_of(kHeadDimQK, kHeadDimV)> * kLanes * kUnit;
// Shared memory: a few words, of each row of a tile its largest and of each block of rows what it is multiplied by, K's
// mean or what channels of V are multiplied by, and what each warp has found of columns: sums, or largest ones.
constexpr int kTaken = 0, kIsLast = 4, kInverse = 8, kMost = 16, kRowMost = kMost + round_up(4 * kWarps, 16);
constexpr int kRowInverse = kRowMost + 4 * kRows, kMean = kRowInverse + 4 * kRows;
constexpr int kSums = kMean + 4 * kPadded;
static_assert(kSums + 4 * kWarps * kPadded == @{ smem_bytes }@, "the shared memory that the host asks for");

<% include "lib/cuda/attention/elements.cuh" %>
<% include "lib/cuda/attention/rotary.cuh" %>

enum Tensor { kQ, kK, kV };
enum ScaleKind { kOfUnit, kOfRows, kOfChannel };

// What thread blocks leave for each other. The counters are zero before the main stage.
struct Scratch {
    u32 *taken, *done, *largest;  // items; and of each tensor and unit tiles, and the bits of the largest magnitude
    u32 *arrived, *ready;         // of each unit tiles of K that are summed, and whether the mean is there
    u32* channels;                // of each unit the bits of the largest magnitude of each column of V
    float *mean, *sums;           // of each unit, and of each tile of it

    __device__ __forceinline__ explicit Scratch(const QuantiseArgs& args) {
        const i64 units = i64(args.batch) * args.kv_heads;
        taken = (u32*)args.scratch;
        done = taken + 4;
        largest = done + 3 * units;
        arrived = largest + 3 * units;
        ready = arrived + units;
        channels = ready + units;
        mean = (float*)(channels + units * kHeadDimV);
        sums = mean + units * kHeadDimQK;
    }
    __device__ __forceinline__ i64 counters() const { return (const u32*)mean - taken; }
};

// Rows of a tensor in a unit: of one head after the other.
__device__ __forceinline__ int tiles_of_head(const QuantiseArgs& args, int tensor) {
    if (args.from[tensor] == nullptr) return 0;
    return div_up(tensor == kQ ? args.q_len : args.kv_len, kRows);
}
__device__ __forceinline__ int group_of(const QuantiseArgs& args, int tensor) {
    return tensor == kQ ? args.heads / args.kv_heads : 1;
}

// What there is to do, in its order.
enum Phase { kSum, kLargestOf, kWrite };
struct Item {
    int phase, tensor, unit, tile;  // unit -1: nothing
};
struct List {
    int units, of_slot, slots;
    int behind_sums;  // slots from the sums of a unit to its largest
    int tiles[3], searched[3];  // of a unit, and those of which the largest is searched
    int behind[3];              // slots from the sums of a unit until it is written

    __device__ __forceinline__ explicit List(const QuantiseArgs& args) {
        units = args.batch * args.kv_heads;
#pragma unroll
        for (int t = 0; t < 3; t++) tiles[t] = tiles_of_head(args, t) * group_of(args, t);
#pragma unroll
        for (int t = 0; t < 3; t++) searched[t] = args.scale_kind[t] == kOfRows ? 0 : tiles[t];
        const int summed = args.subtracts_mean ? tiles[kK] : 0;
        of_slot = tiles[kQ] + tiles[kK] + tiles[kV] + searched[kQ] + searched[kK] + searched[kV] + summed;
        // Items between two of a tile in one slot, the fewest of all that wait for another, and slots that make them as
        // many as thread blocks can be in need of.
        int between = kAhead;
        if (searched[kQ] > 0) between = min_of(between, tiles[kV] + searched[kK]);
        if (searched[kK] > 0) between = min_of(between, tiles[kQ] + searched[kV]);
        if (searched[kV] > 0) between = min_of(between, tiles[kK] + summed + searched[kQ]);
        if (summed > 0) between = min_of(between, searched[kQ] + tiles[kV]);
        const int ahead = min_of(kAhead, int(gridDim.x));
        const int slots_ahead = between < ahead ? div_up(ahead - between, max_of(of_slot, 1)) : 0;
        behind_sums = args.subtracts_mean ? slots_ahead : 0;
        slots = 0;
#pragma unroll
        for (int t = 0; t < 3; t++) {
            // The rows of all units come before the first that is written with the scale of all.
            const int of_search = (args.is_whole[t] ? units : slots_ahead) + (t == kV ? 1 : 0);
            const bool is_searched = searched[t] > 0;
            behind[t] = (is_searched || t == kK ? behind_sums : 0) + (is_searched ? of_search : 0);
            if (tiles[t] > 0) slots = max_of(slots, units + behind[t]);
        }
    }
    __device__ __forceinline__ u32 count() const { return u32(slots) * u32(of_slot); }

    // Leaves in `at` the tile of a step of a slot, or what is left of it behind that step.
    __device__ __forceinline__ bool is_in(int& at, int count) const {
        if (at < count) return true;
        at -= count;
        return false;
    }
    __device__ __forceinline__ Item at(const QuantiseArgs& args, u32 index) const {
        const int slot = int(index / u32(of_slot));
        int at = int(index % u32(of_slot));
        const auto item = [&](int phase, int tensor) {
            const int unit = slot - (phase == kWrite ? behind[tensor] : phase == kSum ? 0 : behind_sums);
            return Item{phase, tensor, unit < units ? unit : -1, at};
        };
        if (args.subtracts_mean && is_in(at, tiles[kK])) return item(kSum, kK);
        if (is_in(at, searched[kQ])) return item(kLargestOf, kQ);
        if (is_in(at, tiles[kV])) return item(kWrite, kV);
        if (is_in(at, searched[kK])) return item(kLargestOf, kK);
        if (is_in(at, tiles[kQ])) return item(kWrite, kQ);
        if (is_in(at, searched[kV])) return item(kLargestOf, kV);
        return item(kWrite, kK);
    }
};

// Entry i of an array of 32- or 64-bit integers.
__device__ __forceinline__ i64 read_int(const int* array, i64 i, int words) {
    return words == 1 ? i64(array[i]) : ((const i64*)array)[i];
}

// The rows of a tile, those of one head.
struct Rows {
    const Element* from;
    e4m3* to;
    i64 from_stride, to_stride;
    int batch, head, kv_head, first, end;

    __device__ __forceinline__ Rows(const QuantiseArgs& args, const Item& item) {
        const int t = item.tensor, of_head = tiles_of_head(args, t);
        batch = item.unit / args.kv_heads;
        kv_head = item.unit % args.kv_heads;
        head = kv_head * group_of(args, t) + item.tile / of_head;
        first = item.tile % of_head * kRows;
        end = min_of(first + kRows, t == kQ ? args.q_len : args.kv_len);
        const i64 *in = args.from_stride + 3 * t, *out = args.to_stride + 3 * t;
        from = (const Element*)args.from[t] + batch * in[0] + head * in[1];
        to = (e4m3*)args.to[t] + batch * out[0] + head * out[1];
        from_stride = in[2];
        to_stride = out[2];
    }
    // Whether every unit of a row is on the grid of 16 bytes where it is read, and of 8 where it is written.
    __device__ __forceinline__ bool are_aligned() const {
        return (u64(from) | u64(from_stride) * sizeof(Element)) % 16 == 0 && (u64(to) | u64(to_stride)) % 8 == 0;
    }
};

// A row's part of a thread.
template <int kDim> using Part = float[kUnits<kDim>][kUnit];

__device__ __forceinline__ int column_of(int unit) { return (unit * kLanes + int(threadIdx.x) % kLanes) * kUnit; }

// 1 / sqrt(n) of a power of two.
constexpr float root_of_inverse(int n) {
    return n == 1 ? 1.0f : n == 2 ? 0.70710678118654752f : root_of_inverse(n / 4) / 2;
}

// Multiplies rows, each of which all of its threads have, by the Hadamard matrix (Sylvester's) over sqrt(kDim).
template <int kDim> __device__ __forceinline__ void mix(Part<kDim>& x) {
    static_assert((kDim & (kDim - 1)) == 0, "a power of two");
#pragma unroll
    for (int step = 1; step < kDim; step *= 2) {
#pragma unroll
        for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
            for (int i = 0; i < kUnit; i++) {
                if (step < kUnit) {
                    if (i & step) continue;
                    const float a = x[u][i], b = x[u][i + step];
                    x[u][i] = a + b, x[u][i + step] = a - b;
                } else if (step < kUnit * kLanes) {
                    const float other = __shfl_xor_sync(0xffffffff, x[u][i], step / kUnit);
                    x[u][i] = threadIdx.x & (step / kUnit) ? other - x[u][i] : x[u][i] + other;
                } else {
                    constexpr int kMostUnits = kUnits<kDim> - 1;
                    const int apart = step / kUnit / kLanes;
                    if (u & apart) continue;
                    const float a = x[u][i], b = x[min_of(u + apart, kMostUnits)][i];
                    x[u][i] = a + b, x[min_of(u + apart, kMostUnits)][i] = a - b;
                }
            }
        }
    }
#pragma unroll
    for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
        for (int i = 0; i < kUnit; i++) x[u][i] *= root_of_inverse(kDim);
    }
}

// Row `step` of a thread's rows in a tile, or -1 where there is none.
__device__ __forceinline__ int row_at(const Rows& rows, int step) {
    const int row = rows.first + step * kStepRows + int(threadIdx.x) / kLanes;
    return row < rows.end ? row : -1;
}

// That row, rotated by its position where its tensor is; zeros where there is none.
template <int kDim>
__device__ __forceinline__ void load_row(const QuantiseArgs& args, const Rows& rows, int tensor, int row,
                                         Part<kDim>& x) {
    const bool exists = row >= 0, rotates = tensor != kV && args.cos != nullptr;
    const Element* from = rows.from + i64(row) * rows.from_stride;
#pragma unroll
    for (int u = 0; u < kUnits<kDim>; u++) {
        const int column = column_of(u);
        Elements<Element, kUnit> raw;
        if (!exists || column >= kDim) {
#pragma unroll
            for (int i = 0; i < kUnit; i++) raw.at[i] = Element();
        } else if (kDim % kUnit != 0 && column + kUnit > kDim) {
            raw = load_tail<kUnit>(from + column, kDim - column);
        } else {
            raw = load<Element, kUnit>(from + column);
        }
#pragma unroll
        for (int i = 0; i < kUnit; i++) x[u][i] = to_float(raw.at[i]);
    }
    if (rotates && exists) {
        const int* positions = args.positions[tensor];
        const i64 at = rows.batch * args.position_stride[tensor] + row;
        const i64 position = positions == nullptr ? args.first_position[tensor] + row
                                                  : read_int(positions, at, args.position_words);
#pragma unroll
        for (int u = 0; u < kUnits<kDim>; u++) {
            if (column_of(u) < args.rotary_dim) rotate(args, from, column_of(u), position, x[u]);
        }
    }
}

// Takes K's mean from a row that there is.
template <int kDim> __device__ __forceinline__ void subtract_mean(u32 smem, Part<kDim>& x) {
#pragma unroll
    for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
        for (int i = 0; i < kUnit; i++) {
            x[u][i] -= __uint_as_float(load_shared_4(smem + kMean + 4 * (column_of(u) + i)));
        }
    }
}

// A row as it is quantised, from what was loaded.
template <int kDim>
__device__ __forceinline__ void finish_row(const QuantiseArgs& args, u32 smem, int tensor, int row, Part<kDim>& x) {
    if (tensor == kK && args.subtracts_mean && row >= 0) subtract_mean<kDim>(smem, x);
    if constexpr ((kDim & (kDim - 1)) == 0) {
        if (tensor != kV && args.is_mixed) mix<kDim>(x);
    }
}

// Rows that a thread of an aligned tile reads before it looks at the first: 64 bytes.
template <int kDim>
constexpr int kAtOnce = min_of<int>(kSteps, max_of<int>(1, 64 / (kUnits<kDim> * kUnit * int(sizeof(Element)))));

// Calls f(step, row, x, Bool<are aligned>) for each of a thread's rows of a tile, those that there are not as zeros
// with the row -1, and once before(), by all threads, when the first are on their way. kFinal: as they are quantised,
// and not as loaded.
template <int kDim, bool kFinal, typename Before, typename F>
__device__ __forceinline__ void each_row(const QuantiseArgs& args, u32 smem, const Rows& rows, int tensor,
                                         const Before& before, const F& f) {
    // What is rotated or mixed is a page of code for each row, and goes one by one.
    const bool is_plain = tensor == kV || (args.cos == nullptr && !(kFinal && args.is_mixed));
    constexpr bool kWhole = kDim % kUnit == 0 && kSteps % kAtOnce<kDim> == 0;
    if (kWhole && is_plain && rows.are_aligned()) {
#pragma unroll 1
        for (int first = 0; first < kSteps; first += kAtOnce<kDim>) {
            using Raw = Elements<Element, kUnit>;
            constexpr int kVectors = sizeof(Raw) / 16;
            uint4 raw[kAtOnce<kDim>][kUnits<kDim>][kVectors];
#pragma unroll
            for (int n = 0; n < kAtOnce<kDim>; n++) {
                const int row = row_at(rows, first + n);
                const Element* from = rows.from + i64(row) * rows.from_stride;
#pragma unroll
                for (int u = 0; u < kUnits<kDim>; u++) {
                    const bool exists = row >= 0 && column_of(u) < kDim;
#pragma unroll
                    for (int v = 0; v < kVectors; v++) {
                        raw[n][u][v] = make_uint4(0, 0, 0, 0);
                        if (exists) raw[n][u][v] = ((const uint4*)(from + column_of(u)))[v];
                    }
                }
            }
            if (first == 0) before();
#pragma unroll
            for (int n = 0; n < kAtOnce<kDim>; n++) {
                const int row = row_at(rows, first + n);
                Part<kDim> x;
#pragma unroll
                for (int u = 0; u < kUnits<kDim>; u++) {
                    Raw values;
#pragma unroll
                    for (int v = 0; v < kVectors; v++) ((uint4*)values.at)[v] = raw[n][u][v];
#pragma unroll
                    for (int i = 0; i < kUnit; i++) x[u][i] = to_float(values.at[i]);
                }
                if (kFinal && tensor == kK && args.subtracts_mean && row >= 0) subtract_mean<kDim>(smem, x);
                f(first + n, row, x, Bool<true>{});
            }
        }
        return;
    }
    before();
#pragma unroll 1
    for (int step = 0; step < kSteps; step++) {
        const int row = row_at(rows, step);
        Part<kDim> x;
        load_row<kDim>(args, rows, tensor, row, x);
        if (kFinal) finish_row<kDim>(args, smem, tensor, row, x);
        f(step, row, x, Bool<false>{});
    }
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7fffffff) < 0x7f800000; }

// The mean of a unit in shared memory, once it is there. By all threads.
__device__ __forceinline__ void bring_mean(const Scratch& scratch, u32 smem, int unit) {
    if (threadIdx.x == 0) wait_for_count(scratch.ready + unit, 1);
    __syncthreads();
    for (int c = threadIdx.x; c < kPadded; c += kThreads) {
        const float mean = c < kHeadDimQK ? __ldcg(scratch.mean + i64(unit) * kHeadDimQK + c) : 0.0f;
        store_shared_4(smem + kMean + 4 * c, __float_as_uint(mean));
    }
    __syncthreads();
}

// What a warp has found of a column, for the other threads.
__device__ __forceinline__ void store_of_warp(u32 smem, int column, u32 word) {
    store_shared_4(smem + kSums + 4 * (int(threadIdx.x) / 32 * kPadded + column), word);
}
__device__ __forceinline__ u32 load_of_warp(u32 smem, int warp, int column) {
    return load_shared_4(smem + kSums + 4 * (warp * kPadded + column));
}

// Sums of a tile of K, and by the last of a unit its mean: of the finite elements over the number of all rows, 0 where
// that is not finite.
__device__ __forceinline__ void sum_tile(const QuantiseArgs& args, const Scratch& scratch, const List& list, u32 smem,
                                         const Item& item) {
    constexpr int kDim = kHeadDimQK;
    const Rows rows(args, item);
    Part<kDim> sums;
#pragma unroll
    for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
        for (int i = 0; i < kUnit; i++) sums[u][i] = 0.0f;
    }
    each_row<kDim, false>(args, smem, rows, kK, [] {}, [&](int, int, const Part<kDim>& x, auto) {
#pragma unroll
        for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
            for (int i = 0; i < kUnit; i++) sums[u][i] += is_finite(x[u][i]) ? x[u][i] : 0.0f;
        }
    });
#pragma unroll
    for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
        for (int i = 0; i < kUnit; i++) {
            float sum = sums[u][i];
            for (int apart = kLanes; apart < 32; apart *= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
            if (threadIdx.x % 32 < kLanes) store_of_warp(smem, column_of(u) + i, __float_as_uint(sum));
        }
    }
    __syncthreads();
    float* of_unit = scratch.sums + i64(item.unit) * list.tiles[kK] * kDim;
    for (int c = threadIdx.x; c < kDim; c += kThreads) {
        float sum = 0.0f;
        for (int w = 0; w < kWarps; w++) sum += __uint_as_float(load_of_warp(smem, w, c));
        __stcg(of_unit + i64(item.tile) * kDim + c, sum);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 before = count_up(scratch.arrived + item.unit);
        store_shared_4(smem + kIsLast, before + 1 == u32(list.tiles[kK]));
    }
    __syncthreads();
    if (load_shared_4(smem + kIsLast) == 0) return;
    for (int c = threadIdx.x; c < kDim; c += kThreads) {
        float sum = 0.0f;
#pragma unroll 8
        for (int tile = 0; tile < list.tiles[kK]; tile++) sum += __ldcg(of_unit + i64(tile) * kDim + c);
        const float quotient = sum / float(args.kv_len), mean = is_finite(quotient) ? quotient : 0.0f;
        __stcg(scratch.mean + i64(item.unit) * kDim + c, mean);
        if (args.mean != nullptr) {
            args.mean[rows.batch * args.mean_stride[0] + rows.kv_head * args.mean_stride[1] + c] = mean;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) count_up(scratch.ready + item.unit);
}

// Which of the counters is a unit's, or that of all.
__device__ __forceinline__ i64 place_of(const QuantiseArgs& args, const List& list, const Item& item) {
    return i64(item.tensor) * list.units + (args.is_whole[item.tensor] ? 0 : item.unit);
}

// The bits of a finite magnitude, which compare as it does; 0 of what is none.
__device__ __forceinline__ u32 magnitude(float x) {
    const u32 bits = __float_as_uint(x) & 0x7fffffff;
    return bits < 0x7f800000 ? bits : 0;
}
template <int kDim> __device__ __forceinline__ u32 largest_of_part(const Part<kDim>& x) {
    u32 most = 0;
#pragma unroll
    for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
        for (int i = 0; i < kUnit; i++) most = max_of(most, magnitude(x[u][i]));
    }
    return most;
}
// The largest of lanes that are less than `apart` from each other, from kFrom on.
__device__ __forceinline__ u32 largest_of_lanes(u32 most, int from, int end) {
    for (int apart = from; apart < end; apart *= 2) most = max_of(most, u32(__shfl_xor_sync(0xffffffff, most, apart)));
    return most;
}

// The largest of what the threads of a tile have found, to that of its unit.
__device__ __forceinline__ void tell_largest(const QuantiseArgs& args, const Scratch& scratch, const List& list,
                                             u32 smem, const Item& item, u32 most) {
    most = largest_of_lanes(most, 1, 32);
    if (threadIdx.x % 32 == 0) store_shared_4(smem + kMost + threadIdx.x / 32 * 4, most);
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 0; w < kWarps; w++) most = max_of(most, load_shared_4(smem + kMost + w * 4));
    const i64 place = place_of(args, list, item);
    atomicMax(scratch.largest + place, most);
    count_up(scratch.done + place);
}

// The largest magnitudes of the columns of a tile of V, to those of its unit.
__device__ __forceinline__ void find_largest_of_channels(const QuantiseArgs& args, const Scratch& scratch,
                                                         const List& list, u32 smem, const Item& item) {
    constexpr int kDim = kHeadDimV;
    const Rows rows(args, item);
    u32 most[kUnits<kDim>][kUnit] = {};
    each_row<kDim, true>(args, smem, rows, kV, [] {}, [&](int, int, const Part<kDim>& x, auto) {
#pragma unroll
        for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
            for (int i = 0; i < kUnit; i++) most[u][i] = max_of(most[u][i], magnitude(x[u][i]));
        }
    });
#pragma unroll
    for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
        for (int i = 0; i < kUnit; i++) {
            const u32 of_warp = largest_of_lanes(most[u][i], kLanes, 32);
            if (threadIdx.x % 32 < kLanes) store_of_warp(smem, column_of(u) + i, of_warp);
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < kDim; c += kThreads) {
        u32 of_tile = 0;
        for (int w = 0; w < kWarps; w++) of_tile = max_of(of_tile, load_of_warp(smem, w, c));
        atomicMax(scratch.channels + i64(item.unit) * kDim + c, of_tile);
    }
    __syncthreads();
    if (threadIdx.x == 0) count_up(scratch.done + place_of(args, list, item));
}

// The scale by which a largest magnitude becomes that of e4m3: 1 where all are zero, and a normal number.
__device__ __forceinline__ float scale_of(u32 largest) {
    return largest == 0 ? 1.0f : max_of(__uint_as_float(largest) / kLargestValue<e4m3>, 0x1p-126f);
}

// Eight elements as e4m3.
__device__ __forceinline__ Elements<e4m3, kUnit> rounded(const float (&x)[kUnit]) {
    Elements<e4m3, kUnit> out;
#pragma unroll
    for (int i = 0; i < kUnit; i += 2) {
#if __CUDA_ARCH__ >= 890
        const u16 pair = pack_e4m3(x[i], x[i + 1]);
        out.at[i].bits = u8(pair & 255), out.at[i + 1].bits = u8(pair >> 8);
#else
        out.at[i] = from_float<e4m3>(x[i]), out.at[i + 1] = from_float<e4m3>(x[i + 1]);
#endif
    }
    return out;
}

// Writes a row, of which each element is multiplied by inverse(unit, element) first.
template <int kDim, bool kAligned, typename Inverse>
__device__ __forceinline__ void write_row(const Rows& rows, int row, const Part<kDim>& x, const Inverse& inverse) {
    if (row < 0) return;
#pragma unroll
    for (int u = 0; u < kUnits<kDim>; u++) {
        const int column = column_of(u);
        if (column >= kDim) continue;
        float scaled[kUnit];
#pragma unroll
        for (int i = 0; i < kUnit; i++) scaled[i] = x[u][i] * inverse(u, i);
        const Elements<e4m3, kUnit> out = rounded(scaled);
        e4m3* to = rows.to + i64(row) * rows.to_stride + column;
        if (kDim % kUnit != 0 && column + kUnit > kDim) {
            store_tail(to, out, kDim - column);
        } else if (kAligned) {
            *(u64*)to = *(const u64*)out.at;
        } else {
            store(to, out);
        }
    }
}

// Where the first of a head's scales goes.
__device__ __forceinline__ float* scales_of(const QuantiseArgs& args, int tensor, const Rows& rows, int head) {
    const i64* stride = args.scale_stride + 2 * tensor;
    return args.scale[tensor] + rows.batch * stride[0] + head * stride[1];
}

// Writes a tile of V, and with the first of a unit the scales of its columns.
__device__ __forceinline__ void write_tile_by_channels(const QuantiseArgs& args, const Scratch& scratch,
                                                       const List& list, u32 smem, const Item& item) {
    constexpr int kDim = kHeadDimV;
    const Rows rows(args, item);
    Part<kDim> inverse;
    const auto before = [&] {
        if (threadIdx.x == 0) wait_for_count(scratch.done + place_of(args, list, item), u32(list.tiles[kV]));
        __syncthreads();
        for (int c = threadIdx.x; c < kPadded; c += kThreads) {
            float scale = 1.0f;
            if (c < kDim) scale = scale_of(__ldcg(scratch.channels + i64(item.unit) * kDim + c));
            store_shared_4(smem + kMean + 4 * c, __float_as_uint(1.0f / scale));
            if (item.tile == 0 && c < kDim) {
                scales_of(args, kV, rows, rows.kv_head)[c * args.scale_unit_stride[kV]] = scale;
            }
        }
        __syncthreads();
#pragma unroll
        for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
            for (int i = 0; i < kUnit; i++) {
                inverse[u][i] = __uint_as_float(load_shared_4(smem + kMean + 4 * (column_of(u) + i)));
            }
        }
    };
    each_row<kDim, true>(args, smem, rows, kV, before, [&](int, int row, const Part<kDim>& x, auto aligned) {
        write_row<kDim, decltype(aligned)::value>(rows, row, x, [&](int u, int i) { return inverse[u][i]; });
    });
}

// The scales of the blocks of rows of a tile, of whose rows the largest are there, as far as a warp has them together.
__device__ __forceinline__ void find_scales_of_blocks(const QuantiseArgs& args, u32 smem, const Rows& rows, int tensor,
                                                      int together) {
    const int log2 = args.scale_rows_log2[tensor], of_scale = 1 << log2;
    float* const scales = scales_of(args, tensor, rows, rows.head);
    __syncthreads();
    for (int block = threadIdx.x; block < kRows >> log2; block += kThreads) {
        u32 most = 0;
#pragma unroll 4
        for (int row = 0; row < of_scale; row += together) {
            most = max_of(most, load_shared_4(smem + kRowMost + 4 * (block * of_scale + row)));
        }
        const float scale = scale_of(most);
        store_shared_4(smem + kRowInverse + 4 * block, __float_as_uint(1.0f / scale));
        const int first = rows.first + block * of_scale;
        if (first < rows.end) scales[(first >> log2) * args.scale_unit_stride[tensor]] = scale;
    }
    __syncthreads();
}

// A tile of a tensor whose scales are not those of columns: searches it for its largest, or writes it. Where rows have
// scales, each of its own, it is read once; where several share one, once more when it has just come. One search and
// one write for all of these: each is a page of code.
template <int kDim>
__device__ __forceinline__ void work_on(const QuantiseArgs& args, const Scratch& scratch, const List& list, u32 smem,
                                        const Item& item) {
    const Rows rows(args, item);
    const int t = item.tensor, log2 = args.scale_rows_log2[t];
    const bool by_rows = args.scale_kind[t] == kOfRows, by_blocks = by_rows && log2 > 0;
    const auto bring = [&] {
        if (t == kK && args.subtracts_mean) bring_mean(scratch, smem, item.unit);
    };
    if (item.phase == kLargestOf || by_blocks) {
        // Rows of a step that a warp has, as far as they share a scale: the first has the largest of them.
        const int together = min_of(1 << log2, 32 / kLanes);
        u32 most = 0;
        each_row<kDim, true>(args, smem, rows, t, bring, [&](int step, int, const Part<kDim>& x, auto) {
            const u32 of_part = largest_of_part<kDim>(x);
            most = max_of(most, of_part);
            if (by_blocks) {
                const u32 of_rows = largest_of_lanes(of_part, 1, kLanes * together);
                store_shared_4(smem + kRowMost + 4 * (step * kStepRows + int(threadIdx.x) / kLanes), of_rows);
            }
        });
        if (!by_blocks) {
            tell_largest(args, scratch, list, smem, item, most);
            return;
        }
        find_scales_of_blocks(args, smem, rows, t, together);
    }
    float inverse = 0.0f;
    const auto before = [&] {
        if (!by_blocks) bring();
        if (by_rows) return;
        if (threadIdx.x == 0) {
            const i64 place = place_of(args, list, item);
            wait_for_count(scratch.done + place, u32(list.tiles[t]) * u32(args.is_whole[t] ? list.units : 1));
            const float scale = scale_of(__ldcg(scratch.largest + place));
            store_shared_4(smem + kInverse, __float_as_uint(1.0f / scale));
            if (item.tile == 0) *scales_of(args, t, rows, rows.kv_head) = scale;
        }
        __syncthreads();
        inverse = __uint_as_float(load_shared_4(smem + kInverse));
    };
    each_row<kDim, true>(args, smem, rows, t, before, [&](int step, int row, const Part<kDim>& x, auto aligned) {
        float by = inverse;
        if (by_blocks) {
            const int block = (step * kStepRows + int(threadIdx.x) / kLanes) >> log2;
            by = __uint_as_float(load_shared_4(smem + kRowInverse + 4 * block));
        } else if (by_rows) {
            const float scale = scale_of(largest_of_lanes(largest_of_part<kDim>(x), 1, kLanes));
            by = 1.0f / scale;
            if (row >= 0 && threadIdx.x % kLanes == 0) {
                scales_of(args, t, rows, rows.head)[row * args.scale_unit_stride[t]] = scale;
            }
        }
        write_row<kDim, decltype(aligned)::value>(rows, row, x, [&](int, int) { return by; });
    });
}

extern "C" __global__ void __launch_bounds__(kThreads) @{ entry }@_clear(const __grid_constant__ KernelArgs args) {
    wait_for_launch_before();
    let_next_launch_begin();
    const Scratch scratch(args);
    for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < scratch.counters(); i += i64(gridDim.x) * kThreads) {
        scratch.taken[i] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
@{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ unsigned char smem[];
    const u32 memory = smem_address(smem);
    const Scratch scratch(args);
    const List list(args);
    wait_for_launch_before();
    let_next_launch_begin();

    // The next item is taken while one is worked on.
    u32 next = threadIdx.x == 0 ? take_number(scratch.taken) : 0;
    for (;;) {
        if (threadIdx.x == 0) store_shared_4(memory + kTaken, next);
        __syncthreads();
        const u32 index = load_shared_4(memory + kTaken);
        __syncthreads();
        if (index >= list.count()) return;
        if (threadIdx.x == 0) next = take_number(scratch.taken);
        const Item item = list.at(args, index);
        if (item.unit < 0) continue;
        if (item.phase == kSum) {
            sum_tile(args, scratch, list, memory, item);
        } else if (item.tensor != kV || (kHeadDimQK == kHeadDimV && args.scale_kind[kV] != kOfChannel)) {
            work_on<kHeadDimQK>(args, scratch, list, memory, item);
        } else if (kHeadDimQK != kHeadDimV && args.scale_kind[kV] != kOfChannel) {
            work_on<kHeadDimV>(args, scratch, list, memory, item);
        } else if (item.phase == kLargestOf) {
            find_largest_of_channels(args, scratch, list, memory, item);
        } else {
            write_tile_by_channels(args, scratch, list, memory, item);
        }
    }
}
