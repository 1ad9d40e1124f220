"""What serving computes: sequences of different lengths over packed keys, slots and pages, and the suites of them
with what each is to reach on an H200. Needs no PyTorch."""

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Optional

from .aims import BestOther, OfCase, ReadRate, Tflops, Us
from .cases import BYTES

PACKED, SLOTS = "packed", "slots"
# Bytes that the nodes of a graph read before any is read again: four times what an H200's L2 cache holds.
COLD_BYTES = 256 << 20
# Nodes of a graph: the layers of a model. More where a layer reads little, so that no cache helps.
NODES, MOST_NODES = 16, 64
# The longest sequence that a host promises when it promises nothing of this step.
MODEL_BOUND = 131072


@dataclass(frozen=True)
class Case:
    """Sequences of `rows[b]` queries beside `lengths[b]` keys, the last query at the last key. `store` is PACKED,
    SLOTS, or the tokens of a page; `element` is that of the cache, "same" as the queries' or "e4m3". `window`
    counts the keys that a query sees, its own among them."""

    name: str
    lengths: tuple
    rows: tuple
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    store: object = 16
    element: str = "same"
    causal: bool = True
    window: Optional[int] = None
    soft_cap: float = 0.0
    sinks: bool = False
    dtype: str = "bf16"
    aim: object = None

    @property
    def batch(self):
        return len(self.lengths)

    @property
    def total_rows(self):
        return sum(self.rows)

    @property
    def is_even(self):
        """Whether all sequences have as many rows and keys."""
        return len(set(self.lengths)) == 1 and len(set(self.rows)) == 1

    @property
    def is_paged(self):
        return self.store not in (PACKED, SLOTS)

    @property
    def is_quantised(self):
        return self.element != "same"

    @property
    def window_size(self):
        """(left, right) as flash-attention counts: -1 is all."""
        return (-1 if self.window is None else self.window - 1, 0 if self.causal else -1)

    @property
    def mask(self):
        if self.window is not None:
            return f"window:{self.window - 1},{0 if self.causal else '-'}"
        return "causal" if self.causal else "full"

    def seen(self, b):
        """(first, end) of the keys that some row of a sequence sees."""
        first = 0 if self.window is None else max(0, self.lengths[b] - self.rows[b] - self.window + 1)
        return first, self.lengths[b] if self.rows[b] else first

    def live_pairs(self):
        """(query, key) pairs that are attended, of one head."""
        pairs = 0
        for n, r in zip(self.lengths, self.rows):
            if not self.causal and self.window is None:
                pairs += n * r
                continue
            for at in range(n - r, n):
                end = max(0, at + 1) if self.causal else n
                pairs += end - (0 if self.window is None else min(end, max(0, at + 1 - self.window)))
        return pairs

    def flops(self):
        return 4 * self.live_pairs() * self.head_dim * self.heads

    def element_bytes(self):
        return 1 if self.is_quantised else BYTES[self.dtype]

    def kv_bytes(self):
        """Bytes of keys and values that are seen."""
        keys = sum(end - first for first, end in map(self.seen, range(self.batch)))
        return 2 * keys * self.kv_heads * self.head_dim * self.element_bytes()

    def ideal_bytes(self):
        return self.kv_bytes() + 2 * self.total_rows * self.heads * self.head_dim * BYTES[self.dtype]

    def scores_bytes(self):
        return sum(n * r for n, r in zip(self.lengths, self.rows)) * self.heads * BYTES[self.dtype]

    def store_bytes(self):
        """Bytes of the store of one layer."""
        page = 1 if self.store in (PACKED, SLOTS) else self.store
        tokens = sum(-(-n // page) * page for n in self.lengths)
        return 2 * tokens * self.kv_heads * self.head_dim * self.element_bytes()

    def counts(self):
        return {"flops": self.flops(), "ideal_bytes": self.ideal_bytes(), "scores_bytes": self.scores_bytes()}

    def nodes(self):
        """(launches of a graph, stores that they take in turn). Where a store is larger than what is read of it,
        launches that share one have page tables of their own, which name other pages."""
        nodes = min(MOST_NODES, max(NODES, -(-COLD_BYTES // max(1, self.kv_bytes()))))
        return nodes, min(nodes, max(2, -(-2 * COLD_BYTES // max(1, self.store_bytes()))))

    def kept(self):
        """How keys and values are kept, in words."""
        where = f"pages of {self.store}" if self.is_paged else self.store
        return where if not self.is_quantised else f"{where}, {self.element}"

    def facts(self):
        """The case as a report has it: the most rows and keys of a sequence."""
        return {
            "name": self.name,
            "store": self.kept(),
            "dtype": self.dtype,
            "head_dim_qk": self.head_dim,
            "head_dim_v": self.head_dim,
            "mask": self.mask,
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "q_len": max(self.rows),
            "kv_len": max(self.lengths),
        }

    def listed(self):
        """Everything of the case, for a dry run."""
        nodes, stores = self.nodes()
        aim = {} if self.aim is None else {"aim": str(self.aim)}
        work = {**self.counts(), "kv_bytes": self.kv_bytes(), "store_bytes": self.store_bytes()}
        return {**self.facts(), **work, "total_q": self.total_rows, "nodes": nodes, "stores": stores, **aim}

    def small(self):
        """The same kind of case at a size for tests: four sequences at most, shorter ones, as many heads to a KV
        head."""
        group = self.heads // self.kv_heads
        kv_heads = min(2, self.kv_heads)
        step = -(-self.batch // 4)
        lengths = tuple(max(1, n // 64) for n in self.lengths[::step])
        kept = zip(self.rows[::step], self.lengths[::step], lengths)
        rows = tuple(min(r, 40) if r < n else m for r, n, m in kept)
        window = None if self.window is None else 9
        return replace(self, lengths=lengths, rows=rows, heads=group * kv_heads, kv_heads=kv_heads, window=window)

    def __str__(self):
        return f"{self.name} {self.heads}/{self.kv_heads} d{self.head_dim} {self.mask} {self.kept()}"


def even(batch, length, rows=1):
    """As many rows and keys for each of some sequences."""
    return {"lengths": (length,) * batch, "rows": (rows,) * batch}


def each(lengths, rows=1):
    """Sequences of these lengths; `rows` of each, or all with None."""
    return {"lengths": tuple(lengths), "rows": tuple(n if rows is None else rows for n in lengths)}


def spread(values):
    """The same values in an order that nothing is sorted by: every 37th (a prime) from the front, round and round."""
    n = len(values)
    step = next(s for s in (37, 41, 43, 47) if n % s)
    return [values[i * step % n] for i in range(n)]


# Four long sequences among sixty short ones.
SKEWED = [16384, 32768, 65536, 100000, *(128 + 15 * i for i in range(60))]
SHORT = [200 + 22 * i for i in range(128)]
ENCODER = spread([8 + round(504 * i / 255) for i in range(256)])


def lognormal(count, mean, sigma, least, most):
    """Lengths at the quantiles of a lognormal distribution, so that every run has the same."""
    normal = NormalDist(0, sigma)
    drawn = [2.718281828459045 ** normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    factor = mean * count / sum(drawn)
    return spread([min(most, max(least, round(factor * x))) for x in drawn])


PROMPTS = lognormal(48, 770, 1.1, 16, 8192)


def decode():
    yield Case("1 x 4k", **even(1, 4096), aim=Us(7))
    yield Case("1 x 32k", **even(1, 32768), aim=Us(35.5))
    yield Case("1 x 128k", **even(1, 131072), heads=64, aim=Us(128))
    yield Case("8 x 4k", **even(8, 4096), aim=Us(35.5))
    yield Case("16 x 8k", **even(16, 8192), aim=Us(128))
    yield Case("64 x 4k", **even(64, 4096), aim=ReadRate(1 / 1.02))
    yield Case("128 of 200 to 3000", **each(SHORT), aim=Us(196))
    yield Case("8 x 8k, 4 queries", **even(8, 8192, 4), aim=Us(67))
    yield Case("8 x 8k, 16 queries", **even(8, 8192, 16), aim=ReadRate(0.9))
    yield Case("32 x 8k, 8/1", **even(32, 8192), heads=8, kv_heads=1, aim=Us(36))
    yield Case("window of 128 over 16 x 32k", **even(16, 32768), window=128, aim=Us(6))
    sinks = {"heads": 64, "head_dim": 64, "sinks": True}
    yield Case("64 x 4k, D64, sinks, window of 128", **even(64, 4096), **sinks, window=128, aim=Us(7))
    yield Case("64 x 4k, D64, sinks", **even(64, 4096), **sinks, aim=ReadRate(1 / 1.03))
    yield Case("8 x 8k, D256, soft cap", **even(8, 8192), heads=16, head_dim=256, soft_cap=50.0, aim=ReadRate(0.9))
    yield Case("8 x 4k, 32/32", **even(8, 4096), kv_heads=32, aim=ReadRate(0.9))
    yield Case("8 x 4k, 28/4", **even(8, 4096), heads=28, kv_heads=4, aim=ReadRate(0.9))


def chunk():
    for rows, length in ((128, 8192), (512, 8192), (512, 32768), (2048, 32768)):
        for heads, kv_heads in ((28, 4), (32, 8), (8, 1)):
            name = f"{rows} x {length >> 10}k, {heads}/{kv_heads}"
            yield Case(name, **even(1, length, rows), heads=heads, kv_heads=kv_heads, aim=BestOther(1.0))
    yield Case("4 of 64 x 16k", **even(4, 16384, 64), aim=BestOther(1.0))


def varlen():
    packed = {"store": PACKED}
    yield Case("48 lognormal prompts, 32/8", **each(PROMPTS, None), **packed, aim=Tflops(610))
    yield Case("48 lognormal prompts, 32/32", **each(PROMPTS, None), **packed, kv_heads=32, aim=Tflops(570))
    yield Case("8 x 2048", **even(8, 2048, 2048), **packed, aim=Tflops(600))
    encoder = {"heads": 12, "kv_heads": 12, "head_dim": 64, "causal": False, **packed}
    yield Case("256 encoder inputs of 8 to 512", **each(ENCODER, None), **encoder, aim=Us(290))
    yield Case("32 x 197", **even(32, 197, 197), **encoder, aim=Us(26))


def paged():
    for name, sequences in (("1 x 32k", even(1, 32768)), ("16 x 8k", even(16, 8192)), ("64 x 4k", even(64, 4096))):
        yield Case(f"{name}, slots", **sequences, store=SLOTS)
        for page in (1, 16, 64, 256):
            aim = OfCase(f"{name}, slots", 1.1 if page == 1 else 1.03)
            yield Case(f"{name}, pages of {page}", **sequences, store=page, aim=aim)


def quantised():
    e4m3 = {"element": "e4m3"}
    yield Case("1 x 32k, e4m3", **even(1, 32768), **e4m3, aim=Us(20))
    yield Case("64 x 4k, e4m3", **even(64, 4096), **e4m3, aim=Us(131))
    yield Case("skewed, e4m3", **each(SKEWED), **e4m3, aim=Us(150))
    yield Case("128 of 200 to 3000, e4m3", **each(SHORT), **e4m3, aim=Us(110))
    yield Case("8 x 8k, 4 queries, e4m3", **even(8, 8192, 4), **e4m3, aim=Us(40))
    yield Case("window of 128 over 16 x 32k, e4m3", **even(16, 32768), **e4m3, window=128, aim=Us(6))


def skewed():
    yield Case("60 of 128 to 1k and 16k, 32k, 64k, 100k", **each(SKEWED), aim=Us(240))
    yield Case("100k beside 63 of 128", **each([100000, *(128,) * 63]))


SUITES = {
    "decode": decode,
    "chunk": chunk,
    "varlen": varlen,
    "paged": paged,
    "quantised": quantised,
    "skewed": skewed,
}


def points(suites, device, names=None):
    """(suite, case) of everything that is to be measured: on the CPU at small sizes, and without aims, which are an
    H200's. `names` keeps those cases whose name holds one of the words."""
    found = [(suite, case) for suite in suites for case in SUITES[suite]()]
    if names:
        found = [(suite, case) for suite, case in found if any(word in case.name for word in names)]
    if device == "cpu":
        # Quantised caches are read beside 16-bit queries alone.
        dtype = lambda case: "f16" if case.is_quantised else "f32"
        found = [(suite, replace(case.small(), aim=None, dtype=dtype(case))) for suite, case in found]
    return found
