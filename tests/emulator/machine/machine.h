// One streaming multiprocessor that runs one thread block at a time, as far as a program can tell it from the real one:
// what the real one leaves open (who runs next, when an asynchronous operation completes) is drawn at random.

#pragma once
#include "ptx.h"
#include <csetjmp>
#include <random>
#include <string>
#include <vector>

namespace ptx {

constexpr int kMaxThreads = 1024;
constexpr int kMaxShared = 227 * 1024;
// Where dynamic shared memory begins: the first KiB belongs to the system.
constexpr u32 kSharedBase = 1024;

// ------------------------------------------------------------------------------------------------------ scheduler

struct Thread {
    int index;
    std::jmp_buf context;
    bool done;
    const char* waits_for;  // why it cannot run, or null
    u32 waits_on[2];
    u32 fences;             // how often it has ordered its writes before asynchronous reads
    u32 registers;
};

extern Thread threads[kMaxThreads];
extern Thread* running;  // null while the machine itself acts
extern std::mt19937_64 rng;

inline int lane(const Thread& t) { return t.index % 32; }
inline int warp(const Thread& t) { return t.index / 32; }

// True in one of n cases.
inline bool one_in(u32 n) { return n != 0 && rng() % n == 0; }

// The calling thread stops until wake() is called for it. It must then look whether it can go on.
void block(const char* why, u32 a = 0, u32 b = 0);
void wake(Thread& t);
// A point where another thread may come first: taken in one of n cases.
void maybe_switch(u32 n);

// Runs the kernel's block `block` of `grid`. Returns what went wrong, or an empty text.
std::string run_block(u32 block, u32 grid, const void* args, u64 seed);

// ---------------------------------------------------------------------------------- what acts beside the threads

// Each part of the machine forgets the last block, acts once if it has something to do, and tells at the end of a block
// what was left undone.
namespace shared {
void reset();
}
namespace barriers {
void reset();
void complete_bytes(u32 mbarrier, u32 bytes);
std::string describe();
}
namespace copy_engine {
void reset();
bool has_work();
void act();
void check_done();
}
namespace tensor_core {
void reset();
bool has_work();
void act();
void check_done();
}

// -------------------------------------------------------------------------------------------------- shared memory

// Bytes of shared memory as the tensor cores and the copy engine see them. Fails unless they hold data that has
// arrived, and that was ordered before such reads by the thread that wrote it.
const u8* read_async(const char* who, u32 address, u32 bytes);
// From the start of a copy to its end nobody may touch its target.
void begin_async_write(u32 address, u32 bytes);
u8* end_async_write(u32 address, u32 bytes);

// The 128-byte swizzle: address bits 4 to 6 are xored with bits 7 to 9.
inline u32 swizzle_128(u32 address) { return address ^ (address >> 7 & 7) << 4; }

float widen(Format format, u16 bits);

}  // namespace ptx
