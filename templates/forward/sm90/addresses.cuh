// Part of Layout, of dense tensors and of ragged batches alike: addresses, from that of the shared memory.

    static __device__ __forceinline__ u32 met_non_finite_at(u32 smem) { return smem + kMetNonFinite; }
    static __device__ __forceinline__ u32 found_at(u32 smem) { return smem + kFound; }
    static __device__ __forceinline__ u32 admit_v_at(u32 smem) { return smem + kAdmitV; }
    static __device__ __forceinline__ u32 ask_work_at(u32 smem) { return smem + kAskWork; }
    static __device__ __forceinline__ u32 tiles_done_at(u32 smem) { return smem + kTilesDone; }
    static __device__ __forceinline__ u32 placed_at(u32 smem, int place) { return smem + kPlaced + place * 4; }
    static __device__ __forceinline__ u32 empty_rows_at(u32 smem, int consumer) {
        return smem + kEmptyRows + consumer * kBytesEmptyRows;
    }
    static __device__ __forceinline__ u32 o_at(u32 smem, int consumer) { return smem + kO + consumer * kBytesO; }
    static __device__ __forceinline__ u32 o_in_v_at(u32 smem, int consumer) { return smem + kV + consumer * kBytesO; }
