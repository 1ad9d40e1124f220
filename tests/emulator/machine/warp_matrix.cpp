// What sm_80 brings: copies of 16 bytes that threads wait for themselves (cp.async), and matrix instructions of a warp,
// with those of sm_75 and sm_89.
//
// A copy happens at any time between its issue and the wait that covers its group, and copies overtake each other.
// Nobody may touch its target meanwhile; that another thread waits for it is worth nothing.

#include "machine.h"
#include <algorithm>
#include <cmath>
#include <cstring>

namespace ptx {
namespace {

struct Copy {
    Thread* thread;
    u64 group;
    u32 to, size;
    u8 content[16];
};
std::vector<Copy> copies;
u64 committed[kMaxThreads];  // groups of each thread

// So many happen at once at most.
constexpr std::size_t kBurst = 16;

// Whether a copy of the calling thread in a group before `group` is on its way.
bool is_open(u64 group) {
    return std::any_of(copies.begin(), copies.end(),
                       [group](const Copy& c) { return c.thread == running && c.group < group; });
}

// Registers of a warp that came together for one instruction.
struct Gathered {
    u32 a[32][4], b[32][2];
    float* d[32][4];
    const float* c[32][4];
} gathered[kMaxThreads / 32];

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type": lane 4 g + t has rows g and g + 8 of A and D,
// and column g of B.
void multiply(const Gathered& w, Format format) {
    static float a[16][16], b[16][8], d[16][8];
    for (int l = 0; l < 32; l++) {
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 8; i++)
            a[g + 8 * (i / 2 % 2)][2 * t + i % 2 + 8 * (i / 4)] = widen(format, u16(w.a[l][i / 2] >> (i % 2 * 16)));
        for (int i = 0; i < 4; i++) {
            b[2 * t + i % 2 + 8 * (i / 2)][g] = widen(format, u16(w.b[l][i / 2] >> (i % 2 * 16)));
            d[g + 8 * (i / 2)][2 * t + i % 2] = *w.c[l][i];
        }
    }
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 8; n++) d[r][n] += a[r][k] * b[k][n];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) *w.d[l][i] = d[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
}

// Sign, exponent and ten bits of the mantissa: the instruction does not look at the others.
float tf32(u32 x) {
    x &= 0xffffe000;
    float y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

// An fp32 number next to x towards zero, if x is none: sums of tensor cores are cut off. Hardware cuts each of the nine
// terms at the unit of the largest, which loses no less.
float cut(double x) {
    const float y = float(x);
    return std::isfinite(y) && std::fabs(double(y)) > std::fabs(x) ? std::nextafterf(y, 0.0f) : y;
}

// PTX ISA, "Matrix fragments for mma.m16n8k8" with .tf32: lane 4 g + t has rows g and g + 8 and columns t and t + 4 of
// A, and rows t and t + 4 of column g of B.
void multiply_tf32(const Gathered& w) {
    static float a[16][8], b[8][8];
    static double d[16][8];
    for (int l = 0; l < 32; l++) {
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 4; i++) {
            a[g + 8 * (i % 2)][t + 4 * (i / 2)] = tf32(w.a[l][i]);
            d[g + 8 * (i / 2)][2 * t + i % 2] = *w.c[l][i];
        }
        for (int i = 0; i < 2; i++) b[t + 4 * i][g] = tf32(w.b[l][i]);
    }
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 8; k++)
            for (int n = 0; n < 8; n++) d[r][n] += double(a[r][k]) * b[k][n];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) *w.d[l][i] = cut(d[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2]);
}

// PTX ISA, "Matrix fragments for mma.m16n8k8" with .f16: lane 4 g + t has rows g and g + 8 and columns 2 t and 2 t + 1
// of A, a register each, and rows 2 t and 2 t + 1 of column g of B.
void multiply_k8(const Gathered& w) {
    static float a[16][8], b[8][8], d[16][8];
    for (int l = 0; l < 32; l++) {
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 4; i++) {
            a[g + 8 * (i / 2)][2 * t + i % 2] = widen(Format::f16, u16(w.a[l][i / 2] >> (i % 2 * 16)));
            d[g + 8 * (i / 2)][2 * t + i % 2] = *w.c[l][i];
        }
        for (int i = 0; i < 2; i++) b[2 * t + i][g] = widen(Format::f16, u16(w.b[l][0] >> (i * 16)));
    }
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 8; k++)
            for (int n = 0; n < 8; n++) d[r][n] += a[r][k] * b[k][n];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) *w.d[l][i] = d[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
}

// PTX ISA, "Matrix fragments for mma.m16n8k32" with .e4m3: lane 4 g + t has of rows g and g + 8 of A columns 4 t to
// 4 t + 3 (registers 0 and 1) and those 16 further (2 and 3), and the same rows of column g of B. Of a sum 13 bits
// behind the first are kept, as Ada and Hopper do.
void multiply_e4m3(const Gathered& w) {
    static float a[16][32], b[32][8], d[16][8];
    for (int l = 0; l < 32; l++) {
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 16; i++)
            a[g + 8 * (i / 4 % 2)][4 * t + i % 4 + 16 * (i / 8)] = from_e4m3(w.a[l][i / 4] >> i % 4 * 8 & 0xff);
        for (int i = 0; i < 8; i++) b[4 * t + i % 4 + 16 * (i / 4)][g] = from_e4m3(w.b[l][i / 4] >> i % 4 * 8 & 0xff);
        for (int i = 0; i < 4; i++) d[g + 8 * (i / 2)][2 * t + i % 2] = *w.c[l][i];
    }
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 32; k++)
            for (int n = 0; n < 8; n++) d[r][n] += a[r][k] * b[k][n];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) *w.d[l][i] = cut_fp8_sum(d[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2]);
}

template <typename Multiply>
void mma(float* const (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float* const (&c)[4], Multiply multiply) {
    Gathered& w = gathered[warp(*running)];
    const int l = lane(*running);
    std::memcpy(w.a[l], a, sizeof a);
    std::memcpy(w.b[l], b, sizeof b);
    std::copy(d, d + 4, w.d[l]);
    std::copy(c, c + 4, w.c[l]);
    // Whoever completes the exchange has seen all others arrive; they do not run before it stops.
    const bool last = completes_exchange();
    if (last) multiply(w);
    exchange("mma.sync", 0xffffffff, 0);
}

// Lane 8 i + r holds the address of row r of matrix i.
void ldmatrix(u32 (&to)[4], u32 address, bool transposed) {
    maybe_switch(16);
    if (address % 16) fail("ldmatrix from shared address %u: rows need 16 bytes of alignment", address);
    u32 rows[32];
    std::memcpy(rows, exchange("ldmatrix", 0xffffffff, address), sizeof rows);
    const int l = lane(*running);
    for (int i = 0; i < 4; i++) {
        if (transposed) {
            u16 low, high;
            ld_shared_u16(low, rows[8 * i + l % 4 * 2] + l / 4 * 2);
            ld_shared_u16(high, rows[8 * i + l % 4 * 2 + 1] + l / 4 * 2);
            to[i] = low | u32(high) << 16;
        } else {
            ld_shared_u32(to[i], rows[8 * i + l / 4] + l % 4 * 4);
        }
    }
    note_ldmatrix(address);
}

}  // namespace

namespace thread_copies {
void reset() {
    copies.clear();
    std::memset(committed, 0, sizeof committed);
}
bool has_work() { return !copies.empty(); }
void act() {
    for (std::size_t n = 1 + rng() % kBurst; n > 0 && !copies.empty(); n--) {
        const std::size_t i = rng() % copies.size();
        const Copy c = copies[i];
        copies[i] = copies.back();
        copies.pop_back();
        std::memcpy(end_async_write(c.to, c.size), c.content, c.size);
        if (c.thread->waits_for && c.thread->waits_on[1] == kWaitsForCopies) wake(*c.thread);
    }
}
void check_done() {
    for (const Copy& c : copies) fail("a block ends while a cp.async of thread %d is unfinished", c.thread->number);
}
}  // namespace thread_copies

static void copy(u32 to, const void* from, u32 size, u32 bytes) {
    maybe_switch(64);
    if (bytes > size) fail("cp.async of %u bytes, %u of them from memory", size, bytes);
    if (bytes && reinterpret_cast<u64>(from) % size) fail("cp.async of %u bytes from %p: not aligned", size, from);
    Copy c = {running, committed[running->number], to, size, {}};
    // What is copied does not change while a kernel runs, so it may be read now.
    if (bytes) std::memcpy(c.content, from, bytes);
    begin_async_write(to, size, true);
    copies.push_back(c);
}
void cp_async_cg_shared_global_L2__128B(u32 to, const void* from, u32 size, u32 bytes) {
    if (size != 16) fail("cp.async.cg of %u bytes", size);
    copy(to, from, size, bytes);
}
void cp_async_ca_shared_global(u32 to, const void* from, u32 size, u32 bytes) {
    if (size != 4 && size != 8 && size != 16) fail("cp.async.ca of %u bytes", size);
    copy(to, from, size, bytes);
}
void cp_async_commit_group() { committed[running->number]++; }
void cp_async_wait_group(u32 pending) {
    maybe_switch(16);
    const u64 all = committed[running->number];
    while (is_open(all > pending ? all - pending : 0)) block("its copies", pending, kWaitsForCopies);
}

void ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 address) {
    u32 to[4];
    ldmatrix(to, address, false);
    a = to[0], b = to[1], c = to[2], d = to[3];
}
void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 address) {
    u32 to[4];
    ldmatrix(to, address, true);
    a = to[0], b = to[1], c = to[2], d = to[3];
}

void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                       u32 a2, u32 a3, u32 b0, u32 b1, const float& c0, const float& c1,
                                                       const float& c2, const float& c3) {
    mma({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {&c0, &c1, &c2, &c3},
        [](const Gathered& w) { multiply(w, Format::f16); });
}
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                         u32 a2, u32 a3, u32 b0, u32 b1, const float& c0,
                                                         const float& c1, const float& c2, const float& c3) {
    mma({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {&c0, &c1, &c2, &c3},
        [](const Gathered& w) { multiply(w, Format::bf16); });
}
void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                        u32 a2, u32 a3, u32 b0, u32 b1, const float& c0,
                                                        const float& c1, const float& c2, const float& c3) {
    mma({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {&c0, &c1, &c2, &c3}, multiply_tf32);
}

void mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                      u32 b0, const float& c0, const float& c1, const float& c2,
                                                      const float& c3) {
    mma({&d0, &d1, &d2, &d3}, {a0, a1, 0, 0}, {b0, 0}, {&c0, &c1, &c2, &c3}, multiply_k8);
}
void mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                         u32 a2, u32 a3, u32 b0, u32 b1, const float& c0,
                                                         const float& c1, const float& c2, const float& c3) {
    mma({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {&c0, &c1, &c2, &c3}, multiply_e4m3);
}

}  // namespace ptx
