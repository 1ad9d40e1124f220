// Runs launches that arrive on standard input, in native byte order:
//   u64 seed; u32 which stage, grids of what is launched first (two), whether blocks come in any order, whether inputs
//   come late, grid, threads, bytes of shared memory, bytes of arguments; the arguments; u32 buffers; per buffer u64
//   address, u64 bytes, u32 comes_back, and the content.
// Buffers lie at the addresses that the arguments tell, each with nothing readable after it. Inputs that come late are
// there once a block has waited for the launch before, and something else until then. The answer on standard
// output: u32 length of a failure's text and the text; without failure the buffers that come back.

#include "machine.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

using namespace ptx;

Kernel ptx::kernel;

namespace {

void read_exactly(void* to, std::size_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(0);
}
template <typename T> T read_value() {
    T x;
    read_exactly(&x, sizeof x);
    return x;
}

struct Buffer {
    u64 address, bytes;
    bool comes_back;
    std::vector<u32> late;  // what is there once the launch before has ended
    u64 page() const { return address / 4096 * 4096; }
    u64 length() const { return (address + bytes - page() + 4095) / 4096 * 4096; }
};

std::vector<Buffer> buffers;
bool waited;
bool has_waited[kMaxThreads];

// Before a block begins: words of the input, zeros, what may be a length, and anything.
void spoil_late_inputs(u64 seed) {
    waited = false;
    std::fill_n(has_waited, kMaxThreads, false);
    std::mt19937_64 random(seed);
    for (const Buffer& b : buffers) {
        u32* const to = reinterpret_cast<u32*>(b.address);
        for (std::size_t i = 0; i < b.late.size(); i++) {
            const u32 words[] = {b.late[i], 0, u32(random() % 512), u32(random())};
            to[i] = words[random() % 4];
        }
    }
}

}  // namespace

void ptx::griddepcontrol_wait() {
    has_waited[running->number] = true;
    if (waited) return;
    waited = true;
    for (const Buffer& b : buffers)
        if (!b.late.empty()) std::memcpy(reinterpret_cast<void*>(b.address), b.late.data(), 4 * b.late.size());
}

int main() {
    for (;;) {
        const u64 seed = read_value<u64>();
        kernel = kernels[read_value<u32>()];
        u32 before[2];
        for (u32& blocks : before) blocks = read_value<u32>();
        const bool any_order = read_value<u32>() != 0;
        const bool late = read_value<u32>() != 0;
        const u32 grid = read_value<u32>();
        for (const u32 has : {u32(kernel.threads), u32(kernel.shared_bytes), u32(kernel.argument_bytes)}) {
            const u32 says = read_value<u32>();
            if (says == has) continue;
            std::fprintf(stderr, "the host's model says %u where the kernel has %u\n", says, has);
            return 3;
        }
        alarm(300);  // a kernel that never ends
        void* args = std::aligned_alloc(64, (kernel.argument_bytes + 63) / 64 * 64);
        read_exactly(args, kernel.argument_bytes);
        buffers.assign(read_value<u32>(), Buffer());
        for (Buffer& b : buffers) {
            b.address = read_value<u64>();
            b.bytes = read_value<u64>();
            b.comes_back = read_value<u32>() != 0;
            if (!b.bytes) continue;
            void* want = reinterpret_cast<void*>(b.page());
            const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
            void* page = mmap(want, b.length(), PROT_READ | PROT_WRITE, flags, -1, 0);
            if (page != want) std::perror("a buffer's address"), std::exit(3);
            read_exactly(reinterpret_cast<void*>(b.address), b.bytes);
            if (!b.comes_back && late) {
                const u32* const from = reinterpret_cast<u32*>(b.address);
                b.late.assign(from, from + b.bytes / 4);
            } else if (!b.comes_back) {
                mprotect(page, b.length(), PROT_READ);
            }
        }
        std::string failure;
        void (*const run)(const void*) = kernel.run;
        const int threads = kernel.threads;
        for (int k = 0; k < 2; k++) {
            kernel.run = kernel.before[k].run, kernel.threads = kernel.before[k].threads;
            for (u32 i = 0; i < before[k] && failure.empty(); i++) {
                failure = run_block(i, before[k], args, seed * 0x9e3779b97f4a7c15 - i - k);
                if (failure.empty()) continue;
                failure = "before, " + std::to_string(k) + ": block " + std::to_string(i) + ": " + failure;
            }
        }
        kernel.run = run, kernel.threads = threads;
        std::vector<u32> order;
        for (u32 i = 0; i < grid; i++) order.push_back(i);
        if (any_order) std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
        for (const u32 i : order) {
            if (!failure.empty()) break;
            spoil_late_inputs(seed + i);
            failure = run_block(i, grid, args, seed * 0x9e3779b97f4a7c15 + i);
            for (int t = 0; late && failure.empty() && t < kernel.threads; t++)
                if (!has_waited[t]) failure = "thread " + std::to_string(t) + " does not wait for the launch before";
            if (!failure.empty()) failure = "block " + std::to_string(i) + ": " + failure;
        }
        const u32 length = u32(failure.size());
        std::fwrite(&length, sizeof length, 1, stdout);
        std::fwrite(failure.data(), 1, length, stdout);
        for (const Buffer& b : buffers) {
            if (!b.bytes) continue;
            if (b.comes_back && failure.empty()) std::fwrite(reinterpret_cast<void*>(b.address), 1, b.bytes, stdout);
            munmap(reinterpret_cast<void*>(b.page()), b.length());
        }
        std::fflush(stdout);
        std::free(args);
    }
}
