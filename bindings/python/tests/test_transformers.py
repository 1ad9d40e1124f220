"""Tiny models of Transformers with random weights, ``ftune`` against ``eager``."""

import unittest

from torch_device import DEVICE, MISSING, torch

import flashtune

try:
    import transformers
except ImportError:
    transformers = None

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Large enough that the scores, and so the masks, matter.
    "initializer_range": 0.3,
}
# A window shorter than the prompt; Gemma 2 caps scores, GPT-OSS has sinks.
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "Gemma3Text": {
        "sliding_window": 5,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen3": {},
    "Phi3": {},
    "GptOss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@unittest.skipIf(torch is None, MISSING)
@unittest.skipIf(transformers is None, "Transformers is not installed")
class Models(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import flashtune.transformers  # noqa: F401 - registers "ftune"

        transformers.logging.set_verbosity_error()

    def model(self, name, **more):
        torch.manual_seed(3)
        config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name], **more)
        config._attn_implementation = "eager"
        return transformers.AutoModelForCausalLM.from_config(config).eval().to(DEVICE)

    def inputs(self):
        ids = torch.randint(3, 99, (2, 11), generator=torch.Generator().manual_seed(5)).to(DEVICE)
        padding = torch.ones_like(ids)
        padding[0, :4] = 0
        return ids, padding

    def both(self, model, call):
        """What a call gives with ``eager`` and with ``ftune``, which must have computed, and made no mask tensor."""
        model.set_attn_implementation("eager")
        want = call()
        model.set_attn_implementation("ftune")
        calls = lambda: sum(flashtune.default_engine(DEVICE).counters()["calls"].values())
        before = calls()
        with self.assertNoLogs("flashtune.transformers"):
            got = call()
        self.assertGreater(calls(), before)
        return want, got

    def near(self, pair, tolerance=2e-5):
        want, got = pair
        largest = want.abs().max().item()
        self.assertLess((want - got).abs().max().item(), tolerance * max(largest, 1))
        return want

    def test_prefill_padding_and_packs(self):
        ids, padding = self.inputs()
        # Two sequences in a row, as Transformers finds them by their positions.
        packed = torch.cat([torch.arange(6), torch.arange(5)])[None].expand(2, -1).to(DEVICE)
        for name in MODELS:
            with self.subTest(model=name), torch.no_grad():
                model = self.model(name)
                plain = self.near(self.both(model, lambda: model(ids).logits))
                seen = padding.bool()
                padded = self.near(self.both(model, lambda: model(ids, attention_mask=padding).logits[seen]))
                apart = self.near(self.both(model, lambda: model(ids, position_ids=packed, use_cache=False).logits))
                # Each mask changes the answer by far more than it may be off.
                self.assertGreater((plain[seen] - padded).abs().max().item(), 1e-2)
                self.assertGreater((plain - apart).abs().max().item(), 1e-2)

    def test_generation_over_caches(self):
        ids, padding = self.inputs()
        for name in MODELS:
            model = self.model(name)
            for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
                with self.subTest(model=name, **more):
                    call = lambda: model.generate(
                        ids, attention_mask=padding, max_new_tokens=8, do_sample=False, **more
                    )
                    want, got = self.both(model, call)
                    self.assertEqual(got.tolist(), want.tolist())
                    self.assertEqual(got.shape[1], ids.shape[1] + 8)

    def test_gradients(self):
        ids, padding = self.inputs()
        labels = ids.clone()
        # Neither what is padding nor what is told from it: queries that see no key give 0 here, and a mean in eager.
        labels[0, :5] = -100
        for name in ("Llama", "Gemma2", "GptOss"):
            with self.subTest(model=name):
                model = self.model(name).train()

                def call():
                    model.zero_grad()
                    model(ids, attention_mask=padding, labels=labels).loss.backward()
                    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

                self.near(self.both(model, call), 1e-4)

    def test_what_is_refused(self):
        ids, _ = self.inputs()
        model = self.model("Llama", attention_dropout=0.1).train()
        model.set_attn_implementation("ftune")
        self.assertTrue(torch.isfinite(model(ids).logits).all())
        self.assertIn("dropout", flashtune.explain())
        with self.assertRaisesRegex(flashtune.Unsupported, "weights"):
            model.eval()(ids, output_attentions=True)

    def test_masks_of_their_own(self):
        from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function, or_masks

        made = flashtune.transformers.ftune_mask
        left = torch.tensor([0, 3], device=DEVICE)
        q_len, kv_len = 9, 12
        q = torch.arange(q_len, device=DEVICE)[:, None] + kv_len - q_len
        kv = torch.arange(kv_len, device=DEVICE)
        odd = lambda b, h, q, kv: torch.where(kv % 2 == 1, q >= 0, q < 0)
        x = torch.randn(2, 2, kv_len, 16, device=DEVICE)
        at = left[:, None, None]
        chunks = ((kv - at) // 4 == (q - at) // 4) & (kv <= q)
        cases = [
            (chunked_causal_mask_function(4, left), chunks[:, None], True),
            (or_masks(causal_mask_function, lambda b, h, q, kv: kv < 5), ((kv <= q) | (kv < 5))[None, None], True),
            (odd, (kv % 2 == 1).expand(1, 1, q_len, -1), False),
        ]
        for function, want, traced in cases:
            with self.subTest(function=function.__qualname__):
                mask = made(2, q_len, kv_len, kv_len - q_len, 0, function, device=DEVICE)
                self.assertEqual("m" not in mask.tensors, traced, mask)
                out = flashtune.attention(x[:, :, :q_len], x, x, mask=mask.text, tensors=mask.tensors)
                same = torch.nn.functional.scaled_dot_product_attention(x[:, :, :q_len], x, x, attn_mask=want)
                # Queries that see no key give 0, here as in PyTorch.
                torch.testing.assert_close(out, same.nan_to_num(), atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    unittest.main()
