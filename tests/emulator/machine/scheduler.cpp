// Threads are fibers; a random policy, drawn per block, decides who runs.

#include "machine.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sys/mman.h>
#include <ucontext.h>

namespace ptx {

Thread threads[kMaxThreads];
Thread* running;
std::mt19937_64 rng;

namespace {

constexpr std::size_t kStack = 256 * 1024;

std::jmp_buf machine;             // where the scheduler goes on when a fiber stops
u32 ready[kMaxThreads / 32];      // per warp, which lanes can run
int living;                       // threads that have not ended
const void* arguments;
u32 block_number, blocks;
std::string failure;
int sleeps;                       // since an asynchronous part did something
int started;                      // fibers that exist

// How the next thread is chosen.
struct Policy {
    enum { uniform, priorities, sticky } warps;
    bool lanes_in_order;
    u32 copy, matrix;             // asynchronous work comes first in one of so many choices; 0: only when it must
    u32 redraw;                   // priorities change in one of so many choices
    u32 priority[kMaxThreads / 32];
    int last;
} policy;

// What a warp-wide exchange has gathered.
struct Exchange {
    const char* what;
    u32 arrived, words[32], result[32];
    u64 round;
} exchanges[kMaxThreads / 32];

void redraw_priorities() {
    for (u32& p : policy.priority) p = rng();
}

void draw_policy() {
    policy.warps = decltype(policy.warps)(rng() % 3);
    policy.lanes_in_order = rng() % 2;
    constexpr u32 rates[] = {1, 4, 32, 0};
    policy.copy = rates[rng() % 4];
    policy.matrix = rates[rng() % 4];
    policy.redraw = rng() % 2 ? 100 : 5000;
    policy.last = 0;
    redraw_priorities();
}

[[noreturn]] void back_to_machine() { _longjmp(machine, 1); }

void fiber_main() {
    for (;;) {
        kernel.run(arguments);
        running->done = true;
        living--;
        Thread* self = running;
        if (!_setjmp(self->context)) back_to_machine();
    }
}

void start_fibers() {
    static u8* stacks = nullptr;
    if (!stacks) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* p = mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (p == MAP_FAILED) std::perror("stacks"), std::exit(3);
        stacks = static_cast<u8*>(p);
    }
    for (int i = 0; i < all_threads(); i++) {
        static ucontext_t here, there;
        getcontext(&there);
        there.uc_stack.ss_sp = stacks + kStack * i;
        there.uc_stack.ss_size = kStack;
        there.uc_link = nullptr;
        static int index;
        index = i;
        makecontext(&there, [] {
            // The first time, only the place is taken.
            Thread& self = threads[index];
            if (!_setjmp(self.context)) setcontext(&here);
            fiber_main();
        }, 0);
        swapcontext(&here, &there);
    }
    started = all_threads();
}

// The next thread, or null when none can run.
Thread* choose() {
    const int warps = all_threads() / 32;
    int candidates[kMaxThreads / 32], count = 0;
    for (int w = 0; w < warps; w++)
        if (ready[w]) candidates[count++] = w;
    if (!count) return nullptr;
    int w = candidates[rng() % count];
    if (policy.warps == Policy::priorities) {
        if (one_in(policy.redraw)) redraw_priorities();
        for (int i = 0; i < count; i++)
            if (policy.priority[candidates[i]] > policy.priority[w]) w = candidates[i];
    } else if (policy.warps == Policy::sticky) {
        if (ready[policy.last] && !one_in(64)) w = policy.last;
    }
    policy.last = w;
    u32 lanes = ready[w];
    if (!policy.lanes_in_order)
        for (int skip = rng() % __builtin_popcount(lanes); skip > 0; skip--) lanes &= lanes - 1;
    return &threads[w * 32 + __builtin_ctz(lanes)];
}

void resume(Thread& t) {
    running = &t;
    ready[warp(t)] &= ~(1u << lane(t));
    if (!_setjmp(machine)) _longjmp(t.context, 1);
    running = nullptr;
}

// Who waits for what, neighbours with the same reason together.
std::string deadlock() {
    std::map<std::string, std::string> by_reason;
    const auto reason = [](int i) {
        const Thread& t = threads[i];
        if (t.done) return std::string();
        char text[80];
        std::snprintf(text, sizeof text, "%s %u (%u)", t.waits_for ? t.waits_for : "?", t.waits_on[0], t.waits_on[1]);
        return std::string(text);
    };
    for (int first = 0, end; first < all_threads(); first = end) {
        const std::string why = reason(first);
        for (end = first + 1; end < all_threads() && reason(end) == why; end++) {}
        if (!why.empty()) by_reason[why] += " " + std::to_string(first) + ".." + std::to_string(end - 1);
    }
    std::string text = "deadlock:";
    for (const auto& [why, who] : by_reason) text += "\n  threads" + who.substr(0, 100) + " wait for " + why;
    return text + barriers::describe();
}

}  // namespace

Index thread_index() { return {u32(running->number)}; }
Index block_index() { return {block_number}; }
Index grid_dim() { return {blocks}; }

void fail(const char* format, ...) {
    char text[600];
    va_list list;
    va_start(list, format);
    std::vsnprintf(text, sizeof text, format, list);
    va_end(list);
    failure = running ? "thread " + std::to_string(running->number) + ": " + text : text;
    back_to_machine();
}

void wake(Thread& t) {
    t.waits_for = nullptr;
    ready[warp(t)] |= 1u << lane(t);
}

void block(const char* why, u32 a, u32 b) {
    Thread& self = *running;
    self.waits_for = why;
    self.waits_on[0] = a;
    self.waits_on[1] = b;
    if (!_setjmp(self.context)) back_to_machine();
}

void maybe_switch(u32 n) {
    if (!one_in(n)) return;
    Thread& self = *running;
    wake(self);
    if (!_setjmp(self.context)) back_to_machine();
}

void maybe_let_others() { maybe_switch(16); }

void sleep() {
    sleeps++;
    maybe_switch(1);
}

const u32* exchange(const char* what, u32 lanes, u32 word) {
    if (lanes != 0xffffffff) fail("%s among lanes %x: only whole warps are emulated", what, lanes);
    Thread& self = *running;
    Exchange& x = exchanges[warp(self)];
    if (x.arrived && x.what != what) fail("lanes of a warp have diverged: %s meets %s", what, x.what);
    x.what = what;
    x.words[lane(self)] = word;
    x.arrived |= 1u << lane(self);
    if (x.arrived == 0xffffffff) {
        // Nobody can overwrite the result before all have read it: the next exchange needs all lanes again.
        for (int i = 0; i < 32; i++) x.result[i] = x.words[i];
        x.arrived = 0;
        x.round++;
        for (int i = 0; i < 32; i++)
            if (i != lane(self)) wake(threads[self.number / 32 * 32 + i]);
    } else {
        const u64 round = x.round;
        while (x.round == round) block(what);
    }
    return x.result;
}

bool completes_exchange() {
    return (exchanges[warp(*running)].arrived | 1u << lane(*running)) == 0xffffffff;
}

// Lets a thread or an asynchronous part do something. False when nothing can.
static bool step() {
    const bool copy = copy_engine::has_work(), matrix = tensor_core::has_work(), own = thread_copies::has_work();
    void (*act)() = nullptr;
    // Who polls for what a copy or a product brings can run for ever: asynchronous parts that come last get a turn.
    constexpr int kPatience = 1000;
    if ((copy || own || matrix) && sleeps > kPatience) {
        act = copy ? copy_engine::act : own ? thread_copies::act : tensor_core::act;
        if (copy && matrix && rng() % 2) act = tensor_core::act;
    } else if (copy && one_in(policy.copy)) {
        act = copy_engine::act;
    } else if (own && one_in(policy.copy)) {
        act = thread_copies::act;
    } else if (matrix && one_in(policy.matrix)) {
        act = tensor_core::act;
    } else if (Thread* next = choose()) {
        resume(*next);
        return true;
    } else if (own) {
        act = thread_copies::act;
    } else if (copy || matrix) {
        act = copy && (!matrix || rng() % 2) ? copy_engine::act : tensor_core::act;
    } else {
        failure = deadlock();
        return false;
    }
    sleeps = 0;
    // It may fail, and then comes back here.
    if (!_setjmp(machine)) act();
    return true;
}

std::string run_block(u32 index, u32 grid, const void* args, u64 seed) {
    rng.seed(seed);
    arguments = args, block_number = index, blocks = grid;
    failure.clear();
    sleeps = 0;
    draw_policy();
    shared::reset();
    barriers::reset();
    copy_engine::reset();
    thread_copies::reset();
    tensor_core::reset();
    for (Exchange& x : exchanges) x.arrived = 0;
    if (started < all_threads()) start_fibers();
    living = kernel.threads;
    const u32 registers = 65536 / (kernel.threads * kernel.blocks_per_sm) / 8 * 8;
    for (int i = 0; i < all_threads(); i++) {
        Thread& t = threads[i];
        t.number = i;
        t.done = false, t.fences = 0, t.groups = 0, t.registers = registers < 256 ? registers : 256;
        wake(t);
    }
    while (living > 0 && failure.empty() && step()) {}
    if (failure.empty() && !_setjmp(machine)) {
        copy_engine::check_done();
        thread_copies::check_done();
        tensor_core::check_done();
    }
    // Fibers that were left in the middle of something cannot be used again.
    if (living > 0) started = 0;
    return failure;
}

}  // namespace ptx
