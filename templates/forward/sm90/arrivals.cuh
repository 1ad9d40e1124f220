// What a consumer waits for and gives back: its turn, what comes next, and the buffers of K and V.

struct Arrivals {
    const KernelArgs& args;
    const u32 smem;
    const int id;  // of the warpgroup, 0 to kConsumers - 1
    Hand hand;
    Ring<kStages> k_ring, v_ring;
    bool k_seen = false, v_seen = false;  // whether the next K and V are known to have arrived

    __device__ __forceinline__ Arrivals(const KernelArgs& args, u32 smem, int id) : args(args), smem(smem), id(id), hand(smem) {}

    static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / 32; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    // A barrier of this warpgroup alone.
    __device__ __forceinline__ void sync() const { barrier_sync(1 + kConsumers + id, 128); }

    // Consumers take turns in issuing matrix work, so that the softmax of one runs beside the products of another
    // (FlashAttention-3, section 3.1). Barrier 1 + i is consumer i's turn.
    __device__ __forceinline__ void wait_turn() const {
        if (kTakeTurns) barrier_sync(1 + id, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (kTakeTurns) barrier_arrive(1 + (id + 1 == kConsumers ? 0 : id + 1), 256);
    }
    __device__ __forceinline__ void skip_turn() const {
        wait_turn();
        pass_turn();
    }

    // Looks for the next K and V while there is other work, so that the answer is at hand when they are wanted.
    __device__ __forceinline__ void look_ahead() {
        k_seen = mbarrier_test(smem + Layout::kFullK + k_ring.stage * 8, k_ring.parity);
        v_seen = mbarrier_test(smem + Layout::kFullV + v_ring.stage * 8, v_ring.parity);
    }
    __device__ __forceinline__ void wait_k() {
        if (!k_seen) mbarrier_wait(smem + Layout::kFullK + k_ring.stage * 8, k_ring.parity);
        k_seen = false;
    }
    // This warp is done with a buffer, which whoever brings a part of the next block into it must know.
    static __device__ __forceinline__ void release(u32 empty) {
        if constexpr (kCluster > 1) {
            if (lane() < kCluster) mbarrier_arrive_at(empty, lane());
        } else {
            if (lane() == 0) mbarrier_arrive(empty);
        }
    }
    __device__ __forceinline__ void release_k() {
        release(smem + Layout::kEmptyK + k_ring.stage * 8);
        k_ring.advance();
    }
    __device__ __forceinline__ void wait_v() {
        if (!v_seen) mbarrier_wait(smem + Layout::kFullV + v_ring.stage * 8, v_ring.parity);
        v_seen = false;
    }
    __device__ __forceinline__ void release_v() {
        release(smem + Layout::kEmptyV + v_ring.stage * 8);
        v_ring.advance();
    }
    // Key blocks that others asked for: of the cluster, or consumers of other rows. Each takes a turn as if it were computed:
    // all consumers of a thread block must take as many. V of the last `later` of them may be left to skip_v(): not of more, since
    // the others may wait for V's space before they give back that of K.
    __device__ __forceinline__ void skip(int count, int later = 0) {
#pragma unroll 1
        for (; kSkips && count > 0; count--) {
            wait_k();
            __syncwarp();  // no lane may still wait for what is given away
            release_k();
            if (kTrim) skip_turn();
            if (count > later) skip_v();
        }
    }
    __device__ __forceinline__ void skip_v() {
        wait_v();
        __syncwarp();
        release_v();
    }
};
