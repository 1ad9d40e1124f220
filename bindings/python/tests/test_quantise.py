"""e4m3 operands with their scales: against NumPy's own arithmetic, and through the attention that takes them."""

import unittest

import flashtune
import numpy as np

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None


def rotated(x, cos, sin, positions, interleaved):
    """``[batch, rows, heads, dim]`` with rows at positions ``[rows]``."""
    x = x.astype("float64")
    half = cos.shape[1]
    c, s = cos[positions][None, :, None], sin[positions][None, :, None]
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    y = x.copy()
    y[..., a], y[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return y


def hadamard(n):
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def attention(q, k, v, causal=False, cap=None, slopes=None):
    """O and the log-sum-exp in float64, of ``[batch, rows, heads, dim]``."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(t, group, 2) for t in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[3])
    if cap is not None:
        s = cap * np.tanh(s / cap)
    if slopes is not None:
        i, j = np.ogrid[: q.shape[1], : k.shape[1]]
        s = s - slopes[:, None, None] * np.abs(i + k.shape[1] - q.shape[1] - j)
    if causal:
        i, j = np.ogrid[: q.shape[1], : k.shape[1]]
        s = np.where(j <= i + k.shape[1] - q.shape[1], s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    lse = (top + np.log(p.sum(-1, keepdims=True)))[..., 0]
    return np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v), lse


def repeated(scale, x, rows, name):
    """The scale of each element of ``[batch, rows, heads, dim]``, by as many axes as scales have."""
    heads = x.shape[2]
    scale = scale.astype("float64")
    if scale.ndim == 2:
        return np.repeat(scale, heads // scale.shape[1], 1)[:, None, :, None] + np.zeros(x.shape)
    if name == "v":
        return scale[:, None] + np.zeros(x.shape)
    return np.repeat(scale, rows, 2)[:, :, : x.shape[1]].transpose(0, 2, 1)[..., None] + np.zeros(x.shape)


@unittest.skipUnless(ml_dtypes, "needs ml_dtypes for float8")
class Quantise(unittest.TestCase):
    def setUp(self):
        rng = np.random.default_rng(7)
        q, k, v = (rng.standard_normal((2, n, h, 64)).astype("float32") for n, h in ((33, 4), (70, 2), (70, 2)))
        # Two channels of K that all keys share, as models have them.
        k[..., 3] += 25.0
        k[..., 40] -= 14.0
        v += 0.5
        self.q, self.k, self.v = q, k, v

    def check(self, name, x, got, scale, whole=False):
        """Codes are the nearest to elements over their scale, which makes the largest 448."""
        b, _, h, _ = x.shape
        heads = scale.shape[1]
        self.assertEqual((got.dtype, scale.dtype), (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype("float32")))
        grouped = np.abs(x).reshape(b, x.shape[1], heads, h // heads, -1)
        largest = grouped.max() * np.ones((b, heads)) if whole else grouped.max((1, 3, 4))
        np.testing.assert_allclose(scale, largest / 448, rtol=1e-5, err_msg=name)
        each = np.repeat(scale.astype("float64"), h // heads, 1)[:, None, :, None]
        error = np.abs(got.astype("float64") * each - x)
        # Half of the last of 4 bits, or of the least number.
        bound = np.maximum(np.abs(x) / 16, each * 2.0**-10) * (1 + 1e-4) + 1e-5 * largest.max()
        self.assertTrue((error <= bound).all(), (name, (error / bound).max()))

    def test_codes_are_the_nearest_to_elements_over_their_scales(self):
        for dtype in ("float32", "float16", ml_dtypes.bfloat16):
            for scales in ("head", "tensor"):
                given = [t.astype(dtype) for t in (self.q, self.k, self.v)]
                r = flashtune.quantise(*given, scales=scales)
                self.assertIsNone(r.k_mean)
                for name, x, got in zip("qkv", given, r[:3]):
                    self.check(name, x.astype("float64"), got, getattr(r, f"{name}_descale"), scales == "tensor")
        alone = flashtune.quantise(self.q, kv_heads=2)
        self.assertEqual([alone.k, alone.v, alone.k_descale], [None] * 3)
        r = flashtune.quantise(self.q, self.k, self.v)
        self.assertEqual(alone.q.tobytes(), r.q.tobytes())

    def test_rows_blocks_and_channels_have_scales_of_their_own(self):
        # A row, a head's channel, that others would lose digits for.
        self.k[1, 20, 0] *= 40
        self.v[..., 1, 9] *= 30
        for kinds, rows, shapes in (
            (("token", "token", "channel"), 1, ((2, 4, 33), (2, 2, 70), (2, 2, 64))),
            (("block", "block", "head"), 16, ((2, 4, 3), (2, 2, 5), (2, 2))),
            (("head", "block", "tensor"), 128, ((2, 2), (2, 2, 1), (2, 2))),
        ):
            r = flashtune.quantise(self.q, self.k, self.v, scales=kinds, block_rows=rows if rows > 1 else 128)
            self.assertEqual(r.descale_rows, rows)
            for name, x, got, scale, kind, shape in zip("qkv", (self.q, self.k, self.v), r, r[3:6], kinds, shapes):
                self.assertEqual((scale.shape, scale.dtype), (shape, np.dtype("float32")), (name, kind))
                each = repeated(scale, x, rows, name)
                error = np.abs(got.astype("float64") * each - x)
                bound = np.maximum(np.abs(x) / 16, each * 2.0**-10) * (1 + 1e-4)
                self.assertTrue((error <= bound).all(), (name, kind, (error / bound).max()))
                # The largest of what shares a scale becomes 448.
                codes = np.abs(got.astype("float64"))
                if kind == "token":
                    self.assertTrue((codes.max(-1) == 448).all(), name)
                elif kind == "channel":
                    self.assertTrue((codes.max(1) == 448).all(), name)
                elif kind == "block":
                    ends = range(0, x.shape[1], rows)
                    self.assertTrue(all((codes[:, i : i + rows].max((1, 3)) == 448).all() for i in ends), name)

    def test_finer_scales_keep_what_one_row_or_channel_would_take(self):
        self.k[:, 20] *= 60
        self.v[..., 9] *= 200
        given = [t.astype(ml_dtypes.bfloat16) for t in (self.q, self.k, self.v)]
        wide = [t.astype("float64") for t in given]
        for causal in (False, True):
            want, _ = attention(*wide, causal)
            errors = {}
            for kinds in ("head", ("token", "token", "channel"), ("block", "block", "channel")):
                r = flashtune.quantise(*given, scales=kinds, block_rows=8)
                out, lse = flashtune.flash_attn_func(*r[:3], causal=causal, return_lse=True, **r.descales)
                meant = [
                    t.astype("float64") * repeated(scale, t, r.descale_rows, name)
                    for name, t, scale in zip("qkv", r, r[3:6])
                ]
                exact, exact_lse = attention(*meant, causal)
                np.testing.assert_allclose(out.astype("float64"), exact, rtol=0.01, atol=0.01)
                np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-3)
                columns = np.arange(64) != 9
                errors[kinds] = np.abs(out.astype("float64") - want)[..., columns].max()
            self.assertLess(errors["token", "token", "channel"], 0.9 * errors["head"], errors)

    def test_rows_of_any_strides_and_both_orders_of_axes(self):
        r = flashtune.quantise(self.q, self.k, self.v, subtract_mean=True, hadamard=True)
        turned = [np.ascontiguousarray(t.transpose(0, 2, 1, 3)) for t in (self.q, self.k, self.v)]
        views = [np.concatenate([t, t], 3)[..., :64] for t in turned]
        other = flashtune.quantise(*views, subtract_mean=True, hadamard=True, layout="bhsd")
        for one, two in zip(r[:3], other[:3]):
            self.assertEqual(one.tobytes(), two.transpose(0, 2, 1, 3).tobytes())
        for one, two in zip(r[3:], other[3:]):
            np.testing.assert_array_equal(one, two)

    def test_mean_matrix_and_rotation_are_what_they_are_said_to_be(self):
        rng = np.random.default_rng(1)
        cos, sin = (rng.uniform(-1, 1, (200, 24)).astype("float32") for _ in range(2))
        places = rng.integers(0, 200, 70).astype("int32")
        for interleaved in (False, True):
            r = flashtune.quantise(
                self.q, self.k, self.v, subtract_mean=True, hadamard=True, rotary_cos=cos, rotary_sin=sin,
                rotary_interleaved=interleaved, q_positions=11, k_positions=places,
            )  # fmt: skip
            q = rotated(self.q, cos, sin, np.arange(33) + 11, interleaved)
            k = rotated(self.k, cos, sin, places, interleaved)
            mean = k.mean(1)
            np.testing.assert_allclose(r.k_mean, mean, atol=1e-5)
            h = hadamard(64)
            self.check("q", q @ h, r.q, r.q_descale)
            self.check("k", (k - mean[:, None]) @ h, r.k, r.k_descale)
            self.check("v", self.v.astype("float64"), r.v, r.v_descale)

    def test_attention_takes_what_comes_out(self):
        given = [t.astype(ml_dtypes.bfloat16) for t in (self.q, self.k, self.v)]
        wide = [t.astype("float64") for t in given]
        for causal in (False, True):
            want, want_lse = attention(*wide, causal)
            errors = {}
            for name in ("plain", "mean", "hadamard", "both"):
                r = flashtune.quantise(
                    *given, subtract_mean=name in ("mean", "both"), hadamard=name in ("hadamard", "both")
                )
                out, lse = flashtune.flash_attn_func(*r[:3], causal=causal, return_lse=True, **r.descales)
                self.assertEqual(out.dtype, ml_dtypes.bfloat16)
                # What the codes mean is what the attention is of.
                meant = []
                for t, scale in zip(r[:3], r[3:6]):
                    each = np.repeat(scale.astype("float64"), t.shape[2] // scale.shape[1], 1)[:, None, :, None]
                    meant.append(t.astype("float64") * each)
                exact, exact_lse = attention(*meant, causal)
                np.testing.assert_allclose(out.astype("float64"), exact, rtol=0.01, atol=0.01)
                np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-4)
                if r.k_mean is not None:
                    mean = np.repeat(r.k_mean.astype("float64"), 2, 1)
                    lse = lse + np.einsum("bihd,bhd->bhi", wide[0], mean) / 8.0
                errors[name] = np.sqrt(((out.astype("float64") - want) ** 2).mean() / (want**2).mean())
                self.assertLess(np.abs(lse - want_lse).max(), {"mean": 0.2, "both": 0.2}.get(name, 3.0), name)
            # Channels that all keys share cost digits unless the mean is taken away.
            self.assertLess(max(errors["mean"], errors["both"]), 0.08, errors)
            self.assertLess(1.5 * errors["mean"], errors["plain"], errors)

    def test_the_output_is_of_e4m3_where_it_has_a_scale(self):
        r = flashtune.quantise(*(t.astype(ml_dtypes.bfloat16) for t in (self.q, self.k, self.v)))
        engine = flashtune.Engine("cpu")
        wide = np.empty(self.q.shape, "float32")
        engine.forward(*r[:3], out=wide, **r.descales)
        for factor in (1.0, 64.0, 4096.0):
            scale = np.array([factor], "float32")
            out, lse = flashtune.flash_attn_func(*r[:3], out_scale=scale, return_lse=True, **r.descales)
            self.assertEqual((out.dtype, lse.dtype), (ml_dtypes.float8_e4m3fn, np.float32))
            want = np.clip(wide * factor, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            # Where a product lies between two codes, one rounding of it may differ from two.
            self.assertLess((want.view("uint8") != out.view("uint8")).mean(), 1e-3, factor)
            into = np.empty(self.q.shape, ml_dtypes.float8_e4m3fn)
            for given in (scale, scale[0:1].reshape(1, 1, 1, 1)):
                into.view("uint8")[:] = 0x7F
                engine.forward(*r[:3], out=into, out_scale=given, **r.descales)
                self.assertTrue((into.view("uint8") == out.view("uint8")).all(), factor)
        self.assertTrue((np.abs(out.astype("float32")) == 448).any())
        into.view("uint8")[:] = 0x7F
        engine.forward(*r[:3], out=into, **r.descales)
        want = wide.astype(ml_dtypes.float8_e4m3fn)
        self.assertLess((want.view("uint8") != into.view("uint8")).mean(), 1e-3)

    def test_caps_slopes_and_programs_are_those_of_what_codes_mean(self):
        r = flashtune.quantise(self.q, self.k, self.v, scales=("token", "token", "channel"), subtract_mean=True)
        meant = []
        for name, t, scale in zip("qkv", r[:3], r[3:6]):
            meant.append(t.astype("float64") * repeated(scale, t, 1, name))
        slopes = np.array([0.5, 0.25, 0.125, 0.0625], "float32")

        def check(found, want):
            np.testing.assert_allclose(found[0].astype("float64"), want[0], rtol=0.01, atol=0.01)
            np.testing.assert_allclose(found[1], want[1], rtol=1e-5, atol=1e-4)

        named = dict(return_lse=True, **r.descales)
        check(flashtune.flash_attn_func(*r[:3], softcap=3.0, **named), attention(*meant, cap=3.0))
        check(
            flashtune.flash_attn_func(*r[:3], causal=True, alibi_slopes=slopes, **named),
            attention(*meant, True, slopes=slopes),
        )
        check(
            flashtune.flash_attn_func(*r[:3], softcap=3.0, alibi_slopes=slopes, **named),
            attention(*meant, cap=3.0, slopes=slopes),
        )

    def test_what_is_no_number_and_what_is_nothing(self):
        k = self.k.copy()
        k[0, :, 0] = 0.0
        k[1, 4, 1, 5], k[1, 6, 1, 7], k[1, 6, 1, 8] = np.nan, np.inf, -np.inf
        r = flashtune.quantise(self.q, k, self.v)
        self.assertEqual(r.k_descale[0, 0], 1.0)
        self.assertFalse(r.k[0, :, 0].astype("float32").any())
        codes = r.k.astype("float32")
        self.assertTrue(np.isnan(codes[1, 4, 1, 5]))
        self.assertEqual((codes[1, 6, 1, 7], codes[1, 6, 1, 8]), (448.0, -448.0))
        self.assertEqual(np.isnan(codes).sum(), 1)
        finite = np.where(np.isfinite(k), np.abs(k), 0).max((1, 3))
        np.testing.assert_allclose(r.k_descale[1], finite[1] / 448, rtol=1e-6)

    def test_errors_name_what_to_do(self):
        def refuses(words, *args, **named):
            with self.assertRaises(flashtune.Error) as caught:
                flashtune.quantise(*args, **named)
            self.assertIn(words, str(caught.exception))

        refuses("pass what is to be quantised")
        refuses("kv_heads is None", self.q)
        refuses("a tuple of one for each", self.q, self.k, self.v, scales="row")
        refuses("a tuple of one for each", self.q, self.k, self.v, scales=("head", "head"))
        refuses("'channel')", self.q, self.k, self.v, scales="token")
        refuses("scales of k by channel", self.q, self.k, self.v, scales=("head", "channel", "head"))
        refuses("one kind for both", self.q, self.k, self.v, scales=("token", "block", "head"))
        refuses("power of two", self.q, self.k, self.v, scales=("block", "block", "head"), block_rows=96)
        refuses("block_rows is 1", self.q, self.k, self.v, block_rows=1)
        refuses("without k", v=self.v, subtract_mean=True)
        refuses("powers of two", self.q[..., :48], self.k[..., :48], self.v, hadamard=True)
        refuses("one dtype", self.q, self.k.astype("float16"), self.v)
        refuses("pass both, or neither", self.q, self.k, self.v, rotary_cos=np.ones((9, 8), "float32"))
        table = np.ones((9, 8), "float32")
        refuses(
            "q_positions is float32", self.q, self.k, self.v, rotary_cos=table, rotary_sin=table, q_positions=table
        )
        r = flashtune.quantise(self.q, self.k, self.v)

        def refuses_call(words, **named):
            with self.assertRaises(flashtune.Error) as caught:
                flashtune.flash_attn_func(*r[:3], **named)
            self.assertIn(words, str(caught.exception))

        ones = np.ones((2, 2, 70), "float32")
        refuses_call("quantise v by channel", v_descale=ones)
        refuses_call("[batch, heads, rows] = (2, 4, 33)", q_descale=np.ones((2, 2, 33), "float32"))
        refuses_call("need descale_rows=", k_descale=ones[..., :9])
        refuses_call("[batch, heads, rows / 8] = (2, 2, 9)", k_descale=ones, descale_rows=8)
        refuses_call("descale_rows is 3", k_descale=ones, descale_rows=3)
        refuses_call("float32 of one element", out_scale=np.ones(2, "float32"))
        refuses_call("out_scale is float64", out_scale=np.ones(1))
        refuses_call("out_scale", out_scale=2.0)
        with self.assertRaises(flashtune.Error) as caught:
            flashtune.flash_attn_func(self.q, self.k, self.v, out_scale=np.ones(1, "float32"))
        self.assertIn("out_scale is of float8_e4m3fn", str(caught.exception))
        with self.assertRaises(flashtune.Error) as caught:
            wide = np.empty(self.q.shape, "float32")
            flashtune.Engine("cpu").forward(*r[:3], out=wide, out_scale=np.ones(1, "float32"))
        self.assertIn("give an output of e4m3", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
