"""Calls like one before, which only fill in addresses: what changes between two of them is seen, and still checked."""

import ctypes
import functools
import threading
import time
import unittest
from unittest import mock

import numpy as np
from reference import attention, visible

import flashtune
from flashtune import _known_calls, _tensors

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
        # A program is one of a form.
        self.assertEqual(self.known(), 2)

    def test_the_number_of_known_forms_is_bounded(self):
        q = random((1, 1, 1, 8))
        with mock.patch("flashtune._dense_call.MOST_CALLS", 8):
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

    def test_quick_way_of_the_function(self):
        x = self.x
        engine = flashtune.default_engine("cpu")
        engine._again.clear()
        first = flashtune.flash_attn_func(x, x, x, causal=True)
        with mock.patch("flashtune._dense_call.attend", side_effect=AssertionError("the long way")):
            self.assertTrue(torch.equal(flashtune.flash_attn_func(x, x, x, causal=True), first))
            for other in ({"causal": False}, {"softmax_scale": 0.5}, {"return_lse": True}):
                with self.assertRaisesRegex(AssertionError, "the long way"):
                    flashtune.flash_attn_func(x, x, x, **{"causal": True, **other})
            for q, k in ((x[:, 1:], x), (x, x.bfloat16()), (x, x.transpose(1, 2).contiguous().transpose(1, 2))):
                with self.assertRaisesRegex(AssertionError, "the long way"):
                    flashtune.flash_attn_func(q, k, k, causal=True)
        for wrong in ({"window_size": (-1.0, -1.0)}, {"deterministic": 1}, {"q_descale": x}, {"softcap": -1.0}):
            with self.assertRaises(flashtune.Error):
                flashtune.flash_attn_func(x, x, x, causal=True, **wrong)
        with self.assertRaises(flashtune.InvalidTensor):
            flashtune.flash_attn_func(x, x.to("meta"), x, causal=True)
        q = x.clone().requires_grad_()
        self.assertTrue(flashtune.flash_attn_func(q, x, x, causal=True).requires_grad)

    def test_quick_way_of_pytorchs_function(self):
        import flashtune.torch

        x, sdpa = self.x.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention
        longer = torch.cat([x, x], 2)
        flashtune.default_engine("cpu")._again.clear()
        want = sdpa(x, longer, longer, is_causal=True)
        flashtune.torch.activate()
        self.addCleanup(flashtune.torch.restore)
        first = sdpa(x, longer, longer, is_causal=True)
        torch.testing.assert_close(first, want)
        served = flashtune.torch.counters()["served"]["cpu"]
        with mock.patch("flashtune._dense_call.attend", side_effect=AssertionError("the long way")):
            self.assertTrue(torch.equal(sdpa(x, longer, longer, is_causal=True), first))
            self.assertEqual(flashtune.torch.counters()["served"]["cpu"], served + 1)
            again = flashtune.scaled_dot_product_attention(x, longer, longer, is_causal=True)
            self.assertTrue(torch.equal(again, first))
            for q, k, options in (
                (x, longer, {}), (x, longer, {"is_causal": True, "scale": 0.5}), (x, x, {"is_causal": True}),
                (x, longer, {"is_causal": True, "enable_gqa": True}), (x[0], longer[0], {"is_causal": True}),
                (x, longer, {"attn_mask": torch.ones(9, 18, dtype=torch.bool)}), (x.bfloat16(), longer.bfloat16(), {}),
            ):  # fmt: skip
                with self.assertRaisesRegex(AssertionError, "the long way"):
                    sdpa(q, k, k, **options)
        with self.assertRaisesRegex(flashtune.Unsupported, "dropout_p is 1.0"):
            sdpa(x, longer, longer, dropout_p=1.0, is_causal=True)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            sdpa(x, longer, longer, is_causal=True)
        self.assertEqual(flashtune.torch.counters()["served"]["cpu"], served + 1)
        q = x.clone().requires_grad_()
        self.assertTrue(sdpa(q, longer, longer, is_causal=True).requires_grad)

    def test_gradients_of_a_call_like_one_before(self):
        def gradients(x, **options):
            q, k, v = (t.clone().requires_grad_() for t in (x, x * 0.5, x + 1.0))
            out = flashtune.flash_attn_func(q, k, v, **options)
            return torch.autograd.grad(out, (q, k, v), torch.ones_like(out) * x)

        engine = flashtune.default_engine("cpu")
        by_heads = self.x.transpose(1, 2).contiguous().transpose(1, 2)
        for x in (self.x, self.x * 2.0, self.x.bfloat16(), self.x[:, 1:], by_heads):
            for options in ({}, {"causal": True}, {"softmax_scale": 0.5}, {"window_size": (2, 0)}):
                again = gradients(x, **options), gradients(x, **options)
                engine._again.clear()
                engine._again_backward.clear()
                for a, b, fresh in zip(*again, gradients(x, **options)):
                    self.assertTrue(torch.equal(a, fresh) and torch.equal(b, fresh))
        with mock.patch("flashtune._dense_call.gradients_again", side_effect=AssertionError("the short way")):
            with self.assertRaisesRegex(AssertionError, "the short way"):
                gradients(x, **options)
            gradients(x, causal=True)

    def test_programs_like_those_before(self):
        x = self.x.transpose(1, 2)
        of_rows = [[0] * 4 + [1] * 5, [0] * 9], [[0] * 9, [0, 1] * 4 + [2]]
        documents = [torch.tensor(rows, dtype=torch.int32) for rows in of_rows]
        bias = [torch.from_numpy(random((9,), seed=seed)) for seed in range(2)]
        calls = [
            {"mask": "document_causal", "tensors": {"doc_q": documents[0], "doc_kv": documents[0]}},
            {"mask": "document_causal", "tensors": {"doc_q": documents[1], "doc_kv": documents[1]}},
            {"score": "score + w[kv]", "tensors": {"w": bias[0]}},
            {"score": "score + w[kv]", "tensors": {"w": bias[1]}},
            {"score": "score * w[kv]", "tensors": {"w": bias[1]}},
            {"score": "score + w[kv]", "tensors": {"w": bias[1].half()}},
            {"score": "score + u", "tensors": {"u": 1.5}},
            {"score": "score + u / abs(u + 0.5)", "tensors": {"u": -2.0}},
            {"score": "score + u / abs(u + 0.5)", "tensors": {"u": 3.0}},
            {"score": "score + u", "tensors": {"u": 2}},
            {"mask": "kv <= q", "tensors": None},
        ]
        engine = flashtune.default_engine("cpu")

        def all_of(options, x):
            q, k, v = (t.clone().requires_grad_() for t in (x, x * 0.5, x + 1.0))
            out = flashtune.attention(q, k, v, **options)
            return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out) * x)

        for x in (x, x.bfloat16()):
            first = [all_of(options, x) for options in calls]
            second = [all_of(options, x) for options in calls]
            for options, a, b in zip(calls, first, second):
                engine._again.clear()
                engine._again_backward.clear()
                for one, other, fresh in zip(a, b, all_of(options, x)):
                    self.assertTrue(torch.equal(one, fresh) and torch.equal(other, fresh), options)
        options = calls[-2]
        all_of(options, x)
        for name in ("_attend_again", "gradients_again"):
            with mock.patch(f"flashtune._dense_call.{name}", side_effect=AssertionError("the short way")):
                with self.assertRaisesRegex(AssertionError, "the short way"):
                    all_of(options, x)
        # What the long way refuses.
        meta = torch.zeros(1, device="meta")
        for wrong in ({"u": True}, {"u": 1 << 64}, {"u": meta}, {1: 2}, {"u": torch.zeros(0, 1)}):
            with self.assertRaises(flashtune.Error):
                flashtune.attention(x, x, x, score="score + u", tensors=wrong)

    def test_gradients_of_packed_sequences_like_those_before(self):
        sums = [torch.tensor(s, dtype=torch.int32) for s in ([0, 4, 9], [0, 5, 9])]
        used = torch.tensor([3, 2], dtype=torch.int32)

        def gradients(x, sums, **options):
            q, k, v = (t.clone().requires_grad_() for t in (x, x * 0.5, x + 1.0))
            out = flashtune.flash_attn_varlen_func(q, k, v, *sums, **options)
            return torch.autograd.grad(out, (q, k, v), torch.ones_like(out) * x)

        engine = flashtune.default_engine("cpu")
        x = self.x.reshape(-1, 2, 16)[:9]
        others = [torch.tensor(s, dtype=torch.int32) for s in ([0, 7, 9], [0, 2, 9])]
        longs = [s.long() for s in sums]
        for x, sums in ((x, sums), (x * 2.0, others), (x, longs), (x.bfloat16(), others), (x, [sums[0]] * 2)):
            few = {"seqused_k": used.to(sums[0])}
            for options in ({}, {"causal": True}, {"softmax_scale": 0.5}, {"max_seqlen_q": 3}, few):
                again = gradients(x, sums, **options), gradients(x, sums, **options)
                engine._again_backward.clear()
                engine._again_ragged.clear()
                for a, b, fresh in zip(*again, gradients(x, sums, **options)):
                    self.assertTrue(torch.equal(a, fresh) and torch.equal(b, fresh), options)
        with mock.patch("flashtune._dense_call.gradients_again", side_effect=AssertionError("the short way")):
            with self.assertRaisesRegex(AssertionError, "the short way"):
                gradients(x, sums, **options)
            gradients(x, sums, causal=True, max_seqlen_q=5)

    def test_ragged_calls_refuse_again(self):
        caches = torch.randn(3, 8, 2, 16)
        q, lengths = torch.randn(3, 1, 4, 16), torch.tensor([1, 8, 3], dtype=torch.int32)
        call = flashtune.flash_attn_with_kvcache
        first = call(q, caches, caches, cache_seqlens=lengths)
        self.assertTrue(torch.equal(call(q, caches, caches, cache_seqlens=lengths), first))
        with self.assertRaisesRegex(flashtune.Unsupported, "resolve_neg"):
            call(torch._neg_view(q), caches, caches, cache_seqlens=lengths)
        with self.assertRaisesRegex(flashtune.Unsupported, "gradient"):
            call(q.clone().requires_grad_(), caches, caches, cache_seqlens=lengths)
        with self.assertRaises(flashtune.InvalidTensor):
            call(q, caches, caches, cache_seqlens=lengths.to("meta"))
        with self.assertRaises(flashtune.Error):
            call(q, caches.to_sparse(), caches, cache_seqlens=lengths)
        with self.assertRaises(flashtune.Unsupported):
            torch.vmap(lambda q: call(q, caches, caches, cache_seqlens=lengths))(q[None])
        for _ in range(2):
            with self.assertRaisesRegex(flashtune.Unsupported, "functionalize"):
                torch.func.functionalize(lambda n: call(q, caches, caches, cache_seqlens=n))(lengths)
        # Tensors without elements have no address either.
        self.assertEqual(call(q[:0], caches, caches, cache_seqlens=lengths[:0]).shape, (0, 1, 4, 16))


class Ragged(unittest.TestCase):
    """Calls over KV caches and of packed sequences."""

    def setUp(self):
        self.engine = flashtune.default_engine("cpu")
        self.known = self.engine._again_ragged
        self.known.clear()
        self.q = random((3, 2, 4, 16))
        self.pages, self.cache = random((12, 4, 2, 16), seed=1), random((3, 16, 2, 16), seed=2)
        self.table = np.arange(12, dtype="int32").reshape(3, 4)
        self.lengths = np.array([5, 16, 2], "int32")

    def same(self, function, *args, **options):
        """A call three times: as the first of its kind, like that one, and as a first one once more."""
        results = []
        for again in (False, True, False):
            if not again:
                self.known.clear()
            where = "flashtune.serving.Call" if again else "flashtune.serving._no_such_name"
            patch = mock.patch(where, side_effect=AssertionError("the long way"), create=True)
            with patch:
                found = function(*args, **options)
            results.append([np.array(x) for x in (found if isinstance(found, tuple) else (found,))])
        for others in results[1:]:
            for a, b in zip(results[0], others):
                np.testing.assert_array_equal(a, b)
        return results[0]

    def pages_of(self, **options):
        given = {"cache_seqlens": self.lengths, "block_table": self.table, "causal": True, **options}
        return self.same(flashtune.flash_attn_with_kvcache, self.q, self.pages, self.pages, **given)

    def test_caches_and_options(self):
        plain = self.pages_of()[0]
        self.assertEqual(len(self.known), 1)
        for options in (
            {"causal": False}, {"window_size": (3, 0)}, {"softmax_scale": 0.5}, {"return_softmax_lse": True},
            {"max_seqlen_k": 4}, {"cache_seqlens": self.lengths.astype("int64")},
            {"block_table": np.asfortranarray(self.table[:, ::-1])[:, ::-1].copy()},
            {"cache_leftpad": np.array([1, 0, 0], "int32")},
            {"scheduler_metadata": flashtune.prepare_step((2, 16), [5, 16, 2])},
        ):  # fmt: skip
            self.pages_of(**options)
        slots = np.array([2, 0, 1], "int32")
        call = flashtune.flash_attn_with_kvcache
        self.same(call, self.q, self.cache, self.cache, cache_seqlens=self.lengths)
        self.same(call, self.q, self.cache, self.cache, cache_seqlens=self.lengths, cache_batch_idx=slots)
        self.same(call, self.q, self.cache, self.cache)
        self.same(call, self.q, self.cache[:, ::2], self.cache[:, 1::2], cache_seqlens=self.lengths // 2)
        np.testing.assert_array_equal(self.pages_of()[0], plain)

    def test_other_contents_and_places(self):
        call = flashtune.flash_attn_with_kvcache
        for seed in range(4):
            q, pages = random(self.q.shape, seed=seed), random(self.pages.shape, seed=seed + 9)
            table = np.random.default_rng(seed).permutation(12).astype("int32").reshape(3, 4)
            lengths = np.random.default_rng(seed).integers(1, 17, 3).astype("int32")
            out = call(q, pages, pages, cache_seqlens=lengths, block_table=table, causal=True)
            for b in range(3):
                keys = pages[table[b]].reshape(16, 2, 16)[None, : lengths[b]]
                heads = (x.swapaxes(1, 2) for x in (q[b : b + 1], keys.repeat(2, 2), keys.repeat(2, 2)))
                want, _ = attention(*heads, visible(2, lengths[b], True, (-1, -1)))
                np.testing.assert_allclose(out[b], want[0].swapaxes(0, 1), atol=1e-5)
        self.assertEqual(len(self.known), 1)

    def test_packed_sequences(self):
        q, k = random((9, 4, 16)), random((11, 2, 16), seed=1)
        sums = [np.array(x, "int32") for x in ([0, 4, 9], [0, 5, 11])]
        used = np.array([3, 5], "int32")
        for options in (
            {}, {"causal": True}, {"max_seqlen_q": 5, "max_seqlen_k": 6}, {"max_seqlen_k": 3}, {"seqused_k": used},
            {"seqused_q": used - 1, "return_softmax_lse": False}, {"window_size": (1, 1)}, {"softmax_scale": 0.25},
        ):  # fmt: skip
            if "seqused_q" not in options:
                options["return_softmax_lse"] = True
                self.same(flashtune.flash_attn_varlen_func, q, k, k, *sums, **options)
        table = np.arange(6, dtype="int32").reshape(2, 3)
        pages = random((6, 4, 2, 16), seed=2)
        for lengths in ({"seqused_k": used}, {"cu_seqlens_k": sums[1]}, {"seqused_k": used, "cu_seqlens_k": sums[1]}):
            self.same(flashtune.flash_attn_varlen_func, q, pages, pages, sums[0], block_table=table, **lengths)

    def test_what_has_more_takes_the_long_way(self):
        call, options = flashtune.flash_attn_with_kvcache, {"block_table": self.table, "causal": True}
        out = np.empty_like(self.q)
        new = random((3, 1, 2, 16), seed=5)
        for more in (
            {"cache_seqlens": 4}, {"softcap": 5.0}, {"out": out}, {"k": new, "v": new}, {"s_aux": random((4,))},
            {"alibi_slopes": random((4,))}, {"softcap": 0}, {"window_size": [-1, -1]},
            {"num_splits": 1, "fa_version": 3},
        ):  # fmt: skip
            given = {"cache_seqlens": self.lengths, **options, **more}
            with mock.patch("flashtune.serving.Call", side_effect=AssertionError("the long way")):
                with self.assertRaisesRegex(AssertionError, "the long way"):
                    call(self.q, self.pages, self.pages, **given)
            call(self.q, self.pages.copy(), self.pages.copy(), **given)
        self.assertEqual(len(self.known), 0)

    def test_wrong_arguments_are_refused_again(self):
        call = flashtune.flash_attn_with_kvcache
        options = {"cache_seqlens": self.lengths, "block_table": self.table}
        call(self.q, self.pages, self.pages, **options)
        for wrong in (
            {"window_size": (-1.0, -1.0)}, {"num_splits": -7}, {"max_seqlen_k": -1}, {"softmax_scale": float("nan")},
            {"cache_seqlens": self.lengths[:2]}, {"cache_seqlens": self.lengths.astype("float32")},
            {"block_table": self.table.astype("int16")}, {"k_scale": 2.0}, {"page_table": self.table},
            {"dropout_p": 0.5}, {"scheduler_metadata": 3}, {"attention_chunk": -1},
            {"cache_batch_idx": self.lengths[:2]},
        ):  # fmt: skip
            for _ in range(2):
                with self.assertRaises(flashtune.Error, msg=wrong):
                    call(self.q, self.pages, self.pages, **{**options, **wrong})
        self.assertEqual(len(self.known), 1)
        with mock.patch("flashtune._repeated.MOST_CALLS", 4):
            for rows in range(1, 9):
                call(random((3, rows, 4, 16)), self.pages, self.pages, **options)
                self.assertLessEqual(len(self.known), 4)



@unittest.skipUnless(hasattr(getattr(torch, "Tensor", None), "__dlpack_c_exchange_api__"), "needs PyTorch 2.10")
class KnownToTheLibrary(unittest.TestCase):
    """Calls over tensors that the library reads by itself."""

    def setUp(self):
        torch.manual_seed(0)
        self.engine = flashtune.default_engine("cpu")
        self.engine._numbers.clear()

    def run_counted(self, call):
        """What a call gives, and whether the library knew it; None where it was not asked."""
        known, answers = _tensors.of_kind(torch.Tensor).known_calls, []
        repeat = known.call

        def counted(*args):
            answers.append(repeat(*args))
            return answers[-1]

        with mock.patch.object(known, "call", counted):
            return call(), answers[-1] == 0 if answers else None

    def apart(self, call):
        """The same where the tensors' package has no such interface, as a first call."""
        self.engine._again.clear()
        self.engine._again_ragged.clear()
        with mock.patch.object(_tensors.of_kind(torch.Tensor), "known_calls", None):
            return call()

    def calls(self, seed):
        torch.manual_seed(seed)
        q, pages = torch.randn(3, 1, 4, 16), torch.randn(12, 4, 2, 16)
        table = torch.randperm(12, dtype=torch.int32).view(3, 4)
        lengths = torch.randint(1, 17, (3,), dtype=torch.int32)
        packed, x, projected = torch.randn(9, 4, 16), torch.randn(2, 9, 4, 16), torch.randn(2, 9, 3, 4, 16)
        sums = torch.tensor([0, 1 + seed, 9], dtype=torch.int32)
        off = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
        return {
            "dense": lambda: flashtune.flash_attn_func(x, x, x, causal=True),
            "another alignment": lambda: flashtune.flash_attn_func(off, off, off, causal=True),
            "pages": lambda: flashtune.flash_attn_with_kvcache(
                q, pages, pages, cache_seqlens=lengths, block_table=table, causal=True
            ),
            "packed": lambda: flashtune.flash_attn_varlen_func(packed, packed, packed, sums, sums, 8, 8, causal=True),
            "parts of a projection": lambda: flashtune.flash_attn_func(*projected.unbind(2)),
            "a part beside pages": lambda: flashtune.flash_attn_with_kvcache(
                projected[:1, :3, 0].transpose(0, 1), pages, pages, cache_seqlens=lengths, block_table=table
            ),
        }

    def test_a_call_of_a_form_is_known_after_the_second(self):
        for name, call in self.calls(0).items():
            if name != "another alignment":
                self.assertEqual([self.run_counted(call)[1] for _ in range(3)], [None, None, True], name)
        for seed in range(4):
            for name, call in self.calls(seed).items():
                (first, known), (second, again) = self.run_counted(call), self.run_counted(call)
                self.assertTrue(known and again, name)
                self.assertNotEqual(first.data_ptr(), second.data_ptr())
                self.assertTrue(torch.equal(first, second) and torch.equal(first, self.apart(call)), name)

    def test_what_is_forgotten_is_known_again(self):
        call = self.calls(0)["pages"]
        for _ in range(3):
            call()
        self.engine._numbers.clear()
        self.assertEqual([self.run_counted(call)[1] for _ in range(2)], [None, True])
        # More forms than the library keeps.
        q, lengths = torch.randn(1, 1, 1, 16), torch.tensor([1], dtype=torch.int32)
        for rows in range(1, 530):
            cache = torch.randn(1, rows, 1, 16)
            for _ in range(2):
                flashtune.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)
        want, asked = call(), [self.run_counted(call) for _ in range(3)]
        self.assertTrue(asked[-1][1] and all(torch.equal(out, want) for out, _ in asked))

    def test_other_forms_are_not_known(self):
        x = torch.randn(2, 9, 4, 16)
        for _ in range(2):
            flashtune.flash_attn_func(x, x, x)
        by_heads = x.transpose(1, 2).contiguous().transpose(1, 2)
        for q, k in ((x[:, 1:], x), (x, x[:, ::2]), (by_heads, x), (x, by_heads), (x.half(), x.half()), (x[:1], x[:1])):
            call = functools.partial(flashtune.flash_attn_func, q, k, k)
            out, known = self.run_counted(call)
            self.assertIs(known, False)
            self.assertTrue(out.is_contiguous() and torch.equal(out, self.apart(call)))
        for options in ({"causal": True}, {"softmax_scale": 0.5}, {"return_lse": True}, {"window_size": (2, 2)}):
            self.assertIsNone(self.run_counted(lambda: flashtune.flash_attn_func(x, x, x, **options))[1])
        # The library is not asked where somebody has to look at a tensor.
        for q in (torch._neg_view(x), x.clone().requires_grad_(), torch.nn.Parameter(x)):
            call = functools.partial(flashtune.flash_attn_func, q, x, x)
            try:
                self.assertIsNone(self.run_counted(call)[1])
            except flashtune.Unsupported as e:
                self.assertIn("resolve_neg", str(e))

    def test_sparse_and_nested_tensors_are_refused_where_a_call_is_known(self):
        x = torch.randn(2, 9, 4, 16)
        pages, table = torch.randn(8, 4, 4, 16), torch.arange(6, dtype=torch.int32).view(2, 3)
        calls = (
            lambda q: flashtune.flash_attn_func(q, x, x),
            lambda q: flashtune.flash_attn_with_kvcache(q, pages, pages, block_table=table),
        )
        others = x.to_sparse(), torch.randn(9, 4).to_sparse_csr(), torch.nested.nested_tensor([x[0], x[1]])
        for call in calls:
            for _ in range(3):
                call(x)
            self.assertTrue(self.run_counted(lambda: call(x))[1])
            for other in (*others, others[-1].transpose(1, 2)):
                with self.assertRaises((flashtune.Unsupported, flashtune.InvalidTensor)):
                    call(other)

    def test_failures_of_known_calls_are_errors(self):
        call = self.calls(0)["dense"]
        call(), call()
        with mock.patch.object(self.engine, "_handle", 1):
            with self.assertRaisesRegex(flashtune.Error, "engine"):
                call()
        self.assertTrue(self.run_counted(call)[1])

    def test_other_threads_go_on(self):
        x = torch.randn(1, 4096, 8, 64)
        flashtune.flash_attn_func(x, x, x), flashtune.flash_attn_func(x, x, x)
        times, done = [], threading.Event()

        def count():
            while not done.is_set():
                times.append(time.perf_counter())

        thread = threading.Thread(target=count)
        thread.start()
        try:
            begin = time.perf_counter()
            _, known = self.run_counted(lambda: flashtune.flash_attn_func(x, x, x))
            end = time.perf_counter()
        finally:
            done.set()
            thread.join()
        self.assertTrue(known)
        # A thread that waits for the lock notes nothing from the call's begin to its end.
        within = [t for t in times if begin + 0.1 * (end - begin) < t < begin + 0.9 * (end - begin)]
        self.assertGreater(len(within), 10)

    def test_what_is_no_such_interface_is_none(self):
        class Nothing:
            __dlpack_c_exchange_api__ = 3

        class OtherName:
            __dlpack_c_exchange_api__ = ctypes.PYFUNCTYPE(
                ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
            )(("PyCapsule_New", ctypes.pythonapi))(1, b"another", None)

        for kind in (Nothing, OtherName, np.ndarray):
            self.assertIsNone(_known_calls.of_type(kind))

if __name__ == "__main__":
    unittest.main()
