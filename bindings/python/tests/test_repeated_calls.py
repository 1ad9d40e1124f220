"""Calls like one before, which only fill in addresses: what changes between two of them is seen, and still checked."""

import threading
import unittest
from unittest import mock

import numpy as np
from reference import attention, visible

import flashtune
from flashtune import _tensors

try:
    import torch
except ImportError:
    torch = None


def random(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def plain(q, k, v, **options):
    """The same call as a first one."""
    with flashtune.Engine("cpu") as fresh:
        return fresh.forward(q, k, v, **options)


class Repeated(unittest.TestCase):
    def setUp(self):
        self.engine = flashtune.Engine("cpu")
        self.addCleanup(self.engine.close)

    def test_another_precision_is_another_call(self):
        q, k, v = (random((1, 8, 2, 16), seed=i) for i in range(3))
        self.engine.forward(q, k, v)
        self.twice(q, k, v, precision="exact")
        for precision in ("tf32x3", "tf32"):
            with self.assertRaisesRegex(flashtune.Unsupported, f"(?s)precision.*{precision}"):
                self.engine.forward(q, k, v, precision=precision)
        with self.assertRaisesRegex(flashtune.InvalidArgument, "precision is 'tf16'"):
            self.engine.forward(q, k, v, precision="tf16")

    def twice(self, q, k, v, **options):
        """A call twice, with a poisoned result between; gives the second result, of other memory than the first."""
        first = self.engine.forward(q, k, v, **options)
        second = self.engine.forward(q, k, v, **options)
        kept = np.array(first)
        first[:] = np.nan
        np.testing.assert_array_equal(np.array(second), kept)
        np.testing.assert_array_equal(np.array(second), np.array(plain(q, k, v, **options)))
        return second

    def known(self):
        return len(self.engine._again)

    def test_other_contents_at_other_addresses(self):
        for seed in range(3):
            q, k, v = (random((2, 9, 2, 16), seed=10 * seed + i) for i in range(3))
            self.twice(q, k, v, causal=True)
        self.assertEqual(self.known(), 1)

    def test_strides_dtypes_alignment_and_options_are_other_calls(self):
        x = random((2, 9, 2, 16))
        self.twice(x, x, x)
        by_heads = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
        self.twice(by_heads, x, x)
        self.twice(x, by_heads, x)
        half = x.astype("float16")
        self.twice(half, half, half)
        packed = random((2, 9, 3, 2, 16))
        self.twice(packed[:, :, 0], packed[:, :, 1], packed[:, :, 2])
        self.assertEqual(self.known(), 5)
        # Off the 16 bytes, with the shape and strides of the first.
        off = np.empty(x.size + 1, np.float32)[1:].reshape(x.shape)
        off[:] = x
        np.testing.assert_array_equal(self.twice(off, x, x), plain(x, x, x))
        self.assertEqual(self.known(), 5)
        for n, options in enumerate([{"causal": True}, {"window": (2, 1)}, {"scale": 0.5}, {"layout": "bhsd"}], 6):
            self.twice(x, x, x, **options)
            self.assertEqual(self.known(), n)

    def test_log_sum_exp_with_and_without(self):
        q, k, v = (random((1, 5, 2, 8), seed=i) for i in range(3))
        want, want_lse = attention(*(x.swapaxes(1, 2) for x in (q, k, v)), visible(5, 5, True, (-1, -1)))
        for _ in range(2):
            out, lse = self.engine.forward(q, k, v, causal=True, return_lse=True)
            np.testing.assert_allclose(out.swapaxes(1, 2), want, atol=1e-5)
            np.testing.assert_allclose(lse, want_lse, atol=1e-5)
            self.assertIsInstance(self.engine.forward(q, k, v, causal=True), np.ndarray)

    def test_nothing_to_compute_and_no_keys(self):
        q, k = random((2, 0, 2, 8)), random((2, 4, 2, 8))
        for _ in range(2):
            self.assertEqual(self.engine.forward(q, k, k).shape, (2, 0, 2, 8))
            out, lse = self.engine.forward(k, k[:, :0], k[:, :0], return_lse=True)
            self.assertTrue((out == 0).all() and (lse == -np.inf).all())

    def test_calls_that_failed_are_not_known(self):
        x, y = random((1, 4, 2, 8)), random((1, 4, 3, 8))
        for _ in range(2):
            with self.assertRaises(flashtune.Unsupported):
                self.engine.forward(x, y, y)
            with self.assertRaises(flashtune.Unsupported):
                self.engine.forward(x, x, x, scale=float("nan"))
            with self.assertRaises(flashtune.InvalidTensor):
                self.engine.forward(x[:, ::-1], x, x)
        self.assertEqual(self.known(), 0)
        self.engine.forward(x, x, x)
        self.engine.close()
        with self.assertRaises(flashtune.EngineClosed):
            self.engine.forward(x, x, x)

    def test_what_has_more_than_tensors_takes_the_long_way(self):
        x = random((1, 4, 2, 8))
        self.engine.forward(x, x, x)
        out = np.empty_like(x)
        self.assertIs(self.engine.forward(x, x, x, out=out), out)
        with self.assertRaisesRegex(flashtune.InvalidTensor, "shares memory"):
            self.engine.forward(x, x, x, out=x)
        masked = self.engine.forward(x, x, x, mask="kv == 0")
        np.testing.assert_allclose(masked, np.broadcast_to(x[:, :1], x.shape), atol=1e-6)
        self.assertEqual(self.engine.forward(x, x, x, return_weights=True)[1].shape, (1, 2, 4, 4))
        self.assertEqual(self.known(), 1)

    def test_the_number_of_known_forms_is_bounded(self):
        q = random((1, 1, 1, 8))
        with mock.patch("flashtune.engine._MOST_CALLS", 8):
            for n in range(20):
                k = random((1, n + 1, 1, 8))
                self.assertEqual(self.engine.forward(q, k, k).shape, q.shape)
                self.assertLessEqual(self.known(), 8)

    def test_threads(self):
        wrong = []

        def work(number):
            for n in range(100):
                q = np.full((1, 1 + (number + n) % 7, 2, 8), float(number), np.float32)
                if not (np.abs(self.engine.forward(q, q, q) - number) < 1e-4).all():
                    wrong.append((number, n))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 9)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(wrong, [])

    def test_the_address_of_an_array_is_its_interfaces(self):
        base = random((4, 6, 8))
        read_only = base.copy()
        read_only.flags.writeable = False
        arrays = [base, base[1:, ::2], base.T, base[::-1], read_only, base[:0], np.frombuffer(b"\0" * 32, "f4")]
        adapter = _tensors.adapter(base)
        self.assertTrue(adapter.field, "this Python's arrays are read by their interface")
        for a in arrays:
            self.assertEqual(adapter.address(a), a.__array_interface__["data"][0])


@unittest.skipIf(torch is None, "PyTorch is not installed")
class RepeatedTorch(unittest.TestCase):
    def setUp(self):
        self.engine = flashtune.Engine("cpu")
        self.addCleanup(self.engine.close)
        self.x = torch.from_numpy(random((2, 9, 2, 16)))

    def test_strides_dtypes_and_alignment(self):
        x = self.x
        by_heads = x.transpose(1, 2).contiguous().transpose(1, 2)
        off = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
        bf16 = x.bfloat16()
        cut = x[:, ::2], x[:, 1:], x[:, 1:]
        for q, k, v in [(x, x, x), (by_heads, x, x), (off, off, off), (bf16, bf16, bf16), cut]:
            first, second = (self.engine.forward(q, k, v, causal=True) for _ in range(2))
            self.assertNotEqual(first.data_ptr(), second.data_ptr())
            self.assertTrue(second.is_contiguous() and torch.equal(first, second))
            self.assertTrue(torch.equal(second, plain(q, k, v, causal=True)))
        self.assertEqual(len(self.engine._again), 4)

    def test_what_is_refused_is_refused_again(self):
        x = self.x
        self.engine.forward(x, x, x)
        with self.assertRaisesRegex(flashtune.Unsupported, "resolve_neg"):
            self.engine.forward(torch._neg_view(x), x, x)
        with self.assertRaises(flashtune.Unsupported):
            self.engine.forward(x.to_sparse(), x, x)
        with self.assertRaisesRegex(flashtune.Unsupported, "gradient"):
            self.engine.forward(x.clone().requires_grad_(), x, x)
        with self.assertRaisesRegex(flashtune.InvalidTensor, "meta"):
            self.engine.forward(x, x.to("meta"), x)
        with self.assertRaises(flashtune.Unsupported):
            self.engine.forward(x.double(), x, x)
        self.assertEqual(len(self.engine._again), 1)


if __name__ == "__main__":
    unittest.main()
