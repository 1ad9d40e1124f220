"""Gradients, of arrays of NumPy on the CPU and, where PyTorch is, of tensors against its autograd."""

import os
import unittest

import numpy as np
from reference import visible

import flashtune

try:
    import torch
except ImportError:
    torch = None


def random(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def gradients(dout, q, k, v, seen, scale=None, dlse=None, change=None, dtype=None):
    """dQ, dK and dV of ``[batch, heads, rows, dim]`` arrays in fp64, or with every result rounded to a dtype. ``change``
    gives what becomes of the scores and its derivative."""
    wide = np.float64 if dtype is None else np.float32
    rounded = (lambda x: x) if dtype is None else (lambda x: x.astype(dtype).astype(wide))
    b, h, s, d = q.shape
    group = h // k.shape[1]
    whole = [x.astype(wide) for x in (dout, q, np.repeat(k, group, 1), np.repeat(v, group, 1))]
    dout, q, k_all, v_all = whole
    scale = wide(1 / np.sqrt(d) if scale is None else scale)
    scores = rounded(rounded(q * scale) @ k_all.swapaxes(-1, -2))
    slope = wide(1)
    if change is not None:
        scores, slope = (x.astype(wide) for x in change(scores))
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, initial=-np.inf, keepdims=True)
    p = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    p = rounded(p / np.where(total > 0, total, 1))
    dp = rounded(dout @ v_all.swapaxes(-1, -2))
    ds = rounded(p * (dp - (p * dp).sum(-1, keepdims=True) + (0 if dlse is None else dlse[..., None].astype(wide))) * slope)
    grouped = lambda x: rounded(x).reshape(b, h // group, group, *x.shape[2:]).sum(2)
    dq = rounded(rounded(ds @ k_all) * scale)
    return dq, rounded(grouped(ds.swapaxes(-1, -2) @ rounded(q * scale))), rounded(grouped(p.swapaxes(-1, -2) @ dout))


class Gradients(unittest.TestCase):
    def near(self, got, *args, **more):
        """Within twice the error of unfused gradients in the dtype, but for a rounding of the largest."""
        want, unfused = gradients(*args, **more), gradients(*args, **more, dtype=got[0].dtype)
        for name, g, w, u in zip(("dq", "dk", "dv"), got, want, unfused):
            self.assertEqual((g.shape, g.dtype), (w.shape, got[0].dtype), name)
            ulp = {"float16": 2.0**-10, "float32": 2.0**-22}[g.dtype.name]
            slack = 2 * ulp * np.abs(w).max(initial=0) + 1e-7
            self.assertLessEqual(np.abs(g - w).max(initial=0), 2 * np.abs(u - w).max(initial=0) + slack, name)

    def case(self, q_len, kv_len, dtype="float32", heads=4, kv_heads=2, d=32, dv=40):
        q, k, v = (
            random((2, q_len, heads, d), dtype, 1),
            random((2, kv_len, kv_heads, d), dtype, 2),
            random((2, kv_len, kv_heads, dv), dtype, 3),
        )
        return q, k, v, random((2, q_len, heads, dv), dtype, 4)

    def holds(self, q, k, v, dout, causal=False, window=(-1, -1), change=None, dlse=None, **more):
        out, lse = flashtune.flash_attn_func(q, k, v, causal=causal, window_size=window, return_lse=True, **more)
        got = flashtune.flash_attn_backward(
            dout, q, k, v, out, lse, causal=causal, window_size=window, dlse=dlse, **more
        )
        seen = visible(q.shape[1], k.shape[1], causal, window)
        wide = [x.swapaxes(1, 2) for x in (dout, q, k, v)]
        self.near([g.swapaxes(1, 2) for g in got], *wide, seen, dlse=dlse, change=change)
        return got

    def test_masks_lengths_and_dtypes(self):
        for causal, window in [(False, (-1, -1)), (True, (-1, -1)), (False, (5, 3))]:
            for q_len, kv_len in [(33, 33), (7, 70), (65, 19)]:
                with self.subTest(causal=causal, window=window, q_len=q_len, kv_len=kv_len):
                    self.holds(*self.case(q_len, kv_len), causal=causal, window=window)
        self.holds(*self.case(40, 50, "float16"), causal=True)
        q, k, v, dout = self.case(20, 30)
        self.holds(q, k, v, dout, dlse=random((2, 4, 20), seed=9))

    def test_flash_attentions_changes_of_the_score(self):
        q, k, v, dout = self.case(30, 40)
        cap, slopes = 2.0, np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
        distance = np.abs(np.arange(30)[:, None] + 10 - np.arange(40)[None, :])

        def change(scores):
            t = np.tanh(scores / cap)
            return cap * t - slopes[:, None, None] * distance, 1 - t * t

        self.holds(q, k, v, dout, change=change, softcap=cap, alibi_slopes=slopes)

    def test_programs_and_memory_of_the_caller(self):
        q, k, v, dout = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in self.case(30, 40, kv_heads=4))
        bias = random((30, 40), seed=8)
        program = {"mask": "kv % 3 != q % 4", "score": "max(score, 0.5 * score) + bias[q, kv]", "tensors": {"bias": bias}}
        out, lse = flashtune.attention(q, k, v, return_lse=True, **program)
        into = tuple(np.full_like(x, np.nan) for x in (q, k, v))
        got = flashtune.attention_backward(dout, q, k, v, out, lse, into=into, **program)
        self.assertTrue(all(a is b for a, b in zip(got, into)))
        seen = np.arange(40)[None, :] % 3 != np.arange(30)[:, None] % 4
        change = lambda s: (np.maximum(s, s / 2) + bias, np.where(s > 0, 1.0, 0.5))
        self.near(got, dout, q, k, v, seen, change=change)
        again = flashtune.attention_backward(dout, q, k, v, out, lse, **program)
        for a, b in zip(got, again):
            np.testing.assert_array_equal(a, b)

    def test_queries_and_keys_that_see_nothing(self):
        q, k, v, dout = self.case(5, 2)
        dq, _, _ = self.holds(q, k, v, dout, causal=True)
        self.assertTrue((dq[:, :3] == 0).all() and (dq[:, 3] != 0).any())
        dq, dk, dv = self.holds(q[:, :0], k, v, dout[:, :0])
        self.assertTrue(dq.shape == (2, 0, 4, 32) and (dk == 0).all() and (dv == 0).all())

    def test_what_is_refused(self):
        q, k, v, dout = self.case(8, 8)
        out, lse = flashtune.flash_attn_func(q, k, v, return_lse=True)
        for error, text, call in [
            (flashtune.InvalidTensor, "log-sum-exp", lambda: flashtune.flash_attn_backward(dout, q, k, v, out, lse[..., :4])),
            (flashtune.InvalidTensor, "dout", lambda: flashtune.flash_attn_backward(dout[..., :32], q, k, v, out, lse)),
            (flashtune.InvalidTensor, "dout", lambda: flashtune.flash_attn_backward(1.0, q, k, v, out, lse)),
            (flashtune.InvalidTensor, "dq shares memory with q", lambda: flashtune.flash_attn_backward(
                dout, q, k, v, out, lse, into=(q, k.copy(), v.copy()))),
            (flashtune.InvalidArgument, "deterministic", lambda: flashtune.flash_attn_backward(
                dout, q, k, v, out, lse, deterministic=2)),
            (flashtune.Unsupported, "needs", lambda: flashtune.attention_backward(dout, q, k, v, out, lse, needs=["bias"])),
        ]:
            with self.assertRaisesRegex(error, text):
                call()


@unittest.skipIf(torch is None, "PyTorch is not installed")
class Autograd(unittest.TestCase):
    def test_gradients_are_those_of_autograd_on_unfused_attention(self):
        device = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")
        if device == "cuda" and not torch.cuda.is_available():
            self.skipTest("no GPU")
        g = torch.Generator().manual_seed(5)
        make = lambda h, s, d: torch.randn(2, s, h, d, generator=g).to(device)
        q, k, v, dout = make(4, 70, 64), make(2, 90, 64), make(2, 90, 40), make(4, 70, 40)
        out, lse = flashtune.flash_attn_func(q, k, v, causal=True, return_lse=True)
        got = flashtune.flash_attn_backward(dout, q, k, v, out, lse, causal=True)
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        qs, ks, vs = (x.transpose(1, 2) for x in wide)
        ks, vs = (x.repeat_interleave(2, 1) for x in (ks, vs))
        seen = torch.ones(70, 90, device=device, dtype=torch.bool).tril(20)
        scores = (qs @ ks.transpose(-1, -2) / 8).masked_fill(~seen, float("-inf"))
        (scores.softmax(-1) @ vs).transpose(1, 2).backward(dout.double())
        for a, b in zip(got, wide):
            self.assertLess((a - b.grad).abs().max().item(), 2e-5)


if __name__ == "__main__":
    unittest.main()
