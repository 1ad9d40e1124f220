// Packed sequences (kPacked): their rows lie one after the other, and where each begins and how many it has is read on
// the device. A thread block computes with the arguments of its sequence, as if that were alone; those of dense tensors
// are the call's own.

// A sequence of a pack: lengths are its own, and tensors begin with its first row.
struct SequenceArgs : BackwardArgs {
    const KernelArgs* call;
};
__device__ __forceinline__ ProgramHead program_head(const SequenceArgs& args, const SequenceArgs&, const Tile& tile) {
    return program_head(*args.call, static_cast<const BackwardArgs&>(args), tile);
}

<% include "lib/cuda/attention/packed_rows.cuh" %>

__device__ __forceinline__ SequenceArgs sequence_args(const KernelArgs& call, int b) {
    const PackedRows q = packed_rows(call.q_begin, call.q_lengths, b, call.q_words, call.q_rows, call.q_len);
    const PackedRows kv = packed_rows(call.kv_begin, call.kv_lengths, b, call.kv_words, call.kv_rows, call.kv_len);
    SequenceArgs s;
    static_cast<BackwardArgs&>(s) = call;
    s.call = &call;
    s.q_len = q.rows, s.kv_len = kv.rows;
    const auto from = [](const void* tensor, i64(&stride)[3], const PackedRows& rows) {
        stride[0] = 0;
        return (Element*)tensor + rows.first * stride[2];
    };
    s.dout = from(s.dout, s.dout_stride, q), s.o = from(s.o, s.o_stride, q);
    s.q = from(s.q, s.q_stride, q), s.dq = from(s.dq, s.dq_stride, q);
    s.k = from(s.k, s.k_stride, kv), s.dk = from(s.dk, s.dk_stride, kv);
    s.v = from(s.v, s.v_stride, kv), s.dv = from(s.dv, s.dv_stride, kv);
#if FT_RESIDUAL
    s.residual = from(s.residual, s.residual_stride, q);
#endif
    s.lse += q.first;
    if (s.dlse != nullptr) s.dlse += q.first;
    return s;
}

// `FT_CALL` is the name of a kernel's argument, and FT_SEQUENCE(args, b) names what a thread block computes with. Of
// dense tensors that is the argument itself, word for word: their machine code is that without packed sequences.
#if @{ packed }@
using Args = SequenceArgs;
#define FT_CALL call
#define FT_SEQUENCE(args, b) const SequenceArgs args = sequence_args(FT_CALL, b)
#else
using Args = KernelArgs;
#define FT_CALL args
#define FT_SEQUENCE(args, b)
#endif

// Where a row of a head is in the log-sum-exp.
__device__ __forceinline__ i64 lse_row(const Args& args, int batch, int head, int row) {
    return kPacked ? head * args.q_rows + row : (i64(batch) * args.heads + head) * args.q_len + row;
}

// Whether a sequence has rows of a tile, of which there are more in its bounds; and how many.
__device__ __forceinline__ bool has_rows(const Args& args, Tile& tile, int most) {
    tile.rows = min_of(most, args.q_len - tile.row);
    return tile.rows > 0;
}
