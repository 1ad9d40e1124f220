"""Tensors of PyTorch, on the GPU.

The whole grid runs on ``cuda``, or where ``FLASHTUNE_TEST_DEVICE`` says (``cpu`` works, and takes minutes for
compiling); without either it is skipped:

    FLASHTUNE_TEST_DEVICE=cpu PYTHONPATH=bindings/python python -m unittest discover -s bindings/python/tests -v

Most of its time is compiling. ``FLASHTUNE_TEST_SHARD=I/N`` runs every N-th head dim and dtype of the grid from the I-th
on, so that several processes can share the work and a cache.
"""

import itertools
import os
import threading
import time
import unittest

import flashtune

try:
    import torch
except ImportError:
    torch = None

DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE")
if torch is not None and DEVICE is None and torch.cuda.is_available():
    DEVICE = "cuda"

# Multiples of 8, even and odd, and others, across the families' ways to cut them; the powers of two are where speed
# counts.
HEAD_DIMS = [32, 40, 56, 59, 64, 72, 88, 96, 104, 111, 120, 128, 136, 160, 168, 192, 200, 216, 232, 248, 256]
SHARD, SHARDS = map(int, os.environ.get("FLASHTUNE_TEST_SHARD", "0/1").split("/"))
# batch, heads, kv_heads, q_len, kv_len
SIZES = [
    (2, 4, 4, 128, 128),
    (1, 6, 2, 113, 203),
    (2, 8, 1, 1, 339),
    (1, 4, 2, 257, 65),
    (1, 2, 2, 511, 513),
]
# causal, window_size
MASKS = [(False, (-1, -1)), (True, (-1, -1)), (False, (31, 17)), (True, (65, 0)), (False, (9, -1))]


def tensors(sizes, d, dtype, device=None, dv=None):
    """q, k, v ``[batch, rows, heads, dim]``."""
    b, h, kv_h, q_len, kv_len = sizes
    generator = torch.Generator().manual_seed(d + q_len)
    shapes = (b, q_len, h, d), (b, kv_len, kv_h, d), (b, kv_len, kv_h, dv or d)
    return [torch.randn(s, generator=generator).to(dtype).to(device or DEVICE) for s in shapes]


def unfused(q, k, v, causal=False, window=(-1, -1), top_left=False, dtype=None):
    """Attention in PyTorch operations of the given dtype, else of q's: O ``[batch, rows, heads, dim]`` and LSE."""
    dtype = dtype or q.dtype
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    q_len, kv_len = q.shape[2], k.shape[2]
    position = torch.arange(q_len, device=q.device)[:, None] + (0 if top_left else kv_len - q_len)
    key = torch.arange(kv_len, device=q.device)[None, :]
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(q_len, kv_len, dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden |= key < position - left
    if right >= 0:
        hidden |= key > position + right
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(hidden.all(-1, keepdim=True), 0)
    return (weights @ v).transpose(1, 2), torch.logsumexp(scores, -1)


@unittest.skipIf(torch is None, "PyTorch is not installed")
@unittest.skipIf(DEVICE is None, "no CUDA device; FLASHTUNE_TEST_DEVICE=cpu runs this on the CPU")
class Torch(unittest.TestCase):
    def holds(self, q, k, v, causal, window):
        """O's error is at most twice that of PyTorch's unfused attention in the same dtype."""
        out, lse = flashtune.flash_attn_func(q, k, v, causal=causal, window_size=window, return_lse=True)
        self.assertEqual((out.shape, out.dtype, out.device), ((*q.shape[:3], v.shape[3]), q.dtype, q.device))
        want, want_lse = unfused(q, k, v, causal, window, dtype=torch.float64)
        same, _ = unfused(q, k, v, causal, window)
        error = (out - want).abs().max().item()
        allowed = 2 * (same - want).abs().max().item()
        # Half a rounding of the largest output: where unfused attention happens to be exact.
        allowed += torch.finfo(q.dtype).eps / 2 * want.abs().max().item() + 1e-6
        self.assertLessEqual(error, allowed)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
        return error / allowed

    def test_grid(self):
        worst = 0.0
        grid = itertools.product(HEAD_DIMS, (torch.float16, torch.bfloat16))
        for d, dtype in itertools.islice(grid, SHARD, None, SHARDS):
            for sizes, (causal, window) in itertools.product(SIZES, MASKS):
                with self.subTest(d=d, dtype=dtype, sizes=sizes, causal=causal, window=window):
                    worst = max(worst, self.holds(*tensors(sizes, d, dtype), causal, window))
        print(f"largest error: {worst:.2f} of what is allowed ({flashtune.explain(as_dict=True)['device']})")

    def test_float32_and_values_of_another_head_dim(self):
        for dtype, d, dv in [(torch.float32, 64, 64), (torch.float32, 72, 40), (torch.bfloat16, 192, 128)]:
            for sizes in SIZES:
                with self.subTest(dtype=dtype, d=d, dv=dv, sizes=sizes):
                    self.holds(*tensors(sizes, d, dtype, dv=dv), True, (-1, -1))

    def test_scaled_dot_product_attention_is_pytorchs(self):
        for sizes, causal in itertools.product([*SIZES, (1, 2, 2, 300, 77), (1, 2, 2, 77, 300)], [False, True]):
            with self.subTest(sizes=sizes, causal=causal):
                q, k, v = (x.transpose(1, 2) for x in tensors(sizes, 64, torch.bfloat16))
                ours = flashtune.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
                wide = [x.transpose(1, 2) for x in (q, k, v)]
                want, _ = unfused(*wide, causal, top_left=True, dtype=torch.float64)
                theirs, _ = unfused(*wide, causal, top_left=True)
                allowed = 2 * (theirs - want).abs().max().item() + torch.finfo(q.dtype).eps / 2
                self.assertLessEqual((ours.transpose(1, 2) - want).abs().max().item(), allowed)

    def test_strides(self):
        packed = torch.randn(2, 65, 3, 4, 64, device=DEVICE).to(torch.bfloat16)
        q, k, v = packed.unbind(2)
        out = flashtune.flash_attn_func(q, k, v, causal=True)
        self.assertTrue(torch.equal(out, flashtune.flash_attn_func(*(x.contiguous() for x in (q, k, v)), causal=True)))
        # Rows that start at no multiple of 16 bytes.
        q, k, v = (torch.randn(1, 33, 2, 65, device=DEVICE).to(torch.bfloat16)[..., 1:] for _ in range(3))
        self.holds(q, k, v, True, (-1, -1))
        with self.assertRaisesRegex(flashtune.InvalidTensor, "contiguous"):
            flashtune.flash_attn_func(*(x.transpose(1, 3) for x in packed[:, :64, :, :, :].unbind(2)))

    def test_what_is_not_supported_is_an_error(self):
        q, k, v = tensors(SIZES[0], 64, torch.float16)
        refused = self.assertRaisesRegex
        with refused(flashtune.Unsupported, "none within autograd"):
            flashtune.default_engine(DEVICE).forward(q.clone().requires_grad_(), k, v)
        with torch.no_grad():
            flashtune.default_engine(DEVICE).forward(torch.nn.Parameter(q), k, v)
        with refused(flashtune.Unsupported, "float64"):
            flashtune.flash_attn_func(q.double(), k, v)
        with refused(flashtune.Unsupported, "meta"):
            flashtune.flash_attn_func(*(x.to("meta") for x in (q, k, v)))
        with refused(flashtune.Unsupported, "layout"):
            flashtune.flash_attn_func(q.float().to_sparse(), k, v)
        with refused(flashtune.InvalidTensor, "numpy|ndarray|Tensor"):
            flashtune.flash_attn_func(q, k.cpu().numpy(), v)
        with refused(flashtune.InvalidTensor, "float|dtype"):
            flashtune.flash_attn_func(q, k.bfloat16(), v)
        with refused(flashtune.InvalidTensor, "heads"):
            flashtune.scaled_dot_product_attention(q, k[:, :2], v[:, :2])

    def test_tensors_that_are_not_what_their_memory_holds(self):
        q, k, v = tensors(SIZES[0], 32, torch.float32)
        attention = flashtune.flash_attn_func
        with self.assertRaisesRegex(flashtune.Unsupported, "resolve_neg"):
            attention(torch._neg_view(q), k, v)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with self.assertRaisesRegex(flashtune.Unsupported, "tangent"):
                attention(dual, k, v)
            attention(q, k, v)
        with self.assertRaisesRegex(flashtune.Unsupported, "vmap"):
            torch.vmap(flashtune.default_engine(DEVICE).forward)(q[None], k[None], v[None])
        with self.assertRaisesRegex(flashtune.Unsupported, "nested"):
            attention(torch.nested.nested_tensor([q[0]]), k, v)

    def test_threads_and_streams(self):
        cases = [tensors((1, 4, 2, n, n), 64, torch.bfloat16) for n in (64, 129, 200)]
        alone = [flashtune.flash_attn_func(*c, causal=True) for c in cases]
        failures = []

        def work(start):
            try:
                stream = torch.cuda.Stream() if q_is_cuda else None
                with torch.cuda.stream(stream):
                    for n in range(50):
                        i = (start + n) % len(cases)
                        if not torch.equal(flashtune.flash_attn_func(*cases[i], causal=True), alone[i]):
                            failures.append(i)
            except BaseException as e:  # noqa: BLE001 - told by the main thread
                failures.append(e)

        q_is_cuda = cases[0][0].is_cuda
        if q_is_cuda:
            torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failures, [])

    def test_a_call_costs_the_host_little(self):
        q, k, v = tensors((1, 1, 1, 1, 1), 32, torch.bfloat16)
        for function in (flashtune.flash_attn_func, flashtune.scaled_dot_product_attention):
            function(q, k, v)
            best = float("inf")
            for _ in range(20):
                if q.is_cuda:
                    torch.cuda.synchronize()
                # This thread's own time: what others do on a shared machine is not the call's.
                start = time.thread_time()
                for _ in range(100):
                    function(q, k, v)
                best = min(best, (time.thread_time() - start) * 1e4)
            print(f"{function.__name__}: {best:.1f} us a call")
            self.assertLess(best, 25)


@unittest.skipIf(torch is None or not torch.cuda.is_available(), "no CUDA device")
class Cuda(unittest.TestCase):
    def test_tensors_elsewhere_than_the_engine(self):
        q, k, v = tensors(SIZES[0], 64, torch.float16, "cuda:0")
        with flashtune.Engine("cuda:0") as engine:
            for wrong in [(q.cpu(), k.cpu(), v.cpu()), (q, k.cpu(), v), (q.cpu().pin_memory(), k, v)]:
                with self.assertRaisesRegex(flashtune.InvalidTensor, "cpu"):
                    engine.forward(*wrong)
            with self.assertRaisesRegex(flashtune.InvalidTensor, "cpu"):
                engine.forward(q, k, v, out=q.cpu())
            engine.forward(q, k, v)
        with flashtune.Engine("cpu") as engine, self.assertRaisesRegex(flashtune.InvalidTensor, "cuda:0"):
            engine.forward(q, k, v)

    def test_waits_for_the_current_stream_and_no_other(self):
        q, k, v = tensors((1, 8, 8, 1024, 1024), 64, torch.float16)
        want = flashtune.flash_attn_func(q, k, v)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            late = torch.full_like(q, float("nan"))
            torch.cuda._sleep(20_000_000)
            late.copy_(q)
            out = flashtune.flash_attn_func(late, k, v)
        stream.synchronize()
        self.assertTrue(torch.equal(out, want))

    def test_is_captured_in_a_graph(self):
        q, k, v = tensors((1, 8, 2, 333, 333), 128, torch.bfloat16)
        flashtune.flash_attn_func(q, k, v, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flashtune.flash_attn_func(q, k, v, causal=True)
        q.copy_(torch.randn_like(q))
        graph.replay()
        self.assertTrue(torch.equal(out, flashtune.flash_attn_func(q, k, v, causal=True)))

    @unittest.skipIf(torch is None or torch.cuda.device_count() < 2, "one CUDA device")
    def test_every_device_has_its_engine(self):
        q, k, v = tensors(SIZES[1], 64, torch.bfloat16, "cuda:1")
        out = flashtune.flash_attn_func(q, k, v, causal=True)
        self.assertEqual(torch.cuda.current_device(), 0)
        here = flashtune.flash_attn_func(*(x.to("cuda:0") for x in (q, k, v)), causal=True)
        self.assertTrue(torch.equal(out.cpu(), here.cpu()))
        with self.assertRaisesRegex(flashtune.InvalidTensor, "cuda:1"):
            flashtune.flash_attn_func(q.to("cuda:0"), k, v)


if __name__ == "__main__":
    unittest.main()
