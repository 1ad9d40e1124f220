/* @{ header }@ */

// Rows of Q, K and V as e4m3 with their scales, in one launch behind one that clears its counters.
//
//   x = row, rotated by its position     K: x -= mean of x over the rows of the unit
//   Q, K: x = H x / sqrt(head dim)       scale = largest |x| of the unit / 448      code = x / scale
//
// A unit is what shares a scale: the rows of a KV head of a sequence, of Q those of its query heads; or a whole tensor.
// Its scale is known when all of it was read, so that memory is read once and L2 twice: work is a list of items, which
// thread blocks take in its order from a counter, and in which a tile is written a few tiles of the next tensor after
// it was read. Slot s of the list has, tile by tile,
//
//   sums of K(s), largest of Q(s), write V(s-1), largest of K(s), write Q(s), largest of V(s), write K(s)
//
// for unit s. Where these are so few that thread blocks would wait for each other, what waits for sums, and what is
// written, is that of some slots before; of tensors with one scale for all units it comes behind all.
//
// An item waits for the count of what it needs, all of which stands before it in the list: whoever has that runs
// already and waits for earlier items alone, so that any number of thread blocks at a time comes to an end. Largest
// elements have no order and sums of K are added up tile by tile, so that it does not show who did what.
//
// A row has kLanes threads, with 8 elements side by side in each of kUnits units, kLanes * 8 elements apart.

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

using KernelArgs = QuantiseArgs;

constexpr int kUnit = 8;           // elements side by side that a thread has
constexpr int kLanes = @{ lanes }@;  // threads of a row
constexpr int kStepRows = kThreads / kLanes;
constexpr int kRows = kSteps * kStepRows;
constexpr int kWarps = kThreads / 32;
static_assert(kRows == @{ tile_rows }@, "the rows of a tile that the host counts with");
template <int kDim> constexpr int kUnits = div_up(kDim, kLanes* kUnit);
constexpr int kPadded = kUnits<kHeadDimQK> * kLanes * kUnit;
// Shared memory: a few words, K's mean, and the sums of each warp.
constexpr int kTaken = 0, kIsLast = 4, kInverse = 8, kMost = 16, kMean = kMost + round_up(4 * kWarps, 16);
constexpr int kSums = kMean + 4 * kPadded;
static_assert(kSums + 4 * kWarps * kPadded == @{ smem_bytes }@, "the shared memory that the host asks for");

<% include "lib/cuda/attention/elements.cuh" %>
<% include "lib/cuda/attention/rotary.cuh" %>

enum Tensor { kQ, kK, kV };

// What thread blocks leave for each other. The counters are zero before the main stage.
struct Scratch {
    u32 *taken, *done, *largest;  // items; and of each tensor and unit tiles, and the bits of the largest magnitude
    u32 *arrived, *ready;         // of each unit tiles of K that are summed, and whether the mean is there
    float *mean, *sums;           // of each unit, and of each tile of it

    __device__ __forceinline__ explicit Scratch(const QuantiseArgs& args) {
        const i64 units = i64(args.batch) * args.kv_heads;
        taken = (u32*)args.scratch;
        done = taken + 4;
        largest = done + 3 * units;
        arrived = largest + 3 * units;
        ready = arrived + units;
        mean = (float*)(ready + units);
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
    int tiles[3], behind[3];  // and from its sums until it is written

    __device__ __forceinline__ explicit List(const QuantiseArgs& args) {
        units = args.batch * args.kv_heads;
#pragma unroll
        for (int t = 0; t < 3; t++) tiles[t] = tiles_of_head(args, t) * group_of(args, t);
        const int all = tiles[kQ] + tiles[kK] + tiles[kV];
        of_slot = 2 * all + (args.subtracts_mean ? tiles[kK] : 0);
        // Items between two of a tile in one slot, and slots that make them as many as thread blocks can be in need of.
        const int between = all - max_of(tiles[kQ], max_of(tiles[kK], tiles[kV]));
        const int ahead = min_of(kAhead, int(gridDim.x));
        const int slots_ahead = between < ahead ? div_up(ahead - between, max_of(of_slot, 1)) : 0;
        behind_sums = args.subtracts_mean ? slots_ahead : 0;
        slots = 0;
#pragma unroll
        for (int t = 0; t < 3; t++) {
            // The rows of all units come before the first that is written with the scale of all.
            behind[t] = behind_sums + (args.is_whole[t] ? units : slots_ahead) + (t == kV ? 1 : 0);
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
        if (is_in(at, tiles[kQ])) return item(kLargestOf, kQ);
        if (is_in(at, tiles[kV])) return item(kWrite, kV);
        if (is_in(at, tiles[kK])) return item(kLargestOf, kK);
        if (is_in(at, tiles[kQ])) return item(kWrite, kQ);
        if (is_in(at, tiles[kV])) return item(kLargestOf, kV);
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
    int batch, kv_head, first, end;

    __device__ __forceinline__ Rows(const QuantiseArgs& args, const Item& item) {
        const int t = item.tensor, of_head = tiles_of_head(args, t);
        batch = item.unit / args.kv_heads;
        kv_head = item.unit % args.kv_heads;
        const i64 head = i64(kv_head) * group_of(args, t) + item.tile / of_head;
        first = item.tile % of_head * kRows;
        end = min_of(first + kRows, t == kQ ? args.q_len : args.kv_len);
        const i64 *in = args.from_stride + 3 * t, *out = args.to_stride + 3 * t;
        from = (const Element*)args.from[t] + batch * in[0] + head * in[1];
        to = (e4m3*)args.to[t] + batch * out[0] + head * out[1];
        from_stride = in[2];
        to_stride = out[2];
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

// Row `step` of a thread's rows in a tile, rotated by its position where its tensor is; zeros where there is none.
template <int kDim>
__device__ __forceinline__ int load_row(const QuantiseArgs& args, const Rows& rows, int tensor, int step,
                                        Part<kDim>& x) {
    const int row = rows.first + step * kStepRows + int(threadIdx.x) / kLanes;
    const bool exists = row < rows.end, rotates = tensor != kV && args.cos != nullptr;
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
    return exists ? row : -1;
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

// The same row as it is quantised.
template <int kDim>
__device__ __forceinline__ int final_row(const QuantiseArgs& args, u32 smem, const Rows& rows, int tensor, int step,
                                         Part<kDim>& x) {
    const int row = load_row<kDim>(args, rows, tensor, step, x);
    if (tensor == kK && args.subtracts_mean && row >= 0) subtract_mean<kDim>(smem, x);
    if constexpr ((kDim & (kDim - 1)) == 0) {
        if (tensor != kV && args.is_mixed) mix<kDim>(x);
    }
    return row;
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
#pragma unroll 1
    for (int step = 0; step < kSteps; step++) {
        Part<kDim> x;
        load_row<kDim>(args, rows, kK, step, x);
#pragma unroll
        for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
            for (int i = 0; i < kUnit; i++) sums[u][i] += is_finite(x[u][i]) ? x[u][i] : 0.0f;
        }
    }
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
        for (int i = 0; i < kUnit; i++) {
            float sum = sums[u][i];
            for (int apart = kLanes; apart < 32; apart *= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
            if (threadIdx.x % 32 < kLanes) {
                store_shared_4(smem + kSums + 4 * (warp * kPadded + column_of(u) + i), __float_as_uint(sum));
            }
        }
    }
    __syncthreads();
    float* of_unit = scratch.sums + i64(item.unit) * list.tiles[kK] * kDim;
    for (int c = threadIdx.x; c < kDim; c += kThreads) {
        float sum = 0.0f;
        for (int w = 0; w < kWarps; w++) sum += __uint_as_float(load_shared_4(smem + kSums + 4 * (w * kPadded + c)));
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

// The largest finite magnitude of a tile, to that of its unit.
template <int kDim>
__device__ __forceinline__ void find_largest(const QuantiseArgs& args, const Scratch& scratch, const List& list,
                                             u32 smem, const Item& item) {
    const Rows rows(args, item);
    if (item.tensor == kK && args.subtracts_mean) bring_mean(scratch, smem, item.unit);
    u32 most = 0;  // magnitudes compare as their bits do
#pragma unroll 1
    for (int step = 0; step < kSteps; step++) {
        Part<kDim> x;
        final_row<kDim>(args, smem, rows, item.tensor, step, x);
#pragma unroll
        for (int u = 0; u < kUnits<kDim>; u++) {
#pragma unroll
            for (int i = 0; i < kUnit; i++) {
                if (is_finite(x[u][i])) most = max_of(most, __float_as_uint(x[u][i]) & 0x7fffffff);
            }
        }
    }
    for (int apart = 1; apart < 32; apart *= 2) most = max_of(most, u32(__shfl_xor_sync(0xffffffff, most, apart)));
    if (threadIdx.x % 32 == 0) store_shared_4(smem + kMost + threadIdx.x / 32 * 4, most);
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 0; w < kWarps; w++) most = max_of(most, load_shared_4(smem + kMost + w * 4));
    const i64 place = place_of(args, list, item);
    atomicMax(scratch.largest + place, most);
    count_up(scratch.done + place);
}

// The scale by which a largest magnitude becomes that of e4m3: 1 where all are zero, and a normal number.
__device__ __forceinline__ float scale_of(u32 largest) {
    return largest == 0 ? 1.0f : max_of(__uint_as_float(largest) / kLargest<e4m3>, 0x1p-126f);
}

// Eight elements as e4m3.
__device__ __forceinline__ Elements<e4m3, kUnit> rounded(const float (&x)[kUnit], float inverse) {
    Elements<e4m3, kUnit> out;
#pragma unroll
    for (int i = 0; i < kUnit; i += 2) {
#if __CUDA_ARCH__ >= 890
        const u16 pair = pack_e4m3(x[i] * inverse, x[i + 1] * inverse);
        out.at[i].bits = u8(pair & 255), out.at[i + 1].bits = u8(pair >> 8);
#else
        out.at[i] = from_float<e4m3>(x[i] * inverse), out.at[i + 1] = from_float<e4m3>(x[i + 1] * inverse);
#endif
    }
    return out;
}

// Writes a tile, and with the first of a unit its scale.
template <int kDim>
__device__ __forceinline__ void write_tile(const QuantiseArgs& args, const Scratch& scratch, const List& list, u32 smem,
                                           const Item& item) {
    const Rows rows(args, item);
    const int t = item.tensor;
    if (t == kK && args.subtracts_mean) bring_mean(scratch, smem, item.unit);
    if (threadIdx.x == 0) {
        const i64 place = place_of(args, list, item);
        wait_for_count(scratch.done + place, u32(list.tiles[t]) * u32(args.is_whole[t] ? list.units : 1));
        const float scale = scale_of(__ldcg(scratch.largest + place));
        store_shared_4(smem + kInverse, __float_as_uint(1.0f / scale));
        const i64* stride = args.scale_stride + 2 * t;
        if (item.tile == 0) args.scale[t][rows.batch * stride[0] + rows.kv_head * stride[1]] = scale;
    }
    __syncthreads();
    const float inverse = __uint_as_float(load_shared_4(smem + kInverse));
#pragma unroll 1
    for (int step = 0; step < kSteps; step++) {
        Part<kDim> x;
        const int row = final_row<kDim>(args, smem, rows, t, step, x);
        if (row < 0) continue;
#pragma unroll
        for (int u = 0; u < kUnits<kDim>; u++) {
            const int column = column_of(u);
            if (column >= kDim) continue;
            const Elements<e4m3, kUnit> out = rounded(x[u], inverse);
            e4m3* to = rows.to + i64(row) * rows.to_stride + column;
            if (kDim % kUnit != 0 && column + kUnit > kDim) {
                store_tail(to, out, kDim - column);
            } else {
                store(to, out);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) @{ entry }@_clear(const __grid_constant__ KernelArgs args) {
    wait_for_launch_before();
    let_next_launch_begin();
    const Scratch scratch(args);
    for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < scratch.counters(); i += i64(gridDim.x) * kThreads) {
        scratch.taken[i] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) @{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ unsigned char smem[];
    const u32 memory = smem_address(smem);
    const Scratch scratch(args);
    const List list(args);
    wait_for_launch_before();
    let_next_launch_begin();

    // The next item is taken while one is worked on.
    u32 next = threadIdx.x == 0 ? count_up(scratch.taken) : 0;
    for (;;) {
        if (threadIdx.x == 0) store_shared_4(memory + kTaken, next);
        __syncthreads();
        const u32 index = load_shared_4(memory + kTaken);
        __syncthreads();
        if (index >= list.count()) return;
        if (threadIdx.x == 0) next = count_up(scratch.taken);
        const Item item = list.at(args, index);
        if (item.unit < 0) continue;
        if (item.phase == kSum) {
            sum_tile(args, scratch, list, memory, item);
        } else if (item.phase == kLargestOf) {
            if (item.tensor == kV) {
                find_largest<kHeadDimV>(args, scratch, list, memory, item);
            } else {
                find_largest<kHeadDimQK>(args, scratch, list, memory, item);
            }
        } else if (item.tensor == kV) {
            write_tile<kHeadDimV>(args, scratch, list, memory, item);
        } else {
            write_tile<kHeadDimQK>(args, scratch, list, memory, item);
        }
    }
}
