/* @{ header }@ */

// New rows of K and V into a KV store, and rows of Q beside them: rotated, quantised, each to the place that a slot
// mapping or the length of its sequence gives.
//
// A row of one head is moved by kLanes neighbouring threads, 16 bytes each. A thread block takes kRows rows at a time:
// all heads of K, then of V, of one token after the other, then the rows of Q. How many blocks there are changes
// nothing but the time: they share the rows by stride.

<% include "lib/cuda/attention/types.cuh" %>
<% include "lib/cuda/attention/kv_elements.cuh" %>
<% include "lib/cuda/attention/quantise.cuh" %>
<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/dependent_launch.cuh" %>
typedef int int32_t;  // NVRTC has none
@{ append_args }@

// Problem.
using Element = @{ dtype }@;
using KvElement = @{ kv_element }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kScaled = @{ kv_scaled }@;
constexpr bool kScalePerToken = @{ kv_scale_per_token }@;
constexpr bool kVColumns = @{ v_columns }@;
// Schedule.
constexpr int kThreads = @{ threads }@;

using KernelArgs = AppendArgs;

constexpr int kUnit = 16 / sizeof(Element);  // elements that a thread has
constexpr int kLanes = div_up(max_of(kHeadDimQK, kHeadDimV), kUnit);
constexpr int kRows = kThreads / kLanes;
constexpr int kPack = 16 / sizeof(KvElement);  // elements of a row of K that lie side by side
constexpr bool kTails = kHeadDimQK % kUnit != 0 || kHeadDimV % kUnit != 0;  // rows that end within a unit
static_assert(kPack % kUnit == 0, "a unit lies in one piece");
static_assert((kScalePerToken ? kThreads * 4 : 0) == @{ smem_bytes }@, "the shared memory that the host asks for");

// Entry i of an array of 32- or 64-bit integers.
__device__ __forceinline__ i64 read_int(const int* array, i64 i, int words) {
    return words == 1 ? i64(array[i]) : ((const i64*)array)[i];
}

<% include "lib/cuda/attention/elements.cuh" %>

// Which sequence a row is of: sequences are packed from `begin` on, or have `rows` rows each.
struct Member {
    int sequence, row;  // -1 for no sequence
};
__device__ __forceinline__ Member member_of(const AppendArgs& args, const int* begin, int rows, int index) {
    if (begin == nullptr) return Member{int(u32(index) / u32(rows)), int(u32(index) % u32(rows))};
    // The last sequence that begins at the row or before it: those without rows lie before.
    int low = 0, high = args.batch;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (read_int(begin, middle + 1, args.length_words) <= index) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == args.batch) return Member{-1, 0};
    const i64 first = read_int(begin, low, args.length_words);
    return index < first ? Member{-1, 0} : Member{low, int(index - first)};
}

// Rows that a sequence gains.
__device__ __forceinline__ i64 added(const AppendArgs& args, int b) {
    if (args.new_begin == nullptr) return args.new_len;
    return read_int(args.new_begin, b + 1, args.length_words) - read_int(args.new_begin, b, args.length_words);
}

// Tokens of a sequence before its new rows.
__device__ __forceinline__ i64 length_before(const AppendArgs& args, int b) {
    i64 length = 0;
    if (args.lengths != nullptr) {
        length = read_int(args.lengths, b, args.length_words);
    } else if (args.length_sums != nullptr) {
        const i64 begin = read_int(args.length_sums, b, args.length_words);
        length = read_int(args.length_sums, b + 1, args.length_words) - begin;
    } else if (args.pages_begin != nullptr) {
        const i64 begin = read_int(args.pages_begin, b, args.length_words);
        const i64 pages = read_int(args.pages_begin, b + 1, args.length_words) - begin;
        const i64 last = args.last_page == nullptr ? args.page_tokens : read_int(args.last_page, b, args.length_words);
        length = pages > 0 ? (pages - 1) * args.page_tokens + last : 0;
    }
    return args.lengths_after ? length - added(args, b) : length;
}

// A token of the store.
struct Place {
    i64 page;  // -1 for none
    int token;
};
__device__ __forceinline__ Place nowhere() { return Place{-1, 0}; }

__device__ __forceinline__ Place place_of(const AppendArgs& args, const int* table, int index, Member member) {
    const u32 tokens = u32(args.page_tokens);
    if (args.slot_mapping != nullptr) {
        const i64 slot = read_int(args.slot_mapping, index, args.slot_words);
        if (slot < 0) return nowhere();
        const i64 page = slot >> 32 == 0 ? i64(u32(slot) / tokens) : slot / tokens;
        return page < args.pages ? Place{page, int(slot - page * tokens)} : nowhere();
    }
    if (member.sequence < 0) return nowhere();
    const int b = member.sequence;
    const i64 place = length_before(args, b) + member.row;
    if (place < 0 || place >= args.kv_len) return nowhere();
    const u32 nth = u32(place) / tokens;
    i64 page = b;
    if (table != nullptr) {
        i64 entry = i64(b) * args.table_stride;
        if (args.pages_begin != nullptr) {
            entry = read_int(args.pages_begin, b, args.length_words);
            if (entry < 0 || entry + nth >= read_int(args.pages_begin, b + 1, args.length_words)) return nowhere();
        }
        page = read_int(table, entry + nth, args.table_words);
    } else {
        if (nth > 0) return nowhere();
        if (args.slots != nullptr) page = read_int(args.slots, b, args.table_words);
    }
    return page >= 0 && page < args.pages ? Place{page, int(u32(place) - nth * tokens)} : nowhere();
}

// Where a row of Q or K is rotated to.
__device__ __forceinline__ i64 position_of(const AppendArgs& args, const int* positions, int index, Member member,
                                           int advance) {
    if (positions != nullptr) return read_int(positions, index, args.position_words);
    if (member.sequence < 0) return -1;
    const int b = member.sequence;
    const i64 first =
        args.first_position != nullptr ? read_int(args.first_position, b, args.length_words) : length_before(args, b);
    return first + i64(member.row) * advance;
}

<% include "lib/cuda/attention/rotary.cuh" %>

// The scale by which finite elements of a row fill the range of the store's, by all threads of the row.
__device__ __forceinline__ float scale_of_row(u32 largest, const float (&x)[kUnit], bool live, int first) {
    u32 most = 0;  // magnitudes compare as their bits do
#pragma unroll
    for (int i = 0; i < kUnit; i++) {
        const u32 magnitude = __float_as_uint(x[i]) & 0x7fffffff;
        if (live && magnitude < 0x7f800000) most = max_of(most, magnitude);
    }
    __syncthreads();  // others may still read those of the rows before
    store_shared_4(largest + threadIdx.x * 4, most);
    __syncthreads();
    for (int i = 0; i < kLanes; i++) most = max_of(most, load_shared_4(largest + min_of(first + i, kThreads - 1) * 4));
    return __uint_as_float(most) / kLargestValue<KvElement>;
}

// The elements of a store that a unit becomes: its own, or x by its scale.
template <typename E>
__device__ __forceinline__ Elements<E, kUnit> stored(const Elements<Element, kUnit>& raw, const float (&x)[kUnit],
                                                     float scale) {
    if constexpr (kScaled) {
        Elements<E, kUnit> out;
#pragma unroll
        for (int i = 0; i < kUnit; i++) out.at[i] = quantised<E>(x[i], scale);
        return out;
    } else {
        return raw;
    }
}

// What one thread has to do with one row.
struct Row {
    const Element* from;  // null for a row that is not there, or that goes nowhere
    Element* q_out;       // a row of Q
    KvElement* to;        // a row of K or V
    float* scale;
    i64 position;
    int columns;
    bool is_k, rotates;
};

__device__ __forceinline__ Row row_of(const AppendArgs& args, u32 index, u32 kv_rows) {
    Row r = {nullptr, nullptr, nullptr, nullptr, -1, 0, false, false};
    if (index >= kv_rows) {
        const u32 heads = u32(args.heads), rest = index - kv_rows;
        const int nth = int(rest / heads), head = int(rest % heads);
        const bool packed = args.q_begin != nullptr;
        const Member m = member_of(args, args.q_begin, args.q_len, nth);
        if (m.sequence < 0) return r;
        const i64 batch = packed ? 0 : m.sequence, row = packed ? nth : m.row;
        r.from = (const Element*)args.q + batch * args.q_stride[0] + head * args.q_stride[1] + row * args.q_stride[2];
        r.q_out = (Element*)args.q_out + batch * args.q_out_stride[0] + head * args.q_out_stride[1] +
                  row * args.q_out_stride[2];
        r.columns = kHeadDimQK, r.rotates = args.cos != nullptr;
        if (r.rotates) r.position = position_of(args, args.q_positions, nth, m, args.q_advance);
        return r;
    }
    const u32 heads = 2 * u32(args.kv_heads);
    const int nth = int(index / heads), unit = int(index % heads);
    r.is_k = unit < args.kv_heads;
    const int head = r.is_k ? unit : unit - args.kv_heads;
    const bool packed = args.new_begin != nullptr;
    // With a slot mapping there is one sequence, of all rows.
    const Member m = member_of(args, args.new_begin, args.new_len, nth);
    const Place place = place_of(args, r.is_k ? args.k_table : args.v_table, nth, m);
    if (place.page < 0) return r;
    const i64 batch = packed ? 0 : m.sequence, row = packed ? nth : m.row;
    const auto at = [&](const i64(&stride)[3]) { return batch * stride[0] + head * stride[1] + row * stride[2]; };
    const auto to = [&](const i64(&stride)[4]) {
        return place.page * stride[0] + place.token * stride[1] + head * stride[2];
    };
    const auto scale = [&](float* scales, const i64(&stride)[3]) -> float* {
        if (!kScaled || scales == nullptr) return nullptr;
        if (kScalePerToken) return scales + place.page * stride[0] + head * stride[1] + place.token * stride[2];
        return scales + i64(m.sequence) * stride[0] + head * stride[1];
    };
    if (r.is_k) {
        r.from = (const Element*)args.k_new + at(args.k_new_stride);
        r.to = (KvElement*)args.k + to(args.k_stride);
        r.scale = scale(args.k_scale, args.k_scale_stride);
        r.columns = kHeadDimQK, r.rotates = args.cos != nullptr;
        if (r.rotates) r.position = position_of(args, args.k_positions, nth, m, 1);
    } else {
        r.from = (const Element*)args.v_new + at(args.v_new_stride);
        r.to = (KvElement*)args.v + to(args.v_stride);
        r.scale = scale(args.v_scale, args.v_scale_stride);
        r.columns = kHeadDimV;
    }
    return r;
}

// Four blocks of a multiprocessor are asked for because ptxas otherwise spills a few registers to fit five.
extern "C" __global__ void __launch_bounds__(kThreads, 4) @{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ unsigned char smem[];
    const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, column = lane * kUnit;
    const u32 kv_rows = u32(args.new_rows) * 2 * u32(args.kv_heads);
    const u32 rows = kv_rows + u32(args.q_rows) * u32(args.heads);
    // A row that is rotated where it lies is read by all of its threads before any writes.
    const bool in_place = args.q == args.q_out && args.cos != nullptr && args.heads > 0;
    wait_for_launch_before();
    let_next_launch_begin();

    for (u32 first = blockIdx.x * kRows; first < rows; first += gridDim.x * kRows) {
        const u32 index = first + group;
        Row row = {nullptr, nullptr, nullptr, nullptr, -1, 0, false, false};
        if (group < kRows && index < rows) row = row_of(args, index, kv_rows);
        const bool live = row.from != nullptr && column < row.columns;
        const bool rotates = live && row.rotates && column < args.rotary_dim;
        const bool tail = kTails && column + kUnit > row.columns;

        Elements<Element, kUnit> raw;
        float x[kUnit];
        if (live) {
            raw = tail ? load_tail<kUnit>(row.from + column, row.columns - column)
                       : load<Element, kUnit>(row.from + column);
#pragma unroll
            for (int i = 0; i < kUnit; i++) x[i] = to_float(raw.at[i]);
            if (rotates) {
                rotate(args, row.from, column, row.position, x);
#pragma unroll
                for (int i = 0; i < kUnit; i++) {
                    if (column + i < args.rotary_dim) raw.at[i] = from_float<Element>(x[i]);
                }
            }
        }
        if (in_place) __syncthreads();
        float found = 0.0f;
        if (kScalePerToken && args.finds_scales) {
            found = scale_of_row(smem_address(smem), x, live && row.to != nullptr, group * kLanes);
        }
        if (!live) continue;
        if (row.q_out != nullptr) {
            if (tail) {
                store_tail(row.q_out + column, raw, row.columns - column);
            } else {
                store(row.q_out + column, raw);
            }
            continue;
        }
        float scale = 1.0f;
        if (kScalePerToken && args.finds_scales) {
            scale = found;
            if (lane == 0 && row.scale != nullptr) *row.scale = scale;
        } else if (row.scale != nullptr) {
            scale = *row.scale;
        }
        const Elements<KvElement, kUnit> out = stored<KvElement>(raw, x, scale);
        if (!row.is_k && kVColumns) {
#pragma unroll
            for (int i = 0; i < kUnit; i++) {
                if (!tail || column + i < row.columns) row.to[(column + i) * args.v_stride[3]] = out.at[i];
            }
            continue;
        }
        KvElement* to = row.to + (row.is_k ? column / kPack * args.k_stride[3] + column % kPack : column);
        if (tail) {
            store_tail(to, out, row.columns - column);
        } else {
            store(to, out);
        }
    }
}
