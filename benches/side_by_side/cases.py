"""What is computed: problems, sizes, and the suites of them. Needs no PyTorch."""

from dataclasses import dataclass

BYTES = {"f16": 2, "bf16": 2, "f32": 4}


@dataclass(frozen=True)
class Case:
    """One problem and its sizes. `window` is the reach to the left; None is all."""

    dtype: str
    head_dim: int
    causal: bool
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    window: int = None

    @property
    def mask(self):
        if self.window is not None:
            return f"window:{self.window},{0 if self.causal else '-'}"
        return "causal" if self.causal else "full"

    @property
    def window_size(self):
        """(left, right) as flash-attention counts: -1 is all."""
        return (-1 if self.window is None else self.window, 0 if self.causal else -1)

    def live_pairs(self):
        """(query, key) pairs that are attended; query i stands at i + kv_len - q_len among the keys."""
        if not self.causal and self.window is None:
            return self.q_len * self.kv_len
        pairs = 0
        for i in range(self.q_len):
            at = i + self.kv_len - self.q_len
            end = min(at + 1, self.kv_len) if self.causal else self.kv_len
            begin = 0 if self.window is None else max(0, at - self.window)
            pairs += max(0, end - begin)
        return pairs

    def flops(self):
        return 4 * self.live_pairs() * self.head_dim * self.batch * self.heads

    def ideal_bytes(self):
        rows = self.heads * self.q_len + self.kv_heads * self.kv_len
        return 2 * self.batch * rows * self.head_dim * BYTES[self.dtype]

    def scores_bytes(self):
        return self.batch * self.heads * self.q_len * self.kv_len * BYTES[self.dtype]

    def counts(self):
        """Work and bytes, as a report has them."""
        return {"flops": self.flops(), "ideal_bytes": self.ideal_bytes(), "scores_bytes": self.scores_bytes()}

    def facts(self):
        """The case as a report has it."""
        return {
            "dtype": self.dtype,
            "head_dim_qk": self.head_dim,
            "head_dim_v": self.head_dim,
            "mask": self.mask,
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "q_len": self.q_len,
            "kv_len": self.kv_len,
        }

    def __str__(self):
        heads = f"h{self.heads}/{self.kv_heads}"
        return f"{self.dtype} d{self.head_dim} {self.mask} b{self.batch} {heads} {self.q_len}x{self.kv_len}"


@dataclass(frozen=True)
class Grid:
    """What the suites range over. `tokens` and `width` keep the work alike: batch = tokens / length, heads = width /
    head dim; 0 stands for a batch of 1 and for 8 heads."""

    dtypes: tuple
    head_dims: tuple
    masks: tuple
    seq_lens: tuple
    tokens: int
    width: int

    @staticmethod
    def default(device):
        if device == "cpu":
            return Grid(("f32", "bf16"), (64, 128), ("full", "causal"), (1024, 4096), 0, 0)
        lengths = (512, 1024, 2048, 4096, 8192, 16384)
        return Grid(("bf16",), (64, 128, 256), ("full", "causal"), lengths, 16384, 2048)


def forward(grid, device):
    for dtype in grid.dtypes:
        for d in grid.head_dims:
            for mask in grid.masks:
                for s in grid.seq_lens:
                    batch = max(1, grid.tokens // s)
                    heads = grid.width // d or 8
                    yield Case(dtype, d, mask == "causal", batch, heads, heads, s, s)


def heads(grid, device):
    """Head dims that are no power of two."""
    batch, count, length = (1, 4, 1024) if device == "cpu" else (4, 16, 4096)
    for dtype in grid.dtypes:
        for d in (96, 192):
            for mask in grid.masks:
                yield Case(dtype, d, mask == "causal", batch, count, count, length, length)


def gqa(grid, device):
    """Prefill with four query heads to a KV head."""
    sizes = ((1, 512), (1, 2048)) if device == "cpu" else ((1, 1024), (4, 4096), (1, 8192), (1, 32768))
    count = 8 if device == "cpu" else 32
    for dtype in grid.dtypes:
        for batch, length in sizes:
            yield Case(dtype, 128, True, batch, count, count // 4, length, length)


def window(grid, device):
    """A sliding window with causal right side."""
    sizes, reach, count = (((1, 2048),), 256, 8) if device == "cpu" else (((4, 4096), (1, 16384)), 1024, 32)
    for dtype in grid.dtypes:
        for batch, length in sizes:
            yield Case(dtype, 128, True, batch, count, count // 4, length, length, reach)


def decode(grid, device):
    """One query per sequence of a dense batch: batch, heads, KV heads, rows of K and V."""
    large = ((1, 32, 8, 32768), (16, 32, 8, 8192), (64, 32, 8, 4096), (128, 32, 8, 2048), (1, 64, 8, 131072))
    large += ((8, 32, 32, 4096),)
    small = ((1, 8, 2, 8192), (4, 8, 2, 2048), (2, 8, 8, 2048))
    for dtype in grid.dtypes:
        for batch, count, kv_heads, length in small if device == "cpu" else large:
            yield Case(dtype, 128, False, batch, count, kv_heads, 1, length)


SUITES = {"forward": forward, "heads": heads, "gqa": gqa, "window": window, "dense-decode": decode}


def points(suites, grid, device):
    """(suite, case) of everything that is to be measured."""
    return [(name, case) for name in suites for case in SUITES[name](grid, device)]
