"""Attention weights, on the CPU through NumPy."""

import unittest

import numpy as np
from reference import visible

import flashtune

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

DTYPES = [np.dtype("float32"), np.dtype("float16")] + ([np.dtype(ml_dtypes.bfloat16)] if ml_dtypes else [])


def random(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def expected(q, k, seen, bias=0.0, sink=None):
    """Weights in fp64; a sink is a logit of each head."""
    q, k = q.astype(np.float64), np.repeat(k.astype(np.float64), q.shape[1] // k.shape[1], 1)
    scores = np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + bias, -np.inf)
    grown = np.exp(scores)
    total = grown.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink)[:, None, None])
    return grown / np.where(total > 0, total, 1)


class Weights(unittest.TestCase):
    def holds(self, got, want):
        self.assertEqual((got.dtype, got.shape), (np.float32, want.shape))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)

    def test_weights_of_every_mask_and_dtype(self):
        for dtype in DTYPES:
            for q_len, kv_len, d in [(37, 70, 32), (70, 37, 59), (1, 300, 16), (129, 5, 7)]:
                q, k = random((2, 4, q_len, d), dtype, 1), random((2, 2, kv_len, d), dtype, 2)
                v = random((2, 2, kv_len, 24), dtype, 3)
                with self.subTest(dtype=dtype.name, q_len=q_len, kv_len=kv_len, d=d):
                    with flashtune.Engine("cpu") as engine:
                        for causal, window in [(False, (-1, -1)), (True, (-1, -1)), (False, (9, 2))]:
                            out, lse, weights = engine.forward(
                                q, k, v, causal=causal, window=window, layout="bhsd", return_lse=True,
                                return_weights=True,
                            )
                            self.holds(weights, expected(q, k, visible(q_len, kv_len, causal, window)))
                            plain = engine.forward(
                                q, k, v, causal=causal, window=window, layout="bhsd", return_lse=True
                            )
                            self.assertEqual(out.tobytes(), plain[0].tobytes())
                            self.assertEqual(lse.tobytes(), plain[1].tobytes())
                    out, weights = flashtune.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=True, return_weights=True
                    )
                    self.holds(weights, expected(q, k, visible(q_len, kv_len, True, top_left=True)))

    def test_weights_of_programs_sinks_and_biases(self):
        q, k, v = (random((1, 2, 45, 32), "float32", n) for n in (1, 2, 3))
        sinks, bias = np.array([0.5, 2.0], np.float32), random((45, 45), "float32", 4)
        at = np.arange(45)
        chunks = at[:, None] // 7 >= at[None, :] // 7
        out, weights = flashtune.attention(
            q, k, v, mask="kv // 7 <= q // 7", score="score + bias[q, kv]", sink="sinks[h]",
            tensors={"bias": bias, "sinks": sinks}, return_weights=True,
        )  # fmt: skip
        self.holds(weights, expected(q, k, chunks, bias, sinks.astype(np.float64)))
        np.testing.assert_allclose(out, weights @ v, rtol=0, atol=1e-5)
        # Rows that see nothing.
        _, weights = flashtune.attention(q, k, v, mask="kv < q - 5", return_weights=True)
        self.holds(weights, expected(q, k, at[None, :] < at[:, None] - 5))
        self.assertFalse(weights[..., :6, :].any())


if __name__ == "__main__":
    unittest.main()
