"""What O loses by rounding: gradients of rows that attend mostly to one key, with it and without, of arrays of NumPy
and, where PyTorch is, through autograd and its operators."""

import sys
import unittest
from unittest import mock

import numpy as np

import flashtune

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None
try:
    import torch
except ImportError:
    torch = None


def peaked(weight, dtype, rows=48, d=64, seed=0):
    """q, k, v and dout ``[batch, rows, heads, d]``, of which each row gives one key about this weight."""
    random = np.random.default_rng(seed)
    k, v, dout = (random.standard_normal((1, rows, 2, d)).astype(dtype) for _ in range(3))
    q = np.zeros((1, rows, 2, d))
    for h in range(2):
        keys = k[0, :, h].astype(np.float64)
        longest = keys[np.argmax((keys * keys).sum(-1))]
        direction = longest / (longest @ longest) * np.sqrt(d)
        scores = keys @ direction / np.sqrt(d)
        for i in range(rows):
            wanted = 1 - (1 - weight) * (0.8 + 0.4 * i / rows)
            low, high = 0.0, 60.0
            for _ in range(60):
                t = (low + high) / 2
                low, high = (t, high) if 1 / np.exp((scores - 1) * t).sum() < wanted else (low, t)
            q[0, i, h] = direction * low
    return q.astype(dtype), k, v, dout


def exact(q, k, v, dout):
    """dQ in fp64."""
    q, k, v, dout = (x.astype(np.float64).swapaxes(1, 2) for x in (q, k, v, dout))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    return (ds @ k / np.sqrt(q.shape[-1])).swapaxes(1, 2)


def off(got, want):
    """The error of an array beside it."""
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@unittest.skipIf(ml_dtypes is None, "there is no bfloat16 for NumPy")
class Arrays(unittest.TestCase):
    def test_rows_of_one_key_have_all_digits_by_what_o_lost(self):
        for dtype in (ml_dtypes.bfloat16, np.float16):
            for weight in (0.8, 0.95, 0.99):
                q, k, v, dout = peaked(weight, dtype)
                want = exact(q, k, v, dout)
                out, lse, lost = flashtune.flash_attn_func(q, k, v, return_lse=True, return_residual=True)
                self.assertEqual((lost.shape, lost.dtype), (out.shape, ml_dtypes.bfloat16))
                by_it, *_ = flashtune.flash_attn_backward(dout, q, k, v, out, lse, residual=lost)
                self.assertIn("residual", flashtune.explain())
                without, *_ = flashtune.flash_attn_backward(dout, q, k, v, out, lse)
                self.assertLessEqual(off(by_it, want), 0.003, f"{dtype} {weight}")
                if dtype is not np.float16 and weight > 0.9:
                    self.assertGreater(off(without, want), 0.01)

    def test_any_program_and_layout_take_it(self):
        q, k, v, dout = (x.swapaxes(1, 2) for x in peaked(0.95, ml_dtypes.bfloat16))
        score = "score + t[h]"
        t = np.zeros(2, np.float32)
        out, lse, lost = flashtune.attention(
            q, k, v, score=score, tensors={"t": t}, return_lse=True, return_residual=True
        )
        dq, _, _, by = flashtune.attention_backward(
            dout, q, k, v, out, lse, score=score, tensors={"t": t}, residual=lost, needs=["t"]
        )
        want = exact(*(x.swapaxes(1, 2) for x in (q, k, v, dout))).swapaxes(1, 2)
        self.assertLessEqual(off(dq, want), 0.003)
        # All scores of a head alike: nothing changes with them, but for what D has lost.
        self.assertLessEqual(np.abs(by["t"]).max(), 1e-2)

    def test_packed_sequences_are_refused_by_name(self):
        q, k, v, _ = (x[0] for x in peaked(0.8, np.float32))
        first = np.array([0, q.shape[0]], np.int32)
        with self.assertRaisesRegex(flashtune.Unsupported, "each sequence"):
            flashtune.flash_attn_varlen_func(q, k, v, first, first, precise=True)

    def test_without_a_bfloat16_it_is_refused(self):
        q, k, v, _ = (x.astype(np.float16) for x in peaked(0.8, np.float32))
        without = {name: module for name, module in sys.modules.items() if name != "ml_dtypes"}
        with mock.patch.dict(sys.modules, without, clear=True):
            with self.assertRaisesRegex(flashtune.Unsupported, "import ml_dtypes"):
                flashtune.flash_attn_func(q, k, v, return_lse=True, return_residual=True)

    def test_what_has_none_is_refused(self):
        q, k, v, dout = peaked(0.8, np.float32)
        with self.assertRaisesRegex(flashtune.Unsupported, "f32 loses nothing"):
            flashtune.flash_attn_func(q, k, v, return_residual=True)
        half = [x.astype(np.float16) for x in (q, k, v, dout)]
        out, lse = flashtune.flash_attn_func(*half[:3], return_lse=True)
        with self.assertRaisesRegex(flashtune.InvalidTensor, "residual"):
            flashtune.flash_attn_backward(half[3], *half[:3], out, lse, residual=out)


@unittest.skipIf(torch is None, "there is no PyTorch")
class Tensors(unittest.TestCase):
    def tensors(self, weight):
        q, k, v, dout = (torch.from_numpy(x.astype(np.float32)).bfloat16() for x in peaked(weight, np.float32))
        numbers = [t.float().numpy() for t in (q, k, v, dout)]
        return [t.requires_grad_() for t in (q, k, v)], dout, exact(*numbers)

    def test_autograd_takes_it_where_a_call_is_precise(self):
        for weight in (0.8, 0.95, 0.99):
            inputs, dout, want = self.tensors(weight)
            found = {}
            for precise in (True, False):
                out = flashtune.flash_attn_func(*inputs, precise=precise)
                found[precise] = off(torch.autograd.grad(out, inputs, dout)[0].float().numpy(), want)
            self.assertLessEqual(found[True], 0.003, weight)
            self.assertGreater(found[False], found[True], weight)
            bhsd = [t.transpose(1, 2) for t in inputs]
            out = flashtune.attention(*bhsd, score="score * 1.0", precise=True)
            dq, *_ = torch.autograd.grad(out, inputs, dout.transpose(1, 2))
            self.assertLessEqual(off(dq.float().numpy(), want), 0.003, weight)

    def test_results_come_with_it_and_it_has_no_gradient(self):
        inputs, dout, want = self.tensors(0.95)
        out, lse, lost = flashtune.flash_attn_func(*inputs, return_lse=True, return_residual=True)
        self.assertEqual((lost.shape, lost.dtype, lost.requires_grad), (out.shape, torch.bfloat16, False))
        with torch.no_grad():
            plain = flashtune.flash_attn_func(*inputs, return_residual=True)
        self.assertTrue(torch.equal(plain[1], lost) and torch.equal(plain[0], out))
        dq, *_ = torch.autograd.grad((out, lse), inputs, (dout, torch.zeros_like(lse)))
        self.assertLessEqual(off(dq.float().numpy(), want), 0.003)

    def test_operators_are_what_compilers_take_them_for(self):
        inputs, _, _ = self.tensors(0.95)
        args = (None, None, None, [], [], [], [], [], [], None, True, True, 0, 0, 0, 0, "", True)
        op = torch.ops.flashtune.attend_precise.default
        torch.library.opcheck(op, (*inputs, *args), test_utils=("test_schema", "test_faketensor"))
        whole = [t.detach() for t in inputs]
        out, lse, lost = op(*whole, *args)
        back = torch.ops.flashtune.attend_backward.default
        given = (out, *whole, out, lse, None, *args[:15], [], lost)
        torch.library.opcheck(back, given, test_utils=("test_schema", "test_faketensor"))
        batched = torch.vmap(lambda q: op(q, *whole[1:], *args)[2])(torch.stack([whole[0], whole[0]]))
        self.assertTrue(torch.equal(batched[0], lost) and torch.equal(batched[1], lost))


if __name__ == "__main__":
    unittest.main()
