"""e4m3 operands with their scales from wider ones: what :func:`flash_attn_func` takes with ``q_descale`` and so on."""

import math
import numbers
from typing import Any, NamedTuple

from . import _library as abi
from . import engine as _engine
from ._tensors import adapter
from .engine import default_engine
from .errors import InvalidArgument, InvalidTensor, Unsupported

_SCALES = ("head", "tensor", "token", "block", "channel")
_KINDS = {"token": abi.DESCALE_TOKEN, "block": abi.DESCALE_BLOCK, "channel": abi.DESCALE_CHANNEL}


class Quantised(NamedTuple):
    """What :func:`quantise` gives; None for what was not asked for.

    ``flash_attn_func(r.q, r.k, r.v, **r.descales)`` is the attention of the three.
    """

    q: Any
    k: Any
    v: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    k_mean: Any
    descale_rows: int = 1

    @property
    def descales(self):
        """The scales under the names that :func:`flash_attn_func` has for them."""
        named = {"q_descale": self.q_descale, "k_descale": self.k_descale, "v_descale": self.v_descale}
        return named if self.descale_rows == 1 else {**named, "descale_rows": self.descale_rows}


def quantise(
    q=None,
    k=None,
    v=None,
    *,
    scales="head",
    block_rows=128,
    subtract_mean=False,
    hadamard=False,
    rotary_cos=None,
    rotary_sin=None,
    rotary_interleaved=True,
    q_positions=0,
    k_positions=0,
    kv_heads=None,
    layout="bshd",
):
    """Q, K and V, or some of them, in float8_e4m3fn, with the scales that their elements are multiplied by.

    q: ``[batch, q_len, heads, head_dim]``; k: ``[batch, kv_len, kv_heads, head_dim]``; v: ``[batch, kv_len, kv_heads,
        head_dim_v]``; of one dtype of float16, bfloat16 and float32, any strides with a contiguous last dimension.
    scales: what shares a scale, of all three or as a tuple of each: ``"head"``, a KV head of a sequence, of q all query
        heads of that; ``"tensor"``, all; of q and k also ``"token"``, a row of a head, and ``"block"``, ``block_rows``
        rows of a head that follow each other; of v also ``"channel"``, a column of a head. The largest finite element
        becomes 448, the largest of e4m3. Where all are zero a scale is 1.
    block_rows: a power of two from 2 to 128.
    subtract_mean: whether k's mean over the rows of each head is taken from them, which takes away what all keys share
        and scores would be rounded for. O of the attention is what it is without; its log-sum-exp lacks
        ``softmax_scale * (q * k_mean).sum(-1)`` of each row, with q as rotated by its position.
    hadamard: whether rows of q and k are multiplied by the Hadamard matrix over the root of ``head_dim``, a power of
        two: what few channels have large is shared by all. Scores are what they are without.
    rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``: rows of q and k are rotated first.
    rotary_interleaved: whether neighbours turn together (GPT-J), or halves (NeoX).
    q_positions, k_positions: positions of the rows: a number for the first, or int32 or int64 ``[batch, rows]`` or
        ``[rows]``. Rows at positions that the tables have not become NaN.
    kv_heads: of q without k and v, the KV heads that share its scales.
    layout: ``"bshd"``, or ``"bhsd"`` for ``[batch, heads, rows, head_dim]``.
    Gives a :class:`Quantised`: tensors in q's layout, float32 scales, ``[batch, kv_heads]``, ``[batch, heads, rows]``,
    ``[batch, heads, rows / block_rows]`` or ``[batch, kv_heads, head_dim_v]``, and ``[batch, kv_heads, head_dim]``
    k_mean. NaN stays NaN, an infinity becomes 448 of its sign, and neither counts for a scale or the mean.
    """
    first = next((t for t in (q, k, v) if t is not None), None)
    if first is None:
        raise InvalidArgument("q, k and v are None; pass what is to be quantised")
    tensors = adapter(first)
    name = tensors.name(getattr(first, "device", "cpu"))
    engine = _engine._engines.get(name)
    engine = default_engine(name) if engine is None or engine.closed else engine
    return engine.quantise(
        q, k, v, scales=scales, block_rows=block_rows, subtract_mean=subtract_mean, hadamard=hadamard,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved, q_positions=q_positions,
        k_positions=k_positions, kv_heads=kv_heads, layout=layout,
    )  # fmt: skip


def of_engine(
    engine, q, k, v, scales, block_rows, subtract_mean, hadamard, rotary_cos, rotary_sin, rotary_interleaved,
    q_positions,
    k_positions, kv_heads, layout,
):  # fmt: skip
    """:func:`quantise` on an engine."""
    given = [t for t in (q, k, v) if t is not None]
    if not given:
        raise InvalidArgument("q, k and v are None; pass what is to be quantised")
    each = _each(scales)
    if isinstance(block_rows, bool) or not isinstance(block_rows, numbers.Integral) or not 2 <= block_rows <= 128:
        raise InvalidArgument(f"block_rows is {block_rows!r}; it is a power of two from 2 to 128")
    if layout not in ("bshd", "bhsd"):
        raise InvalidArgument(f"layout is {layout!r}; it is 'bshd' or 'bhsd'")
    if subtract_mean and k is None:
        raise InvalidArgument("subtract_mean is given without k; pass k, or leave it out")
    first, bshd = given[0], layout == "bshd"
    tensors = adapter(first)
    device = tensors.device(first, given[1] if len(given) > 1 else first, given[-1])
    name = tensors.name(device)
    if name != engine.device:
        raise InvalidTensor(
            f"what is quantised is on {name}, the engine computes on {engine.device}; move it, or use an engine there"
        )
    described = [None if t is None else tensors.describe(n, t, bshd) for n, t in zip("qkv", (q, k, v))]
    batch = next(d for d in described if d is not None)[1]
    of_kv = next((d for d in described[1:] if d is not None), None)
    by_rows = each[0] in ("token", "block")
    if of_kv is None and kv_heads is None and by_rows:
        # They say nothing of KV heads.
        kv_heads = described[0][2]
    if of_kv is None and kv_heads is None:
        raise InvalidArgument("kv_heads is None beside q alone; pass the KV heads that share its scales")
    if of_kv is not None and kv_heads is not None and kv_heads != of_kv[2]:
        raise InvalidArgument(f"kv_heads is {kv_heads}, but k and v have {of_kv[2]}; leave it out")
    heads = kv_heads if of_kv is None else of_kv[2]
    if isinstance(heads, bool) or not isinstance(heads, numbers.Integral) or heads < 0:
        raise InvalidArgument(f"kv_heads is {heads!r}; it is a number")
    parts, outs, found, of_head, by = [], [], [], [], []
    for d, kind in zip(described, each):
        if d is None:
            parts.append((0,) * 11)
            outs.append((None, (0,) * 11))
            found.append(None)
            of_head += (0, 0)
            by += (0, 0, 0)
            continue
        _, b, h, s, n = d[:5]
        out = tensors.empty_e4m3((b, s, h, n) if bshd else (b, h, s, n), first)
        strides = (s * h * n, n, h * n, 1) if bshd else (h * s * n, s * n, n, 1)
        parts.append(d)
        outs.append((out, (tensors.address(out), b, h, s, n, *strides, abi.E4M3, 0)))
        units = {"token": (h, s), "block": (h, -(-s // block_rows)), "channel": (heads, n)}.get(kind, (heads,))
        found.append(tensors.empty_lse((batch, *units), first))
        of_head += (math.prod(units), math.prod(units[1:]))
        by += (_KINDS.get(kind, abi.DESCALE_HEAD), block_rows if kind == "block" else 0, len(units) - 1)
    mean = tensors.empty_lse((batch, heads, described[1][4]), first) if subtract_mean else None
    flags = abi.QUANTISE_INTERLEAVED * bool(rotary_interleaved) | abi.QUANTISE_HADAMARD * bool(hadamard)
    flags |= abi.QUANTISE_MEAN * bool(subtract_mean)
    for kind, whole in zip(each, abi.QUANTISE_WHOLE):
        flags |= whole * (kind == "tensor")
    table, positions = _rotary(tensors, device, rotary_cos, rotary_sin, q_positions, k_positions, described, batch)
    dim = 0 if described[1] is None else described[1][4]
    args = abi.QUANTISE_ARGS.pack(
        abi.QUANTISE_ARGS.size,
        flags,
        *(x for part in parts for x in part),
        *(x for _, out in outs for x in out),
        *(0 if t is None else tensors.address(t) for t in found),
        *of_head,
        0 if mean is None else tensors.address(mean),
        heads * dim,
        dim,
        heads,
        *table,
        *positions,
        *by,
    )
    abi.require(abi.library().flashtune_quantise(engine._handle, args, tensors.stream(device) or None))
    _engine._last = engine
    return Quantised(*(out for out, _ in outs), *found, mean, block_rows if "block" in each[:2] else 1)


def _each(scales):
    """What shares a scale in q, k and v."""
    each = (scales,) * 3 if isinstance(scales, str) else scales
    if not isinstance(each, (tuple, list)) or len(each) != 3 or any(kind not in _SCALES for kind in each):
        known = ", ".join(map(repr, _SCALES))
        raise InvalidArgument(f"scales is {scales!r}; it is one of {known}, or a tuple of one for each of q, k and v")
    if each[2] in ("token", "block"):
        remedy = f"pass ('{each[0]}', '{each[1]}', 'channel')"
        raise Unsupported(f"scales of v by {each[2]} are read by no attention; {remedy}")
    for name, kind in zip("qk", each):
        if kind == "channel":
            raise Unsupported(f"scales of {name} by channel are read by no attention; pass 'token' or 'head' for it")
    if set(each[:2]) == {"token", "block"}:
        raise Unsupported("scales of q and k by token and by block are read by no one call; pass one kind for both")
    return tuple(each)


def _rotary(tensors, device, cos, sin, q_positions, k_positions, described, batch):
    """The ends of the arguments that say how rows are rotated."""
    if (cos is None) != (sin is None):
        raise InvalidArgument("of rotary_cos and rotary_sin one is None; pass both, or neither")
    if cos is None:
        return (0,) * 7, (0,) * 6
    tables = [tensors.side(name, t, device) for name, t in (("rotary_cos", cos), ("rotary_sin", sin))]
    (at_cos, shape, strides, dtype), (at_sin, *of_sin) = tables
    if [shape, strides, dtype] != of_sin or len(shape) != 2 or (shape[1] > 1 and strides[1] != 1):
        raise InvalidTensor(
            f"rotary_cos is {dtype} {shape} by {strides}, rotary_sin {of_sin[2]} {of_sin[0]} by {of_sin[1]}; both are "
            "[positions, rotary_dim / 2] of one dtype with contiguous rows"
        )
    if dtype not in abi.DTYPES:
        raise InvalidTensor(f"rotary_cos is {dtype}; it is float32, or of the dtype of q and k")
    places, words = [], None
    for name, positions, of in (("q_positions", q_positions, described[0]), ("k_positions", k_positions, described[1])):
        if isinstance(positions, numbers.Integral) and not isinstance(positions, bool):
            places.append((0, 0, int(positions)))
            continue
        address, found, stride, kind = tensors.side(name, positions, device)
        rows = found[-1] if of is None and found else 0 if of is None else of[3]
        if found not in ((batch, rows), (rows,)) or kind not in abi.INTS or (rows > 1 and stride[-1] != 1):
            raise InvalidTensor(
                f"{name} is {kind} {found} by {stride}; it is a number, or contiguous int32 or int64 [batch, rows] or "
                f"[rows], here of {rows} rows"
            )
        if words not in (None, kind):
            raise InvalidTensor(f"q_positions is {words}, k_positions {kind}; convert one of them")
        words = kind
        places.append((address, stride[0] if len(found) == 2 else 0, 0))
    table = (at_cos, at_sin, strides[0], shape[0], 2 * shape[1], abi.DTYPES[dtype], abi.INTS[words or "int32"])
    (q_at, q_stride, q_first), (k_at, k_stride, k_first) = places
    return table, (q_at, k_at, q_stride, k_stride, q_first, k_first)
