// Rings of buffers in shared memory between threads that fill them and threads that read them.

// A thread's position in a ring of kStages buffers: which buffer, and the parity of its barriers in this round.
template <int kStages> struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

// A ring whose buffers have two mbarriers each. A producer acquires the buffer at its position once all readers have
// released it, expects the bytes of TMA loads or commits what it wrote itself, and advances; a consumer waits until the
// buffer is full, reads, releases and advances. Each thread that takes part has a position of its own. With kParts a
// stage is as many buffers with barriers of their own. kFull, kEmpty and kBuffers are offsets in shared memory, of 8
// and of kBytes bytes per buffer. A position does not hold the address of shared memory: where it did, quick kernels
// came out of NVRTC with registers in another order.
template <int kStages, int kFull, int kEmpty, int kBuffers, int kBytes, int kParts = 1>
struct Pipeline : Ring<kStages> {
    // By number, counted over stages and parts.
    static __device__ __forceinline__ u32 full_at(u32 smem, int at) { return smem + kFull + at * 8; }
    static __device__ __forceinline__ u32 empty_at(u32 smem, int at) { return smem + kEmpty + at * 8; }
    static __device__ __forceinline__ u32 buffer_at(u32 smem, int at) { return smem + kBuffers + at * kBytes; }
    // Arrivals that make it full, and that make it empty.
    static __device__ __forceinline__ void init(u32 smem, int at, u32 producers, u32 consumers) {
        mbarrier_init(full_at(smem, at), producers);
        mbarrier_init(empty_at(smem, at), consumers);
    }

    // At this thread's position.
    __device__ __forceinline__ int at(int part = 0) const { return this->stage * kParts + part; }
    __device__ __forceinline__ u32 full(u32 smem, int part = 0) const { return full_at(smem, at(part)); }
    __device__ __forceinline__ u32 empty(u32 smem, int part = 0) const { return empty_at(smem, at(part)); }
    __device__ __forceinline__ u32 buffer(u32 smem, int part = 0) const { return buffer_at(smem, at(part)); }

    __device__ __forceinline__ void acquire(u32 smem, int part = 0) const {
        mbarrier_wait(empty(smem, part), this->parity ^ 1);
    }
    __device__ __forceinline__ void expect(u32 smem, u32 bytes, int part = 0) const {
        mbarrier_arrive_expect(full(smem, part), bytes);
    }
    __device__ __forceinline__ void commit(u32 smem, int part = 0) const { mbarrier_arrive(full(smem, part)); }

    __device__ __forceinline__ bool is_full(u32 smem, int part = 0) const {
        return mbarrier_test(full(smem, part), this->parity);
    }
    __device__ __forceinline__ void wait(u32 smem, int part = 0) const {
        mbarrier_wait(full(smem, part), this->parity);
    }
    __device__ __forceinline__ void release(u32 smem, int part = 0) const { mbarrier_arrive(empty(smem, part)); }
};
