"""Score programs that are measured: each as a text of ours, as functions for FlexAttention, and as options of
FlashAttention-4 where it has them. Needs no PyTorch to be imported.

Queries and keys have the same length here, and heads their own keys.
"""

import random
from dataclasses import dataclass
from typing import Callable, Optional


@dataclass(frozen=True)
class Case:
    """One program. `tensors` makes what it reads; given that, `visible` and `changed` make FlexAttention's functions
    (b, h, q, kv) and (score, b, h, q, kv), which a reference is computed with, too."""

    name: str
    ours: dict  # arguments of Engine.forward, tensors aside
    tensors: Callable = lambda size: {}
    visible: Optional[Callable] = None  # None sees everything
    changed: Optional[Callable] = None
    fa4: Optional[dict] = None  # options, or None where it has none; documents are sequences of various lengths there
    length: int = 16384
    aim: float = 0.0  # of dense causal's rate
    bias_bytes: int = 0  # for every score


@dataclass(frozen=True)
class Size:
    """What tensors are made for; `torch` is the module."""

    torch: object
    device: str
    heads: int
    length: int


def documents(mean):
    """Numbers of packed documents whose lengths are between half and one and a half times the mean, at no boundary of a
    block."""

    def make(size):
        draw, lengths = random.Random(mean), []
        while sum(lengths) < size.length:
            lengths.append(draw.randint(mean // 2, mean * 3 // 2))
        numbers = [d for d, n in enumerate(lengths) for _ in range(n)][: size.length]
        found = size.torch.tensor([numbers], dtype=size.torch.int32, device=size.device)
        return {"doc_q": found, "doc_kv": found}

    return make


def slopes(size):
    """ALiBi's slopes, which halve every eighth of the heads."""
    heads = size.torch.arange(1, size.heads + 1, device=size.device, dtype=size.torch.float32)
    return {"slope": size.torch.exp2(-8 * heads / size.heads)}


def bias(size):
    """A bias for every score of every head, made where it is used."""
    shape = (size.heads, size.length, size.length)
    return {"bias": size.torch.randn(shape, device=size.device, dtype=size.torch.bfloat16)}


def soft_cap(cap):
    return lambda: lambda s, b, h, q, kv: cap * (s / cap).tanh()


def prefix(size):
    """A prefix of an eighth of the keys."""
    return {"prefix": size.torch.tensor([size.length // 8], dtype=size.torch.int32, device=size.device)}


def live_blocks(size):
    """Which blocks of 128 queries and 128 keys are attended: a tenth of them, and those on the diagonal."""
    blocks, torch = -(-size.length // 128), size.torch
    draw = torch.Generator().manual_seed(1)
    live = (torch.rand(blocks, blocks, generator=draw) < 0.1) | torch.eye(blocks, dtype=torch.bool)
    return {"live": live.to(size.device)}


def of_blocks(size):
    """The same as a mask of every score."""
    seen = live_blocks(size)["live"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {"seen": seen[: size.length, : size.length].contiguous()}


def half(size):
    """Every second score, at random."""
    draw = size.torch.Generator(size.device).manual_seed(1)
    scores = size.torch.rand(size.length, size.length, generator=draw, device=size.device)
    return {"seen": scores < 0.5}


def plain_documents(mean):
    """Documents of which nothing is promised."""
    return lambda size: {"of_q": documents(mean)(size)["doc_q"], "of_kv": documents(mean)(size)["doc_kv"]}


causal = lambda **_: lambda b, h, q, kv: q >= kv
same_document = lambda doc_q, doc_kv: lambda b, h, q, kv: doc_q[b, q] == doc_kv[b, kv]
causal_document = lambda doc_q, doc_kv: lambda b, h, q, kv: (doc_q[b, q] == doc_kv[b, kv]) & (q >= kv)

# All are held against the first of these.
CASES = (
    Case("causal", {"causal": True}, visible=causal, fa4={"causal": True}),
    Case("causal as a program", {"mask": "kv <= q + shift", "tensors": {"shift": 0}}, visible=causal, aim=0.99),
    Case(
        "window 1024",
        {"mask": "kv <= q and q - kv < 1024"},
        visible=lambda: lambda b, h, q, kv: (q >= kv) & (q - kv < 1024),
        fa4={"causal": True, "window_size": (1023, 0)},
        aim=0.92,
    ),
    Case(
        "chunked 2048",
        {"mask": "chunked", "tensors": {"chunk": 2048}},
        visible=lambda: lambda b, h, q, kv: (q // 2048 == kv // 2048) & (q >= kv),
        aim=0.92,
    ),
    Case(
        "block local 2048",
        {"mask": "block_local", "tensors": {"block": 2048}},
        visible=lambda: lambda b, h, q, kv: q // 2048 == kv // 2048,
        aim=0.92,
    ),
    Case(
        "prefix 2048",
        {"mask": "prefix_lm"},
        prefix,
        visible=lambda prefix: lambda b, h, q, kv: (kv < prefix[b]) | (q >= kv),
        aim=0.92,
    ),
    Case("document 2k", {"mask": "document"}, documents(2048), same_document, fa4={}, aim=0.92),
    Case("document 512", {"mask": "document"}, documents(512), same_document, fa4={}, aim=0.92),
    Case("document causal 2k", {"mask": "document_causal"}, documents(2048), causal_document, fa4={"causal": True}),
    Case(
        "alibi",
        {"causal": True, "score": "alibi"},
        slopes,
        causal,
        lambda slope: lambda s, b, h, q, kv: s + slope[h] * (kv - q),
        aim=0.9,
    ),
    Case(
        "soft cap 30",
        {"causal": True, "score": "30.0 * tanh(score / 30.0)"},
        visible=causal,
        changed=soft_cap(30.0),
        fa4={"causal": True, "softcap": 30.0},
        aim=0.8,
    ),
    Case(
        "soft cap by a scalar",
        {"causal": True, "score": "soft_cap", "tensors": {"cap": 50.0}},
        visible=causal,
        changed=soft_cap(50.0),
        fa4={"causal": True, "softcap": 50.0},
        aim=0.8,
    ),
    Case(
        "soft cap by a scalar up to 50",
        {"causal": True, "score": "cap: float in 0..50; cap * tanh(score / cap)", "tensors": {"cap": 50.0}},
        visible=causal,
        changed=soft_cap(50.0),
        fa4={"causal": True, "softcap": 50.0},
        aim=0.8,
    ),
    Case(
        "bias 4k",
        {"score": "score + bias[h, q, kv]"},
        bias,
        changed=lambda bias: lambda s, b, h, q, kv: s + bias[h, q, kv],
        length=4096,
        bias_bytes=2,
    ),
    Case(
        "a tenth of the blocks, by a table",
        {"mask": "live[q // 128, kv // 128]"},
        live_blocks,
        visible=lambda live: lambda b, h, q, kv: live[q // 128, kv // 128],
        aim=0.8,
    ),
    Case(
        "a tenth of the blocks, by a mask",
        {"mask": "seen[q, kv]"},
        of_blocks,
        visible=lambda seen: lambda b, h, q, kv: seen[q, kv],
        aim=0.7,
    ),
    Case(
        "half of the scores, by a mask",
        {"mask": "seen[q, kv]"},
        half,
        visible=lambda seen: lambda b, h, q, kv: seen[q, kv],
    ),
    Case(
        "dilated 4",
        {"mask": "kv <= q and (q - kv) % 4 == 0"},
        visible=lambda: lambda b, h, q, kv: (q >= kv) & ((q - kv) % 4 == 0),
    ),
    Case(
        "document 2k without promises",
        {"mask": "of_q[b, q] == of_kv[b, kv]"},
        plain_documents(2048),
        lambda of_q, of_kv: lambda b, h, q, kv: of_q[b, q] == of_kv[b, kv],
        aim=0.7,
    ),
)
