// A streaming multiprocessor that runs one thread block at a time, as far as a program can tell it from a real one:
// what that leaves open (who runs next, when an asynchronous operation completes) is drawn at random.

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
// What a thread waits on that waits for copies of its own.
constexpr u32 kWaitsForCopies = 0xc0b1;

// ------------------------------------------------------------------------------------------------------ scheduler

struct Thread {
    int number;             // in the block
    std::jmp_buf context;
    bool done;
    const char* waits_for;  // why it cannot run, or null
    u32 waits_on[2];
    u32 fences;             // how often it has ordered its writes before asynchronous reads
    u32 groups;             // of its copies from shared memory that it has committed
    u32 registers;
};

extern Thread threads[kMaxThreads];
extern Thread* running;  // null while the machine itself acts
extern std::mt19937_64 rng;

inline int all_threads() { return kernel.threads; }
inline int lane(const Thread& t) { return t.number % 32; }
inline int warp(const Thread& t) { return t.number / 32; }

// True in one of n cases.
inline bool one_in(u32 n) { return n != 0 && rng() % n == 0; }

// The calling thread stops until wake() is called for it. It must then look whether it can go on.
void block(const char* why, u32 a = 0, u32 b = 0);
void wake(Thread& t);
// Whether all other lanes of the warp wait for the calling thread in an exchange.
bool completes_exchange();
// A point where another thread may come first: taken in one of n cases.
void maybe_switch(u32 n);
// Of a thread that polls: lets others go on, and asynchronous parts after a while.
void sleep();

// Runs a block of a grid. Returns what went wrong, or an empty text.
std::string run_block(u32 index, u32 grid, const void* args, u64 seed);

// ---------------------------------------------------------------------------------- what acts beside the threads

// Each part of the machine forgets the last block, acts once if it has something to do, and tells at the end what was
// left undone.
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
namespace thread_copies {
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

// Bytes of the shared memory as the tensor cores and the copy engine see them. Fails unless they hold data
// that has arrived, and that was ordered before such reads by the thread that wrote it.
const u8* read_async(const char* who, u32 address, u32 bytes);
// The running thread has asked for 16 bytes there and may not have waited for them: no copy may begin until it has
// passed a fence.
void note_ldmatrix(u32 address);
// From the start of a copy to its end nobody may touch its target. `ordinary` copies need no order after ordinary
// writes.
void begin_async_write(u32 address, u32 bytes, bool ordinary = false);
u8* end_async_write(u32 address, u32 bytes);

// The 128-byte swizzle: address bits 4 to 6 are xored with bits 7 to 9.
inline u32 swizzle_128(u32 address) { return address ^ (address >> 7 & 7) << 4; }

float widen(Format format, u16 bits);
float from_e4m3(u32 byte);
float from_e5m2(u32 byte);
// What tensor cores keep of a sum of FP8 products: 13 bits behind the first, the others are cut off.
float cut_fp8_sum(float x);

}  // namespace ptx
