// Warpgroup matrix instructions (wgmma). Each warp's quarter of an instruction runs at any time between its issue by
// all lanes of the warp and the wait that covers it, in order. Until then its accumulators hold NaN, and whoever writes
// to them is caught.

#include "machine.h"
#include <cstring>
#include <deque>

namespace ptx {
namespace {

constexpr int kWarps = kMaxThreads / 32, kMaxColumns = 256, kMaxDepth = 32;

// Elements that an instruction sums over.
int depth_of(Format format) { return is_fp8(format) ? 32 : 16; }
Format format_of_a(Format format) { return format == Format::e4m3_e5m2 ? Format::e4m3 : format; }
Format format_of_b(Format format) { return format == Format::e4m3_e5m2 ? Format::e5m2 : format; }
// A quiet NaN that no computation gives.
constexpr u32 kUntouched = 0x7fc0dead;

// 16 rows of a matrix in registers, shared by the lanes of a warp.
struct Accumulator {
    int columns;
    float* at[32][kMaxColumns / 2];
    u32 taken;    // lanes whose registers are in `value` now
    u64 last[32]; // the latest step of each of them
    float value[16][kMaxColumns];
};

// A step as one warpgroup issues it. Its place in the order is its number.
struct Issued {
    MatrixStep step;
    u32 lanes[4];
    u32 a[4][32][4];
    Accumulator* d[4];
};

struct Group {
    std::deque<Issued> steps;
    u64 first;  // number of steps.front()
};
Group groups[kWarps / 4];

struct Warp {
    std::deque<Accumulator> accumulators;
    u64 done;  // steps
} warps[kWarps];

struct Lane {
    u64 issued;
    bool fenced;
    std::vector<u64> committed;  // steps at the end of each group
} lanes[kMaxThreads];

// Row of fragment element `i` of a lane in its warp's 16 rows, and the column (PTX ISA, "Register fragments for
// wgmma.mma_async.m64nNk16", matrix D).
int row_of(int lane, int i) { return lane / 4 + 8 * (i / 2 % 2); }
int column_of(int lane, int i) { return 8 * (i / 4) + lane % 4 * 2 + i % 2; }

// The shared address of an element by a descriptor (PTX ISA, "Matrix descriptor format" and "Strides"). `outer` is the
// row of A or the column of B, `depth` the dimension that is summed over.
struct Descriptor {
    u32 start, leading, stride;
    bool by_depth;

    Descriptor(u64 bits, bool by_depth)
        : start((bits & 0x3fff) << 4),
          leading((bits >> 16 & 0x3fff) << 4),
          stride((bits >> 32 & 0x3fff) << 4),
          by_depth(by_depth) {
        if (bits >> 62 != 1) fail("a matrix descriptor with swizzle mode %llu: only 1 is emulated", bits >> 62);
        if (bits >> 49 & 7) fail("a matrix descriptor with base offset %d", int(bits >> 49 & 7));
    }

    u32 address(u32 outer, u32 depth) const {
        u32 offset;
        if (by_depth) {
            // 64 outer elements lie together, the next 64 a leading offset away; 8 of depth make 1024 bytes, the next 8
            // follow at the stride.
            offset = outer % 64 * 2 + outer / 64 * leading + depth % 8 * 128 + depth / 8 * stride;
        } else {
            // 8 outer elements are 8 rows of 128 bytes; the next 8 follow at the stride.
            offset = outer % 8 * 128 + outer / 8 * stride + depth * 2;
        }
        return swizzle_128(start + offset);
    }

    // to[depth][outer], for `count` outer elements from `first` on.
    void read(const char* who, Format format, u32 first, u32 count, float (*to)[kMaxColumns]) const {
        if (is_fp8(format)) {
            for (u32 i = 0; i < count; i++) {
                for (u32 j = 0; j < kMaxDepth; j += 16) {
                    const u32 outer = first + i;
                    const u32 at = swizzle_128(start + outer % 8 * 128 + outer / 8 * stride + j);
                    const u8* const x = read_async(who, at, 16);
                    const auto value = format == Format::e5m2 ? from_e5m2 : from_e4m3;
                    for (u32 e = 0; e < 16; e++) to[j + e][i] = value(x[e]);
                }
            }
            return;
        }
        constexpr u32 kDepth = 16;
        // Both kinds keep 8 neighbours of one dimension in 16 bytes.
        for (u32 i = 0; i < (by_depth ? kDepth : count); i++) {
            for (u32 j = 0; j < (by_depth ? count : kDepth); j += 8) {
                const u32 at = by_depth ? address(first + j, i) : address(first + i, j);
                u16 x[8];
                std::memcpy(x, read_async(who, at, 16), 16);
                for (u32 e = 0; e < 8; e++) (by_depth ? to[i][j + e] : to[j + e][i]) = widen(format, x[e]);
            }
        }
    }
};

bool is_ready(u32 w) {
    const Group& g = groups[w / 4];
    const u64 next = warps[w].done;
    return next < g.first + g.steps.size() && g.steps[next - g.first].lanes[w % 4] == 0xffffffff;
}

float b[kMaxDepth][kMaxColumns];

void multiply(u32 w, Issued& issued) {
    const MatrixStep& s = issued.step;
    static float a[kMaxDepth][kMaxColumns];
    if (s.a_in_registers && is_fp8(s.format)) {
        // Words 0 and 2 are rows of the upper eight, 2 and 3 the second half of depth.
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 16; i++) {
                const u32 word = i / 4, byte = i % 4;
                const int depth = l % 4 * 4 + byte + 16 * (word / 2), row = l / 4 + 8 * (word % 2);
                a[depth][row] = from_e4m3(issued.a[w % 4][l][word] >> byte * 8);
            }
    } else if (s.a_in_registers) {
        // "Register fragments", matrix A: words 0 and 2 are rows of the upper eight, 2 and 3 the second half of depth.
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 8; i++) {
                const u16 x = u16(issued.a[w % 4][l][i / 2] >> (i % 2 * 16));
                a[l % 4 * 2 + i % 2 + 8 * (i / 4)][l / 4 + 8 * (i / 2 % 2)] = widen(s.format, x);
            }
    } else {
        Descriptor(s.a, s.a_by_depth).read("wgmma (A)", format_of_a(s.format), w % 4 * 16, 16, a);
    }
    Accumulator& d = *issued.d[w % 4];
    for (int r = 0; r < 16; r++) {
        float* out = d.value[r];
        if (!s.keep) std::memset(out, 0, sizeof d.value[r]);
        for (int k = 0; k < depth_of(s.format); k++) {
            const float x = a[k][r];
            for (int c = 0; c < s.columns; c++) out[c] += x * b[k][c];
        }
        for (int c = 0; is_fp8(s.format) && c < s.columns; c++) out[c] = cut_fp8_sum(out[c]);
    }
    warps[w].done++;
    for (int i = 0; i < 32; i++) {
        Thread& t = threads[w * 32 + i];
        if (t.waits_for && t.waits_on[1] == 0x3ace) wake(t);
    }
}

Accumulator& accumulator_at(u32 w, int lane, int columns, float* first) {
    for (Accumulator& x : warps[w].accumulators)
        if (x.at[lane][0] == first && x.columns == columns) return x;
    warps[w].accumulators.emplace_back();
    Accumulator& x = warps[w].accumulators.back();
    std::memset(&x, 0, sizeof x);
    x.columns = columns;
    return x;
}

}  // namespace

namespace tensor_core {
void reset() {
    for (Group& g : groups) g.steps.clear(), g.first = 0;
    for (Warp& w : warps) w.accumulators.clear(), w.done = 0;
    for (Lane& l : lanes) l.issued = 0, l.fenced = false, l.committed.clear();
}

bool has_work() {
    for (int w = 0; w < all_threads() / 32; w++)
        if (is_ready(w)) return true;
    return false;
}

void act() {
    const u32 count = all_threads() / 32;
    u32 w = rng() % count;
    while (!is_ready(w)) w = (w + 1) % count;
    Group& g = groups[w / 4];
    const u64 step = warps[w].done;
    Issued& issued = g.steps[step - g.first];
    const MatrixStep& s = issued.step;
    Descriptor(s.b, s.b_by_depth).read("wgmma (B)", format_of_b(s.format), 0, s.columns, b);
    // The other warps often take the step together with this one, but need not.
    const bool alone = one_in(4);
    for (u32 i = w / 4 * 4; i < w / 4 * 4 + 4; i++)
        if (i == w || (!alone && warps[i].done == step && is_ready(i))) multiply(i, issued);
    u64 all = ~0ull;
    for (u32 i = w / 4 * 4; i < w / 4 * 4 + 4; i++) all = warps[i].done < all ? warps[i].done : all;
    while (g.first < all) g.steps.pop_front(), g.first++;
}

void check_done() {
    for (int i = 0; i < all_threads(); i++)
        if (lanes[i].issued > warps[i / 32].done) fail("thread %d ends before its matrix instructions", i);
    for (int w = 0; w < all_threads() / 32; w++)
        for (const Accumulator& x : warps[w].accumulators)
            if (x.taken) fail("warp %d ends without waiting for its accumulators", w);
}
}  // namespace tensor_core

void issue(const MatrixStep& step, float* const* d, const u32* a) {
    maybe_switch(256);
    const Thread& self = *running;
    const u32 w = warp(self), l = lane(self);
    Lane& mine = lanes[self.number];
    if (!mine.fenced) fail("a batch of wgmma without wgmma.fence before it");
    Group& g = groups[w / 4];
    const u64 number = mine.issued++;
    if (number == g.first + g.steps.size()) {
        g.steps.emplace_back();
        std::memset(&g.steps.back(), 0, sizeof(Issued));
        g.steps.back().step = step;
    }
    Issued& issued = g.steps[number - g.first];
    if (!(issued.step == step)) fail("threads of a warpgroup issue different wgmma as their number %llu", number);
    issued.lanes[w % 4] |= 1u << l;
    if (a) std::memcpy(issued.a[w % 4][l], a, sizeof issued.a[w % 4][l]);

    Accumulator*& known = issued.d[w % 4];
    if (!known) known = &accumulator_at(w, l, step.columns, d[0]);
    Accumulator& x = *known;
    x.last[l] = number;
    if (x.taken & 1u << l) {
        if (x.at[l][0] != d[0]) fail("lanes of a warp give different accumulators");
        return;
    }
    x.taken |= 1u << l;
    for (int i = 0; i < step.columns / 2; i++) {
        x.at[l][i] = d[i];
        x.value[row_of(l, i)][column_of(l, i)] = *d[i];
        std::memcpy(d[i], &kUntouched, 4);
    }
}

void wgmma_fence_sync_aligned() { lanes[running->number].fenced = true; }

void wgmma_commit_group_sync_aligned() {
    Lane& mine = lanes[running->number];
    mine.committed.push_back(mine.issued);
    mine.fenced = false;
}

void wgmma_wait_group_sync_aligned(u32 pending) {
    const u32 w = warp(*running), l = lane(*running);
    const std::vector<u64>& committed = lanes[running->number].committed;
    if (committed.size() <= pending) return;
    const u64 needed = committed[committed.size() - 1 - pending];
    while (warps[w].done < needed) block("wgmma", u32(needed), 0x3ace);
    for (Accumulator& x : warps[w].accumulators) {
        if (!(x.taken & 1u << l) || x.last[l] >= needed) continue;
        for (int i = 0; i < x.columns / 2; i++) {
            if (std::memcmp(x.at[l][i], &kUntouched, 4)) fail("accumulator register %d was written while wgmma ran", i);
            *x.at[l][i] = x.value[row_of(l, i)][column_of(l, i)];
        }
        x.taken &= ~(1u << l);
    }
}

}  // namespace ptx
