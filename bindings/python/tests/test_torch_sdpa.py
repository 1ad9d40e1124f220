"""flashtune in place of PyTorch's scaled_dot_product_attention: what arrives, what is refused, what goes back."""

import unittest

from torch_device import DEVICE, MISSING, check, gradients, randn, torch, unfused

import flashtune

if torch is not None:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import flashtune.torch


def case(q_len=33, kv_len=33, heads=4, kv_heads=4, dtype=None, d=32):
    shapes = (heads, q_len, d), (kv_heads, kv_len, d), (kv_heads, kv_len, d)
    return [randn(2, *s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]


@unittest.skipIf(torch is None, MISSING)
class Activated(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()
        flashtune.torch.activate()
        self.addCleanup(flashtune.torch.restore)

    def served(self):
        return sum(flashtune.torch.counters()["served"].values())

    def fallbacks(self):
        return dict(flashtune.torch.counters()["fallback"])

    def arrives(self, call, *inputs, times=1):
        """The result of a call that flashtune must have computed."""
        before = self.served(), self.fallbacks()
        result = call(*inputs)
        self.assertEqual((self.served() - before[0], self.fallbacks()), (times, before[1]))
        return result

    def test_masks_heads_and_dtypes(self):
        seen = torch.ones(20, 33, dtype=torch.bool, device=DEVICE).tril()
        bools, floats = randn(2, 1, 20, 33) > -1, randn(4, 20, 33)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for kv_heads in (4, 2):
                q, k, v = case(20, 33, kv_heads=kv_heads, dtype=dtype)
                bias = floats.to(dtype)
                for more, reference in [
                    ({}, {}),
                    ({"is_causal": True}, {"seen": seen}),
                    ({"attn_mask": bools}, {"seen": bools}),
                    ({"attn_mask": bias}, {"score": lambda s: s + bias.to(s.dtype)}),
                    ({"scale": 0.3}, {"scale": 0.3}),
                ]:
                    with self.subTest(dtype=dtype, kv_heads=kv_heads, case=list(more)):
                        call = lambda *x: F.scaled_dot_product_attention(*x, enable_gqa=kv_heads != 4, **more)
                        got = self.arrives(call, q, k, v)
                        check(self, [got], lambda *x: [unfused(*x, **reference)[0]], q, k, v)

    def test_gradients(self):
        for more, reference in [
            ({"is_causal": True}, {"seen": torch.ones(33, 33, dtype=torch.bool, device=DEVICE).tril()}),
            ({"attn_mask": (mask := randn(33, 33) > -1)}, {"seen": mask}),
        ]:
            inputs = case()
            got = self.arrives(lambda *x: gradients(lambda *y: F.scaled_dot_product_attention(*y, **more), *x), *inputs)
            check(self, got, lambda *x: gradients(lambda *y: unfused(*y, **reference)[0], *x), *inputs)

    def test_shapes(self):
        q, k, v = case()
        whole = F.scaled_dot_product_attention(q, k, v)
        call = F.scaled_dot_product_attention
        self.assertTrue(torch.equal(self.arrives(call, q[0], k[0], v[0]), whole[0]))
        self.assertTrue(torch.equal(self.arrives(call, q[0, 1], k[0, 1], v[0, 1]), whole[0, 1]))
        self.assertTrue(torch.equal(self.arrives(call, q[None], k[None], v[None]), whole[None]))
        self.assertTrue(
            torch.equal(self.arrives(call, q[:1], k[:1], v), call(q[:1].expand_as(q), k[:1].expand_as(k), v))
        )
        mask = randn(33) > 0
        full = self.arrives(lambda *x: call(*x, attn_mask=mask), q[0], k[0], v[0])
        self.assertTrue(torch.equal(full, call(q, k, v, attn_mask=mask.expand(33, 33))[0]))
        # The last dimension not in one piece.
        turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
        self.assertTrue(torch.equal(self.arrives(call, *turned), whole))

    def test_modules_autocast_and_inference_mode(self):
        layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0, device=DEVICE)
        x = randn(2, 10, 64)
        self.arrives(layer, x)
        q, k, v = case()
        device = torch.device(DEVICE).type
        with torch.autocast(device, torch.bfloat16):
            self.assertEqual(self.arrives(F.scaled_dot_product_attention, q, k, v).dtype, torch.bfloat16)
        with torch.inference_mode():
            self.arrives(F.scaled_dot_product_attention, q, k, v)

    def test_compiled_code(self):
        f = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)
        inputs = case()
        eager = gradients(f, *inputs)
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        for a, b in zip(self.arrives(lambda: gradients(compiled, *inputs)), eager):
            self.assertTrue(torch.equal(a, b))
        self.arrives(lambda: gradients(compiled, *inputs))
        flashtune.torch.restore()
        self.arrives(lambda: gradients(compiled, *inputs), times=0)
        flashtune.torch.activate()
        self.arrives(lambda: gradients(compiled, *inputs))
        with torch.no_grad():
            self.arrives(compiled, *inputs)

    def refusals(self):
        q, k, v = case()
        call = F.scaled_dot_product_attention
        return {
            "dropout": lambda: call(q, k, v, dropout_p=1.0),
            "dtype": lambda: call(q.double(), k.double(), v.double()),
            "head_dim": lambda: call(q.repeat(1, 1, 1, 9), k.repeat(1, 1, 1, 9), v),
        }

    def test_what_is_not_computed_raises(self):
        for reason, call in self.refusals().items():
            with self.subTest(reason=reason), self.assertRaisesRegex(flashtune.Unsupported, "on_unsupported"):
                self.arrives(call, times=0)
        with self.assertRaisesRegex(flashtune.Unsupported, "torch.func"):
            torch.func.grad(lambda q: F.scaled_dot_product_attention(q, q, q).sum())(case()[0])
        with self.assertRaises(flashtune.InvalidArgument):
            flashtune.torch.activate("sometimes")

    def test_or_goes_to_pytorch_counted_and_logged_once(self):
        flashtune.torch.restore()
        # PyTorch's own, which may be NaN where all is dropped.
        alone = {reason: call() for reason, call in self.refusals().items()}
        flashtune.torch.activate(on_unsupported="torch")
        for reason, call in self.refusals().items():
            before, served = self.fallbacks().get(reason, 0), self.served()
            with self.subTest(reason=reason):
                if before == 0:
                    with self.assertLogs("flashtune.torch", "WARNING") as logs:
                        first = call()
                    self.assertIn(reason, logs.output[0])
                else:
                    first = call()
                with self.assertNoLogs("flashtune.torch"):
                    call()
                self.assertEqual(self.fallbacks()[reason], before + 2)
                self.assertEqual(self.served(), served)
                torch.testing.assert_close(first, alone[reason], equal_nan=True)
                self.assertTrue(torch.isfinite(first).all() or reason == "dropout" and DEVICE != "cpu")
        text = flashtune.default_engine(DEVICE).prometheus()
        self.assertRegex(text, r'flashtune_fallback_total\{device="[^"]+",reason="dropout"\} \d+')
        self.assertIn("flashtune_sdpa_total{", text)

    def test_a_learned_mask_gets_its_gradient(self):
        q, k, v = case()
        for shape in ((33, 33), (1, 1, 33, 33), (2, 1, 1, 33)):
            mask = randn(*shape, seed=5)
            f = lambda q, m: F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=m)
            flashtune.torch.activate()
            served = self.served()
            got = gradients(f, q, mask)
            self.assertEqual(self.served(), served + 1)
            flashtune.torch.restore()
            for a, b in zip(got, gradients(f, q.double(), mask.double())):
                torch.testing.assert_close(a, b.to(a.dtype), atol=2e-5, rtol=1e-4)

    def test_blocks_that_ask_for_the_unfused_kernel_get_it(self):
        q, k, v = case()
        before, served = self.fallbacks().get("sdpa_kernel", 0), self.served()
        with sdpa_kernel(SDPBackend.MATH):
            got = F.scaled_dot_product_attention(q, k, v)
        self.assertEqual((self.fallbacks()["sdpa_kernel"], self.served()), (before + 1, served))
        flashtune.torch.restore()
        with sdpa_kernel(SDPBackend.MATH):
            self.assertTrue(torch.equal(got, F.scaled_dot_product_attention(q, k, v)))

    def test_restored(self):
        q, k, v = case()
        flashtune.torch.activate()
        self.assertTrue(flashtune.torch.active())
        flashtune.torch.restore()
        flashtune.torch.restore()
        self.assertFalse(flashtune.torch.active())
        self.arrives(F.scaled_dot_product_attention, q, k, v, times=0)
        for x in gradients(F.scaled_dot_product_attention, q, k, v):
            self.assertTrue(torch.isfinite(x).all())

    def test_registry_of_implementations(self):
        if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
            self.skipTest("this PyTorch has no registry; 2.11 has")
        self.assertEqual(torch.nn.attention.current_flash_attention_impl(), "FLASHTUNE")
        flashtune.torch.restore()
        self.assertIsNone(torch.nn.attention.current_flash_attention_impl())
        torch.nn.attention.activate_flash_attention_impl("FLASHTUNE")
        self.assertTrue(flashtune.torch.active())
        self.arrives(F.scaled_dot_product_attention, *case())
        torch.nn.attention.restore_flash_attention_impl()
        self.assertFalse(flashtune.torch.active())


if __name__ == "__main__":
    unittest.main()
