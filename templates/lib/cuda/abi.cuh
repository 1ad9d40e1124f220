// The argument struct of every forward kernel. Same layout as codegen/src/abi.rs; ABI_VERSION guards both.

struct ForwardArgs {
    const void* q;      // [batch, heads, q_len, head_dim_qk] by strides
    const void* k;      // [batch, kv_heads, kv_len, head_dim_qk] by strides
    const void* v;      // [batch, kv_heads, kv_len, head_dim_v] by strides
    void* o;            // [batch, heads, q_len, head_dim_v] by strides
    float* lse;         // [batch, heads, q_len] contiguous, or null
    float* weights;     // [batch, heads, q_len, kv_len] contiguous, or null (forward/naive only)
    i64 q_stride[3];    // batch, head, row; in elements
    i64 k_stride[3];
    i64 v_stride[3];
    i64 o_stride[3];
    int batch, heads, kv_heads, q_len, kv_len;
    int window_left, window_right;  // read only where that side of the mask is bounded
    float scale;
    const void* side;   // an address of the host: what a score program reads lies behind the arguments (program.cuh)
};
