/* @{ header }@ */

// Exact attention of f32 on tensor cores, tiled, in one pass: `forward/sm80` with TF32 products, of which three make
// one of fp32. With x = big + small, both TF32, x y is small big' + big small' + big big', which leaves out 2^-22 of
// it; the small ones are added first.
//
// Tensor cores cut off what their sums push out, which adds up in one direction. So they only ever sum a few products
// (16 elements of the head dim, 32 keys), and what comes out is added to fp32 registers, which round.

<% include "lib/cuda/attention/types.cuh" %>
<% include "lib/cuda/attention/abi.cuh" %>

// Problem.
using Element = @{ dtype }@;
constexpr int kHeadDimQK = @{ head_dim_qk }@;
constexpr int kHeadDimV = @{ head_dim_v }@;
constexpr bool kMaskLeft = @{ mask_left }@;
constexpr bool kMaskRight = @{ mask_right }@;
#define FT_DROPOUT @{ dropout }@  // scores are dropped behind the softmax
// TF32 products to one product: three, or one that keeps 11 bits.
constexpr int kProducts = @{ products }@;
// Schedule.
constexpr int kWarps = @{ warps }@;
constexpr int kRowsPerWarp = @{ rows_per_warp }@;
constexpr int kBlockKV = @{ block_kv }@;
constexpr int kStages = @{ stages }@;
constexpr int kBlocksPerSM = @{ blocks_per_sm }@;
constexpr bool kMaskedLoop = @{ masked_loop }@;
constexpr bool kBlockMajor = @{ block_major }@;

<% include "lib/cuda/ptx/shared_memory.cuh" %>
<% include "lib/cuda/ptx/cp_async.cuh" %>
<% include "lib/cuda/ptx/ldmatrix.cuh" %>
<% include "lib/cuda/ptx/mma_tf32.cuh" %>
<% include "lib/cuda/ptx/approx.cuh" %>
<% include "lib/cuda/ptx/warp.cuh" %>
<% include "lib/cuda/attention/tile.cuh" %>
<% include "lib/cuda/attention/row_tile.cuh" %>
#if FT_DROPOUT
<% include "lib/cuda/attention/dropout.cuh" %>
#endif
<% include "lib/cuda/score/program.cuh" %>
<% include "lib/cuda/attention/far.cuh" %>
<% include "lib/cuda/attention/softmax.cuh" %>
<% include "lib/cuda/score/sink.cuh" %>

constexpr int kThreads = kWarps * 32;
static_assert(kThreads == @{ threads }@, "the threads that the host launches");
constexpr int kBlockQ = kWarps * kRowsPerWarp;
using KernelArgs = WithSide<ForwardArgs>;
// Whether blocks before those in sight of every row may need a mask.
constexpr bool kMaskedFirst = kMaskLeft || kProgramMask;
// Rows of fp32 as rows of twice as many 16-bit words, an odd number of 16-byte chunks apart. Four lanes that read one
// chunk each of neighbouring rows, or eight that read one word each, then meet no bank twice.
using TileQK = RowTile<2 * kHeadDimQK, true>;
using TileV = RowTile<2 * kHeadDimV, true>;
constexpr int kMTiles = kRowsPerWarp / 16;      // 16-row tiles of a warp
constexpr int kSTiles = kBlockKV / 8;           // 8-column tiles of its scores
constexpr int kOTiles = kHeadDimV / 8;          // 8-column tiles of its output
constexpr int kStepsQK = kHeadDimQK / 8;        // matrix steps of Q K^T
constexpr int kStepsPV = kBlockKV / 8;          // matrix steps of P V
// Columns of V come in groups of four tiles, a vector of four to a lane; what is left in single tiles.
constexpr int kWideTiles = kOTiles / 4 * 4;
constexpr int kBytesQ = kBlockQ * TileQK::kPitch;
constexpr int kBytesK = kBlockKV * TileQK::kPitch;
constexpr int kBytesV = kBlockKV * TileV::kPitch;
constexpr int kOffsetK = kBytesQ;
constexpr int kOffsetV = kOffsetK + kStages * kBytesK;
static_assert(kOffsetV + kStages * kBytesV == @{ smem_bytes }@, "the shared memory that the host asks for");
// Keys after which O and the sums go to memory, into what has gathered there: sums of sums lose less, up to a million
// keys.
constexpr int kSpanBlocks = max_of(1, 4096 / kBlockKV);

using Scores = float[kMTiles][kSTiles][4];
using Output = float[kMTiles][kOTiles][4];

__device__ __forceinline__ Tile this_tile(const ForwardArgs& args) {
    return decode_tile<kBlockQ, kBlockMajor, kMaskRight>(args, block_index());
}

__device__ __forceinline__ BlockRange blocks_of(const KernelArgs& args, const Tile& tile) {
    return program_blocks<kBlockKV>(program_head(args, args, tile), tile.row, tile.row + tile.rows - 1,
                                    visit_blocks<kBlockKV, kMaskLeft, kMaskRight>(args, tile));
}

// The first row of a tile's O.
__device__ __forceinline__ float* output_rows(const ForwardArgs& args, const Tile& tile) {
    return (float*)args.o + tile.batch * args.o_stride[0] + tile.head * args.o_stride[1] + tile.row * args.o_stride[2];
}

// The addresses at which this lane reads fragments of Q, K and V from their tiles, matrix step 0.
struct LaneAddress {
    u32 q, k, v;
    __device__ __forceinline__ explicit LaneAddress(u32 smem_q) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        q = smem_q + TileQK::lane_base(warp * kRowsPerWarp + lane % 16, lane / 16);
        k = smem_q + kOffsetK + TileQK::lane_base(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        v = smem_q + kOffsetV + TileV::offset(lane % 4 * 2, lane / 4);
    }
};

// An operand of several registers as TF32 numbers, and what these leave.
template <int kCount> struct Split {
    u32 big[kCount], small[kCount];
    __device__ __forceinline__ void set(const u32 (&x)[kCount]) {
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            if (kProducts == 1) {
                big[i] = rounded_tf32(x[i]);
            } else {
                split_tf32(x[i], big[i], small[i]);
            }
        }
    }
};

// The online softmax of attention/softmax.cuh with every new maximum as the reference: P is at most 1, so that sums
// overflow where those of the exact kernel do. What was summed before is brought to a new reference by the difference
// of the two as scores have met them, each rounded: at scores of hundreds a rounding is 1e-5 of the sum.
struct Softmax : OnlineSoftmax<kMTiles, kSTiles, kOTiles, false> {
    // The reference that belongs to a maximum, in units of log2.
    static __device__ __forceinline__ float reference(float m, float c) { return __fmul_rn(m, c); }
    static __device__ __forceinline__ float factor(float from, float to, float c) {
        if (kProgramFar) return from == to ? 1.0f : exp2_approx((from - to) * c);
        return from == to ? 1.0f : exp2_approx(reference(from, c) - reference(to, c));
    }

    __device__ __forceinline__ void step(Scores& s, Output& o, float c) {
        float to[kMTiles][2];
        bool moved = false;
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
                for (int j = 1; j < kSTiles; j++) x = fmaxf(x, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
                to[i][h] = fmaxf(m[i][h], quad_max(x));
                moved |= to[i][h] != m[i][h];
            }
        }
        // One vote per warp: a branch that is the same for all lanes.
        if (__any_sync(0xffffffff, moved)) {
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float less = factor(m[i][h], to[i][h], c);
                    m[i][h] = to[i][h];
                    l[i][h] *= less;
#pragma unroll
                    for (int j = 0; j < kOTiles; j++) o[i][j][2 * h] *= less, o[i][j][2 * h + 1] *= less;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // A row that has seen nothing yet: any finite reference gives exp2(-inf) = 0 instead of NaN.
                const float first = kProgramFar && m[i][h] != -FT_INFINITY ? m[i][h] : 0.0f;
                const float less = kProgramFar || m[i][h] == -FT_INFINITY ? 0.0f : reference(m[i][h], c);
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < kSTiles; j++) {
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; e++) {
                        if (kProgramFar) s[i][j][e] -= first;
                        s[i][j][e] = exp2_approx(fmaf(s[i][j][e], c, -less));
                        sum += s[i][j][e];
                    }
                }
                l[i][h] += sum;
            }
        }
    }
};

// s = Q K^T for one block of keys.
__device__ __forceinline__ void multiply_qk(Scores& s, u32 lane_q, u32 lane_k) {
    constexpr int kTogether = 2;  // matrix steps that the tensor core sums by itself
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int j = 0; j < kSTiles; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[i][j][e] = 0.0f;
        }
    }
#pragma unroll
    for (int first = 0; first < kStepsQK; first += kTogether) {
        Split<4> q[kTogether][kMTiles];
#pragma unroll
        for (int h = 0; h < kTogether; h++) {
            if (first + h >= kStepsQK) break;
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
                u32 x[4];
                ldmatrix_x4(x, TileQK::at_step(lane_q, first + h) + i * 16 * TileQK::kPitch);
                q[h][i].set(x);
            }
        }
#pragma unroll
        for (int j = 0; j < kSTiles; j += 2) {
            Split<4> k[kTogether];
#pragma unroll
            for (int h = 0; h < kTogether; h++) {
                if (first + h >= kStepsQK) break;
                u32 x[4];
                ldmatrix_x4(x, TileQK::at_step(lane_k, first + h) + j * 8 * TileQK::kPitch);
                k[h].set(x);
            }
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    float(&sum)[4] = s[i][j + side];
                    if (kProducts == 1) {
#pragma unroll
                        for (int h = 0; h < kTogether; h++) {
                            if (first + h >= kStepsQK) break;
                            mma_tf32(sum, q[h][i].big, k[h].big[2 * side], k[h].big[2 * side + 1]);
                        }
                    } else {
                        float part[4] = {};
#pragma unroll
                        for (int h = 0; h < kTogether; h++) {
                            if (first + h >= kStepsQK) break;
                            mma_tf32(part, q[h][i].small, k[h].big[2 * side], k[h].big[2 * side + 1]);
                            mma_tf32(part, q[h][i].big, k[h].small[2 * side], k[h].small[2 * side + 1]);
                        }
#pragma unroll
                        for (int h = 0; h < kTogether; h++) {
                            if (first + h >= kStepsQK) break;
                            mma_tf32(part, q[h][i].big, k[h].big[2 * side], k[h].big[2 * side + 1]);
                        }
#pragma unroll
                        for (int e = 0; e < 4; e++) sum[e] += part[e];
                    }
                }
            }
        }
    }
}

// Scores in plain fp32, in the order of `forward/naive`: where an element is not finite, or so large that it rounds to
// an infinity, the parts of products are infinities of both signs. Rare, so plain and slow. By value: what another
// function writes to by address is never in registers.
struct PlainScores {
    Scores s;
};
__device__ __noinline__ PlainScores multiply_qk_plainly(u32 smem_q, u32 smem_k) {
    PlainScores plain;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * kRowsPerWarp + lane / 4;
    const auto element = [](u32 tile, int row, int d) {
        return __uint_as_float(load_shared_4(tile + TileQK::offset(row, d / 4) + d % 4 * 4));
    };
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int j = 0; j < kSTiles; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float sum = 0.0f;
#pragma unroll 1
                for (int d = 0; d < kHeadDimQK; d++) {
                    sum = fmaf(element(smem_q, row + i * 16 + e / 2 * 8, d),
                               element(smem_k, j * 8 + lane % 4 * 2 + e % 2, d), sum);
                }
                plain.s[i][j][e] = sum;
            }
        }
    }
    return plain;
}

// Whether any score of the warp is not finite.
__device__ __forceinline__ bool any_non_finite(const Scores& s) {
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int j = 0; j < kSTiles; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) zero = fmaf(s[i][j][e], 0.0f, zero);
        }
    }
    return __any_sync(0xffffffff, zero != 0.0f);
}

// o += P V for kCount tiles of columns from `first` on and one block of keys. A lane holds the scores of keys 2t and 2t
// + 1 of eight, and an operand has columns t and t + 4: the keys of V are taken in that order, so that P needs no
// shuffle.
//
// Of four tiles, tile j has columns j, j + 4, j + 8, ... of 32: a lane's columns of V, and those of its outputs, then
// lie side by side.
template <int kFirst, int kCount>
__device__ __forceinline__ void multiply_pv(Output& o, const Split<4> (&p)[kMTiles][kStepsPV], u32 lane_v) {
    const u32 at = kCount == 4 ? lane_v : lane_v - threadIdx.x % 32 / 4 * 12;  // a word for each column, not four
    // Matrix steps that the tensor core sums by itself: a key that weighs most is cut by each after it.
    constexpr int kTogether = 4;
#pragma unroll
    for (int first = 0; first < kStepsPV; first += kTogether) {
        float part[kMTiles][kCount][4] = {}, less[kMTiles][kCount][4] = {};
#pragma unroll
        for (int step = first; step < min_of(first + kTogether, kStepsPV); step++) {
            u32 x[2][kCount];
#pragma unroll
            for (int key = 0; key < 2; key++) {
                const u32 from = at + (step * 8 + key) * TileV::kPitch + kFirst * 32;
                if constexpr (kCount == 4) {
                    const uint4 v = load_shared_16(from);
                    x[key][0] = v.x, x[key][1] = v.y, x[key][2] = v.z, x[key][3] = v.w;
                } else {
                    x[key][0] = load_shared_4(from);
                }
            }
            Split<kCount> v[2];
            v[0].set(x[0]), v[1].set(x[1]);
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
#pragma unroll
                for (int j = 0; j < kCount; j++) {
                    if (kProducts == 3) {
                        mma_tf32(less[i][j], p[i][step].small, v[0].big[j], v[1].big[j]);
                        mma_tf32(less[i][j], p[i][step].big, v[0].small[j], v[1].small[j]);
                    }
                    mma_tf32(part[i][j], p[i][step].big, v[0].big[j], v[1].big[j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int j = 0; j < kCount; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    o[i][kFirst + j][e] += kProducts == 3 ? less[i][j][e] + part[i][j][e] : part[i][j][e];
                }
            }
        }
    }
}

template <int kFirst>
__device__ __forceinline__ void multiply_pv_from(Output& o, const Split<4> (&p)[kMTiles][kStepsPV], u32 lane_v) {
    if constexpr (kFirst < kWideTiles) {
        multiply_pv<kFirst, 4>(o, p, lane_v);
        multiply_pv_from<kFirst + 4>(o, p, lane_v);
    } else if constexpr (kFirst < kOTiles) {
        multiply_pv<kFirst, 1>(o, p, lane_v);
        multiply_pv_from<kFirst + 1>(o, p, lane_v);
    }
}

// o += P V for one block of keys.
__device__ __forceinline__ void multiply_pv(Output& o, const Scores& s, u32 lane_v) {
    Split<4> p[kMTiles][kStepsPV];
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int step = 0; step < kStepsPV; step++) {
            const float(&x)[4] = s[i][step];
            const u32 keys_in_order[4] = {__float_as_uint(x[0]), __float_as_uint(x[2]), __float_as_uint(x[1]),
                                          __float_as_uint(x[3])};
            p[i][step].set(keys_in_order);
        }
    }
    multiply_pv_from<0>(o, p, lane_v);
}

// The column of O that a lane's tile j begins with, and calls f(column, values, count) for what lies side by side of a
// row.
template <typename F> __device__ __forceinline__ void each_vector(float (&o)[kOTiles][4], int h, const F& f) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kWideTiles; j += 4) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float x[4] = {o[j][2 * h + e], o[j + 1][2 * h + e], o[j + 2][2 * h + e], o[j + 3][2 * h + e]};
            f(j * 8 + t * 8 + e * 4, x);
#pragma unroll
            for (int c = 0; c < 4; c++) o[j + c][2 * h + e] = x[c];
        }
    }
#pragma unroll
    for (int j = kWideTiles; j < kOTiles; j++) {
        float x[2] = {o[j][2 * h], o[j][2 * h + 1]};
        f(j * 8 + t * 2, x);
        o[j][2 * h] = x[0], o[j][2 * h + 1] = x[1];
    }
}
__device__ __forceinline__ void store_vector(float* to, const float (&x)[4]) {
    *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void store_vector(float* to, const float (&x)[2]) { *(float2*)to = make_float2(x[0], x[1]); }
// x += factor * what is there.
template <int kCount> __device__ __forceinline__ void add_vector(float (&x)[kCount], const float* from, float factor) {
#pragma unroll
    for (int c = 0; c < kCount; c++) x[c] = fmaf(from[c], factor, x[c]);
}

// Replaces the scores of masked pairs by -inf; `key` is the block's first key.
__device__ __forceinline__ void mask_scores(Scores& s, const ForwardArgs& args, int warp_row, int key) {
    const int lane = threadIdx.x % 32;
    const int column = key + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const KeyRange live = live_keys<kMaskLeft, kMaskRight>(args, warp_row + i * 16 + h * 8 + lane / 4);
            const int first = live.first - column, last = live.last - column;
#pragma unroll
            for (int j = 0; j < kSTiles; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int at = j * 8 + e;
                    if (at > last || (kMaskLeft && at < first)) s[i][j][2 * h + e] = -FT_INFINITY;
                }
            }
        }
    }
}

#if FT_DROPOUT
// Zeros in the place of dropped probabilities of a block of keys, behind their sum.
__device__ __forceinline__ void drop_weights(Scores& p, const Dropout& dropout, u32 pair, int warp_row, int key) {
    const u32 pairs[2] = {pair, pair};
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
        const u32 row = warp_row + i * 16 + threadIdx.x % 32 / 4, rows[2] = {row, row + 8};
        each_dropout_across<kSTiles>(dropout, u32(key) / 8, rows, pairs, [&](int j, int h, u32 word) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (!keeps_half(dropout, word, e)) p[i][j][2 * h + e] = 0.0f;
            }
        });
    }
}
#endif

// Zero times NaN is NaN: takes the non-finite elements out of a masked block of V, so that they cannot reach the rows
// that do not attend to them. restore_non_finite() puts them back into the outputs of those that do. Returns whether
// any was met.
__device__ __forceinline__ bool take_out_non_finite(u32 smem_v) {
    constexpr u32 kExponent = 0x7f800000;
    bool met = false;
    TileV::each_own_chunk<kBlockKV, kThreads>(smem_v, [&](u32 address) {
        uint4 v = load_shared_16(address);
        u32* words = &v.x;
        bool bad = false;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            if ((words[w] & kExponent) == kExponent) words[w] = 0, bad = true;
        }
        if (bad) {
            store_shared_16(address, v);
            met = true;
        }
    });
    return met;
}

// Rows whose outputs no element of V changes, since their sum is empty or NaN: one of four bits for each, where Q was.
__device__ __forceinline__ u32 settled_rows(u32 smem, int row) { return smem + row / 8 * 4; }
__device__ __forceinline__ bool is_settled(u32 smem, int row) {
    return load_shared_4(settled_rows(smem, row)) >> row % 8 * 4 & 1;
}

// The sum of the non-finite elements of a column of V over the keys that a row attends to, those of blocks that are
// visible to every row included or not.
template <typename Visible>
__device__ __forceinline__ float sum_of_non_finite(const ForwardArgs& args, const float* column, int row,
                                                   const BlockRange& blocks, bool everywhere, const Visible& visible) {
    const KeyRange live = live_keys<kMaskLeft, kMaskRight>(args, row);
    float sum = 0.0f;
#pragma unroll 1
    for (int j = live.first; j <= live.last && sum == sum; j++) {
        const int block = j / kBlockKV;
        if (!everywhere && block >= blocks.full_begin && block < blocks.full_end) {
            j = blocks.full_end * kBlockKV - 1;
            continue;
        }
        const float x = column[j * args.v_stride[2]];
        if (!(fabsf(x) < FT_INFINITY) && visible(j)) sum += x;
    }
    return sum;
}

// Puts right what non-finite elements of V make of outputs. In masked blocks they were taken out, and are added; in
// others a product has parts of both signs, of which an infinity makes NaN: the sum of these elements is the output.
// Rare, so plain and slow.
__device__ __noinline__ void restore_non_finite(const KernelArgs& args, u32 smem) {
    const Tile tile = this_tile(args);
    const BlockRange blocks = blocks_of(args, tile);
    const ProgramHead head = program_head(args, args, tile);
    const float* v = (const float*)args.v + tile.batch * args.v_stride[0] + tile.kv_head * args.v_stride[1];
    float* out = output_rows(args, tile);
#if FT_DROPOUT
    const Dropout dropout = dropout_of(args);
#endif
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kRowsPerWarp;
#pragma unroll 1
    for (int i = lane; i < kRowsPerWarp * kHeadDimV; i += 32) {
        const int row = first + i / kHeadDimV, column = i % kHeadDimV;
        if (row >= tile.rows) break;
        if (is_settled(smem, row)) continue;
        float* at = out + row * args.o_stride[2] + column;
        const bool everywhere = !(fabsf(*at) < FT_INFINITY);
#if FT_DROPOUT
        // What is not finite is asked for alone; times a weight of zero it is NaN.
        bool is_dropped = false;
        const auto visible = [&](int key) {
            const bool seen = program_visible(head, tile.row + row, key);
            is_dropped |= seen && !keeps_score(dropout, dropout_pair(args, tile.batch, tile.head), tile.row + row, key);
            return seen;
        };
#else
        const auto visible = [&](int key) { return program_visible(head, tile.row + row, key); };
#endif
#if FT_DROPOUT
        float sum = sum_of_non_finite(args, v + column, tile.row + row, blocks, everywhere, visible);
        if (is_dropped) sum = __int_as_float(0x7fc00000);
#else
        const float sum = sum_of_non_finite(args, v + column, tile.row + row, blocks, everywhere, visible);
#endif
        if (sum != 0.0f) *at = sum;
    }
}

// A scale of zero or below turns maxima of the scores into minima: move its sign into Q and use its magnitude.
__device__ __forceinline__ void fold_sign_into_q(u32 smem_q, float scale) {
    TileQK::each_own_chunk<kBlockQ, kThreads>(smem_q, [&](u32 address) {
        uint4 v = load_shared_16(address);
        u32* words = &v.x;
#pragma unroll
        for (int w = 0; w < 4; w++) words[w] = scale == 0.0f ? 0 : words[w] ^ 0x80000000;
        store_shared_16(address, v);
    });
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    @{ entry }@(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(128) u8 smem[];
    const u32 smem_q = smem_address(smem), smem_k = smem_q + kOffsetK, smem_v = smem_q + kOffsetV;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const LaneAddress at(smem_q);

    const Tile tile = this_tile(args);
    const BlockRange blocks = blocks_of(args, tile);
    const ProgramHead head = program_head(args, args, tile);
    const ProgramKept kept = program_kept(head);
    const int warp_row = tile.row + warp * kRowsPerWarp;
    // Strides in 16-bit words, as row tiles count.
    const i64 k_stride = args.k_stride[2] * 2, v_stride = args.v_stride[2] * 2;
    const int last_key = (blocks.end - 1) * kBlockKV;
    const auto words = [](const void* tensor, i64 elements) { return (const u16*)((const float*)tensor + elements); };
    // K and V are read backwards, block by block: one running pointer each.
    const u16* k = TileQK::thread_source<kThreads>(
        words(args.k, tile.batch * args.k_stride[0] + tile.kv_head * args.k_stride[1] + last_key * args.k_stride[2]),
        k_stride);
    const u16* v = TileV::thread_source<kThreads>(
        words(args.v, tile.batch * args.v_stride[0] + tile.kv_head * args.v_stride[1] + last_key * args.v_stride[2]),
        v_stride);

    // Copy block n, which must be the one before the last copied. Only the first one can reach past the last key.
    const auto copy_k = [&](int n, int stage, auto check) {
        TileQK::copy_async<kBlockKV, kThreads, check.value>(smem_k + stage * kBytesK, k, k_stride,
                                                            args.kv_len - n * kBlockKV);
        k -= kBlockKV * k_stride;
    };
    const auto copy_v = [&](int n, int stage, auto check) {
        TileV::copy_async<kBlockKV, kThreads, check.value>(smem_v + stage * kBytesV, v, v_stride,
                                                           args.kv_len - n * kBlockKV);
        v -= kBlockKV * v_stride;
    };

    // Q first. A scale that is not positive is rare, so its branch costs one comparison.
    const u16* q =
        words(args.q, tile.batch * args.q_stride[0] + tile.head * args.q_stride[1] + tile.row * args.q_stride[2]);
    const i64 q_stride = args.q_stride[2] * 2;
    TileQK::copy_async<kBlockQ, kThreads, true>(smem_q, TileQK::thread_source<kThreads>(q, q_stride), q_stride,
                                                tile.rows);
    cp_async_commit();
    const bool fold = !(args.scale > 0.0f);
    if (fold) {
        cp_async_wait<0>();
        fold_sign_into_q(smem_q, args.scale);
        __syncthreads();
    }
    const float magnitude = fold ? (args.scale == 0.0f ? 1.0f : -args.scale) : args.scale;
    const float c = kProgramScore ? kLog2E : magnitude * kLog2E;  // a program gives scores in natural units

    Output o;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int j = 0; j < kOTiles; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][j][e] = 0.0f;
        }
    }
    Softmax softmax;
    softmax.init();
    bool met_non_finite = false;
#if FT_DROPOUT
    const Dropout dropout = dropout_of(args);
#endif

    // What has gone to memory: its sums, and the references that they have.
    float gathered_l[kMTiles][2], gathered_m[kMTiles][2];
    bool has_gathered = false;
    // Brings O and the sums together with what has gathered in memory.
    const auto join = [&](int i, int h, const float* row, bool exists) {
        if (!has_gathered) return;
        const float factor = Softmax::factor(gathered_m[i][h], softmax.m[i][h], c);
        softmax.l[i][h] = fmaf(gathered_l[i][h], factor, softmax.l[i][h]);
        if (exists) each_vector(o[i], h, [&](int column, auto& x) { add_vector(x, row + column, factor); });
    };
    const auto gather = [&] {
        const Tile tile = this_tile(args);
        float* out = output_rows(args, tile);
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = warp * kRowsPerWarp + i * 16 + h * 8 + lane / 4;
                float* to = out + row * args.o_stride[2];
                join(i, h, to, row < tile.rows);
                gathered_l[i][h] = softmax.l[i][h], gathered_m[i][h] = softmax.m[i][h];
                softmax.l[i][h] = 0.0f;
                each_vector(o[i], h, [&](int column, auto& x) {
                    if (row < tile.rows) store_vector(to + column, x);
                    for (float& each : x) each = 0.0f;
                });
            }
        }
        has_gathered = true;
    };

    // Keys are visited from the last block to the first; block n is step (end - 1 - n) and lives in stage step %
    // kStages.
    int stage = 0;
    if (kStages == 1) {
        if (blocks.end > blocks.begin) copy_k(blocks.end - 1, 0, Bool<true>{});
        cp_async_commit();
    } else {
#pragma unroll
        for (int ahead = 0; ahead < kStages - 1; ahead++) {
            const int n = blocks.end - 1 - ahead;
            if (n >= blocks.begin) copy_k(n, ahead, Bool<true>{}), copy_v(n, ahead, Bool<true>{});
            cp_async_commit();
        }
    }

    // The scores of block n, with what the program and the window make of them.
    const auto score = [&](Scores& s, int n, auto masked) {
        multiply_qk(s, at.q, at.k + stage * kBytesK);
        if (any_non_finite(s)) {
            const PlainScores plain = multiply_qk_plainly(smem_q, smem_k + stage * kBytesK);
#pragma unroll
            for (int i = 0; i < kMTiles; i++) {
#pragma unroll
                for (int j = 0; j < kSTiles; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) s[i][j][e] = plain.s[i][j][e];
                }
            }
        }
        const int key = n * kBlockKV + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
            const auto at = [&](int j, int e) -> float& { return s[i][j][e]; };
            const int row = warp_row + i * 16 + lane / 4;
            if (masked) {
                program_scores<true, kSTiles>(at, head, kept, row, key, magnitude);
            } else {
                program_scores<false, kSTiles>(at, head, kept, row, key, magnitude);
            }
        }
        if (masked) mask_scores(s, args, warp_row, n * kBlockKV);
    };

    // `masked` is a bool, or a constant where masked blocks have a loop of their own.
    const auto step = [&](int n, auto masked) {
        Scores s;
        if (kStages == 1) {
            // One buffer each: V of this step arrives during Q K^T, K of the next one during the softmax and P V.
            cp_async_wait<0>();
            __syncthreads();
            if (masked) {
                copy_v(n, 0, Bool<true>{});
            } else {
                copy_v(n, 0, Bool<false>{});
            }
            cp_async_commit();
            score(s, n, masked);
            cp_async_wait<0>();
            if (masked) met_non_finite |= take_out_non_finite(smem_v + stage * kBytesV);
            __syncthreads();
            if (n > blocks.begin) copy_k(n - 1, 0, Bool<false>{});
            cp_async_commit();
        } else {
            cp_async_wait<(kStages > 1 ? kStages - 2 : 0)>();
            if (masked) met_non_finite |= take_out_non_finite(smem_v + stage * kBytesV);
            __syncthreads();  // this step's K and V are here, and everyone is done with the stage that is filled next
            const int ahead = n - (kStages - 1);
            const int ahead_stage = stage == 0 ? kStages - 1 : stage - 1;
            if (ahead >= blocks.begin) {
                copy_k(ahead, ahead_stage, Bool<false>{});
                copy_v(ahead, ahead_stage, Bool<false>{});
            }
            cp_async_commit();
            score(s, n, masked);
        }
        softmax.step(s, o, c);
#if FT_DROPOUT
        drop_weights(s, dropout, dropout_pair(args, tile.batch, tile.head), warp_row, n * kBlockKV);
#endif
        multiply_pv(o, s, at.v + stage * kBytesV);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        if ((blocks.end - n) % kSpanBlocks == 0 && n > blocks.begin) gather();
    };

    // A block needs a mask when it is cut on the right (or reaches past the last key), or cut on the left.
    int n = blocks.end - 1;
    if (kMaskedLoop) {
        for (; n >= max_of(blocks.begin, blocks.full_end); n--) step(n, Bool<true>{});
        for (; n >= max_of(blocks.begin, blocks.full_begin); n--) step(n, Bool<false>{});
        if (kMaskedFirst) {
            for (; n >= blocks.begin; n--) step(n, Bool<true>{});
        }
    } else {
        for (; n >= blocks.begin; n--) step(n, n >= blocks.full_end || (kMaskedFirst && n < blocks.full_begin));
    }

    cp_async_wait<0>();
    bool restore = __syncthreads_or(met_non_finite);
    const Tile out_tile = this_tile(args);  // again, so that the main loop need not keep it
    float* out = output_rows(args, out_tile);
    float zero = 0.0f;  // NaN once an output is not finite
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = warp * kRowsPerWarp + i * 16 + h * 8 + lane / 4;
            const bool exists = row < out_tile.rows;
            float* to = out + row * args.o_stride[2];
            join(i, h, to, exists);
            softmax.finish(i, h);
            const float l = softmax.l[i][h];
            const bool empty = l == 0.0f;
            float inverse = empty ? 0.0f : 1.0f / l;
            const u32 bits = __ballot_sync(0xffffffff, empty || l != l);
            if (lane == 0) store_shared_4(settled_rows(smem_q, row), bits);
            // The reference as it was subtracted from scores, and a logarithm to all bits.
            float lse = empty ? -FT_INFINITY : fmaf(Softmax::reference(softmax.m[i][h], c), kLn2, logf(l));
            if (is_far(softmax.m[i][h], c)) lse = far_log_sum_exp(softmax.m[i][h], c, l);
            if (kProgramSink) {
                const float sink = program_sink(head, min_of(out_tile.row + row, args.q_len - 1));
                const float top = fmaxf(lse, sink), less = top == -FT_INFINITY ? 0.0f : expf(lse - top);
                const float all = less + (top == -FT_INFINITY ? 0.0f : expf(sink - top));
                inverse = all == 0.0f ? 0.0f : inverse * (less / all);
                lse = all == 0.0f ? -FT_INFINITY : top + logf(all);
            }
            if (args.lse != nullptr && lane % 4 == 0 && exists) {
                args.lse[(i64(out_tile.batch) * args.heads + out_tile.head) * args.q_len + out_tile.row + row] = lse;
            }
#if FT_DROPOUT
            inverse *= args.dropout_scale;
#endif
            each_vector(o[i], h, [&](int column, auto& x) {
                for (float& each : x) {
                    each = empty ? 0.0f : each * inverse;  // a NaN of V has no part in an empty row
                    zero = fmaf(each, 0.0f, zero);
                }
                if (exists) store_vector(to + column, x);
            });
        }
    }
    restore |= __any_sync(0xffffffff, zero != 0.0f);
    __syncwarp();  // a warp puts right only the rows that it wrote
    if (restore) restore_non_finite(args, smem_q);
}
