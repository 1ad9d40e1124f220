"""Ragged batches, KV caches and appends by flash-attention's and vLLM's names: arrays of NumPy on the CPU."""

import ctypes
import unittest

import numpy as np
from reference import visible

import flashtune
from flashtune import _library

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

# Twice what unfused attention in the dtype is off by, for standard normal values and up to 200 keys.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
DTYPES = ["float32", "float16"] + ([ml_dtypes.bfloat16] if ml_dtypes else [])


def random(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def sums(lengths, dtype="int32"):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


def plain(q, k, v, causal=False, window=(-1, -1), scale=None, cap=0.0, slopes=None, sinks=None, chunk=0):
    """O ``[rows, heads, dim]`` and LSE ``[heads, rows]`` of one sequence in fp64."""
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    q, k, v = (x.astype(np.float64).swapaxes(0, 1) for x in (q, np.repeat(k, group, 1), np.repeat(v, group, 1)))
    scores = q @ k.swapaxes(1, 2) * (1 / np.sqrt(dim) if scale is None else scale)
    if cap:
        scores = cap * np.tanh(scores / cap)
    if slopes is not None:
        distance = np.abs(np.arange(rows)[:, None] + k.shape[1] - rows - np.arange(k.shape[1]))
        scores = scores - slopes.astype(np.float64)[:, None, None] * distance
    scores = np.where(visible(rows, k.shape[1], causal, window, chunk=chunk), scores, -np.inf)
    sink = np.full((heads, rows, 1), -np.inf)
    if sinks is not None:
        sink[:] = sinks[:, None, None]
    top = np.maximum(scores.max(-1, initial=-np.inf, keepdims=True), sink)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return (weights / np.where(total > 0, total, 1) @ v).swapaxes(0, 1), lse


class Case(unittest.TestCase):
    def same(self, out, want):
        self.assertEqual(out.shape, want.shape)
        error = np.abs(out.astype(np.float64) - want).max(initial=0)
        self.assertLessEqual(error, TOLERANCE[out.dtype.name])

    def same_lse(self, lse, want):
        self.assertEqual(lse.dtype, np.float32)
        np.testing.assert_allclose(lse, want, rtol=1e-4, atol=1e-4)

    def refuses(self, kind, text, f, *args, **named):
        with self.assertRaisesRegex(kind, text) as caught:
            f(*args, **named)
        self.assertIs(type(caught.exception), kind)


class Varlen(Case):
    Q, K = [3, 0, 1, 40, 5], [7, 4, 0, 33, 130]

    def tensors(self, dtype="float32", heads=4, kv_heads=2, dim=32):
        q = random((sum(self.Q), heads, dim), dtype, 1)
        k, v = (random((sum(self.K), kv_heads, dim), dtype, seed) for seed in (2, 3))
        return q, k, v, sums(self.Q), sums(self.K), max(self.Q), max(self.K)

    def holds(self, args, slopes=None, **named):
        q, k, v, cq, ck = args[:5]
        causal, window = named.get("causal", False), named.get("window_size", (-1, -1))
        out, lse = flashtune.flash_attn_varlen_func(*args, alibi_slopes=slopes, return_softmax_lse=True, **named)
        self.assertEqual((out.dtype, lse.shape), (q.dtype, (q.shape[1], q.shape[0])))
        for b in range(len(cq) - 1):
            rows, keys = slice(cq[b], cq[b + 1]), slice(ck[b], ck[b + 1])
            of_b = slopes if slopes is None or slopes.ndim == 1 else slopes[b]
            want, want_lse = plain(
                q[rows], k[keys], v[keys], causal, window, named.get("softmax_scale"), named.get("softcap", 0.0), of_b,
                named.get("s_aux"), named.get("attention_chunk", 0),
            )  # fmt: skip
            self.same(out[rows], want)
            self.same_lse(lse[:, rows], want_lse)

    def test_dtypes_masks_and_zero_lengths(self):
        for dtype in DTYPES:
            with self.subTest(dtype=dtype):
                self.holds(self.tensors(dtype), causal=True)
        self.holds(self.tensors())
        for window in [(5, -1), (5, 3), (0, 0), (-1, 2)]:
            for causal in [False, True]:
                with self.subTest(window=window, causal=causal):
                    self.holds(self.tensors(), causal=causal, window_size=window)

    def test_softcap_alibi_sinks_and_scale(self):
        slopes, sinks = np.abs(random(4, seed=5)), random(4, seed=6)
        self.holds(self.tensors(), softcap=2.0)
        self.holds(self.tensors(), softmax_scale=0.5)
        self.holds(self.tensors(), slopes, causal=True)
        self.holds(self.tensors(), np.abs(random((5, 4), seed=7)), s_aux=sinks)
        self.holds(self.tensors(), slopes, s_aux=sinks, softcap=3.0, window_size=(20, 0))

    def test_chunks_are_of_a_sequence_and_end_with_its_keys(self):
        for chunk in [1, 7, 50, 1 << 29]:
            for how in [{}, {"causal": True}, {"window_size": (9, 4)}]:
                with self.subTest(chunk=chunk, **how):
                    self.holds(self.tensors(), attention_chunk=chunk, **how)
        self.holds(self.tensors(), np.abs(random(4, seed=5)), attention_chunk=20, softcap=2.0, s_aux=random(4, seed=6))

    def test_learnable_sink_is_s_aux(self):
        sinks = random(4, seed=6)
        slopes = np.abs(random((5, 4), seed=7))
        a = flashtune.flash_attn_varlen_func(*self.tensors(), alibi_slopes=slopes, s_aux=sinks)
        b = flashtune.flash_attn_varlen_func(*self.tensors(), alibi_slopes=slopes, learnable_sink=sinks)
        self.assertEqual(a.tobytes(), b.tobytes())

    def test_used_lengths_leave_other_rows_alone(self):
        q, k, v, cq, ck, mq, mk = self.tensors()
        used_q, used_k = np.array([2, 0, 1, 17, 5], "int32"), np.array([7, 1, 0, 20, 64], "int32")
        out = np.full_like(q, 7)
        given = flashtune.flash_attn_varlen_func(
            q, k, v, cq, ck, mq, mk, seqused_q=used_q, seqused_k=used_k, causal=True, out=out
        )
        self.assertIs(given, out)
        for b in range(5):
            rows = slice(cq[b], cq[b] + used_q[b])
            keys = slice(ck[b], ck[b] + used_k[b])
            self.same(out[rows], plain(q[rows], k[keys], v[keys], True)[0])
            self.assertTrue((out[cq[b] + used_q[b] : cq[b + 1]] == 7).all())

    def test_strides_wide_lengths_and_bounds_from_shapes(self):
        q, k, v, cq, ck, _, _ = self.tensors()
        kv = np.stack([k, v], 1)
        wide = np.zeros((q.shape[0], 4, 64), "float32")
        wide[..., :32] = q
        cq, ck = cq.astype("int64"), ck.astype("int64")
        self.holds((wide[..., :32], kv[:, 0], kv[:, 1], cq, ck), causal=True)

    def test_no_sequence_and_no_row(self):
        q, k, v = random((0, 4, 32)), random((0, 2, 32)), random((0, 2, 32))
        none = np.zeros(1, "int32")
        out, lse = flashtune.flash_attn_varlen_func(q, k, v, none, none, 0, 0, return_softmax_lse=True)
        self.assertEqual((out.shape, lse.shape), ((0, 4, 32), (4, 0)))

    def test_refusals_name_the_argument(self):
        f, args = flashtune.flash_attn_varlen_func, self.tensors()
        q, k, v, cq, ck, mq, mk = args
        unsupported, tensor, argument = flashtune.Unsupported, flashtune.InvalidTensor, flashtune.InvalidArgument
        for named in [
            {"sm_margin": 4}, {"qv": q}, {"scheduler_metadata": cq},
            {"cp_world_size": 2}, {"score_mod": print}, {"return_attn_probs": True},
            {"k_descale": 2.0}, {"q_descale": 2.0}, {"k_scale": np.ones(1, "float32")},
        ]:  # fmt: skip
            name = next(iter(named))
            with self.subTest(name):
                self.refuses(unsupported, name, f, *args, **named)
        self.refuses(tensor, "cu_seqlens_q is int", f, q, k, v, mq, cq, mk)
        self.refuses(tensor, "cu_seqlens_k has 3", f, q, k, v, cq, ck[:3], mq, mk)
        self.refuses(tensor, "cu_seqlens_k is int64, cu_seqlens_q int32", f, q, k, v, cq, ck.astype("int64"), mq, mk)
        self.refuses(tensor, "cu_seqlens_q is float32", f, q, k, v, cq.astype("float32"), ck, mq, mk)
        self.refuses(argument, "max_seqlen_q", f, q, k, v, cq, ck, np.array([40]), mk)
        self.refuses(argument, "attention_chunk", f, *args, attention_chunk=-1)
        self.refuses(argument, "attention_chunk", f, *args, attention_chunk=np.array([4, 5]))
        self.refuses(argument, "num_splits", f, *args, num_splits=-1)
        self.refuses(argument, "block_table", f, q, k, v, cq)
        self.refuses(tensor, "k is float16", f, q, k.astype("float16"), v.astype("float16"), cq, ck, mq, mk)
        self.refuses(tensor, "head dim", f, q[..., :16].copy(), k, v, cq, ck, mq, mk)
        self.refuses(tensor, "out shares memory with q", f, *args, out=q)
        self.refuses(tensor, "out is float16", f, *args, out=q.astype("float16"))
        self.refuses(tensor, "s_aux", f, *args, s_aux=random((4, 2)))
        self.refuses(argument, "s_aux and learnable_sink", f, *args, s_aux=random(4), learnable_sink=random(4))
        self.refuses(TypeError, "no_such", f, *args, no_such=1)

    def test_neutral_values_are_taken(self):
        a = flashtune.flash_attn_varlen_func(*self.tensors(), causal=True)
        b = flashtune.flash_attn_varlen_func(
            *self.tensors(), causal=True, dropout_p=0.0, deterministic=True, num_splits=3, pack_gqa=True, sm_margin=0,
            qv=None, attention_chunk=0, fa_version=3, window_size=None, softcap=None,
            k_descale=np.ones((5, 2), "float32"), q_descale=1.0,
            scheduler_metadata=flashtune.prepare_step((40, 130), self.K),
        )  # fmt: skip
        self.assertEqual(a.tobytes(), b.tobytes())


def paged(sequences, page, dtype, kv_heads=2, dim=32, room=0, seed=8):
    """Keys and values of so many tokens each, in pages in random order; NaN where there are none. Gives both caches,
    the table, and K and V by sequences."""
    rng = np.random.default_rng(seed)
    width = max(-(-(n + room) // page) for n in sequences)
    pages = width * len(sequences) + 3
    table = rng.permutation(pages)[: width * len(sequences)].reshape(len(sequences), width).astype("int32")
    caches = [np.full((pages, page, kv_heads, dim), np.nan, dtype) for _ in range(2)]
    kept = []
    for b, n in enumerate(sequences):
        kv = [rng.standard_normal((n, kv_heads, dim)).astype(dtype) for _ in range(2)]
        for cache, x in zip(caches, kv):
            for t in range(n):
                cache[table[b, t // page], t % page] = x[t]
        kept.append(kv)
        # What is behind a length is never read.
        table[b, -(-(n + room) // page) :] = -7
    return *caches, table, kept


class Cache(Case):
    LENGTHS = [17, 0, 1, 48, 5]

    def test_pages_of_1_5_and_16_tokens(self):
        lengths = np.array(self.LENGTHS, "int32")
        for page in [1, 5, 16]:
            for dtype in ["float32", "float16"]:
                k, v, table, kept = paged(self.LENGTHS, page, dtype)
                q = random((5, 3, 4, 32), dtype, 1)
                for name in ["block_table", "page_table"]:
                    with self.subTest(page=page, dtype=dtype, name=name):
                        out, lse = flashtune.flash_attn_with_kvcache(
                            q, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True, **{name: table}
                        )
                        self.assertEqual(lse.shape, (5, 4, 3))
                        for b in range(5):
                            want, want_lse = plain(q[b], *kept[b], True)
                            self.same(out[b], want)
                            self.same_lse(lse[b], want_lse)

    def test_slots_choose_rows_of_a_table_and_none_is_no_key(self):
        k, v, table, kept = paged(self.LENGTHS, 16, "float32")
        q, slots = random((4, 2, 4, 32), seed=1), np.array([3, 0, 9, -1], "int64")
        lengths = np.array([self.LENGTHS[3], self.LENGTHS[0], 20, 20], "int32")
        out = flashtune.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, cache_batch_idx=slots, page_table=table, causal=True, attention_chunk=10,
            rotary_seqlens=lengths, num_splits=4,
        )  # fmt: skip
        for b in (0, 1):
            self.same(out[b], plain(q[b], *kept[slots[b]], True, chunk=10)[0])
        self.assertTrue((out[2:] == 0).all())

    def test_varlen_over_pages_as_vllm_calls_it(self):
        k, v, table, kept = paged(self.LENGTHS, 16, "float16")
        rows = [2, 1, 1, 20, 0]
        q, cq = random((sum(rows), 4, 32), "float16", 1), sums(rows)
        for lengths in [
            {"seqused_k": np.array(self.LENGTHS, "int32"), "max_seqlen_k": 4096},
            {"cu_seqlens_k": sums(self.LENGTHS), "max_seqlen_k": 48},
        ]:
            out = np.empty_like(q)
            flashtune.flash_attn_varlen_func(
                q=q, k=k, v=v, out=out, cu_seqlens_q=cq, max_seqlen_q=20, softmax_scale=0.2, causal=True,
                window_size=[9, 0], block_table=table.astype("int64"), softcap=0, fa_version=3, **lengths,
            )  # fmt: skip
            for b in range(5):
                at = slice(cq[b], cq[b + 1])
                self.same(out[at], plain(q[at], *kept[b], True, (9, 0), 0.2)[0])

    def test_slots_left_padding_and_lengths(self):
        k, v = random((6, 40, 2, 32), seed=2), random((6, 40, 2, 24), seed=3)
        q = random((3, 2, 4, 32), seed=1)
        slots, pad = np.array([4, 0, 2], "int32"), np.array([3, 0, 9], "int32")
        for lengths in [np.array([20, 40, 9], "int32"), 25, None]:
            with self.subTest(lengths=str(lengths)):
                out = flashtune.flash_attn_with_kvcache(
                    q, k, v, cache_seqlens=lengths, cache_batch_idx=slots, cache_leftpad=pad, causal=True
                )
                for b in range(3):
                    n = 40 if lengths is None else np.broadcast_to(lengths, 3)[b]
                    keys = slots[b], slice(pad[b], n)
                    self.same(out[b], plain(q[b], k[keys], v[keys], True)[0])

    def test_new_rows_are_appended_and_seen(self):
        for page in [5, 16]:
            k, v, table, kept = paged(self.LENGTHS, page, "float16", room=3)
            new_k, new_v = random((5, 3, 2, 32), "float16", 4), random((5, 3, 2, 32), "float16", 5)
            q, lengths = random((5, 2, 4, 32), "float16", 1), np.array(self.LENGTHS, "int32")
            out = flashtune.flash_attn_with_kvcache(
                q, k, v, new_k, new_v, cache_seqlens=lengths, block_table=table, causal=True
            )
            for b, n in enumerate(self.LENGTHS):
                for i in range(3):
                    at = table[b, (n + i) // page], (n + i) % page
                    self.assertEqual(k[at].tobytes(), new_k[b, i].tobytes())
                both = [np.concatenate([old, new[b]]) for old, new in zip(kept[b], (new_k, new_v))]
                self.same(out[b], plain(q[b], *both, True)[0])

    def test_packed_new_rows(self):
        k, v = random((3, 40, 2, 32), seed=2), random((3, 40, 2, 32), seed=3)
        old_k, old_v = k.copy(), v.copy()
        begin = np.array([0, 2, 2, 5], "int32")
        new_k, new_v, q = random((5, 2, 32), seed=4), random((5, 2, 32), seed=5), random((5, 4, 32), seed=1)
        lengths = np.array([7, 9, 0], "int32")
        out, lse = flashtune.flash_attn_with_kvcache(
            q, k, v, new_k, new_v, cache_seqlens=lengths, cu_seqlens_q=begin, cu_seqlens_k_new=begin, max_seqlen_q=3,
            causal=True, return_softmax_lse=True,
        )  # fmt: skip
        self.assertEqual(lse.shape, (4, 5))
        for b in range(3):
            at = slice(begin[b], begin[b + 1])
            both = [np.concatenate([old[b, : lengths[b]], new[at]]) for old, new in ((old_k, new_k), (old_v, new_v))]
            want, want_lse = plain(q[at], *both, True)
            self.same(out[at], want)
            self.same_lse(lse[:, at], want_lse)

    def rotated(self, x, first, cos, sin, interleaved, advance=True):
        """[rows, heads, dim] with rows from position ``first`` on."""
        x, half = x.astype(np.float64), cos.shape[1]
        at = first + np.arange(x.shape[0]) * advance
        c, s = cos[at][:, None], sin[at][:, None]
        a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
        out = x.copy()
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
        return out

    def test_rotary_of_new_rows_and_queries(self):
        angle = np.arange(64)[:, None] / 10.0 ** np.arange(8)
        cos, sin = np.cos(angle).astype("float32"), np.sin(angle).astype("float32")
        new_k, new_v, q = random((2, 3, 2, 32), seed=4), random((2, 3, 2, 32), seed=5), random((2, 3, 4, 32), seed=1)
        lengths, firsts = np.array([7, 30], "int32"), np.array([2, 11], "int32")
        for interleaved in [True, False]:
            for causal in [True, False]:
                for rotary in [None, firsts]:
                    with self.subTest(interleaved=interleaved, causal=causal, own=rotary is not None):
                        k, v = random((2, 40, 2, 32), seed=2), random((2, 40, 2, 32), seed=3)
                        before = q.copy()
                        out = flashtune.flash_attn_with_kvcache(
                            q, k, v, new_k, new_v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved,
                            rotary_seqlens=rotary, cache_seqlens=lengths, causal=causal,
                        )  # fmt: skip
                        self.assertEqual(q.tobytes(), before.tobytes())
                        for b, n in enumerate(lengths):
                            first = n if rotary is None else rotary[b]
                            turned = self.rotated(new_k[b], first, cos, sin, interleaved)
                            np.testing.assert_allclose(k[b, n : n + 3], turned, atol=1e-5)
                            of_q = self.rotated(q[b], first, cos, sin, interleaved, causal)
                            self.same(out[b], plain(of_q, k[b, : n + 3], v[b, : n + 3], causal)[0])

    def test_prepared_steps_and_explanations(self):
        k, v = random((2, 40, 2, 32), seed=2), random((2, 40, 2, 32), seed=3)
        q, lengths = random((2, 1, 4, 32), seed=1), np.array([9, 40], "int32")
        step = flashtune.prepare_step((1, None), lengths)
        self.assertEqual(step, (1, None, 49, 40))
        self.assertEqual(flashtune.prepare_step((None, 8)), (None, 8, 0, 0))
        a = flashtune.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, scheduler_metadata=step)
        for b, n in enumerate(lengths):
            self.same(a[b], plain(q[b], k[b, :n], v[b, :n])[0])
        self.assertIn("cpu_ragged", flashtune.explain())
        self.refuses(flashtune.InvalidArgument, "bounds", flashtune.prepare_step, 5)
        self.refuses(flashtune.InvalidArgument, "max_seqlen_k", flashtune.prepare_step, (1, -1))

    def test_refusals_name_the_argument(self):
        f = flashtune.flash_attn_with_kvcache
        k, v = random((2, 40, 2, 32), seed=2), random((2, 40, 2, 32), seed=3)
        q, lengths, new = random((2, 1, 4, 32), seed=1), np.array([9, 40], "int32"), random((2, 1, 2, 32))
        table = np.zeros((2, 1), "int32")
        tensor, argument = flashtune.InvalidTensor, flashtune.InvalidArgument
        self.refuses(argument, "of k and v one", f, q, k, v, new)
        self.refuses(argument, "cache_seqlens is None", f, q, k, v, new, new)
        self.refuses(argument, "rotary_cos", f, q, k, v, cache_seqlens=lengths, rotary_cos=random((8, 8)))
        tables = {"rotary_cos": random((8, 8)), "rotary_sin": random((8, 8))}
        self.refuses(argument, "rotary_cos and rotary_sin belong", f, q, k, v, **tables)
        self.refuses(argument, "block_table and page_table", f, q, k, v, block_table=table, page_table=table)
        both = {"block_table": table, "cache_batch_idx": lengths[:1]}
        self.refuses(tensor, "cache_batch_idx is", f, q, k, v, **both)
        self.refuses(tensor, "block_table is float32", f, q, k, v, block_table=random((2, 1)), cache_seqlens=lengths)
        self.refuses(tensor, "cache_seqlens has 1", f, q, k, v, cache_seqlens=lengths[:1])
        self.refuses(tensor, "k_cache has 1 slots", f, q, k[:1], v[:1], cache_seqlens=lengths)
        self.refuses(tensor, "v_cache float16", f, q, k, v.astype("float16"))
        self.refuses(flashtune.Unsupported, "k_cache is uint8", f, q, k.astype("uint8"), v.astype("uint8"))
        half = new.astype("float16")
        self.refuses(tensor, "k is float16", f, q, k, v, half, half, cache_seqlens=lengths)
        k.flags.writeable = False
        self.refuses(tensor, "k_cache cannot be written", f, q, k, v, new, new, cache_seqlens=lengths)


class Quantised(Case):
    def test_int8_cache_and_shapes_of_scales(self):
        # 2 sequences and 3 KV heads, so that no shape can be taken for another.
        rng = np.random.default_rng(4)
        k, v = (rng.integers(-127, 128, (2, 24, 3, 32)).astype("int8") for _ in range(2))
        q, lengths = random((2, 2, 6, 32), "float16", 1), np.array([24, 11], "int32")
        full = np.abs(rng.standard_normal((2, 3))).astype("float32") / 64 + 1 / 128
        one = np.full(1, 1 / 64, "float32")
        for scale in [1 / 64, one, one.reshape(()), full[0], full, full[:, :1], np.broadcast_to(one, (2, 3))]:
            wide = np.broadcast_to(scale, (2, 3)).astype(np.float64)
            for names in [("k_descale", "v_descale"), ("k_scale", "v_scale")]:
                with self.subTest(shape=np.shape(scale), names=names):
                    out = flashtune.flash_attn_with_kvcache(
                        q, k, v, cache_seqlens=lengths, causal=True, **dict.fromkeys(names, scale)
                    )
                    for b, n in enumerate(lengths):
                        by = wide[b][None, :, None]
                        self.same(out[b], plain(q[b], k[b, :n] * by, v[b, :n] * by, True)[0])
        named = {"k_descale": np.ones(2, "float32"), "cache_seqlens": lengths}
        f, tensor = flashtune.flash_attn_with_kvcache, flashtune.InvalidTensor
        self.refuses(tensor, "k_descale has the shape", f, q, k, v, **named)
        named["k_descale"] = np.ones(1, "float64")
        self.refuses(tensor, "k_descale is float64", f, q, k, v, **named)


    @unittest.skipUnless(ml_dtypes, "needs ml_dtypes for float8")
    def test_128k_keys_of_heads_whose_scales_differ_by_100(self):
        rng, keys, dim = np.random.default_rng(5), 1 << 17, 64
        scale = np.array([[0.05, 5.0]], "float32")
        k = rng.standard_normal((1, keys, 2, dim)).astype(ml_dtypes.float8_e4m3fn)
        v = (rng.standard_normal((1, keys, 2, dim)) + 0.5).astype(ml_dtypes.float8_e4m3fn)
        q = random((1, 1, 4, dim), "float16", 1)
        # Scores as those of a model, though K of the second head is 100 times as large.
        q[:, :, 2:] /= 100
        by, v_by = scale[0][None, :, None] * 20, np.array([1.0, 0.01], "float32")
        out = flashtune.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=keys, k_descale=scale * 20, v_descale=v_by[None], causal=True
        )
        want, _ = plain(q[0], k[0].astype("float32") * by, v[0].astype("float32") * v_by[None, :, None], True)
        error = np.abs(out[0].astype(np.float64) - want) / np.abs(want).max(axis=(0, 2), keepdims=True)
        # A rounding of O to float16, and as much again.
        self.assertLessEqual(error.max(), 2 * 2.0**-11)


class Slots(Case):
    SLOTS = [11, -1, 0, 34, 16]

    def test_flash_layout_skips_negative_slots(self):
        for dtype in ["float32", "float16"]:
            for kind in ["int64", "int32"]:
                with self.subTest(dtype=dtype, kind=kind):
                    key, value = random((7, 2, 32), dtype, 1), random((7, 2, 24), dtype, 2)
                    k, v = np.zeros((7, 5, 2, 32), dtype), np.zeros((7, 5, 2, 24), dtype)
                    flashtune.reshape_and_cache_flash(
                        key, value, k, v, np.array(self.SLOTS, kind), "auto", np.ones(1, "float32"), 1.0
                    )
                    want_k, want_v = np.zeros((35, 2, 32), dtype), np.zeros((35, 2, 24), dtype)
                    for i, slot in enumerate(self.SLOTS):
                        if slot >= 0:
                            want_k[slot], want_v[slot] = key[i], value[i]
                    self.assertEqual(k.tobytes(), want_k.tobytes())
                    self.assertEqual(v.tobytes(), want_v.tobytes())

    def test_older_layout_and_attention_over_it(self):
        key, value = random((13, 2, 32), "float16", 1), random((13, 2, 32), "float16", 2)
        k, v = np.zeros((3, 2, 4, 8, 8), "float16"), np.zeros((3, 2, 32, 8), "float16")
        table = np.array([[2, 0]], "int64")
        slots = np.array([table[0, t // 8] * 8 + t % 8 for t in range(13)])
        flashtune.reshape_and_cache(key, value, k, v, slots)
        for t, slot in enumerate(slots):
            page, at = divmod(int(slot), 8)
            np.testing.assert_array_equal(k[page, :, :, at].reshape(2, 32), key[t])
            np.testing.assert_array_equal(v[page, :, :, at], value[t])
        q = random((1, 2, 4, 32), "float16", 3)
        out = flashtune.flash_attn_with_kvcache(q, k, v, cache_seqlens=13, block_table=table, causal=True)
        self.same(out[0], plain(q[0], key, value, True)[0])

    def test_int8_bytes_by_name(self):
        key, value = random((2, 2, 32), "float16", 1), random((2, 2, 32), "float16", 2)
        scale = np.array([0.03, 0.05], "float32")
        k, v = np.zeros((1, 4, 2, 32), "uint8"), np.zeros((1, 4, 2, 32), "uint8")
        flashtune.reshape_and_cache_flash(key, value, k, v, np.array([3, 0]), "int8", scale, 0.04)
        for cache, rows, by in ((k, key, scale[:, None]), (v, value, 0.04)):
            for slot, row in zip([3, 0], rows):
                want = np.clip(row.astype(np.float64) / by, -128, 127)
                # Half a step, and what a quotient in fp32 is off by.
                self.assertLessEqual(np.abs(cache[0, slot].view("int8") - want).max(), 0.5 + 1e-4)

    def test_refusals_name_the_argument(self):
        f, g = flashtune.reshape_and_cache_flash, flashtune.reshape_and_cache
        key, slots = random((2, 2, 32)), np.array([0, 1])
        k = np.zeros((1, 4, 2, 32), "float32")
        tensor, unsupported = flashtune.InvalidTensor, flashtune.Unsupported
        self.refuses(unsupported, "kv_cache_dtype is 'fp4'", f, key, key, k, k.copy(), slots, "fp4")
        self.refuses(tensor, "kv_cache_dtype says float8_e4m3fn", f, key, key, k, k.copy(), slots, "fp8")
        self.refuses(unsupported, "key_cache is uint8", f, key, key, k.astype("uint8"), k.astype("uint8"), slots)
        self.refuses(tensor, "reshape_and_cache_flash", g, key, key, k, k.copy(), slots)
        self.refuses(tensor, "slot_mapping has 3", f, key, key, k, k.copy(), np.arange(3))
        self.refuses(tensor, "slot_mapping is float64", f, key, key, k, k.copy(), slots * 1.0)
        self.refuses(unsupported, "k_scale is 0.5", f, key, key, k, k.copy(), slots, "auto", 0.5)
        self.refuses(tensor, "key float16", f, key.astype("float16"), key, k, k.copy(), slots)


@unittest.skipUnless(ml_dtypes, "needs ml_dtypes for float8")
class NarrowQueries(Case):
    """q of e4m3: packed, over pages and over slots; O of any dtype."""

    Q, K = [3, 0, 1, 40, 5], [7, 4, 0, 33, 130]

    def setUp(self):
        heads, kv_heads, dim = 4, 2, 32
        narrow = lambda rows, heads, seed: random((rows, heads, dim), seed=seed).astype(ml_dtypes.float8_e4m3fn)
        self.q, self.k, self.v = narrow(sum(self.Q), heads, 1), narrow(sum(self.K), kv_heads, 2), narrow(
            sum(self.K), kv_heads, 3
        )
        scales = np.random.default_rng(4).uniform(0.5, 1.5, (3, len(self.Q), kv_heads)).astype("float32")
        self.scales = dict(zip(("q_descale", "k_descale", "v_descale"), scales))
        self.lengths = sums(self.Q), sums(self.K), max(self.Q), max(self.K)

    def pages(self, tokens=16):
        """The same keys in shuffled pages, and the table."""
        counts = [-(-n // tokens) for n in self.K]
        order = np.random.default_rng(5).permutation(sum(counts)).astype("int32")
        table = np.full((len(self.K), max(counts)), -1, "int32")
        caches = [np.full((sum(counts), tokens, *t.shape[1:]), np.nan, t.dtype) for t in (self.k, self.v)]
        first, page = 0, 0
        for b, n in enumerate(self.K):
            for i in range(counts[b]):
                table[b, i] = order[page]
                some = min(tokens, n - i * tokens)
                for cache, t in zip(caches, (self.k, self.v)):
                    cache[order[page], :some] = t[first + i * tokens : first + i * tokens + some]
                page += 1
            first += n
        return *caches, table

    def want(self, **named):
        """Of what the codes mean."""
        outs, lses, q0, k0 = [], [], 0, 0
        for b, (q_rows, k_rows) in enumerate(zip(self.Q, self.K)):
            scales = [self.scales[name][b] for name in ("q_descale", "k_descale", "v_descale")]
            group = np.repeat(scales[0], 2)
            q = self.q[q0 : q0 + q_rows].astype("float64") * group[:, None]
            k, v = (
                t[k0 : k0 + k_rows].astype("float64") * by[:, None]
                for t, by in zip((self.k, self.v), scales[1:])
            )
            o, lse = plain(q, k, v, **named)
            outs.append(o), lses.append(lse)
            q0, k0 = q0 + q_rows, k0 + k_rows
        return np.concatenate(outs), np.concatenate(lses, 1)

    def test_packed_and_paged_with_scales_of_sequences_and_heads(self):
        want, want_lse = self.want(causal=True)
        q, k, v, lengths = self.q, self.k, self.v, self.lengths
        for _ in range(2):  # and once more the short way
            out, lse = flashtune.flash_attn_varlen_func(
                q, k, v, *lengths, causal=True, return_softmax_lse=True, **self.scales
            )
            self.assertEqual(out.dtype, ml_dtypes.bfloat16)
            self.same(out, want)
            self.same_lse(lse, want_lse)
        k, v, table = self.pages()
        used = np.array(self.K, "int32")
        for _ in range(2):
            out = flashtune.flash_attn_varlen_func(
                q, k, v, lengths[0], None, *lengths[2:], seqused_k=used, block_table=table, causal=True, **self.scales
            )
            self.same(out, want)
        out = flashtune.flash_attn_with_kvcache(
            q, k, v, cu_seqlens_q=lengths[0], max_seqlen_q=lengths[2], cache_seqlens=used, block_table=table,
            causal=True, **self.scales,
        )  # fmt: skip
        self.same(out, want)

    def test_numbers_and_one_scale_for_all(self):
        self.scales = {name: np.full((5, 2), 0.5, "float32") for name in self.scales}
        want, _ = self.want()
        for half in (0.5, np.full(1, 0.5, "float32"), np.full((1, 2), 0.5, "float32")):
            named = dict.fromkeys(self.scales, half)
            self.same(flashtune.flash_attn_varlen_func(self.q, self.k, self.v, *self.lengths, **named), want)

    def test_outputs_of_every_dtype_and_a_scale_of_o(self):
        want, _ = self.want()
        call = lambda **named: flashtune.flash_attn_varlen_func(
            self.q, self.k, self.v, *self.lengths, **self.scales, **named
        )
        for dtype in ("float32", "float16", ml_dtypes.bfloat16):
            out = np.empty(self.q.shape, dtype)
            self.assertIs(call(out=out), out)
            self.same(out, want)
        by = np.full(1, 64.0, "float32")
        out = call(out_scale=by)
        self.assertEqual(out.dtype, ml_dtypes.float8_e4m3fn)
        wide = call(out=np.empty(self.q.shape, "float32"))
        np.testing.assert_array_equal(
            out.view("uint8"), np.clip(wide * 64, -448, 448).astype(ml_dtypes.float8_e4m3fn).view("uint8")
        )

    def test_dense_keys_of_e5m2(self):
        q = random((2, 9, 4, 32), seed=1).astype(ml_dtypes.float8_e4m3fn)
        k, v = (random((2, 13, 2, 32), seed=seed).astype(ml_dtypes.float8_e5m2) for seed in (2, 3))
        scales = {name: by[:2] for name, by in self.scales.items()}
        f, unsupported = flashtune.flash_attn_func, flashtune.Unsupported
        for more in ({}, {"causal": True}, {"window": (3, 2)}, {"cap": 2.0}):
            named = {{"window": "window_size", "cap": "softcap"}.get(name, name): value for name, value in more.items()}
            out, lse = f(q, k, v, return_lse=True, **scales, **named)
            self.assertEqual(out.dtype, ml_dtypes.bfloat16)
            for b in range(2):
                of_q, of_k, of_v = (scales[name][b] for name in ("q_descale", "k_descale", "v_descale"))
                wide = q[b].astype("float64") * np.repeat(of_q, 2)[:, None], k[b].astype("float64") * of_k[:, None]
                want, want_lse = plain(*wide, v[b].astype("float64") * of_v[:, None], **more)
                self.same(out[b], want)
                self.same_lse(lse[b], want_lse)
        self.assertEqual(f(q, k, v, out_scale=np.ones(1, "float32")).dtype, ml_dtypes.float8_e4m3fn)
        self.refuses(unsupported, "dropout_p", f, q, k, v, dropout_p=0.5)
        self.refuses(unsupported, "k_descale has the shape", f, q, k, v, k_descale=np.ones((2, 2, 13), "float32"))
        self.refuses(flashtune.InvalidTensor, "with the 2 sequences of q", f, q, k[:1], v[:1])
        self.refuses(flashtune.InvalidTensor, "k is float8_e5m2, v float32", f, q, k, v.astype("float32"))

    def test_new_rows_are_copied_as_they_are(self):
        narrow = lambda *shape, seed: random(shape, seed=seed).astype(ml_dtypes.float8_e4m3fn)
        new_k, new_v = narrow(2, 3, 2, 32, seed=6), narrow(2, 3, 2, 32, seed=7)
        new_k[0, 0, 0, :4] = [448, -448, 0.001953125, -0.0]
        q, scales = narrow(2, 3, 4, 32, seed=8), {n: t[:2] for n, t in self.scales.items()}
        lengths = np.array([5, 0], "int32")
        k, v = narrow(2, 40, 2, 32, seed=9), narrow(2, 40, 2, 32, seed=10)
        whole = [t.copy() for t in (k, v)]
        for t, new in zip(whole, (new_k, new_v)):
            for b in range(2):
                t[b, lengths[b] : lengths[b] + 3] = new[b]
        out = flashtune.flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=lengths, causal=True, **scales)
        self.assertEqual([t.tobytes() for t in (k, v)], [t.tobytes() for t in whole])
        again = flashtune.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths + 3, causal=True, **scales)
        self.assertEqual(out.tobytes(), again.tobytes())
        f, unsupported = flashtune.flash_attn_with_kvcache, flashtune.Unsupported
        angles = {"rotary_cos": random((50, 8)), "rotary_sin": random((50, 8))}
        self.refuses(unsupported, "rotated", f, q, k, v, new_k, new_v, cache_seqlens=lengths, **angles)
        odd = [t[..., :31] for t in (q, k, v, new_k, new_v)]
        self.refuses(unsupported, "odd head dim", f, *odd, cache_seqlens=lengths)

    def test_refusals_name_the_argument(self):
        q, k, v, lengths = self.q, self.k, self.v, self.lengths
        f, tensor = flashtune.flash_attn_varlen_func, flashtune.InvalidTensor
        wide = [t.astype("float32") for t in (q, k, v)]
        self.refuses(tensor, "k is float32, q float8_e4m3fn", f, q, *wide[1:], *lengths)
        self.refuses(flashtune.Unsupported, "q_descale", f, *wide, *lengths, q_descale=0.5)
        self.refuses(flashtune.InvalidArgument, "out_scale", f, *wide, *lengths, out_scale=np.ones(1, "float32"))
        self.refuses(tensor, "out_scale is float32", f, q, k, v, *lengths, out_scale=np.ones(2, "float32"))
        out = np.empty(q.shape, "float32")
        self.refuses(tensor, "out_scale", f, q, k, v, *lengths, out=out, out_scale=np.ones(1, "float32"))
        self.refuses(tensor, "q_descale has the shape", f, q, k, v, *lengths, q_descale=np.ones((2, 2), "float32"))
        caches = self.pages()
        new = random((5, 1, 2, 32))
        rows = random((5, 1, 4, 32)).astype(ml_dtypes.float8_e4m3fn)
        f = flashtune.flash_attn_with_kvcache
        self.refuses(
            tensor, "k is float32, q or", f, rows, *caches[:2], new, new,
            block_table=caches[2], cache_seqlens=np.array([1] * 5, "int32"),
        )  # fmt: skip


class Structures(unittest.TestCase):
    def test_structures_are_those_of_the_header(self):
        self.assertEqual(ctypes.sizeof(_library.Ragged), 648)
        self.assertEqual(ctypes.sizeof(_library.Append), 560)


if __name__ == "__main__":
    unittest.main()
