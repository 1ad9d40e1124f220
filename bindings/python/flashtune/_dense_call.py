"""The calls of dense tensors and their gradients: from what Python has to the arguments of the library, and calls that
are like one before with other addresses."""

import math
import numbers
import operator
import struct

from . import _library as abi
from . import engine as _engine
from ._known_calls import NOT_KNOWN
from ._programs import PackedProgram, pack_gradients
from .block_mask import handle_of
from .errors import InvalidArgument, InvalidTensor, Unsupported


# Calls of an engine that are known by their form. One of 256 forms is found again as fast as one of two; a decode
# without a cache meets a new one in each step, and starts over.
MOST_CALLS = 256
# Where flashtune_forward_args has the addresses of q, k, v and o.
_PLACES = 8, 88, 168, 248
# Of an element.
_BYTES = {abi.F16: 2, abi.BF16: 2, abi.F32: 4, abi.E4M3: 1}
# Behind what a repeated backward pass packs anew: window, mask, scale and a program come before packed sequences.
_PROGRAM_AT = abi.BACKWARD_ARGS.size - abi.BACKWARD_AGAIN.size
_PACKED_AT = _PROGRAM_AT + abi.PROGRAM_ARGS.size
# Where dropout is behind what every call packs.
_FORWARD_DROPOUT_AT = sum(
    part.size for part in (abi.PROGRAM_ARGS, abi.BLOCK_MASK, abi.WEIGHTS, abi.DESCALES, abi.TENSOR)
)
_DROPOUT_AT = abi.PROGRAM_ARGS.size + abi.BACKWARD_PACKED.size + abi.GRADIENTS.size + abi.TENSOR.size


def attend(
    engine,
    tensors,
    q,
    k,
    v,
    bshd,
    mask,
    left,
    right,
    scale,
    return_lse,
    out=None,
    top_left=False,
    grouped=True,
    program=None,
    block_mask=None,
    return_weights=False,
    precision=None,
    descales=(None, None, None),
    descale_rows=1,
    residual=False,
    dropout=None,
    out_scale=None,
):
    """The one path to the library. ``mask``, ``left`` and ``right`` are the header's; ``top_left`` replaces them by
    PyTorch's causal mask; without ``grouped`` all tensors must have as many heads. With ``residual`` what O loses
    by rounding comes behind it and the log-sum-exp; weights come last."""
    device = tensors.device(q, k, v)
    name = tensors.name(device)
    if name != engine.device:
        raise InvalidTensor(
            f"q, k and v are on {name}, the engine computes on {engine.device}; move them, or use an engine there"
        )
    key = None
    scaled = any(scales is not None for scales in descales)
    plain = block_mask is None and out is None and not return_weights
    plain = plain and not scaled and not residual and dropout is None and out_scale is None
    side = ()
    if plain and (scale is None or type(scale) is float):
        try:
            forms, side = (tensors.forms(q, k, v), ()) if program is None else _forms(tensors, program, (q, k, v))
        except RuntimeError:
            # What is told below.
            forms = None
        if forms is not None:
            key = (forms, bshd, mask, left, right, scale, return_lse, top_left, grouped, precision)
            known = engine._again.get(key)
            if known is not None:
                result = _attend_again(engine, known, tensors, device, q, k, v, side)
                if result is not None:
                    return result
    qd = tensors.describe("q", q, bshd)
    kd = tensors.describe("k", k, bshd)
    vd = tensors.describe("v", v, bshd)
    _, b, h, s, _, _, _, _, _, dtype, _ = qd
    dv = vd[4]
    new, o_dtype = tensors.empty, dtype
    if dtype == abi.E4M3 and out_scale is None:
        new, o_dtype = tensors.empty_wide, abi.BF16
    if not grouped and h != kd[2]:
        raise InvalidTensor(
            f"query has {h} heads, key {kd[2]}; pass enable_gqa=True for query heads that share a key head"
        )
    if top_left:
        mask, left, right, kd, vd = _top_left_causal(qd, kd, vd)
    if out is None:
        # Contiguous, so its strides are known without asking.
        if bshd:
            out = new((b, s, h, dv), q)
            strides = (s * h * dv, dv, h * dv, 1)
        else:
            out = new((b, h, s, dv), q)
            strides = (h * s * dv, s * dv, dv, 1)
        od = (tensors.address(out), b, h, s, dv, *strides, o_dtype, 0)
    else:
        tensors.check_out(out, device)
        od = tensors.describe("out", out, bshd)
        for other, described in (("q", qd), ("k", kd), ("v", vd)):
            if _overlap(od, described):
                raise InvalidTensor(
                    f"out shares memory with {other}, which is read while out is written; pass other memory"
                )
    lse = tensors.empty_lse((b, h, s), q) if return_lse else None
    more, _kept = (b"", None) if program is None else program.pack(tensors, device)
    if block_mask is not None:
        # An operator has its number, of a block mask that was looked at before.
        number = block_mask % (1 << 64) if isinstance(block_mask, int) else handle_of(block_mask, name)
        more = (more or bytes(abi.PROGRAM_ARGS.size)) + abi.BLOCK_MASK.pack(number)
    weights = None
    if return_weights:
        weights = tensors.empty_lse((b, h, s, kd[3]), q)
        before = abi.PROGRAM_ARGS.size + abi.BLOCK_MASK.size
        more = more.ljust(before, b"\0") + abi.WEIGHTS.pack(tensors.address(weights))
    if scaled:
        before = abi.PROGRAM_ARGS.size + abi.BLOCK_MASK.size + abi.WEIGHTS.size
        scales, by = _descales(tensors, device, descales, descale_rows, (qd, kd, vd))
        more = more.ljust(before, b"\0") + scales
    lost = None
    if residual:
        lost = _empty_residual(tensors, tuple(out.shape), q)
        before = abi.PROGRAM_ARGS.size + abi.BLOCK_MASK.size + abi.WEIGHTS.size + abi.DESCALES.size
        more = more.ljust(before, b"\0") + abi.TENSOR.pack(*tensors.describe("residual", lost, bshd))
    if dropout is not None:
        more = more.ljust(_FORWARD_DROPOUT_AT, b"\0") + dropout.pack(tensors, device)
    if scaled and by is not None:
        more = more.ljust(_FORWARD_DROPOUT_AT + abi.DROPOUT.size, b"\0") + by
    if out_scale is not None:
        before = _FORWARD_DROPOUT_AT + abi.DROPOUT.size + abi.DESCALES_BY.size
        more = more.ljust(before, b"\0") + _out_scale(tensors, device, out_scale, dtype)
    try:
        flags = abi.PRECISIONS[precision]
    except (KeyError, TypeError):
        raise InvalidArgument(f"precision is {precision!r}; it is 'exact', 'tf32x3', 'tf32', or None") from None
    try:
        args = abi.FORWARD_ARGS.pack(
            abi.FORWARD_ARGS.size + len(more),
            flags if scale is None else flags | abi.SCALE_IS_GIVEN,
            *qd,
            *kd,
            *vd,
            *od,
            0 if lse is None else tensors.address(lse),
            tensors.stream(device),
            left,
            right,
            mask,
            0.0 if scale is None else scale,
        )
    except (struct.error, OverflowError) as e:
        raise InvalidArgument(f"the softmax scale is {scale!r}, but it is a finite number: {e}") from None
    status = engine._forward(engine._handle, args + more)
    if status:
        raise abi.failure(status)
    _engine._last = engine
    # O of e4m3 is of another dtype, which a repeated call would have to ask for.
    if key is not None and dtype == o_dtype:
        if len(engine._again) >= MOST_CALLS:
            engine._again.clear()
        again = None if program is None else PackedProgram(program, tensors, device)
        # All but q, k, v, o, lse and stream, as the layout of the struct has them.
        fixed = [args[a:b] for a, b in ((0, 8), (16, 88), (96, 168), (176, 248), (256, 328), (344, 368))]
        # O is contiguous.
        like_q = tuple(q.shape) == tuple(out.shape)
        shapes = None if like_q else tuple(out.shape), (b, h, s) if return_lse else None
        engine._again[key] = (*fixed, *shapes, again)
    if weights is not None or lost is not None:
        return (out, *(t for t in (lse, lost, weights) if t is not None))
    return out if lse is None else (out, lse)


def attend_plain_again(engine, tensors, device, q, k, v, bshd, mask, scale, return_lse, top_left=False, grouped=True):
    """A call without windows and options, if one like it has been made; else None."""
    # As `attend` writes them.
    options = (bshd, mask, 0, 0, scale, return_lse, top_left, grouped, None)
    known_calls, out = tensors.known_calls, None
    number = None if known_calls is None else engine._numbers.get(options)
    if number is not None and not (q.is_neg() or k.is_neg() or v.is_neg()):
        try:
            out = tensors.empty_like(q)
        except RuntimeError:
            # Sparse or nested, of which the long way says so.
            return None
        stream = 0 if engine._index is None else tensors.raw_stream(engine._index)
        # Which devices k and v are on is part of what the library knows a call by.
        status = known_calls.call(engine._handle, number, stream, known_calls.read, q, k, v, out)
        if status == 0:
            _engine._last = engine
            return out
        if status != NOT_KNOWN:
            raise abi.failure(status)
    if not tensors.are_there(device, k, v):
        return None
    try:
        forms = tensors.forms(q, k, v)
    except RuntimeError:
        return None
    known = engine._again.get((forms, *options))
    return None if known is None else _attend_again(engine, known, tensors, device, q, k, v, (), out, options)


def _attend_again(engine, known, tensors, device, q, k, v, side=(), like_q=None, options=None):
    """A call like one before, with other addresses; None where a tensor has no memory to read. ``side``: the
    tensors that its program reads; ``like_q``: memory for O, of q's shape; ``options``: what the library is to know
    the call by."""
    head, of_q, of_k, of_v, of_o, tail, shape, lse_shape, program = known
    try:
        addresses = tensors.addresses(q, k, v)
        read = tensors.addresses_of(side) if side else ()
    except RuntimeError:
        return None
    if addresses is None:
        return None
    at_q, at_k, at_v = addresses
    if shape is None:
        out = tensors.empty_like(q) if like_q is None else like_q
    else:
        out = tensors.empty(shape, q)
    lse = None if lse_shape is None else tensors.empty_lse(lse_shape, q)
    args = abi.FORWARD_AGAIN.pack(
        head, at_q, of_q, at_k, of_k, at_v, of_v, tensors.address(out), of_o,
        0 if lse is None else tensors.address(lse), 0 if engine.device == "cpu" else tensors.stream(device), tail,
    )  # fmt: skip
    if program is not None:
        more, _kept = program.pack(read)
        args += more
    status = engine._forward(engine._handle, args)
    if status:
        raise abi.failure(status)
    _engine._last = engine
    if options is not None and shape is None and lse is None and program is None:
        known_calls = tensors.known_calls
        if known_calls is not None:
            known_calls.remember(engine, options, 0, args, _PLACES, (q, k, v, out))
    return out if lse is None else (out, lse)


def gradients(
    engine, tensors, dout, q, k, v, out, lse, dlse, bshd, mask, left, right, scale, into, program, run=True,
    packed=None, needs=(), key=None, residual=None, dropout=None,
):  # fmt: skip
    """dQ, dK and dV, and with names in ``needs`` a dict of the gradients of these, too. ``mask``, ``left`` and
    ``right`` are the header's; without ``run`` all but the launch. ``packed`` is the end of the arguments that
    packed sequences have: tensors are then ``[rows, heads, head_dim]``, and rows of no sequence are 0 in new
    gradients. ``key`` is what such a call is to be known by."""
    device = tensors.device(q, k, v)
    name = tensors.name(device)
    if name != engine.device:
        raise InvalidTensor(
            f"q, k and v are on {name}, the engine computes on {engine.device}; move them, or use an engine there"
        )
    given_into = into is not None
    plain = not given_into and packed is None and run and not needs and residual is None
    plain = plain and dropout is None
    if plain and (scale is None or type(scale) is float):
        forms, side = _forms(tensors, program, (q, k, v, dout, out, lse, dlse))
        if forms is not None:
            key = (forms, bshd, mask, left, right, scale)
            known = engine._again_backward.get(key)
            if known is not None:
                given = dout, q, k, v, out
                result = gradients_again(engine, known, tensors, device, given, lse, dlse, side=side)
                if result is not None:
                    return result
    given = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    for one, t in (("dout", dout), ("out", out)):
        if not tensors.is_tensor(t) or tensors.device(t, t, t) != device:
            raise InvalidTensor(f"{one} is a {type(t).__name__}; pass a tensor of the kind and on the device of q")
    # Packed rows are those of one entry of the batch.
    whole = (lambda name, t: t) if packed is None else _one_entry
    described = {one: tensors.describe(one, whole(one, t), bshd) for one, t in given.items()}
    if into is None:
        new = tensors.empty if packed is None else tensors.zeros
        into = tuple(new(tuple(t.shape), t) for t in (q, k, v))
        read = _empty_gradients(needs, program, tensors, q)
    elif not isinstance(into, (tuple, list)) or len(into) != (4 if needs else 3):
        form = "(dq, dk, dv, a dict of the gradients that needs names)" if needs else "(dq, dk, dv)"
        raise InvalidArgument(f"into is a {type(into).__name__}; it is {form}")
    else:
        *into, read = into if needs else (*into, {})
        if not isinstance(read, dict) or set(read) != set(needs):
            raise InvalidArgument(f"into has gradients of {list(read)}, but needs names {list(needs)}")
        for t in (*into, *read.values()):
            tensors.check_out(t, device)
    written = [tensors.describe(one, whole(one, t), bshd) for one, t in zip(("dq", "dk", "dv"), into)]
    # New memory is nobody else's.
    for i, one in enumerate(written if given_into else ()):
        others = [*described.items(), *zip(("dq", "dk", "dv"), written[:i])]
        for other, where in others:
            if _overlap(one, where):
                raise InvalidTensor(f"{('dq', 'dk', 'dv')[i]} shares memory with {other}; pass other memory")
    _, b, h, s, *_ = described["q"]
    shape = (b, h, s) if packed is None else (h, s)
    rows = [_rows("the log-sum-exp", lse, shape, tensors, device)]
    rows.append(0 if dlse is None else _rows("dlse", dlse, shape, tensors, device))
    more, _kept = (bytes(abi.PROGRAM_ARGS.size), None) if program is None else program.pack(tensors, device)
    by_name, _kept_too = pack_gradients(read, tensors, device)
    if packed is not None or by_name or residual is not None or dropout is not None:
        more += packed or bytes(abi.BACKWARD_PACKED.size)
    more += by_name
    if residual is not None:
        if not tensors.is_tensor(residual) or tensors.device(residual, residual, residual) != device:
            kind = type(residual).__name__
            raise InvalidTensor(f"residual is a {kind}; pass a tensor of the kind and on the device of q")
        lost = tensors.describe("residual", whole("residual", residual), bshd)
        more = more if by_name else more + bytes(abi.GRADIENTS.size)
        more += abi.TENSOR.pack(*lost)
    if dropout is not None:
        more = more.ljust(_DROPOUT_AT, b"\0") + dropout.pack(tensors, device)
    views = [described[one] for one in ("dout", "q", "k", "v", "out")] + written
    try:
        args = abi.BACKWARD_ARGS.pack(
            abi.BACKWARD_ARGS.size + len(more),
            0 if scale is None else abi.SCALE_IS_GIVEN,
            *[field for view in views for field in view],
            *rows,
            tensors.stream(device),
            left,
            right,
            mask,
            0.0 if scale is None else scale,
        )
    except (struct.error, OverflowError) as e:
        raise InvalidArgument(f"the softmax scale is {scale!r}, but it is a finite number: {e}") from None
    args += more
    abi.require((engine._backward if run else abi.library().flashtune_prepare_backward)(engine._handle, args))
    if not run:
        return None
    _engine._last = engine
    if key is not None:
        if len(engine._again_backward) >= MOST_CALLS:
            engine._again_backward.clear()
        # All but the addresses of eight tensors, lse and dlse, and the stream.
        parts = [args[:8]]
        for at in range(8, 8 + 8 * 80, 80):
            parts += [0, args[at + 8 : at + 80]]
        again = None if program is None else PackedProgram(program, tensors, device)
        engine._again_backward[key] = (parts, args[abi.BACKWARD_AGAIN.size :], again)
    return (*into, read) if needs else tuple(into)


def gradients_again(engine, known, tensors, device, given, lse, dlse, packed=None, side=()):
    """A backward pass like one before, with other addresses; None where a tensor has no memory to read. ``packed``
    are the addresses of first rows and lengths, 0 for none; ``side`` the tensors that its program reads."""
    parts, tail, program = known
    if packed is not None:
        tail = tail[:_PACKED_AT] + abi.PACKED_AGAIN.pack(*packed) + tail[_PACKED_AT + abi.PACKED_AGAIN.size :]
    try:
        addresses = tensors.addresses_of(given)
        rows = tensors.address(lse), 0 if dlse is None else tensors.address(dlse)
        read = tensors.addresses_of(side) if side else ()
    except RuntimeError:
        return None
    if program is not None:
        more, _kept = program.pack(read)
        tail = tail[:_PROGRAM_AT] + more + tail[_PROGRAM_AT + abi.PROGRAM_ARGS.size :]
    if packed is None:
        new = [tensors.empty_like(t) for t in given[1:4]]
    else:
        new = [tensors.zeros(tuple(t.shape), t) for t in given[1:4]]
    dq, dk, dv = into = tuple(new)
    parts = parts.copy()
    parts[1::2] = *addresses, tensors.address(dq), tensors.address(dk), tensors.address(dv)
    stream = 0 if engine.device == "cpu" else tensors.stream(device)
    args = abi.BACKWARD_AGAIN.pack(*parts, *rows, stream)
    status = engine._backward(engine._handle, args + tail)
    if status:
        raise abi.failure(status)
    _engine._last = engine
    return into


def mask_of(causal, window):
    """Mask and reaches for the arguments ``causal`` and ``window_size`` of flash-attention: a negative reach is
    unbounded, and causal bounds the right side to the query's own position."""
    if type(window) is tuple and len(window) == 2:
        left, right = window
        # The usual case, without a look at what else may be a number.
        if type(left) is int and type(right) is int and left < 0 and right < 0:
            return (abi.CAUSAL if causal else abi.FULL), 0, 0
    try:
        # What reaches further than every length is as good as any other number of that kind.
        left, right = (max(-1, min(operator.index(n), 1 << 40)) for n in window)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"window_size is {window!r}; it is (left, right), whole numbers of keys, with -1 for an unbounded side"
        ) from None
    if causal:
        if left < 0:
            return abi.CAUSAL, 0, 0
        return abi.WINDOW, left, 0
    if left < 0 and right < 0:
        return abi.FULL, 0, 0
    return abi.WINDOW, left, right


def _top_left_causal(qd, kd, vd):
    """A causal mask that starts at the first key, as PyTorch's ``is_causal`` does, in terms of ours, which ends at the
    last.

    With more keys than queries no query sees the keys beyond q_len: they are left out. With more queries than keys,
    query i stands q_len - kv_len keys further left than by PyTorch's count: it may look that much to the right.
    """
    q_len, kv_len = qd[3], kd[3]
    if q_len <= kv_len:
        # A value tensor of another length than the keys is the library's to refuse.
        kd, vd = ((*t[:3], q_len, *t[4:]) if t[3] == kv_len else t for t in (kd, vd))
        return abi.CAUSAL, 0, 0, kd, vd
    return abi.WINDOW, -1, q_len - kv_len, kd, vd


def top_left_sliced(q_len, k, v):
    """As :func:`_top_left_causal`, of tensors ``[batch, heads, rows, dim]``, whose gradients slices keep."""
    kv_len = k.shape[2]
    if q_len < kv_len:
        k, v = (t[:, :, :q_len] if t.shape[2] == kv_len else t for t in (k, v))
    if q_len <= kv_len:
        return abi.CAUSAL, 0, 0, k, v
    return abi.WINDOW, -1, q_len - kv_len, k, v


def _descales(tensors, device, descales, descale_rows, described):
    """The two parts of the arguments that scales of e4m3 operands are; the second is None where all are those of heads.

    How many axes a tensor has says what shares a scale: two, a head; three, of q and k rows, of v a channel.
    """
    rows = descale_rows
    if isinstance(rows, bool) or not isinstance(rows, numbers.Integral) or rows < 1 or rows & (rows - 1):
        raise InvalidArgument(f"descale_rows is {rows!r}; it is the rows of q and k that share a scale, a power of two")
    kv = described[1]
    addresses, strides, by = [], [], []
    for name, scales, of in zip(("q_descale", "k_descale", "v_descale"), descales, described):
        if scales is None:
            addresses.append(0)
            strides += (0, 0)
            by += (abi.DESCALE_HEAD, 0, 0)
            continue
        address, found, stride, dtype = tensors.side(name, scales, device)
        _, batch, heads, count, dim = of[:5]
        by_head = (batch, kv[2])
        if name == "v_descale":
            finer, words = (batch, kv[2], dim), "[batch, heads_kv, head_dim_v]"
            kind = (abi.DESCALE_CHANNEL, 0)
        else:
            finer, words = (batch, heads, -(-count // rows)), "[batch, heads, rows]"
            kind = (abi.DESCALE_TOKEN, 0) if rows == 1 else (abi.DESCALE_BLOCK, rows)
            if rows > 1:
                words = f"[batch, heads, rows / {rows}]"
        if dtype != "float32" or found not in (by_head, finer):
            raise InvalidTensor(
                f"{name} is {dtype} of the shape {found}; it is float32 [batch, heads_kv] = {by_head}, where expand() "
                f"repeats one scale, or {words} = {finer}" + _of_rows(name, rows)
            )
        addresses.append(address)
        strides += stride[:2]
        by += (*kind, stride[2]) if len(found) == 3 else (abi.DESCALE_HEAD, 0, 0)
    finer = any(by[::3])
    return abi.DESCALES.pack(*addresses, *strides), abi.DESCALES_BY.pack(*by) if finer else None


def _out_scale(tensors, device, out_scale, dtype):
    """The part of the arguments that says where the scale of an e4m3 O lies."""
    if dtype != abi.E4M3:
        raise InvalidArgument("out_scale is of float8_e4m3fn tensors; leave it out, and quantise the result")
    address, shape, _, of = tensors.side("out_scale", out_scale, device)
    if of != "float32" or math.prod(shape) != 1:
        raise InvalidTensor(f"out_scale is {of} of the shape {tuple(shape)}; it is float32 of one element")
    return abi.O_SCALE.pack(address)


def _of_rows(name, rows):
    if name == "v_descale":
        return "; scales of rows of v are not taken: quantise v by channel"
    return "" if rows > 1 else "; scales of blocks of rows need descale_rows="


def _overlap(a, b):
    """Whether two described tensors share an element, as far as addresses tell: those of interleaved rows share a range
    and no element."""
    (start_a, end_a, dense_a), (start_b, end_b, dense_b) = _span(a), _span(b)
    if start_a >= end_a or start_b >= end_b:
        return False
    return start_a == start_b or (dense_a and dense_b and start_a < end_b and start_b < end_a)


def _span(described):
    """First address, the one behind the last, and whether all between them is the tensor's."""
    address, shape, strides, size = described[0], described[1:5], described[5:9], _BYTES[described[9]]
    # Described are batch, heads, rows and dim, and the strides in that order.
    last, elements = sum((n - 1) * stride for n, stride in zip(shape, strides)), math.prod(shape)
    return address, address + (last + 1) * size if elements else address, last + 1 == elements


def _forms(tensors, program, given):
    """What calls have in common that differ in memory alone, a key, or None; and the tensors that a program reads."""
    if program is None:
        return tensors.forms_of(given), ()
    form = program.form()
    if form is None:
        return None, ()
    key, side = form
    forms = tensors.forms_of((*given, *side))
    return None if forms is None else (key, forms), side


def _one_entry(name, t):
    """Packed rows as a batch of one."""
    if len(t.shape) != 3:
        raise InvalidTensor(f"{name} has the shape {tuple(t.shape)}; packed rows are [rows, heads, head_dim]")
    return t[None]
def _empty_residual(tensors, shape, q):
    """Memory for what O loses by rounding."""
    try:
        return tensors.empty_wide(shape, q)
    except (KeyError, AttributeError):
        raise Unsupported(
            "what O loses by rounding is kept in bfloat16, which there is not; import ml_dtypes, or pass tensors of "
            "PyTorch"
        ) from None


def _empty_gradients(needs, program, tensors, q):
    """Memory for the gradients of what a program reads: of the tensors' shapes and dtypes, and float32 for numbers."""
    written = {}
    for name in needs:
        value = None if program is None else program.values.get(name)
        if value is None:
            raise InvalidArgument(f"needs names {name!r}, which is not in tensors; name what is")
        shape = getattr(value, "shape", None)
        written[name] = tensors.empty_lse((), q) if shape is None else tensors.empty(tuple(shape), value)
    return written


def _rows(name, t, shape, tensors, device):
    """The address of a contiguous float32 tensor of a number for each query."""
    address, found, strides, dtype = tensors.side(name, t, device)
    dense = (shape[-2] * shape[-1], shape[-1], 1)[-len(shape) :]
    contiguous = all(n <= 1 or have == want for n, have, want in zip(shape, strides, dense)) or 0 in shape
    if dtype != "float32" or tuple(found) != shape or not contiguous:
        raise InvalidTensor(
            f"{name} is {dtype} of the shape {tuple(found)} with strides {tuple(strides)}; it is contiguous float32 "
            f"of the shape {shape}, a number for each {'batch, ' if len(shape) == 3 else ''}head and query"
        )
    return address
