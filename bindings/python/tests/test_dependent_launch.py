"""Decoding behind a kernel that lets the next one begin early and writes the lengths only then (programmatic dependent
launch). On a GPU, with CuPy for that kernel."""

import unittest

import flashtune

try:
    import cupy
    import torch
except ImportError:
    cupy = None

# Longer than a call takes on the host: the next launch is there before the lengths are.
NANOSECONDS = 300_000
LATE = r"""
extern "C" __global__ void late(int* lengths, const int* next, int n, unsigned long long nanoseconds) {
    asm volatile("griddepcontrol.launch_dependents;");
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begin < nanoseconds);
    for (int i = threadIdx.x; i < n; i += blockDim.x) lengths[i] = next[i];
}
"""


def has_launches():
    return cupy is not None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@unittest.skipUnless(has_launches(), "needs a GPU of sm_90 or newer, PyTorch and CuPy")
class LateLengths(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # One kernel for all calls, whose bytes are compared.
        before = flashtune.set_default_engine(flashtune.Engine("cuda:0", quick_first=False))
        if before is not None:
            cls.addClassCleanup(flashtune.set_default_engine, before)

    def test_lengths_that_the_launch_before_writes_are_the_ones_that_count(self):
        late, rows = cupy.RawKernel(LATE, "late"), 2048
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            # One thread block's threads are more than the sequences, and fewer.
            for batch, heads, kv_heads in ((1, 32, 8), (5, 16, 2), (48, 32, 8), (300, 4, 1)):
                with self.subTest(dtype=dtype, batch=batch), torch.cuda.stream(torch.cuda.Stream()):
                    self.compare(late, rows, dtype, batch, heads, kv_heads)

    def compare(self, late, rows, dtype, batch, heads, kv_heads):
        torch.manual_seed(batch)
        on = {"device": "cuda"}
        pages = batch * rows // 16
        k, v = (torch.randn(pages, 16, kv_heads, 128, dtype=torch.bfloat16, **on).to(dtype) for _ in range(2))
        q = torch.randn(batch, 1, heads, 128, dtype=torch.bfloat16, **on)
        table = torch.randperm(pages, dtype=torch.int32, **on).view(batch, -1)
        lengths = torch.zeros(batch, dtype=torch.int32, **on)

        def call(out):
            flashtune.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=lengths, block_table=table, causal=True, max_seqlen_k=rows, out=out
            )

        for i in range(30):
            before = lengths.clone()
            after = torch.randint(0, rows + 1, (1 if i % 3 == 0 else batch,), dtype=torch.int32, **on)
            after = after.expand(batch).contiguous()
            lengths.copy_(after)
            wanted, found = (torch.full_like(q, float("nan")) for _ in range(2))
            call(wanted)
            anything = torch.randint(-(2**31), 2**31, (batch,), dtype=torch.int64, **on).to(torch.int32)
            lengths.copy_(before if i % 2 else anything)
            torch.cuda.synchronize()
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                arguments = (lengths.data_ptr(), after.data_ptr(), batch, cupy.uint64(NANOSECONDS))
                late((1,), (64,), arguments)
            call(found)  # nothing is launched between the two: it would wait for the lengths
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(found, wanted), f"call {i}")


if __name__ == "__main__":
    unittest.main()
