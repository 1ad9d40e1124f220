// Barriers: named ones, those in shared memory (mbarrier), and the register pool, which threads also wait for.

#include "machine.h"
#include <cstdio>

namespace ptx {
namespace {

struct Named {
    u32 threads, arrived;
    u64 round;
    u32 counted, last_counted;  // for how many threads bar.red was given true, in this round and in the last one
    std::vector<Thread*> waiting;
} all_named[16];

// PTX ISA, "Parallel synchronization and communication instructions: mbarrier".
struct Mbarrier {
    u32 address, expected, pending;
    long long bytes;
    u64 phase;
    std::vector<Thread*> waiting;
};
std::vector<Mbarrier> mbarriers;
bool initialised_for_copies;  // fence.mbarrier_init
u32 pool;                     // registers that nobody holds

Mbarrier& find(const char* who, u32 address) {
    for (Mbarrier& b : mbarriers)
        if (b.address == address) return b;
    fail("%s: there is no mbarrier at shared address %u", who, address);
}

void end_phase_if_due(Mbarrier& b) {
    if (b.bytes < 0 && !b.pending) fail("mbarrier at %u: %lld bytes too many have arrived", b.address, -b.bytes);
    if (b.pending || b.bytes) return;
    b.phase++;
    b.pending = b.expected;
    for (Thread* t : b.waiting) wake(*t);
    b.waiting.clear();
}

void arrive(Mbarrier& b) {
    if (b.pending == 0)
        fail("mbarrier at %u: more arrivals than the %u of its phase %llu", b.address, b.expected, b.phase);
    b.pending--;
    end_phase_if_due(b);
}

Named& named(u32 id) { return all_named[id & 15]; }

// Counts the thread in. The last one frees the others.
bool arrive(Named& b, u32 id, u32 count) {
    if (id > 15 || count % 32 || count == 0) fail("named barrier %u of %u threads", id, count);
    if (b.arrived && b.threads != count)
        fail("named barrier %u: %u threads are expected by some, %u by others", id, b.threads, count);
    b.threads = count;
    if (++b.arrived < count) return false;
    b.arrived = 0;
    b.round++;
    b.last_counted = b.counted;
    b.counted = 0;
    for (Thread* t : b.waiting) wake(*t);
    b.waiting.clear();
    return true;
}

}  // namespace

namespace barriers {
void reset() {
    for (Named& b : all_named) b.arrived = 0, b.round = 0, b.counted = 0, b.waiting.clear();
    mbarriers.clear();
    initialised_for_copies = false;
    pool = 0;
}

void complete_bytes(u32 address, u32 bytes) {
    if (!initialised_for_copies) fail("a copy completes on mbarriers that were not fenced after their initialisation");
    Mbarrier& b = find("a copy", address);
    b.bytes -= bytes;
    end_phase_if_due(b);
}

std::string describe() {
    std::string text;
    char line[160];
    for (const Named& b : all_named) {
        if (!b.arrived) continue;
        const int id = &b - all_named;
        std::snprintf(line, sizeof line, "\n  named barrier %d: %u of %u threads", id, b.arrived, b.threads);
        text += line;
    }
    for (const Mbarrier& b : mbarriers) {
        std::snprintf(line, sizeof line, "\n  mbarrier %u: phase %llu lacks %u of %u arrivals and %lld bytes",
                      b.address, b.phase, b.pending, b.expected, b.bytes);
        text += line;
    }
    return text;
}
}  // namespace barriers

void bar_sync(u32 id, u32 count) {
    maybe_switch(64);
    Named& b = named(id);
    if (arrive(b, id, count)) return;
    const u64 round = b.round;
    b.waiting.push_back(running);
    while (b.round == round) block("named barrier", id, count);
}
// Nobody can start another round before all have seen the result: the barrier needs them all.
void bar_red_popc_u32(u32& counted, u32 id, u32 count, bool mine) {
    named(id).counted += mine;
    bar_sync(id, count);
    counted = named(id).last_counted;
}
void bar_red_or_pred(bool& any, u32 id, u32 count, bool mine) {
    u32 counted;
    bar_red_popc_u32(counted, id, count, mine);
    any = counted != 0;
}
void bar_arrive(u32 id, u32 count) {
    maybe_switch(64);
    arrive(named(id), id, count);
}
void synchronize_block() { bar_sync(0, kernel.threads); }

void mbarrier_init_shared__cta_b64(u32 address, u32 arrivals) {
    if (address % 8) fail("mbarrier at shared address %u: not aligned", address);
    for (const Mbarrier& b : mbarriers)
        if (b.address == address) fail("mbarrier at %u is initialised twice", address);
    if (arrivals == 0 || address < kSharedBase || address + 8 > kSharedBase + u32(kernel.shared_bytes))
        fail("mbarrier at %u with %u arrivals", address, arrivals);
    mbarriers.push_back({address, arrivals, arrivals, 0, 0, {}});
}
void fence_mbarrier_init_release_cluster() { initialised_for_copies = true; }

void mbarrier_arrive_shared__cta_b64(u32 address) {
    maybe_switch(16);
    arrive(find("mbarrier.arrive", address));
}
void mbarrier_arrive_expect_tx_shared__cta_b64(u32 address, u32 bytes) {
    maybe_switch(16);
    Mbarrier& b = find("mbarrier.arrive.expect_tx", address);
    b.bytes += bytes;
    if (b.bytes >= 1 << 20) fail("mbarrier at %u: %lld bytes are more than it can count", address, b.bytes);
    arrive(b);
}
// A thread that waits looks again only now and then: it may miss a phase if two pass in the meantime.
void mbarrier_try_wait_parity_shared__cta_b64(bool& done, u32 address, u32 parity, u32) {
    maybe_switch(8);
    if (parity > 1) fail("mbarrier at %u: parity %u", address, parity);
    Mbarrier& b = find("mbarrier.try_wait", address);
    done = (b.phase & 1) != parity;
    if (done) return;
    b.waiting.push_back(running);
    block("mbarrier (parity)", address, parity);
}
void mbarrier_test_wait_parity_shared__cta_b64(bool& done, u32 address, u32 parity) {
    maybe_switch(8);
    if (parity > 1) fail("mbarrier at %u: parity %u", address, parity);
    done = (find("mbarrier.test_wait", address).phase & 1) != parity;
}
void nanosleep_u32(u32) { sleep(); }

// Registers are counted per thread here; the hardware counts whole warps, whose threads do the same.
void setmaxnreg_dec_sync_aligned_u32(u32 count) {
    if (count % 8 || count < 24 || count > running->registers)
        fail("setmaxnreg.dec from %u to %u", running->registers, count);
    pool += running->registers - count;
    running->registers = count;
    exchange("setmaxnreg", 0xffffffff, count);
    for (int i = 0; i < all_threads(); i++)
        if (threads[i].waits_for && threads[i].waits_on[1] == ~0u) wake(threads[i]);
}
void setmaxnreg_inc_sync_aligned_u32(u32 count) {
    if (count % 8 || count > 256 || count < running->registers)
        fail("setmaxnreg.inc from %u to %u", running->registers, count);
    while (pool < count - running->registers) block("registers", count - running->registers, ~0u);
    pool -= count - running->registers;
    running->registers = count;
    exchange("setmaxnreg", 0xffffffff, count);
}

}  // namespace ptx
