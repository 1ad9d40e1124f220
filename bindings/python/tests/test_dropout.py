"""Dropout: which weights are dropped by the definition, written here once more, and the gradients of that; of arrays of
NumPy and, where PyTorch is, through autograd, its operators and its own functions."""

import unittest

import numpy as np

import flashtune

try:
    import torch
except ImportError:
    torch = None


def kept(p, seed, offset, batch, heads, q_len, kv_len):
    """Whether each weight is kept, ``[batch, heads, q_len, kv_len]``: Philox 4x32-10 by its place."""
    mask = np.uint64(0xFFFFFFFF)
    sizes = -(-kv_len // 8), q_len, batch * heads
    group, query, pair = np.meshgrid(*map(np.arange, sizes), indexing="ij")
    c = [x.astype(np.uint64) for x in (group, query, pair, np.full_like(group, offset & 0xFFFFFFFF))]
    key = [seed & 0xFFFFFFFF, ((seed >> 32) + (offset >> 32)) & 0xFFFFFFFF]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high, low = np.uint64(32), mask
        c = [(b >> high) ^ c[1] ^ np.uint64(key[0]), b & low, (a >> high) ^ c[3] ^ np.uint64(key[1]), a & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    lanes = np.stack([half for word in c for half in (word & np.uint64(0xFFFF), word >> np.uint64(16))])
    lanes = lanes.transpose(3, 2, 1, 0).reshape(batch, heads, q_len, -1)[..., :kv_len]
    return lanes < round((1 - p) * 65536)


def exact(q, k, v, dout, factor, scale):
    """O, the log-sum-exp and gradients in fp64, of ``[batch, rows, heads, d]``, with as many heads of each."""
    q, k, v, dout = (x.astype(np.float64).swapaxes(1, 2) for x in (q, k, v, dout))
    scores = q @ k.swapaxes(-1, -2) * scale
    lse = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - lse[..., None])
    left = weights * factor
    dp = (dout @ v.swapaxes(-1, -2)) * factor
    ds = weights * (dp - (weights * dp).sum(-1, keepdims=True)) * scale
    results = left @ v, ds @ k, ds.swapaxes(-1, -2) @ q, left.swapaxes(-1, -2) @ dout
    out, dq, dk, dv = (x.swapaxes(1, 2) for x in results)
    return out, lse, dq, dk, dv


def tensors(seed=0, batch=2, q_len=37, kv_len=53, heads=3, d=32):
    random = np.random.default_rng(seed)
    shapes = (q_len, kv_len, kv_len, q_len)
    return [random.standard_normal((batch, rows, heads, d)).astype(np.float32) for rows in shapes]


class Arrays(unittest.TestCase):
    def test_weights_are_dropped_by_the_definition_forward_and_backward(self):
        q, k, v, dout = tensors()
        for p, state in ((0.1, (1, 2)), (0.5, (-5, 3 << 32 | 9)), (0.8, np.array([7, 8], np.int64))):
            seed, offset = (int(n) % (1 << 64) for n in state)
            factor = kept(p, seed, offset, 2, 3, 37, 53) / (1 - p)
            want = exact(q, k, v, dout, factor, 32**-0.5)
            out, lse = flashtune.flash_attn_func(q, k, v, return_lse=True, dropout_p=p, rng_state=state)
            self.assertIn("dropout", flashtune.explain())
            got = flashtune.flash_attn_backward(dout, q, k, v, out, lse, dropout_p=p, rng_state=state)
            for x, y in zip((out, lse, *got), want):
                np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
            bhsd = [x.swapaxes(1, 2) for x in (q, k, v, dout, out)]
            again = flashtune.attention(*bhsd[:3], score="score * 1.0", dropout_p=p, rng_state=state)
            np.testing.assert_allclose(again.swapaxes(1, 2), want[0], rtol=2e-5, atol=2e-5)
            dq, _, _ = flashtune.attention_backward(
                bhsd[3], *bhsd[:3], bhsd[4], lse, score="score * 1.0", dropout_p=p, rng_state=state
            )
            np.testing.assert_allclose(dq.swapaxes(1, 2), want[2], rtol=2e-5, atol=2e-5)

    def test_packed_sequences_count_from_their_own_first_rows(self):
        lengths = [(20, 33), (1, 7), (40, 40)]
        each = [[x[0] for x in tensors(i, 1, *n)] for i, n in enumerate(lengths)]
        q, k, v, dout = (np.concatenate(parts) for parts in zip(*each))
        cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in zip(*lengths))
        options = dict(dropout_p=0.4, rng_state=(11, 12))
        out, lse = flashtune.flash_attn_varlen_func(q, k, v, cu_q, cu_k, return_softmax_lse=True, **options)
        self.assertIn("dropout", flashtune.explain())
        got = flashtune.flash_attn_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, **options)
        for i, (rows, keys) in enumerate(lengths):
            factor = kept(0.4, 11, 12, 3, 3, rows, keys)[i : i + 1] / 0.6
            want = exact(*(x[None] for x in each[i]), factor, 32**-0.5)
            of_q, of_k = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
            parts = out[of_q], lse[:, of_q], got[0][of_q], got[1][of_k], got[2][of_k]
            for x, y in zip(parts, want):
                np.testing.assert_allclose(x, y[0], rtol=2e-5, atol=2e-5)

    def test_a_state_is_drawn_and_given(self):
        q, k, v, _ = tensors()
        np.random.seed(3)
        out, state = flashtune.flash_attn_func(q, k, v, dropout_p=0.3, return_rng_state=True)
        other, another = flashtune.flash_attn_func(q, k, v, dropout_p=0.3, return_rng_state=True)
        self.assertEqual((state.shape, state.dtype), ((2,), np.int64))
        self.assertTrue((state != another).any() and (out != other).any())
        again = flashtune.flash_attn_func(q, k, v, dropout_p=0.3, rng_state=state)
        self.assertTrue((again == out).all())
        np.random.seed(3)
        self.assertTrue((flashtune.flash_attn_func(q, k, v, dropout_p=0.3) == out).all())
        plain, none = flashtune.flash_attn_func(q, k, v, return_rng_state=True)
        self.assertIsNone(none)
        self.assertTrue((plain == flashtune.flash_attn_func(q, k, v)).all())

    def test_what_is_wrong_is_told_by_name(self):
        q, k, v, dout = tensors()
        call, (out, lse) = flashtune.flash_attn_func, flashtune.flash_attn_func(q, k, v, return_lse=True)
        for p in (1.0, -0.1, float("nan"), "a", True):
            with self.assertRaisesRegex(flashtune.InvalidArgument, "dropout_p is"):
                call(q, k, v, dropout_p=p)
        for state in ((1,), (1.5, 2), (1, 2, 3)):
            with self.assertRaisesRegex(flashtune.InvalidArgument, "rng_state"):
                call(q, k, v, dropout_p=0.1, rng_state=state)
        for state in (np.zeros(2, np.int32), np.zeros(3, np.int64), np.zeros(4, np.int64)[::2]):
            with self.assertRaisesRegex(flashtune.InvalidTensor, "rng_state"):
                call(q, k, v, dropout_p=0.1, rng_state=state)
        with self.assertRaisesRegex(flashtune.InvalidArgument, "return_rng_state"):
            flashtune.flash_attn_backward(dout, q, k, v, out, lse, dropout_p=0.1)
        with self.assertRaisesRegex(flashtune.Unsupported, "weights"):
            flashtune.attention(q, q, q, return_weights=True, dropout_p=0.1)
        t = np.zeros(3, np.float32)
        with self.assertRaisesRegex(flashtune.Unsupported, "dropout"):
            bhsd = [x.swapaxes(1, 2) for x in (dout, q, k, v, out)]
            more = dict(score="score + t[h]", tensors={"t": t}, needs=["t"])
            flashtune.attention_backward(*bhsd, lse, dropout_p=0.1, rng_state=(1, 2), **more)
        with self.assertRaisesRegex(flashtune.Unsupported, "dropout_p"):
            flashtune.flash_attn_with_kvcache(q, k, v, cache_seqlens=50, dropout_p=0.1)
        first, table = np.array([0, q.shape[1]], np.int32), np.zeros((1, 1), np.int32)
        with self.assertRaisesRegex(flashtune.Unsupported, "packed queries and keys"):
            used = np.array([9], np.int32)
            flashtune.flash_attn_varlen_func(q[0], k, v, first, block_table=table, seqused_k=used, dropout_p=0.1)


@unittest.skipIf(torch is None, "there is no PyTorch")
class Tensors(unittest.TestCase):
    def case(self):
        arrays = tensors()
        return [torch.from_numpy(x).requires_grad_() for x in arrays[:3]], torch.from_numpy(arrays[3]), arrays

    def test_autograd_takes_the_state_of_the_forward_pass(self):
        inputs, dout, arrays = self.case()
        torch.manual_seed(5)
        out, lse, state = flashtune.flash_attn_func(*inputs, return_lse=True, dropout_p=0.25, return_rng_state=True)
        seed, offset = (int(n) % (1 << 64) for n in state)
        want = exact(*arrays, kept(0.25, seed, offset, 2, 3, 37, 53) / 0.75, 32**-0.5)
        got = torch.autograd.grad(out, inputs, dout)
        for x, y in zip((out, lse, *got), want):
            np.testing.assert_allclose(x.detach().numpy(), y, rtol=2e-5, atol=2e-5)
        torch.manual_seed(5)
        again = flashtune.flash_attn_func(*inputs, dropout_p=0.25)
        self.assertTrue(torch.equal(again, out))
        with torch.no_grad():
            by_numbers = flashtune.flash_attn_func(*inputs, dropout_p=0.25, rng_state=(seed, offset))
            self.assertTrue(torch.equal(by_numbers, out))
        checkpoint = torch.utils.checkpoint.checkpoint
        torch.manual_seed(5)
        kept_less = checkpoint(lambda *t: flashtune.flash_attn_func(*t, dropout_p=0.25), *inputs, use_reentrant=False)
        for x, y in zip(torch.autograd.grad(kept_less, inputs, dout), got):
            self.assertTrue(torch.equal(x, y))

    def test_autograd_of_packed_sequences(self):
        inputs = [t.detach()[0].requires_grad_() for t in self.case()[0]]
        first = torch.tensor([0, 30, 37], dtype=torch.int32)
        inputs[1:] = (t.detach()[:37].requires_grad_() for t in inputs[1:])
        call = flashtune.flash_attn_varlen_func
        out, lse, state = call(*inputs, first, first, dropout_p=0.3, return_softmax_lse=True, return_rng_state=True)
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, inputs, dout)
        plain = [t.detach() for t in inputs]
        more = dict(dropout_p=0.3, rng_state=state)
        by_hand = flashtune.flash_attn_varlen_backward(dout, *plain, out.detach(), lse.detach(), first, first, **more)
        self.assertTrue(all(torch.equal(x, y) for x, y in zip(got, by_hand)))
        self.assertTrue(torch.equal(call(*plain, first, first, **more), out))

    def test_pytorchs_function_and_modules_drop(self):
        inputs, _, _ = self.case()
        bhsd = [t.detach().transpose(1, 2)[:, :, :37] for t in inputs]
        mean = sum(flashtune.scaled_dot_product_attention(*bhsd, dropout_p=0.1) for _ in range(300)) / 300
        whole = flashtune.scaled_dot_product_attention(*bhsd)
        self.assertLess((mean - whole).abs().max(), 0.2)
        flashtune.torch.activate()
        try:
            torch.manual_seed(1)
            first = torch.nn.functional.scaled_dot_product_attention(*bhsd, dropout_p=0.5, is_causal=True)
            torch.manual_seed(1)
            second = flashtune.scaled_dot_product_attention(*bhsd, dropout_p=0.5, is_causal=True)
            self.assertTrue(torch.equal(first, second))
            layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.1).train()
            layer(torch.randn(2, 10, 64)).sum().backward()
            self.assertTrue(all(torch.isfinite(p.grad).all() for p in layer.parameters()))
        finally:
            flashtune.torch.restore()

    def test_operators_are_what_compilers_take_them_for(self):
        inputs, dout, _ = self.case()
        args = (None, None, None, [], [], [], [], [], [], None, True, True, 0, 0, 0, 0, "", True)
        state = torch.tensor([3, 4])
        op = torch.ops.flashtune.attend_dropout.default
        torch.library.opcheck(op, (*inputs, *args, state, 0.3), test_utils=("test_schema", "test_faketensor"))
        with self.assertRaisesRegex(flashtune.Unsupported, "vmap"):
            torch.vmap(lambda q: flashtune.flash_attn_func(q, q, q, dropout_p=0.1, rng_state=(1, 2)))(inputs[0][None])
        with self.assertRaisesRegex(flashtune.Unsupported, "precise"):
            half = [t.detach().half().requires_grad_() for t in inputs]
            flashtune.flash_attn_func(*half, precise=True, dropout_p=0.1)


if __name__ == "__main__":
    unittest.main()
