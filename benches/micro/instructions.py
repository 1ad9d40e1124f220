"""Wrapped wgmma instructions as CUDA C++: 64 rows, n columns, 16 deep, bf16 in, fp32 accumulators."""


def _tuple(first, count):
    return "{" + ", ".join(f"%{first + i}" for i in range(count)) + "}"


def shared(name, n, depth_a, depth_b):
    """`name(d, a, b, keep)`: both operands in shared memory, by rows or by depth (transposed)."""
    count = n // 2
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void {name}(float (&d)[{count}], u64 a, u64 b, int keep = 1) {{
    asm volatile("{{\\n.reg .pred keep;\\nsetp.ne.b32 keep, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
        "{_tuple(0, count)}, %{count}, %{count + 1}, keep, 1, 1, {depth_a}, {depth_b};\\n}}\\n"
        : {outs} : "l"(a), "l"(b), "r"(keep) : "memory");
}}
"""


def registers(name, n, depth_b):
    """`name(d, a0, a1, a2, a3, b)`: d += A B with A in registers."""
    count = n // 2
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void {name}(float (&d)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
        "{_tuple(0, count)}, {_tuple(count, 4)}, %{count + 4}, 1, 1, 1, {depth_b};\\n"
        : {outs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b) : "memory");
}}
"""
