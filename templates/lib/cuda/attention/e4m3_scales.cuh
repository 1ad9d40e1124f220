// Scales for which only kernels with e4m3 queries, or with an O of e4m3, have fields in their arguments.

template <typename Element> constexpr bool kIsE4m3 = false;
template <> constexpr bool kIsE4m3<e4m3> = true;

// What O is multiplied by before it is rounded, where it is e4m3.
template <typename Element, typename Args> __device__ __forceinline__ float output_scale(const Args& args) {
    if constexpr (kIsE4m3<Element>) {
        return args.o_scale == nullptr ? 1.0f : __ldg(args.o_scale);
    } else {
        return 1.0f;
    }
}

// What Q of a sequence of a ragged batch is multiplied by, for the heads of a KV head, where it is e4m3.
template <typename Element, typename Args>
__device__ __forceinline__ float query_scale(const Args& args, int sequence, int kv_head) {
    if constexpr (kIsE4m3<Element>) {
        const i64* const stride = args.q_scale_stride;
        return args.q_scale == nullptr ? 1.0f : __ldg(args.q_scale + sequence * stride[0] + kv_head * stride[1]);
    } else {
        return 1.0f;
    }
}
