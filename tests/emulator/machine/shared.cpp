// Shared memory with a note per 16 bytes: has it been written, by whom, is a copy on its way to it, and who may still
// be reading?

#include "machine.h"
#include <cstring>

extern "C" {
alignas(1024) unsigned char shared_memory[ptx::kMaxShared];
}

namespace ptx {
namespace {

enum class State : u8 { unwritten, arriving, holds };
struct Note {
    State state;
    u8 words;    // bits of those of 4 bytes that copies of less than 16 bytes are on their way to
    u16 writer;  // thread + 1 of the last ordinary write, or 0
    u32 fences;  // how many fences that thread had passed then
    u16 reader;  // the same of the last ldmatrix, whose answer nobody need have waited for
    u32 reader_fences;
};
constexpr u32 kGranule = 16;
Note notes[kMaxShared / kGranule];

u8* place(const char* who, u32 address, u32 bytes) {
    if (address < kSharedBase || address + bytes > kSharedBase + u32(kernel.shared_bytes))
        fail("%s of %u bytes at shared address %u: the block has %d bytes from %u on", who, bytes, address,
             kernel.shared_bytes, kSharedBase);
    if (address % bytes && bytes <= 16) fail("%s of %u bytes at shared address %u: not aligned", who, bytes, address);
    return shared_memory + (address - kSharedBase);
}

Note& note(u32 address) { return notes[(address - kSharedBase) / kGranule]; }

// Whether a copy is on its way to any of some bytes of a granule.
bool is_arriving(const Note& n, u32 address, u32 bytes) {
    const u32 first = address % kGranule / 4, last = (address % kGranule + bytes - 1) / 4;
    return n.state == State::arriving || (n.words >> first & ((1u << (last - first + 1)) - 1)) != 0;
}

// Whether nothing has been written there: neither through instructions of the machine nor by a pointer.
bool is_unwritten(const Note& n, const u8* at, u32 bytes) {
    if (n.state != State::unwritten) return false;
    for (u32 i = 0; i < bytes; i++)
        if (at[i] != 0xff) return false;
    return true;
}

void load(void* to, u32 address, u32 bytes) {
    maybe_switch(64);
    const u8* from = place("a load", address, bytes);
    const Note& n = note(address);
    if (is_unwritten(n, from, bytes)) fail("a load of shared address %u, which was never written", address);
    if (is_arriving(n, address, bytes)) fail("a load of shared address %u while a copy to it is on its way", address);
    std::memcpy(to, from, bytes);
}

void store(u32 address, const void* from, u32 bytes, Thread& writer) {
    u8* to = place("a store", address, bytes);
    Note& n = note(address);
    if (is_arriving(n, address, bytes)) fail("a store to shared address %u while a copy to it is on its way", address);
    n = {State::holds, n.words, u16(writer.number + 1), writer.fences, n.reader, n.reader_fences};
    std::memcpy(to, from, bytes);
}

template <typename T> void store(u32 address, T x) {
    maybe_switch(64);
    store(address, &x, sizeof x, *running);
}

}  // namespace

namespace shared {
void reset() {
    std::memset(shared_memory, 0xff, kMaxShared);  // NaN in every format
    std::memset(notes, 0, sizeof notes);
}
}  // namespace shared

u32 shared_address(const void* p) { return u32(static_cast<const u8*>(p) - shared_memory) + kSharedBase; }

void ld_shared_u16(u16& d, u32 address) { load(&d, address, 2); }
void ld_shared_u32(u32& d, u32 address) { load(&d, address, 4); }
void ld_shared_v2_f32(float& x, float& y, u32 address) {
    float v[2];
    load(v, address, 8);
    x = v[0], y = v[1];
}
void ld_shared_v4_u32(u32& x, u32& y, u32& z, u32& w, u32 address) {
    u32 v[4];
    load(v, address, 16);
    x = v[0], y = v[1], z = v[2], w = v[3];
}
void note_ldmatrix(u32 address) {
    Note& n = note(address);
    n.reader = u16(running->number + 1), n.reader_fences = running->fences;
}
void st_shared_u16(u32 address, u16 x) { store(address, x); }
void st_shared_u32(u32 address, u32 x) { store(address, x); }
void red_shared_or_b32(u32 address, u32 x) {
    u32 old;
    atom_shared_or_b32(old, address, x);
}
void atom_shared_or_b32(u32& old, u32 address, u32 x) {
    load(&old, address, 4);
    if ((old | x) != old) store(address, old | x);
}
void st_shared_v4_u32(u32 address, u32 x, u32 y, u32 z, u32 w) {
    struct {
        u32 v[4];
    } all = {{x, y, z, w}};
    store(address, all);
}

// Lane l holds in its register i the elements of row l / 4 and columns 2 (l % 4), 2 (l % 4) + 1 of matrix i; lane
// 8 i + r holds the address of row r of matrix i.
void stmatrix_sync_aligned_m8n8_x4_shared_b16(u32 address, u32 a, u32 b, u32 c, u32 d) {
    const u32 mine[4] = {a, b, c, d};
    if (address % 16) fail("stmatrix to shared address %u: rows need 16 bytes of alignment", address);
    u32 addresses[32];
    std::memcpy(addresses, exchange("stmatrix", 0xffffffff, address), sizeof addresses);
    const int l = lane(*running);
    for (int i = 0; i < 4; i++) store(addresses[8 * i + l / 4] + l % 4 * 4, &mine[i], 4, *running);
    // The instruction is one for the warp: no lane goes on before all have written.
    exchange("stmatrix", 0xffffffff, 0);
}

void fence_proxy_async_shared__cta() {
    running->fences++;
    maybe_switch(64);
}
void fence_proxy_async() { fence_proxy_async_shared__cta(); }

const u8* read_async(const char* who, u32 address, u32 bytes) {
    const u8* from = place(who, address, bytes);
    for (u32 at = address / kGranule * kGranule; at < address + bytes; at += kGranule) {
        const Note& n = note(at);
        const u32 last = at + kGranule < address + bytes ? at + kGranule : address + bytes;
        const u32 first = at < address ? address : at;
        if (is_unwritten(n, from + (first - address), last - first))
            fail("%s reads shared address %u, which was never written", who, at);
        if (n.state == State::arriving || n.words)
            fail("%s reads shared address %u while a copy to it is on its way", who, at);
        if (n.writer && threads[n.writer - 1].fences == n.fences)
            fail("%s reads shared address %u, where thread %d wrote with no fence.proxy.async after", who, at,
                 n.writer - 1);
    }
    return from;
}

void begin_async_write(u32 address, u32 bytes, bool ordinary) {
    std::memset(place("a copy", address, bytes), 0xff, bytes);
    if (bytes < kGranule) {
        Note& n = note(address);
        if (is_arriving(n, address, bytes)) fail("two copies to shared address %u are on their way", address);
        n.words |= u8(((1u << bytes / 4) - 1) << address % kGranule / 4);
        return;
    }
    for (u32 at = address; at < address + bytes; at += kGranule) {
        Note& n = note(at);
        if (n.state == State::arriving || n.words) fail("two copies to shared address %u are on their way", at);
        if (!ordinary && n.writer && threads[n.writer - 1].fences == n.fences)
            fail("a copy to shared address %u, where thread %d wrote with no fence.proxy.async after", at,
                 n.writer - 1);
        if (!ordinary && n.reader && threads[n.reader - 1].fences == n.reader_fences)
            fail("a copy to shared address %u, where thread %d read by ldmatrix with no fence.proxy.async after", at,
                 n.reader - 1);
        n = {State::arriving, 0, 0, 0, 0, 0};
    }
}

u8* end_async_write(u32 address, u32 bytes) {
    if (bytes < kGranule) {
        Note& n = note(address);
        n.words &= u8(~(((1u << bytes / 4) - 1) << address % kGranule / 4));
        n.state = State::holds;
        return place("a copy", address, bytes);
    }
    for (u32 at = address; at < address + bytes; at += kGranule) note(at).state = State::holds;
    return place("a copy", address, bytes);
}

}  // namespace ptx
