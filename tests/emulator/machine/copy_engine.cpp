// The bulk tensor copy engine. A copy happens at any time between its issue and the wait for its end, and copies
// overtake each other.

#include "machine.h"
#include <algorithm>
#include <cstring>

namespace ptx {
namespace {

// What the host puts into the 128 bytes of a tensor map instead of the driver's encoding.
struct Map {
    char magic[8];
    u64 address, rank;
    u32 dims[5], tile[5];
    u64 strides[4];  // bytes
    u64 element;     // bytes
    u64 unused[3];
};
static_assert(sizeof(Map) == 128);
constexpr char kMagic[] = "tnsormap";
constexpr u32 kRow = 128;

struct Copy {
    bool load;
    Map map;
    int at[5];
    u32 shared, mbarrier;
    Thread* thread;
    u8* flat;  // instead of a tensor: so many bytes as they lie
    u32 bytes;
    u32 group;  // of stores: how many groups the thread had committed before
    bool adds;  // fp32, to what is there
};
std::vector<Copy> copies;

const Map& map_at(const void* p, int rank) {
    const Map& m = *static_cast<const Map*>(p);
    if (std::memcmp(m.magic, kMagic, 8)) fail("no tensor map at %p", p);
    if (m.rank != u64(rank)) fail("a tensor map of %llu dimensions, but %d coordinates", m.rank, rank);
    if (m.element != 1 && m.element != 2) fail("a tensor map of elements of %llu bytes", m.element);
    if (m.tile[0] * m.element != kRow) fail("a box of %u columns: only the 128-byte swizzle is emulated", m.tile[0]);
    if (m.address % 16) fail("a tensor at address %llx, which is no multiple of 16", m.address);
    for (int d = 0; d < rank; d++) {
        if (m.tile[d] == 0 || m.tile[d] > 256 || m.dims[d] == 0)
            fail("a tensor map with boxes of %u of %u in dimension %d", m.tile[d], m.dims[d], d);
        if (d > 0 && (m.strides[d - 1] % 16 || m.strides[d - 1] >= 1ull << 40))
            fail("a tensor map with a stride of %llu bytes in dimension %d", m.strides[d - 1], d);
    }
    return m;
}

u32 rows(const Map& m) {
    u32 n = 1;
    for (u32 d = 1; d < m.rank; d++) n *= m.tile[d];
    return n;
}

// The address of the box's row `row`, or null where it lies outside of the tensor; and how many columns exist.
u8* row_of(const Copy& c, u32 row, u32& columns) {
    u64 address = c.map.address;
    for (u32 d = 1; d < c.map.rank; d++) {
        const long long i = (long long)c.at[d] + row % c.map.tile[d];
        row /= c.map.tile[d];
        if (i < 0 || i >= c.map.dims[d]) return nullptr;
        address += u64(i) * c.map.strides[d - 1];
    }
    if (c.at[0] < 0) fail("a negative column is not emulated");
    const long long left = (long long)c.map.dims[0] - c.at[0];
    columns = left <= 0 ? 0 : left < c.map.tile[0] ? u32(left) : c.map.tile[0];
    return reinterpret_cast<u8*>(address) + u64(c.at[0]) * c.map.element;
}

template <typename... Coordinates>
void issue(bool load, u32 shared, const void* map, u32 mbarrier, Coordinates... at) {
    maybe_switch(8);
    if (shared % 1024) fail("a copy at shared address %u: the swizzle repeats every 1024 bytes", shared);
    const Map& of = map_at(map, sizeof...(at));
    const Copy c = {load, of, {at...}, shared, mbarrier, running, nullptr, 0, running->groups, false};
    if (load) begin_async_write(shared, rows(c.map) * kRow);
    copies.push_back(c);
}

void issue_flat(bool load, u32 shared, const void* global, u32 bytes, u32 mbarrier, bool adds = false) {
    maybe_switch(8);
    if (bytes == 0 || bytes % 16 || shared % 16 || reinterpret_cast<u64>(global) % 16)
        fail("a copy of %u bytes between %p and shared address %u: multiples of 16 are wanted", bytes, global, shared);
    if (load) begin_async_write(shared, bytes);
    u8* const memory = static_cast<u8*>(const_cast<void*>(global));
    copies.push_back({load, {}, {}, shared, mbarrier, running, memory, bytes, running->groups, adds});
}

void perform_flat(const Copy& c) {
    if (c.load) {
        std::memcpy(end_async_write(c.shared, c.bytes), c.flat, c.bytes);
        barriers::complete_bytes(c.mbarrier, c.bytes);
    } else if (c.adds) {
        const u8* const from = read_async("a copy", c.shared, c.bytes);
        for (u32 i = 0; i < c.bytes; i += 4) {
            float x, sum;
            std::memcpy(&x, from + i, 4), std::memcpy(&sum, c.flat + i, 4);
            sum += x;
            std::memcpy(c.flat + i, &sum, 4);
        }
        if (c.thread->waits_for) wake(*c.thread);
    } else {
        std::memcpy(c.flat, read_async("a copy", c.shared, c.bytes), c.bytes);
        if (c.thread->waits_for) wake(*c.thread);
    }
}

void perform(const Copy& c) {
    if (c.flat) return perform_flat(c);
    const u32 count = rows(c.map);
    if (c.load) end_async_write(c.shared, count * kRow);
    for (u32 r = 0; r < count; r++) {
        u32 columns = 0;
        u8* global = row_of(c, r, columns);
        if (!global) columns = 0;
        for (u32 chunk = 0; chunk < kRow / 16; chunk++) {
            const u32 element = u32(c.map.element), first = chunk * 16 / element;
            const u32 bytes = columns <= first ? 0 : std::min((columns - first) * element, 16u);
            const u32 at = swizzle_128(c.shared + r * kRow + chunk * 16);
            if (c.load) {
                u8* to = end_async_write(at, 16);
                std::memset(to, 0, 16);
                if (bytes) std::memcpy(to, global + chunk * 16, bytes);
            } else if (bytes) {
                std::memcpy(global + chunk * 16, read_async("a copy", at, 16), bytes);
            }
        }
    }
    if (c.load) barriers::complete_bytes(c.mbarrier, count * kRow);
    else if (c.thread->waits_for) wake(*c.thread);
}

}  // namespace

namespace copy_engine {
void reset() { copies.clear(); }
bool has_work() { return !copies.empty(); }
void act() {
    const std::size_t i = rng() % copies.size();
    const Copy c = copies[i];
    copies[i] = copies.back();
    copies.pop_back();
    perform(c);
}
void check_done() {
    for (const Copy& c : copies)
        fail("a block ends while a %s of thread %d is unfinished", c.load ? "load" : "store", c.thread->number);
}
}  // namespace copy_engine

void prefetch_tensormap(const void* map) {
    if (std::memcmp(map, kMagic, 8)) fail("no tensor map at %p", map);
}
void cp_async_bulk_tensor_4d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    u32 to, const void* map, int c0, int c1, int c2, int c3, u32 mbarrier, u64) {
    issue(true, to, map, mbarrier, c0, c1, c2, c3);
}
void cp_async_bulk_tensor_5d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    u32 to, const void* map, int c0, int c1, int c2, int c3, int c4, u32 mbarrier, u64) {
    issue(true, to, map, mbarrier, c0, c1, c2, c3, c4);
}
void cp_async_bulk_tensor_5d_global_shared__cta_bulk_group(const void* map, int c0, int c1, int c2, int c3, int c4,
                                                           u32 from) {
    issue(false, from, map, 0, c0, c1, c2, c3, c4);
}
void cp_async_bulk_tensor_4d_global_shared__cta_bulk_group(const void* map, int c0, int c1, int c2, int c3, u32 from) {
    issue(false, from, map, 0, c0, c1, c2, c3);
}
void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(u32 to, const void* from, u32 bytes,
                                                                       u32 mbarrier) {
    issue_flat(true, to, from, bytes, mbarrier);
}
void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(u32 to, const void* from,
                                                                                     u32 bytes, u32 mbarrier, u64) {
    cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(to, from, bytes, mbarrier);
}
void cp_async_bulk_global_shared__cta_bulk_group(void* to, u32 from, u32 bytes) {
    issue_flat(false, from, to, bytes, 0);
}
void cp_reduce_async_bulk_global_shared__cta_bulk_group_add_f32(void* to, u32 from, u32 bytes) {
    issue_flat(false, from, to, bytes, 0, true);
}
void cp_async_bulk_commit_group() { running->groups++; }
void cp_async_bulk_wait_group_read(u32 pending) {
    for (;;) {
        bool open = false;
        for (const Copy& c : copies) open |= !c.load && c.thread == running && c.group + pending < running->groups;
        if (!open) return;
        block("its stores", 0, 0);
    }
}
// A store here reads and writes in one step.
void cp_async_bulk_wait_group(u32 pending) { cp_async_bulk_wait_group_read(pending); }

}  // namespace ptx
