"""Gradients of packed sequences: against those of each sequence alone, against autograd of unfused attention, and what
is left alone."""

import itertools
import unittest

import numpy as np
from torch_device import DEVICE, MISSING, check, randn, torch, unfused

import flashtune

if torch is not None:
    import flashtune.torch
    from flashtune.torch import _varlen


# Rows and keys of the sequences of a pack.
MIXES = [
    [(70, 133), (0, 40), (64, 64), (1, 300), (129, 0), (5, 200)],
    [(0, 0), (3, 9), (66, 65), (0, 1)],
    [(113, 203)],
]


def firsts(lengths, dtype=np.int32, apart=0):
    return np.cumsum([0] + [n + apart for n in lengths]).astype(dtype)


def random(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class OfArrays(unittest.TestCase):
    def case(self, mix, dtype="float32", apart=0, heads=4, kv_heads=2, d=32, dv=40, ints=np.int32):
        """q, k, v, dout, and the arrays of lengths; rows between sequences are NaN."""
        sides = [[n[i] for n in mix] for i in (0, 1)]
        begins = [firsts(side, ints, apart) for side in sides]
        shapes = [(begins[0][-1], heads, d), (begins[1][-1], kv_heads, d), (begins[1][-1], kv_heads, dv)]
        tensors = [random(s, dtype, i) for i, s in enumerate([*shapes, (begins[0][-1], heads, dv)])]
        for t, i in zip(tensors, (0, 1, 1, 0)):
            own = np.zeros(len(t), bool)
            for first, n in zip(begins[i], sides[i]):
                own[first : first + n] = True
            t[~own] = np.nan
        used = {}
        if apart:
            used = {"seqused_q": np.array(sides[0], ints), "seqused_k": np.array(sides[1], ints)}
        return tensors, dict(cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], **used)

    def holds(self, mix, causal=False, window_size=(-1, -1), with_dlse=False, apart=0, change=None, **more):
        """A pack has the same bytes as its sequences alone."""
        (q, k, v, dout), packed = self.case(mix, apart=apart, **more)
        change = {} if change is None else change
        how = dict(causal=causal, window_size=window_size, **change)
        out, lse = flashtune.flash_attn_varlen_func(q, k, v, **packed, **how, return_softmax_lse=True)
        dlse = random(lse.shape, seed=7) if with_dlse else None
        into = tuple(np.full_like(x, 77) for x in (q, k, v))
        got = flashtune.flash_attn_varlen_backward(dout, q, k, v, out, lse, **packed, **how, dlse=dlse, into=into)
        new = flashtune.flash_attn_varlen_backward(dout, q, k, v, out, lse, **packed, **how, dlse=dlse)
        self.assertTrue(all(a is b for a, b in zip(got, into)))
        for i, (q_len, kv_len) in enumerate(mix):
            rows, keys = (slice(b[i], b[i] + n) for b, n in zip(list(packed.values())[:2], (q_len, kv_len)))
            one = lambda x, at: np.ascontiguousarray(x[at])[None]
            flat = lambda x: None if x is None else np.ascontiguousarray(x[None, :, rows])
            args = one(dout, rows), one(q, rows), one(k, keys), one(v, keys), one(out, rows), flat(lse)
            alone = flashtune.flash_attn_backward(*args, dlse=flat(dlse), **how)
            for name, mine, fresh, want, at in zip(("dq", "dk", "dv"), got, new, alone, (rows, keys, keys)):
                np.testing.assert_array_equal(mine[at], want[0], f"{name} of sequence {i}")
                np.testing.assert_array_equal(fresh[at], want[0])
                # What belongs to nobody stays, and is 0 in new memory.
                mine[at], fresh[at] = 77, 0
        for mine, fresh in zip(got, new):
            self.assertTrue((mine == 77).all() and (fresh == 0).all())

    def test_a_pack_has_the_gradients_of_its_sequences(self):
        for mix in MIXES:
            for how in ({}, {"causal": True}, {"window_size": (20, 3)}):
                with self.subTest(mix=mix, **how):
                    self.holds(mix, with_dlse="causal" in how, **how)
        self.holds(MIXES[0], causal=True, dtype="float16", apart=3, d=64, dv=64)
        self.holds(MIXES[1], apart=2, ints=np.int64, heads=3, kv_heads=3)

    def test_changes_of_the_score_have_positions_in_a_sequence(self):
        slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
        for mix in MIXES[:2]:
            self.holds(mix, causal=True, change={"softcap": 2.0, "alibi_slopes": slopes})
            self.holds(mix, causal=True, change={"attention_chunk": 30})

    def test_bounds_that_are_too_small_cut(self):
        mix = [(70, 90), (20, 30)]
        (q, k, v, dout), packed = self.case(mix)
        how = dict(max_seqlen_q=40, max_seqlen_k=50)
        out, lse = flashtune.flash_attn_varlen_func(q, k, v, **packed, return_softmax_lse=True, **how)
        dq, dk, dv = flashtune.flash_attn_varlen_backward(dout, q, k, v, out, lse, **packed, **how)
        self.assertTrue((dq[40:70] == 0).all() and (dk[50:90] == 0).all() and (dv[50:90] == 0).all())
        cut = dict(packed, seqused_q=np.array([40, 20], np.int32), seqused_k=np.array([50, 30], np.int32))
        for a, b in zip((dq, dk, dv), flashtune.flash_attn_varlen_backward(dout, q, k, v, out, lse, **cut)):
            np.testing.assert_array_equal(a, b)

    def test_arrays_of_any_content_touch_no_other_memory(self):
        (q, k, v, dout), packed = self.case([(30, 40), (20, 10)])
        out, lse = flashtune.flash_attn_varlen_func(q, k, v, **packed, return_softmax_lse=True)
        # Gradients lie within larger memory.
        whole = [np.full((len(x) + 200, *x.shape[1:]), 5, x.dtype) for x in (q, k, v)]
        into = tuple(w[100:-100] for w in whole)
        for bad in ([-5, 1000, -7], [2**31 - 1, -(2**31), 3], [0, 30, 10**6]):
            begins = np.array(bad, np.int32)
            flashtune.flash_attn_varlen_backward(dout, q, k, v, out, lse, begins, begins, into=into)
            for w in whole:
                self.assertTrue((w[:100] == 5).all() and (w[-100:] == 5).all())

    def test_what_is_refused(self):
        (q, k, v, dout), packed = self.case([(8, 9), (4, 5)])
        out, lse = flashtune.flash_attn_varlen_func(q, k, v, **packed, return_softmax_lse=True)
        good = dict(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, **packed)
        flashtune.flash_attn_varlen_backward(**good)
        n = packed["cu_seqlens_q"]
        wrong = [
            ("cu_seqlens_q", None, "cu_seqlens_q is None"),
            ("cu_seqlens_k", None, "cu_seqlens_k is None"),
            ("cu_seqlens_q", n.astype(np.float32), "cu_seqlens_q is float32"),
            ("cu_seqlens_k", n[:-1], "cu_seqlens_k has 2 numbers"),
            ("cu_seqlens_k", n.astype(np.int64), "int64"),
            ("seqused_q", n, "seqused_q has 3 numbers"),
            ("max_seqlen_q", n, "max_seqlen_q is a ndarray"),
            ("max_seqlen_k", -1, "max_seqlen_k is -1"),
            ("softmax_lse", lse.T, r"\(4, 12\)"),
            ("softmax_lse", lse[None], r"\(4, 12\)"),
            ("dlse", lse.astype(np.float16), "dlse is float16"),
            ("dout", dout[None], "dout has the shape"),
            ("out", out[:-1], "\\bo\\b.*shape"),
            ("into", (q, k, v), "dq shares memory with q"),
            ("into", (q,), "into is a tuple"),
        ]
        for name, value, text in wrong:
            with self.subTest(name=name, text=text), self.assertRaisesRegex(flashtune.Error, text):
                flashtune.flash_attn_varlen_backward(**dict(good, **{name: value}))


@unittest.skipIf(torch is None, MISSING)
class OfTensors(unittest.TestCase):
    """Autograd, opcheck and compilers; on a GPU the sizes of flash-attention's own tests."""

    def case(self, mix, dtype, heads=4, kv_heads=2, d=32, dv=None):
        begins = [torch.tensor(firsts([n[i] for n in mix])).to(DEVICE) for i in (0, 1)]
        totals = [sum(n[i] for n in mix) for i in (0, 1)]
        shapes = (totals[0], heads, d), (totals[1], kv_heads, d), (totals[1], kv_heads, d if dv is None else dv)
        return [randn(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)], begins

    def holds(self, mix, dtype, window=(-1, -1), causal=False, softcap=0.0, both=False, **sizes):
        from reference import visible

        tensors, begins = self.case(mix, dtype, **sizes)
        weights = None

        def gradients(f, *inputs):
            nonlocal weights
            inputs = [x.detach().clone().requires_grad_() for x in inputs]
            results = f(*inputs) if both else (f(*inputs)[0],)
            weights = weights or [randn(*r.shape, seed=9 + i) for i, r in enumerate(results)]
            # Rows without a key have a log-sum-exp of -inf.
            loss = sum((r * w.to(r.dtype)).masked_fill(~r.isfinite(), 0).sum() for r, w in zip(results, weights))
            return torch.autograd.grad(loss, inputs)

        def ours(*x):
            return flashtune.flash_attn_varlen_func(
                *x, cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], window_size=window, causal=causal, softcap=softcap,
                max_seqlen_q=max(n[0] for n in mix), max_seqlen_k=max(n[1] for n in mix), return_softmax_lse=True,
            )  # fmt: skip

        def reference(q, k, v):
            outs, lses, at = [], [], [0, 0]
            for q_len, kv_len in mix:
                rows, keys = slice(at[0], at[0] + q_len), slice(at[1], at[1] + kv_len)
                at = [at[0] + q_len, at[1] + kv_len]
                seen = torch.tensor(visible(q_len, kv_len, causal, window)).to(DEVICE)
                some = seen.any(-1)
                one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
                if kv_len == 0 or q_len == 0:
                    outs.append(q[rows].sum() * 0 + q.new_zeros(q_len, q.shape[1], v.shape[2]))
                    lses.append(q.new_zeros(q.shape[1], q_len))
                    continue
                cap = (lambda s: softcap * torch.tanh(s / softcap)) if softcap else None
                # A row without a key sees all here, and what comes of it is left out.
                o, lse = unfused(*one, seen=seen | ~some[:, None], score=cap)
                outs.append(torch.where(some[:, None, None], o[0].transpose(0, 1), 0))
                lses.append(torch.where(some, lse[0], 0))
            return torch.cat(outs), torch.cat(lses, -1)

        got = gradients(ours, *tensors)
        check(self, got, lambda *x: gradients(reference, *x), *tensors)
        for a, b in zip(got, gradients(ours, *tensors)):
            self.assertTrue(torch.equal(a, b))

    def test_autograd(self):
        mix = [(40, 70), (0, 9), (33, 33), (9, 0), (50, 20)]
        self.holds(mix, torch.float32)
        self.holds(mix, torch.bfloat16, causal=True)
        self.holds(mix, torch.float16, window=(9, 4), d=64, dv=32)
        self.holds(mix, torch.float32, softcap=3.0, heads=4, kv_heads=1)
        self.holds([(40, 70), (33, 33)], torch.float32, causal=True, both=True)

    @unittest.skipUnless(DEVICE != "cpu", "a GPU's sizes")
    def test_the_grid_of_flash_attention(self):
        lengths = [(1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (1023, 1024)]
        generator = np.random.default_rng(5)
        masks = [{}, {"causal": True}, {"window": (40, 25)}]
        heads = [(6, 6), (6, 1), (6, 2)]
        dims = [32, 40, 64, 96, 128, 160, 192, 224, 256]
        for n, (most, mask, (h, kv)) in enumerate(itertools.product(lengths, masks, heads)):
            d = dims[n % len(dims)]
            mix = [tuple(int(generator.integers(0, m + 1)) for m in most) for _ in range(5)] + [most, (0, 5)]
            with self.subTest(mix=mix, d=d, heads=h, kv_heads=kv, **mask):
                dtype = (torch.bfloat16, torch.float16)[n % 2]
                self.holds(mix, dtype, softcap=30.0 if n % 5 == 0 else 0.0, heads=h, kv_heads=kv, d=d, **mask)

    def operator(self):
        (q, k, v), begins = self.case([(9, 12), (7, 7)], torch.float32, d=16)
        rest = (*begins, None, None, 9, 12, None, True, -1, -1, 0, 0.0, None, None)
        return [x.requires_grad_() for x in (q, k, v)], rest

    def test_opcheck(self):
        tensors, rest = self.operator()
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.1], device=DEVICE)
        used = torch.tensor([9, 7], dtype=torch.int32, device=DEVICE)
        for args in (rest, (*rest[:2], used, None, None, None, 0.2, False, 5, 3, 20, 9.0, slopes, None)):
            found = torch.library.opcheck(_varlen.attend_varlen_op, (*tensors, *args))
            self.assertEqual(set(found.values()), {"SUCCESS"})
            out, lse = (t.detach() for t in _varlen.attend_varlen_op(*tensors, *args))
            read = [t.detach() for t in (torch.randn_like(out), *tensors, out, lse)]
            for dlse in (None, torch.randn_like(lse)):
                found = torch.library.opcheck(_varlen.attend_varlen_backward_op, (*read, dlse, *args))
                self.assertEqual(set(found.values()), {"SUCCESS"})

    def test_a_compiler_takes_it_whole(self):
        (q, k, v), begins = self.case([(9, 12), (7, 7)], torch.float32)

        def f(q, k, v, a, b):
            of = flashtune.flash_attn_varlen_func
            return of(q * 2, k, v, cu_seqlens_q=a, cu_seqlens_k=b, max_seqlen_q=9, max_seqlen_k=12, causal=True).sum()

        inputs = [x.requires_grad_() for x in (q, k, v)]
        want = torch.autograd.grad(f(*inputs, *begins), inputs)
        got = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(*inputs, *begins), inputs)
        for a, b in zip(got, want):
            self.assertTrue(torch.equal(a, b))

    def test_what_has_no_gradient_is_refused(self):
        (q, k, v), begins = self.case([(9, 12)], torch.float32)
        q.requires_grad_()
        f = lambda **more: flashtune.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], **more
        )
        slopes = torch.ones(4, device=DEVICE, requires_grad=True)
        for more, error in [
            ({"alibi_slopes": slopes}, flashtune.Unsupported),
            ({"out": torch.empty_like(q)}, flashtune.Unsupported),
            ({"s_aux": slopes}, flashtune.Unsupported),
            ({"num_splits": -3}, flashtune.InvalidArgument),
            ({"no_such": 3}, TypeError),
            ({"window_size": 3}, flashtune.InvalidArgument),
        ]:
            with self.subTest(more=list(more)), self.assertRaises(error):
                f(**more)
        with self.assertRaises(flashtune.Unsupported):
            torch.func.grad(lambda x: flashtune.flash_attn_varlen_func(
                x, k, v, cu_seqlens_q=begins[0], cu_seqlens_k=begins[1]).sum())(q.detach())  # fmt: skip

    def test_a_tensor_of_lengths_may_change_between_calls(self):
        (q, k, v), begins = self.case([(9, 12), (7, 7)], torch.float32)
        out, lse = flashtune.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], return_softmax_lse=True
        )
        args = torch.randn_like(out), q, k, v, out, lse, *begins
        first = flashtune.flash_attn_varlen_backward(*args)
        begins[0][1], begins[1][1] = 0, 0
        flashtune.flash_attn_varlen_backward(*args)
        begins[0][1], begins[1][1] = 9, 12
        for a, b in zip(first, flashtune.flash_attn_varlen_backward(*args)):
            self.assertTrue(torch.equal(a, b))


if __name__ == "__main__":
    unittest.main()
