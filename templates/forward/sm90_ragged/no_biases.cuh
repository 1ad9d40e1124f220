// Bias tensors do not come by TMA in ragged batches: what consumer and producer ask of them does nothing.

__device__ __forceinline__ bool copies_biases(const KernelArgs&) { return false; }
__device__ __forceinline__ void prefetch_biases(const KernelArgs&) {}
template <bool kCopies> __device__ __forceinline__ void load_biases(const KernelArgs&, u32) {}
__device__ __forceinline__ void read_biases(const KernelArgs&, u32, const BiasPipeline&, int,
                                            ScoresAhead<kBlockKV / 8>&) {}
__device__ __forceinline__ void release_biases(const KernelArgs&, u32, BiasPipeline&, int) {}
