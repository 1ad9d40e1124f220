"""Arrays of NumPy on the CPU."""

import threading
import unittest

import numpy as np
from reference import attention, check, visible

import flashtune

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

DTYPES = [np.dtype("float32"), np.dtype("float16")] + ([np.dtype(ml_dtypes.bfloat16)] if ml_dtypes else [])


def random(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def bhsd(x):
    return x.swapaxes(1, 2)


def inputs(b, h, kv_h, q_len, kv_len, d, dtype="float32", dv=None):
    """q, k, v in flash-attention's layout."""
    return (
        random((b, q_len, h, d), dtype, 1),
        random((b, kv_len, kv_h, d), dtype, 2),
        random((b, kv_len, kv_h, dv or d), dtype, 3),
    )


class Results(unittest.TestCase):
    def holds(self, q, k, v, causal=False, window=(-1, -1), scale=None):
        out, lse = flashtune.flash_attn_func(q, k, v, scale, causal, window, return_lse=True)
        self.assertEqual((out.shape, out.dtype), ((*q.shape[:3], v.shape[3]), q.dtype))
        self.assertEqual(lse.shape, (q.shape[0], q.shape[2], q.shape[1]))
        seen = visible(q.shape[1], k.shape[1], causal, window)
        check(self, bhsd(out), lse, bhsd(q), bhsd(k), bhsd(v), seen, scale)
        return out

    def test_dtypes_head_dims_and_lengths(self):
        for dtype in DTYPES:
            for d, dv in [(32, 32), (72, 40), (256, 256)]:
                for q_len, kv_len in [(1, 1), (33, 33), (7, 130), (65, 19)]:
                    with self.subTest(dtype=dtype.name, d=d, dv=dv, q_len=q_len, kv_len=kv_len):
                        self.holds(*inputs(2, 2, 2, q_len, kv_len, d, dtype, dv), causal=True)

    def test_masks_groups_and_scales(self):
        q, k, v = inputs(1, 6, 2, 50, 70, 32)
        for causal in [False, True]:
            for window in [(-1, -1), (5, -1), (5, 3), (0, 0), (1000, 1000), (-1, 7), [12, 0], (10**30, -5)]:
                with self.subTest(causal=causal, window=window):
                    self.holds(q, k, v, causal, window)
        for scale in [0.0, 1.0, -0.3, np.float32(0.25)]:
            with self.subTest(scale=scale):
                self.holds(q, k, v, scale=scale)

    def test_a_query_that_sees_nothing_gives_zero_and_minus_infinity(self):
        q, k, v = inputs(1, 1, 1, 5, 2, 32)
        out, lse = flashtune.flash_attn_func(q, k, v, causal=True, return_lse=True)
        self.assertTrue((out[:, :3] == 0).all() and (lse[..., :3] == -np.inf).all() and np.isfinite(lse[..., 3:]).all())
        out, lse = flashtune.flash_attn_func(q, k[:, :0], v[:, :0], return_lse=True)
        self.assertTrue((out == 0).all() and (lse == -np.inf).all())

    def test_nothing_to_compute(self):
        q, k, v = inputs(2, 2, 2, 0, 9, 32)
        out, lse = flashtune.flash_attn_func(q, k, v, return_lse=True)
        self.assertEqual((out.shape, lse.shape), ((2, 0, 2, 32), (2, 2, 0)))

    def test_strides(self):
        packed = random((2, 20, 3, 4, 32))
        q, k, v = (packed[:, :, i] for i in range(3))
        out = self.holds(q, k, v, causal=True)
        again = flashtune.flash_attn_func(*(np.ascontiguousarray(x) for x in (q, k, v)), causal=True)
        np.testing.assert_array_equal(out, again)
        other = flashtune.scaled_dot_product_attention(bhsd(q), bhsd(k), bhsd(v), is_causal=True)
        np.testing.assert_array_equal(out, bhsd(other))
        # One key head for all, and every other row.
        self.holds(q[:, ::2], np.broadcast_to(k[:, :, :1], k.shape), v)

    def test_read_only_inputs_and_an_output_of_ones_own(self):
        q, k, v = inputs(1, 2, 2, 9, 9, 32)
        q.flags.writeable = False
        wide = np.full((1, 9, 4, 32), 7, np.float32)
        engine = flashtune.default_engine("cpu")
        out = engine.forward(q, k, v, causal=True, out=wide[:, :, ::2])
        np.testing.assert_array_equal(out, flashtune.flash_attn_func(q, k, v, causal=True))
        self.assertTrue((wide[:, :, 1::2] == 7).all(), "only the output was written")

    def test_causal_as_pytorch_has_it(self):
        for q_len, kv_len in [(20, 20), (20, 45), (45, 20), (1, 9), (9, 1)]:
            with self.subTest(q_len=q_len, kv_len=kv_len):
                q, k, v = (bhsd(x) for x in inputs(2, 4, 2, q_len, kv_len, 32))
                for causal in [False, True]:
                    out = flashtune.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
                    seen = visible(q_len, kv_len, causal, top_left=True)
                    np.testing.assert_allclose(out, attention(q, k, v, seen)[0], atol=2e-6)

    def test_threads_share_the_default_engine(self):
        cases = [inputs(1, 2, 1, n, n + 3, 32) for n in (1, 17, 40, 64)]
        alone = [flashtune.flash_attn_func(*c, causal=True) for c in cases]
        failures = []

        def work(start):
            try:
                for n in range(40):
                    i = (start + n) % len(cases)
                    np.testing.assert_array_equal(flashtune.flash_attn_func(*cases[i], causal=True), alone[i])
                    with self.assertRaises(flashtune.InvalidTensor):
                        flashtune.flash_attn_func(*cases[i][:2], cases[i - 1][2])
                    self.assertIn("causal", flashtune.explain())
            except BaseException as e:  # noqa: BLE001 - told by the main thread
                failures.append(e)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failures, [])


class Programs(unittest.TestCase):
    """Score programs against attention in fp64 with the same mask and changed scores."""

    def setUp(self):
        shape = (2, 4, 61, 32)
        self.q, self.k, self.v = (random(shape, seed=n) for n in (1, 2, 3))
        self.i, self.j = np.arange(61)[:, None], np.arange(61)[None, :]

    def scores(self):
        return self.q.astype(float) @ self.k.astype(float).swapaxes(-1, -2) / np.sqrt(32)

    def holds(self, scores, seen, logit=None, **program):
        out, lse = flashtune.attention(self.q, self.k, self.v, return_lse=True, **program)
        scores = np.where(np.broadcast_to(seen, scores.shape), scores, -np.inf)
        if logit is not None:
            scores = np.concatenate([scores, np.broadcast_to(logit, (*scores.shape[:3], 1))], -1)
        top = scores.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse, (np.log(total) + top)[..., 0], atol=2e-5)
        weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
        np.testing.assert_allclose(out, weights[..., : self.k.shape[2]] @ self.v.astype(float), atol=3e-6)

    def test_masks(self):
        i, j = self.i, self.j
        doc = np.sort(np.random.default_rng(4).integers(0, 5, (2, 61)), -1).astype(np.int32)
        tensors = {"doc_q": doc, "doc_kv": doc}
        self.holds(self.scores(), (j <= i) & (i - j < 20), mask="kv_idx <= q_idx and q_idx - kv_idx < 20")
        same = doc[:, None, :, None] == doc[:, None, None, :]
        self.holds(self.scores(), same, mask="document", tensors=tensors)
        self.holds(self.scores(), same & (j <= i), mask="document_causal", tensors=tensors)
        visible = np.random.default_rng(5).random((2, 1, 61, 61)) < 0.1
        self.holds(self.scores(), visible, mask="seen[b, h, q, kv]", tensors={"seen": visible})
        step = np.int64(3)
        self.holds(self.scores(), (i - j) % 3 == 0, mask="(q - kv) % step == 0", tensors={"step": step})

    def test_scores_and_sinks(self):
        i, j, scores = self.i, self.j, self.scores()
        slope = np.array([0.5, 0.25, 0.125, 0.0], np.float32)
        sinks = np.array([0.0, 3.0, -np.inf, -2.0], np.float32)
        bias = random((4, 61, 122), np.float16, 6)[:, :, ::2]
        alibi = scores + slope[None, :, None, None] * (j - i)
        self.holds(alibi, True, score="score + slope[h] * (kv - q)", tensors={"slope": slope})
        self.holds(scores + bias.astype(float), True, score="score + bias[h, q, kv]", tensors={"bias": bias})
        cap = {"score": "soft_cap", "tensors": {"cap": 2}}
        self.holds(2 * np.tanh(scores / 2), True, **cap)
        # Outside of the range that caps usually have.
        self.holds(75 * np.tanh(scores / 75), True, score="soft_cap", tensors={"cap": 75.0})
        self.holds(scores, j < i, sinks[None, :, None, None], mask="kv < q", sink="s[h]", tensors={"s": sinks})

    def test_peers_arguments(self):
        i, j, scores = self.i, self.j, self.scores()
        bshd = [bhsd(x) for x in (self.q, self.k, self.v)]
        slopes = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)
        out = flashtune.flash_attn_func(*bshd, causal=True, softcap=1.5, alibi_slopes=slopes)
        changed = 1.5 * np.tanh(scores / 1.5) - slopes[:, :, None, None] * abs(i - j)
        tensors = {"x": changed.astype(np.float32)}
        want = flashtune.attention(self.q, self.k, self.v, score="x[b, h, q, kv]", mask="kv <= q", tensors=tensors)
        np.testing.assert_allclose(bhsd(out), want, atol=1e-5)
        # A cap alone is the built-in, so that the kernel is the one which `tune --model` tunes, whatever the number is.
        kernels = set()
        for cap in (1.5, 30.0):
            flashtune.flash_attn_func(*bshd, softcap=cap)
            kernels.add(flashtune.explain(as_dict=True)["kernel"])
            flashtune.attention(self.q, self.k, self.v, score="soft_cap", tensors={"cap": cap})
            kernels.add(flashtune.explain(as_dict=True)["kernel"])
        self.assertEqual(len(kernels), 1, kernels)
        seen = np.random.default_rng(7).random((61, 61)) < 0.3
        sdpa = flashtune.scaled_dot_product_attention
        out = sdpa(self.q, self.k, self.v, attn_mask=seen)
        np.testing.assert_allclose(out, attention(self.q, self.k, self.v, seen)[0], atol=3e-6)
        added = np.where(seen, 0, -np.inf).astype(np.float32)[None]
        np.testing.assert_allclose(sdpa(self.q, self.k, self.v, attn_mask=added), out, atol=3e-6)

    def test_chunks(self):
        q, k, v = (random((2, rows, 2, 32), seed=seed) for seed, rows in enumerate((50, 70, 70)))
        for chunk in (1, 16, 33, 100):
            for causal in (False, True):
                seen = visible(50, 70, causal, chunk=chunk)
                out, lse = flashtune.flash_attn_func(
                    q, k, v, causal=causal, attention_chunk=chunk, return_lse=True, num_splits=3, pack_gqa=True
                )
                check(self, bhsd(out), lse, *map(bhsd, (q, k, v)), seen)
        refused = {"attention_chunk": 2.5, "num_splits": -1, "sm_margin": 8, "qv": q, "return_attn_probs": True}
        for name, value in refused.items():
            with self.assertRaisesRegex((flashtune.InvalidArgument, flashtune.Unsupported), name):
                flashtune.flash_attn_func(q, k, v, **{name: value})
        with self.assertRaisesRegex(TypeError, "no_such"):
            flashtune.flash_attn_func(q, k, v, no_such=1)

    def test_what_does_not_fit_is_refused_by_name(self):
        argument, slope = flashtune.InvalidArgument, np.ones(4, np.float32)
        score = "score + slope[h] * (kv - q)"
        for error, word, program in [
            (argument, "slope", {"score": score}),
            (argument, "axis 0 of the tensor `slope`", {"score": score, "tensors": {"slope": slope[:3]}}),
            (argument, "is of f32", {"mask": "document", "tensors": {"doc_q": slope[None], "doc_kv": slope[None]}}),
            (argument, "did you mean", {"mask": "kv <= qq"}),
            (argument, "mask is a bool", {"mask": "kv - q"}),
            (argument, "pass the text", {"mask": lambda b, h, q, kv: kv <= q}),
            (argument, "pass a dict", {"score": score, "tensors": [slope]}),
            (argument, "`q` is given a value", {"mask": "kv < q", "tensors": {"q": 3}}),
            (argument, "64 bits", {"mask": "kv < n", "tensors": {"n": 1 << 70}}),
            (flashtune.Unsupported, "float64", {"score": score, "tensors": {"slope": slope.astype(float)}}),
            (flashtune.InvalidTensor, "list", {"score": score, "tensors": {"slope": [1.0]}}),
            (flashtune.InvalidTensor, "1 to 4 axes", {"score": score, "tensors": {"slope": np.ones((1,) * 5, "f4")}}),
        ]:
            with self.subTest(word), self.assertRaisesRegex(error, word):
                flashtune.attention(self.q, self.k, self.v, **program)


class BadInput(unittest.TestCase):
    def refused(self, error, word, q, k, v, function=flashtune.flash_attn_func, **more):
        with self.assertRaisesRegex(error, word) as caught:
            function(q, k, v, **more)
        self.assertIsInstance(caught.exception, flashtune.Error)
        self.assertTrue(caught.exception.status.startswith("FLASHTUNE_STATUS_"))

    def test_tensors(self):
        q, k, v = inputs(1, 2, 2, 8, 8, 32)
        tensor, unsupported = flashtune.InvalidTensor, flashtune.Unsupported
        swapped = q.astype(q.dtype.newbyteorder())
        masked = np.ma.masked_array(q)
        odd = np.zeros((1, 8, 2, 32), np.dtype([("x", "f4"), ("y", "u1")]))["x"]
        cases = [
            (tensor, "tensor k: dtype is f16", (q, k.astype("float16"), v)),
            (unsupported, "q is float64", (q.astype("float64"), k, v)),
            (unsupported, "v is int32", (q, k, v.astype("int32"))),
            (unsupported, "q is >f4|q is <f4", (swapped, k, v)),
            (tensor, "q has the shape", (q[0], k, v)),
            (tensor, "v has the shape", (q, k, v[..., None])),
            (tensor, "tensor v: shape", (q, k, v[:, :5])),
            (tensor, "tensor k: shape", (q, np.concatenate([k, k]), v)),
            (tensor, "stride of the last dim", (q[..., ::2], k[..., :16], v)),
            (tensor, "row stride is -", (q[:, ::-1], k, v)),
            (tensor, "no whole elements", (odd, k, v)),
            (tensor, "MaskedArray", (masked, k, v)),
            (tensor, "MaskedArray", (q, masked, v)),
            (tensor, "list", ([[1.0]], k, v)),
            (tensor, "NoneType", (q, k, None)),
            (unsupported, "split the heads", (np.tile(q, 9), np.tile(k, 9), v)),
            (unsupported, "multiple", (q[:, :, [0, 1, 1]], k, v)),
        ]
        for error, word, (q_, k_, v_) in cases:
            with self.subTest(word):
                self.refused(error, word, q_, k_, v_)

    def test_arguments(self):
        q, k, v = inputs(1, 2, 2, 8, 8, 32)
        unsupported, argument = flashtune.Unsupported, flashtune.InvalidArgument
        for cap in [-50.0, float("nan"), float("inf"), 1e300, "a", np.ones(2)]:
            self.refused(argument, "softcap", q, k, v, softcap=cap)
        for slopes in [[1.0, 2.0], 0.5, np.ones((1, 1, 2), np.float32)]:
            self.refused(flashtune.InvalidTensor, "alibi_slopes", q, k, v, alibi_slopes=slopes)
        for window in [3, (1,), (1, 2, 3), "ab", (None, 1), None, (2.7, 0), (float("inf"), 0)]:
            self.refused(argument, "window_size", q, k, v, window_size=window)
        for scale in ["1", 1e300, (1,)]:
            self.refused(argument, "scale", q, k, v, softmax_scale=scale)
        self.refused(unsupported, "scale", q, k, v, softmax_scale=float("nan"))
        sdpa = flashtune.scaled_dot_product_attention
        self.refused(argument, "attn_mask", q, k, v, sdpa, attn_mask=np.ones((8, 8), bool), is_causal=True)
        self.refused(argument, "attn_mask", q, k, v, sdpa, attn_mask=np.ones((8, 9), bool))
        # Added to the scores, as floats are, zeros and ones would be no mask.
        self.refused(unsupported, "attn_mask is int32", q, k, v, sdpa, attn_mask=np.ones((8, 8), np.int32))
        self.refused(flashtune.InvalidTensor, "attn_mask is a list", q, k, v, sdpa, attn_mask=[[True]])
        self.refused(argument, "dropout_p is 1.0", q, k, v, sdpa, dropout_p=1.0)
        self.refused(flashtune.InvalidTensor, "enable_gqa", q, k[:, :4], v[:, :4], sdpa)
        self.refused(flashtune.InvalidTensor, "NoneType", q, None, v, sdpa)
        forward = flashtune.default_engine("cpu").forward
        self.refused(argument, "layout", q, k, v, forward, layout="sbhd")
        self.refused(flashtune.InvalidTensor, "tensor o: shape", q, k, v, forward, out=q[:, :3].copy())
        self.refused(flashtune.InvalidTensor, "tensor o: dtype", q, k, v, forward, out=q.astype("float16"))
        self.refused(flashtune.InvalidTensor, "out is a list", q, k, v, forward, out=[])
        for out in (q, k, v):
            self.refused(flashtune.InvalidTensor, "out shares memory", q, k, v, forward, out=out)
        rows = random((1, 9, 2, 32))
        self.refused(flashtune.InvalidTensor, "out shares memory", rows[:, :8], k, v, forward, out=rows[:, 1:])
        # Interleaved heads share nothing.
        packed = random((1, 8, 4, 32))
        forward(packed[:, :, ::2], k, v, out=packed[:, :, 1::2])
        if ml_dtypes is not None:
            # Of one buffer, e4m3 first: an element of it is one byte.
            memory, n = np.zeros(6 * q.size, np.uint8), q.size
            eight = [memory[i * n : (i + 1) * n].view(ml_dtypes.float8_e4m3fn).reshape(q.shape) for i in range(3)]
            behind = memory[4 * n :].view(ml_dtypes.bfloat16).reshape(q.shape)
            memory[:] = 0xFF
            memory[: 3 * n] = 0
            forward(*eight, out=memory[3 * n : 5 * n].view(ml_dtypes.bfloat16).reshape(q.shape))
            self.assertTrue((memory[: 5 * n] == 0).all() and (memory[5 * n :] == 0xFF).all())
            overlapping = memory[2 * n : 4 * n].view(ml_dtypes.bfloat16).reshape(q.shape)
            self.refused(flashtune.InvalidTensor, "out shares memory with v", *eight, forward, out=overlapping)
            self.assertEqual(forward(*eight, out=behind).dtype, behind.dtype)
        frozen = np.broadcast_to(np.zeros((1, 1, 1, 32), np.float32), q.shape)
        self.refused(flashtune.InvalidTensor, "written", q, k, v, forward, out=frozen)
        overlapping = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), q.shape, (0, 0, 128, 4))
        self.refused(flashtune.InvalidTensor, "overlap", q, k, v, forward, out=overlapping)


if __name__ == "__main__":
    unittest.main()
