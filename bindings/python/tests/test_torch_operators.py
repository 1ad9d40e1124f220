"""The operators of PyTorch: gradients against autograd of unfused attention, compilers, exports, vmap, graphs."""

import io
import unittest
import unittest.mock

from torch_device import DEVICE, MISSING, check, gradients, randn, torch, unfused

import flashtune
from flashtune import _dense_call

if torch is not None:
    import flashtune.torch
    from flashtune.torch import _operators


def bhsd(f):
    """A function of flash-attention's layout as one of PyTorch's."""

    def swapped(*tensors):
        results = f(*(t.transpose(1, 2) for t in tensors))
        return (results[0].transpose(1, 2), results[1]) if isinstance(results, tuple) else results.transpose(1, 2)

    return swapped


def case(q_len, kv_len, dtype=None, heads=4, kv_heads=2, d=32, dv=32):
    """q, k, v ``[batch, heads, rows, dim]``."""
    shapes = (heads, q_len, d), (kv_heads, kv_len, d), (kv_heads, kv_len, dv)
    return [randn(2, *s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]


def causal(q_len, kv_len):
    return torch.ones(q_len, kv_len, dtype=torch.bool, device=DEVICE).tril(kv_len - q_len)


@unittest.skipIf(torch is None, MISSING)
class Gradients(unittest.TestCase):
    def holds(self, ours, *inputs, **reference):
        got = gradients(ours, *inputs)
        both = bool(reference.pop("both", False))
        pick = (lambda r: r) if both else (lambda r: r[0])
        check(self, got, lambda *x: gradients(lambda q, k, v: pick(unfused(q, k, v, **reference)), *x), *inputs)
        # The same bytes in every run.
        for a, b in zip(got, gradients(ours, *inputs)):
            self.assertTrue(torch.equal(a, b))

    def test_flash_attn_func(self):
        f = bhsd(lambda *x: flashtune.flash_attn_func(*x, causal=True, deterministic=False))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with self.subTest(dtype=dtype):
                self.holds(f, *case(33, 70, dtype), seen=causal(33, 70))
        f = bhsd(lambda *x: flashtune.flash_attn_func(*x, window_size=(5, 3), softmax_scale=0.3))
        at = torch.arange(40, device=DEVICE)
        distance = at[None, :] - at[:, None]
        self.holds(f, *case(40, 40), seen=(distance >= -5) & (distance <= 3), scale=0.3)

    def test_caps_and_slopes(self):
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
        f = bhsd(lambda *x: flashtune.flash_attn_func(*x, softcap=2.0, alibi_slopes=slopes))
        distance = (torch.arange(30, device=DEVICE)[:, None] + 10 - torch.arange(40, device=DEVICE)).abs()
        change = lambda s: 2 * (s / 2).tanh() - slopes[:, None, None] * distance
        self.holds(f, *case(30, 40), score=change)

    def test_log_sum_exp(self):
        f = bhsd(lambda *x: flashtune.flash_attn_func(*x, causal=True, return_lse=True))
        self.holds(f, *case(33, 33), seen=causal(33, 33), both=True)
        alone = lambda *x: f(*x)[1]
        q, k, v = case(33, 33)
        got = gradients(alone, q, k, v)
        want = gradients(lambda *x: unfused(*x, seen=causal(33, 33))[1] + 0 * x[2].sum(), q, k, v)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)

    def test_scaled_dot_product_attention(self):
        f = flashtune.scaled_dot_product_attention
        grouped = lambda **more: lambda *x: f(*x, enable_gqa=True, **more)
        seen = lambda n, m: torch.ones(n, m, dtype=torch.bool, device=DEVICE).tril()
        for n, m in ((20, 33), (33, 33), (33, 20)):
            self.holds(grouped(is_causal=True), *case(n, m), seen=seen(n, m))
        mask = randn(2, 1, 20, 33) > -0.5
        self.holds(grouped(attn_mask=mask), *case(20, 33), seen=mask)
        bias = randn(4, 20, 33, seed=7)
        self.holds(grouped(attn_mask=bias), *case(20, 33), score=lambda s: s + bias.to(s.dtype))

    def test_programs_and_block_masks(self):
        bias = randn(30, 40, seed=8)
        seen = torch.arange(40, device=DEVICE) % 3 != torch.arange(30, device=DEVICE)[:, None] % 4
        change = lambda s: torch.maximum(s, 0.5 * s) + 0.25 * bias.to(s.dtype)
        more = {"score": "max(score, 0.5 * score) + c * bias[q, kv]", "tensors": {"bias": bias, "c": 0.25}}
        f = lambda *x: flashtune.attention(*x, mask="kv % 3 != q % 4", enable_gqa=True, **more)
        self.holds(f, *case(30, 40), seen=seen, score=change)
        prepared = flashtune.create_block_mask("kv % 3 != q % 4", None, None, 30, 40, device=DEVICE)
        f = lambda *x: flashtune.attention(*x, block_mask=prepared, enable_gqa=True, **more)
        self.holds(f, *case(30, 40), seen=seen, score=change)
        table = torch.arange(40, device=DEVICE, dtype=torch.int32) // 7
        prepared = flashtune.create_block_mask("t[q] == t[kv]", None, None, 40, 40, tensors={"t": table})
        f = lambda *x: flashtune.attention(*x, block_mask=prepared, enable_gqa=True)
        self.holds(f, *case(40, 40), seen=table == table[:, None])

    def test_only_what_asks_gets_one(self):
        q, k, v = (x.transpose(1, 2) for x in case(20, 20))
        k.requires_grad_()
        flashtune.flash_attn_func(q, k, v).sum().backward()
        self.assertIsNone(q.grad)
        self.assertEqual(k.grad.shape, k.shape)
        with torch.no_grad():
            self.assertFalse(flashtune.flash_attn_func(q, k, v).requires_grad)

    def test_what_was_read_must_not_be_changed(self):
        q, k, v = (x.transpose(1, 2) for x in case(20, 20))
        out = flashtune.flash_attn_func(q.requires_grad_(), k, v)
        k.add_(1)
        with self.assertRaisesRegex(RuntimeError, "inplace"):
            out.sum().backward()

    def test_refused_at_the_forward_pass(self):
        q, k, v = (x.transpose(1, 2) for x in case(20, 20))
        x = q.detach().clone().requires_grad_()
        learned = torch.ones(4, device=DEVICE, requires_grad=True)
        bias = torch.zeros(20, 20, device=DEVICE, requires_grad=True)
        swapped = [t.transpose(1, 2) for t in (q, k, v)]
        for text, call in [
            ("none within autograd", lambda: flashtune.flash_attn_with_kvcache(x, k, v)),
            ("none within autograd", lambda: flashtune.default_engine(DEVICE).forward(x, k, v)),
            ("gradient of t", lambda: flashtune.attention_backward(
                swapped[0], *swapped, swapped[0], swapped[0][..., 0].contiguous(), score="score + t[q, kv]",
                tensors={"t": bias})),
            ("torch.func", lambda: torch.func.grad(lambda q: flashtune.flash_attn_func(q, k, v).sum())(q)),
            ("torch.func", lambda: torch.func.jvp(lambda q: flashtune.flash_attn_func(q, k, v), (q,), (q,))),
        ]:
            with self.subTest(text=text), self.assertRaisesRegex(flashtune.Unsupported, text):
                call()
        with torch.no_grad():
            flashtune.flash_attn_func(x, k, v, alibi_slopes=learned)
        with self.assertRaisesRegex(flashtune.InvalidArgument, "deterministic"):
            flashtune.flash_attn_func(q, k, v, deterministic=1)

    def learned(self, call, reference, *learned, q_len=30, kv_len=40):
        """Gradients of q, k, v and of what is learned against those of unfused attention in fp64."""
        inputs = (*case(q_len, kv_len), *learned)
        got = gradients(call, *inputs)
        want = gradients(reference, *(x.double() for x in inputs))
        for a, b in zip(got, want):
            self.assertEqual((a.shape, a.dtype), (b.shape, torch.float32))
            torch.testing.assert_close(a.double(), b, atol=3e-5 * max(1, b.abs().max().item()), rtol=1e-4)
        for a, b in zip(got, gradients(call, *inputs)):
            self.assertTrue(torch.equal(a, b))
        # Of what is learned alone.
        q, k, v = inputs[:3]
        for a, b in zip(gradients(lambda *x: call(q, k, v, *x), *learned), got[3:]):
            self.assertTrue(torch.equal(a, b))

    def test_learned_biases_and_slopes(self):
        attend = lambda score, **more: lambda q, k, v, t: flashtune.attention(
            q, k, v, score=score, tensors={"t": t}, enable_gqa=True, **more
        )
        plain = lambda add: lambda q, k, v, t: unfused(q, k, v, score=lambda s: s + add(t))[0]
        at = lambda n: torch.arange(n, device=DEVICE)
        distance = at(40) - at(30)[:, None]
        for shape in ((2, 4, 30, 40), (1, 4, 30, 40), (2, 1, 1, 40), (1, 4, 30, 1)):
            self.learned(attend("score + t[b, h, q, kv]"), plain(lambda t: t), randn(*shape, seed=4))
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
        self.learned(attend("score + t[h] * (kv - q)"), plain(lambda t: t[:, None, None] * distance), slopes)
        ours = bhsd(lambda q, k, v: flashtune.flash_attn_func(q, k, v, alibi_slopes=ours.slopes))

        def flash(q, k, v, t):
            ours.slopes = t
            return ours(q, k, v)

        self.learned(flash, plain(lambda t: -t[:, None, None] * (distance - 10).abs()), slopes)
        mask = lambda q, k, v, t: flashtune.scaled_dot_product_attention(q, k, v, attn_mask=t, enable_gqa=True)
        self.learned(mask, plain(lambda t: t), randn(30, 40, seed=5))

    def test_learned_tables_and_sinks(self):
        # The buckets of T5: half of them exact, the others logarithmic up to a distance of 128.
        bounds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
        terms = " + ".join(f"select(kv - q >= {n}, 1, 0)" for n in bounds[1:])
        program = f"near = {terms}; score = score + t[h, near];"
        distance = torch.arange(40, device=DEVICE) - torch.arange(30, device=DEVICE)[:, None]
        near = sum((distance >= n).long() for n in bounds[1:])
        call = lambda q, k, v, t: flashtune.attention(q, k, v, score=program, tensors={"t": t}, enable_gqa=True)
        self.learned(call, lambda q, k, v, t: unfused(q, k, v, score=lambda s: s + t[:, near])[0], randn(4, 16, seed=6))

        def with_sink(q, k, v, s):
            group = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(~causal(30, 40), float("-inf"))
            sink = s[None, :, None, None].expand(*scores.shape[:3], 1)
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v

        call = lambda q, k, v, s: flashtune.attention(
            q, k, v, mask="kv <= q + kv_len - q_len", sink="s[h]", tensors={"s": s}, enable_gqa=True
        )
        self.learned(call, with_sink, randn(4, seed=7))

    def test_second_derivatives_are_refused(self):
        q, k, v = (x.transpose(1, 2) for x in case(20, 20))
        q.requires_grad_()
        (g,) = torch.autograd.grad(flashtune.flash_attn_func(q, k, v).square().sum(), q, create_graph=True)
        with self.assertRaisesRegex(flashtune.Unsupported, "gradient of a gradient"):
            g.sum().backward()


@unittest.skipIf(torch is None, MISSING)
class Precisions(unittest.TestCase):
    def test_calls_that_ask_for_gradients_are_exact(self):
        asked = []
        plain = _dense_call.attend

        def attend(engine, *args, **more):
            asked.append(more.get("precision"))
            return plain(engine, *args, **more)

        with unittest.mock.patch.object(_dense_call, "attend", attend):
            q, k, v = (randn(1, 9, 2, 16) for _ in range(3))
            for dtype, wanted in [(torch.float32, "exact"), (torch.bfloat16, None)]:
                learned = q.detach().to(dtype).requires_grad_()
                out = flashtune.flash_attn_func(learned, k.to(dtype), v.to(dtype))
                out.sum().backward()
                self.assertEqual((asked[-1], learned.grad is not None), (wanted, True))
                with torch.no_grad():
                    flashtune.flash_attn_func(learned, k.to(dtype), v.to(dtype))
                self.assertIsNone(asked[-1])
        self.assertEqual(len(asked), 4)


@unittest.skipIf(torch is None, MISSING)
class Compilers(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()

    def same(self, f, *inputs, **options):
        compiled = torch.compile(f, fullgraph=True, **options)
        with torch.no_grad():
            self.assertTrue(torch.equal(compiled(*inputs), f(*inputs)))
        for a, b in zip(gradients(compiled, *inputs), gradients(f, *inputs)):
            self.assertTrue(torch.equal(a, b))
        return compiled

    def test_inductor(self):
        f = bhsd(lambda *x: flashtune.flash_attn_func(*x, causal=True))
        self.same(f, *case(33, 33))

    def test_learned_biases(self):
        f = lambda q, k, v, t: flashtune.attention(q, k, v, score="score + t[h, kv]", tensors={"t": t}, enable_gqa=True)
        self.same(f, *case(33, 33), randn(4, 33, seed=4))
        self.same(f, *case(33, 33), randn(4, 33, seed=4), backend="aot_eager")

    def test_graphs_without_breaks(self):
        bias = randn(33, 33)
        changed = lambda *x: flashtune.attention(
            *x, mask="kv <= q + n", score="score + c * bias[q, kv]", enable_gqa=True,
            tensors={"bias": bias, "c": 0.5, "n": 2},
        )  # fmt: skip
        prepared = flashtune.create_block_mask("kv % 3 != 1", None, None, 33, 33, device=DEVICE)
        mask = randn(33, 33) > 0
        for f in (
            changed,
            lambda *x: flashtune.attention(*x, block_mask=prepared, enable_gqa=True),
            lambda *x: flashtune.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True),
            lambda *x: flashtune.scaled_dot_product_attention(*x, attn_mask=mask, enable_gqa=True),
            bhsd(lambda *x: flashtune.flash_attn_func(*x, softcap=3.0, window_size=(4, 0))),
        ):
            self.same(f, *case(33, 33), backend="aot_eager")

    def test_lengths_that_vary(self):
        f = bhsd(lambda *x: flashtune.flash_attn_func(*x, causal=True))
        compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
        for n in (20, 33, 47):
            inputs = case(n, n)
            self.assertTrue(torch.equal(compiled(*inputs), f(*inputs)))

    def test_export(self):
        class Attention(torch.nn.Module):
            def forward(self, q, k, v, bias):
                tensors = {"bias": bias}
                return flashtune.attention(
                    q, k, v, mask="kv <= q", score="score + bias[q, kv]", tensors=tensors, enable_gqa=True
                )

        inputs = (*case(33, 33), randn(33, 33))
        want = Attention()(*inputs)
        for strict in (False, True):
            exported = torch.export.export(Attention(), inputs, strict=strict)
            called = [str(n.target) for n in exported.graph.nodes if n.op == "call_function"]
            self.assertIn("flashtune.attend.default", called)
            file = io.BytesIO()
            torch.export.save(exported, file)
            file.seek(0)
            self.assertTrue(torch.equal(torch.export.load(file).module()(*inputs), want))

    def test_opcheck(self):
        q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in case(9, 9, d=16, dv=16))
        bias = randn(9, 9)
        plain = (None, None, None, [], [], [], [], [], [], None, True, True, 1, 0, 0)
        program = ("kv <= q + n", "score + c * bias[q, kv]", None, ["bias"], [bias], ["n"], [1], ["c"], [0.5])
        for args in (plain, (*program, 0.2, True, True, 0, 0, 0)):
            found = torch.library.opcheck(flashtune.torch.attend, (q, k, v, *args, 0, "", True))
            self.assertEqual(set(found.values()), {"SUCCESS"})
            out, lse = (t.detach() for t in flashtune.torch.attend(q, k, v, *args, 0, "", True))
            read = [t.detach() for t in (torch.randn_like(out), q, k, v, out, lse)]
            for dlse in (None, torch.randn_like(lse)):
                needs = [0] if args[3] else []
                found = torch.library.opcheck(flashtune.torch.attend_backward, (*read, dlse, *args, needs))
                self.assertEqual(set(found.values()), {"SUCCESS"})

    def test_vmap(self):
        q, k, v = (x.transpose(1, 2) for x in case(20, 20))
        f = lambda q, k, v: flashtune.flash_attn_func(q, k, v, causal=True)
        many = torch.stack([q, q + 1, q - 1], 1)
        values = torch.stack([v, v * 2, v + 3])
        got = torch.vmap(f, in_dims=(1, None, 0))(many, k, values)
        for i in range(3):
            self.assertTrue(torch.equal(got[i], f(many[:, i], k, values[i])))
        many.requires_grad_()
        torch.vmap(f, in_dims=(1, None, 0))(many, k, values).sum().backward()
        alone = many.detach()[:, 1].clone().requires_grad_()
        f(alone, k, values[1]).sum().backward()
        self.assertTrue(torch.equal(many.grad[:, 1], alone.grad))
        # What is graded is computed exactly, as it is outside.
        for graded in (False, True):
            with unittest.mock.patch.object(_operators, "attend_op", side_effect=_operators.attend_op) as seen:
                torch.vmap(torch.vmap(lambda q: f(q[None], k[:1], v[:1])))(many.detach().clone().requires_grad_(graded))
            self.assertEqual({call.args[-1] for call in seen.mock_calls if len(call.args) > 3}, {graded})
        for more in ({"alibi_slopes": torch.ones(4, device=DEVICE)}, {"softcap": 2.0}):
            call = torch.vmap(lambda q: flashtune.flash_attn_func(q, k, v, **more))
            if "softcap" in more:
                self.assertEqual(call(q[None]).shape, (1, *q.shape))
            else:
                with self.assertRaisesRegex(flashtune.Unsupported, "vmap"):
                    call(q[None])

    @unittest.skipIf(DEVICE == "cpu", "no CUDA device")
    def test_cuda_graph_of_forward_and_backward(self):
        q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in case(128, 128, torch.bfloat16, d=64, dv=64))
        step = lambda: torch.autograd.grad(flashtune.flash_attn_func(q, k, v, causal=True).sum(), (q, k, v))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        with torch.no_grad():
            q.copy_(torch.randn_like(q))
        graph.replay()
        for a, b in zip(found, step()):
            self.assertTrue(torch.equal(a, b))


if __name__ == "__main__":
    unittest.main()
