"""Grids of serving calls after those that other libraries run their kernels through, against plain loops in fp64. The
cases are our own; taken over are the sizes, and what is crossed with what.

``sample(name, count, seed)`` draws cases of a grid, ``run(case, tensors)`` computes one and gives what is wrong with
it. ``tensors`` makes arrays of NumPy into tensors of the library that is tried, and back: the tests of the package run
a few cases with NumPy (``test_serving_grids.py``), ``benches/whole_grids.py`` as many as wanted with PyTorch too.
"""

import random as chance

import numpy as np
from test_serving import TOLERANCE, plain, sums

import flashtune

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

# Axes that a grid does not name, at the only value that they have there.
_DEFAULTS = {
    "dtype": ["float16", "bfloat16", "float32"] if ml_dtypes else ["float16", "float32"],
    "cache": ["q"], "dim": [128], "page": [16], "new": [False], "rotary": [0.0], "interleaved": [False],
    "mask": ["causal"], "slots": [False], "pad": [False], "packed_q": [True], "sinks": [False], "cap": [0.0],
    "alibi": [False],
}  # fmt: skip

GRIDS = {
    # flash-attention's kvcache (without qv): rows of q, room of the cache; a cache with slots or pages of any size, new
    # rows with rotary embeddings, padding, ALiBi. Its longest caches are left to the GPU.
    "kvcache": {
        "sizes": [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (128, 128), (16, 3000)],
        "heads": [(6, 6), (6, 1), (6, 3)], "dim": [32, 59, 64, 80, 128, 256], "page": [None, 1, 4, 128, 256],
        "new": [False, True], "rotary": [0.0, 0.5, 1.0], "interleaved": [False, True],
        "mask": ["full", "causal", "window"], "slots": [False, True], "pad": [False, True],
        "packed_q": [False, True], "alibi": [False, True],
    },
    # flash-attention's varlen: packed keys; sequences without rows, and without keys.
    "varlen": {
        "sizes": [(1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (799, 799)],
        "heads": [(6, 6), (6, 2), (6, 1)], "dim": [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256],
        "page": ["packed"], "mask": ["full", "causal", "window"], "cap": [0.0, 50.0], "alibi": [False, True],
    },
    # FlashInfer's batch decode: a row each, small pages, soft caps, 8-bit caches.
    "decode": {
        "sizes": [(1, 54), (1, 97), (1, 512), (1, 2048)], "heads": [(4, 4), (32, 4)], "dim": [128, 256],
        "page": [1, 8, 16], "mask": ["full", "window"], "packed_q": [False, True], "sinks": [False, True],
        "cap": [0.0, 30.0], "cache": ["q", "int8", "fp8"] if ml_dtypes else ["q", "int8"],
    },
    # FlashInfer's paged prefill: prompts, and chunks beside what is cached.
    "prefill": {
        "sizes": [(37, 54), (17, 97), (127, 512), (37, 512), (577, 600)], "heads": [(4, 4), (32, 4)],
        "dim": [64, 128, 256], "page": [1, 5, 16], "mask": ["full", "causal"], "cap": [0.0, 30.0],
    },
    # vLLM's: mixed batches over pages of 16; windows, soft caps, sinks, fp8, and K in pieces beside V by columns.
    "vllm": {
        "sizes": [[(1, 1328), (5, 18), (129, 463)], [(1, 523), (1, 37), (1, 2011)]],
        "heads": [(4, 4), (8, 2), (5, 1)], "dim": [128, 256], "mask": ["causal", 64, 128, 256],
        "sinks": [False, True], "cap": [0.0, 50.0], "cache": ["q", "pieces", "fp8"] if ml_dtypes else ["q", "pieces"],
    },
}  # fmt: skip


def legal(case):
    paged = case["page"] not in (None, "packed")
    return not (
        case["rotary"] and not case["new"]
        or case["interleaved"] and not case["rotary"]
        or case["slots"] and paged
        or case["cache"] in ("int8", "fp8") and case["dtype"] == "float32"
    )  # fmt: skip


def sample(name, count, seed):
    """So many cases of a grid, the same for a seed."""
    rng, taken = chance.Random(f"{name} {seed}"), []
    while len(taken) < count:
        case = {axis: rng.choice(values) for axis, values in {**_DEFAULTS, **GRIDS[name]}.items()}
        if legal(case):
            taken.append({**case, "seed": rng.randrange(1 << 30)})
    return taken


class NumPy:
    """Arrays of NumPy as they are."""

    def to(self, x):
        return x

    def back(self, x):
        return x


def run(case, tensors):
    """Computes a case; gives None, or what is wrong with the result."""
    return _Run(case, tensors).run()


class _Run:
    def __init__(self, case, tensors):
        self.case, self.to, self.back = case, tensors.to, tensors.back
        self.rng = np.random.default_rng(case["seed"])
        name = case["dtype"]
        self.dtype = np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
        self.heads, self.kv_heads = case["heads"]
        self.dim = case["dim"]
        self.lengths()

    def lengths(self):
        """Rows of q, keys and new keys of each sequence; one without keys among them where sizes are drawn."""
        case, rng = self.case, self.rng
        if isinstance(case["sizes"], list):
            self.q, self.k, self.new = *zip(*case["sizes"]), (0,) * len(case["sizes"])
        else:
            (rows, keys), batch = case["sizes"], 3
            ragged = case["packed_q"]
            self.q = [int(rng.integers(0, rows + 1)) if ragged and b else rows for b in range(batch)]
            self.k = [int(rng.integers(1, keys + 1)) if b else keys for b in range(batch - 1)] + [0]
            self.new = [int(rng.integers(0, min(rows, 9) + 1)) for _ in range(batch)] if case["new"] else [0] * batch
            if case["new"] and not ragged:
                self.new = [self.new[0]] * batch
            # What a sequence has together is its room.
            self.k = [max(k - n, 0) for k, n in zip(self.k, self.new)]
        self.pad = [int(rng.integers(0, k + 1)) if case["pad"] else 0 for k in self.k]
        self.room = max(k + n for k, n in zip(self.k, self.new)) or 1

    def normal(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32).astype(self.dtype)

    def stored(self, x, b, of_v):
        """What a cache keeps of rows, and what these are worth."""
        kind = self.case["cache"]
        if kind in ("q", "pieces"):
            return x, x.astype(np.float64)
        scale = self.scale[of_v][b][None, :, None]
        x = x.astype(np.float32) / scale
        if kind == "int8":
            kept = np.clip(np.rint(x), -127, 127).astype(np.int8)
        else:
            kept = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return kept, kept.astype(np.float64) * scale

    def caches(self):
        """K and V where the case has them, NaN (or 0x7f) wherever no token is; the table; and for each sequence what
        its K and V are worth."""
        case, batch = self.case, len(self.k)
        self.scale = np.abs(self.rng.standard_normal((2, batch, self.kv_heads))).astype("float32") * 0.02 + 0.01
        row = self.kv_heads, self.dim
        olds = [[self.stored(self.normal(n, *row), b, v) for v in (0, 1)] for b, n in enumerate(self.k)]
        kept_dtype = olds[0][0][0].dtype
        page = case["page"]
        if page == "packed":
            kv = [np.concatenate([old[v][0] for old in olds]) for v in (0, 1)]
            return kv, None, [[worth for _, worth in old] for old in olds]
        tokens = page or self.room
        width = -(-self.room // tokens) if page else 1
        pages = batch * width + 2
        nothing = np.array(127 if kept_dtype == np.int8 else np.nan).astype(kept_dtype)
        kv = [np.full((pages, tokens, self.kv_heads, self.dim), nothing) for _ in (0, 1)]
        table = self.rng.permutation(pages)[: batch * width].reshape(batch, width).astype("int32")
        if not page and not case["slots"]:
            table = np.arange(batch, dtype="int32")[:, None]
        for b, old in enumerate(olds):
            for cache, (x, _) in zip(kv, old):
                for t in range(self.k[b]):
                    cache[table[b, t // tokens], t % tokens] = x[t]
            # What is behind a sequence's pages is never read.
            if page:
                table[b, -(-(self.k[b] + self.new[b]) // tokens) :] = self.rng.choice([-1, -7, pages, 2**31 - 1])
        return kv, table, [[worth for _, worth in old] for old in olds]

    def run(self):
        case, batch = self.case, len(self.q)
        kv, table, worth = self.caches()
        packed_q = case["packed_q"]
        total = sum(self.q)
        rows = (total,) if packed_q else (batch, self.q[0])
        q = self.normal(*rows, self.heads, self.dim)
        of_b = (lambda x, b: x[sum(self.q[:b]) : sum(self.q[: b + 1])]) if packed_q else (lambda x, b: x[b])
        causal, window = case["mask"] == "causal" or isinstance(case["mask"], int), (-1, -1)
        if case["mask"] == "window":
            window = (int(self.rng.integers(0, 99)), int(self.rng.integers(0, 9)))
        elif isinstance(case["mask"], int):
            window = (case["mask"] - 1, 0)
        named = {"causal": causal, "window_size": window, "softcap": case["cap"], "return_softmax_lse": True}
        sinks = self.rng.standard_normal(self.heads).astype("float32") if case["sinks"] else None
        slopes = np.abs(self.rng.standard_normal(self.heads)).astype("float32") * 0.3 if case["alibi"] else None
        if sinks is not None:
            named["s_aux"] = self.to(sinks)
        if slopes is not None:
            named["alibi_slopes"] = self.to(slopes)
        if case["cache"] in ("int8", "fp8"):
            named["k_descale"], named["v_descale"] = (self.to(scale) for scale in self.scale)
        if case["page"] == "packed":
            out, lse = flashtune.flash_attn_varlen_func(
                self.to(q), *map(self.to, kv), self.to(sums(self.q)), self.to(sums(self.k)), max(self.q), self.room,
                **named,
            )  # fmt: skip
            return self.compare(q, of_b, worth, self.back(out), self.back(lse), causal, window, slopes, sinks)
        if case["cache"] == "pieces":
            kv = self.pieces(*kv)
        if case["page"]:
            named["block_table"] = self.to(table)
        elif case["slots"]:
            named["cache_batch_idx"] = self.to(np.ascontiguousarray(table[:, 0]))
        if case["pad"]:
            named["cache_leftpad"] = self.to(np.array(self.pad, "int32"))
        if packed_q:
            named.update(cu_seqlens_q=self.to(sums(self.q)), max_seqlen_q=max(self.q))
        turned, caches = q, [self.to(x) for x in kv]
        rows = []
        if case["new"]:
            rows, turned = self.new_rows(named, q, of_b, worth, causal or window != (-1, -1))
        lengths = self.to(np.array(self.k, "int32"))
        out, lse = flashtune.flash_attn_with_kvcache(self.to(q), *caches, *rows, cache_seqlens=lengths, **named)
        wrong = self.appended(caches, table, worth) if case["new"] else None
        padded = [[x[pad:] for x in of] for of, pad in zip(worth, self.pad)]
        return wrong or self.compare(
            turned, of_b, padded, self.back(out), self.back(lse), causal, window, slopes, sinks
        )

    def pieces(self, k, v):
        x = 16 // k.dtype.itemsize
        pages, tokens, heads, dim = k.shape
        k = k.reshape(pages, tokens, heads, dim // x, x).transpose(0, 2, 3, 1, 4)
        return np.ascontiguousarray(k), np.ascontiguousarray(v.transpose(0, 2, 3, 1))

    def new_rows(self, named, q, of_b, worth, advances):
        """New rows as the call takes them; adds what they are worth behind the others', and gives the rotated q."""
        case = self.case
        new = [[self.normal(n, self.kv_heads, self.dim) for _ in (0, 1)] for n in self.new]
        turned = q.astype(np.float64)
        rotary = int(case["rotary"] * self.dim) // 16 * 16
        if rotary:
            angles = np.arange(self.room + max(self.q))[:, None] / 100.0 ** np.linspace(0, 1, rotary // 2)
            cos, sin = (f(angles).astype(self.dtype) for f in (np.cos, np.sin))
            named.update(rotary_cos=self.to(cos), rotary_sin=self.to(sin), rotary_interleaved=case["interleaved"])
        for b, of in enumerate(new):
            k, v = (x.astype(np.float64) for x in of)
            if rotary:
                k = rotated(k, self.k[b], cos, sin, case["interleaved"])
                of_b(turned, b)[:] = rotated(of_b(turned, b), self.k[b], cos, sin, case["interleaved"], advances)
            worth[b] = [np.concatenate([old, x]) for old, x in zip(worth[b], (k, v))]
        if case["packed_q"]:
            named["cu_seqlens_k_new"] = self.to(sums(self.new))
            return [self.to(np.concatenate([of[v] for of in new])) for v in (0, 1)], turned
        return [self.to(np.stack([of[v] for of in new])) for v in (0, 1)], turned

    def appended(self, caches, table, worth):
        """New rows where they belong: V to the bit, K within the rounding of a rotation."""
        tokens = self.case["page"] or self.room
        for which, cache in enumerate(map(self.back, caches)):
            for b, n in enumerate(self.new):
                for t in range(self.k[b], self.k[b] + n):
                    found, want = cache[table[b, t // tokens], t % tokens].astype(np.float64), worth[b][which][t]
                    limit = 0 if which or not self.case["rotary"] else 2e-2 if self.dtype.itemsize == 2 else 1e-5
                    if not np.abs(found - want).max() <= limit * max(1, np.abs(want).max()):
                        return f"{'KV'[which]} of token {t} of sequence {b} is off by {np.abs(found - want).max()}"
        return None

    def compare(self, q, of_b, worth, out, lse, causal, window, slopes, sinks):
        tolerance = TOLERANCE[self.case["dtype"]] * (4 if self.case["cache"] in ("int8", "fp8") else 1)
        if self.case["rotary"]:
            # q and K were rounded once more.
            tolerance *= 4
        ends = sums(self.q)
        for b, (k, v) in enumerate(worth):
            lse_b = lse[:, ends[b] : ends[b + 1]] if self.case["packed_q"] else lse[b]
            want, want_lse = plain(of_b(q, b), k, v, causal, window, None, self.case["cap"], slopes, sinks)
            found = of_b(out, b).astype(np.float64)
            off = np.abs(found - want).max(initial=0)
            if not off <= tolerance * max(1, np.abs(want).max(initial=0)):
                return f"O of sequence {b}, {self.q[b]} x {len(k)}: off by {off}"
            with np.errstate(invalid="ignore"):
                same = (lse_b == want_lse) | (np.abs(lse_b - want_lse) <= 10 * tolerance)
            if not same.all():
                return f"LSE of sequence {b}, {self.q[b]} x {len(k)}: {lse_b[~same][0]}, not {want_lse[~same][0]}"
        return None


def rotated(x, first, cos, sin, interleaved, advance=True):
    """``[rows, heads, dim]`` with rows from position ``first`` on, or all at it."""
    half = cos.shape[1]
    at = first + np.arange(x.shape[0]) * advance
    c, s = cos[at][:, None].astype(np.float64), sin[at][:, None].astype(np.float64)
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    out = x.copy()
    out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return out
