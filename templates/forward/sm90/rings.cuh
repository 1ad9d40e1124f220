// The rings of buffers in shared memory (layout.cuh), and the named barriers: of dense tensors and ragged batches.

using QPipeline = Pipeline<Layout::kQBuffers, Layout::kFullQ, Layout::kEmptyQ, Layout::kQ, Layout::kBytesQ, kConsumers>;
using KPipeline = Pipeline<kStages, Layout::kFullK, Layout::kEmptyK, Layout::kK, Layout::kBytesK>;
struct VPipeline : Pipeline<kStages, Layout::kFullV, Layout::kEmptyV, Layout::kV, Layout::kBytesV> {
    // Where TMA completes: a masked block is raw until the helpers have taken non-finite elements out, then full.
    static __device__ __forceinline__ u32 raw_at(u32 smem, int stage) { return smem + Layout::kRawV + stage * 8; }
    __device__ __forceinline__ u32 arrived(u32 smem, bool raw) const {
        return smem + (raw ? Layout::kRawV : Layout::kFullV) + stage * 8;
    }
};
using BiasPipeline = Pipeline<max_of(1, kBiasStages), Layout::kFullBias, Layout::kEmptyBias, Layout::kBias,
                              Layout::kBytesBiases, kConsumers>;
using BitPipeline = Pipeline<kBitStages, Layout::kFullBits, Layout::kEmptyBits, Layout::kBits, Layout::kBytesBits>;
using WorkPipeline = Pipeline<2, Layout::kFullWork, Layout::kEmptyWork, Layout::kWork, Layout::kBytesSlot>;

// Named barriers. 0 is that of the whole block, __syncthreads().
enum NamedBarrier : int {
    kTurn = 1,                                // + consumer: its turn to issue products
    kWarpgroup = kTurn + kConsumers,          // + consumer: its four warps
    kAllConsumers = kWarpgroup + kConsumers,
};
