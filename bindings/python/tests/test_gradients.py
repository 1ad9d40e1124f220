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
    """dQ, dK and dV of ``[batch, heads, rows, dim]`` arrays in fp64, or with every result rounded to a dtype.
    ``change`` gives what becomes of the scores and its derivative."""
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
    ds = rounded(
        p * (dp - (p * dp).sum(-1, keepdims=True) + (0 if dlse is None else dlse[..., None].astype(wide))) * slope
    )
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
        bias = random((30, 40), seed=9)
        program = {
            "mask": "kv % 3 != q % 4", "score": "max(score, 0.5 * score) + bias[q, kv]", "tensors": {"bias": bias},
        }
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
            (flashtune.InvalidTensor, "log-sum-exp", lambda: flashtune.flash_attn_backward(
                dout, q, k, v, out, lse[..., :4])),
            (flashtune.InvalidTensor, "dout", lambda: flashtune.flash_attn_backward(dout[..., :32], q, k, v, out, lse)),
            (flashtune.InvalidTensor, "dout", lambda: flashtune.flash_attn_backward(1.0, q, k, v, out, lse)),
            (flashtune.InvalidTensor, "dq shares memory with q", lambda: flashtune.flash_attn_backward(
                dout, q, k, v, out, lse, into=(q, k.copy(), v.copy()))),
            (flashtune.InvalidArgument, "deterministic", lambda: flashtune.flash_attn_backward(
                dout, q, k, v, out, lse, deterministic=2)),
            (flashtune.InvalidArgument, "not in tensors", lambda: flashtune.attention_backward(
                dout, q, k, v, out, lse, needs=["bias"])),
        ]:
            with self.assertRaisesRegex(error, text):
                call()


class Reads(unittest.TestCase):
    """Gradients of what a score program reads, against finite differences of the loss in fp64."""

    def case(self):
        q, k = random((2, 4, 9, 16)), random((2, 2, 12, 16), seed=1)
        v, dout = random((2, 2, 12, 24), seed=2), random((2, 4, 9, 24), seed=3)
        return q, k, v, dout

    def loss(self, q, k, v, dout, score, sink=None, seen=True):
        """``sum(dO * O)`` with scores from a function of the plain ones."""
        k, v = (np.repeat(x.astype(np.float64), 2, 1) for x in (k, v))
        s = np.where(seen, score(q.astype(np.float64) @ k.swapaxes(-1, -2) / 4), -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        total = p.sum(-1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink - s.max(-1, keepdims=True))
        return (dout * (p / total @ v)).sum()

    def holds(self, names, score, tensors, sink=None, mask=None, score_text=None, sink_text=None):
        """``score`` and ``sink`` are functions of scores and of the tensors' values."""
        q, k, v, dout = self.case()
        program = {"score": score_text, "sink": sink_text, "mask": mask, "tensors": tensors}
        seen = True if mask is None else np.arange(12) <= np.arange(9)[:, None] + 3
        out, lse = flashtune.attention(q, k, v, return_lse=True, enable_gqa=True, **program)
        dq, dk, dv, got = flashtune.attention_backward(dout, q, k, v, out, lse, needs=names, **program)
        plain = flashtune.attention_backward(dout, q, k, v, out, lse, **program)
        for a, b in zip((dq, dk, dv), plain):
            np.testing.assert_array_equal(a, b)
        self.assertEqual(list(got), names)
        for name in names:
            value = np.asarray(tensors[name], np.float64)
            self.assertEqual(got[name].shape, value.shape)
            want = np.zeros_like(value)
            for at in np.ndindex(*value.shape):
                def moved(step):
                    values = {n: np.asarray(t, np.float64).copy() for n, t in tensors.items()}
                    values[name][at] += step
                    return self.loss(q, k, v, dout, lambda s: score(s, values), sink and sink(values), seen)
                want[at] = (moved(1e-5) - moved(-1e-5)) / 2e-5
            np.testing.assert_allclose(got[name], want, atol=2e-5 * max(1, np.abs(want).max()), err_msg=name)

    def test_biases_of_any_broadcast(self):
        for shape in [(2, 4, 9, 12), (1, 4, 9, 12), (2, 1, 1, 12), (1, 4, 9, 1), (1, 1, 9, 12)]:
            with self.subTest(shape=shape):
                bias = random(shape, seed=5)
                self.holds(
                    ["t"], lambda s, x: s + x["t"], {"t": bias}, mask="kv <= q + 3", score_text="score + t[b, h, q, kv]"
                )

    def test_slopes_tables_and_sinks(self):
        distance = np.arange(12) - np.arange(9)[:, None]
        slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
        self.holds(
            ["m"], lambda s, x: s + x["m"][:, None, None] * distance, {"m": slopes},
            score_text="score + m[h] * (kv - q)",
        )
        bucket = np.clip(distance, -3, 4) + 3
        self.holds(
            ["t"], lambda s, x: s + x["t"][:, bucket], {"t": random((4, 8), seed=6)},
            score_text="score + t[h, clamp(kv - q, -3, 4) + 3]",
        )
        both = {"s": random(4, seed=7), "c": 1.5}
        self.holds(
            ["s", "c"],
            lambda s, x: s * x["c"] + x["s"][:, None, None],
            both,
            sink=lambda x: 2 * x["s"][:, None, None],
            score_text="c * score + s[h]",
            sink_text="2.0 * s[h]",
        )

    def test_memory_of_the_caller_and_its_dtype(self):
        q, k, v, dout = self.case()
        program = {"score": "score + t[h, kv]", "tensors": {"t": random((4, 12), seed=8)}}
        out, lse = flashtune.attention(q, k, v, return_lse=True, enable_gqa=True, **program)
        *_, whole = flashtune.attention_backward(dout, q, k, v, out, lse, needs=["t"], **program)
        spaced = np.full((4, 24), np.nan, np.float16)
        into = (*(np.empty_like(x) for x in (q, k, v)), {"t": spaced[:, ::2]})
        flashtune.attention_backward(dout, q, k, v, out, lse, needs=["t"], into=into, **program)
        np.testing.assert_array_equal(spaced[:, ::2], whole["t"].astype(np.float16))
        self.assertTrue(np.isnan(spaced[:, 1::2]).all())
        back = lambda **more: flashtune.attention_backward(dout, q, k, v, out, lse, **{**program, **more})
        for error, text, call in [
            (flashtune.InvalidArgument, "needs is 't'", lambda: back(needs="t")),
            (flashtune.InvalidArgument, "into is a tuple", lambda: back(needs=["t"], into=into[:3])),
            (flashtune.InvalidArgument, "needs names", lambda: back(needs=["t"], into=(*into[:3], {}))),
            (flashtune.Error, "shape", lambda: back(needs=["t"], into=(*into[:3], {"t": spaced}))),
            (flashtune.Error, "that the score program reads", lambda: back(
                needs=["u"], tensors={**program["tensors"], "u": random(3)})),
            (flashtune.Error, "float", lambda: back(
                needs=["n"], mask="kv < n[b]", tensors={**program["tensors"], "n": np.full(2, 9, np.int32)})),
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
