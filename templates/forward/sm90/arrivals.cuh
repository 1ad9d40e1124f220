// What a consumer waits for and releases: its turn, tiles, and the stages of K and V.

struct Arrivals {
    const KernelArgs& args;
    const u32 smem;
    const int id;  // of the warpgroup, 0 to kConsumers - 1
    Schedule schedule;
    KPipeline k;
    VPipeline v;
#if FT_DRAWERS
    BitPipeline bits;
#endif
    bool k_seen = false, v_seen = false;  // whether the next K and V are known to have arrived

    __device__ __forceinline__ Arrivals(const KernelArgs& args, u32 smem, int id)
        : args(args), smem(smem), id(id), schedule(smem) {}

    static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / 32; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    // A barrier of this warpgroup alone.
    __device__ __forceinline__ void sync() const { barrier_sync(kWarpgroup + id, 128); }

    // Consumers take turns in issuing matrix work, so that the softmax of one runs beside the products of another
    // (FlashAttention-3, section 3.1: ping-pong).
    __device__ __forceinline__ void wait_turn() const {
        if (kTakeTurns) barrier_sync(kTurn + id, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (kTakeTurns) barrier_arrive(kTurn + (id + 1 == kConsumers ? 0 : id + 1), 256);
    }
    __device__ __forceinline__ void skip_turn() const {
        wait_turn();
        pass_turn();
    }

    // Polls the next K and V while there is other work, so that the answer is there when they are wanted.
    __device__ __forceinline__ void look_ahead() {
        k_seen = k.is_full(smem);
        v_seen = v.is_full(smem);
    }
    __device__ __forceinline__ void wait_k() {
        if (!k_seen) k.wait(smem);
        k_seen = false;
    }
    // This warp is done with a stage.
    static __device__ __forceinline__ void release(u32 empty) {
        if (lane() == 0) mbarrier_arrive(empty);
    }
    __device__ __forceinline__ void release_k() {
        release(k.empty(smem));
        k.advance();
    }
    __device__ __forceinline__ void wait_v() {
        if (!v_seen) v.wait(smem);
        v_seen = false;
    }
    __device__ __forceinline__ void release_v() {
        release(v.empty(smem));
        v.advance();
    }
    // Drains stages that were loaded for consumers of other rows. Each still passes the ping-pong barrier, or the
    // warpgroups fall out of step. V of the last `later` of them is left to skip_v(): of no more, since others may wait
    // for a stage of V before they release one of K.
    __device__ __forceinline__ void skip(int count, int later = 0) {
#pragma unroll 1
        for (; kSkips && count > 0; count--) {
            wait_k();
            __syncwarp();  // no lane may still wait for what is released
            release_k();
#if FT_DRAWERS
            skip_bits();
#endif
            if (kTrim) skip_turn();
            if (count > later) skip_v();
        }
    }
#if FT_DRAWERS
    // This warp has read the bits of a block, or wants none of them.
    __device__ __forceinline__ void release_bits() {
        __syncwarp();
        if (lane() == 0) bits.release(smem);
        bits.advance();
    }
    __device__ __forceinline__ void skip_bits() {
        bits.wait(smem);
        release_bits();
    }
#endif
    __device__ __forceinline__ void skip_v() {
        wait_v();
        __syncwarp();
        release_v();
    }
};
